"""Answers about ragged paged attention v3 that were compiled before."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from autotune.compile.cache import default_path
from autotune.compile.rpa_v3 import Answer, Answers, Job
from autotune.kernel.problem import Problem, Settings
from autotune.kernel.rpa_v3.blocks import DECODE, MIXED, Blocks
from autotune.tpu.compiler import Compiled
from autotune.tpu.loops import Loop

BLOCKS = Blocks(32, 512, 32, 512)
OK = Answer(
    blocks=BLOCKS,
    verdict=Compiled(status="ok", seconds=2.5),
    loops=Loop(33, [Loop(163, [Loop(122, [Loop(191, [Loop(16), Loop(506)])])])]),
    vmem_bytes=954368,
    smem_bytes=7260,
)
REFUSED = Answer(
    blocks=BLOCKS,
    verdict=Compiled(status="vmem_oom", needed_bytes=9, limit_bytes=8, error="no room", seconds=1.5),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds a kernel's source, of which only the bytes count here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return _source(tmp_path / "a", "version = 1\n")


def _source(folder: Path, text: str) -> Path:
    kernel = folder / "tpu_inference" / "kernels" / "ragged_paged_attention" / "v3"
    kernel.mkdir(parents=True)
    for name in ("kernel.py", "util.py"):
        (kernel / name).write_text(text)
    return folder


def _job(folder: Path, **changed: Any) -> Job:
    problem = Problem(
        num_q_heads=4,
        num_kv_heads=1,
        head_dim=128,
        page_size=128,
        max_num_batched_tokens=1024,
        pages_per_seq=16,
    )
    job = Job(target="v6e", folder=folder, case=MIXED, blocks=None, problem=problem, settings=Settings())
    return dataclasses.replace(job, **changed)


@pytest.mark.parametrize("answer", [OK, REFUSED])
def test_answers_come_back_as_they_were(folder: Path, answer: Answer) -> None:
    Answers(folder).put(_job(folder), answer)
    assert Answers(folder).get(_job(folder)) == answer


def test_another_question_has_another_answer(folder: Path, tmp_path: Path) -> None:
    kept = Answers(folder)
    kept.put(_job(folder), OK)
    problem = dataclasses.replace(_job(folder).problem, max_num_seqs=64)
    for changed in (
        {"target": "v5e"},
        {"case": DECODE},
        {"blocks": BLOCKS},
        {"problem": problem},
        {"settings": Settings(vmem_limit_bytes=1 << 20)},
    ):
        assert kept.get(_job(folder, **changed)) is None
    other = _source(tmp_path / "b", "version = 2\n")
    assert Answers(other).get(_job(other)) is None
    same = _source(tmp_path / "c", "version = 1\n")
    assert Answers(same).get(_job(same)) == OK, "the same source in another folder"


@pytest.mark.parametrize("status", ["timeout", "crashed", "compile_error"])
def test_what_may_go_better_next_time_is_not_kept(folder: Path, status: str) -> None:
    Answers(folder).put(_job(folder), Answer(blocks=BLOCKS, verdict=Compiled(status=status, seconds=1.0)))
    assert Answers(folder).get(_job(folder)) is None


@pytest.mark.parametrize(
    "damage",
    [
        {"loops": None},
        {"loops": {"bundles": -1, "inner": []}},
        {"loops": {"bundles": 1, "inner": [7]}},
        {"loops": {"bundles": 1, "inner": "x" * 1000}},
        {"blocks": [1, 2, 3]},
        {"blocks": [1, 2, 3, 0]},
        {"blocks": None},
        {"vmem_bytes": None},
        {"vmem_bytes": 1e400},
        {"smem_bytes": "7"},
        {"verdict": {"status": "fine"}},
        {"verdict": {"status": "vmem_oom", "seconds": 1.0}},
        {"verdict": []},
    ],
)
def test_a_damaged_answer_is_none(folder: Path, damage: dict[str, object]) -> None:
    Answers(folder).put(_job(folder), OK)
    with sqlite3.connect(default_path()) as connection:
        ((text,),) = connection.execute("SELECT verdict FROM verdicts").fetchall()
        connection.execute("UPDATE verdicts SET verdict = ?", [json.dumps(json.loads(text) | damage)])
    assert Answers(folder).get(_job(folder)) is None


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, '{"verdict": 1}'])
def test_another_text_is_none(folder: Path, text: str) -> None:
    Answers(folder).put(_job(folder), OK)
    with sqlite3.connect(default_path()) as connection:
        connection.execute("UPDATE verdicts SET verdict = ?", [text])
    assert Answers(folder).get(_job(folder)) is None
