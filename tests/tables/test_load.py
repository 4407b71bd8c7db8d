"""What `load` makes of a name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune.errors import UsageError
from autotune.tables import load
from autotune.tables.load import committed_path


def test_the_installed_jax_and_one_device_of_it():
    whole = load("jax")
    assert {device: len(rows) for device, rows in whole.devices.items()} == {"TPU v6": 668, "TPU v5": 668}
    assert whole.generations() == ["v5e", "v5p", "v6e"]
    one = load("jax:TPU v6")
    assert list(one.devices) == ["TPU v6"]
    assert one.devices["TPU v6"] == whole.devices["TPU v6"]
    assert {device for device, _ in one.lines} == {"TPU v6"}
    assert load("jax:v5p").devices == {"TPU v5": whole.devices["TPU v5"]}
    assert not one.modelled


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere.py", "does not exist: use a table's path"),
        ("jax:TPU v9", "jax has no device 'TPU v9': it has 'TPU v6', 'TPU v5'"),
        ("v8", "does not exist"),
        (":v6e", "does not exist"),
        ("a\0b", "does not exist"),
        ("x" * 5000, "does not exist"),
    ],
)
def test_names_that_are_nothing(name, said):
    with pytest.raises(UsageError, match=said) as caught:
        load(name)
    assert "\n" not in str(caught.value)


def test_a_path_is_a_file_whatever_it_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("jax").write_bytes(committed_path("v4").read_bytes())
    assert load(Path("jax")).generations() == ["v4"]
    with pytest.raises(UsageError, match="table 'v6e' does not exist: use the path of a table"):
        load(Path("v6e"))


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="neither a file nor a folder"):
        load(str(tmp_path / "pipe"))
