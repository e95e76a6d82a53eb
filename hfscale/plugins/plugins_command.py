"""`hfscale plugins`: what to write into the configs of programs that make the Trainer themselves."""

from pathlib import Path
from typing import Annotated

import typer

from hfscale.errors import UsageError

_WORDS = {
    "axolotl": "hfscale.plugins.axolotl.HfscalePlugin",
    "llamafactory": "hfscale.plugins.llamafactory",
}
"""Programs that take a name -> the name."""


def plugins(
    program: Annotated[
        str, typer.Argument(help="axolotl, llamafactory or swift", metavar="PROGRAM")
    ],
) -> None:
    """Print what a program is given: for axolotl and LLaMA-Factory a name, for ms-swift the path of a file."""
    if program in _WORDS:
        print(_WORDS[program])
        return
    if program not in ("swift", "ms-swift"):
        raise UsageError(f"no plug-in for '{program}': choose axolotl, llamafactory or swift")
    print(Path(__file__).with_name("swift.py"))


COMMAND = plugins
EXAMPLES = ("--external_plugins $(hfscale plugins swift) --callbacks hfscale",)
