"""Resumes from a checkpoint that this launch cannot read as it is: another strategy or number of processes wrote it.

The checkpoint is converted into a hidden folder of the output directory, from which the Trainer resumes. The folder
is deleted when the next checkpoint has been committed. Plain `resume_from_checkpoint=True` does not find it.
"""

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from accelerate.utils.constants import FSDP_MODEL_NAME
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import has_length
from transformers.utils import SAFE_WEIGHTS_NAME

from hfscale.checkpoint.best import STATE_NAME
from hfscale.checkpoint.conversion import can_read, convert
from hfscale.checkpoint.formats import dcp, format_written, unsharded
from hfscale.checkpoint.formats.merged import load_merged
from hfscale.checkpoint.formats.safetensors_files import read_weights
from hfscale.checkpoint.formats.view import canonical_name
from hfscale.checkpoint.formats.zero import is_universal
from hfscale.checkpoint.manifest import Manifest, read_manifest
from hfscale.checkpoint.pickles import load_archive
from hfscale.checkpoint.resumable import has_weights, why_not_resumable
from hfscale.checkpoint.store import VISIBILITY_TIMEOUT_S, verify, wait_until_visible
from hfscale.core.collectives import START
from hfscale.core.counts import counted
from hfscale.core.launch_variables import launch_number
from hfscale.core.logging import get_logger
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.core.text_files import read_json
from hfscale.core.versions import is_peft_model, what_is_missing
from hfscale.errors import (
    CheckpointError,
    HfScaleError,
    LayoutError,
    MissingDependencyError,
    UsageError,
)
from hfscale.facts.strategies import CONVERTIBLE, StrategyFacts, facts_of
from hfscale.trainer.checkpoint_changes import loads_itself
from hfscale.trainer.state import (
    data_ranks,
    global_batch_size,
    growing_batch_state,
    micro_batch_size,
    output_folder,
)
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.requested import requested_strategy

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = get_logger(__name__)

CONVERSIONS = ".hfscale-resume"
"""Folder in the output directory that holds the converted checkpoints."""
_START_OVER = "or start from scratch with --resume_from_checkpoint false"


def readable_checkpoint(
    args: "TrainingArguments", checkpoint: str | None, *, strategy: str | None = None
) -> str | None:
    """Return the checkpoint itself if this launch can read it, otherwise its conversion. Call it on every rank.

    Rank 0 converts while the others wait; on a node that does not see rank 0's files, its first process converts. A
    conversion left by an earlier launch is used again. If DeepSpeed is to read a universal checkpoint, its config is
    changed accordingly (`load_universal`). A checkpoint without a manifest is returned as it is.

    Args:
        args (`TrainingArguments`): the training arguments of this launch.
        checkpoint (`str`, *optional*): the folder to resume from; None, which is returned as it is: a fresh start.
        strategy (`str`, *optional*): the strategy that will read it; by default the one that the launcher asks for.
            `ParallelTrainer` passes its own.

    Returns:
        `str` or `None`: the folder to give to `Trainer.train(resume_from_checkpoint=...)`.

    Raises:
        LayoutError: there is no conversion between these two strategies, or the conversion failed.
        CheckpointError: the manifest of the checkpoint cannot be read.
    """
    if checkpoint is None or not (Path(checkpoint) / MANIFEST_NAME).is_file():
        return checkpoint
    source = Path(checkpoint)
    manifest = read_manifest(checkpoint)
    reader = strategy or requested_strategy(args)
    if strategy is None and facts_of(reader).is_set_by_script:
        # A Trainer, and not `ParallelTrainer`, runs the tensor parallelism of a launcher's config
        reader = "native"
    if not can_read(manifest, strategy=reader, world_size=args.world_size):
        if reader not in CONVERTIBLE or manifest.strategy not in CONVERTIBLE:
            raise LayoutError(
                f"{checkpoint} was written under {manifest.strategy.upper()} and cannot be continued under "
                f"{reader.upper()}: launch with the config that the run started with, {_START_OVER}"
            )
        target = _conversion_folder(output_folder(args), source, reader, args.world_size)
        if not _is_converted(target):
            START.on_rank_0(
                "convert", lambda: _convert(source, target, manifest, reader, args.world_size)
            )
        patience_s = 0.0 if args.save_on_each_node else VISIBILITY_TIMEOUT_S
        leads_node = launch_number("LOCAL_RANK", 0) == 0
        with START.agreed("convert on each node"):
            if leads_node and not wait_until_visible(target / MANIFEST_NAME, patience_s):
                # A node with a disk of its own
                _convert(source, target, manifest, reader, args.world_size)
        checkpoint = str(target)
    if facts_of(reader).by_deepspeed and is_universal(Path(checkpoint)):
        _load_universal(args)
    return checkpoint


def _conversion_folder(output_dir: Path, source: Path, strategy: str, ranks: int) -> Path:
    # The manifest has the hash of every file, so that another checkpoint of the same step has another folder.
    digest = xxhash.xxh3_64_hexdigest((source / MANIFEST_NAME).read_bytes())
    return output_dir / CONVERSIONS / f"{source.name}-as-{strategy}-x{ranks}-{digest}"


def _is_converted(target: Path) -> bool:
    """Return whether an earlier launch has left the conversion. Every rank must call it.

    Each rank verifies a share of the files; rank 0 verifies them all where it alone sees them.
    """
    sees = (target / MANIFEST_NAME).is_file()
    on_rank_0, everywhere = START.combine(
        "earlier conversion", sees, lambda found: [found[0], all(found)]
    )
    if not on_rank_0:
        return False
    if everywhere:
        problem = why_not_resumable(target, START)
    else:
        problem = START.on_rank_0("verification", lambda: _problem_of(target))
    if problem is not None:
        logger.warning("the conversion of an earlier launch is replaced: %s", problem)
    return problem is None


def _problem_of(target: Path) -> str | None:
    try:
        verify(target)
    except CheckpointError as error:
        return str(error)
    return None


def _convert(source: Path, target: Path, manifest: Manifest, strategy: str, ranks: int) -> None:
    began = time.monotonic()
    shutil.rmtree(target.parent, ignore_errors=True)  # unfinished ones, and those of other launches
    try:
        convert(source, target, manifest=manifest, strategy=strategy, world_size=ranks, link=True)
    except CheckpointError as error:
        raise LayoutError(
            f"{error}; launch with the config that the run started with, {_START_OVER}"
        ) from None
    logger.info(
        "%s was written under %s by %s and has been converted for %s on %d: %.1f s",
        source.name,
        manifest.strategy,
        counted(manifest.world_size, "process"),
        strategy,
        ranks,
        time.monotonic() - began,
    )


def discard_conversions(output_dir: str | os.PathLike[str]) -> None:
    """Delete the conversions of `readable_checkpoint`. Call it on one rank, after a newer checkpoint's commit.

    Args:
        output_dir (`str` or `Path`): output directory of the run.
    """
    shutil.rmtree(Path(output_dir) / CONVERSIONS, ignore_errors=True)


def _load_universal(args: "TrainingArguments") -> None:
    """Set `load_universal` in DeepSpeed's config, before the engine is made."""
    plugin = args.deepspeed_plugin
    assert plugin is not None  # the run has a DeepSpeed config
    for config in (plugin.hf_ds_config.config, plugin.deepspeed_config):
        config.setdefault("checkpoint", {})["load_universal"] = True


def finish_universal_load(trainer: Trainer) -> None:
    """Correct what DeepSpeed 0.19.8 does wrong when it loads a universal checkpoint. Call it when training begins.

    Stage 3 gives all its optimizer states the same `step` tensor, which the update of each group then increments, so
    that the bias correction of Adam is too far ahead; no stage puts the tensor on the device where torch's fused
    AdamW needs it. And the engine would look for universal files in every later load, such as that of the best model
    at the end. Nothing is done if no universal checkpoint was loaded.

    Args:
        trainer (`Trainer`): prepared for training, with its checkpoint loaded.

    Raises:
        HfScaleError: DeepSpeed has moved what is corrected.
    """
    engine: Any = trainer.model_wrapped
    if not (Strategy.of(trainer).engine_steps and engine.load_universal_checkpoint()):
        return
    optimizer: torch.optim.Optimizer = engine.optimizer.optimizer
    has_steps_on_device = keeps_steps_on_device(optimizer)
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        if isinstance(step, torch.Tensor):
            device = parameter.device if has_steps_on_device else torch.device("cpu")
            state["step"] = step.detach().to(device, copy=True)
    try:
        engine._config.load_universal_checkpoint = False
    except AttributeError:
        raise HfScaleError(
            "DeepSpeed no longer keeps load_universal_checkpoint in its config"
        ) from None


def keeps_steps_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer of torch needs its counters of steps on the device of the parameters.

    Args:
        optimizer (`torch.optim.Optimizer`): an optimizer inside of Accelerate's and DeepSpeed's.
    """
    groups = optimizer.param_groups
    return any(group.get("fused") or group.get("capturable") for group in groups)


def finish_merged_load(trainer: Trainer, checkpoint: str | None) -> None:
    """Read from `checkpoint` the weights that Trainer leaves out of its load, for which it only logs a warning.

    transformers 5 writes the experts of a layer separately, under the names with which they were published, and holds
    them merged in memory. Trainer (5.23) loads by name, so that after a resume, or with the best model, one process
    and DDP would continue with the experts that the model was initialised with. Under the other strategies the names
    are those in memory.

    Args:
        trainer (`Trainer`): its model is completed in place.
        checkpoint (`str`, *optional*): the folder that Trainer has loaded; None: nothing is read.

    Raises:
        CheckpointError: a file of the weights is broken.
    """
    model = trainer.model
    if checkpoint is None or not isinstance(model, PreTrainedModel):
        return
    if Strategy.of(trainer).facts.file_format != unsharded.FORMAT.name:
        return
    stored = read_weights(Path(checkpoint), "model")
    names = load_merged(model, stored) if stored is not None else []
    if names:
        logger.info(
            "loaded %d merged weights that Trainer leaves out, such as %s", len(names), names[0]
        )


def check_files(trainer: Trainer, checkpoint: str) -> Manifest | None:
    """Check that the strategy of a training reads the files of a checkpoint. It needs no prepared model.

    Args:
        trainer (`Trainer`): the Trainer.
        checkpoint (`str`): the folder.

    Returns:
        The manifest of the checkpoint; None for one of plain Trainer.

    Raises:
        LayoutError: the checkpoint was written by a strategy whose files this one cannot read.
        CheckpointError: the manifest of the checkpoint cannot be read, or Trainer would find no weights in it.
    """
    running = Strategy.of(trainer).facts
    if not (Path(checkpoint) / MANIFEST_NAME).is_file():
        _check_plain(Path(checkpoint), running)
        check_weights(trainer, Path(checkpoint))
        return None
    manifest = read_manifest(checkpoint)
    written = facts_of(manifest.strategy)
    # By `NativeLoading` and `ParallelTrainer`, in place of Trainer's own loading
    is_converted = running.is_set_by_script and written.is_convertible
    if written.file_layout != running.file_layout and not is_converted:
        name = running.name
        conversion = f"{checkpoint} NEW_FOLDER --to {name} --world-size {trainer.args.world_size}"
        raise LayoutError(
            f"{checkpoint} was written under {manifest.strategy.upper()}: the Trainer, under {name.upper()}, loads no "
            f"optimizer or schedule from it; convert it with `hfscale checkpoints convert {conversion}` and resume "
            "from that"
        )
    check_weights(trainer, Path(checkpoint))
    return manifest


def check_weights(trainer: Trainer, checkpoint: Path) -> None:
    """Check that a checkpoint has weights where Trainer looks for those of a whole model.

    A model of another library may write others, such as the adapters inside of TRL's models with a value head.

    Args:
        trainer (`Trainer`): the Trainer.
        checkpoint (`Path`): the folder.

    Raises:
        CheckpointError: Trainer would find none.
    """
    model = trainer.model
    if (
        loads_itself(trainer)
        or not Strategy.of(trainer).facts.is_replicated
        or is_peft_model(model)
    ):
        return
    if has_weights(checkpoint, "model"):
        return
    kind = type(model).__name__
    way = "override _load_from_checkpoint of the Trainer, or save the weights of the whole model"
    raise CheckpointError(
        f"{checkpoint} has no {SAFE_WEIGHTS_NAME}, which Trainer loads into {kind}: {way}"
    )


def check_resumed(trainer: Trainer, checkpoint: str | None) -> None:
    """Report what Trainer on its own does silently when it resumes. Call it when training begins.

    A Trainer takes the weights from a checkpoint of another strategy if it finds any, and continues with a new
    optimizer and schedule: that is an error. With another global batch it continues at another sample: that is a
    warning. Neither happens in the recipes.

    Args:
        trainer (`Trainer`): prepared for training.
        checkpoint (`str`, *optional*): the folder that Trainer has loaded; None: it starts from scratch.

    Raises:
        LayoutError: the checkpoint was written by a strategy whose files this one cannot read.
        CheckpointError: the manifest of the checkpoint cannot be read.
        MissingDependencyError: Accelerate is too old to resume under FSDP2.
    """
    running = Strategy.of(trainer).facts
    is_fsdp2 = running.file_format == dcp.FORMAT.name
    missing = what_is_missing("FSDP2 checkpoints") if is_fsdp2 else None
    if missing is not None:
        if checkpoint is not None:
            raise MissingDependencyError(f"{checkpoint}: {missing}")
        logger.warning("%s; training starts, and cannot be resumed with this version", missing)
    if checkpoint is None:
        return
    if is_fsdp2:
        _check_adapters(trainer.model, Path(checkpoint))
    manifest = check_files(trainer, checkpoint)
    if manifest is None:
        return
    model_only = manifest.why_model_only()
    if model_only is not None:
        logger.warning(
            "%s: %s; training continues at step %d with a new optimizer, a learning rate schedule that begins anew, "
            "and new random numbers",
            checkpoint,
            model_only,
            manifest.step,
        )
    _warn_of_other_passes(trainer, Path(checkpoint), manifest)
    if growing_batch_state(trainer.state):
        return  # the state says how much has been seen
    size = global_batch_size(trainer)
    if size != manifest.global_batch_size:
        logger.warning(
            "the global batch was %d sequences and is now %d (%d processes): training continues at sequence %d "
            "instead of %d, so that some sequences are seen twice or never; to keep it, change "
            "per_device_train_batch_size or gradient_accumulation_steps",
            manifest.global_batch_size,
            size,
            trainer.args.world_size,
            manifest.step * size,
            manifest.step * manifest.global_batch_size,
        )


def _warn_of_other_passes(trainer: Trainer, checkpoint: Path, manifest: Manifest) -> None:
    """Log where a pass over the data has another length than before, since its last batch is filled up to another one.

    Accelerate gives several processes batches of one size, for which it repeats the first sequences of the pass. One
    process trains on what is left.
    """
    args = trainer.args
    data = trainer.train_dataset
    accelerator = trainer.accelerator
    fills = accelerator.even_batches and not args.dataloader_drop_last
    if not fills or accelerator.split_batches or not has_length(data):
        return
    try:
        state = read_json(checkpoint / STATE_NAME)
        per_device = int(state["train_batch_size"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return  # Trainer names what is wrong with the file
    ranks = data_ranks(trainer)
    earlier_ranks = _earlier_data_ranks(manifest, ranks, args.world_size)
    if earlier_ranks is None:
        return
    rows = len(data)
    micro_batch = micro_batch_size(trainer)
    now = _rows_of_pass(rows, micro_batch, ranks)
    earlier = _rows_of_pass(rows, per_device, earlier_ranks)
    if now != earlier:
        logger.warning(
            "with %d processes of %d sequences a pass over the %d trained on %d, and with %d of %d it trains on %d: "
            "Accelerate fills the last batch of several processes up with the first sequences of the pass, so the "
            "last step of a pass is not that of an uninterrupted run; take a number of sequences that divides, or "
            "begin with dataloader_drop_last",
            earlier_ranks,
            per_device,
            rows,
            earlier,
            ranks,
            micro_batch,
            now,
        )


def _earlier_data_ranks(manifest: Manifest, ranks: int, processes: int) -> int | None:
    """Return how many ranks of the earlier launch trained on different sequences; None if that is not known.

    A manifest does not say how many ranks shared a sequence: as many as now, unless that does not divide them.
    """
    if manifest.world_size == 1:
        return 1
    sharing = processes // ranks
    return None if manifest.world_size % sharing else manifest.world_size // sharing


def _rows_of_pass(rows: int, per_device: int, ranks: int) -> int:
    """Return how many sequences of a pass the ranks train on, with those that are repeated."""
    if ranks == 1:
        return rows
    batch = per_device * ranks
    batches = -(-rows // batch)
    return batches * batch


def check_own_adapters(trainer: Trainer) -> None:
    """Refuse to train adapters of `model.add_adapter`, of whose checkpoints Trainer cannot load one.

    Trainer (5.23) saves `adapter_model.safetensors` for them, and looks for the weights of a whole model when it
    resumes and when it loads the best model. A Trainer that loads them itself, such as that of sentence-transformers,
    is not refused.

    Args:
        trainer (`Trainer`): prepared for training.

    Raises:
        UsageError: the model has such adapters.
    """
    model: Any = trainer.model
    has_own = bool(getattr(model, "_hf_peft_config_loaded", False)) and not is_peft_model(model)
    if has_own and not loads_itself(trainer):
        raise UsageError(
            f"{type(model).__name__} has the adapters of model.add_adapter, and Trainer cannot load a checkpoint of "
            "them: use peft.get_peft_model(model, config), or save_strategy='no'"
        )


def _check_adapters(model: Any, checkpoint: Path) -> None:
    """Check that a checkpoint of FSDP2 in one file has all adapters: Accelerate leaves the others as they begin.

    Before 1.15 Accelerate wrote the shards of the first rank, under names that 1.15 does not look for.
    """
    path = checkpoint / f"{FSDP_MODEL_NAME}.bin"
    if not is_peft_model(model) or not path.is_file():
        return
    stored = load_archive(path)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and canonical_name(name) not in stored:
            raise CheckpointError(
                f"{path} has no weight '{canonical_name(name)}': accelerate before 1.15 saves the adapters of one "
                "rank there; start from scratch, or from a checkpoint with fsdp_state_dict_type SHARDED_STATE_DICT"
            )


def _check_plain(checkpoint: Path, running: StrategyFacts) -> None:
    """Check that plain Trainer wrote the checkpoint, which has no manifest, under a strategy with the same files.

    Raises:
        LayoutError: its files are those of another strategy.
    """
    written = format_written(checkpoint)
    # What a script distributes itself is not loaded by Trainer's own methods
    if written.name == running.file_format or running.is_set_by_script:
        return
    raise LayoutError(
        f"{checkpoint} has the files of {written.label}: the Trainer, under {running.name.upper()}, loads no "
        f"optimizer or schedule from it; convert it with `hfscale checkpoints convert {checkpoint} NEW_FOLDER --to "
        f"{running.name} --global-batch-size N` and resume from that"
    )
