"""A manifest for a checkpoint that plain Trainer wrote."""

import re
from pathlib import Path

from hfscale.checkpoint.formats import format_written
from hfscale.checkpoint.manifest import Manifest
from hfscale.core.text_files import read_json
from hfscale.errors import CheckpointError, UsageError

_RNG_FILE_OF_RANK = re.compile(r"rng_state_(\d+)\.pth")


def infer_manifest(checkpoint: Path, *, global_batch_size: int | None) -> Manifest:
    """Return a manifest, without files, for a checkpoint that plain Trainer wrote.

    The strategy, step and number of ranks come from the names of its files and the counters in them.

    Args:
        checkpoint (`Path`): the checkpoint.
        global_batch_size (`int`, *optional*): sequences per optimizer step. DeepSpeed stores it; plain Trainer does
            not, so for other strategies it is required.

    Raises:
        UsageError: `global_batch_size` is required.
        CheckpointError: it is not a checkpoint of a Trainer, or a file of DeepSpeed is missing or broken.
    """
    try:
        step = int(read_json(checkpoint / "trainer_state.json")["global_step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint of a Trainer: trainer_state.json: {error}"
        ) from None
    world_size = (
        sum(bool(_RNG_FILE_OF_RANK.fullmatch(path.name)) for path in checkpoint.iterdir()) or 1
    )
    origin = format_written(checkpoint).origin(checkpoint, world_size)
    global_batch_size = global_batch_size or origin.global_batch_size
    if global_batch_size is None:
        raise UsageError(
            f"{checkpoint} has no manifest, and plain Trainer does not store the global batch size: give "
            "--global-batch-size"
        )
    return Manifest(
        step=step,
        strategy=origin.strategy,
        world_size=world_size,
        global_batch_size=global_batch_size,
        files={},
    )
