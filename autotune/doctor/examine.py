"""What is wrong with this machine or its environment, and what to type about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from autotune.doctor import checks as doctor_checks
from autotune.doctor import machine
from autotune.doctor import probe as doctor_probe
from autotune.doctor.checks import FAILURE, OK, Check
from autotune.errors import MachineError
from autotune.io import installed
from autotune.io.folders import Folder
from autotune.tpu import generations as chips
from autotune.tpu.attached import Attached

DEEP_SECONDS = 300.0  # for one compile that takes three


@dataclasses.dataclass
class Report:
    """checks: those made so far. attached: the TPU that can be used, if there is one."""

    checks: list[Check] = dataclasses.field(default_factory=list)
    attached: Attached | None = None

    @property
    def ready(self) -> bool:
        """Whether a sweep can run here, on a TPU or for one."""
        return not any(check.stops for check in self.checks)

    def next(self, command: str = "autotune", out: str = "results/first") -> list[str]:
        """What to type next: a sweep that works here, or what makes one work."""
        cures = [check.command for check in self.checks if check.stops and check.command]
        if cures or not self.ready:
            return [*dict.fromkeys(cures), f"{command} doctor"]
        if self.attached:
            return [f"{command} sweep --preset smoke --out {out}"]
        usable = [c.name for c in self.checks if c.name in chips.GENERATIONS and c.state == OK]
        target = "v6e" if "v6e" in usable or not usable else usable[-1]
        return [f"{command} sweep --target {target} --preset smoke --out {out}"]


def examine(report: Report, *, out: Folder | None, deep: bool, cores: int) -> Iterator[Check]:
    """Make every check, those that take long last; each is in the report when it comes out.

    out: the results folder to look at. deep: compile a small program for each generation, with at most
    `cores` at once.
    """
    for check in _checks(report, out, deep, cores):
        report.checks.append(check)
        yield check


def _checks(report: Report, out: Folder | None, deep: bool, cores: int) -> Iterator[Check]:
    needed = installed.own_needs()
    yield doctor_checks.python()
    yield doctor_checks.packages(needed)
    probe = doctor_probe.ask()
    yield doctor_checks.jax(needed, probe)
    yield doctor_checks.jaxlib(needed, probe)
    yield doctor_checks.libtpu(needed)
    yield doctor_checks.kernel(needed, probe)
    if heads := doctor_checks.heads(probe):
        yield heads
    yield doctor_checks.environment()
    yield machine.lockfile()
    yield machine.temporary()
    yield machine.cache()
    yield machine.results(out)
    yield machine.memory(cores)
    tpu, report.attached = machine.tpu(shipped="kernel" in probe.answers)
    yield tpu
    generations = machine.generations(probe, vital=report.attached is None)
    if deep and report.ready:
        yield from (check for check in generations if check.state != OK)
        yield from compiled([check for check in generations if check.state == OK], cores)
    else:
        yield from generations
    compiles = [check for check in report.checks if check.name in chips.GENERATIONS]
    if compiles and not any(check.state == OK for check in compiles):
        yield Check("compiler", FAILURE, "nothing can be compiled", vital=report.attached is None)


def compiled(checks: list[Check], cores: int) -> Iterator[Check]:
    """Compile one small program for each generation; a check each, as they are done."""
    if not checks:
        return
    from autotune.compile.local_pool import CompilePool, Task
    from autotune.kernel.problem import BlockSizes, Layout, Program

    layout = Layout(
        q_dtype="bfloat16", kv_dtype="bfloat16", num_q_heads=4, num_kv_heads=1, head_dim=128, page_size=16
    )
    program = Program(layout=layout, blocks=BlockSizes(8, 32))
    waiting = {check.name: check for check in checks}
    tasks = iter([Task(name, program) for name in waiting])
    try:
        with CompilePool(min(cores, len(waiting)), DEEP_SECONDS) as pool:
            for task, verdict in pool.run(lambda: next(tasks, None)):
                check = waiting.pop(task.target)
                if verdict.status == "ok":
                    text = check.text.replace(
                        "libtpu knows it", f"compiled in {verdict.seconds or 0:.0f} s", 1
                    )
                    yield dataclasses.replace(check, text=text)
                else:
                    text = f"a small program does not compile: {verdict.status}, {verdict.error}"
                    yield Check(check.name, FAILURE, text)
    except (MachineError, OSError) as error:
        for name in waiting:
            yield Check(name, FAILURE, f"nothing could be compiled: {error}")
