"""What happens once when a training begins: what it may not discard, and what it resumes beside Trainer."""

from typing import Any

from transformers import TrainingArguments

from hfscale.checkpoint.data_order.order import keep_data_order
from hfscale.checkpoint.data_order.skipping import check_can_skip
from hfscale.checkpoint.evaluations import put_back_if_cut, resume_evaluations
from hfscale.checkpoint.generated_batches import keep_generated_batches
from hfscale.checkpoint.loader_seeds import keep_loader_seeds
from hfscale.checkpoint.loading import check_resumed, finish_merged_load, finish_universal_load
from hfscale.checkpoint.program_state.optimizer_states import watch_optimizer_states
from hfscale.checkpoint.program_state.state import keep_program_state
from hfscale.checkpoint.remote_copies import RemoteCopies
from hfscale.checkpoint.resume import refuse_to_replace_unread
from hfscale.checkpoint.running_loss import keep_running_loss
from hfscale.checkpoint.schedule import compare_schedules
from hfscale.checkpoint.state_formats import note_formats
from hfscale.core.collectives import START
from hfscale.errors import ParameterError
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.state import output_folder


def is_from_scratch(args: TrainingArguments) -> bool:
    """Return whether the training arguments ask for a start from scratch.

    Args:
        args (`TrainingArguments`): the training arguments.
    """
    return str(args.resume_from_checkpoint).lower() == "false"


def refuse_to_discard(adapter: TrainerAdapter, remote: RemoteCopies | None) -> None:
    """Refuse a start that would archive checkpoints which the script cannot have known of, or cannot have read.

    A script that passes the result of `latest_checkpoint` starts at step 0 if it is None: also where checkpoints are
    there and none can be resumed from. Where one can, the script has decided not to resume from it, and a warning says
    that it is archived. `resume_from_checkpoint="false"` in the training arguments always starts from scratch. Every
    rank must call it.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that is about to train.
        remote (`RemoteCopies`, *optional*): the remote copies of the run.

    Raises:
        UsageError: the training arguments name a checkpoint, which Trainer does not read there.
        CheckpointError: on every rank: there are checkpoints, and none of them can be resumed from; or the remote
            store has a later one.
    """
    args, run_dir = adapter.trainer.args, adapter.checkpoints.run_dir()
    if is_from_scratch(args):
        return
    named = args.resume_from_checkpoint
    if adapter.resumes_from is None and str(named).lower() not in ("none", "true"):
        raise ParameterError(
            "resume_from_checkpoint",
            named,
            "Trainer does not read it from its arguments: pass it to train(resume_from_checkpoint=...)",
        )
    if adapter.resumes_from is None:
        START.on_rank_0(
            "start: checkpoints that cannot be read", lambda: refuse_to_replace_unread(run_dir)
        )
    is_trial = run_dir != output_folder(args)  # of a search, which always starts from scratch
    if remote is not None and not is_trial:
        remote.refuse_to_discard(run_dir, adapter.trainer.state.global_step)


def finish_load(adapter: TrainerAdapter) -> None:
    """Complete and check what Trainer has loaded, if this training resumes.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains.

    Raises:
        CheckpointError: what Trainer has loaded is not what the checkpoint holds.
    """
    trainer = adapter.trainer
    checkpoint = adapter.resumes_from
    finish_universal_load(trainer)
    finish_merged_load(trainer, checkpoint)
    check_resumed(trainer, checkpoint)


def keep_what_trainer_does_not(adapter: TrainerAdapter, train_dataloader: Any) -> None:
    """Keep in the checkpoints what Trainer's own do not have, and resume with it.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains.
        train_dataloader (`DataLoader`): its training data.

    Raises:
        CheckpointError: a file of the checkpoint is broken; raised on every rank.
    """
    check_can_skip(adapter, train_dataloader)
    keep_loader_seeds(adapter, train_dataloader)
    evaluations = resume_evaluations(adapter)
    put_back_if_cut(adapter)
    keep_data_order(adapter, train_dataloader)
    keep_program_state(adapter)
    note_formats(adapter)
    watch_optimizer_states(adapter)
    keep_generated_batches(adapter)
    keep_running_loss(adapter)
    compare_schedules(adapter)
    if evaluations is not None:
        evaluations.begin()
