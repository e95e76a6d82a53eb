"""MkDocs hook: fills in what is read from the package when the site is built.

- `::: hfscale.NAME` documents the public name NAME, whichever module defines it.
- `<!-- help: COMMAND -->` becomes the text that `hfscale COMMAND --help` prints.
- `<!-- options: FUNCTION -->` becomes the table of the options of `hfscale.plan` or `hfscale.estimate`.
"""

import io
import os
import re
from contextlib import redirect_stdout
from typing import Any

from hfscale import _HOME_OF
from hfscale.cli import main
from hfscale.planner.options import EstimateOptions, PlanOptions, described

_PUBLIC_NAME = re.compile(r"^::: hfscale\.(\w+)$", re.MULTILINE)
_HELP = re.compile(r"^<!-- help: ([\w ]+) -->$", re.MULTILINE)
_OPTIONS = re.compile(r"^<!-- options: (\w+) -->$", re.MULTILINE)
_CLASSES = {"plan": PlanOptions, "estimate": EstimateOptions}


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Return the page with module paths, which mkdocstrings can read without importing them, and help texts."""
    markdown = _PUBLIC_NAME.sub(lambda found: f"::: {_HOME_OF.get(found[1], 'hfscale')}.{found[1]}", markdown)
    markdown = _OPTIONS.sub(lambda found: _options_table(found[1]), markdown)
    return _HELP.sub(lambda found: f"```text\n{_help_text(found[1].split())}```", markdown)


def _options_table(function: str) -> str:
    lines = ["| option | type | default | |", "|---|---|---|---|"]
    for name, kind, default, text in described(_CLASSES[function], function):
        shown = f"`{default}`" if default else ""
        lines.append(f"| `{name}` | {kind} | {shown} | {text[0].upper()}{text[1:]} |")
    return "\n".join(lines)


def _help_text(command: list[str]) -> str:
    os.environ["COLUMNS"] = "92"
    shown = io.StringIO()
    with redirect_stdout(shown):
        main([*command, "--help"])
    return shown.getvalue()
