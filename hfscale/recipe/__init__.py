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
| `trl`, `rewards` | TRL's arguments, records and reference models; reward functions |
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


def require_in_one_line(feature: str) -> None:
    """Call `require` where modules are imported, before `entrypoint.run` can print errors as one line.

    Args:
        feature (`str`): one of `FEATURES`.

    Raises:
        MissingDependencyError: a package that it needs is not installed or too old.
    """
    try:
        require(feature)
    except MissingDependencyError:
        sys.excepthook = _print_one_line
        raise


require_in_one_line("recipes")
