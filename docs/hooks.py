"""MkDocs hook: fills in what is read from the package when the site is built.

- `::: hfscale.NAME` documents the public name NAME, whichever module defines it; `::: hfscale.recipe.NAME` a name of
  the recipes.
- `<!-- help: COMMAND -->` becomes the text that `hfscale COMMAND --help` prints.
- `<!-- options: FUNCTION -->` becomes the table of the options of `hfscale.plan` or `hfscale.estimate`.
"""

import io
import os
import re
from contextlib import redirect_stdout
from typing import Any

import hfscale
import hfscale.recipe
from hfscale.cli import main
from hfscale.planner.option_fields import described
from hfscale.planner.options import EstimateOptions, PlanOptions

_PUBLIC_NAME = re.compile(r"^::: (hfscale|hfscale\.recipe)\.(\w+)$", re.MULTILINE)
_HELP = re.compile(r"^<!-- help: ([\w ]+) -->$", re.MULTILINE)
_OPTIONS = re.compile(r"^<!-- options: (\w+) -->$", re.MULTILINE)
_CLASSES = {"plan": PlanOptions, "estimate": EstimateOptions}


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Return the page with module paths, which mkdocstrings can read without importing them, and help texts."""
    markdown = _PUBLIC_NAME.sub(lambda found: f"::: {_home_of(found[1], found[2])}.{found[2]}", markdown)
    markdown = _OPTIONS.sub(lambda found: _options_table(found[1]), markdown)
    return _HELP.sub(lambda found: f"```text\n{_help_text(found[1].split())}```", markdown)


def _home_of(package: str, name: str) -> str:
    """Return the module that defines a name of a package that loads its names when they are first used."""
    homes = {"hfscale": hfscale._HOME_OF, "hfscale.recipe": hfscale.recipe._HOME_OF}
    return homes[package].get(name, package)


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
