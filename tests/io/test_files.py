from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from autotune.compile.cache import default_path
from autotune.errors import MachineError, UsageError
from autotune.io.files import HIDDEN, distrusted, remove_abandoned, user_folder, whole
from tests.conftest import user_environment


def test_a_file_is_there_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with whole(path) as file:
        file.write(b"all of it")
        assert not path.exists()
    assert path.read_bytes() == b"all of it"


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), whole(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def test_links_are_followed_and_devices_stay_devices(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with whole(tmp_path / "link") as file:
        file.write(b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"x"
    with whole(Path(os.devnull)) as file:
        file.write(b"x")
    assert Path(os.devnull).is_char_device()


def test_a_file_keeps_its_mode_and_its_other_names(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old and longer")
    path.chmod(0o640)
    with whole(path) as file:
        file.write(b"new")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", 0o640)
    os.link(path, tmp_path / "other")
    (tmp_path / "link").symlink_to(path)
    with whole(tmp_path / "link") as file:
        file.write(b"x")
    assert (tmp_path / "other").read_bytes() == b"x" and path.samefile(tmp_path / "other")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link", "other"]


def test_a_loop_of_links_is_said_and_stays(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UsageError, match="a' cannot be written: Too many levels"), whole(tmp_path / "a") as f:
        f.write(b"x")
    assert (tmp_path / "a").is_symlink() and (tmp_path / "b").is_symlink()


def test_what_others_may_have_written_is_not_read_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert distrusted(path) is None
    path.touch(0o600)
    assert distrusted(path) is None
    path.chmod(0o664)
    assert distrusted(path) is None, "the group is the user's own"
    path.chmod(0o646)
    assert distrusted(path) == f"others may write it: chmod go-w {path}"
    if os.getuid() == 0:
        path.chmod(0o600)
        os.chown(path, 1234, -1)
        assert distrusted(path) == "it belongs to the user with the number 1234"
        os.chown(path, 0, 1234)
        path.chmod(0o660)
        assert distrusted(path) == f"others may write it: chmod go-w {path}"


def _plant(folder: Path, kind: str) -> None:
    """What another user may have put in place of a user's folder for temporary files."""
    if kind == "a link":
        (folder.parent / "elsewhere").mkdir()
        folder.symlink_to(folder.parent / "elsewhere")
        return
    folder.mkdir(0o700)
    if kind == "another's":
        os.chown(folder, 1234, 1234)
    else:
        folder.chmod(0o755 if kind == "read by all" else 0o777)


@pytest.mark.parametrize("kind", ["another's", "a link", "read by all", "written by all"])
def test_a_user_without_a_home_trusts_only_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    if kind == "another's" and os.getuid():
        pytest.skip("only root can give a folder to another user")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", staticmethod(lambda: (_ for _ in ()).throw(RuntimeError())))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = user_folder("XDG_CACHE_HOME", ".cache")
    assert (made.parent, stat.S_IMODE(made.stat().st_mode)) == (tmp_path, 0o700)
    made.rmdir()
    _plant(made, kind)
    others = [user_folder("XDG_CACHE_HOME", ".cache") for _ in range(3)]
    assert made not in others and len(set(others)) == 1
    assert stat.S_IMODE(others[0].stat().st_mode) == 0o700 and not any(others[0].iterdir())
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and f"{made} is not used, and nothing is kept for next time: " in said


def test_a_folder_that_others_may_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert user_folder("XDG_CACHE_HOME", ".cache") == tmp_path / "autotune"
    (tmp_path / "autotune").mkdir()
    (tmp_path / "autotune").chmod(0o777)
    assert default_path().parent.parent == tmp_path and default_path().parent.name != "autotune"
    assert f"chmod go-w {tmp_path}/autotune" in capfd.readouterr().err


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "below", tmp_path / "folder"):
        with pytest.raises(UsageError, match="cannot be written"), whole(path) as file:
            file.write(b"x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


_HOLDS = """
import sys, time
from pathlib import Path
from autotune.io.files import scratch_folder, whole
with whole(Path(sys.argv[1]) / "rows") as file:
    folder, _ = scratch_folder("autotune-test-")
    (folder / "inside").write_text("")
    print(folder, flush=True)
    time.sleep(99)
"""


def test_what_a_killed_process_was_writing_is_removed_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".mine.tmp").write_text("not of the kind")
    (tmp_path / ".link.0123abcd.tmp").symlink_to(tmp_path / ".mine.tmp")
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS, str(tmp_path)],
        env={**user_environment(), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        folder = Path(process.stdout.readline().strip())
        hidden = set(tmp_path.glob(HIDDEN)) - {tmp_path / ".link.0123abcd.tmp"}
        assert folder.parent == tmp_path and len(hidden) == 1

        def remove() -> None:
            remove_abandoned(tmp_path, HIDDEN)
            remove_abandoned(tmp_path, "autotune-*.live")

        remove()
        assert folder.exists() and all(path.exists() for path in hidden), "its process lives"
        process.kill()
    remove()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".link.0123abcd.tmp", ".mine.tmp"]


def test_a_full_disk_is_the_machines_affair(tmp_path: Path) -> None:
    with (
        pytest.raises(MachineError, match="No space left on device; make room"),
        whole(Path("/dev/full")) as f,
    ):
        f.write(b"x" * 100_000)
