"""What hfscale reads from the state of a Trainer, and keeps in it."""

import warnings
from pathlib import Path
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import is_compiled_module
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from hfscale.core.versions import has_epoch_methods

_STATE_KEY = "hfscale"
_GROWING_BATCH = "growing_batch"


def output_folder(args: TrainingArguments) -> Path:
    """Return the output directory of a training.

    Args:
        args (`TrainingArguments`): the training arguments.
    """
    assert args.output_dir is not None  # TrainingArguments has a default for it
    return Path(args.output_dir)


def model_of(trainer: Trainer) -> nn.Module:
    """Return the model of a Trainer, without the wrappers that Accelerate adds.

    Args:
        trainer (`Trainer`): a Trainer; it cannot be made without a model.
    """
    assert trainer.model is not None
    return trainer.model


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wrapped, or `module` itself if it is not compiled.

    Args:
        module (`nn.Module`): a module that a Trainer trains; the engine of DeepSpeed is one too.
    """
    # The wrapper has no other child
    return next(module.children()) if is_compiled_module(module) else module


def saved_state(state: TrainerState, name: str) -> dict[str, Any]:
    """Return a dictionary that hfscale keeps in `trainer_state.json`.

    Changes made to it are part of every later checkpoint. transformers' own `ExportableState` is not used: it raises
    a KeyError on save when the run resumed from a checkpoint that was written without the callback, and it restores
    by making a second instance of the callback.

    Args:
        state (`TrainerState`): the state of the Trainer.
        name (`str`): name of the dictionary, one for each part of hfscale, such as `lr_scaling`.

    Returns:
        `dict[str, Any]`: the live dictionary, not a copy; empty in a fresh run. Its values must be JSON values.
    """
    by_callback: Any = state.stateful_callbacks
    # TrainerState makes it from the list of callbacks that it is given
    assert isinstance(by_callback, dict)
    saved: dict[str, Any] = by_callback.setdefault(_STATE_KEY, {}).setdefault(name, {})
    return saved


def find_saved_state(state: TrainerState, name: str) -> dict[str, Any]:
    """Return a dictionary that hfscale keeps in `trainer_state.json`, and begin none where there is none.

    Args:
        state (`TrainerState`): the state of the Trainer.
        name (`str`): name of the dictionary.

    Returns:
        `dict[str, Any]`: the live dictionary, or an empty one that belongs to nothing.
    """
    return saved_state_of({"stateful_callbacks": state.stateful_callbacks}, name)


def saved_state_of(fields: Any, name: str) -> dict[str, Any]:
    """Return a dictionary that hfscale keeps in `trainer_state.json`, from what a file says.

    Args:
        fields (`Any`): the values of the file.
        name (`str`): name of the dictionary.

    Returns:
        `dict[str, Any]`: the dictionary; an empty one that belongs to nothing if there is none.
    """
    found = fields
    for key in ("stateful_callbacks", _STATE_KEY, name):
        if not isinstance(found, dict):
            return {}
        found = found.get(key)
    if not isinstance(found, dict):
        return {}
    return found


def drop_saved_state(state: TrainerState, name: str) -> None:
    """Remove a dictionary that hfscale keeps in `trainer_state.json`; nothing is done if there is none.

    Args:
        state (`TrainerState`): the state of the Trainer.
        name (`str`): name of the dictionary.
    """
    by_callback: Any = state.stateful_callbacks
    if isinstance(by_callback, dict):
        by_callback.get(_STATE_KEY, {}).pop(name, None)


def growing_batch_state(state: TrainerState) -> dict[str, Any]:
    """Return where a training with a changing global batch is; empty where the batch is constant.

    Args:
        state (`TrainerState`): the state of the Trainer.

    Returns:
        `dict[str, Any]`: the live dictionary, not a copy, if the batch changes: `pass` (over the data, from 0),
            `in_pass` (sequences of it that have been trained on), `samples` (sequences in all).
    """
    return find_saved_state(state, _GROWING_BATCH)


def begin_growing_batch_state(state: TrainerState) -> dict[str, Any]:
    """Return the dictionary of `growing_batch_state`, which a training from scratch begins.

    Args:
        state (`TrainerState`): the state of the Trainer.
    """
    return saved_state(state, _GROWING_BATCH)


def requested_optimizer(args: TrainingArguments) -> str:
    """Return the name of the optimizer that a Trainer's arguments ask for, such as `adamw_torch`.

    Args:
        args (`TrainingArguments`): the arguments; `optim` is a name of transformers, or `muon` in a recipe.
    """
    return str(getattr(args.optim, "value", args.optim))


def global_batch_size(trainer: Trainer) -> int:
    """Return the sequences per optimizer step: per-device batch x accumulation x data-parallel size.

    Args:
        trainer (`Trainer`): ranks that share a sequence or a matrix count as one data-parallel rank. With
            `split_batches` the ranks share a batch, which transformers counts once per rank.
    """
    # An AcceleratorConfig: TrainingArguments converts the user's value
    config: Any = trainer.args.accelerator_config
    if config.split_batches:
        return micro_batch_size(trainer) * trainer.args.gradient_accumulation_steps
    if not has_epoch_methods() and "_train_batch_size" not in vars(trainer):
        # As Trainer does after `on_init_end`
        trainer._train_batch_size = trainer.args.train_batch_size
    return trainer.get_total_train_batch_size(trainer.args)


def stepped_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside of those of Accelerate and DeepSpeed.

    An optimizer of the program may hold another one in an attribute of the same name, and is whole.

    Args:
        optimizer (`Any`): `Trainer.optimizer`.
    """
    while isinstance(optimizer, AcceleratedOptimizer) or _is_of_deepspeed(optimizer):
        inside = getattr(optimizer, "optimizer", None)
        if inside is None:
            break
        optimizer = inside
    return optimizer


def _is_of_deepspeed(optimizer: object) -> bool:
    return type(optimizer).__module__.startswith("deepspeed.")


def data_ranks(trainer: Trainer) -> int:
    """Return the number of ranks that train on different sequences; 1 with `split_batches`, where ranks share a batch.

    Args:
        trainer (`Trainer`): as for `global_batch_size`.
    """
    of_rank = micro_batch_size(trainer) * trainer.args.gradient_accumulation_steps
    return global_batch_size(trainer) // of_rank


def micro_batch_size(trainer: Trainer) -> int:
    """Return the sequences of a micro-batch of one rank, as `auto_find_batch_size` has found them where it is set.

    Args:
        trainer (`Trainer`): as for `global_batch_size`; with `split_batches` it is the batch that its ranks share.
    """
    found: int | None = getattr(trainer, "_train_batch_size", None)
    if found is None:
        return trainer.args.train_batch_size
    return found


def steps_per_epoch(trainer: Trainer) -> int:
    """Return the optimizer steps of an epoch, as Trainer counts them; 0 where the data have no length.

    Args:
        trainer (`Trainer`): a Trainer whose training has begun.
    """
    loader = trainer.callback_handler.train_dataloader
    if not has_length(loader):
        return 0
    return max(-(-len(loader) // trainer.args.gradient_accumulation_steps), 1)


def micro_batches_of_pass(trainer: Trainer, steps: int) -> int:
    """Return how many micro-batches of its pass over the data each rank has trained on; 0 between two passes.

    Args:
        trainer (`Trainer`): a Trainer whose training has begun; 0 is returned for data without a length.
        steps (`int`): the optimizer steps of the run so far.
    """
    accumulation = int(trainer.args.gradient_accumulation_steps)
    growing = growing_batch_state(trainer.state)
    if not growing:
        steps_of_pass = steps % max(steps_per_epoch(trainer), 1)
        return steps_of_pass * accumulation
    in_pass: int = growing["in_pass"]
    micro_batch = global_batch_size(trainer) // accumulation
    return in_pass // micro_batch


def jump_to(trainer: Trainer, step: int) -> None:
    """Count steps that were taken elsewhere: the learning rate and the end of the training follow.

    The batches are not skipped. Call it between two steps.

    Args:
        trainer (`Trainer`): a Trainer that trains.
        step (`int`): optimizer steps taken, at least those so far.
    """
    missed = step - trainer.state.global_step
    # Accelerate's wraps the real one
    scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    assert scheduler is not None  # Trainer makes it before the first step
    if not isinstance(scheduler, ReduceLROnPlateau):  # it counts evaluations
        with warnings.catch_warnings():
            # The optimizer of an island that has just begun has taken no step yet; those of the others count.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for _ in range(missed):
                scheduler.step()
    trainer.state.global_step = step
    # The logged loss is a mean over the steps of this process
    trainer._globalstep_last_logged += missed


def is_inside_pass(trainer: Trainer) -> bool:
    """Return whether a training resumes inside a pass over its data.

    Args:
        trainer (`Trainer`): a Trainer whose state is that of the checkpoint.
    """
    state = trainer.state
    if steps_per_epoch(trainer):
        return micro_batches_of_pass(trainer, state.global_step) > 0
    position = find_saved_state(state, "stream")
    return bool(position.get("samples", 1))


def running_loss(trainer: Trainer) -> tuple[Tensor, int]:
    """Return a copy of the sum of this rank's losses since the last log, a scalar, and the step of that log.

    Args:
        trainer (`Trainer`): a Trainer that trains, of transformers 5.4 or later.
    """
    return trainer._tr_loss.detach().clone(), trainer._globalstep_last_logged


def set_running_loss(trainer: Trainer, loss: float, mean: float, *, last_log: int) -> None:
    """Have the next log be the mean of all steps since one that another process has made.

    Args:
        trainer (`Trainer`): a Trainer of transformers 5.4 or later, whose training has begun and has taken no step.
        loss (`float`): the sum of this rank's losses since that log.
        mean (`float`): the mean of that sum over the ranks.
        last_log (`int`): the step of that log.
    """
    trainer._tr_loss.fill_(loss)
    trainer._globalstep_last_logged = last_log
    # The record that ends the training has the mean loss of the steps of this process alone
    trainer._total_loss_scalar = -mean


def leave_out_of_logged_loss(trainer: Trainer) -> None:
    """Have the next log leave the step that is being taken out of its mean loss; a log of no other step is not made.

    Args:
        trainer (`Trainer`): a Trainer that trains.
    """
    # The logged loss is a mean over the steps since this one
    trainer._globalstep_last_logged += 1


def leave_out_of_final_loss(trainer: Trainer, steps: int) -> None:
    """Have the record that ends a training leave steps out of its mean loss. Call it before that is made.

    Args:
        trainer (`Trainer`): a Trainer that has taken its last step.
        steps (`int`): steps whose loss was not added up.
    """
    taken = trainer.state.global_step - steps
    if taken > 0:
        factor = trainer.state.global_step / taken
        trainer._total_loss_scalar *= factor
        trainer._tr_loss *= factor
