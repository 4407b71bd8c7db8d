from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.errors import MachineError, UsageError
from autotune.io import folders
from autotune.io.folders import Folder, Remote
from autotune.results import dataset
from tests.factories import make_row

Uri = Callable[[str], str]


@pytest.fixture(params=["local", "s3", "gcs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "local":
        return tmp_path / "r"
    return folders.parse(request.getfixturevalue(request.param)(uuid.uuid4().hex))


def test_files_are_published_listed_read_and_deleted(folder: Folder) -> None:
    assert folders.entries(folder) == []
    assert not folder.is_dir()
    for name in ("b", "a", "a"):
        folders.publish(folder, name, name.encode() * 3)
    folders.publish(folder / ".hidden", "c", b"")
    assert [entry[:2] for entry in folders.entries(folder)] == [("a", 3), ("b", 3)]
    assert all(abs(entry.written - time.time_ns()) < 60e9 for entry in folders.entries(folder))
    assert [entry.name for entry in folders.entries(folder / ".hidden")] == ["c"]
    assert folder.is_dir()
    assert folders.read(folder, "b") == b"bbb"
    assert [file.open("rb").read() for file in folders.files(folder, ["b", "a"])] == [b"bbb", b"aaa"]
    folders.delete(folder, "a")
    folders.delete(folder, "a")
    assert [entry.name for entry in folders.entries(folder)] == ["b"]
    with pytest.raises(FileNotFoundError):
        folders.read(folder, "a")
    [gone] = folders.files(folder, ["a"])
    with pytest.raises(FileNotFoundError):
        gone.open("rb")


def test_rows_in_a_bucket_are_read_as_those_of_a_folder(folder: Folder, tmp_path: Path) -> None:
    rows = [make_row(p, minute=p, latency_us=1.0 + p, cycles=[1, 2, 3, 4]) for p in (4, 8, 16)]
    for row in rows:
        dataset.append(folder, [row])
        dataset.append(tmp_path / "plain", [row])
    assert dataset.read(folder).equals(dataset.read(tmp_path / "plain"))
    folders.publish(folder, "rows-broken.parquet", b"PAR1")
    with pytest.raises(UsageError, match=r"rows-broken\.parquet\S* cannot be read as parquet rows"):
        dataset.read(folder)


def test_files_that_are_gone_are_passed_over(folder: Folder) -> None:
    dataset.append(folder, [make_row(4)])
    dataset.append(folder, [make_row(8)])
    listed = dataset.names(folder)
    folders.delete(folder, listed[0])
    assert len(dataset.read(folder, only=listed)) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http://host/dir", "is not a results folder: use a path, s3://BUCKET/DIR or gs://BUCKET/DIR"),
        ("s3://key:secret@bucket/dir", "name none there"),
        ("s3:///dir", "names no folder of a bucket"),
        ("gs://bucket/a/../b", "names no folder of a bucket"),
        ("s3://bucket/dir?endpoint=x", "has the option 'endpoint': known are endpoint_override, region"),
        ("s3://bucket/dir?region=", "has the option 'region'"),
    ],
)
def test_uris_that_name_no_folder(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        folders.parse(text)
    assert "secret" not in str(caught.value)


def test_parts_of_a_uri() -> None:
    parsed = folders.parse("s3://bucket/a/b/?region=eu-west-1")
    assert isinstance(parsed, Remote)
    assert (parsed.kind, parsed.path, parsed.options) == ("s3", "bucket/a/b", (("region", "eu-west-1"),))
    assert str(parsed / "c") == "s3://bucket/a/b/c?region=eu-west-1"
    assert (parsed / "c").path == "bucket/a/b/c"
    assert folders.parse("gs://bucket/a").kind == "gcs"  # type: ignore[union-attr]
    assert folders.parse("results/a") == Path("results/a")


@pytest.mark.parametrize("server", ["s3", "gcs"])
def test_a_bucket_that_is_not_there(request: pytest.FixtureRequest, server: str) -> None:
    missing = folders.parse(request.getfixturevalue(server)("x").replace("//bucket", "//none"))
    for attempt in (lambda: folders.entries(missing), lambda: folders.publish(missing, "a", b"a")):
        with pytest.raises(MachineError, match="bucket 'none' does not exist: make it first"):
            attempt()


def test_a_server_that_refuses_or_says_nothing(s3: Uri, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, and not listening: connections are refused
        port = unused.getsockname()[1]
        refusing = folders.parse(f"s3://bucket/x?endpoint_override=http://127.0.0.1:{port}")
        with pytest.raises(MachineError, match="its server cannot be reached") as caught:
            folders.entries(refusing)
        assert "\n" not in str(caught.value)
        unused.listen()
        monkeypatch.setattr(folders, "REQUEST_SECONDS", 1.0)
        monkeypatch.setattr(folders, "ATTEMPTS", 1)
        silent = folders.parse(f"s3://other/x?endpoint_override=http://127.0.0.1:{port}")
        with pytest.raises(MachineError, match="its server cannot be reached"):
            folders.entries(silent)
