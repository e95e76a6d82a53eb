"""MkDocs hook: fills in what is read from the package when the site is built.

- `::: hfscale.NAME` documents the public name NAME, whichever module defines it.
- `<!-- help: COMMAND -->` becomes the text that `hfscale COMMAND --help` prints.
"""

import io
import os
import re
from contextlib import redirect_stdout
from typing import Any

from hfscale import _HOME_OF
from hfscale.cli import main

_PUBLIC_NAME = re.compile(r"^::: hfscale\.(\w+)$", re.MULTILINE)
_HELP = re.compile(r"^<!-- help: ([\w ]+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Return the page with module paths, which mkdocstrings can read without importing them, and help texts."""
    markdown = _PUBLIC_NAME.sub(lambda found: f"::: {_HOME_OF.get(found[1], 'hfscale')}.{found[1]}", markdown)
    return _HELP.sub(lambda found: f"```text\n{_help_text(found[1].split())}```", markdown)


def _help_text(command: list[str]) -> str:
    os.environ["COLUMNS"] = "92"
    shown = io.StringIO()
    with redirect_stdout(shown):
        main([*command, "--help"])
    return shown.getvalue()
