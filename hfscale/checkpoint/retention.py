"""Drops the training state of older checkpoints (`state_limit`), and keeps their weights.

The state of AdamW has twice the size of fp32 weights, and only the newest checkpoints are resumed from. What is left
is what `save_only_model` writes: it can be evaluated, averaged and exported, and no run resumes from it. Under
DeepSpeed in 16 bits these weights are the rounded ones; the fp32 masters are a part of the state.
"""

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from hfscale.checkpoint.manifest import Manifest, read_manifest
from hfscale.checkpoint.store import checkpoint_step, list_checkpoints
from hfscale.core.durable_files import flush_folders, write_atomically
from hfscale.core.run_files import MANIFEST_NAME

_STATE = re.compile(
    r"optimizer\.(pt|bin)|optimizer_\d+/.*|(scheduler|scaler)\.pt|rng_state(_\d+)?\.pth"
    r"|global_step\d+/.*|latest|zero_to_fp32\.py"
    r"|(data_order|hfscale_[a-z_]+)_\d+\.json|[^/]+_outer_\d+\.safetensors"
)
"""Files that only a resume reads: of Trainer, of Accelerate's FSDP2, of DeepSpeed, of hfscale."""
_WEIGHTS = re.compile(
    r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors|(pytorch_model|adapter_model)(-\d+-of-\d+)?\.bin"
    r"|pytorch_model_fsdp\.bin|pytorch_model_fsdp_\d+/\.metadata"
)
"""Files by which a checkpoint has its weights apart from its state."""


def keeps_weights_apart(manifest: Manifest) -> bool:
    """Return whether a checkpoint's weights stay readable without its state.

    They do not under ZeRO-3 where its shards are not gathered, under `ParallelTrainer` and where transformers shards.
    """
    return any(_WEIGHTS.fullmatch(name) for name in manifest.files)


def without_state(manifest: Manifest) -> Manifest:
    """Return the manifest of what is left of a checkpoint whose state is dropped."""
    left = {name: record for name, record in manifest.files.items() if not _STATE.fullmatch(name)}
    return replace(manifest, files=left)


def state_files(manifest: Manifest) -> list[str]:
    """Return the files of a checkpoint's state, as paths relative to it; [] if its weights are not apart from them."""
    if not keeps_weights_apart(manifest):
        return []
    return [name for name in manifest.files if _STATE.fullmatch(name)]


def steps_without_state(
    steps: Collection[int], *, limit: int, best: int | None = None
) -> list[int]:
    """Return the steps of the checkpoints whose state is not kept, in ascending order.

    Args:
        steps (`Collection[int]`): the steps of the committed checkpoints that have their state.
        limit (`int`): number of checkpoints that keep it, at least 1: the newest ones.
        best (`int`, *optional*): the step of the best checkpoint, which keeps it too, and does not count: DeepSpeed
            loads the best model together with its state.
    """
    return [step for step in sorted(steps)[:-limit] if step != best]


def drop_states(run_dir: Path, *, limit: int, best: Path | None = None) -> list[Path]:
    """Delete the state of all but the newest checkpoints of a run.

    The manifest is replaced before the files are deleted: a crash in between leaves files that belong to nothing, and
    the next call deletes them.

    Args:
        run_dir (`Path`): the folder of the checkpoints.
        limit (`int`): number of checkpoints that keep their state, at least 1.
        best (`Path`, *optional*): the best checkpoint, which keeps it too.

    Returns:
        `list[Path]`: the checkpoints that have lost their state.

    Raises:
        OSError: a file cannot be written or deleted.
        CheckpointError: a manifest is invalid.
    """
    committed = {
        checkpoint_step(path): path
        for path in list_checkpoints(run_dir)
        if (path / MANIFEST_NAME).is_file()
    }
    resumable = {step for step, path in committed.items() if _has_state(path)}
    kept = next(
        (step for step, path in committed.items() if best and path.resolve() == best.resolve()),
        None,
    )
    dropped = []
    for step in steps_without_state(resumable, limit=limit, best=kept):
        if _drop(committed[step]):
            dropped.append(committed[step])
    return dropped


def _has_state(checkpoint: Path) -> bool:
    """Return whether files of the state are there, also those that an interrupted call has left."""
    return any(
        _STATE.fullmatch(path.relative_to(checkpoint).as_posix())
        for path in checkpoint.rglob("*")
        if path.is_file()
    )


def _drop(checkpoint: Path) -> bool:
    manifest = read_manifest(checkpoint)
    if not keeps_weights_apart(manifest):
        return False
    write_atomically(checkpoint / MANIFEST_NAME, without_state(manifest).to_json())
    for path in sorted(checkpoint.rglob("*"), reverse=True):
        name = path.relative_to(checkpoint).as_posix()
        if path.is_file() and _STATE.fullmatch(name):
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    flush_folders(checkpoint)
    return True
