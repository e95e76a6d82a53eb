"""The formats of a checkpoint on disk: for each training strategy, one reader and one writer.

| strategy | files | module |
|---|---|---|
| `single`, `ddp` | Trainer's unsharded files | unsharded.py |
| `fsdp2` | two torch distributed checkpoints | dcp.py |
| `parallel`, `native` | one torch distributed checkpoint with canonical names | parallel.py |
| `zero1` to `zero3` | read: the files of each DeepSpeed rank, or universal ones; written: universal ones | zero.py |

Every reader returns a `CheckpointView` (view.py), and every writer takes one. To add a format, write a module with
`read_NAME(checkpoint) -> CheckpointView` and `write_NAME(view, folder)` and add it to the functions below: it can then
be converted from and to all others.
"""

from pathlib import Path

from hfscale.checkpoint.formats.dcp import read_fsdp2, write_fsdp2
from hfscale.checkpoint.formats.parallel import read_parallel, write_parallel
from hfscale.checkpoint.formats.unsharded import read_unsharded, write_unsharded
from hfscale.checkpoint.formats.view import CheckpointView
from hfscale.checkpoint.formats.zero import (
    check_for_stage_3,
    is_universal,
    read_universal,
    read_zero,
    write_universal,
)
from hfscale.errors import CheckpointError

STRATEGIES = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3", "parallel", "native")


def layout_of(strategy: str) -> str:
    """Return the name of the file layout that `strategy` uses.

    Strategies of one layout read each other's files on any number of ranks, except for `zero1`, `zero2` and `zero3`.
    """
    return {"single": "unsharded", "ddp": "unsharded", "native": "parallel"}.get(strategy, strategy)


def read_view(checkpoint: Path, strategy: str) -> CheckpointView:
    """Return the view of a checkpoint that was written under `strategy`.

    Args:
        checkpoint (`Path`): the checkpoint.
        strategy (`str`): one of `STRATEGIES`.

    Raises:
        CheckpointError: the strategy has no reader, or a file is missing, broken or would have to be unpickled.
    """
    if layout_of(strategy) == "unsharded":
        return read_unsharded(checkpoint)
    if strategy == "fsdp2":
        return read_fsdp2(checkpoint)
    if layout_of(strategy) == "parallel":
        return read_parallel(checkpoint)
    if strategy in STRATEGIES:
        return read_universal(checkpoint) if is_universal(checkpoint) else read_zero(checkpoint)
    raise CheckpointError(
        f"{checkpoint} was written under {strategy}: hfscale converts {', '.join(STRATEGIES)}"
    )


def write_view(
    view: CheckpointView, folder: Path, strategy: str, *, step: int, world_size: int
) -> None:
    """Write a view in the format that `strategy` loads.

    Args:
        view (`CheckpointView`): what is written.
        folder (`Path`): existing folder of the new checkpoint.
        strategy (`str`): one of `STRATEGIES`.
        step (`int`): optimizer steps taken.
        world_size (`int`): number of processes that will resume.

    Raises:
        CheckpointError: the strategy has no writer, or a tensor of `view` cannot be read or written.
    """
    if layout_of(strategy) == "unsharded":
        write_unsharded(view, folder)
    elif strategy == "fsdp2":
        write_fsdp2(view, folder)
    elif layout_of(strategy) == "parallel":
        write_parallel(view, folder)
    elif strategy in STRATEGIES:
        write_universal(view, folder, step=step, world_size=world_size)
    else:
        raise CheckpointError(
            f"nothing can be converted to {strategy}: choose one of {', '.join(STRATEGIES)}"
        )


def check_target(view: CheckpointView, strategy: str) -> None:
    """Check that `strategy` can load everything that `view` holds.

    Args:
        view (`CheckpointView`): the view to be written.
        strategy (`str`): strategy that will load it. Only `zero3` has restrictions (see `check_for_stage_3`).

    Raises:
        CheckpointError: `strategy` cannot load the optimizer's states or groups.
    """
    if strategy == "zero3":
        check_for_stage_3(view)
