"""Where a relaunched command resumes, and with which accumulation."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfscale.checkpoint.best_pickles import check_best_on_all_ranks
from hfscale.checkpoint.conversion import read_origin
from hfscale.checkpoint.load_once import check_copied_pickles, copy_checkpoint
from hfscale.checkpoint.loading import discard_conversions, readable_checkpoint
from hfscale.checkpoint.manifest import read_manifest
from hfscale.checkpoint.resumable import (
    check_pickles_on_all_ranks,
    why_not_resumable,
)
from hfscale.checkpoint.resume import find_resumable
from hfscale.core.collectives import START
from hfscale.core.counts import counted
from hfscale.core.logging import get_logger
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.core.run_memory import RunMemory
from hfscale.core.spelling import spelled
from hfscale.core.text_files import read_json
from hfscale.errors import CheckpointError, LayoutError, UsageError
from hfscale.facts.batch_split import split_batch
from hfscale.facts.strategies import facts_of
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.state import output_folder
from hfscale.trainer.strategies.requested import requested

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

logger = get_logger(__name__)

RESULTS_NAME = "all_results.json"
"""The file that `trainer.save_metrics("all", …)` writes."""
TRAINER_STATE_NAME = "trainer_state.json"


def resume_point(args: "TrainingArguments", remote: str | None = None) -> str | None:
    """Return the checkpoint for `trainer.train(resume_from_checkpoint=…)`. Call it on every rank.

    With `--resume_from_checkpoint true` it is the newest checkpoint of `output_dir` that is verified, or that plain
    Trainer has completed (`latest_checkpoint`), or None if there are no checkpoints; with `false`
    it is None; any other value is the path of a checkpoint. Each rank reads and verifies a share of its files. With
    `true`, a newer checkpoint in the remote store is fetched first. When `hfscale run` has restarted a training that
    had begun, the value is taken as `true`, and a newer snapshot in host memory is used. With `--load_once` the
    checkpoint is copied to each node.

    Args:
        args (`TrainingArguments`): `output_dir` and `resume_from_checkpoint`.
        remote (`str`, *optional*): the URL of the remote copy of the checkpoints.

    Returns:
        `str`, *optional*: the path of the checkpoint, or of this node's copy.

    Raises:
        UsageError: the path is not a checkpoint.
        CheckpointError: the checkpoint at the path is corrupt or has a pickle with more than tensors and plain values;
            or there are checkpoints and none is usable; or a rank does not see the checkpoint that the main process
            has found.
        StorageError: the remote store cannot be read, and there is no local checkpoint.
    """
    requested = str(args.resume_from_checkpoint)
    folder: str | None = vars(args).get("load_once")
    word = requested.lower()
    names_one = word not in ("true", "false")
    # The flag was meant for the first launch, if it has left a checkpoint
    is_restarted = START.on_rank_0("restarted", lambda: _has_begun(output_folder(args)))
    if not is_restarted:
        if word == "false":
            return None
        if names_one:
            return _given_checkpoint(Path(requested), args)
    latest = find_resumable(output_folder(args), remote, load_once=folder)
    if latest.path is None:
        _check_none_skipped(output_folder(args), latest.skipped)
        if names_one:
            return _given_checkpoint(Path(requested), args)
        return None
    _check_best(latest.path, args)
    is_on_disk = (latest.original or latest.path).parent == output_folder(args)
    logger.info(
        "continues from %s of %s",
        latest.path.name,
        args.output_dir if is_on_disk else "the host's memory",
    )
    return str(latest.path)


def _given_checkpoint(checkpoint: Path, args: "TrainingArguments") -> str:
    """Return the checkpoint that the flag names, once it is checked, or its copy on this node with `--load_once`.

    Every rank must call it.
    """
    has_manifest = START.on_rank_0("given checkpoint", lambda: _check_given(checkpoint))
    folder: str | None = vars(args).get("load_once")
    copy: Path | None = None
    problem = None
    if folder is not None:
        copy, problem = copy_checkpoint(checkpoint, folder, START)
    elif has_manifest:
        problem = why_not_resumable(checkpoint, START)
    if problem is not None:
        named = spelled("resume_from_checkpoint")
        raise CheckpointError(f"{named}: {problem}; name another, or give true")
    if copy is None:
        check_pickles_on_all_ranks(checkpoint, START)
    else:
        check_copied_pickles(copy, checkpoint, START)
    _check_best(checkpoint, args)
    return str(copy or checkpoint)


def readable_copy(
    args: "TrainingArguments", checkpoint: str | None, *, strategy: str | None
) -> str | None:
    """Return the checkpoint as this launch can read it; with `--load_once`, a conversion is copied to each node too.

    Args:
        args (`TrainingArguments`): the training arguments of this launch.
        checkpoint (`str`, *optional*): the checkpoint to resume from.
        strategy (`str`, *optional*): as for `readable_checkpoint`.

    Raises:
        HfScaleError: as `readable_checkpoint` and `load_once`.
    """
    readable = readable_checkpoint(args, checkpoint, strategy=strategy)
    folder: str | None = vars(args).get("load_once")
    if folder is None or readable is None or readable == checkpoint:
        return readable
    copy, problem = copy_checkpoint(Path(readable), folder, START)
    if problem is not None:
        raise CheckpointError(problem)
    return str(copy)


def _check_none_skipped(output_dir: Path, reasons: tuple[str, ...]) -> None:
    """Raise a CheckpointError if there are checkpoints, none of which can be resumed from."""
    if reasons:
        others = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise CheckpointError(
            f"no checkpoint of {output_dir} can be resumed from: {reasons[0]}{others}; restore its files, or start "
            "from scratch with --resume_from_checkpoint false"
        )


def _check_best(checkpoint: Path, args: "TrainingArguments") -> None:
    """Check the pickles of the best checkpoint if the training will load it. Every rank must call it."""
    if args.load_best_model_at_end:
        check_best_on_all_ranks(checkpoint, output_folder(args), START)


def _has_begun(output_dir: Path) -> bool:
    """Return whether a launch before a restart by `hfscale run` has begun to train."""
    memory = RunMemory.of_environment()
    return memory is not None and memory.snapshots(output_dir).is_dir()


def keep_global_batch(
    args: "TrainingArguments", checkpoint: str | None, *, data_parallel_size: int | None = None
) -> None:
    """Keep the checkpoint's global batch on another number of processes, by changing the accumulation steps.

    The steps, the samples of each step and the learning rate are then those of an uninterrupted run. Call this before
    the Trainer is created. On the same number of processes the arguments do not change, unless ranks shared batches in
    the run that wrote the checkpoint or share them now (tensor and pipeline parallelism), since then the number of
    data-parallel ranks may differ. A converted checkpoint has the number of processes that trained it.

    Args:
        args (`TrainingArguments`): its `per_device_train_batch_size` and `gradient_accumulation_steps` are changed.
        checkpoint (`str`, *optional*): the checkpoint to resume from.
        data_parallel_size (`int`, *optional*): number of ranks that read different samples. Default: all.

    Raises:
        CheckpointError: the checkpoint's manifest is broken.
        LayoutError: no accumulation and per-device batch give the global batch on this number of processes.
    """
    if checkpoint is None or not (Path(checkpoint) / MANIFEST_NAME).is_file():
        return
    manifest = read_manifest(checkpoint)
    world_size = args.world_size
    wanted = manifest.global_batch_size
    origin = read_origin(Path(checkpoint)) or {
        "strategy": manifest.strategy,
        "world_size": manifest.world_size,
    }
    trained_by = origin["world_size"]
    ranks = data_parallel_size or world_size
    # The numbers of processes tell the numbers of data-parallel ranks only where no ranks share a batch.
    shared_batches = facts_of(str(origin["strategy"])).is_set_by_script
    by_launcher = requested(args)
    by_script = by_launcher.is_replicated or by_launcher.is_set_by_script
    shares_batches = ranks < world_size and by_script
    if world_size == trained_by and not shared_batches and not shares_batches:
        return
    split = split_batch(wanted, ranks, args.per_device_train_batch_size)
    if split is None:
        fitting = [n * world_size // ranks for n in range(1, wanted + 1) if wanted % n == 0]
        nearest = min(fitting, key=lambda n: abs(n - world_size))
        raise LayoutError(
            f"{world_size} processes cannot keep the run's global batch of {wanted} sequences: start {nearest}, or "
            "start from scratch with --resume_from_checkpoint false"
        )
    if split == (args.per_device_train_batch_size, args.gradient_accumulation_steps):
        return
    args.per_device_train_batch_size, args.gradient_accumulation_steps = split
    instead = "with another data parallel size"
    if world_size != trained_by:
        instead = f"instead of {trained_by}"
    logger.info(
        "%s %s: the global batch stays %d sequences, by %d per device x %d accumulation steps",
        counted(world_size, "process"),
        instead,
        wanted,
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
    )


def is_finished(trainer: "Trainer", checkpoint: str | None) -> bool:
    """Return whether the run is complete: `checkpoint` has all the requested steps, and the results are there too.

    Without results (the last thing that a recipe writes is all_results.json) the run was lost while it evaluated or
    exported its model. Then it is not finished, and the next `trainer.train` only loads the checkpoint and returns;
    Trainer itself would take one more step. Call this on every rank.

    Args:
        trainer (`Trainer`): the trainer of the run.
        checkpoint (`str`, *optional*): the checkpoint to resume from.
    """
    if checkpoint is None:
        return False
    state = read_json(Path(checkpoint) / TRAINER_STATE_NAME)
    *_, max_steps = trainer.set_initial_training_values(
        trainer.args, trainer.get_train_dataloader()
    )
    done = state["global_step"]
    if not _has_trained_all(trainer.args, state, max_steps):
        return False
    if not _has_results(output_folder(trainer.args), Path(checkpoint)):
        logger.info(
            "%s has all %d steps but the run has no results yet: they are computed now",
            checkpoint,
            done,
        )
        TrainerAdapter.of(trainer).finish_without_steps()
        return False
    logger.info(
        "nothing to do: %s has all %d steps; raise --max_steps or --num_train_epochs to train on, or start from "
        "scratch with --resume_from_checkpoint false",
        checkpoint,
        done,
    )
    if trainer.is_world_process_zero():
        discard_conversions(output_folder(trainer.args))
    return True


def _has_trained_all(args: "TrainingArguments", state: dict[str, Any], max_steps: float) -> bool:
    """Return whether the state of a checkpoint is that of the last step."""
    kept = state.get("stateful_callbacks", {}).get("hfscale", {})
    if "growing_batch" in kept and args.max_steps <= 0:
        # Where the batch follows a measurement, the steps are at most `max_steps`
        passes: float = state["epoch"]
        return passes >= args.num_train_epochs
    steps: int = state["global_step"]
    return steps >= math.ceil(max_steps)


def _has_results(output_dir: Path, checkpoint: Path) -> bool:
    """Return whether the main process sees results newer than the checkpoint; older ones are of a shorter run."""
    results = output_dir / RESULTS_NAME
    state = checkpoint / TRAINER_STATE_NAME

    def are_newer() -> bool:
        return results.is_file() and results.stat().st_mtime >= state.stat().st_mtime

    return bool(START.on_rank_0("find results", are_newer))


def _check_given(checkpoint: Path) -> bool:
    """Return whether the checkpoint has a manifest."""
    if not (checkpoint / TRAINER_STATE_NAME).is_file():
        given = spelled("resume_from_checkpoint", str(checkpoint))
        raise UsageError(f"{given} is not a checkpoint folder: name one, or give true or false")
    if (checkpoint / MANIFEST_NAME).is_file():
        return True
    logger.info(
        "%s has no %s: it cannot be verified and is used as it is", checkpoint, MANIFEST_NAME
    )
    return False
