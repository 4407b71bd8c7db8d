"""`autotune check` on JAX's own table, on the public ones, and on planted mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes

from autotune.analysis import check
from autotune.cli.render import check as check_formats
from autotune.kernel.problem import BlockSizes, Settings, TableKey
from autotune.results.scores import Score, Scoreboard
from autotune.tables import load, lookups
from autotune.tables.dialects import INFERENCE, JAX, SGLANG
from autotune.tables.source import read_text, render
from autotune.tables.table import Table
from tests.conftest import ROOT, user_environment
from tests.factories import published_rows

KEY = TableKey("bfloat16", "bfloat16", 8, 2, 128, 128, 1024, 2048)


def jax_table(rows, device="TPU v6", rule="jax-0.10"):
    return Table(
        dialect=JAX, devices={device: rows}, provenance={"lookup": rule}, rule=lookups.RULES.get(rule)
    )


def kinds(table):
    return Counter(finding.kind for finding in check.static_findings(table))


def test_half_of_jaxs_table_is_unreachable_and_each_key_has_its_replacement():
    table = load("jax")
    found = list(check.static_findings(table))
    assert kinds(table) == {"unreachable": 640, "shared-name": 1}
    for name, rows in tuned_block_sizes.TUNED_BLOCK_SIZES.items():
        # Asked of JAX: what it looks up for each row's own numbers.
        lost = {}
        for key in rows:
            asked = (
                *tuned_block_sizes.simplify_key((*key[:7], 1))[:7],
                tuned_block_sizes.next_power_of_2(key[7]),
            )
            if asked != key:
                lost[key] = asked
        assert len(lost) == 320
        mine = {f.key: f.replacement for f in found if f.device == name and f.kind == "unreachable"}
        assert mine == lost
    shared = next(f for f in found if f.kind == "shared-name")
    assert (shared.device, shared.detail["generations"]) == ("TPU v5", ["v5e", "v5p"])


@pytest.mark.parametrize(
    ("name", "dialect", "rule", "expected"),
    [
        ("tpu_inference_v3", INFERENCE, "tpu-inference-2026-01", {"unread": 1, "unreachable": 2}),
        ("tpu_inference_v3", INFERENCE, None, {}),
        ("tpu_inference_v3", INFERENCE, "tpu-inference-2025-09", {"unreachable": 3254}),
        ("sglang_jax_v1", SGLANG, "sglang-jax-2026-01", {"unread": 1}),
        ("sglang_jax_v1", SGLANG, "sglang-jax-2025-10", {"unknown-device": 2, "shared-name": 1}),
        ("sglang_jax_v1", SGLANG, None, {}),
    ],
)
def test_public_tables(name, dialect, rule, expected):
    devices, _ = published_rows(name, dialect)
    table = Table(dialect=dialect, devices=devices, rule=lookups.RULES[rule] if rule else None)
    assert kinds(table) == expected
    unread = [f.message for f in check.static_findings(table) if f.kind == "unread"]
    since = {
        "tpu-inference-2026-01": ["tpu-inference reads it no more since b2e416f06 (2026-03-19)"],
        "sglang-jax-2026-01": ["sglang-jax reads it no more since da29e8bd (2026-04-17)"],
    }
    assert unread == since.get(rule, [])


@pytest.mark.parametrize(
    ("key", "blocks", "expected"),
    [
        (KEY, (16, 32), {}),
        (KEY, (17, 32), {"above-call": 1}),
        (KEY, (17, 2048), {"above-call": 2}),
        (KEY._replace(max_model_len=64), (1, 32), {"unreachable": 1}),  # one page makes 128
        (
            KEY._replace(kv_dtype="float4_e2m1fn", num_q_heads_per_blk=32, num_kv_heads_per_blk=8),
            (16, 32),
            {},
        ),
        (KEY._replace(num_q_heads_per_blk=6), (16, 32), {"unreachable": 1}),
        (KEY._replace(head_dim=64), (16, 32), {"unreachable": 1}),
        (KEY._replace(kv_dtype="bf16"), (16, 32), {"malformed": 1}),
        (KEY._replace(page_size=0), (16, 32), {"malformed": 1}),
        # 16 KV heads of one query head each are split in two blocks of 8: no call has them in one.
        (KEY._replace(num_q_heads_per_blk=16, num_kv_heads_per_blk=16), (16, 32), {"untileable": 1}),
        # But 48 query heads cannot be split so, stay in one block, and are looked up as 64.
        (KEY._replace(num_q_heads_per_blk=64, num_kv_heads_per_blk=16), (16, 32), {}),
        (KEY._replace(num_q_heads_per_blk=2, num_kv_heads_per_blk=8), (16, 32), {"untileable": 1}),
    ],
)
def test_planted_rows(key, blocks, expected):
    assert kinds(jax_table({key: BlockSizes(*blocks)})) == expected


def test_replacements_that_are_taken_or_wanted_twice():
    rows = {
        KEY: BlockSizes(8, 32),
        KEY._replace(num_q_heads_per_blk=7): BlockSizes(4, 32),
        KEY._replace(page_size=60): BlockSizes(4, 32),
        KEY._replace(max_model_len=1030): BlockSizes(4, 32),
        KEY._replace(max_model_len=4000): BlockSizes(4, 32),
        KEY._replace(max_model_len=4001): BlockSizes(4, 32),
    }
    messages = [
        finding.message.split(" looked up as ")[1] for finding in check.static_findings(jax_table(rows))
    ]
    assert [message.split("which is ")[1] for message in messages] == [
        "there already, with (8, 32)",
        "free",
        "there already, with (8, 32)",
        "free but for 1 more that round to it",
        "free but for 1 more that round to it",
    ]


@pytest.mark.parametrize("name", ["TPU v6 lite", "v6e", "TPU v6e"])
def test_names_that_jaxs_look_up_never_asks_for(name):
    [finding] = check.static_findings(jax_table({KEY: BlockSizes(8, 32)}, name))
    assert finding.kind == "unknown-device"
    assert f"the look-up jax-0.10 never asks for {name!r} (it means v6e): it asks for" in finding.message
    assert "'TPU v6' on v6e" in finding.message


def test_the_name_of_v7x_depends_on_the_version():
    rows = {KEY: BlockSizes(8, 32)}
    assert kinds(jax_table(rows, "TPU v7")) == kinds(jax_table(rows, "TPU7x", "jax-0.12"))
    assert kinds(jax_table(rows, "TPU v7")) == {"unknown-device": 1}
    assert kinds(jax_table(rows, "TPU7x")) == kinds(jax_table(rows, "TPU v7", "jax-0.12")) == {}
    assert kinds(jax_table(rows, "TPU7x", "jax-2025-04")) == {"unknown-device": 1}


def test_rows_that_are_never_consulted():
    assert kinds(jax_table({KEY: BlockSizes(8, 32)}, "TPU v4")) == {"not-consulted": 1}
    assert kinds(jax_table({KEY: BlockSizes(8, 32)}, "TPU v4", "stand-in")) == {}


def test_where_the_look_up_is_not_known_keys_are_judged_as_jax_rounds_them():
    rows = {
        KEY._replace(num_q_heads_per_blk=12, max_model_len=1000): BlockSizes(4, 32),
        KEY._replace(kv_dtype="bf16"): BlockSizes(4, 32),
        KEY: BlockSizes(17, 32),
    }
    for name in ("TPU v6e", "TPU v6 lite", "TPU v5"):
        assert kinds(jax_table(rows, name, None)) == {"malformed": 1, "above-call": 1, "unreachable": 1}
    text = check_formats.render(check.Report(jax_table(rows, rule=None), []), "text")
    assert "keys are judged as JAX rounds them, names of devices are not; --lookup" in " ".join(text.split())


def test_empty_tables_and_devices():
    assert kinds(Table(dialect=JAX, devices={})) == {"empty": 1}
    both = Table(dialect=JAX, devices={"TPU v6": {KEY: BlockSizes(8, 32)}, "TPU v5": {}})
    [finding] = check.static_findings(both)
    assert (finding.kind, finding.message) == ("empty", "'TPU v5' has no rows")
    for form in ("text", "markdown", "json", "github"):
        assert "no rows" in check_formats.render(check.Report(both, [finding]), form)


def test_what_pytorch_xla_no_longer_rounds_is_reachable():
    """Heads and lengths as JAX's published table has them: all that its own look-up never finds."""
    whole = load("jax", "pytorch-xla-9497")
    assert kinds(whole) == {"shared-name": 1}
    assert kinds(load("jax", "pytorch-xla-9372")) == {"unreachable": 640, "shared-name": 1}


def test_names_and_repeats():
    assert kinds(jax_table({KEY: BlockSizes(8, 32)}, "TPU v9")) == {"unknown-device": 1}
    assert kinds(jax_table({KEY: BlockSizes(8, 32)}, "TPU v9", None)) == {"unknown-device": 1}
    twice = "TUNED_BLOCK_SIZES = {'TPU v6': {" + f"{tuple(KEY)}: (8, 32)," * 2 + "}}"
    assert kinds(read_text(twice, "x")) == {"repeated": 1}


def test_programs_are_those_of_reachable_rows_cut_to_their_calls():
    rows = {
        KEY: BlockSizes(999, 32),
        KEY._replace(max_num_batched_tokens=2048): BlockSizes(16, 32),
        KEY._replace(num_q_heads_per_blk=6): BlockSizes(4, 32),
    }
    programs = check.programs_of(jax_table(rows), "v6e", Settings())
    assert [(p.blocks, len(keys)) for p, keys in programs.items()] == [((16, 32), 2)]


def test_a_grid_that_is_too_small_is_told() -> None:
    """Of longer calls, all have the most pages that there are; a single smaller one shows a choice."""
    lengths = [512 << n for n in range(4)]
    rows = {KEY._replace(page_size=16, max_model_len=n): BlockSizes(16, 32) for n in lengths}
    [found] = [f for f in check.static_findings(jax_table(rows)) if f.kind == "edge"]
    assert found.message == "page size 16: all 4 keys of more than 16 pages have 16"
    chosen = {**rows, KEY._replace(page_size=16, max_model_len=8192): BlockSizes(8, 32)}
    assert kinds(jax_table(chosen))["edge"] == 0
    few = dict(list(rows.items())[1:])
    assert kinds(jax_table(few))["edge"] == 0


def test_samples_are_spread_evenly():
    assert check.sample(list("abcdefghij"), 5) == list("acegi")
    assert check.sample(list("ab"), 5) == list("ab")
    assert check.sample(list("ab"), None) == list("ab")


def test_slow_entries_by_the_rows():
    pairs = {
        BlockSizes(8, 32): Score(1.5, 150.0, "modelled"),
        BlockSizes(16, 32): Score(1.2, 120.0, "modelled"),
    }
    board = Scoreboard({("v6e", KEY): pairs}, {}, "rows")
    other = KEY._replace(max_model_len=4096)
    table = jax_table({KEY: BlockSizes(8, 32), other: BlockSizes(8, 32)})
    found, unscored = check.slow_findings(table, ["v6e"], board, 0.2)
    assert [f.detail["ratio"] for f in found] == [pytest.approx(1.25)]
    assert "25% more than (16, 32) (modelled)" in found[0].message
    assert unscored == 1
    assert check.slow_findings(table, ["v6e"], board, 0.3)[0] == []


def test_formats():
    report = check.Report(load("jax"), list(check.static_findings(load("jax"))))
    text = check_formats.render(report, "text")
    assert max(map(len, text.splitlines())) <= 80
    assert "... and 315 more" in text
    assert len(check_formats.render(report, "text", show_all=True).splitlines()) > 1280
    data = json.loads(check_formats.render(report, "json"))
    assert data["counts"] == {"shared-name": 1, "unreachable": 640}
    assert all(f["replacement"] for f in data["findings"] if f["kind"] == "unreachable")
    markdown = check_formats.render(report, "markdown")
    assert markdown.count("\n- line ") == 10
    assert "12, 2" in markdown and "num_" not in markdown.replace(r"num\_", "")


def test_github_annotations_name_file_and_line(tmp_path):
    path = tmp_path / "a,b.py"
    path.write_text(render(jax_table({KEY._replace(page_size=100): BlockSizes(8, 32)})))
    table = load(str(path))
    lines = check_formats.render(
        check.Report(table, list(check.static_findings(table))), "github"
    ).splitlines()
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "100" in text)
    file = str(path).replace(",", "%2C")
    assert lines[0].startswith(f"::error file={file},line={line},title=unreachable::('bfloat16', ")
    assert lines[1].startswith("::notice ::")


def test_the_command_compiles_and_exits_with_1(autotune, tmp_path):
    rows = {
        KEY._replace(num_q_heads_per_blk=4, num_kv_heads_per_blk=1, page_size=64): BlockSizes(4, 32),
        KEY: BlockSizes(8, 64),
    }
    (tmp_path / "table.py").write_text(render(jax_table(rows)))
    done = autotune("check", "table.py", "--compile", "--vmem-limit", "3MiB", "--format", "json")
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    assert data["compiled"] == {"v6e": {"ok": 1, "vmem_oom": 1}}
    assert data["lookup"]["name"] == "jax-0.10"
    [finding] = data["findings"]
    assert (finding["kind"], finding["status"], finding["target"]) == ("does-not-compile", "vmem_oom", "v6e")
    assert finding["needed_bytes"] > finding["limit_bytes"] == 3 << 20
    fits = autotune("check", "table.py", "--compile", "--vmem-limit", "100MiB", "--limit", 1)
    assert fits.returncode == 0, fits.stdout + fits.stderr
    assert "1 of 2 distinct programs: 1 ok" in fits.stdout


def test_the_command_says_by_which_look_up_and_takes_another(autotune, tmp_path):
    rows = {KEY._replace(num_q_heads_per_blk=6): BlockSizes(8, 64)}
    (tmp_path / "table.py").write_text(render(Table(dialect=JAX, devices={"TPU v6": rows})))
    own = autotune("check", "table.py")
    assert (own.returncode, "it holds no look-up: keys are judged as JAX rounds" in own.stdout) == (1, True)
    jaxs = autotune("check", "table.py", "--lookup", "jax-0.10", "--format", "json")
    assert jaxs.returncode == 1
    assert json.loads(jaxs.stdout)["counts"] == {"unreachable": 1}
    theirs = autotune("check", "table.py", "--lookup", "pytorch-xla-9497")
    assert theirs.returncode == 0
    assert "judged by the look-up pytorch-xla-9497: of pytorch/xla, since 31c4c2f23" in theirs.stdout
    wrong = autotune("check", "table.py", "--lookup", "jaxx")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "'jaxx' is unknown: for a table of the jax dialect use" in wrong.stderr


def test_cli_py_may_start_compiling_processes(tmp_path):
    """They import the file that was run, which must not run the command line again."""
    key = KEY._replace(num_q_heads_per_blk=4, num_kv_heads_per_blk=1, page_size=64)
    (tmp_path / "table.py").write_text(render(jax_table({key: BlockSizes(4, 32)})))
    done = subprocess.run(
        [sys.executable, "cli.py", "check", str(tmp_path / "table.py"), "--compile"],
        cwd=ROOT,
        env=user_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 1 distinct programs: 1 ok" in done.stdout


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("import os\nTUNED_BLOCK_SIZES = {'TPU v6': os.system('touch ran')}", "is no literal"),
        ("open('ran', 'w')\nTUNED_BLOCK_SIZES = dict(a=1)", "function call"),
        ("TUNED_BLOCK_SIZES = " + "(" * 1000, "nested deeper than 8"),
        ("TUNED_BLOCK_SIZES = {'TPU v6': {'a': (8, 32)}}", "is no key of a table"),
        ("TUNED_BLOCK_SIZES = {'TPU v6': {}, 'TPU v6': {}}", "there twice"),
        ("# caf\xe9".encode("latin-1"), "not UTF-8"),
        (b"TUNED_BLOCK_SIZES = {" + b" " * 200_000_000, "larger than 32 MiB"),
    ],
)
@pytest.mark.parametrize("words", [["check"], ["diff", "jax"]], ids=["check", "diff"])
def test_files_that_are_no_table_are_one_line_and_never_run(content, said, words, autotune, tmp_path):
    (tmp_path / "table.py").write_bytes(content if isinstance(content, bytes) else content.encode())
    done: subprocess.CompletedProcess[str] = autotune(*words, "table.py")
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""
    assert not (tmp_path / "ran").exists()


def test_a_generation_without_rows_is_answered(autotune):
    done = autotune("check", "jax", "--target", "v4")
    assert done.returncode == 1, done.stderr
    said = " ".join(done.stdout.split())
    assert "no rows for v4, and its look-up jax-0.10 never consults rows there: every call" in said
    assert "gets the default, (32, 32); it has rows for v5e, v5p, v6e" in said
    assert "unreachable" not in said, "of other generations' rows nothing was asked"
    there = autotune("check", "v6e", "--target", "v4", "--compile")
    assert there.returncode == 1 and "no rows for v4: every call there" in " ".join(there.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "nowhere.py"], "does not exist"),
        (["check", "jax", "--format", "yaml"], "'yaml' is not one of"),
        (["check"], "nothing is named: name a TABLE"),
    ],
)
def test_wrong_usage(arguments, said, autotune):
    done = autotune(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
