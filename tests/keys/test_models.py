"""Models to heads: config.json files in the shapes that real models have, and broken ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import UsageError
from autotune.keys.builtin_models import KNOWN, find, known
from autotune.keys.hf_config import parse_config, read_config
from autotune.keys.models import Attention, Model, per_chip, recommended_page_size

CONFIGS = Path(__file__).parents[1] / "data" / "configs"

# By hand: (query heads, KV heads, head_dim, window of all layers), longest length.
EXPECTED: dict[str, tuple[list[tuple[int, int, int, int | None]], int | None]] = {
    "llama-3.1-8b": ([(32, 8, 128, None)], 131072),
    "llama-2-7b": ([(32, 32, 128, None)], 4096),
    "qwen2.5-7b-instruct": ([(28, 4, 128, None)], 32768),
    "qwen3-30b-a3b": ([(32, 4, 128, None)], 40960),
    "gemma-3-12b-it": ([(16, 8, 256, None)], 131072),
    "gemma-2-9b": ([(16, 8, 256, None)], 8192),
    "gemma-4-31b": ([(32, 16, 256, 1024), (32, 4, 512, None)], 262144),
    "mistral-7b-v0.1": ([(32, 8, 128, 4096)], 32768),
    "phi-4": ([(40, 10, 128, None)], 16384),
    "phi-3.5-mini": ([(32, 32, 96, None)], 131072),
    "gpt-oss-20b": ([(64, 8, 64, None)], 131072),
    "falcon-7b": ([(71, 1, 64, None)], None),
}
# What a note of each must say; the others have none.
NOTES = {
    "llama-2-7b": ["its dtype is float16"],
    "gemma-3-12b-it": ["some layers see a window of 1024"],
    "gemma-2-9b": ["some layers see a window of 4096", "--soft-cap 50", "its dtype is float32"],
    "gemma-4-31b": ["the windowed layers see a window of 1024"],
    "mistral-7b-v0.1": ["all layers see a window of 4096 tokens"],
    "gpt-oss-20b": ["some layers see a window of 128", "sinks"],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_real_shapes_of_config_json(name: str) -> None:
    model = read_config(CONFIGS / f"{name}.json")
    attentions, longest = EXPECTED[name]
    assert [tuple(attention)[:4] for attention in model.attentions] == attentions
    assert (model.name, model.dtype, model.max_model_len) == (name, "bfloat16", longest)
    wanted = NOTES.get(name, [])
    assert len(model.notes) == len(wanted)
    for note, part in zip(model.notes, wanted, strict=True):
        assert part in note


def test_windows_of_some_layers_and_soft_caps_are_known() -> None:
    (gemma_2,) = read_config(CONFIGS / "gemma-2-9b.json").attentions
    assert (gemma_2.window, gemma_2.some_window, gemma_2.soft_cap) == (None, 4096, 50.0)
    assert known("gemma-2-9b").attentions[0].some_window == 4096
    (mistral,) = read_config(CONFIGS / "mistral-7b-v0.1.json").attentions
    assert (mistral.window, mistral.some_window, mistral.soft_cap) == (4096, None, None)
    assert [a.some_window for a in read_config(CONFIGS / "gemma-4-31b.json").attentions] == [None, None]


def test_multi_head_latent_attention_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match=r"kv_lora_rank=512 means multi-head latent attention \(MLA\)"):
        read_config(CONFIGS / "deepseek-v3.json")


def test_every_file_is_expected() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == {*EXPECTED, "deepseek-v3"}


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "gemma-2-9b", "phi-4", "gpt-oss-20b"])
def test_the_built_in_line_of_a_model_is_what_its_config_says(name: str) -> None:
    own, built_in = read_config(CONFIGS / f"{name}.json"), known(name)
    assert built_in.attentions == own.attentions
    assert built_in.max_model_len == own.max_model_len
    windows = [note for note in own.notes if "window" in note]
    assert list(built_in.notes) == windows


def test_built_in_models_are_ones_that_a_config_could_describe() -> None:
    assert len(KNOWN) >= 36
    assert len({line.source for line in KNOWN.values()}) == len(KNOWN)
    for name, line in KNOWN.items():
        assert name == name.lower()
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", line.source)
        assert line.num_q_heads % line.num_kv_heads == 0
        assert line.head_dim in (64, 96, 128, 256)
        assert line.window is None or line.window < line.max_model_len


def config(**changes: Any) -> dict[str, Any]:
    fields = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    fields.update(changes)
    return {name: value for name, value in fields.items() if value != "GONE"}


BROKEN: list[tuple[Any, str]] = [
    ([], "holds an object {...}, and this is a list"),
    ("text", "this is a string"),
    (None, "this is null"),
    (7, "this is a number"),
    ({}, "num_attention_heads is missing"),
    (config(num_attention_heads="GONE"), "num_attention_heads is missing: name the config.json of the model"),
    (config(num_attention_heads="32"), 'num_attention_heads="32" must be a whole number, without quotes'),
    (config(num_attention_heads=32.5), "num_attention_heads=32.5 must be a whole number"),
    (config(num_attention_heads=True), "num_attention_heads=true must be a whole number"),
    (config(num_attention_heads=0), "num_attention_heads=0 must be within 1 and 65536"),
    (config(num_attention_heads=-4), "num_attention_heads=-4 must be within"),
    (config(num_attention_heads=10**30), "num_attention_heads=a huge number must be within"),
    (config(num_attention_heads={"a": 1}), "must be a whole number"),
    (config(num_key_value_heads=[8, 4, 8]), "num_key_value_heads differs by layer ([8, 4, 8])"),
    (config(num_key_value_heads=7), "num_attention_heads=32 is no multiple of num_key_value_heads=7"),
    (config(hidden_size="GONE"), "head_dim is missing"),
    (config(hidden_size=4097), "hidden_size=4097 is no multiple of num_attention_heads=32: add head_dim"),
    (config(head_dim=float("nan")), "head_dim=NaN must be a whole number"),
    (config(max_position_embeddings="128k"), 'max_position_embeddings="128k" must be a whole number'),
    (config(torch_dtype=16), 'dtype=16 must be a name, such as "bfloat16"'),
    (config(model_type="bert"), "is an encoder"),
    (config(is_encoder_decoder=True), "the kernel is for decoders"),
    (config(alibi=True), "the kernel adds no such bias"),
    (config(attn_config={"alibi": True}), "the kernel adds no such bias"),
    (config(model_type="bloom"), "has ALiBi"),
    (config(text_config={"num_attention_heads": "x"}), 'num_attention_heads="x" must be'),
]


@pytest.mark.parametrize(("value", "said"), BROKEN, ids=lambda value: str(value)[:40])
def test_a_broken_config_is_one_clear_line(value: Any, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_config(value, "mine", "mine/config.json")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("mine/config.json: ")


FILES: list[tuple[bytes, str]] = [
    (b"", "is empty: name a config.json"),
    (b'{"num_attention_heads": 3', "is not JSON, line 1"),
    (b"\xff\xfe\x00", "is not UTF-8 text"),
    (b"[" * 200_000, "is nested too deeply"),
    (b'{"num_attention_heads": ' + b"9" * 5000 + b"}", "is not JSON"),
    (b'{"a": 1, "a": NaN, "b": Infinity}', "num_attention_heads is missing"),
]


@pytest.mark.parametrize(("data", "said"), FILES, ids=[said for _, said in FILES])
def test_a_broken_file_is_one_clear_line(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(UsageError) as raised:
        find(str(path))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"torch_dtype": "float8_e4m3fn"}, "its dtype"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "all layers see a window of 4096"),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 8}, "some layers see"),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 32}, ""),
        ({"sliding_window": 4096, "use_sliding_window": False}, ""),
        ({"sliding_window": 131072}, ""),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of other kinds (linear_attention)"),
    ],
)
def test_what_a_key_does_not_hold_is_said(changes: dict[str, Any], said: str) -> None:
    model = parse_config(config(**changes), "mine", "mine")
    assert model.dtype == "bfloat16"
    assert len(model.notes) == bool(said)
    assert said in "".join(model.notes)


def test_a_file_of_100_mb_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(100_000_000)
    with pytest.raises(UsageError, match="is larger than 1 MiB"):
        find(str(tmp_path))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(
    [
        *config(),
        "head_dim",
        "sliding_window",
        "layer_types",
        "text_config",
        "multi_query",
        "dtype",
        "num_kv_heads",
    ]
)


@given(st.dictionaries(fields, values, max_size=6))
@settings(deadline=None)
def test_no_config_is_a_traceback(changes: dict[str, Any]) -> None:
    """Whatever the fields hold, there is a model with whole groups of heads, or one line."""
    try:
        model = parse_config({**config(), **changes}, "mine", "mine")
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        for attention in model.attentions:
            assert attention.num_q_heads % attention.num_kv_heads == 0
            assert attention.head_dim > 0


def test_a_folder_and_a_name_and_a_repository(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text((CONFIGS / "llama-3.1-8b.json").read_text())
    assert find(str(folder)).name == "my-llama"
    for tuned in ("llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct", "x/Meta-Llama-3.1-8B-it-FP8"):
        model = find(tuned)
        assert (model.name, model.attentions) == ("llama-3.1-8b", known("llama-3.1-8b").attentions)
        assert model.notes[0] == (
            f"{tuned} is taken to have the heads of llama-3.1-8b; its longest length may be another"
        )
    assert find("mistralai/Mistral-7B-Instruct-v0.3").name == "mistral-7b-v0.3"
    assert find("gemma-3-12b").name == find("google/gemma-3-12b-it").name == "gemma-3-12b"
    assert find("Llama-3.1-8B") == find("meta-llama/Llama-3.1-8B") == known("llama-3.1-8b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lama-3.1-8b", "near it: llama-3.1-8b"),
        ("Qwen/Qwen3-9B", "near it: qwen3-8b"),
        ("Qwen/Qwen3-9B", "nothing is downloaded"),
        ("https://huggingface.co/x/y", "is a URL, and nothing is downloaded"),
        ("https://huggingface.co/x/llama-3.1-8b-instruct", "is a URL, and nothing is downloaded"),
        ("./llama-3.1-8b-instruct", "is neither a file nor a built-in model"),
        ("missing/config.json", "does not exist"),
        ("x" * 5000, "is neither a file nor a built-in model"),
        ("a\0b", "is neither a file nor a built-in model"),
        ("", "is empty: name a config.json"),
        ("/dev/null", "is no file"),
        ("/", "is a folder without a config.json"),
    ],
)
def test_a_model_that_is_not_there(text: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        find(text)
    assert said in str(raised.value)
    assert len(str(raised.value)) < 500


def heads(q_heads: int, kv_heads: int) -> tuple[Model, Attention]:
    attention = Attention(q_heads, kv_heads, 128)
    model = Model(
        name="m", attentions=(attention,), dtype="bfloat16", max_model_len=None, notes=(), source="s"
    )
    return model, attention


def test_heads_are_divided_as_serving_stacks_do() -> None:
    assert [per_chip(*heads(32, 8), tp) for tp in (1, 2, 4, 8, 16, 32)] == [
        (32, 8),
        (16, 4),
        (8, 2),
        (4, 1),
        (2, 1),
        (1, 1),
    ]
    assert per_chip(*heads(12, 6), 12) == (1, 1)
    with pytest.raises(UsageError, match=r"32 query heads cannot be divided among --tp 3 chips$"):
        per_chip(*heads(32, 8), 3)
    with pytest.raises(UsageError, match=r"10 KV heads can be neither divided among --tp 8 .* as many$"):
        per_chip(*heads(40, 10), 8)


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 64))
@settings(deadline=None)
def test_every_chip_has_whole_groups_and_no_head_is_lost(kv_heads: int, group: int, tp: int) -> None:
    try:
        q, kv = per_chip(*heads(kv_heads * group, kv_heads), tp)
    except UsageError:
        return
    assert q % kv == 0
    assert q * tp == kv_heads * group
    assert kv * tp == max(kv_heads, tp)


@pytest.mark.parametrize(
    ("length", "seqs", "page"),
    [
        (128, 128, 16),
        (1024, 128, 64),
        (1280, 128, 128),
        (2048, 128, 128),
        (4096, 128, 256),
        (8192, 128, 256),
        (8193, 128, 16),
        (16384, 128, 16),
        (32768, 128, 32),  # 1,024 pages a sequence at most
        (131072, 128, 128),
        (131072, 256, 256),
        (131072, 65536, 65536),
    ],
)
def test_page_sizes_that_vllm_would_take(length: int, seqs: int, page: int) -> None:
    assert recommended_page_size(length, seqs) == page


def test_a_field_nested_as_deep_as_json_reads_is_one_line(tmp_path: Path) -> None:
    """Python writes JSON no deeper than it reads it, and a message repeats the value."""
    path = tmp_path / "config.json"
    for depth in range(900, 1010):
        path.write_text('{"num_attention_heads": ' + "[" * depth + "]" * depth + "}")
        with pytest.raises(UsageError, match=r"nested|differs by layer"):
            read_config(path)
