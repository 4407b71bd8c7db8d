"""What is installed and what each package asks of the others, by their metadata; nothing is imported."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

OWN = "tpu-autotune"
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@dataclasses.dataclass(frozen=True)
class Need:
    """A package that another one asks for.

    wanted: the versions, such as `>=0.10`; empty for any. installed: the version that is there, if one is.
    fits: whether that is one of those wanted; None if it cannot be told, as `packaging` is not installed.
    """

    name: str
    wanted: str
    installed: str | None
    fits: bool | None


def version(name: str) -> str | None:
    """The installed version of a package; None if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def needs(name: str, extra: str = "") -> list[Need]:
    """What an installed package asks for on this machine, with one of its extras."""
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []
    return list(_needs(lines, extra))


def own_needs() -> list[Need]:
    """What autotune itself asks for; from pyproject.toml where it runs from a checkout."""
    if version(OWN) is not None:
        return needs(OWN)
    try:
        lines = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    except (OSError, ValueError, KeyError):
        return []
    return list(_needs(lines, ""))


def _needs(lines: list[str], extra: str) -> Iterator[Need]:
    try:
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.version import InvalidVersion
    except ImportError:
        for line in lines:
            # Whether a marker holds cannot be told either.
            if ";" not in line and (match := re.match(r"[A-Za-z0-9._-]+", line.strip())):
                installed = version(match[0])
                yield Need(match[0], line[match.end() :].strip(), installed, None if installed else False)
        return
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        installed = version(requirement.name)
        try:
            fits = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        except InvalidVersion:
            fits = False
        yield Need(requirement.name, str(requirement.specifier), installed, fits)


def libtpu_file() -> Path | None:
    """Where JAX finds libtpu: the file that TPU_LIBRARY_PATH names, else the package's; None if nowhere."""
    named = os.environ.get("TPU_LIBRARY_PATH")
    if named and Path(named).is_file():
        return Path(named)
    return _packaged_libtpu()


def libtpu_version() -> str | None:
    """Which libtpu compiles: the package's version, or a hash of another file that TPU_LIBRARY_PATH names."""
    found, packaged = libtpu_file(), _packaged_libtpu()
    if found is None or (packaged and packaged.samefile(found)):
        return version("libtpu")
    return _hash(found)


@functools.cache
def _hash(path: Path) -> str:
    with path.open("rb") as file:  # half a gigabyte, once a process
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"


def _packaged_libtpu() -> Path | None:
    from importlib.util import find_spec

    spec = find_spec("libtpu")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder) / "libtpu.so").is_file():
            return path
    return None


def too_old() -> str | None:
    """Why the installed JAX is none that autotune works with, in a few words; None if it is one."""
    for need in own_needs():
        if need.name.startswith("jax") and need.installed is None:
            return f"{need.name} is not installed"
        if need.name.startswith("jax") and need.fits is False:
            return f"{need.name} {need.installed} is installed, and autotune needs {need.wanted}"
    return None


def misfit() -> str | None:
    """Why JAX cannot be used as it is installed, in a few words; None if nothing is known against it."""
    if why := too_old():
        return why
    for need in needs("jax"):
        if need.name == "jaxlib" and need.fits is False:
            have = f"jaxlib {need.installed} is" if need.installed else "jaxlib is not"
            return f"{have} installed, and jax {version('jax')} needs {need.wanted}"
    return None
