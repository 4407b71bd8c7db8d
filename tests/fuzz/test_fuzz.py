"""Some inputs for each target, all that ever found something, and whether fuzzing finds faults at all."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fuzz import child, faulty, listings
from tests.fuzz.mutate import MAX_INPUT, Mutator
from tests.fuzz.run import Outcome, run
from tests.fuzz.targets import TARGETS

FOUND = Path(__file__).parent / "found"
QUICK = 2000  # inputs a target; `make fuzz` gives 100,000
SEED = 1


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Future[Outcome]]:
    """Of each target, side by side on all cores."""
    listings.prepare()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        # The slowest first, so that no core waits for it at the end.
        order = sorted(TARGETS, key=lambda name: name not in ("row-values", "store"))
        return {name: pool.submit(run, name, QUICK, SEED) for name in order}


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_is_answered_wrongly(name: str, outcomes: dict[str, Future[Outcome]]) -> None:
    outcome = outcomes[name].result()
    assert outcome.finds == [], (
        f"see them: python -m tests.fuzz --target {name} --seed {SEED} --inputs {QUICK}"
    )


KEPT = sorted(path for path in FOUND.glob("*/*") if path.is_file())


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_was_found_stays_fixed(path: Path, tmp_path: Path) -> None:
    assert child.one(TARGETS[path.parent.name], path.read_bytes(), tmp_path, None) is None


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raises", "raised: ValueError at tests/fuzz/faulty.py"),
        ("hangs", "hang: Hang at tests/fuzz/faulty.py"),
        ("hangs, and would swallow it", "hang: Hang"),
        ("dies", "died: by signal 6"),
        ("leaves", "died: by exit code 3"),
        ("executes", "executed: Executed at tests/fuzz/faulty.py"),
        ("starts", "os.system"),
        ("writes", "open"),
        ("eats memory", "raised: MemoryError"),
        ("many lines", "raised: Wrong at tests/fuzz/targets.py"),
        ("steers a terminal", "a refusal that is not a few printable lines"),
        ("long line", "a refusal of 5000 characters"),
    ],
)
def test_faults_are_found_and_the_inputs_after_them_run(fault: str, said: str) -> None:
    outcome = run(fault, 100, 0, module=faulty.__name__)
    assert [number for number, _ in outcome.finds] == [60, 61]
    for _, found in outcome.finds:
        assert said in found


def test_an_input_is_known_by_its_number() -> None:
    seeds = [b'{"a": 12}', b"(1, 2)\n" * 20]
    first, second = (Mutator(seeds, (b"token",)) for _ in range(2))
    inputs = [first.input("x", 0, number) for number in range(3000)]
    assert inputs == [second.input("x", 0, number) for number in range(3000)]
    assert len(set(inputs)) > 2500
    assert inputs[:50] != [first.input("x", 1, number) for number in range(50)]
    assert max(map(len, inputs)) > MAX_INPUT >= sorted(map(len, inputs))[2900]


@pytest.mark.parametrize("name", TARGETS)
def test_sound_files_are_taken(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    answers = []
    for seed in target.seeds():
        try:
            target.run(seed, tmp_path)
            answers.append(True)
        except target.refusals:
            answers.append(False)
    assert any(answers), "every input would be refused at once"
