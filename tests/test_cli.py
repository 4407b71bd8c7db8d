from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from autotune.files import user_folder
from tests.conftest import ROOT, user_environment

HEAVY = {"jax", "jaxlib", "pandas", "pyarrow", "numpy", "libtpu", "plotly"}

_PROBE = """
import sys
from autotune.cli import run
sys.argv = ["autotune", *sys.argv[1:]]
try:
    sys.exit(run())
finally:
    print("IMPORTED", *sorted({name.split(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def imported(*arguments: str) -> tuple[int, set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, *arguments],
        cwd=ROOT,
        env=user_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, set(done.stderr.rsplit("IMPORTED", 1)[1].split())


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["sweep", "--help"], 0),
        (["emit", "--help"], 0),
        (["show", "--help"], 0),
        (["report", "--help"], 0),
        (["report", "r"], 2),
        (["sweep", "--no-such-option"], 2),
        (["sweep", "--target", "v3"], 2),
        (["sweep", "--target", "v6e"], 2),
        (["sweep", "--target", "v6e", "--shape", "q_heads=1", "--out", "r"], 2),
        (["sweep", "--target", "v6e", "--preset", "smoke", "--kv-pages", "none", "--out", "r"], 2),
        (["keys", "--help"], 0),
        (["keys", "--list-models"], 0),
        (["keys"], 2),
        (["keys", "--model", "no-such-model"], 2),
        (["keys", "--keys", "no-such-file"], 2),
        (["sweep"], 3),
        (["nonsense"], 2),
    ],
)
def test_help_and_usage_errors_import_nothing_heavy(arguments: list[str], code: int) -> None:
    returned, modules = imported(*arguments)
    assert returned == code
    assert not modules & HEAVY


def test_the_probe_would_see_a_heavy_import() -> None:
    untileable = "q_heads=12,kv_heads=6,head_dim=128,page_size=16,max_num_batched_tokens=64,max_model_len=64"
    returned, modules = imported("sweep", "--target", "v6e", "--shape", untileable, "--out", "r")
    assert returned == 2
    assert {"jax", "numpy"} <= modules


def test_no_tpu_is_said_in_under_a_second() -> None:
    """Generously: interpreter start included, it is a tenth of that."""
    start = time.monotonic()
    returned, _ = imported("sweep")
    assert returned == 3
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("redirect", [">&-", "2>&-", "<&-", ">/dev/full", "| true"])
def test_lost_streams_are_no_traceback(redirect: str) -> None:
    command = f"{sys.executable} -m autotune --help {redirect}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        cwd=ROOT,
        env=user_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (2 if "full" in redirect else 0), done.stderr
    assert "Traceback" not in done.stderr
    if "full" in redirect:
        assert "No space left on device" in done.stderr


def test_differences_that_no_disk_takes_are_an_error(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "autotune", "diff", "v5e", "v6e"],
            cwd=tmp_path,
            env=user_environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, "No space left on device" in done.stderr) == (2, True), done.stderr


def test_a_command_that_fails_leaves_without_pythons_own_ending() -> None:
    """Which waits for this thread for ever, and where jax or pyarrow have some may abort."""
    stuck = "import threading; threading.Thread(target=threading.Event().wait).start()"
    start = "import atexit; atexit.register(print, 'tidied'); from autotune.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", f"{stuck}; {start}", "show", "nowhere"],
        cwd=ROOT,
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "tidied\n")
    assert "'nowhere' does not exist" in done.stderr


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", staticmethod(lambda: (_ for _ in ()).throw(RuntimeError())))
    assert user_folder("XDG_CACHE_HOME", ".cache").parent == Path(tempfile.gettempdir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_folder("XDG_CACHE_HOME", ".cache") == tmp_path / "autotune"


def test_every_command_has_help_with_an_example() -> None:
    from autotune.cli import COMMANDS, cli

    for name in COMMANDS:
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        assert command
        assert command.help
        assert command.epilog
        assert command.epilog.startswith(f"Example: autotune {name} ")


def test_cli_py_runs_from_a_checkout() -> None:
    done = subprocess.run(
        [sys.executable, "cli.py", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("autotune, version ")
    assert len((ROOT / "cli.py").read_text().splitlines()) <= 4
