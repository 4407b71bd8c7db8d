"""What reads files and words of others, each given one hostile input; with sound inputs to start from."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from autotune.errors import AutotuneError
from autotune.timing.profile import TraceError
from autotune.tpu.schedule import ListingError
from tests.factories import TOOLS
from tests.fuzz import rows
from tests.fuzz.guard import LONGEST_MESSAGE, Wrong
from tests.fuzz.strategies import made, mutated, profiles, sound_profiles

DATA = Path(__file__).parents[1] / "data"


def _file(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def _require(condition: object, what: str) -> None:
    if not condition:
        raise Wrong(what)


# Tables.


def table_seeds() -> list[bytes]:
    from autotune.kernel.problem import BlockSizes, TableKey
    from autotune.tables import render, source
    from autotune.tables.dialects import INFERENCE, JAX, SGLANG
    from autotune.tables.load import published
    from autotune.tables.table import Table

    theirs = {name: dict(list(part.items())[:6]) for name, part in published().devices.items()}
    seeds = [source.render(Table(dialect=JAX, devices=theirs, provenance={"source": "published"}))]
    for name, dialect in (("tpu_inference_v3", INFERENCE), ("sglang_jax_v1", SGLANG)):
        devices: dict[str, Any] = {}
        published_rows = json.loads((DATA / "published" / f"{name}.json").read_text())["rows"]
        for device, *key, blocks in published_rows[:: len(published_rows) // 12]:
            devices.setdefault(device, {})[dialect.key_type(*key)] = BlockSizes(*blocks)
        seeds.append(source.render(Table(dialect=dialect, devices=devices, provenance={"rows": 12})))
    key = TableKey("bfloat16", "bfloat16", 8, 2, 128, 128, 1024, 2048)
    emitted = {"v5e": {key: BlockSizes(8, 32)}, "v6e": {key: BlockSizes(16, 64)}}
    seeds.append(render.render(emitted, "modelled", ["by hand"], 100 << 20))
    # Without what stands around it, so that more of the changes meet the literal.
    seeds += [text[text.index("TUNED_BLOCK_SIZES =") :] for text in list(seeds)]
    return [text.encode() for text in seeds]


def table(data: bytes, folder: Path) -> None:
    from autotune.analysis import check
    from autotune.cli.render import check as check_formats
    from autotune.tables import source

    table = source.read_file(_file(folder, "table.py", data))
    report = check.Report(table, list(check.static_findings(table)))
    for form in ("text", "markdown", "json", "github"):
        text = check_formats.render(report, form)
        _require(text.replace("\n", "").isprintable(), f"{form} of a check with escapes")
    again = source.read_text(source.render(table), "x")
    _require(len(again) == len(table) or '"' in str(table.devices), "rows were lost in writing and reading")


# What is typed.


def shape_seeds() -> list[bytes]:
    six = "head_dim=128,page_size=128,max_num_batched_tokens=1024,max_model_len=2048"
    heads = ((8, 2), (12, 6), (28, 4), (64, 8), (10, 5), (3, 3), (32, 32))
    return [f"q_heads={q},kv_heads={kv},{six}".encode() for q, kv in heads] + [
        f"q_heads=8,kv_heads=2,{six},q_dtype=float32,kv_dtype=int8".encode()
    ]


def _typed(data: bytes) -> str:
    """As an argument of a process: no NUL, and what is not UTF-8 as Python makes it of argv."""
    return data.replace(b"\0", b"").decode("utf-8", "surrogateescape")


def shape(data: bytes, folder: Path) -> None:
    from autotune.cli.options import parse_shape
    from autotune.keys import resolve

    asked = resolve.Asked(parse_shape(_typed(data), 128), "--shape")
    [padded] = resolve.resolve([asked], pad_heads=True)
    _require(resolve.canonical([(padded.key, "", "")])[0][0].key == padded.key, "a key that is not canonical")
    resolve.resolve([asked])


WORDS = (
    b"64MiB",
    b"0.5%",
    b"4,8,16",
    b"1e3",
    b"s3://bucket/dir?region=eu-west-1",
    b"gs://b/d",
    b"100M",
    b"1.5G",
)


def words(data: bytes, folder: Path) -> None:
    import click

    from autotune.cli import options
    from autotune.io import folders

    text = _typed(data)
    kinds: tuple[click.ParamType[Any], ...] = (
        options.Size(),
        options.Percent(),
        options.Numbers(),
        options.Seconds(),
    )
    for kind in kinds:
        with contextlib.suppress(click.BadParameter):
            kind.convert(text, None, None)
    with contextlib.suppress(AutotuneError):
        str(folders.parse(text))


def names(data: bytes, folder: Path) -> None:
    from autotune.keys import builtin_models
    from autotune.tables import load

    text = _typed(data)
    if "://" in text:  # asks the network
        return
    if zlib.crc32(data) % 8 == 0 or not text.startswith(("jax", "v")):  # which are large tables
        with contextlib.suppress(AutotuneError):
            load(text)
    builtin_models.find(text)


# Files of models, keys, batches and constants.


def config_seeds() -> list[bytes]:
    return [path.read_bytes() for path in sorted((DATA / "configs").glob("*.json"))]


CONFIG_WORDS = (
    *(
        b'"text_config": {',
        b'"layer_types": ["x"],',
        b'"sliding_window": 4096,',
        b'"model_type": "gemma3_text",',
    ),
    *(b'"attn_logit_softcapping": 50.0,', b'"use_sliding_window": true,', b'"max_window_layers": 28,'),
    *(b'"global_head_dim": 512,', b'"dtype": "auto",', b'"multi_query": true,', b'"num_hidden_layers": 28,'),
    *(b'"head_dim": 128,', b'"num_attention_heads": 32,', b'"hidden_size": 4096,', b'"alibi": true,'),
)


def config(data: bytes, folder: Path) -> None:
    from autotune.keys import resolve
    from autotune.keys.hf_config import read_config

    model = read_config(_file(folder, "config.json", data))
    for note in model.notes:
        _require(
            note.isprintable() and len(note) < LONGEST_MESSAGE,
            f"a note that is no short line: {note[:200]!r}",
        )
    entries = resolve.resolve(resolve.of_model(model, resolve.Serving()), pad_heads=True)
    for line in resolve.listing(model, entries, recommended=True):
        _require(line.isprintable(), f"a line with escapes: {line[:200]!r}")


def key_seeds() -> list[bytes]:
    from autotune.kernel.problem import TableKey
    from autotune.keys import files

    keys = {
        TableKey("bfloat16", kv, q, 2, 128, 128, 1024, length): "llama-3.1-8b tp=4"
        for kv in ("bfloat16", "int8")
        for q, length in ((8, 2048), (16, 4096))
    }
    return [files.render(keys, form).encode() for form in ("csv", "json")]


def keys(data: bytes, folder: Path) -> None:
    from autotune.keys import files, resolve

    entries, notes = resolve.canonical(files.read(str(_file(folder, "keys", data))))
    for note in notes:
        _require(note.isprintable(), f"a note with escapes: {note[:200]!r}")
    for form in files.FORMATS:
        files.render(resolve.merged(entries), form)


BATCHES = (b"q_len,kv_len\n1,128\n1,2048\n256,512\n", b"# a trace\n1,1\n7,9 # x\n\n2,2\n", b"1,1\n" * 40)


def batch(data: bytes, folder: Path) -> None:
    from autotune.kernel import workload
    from autotune.kernel.problem import BlockSizes, Problem
    from autotune.model.cost import loop_counts

    problem = Problem(
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=128,
        page_size=128,
        max_num_batched_tokens=1024,
        pages_per_seq=16,
    )
    batch = workload.from_csv(str(_file(folder, "batch.csv", data)))
    if batch.misfit(problem) is None:
        counts = loop_counts.__wrapped__(problem, BlockSizes(4, 32), batch)
        _require(min(counts) > 0, f"loops that never run: {counts}")
        workload.place(problem, batch, 1024)


def calibration_seeds() -> list[bytes]:
    from autotune.model.cost import CALIBRATIONS

    entry = {
        **dataclasses.asdict(CALIBRATIONS["v6e"]),
        "uncertainty": {"stall": 0.1},
        "error": 0.02,
        "rows": 40,
    }
    return [
        json.dumps({"TPU v6 lite": entry}, indent=2).encode(),
        json.dumps({"TPU v4": entry}).encode(),
        b"{}",
    ]


def calibration(data: bytes, folder: Path) -> None:
    from autotune.model import calibrate
    from autotune.tpu import generations

    os.environ["XDG_CONFIG_HOME"] = str(folder)
    (folder / "autotune").mkdir(exist_ok=True)
    _file(folder / "autotune", "calibration.json", data)
    calibration = calibrate.current(generations.by_name("v6e"))
    _require(calibration.origin.isprintable(), "an origin with escapes")


# What the compiler and the profiler write.

# A few lines of each kind; the first is the form alone.
LISTINGS = (
    b"     0   :  { %s1 = smov 0  }\n   0x1   : > { %v2 = vadd.f32 %v1, %v0 }\n  0x2 LB: >> { nop }\n"
    b"   0x3 PF: >>> { nop ;; nop }\n#allocation2 [shape = 'u8[1048576]{0}', space=vmem, size = 0x100000, "
    b"offset = 0x20000, scoped]\n",
    b"// [Enable stack traces via -xla_jf_debug_level=2]\n$region0: #{ragged_paged_attention_kernel.1}\n"
    b"  #allocation8 [shape = 'u8[512]{0}', space=smem, size = 0x200, offset = 0, scoped, tag = 'first']\n"
    b"  #allocation2 [shape = 'bf16[2,8,64,2,128]{4,3,2,1,0:T(2,128)(2,1)}', space=vmem, size = 0x80000, "
    b"offset = 0, scoped, tag = 'scratch operand']\n"
    b"  #allocation3 [shape = 's32[2]{0}', space=sflag, size = 0x8, offset = 0, scoped, tag = 'scratch']\n"
    b"  %s9477_s3 = inlined_call_operand.vmem [shape: s32[2], index: 3, kind: input] /* operand 3 */\n"
    b"= control target key start\nLH: loop header\n= control target key end\n\n"
    b"   0x1   :  { %9711 = sst [smem:[#allocation156_spill]] %s9473_s5  ;;  %s14_s29 = sshll.u32 %s9, 4 }\n"
    b"   0xc   :  { %p5267_p6 = scmp.lt.s32.totalorder %s21_s9, %s21_s9 }\nhlo: ragged.1\n */ }\n",
)
LISTING_WORDS = (
    *(
        b"#allocation1",
        b"space=vmem",
        b"space=smem",
        b"size = 0x1000, offset = 0x20000, scoped",
        b" >> ",
        b"0x1f LB: >>",
    ),
    *(b"#allocation" + b"1" * 5000, b">" * 2000, b"0x" + b"f" * 40, b"shape = '", b"space=sflag"),
)


def listing(data: bytes, folder: Path) -> None:
    from autotune.tpu import schedule

    path = _file(folder, "listing.txt", data)
    with contextlib.suppress(schedule.ListingError):
        cycles = schedule.parse_bundles(path)
        _require(len(cycles) <= 64 and max(cycles) < 2**40, f"a schedule of {len(cycles)} depths")
    vmem, smem = schedule.parse_allocations(path)
    _require(max(vmem, smem) < 2**50, f"{vmem} bytes of VMEM, {smem} of SMEM")


def profile(data: bytes, folder: Path) -> None:
    from autotune.timing.profile import runs

    names = ("rpa_p8_q32", "rpa_p16_q32")
    for run in runs(data, "kernel", names):
        _require(run.name in names and run.seconds >= 0, f"{run}")


# The data set, and the store of verdicts.


def _rows_folder(data: bytes, folder: Path) -> Path:
    part = folder / "rows"
    part.mkdir(exist_ok=True)
    _file(part, "rows-1.parquet", data)
    return part


def row_files(data: bytes, folder: Path) -> None:
    from autotune.results import dataset, schema

    dataset.tables(_rows_folder(data, folder), schema.arrow())


def row_values(data: bytes, folder: Path) -> None:
    """One of the things that commands make of a folder of rows, by the input's own sum."""
    from autotune.analysis import overview
    from autotune.cli.render import overview as show_formats
    from autotune.results import dataset, maintenance, winners

    part = _rows_folder(data, folder)
    match zlib.crc32(data) % 5:
        case 0:
            scored = winners.scores(dataset.read(part))
            winners.choose(scored)
            _require((scored["score"] >= 0.999).all(), "a candidate better than the best")
        case 1:
            json.dumps(maintenance.inventory(part))
        case 2:
            json.loads(maintenance.exported(part, "json"))
        case 3:
            maintenance.exported(part, "csv")
        case 4:
            seen = overview.overview(part)
            for form in ("text", "markdown"):
                text = show_formats.render(seen, form)
                _require(text.replace("\n", "").isprintable(), "a screen with escapes")
            json.loads(show_formats.render(seen, "json"))


def note_seeds() -> list[bytes]:
    keys = [
        ["bfloat16", "bfloat16", 8, 2, 128, 128, 1024, 2048],
        ["bfloat16", "int8", 4, 1, 128, 64, 512, 512],
    ]
    return [json.dumps({"target": "v6e", "time": "2026-11-30 10:00", "keys": keys}).encode()]


def note(data: bytes, folder: Path) -> None:
    from autotune.results import unfinished

    _file(folder, ".sweep-1-2.json", data)
    for begun in unfinished.read(folder):
        _require(begun.time.isprintable() and begun.target.isprintable(), f"a note with escapes: {begun}")


def store_seeds() -> list[bytes]:
    from autotune.compile.cache import Store

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "compiles.sqlite"
        store = Store(path)
        for pages in (4, 8):
            store.put("v6e", TOOLS, rows.program(pages), rows.verdict())
        return [path.read_bytes()]


def store(data: bytes, folder: Path) -> None:
    from autotune.compile.cache import Store

    path = _file(folder, "compiles.sqlite", data)
    wanted = [rows.program(4), rows.program(8)]
    for verdict in Store(path).get("v6e", TOOLS, wanted).values():
        rows.as_row(verdict)
    for line in Store(path).lines():
        _require(isinstance(line.verdicts, int), f"{line}")
    Store(path).put("v6e", TOOLS, rows.program(16), rows.verdict())
    path.with_name(path.name + "-journal").unlink(missing_ok=True)


def verdict_seeds() -> list[bytes]:
    from autotune.tpu.compiler import Compiled

    failed = Compiled(
        status="vmem_oom", needed_bytes=1 << 27, limit_bytes=1 << 26, error="too large", seconds=2.0
    )
    return [json.dumps(dataclasses.asdict(verdict)).encode() for verdict in (rows.verdict(), failed)]


def verdict(data: bytes, folder: Path) -> None:
    from autotune.compile import cache as store

    verdict = store._decoded(data.decode("utf-8", "replace"))
    if verdict is not None:
        rows.as_row(verdict)


@dataclasses.dataclass(frozen=True)
class Reader:
    """read: gives an input to the reader, in a folder of its own; raises what the reader raises. seeds: sound
    inputs. inputs: hostile ones. refusals: exceptions that are its documented answer. one_in: of the inputs
    that others get, for a slow one."""

    read: Callable[[bytes, Path], object]
    seeds: Callable[[], Sequence[bytes]]
    inputs: Callable[[], st.SearchStrategy[bytes]]
    refusals: tuple[type[Exception], ...] = (AutotuneError,)
    one_in: int = 1


def _changed(
    read: Callable[[bytes, Path], object],
    seeds: Callable[[], Sequence[bytes]],
    *tokens: bytes,
    refusals: tuple[type[Exception], ...] = (AutotuneError,),
) -> Reader:
    return Reader(read, seeds, lambda: mutated(seeds(), tokens), refusals)


NAMES = (b"jax:TPU v6", b"v6e", b"llama-3.1-8b", b"/tmp/x.py:v5e")
READERS = {
    "table": _changed(table, table_seeds, b"TUNED_BLOCK_SIZES = {", b"PROVENANCE = {", b"'TPU v6'", b"None"),
    "config": _changed(config, config_seeds, *CONFIG_WORDS),
    "keys": _changed(keys, key_seeds, b"bfloat16", b"origin", b"max_model_len", b"[]", b"{}"),
    "shape": _changed(shape, shape_seeds, b"q_heads=", b"kv_heads=", b"page_size=", b"q_dtype="),
    "words": _changed(words, lambda: WORDS, b"%", b"MiB", b"?region=", b"s3://", b"@", b".."),
    "names": _changed(names, lambda: NAMES, b":", b"/"),
    "batch": _changed(batch, lambda: BATCHES, b"q_len,kv_len", b"1,1\n", b"#"),
    "calibration": _changed(calibration, calibration_seeds, b'"TPU v6 lite": ', b'"origin": '),
    "listing": _changed(listing, lambda: LISTINGS, *LISTING_WORDS, refusals=(ListingError,)),
    "profile": Reader(profile, sound_profiles, profiles, (TraceError,)),
    "row-files": _changed(row_files, rows.files, b"PAR1", b"ARROW:schema"),
    "row-values": Reader(row_values, rows.files, lambda: made(rows.wild), one_in=5),
    "note": _changed(note, note_seeds, b'"target": [', b'"keys": [', b'"time": '),
    "store": _changed(store, store_seeds, b"SQLite format 3\0", b"CREATE VIEW verdicts AS SELECT 1"),
    "verdict": _changed(verdict, verdict_seeds, b'"schedule": ', b'"status": "ok"', refusals=()),
}
