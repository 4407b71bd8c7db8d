from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import UsageError
from autotune.kernel import workload
from autotune.kernel.problem import Problem
from autotune.kernel.workload import Sequence, Workload, from_csv, generate, pages_needed, place


def problem(tokens: int = 1024, pages: int = 16, page_size: int = 128, seqs: int = 128) -> Problem:
    return Problem(
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=128,
        page_size=page_size,
        max_num_batched_tokens=tokens,
        pages_per_seq=pages,
        max_num_seqs=seqs,
    )


@given(
    st.sampled_from(list(workload.GENERATORS)),
    st.integers(1, 8192),
    st.integers(1, 64),
    st.integers(1, 256),
    st.integers(1, 256),
    st.integers(0, 5),
)
@settings(max_examples=200, deadline=None)
def test_generated_batches_are_calls_of_their_problem(
    name: str, tokens: int, pages: int, page_size: int, seqs: int, seed: int
) -> None:
    p = problem(tokens, pages, page_size, seqs)
    batch = generate(name, p, seed)
    assert batch.misfit(p) is None
    assert all(0 < s.q_len <= s.kv_len for s in batch.sequences)
    assert batch == generate(name, p, seed)


def test_the_three_workloads_are_what_they_are_called() -> None:
    p = problem(tokens=2048)
    decodes = {name: sum(s.q_len == 1 for s in generate(name, p).sequences) for name in workload.GENERATORS}
    prefilled = {
        name: sum(s.q_len for s in generate(name, p).sequences if s.q_len > 1) for name in workload.GENERATORS
    }
    assert decodes["decode-heavy"] > 100 > decodes["prefill-heavy"]
    assert prefilled["prefill-heavy"] > prefilled["mixed"] > prefilled["decode-heavy"] > 0
    assert len({generate(name, p).fingerprint for name in workload.GENERATORS}) == 3
    assert generate("mixed", p, 0).fingerprint != generate("mixed", p, 1).fingerprint


def test_pages_are_scattered_and_each_sequence_has_its_own() -> None:
    p = problem()
    batch = generate("mixed", p)
    placed = place(p, batch, 2 * pages_needed(p, batch))
    used = []
    for row, s in enumerate(batch.sequences):
        pages = placed.page_indices[row, : -(-s.kv_len // p.page_size)]
        used += list(pages)
    assert len(set(used)) == len(used) <= placed.total_num_pages
    assert sum(np.diff(used) == 1) < len(used) / 10, "pages follow one another as a serving engine's never do"
    assert placed.cu_q_lens[placed.num_seqs[0]] == sum(s.q_len for s in batch.sequences)
    assert placed.kv_lens.shape == (p.max_num_seqs,)


def test_a_pool_larger_than_the_device_should_hold_is_shared() -> None:
    p = problem(tokens=128, pages=2048, page_size=256, seqs=128)
    batch = Workload("long", tuple(Sequence(1, p.max_model_len) for _ in range(64)))
    placed = place(p, batch, 1000)
    assert placed.total_num_pages == 1000
    assert set(placed.page_indices[:64].ravel()) == set(range(1000))


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("q_len,kv_len\n1, 512  # a decode\n\n256,256\n")
    assert from_csv(str(path)).sequences == (Sequence(1, 512), Sequence(256, 256))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1,2,3\n", r"line 1: '1,2,3' is not q_len,kv_len"),
        ("1,2\n7\n", r"line 2: '7' is not"),
        ("5,4\n", r"line 1: '5,4' must have 0 < q_len <= kv_len"),
        ("0,4\n", r"must have 0 < q_len"),
        ("1,99999999999\n", r"must have"),
        ("q_len,kv_len\n", r"has no q_len,kv_len line"),
        ("\xff\xfe", r"not UTF-8"),
        ("1,2\n" * 300_000, r"larger than 1048576 bytes"),
    ],
)
def test_csv_refuses(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=said):
        from_csv(str(path))


def test_a_name_that_rows_cannot_keep_is_refused_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / os.fsdecode(b"\xff.csv"))
    with open(path, "w") as file:  # noqa: PTH123
        file.write("1,512\n")
    with pytest.raises(UsageError, match=r"\\udcff.csv' has a name that rows cannot keep: rename it"):
        from_csv(path)


def test_csv_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="No such file"):
        from_csv("nowhere.csv")


def test_a_batch_that_does_not_fit_says_why() -> None:
    p = problem(tokens=64, pages=2)
    assert "kv_len 999" in (Workload("w", (Sequence(1, 999),)).misfit(p) or "")
    assert "65 new tokens" in (Workload("w", (Sequence(65, 65),)).misfit(p) or "")
    assert "129 sequences" in (Workload("w", (Sequence(1, 1),) * 129).misfit(problem()) or "")


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(UsageError, match="'decode' is unknown: use mixed"):
        generate("decode", problem())
