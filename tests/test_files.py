from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune.errors import UsageError
from autotune.files import whole


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
