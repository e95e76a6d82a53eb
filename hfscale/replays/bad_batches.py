"""Leaves bad batches out of a training (`skip_bad_batches`): each is undone before the optimizer has stepped on it.

Design
- What: the batch of a step (of all ranks and micro-batches) is bad if the loss or the norm of the gradients is NaN or
  infinite, or far above those of the steps before (`outliers`).
- When: between the backward pass and the update (`trainer/update_gate.py`). Then no weight and no state of the
  optimizer has seen the batch, so that there is nothing to go back to and nothing to compute again. What the step has
  moved besides is put back: random numbers, and all that the model and the Trainer hold (`replay_state`).
- Result, bit for bit: the run whose step did nothing with this batch but read it. Where reading draws no random
  numbers in the training process, that is the run whose sampler never had it. The step counts, so that the place in
  the data and the end of the training follow from the number of steps; the optimizer and the schedule do not see it.
- All ranks: loss and norm are exchanged in each step, and every rank draws the conclusion from the same table.
- Later: `skipped_batches` keeps what was left out, for a resume on any ranks and from any checkpoint.
- Who: `CommHealthCallback` makes it; it imports `trainer` and `checkpoint` (which samples a step reads). What cannot
  be undone is refused when training begins: by the support table, `replayable` and `replay_state`.
- Not here: a batch whose harm shows only later, and a replay with another result, whose batch is not to blame.
  `on_bad_training` and `hfscale run` go back to a checkpoint or a snapshot for these.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from transformers import Trainer, TrainerState

from hfscale.core.attributes import replaced
from hfscale.core.collectives import TRAINING
from hfscale.core.findings import Finding
from hfscale.core.logging import get_logger
from hfscale.core.redaction import redact
from hfscale.core.spelling import spelled
from hfscale.replays.kept_state import KeptState
from hfscale.replays.outliers import Outliers
from hfscale.replays.replay_state import (
    check_state,
    check_weights,
    hash_weights,
    put_random_states_back,
    random_states,
    state_of,
)
from hfscale.replays.replayable import check_effects
from hfscale.replays.skipped_batches import SkippedBatches, same_samples
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.sample_indices import record_samples
from hfscale.trainer.state import leave_out_of_final_loss, leave_out_of_logged_loss
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.update_gate import UpdateGate

logger = get_logger(__name__)

_VERB = "undone"
_MOST_NAMED = 16
"""Samples of a batch that the log names."""
_MOST_TEXTS = 2
_TEXT_LENGTH = 160
"""Characters of a sample's text in the log."""
Report = Callable[[Finding, int], None]
Stop = Callable[[Finding], None]


class BadBatches:
    """Judges each step of a training before its update, and undoes those with a bad batch.

    Every rank must make it, in `on_train_begin`.

    Args:
        adapter (`TrainerAdapter`): the adapter of a Trainer that is prepared for training.
        most (`int`): how many batches the run may leave out, those of earlier launches included.
        report (`Callable`): called on every rank with what was left out, and the step.
        stop (`Callable`): called on every rank where a batch is bad and none may be left out any more; it raises.

    Raises:
        UsageError: the arguments, the class of the Trainer or what it refers to do not allow it.
    """

    def __init__(self, adapter: TrainerAdapter, most: int, report: Report, stop: Stop) -> None:
        self._asked = spelled("skip_bad_batches", most)
        trainer = adapter.trainer
        with TRAINING.agreed("start: bad batches"):
            check_effects(trainer, self._asked, _VERB)
            check_state(trainer, self._asked, _VERB)
        self._trainer = trainer
        self._most = most
        self._report = report
        self._stop = stop
        strategy = Strategy.of(trainer)
        self._has_engine = strategy.engine_steps
        self._knows_micro_batches = not strategy.steps_at_last_batch
        self._samples = record_samples(adapter, trainer.callback_handler.train_dataloader)
        self.skipped = SkippedBatches(adapter)
        self._losses = Outliers(self.skipped.window["loss"])
        self._norms = Outliers(self.skipped.window["grad_norm"])
        self._step: _Step | None = None
        self._weights: dict[str, torch.Tensor] | None = None
        self._has_checked = False
        self._bad: dict[str, Any] | None = None
        UpdateGate(adapter, self._is_made, self._undo).open()
        adapter.wrap_training_step(self._wrap)
        adapter.add_metrics(self._keys)
        adapter.evaluations.before_finalizing(self._correct_mean_loss)

    def _keys(self, state: TrainerState, logs: Any) -> dict[str, float]:
        return {"health/skipped_batches": float(len(self.skipped.batches))}

    def _correct_mean_loss(self) -> None:
        leave_out_of_final_loss(self._trainer, len(self.skipped.batches))

    # ---- a step

    def _wrap(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(training_step)
        def step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self._step is None:
                self._step = self._begin_step()
            own = self._step
            own.inputs.append(inputs)
            with self._hearing_losses(own):
                loss = training_step(model, inputs, *args, **kwargs)
            if not self._has_engine:
                own.losses.append(loss.detach())
            return loss

        return step

    def _begin_step(self) -> "_Step":
        kept = state_of(self._trainer, (), without=[self.skipped.state])
        if not self._has_checked:
            self._weights = hash_weights(self._trainer, kept)
        return _Step(kept)

    @contextmanager
    def _hearing_losses(self, step: "_Step") -> Iterator[None]:
        """Hear the loss before DeepSpeed updates, which is at the end of the backward pass."""
        if not self._has_engine:
            yield
            return
        accelerator = self._trainer.accelerator
        backward = accelerator.backward

        def hear_and_compute(loss: torch.Tensor, **kwargs: Any) -> None:
            step.losses.append(loss.detach())
            backward(loss, **kwargs)

        with replaced(accelerator, "backward", hear_and_compute):
            yield

    def _check_weights(self, step: "_Step") -> None:
        """Check once in a launch that computing the loss writes no weights, which would not be put back."""
        before, self._weights = self._weights, None
        self._has_checked = True
        if before is not None:
            with TRAINING.agreed("bad batches: weights"):
                now = hash_weights(self._trainer, step.kept)
                check_weights(before, now, self._asked, _VERB)

    def _is_made(self, norm: float) -> bool:
        """Judge the step, and return whether its update is made; all ranks come to the same conclusion."""
        step = self._step
        assert step is not None
        if not self._has_checked:
            self._check_weights(step)
        losses: list[float] = torch.stack(step.losses).tolist()  # waits for a GPU once
        table = TRAINING.gather_numbers("bad batches", [sum(losses), norm])
        loss, norm = float(table[:, 0].mean()), float(table[:, 1].max())
        number = self._trainer.state.global_step + 1
        reason = self._why_bad(loss, norm)
        later = self.skipped.later(number)
        if reason is None and later is None:
            return self._accept(loss, norm)
        batch = self._describe(step, losses)
        if reason is None:
            # An earlier launch has left it out. This one does so too, if its numbers here say so or not.
            assert later is not None
            if not same_samples(later, batch["samples"]):
                self._forget(number)
                return self._accept(loss, norm)
            reason = later["reason"]
        self._remember(loss, norm)
        self._bad = {"step": number, "reason": reason, **batch}
        if len(self.skipped.batches) >= self._most:
            self._stop(self._finding(self._bad, is_last=True))
        self._report(self._finding(self._bad), number)
        return False

    def _accept(self, loss: float, norm: float) -> bool:
        self._remember(loss, norm)
        self._step = None
        return True

    def _remember(self, loss: float, norm: float) -> None:
        """Compare later steps with these numbers too."""
        for number, earlier in ((loss, self._losses), (norm, self._norms)):
            if math.isfinite(number):
                limit = earlier.limit_below(number)
                earlier.add(number if limit is None else limit)

    def _forget(self, number: int) -> None:
        self.skipped.forget(number)
        logger.warning(
            "step %d has other samples than the batch that an earlier launch has left out there: it is trained on",
            number,
        )

    def _why_bad(self, loss: float, norm: float) -> str | None:
        """Return what is wrong with a step; None if nothing is."""
        for name, number, earlier in (
            ("the loss", loss, self._losses),
            ("the gradient norm", norm, self._norms),
        ):
            if not math.isfinite(number):
                return f"{name} is {number}"
            limit = earlier.limit_below(number)
            if limit is not None:
                return f"{name} is {number:.4g}, where {limit:.4g} is the limit and {earlier.median():.4g} the median"
        return None

    def _undo(self) -> None:
        """Put back what the step has moved, and note the batch."""
        step, bad = self._step, self._bad
        assert step is not None
        assert bad is not None
        self._step = self._bad = None
        step.kept.put_back()
        put_random_states_back(step.randoms)
        leave_out_of_logged_loss(self._trainer)
        self.skipped.add(bad)

    # ---- what was in it

    def _describe(self, step: "_Step", losses: list[float]) -> dict[str, Any]:
        """Return the samples of the step on all ranks, and those of the micro-batch with the highest loss."""
        batches: list[list[Any]] | None = None
        if self._samples is not None:
            taken = self._samples.batches_after(self._trainer.state.global_step)
            batches = [[_plain(index) for index in batch] for batch in taken]
        own: dict[str, Any] = {"batches": batches, "loss": None}
        if self._knows_micro_batches and losses:
            worst = max(range(len(losses)), key=lambda n: _order(losses[n]))
            own["loss"] = losses[worst]
            own["texts"] = _texts(self._trainer, step.inputs[worst])
            if batches is not None and worst < len(batches):
                own["samples"] = batches[worst]
        of_ranks = TRAINING.gather("bad batches: samples", own)
        return {"samples": _together(of_ranks), "worst": _worst(of_ranks)}

    def _finding(self, bad: dict[str, Any], *, is_last: bool = False) -> Finding:
        count = len(self.skipped.batches)
        what = f"step {bad['step']}: {bad['reason']}"
        where = _named(bad)
        if is_last:
            problem = f"{what}; {count} batches have been left out, and {self._asked} allows no more{where}"
            fix = "look at the data and at the learning rate, or allow more"
            return Finding(level="error", check="loss", problem=problem, fix=fix)
        problem = f"{what}; its batch is left out ({count + 1} of at most {self._most}){where}"
        return Finding(check="loss", problem=problem, fix="look at the data")


class _Step:
    """What is known of a step that is being computed."""

    def __init__(self, kept: KeptState) -> None:
        self.kept = kept
        self.randoms = random_states()
        self.losses: list[torch.Tensor] = []
        self.inputs: list[Any] = []


def _order(loss: float) -> float:
    """Return a number by which losses are compared: those that are not finite are the highest."""
    return loss if math.isfinite(loss) else math.inf


def _plain(index: Any) -> Any:
    """Return the index of a sample as a JSON value."""
    try:
        return int(index)
    except (TypeError, ValueError):
        return str(index)


def _together(of_ranks: list[dict[str, Any]]) -> list[Any] | None:
    """Return the samples of all ranks in order; ranks that share a sequence name it once. None: not known."""
    if any(own["batches"] is None for own in of_ranks):
        return None
    found = {index for own in of_ranks for batch in own["batches"] for index in batch}
    return sorted(found, key=lambda index: (isinstance(index, str), index))


def _worst(of_ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return rank, loss, samples and texts of the micro-batch with the highest loss; None if it is not known."""
    known = [rank for rank, own in enumerate(of_ranks) if own["loss"] is not None]
    if not known:
        return None
    rank = max(known, key=lambda rank: _order(of_ranks[rank]["loss"]))
    own = of_ranks[rank]
    return {
        "rank": rank,
        "loss": own["loss"] if math.isfinite(own["loss"]) else str(own["loss"]),
        "samples": own.get("samples"),
        "texts": own["texts"],
    }


def _named(bad: dict[str, Any]) -> str:
    """Return what the log says of the samples."""
    worst = bad["worst"]
    samples = bad["samples"] if worst is None else worst["samples"]
    if samples is None:
        where = "the samples of a stream have no number"
    else:
        more = ", …" if len(samples) > _MOST_NAMED else ""
        where = f"samples {', '.join(map(str, samples[:_MOST_NAMED]))}{more} of the training data"
    if worst is None:
        return f"; {where}"
    texts = "".join(f" {text!r}" for text in worst["texts"])
    said = f": {texts.strip()}" if texts else ""
    return f"; the highest loss, {worst['loss']}, is on rank {worst['rank']}, {where}{said}"


def _texts(trainer: Trainer, inputs: Any) -> list[str]:
    """Return the beginnings of the texts of a micro-batch; nothing where a Trainer has no tokenizer or no tokens."""
    processing: Any = trainer.processing_class
    decode = getattr(getattr(processing, "tokenizer", processing), "decode", None)
    if decode is None or not isinstance(inputs, dict) or "input_ids" not in inputs:
        return []
    rows = inputs["input_ids"][:_MOST_TEXTS].tolist()
    return [redact(decode(row, skip_special_tokens=True))[:_TEXT_LENGTH] for row in rows]
