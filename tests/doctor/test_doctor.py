"""The doctor, in environments that are whole and in ones that lack something."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import pty
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.cli.render import doctor as doctor_formats
from autotune.compile.cache import Store, default_path
from autotune.doctor import checks as doctor_checks
from autotune.doctor import examine, machine
from autotune.doctor import probe as doctor_probe
from autotune.doctor.checks import FAILURE, OK, WARNING, Check
from autotune.io import folders, installed
from autotune.kernel.problem import BlockSizes, Program
from autotune.results.schema import Tools
from autotune.tpu import generations
from autotune.tpu.compiler import Compiled
from tests.conftest import ROOT, user_environment
from tests.factories import KEY
from tests.tpu.test_attached import SAYS_V6E, Host

TOO_OLD = "NotImplementedError: TPU version must be 4 or higher."
SHAPE = "q_heads=4,kv_heads=1,head_dim=128,page_size=16,max_num_batched_tokens=512,max_model_len=512"
SWEEP = ("sweep", "--target", "v6e", "--shape", SHAPE, "--kv-pages", "8", "--queries", "32", "--out", "r")
LINUX = pytest.mark.skipif(not doctor_checks.has_libtpu_wheels(), reason="libtpu is for Linux x86_64")


class Environment:
    """An environment of its own: this one's packages by links, without some and with stubs of others."""

    def __init__(self, folder: Path, without: tuple[str, ...] = ()) -> None:
        self.site, self.cwd = folder / "site", folder / "cwd"
        self.site.mkdir()
        self.cwd.mkdir()
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            left_out = path.name in without or path.name.startswith(tuple(f"{name}-" for name in without))
            if path.suffix != ".pth" and not left_out:
                (self.site / path.name).symlink_to(path)

    def stub(self, name: str, version: str, *requires: str, code: str | None = None) -> None:
        """A package by its metadata, in place of the real one's; and if there is code, by a module of it."""
        for path in self.site.glob(f"{name}-*.dist-info"):
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
        info = self.site / f"{name}-{version}.dist-info"
        info.mkdir()
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
        (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")
        if code is not None:
            if (self.site / name).is_symlink():
                (self.site / name).unlink()
            (self.site / name).mkdir(exist_ok=True)
            (self.site / name / "__init__.py").write_text(code)

    def autotune(
        self, *arguments: str, stdout: int = subprocess.PIPE, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-S", "-m", "autotune", *arguments],
            cwd=self.cwd,
            env={**user_environment(), "PYTHONPATH": f"{ROOT}{os.pathsep}{self.site}", **variables},
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


Make = Callable[..., Environment]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda *without: Environment(tmp_path, without)


def states(text: str) -> dict[str, str]:
    """By name of the check, its state."""
    words = [line.split() for line in text.splitlines() if line[:1].isalpha()]
    return {line[1]: line[0] for line in words if line[0] in (OK, WARNING, FAILURE)}


@LINUX
def test_a_whole_environment(autotune: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = autotune("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    found = states(done.stdout)
    assert FAILURE not in found.values(), done.stdout
    assert found["tpu"] == WARNING
    assert {*generations.GENERATIONS, "python", "jax", "jaxlib", "libtpu", "kernel", "lockfile"} <= set(found)
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines if "/" not in line) <= 80  # a path stays whole
    # The words that users search for, each unbroken.
    assert TOO_OLD in done.stdout
    assert "can not be XLA fully tiled`" in done.stdout
    assert "\x1b" not in done.stdout
    # What it says to type next does work here.
    following = shlex.split(done.stdout.splitlines()[-1])
    assert "autotune" in following
    assert autotune(*following[following.index("autotune") + 1 :], "--dry-run").returncode == 0


@LINUX
def test_json_keeps_its_schema(autotune: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = autotune("doctor", "--json", "--out", "of mine")
    said = json.loads(done.stdout)
    assert done.returncode == said["exit_code"] == 0
    assert list(said) == ["schema", "autotune", "ready", "exit_code", "tpu", "checks", "next"]
    assert (said["schema"], said["ready"], said["tpu"]) == (1, True, None)
    for check in said["checks"]:
        assert list(check) == ["name", "state", "text", "advice", "command", "vital"]
        assert check["state"] in (OK, WARNING, FAILURE)
    names = [check["name"] for check in said["checks"]]
    assert names == [
        *("python", "packages", "jax", "jaxlib", "libtpu", "kernel", "heads"),
        *("environ", "lockfile", "tmp", "cache", "results", "memory", "tpu", *generations.GENERATIONS),
    ]
    assert said["next"][0].endswith("--preset smoke --out 'of mine'")


@LINUX
def test_without_libtpu(make: Make) -> None:
    environment = make("libtpu")
    done = environment.autotune("doctor")
    assert done.returncode == 3
    found = states(done.stdout)
    assert {name for name, state in found.items() if state == FAILURE} == {"libtpu", "compiler"}
    assert f"type: pip install 'jax[tpu]=={installed.version('jax')}'" in done.stdout
    assert done.stdout.splitlines()[-2:] == [
        f"  pip install 'jax[tpu]=={installed.version('jax')}'",
        "  python -m autotune doctor",
    ]
    swept = environment.autotune(*SWEEP)
    assert swept.returncode == 3
    assert swept.stderr.splitlines()[-1].startswith(
        "Error: libtpu, which holds the TPU compiler, is not inst"
    )
    assert "`autotune doctor`" in swept.stderr
    assert "Traceback" not in swept.stderr


def test_with_an_old_jax(make: Make) -> None:
    environment = make()
    environment.stub("jax", "0.4.35", "jaxlib<=0.4.35,>=0.4.34", code="__version__ = '0.4.35'\n")
    environment.stub("jaxlib", "0.4.34")
    done = environment.autotune("doctor")
    assert done.returncode == 3
    found = states(done.stdout)
    assert (found["jax"], found["jaxlib"], found["kernel"]) == (FAILURE, OK, FAILURE)
    assert "0.4.35 is too old: autotune needs >=0.10" in done.stdout
    assert "jax 0.4.35 does not ship" in done.stdout
    assert TOO_OLD not in done.stdout
    assert done.stdout.splitlines()[-2] == f"  {doctor_checks.INSTALL}"
    swept = environment.autotune(*SWEEP)
    assert swept.returncode == 3
    assert swept.stderr == (
        "Error: jax 0.4.35 is installed, and autotune needs >=0.10: `autotune doctor` says what to type\n"
    )


def test_without_jax(make: Make) -> None:
    environment = make("jax", "jaxlib")
    done = environment.autotune("doctor")
    assert done.returncode == 3
    assert "failure  jax       not installed" in done.stdout
    assert "failure  jaxlib    not installed" in done.stdout
    assert environment.autotune(*SWEEP).stderr == (
        "Error: jax is not installed: `autotune doctor` says what to type\n"
    )


def test_with_click_alone(make: Make) -> None:
    kept = ("click", "packaging")
    environment = make(*(p.name for p in Path(sysconfig.get_path("purelib")).iterdir() if p.name not in kept))
    (environment.site / "click-8.2.0.dist-info").mkdir()
    (environment.site / "click-8.2.0.dist-info" / "METADATA").write_text("Name: click\nVersion: 8.2.0\n")
    done = environment.autotune("doctor")
    assert done.returncode == 3
    assert done.stderr == ""
    assert "no numpy, no pandas, no " in done.stdout
    assert "'pandas>=2.2'" in done.stdout
    assert environment.autotune(*SWEEP).stderr == (
        "Error: jax is not installed: `autotune doctor` says what to type\n"
    )


def test_without_packaging_the_fit_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)  # so that importing it fails
    needed = installed.own_needs()
    assert {need.fits for need in needed} == {None}
    for check in (
        doctor_checks.packages(needed),
        doctor_checks.jaxlib(needed, doctor_probe.Probe({"jax": {}}, {})),
    ):
        assert check.state == WARNING
        assert "unknown without `packaging`" in check.text
        assert check.command == "pip install packaging"


def test_a_jaxlib_that_does_not_fit(make: Make) -> None:
    environment = make()
    asked = ("jaxlib<=0.10.2,>=0.10.1", "libtpu==0.0.41.*; extra == 'tpu'")
    environment.stub("jax", "0.10.2", *asked, code="__version__ = '0.10.2'")
    environment.stub("jaxlib", "0.9.0")
    done = environment.autotune("doctor")
    assert states(done.stdout)["jaxlib"] == WARNING  # it can be imported, so jax itself takes it
    assert "0.9.0 does not fit: jax 0.10.2 asks for jaxlib <=0.10.2,>=0.10.1" in " ".join(done.stdout.split())
    assert states(done.stdout)["libtpu"] == WARNING
    assert "asks for libtpu ==0.0.41.*" in done.stdout
    environment.stub("jax", "0.10.2", "jaxlib>=0.10.1", code="raise RuntimeError('jaxlib is version 0.9.0')")
    done = environment.autotune("doctor")
    assert done.returncode == 3
    assert states(done.stdout)["jaxlib"] == FAILURE
    assert "0.10.2 cannot be imported: jaxlib is version 0.9.0" in " ".join(done.stdout.split())


def stub_jax(folder: Path, code: str) -> list[str]:
    (folder / "jax").mkdir()
    (folder / "jax" / "__init__.py").write_text(code)
    return [str(folder), *sys.path]


def test_another_libtpu_is_another_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its verdicts are none of the package's."""
    package = installed.libtpu_version()
    assert package == installed.version("libtpu")
    for name, said in (("one", "a"), ("other", "b"), ("same", "b")):
        (tmp_path / name).write_text(said)
    found = {}
    for name in ("one", "other", "same", "not there"):
        monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / name))
        found[name] = installed.libtpu_version()
    assert found["not there"] == package
    assert found["other"] == found["same"]
    assert len({*found.values()}) == 3
    assert package and found["one"] and found["one"].startswith("sha256:")
    monkeypatch.delenv("TPU_LIBRARY_PATH")
    (tmp_path / "package").symlink_to(installed.libtpu_file() or "")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "package"))
    assert installed.libtpu_version() == package


def test_a_jax_that_crashes(tmp_path: Path) -> None:
    path = stub_jax(tmp_path, "import os, sys; print('noise'); print('its end', file=sys.stderr); os.abort()")
    probe = doctor_probe.ask(path=path)
    assert probe.answers == {}
    assert probe.errors == {"jax": "a process that asked it ended by SIGABRT: its end"}
    check = doctor_checks.jax([], probe)
    assert check.stops
    assert "cannot be imported: a process that asked it ended by SIGABRT" in check.text


def test_a_jax_that_hangs(tmp_path: Path) -> None:
    probe = doctor_probe.ask(seconds=1, path=stub_jax(tmp_path, "import time; time.sleep(60)"))
    assert probe.errors == {"jax": "a process that asked it was not done after 1 s"}


def test_a_crash_in_a_later_stage_keeps_what_was_said(tmp_path: Path) -> None:
    path = stub_jax(tmp_path, "__version__ = '0.10.2'")
    (tmp_path / "jax" / "experimental").mkdir()
    (tmp_path / "jax" / "experimental" / "__init__.py").write_text("import os; os._exit(7)")
    probe = doctor_probe.ask(path=path)
    assert probe.answers["jax"]["version"] == "0.10.2"
    assert probe.errors == {"kernel": "a process that asked it ended with exit code 7"}
    assert "cannot be imported: a process" in doctor_checks.kernel([], probe).text


def test_a_kernel_without_an_argument_stops_a_sweep() -> None:
    answer = {"module": "m", "path": "p", "fingerprint": "f", "missing": ["k_scale"], "entries": 1}
    probe = doctor_probe.Probe({"jax": {"version": "0.10.2", "path": "p"}, "kernel": answer}, {})
    check = doctor_checks.kernel([], probe)
    assert check.stops
    assert "no argument k_scale" in check.text


def test_another_kernel_than_that_of_the_tables_is_said() -> None:
    answer = {"module": "m", "path": "p", "fingerprint": "new", "missing": [], "entries": 1}
    answers = {"jax": {"version": "0.12", "path": "p"}, "kernel": answer, "tables": {"v6e": "old"}}
    check = doctor_checks.kernel([], doctor_probe.Probe(answers, {}))
    assert check.state == WARNING
    assert "made with old" in check.text


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="locks are read from /proc")
def test_lockfile_and_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "libtpu_lockfile"
    assert machine.lockfile(path).state == OK
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        held = machine.lockfile(path)
        # Where /proc does not show it, as from another container, that it is locked is still known.
        unseen = machine.lockfile(path, tmp_path)
        holder.kill()
    assert held.state == WARNING
    assert f"is held by process {holder.pid} ({sys.executable} -c" in held.text
    assert "process 0" in unseen.text
    left = machine.lockfile(path)
    assert left.state == OK
    assert "left behind" in left.text
    assert "harmless" in left.text


def test_lockfile_that_cannot_be_opened(tmp_path: Path) -> None:
    check = machine.lockfile(tmp_path)  # a folder refuses whoever asks, as another user's file does
    assert check.state == WARNING
    assert check.command == f"sudo rm {tmp_path}"


def test_folders_that_cannot_be_written_or_have_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.room("tmp", tmp_path / "not" / "yet", "new").state == OK
    assert not (tmp_path / "not").exists()
    blocked = machine.room("results", Path("/proc/1/results"), "new", vital=True)
    assert blocked.stops
    assert "cannot be written" in blocked.text
    assert machine.room("cache", Path("/proc/1/cache"), "new").state == WARNING
    (tmp_path / "file").touch()
    assert machine.results(tmp_path / "file").stops
    # A bucket that no machine answers for: an address of one's own on which nothing listens.
    bucket = folders.parse("s3://bucket/rows?endpoint_override=http://127.0.0.1:9&anonymous=true")
    assert machine.results(bucket).stops
    monkeypatch.setattr(machine, "ROOM_BYTES", 1 << 62)
    full = machine.room("tmp", tmp_path, "compiles write there", "export TMPDIR=/some/folder")
    assert (full.state, full.command) == (WARNING, "export TMPDIR=/some/folder")


def test_tmp_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)  # else Python goes by what it found before
    monkeypatch.setenv("TMPDIR", str(tmp_path / "not there"))
    check = machine.temporary()
    assert check.state == WARNING
    assert check.command == f"mkdir -p '{tmp_path}/not there'"
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", "/proc/self")  # which takes no file, not even of root
    assert "TMPDIR=/proc/self cannot be written" in machine.temporary().text


def test_the_cache_says_how_many_results_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "no compile results yet" in machine.cache().text
    program = Program(layout=KEY.canonical_problem().layout, blocks=BlockSizes(8, 32))
    verdict = Compiled(status="vmem_oom", needed_bytes=2, limit_bytes=1, error="no", seconds=1.0)
    Store(default_path()).put("v6e", Tools.installed(), program, verdict)
    assert re.search(r": 1 compile result in \d\d? KiB; ", machine.cache().text)
    default_path().write_bytes(bytes(200 << 10))
    assert "0.2 MiB of compile results" in machine.cache().text


def test_variables_that_change_what_is_compiled() -> None:
    assert doctor_checks.environment({}).state == OK
    assert doctor_checks.environment({"TPU_VISIBLE_CHIPS": "1", "JAX_PLATFORMS": "cpu"}).state == OK
    check = doctor_checks.environment({"XLA_FLAGS": "--xla_nonsense", "JAX_ENABLE_X64": "1"})
    assert check.state == WARNING
    assert "not passed on" in check.text
    assert "JAX_ENABLE_X64=1, XLA_FLAGS=--xla_nonsense" in check.text
    report = examine.Report([check, Check("tpu", FAILURE, "it ended"), Check("v6e", OK, "libtpu knows it")])
    assert not any("XLA_FLAGS" in line for line in report.next())  # it cannot be why the TPU does not start


def test_a_tpu_that_this_process_was_not_given(host: Host) -> None:
    host.pci("0000:00:04.0", "0x1ae0", "0x006f", "vfio/0")
    check, found = machine.tpu(**host.paths, ask=SAYS_V6E)
    assert (check.state, found) == (FAILURE, None)
    assert "lists 1 TPU chips and this process can open no device node" in check.text


@LINUX
def test_variables_of_the_user_that_end_a_compiler_do_not_end_ours(make: Make) -> None:
    done = make().autotune("doctor", XLA_FLAGS="--bogus_flag", TPU_LOAD_LIBRARY="0")
    assert done.returncode == 0, done.stdout
    found = states(done.stdout)
    assert found["environ"] == WARNING
    assert {found[name] for name in generations.GENERATIONS} == {OK}
    assert "sweep --target v6e" in done.stdout.splitlines()[-1]


def test_an_attached_tpu(host: Host) -> None:
    host.tpus("0x006f", ["vfio/0", "vfio/1", "vfio/2", "vfio/3"])
    check, found = machine.tpu(**host.paths, ask=SAYS_V6E, environment={"TPU_VISIBLE_CHIPS": "0"})
    assert check.state == OK
    assert check.text == "v6e, TPU version 6, 'TPU v6 lite': 4 chips, of which 1 may be used"
    report = examine.Report([check, Check("compiler", FAILURE, "no libtpu knows it")], found)
    assert report.ready  # it compiles on the device
    assert report.next() == ["autotune sweep --preset smoke --out results/first"]
    assert json.loads(doctor_formats.as_json(report, "autotune", "r"))["tpu"] == {
        "generation": "v6e",
        "version": 6,
        "device_kind": "TPU v6 lite",
        "chips": 4,
        "usable": [0],
    }


def test_a_tpu_that_is_held_or_too_old(host: Host) -> None:
    host.tpus("0x005e", ["accel0"])
    host.process(4242, "python train.py", host.dev / "accel0")
    check, found = machine.tpu(**host.paths, ask=SAYS_V6E)
    assert found is None
    assert check.state == FAILURE
    assert not check.stops  # for it can still be compiled for
    assert "held by process 4242 (python train.py)" in check.text
    host.pci("0000:00:06.0", "0x1ae0", "0x0027")
    check, _ = machine.tpu(**host.paths, ask=SAYS_V6E)
    assert "TPU version must be 4 or higher." in check.text


def test_memory_says_how_many_compiles_it_bears(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 99 kB\nMemAvailable:   2621440 kB\n")  # 2.5 GiB
    assert machine.memory(2, meminfo).state == OK
    assert "--jobs 2" in machine.memory(8, meminfo).advice
    assert machine.memory(8, tmp_path / "absent").state == WARNING


def test_libtpu_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libtpu.so"
    library.touch()
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    check = doctor_checks.libtpu([])
    assert check.state == WARNING
    assert str(library) in check.text


@LINUX
def test_deep_really_compiles() -> None:
    (check,) = examine.compiled([Check("v5p", OK, "libtpu knows it; limits")], cores=1)
    assert (check.name, check.state) == ("v5p", OK)
    assert check.text.startswith("compiled in ")
    assert check.text.endswith("; limits")


def test_generations_that_libtpu_does_not_know() -> None:
    said = {name: {"device_kind": name} for name in generations.GENERATIONS}
    said["v7x"] = {"error": "ValueError: no topology"}
    checks = {
        c.name: c for c in machine.generations(doctor_probe.Probe({"generations": said}, {}), vital=True)
    }
    assert checks["v7x"].state == FAILURE
    assert "no topology" in checks["v7x"].text
    assert checks["v6e"].state == OK
    report = examine.Report(list(checks.values()))
    assert report.ready
    none = doctor_probe.Probe({}, {"generations": "a process ended by SIGSEGV"})
    (check,) = machine.generations(none, vital=True)
    assert check.stops
    assert not examine.Report([check]).ready


def test_next_names_a_generation_that_compiles() -> None:
    checks = [Check(name, FAILURE if name == "v6e" else OK, "") for name in generations.GENERATIONS]
    assert "--target v7x" in examine.Report(checks).next()[0]


def test_lines_keep_to_80_columns_and_commands_whole() -> None:
    command = "pip install --upgrade " + " ".join(f"package-{n}" for n in range(12))
    text = doctor_formats.line(Check("name", WARNING, "word " * 40 + f"`{TOO_OLD}`", "advice " * 20, command))
    for line in text.splitlines():
        assert len(line) <= 80 or line == f"{'':19}type: {command}"
    assert TOO_OLD in text
    assert dataclasses.replace(Check("a", OK, "b"), vital=True).stops is False


def test_colour_is_for_terminals_that_want_it(make: Make) -> None:
    environment = make("jax", "jaxlib")  # which takes no time to look at

    def on_a_terminal(**variables: str) -> bytes:
        main, terminal = pty.openpty()
        assert environment.autotune("doctor", stdout=terminal, **variables).returncode == 3
        os.close(terminal)
        said = b""
        while chunk := _read(main):
            said += chunk
        os.close(main)
        return said

    assert b"\x1b[31m\x1b[1mfailure" in on_a_terminal(TERM="xterm")
    plain = on_a_terminal(TERM="xterm", NO_COLOR="1")
    assert b"\x1b" not in plain
    assert b"failure  jax " in plain


def _read(number: int) -> bytes:
    try:
        return os.read(number, 65536)
    except OSError:  # Linux says so at the end of a terminal
        return b""
