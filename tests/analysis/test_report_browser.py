"""Reports looked at in a real browser: Chromium without a screen, driven by selenium.

`make screenshots` has the pictures in docs/report made by the tests here.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from autotune.analysis.report import data, page
from autotune.kernel.problem import BlockSizes, TableKey
from autotune.results import dataset, scores
from autotune.tables.load import committed_path, load
from autotune.tpu.generations import MIB
from tests.analysis.test_report import HOSTILE, hostile_rows
from tests.factories import KEY, make_row

if TYPE_CHECKING:
    from selenium.webdriver.remote.webdriver import WebDriver

WIDE, NARROW = (1280, 1000), (400, 1200)


@pytest.fixture(scope="module")
def driver() -> Iterator[WebDriver]:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    service = shutil.which("chromedriver")
    if browser is None or service is None:
        pytest.skip("no chromium with chromedriver: type `apt-get install chromium chromium-driver`")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # root has none
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=webdriver.ChromeService(service))
    yield running
    running.quit()


class Browser:
    """What the tests do with a page."""

    def __init__(self, driver: WebDriver, tmp_path: Path) -> None:
        self.driver = driver
        self._folder = tmp_path

    def open(
        self, text: str, size: tuple[int, int] = WIDE, scheme: str = "light", scripts: bool = True
    ) -> None:
        path = self._folder / "report.html"
        path.write_text(text)
        self.command("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.command("Network.enable")
        offline = {"latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self.command("Network.emulateNetworkConditions", offline=True, **offline)
        self.resize(size)
        self.scheme(scheme)
        self.driver.get_log("browser")  # of the page before
        self.driver.get(path.as_uri())

    def command(self, name: str, **arguments: Any) -> None:
        self.driver.execute_cdp_cmd(name, arguments)

    def resize(self, size: tuple[int, int]) -> None:
        width, height = size
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def scheme(self, name: str) -> None:
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def run(self, script: str) -> Any:
        return self.driver.execute_script(f"return {script}")

    def text(self, selector: str) -> str:
        said: str = self.run(f"document.querySelector({selector!r}).textContent")
        return said

    def texts(self, selector: str) -> list[str]:
        said: list[str] = self.run(f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent)")
        return said

    def labels(self) -> list[str]:
        """What is written in the cells of the heat map."""
        return self.texts("#map .textpoint text")

    def press(self, *keys: str) -> None:
        """Keys to whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def console(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def keep(self, name: str, element: str | None = None) -> None:
        """A picture: into the folder that AUTOTUNE_SCREENSHOTS names, else into the test's own."""
        folder = Path(os.environ.get("AUTOTUNE_SCREENSHOTS") or self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        target = self.driver.find_element("css selector", element) if element else self.driver
        picture: bytes = target.screenshot_as_png if element else self.driver.get_screenshot_as_png()
        (folder / f"{name}.png").write_bytes(picture)
        assert len(picture) > 5_000
        assert len(picture) < 300_000 or not os.environ.get("AUTOTUNE_SCREENSHOTS"), (
            "too large to be committed"
        )


@pytest.fixture
def browser(driver: WebDriver, tmp_path: Path) -> Browser:
    return Browser(driver, tmp_path)


@pytest.fixture(scope="module")
def keys() -> int:
    """How many keys the committed tables of v5e and v6e have."""
    return sum(len(load(committed_path(generation))) for generation in ("v5e", "v6e"))


@pytest.fixture(scope="module")
def swept() -> str:
    """The page of the committed sweeps of v5e and v6e."""
    return page_of(scores.COMMITTED_ROWS / "v5e", scores.COMMITTED_ROWS / "v6e")


def page_of(*folders: Path) -> str:
    return page.render(data.build(folders), page.plotly_js())


@pytest.fixture
def page_with(tmp_path: Path) -> Callable[..., str]:
    def made(*rows: dict[str, Any]) -> str:
        dataset.append(tmp_path / "rows", rows)
        return page_of(tmp_path / "rows")

    return made


def choose(browser: Browser, **parts: str) -> None:
    """Filter down to a key, as a person does."""
    from selenium.webdriver.support.ui import Select

    for name, value in parts.items():
        Select(browser.driver.find_element("id", name.replace("_", "-"))).select_by_visible_text(value)


def test_it_opens_offline_with_nothing_in_the_console(browser: Browser, swept: str, keys: int) -> None:
    browser.open(swept)
    assert browser.text("#found") == f"{keys} of {keys} keys"
    assert len(browser.labels()) >= 3
    assert browser.run("document.querySelectorAll('#map .hm image').length") >= 1
    assert [text.split(":")[0] for text in browser.texts("#legend > span")] == [
        "winner (modelled)",
        "JAX's default (modelled)",
        "published (modelled)",
    ]
    assert "us, modelled" in browser.texts("#overview th")
    choose(browser, filter_target="v6e", filter_heads="4/2", filter_page="128", filter_length="2048")
    choose(browser, filter_tokens="2048")
    assert browser.text("#found") == f"1 of {keys} keys"
    assert browser.text("#map-title") == "Latency by block sizes, modelled, us"
    assert browser.run("[...document.querySelectorAll('#previous, #next')].every((e) => e.disabled)")
    timed = [label for label in browser.labels() if label != "nottried"]
    assert len(timed) == len(browser.texts("#pairs tbody tr")) == 11
    assert sum("best" in label for label in timed) == 1
    assert browser.run("document.querySelectorAll('#map .scatterlayer path.point').length") == 3
    marks = browser.texts("#pairs tbody td:nth-child(3)")
    assert sum("winner" in mark for mark in marks) == 1
    assert browser.run("performance.getEntriesByType('resource').length") == 0
    assert browser.console() == []


@pytest.mark.slow  # the pages that it draws are those of other tests
def test_pictures(browser: Browser, swept: str) -> None:
    seen = {}
    for name, size, scheme in (("light", WIDE, "light"), ("dark", WIDE, "dark"), ("narrow", NARROW, "light")):
        browser.open(swept, size, scheme)
        choose(browser, filter_heads="4/2", filter_page="128", filter_length="2048", filter_tokens="2048")
        choose(browser, order="key", filter_page="all", filter_tokens="all")
        if name == "narrow":
            browser.run("document.getElementById('map-title').scrollIntoView()")
        browser.run("document.activeElement.blur()")
        browser.keep(name)
        seen[name] = browser.run("getComputedStyle(document.body).backgroundColor")
        assert browser.console() == []
    assert seen["light"] == seen["narrow"] != seen["dark"]


@pytest.mark.parametrize("width", [400, 320])
def test_a_narrow_window_does_not_scroll_sideways(browser: Browser, swept: str, width: int) -> None:
    browser.open(swept, (width, 900))
    assert browser.run("document.documentElement.scrollWidth") == width
    for selector in ("#map", "#pairs-title", "#overview-box", "#regret"):
        assert browser.run(f"document.querySelector({selector!r}).getBoundingClientRect().right") <= width
    plot = browser.run("document.querySelector('#map .main-svg').getBoundingClientRect().width")
    assert width * 0.6 < plot <= width


def contrast(first: str, second: str) -> float:
    """Of two colours as rgb(...), by WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(float(part)) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted(map(luminance, (first, second)))
    return (high + 0.05) / (low + 0.05)


def test_the_plot_follows_the_colour_scheme(browser: Browser, swept: str) -> None:
    browser.open(swept)
    found = {}
    for scheme in ("light", "dark"):
        browser.scheme(scheme)
        style = "getComputedStyle(document.querySelector({!r})).{}"
        panel = browser.run(style.format("section.map", "backgroundColor"))
        axis = browser.run(style.format("#map .xtick text", "fill"))
        found[scheme] = panel, axis, browser.run("document.querySelector('#map .hm image').href.baseVal")
        for selector in ("#map-key", ".note", "#legend", "thead th", ".controls label"):
            assert contrast(browser.run(style.format(selector, "color")), panel) > 4.5, selector
        assert contrast(axis, panel) > 4.5
    assert all(a != b for a, b in zip(found["light"], found["dark"], strict=True))


def test_the_keyboard_is_enough(browser: Browser, swept: str) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(swept)
    browser.driver.find_element("tag name", "body").send_keys(Keys.TAB)
    assert browser.text(":focus") == "Skip to the keys"
    browser.press(Keys.ENTER)
    browser.press(Keys.TAB)
    assert browser.run("document.activeElement.id") == "filter-target"
    assert browser.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.press("v6e")
    found, _, both, _ = browser.text("#found").split()
    assert 476 < int(found) < int(both)
    assert set(browser.texts("#overview tbody td:nth-child(2)")) == {"v6e"}
    before = browser.labels(), browser.text("#legend")
    while browser.run("document.activeElement.tagName") != "BUTTON":
        browser.press(Keys.TAB)
    browser.press(Keys.TAB, Keys.TAB)
    browser.press(Keys.ENTER)  # another key of the table
    assert (browser.labels(), browser.text("#legend")) != before
    assert len(browser.texts("#overview tr.chosen [aria-pressed=true]")) == 1
    first = browser.labels()
    while browser.run("document.activeElement.id") != "workload":
        browser.press(Keys.TAB)
    browser.press("prefill")
    assert browser.run("document.activeElement.selectedOptions[0].textContent") == "prefill-heavy"
    assert browser.labels() != first
    while browser.run("document.activeElement.id") != "next":
        browser.press(Keys.TAB)
    chosen = browser.run("document.getElementById('key').value")
    browser.press(Keys.SPACE)
    assert browser.run("document.getElementById('key').value") != chosen
    unnamed = (
        "[...document.querySelectorAll('select, button, [role=img], [role=region]')].filter((e) => "
        "e.offsetParent && !e.labels?.length && !e.ariaLabel && !e.getAttribute('aria-labelledby') && "
        "!(e.tagName === 'BUTTON' && e.textContent)).length"
    )
    assert browser.run(unnamed) == 0
    assert browser.run("[...document.querySelectorAll('thead th')].every((e) => e.scope === 'col')")


def test_hostile_rows_are_text(browser: Browser, page_with: Callable[..., str]) -> None:
    text = page_with(*hostile_rows())
    browser.open(text)
    assert browser.driver.title == "Block sizes of ragged paged attention on TPU v6e"
    assert HOSTILE in browser.texts("#pairs .long")
    assert browser.run("document.querySelectorAll('img, script').length") == 5
    assert browser.labels() == ["1.000best", "nottried", "crashed", "failed"]
    assert browser.console() == []
    # Were there a hole, the policy would stand behind it.
    browser.open(
        text.replace(
            "<main>", '<main><img src="x" onerror="document.title=1"><script>document.title=2</script>'
        )
    )
    assert browser.driver.title == "Block sizes of ragged paged attention on TPU v6e"
    assert sum("Content Security Policy" in line for line in browser.console()) >= 3


def test_failures_are_named_in_the_plot_and_in_the_table(browser: Browser) -> None:
    browser.open(page_of(scores.COMMITTED_ROWS / "v4"))
    choose(browser, filter_heads="32/8", filter_page="128", filter_tokens="2048", filter_length="2048")
    board = scores.committed(["v4"])
    assert board
    failures = board.failures["v4", TableKey("bfloat16", "bfloat16", 32, 8, 128, 128, 2048, 2048)]
    assert browser.labels().count("vmemoom") == len(failures) > 3
    assert browser.texts("#pairs td.failed") == ["vmem_oom"] * len(failures)
    needed = {
        f"needs {f.needed_bytes / MIB:.2f} MiB, limit 16.00 MiB" for f in failures.values() if f.needed_bytes
    }
    assert {text.split(";")[0] for text in browser.texts("#pairs .long") if text} == needed
    browser.keep("failures", "section.map figure")
    assert browser.console() == []


def test_measured_modelled_and_interpreted_are_told_apart(
    browser: Browser, page_with: Callable[..., str]
) -> None:
    rows = []
    for pages in (4, 8, 16):
        low, high = {"latency_low_us": 99.0}, {"latency_high_us": 120.0}
        rows.append(make_row(pages, 32, latency_us=90.0 + pages))
        rows.append(make_row(pages, 32, latency_us=100.0 + pages, source="measured", **low, **high))
        rows.append(make_row(pages, 32, latency_us=7777.0, source="interpreted"))
    browser.open(page_with(*rows))
    assert browser.text("#map-title") == "Latency by block sizes, measured, us"
    assert browser.run("document.querySelectorAll('#scatter .scatterlayer path.point').length") == 3
    assert browser.texts("#scatter .xtitle, #scatter .ytitle") == ["measured, us", "modelled, us"]
    # A tie, as the intervals overlap: it goes to what JAX hands out.
    assert browser.texts("#legend > span")[0] == "winner (measured): 16,32"
    said = {}
    runs = browser.texts("#run option")
    assert [run.split(",")[0] for run in runs] == ["measured", "modelled", "interpreted"]
    for run in runs:
        choose(browser, run=run)
        said[run.split(",")[0]] = browser.text("#map-title"), browser.labels(), browser.text("#pairs")
    assert said["modelled"][0] == "Latency by block sizes, modelled, us"
    assert said["interpreted"][0] == "Interpreted: which block sizes give the right output"
    assert said["interpreted"][1] == ["ok"] * 3
    assert not any("7777" in text for text in said["interpreted"][2:])
    assert browser.console() == []


def test_without_scripts_there_are_the_winners(browser: Browser, swept: str, keys: int) -> None:
    browser.open(swept, scripts=False)
    try:
        tables = browser.driver.find_elements("css selector", "noscript table tbody")
        assert len(tables[0].find_elements("css selector", "tr")) == keys
        assert not browser.driver.find_element("id", "scripted").is_displayed()
        assert browser.driver.find_element("id", "regret").is_displayed()
    finally:
        browser.command("Emulation.setScriptExecutionDisabled", value=False)


def test_a_thousand_full_keys_are_under_ten_megabytes(browser: Browser, tmp_path: Path) -> None:
    """Twenty pairs on three workloads, measured and modelled, of each key."""
    keys = [KEY._replace(max_num_batched_tokens=2**i, max_model_len=4096) for i in range(8, 18)]
    rows = [
        make_row(pages, queries, key=key, workload=load, source=source, latency_us=us, **ends)
        for key in keys
        for pages in (2, 4, 8, 16, 32)
        for queries in (32, 64, 128, 256)
        for load in ("mixed", "decode-heavy", "prefill-heavy")
        for us in [pages * 12.3456789 + queries * 1.23456789]
        for source, ends in (
            ("modelled", {}),
            ("measured", {"latency_low_us": us - 1.2345678, "latency_high_us": us + 1.2345678}),
        )
    ]
    dataset.append(tmp_path / "rows", rows)
    report = data.build([tmp_path / "rows"])
    entries = [
        dataclasses.replace(
            entry, key=entry.key._replace(max_model_len=2 ** (i % 30), page_size=2 ** (i // 30))
        )
        for i in range(100)
        for entry in report.keys.entries
    ]
    points = [
        point._replace(entry=point.entry + 10 * i) for i in range(100) for point in report.agreement.points
    ]
    full = report._replace(
        keys=report.keys._replace(entries=entries), agreement=report.agreement._replace(points=points)
    )
    text = page.render(full, page.plotly_js())
    assert len(text.encode()) < 10_000_000
    browser.open(text)
    assert browser.text("#found") == "1000 of 1000 keys"
    assert len(browser.labels()) == 20
    assert browser.run("document.querySelectorAll('#scatter .scatterlayer path.point').length") == 5000
    assert entries[0].winner == BlockSizes(2, 32)
    assert browser.console() == []
