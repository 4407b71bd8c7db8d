"""A report as one HTML file: nothing is loaded from elsewhere, and no text of a row can run in it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from html import escape
from importlib import resources
from string import Template

import autotune
from autotune.analysis.report import fragments
from autotune.analysis.report.data import Report
from autotune.analysis.report.embedded import embedded
from autotune.errors import MachineError


def plotly_js() -> str:
    """The source of plotly.js.

    Raises:
      MachineError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MachineError(
            "a report is drawn with plotly, which is not installed: type `pip install 'tpu-autotune[report]'`"
        ) from None
    source: str = get_plotlyjs()
    return source


def render(report: Report, plotly: str) -> str:
    """The page; the same text for the same rows. plotly: the source of plotly.js."""
    folder = resources.files("autotune.analysis.report")
    html, css, elements, plots, js = (
        (folder / name).read_text(encoding="utf-8")
        for name in ("page.html", "page.css", "elements.js", "plots.js", "page.js")
    )
    return Template(html).substitute(
        policy=escape(_policy([plotly, elements, plots, js])),
        title=escape(fragments.title(report)),
        css=css,
        notice=fragments.notice(report),
        summary=fragments.summary(report),
        winners=fragments.winners(report),
        agreement=fragments.agreement(report),
        regret=fragments.regret(report),
        provenance=fragments.provenance(report),
        version=escape(autotune.__version__),
        data=embedded(report),
        plotly=plotly,
        elements=elements,
        plots=plots,
        js=js,
    )


def _policy(scripts: Iterable[str]) -> str:
    """The content security policy: these very scripts run, no other, and nothing is fetched.

    plotly.js writes style rules, and draws a heat map as an image that it makes itself.
    """
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
