"""The floors of docs/architecture.md: a module imports only from floors below its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

# From the ground up. A name that ends with a dot stands for all modules below it.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("autotune", "autotune.errors", "autotune.terminal"),
    (
        *("autotune.files", "autotune.cluster", "autotune.installed"),
        "autotune.patience",
    ),
    ("autotune.folders",),
    ("autotune.kernel", "autotune.kernel.problem"),
    ("autotune.kernel.tiling", "autotune.kernel.workload"),
    ("autotune.kernel.rpa", "autotune.kernel.reference"),
    ("autotune.kernel.inputs", "autotune.kernel.interpret"),
    (
        *("autotune.tpu", "autotune.tpu.chips", "autotune.tpu.schedule", "autotune.tpu.chip_process"),
        *("autotune.tpu.statistics", "autotune.tpu.trace"),
    ),
    ("autotune.tpu.attached", "autotune.tpu.timer", "autotune.tpu.compiler"),
    ("autotune.tpu.executable",),
    ("autotune.tpu.session",),
    (
        "autotune.eta",
        "autotune.rowcheck",
        "autotune.rowcodes",
        "autotune.pool",
        "autotune.models",
        "autotune.key_files",
    ),
    ("autotune.model_config",),
    ("autotune.known_models",),
    ("autotune.cost", "autotune.space", "autotune.results", "autotune.presets", "autotune.tables."),
    (
        *("autotune.unfinished", "autotune.winners", "autotune.gather"),
        "autotune.outbox",
        *("autotune.workers", "autotune.owner", "autotune.shortlist", "autotune.room"),
    ),
    ("autotune.slot", "autotune.ray_pool"),
    ("autotune.measure",),
    ("autotune.devices",),
    ("autotune.ray_devices", "autotune.chip_threads"),
    ("autotune.executors",),
    ("autotune.incumbents",),
    (
        "autotune.scoreboard",
        "autotune.merge",
        "autotune.tables.load",
        "autotune.tables.lookup",
        "autotune.tables.override",
    ),
    ("autotune.plan", "autotune.surrogate", "autotune.store", "autotune.tables"),
    ("autotune.search",),
    ("autotune.schedules",),
    ("autotune.calibrate", "autotune.progress", "autotune.shard"),
    ("autotune.estimates",),
    ("autotune.heads",),
    ("autotune.keyset",),
    (
        "autotune.known",
        "autotune.emit",
        "autotune.show",
        "autotune.check",
        "autotune.diff",
        "autotune.explain",
    ),
    ("autotune.chip_jobs",),
    ("autotune.sweep",),
    (
        "autotune.commit",
        "autotune.confirm",
        "autotune.verdicts",
        "autotune.check_formats",
        "autotune.diff_formats",
        "autotune.show_formats",
        "autotune.explain_formats",
        "autotune.report.",
    ),
    ("autotune.doctor_probe", "autotune.confirm_formats"),
    ("autotune.doctor_checks",),
    ("autotune.doctor_machine",),
    ("autotune.doctor",),
    ("autotune.doctor_formats",),
    ("autotune.commands.",),
    ("autotune.cli",),
    ("autotune.__main__", "autotune.commands.reference"),
)
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "autotune").rglob("*.py")
}


def floor_of(module: str) -> int | None:
    for number, names in enumerate(FLOORS):
        if module in names:
            return number
    for number, names in enumerate(FLOORS):
        if any(name.endswith(".") and f"{module}.".startswith(name) for name in names):
            return number
    return None


def imports_of(path: Path) -> set[str]:
    """The project's modules that a module imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
    return {name for name in found if name in MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_floors_below(module: str) -> None:
    own = floor_of(module)
    assert own is not None, f"{module} has no floor: give it one in FLOORS and in docs/architecture.md"
    siblings = module.rpartition(".")[0]
    for name in imports_of(MODULES[module]) - {module, "autotune"}:
        below = floor_of(name)
        assert below is not None
        # Modules of one package that has a floor to itself may use one another.
        same_package = below == own and name.rpartition(".")[0] == siblings != "autotune"
        assert below < own or same_package, f"{module} (floor {own}) imports {name} (floor {below})"


def test_floors_name_no_module_that_is_gone() -> None:
    named = {name for names in FLOORS for name in names if not name.endswith(".")}
    assert named <= set(MODULES)


def test_the_kernel_knows_no_file_process_or_screen() -> None:
    for module, path in MODULES.items():
        if module.startswith("autotune.kernel"):
            text = path.read_text()
            for word in ("subprocess", "multiprocessing", "pyarrow", "pandas", "click", "rich"):
                assert f"import {word}" not in text, f"{module} imports {word}"


def test_architecture_page_names_every_module() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    missing = [
        path.relative_to(ROOT / "autotune").as_posix()
        for module, path in MODULES.items()
        if path.name not in ("__init__.py", "__main__.py")
        and not module.startswith(("autotune.commands", "autotune.tables.tpu_"))
        and path.relative_to(ROOT / "autotune").as_posix() not in page
    ]
    assert not missing
