"""One room per layout of a checkpoint on disk; `reader` and `writer` find the one of a strategy.

| strategy | layout | read | written |
|---|---|---|---|
| `single`, `ddp` | Trainer's whole files | whole.py | whole.py |
| `fsdp2` | two torch distributed checkpoints | fsdp2.py | fsdp2.py |
| `parallel` | one torch distributed checkpoint under canonical names | parallel.py | parallel.py |
| `zero1` to `zero3` | DeepSpeed's files of each rank, or universal ones | zero.py, universal.py | universal.py |

To add a layout, write `read_NAME(checkpoint) -> CheckpointView` and `write_NAME(view, folder, step=…, world_size=…)`
in a room of its own and give it a line here: it then converts to and from all others.
"""

from collections.abc import Callable
from pathlib import Path

from hfscale.checkpoint.formats.fsdp2 import read_fsdp2, write_fsdp2
from hfscale.checkpoint.formats.parallel import read_parallel, write_parallel
from hfscale.checkpoint.formats.universal import check_for_stage_3, is_universal, read_universal, write_universal
from hfscale.checkpoint.formats.view import CheckpointView
from hfscale.checkpoint.formats.whole import read_whole, write_whole
from hfscale.checkpoint.formats.zero import read_zero
from hfscale.errors import CheckpointError

STRATEGIES = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3", "parallel")
Writer = Callable[..., None]


def layout_of(strategy: str) -> str:
    """The layout's name; strategies of one layout read each other's files on any number of ranks, but for `zero…`."""
    return "whole" if strategy in ("single", "ddp") else strategy


def read_view(checkpoint: Path, strategy: str) -> CheckpointView:
    """The view of a checkpoint that was written under `strategy`.

    Raises:
        CheckpointError: a strategy without a reader, or a file that is missing, broken or would have to be unpickled.
    """
    if layout_of(strategy) == "whole":
        return read_whole(checkpoint)
    if strategy == "fsdp2":
        return read_fsdp2(checkpoint)
    if strategy == "parallel":
        return read_parallel(checkpoint)
    if strategy in STRATEGIES:
        return read_universal(checkpoint) if is_universal(checkpoint) else read_zero(checkpoint)
    raise CheckpointError(f"{checkpoint} was written under {strategy}: hfscale converts {', '.join(STRATEGIES)}")


def writer(strategy: str) -> Writer:
    """What writes a view as `strategy` reads it: `write(view, folder, step=…, world_size=…)`.

    Raises:
        CheckpointError: a strategy without a writer.
    """
    if layout_of(strategy) == "whole":
        return write_whole
    if strategy == "fsdp2":
        return write_fsdp2
    if strategy == "parallel":
        return write_parallel
    if strategy in STRATEGIES:
        return write_universal
    raise CheckpointError(f"nothing can be converted to {strategy}: choose one of {', '.join(STRATEGIES)}")


def check_target(view: CheckpointView, strategy: str) -> None:
    """Raise a CheckpointError where `strategy` cannot load all that `view` holds."""
    if strategy == "zero3":
        check_for_stage_3(view)
