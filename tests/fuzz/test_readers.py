"""Hostile inputs for each reader of others' files and words, and all that ever found something."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.conftest import ROOT
from tests.fuzz.guard import answer
from tests.fuzz.readers import READERS

FOUND = Path(__file__).parent / "found"
KEPT = sorted(path for path in FOUND.glob("*/*") if path.is_file())


@pytest.fixture(autouse=True)
def config_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Calibrations are read from here, and nothing is loaded for the first time within bounds."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.mark.parametrize("name", READERS)
def test_sound_inputs_are_taken(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    answers = [answer(reader.read, seed, tmp_path, reader.refusals) for seed in reader.seeds()]
    assert any(answers), "every input would be refused at once"


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_was_found_stays_fixed(path: Path, tmp_path: Path) -> None:
    reader = READERS[path.parent.name]
    answer(reader.read, path.read_bytes(), tmp_path, reader.refusals)


@pytest.mark.parametrize("name", READERS)
def test_hostile_inputs_are_answered(name: str, tmp_path: Path) -> None:
    """What finds something is left in build/fuzz, shortened; fixed, it belongs into tests/fuzz/found."""
    reader = READERS[name]
    found = ROOT / "build" / "fuzz" / name

    @settings(
        max_examples=2 * settings().max_examples // reader.one_in, suppress_health_check=list(HealthCheck)
    )
    @given(reader.inputs())
    def hostile(data: bytes) -> None:
        try:
            answer(reader.read, data, tmp_path, reader.refusals)
        except Exception:
            found.parent.mkdir(parents=True, exist_ok=True)
            found.write_bytes(data)
            raise

    hostile()
