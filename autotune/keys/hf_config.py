"""A Hugging Face config.json to a Model: other people's files, so parsed with bounds and never trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import UsageError
from autotune.io.terminal import printable
from autotune.kernel.problem import SETTING_RANGES
from autotune.keys.models import Attention, Model, window_note

MAX_BYTES = 1 << 20
# Where models with several parts keep the part that generates text.
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
MAX_NESTED = 4

_Q_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_DTYPES = ("dtype", "torch_dtype")

# Fields that files leave out where they have the default of their model type: from the configuration classes
# of the transformers library (src/transformers/models/*/configuration_*.py).
_GEMMA = {"head_dim": 256}
_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma": _GEMMA,
    "gemma2": {**_GEMMA, "sliding_window": 4096},
    "gemma3_text": _GEMMA3,
    "gemma4_text": {**_GEMMA3, "sliding_window": 512, "global_head_dim": 512},
    "gpt_oss": {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128},
    "llama4_text": {"head_dim": 128, "num_key_value_heads": 8, "num_attention_heads": 40},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
    "qwen3": {"head_dim": 128},
}
# Model types of which only every other layer, or fewer, has the window, where the file does not list them.
_SOME_WINDOWED = ("gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "cohere2", "olmo3", "exaone4")
_ENCODERS = ("bert", "roberta", "xlm-roberta", "deberta-v2", "albert", "electra", "modernbert", "nomic_bert")


def read_config(path: Path) -> Model:
    """The model of a config.json, or of a folder that has one.

    Raises:
      UsageError: it cannot be read, is over 1 MiB, is no JSON object, or no model that the kernel serves.
    """
    if path.is_dir():
        path = path / "config.json"
    where = repr(str(path))
    if not path.is_file():  # reading a pipe could wait for ever
        raise UsageError(f"model file {where} is no file")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"model file {where} cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"model file {where} is larger than 1 MiB: a config.json is some KiB")
    if not data.strip():
        raise UsageError(f"model file {where} is empty: name a config.json")
    try:
        config = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise UsageError(f"model file {where} is not UTF-8 text: name a config.json") from None
    except RecursionError:
        raise UsageError(f"model file {where} is nested too deeply for a config.json") from None
    except ValueError as error:
        said = f", line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else ""
        raise UsageError(f"model file {where} is not JSON{said}") from None
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return parse_config(config, name or path.stem, str(path))


def parse_config(config: object, name: str, source: str) -> Model:
    """The model that a parsed config.json describes.

    Raises:
      UsageError: a field that is needed is missing or no number, or the kernel does not serve such a model;
        one line with the field, its value and what to do.
    """
    if not isinstance(config, dict):
        raise UsageError(f"{source}: a config.json holds an object {{...}}, and this is {_kind(config)}")
    fields = _Fields(_text_part(config), source)
    _refuse(fields)
    q_heads = fields.number(*_Q_HEADS)
    if q_heads is None:
        raise fields.missing(*_Q_HEADS)
    kv_heads = _kv_heads(fields, q_heads)
    head_dim = _head_dim(fields, q_heads)
    attentions, notes = _attentions(fields, Attention(q_heads, kv_heads, head_dim))
    for attention in attentions:
        if attention.num_q_heads % attention.num_kv_heads:
            raise UsageError(
                f"{source}: num_attention_heads={attention.num_q_heads} is no multiple of "
                f"num_key_value_heads={attention.num_kv_heads}: grouped-query attention needs whole groups"
            )
    dtype, dtype_notes = _dtype(fields)
    return Model(
        name=name,
        attentions=attentions,
        dtype=dtype,
        max_model_len=fields.number(*_LENGTH, most=2**31 - 1),
        notes=(*notes, *dtype_notes),
        source=source,
    )


class _Fields:
    """A config's fields, or the defaults of its model type; numbers are checked as they are asked for."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        kind = values.get("model_type")
        self.model_type = kind if isinstance(kind, str) else ""
        self._values = values
        self._defaults = _DEFAULTS.get(self.model_type, {})
        self.source = source

    def get(self, name: str) -> Any:
        """Its value, or its default; None if it has neither, or is null."""
        value = self._values.get(name)
        return self._defaults.get(name) if name not in self._values else value

    def number(self, *names: str, most: int = 65536) -> int | None:
        """The first of these fields that is there, as a whole number of 1 to most."""
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if isinstance(value, list):
                raise UsageError(
                    f"{self.source}: {name} differs by layer ({_shown(value)}): name each layout with --shape"
                )
            if not isinstance(value, int) or isinstance(value, bool):
                hint = ", without quotes" if isinstance(value, str) else ""
                raise UsageError(f"{self.source}: {name}={_shown(value)} must be a whole number{hint}")
            if not 1 <= value <= most:
                raise UsageError(f"{self.source}: {name}={_shown(value)} must be within 1 and {most}")
            return value
        return None

    def missing(self, *names: str) -> UsageError:
        return UsageError(
            f"{self.source}: {names[0]} is missing: name the config.json of the model itself, or its layout "
            "with --shape"
        )


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The part that generates text, with what it leaves out from the parts around it, such as the dtype."""
    merged = config
    for _ in range(MAX_NESTED):
        inner = next((merged[name] for name in NESTED if isinstance(merged.get(name), dict)), None)
        if inner is None:
            break
        outside = {name: value for name, value in merged.items() if name not in NESTED}
        merged = {**outside, **inner}
    return merged


def _refuse(fields: _Fields) -> None:
    """Refuse attention that JAX's kernel does not do, with the reason."""
    if fields.get("kv_lora_rank") is not None:
        raise UsageError(
            f"{fields.source}: kv_lora_rank={_shown(fields.get('kv_lora_rank'))} means multi-head latent "
            "attention (MLA), whose cache holds one compressed vector a token; JAX's ragged paged attention "
            "is for multi- and grouped-query attention, so it has no key: use the serving stack's MLA kernel"
        )
    if fields.get("is_encoder_decoder") is True:
        raise UsageError(
            f"{fields.source}: is_encoder_decoder=true: the kernel is for decoders, whose attention is causal"
        )
    if fields.model_type in _ENCODERS:
        raise UsageError(
            f"{fields.source}: model_type={fields.model_type!r} is an encoder, which has no KV cache to page"
        )
    inner = fields.get("attn_config")  # of MPT
    if fields.get("alibi") is True or (isinstance(inner, dict) and inner.get("alibi") is True):
        raise UsageError(f"{fields.source}: alibi=true: the kernel adds no such bias, so it cannot serve it")
    if fields.model_type == "bloom":
        raise UsageError(
            f"{fields.source}: model_type='bloom' has ALiBi, a bias that the kernel does not add"
        )


def _kv_heads(fields: _Fields, q_heads: int) -> int:
    """KV heads; as many as query heads if nothing says otherwise, which is multi-head attention."""
    # Falcon says multi_query, and counts its KV heads only in the newer architecture.
    old_falcon = fields.model_type == "falcon" and fields.get("new_decoder_architecture") is not True
    if fields.get("multi_query") is True and (old_falcon or fields.model_type != "falcon"):
        return 1
    return (None if old_falcon else fields.number(*_KV_HEADS)) or q_heads


def _head_dim(fields: _Fields, q_heads: int) -> int:
    head_dim = fields.number(*_HEAD_DIM)
    if head_dim is not None:
        return head_dim
    hidden = fields.number(*_HIDDEN, most=1 << 24)
    if hidden is None:
        raise fields.missing("head_dim", *_HIDDEN)
    if hidden % q_heads:
        raise UsageError(
            f"{fields.source}: head_dim is missing, and hidden_size={hidden} is no multiple of "
            f"num_attention_heads={q_heads}: add head_dim"
        )
    return hidden // q_heads


def _attentions(fields: _Fields, usual: Attention) -> tuple[tuple[Attention, ...], list[str]]:
    """The distinct attentions of its layers, and what a key does not hold of them."""
    notes = []
    window = fields.number("sliding_window", most=2**31 - 1)
    if fields.get("use_sliding_window") is False:
        window = None
    length = fields.number(*_LENGTH, most=2**31 - 1)
    if window is not None and length is not None and window >= length:
        window = None
    types = fields.get("layer_types")
    kinds = {kind for kind in types if isinstance(kind, str)} if isinstance(types, list) else set()
    if kinds and "sliding_attention" not in kinds:
        window = None
    some = fields.model_type in _SOME_WINDOWED or len(kinds) > 1
    if fields.get("use_sliding_window") is True and not kinds:  # Qwen: the layers from this one on
        first, layers_in_all = fields.get("max_window_layers"), fields.number("num_hidden_layers")
        if isinstance(first, int) and layers_in_all is not None:
            window = None if first >= layers_in_all else window
            some = first > 0
    attentions: tuple[Attention, ...] = (
        usual._replace(window=None, some_window=window) if some else usual._replace(window=window),
    )
    global_dim = fields.number("global_head_dim")
    if global_dim is not None:  # Gemma 4, whose layers that see everything have other heads
        other_kv = fields.number("num_global_key_value_heads") if fields.get("attention_k_eq_v") else None
        global_kv = other_kv or usual.num_kv_heads
        attentions = (
            usual._replace(window=window, layers="windowed layers"),
            Attention(usual.num_q_heads, global_kv, global_dim, None, "full-attention layers"),
        )
        some = False
        layers = "the windowed layers"
    else:
        layers = "some layers" if some else "all layers"
    if window is not None:
        notes.append(window_note(window, layers))
    if fields.get("attention_chunk_size") is not None and fields.model_type == "llama4_text":
        notes.append(
            "some layers attend within chunks, which the kernel does not know; swept as if they did not"
        )
    cap = fields.get("attn_logit_softcapping")
    if isinstance(cap, (int, float)) and not isinstance(cap, bool):
        notes.append(
            f"its attention has a soft cap; a key does not hold that: sweep with --soft-cap {_shown(cap)}"
        )
        least, most = SETTING_RANGES["soft_cap"]
        if least <= abs(cap) <= most:
            attentions = tuple(attention._replace(soft_cap=float(cap)) for attention in attentions)
    if fields.model_type == "gpt_oss":
        notes.append("its attention has sinks, which JAX's kernel does not know; swept without")
    others = sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"})
    if others:
        notes.append(f"layers of other kinds ({printable(', '.join(others)[:80])}) use no such kernel")
    return attentions, notes


def _dtype(fields: _Fields) -> tuple[str, list[str]]:
    """The dtype of the activations, as served on a TPU, and a note where it is not the file's."""
    value = next((v for name in _DTYPES if (v := fields.get(name)) is not None), "bfloat16")
    text = value.removeprefix("torch.") if isinstance(value, str) else ""
    if text in ("float16", "half", "float32", "float", "auto"):
        # The kernel has no float16; vLLM serves both as bfloat16 on TPUs unless told otherwise.
        return "bfloat16", [f"its dtype is {text}; served on TPUs as bfloat16, unless --dtype says otherwise"]
    if not isinstance(value, str):
        raise UsageError(f'{fields.source}: dtype={_shown(value)} must be a name, such as "bfloat16"')
    if text == "bfloat16":
        return text, []
    return "bfloat16", [f"its dtype {_shown(text)} is not one to attend in; taken as bfloat16"]


def _kind(value: object) -> str:
    return {list: "a list", str: "a string", type(None): "null", bool: "true or false"}.get(
        type(value), "a number"
    )


def _shown(value: object) -> str:
    try:
        text = json.dumps(value) if not isinstance(value, int) or abs(value) < 10**20 else "a huge number"
    except RecursionError:  # it could be read at the depth of the reader, and no deeper
        text = "something deeply nested"
    return text if len(text) <= 40 else text[:37] + "..."
