"""Going on under another strategy, or on another number of processes, than the checkpoint was written by.

The checkpoint is converted into a hidden folder of the output directory, from which the Trainer resumes; it goes once
the next checkpoint has been committed. Plain `resume_from_checkpoint=True` does not see it.
"""

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from transformers import PreTrainedModel

from hfscale.checkpoint.conversion import can_read, convert
from hfscale.checkpoint.formats import STRATEGIES, layout_of
from hfscale.checkpoint.formats.merged import load_merged
from hfscale.checkpoint.formats.safetensors_files import read_weights
from hfscale.checkpoint.formats.zero import UNIVERSAL_LATEST
from hfscale.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from hfscale.checkpoint.store import VISIBILITY_TIMEOUT_S, verify, wait_until_visible
from hfscale.errors import CheckpointError, HfScaleError, LayoutError
from hfscale.integrations.strategy import requested_strategy, running_strategy
from hfscale.integrations.trainer import global_batch_size, resumed_from
from hfscale.utils import distributed
from hfscale.utils.logging import get_logger

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

logger = get_logger(__name__)

CONVERSIONS = ".hfscale-resume"
"""Folder in the output directory that holds conversions."""
_AFRESH = "or begin afresh with --resume_from_checkpoint false"


def readable_checkpoint(
    args: "TrainingArguments", checkpoint: str | None, *, strategy: str | None = None
) -> str | None:
    """`checkpoint` itself where this launch can read it as it is, else its conversion. Call it on every rank.

    Rank 0 converts, and each node whose file system does not show rank 0's work its first process; the others wait.
    A conversion that is there from an earlier launch is used again. Where DeepSpeed is to read one, its config is told
    so (`load_universal`). A checkpoint without a manifest is taken as it is.

    Args:
        strategy (`str`, *optional*): who is to read it; absent: what the launcher asks for. `ParallelTrainer` names
            itself.

    Raises:
        LayoutError: the pair of strategies cannot be converted.
    """
    if checkpoint is None:
        return None
    if not (Path(checkpoint) / MANIFEST_NAME).is_file():
        return checkpoint
    manifest, asked, ranks = read_manifest(checkpoint), strategy or requested_strategy(args), args.world_size
    source = Path(checkpoint)
    if not can_read(manifest, strategy=asked, world_size=ranks):
        by_transformers = asked == "parallel" and strategy is None  # its tensor parallelism, which has no checkpoints
        if asked not in STRATEGIES or manifest.strategy not in STRATEGIES or by_transformers:
            raise LayoutError(
                f"{checkpoint} was written under {manifest.strategy.upper()} and cannot be continued under "
                f"{asked.upper()}: launch with the config it was begun with, {_AFRESH}"
            )
        target = _place_of_conversion(Path(args.output_dir), source, asked, ranks)
        if distributed.rank() == 0:
            _convert(source, target, manifest, asked, ranks)
        distributed.barrier()
        patience_s = 0.0 if args.save_on_each_node else VISIBILITY_TIMEOUT_S
        if int(os.environ.get("LOCAL_RANK", "0")) == 0 and not wait_until_visible(target / MANIFEST_NAME, patience_s):
            _convert(source, target, manifest, asked, ranks)  # a node with a disk of its own
        distributed.barrier()
        checkpoint = str(target)
    if asked.startswith("zero") and (Path(checkpoint) / UNIVERSAL_LATEST).is_file():
        _load_universal(args)
    return checkpoint


def _place_of_conversion(output_dir: Path, source: Path, strategy: str, ranks: int) -> Path:
    # Of the manifest, which has every file's hash: another checkpoint of the same step has another conversion.
    digest = xxhash.xxh3_64_hexdigest((source / MANIFEST_NAME).read_bytes())
    return output_dir / CONVERSIONS / f"{source.name}-as-{strategy}-x{ranks}-{digest}"


def _convert(source: Path, target: Path, manifest: Manifest, strategy: str, ranks: int) -> None:
    if target.is_dir():
        try:
            verify(target)
        except CheckpointError as error:
            logger.warning("converted once more: %s", error)
        else:
            return
    began = time.monotonic()
    shutil.rmtree(target.parent, ignore_errors=True)  # unfinished ones, and those of other launches
    try:
        convert(source, target, manifest=manifest, strategy=strategy, world_size=ranks, link=True)
    except CheckpointError as error:
        raise LayoutError(f"{error}; launch with the config it was begun with, {_AFRESH}") from None
    logger.info(
        "%s was written under %s by %d, and is converted for %s on %d: %.1f s",
        source.name,
        manifest.strategy,
        manifest.world_size,
        strategy,
        ranks,
        time.monotonic() - began,
    )


def discard_conversions(output_dir: str | os.PathLike[str]) -> None:
    """Delete what `readable_checkpoint` has made. Call it on one rank, when a newer checkpoint has been committed."""
    shutil.rmtree(Path(output_dir) / CONVERSIONS, ignore_errors=True)


def _load_universal(args: "TrainingArguments") -> None:
    """Tell DeepSpeed's config, before the engine is made."""
    plugin = args.deepspeed_plugin
    for config in (plugin.hf_ds_config.config, plugin.deepspeed_config):
        config.setdefault("checkpoint", {})["load_universal"] = True


def finish_universal_load(trainer: "Trainer") -> None:
    """Put right what DeepSpeed 0.19.8 gets wrong when it loads a universal checkpoint. Call it when training begins.

    Stage 3 gives all its optimizer states one and the same `step` tensor, which each group's update then moves on, so
    the bias correction of Adam runs ahead; no stage puts it on the device where torch's fused AdamW wants it. And the
    engine would look for universal files in every later load, as of the best model at the end. Nothing is done where
    no universal checkpoint was loaded.

    Raises:
        HfScaleError: DeepSpeed has moved what is put right.
    """
    engine: Any = trainer.model_wrapped
    if not (trainer.is_deepspeed_enabled and engine.load_universal_checkpoint()):
        return
    optimizer: torch.optim.Optimizer = engine.optimizer.optimizer
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].detach().to(parameter.device if on_device else "cpu", copy=True)
    try:
        engine._config.load_universal_checkpoint = False  # no public way: tests/test_reshape.py fails if it moves
    except AttributeError:
        raise HfScaleError("DeepSpeed no longer keeps load_universal_checkpoint in its config") from None


def finish_merged_load(trainer: "Trainer", checkpoint: str | None) -> None:
    """Read from `checkpoint` the weights that Trainer has left out of its load, with a warning and no error.

    transformers 5 writes the experts of a layer apart, under the names they were published with, and holds them merged
    in memory; Trainer (5.23) loads by the name, so that after a resume, or with the best model, one process and DDP go
    on with the experts that the model was made with. Under the other strategies the names are those in memory.
    """
    model = trainer.model
    if checkpoint is None or not isinstance(model, PreTrainedModel):
        return
    if layout_of(running_strategy(trainer)) != "unsharded":
        return
    stored = read_weights(Path(checkpoint), "model")
    names = load_merged(model, stored) if stored is not None else []
    if names:
        logger.info("read what Trainer leaves out, for it is stored in parts: %s and so on, %d", names[0], len(names))


def check_resumed(trainer: "Trainer") -> None:
    """Say what plain Trainer does without a word when it resumes; call it when training begins.

    A Trainer takes the weights of a checkpoint of another strategy where it finds any, and goes on with a fresh
    optimizer and schedule; that is stopped. With another global batch it goes on at another sample; that is a warning.
    The recipes come to neither.

    Raises:
        LayoutError: the checkpoint was written by a strategy whose files this one cannot read.
    """
    path = resumed_from()
    if path is None or not (Path(path) / MANIFEST_NAME).is_file():
        return
    manifest, running = read_manifest(path), running_strategy(trainer)
    if layout_of(manifest.strategy) != layout_of(running):
        raise LayoutError(
            f"{path} was written under {manifest.strategy.upper()}: the Trainer, under {running.upper()}, takes no "
            "optimizer or schedule from it; convert it with `hfscale checkpoints convert "
            f"{path} NEW_FOLDER --to {running} --world-size {trainer.args.world_size}` and resume from that"
        )
    size = global_batch_size(trainer)
    if size != manifest.global_batch_size:
        logger.warning(
            "the global batch was %d sequences and is now %d (%d processes): training goes on at sequence %d instead "
            "of %d, so that some are seen twice or never; to keep it, change per_device_train_batch_size or "
            "gradient_accumulation_steps",
            manifest.global_batch_size,
            size,
            trainer.args.world_size,
            manifest.step * size,
            manifest.step * manifest.global_batch_size,
        )
