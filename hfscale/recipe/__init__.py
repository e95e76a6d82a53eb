"""What the recipes share. A recipe imports these functions and calls them in the order of this table.

| module | contents |
|---|---|
| `parsing` | `--config`, the command line, `--help` |
| `arguments` | the flags as dataclasses with their checks, and the callback that is built of them |
| `layout`, `compatibility` | sizes of the parallel axes; checks that refuse combinations that do not work |
| `entrypoint` | output directory, errors as one line, exit codes, exported model, summary |
| `resume` | the checkpoint to resume from, and the accumulation that keeps the global batch |
| `data`, `corpus` | text packed into sequences; the embedded default text, tokenizer and model |
| `models`, `compression` | loading of model, tokenizer and adapters; gradient compression of DDP |
"""

import sys
from types import TracebackType

from hfscale.errors import MissingDependencyError
from hfscale.utils.versions import require


def _print_one_line(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if isinstance(error, MissingDependencyError):
        print(f"hfscale: error: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


# The modules of this package cannot be imported where the requirements are not met. A recipe imports them before it
# can call `entrypoint.run`, which prints errors as one line.
try:
    require("recipes")
except MissingDependencyError:
    sys.excepthook = _print_one_line
    raise
