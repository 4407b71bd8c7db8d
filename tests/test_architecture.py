"""The floors of docs/architecture.md: a module imports only from floors below its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

# From the ground up. A name that ends with a dot stands for all modules below it.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("autotune", "autotune.errors", "autotune.io.terminal"),
    (
        *("autotune.io.files", "autotune.executors.ray_cluster", "autotune.io.installed"),
        "autotune.io.patience",
    ),
    ("autotune.io.folders",),
    ("autotune.kernel", "autotune.kernel.problem"),
    ("autotune.kernel.jax_rpa.tiling", "autotune.kernel.workload"),
    ("autotune.kernel.jax_rpa.call", "autotune.kernel.jax_rpa.reference"),
    ("autotune.kernel.jax_rpa.inputs", "autotune.kernel.jax_rpa.interpret"),
    (
        *("autotune.tpu", "autotune.tpu.generations", "autotune.tpu.schedule", "autotune.tpu.environment"),
        *("autotune.timing.statistics", "autotune.timing.profile"),
    ),
    ("autotune.tpu.attached", "autotune.timing.timer", "autotune.tpu.compiler"),
    ("autotune.tpu.executable",),
    ("autotune.timing.device_worker",),
    (
        "autotune.cli.eta",
        "autotune.results.validate",
        "autotune.results.codes",
        "autotune.compile.pool",
        "autotune.keys.models",
        "autotune.keys.files",
    ),
    ("autotune.keys.hf_config",),
    ("autotune.keys.builtin_models",),
    (
        "autotune.model.cost",
        "autotune.search.space",
        "autotune.results.dataset",
        "autotune.keys.presets",
        "autotune.tables.",
    ),
    (
        *("autotune.results.unfinished", "autotune.results.winners", "autotune.results.maintenance"),
        "autotune.results.spool",
        *(
            "autotune.compile.local_pool",
            "autotune.timing.device_process",
            "autotune.timing.shortlist",
            "autotune.keys.feasibility",
        ),
    ),
    ("autotune.timing.slot", "autotune.executors.ray_pool"),
    ("autotune.timing.key_timing",),
    ("autotune.timing.devices",),
    ("autotune.executors.ray_devices", "autotune.timing.chip_threads"),
    ("autotune.executors.places",),
    ("autotune.results.baselines",),
    (
        "autotune.results.scores",
        "autotune.tables.merge",
        "autotune.tables.load",
        "autotune.tables.lookup",
        "autotune.tables.override",
    ),
    ("autotune.search.plan", "autotune.model.surrogate", "autotune.compile.cache", "autotune.tables"),
    ("autotune.search.strategy",),
    ("autotune.compile.schedules",),
    ("autotune.model.calibrate", "autotune.cli.progress", "autotune.search.shard"),
    ("autotune.keys.estimates",),
    ("autotune.keys.padding",),
    ("autotune.keys.resolve",),
    (
        "autotune.timing.history",
        "autotune.emit",
        "autotune.analysis.overview",
        "autotune.analysis.check",
        "autotune.analysis.diff",
        "autotune.analysis.explain",
    ),
    ("autotune.timing.chip_jobs",),
    ("autotune.sweep",),
    (
        "autotune.commit",
        "autotune.analysis.confirm",
        "autotune.compile.batch",
        "autotune.cli.render.check",
        "autotune.cli.render.diff",
        "autotune.cli.render.overview",
        "autotune.cli.render.explain",
        "autotune.analysis.report.",
    ),
    ("autotune.doctor.probe", "autotune.cli.render.confirm"),
    ("autotune.doctor.checks",),
    ("autotune.doctor.machine",),
    ("autotune.doctor.examine",),
    ("autotune.cli.render.doctor",),
    ("autotune.cli.commands.",),
    ("autotune.cli.main",),
    ("autotune.__main__", "autotune.cli.reference"),
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
        and not module.startswith(("autotune.cli.commands", "autotune.tables.tpu_"))
        and path.relative_to(ROOT / "autotune").as_posix() not in page
    ]
    assert not missing
