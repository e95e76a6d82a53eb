"""Which checkpoint a run resumes from: the newest that is verified, or that plain Trainer has completed.

Plain Trainer writes no manifest. Its checkpoints are used if every file that a resume needs is there with its full
length; a changed byte in them is not noticed, since there is no hash to compare it with.
"""

import json
import zipfile
from pathlib import Path

from hfscale.checkpoint.formats.dcp import MODEL_FOLDER
from hfscale.checkpoint.formats.safetensors_files import read_weights
from hfscale.checkpoint.formats.zero import tag_folder
from hfscale.checkpoint.manifest import MANIFEST_NAME, checkpoint_files
from hfscale.checkpoint.pickles import METADATA_NAME, read_dcp_metadata
from hfscale.checkpoint.store import checkpoint_step, list_checkpoints, verify
from hfscale.errors import CheckpointError
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

_WEIGHTS = {"model": "pytorch_model.bin", "adapter_model": "adapter_model.bin"}
"""What Trainer saves the weights as: the stem of the safetensors files, and the file of `torch.save`."""
_LAST_WRITTEN = "trainer_state.json"
_SCHEDULER = "scheduler.pt"


def newest_usable(output_dir: Path) -> Path | None:
    """Return the newest checkpoint of a run that is verified or that plain Trainer has completed.

    Candidates are read completely, newest first. A warning says why one was skipped, and that one without a manifest
    has no hashes.

    Args:
        output_dir (`Path`): output directory of the run.

    Returns:
        `Path` or `None`: the checkpoint; None if no folder `checkpoint-N` exists.

    Raises:
        CheckpointError: there are checkpoints and none is usable. The message names the newest and what is wrong.
    """
    reasons = []
    for checkpoint in reversed(list_checkpoints(output_dir)):
        try:
            if (checkpoint / MANIFEST_NAME).is_file():
                verify(checkpoint)
            else:
                check_complete(checkpoint)
                logger.warning(
                    "%s has no %s, as plain Trainer leaves it: all its files are there, but without hashes a changed "
                    "byte is not noticed",
                    checkpoint,
                    MANIFEST_NAME,
                )
        except CheckpointError as error:
            logger.warning("checkpoint skipped: %s", error)
            reasons.append(str(error))
            continue
        return checkpoint
    if reasons:
        others = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise CheckpointError(
            f"no checkpoint of {output_dir} can be resumed from: {reasons[0]}{others}; restore its files, or start "
            "from scratch with --resume_from_checkpoint false"
        )
    return None


def check_complete(checkpoint: Path) -> None:
    """Check that a checkpoint of plain Trainer has every file that a resume needs, and each with its full length.

    Args:
        checkpoint (`Path`): a folder `checkpoint-N` without a manifest.

    Raises:
        CheckpointError: a file is missing, shorter than it says, or of another step.
    """
    _check_state(checkpoint)
    if (checkpoint / "latest").is_file():
        folder = tag_folder(checkpoint)
        for kind in ("model", "optim"):
            if not any(folder.glob(f"*_{kind}_states.pt")):
                raise CheckpointError(f"{checkpoint} is incomplete: {folder.name} has no *_{kind}_states.pt")
    elif (checkpoint / MODEL_FOLDER).is_dir():
        _check_has(checkpoint, f"optimizer_0/{METADATA_NAME}", f"{MODEL_FOLDER}/{METADATA_NAME}", _SCHEDULER)
    else:
        _check_has(checkpoint, "optimizer.pt", _SCHEDULER)
        if not any(_has_weights(checkpoint, stem) for stem in _WEIGHTS):
            raise CheckpointError(f"{checkpoint} is incomplete: it has no weights")
    for name in checkpoint_files(checkpoint):
        _check_length(checkpoint / name)


def _check_state(checkpoint: Path) -> None:
    """Check the file that Trainer writes last."""
    path = checkpoint / _LAST_WRITTEN
    try:
        step = json.loads(path.read_text(encoding="utf-8"))["global_step"]
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint} is incomplete: it has no {_LAST_WRITTEN}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__} {error}") from None
    if step != checkpoint_step(checkpoint):
        raise CheckpointError(f"{checkpoint} is corrupt: its {_LAST_WRITTEN} is of step {step}")


def _check_has(checkpoint: Path, *names: str) -> None:
    missing = next((name for name in names if not (checkpoint / name).is_file()), None)
    if missing is not None:
        raise CheckpointError(f"{checkpoint} is incomplete: it has no {missing}")


def _has_weights(checkpoint: Path, stem: str) -> bool:
    """Whether the weights are there; all the files that an index names must be, with the length in their header."""
    if (checkpoint / _WEIGHTS[stem]).is_file():
        return True
    try:
        return read_weights(checkpoint, stem) is not None
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint} is incomplete: {error}") from None


def _check_length(path: Path) -> None:
    """Check that a file ends where its format says: a zip archive has its table at the end, DCP lists its pieces."""
    if path.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path.parent} is incomplete: {path.name} is not a complete file of torch.save")
    if path.name == METADATA_NAME:
        for entry in read_dcp_metadata(path.parent).values():
            for chunk in entry.chunks:
                piece = path.parent / chunk.file
                if not piece.is_file() or piece.stat().st_size < chunk.start + chunk.length:
                    raise CheckpointError(f"{path.parent} is incomplete: {chunk.file} is missing or too short")
