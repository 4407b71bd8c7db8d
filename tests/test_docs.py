from __future__ import annotations

import re
import subprocess
import sys

from autotune import __version__
from autotune.results import schema
from tests.conftest import ROOT


def test_cli_page_is_what_the_commands_say() -> None:
    # In a process of its own: click keeps the help option of a command that was called before.
    done = subprocess.run(
        [sys.executable, "-m", "autotune.cli.reference"], capture_output=True, text=True, check=True
    )
    assert (ROOT / "docs" / "cli.md").read_text() == done.stdout, "stale: type `make docs`"


def test_results_page_lists_every_column() -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", page, re.M)
    assert tuple((n, kind.strip(), meaning.strip()) for n, kind, meaning in rows) == schema.COLUMNS
    assert f"schema_version is {schema.SCHEMA_VERSION}" in page


def test_changelog_has_this_version() -> None:
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_pages_link_to_files_that_exist() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
