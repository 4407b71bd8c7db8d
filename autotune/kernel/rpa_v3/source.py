"""The kernel's source: an installed tpu_inference, or a folder that the user names; loaded without the stack.

Only the kernel's own modules are run. What they import of the stack beside that is a logger and two helpers,
which stand-ins replace, so vLLM, torch and flax are not needed. This runs code of the named folder.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune.errors import MachineError, UsageError

PACKAGE = "tpu_inference"
_FOLDER = Path(PACKAGE, "kernels", "ragged_paged_attention", "v3")
_KERNEL = _FOLDER / "kernel.py"
# The newest release whose kernel was compiled here. It asks for packages that its kernel does not need.
DOWNLOAD = "pip download --no-deps tpu-inference==0.32.0 && unzip tpu_inference-0.32.0-*.whl -d tpu-inference"


def find(named: Path | None) -> Path:
    """The folder that holds the package tpu_inference: the named one, else where it is installed.

    Raises:
      UsageError: the named folder does not hold the kernel.
      MachineError: none is named, and tpu_inference is not installed.
    """
    if named is not None:
        if not (named / _KERNEL).is_file():
            raise UsageError(
                f"--kernel-source {str(named)!r} does not hold {_KERNEL}: name a checkout of tpu-inference, "
                "or its unpacked wheel"
            )
        return named.absolute()
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder).parent / _KERNEL).is_file():
            return Path(folder).parent
    raise MachineError(
        f"tpu_inference, which holds this kernel, is not installed: type `{DOWNLOAD}`, then add "
        "--kernel-source tpu-inference"
    )


def pinned(folder: Path) -> dict[str, str]:
    """The versions of jax and libtpu that the stack asks for; empty where the folder has no metadata."""
    for found in metadata.distributions(name=PACKAGE, path=[str(folder)]):
        pins = (re.match(r"(jax|libtpu)==([\w.]+)$", line) for line in found.requires or ())
        return {pin[1]: pin[2] for pin in pins if pin}
    return {}


def fingerprint(folder: Path) -> str:
    """The first 12 hex digits of the SHA-256 of the kernel's two modules."""
    sources = [(folder / _FOLDER / name).read_bytes() for name in ("kernel.py", "util.py")]
    return hashlib.sha256(b"".join(sources)).hexdigest()[:12]


def load(folder: Path) -> types.ModuleType:
    """The kernel's module; once a process, which should be one that does nothing else."""
    package = types.ModuleType(PACKAGE)
    package.__path__ = [str(folder / PACKAGE)]  # its __init__ would import the stack
    sys.modules[PACKAGE] = package
    for name, attributes in (
        ("logger", {"init_logger": lambda name: _Quiet()}),
        ("utils", {"align_to": lambda x, a: -(-x // a) * a, "get_device_name": _device_kind}),
    ):
        module = types.ModuleType(f"{PACKAGE}.{name}")
        module.__dict__.update(attributes)
        sys.modules[module.__name__] = module
    return importlib.import_module(".".join(_KERNEL.with_suffix("").parts))


class _Quiet:
    """A logger with every method, none of which says anything."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None


def _device_kind() -> str:
    import jax

    kind: str = jax.devices()[0].device_kind
    return kind
