from __future__ import annotations

from pathlib import Path

import pytest

from autotune.analysis.server_start import Case, Server, Tried, that_fit
from autotune.compile.local_pool import CompilePool
from autotune.compile.rpa_v3 import Answer
from autotune.kernel.problem import Problem, Settings
from autotune.kernel.rpa_v3.blocks import DECODE, MIXED, Blocks
from autotune.tpu.compiler import Compiled
from autotune.tpu.generations import V6E

OK, TOO_LARGE = Compiled(status="ok"), Compiled(status="vmem_oom", needed_bytes=2, limit_bytes=1)
DEFAULT, FAST, SLOW = Blocks(256, 1024, 128, 512), Blocks(64, 1024, 64, 512), Blocks(32, 512, 32, 512)
SERVER = Server(
    layers="",
    generation=V6E,
    problem=Problem(
        num_q_heads=4, num_kv_heads=1, head_dim=128, page_size=128, max_num_batched_tokens=64, pages_per_seq=8
    ),
    settings=Settings(),
    given={},
    folder=Path("nowhere"),
)


def tried(blocks: Blocks, verdict: Compiled, seconds: float | None = None) -> Tried:
    return Tried(blocks=blocks, answer=Answer(blocks=blocks, verdict=verdict), seconds=seconds)


def case(name: str, own: Tried, *instead: Tried) -> Case:
    return Case(name=name, set_by="", own=own, refusal=own.answer.verdict, instead=instead)


def fitting(*mixed: Case) -> dict[str, Blocks]:
    """Of kinds of layers whose decode starts. All that is asked is known, so nothing is compiled."""
    decode = case(DECODE, tried(Blocks(1, 1024, 1, 1024), OK))
    kinds = [(SERVER, (decode, one)) for one in mixed]

    def told(server: Server, name: str, blocks: Blocks | None) -> None:
        pytest.fail(f"{name} was compiled with {blocks}")

    return that_fit(CompilePool(1, 1.0), kinds, told)


def test_the_fastest_that_fits_is_chosen() -> None:
    failing = case(MIXED, tried(DEFAULT, TOO_LARGE), tried(SLOW, OK, 2.0), tried(FAST, OK, 1.0))
    assert fitting(failing) == {MIXED: FAST}
    unknown = case(MIXED, tried(DEFAULT, TOO_LARGE), tried(FAST, OK), tried(SLOW, OK, 2.0))
    assert fitting(unknown) == {MIXED: SLOW}


def test_what_fits_some_layers_and_not_others_is_not_chosen() -> None:
    """The environment sets block sizes for all layers of a server."""
    one = case(MIXED, tried(DEFAULT, TOO_LARGE), tried(FAST, OK, 1.0), tried(SLOW, OK, 2.0))
    other = case(MIXED, tried(DEFAULT, TOO_LARGE), tried(FAST, TOO_LARGE), tried(SLOW, OK, 2.0))
    assert fitting(one, other) == {MIXED: SLOW}
    hopeless = case(MIXED, tried(DEFAULT, TOO_LARGE), tried(FAST, TOO_LARGE), tried(SLOW, TOO_LARGE))
    assert fitting(one, hopeless) == {}


def test_layers_that_start_count_too() -> None:
    failing = case(MIXED, tried(DEFAULT, TOO_LARGE), tried(FAST, OK, 1.0))
    starting = case(MIXED, tried(FAST, OK, 1.0))
    assert fitting(failing, starting) == {MIXED: FAST}


def test_nothing_is_chosen_where_all_start() -> None:
    assert fitting(case(MIXED, tried(DEFAULT, OK, 1.0), tried(FAST, OK, 0.5))) == {}
