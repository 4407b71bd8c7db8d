from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import MachineError, UsageError
from autotune.files import HIDDEN, remove_abandoned, whole
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
from autotune.files import scratch_folder, whole
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
