"""The TPU attached to this machine."""

from __future__ import annotations

from autotune.errors import MachineError


def no_tpu() -> MachineError:
    """What a user without a TPU is told."""
    return MachineError(
        "no TPU is attached to this machine: name a generation to compile for, such as --target v6e, "
        "or run this on a TPU host"
    )
