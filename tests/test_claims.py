"""Claims, and rows that a bucket does not take."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune import claims, folders, gather, results
from autotune.claims import Claims
from autotune.errors import MachineError
from autotune.folders import Folder
from autotune.outbox import Outbox
from tests.conftest import ROOT
from tests.test_results import make_row


@pytest.fixture(params=["local", "s3", "gcs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "local":
        return tmp_path / "r"
    return folders.parse(request.getfixturevalue(request.param)(uuid.uuid4().hex))


def test_a_thing_has_one_owner_at_a_time(folder: Folder) -> None:
    with Claims(folder) as first, Claims(folder) as second:
        assert first.take("a")
        assert not second.take("a")
        assert second.take("b")
        assert (first.taken(), second.taken()) == ({"b"}, {"a"})
        first.release("a")
        assert second.taken() == set()
        assert second.take("a")
        assert not first.take("a")
    assert first.broken is second.broken is None
    assert folders.entries(folder / claims.PLACE) == []
    assert results.names(folder) == []


@pytest.mark.parametrize("written", [1, 2])
def test_an_interrupt_right_after_a_file_is_written_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """The sign of life is the first file, the claim the second."""
    publish, left = folders.publish, iter(range(written - 1, -1, -1))

    def interrupted(folder: Folder, name: str, content: bytes) -> None:
        publish(folder, name, content)
        if next(left) == 0:
            assert len(folders.entries(folder)) == written
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Claims(tmp_path) as mine:
        monkeypatch.setattr(folders, "publish", interrupted)
        mine.take("a")
    assert list(tmp_path.iterdir()) == []


def test_of_many_at_once_each_thing_has_one_owner_and_none_has_none(tmp_path: Path) -> None:
    owners = [Claims(tmp_path) for _ in range(4)]
    got: list[list[str]] = [[] for _ in owners]
    start = threading.Barrier(len(owners))

    def taking(number: int) -> None:
        start.wait()
        for thing in map(str, range(12)):
            if owners[number].take(thing):
                got[number].append(thing)

    threads = [threading.Thread(target=taking, args=(n,)) for n in range(len(owners))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(itertools.chain(*got), key=int) == [str(n) for n in range(12)]
    for owner in owners:
        owner.__exit__(None, None, None)


def test_claims_of_one_that_is_silent_expire_and_of_one_that_is_not_do_not(tmp_path: Path) -> None:
    lease = 2.0
    with Claims(tmp_path, lease) as silent, Claims(tmp_path, lease) as watching:
        assert silent.take("a")
        deadline = time.monotonic() + 1.5 * lease
        while time.monotonic() < deadline:
            assert not watching.take("a"), "it gave signs of life"
            time.sleep(0.2)
        silent._stop.set()  # as a host that lost its power
        silent._thread.join()
        while not watching.take("a"):
            assert time.monotonic() < deadline + 3 * lease
            time.sleep(0.1)
        assert not [e for e in folders.entries(tmp_path / claims.PLACE) if e.name.startswith(silent._owner)]


_HOLD = """
import sys, time
from autotune import folders
from autotune.claims import Claims
claims = Claims(folders.parse(sys.argv[1]))
print(claims.take("a"), flush=True)
time.sleep(60)
"""


def test_a_process_of_this_machine_that_was_killed_is_gone_at_once(folder: Folder) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout
    assert holder.stdout.readline() == "True\n"
    with Claims(folder) as mine:
        assert not mine.take("a")
        holder.kill()
        holder.wait()
        assert mine.take("a")
    assert folders.entries(folder / claims.PLACE) == []


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"machine": 1, "pid": "x"}', b"\xff", b"[" * 100000]
)
def test_a_sign_of_life_that_says_nothing_is_one_all_the_same(tmp_path: Path, content: bytes) -> None:
    folders.publish(tmp_path / claims.PLACE, "x.json", content)
    folders.publish(tmp_path / claims.PLACE, "x.a", b"")
    with Claims(tmp_path, lease=0.5) as mine:
        assert not mine.take("a")
        time.sleep(0.6)
        assert mine.take("a")


def test_another_process_with_the_number_of_one_that_is_gone(tmp_path: Path) -> None:
    said = {"machine": claims._machine(), "pid": os.getpid(), "started": "1", "sign": "x"}
    folders.publish(tmp_path / claims.PLACE, "x.json", json.dumps(said).encode())
    folders.publish(tmp_path / claims.PLACE, "x.a", b"")
    with Claims(tmp_path) as mine:
        assert mine.take("a")


def test_where_claims_cannot_be_written_all_is_free(tmp_path: Path) -> None:
    (tmp_path / claims.PLACE).write_text("not a folder")
    with Claims(tmp_path) as mine:
        assert mine.take("a")
        assert "cannot be written" in str(mine.broken)
        mine.release("a")


def test_rows_that_a_bucket_does_not_take_are_kept_and_sent_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: Callable[[str], str]
) -> None:
    from moto.server import ThreadedMotoServer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("autotune.outbox.FIRST_PAUSE", 0.0)
    name = uuid.uuid4().hex
    started = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()  # of the same process, it holds the same bucket
    host, port = started.get_host_and_port()
    uri = f"s3://bucket/{name}?endpoint_override=http://{host}:{port}"
    rows = [make_row(p, latency_us=1.0) for p in (1, 2, 3, 4, 5)]
    with pytest.raises(MachineError, match="cannot be reached") as caught, Outbox(folders.parse(uri)) as box:
        assert len(box.append(rows[:1])) == 1
        started.stop()
        assert box.append(rows[1:2]) == box.append(rows[2:3]) == []
        assert box.kept
        assert len(results.read(box.kept)) == 2, "they are on disk before anything else is done"
        started = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
        started.start()
        assert len(box.append(rows[3:4])) == 3
        assert box.kept is None
        started.stop()
        box.append(rows[4:])
    [kept] = (tmp_path / "autotune" / "unsent").iterdir()
    assert f"type: autotune results merge {kept} -o '{uri}'" in str(caught.value)
    there = folders.parse(s3(name))
    assert len(results.read(there)) == 4
    assert gather.merge([kept], there).new == 1
    assert len(results.read(there)) == 5
