"""The formats of a checkpoint on disk: one reader and one writer for each.

| strategy | files | module |
|---|---|---|
| `single`, `ddp` | Trainer's unsharded files | unsharded.py |
| `fsdp2` | two torch distributed checkpoints | dcp.py |
| `parallel`, `native` | one torch distributed checkpoint with canonical names | parallel.py |
| `zero1` to `zero3` | read: the files of each DeepSpeed rank, or universal ones; written: universal ones | zero.py |
| any, if the weights are averaged | besides: one torch distributed checkpoint, without a layout | average.py |

Every reader of a strategy returns a `CheckpointView` (view.py), and every writer takes one. To add a format, write a
module with a `Format` (format.py) and add it to `FORMATS` below: it can then be converted from and to all others.
Which strategy has which format is in `hfscale.facts.strategies`.
"""

from pathlib import Path

from hfscale.checkpoint.formats import dcp, parallel, unsharded, zero
from hfscale.checkpoint.formats.format import Format
from hfscale.checkpoint.formats.view import CheckpointView
from hfscale.errors import CheckpointError
from hfscale.facts.strategies import CONVERTIBLE, facts_of

# What no other format has written is unsharded: it comes last
FORMATS = {each.name: each for each in (dcp.FORMAT, parallel.FORMAT, zero.FORMAT, unsharded.FORMAT)}
"""The formats by name."""


def format_written(checkpoint: Path) -> Format:
    """Return the format of the files of a checkpoint, which needs no manifest.

    Args:
        checkpoint (`Path`): the checkpoint.
    """
    return next(each for each in FORMATS.values() if each.wrote(checkpoint))


def read_view(checkpoint: Path, strategy: str) -> CheckpointView:
    """Return the view of a checkpoint that was written under `strategy`.

    Args:
        checkpoint (`Path`): the checkpoint.
        strategy (`str`): one of `hfscale.facts.strategies.CONVERTIBLE`.

    Raises:
        CheckpointError: the strategy has no reader, or a file is missing, broken or would have to be unpickled.
    """
    if strategy not in CONVERTIBLE:
        raise CheckpointError(
            f"{checkpoint} was written under {strategy}: hfscale converts {', '.join(CONVERTIBLE)}"
        )
    return FORMATS[facts_of(strategy).file_format].read(checkpoint)


def write_view(
    view: CheckpointView, folder: Path, strategy: str, *, step: int, world_size: int
) -> None:
    """Write a view in the format that `strategy` loads.

    Args:
        view (`CheckpointView`): what is written.
        folder (`Path`): existing folder of the new checkpoint.
        strategy (`str`): one of `hfscale.facts.strategies.CONVERTIBLE`.
        step (`int`): optimizer steps taken.
        world_size (`int`): number of processes that will resume.

    Raises:
        CheckpointError: the strategy has no writer or cannot load all that `view` holds, or a tensor of it cannot be
            read or written.
    """
    if strategy not in CONVERTIBLE:
        raise CheckpointError(
            f"nothing can be converted to {strategy}: choose one of {', '.join(CONVERTIBLE)}"
        )
    facts = facts_of(strategy)
    target = FORMATS[facts.file_format]
    target.check(view, facts)
    target.write(view, folder, step=step, world_size=world_size)
