"""Checks of what is installed: Python, jax, jaxlib, libtpu, whether they fit together, and the kernel.

Only the standard library is imported here: what the installed packages do is asked of `doctor_probe`.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import autotune
from autotune.doctor.probe import Probe
from autotune.io import installed
from autotune.io.installed import Need
from autotune.tpu import environment as chip_process

OK, WARNING, FAILURE = "ok", "warning", "failure"
INSTALL = "pip install --upgrade 'jax[tpu]>=0.10'"
KERNEL_MODULE = "jax.experimental.pallas.ops.tpu.ragged_paged_attention"


@dataclasses.dataclass(frozen=True)
class Check:
    """One finding.

    name: what was looked at, the same in every version. state: ok, warning or failure. text: what was found.
    advice: what to do about it, in words. command: what to type. vital: without it no sweep can run here.
    """

    name: str
    state: str
    text: str
    advice: str = ""
    command: str = ""
    vital: bool = False

    @property
    def stops(self) -> bool:
        """Whether no sweep can run because of it."""
        return self.vital and self.state == FAILURE


def has_libtpu_wheels(system: str = platform.system(), machine: str = platform.machine()) -> bool:
    """Whether libtpu is made for this kind of machine."""
    return (system, machine) == ("Linux", "x86_64")


def python() -> Check:
    text = (
        f"autotune {autotune.__version__} on Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}"
    )
    if has_libtpu_wheels():
        return Check("python", OK, text)
    return Check(
        "python",
        WARNING,
        text,
        "libtpu, which holds the TPU compiler, exists for Linux x86_64 only: here emit, show and diff work, "
        "and sweep does not",
    )


def packages(needed: list[Need]) -> Check:
    """What autotune needs besides JAX."""
    others = [need for need in needed if not need.name.startswith("jax")]
    # Without `packaging` nothing but this check is the poorer, and it says so below.
    others = [need for need in others if need.name != "packaging" or need.installed]
    wrong = [need for need in others if need.fits is False]
    if wrong:
        said = ", ".join(
            f"{need.name} {need.installed} (needed: {need.wanted})" if need.installed else f"no {need.name}"
            for need in wrong
        )
        what = " ".join(f"'{need.name}{need.wanted}'" for need in wrong)
        return Check("packages", FAILURE, said, command=f"pip install --upgrade {what}", vital=True)
    if not others:
        return Check("packages", WARNING, "unknown: autotune's own list of what it needs is not there")
    if unknown := [need.name for need in others if need.fits is None]:
        return Check(
            "packages",
            WARNING,
            f"there are {', '.join(unknown)}; whether their versions fit is unknown without `packaging`",
            command="pip install packaging",
        )
    return Check("packages", OK, ", ".join(f"{need.name} {need.installed}" for need in others))


def jax(needed: list[Need], probe: Probe) -> Check:
    """Whether JAX is there, new enough, and can be imported."""
    have = installed.version("jax")
    wanted = next((need for need in needed if need.name == "jax"), None)
    answer = probe.answers.get("jax")
    if answer is None and have is None:
        return Check("jax", FAILURE, "not installed", command=INSTALL, vital=True)
    if wanted and wanted.fits is False:
        return Check(
            "jax",
            FAILURE,
            f"{have} is too old: autotune needs {wanted.wanted}",
            command=INSTALL,
            vital=True,
        )
    if answer is None:
        said = probe.errors.get("jax", "it said nothing")
        return Check("jax", FAILURE, f"{have} cannot be imported: {said}", command=cure(needed), vital=True)
    if have and answer["version"] != have:
        return Check(
            "jax",
            WARNING,
            f"{answer['version']} is imported from {Path(answer['path']).parent}, and {have} is installed",
            "look for a jax folder in the current folder or in PYTHONPATH",
        )
    return Check("jax", OK, answer["version"])


def cure(needed: list[Need]) -> str:
    """What makes jax, jaxlib and libtpu fit each other: those of the jax that is there, if it will do."""
    wanted = next((need for need in needed if need.name == "jax"), None)
    if wanted and wanted.installed and wanted.fits is not False:
        return f"pip install 'jax[tpu]=={wanted.installed}'"
    return INSTALL


def jaxlib(needed: list[Need], probe: Probe) -> Check:
    """Whether jaxlib is a version that the installed JAX asks for."""
    have = installed.version("jaxlib")
    if have is None:
        return Check("jaxlib", FAILURE, "not installed", command=cure(needed), vital=True)
    asked = [need for need in installed.needs("jax") if need.name == "jaxlib"]
    check = _fit("jaxlib", have, asked, cure(needed))
    if check.state == WARNING and "jax" not in probe.answers:
        return dataclasses.replace(check, state=FAILURE, vital=True)
    return check


def _fit(name: str, have: str, asked: list[Need], command: str) -> Check:
    jax_version = installed.version("jax")
    if jax_version is None:
        return Check(name, WARNING, f"{have}, and no jax for it", command=command)
    wanted = ",".join(need.wanted for need in asked if need.wanted)
    if not wanted:
        return Check(name, WARNING, f"{have}; jax {jax_version} does not say which {name} fits it")
    if any(need.fits is False for need in asked):
        text = f"{have} does not fit: jax {jax_version} asks for {name} {wanted}"
        return Check(name, WARNING, text, command=command)
    if any(need.fits is None for need in asked):
        text = f"{have}; whether it is in {wanted}, as jax {jax_version} asks, is unknown without `packaging`"
        return Check(name, WARNING, text, command="pip install packaging")
    return Check(name, OK, f"{have}, within {wanted} as jax {jax_version} asks")


def libtpu(needed: list[Need]) -> Check:
    """Whether libtpu is there, and is a version that the installed JAX's tpu extra asks for."""
    have, path = installed.version("libtpu"), installed.libtpu_file()
    named = os.environ.get("TPU_LIBRARY_PATH")
    if named and path == Path(named):
        text = f"{named}, as TPU_LIBRARY_PATH says; whether it fits the installed jax is unknown"
        return Check("libtpu", WARNING, text, "unset TPU_LIBRARY_PATH to use the libtpu package")
    if path is None and not has_libtpu_wheels():
        text = "not installed: it exists for Linux x86_64 only"
        return Check("libtpu", FAILURE, text, "run sweeps on such a host", vital=True)
    if path is None:
        text, command = "not installed: it holds the TPU compiler and runs TPUs", cure(needed)
        if have:
            text = f"{have} is installed, and its libtpu.so is not there"
            command = f"pip install --force-reinstall --no-deps 'libtpu=={have}'"
        return Check("libtpu", FAILURE, text, command=command, vital=True)
    asked = [need for need in installed.needs("jax", "tpu") if need.name == "libtpu"]
    return _fit("libtpu", have or "a libtpu without a version", asked, cure(needed))


def environment(variables: Mapping[str, str] | None = None) -> Check:
    """The user's variables that would change what JAX and libtpu compile, and are left out."""
    variables = chip_process.of_the_user() if variables is None else variables
    named = chip_process.dropped(variables)
    if not named:
        return Check("environ", OK, "no variable is set that changes what JAX, XLA or libtpu compile")
    said = ", ".join(f"{name}={variables[name][:60]}" for name in named)
    return Check(
        "environ",
        WARNING,
        f"not passed on to the processes that compile and time: {said}",
        "what a program that has them set compiles may run best with other values",
    )


def kernel(needed: list[Need], probe: Probe) -> Check:
    """Whether the installed JAX still has the kernel, with the arguments that a sweep sets."""
    if "jax" not in probe.answers:
        return Check("kernel", FAILURE, "not looked for, as jax cannot be imported", vital=True)
    version = probe.answers["jax"]["version"]
    answer = probe.answers.get("kernel")
    if answer is None:
        said = probe.errors.get("kernel", "it said nothing")
        if "No module named" in said or "cannot import name" in said:
            text = f"jax {version} does not ship {KERNEL_MODULE} ({said})"
        else:
            text = f"{KERNEL_MODULE} of jax {version} cannot be imported: {said}"
        old = any(need.name == "jax" and need.fits is False for need in needed)
        command = INSTALL if old else "pip install 'jax[tpu]==0.10.2'"
        return Check("kernel", FAILURE, text, "use a jax that ships it", command, vital=True)
    if answer["missing"]:
        return Check(
            "kernel",
            FAILURE,
            f"the kernel of jax {version} has no argument {', '.join(answer['missing'])}",
            command=INSTALL,
            vital=True,
        )
    text = f"shipped by jax {version} ({answer['module']}), fingerprint {answer['fingerprint']}"
    made_with = set(probe.answers.get("tables", {}).values())
    if not made_with:
        return Check("kernel", OK, text)
    if made_with == {answer["fingerprint"]}:
        return Check("kernel", OK, f"{text}, the one that autotune's own tables were made with")
    return Check(
        "kernel",
        WARNING,
        f"{text}; autotune's own tables were made with {', '.join(sorted(map(str, made_with)))}",
        "sweeps are not affected; those tables may not be the best for this kernel",
    )


def heads(probe: Probe) -> Check | None:
    """Which heads the kernel refuses, in its own words, so that a search for them ends here."""
    answer = probe.answers.get("heads")
    if answer is None:
        return None
    if not answer["refused"]:
        return Check("heads", OK, "the kernel takes every number of KV heads up to 16 in bfloat16")
    numbers = ", ".join(map(str, answer["refused"]))
    words = answer["words"].removeprefix("Not implemented: ").rstrip(".")
    return Check(
        "heads",
        OK,
        f"of 1 to 16 KV heads in bfloat16 the kernel refuses {numbers}: ValueError "
        f"`{words}`; sweep and lookup name layouts that it takes",
    )
