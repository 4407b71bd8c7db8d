"""docs/colab.ipynb, executed as a machine without a TPU executes it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from tests.conftest import ROOT, user_environment

NOTEBOOK = ROOT / "docs" / "colab.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook with its outputs, and the folder that it ran in."""
    folder: Path = tmp_path_factory.mktemp("notebook")
    environment = user_environment(folder / "cache")
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR"):
        environment[name] = str(folder / name.lower())
    # A download would fail the test rather than reach the network.
    environment |= {"PYTHONPATH": str(ROOT), "PIP_NO_INDEX": "1"}
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    # Sockets of the file system: another process may take a port before the kernel does.
    manager = client.create_kernel_manager()
    manager.transport, manager.ip = "ipc", str(folder / "kernel")
    client.execute(env=environment)
    return notebook, folder


def printed(notebook: Any) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


def test_every_cell_runs_and_none_installs(executed: Any) -> None:
    notebook, _ = executed
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert "autotune is installed" in printed(notebook)


def test_the_path_without_a_tpu_is_taken_and_said(executed: Any) -> None:
    said = printed(executed[0])
    assert "no TPU is attached to this machine" in said
    assert "Latencies are modelled, not measured." in said
    assert "the kernel cannot run here" in said


def test_jax_takes_the_winner_of_the_emitted_table(executed: Any) -> None:
    notebook, folder = executed
    table = runpy.run_path(str(folder / "tuned_block_sizes.py"))
    [winner] = table["TUNED_BLOCK_SIZES"]["TPU v5e"].values()
    assert f"JAX's kernel now takes {winner}" in printed(notebook)


def test_the_committed_notebook_has_no_outputs() -> None:
    code = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert len(code) >= 7
    assert not any(cell.outputs or cell.execution_count for cell in code)
