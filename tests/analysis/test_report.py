"""Rows to a report: what is in it, and that nothing of a row can leave the place it is shown in."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from autotune.analysis import overview
from autotune.analysis.report import data, page
from autotune.errors import UsageError
from autotune.kernel.problem import Settings
from autotune.results import dataset, schema, scores, winners
from autotune.results.rows import keys_of
from tests.conftest import ROOT, user_environment
from tests.factories import KEY, TOOLS, make_row

HOSTILE = (
    '</script><script>document.title="pwned"</script><img src=x onerror="document.title=\'pwned\'"><!--\u2028'
)
OTHER = KEY._replace(max_model_len=4096)


def built(folder: Path, *rows: dict[str, Any]) -> data.Report:
    dataset.append(folder, rows)
    return data.build([folder])


def page_of(report: data.Report) -> str:
    return page.render(report, "/* plotly.js */")


def embedded_in(text: str) -> dict[str, Any]:
    [held] = re.findall(r'<script type="application/json" id="data">([^<]*)</script>', text)
    read: dict[str, Any] = json.loads(held)
    return read


def test_winners_and_costs_are_those_of_show() -> None:
    folder = scores.COMMITTED_ROWS / "v6e"
    report = data.build([folder])
    shown = {line.key: line for line in overview.overview(folder).lines}
    assert len(report.keys.entries) == len(shown)
    for entry in report.keys.entries:
        line = shown[entry.key]
        assert (entry.target, entry.winner, entry.us) == (line.target, line.blocks, line.latency_us)
        assert (entry.default, entry.published) == (line.default, line.published)
        best = min(cell.score for cell in entry.runs[0].cells if cell.score)
        [won] = [cell for cell in entry.runs[0].cells if (cell.pages, cell.queries) == entry.winner]
        assert won.score == pytest.approx(best)


def test_generations_are_judged_by_one_another() -> None:
    report = data.build([scores.COMMITTED_ROWS / "v5e", scores.COMMITTED_ROWS / "v6e"])
    [matrix] = report.regret
    assert matrix.generations == ["v5e", "v6e"]
    assert matrix.sources == [["modelled"], ["modelled"]]
    own = [matrix.cells[i][i] for i in range(2)]
    assert [cell and cell.mean for cell in own] == [pytest.approx(1.0)] * 2
    others = [matrix.cells[1][0], matrix.cells[0][1], matrix.cells[2][0], matrix.cells[2][1]]
    assert all(cell and cell.mean and cell.mean > 1.01 for cell in others)
    tried = {g: set(keys_of(dataset.read(scores.COMMITTED_ROWS / g))) for g in matrix.generations}
    assert len(tried["v6e"]) > 476
    counts = {c.keys + c.failed + c.unknown for cells in matrix.cells for c in cells if c}
    assert counts <= {len(keys) for keys in tried.values()}


def test_a_failure_is_shown_as_what_it_is(tmp_path: Path) -> None:
    report = built(
        tmp_path,
        make_row(8, 32, latency_us=2.0),
        make_row(16, 32, status="vmem_oom", needed_bytes=3 << 20, limit_bytes=2 << 20, error="no room"),
        make_row(16, 64, status="timeout", error="slow"),
    )
    [entry] = report.keys.entries
    cells = entry.runs[0].cells
    assert [(cell.pages, cell.us) for cell in cells] == [(8, 2.0), (16, None), (16, None)]
    failures = [report.keys.failures[int(-1 - (cell.values[0] or 0))] for cell in cells[1:]]
    assert failures == [("vmem_oom", 3 << 20, 2 << 20, "no room"), ("timeout", None, None, "slow")]
    assert report.provenance.counts == {"modelled": {"ok": 1, "timeout": 1, "vmem_oom": 1}}


def test_a_default_that_fails_is_told_and_not_said_to_be_untried(tmp_path: Path) -> None:
    untried = OTHER._replace(head_dim=256)
    report = built(
        tmp_path,
        make_row(4, 64, latency_us=2.0),
        make_row(16, 32, status="vmem_oom", needed_bytes=3 << 20, limit_bytes=2 << 20, error="no room"),
        make_row(4, 64, latency_us=2.0, key=untried),
    )
    by_key = {entry.key: entry for entry in report.keys.entries}
    assert by_key[KEY].default.blocks == (16, 32)
    assert (by_key[KEY].default.status, by_key[untried].default.status) == ("vmem_oom", None)
    text = page_of(report)
    said = [entry["default_status"] for entry in embedded_in(text)["entries"]]
    assert sorted(said, key=str) == [None, "vmem_oom"]
    cells = [unescape(cell) for cell in re.findall(r"<td>([^<]*)</td>", text)]
    assert "16,32 vmem_oom" in cells and "32,32 not tried" in cells
    facts = unescape(re.sub(r"<[^>]+>", "", text))
    assert "1 of 2 keys where JAX's default fails: vmem_oom" in facts


def test_a_folder_with_nothing_but_failures_has_a_page(tmp_path: Path) -> None:
    report = built(tmp_path, make_row(status="crashed", error="it died"))
    assert [entry.winner for entry in report.keys.entries] == [None]
    assert report.regret == []
    text = page_of(report)
    assert "Nothing has won yet" in text
    assert embedded_in(text)["failures"] == [["crashed", None, None, "it died"]]


def test_pairs_not_ok_on_every_workload_have_no_score(tmp_path: Path) -> None:
    report = built(
        tmp_path,
        *(make_row(8, 32, workload=w, latency_us=2.0) for w in ("mixed", "decode-heavy")),
        *(make_row(16, 32, workload=w, latency_us=3.0) for w in ("mixed", "decode-heavy")),
        make_row(4, 32, workload="mixed", latency_us=1.0),
        make_row(4, 32, workload="decode-heavy", status="compile_error", error="no"),
        make_row(2, 32, workload="mixed", latency_us=9.0),
    )
    [entry] = report.keys.entries
    assert entry.runs[0].workloads == ["decode-heavy", "mixed"]
    assert entry.winner == (8, 32)
    assert {(c.pages, c.us is None, tuple(c.values)) for c in entry.runs[0].cells} == {
        (2, True, (None, 9.0)),
        (4, True, (-1.0, 1.0)),
        (8, False, (2.0, 2.0)),
        (16, False, (3.0, 3.0)),
    }


def test_measured_rows_decide_and_stand_beside_the_modelled(tmp_path: Path) -> None:
    modelled = {(4, 32): 90.0, (8, 32): 100.0, (16, 32): 130.0}
    measured = {(4, 32): 110.0, (8, 32): 100.0, (16, 32): 100.0}
    rows = [make_row(*pair, latency_us=us) for pair, us in modelled.items()]
    rows += [
        make_row(*pair, latency_us=us, latency_low_us=us - 1, latency_high_us=us + 1, source="measured")
        for pair, us in measured.items()
    ]
    report = built(tmp_path, *rows)
    [entry] = report.keys.entries
    assert [run.source for run in entry.runs] == ["measured", "modelled"]
    assert entry.tied == 1
    assert [cell.us for cell in entry.runs[1].cells] == [pytest.approx(us) for us in modelled.values()]
    assert [cell.intervals for cell in entry.runs[0].cells] == [
        [(us - 1, us + 1)] for us in measured.values()
    ]
    assert all(cell.intervals is None for cell in entry.runs[1].cells)
    points = {(p.entry, p.blocks): (p.predicted_us, p.measured_us) for p in report.agreement.points}
    assert points == {(0, pair): (modelled[pair], measured[pair]) for pair in modelled}
    [figures] = report.agreement.figures
    assert (figures.target, figures.points, figures.keys) == ("v6e", 3, 1)
    assert figures.error == pytest.approx(1 - 90 / 110)
    assert figures.regret == pytest.approx(1.10)  # 4,32 was predicted to be the best
    text = page_of(report)
    assert "3 rows are measured on a TPU; 3 rows are modelled" in unescape(text)


def test_interpreted_rows_are_no_latencies(tmp_path: Path) -> None:
    report = built(
        tmp_path,
        make_row(8, 32, source="interpreted", latency_us=1e6),
        make_row(8, 32, key=OTHER, source="interpreted", latency_us=1e6),
        make_row(8, 32, key=OTHER, latency_us=5.0),
        make_row(16, 32, source="interpreted", status="wrong_result", error="off by 3"),
    )
    first, second = report.keys.entries
    assert (first.winner, first.us) == (None, None)
    assert [(c.pages, c.us, c.score, c.values) for c in first.runs[0].cells] == [
        (8, None, None, [0.0]),
        (16, None, None, [-1.0]),
    ]
    assert [run.source for run in second.runs] == ["modelled", "interpreted"]
    assert (second.winner, second.us) == ((8, 32), pytest.approx(5.0))
    assert report.agreement.points == []
    assert "1000000" not in page_of(report)


def test_each_set_of_tools_is_a_run_and_the_newest_decides(tmp_path: Path) -> None:
    newer = schema.Tools("0.11.0", "0.11.0", "0.0.43", "abc")
    report = built(
        tmp_path,
        make_row(4, 32, latency_us=1.0),
        make_row(8, 32, latency_us=2.0),
        make_row(4, 32, latency_us=4.0, tools=newer, minute=1),
        make_row(8, 32, latency_us=3.0, tools=newer, minute=1),
    )
    [entry] = report.keys.entries
    assert (entry.winner, entry.us) == ((8, 32), pytest.approx(3.0))
    jax = winners.TOOLS.index("jax")
    assert [report.keys.tools[run.tools][jax] for run in entry.runs] == ["0.11.0", TOOLS.jax]
    assert [[cell.score for cell in run.cells] for run in entry.runs] == [
        [pytest.approx(4 / 3), 1.0],
        [1.0, 2.0],
    ]
    assert ("jax", ["0.10.2", "0.11.0"]) in report.provenance.facts


def test_settings_of_the_kernel_are_kept_apart(tmp_path: Path) -> None:
    report = built(
        tmp_path,
        make_row(4, 32, latency_us=1.0),
        make_row(8, 32, latency_us=2.0, settings=Settings(vmem_limit_bytes=100 << 20)),
    )
    assert [entry.winner for entry in report.keys.entries] == [(4, 32), (8, 32)]
    assert sorted(matrix.setting for matrix in report.regret) == [
        "the compiler's own VMEM limit",
        "vmem_limit_bytes=104857600 (100 MiB)",
    ]
    assert ("VMEM limit", ["the compiler's own", "100 MiB"]) in report.provenance.facts


def test_equal_keys_of_two_folders_show_what_tells_them_apart(tmp_path: Path) -> None:
    """Without a script; with one, the table of keys has a column of it, and so has each name of a key."""
    dataset.append(tmp_path / "a", [make_row(4, 32, latency_us=1.0)])
    limited = Settings(vmem_limit_bytes=100 << 20)
    dataset.append(tmp_path / "b", [make_row(8, 32, latency_us=2.0, settings=limited)])

    def lines(*folders: Path) -> list[list[str]]:
        [table] = re.findall(r"<noscript>.*</noscript>", page_of(data.build(folders)), re.S)
        rows = re.findall(r"<tr>(.*?)</tr>", table)
        return [[unescape(cell) for cell in re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", row)] for row in rows]

    head, *both = lines(tmp_path / "a", tmp_path / "b")
    assert head[-1] == "setting"
    assert sorted((line[6], line[-1]) for line in both) == [
        ("4,32", "the compiler's own VMEM limit"),
        ("8,32", "vmem_limit_bytes=104857600 (100 MiB)"),
    ]
    assert lines(tmp_path / "a")[0][-1] == "published"


def test_workloads_of_one_name_are_told_apart(tmp_path: Path) -> None:
    one, two = make_row(latency_us=1.0), make_row(latency_us=2.0)
    two["workload_fingerprint"] = "f" * 16
    [entry] = built(tmp_path, one, two).keys.entries
    assert sorted(entry.runs[0].workloads) == sorted(
        f"mixed {row['workload_fingerprint'][:8]}" for row in (one, two)
    )


def test_a_folder_and_its_copy_count_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        dataset.append(tmp_path / name, [make_row(latency_us=1.0)])
    report = data.build([tmp_path / "a", tmp_path / "b"])
    assert report.provenance.counts == {"modelled": {"ok": 1}}
    assert [source.files for source in report.provenance.sources] == [1, 1]


def test_no_rows_are_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"empty': no rows: `autotune sweep --out` makes some"):
        data.build([tmp_path / "empty"])
    dataset.append(tmp_path / "up" / "v6e", [make_row(latency_us=1.0)])
    with pytest.raises(UsageError, match=r"name those in it: \S+/up/v6e$"):
        data.build([tmp_path / "up"])
    with pytest.raises(UsageError, match="no rows for v4"):
        data.build([tmp_path / "up" / "v6e"], "v4")


@pytest.fixture
def hostile(tmp_path: Path) -> str:
    """A page of rows whose every text is hostile."""
    return page_of(built(tmp_path / HOSTILE.replace("/", "_"), *hostile_rows()))


def hostile_rows() -> list[dict[str, Any]]:
    rows = [
        make_row(8, 32, latency_us=1.0),
        make_row(16, 32, status="crashed", error=HOSTILE),
        make_row(16, 64, status=HOSTILE, error=HOSTILE),
    ]
    names = ("model", "host", "autotune", "workload", *schema.TOOL_COLUMNS)
    return [{**row, **dict.fromkeys(names, HOSTILE)} for row in rows]


def test_no_text_of_a_row_is_markup(hostile: str) -> None:
    assert hostile.count("</script>") == 5  # the data, plotly.js and the page's three
    assert "<img" not in hostile
    assert "<!--" not in hostile
    assert "\u2028" not in hostile.split('id="data">')[1]
    assert embedded_in(hostile)["failures"] == [
        ["crashed", None, None, HOSTILE],
        [HOSTILE, None, None, HOSTILE],
    ]


def test_only_these_scripts_run_and_nothing_is_loaded(hostile: str) -> None:
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', hostile)
    allowed = re.findall(r"sha256-([^']+)'", unescape(policy))
    scripts = re.findall(r"<script>(.*?)</script>", hostile, re.S)
    made = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert allowed == made
    assert len(made) == 4
    assert "unsafe-eval" not in policy
    assert "default-src 'none'" in unescape(policy)
    assert set(re.findall(r'\s(?:href|src|action)="([^"]*)"', hostile)) == {"#keys"}


def test_the_same_rows_give_the_same_page(tmp_path: Path) -> None:
    rows = [make_row(p, 32, latency_us=1.0 * p) for p in (4, 8)]
    first = page_of(built(tmp_path / "r", *rows))
    again = tmp_path / "again" / "r"
    for row in reversed(rows):
        dataset.append(again, [row])
    second = page_of(data.build([again]))
    hide = re.compile(r"<details>.*</details>")  # the files' names differ
    assert hide.sub("", first) == hide.sub("", second)


def test_without_javascript_there_are_winners(tmp_path: Path) -> None:
    text = page_of(built(tmp_path, make_row(8, 32, latency_us=12.5), make_row(16, 32, latency_us=25.0)))
    [table] = re.findall(r"<noscript>.*</noscript>", text, re.S)
    cells = [unescape(cell) for cell in re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", table)]
    assert cells[11:20] == ["v6e", "8/2", "128", "1024", "2048", "bfloat16", "8,32", "12.5", "modelled"]
    assert cells[20] == "16,32 +100.0%"


def test_the_command(autotune: Any, tmp_path: Path) -> None:
    dataset.append(tmp_path / "r", [make_row(latency_us=1.0), make_row(target="v5e", latency_us=2.0)])
    done = autotune("report", "r", "-o", "page.html")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "page.html: 2 keys (2 modelled rows)\nNext: open page.html in a browser\n"
    page_text = (tmp_path / "page.html").read_text()
    assert "plotly.js v" in page_text
    assert len(page_text) < 6e6
    one = autotune("report", "r", "--target", "v5e", "-o", "-")
    assert one.returncode == 0
    assert [entry["target"] for entry in embedded_in(one.stdout)["entries"]] == ["v5e"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-o", "page.html"], "Missing argument"),
        (["r"], "Missing option"),
        (["r", "-o", ""], "the name is empty"),
        (["r", "-o", "r"], "'r' cannot be written: Is a directory"),
        (["r", "-o", "p.html", "--target", "v3"], "target 'v3' is unknown"),
        (["none", "-o", "p.html"], "does not exist"),
    ],
)
def test_usage_errors(autotune: Any, tmp_path: Path, arguments: list[str], says: str) -> None:
    dataset.append(tmp_path / "r", [make_row(latency_us=1.0)])
    done = autotune("report", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "p.html").exists()


def test_without_plotly_it_says_what_to_type(tmp_path: Path) -> None:
    dataset.append(tmp_path / "r", [make_row(latency_us=1.0)])
    start = "import sys; sys.modules['plotly'] = None; from autotune.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", start, "report", str(tmp_path / "r"), "-o", str(tmp_path / "p.html")],
        cwd=ROOT,
        env=user_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "pip install 'tpu-autotune[report]'" in done.stderr
