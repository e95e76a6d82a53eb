"""Keeps the loss since the last log in checkpoints, so that the first log after a resume is that of the whole run.

Trainer logs the mean loss of the steps since the last log, and adds it up in the process. After a resume from a
checkpoint that was saved between two logs, its first log is the mean of the steps of the new process only, under the
number of the same step. Here each rank's checkpoint keeps the sum and the step of the last log.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.checkpoint.rank_files import read_checked
from hfscale.core import distributed
from hfscale.core.collectives import TRAINING
from hfscale.core.versions import has_epoch_methods
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.state import (
    is_inside_pass,
    running_loss,
    set_running_loss,
    steps_per_epoch,
)

NAME = "hfscale_running_loss"
"""The file of a rank is `hfscale_running_loss_RANK.json`."""


def keep_running_loss(adapter: TrainerAdapter) -> None:
    """Keep the loss since the last log in the checkpoints of a training, and resume with it.

    Call it in `on_train_begin`. Nothing is kept with transformers before 5.4, where the sum is a local variable.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains.

    Raises:
        CheckpointError: a file of the checkpoint is broken; raised on every rank.
    """
    if not has_epoch_methods():
        return
    trainer = adapter.trainer
    before = _BeforeStep(trainer)
    adapter.announced.json[NAME] = before.saved
    if adapter.resumes_from is not None:
        _resume(trainer, Path(adapter.resumes_from))
    if not steps_per_epoch(trainer) and trainer.args.gradient_accumulation_steps > 1:
        adapter.append_callback(before)


def _resume(trainer: Trainer, checkpoint: Path) -> None:
    """Have the next log go on with the sum of a checkpoint."""
    with TRAINING.agreed("start: running loss"):  # the file of one rank may be broken
        own = _read_share(checkpoint)
    count, total, last_log = _of_all_ranks(own)
    # The log at the end of an epoch follows the save of its last step
    is_logged = trainer.args.logging_strategy == "epoch" and not is_inside_pass(trainer)
    if count == 0 or is_logged:
        return
    mean = total / count
    has_same_ranks = count == distributed.world_size()
    loss = own[0][0] if has_same_ranks else mean
    set_running_loss(trainer, loss, mean, last_log=last_log)


class _BeforeStep(TrainerCallback):
    """Notes the sum at the beginning of each step.

    Where a pass over a stream ends within a step, a checkpoint is saved before its other micro-batches, and the launch
    that resumes reads the first ones again.

    Args:
        trainer (`Trainer`): the Trainer that trains.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._step = -1
        self._loss: torch.Tensor | None = None
        self._last_log = -1

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step = state.global_step
        self._loss, self._last_log = running_loss(self._trainer)

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        loss, last_log = running_loss(self._trainer)
        now = self._trainer.state.global_step
        is_of_step = (self._step, self._last_log) == (now, last_log)
        if is_of_step and self._loss is not None:
            loss = self._loss
        return {"loss": loss.item(), "last_log": last_log}


def _of_all_ranks(own: list[tuple[float, int]]) -> tuple[int, float, int]:
    """Return how many ranks have saved, the sum of their losses, and the step of their last log; -1 if none has."""
    total = 0.0
    last_log = -1
    for loss, step in own:
        total += loss
        last_log = max(last_log, step)
    table = TRAINING.gather_numbers("start: running loss", [len(own), total, last_log])
    counts, totals, steps = table.T
    return int(counts.sum()), float(totals.sum()), int(steps.max())


def _read_share(checkpoint: Path) -> list[tuple[float, int]]:
    """Return the sum of losses and the step of the last log of each rank that has saved, divided over the ranks."""
    found: list[tuple[float, int]] = []
    saver = distributed.rank()
    path = checkpoint / f"{NAME}_{saver}.json"
    while path.is_file():
        found.append(read_checked(path, _parse))
        saver += distributed.world_size()
        path = checkpoint / f"{NAME}_{saver}.json"
    return found


def _parse(saved: Any) -> tuple[float, int]:
    loss = float(saved["loss"])
    last_log = int(saved["last_log"])
    return loss, last_log
