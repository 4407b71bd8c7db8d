"""docs/troubleshooting.md: what it quotes exists, in autotune's source or upstream."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
# Words of jax, libtpu and others, which the page does quote; everything else in bold is autotune's own.
UPSTREAM = (
    "NotImplementedError: TPU version must be 4 or higher.",
    "ValueError: Not implemented: num_combined_kv_heads=12 can not be XLA fully tiled.",
    "RuntimeError: Unable to initialize backend 'tpu'",
    "The TPU is already in use by process with pid",
    'Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm /tmp/libtpu_lockfile".',
    "The TPU is already in use by another process probably owned by another user.",
    "Couldn't open iommu group /dev/vfio/0",
    "Failed to deserialize the Mosaic module: INTERNAL: Unsupported version",
    "Mismatched PJRT plugin PJRT API version",
    "Failed to get TPU metadata (tpu-env) from instance metadata",
    "Ran out of memory in memory space vmem",
    "Scoped allocation with size",
    "Mosaic failed to compile TPU kernel: E2001: CompileTimeMosaicUnsupportedRhsType",
    "The last dim size is not 128 in original base memref",
    "No space left on device",
    "Unknown flag in XLA_FLAGS",
    "TPU_LOAD_LIBRARY=0, not loading libtpu",
)


def quoted() -> list[str]:
    """What stands in backticks within bold type, on one line each."""
    bold = re.findall(r"\*\*(.+?)\*\*", PAGE, re.S)
    return [" ".join(words.split()) for text in bold for words in re.findall(r"`([^`]+)`", text)]


def literals() -> str:
    """Every string of the package, with a null for what is filled in."""
    found = []
    for path in (ROOT / "autotune").rglob("*.py"):
        if path.name.startswith("tpu_v"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values)
                )
    return "\n".join(found)


@pytest.fixture(scope="module")
def source() -> str:
    return literals()


def test_upstream_words_are_quoted_whole() -> None:
    assert set(UPSTREAM) <= set(quoted())
    assert "num_combined_kv_heads can not be XLA fully tiled" in " ".join(PAGE.split())


@pytest.mark.parametrize("words", [words for words in quoted() if words not in UPSTREAM])
def test_words_of_autotune_are_in_its_source(words: str, source: str) -> None:
    assert words in source


def test_every_refusal_of_a_machine_is_on_the_page() -> None:
    """Each MachineError that is raised with words of its own has some of them quoted."""
    missing = []
    for path in (ROOT / "autotune").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "MachineError":
                text = "".join(
                    part.value if isinstance(part.value, str) else ""
                    for part in ast.walk(node)
                    if isinstance(part, ast.Constant)
                )
                words = len(re.findall(r"[a-z]{3,}", text))
                if words > 6 and not any(quote in text for quote in quoted()):
                    missing.append(text)
    assert not missing, "docs/troubleshooting.md quotes none of these: add what to do about them"


def test_a_line_that_is_gone_would_be_noticed(source: str) -> None:
    assert len([words for words in quoted() if words not in UPSTREAM]) > 20
    assert "the TPU is gone for a walk" not in source


def test_commands_and_options_that_are_named_exist() -> None:
    reference = (ROOT / "docs" / "cli.md").read_text()
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    others = {"--privileged", "--network", "--address"}  # of docker and ray
    assert options - others <= set(re.findall(r"--[a-z][a-z-]+", reference))
    for command in re.findall(r"`autotune (\w+)", PAGE):
        assert f"## autotune {command}\n" in reference


def test_upstreams_words_are_those_of_the_installed_jax() -> None:
    import jax

    kernel = Path(jax.__file__).parent / "experimental/pallas/ops/tpu/ragged_paged_attention"
    text = "".join(path.read_text() for path in kernel.glob("*.py"))
    assert "TPU version must be 4 or higher." in text
    assert "{num_combined_kv_heads=} can not be XLA fully tiled." in text
