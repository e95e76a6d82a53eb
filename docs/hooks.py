"""MkDocs hook: `::: hfscale.NAME` in a page documents the public name NAME, wherever its module lies."""

import re
from typing import Any

from hfscale import _HOME_OF

_PUBLIC_NAME = re.compile(r"^::: hfscale\.(\w+)$", re.MULTILINE)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Replace a public name by the module path that mkdocstrings can read without importing it."""
    return _PUBLIC_NAME.sub(lambda found: f"::: {_HOME_OF.get(found[1], 'hfscale')}.{found[1]}", markdown)
