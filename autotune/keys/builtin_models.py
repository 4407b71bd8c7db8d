"""Well-known public models by name: heads, head_dim, window, longest length; and how --model finds one.

A line says what the config.json of the named Hugging Face repository says, or what its model type in the
`transformers` library says where the file leaves a field out (head_dim 256 of Gemma 3). Heads, head_dim and
windows were checked in 2026-11 against the tables of litgpt (litgpt/config.py), mlc-llm
(python/mlc_llm/model/model_preset.py) and MaxText (src/maxtext/configs/models); models that none of them
has are left out. A model that was tuned from one of these has the same heads.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from pathlib import Path
from typing import NamedTuple

from autotune.errors import UsageError
from autotune.io.terminal import printable
from autotune.keys.hf_config import read_config
from autotune.keys.models import Attention, Model, window_note

# What names of tuned and quantized models add to that of the model: words between hyphens.
_ADDED = re.compile(r"meta|instruct|it|chat|hf|base|pt|thinking|qat|fp8|awq|gptq|\d{4}")
LIST_THEM = "`autotune keys --list-models` lists them"


class Known(NamedTuple):
    """A model's own numbers, before tensor parallelism.

    source: the Hugging Face repository. window: sliding window in tokens; some: of some layers, not of all.
    soft_cap: of the attention logits.
    """

    source: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    window: int | None = None
    some: bool = False
    soft_cap: float | None = None


KNOWN = {
    "llama-2-7b": Known("meta-llama/Llama-2-7b-hf", 32, 32, 128, 4096),
    "llama-2-13b": Known("meta-llama/Llama-2-13b-hf", 40, 40, 128, 4096),
    "llama-2-70b": Known("meta-llama/Llama-2-70b-hf", 64, 8, 128, 4096),
    "llama-3-8b": Known("meta-llama/Meta-Llama-3-8B", 32, 8, 128, 8192),
    "llama-3-70b": Known("meta-llama/Meta-Llama-3-70B", 64, 8, 128, 8192),
    "llama-3.1-8b": Known("meta-llama/Llama-3.1-8B", 32, 8, 128, 131072),
    "llama-3.1-70b": Known("meta-llama/Llama-3.1-70B", 64, 8, 128, 131072),
    "llama-3.1-405b": Known("meta-llama/Llama-3.1-405B", 128, 8, 128, 131072),
    "llama-3.2-1b": Known("meta-llama/Llama-3.2-1B", 32, 8, 64, 131072),
    "llama-3.2-3b": Known("meta-llama/Llama-3.2-3B", 24, 8, 128, 131072),
    "llama-3.3-70b": Known("meta-llama/Llama-3.3-70B-Instruct", 64, 8, 128, 131072),
    "codellama-34b": Known("codellama/CodeLlama-34b-hf", 64, 8, 128, 16384),
    "tinyllama-1.1b": Known("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 32, 4, 64, 2048),
    "qwen2.5-0.5b": Known("Qwen/Qwen2.5-0.5B", 14, 2, 64, 32768),
    "qwen2.5-1.5b": Known("Qwen/Qwen2.5-1.5B", 12, 2, 128, 131072),
    "qwen2.5-3b": Known("Qwen/Qwen2.5-3B", 16, 2, 128, 32768),
    "qwen2.5-7b": Known("Qwen/Qwen2.5-7B", 28, 4, 128, 131072),
    "qwen2.5-14b": Known("Qwen/Qwen2.5-14B", 40, 8, 128, 131072),
    "qwen2.5-32b": Known("Qwen/Qwen2.5-32B", 40, 8, 128, 131072),
    "qwen2.5-72b": Known("Qwen/Qwen2.5-72B", 64, 8, 128, 131072),
    "qwen3-0.6b": Known("Qwen/Qwen3-0.6B", 16, 8, 128, 40960),
    "qwen3-1.7b": Known("Qwen/Qwen3-1.7B", 16, 8, 128, 40960),
    "qwen3-4b": Known("Qwen/Qwen3-4B", 32, 8, 128, 40960),
    "qwen3-8b": Known("Qwen/Qwen3-8B", 32, 8, 128, 40960),
    "qwen3-14b": Known("Qwen/Qwen3-14B", 40, 8, 128, 40960),
    "qwen3-32b": Known("Qwen/Qwen3-32B", 64, 8, 128, 40960),
    "qwen3-30b-a3b": Known("Qwen/Qwen3-30B-A3B", 32, 4, 128, 40960),
    "qwen3-235b-a22b": Known("Qwen/Qwen3-235B-A22B", 64, 4, 128, 40960),
    "gemma-2b": Known("google/gemma-2b", 8, 1, 256, 8192),
    "gemma-7b": Known("google/gemma-7b", 16, 16, 256, 8192),
    "gemma-2-2b": Known("google/gemma-2-2b", 8, 4, 256, 8192, 4096, True, 50.0),
    "gemma-2-9b": Known("google/gemma-2-9b", 16, 8, 256, 8192, 4096, True, 50.0),
    "gemma-2-27b": Known("google/gemma-2-27b", 32, 16, 128, 8192, 4096, True, 50.0),
    "gemma-3-1b": Known("google/gemma-3-1b-it", 4, 1, 256, 32768, 512, True),
    "gemma-3-4b": Known("google/gemma-3-4b-it", 8, 4, 256, 131072, 1024, True),
    "gemma-3-12b": Known("google/gemma-3-12b-it", 16, 8, 256, 131072, 1024, True),
    "gemma-3-27b": Known("google/gemma-3-27b-it", 32, 16, 128, 131072, 1024, True),
    "mistral-7b-v0.1": Known("mistralai/Mistral-7B-v0.1", 32, 8, 128, 32768, 4096),
    "mistral-7b-v0.3": Known("mistralai/Mistral-7B-v0.3", 32, 8, 128, 32768),
    "mixtral-8x7b": Known("mistralai/Mixtral-8x7B-v0.1", 32, 8, 128, 32768),
    "mixtral-8x22b": Known("mistralai/Mixtral-8x22B-v0.1", 48, 8, 128, 65536),
    "phi-3.5-mini": Known("microsoft/Phi-3.5-mini-instruct", 32, 32, 96, 131072),
    "phi-4": Known("microsoft/phi-4", 40, 10, 128, 16384),
    "phi-4-mini": Known("microsoft/Phi-4-mini-instruct", 24, 8, 128, 131072),
    "gpt-oss-20b": Known("openai/gpt-oss-20b", 64, 8, 64, 131072, 128, True),
    "gpt-oss-120b": Known("openai/gpt-oss-120b", 64, 8, 64, 131072, 128, True),
    "smollm2-135m": Known("HuggingFaceTB/SmolLM2-135M", 9, 3, 64, 8192),
    "smollm2-360m": Known("HuggingFaceTB/SmolLM2-360M", 15, 5, 64, 8192),
    "smollm2-1.7b": Known("HuggingFaceTB/SmolLM2-1.7B", 32, 32, 64, 8192),
    "falcon3-7b": Known("tiiuae/Falcon3-7B-Base", 12, 4, 256, 32768),
    "olmo-2-7b": Known("allenai/OLMo-2-1124-7B", 32, 32, 128, 4096),
    "olmo-2-13b": Known("allenai/OLMo-2-1124-13B", 40, 40, 128, 4096),
}


def known(name: str) -> Model:
    """The built-in model of this name; bfloat16, which is what TPUs serve.

    Raises:
      KeyError: there is none.
    """
    line = KNOWN[name]
    layers = "some layers" if line.some else "all layers"
    return Model(
        name=name,
        attentions=(
            Attention(
                line.num_q_heads,
                line.num_kv_heads,
                line.head_dim,
                window=None if line.some else line.window,
                some_window=line.window if line.some else None,
                soft_cap=line.soft_cap,
            ),
        ),
        dtype="bfloat16",
        max_model_len=line.max_model_len,
        notes=(window_note(line.window, layers),) if line.window else (),
        source=line.source,
    )


def _tuned_from(wanted: str) -> str | None:
    """The built-in model that a name, or an OWNER/NAME, adds words to, as tuned and quantized ones do."""
    if not re.fullmatch(r"([\w-][\w.-]*/)?[\w.-]+", wanted):  # a path or a URL
        return None

    def bare(name: str) -> str:
        words = name.rpartition("/")[2].split("-")
        return "-".join(word for word in words if not _ADDED.fullmatch(word))

    return next((name for name in KNOWN if bare(name) == bare(wanted)), None)


def find(text: str) -> Model:
    """The model that a --model names: a config.json, a folder with one, a built-in name or its repository.

    Raises:
      UsageError: it is none of these, or its config.json cannot be used.
    """
    if not text.strip():
        raise UsageError(f"--model {text!r} is empty: name a config.json, or a built-in model ({LIST_THEM})")
    path = Path(text)
    try:
        if path.is_file() or (path / "config.json").is_file():
            return read_config(path)
        there = path.exists()
    except (OSError, ValueError):  # such as a name that is too long
        there = False
    wanted = text.strip().lower()
    repositories = {line.source.lower(): name for name, line in KNOWN.items()}
    name = repositories.get(wanted, wanted)
    if name in KNOWN:
        return known(name)
    if not there and (untuned := _tuned_from(wanted)):
        model = known(untuned)
        note = f"{printable(text)} is taken to have the heads of {untuned}; its longest length may be another"
        return dataclasses.replace(model, notes=(note, *model.notes))
    shown = text if len(text) <= 120 else text[:120] + "..."
    if there:
        if path.is_dir():
            raise UsageError(f"--model {shown!r} is a folder without a config.json: name the file")
        return read_config(path)  # a pipe or a device, which it refuses
    if "://" in text:
        raise UsageError(
            f"--model {shown!r} is a URL, and nothing is downloaded: save its config.json and name that file"
        )
    if text.endswith(".json"):
        raise UsageError(f"--model {shown!r} does not exist: name a config.json, or a built-in model")
    last = wanted.rpartition("/")[2][:80]
    near = difflib.get_close_matches(last, KNOWN, n=3, cutoff=0.5)
    like = f"; near it: {', '.join(near)}" if near else ""
    raise UsageError(
        f"--model {shown!r} is neither a file nor a built-in model ({LIST_THEM}{like}); nothing is "
        "downloaded: save the config.json of its Hugging Face repository and name that file"
    )
