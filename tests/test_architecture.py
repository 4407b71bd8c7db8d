"""Imports go down one list of packages, and docs/architecture.md has that list."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

# A package imports only from those before it, whatever the place in a file.
ORDER = (
    *("errors", "io", "kernel", "tpu", "results", "tables", "model", "search", "compile", "timing"),
    *("executors", "keys", "sweep", "emit", "analysis", "doctor", "cli"),
)
MODULES = sorted(path for path in (ROOT / "autotune").rglob("*.py") if path.name != "__main__.py")


def packages_of(text: str) -> set[str]:
    """What of autotune a module imports, inside functions too: the second part of each dotted name."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "autotune":
            names = [f"autotune.{alias.name}" for alias in node.names if alias.name != "__version__"]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("autotune.")}
    return found


def upward(package: str, text: str) -> set[str]:
    """Imports that do not go down the list."""
    return {name for name in packages_of(text) if ORDER.index(name) > ORDER.index(package)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_go_down_the_list(path: Path) -> None:
    package = path.relative_to(ROOT / "autotune").with_suffix("").parts[0]
    text = path.read_text()
    if package == "__init__":
        assert not packages_of(text)
    else:
        assert not upward(package, text)


@pytest.mark.parametrize(
    "planted",
    [
        "from autotune.cli.progress import CompileProgress",
        "def f():\n    from autotune import sweep",
        "import autotune.timing.timer as t",
    ],
)
def test_an_import_that_goes_up_is_found(planted: str) -> None:
    text = (ROOT / "autotune" / "results" / "winners.py").read_text()
    assert not upward("results", text)
    assert upward("results", f"{text}\n{planted}\n")


def test_only_the_command_line_prints() -> None:
    for path in MODULES:
        package = path.relative_to(ROOT / "autotune").parts[0]
        calls = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        prints = [f for f in calls if isinstance(f, ast.Name) and f.id == "print"]
        echoes = [f for f in calls if isinstance(f, ast.Attribute) and f.attr == "echo"]
        # A process that compiles or times has its own standard error, which its parent reads.
        child = path.name in ("local_pool.py", "device_worker.py", "probe.py")
        child |= path.name == "terminal.py"  # `say`: the one line by which a file that is not trusted is told
        assert package == "cli" or child or not (prints or echoes), path


def test_the_page_has_the_list_and_is_short() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert len(page.splitlines()) <= 120
    listed = [
        line.split()[0].rstrip("/").removesuffix(".py") for line in page.splitlines() if line[:2] == "  "
    ]
    assert [name for name in listed if name in ORDER] == list(ORDER)
    assert {path.name for path in (ROOT / "autotune").iterdir() if (path / "__init__.py").is_file()} <= set(
        listed
    )
