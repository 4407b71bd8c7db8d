from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_link_to_files_and_headings_that_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}#{anchor}"


def test_readme_and_docs_stay_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 1_000
    written = [page for page in PAGES[1:] if page.name != "cli.md"]
    assert sum(len(page.read_text().split()) for page in written) <= 10_000
