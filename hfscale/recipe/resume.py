"""Where a relaunched command goes on."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfscale.checkpoint.conversion import read_origin
from hfscale.checkpoint.manifest import MANIFEST_NAME, read_manifest
from hfscale.checkpoint.pickles import check_pickles
from hfscale.checkpoint.remote import RemoteStore, fetch_newest
from hfscale.checkpoint.store import checkpoint_step, latest_checkpoint, verify, wait_until_visible
from hfscale.checkpoint.writer import finish_renames
from hfscale.errors import CheckpointError, LayoutError, UsageError
from hfscale.integrations.resume import discard_conversions
from hfscale.integrations.strategy import requested_family
from hfscale.utils import distributed
from hfscale.utils.logging import get_logger

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

logger = get_logger(__name__)

RESULTS_NAME = "all_results.json"
"""What `trainer.save_metrics("all", …)` writes."""
TRAINER_STATE_NAME = "trainer_state.json"


def resume_point(args: "TrainingArguments", remote: str | None = None) -> str | None:
    """The checkpoint to give to `trainer.train(resume_from_checkpoint=…)`, by `--resume_from_checkpoint`.

    `true` is the newest verified checkpoint of `output_dir`, None where there is none; `false` is None; anything else
    is the path of one checkpoint. The main process reads and verifies, the others follow it. With `true`, a newer
    checkpoint in the store `remote` (a URL) is fetched first.

    Raises:
        UsageError: the path is not a checkpoint.
        CheckpointError: the checkpoint at the path is corrupt, or holds a pickle that is more than tensors and values;
            or a rank does not see the one that the main process has found.
        StorageError: the remote store cannot be read, and there is no local checkpoint.
    """
    store = RemoteStore(remote) if remote is not None else None
    asked = str(args.resume_from_checkpoint)
    if asked.lower() == "false":
        return None
    if asked.lower() != "true":
        if distributed.rank() == 0:
            _check_given(Path(asked))
            check_pickles(Path(asked))
        distributed.barrier()
        return asked
    if distributed.rank() == 0:
        finish_renames(Path(args.output_dir))
    if store is not None:
        fetch_newest(store, Path(args.output_dir))
    found = latest_checkpoint(args.output_dir) if distributed.rank() == 0 else None
    if found is not None:
        check_pickles(Path(found))  # its files are those of its manifest, but who wrote that?
    step = int(distributed.all_max([checkpoint_step(Path(found)) if found else -1])[0])
    if step < 0:
        return None
    checkpoint = Path(args.output_dir) / f"checkpoint-{step}"
    _check_seen(checkpoint)
    logger.info("continues from checkpoint-%d of %s", step, args.output_dir)
    return str(checkpoint)


def _check_seen(checkpoint: Path) -> None:
    """Whether every rank sees what the main process has verified; some may see it later."""
    sees = wait_until_visible(checkpoint / MANIFEST_NAME)
    blind = int(distributed.all_max([float(-1 if sees else distributed.rank())])[0])
    if blind >= 0:
        raise CheckpointError(
            f"rank {blind} does not see {checkpoint}, which rank 0 has verified: put output_dir on storage that every "
            "machine shares"
        )


def keep_global_batch(
    args: "TrainingArguments", checkpoint: str | None, *, data_parallel_size: int | None = None
) -> None:
    """On another number of processes than the checkpoint's, keep its global batch by changing the accumulation.

    The steps, the samples of each step and the learning rate are then those of the uninterrupted run. Call it before
    the Trainer is made. On the same number of processes the arguments stand as they are, unless `ParallelTrainer`
    wrote the checkpoint or goes on from it: then as many ranks may share samples otherwise. A converted checkpoint
    counts as one of the processes that trained it.

    Args:
        data_parallel_size (`int`, *optional*): ranks that read different samples; absent: all.

    Raises:
        LayoutError: no accumulation and per-device batch make up the global batch on so many processes.
    """
    if checkpoint is None or not (Path(checkpoint) / MANIFEST_NAME).is_file():
        return
    manifest = read_manifest(checkpoint)
    world_size, wanted = args.world_size, manifest.global_batch_size
    origin = read_origin(Path(checkpoint)) or {"strategy": manifest.strategy, "world_size": manifest.world_size}
    trained_by, ranks = origin["world_size"], data_parallel_size or world_size
    lays_out = origin["strategy"] == "parallel" or (ranks < world_size and requested_family(args) in ("single", "ddp"))
    if world_size == trained_by and not lays_out:
        return
    per_rank, left_over = divmod(wanted, ranks)
    if left_over or per_rank == 0:
        fitting = [n * world_size // ranks for n in range(1, wanted + 1) if wanted % n == 0]
        nearest = min(fitting, key=lambda n: abs(n - world_size))
        raise LayoutError(
            f"{world_size} processes cannot keep the run's global batch of {wanted} sequences: start {nearest}, or "
            "begin afresh with --resume_from_checkpoint false"
        )
    per_device = args.per_device_train_batch_size
    while per_rank % per_device:
        per_device -= 1
    if (per_device, per_rank // per_device) == (args.per_device_train_batch_size, args.gradient_accumulation_steps):
        return
    args.per_device_train_batch_size, args.gradient_accumulation_steps = per_device, per_rank // per_device
    instead = f"instead of {trained_by}" if world_size != trained_by else "that share samples otherwise"
    logger.info(
        "%d processes %s: the global batch stays %d sequences, by %d per device x %d accumulation steps",
        world_size,
        instead,
        wanted,
        per_device,
        args.gradient_accumulation_steps,
    )


def is_finished(trainer: "Trainer", checkpoint: str | None) -> bool:
    """Whether `checkpoint` already holds all the steps asked for, and the results of the run are there too.

    Without results (a recipe's last act is to write all_results.json) the run was lost while it evaluated its model
    or wrote it out. Then it is not finished, and `trainer.train` loads the checkpoint and returns: left to itself,
    Trainer would take one more step. Call it on every rank.
    """
    if checkpoint is None:
        return False
    state = json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    *_, max_steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    done = state["global_step"]
    if done < math.ceil(max_steps):
        return False
    if not _has_results(Path(trainer.args.output_dir), Path(checkpoint)):
        logger.info("%s holds all %d steps, and the run has no results yet: they are made now", checkpoint, done)
        _take_no_step(trainer)
        return False
    logger.info(
        "nothing to do: %s holds all %d steps; raise --max_steps or --num_train_epochs to go on, or start afresh with "
        "--resume_from_checkpoint false",
        checkpoint,
        done,
    )
    if trainer.is_world_process_zero():
        discard_conversions(trainer.args.output_dir)
    return True


def _has_results(output_dir: Path, checkpoint: Path) -> bool:
    """Whether the main process sees results that are younger than the checkpoint: a shorter run may have left some."""
    results, missing = output_dir / RESULTS_NAME, False
    if distributed.rank() == 0:
        missing = not results.is_file() or results.stat().st_mtime < (checkpoint / TRAINER_STATE_NAME).stat().st_mtime
    return not distributed.all_max([float(missing)])[0]


def _take_no_step(trainer: "Trainer") -> None:
    """Have the next `trainer.train` do all but train, and say nothing of a loss that it has not seen."""
    train, log, initial_values = trainer.train, trainer.log, trainer.set_initial_training_values

    def without_epochs(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (0, *initial_values(*args, **kwargs)[1:])

    def without_training(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "train_loss" not in logs:
            log(logs, *args, **kwargs)

    def train_nothing(*args: Any, **kwargs: Any) -> Any:
        trainer.set_initial_training_values, trainer.log = without_epochs, without_training  # type: ignore[method-assign]
        try:
            return train(*args, **kwargs)._replace(metrics={})
        finally:
            for name in ("train", "log", "set_initial_training_values"):
                vars(trainer).pop(name, None)

    trainer.train = train_nothing  # type: ignore[method-assign]


def _check_given(checkpoint: Path) -> None:
    if not (checkpoint / TRAINER_STATE_NAME).is_file():
        raise UsageError(
            f"--resume_from_checkpoint {checkpoint} is not a checkpoint folder: name one, or give true or false"
        )
    if not (checkpoint / MANIFEST_NAME).is_file():
        logger.info("%s has no %s: it is used unverified", checkpoint, MANIFEST_NAME)
        return
    try:
        verify(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"--resume_from_checkpoint: {error}; name another, or give true") from None
