"""Whether a run can resume from a checkpoint: from one that is verified, or that plain Trainer has completed.

Plain Trainer writes no manifest. Its checkpoints are used if every file that a resume needs is there with its full
length; a changed byte in them is not noticed, since there is no hash to compare it with.
"""

import zipfile
from pathlib import Path

from hfscale.checkpoint.formats.dcp import MODEL_FOLDER
from hfscale.checkpoint.formats.safetensors_files import read_weights
from hfscale.checkpoint.formats.zero import tag_folder
from hfscale.checkpoint.manifest import checkpoint_files, read_manifest
from hfscale.checkpoint.pickles import METADATA_NAME, check_pickles, read_dcp_metadata
from hfscale.checkpoint.store import checkpoint_step, verify, wait_until_visible
from hfscale.checkpoint.untrusted import check_links
from hfscale.core.exchanges import Exchanges
from hfscale.core.logging import get_logger
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.core.text_files import read_json
from hfscale.errors import CheckpointError

logger = get_logger(__name__)

_WEIGHTS = {"model": "pytorch_model.bin", "adapter_model": "adapter_model.bin"}
"""What Trainer saves the weights as: the stem of the safetensors files, and the file of `torch.save`."""
_LAST_WRITTEN = "trainer_state.json"
_SCHEDULER = "scheduler.pt"


def why_not_resumable(checkpoint: Path, exchanges: Exchanges) -> str | None:
    """Verify a checkpoint, each rank a share of its files; one without a manifest is only checked to be complete.

    Every rank must call it.

    Args:
        checkpoint (`Path`): the folder of the checkpoint.
        exchanges (`Exchanges`): between the ranks that read it together.

    Returns:
        `str` or `None`: why no run can resume from it; None if one can.

    Raises:
        CheckpointError: a rank does not see the checkpoint; raised on every rank.
    """
    has_manifest = exchanges.on_rank_0("manifest", (checkpoint / MANIFEST_NAME).is_file)
    check_visible(checkpoint / (MANIFEST_NAME if has_manifest else _LAST_WRITTEN), exchanges)
    problem: str | None = None
    with exchanges.agreed("verification"):
        try:
            if has_manifest:
                manifest = verify(checkpoint, share=(exchanges.rank, exchanges.world_size))
                model_only = manifest.why_model_only()
                problem = f"{checkpoint}: {model_only}" if model_only is not None else None
            elif exchanges.rank == 0:
                check_complete(checkpoint)
        except CheckpointError as error:
            problem = str(error)
    problem = exchanges.combine(
        "problems", problem, lambda found: next((text for text in found if text), None)
    )
    if problem is None and not has_manifest:
        logger.warning(
            "%s has no %s, as plain Trainer leaves it: all its files are there, but without hashes a changed byte is "
            "not noticed",
            checkpoint,
            MANIFEST_NAME,
        )
    return problem


def check_pickles_on_all_ranks(checkpoint: Path, exchanges: Exchanges) -> None:
    """Check the pickles of a verified checkpoint, each rank a share of its files. Every rank must call it.

    Its files match its manifest, but anybody could have written both.

    Args:
        checkpoint (`Path`): the folder of the checkpoint.
        exchanges (`Exchanges`): between the ranks that read it together.

    Raises:
        CheckpointError: a pickle has more than tensors and plain values; raised on every rank.
    """
    has_manifest = exchanges.on_rank_0("manifest", (checkpoint / MANIFEST_NAME).is_file)
    with exchanges.agreed("pickles"):
        recorded = read_manifest(checkpoint) if has_manifest else None
        if exchanges.rank == 0:
            check_links(checkpoint)
            known = recorded.files if recorded is not None else {}
            check_pickles(
                checkpoint, [name for name in checkpoint_files(checkpoint) if name not in known]
            )
        if recorded is not None:
            check_pickles(checkpoint, recorded.share(exchanges.rank, exchanges.world_size))


def check_visible(path: Path, exchanges: Exchanges) -> None:
    """Check that every rank sees, after some waiting, a file that rank 0 sees or looks for. Every rank must call it.

    Args:
        path (`Path`): a file of a checkpoint.
        exchanges (`Exchanges`): between all ranks.

    Raises:
        CheckpointError: a rank does not see it; raised on every rank.
    """
    is_there = exchanges.on_rank_0("is there", path.is_file)
    sees = not is_there or wait_until_visible(path)
    without = exchanges.combine(
        "visible", sees, lambda ranks: [rank for rank, sees in enumerate(ranks) if not sees]
    )
    if without:
        raise CheckpointError(
            f"rank {without[-1]} does not see {path.parent}, which rank 0 has read: put output_dir on storage that "
            "every machine shares"
        )


def has_been_complete(checkpoint: Path) -> bool:
    """Return whether a save of this folder was ever completed: by its manifest, or the file that Trainer writes last.

    Args:
        checkpoint (`Path`): a folder `checkpoint-N`.
    """
    return (checkpoint / MANIFEST_NAME).is_file() or (checkpoint / _LAST_WRITTEN).is_file()


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
                raise CheckpointError(
                    f"{checkpoint} is incomplete: {folder.name} has no *_{kind}_states.pt"
                )
    elif (checkpoint / MODEL_FOLDER).is_dir():
        _check_has(
            checkpoint,
            f"optimizer_0/{METADATA_NAME}",
            f"{MODEL_FOLDER}/{METADATA_NAME}",
            _SCHEDULER,
        )
    else:
        _check_has(checkpoint, "optimizer.pt", _SCHEDULER)
        if not any(has_weights(checkpoint, stem) for stem in _WEIGHTS):
            raise CheckpointError(f"{checkpoint} is incomplete: it has no weights")
    for name in checkpoint_files(checkpoint):
        _check_length(checkpoint / name)


def _check_state(checkpoint: Path) -> None:
    """Check the file that Trainer writes last."""
    path = checkpoint / _LAST_WRITTEN
    try:
        step = read_json(path)["global_step"]
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


def has_weights(checkpoint: Path, stem: str) -> bool:
    """Return whether the weights are there: all files that an index names, with the length in their header.

    Args:
        checkpoint (`Path`): a folder `checkpoint-N`.
        stem (`str`): `model`, or `adapter_model`.

    Raises:
        CheckpointError: a file of them is missing or shorter than it says.
    """
    packed = checkpoint / _WEIGHTS[stem]
    index = packed.with_suffix(".bin.index.json")
    if packed.is_file() or index.is_file():
        return True
    try:
        return read_weights(checkpoint, stem) is not None
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint} is incomplete: {error}") from None


def _check_length(path: Path) -> None:
    """Check that a file ends where its format says: a zip archive has its table at the end, DCP lists its pieces."""
    if path.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path.parent} is incomplete: {path.name} is not a complete file of torch.save"
        )
    if path.name == METADATA_NAME:
        for entry in read_dcp_metadata(path.parent).values():
            for chunk in entry.chunks:
                piece = path.parent / chunk.file
                if not piece.is_file() or piece.stat().st_size < chunk.start + chunk.length:
                    raise CheckpointError(
                        f"{path.parent} is incomplete: {chunk.file} is missing or too short"
                    )
