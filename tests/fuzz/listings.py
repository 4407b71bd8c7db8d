"""Real listings of the compiler, cut short: of one small program, made once a process tree."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

FOLDER = "AUTOTUNE_FUZZ_LISTINGS"  # where they are, for the children
LINES_OF_A_KIND = 3

# The form alone, for a machine without the compiler.
_FORM = (
    b"     0   :  { %s1 = smov 0  }\n   0x1   : > { %v2 = vadd.f32 %v1, %v0 }\n  0x2 LB: >> { nop }\n"
    b"   0x3 PF: >>> { nop ;; nop }\n",
    b"#allocation2 [shape = 'u8[1048576]{0}', space=vmem, size = 0x100000, offset = 0x20000, scoped]\n"
    b"#allocation3 [shape = 's32[16]{0}', space=smem, size = 0x40, offset = 0, scoped, tag = 'y']\n",
)

_COMPILE = """
import sys
from pathlib import Path
from autotune.tpu import generations
from autotune.tpu.compiler import lower
from tests.conftest import program
lower(generations.by_name("v6e"), program(8, 32)).compile()
"""


def prepare() -> None:
    """Compile, so that `cut_listings` of this process and its children finds the listings."""
    from autotune.tpu.compiler import environment
    from tests.conftest import ROOT

    if FOLDER not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="listings-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        subprocess.run(
            [sys.executable, "-c", _COMPILE],
            cwd=ROOT,
            env={**os.environ, **environment(folder)},
            capture_output=True,
            check=find_spec("libtpu") is not None,
        )
        os.environ[FOLDER] = str(folder)


def cut_listings() -> list[bytes]:
    """Of each listing a few lines of every loop depth and every space, and beside them the form alone."""
    seeds = list(_FORM)
    folder = os.environ.get(FOLDER)
    for path in sorted(Path(folder).rglob("*ragged*.txt")) if folder else []:
        kept: dict[str, list[str]] = {}
        for line in path.read_text(errors="replace").splitlines(keepends=True):
            kind = (
                "allocation" + line.partition("space=")[2][:4]
                if "#allocation" in line
                else line[:24].strip("0123456789abcdefx ")
            )
            lines = kept.setdefault(kind, [])
            if len(lines) < LINES_OF_A_KIND:
                lines.append(line[:400])
        seeds.append("".join(line for lines in list(kept.values())[:20] for line in lines).encode())
    return seeds
