"""Runs as one HTML file with all that it needs: data, scripts and styles are in it, and it asks the network nothing."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib.resources import files

from flopwise.report import palette
from flopwise.report.page.data import PageData, inline_json, page_json
from flopwise.report.words import safe

LIBRARIES = ("d3.min.js", "plot.umd.min.js")
SCRIPTS = (
    *("state.js", "filters.js", "tabs.js", "words.js", "kit.js", "lanes.js", "overview.js", "best.js", "heatmap.js"),
    *(
        "columns.js",
        "table.js",
        "memory.js",
        "timeline.js",
        "roofline.js",
        "run.js",
        "about.js",
        "compare.js",
        "live.js",
    ),
    *("planner.js", "planned.js", "around.js", "pins.js", "page.js"),
)
"""In the order in which they run; none needs a server or a build."""
LONGEST_TITLE = 200


def asset(name: str) -> str:
    """A file that comes with the page."""
    return (files("flopwise.report.page") / "assets" / name).read_text(encoding="utf-8")


def page_html(page: PageData) -> str:
    """The page: it opens from disk, and served by `flopwise serve` it follows the store."""
    scripts = [asset(name).replace("\r\n", "\n") for name in (*LIBRARIES, *SCRIPTS)]
    parts = {
        "POLICY": escape(policy(scripts, live=page.live)),
        "LIVE": "true" if page.live else "false",
        "TITLE": escape(safe(page.title, LONGEST_TITLE)),
        "STYLE": f"{palette.style()}{asset('page.css')}",
        "DATA": inline_json(page_json(page)),
        "SCRIPTS": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    pieces = asset("page.html").split("%%")
    # Names stand between the signs: whatever a part holds is never looked at again.
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def policy(scripts: list[str], *, live: bool) -> str:
    """What the browser may do for this page: run these scripts and no others, and load nothing from elsewhere."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    asks = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; connect-src {asks}; "
        "base-uri 'none'; form-action 'none'"
    )
