"""A model as attention sees it: its heads, those of one chip, and the page size that goes with a length."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from autotune.errors import UsageError
from autotune.kernel.problem import next_power_of_2


class Attention(NamedTuple):
    """The heads of a model's attention layers, or of those that `layers` names, before tensor parallelism.

    window: the sliding window in tokens of all these layers; None where some or all see everything.
    some_window: that of those layers that have one, where not all do. soft_cap: of the logits.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    layers: str = ""
    some_window: int | None = None
    soft_cap: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """What decides a model's keys.

    attentions: one, or several where layers differ in their heads. dtype: of the activations.
    max_model_len: the longest sequence, None if it does not say. notes: what a key does not hold, a line
    each. source: a file, or the Hugging Face repository.
    """

    name: str
    attentions: tuple[Attention, ...]
    dtype: str
    max_model_len: int | None
    notes: tuple[str, ...]
    source: str


def window_note(window: int, where: str) -> str:
    """What to know of a sliding window, which is a static argument of the kernel and no part of a key."""
    other = "" if where == "all layers" else " into another --out than the others"
    return (
        f"{where} see a window of {window} tokens; a key does not hold that: sweep these layers with "
        f"--sliding-window {window}{other}"
    )


def divisors(attention: Attention) -> list[int]:
    """The numbers of chips that heads can be divided among, as `per_chip` does it."""
    q_heads, kv_heads = attention.num_q_heads, attention.num_kv_heads
    return [n for n in range(1, q_heads + 1) if q_heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]


def per_chip(model: Model, attention: Attention, tp: int) -> tuple[int, int]:
    """(query heads, KV heads) on each of tp chips.

    Query heads are divided. So are KV heads, and where there are fewer of them than chips each is kept on
    several chips: the rule of vLLM (ModelConfig.get_num_kv_heads and verify_with_parallel_config in
    vllm/config/model.py) and of tpu-inference (get_num_kv_heads_by_tp, get_padded_num_heads in its utils).

    Raises:
      UsageError: the heads cannot be divided so.
    """
    q_heads, kv_heads = attention.num_q_heads, attention.num_kv_heads
    if q_heads % tp:
        raise UsageError(f"{model.name}: {q_heads} query heads cannot be divided among --tp {tp} chips")
    if kv_heads % tp and tp % kv_heads:
        raise UsageError(
            f"{model.name}: {kv_heads} KV heads can be neither divided among --tp {tp} chips nor repeated to "
            "as many"
        )
    return q_heads // tp, max(1, kv_heads // tp)


def recommended_page_size(max_model_len: int, max_num_seqs: int) -> int:
    """Tokens of a page as vLLM on TPUs chooses it where nobody names one.

    A sixteenth of the length as a power of two, within 16 and 256, and 16 for lengths above 8192; then up to
    where the page table of max_num_seqs sequences takes at most half of 1 MiB of SMEM: get_page_size and
    get_min_page_size of tpu-inference (tpu_inference/layers/vllm/backends/flash_attn.py, applied in
    tpu_inference/platforms/tpu_platform.py, read in 2026-11).
    """
    size = 16 if max_model_len > 8192 else min(256, max(16, next_power_of_2(max_model_len) // 16))
    most_pages = max(1, 1024 * 1024 // 2 // max_num_seqs // 4)
    return max(size, next_power_of_2(-(-max_model_len // most_pages)))
