"""MkDocs hook: fills in what is read from the package when the site is built.

- `::: hfscale.NAME` documents the public name NAME, whichever module defines it; `::: hfscale.recipe.NAME` a name of
  the recipes.
- `<!-- help: COMMAND -->` becomes the text that `hfscale COMMAND --help` prints.
- `<!-- options: FUNCTION -->` becomes the table of the options of `hfscale.plan` or `hfscale.estimate`. A callback
  gets the table of its options without such a line.
"""

import importlib
import io
import os
import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

import hfscale
import hfscale.recipe
from hfscale.cli import main
from hfscale.core.options import describe_options
from hfscale.planner.option_fields import described
from hfscale.planner.options import EstimateOptions, PlanOptions

_PUBLIC_NAME = re.compile(r"^::: (hfscale|hfscale\.recipe)\.(\w+)$", re.MULTILINE)
_HELP = re.compile(r"^<!-- help: ([\w ]+) -->$", re.MULTILINE)
_OPTIONS = re.compile(r"^<!-- options: (\w+) -->$", re.MULTILINE)
_CLASSES = {"plan": PlanOptions, "estimate": EstimateOptions}


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Return the page with module paths, which mkdocstrings can read without importing them, and help texts."""
    markdown = _PUBLIC_NAME.sub(lambda found: _public_name(found[1], found[2]), markdown)
    markdown = _OPTIONS.sub(lambda found: _options_table(described(_CLASSES[found[1]], found[1])), markdown)
    return _HELP.sub(lambda found: f"```text\n{_help_text(found[1].split())}```", markdown)


def _public_name(package: str, name: str) -> str:
    """Return the entry of a public name; below that of a callback the table of its options."""
    entry = f"::: {_home_of(package, name)}.{name}"
    documented = getattr(importlib.import_module(package), name, None)
    options = getattr(getattr(documented, "__init__", None), "options", None)
    if options is None:
        return entry
    without_signature = "    options:\n      show_signature: false"  # mkdocstrings would show one argument, `options`
    table = _options_table(describe_options(options))
    return f"{entry}\n{without_signature}\n\nOptions of `{name}`:\n\n{table}"


def _home_of(package: str, name: str) -> str:
    """Return the module that defines a name of a package that loads its names when they are first used."""
    homes = {"hfscale": hfscale._HOME_OF, "hfscale.recipe": hfscale.recipe._HOME_OF}
    return homes[package].get(name, package)


def _options_table(rows: Sequence[tuple[str, str, str, str]]) -> str:
    lines = ["| option | type | default | |", "|---|---|---|---|"]
    for name, kind, default, text in rows:
        shown = f"`{default}`" if default else ""
        lines.append(f"| `{name}` | {kind} | {shown} | {text[0].upper()}{text[1:]} |")
    return "\n".join(lines)


def _help_text(command: list[str]) -> str:
    os.environ["COLUMNS"] = "92"
    shown = io.StringIO()
    with redirect_stdout(shown):
        main([*command, "--help"])
    return shown.getvalue()
