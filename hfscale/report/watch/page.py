"""The page of `hfscale watch`: one document that loads nothing but the data of its own server.

Its script makes elements and text nodes only, so that no text of a run is interpreted as HTML, and the policy allows
this script and this style sheet by their hashes and nothing else.
"""

import base64
import hashlib
from html import escape
from pathlib import Path

from hfscale import __version__
from hfscale.report.html import STYLE

_FOLDER = Path(__file__).parent
_STYLE = STYLE + (_FOLDER / "page.css").read_text(encoding="utf-8")
_SCRIPT = (_FOLDER / "page.js").read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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
