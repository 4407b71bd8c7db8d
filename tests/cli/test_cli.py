from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from autotune.io.files import user_folder
from autotune.results import dataset
from tests.conftest import ROOT, user_environment
from tests.factories import SWEEP, start, wait_for_rows

HEAVY = {"jax", "jaxlib", "pandas", "pyarrow", "numpy", "libtpu", "plotly"}

_PROBE = """
import sys
from autotune.cli.main import run
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


def test_no_tpu_is_said_at_once() -> None:
    """Before what takes a second to import."""
    returned, modules = imported("sweep")
    assert returned == 3
    assert not modules & HEAVY


LIGHT, LOADS_PANDAS = ("--help", "keys --list-models"), "diff v5e v6e --format csv"
CLOSED = (">&-", 2, "Error: standard output is closed, and what was to be written there is lost")
FULL = (">/dev/full", 2, "Error: No space left on device")


@pytest.mark.parametrize(
    ("command", "redirect", "code", "said"),
    [
        *((command, *lost) for command in (*LIGHT, LOADS_PANDAS) for lost in (CLOSED, FULL)),
        *((command, redirect, 0, "") for command in LIGHT for redirect in ("2>&-", "<&-", "| true")),
    ],
)
def test_lost_streams_are_no_traceback(command: str, redirect: str, code: int, said: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m autotune {command} {redirect}"],
        cwd=ROOT,
        env=user_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith(("Error", "Trace"))] == (
        [said] if said else []
    )


def test_keys_of_a_closed_standard_input() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m autotune keys --keys - <&-"],
        cwd=ROOT,
        env=user_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.startswith("Error: --keys standard input")) == (2, True), done.stderr


def test_a_sweep_whose_standard_error_is_closed_has_its_rows(tmp_path: Path, replayed: str) -> None:
    command = shlex.join([sys.executable, "-m", "autotune", *SWEEP, "--queries", "32", "--workload", "mixed"])
    done = subprocess.run(
        ["bash", "-c", f"{command} 2>&-"],
        cwd=tmp_path,
        env={**user_environment(tmp_path / "cache"), "PYTHONPATH": replayed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert len(dataset.read(tmp_path / "r")) == 2
    assert "Next: " in done.stdout


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_hangup_and_a_quit_end_as_a_ctrl_c_does(
    tmp_path: Path, slowly_replayed: str, number: signal.Signals
) -> None:
    running = start(tmp_path, slowly_replayed)
    wait_for_rows(tmp_path / "r", 2)
    os.killpg(running.pid, number)  # as a terminal does
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "everything so far is recorded in r. To go on:\n  python -m autotune sweep --target v6e" in said
    assert "Traceback" not in said
    assert set(dataset.read(tmp_path / "r")["status"]) == {"ok"}, "the compilers were not to blame"


def test_a_hangup_under_nohup_is_passed_over(tmp_path: Path) -> None:
    said = subprocess.run(
        ["nohup", sys.executable, "-c", f"{_LISTENS}listen(signal.SIGHUP)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (said.returncode, said.stdout) == (0, "went on\n"), said.stderr


_LISTENS = """
import os, signal
from autotune.cli import main
def listen(number):
    main._listen()
    try:
        os.kill(os.getpid(), number)
        print("went on")
    except KeyboardInterrupt:
        print("leaves")
"""


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
    start = "import atexit; atexit.register(print, 'tidied'); from autotune.cli.main import main; main()"
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
    from autotune.cli.main import COMMANDS, cli

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
