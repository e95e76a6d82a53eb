"""The page of `hfscale watch`: one document that loads nothing but the data of its own server.

It shows the sections of the report, which are fetched again while the run goes on. Their texts are escaped where they
are made, and the policy allows one script and one style sheet by their hashes and nothing else, so that a text of a
run would not run even as HTML. Attributes with a style are allowed: the charts place their labels with them, and they
can load nothing.
"""

import base64
import hashlib
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path

from hfscale import __version__
from hfscale.report.html import STYLE, short
from hfscale.report.sections import header, sections
from hfscale.report.watch.live import MAX_ROWS, Runs, View, left_tiles

_FOLDER = Path(__file__).parent
_STYLE = STYLE + (_FOLDER / "page.css").read_text(encoding="utf-8")
_SCRIPT = (_FOLDER / "page.js").read_text(encoding="utf-8")
_ORDER = ("tiles", "alarms", "bottlenecks", "charts", "ranks", "prediction", "split", "timeline")
"""The sections that come first, as they are what changes; the others follow in the order of the report."""
_QUIET_S = 600.0
"""Seconds without a record after which a run that should be running is marked."""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; style-src-attr 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What a browser may do with the page."""
PAGE = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
    f"<title>hfscale watch</title><style>{_STYLE}</style></head>\n"
    '<body><main id="runs"><noscript>This page needs JavaScript; hfscale report writes one that does not.</noscript>'
    "</main>"
    f'<footer>hfscale {escape(__version__)}. Unknown numbers are left out. <span id="state"></span></footer>'
    f"<script>{_SCRIPT}</script></body></html>\n"
)
"""The document."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Holds the sections of a run as HTML, without the header."""

    sections: str
    """The HTML."""
    version: str
    """Changes with the HTML."""


def draw(view: View) -> Drawn:
    """Draw the sections of a run.

    Args:
        view (`View`): the run.
    """
    left = left_tiles(view.left)
    found = sections(view.run, view.plan, more_tiles=left, most_rows=MAX_ROWS, all_ranks=True)
    first = [found.pop(name) for name in _ORDER]
    html = "".join([*first, *found.values()])
    return Drawn(sections=html, version=hashlib.sha256(html.encode()).hexdigest()[:16])


class DrawnRuns:
    """Draws a run only when its files have changed, however many pages ask.

    Args:
        runs (`Runs`): the runs by name.
    """

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._newest: dict[str, tuple[View, Drawn]] = {}

    def of(self, name: str) -> tuple[View, Drawn]:
        """Return a run as its files are, and its sections.

        Raises:
            StorageError: a file cannot be read.
        """
        view = self._runs[name].view()
        known = self._newest.get(name)
        if known is not None and known[0].run == view.run:
            return view, known[1]
        drawn = draw(view)
        self._newest[name] = (view, drawn)
        return view, drawn


def draw_save(view: View, *, is_asked: bool) -> str:
    """Draw the button that asks a run for a checkpoint; nothing where the run is not going on.

    Args:
        view (`View`): the run.
        is_asked (`bool`): whether a checkpoint has been asked for.
    """
    if view.run.status != "running":
        return ""
    if is_asked:
        return '<p class="now">A checkpoint of the next step is asked for.</p>'
    return '<button type="button">Save a checkpoint now</button>'


def draw_header(view: View, more: str = "") -> str:
    """Draw the header of a run, with its step, its loss and its newest record.

    Args:
        view (`View`): the run.
        more (`str`): HTML that follows.
    """
    run = view.run
    step = run.last("step")
    loss = run.last("loss")
    rate = run.last("learning_rate")
    known = []
    if step is not None:
        known.append(f"step {step:.0f}" + (f" of {run.max_steps}" if run.max_steps else ""))
    if loss is not None:
        known.append(f"loss {short(loss)}")
    if rate is not None:
        known.append(f"learning rate {short(rate)}")
    now = escape(" · ".join(known) or "nothing is logged yet")
    if view.alive_at is not None:
        now += f" · {_last_record(time.time() - view.alive_at, is_running=run.status == 'running')}"
    bar = ""
    if run.max_steps and step is not None:
        done = min(int(step), run.max_steps)
        bar = f'<progress max="{run.max_steps}" value="{done}" aria-label="steps"></progress>'
    return header(run, f'<p class="now">{now}</p>{bar}{more}')


def _last_record(seconds: float, *, is_running: bool) -> str:
    size, unit = 3600, "h"
    if seconds < 120:
        size, unit = 1, "s"
    elif seconds < 7200:
        size, unit = 60, "min"
    text = f"last record {max(0, round(seconds / size))} {unit} ago"
    is_quiet = is_running and seconds > _QUIET_S
    return f'<span class="quiet">{text}</span>' if is_quiet else f"<span>{text}</span>"
