"""What a checkpoint without a manifest says of itself: one that plain Trainer wrote."""

import json
import re
from pathlib import Path

from hfscale.checkpoint.formats.archives import load_archive
from hfscale.checkpoint.formats.fsdp2 import MODEL_FOLDER
from hfscale.checkpoint.formats.parallel import FOLDER, PARALLEL_NAME
from hfscale.checkpoint.formats.zero import tag_folder
from hfscale.checkpoint.manifest import Manifest
from hfscale.errors import CheckpointError, UsageError

_RNG_OF_A_RANK = re.compile(r"rng_state_(\d+)\.pth")


def describe(checkpoint: Path, *, global_batch_size: int | None) -> Manifest:
    """A manifest without files, of what can be told from the names of the files and the counters in them.

    Args:
        global_batch_size (`int`, *optional*): sequences per step; plain Trainer keeps it nowhere, DeepSpeed does.

    Raises:
        UsageError: `global_batch_size` is needed.
        CheckpointError: it is no checkpoint of a Trainer.
    """
    try:
        step = int(json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{checkpoint} is no checkpoint of a Trainer: trainer_state.json: {error}") from None
    world_size = sum(bool(_RNG_OF_A_RANK.fullmatch(path.name)) for path in checkpoint.iterdir()) or 1
    if (checkpoint / MODEL_FOLDER).is_dir():
        strategy = "fsdp2"
    elif (checkpoint / FOLDER).is_dir() and (checkpoint / PARALLEL_NAME).is_file():
        strategy = "parallel"
    elif (checkpoint / "latest").is_file():
        folder = tag_folder(checkpoint)
        path = folder / "mp_rank_00_model_states.pt"
        path = path if path.is_file() else folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
        config = load_archive(path)["ds_config"]
        strategy = f"zero{config['zero_optimization']['stage']}"
        global_batch_size = global_batch_size or config.get("train_batch_size")
    else:
        strategy = "ddp" if world_size > 1 else "single"
    if global_batch_size is None:
        raise UsageError(
            f"{checkpoint} has no manifest, and plain Trainer does not keep the global batch: give --global-batch-size"
        )
    return Manifest(step=step, strategy=strategy, world_size=world_size, global_batch_size=global_batch_size, files={})
