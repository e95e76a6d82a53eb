"""This rank's part of an average of the trained weights, and how it is put in the place of the weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import Trainer

from hfscale.averaging.options import AverageOptions
from hfscale.checkpoint.formats.parallel import ADAPTER_PREFIX
from hfscale.checkpoint.formats.view import canonical_name
from hfscale.errors import UsageError
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies import Strategy

Part = torch.Tensor | None
"""What this rank keeps in the place of `Strategy.master_part`, in float32; None: nothing of this parameter."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained parameter."""

    name: str
    """Its name in the undistributed model, without the wrappers of adapters."""
    parameter: nn.Parameter
    """The parameter as it is between two steps."""


@dataclass(kw_only=True)
class Snapshot:
    """A set of parts, one for each trained parameter."""

    parts: list[Part]
    """In the order of the parameters."""
    step: int = 0
    """The optimizer step that it is of; of a moving average, that of the last update."""


class AveragedWeights:
    """Averages the trained parameters of a Trainer, of each what this rank keeps of the values that are stepped.

    A moving average begins as a copy of the weights at its first update. The decay of a later one is
    `min(decay, (1 + t) / (10 + t))` after t updates, so that it soon forgets the first weights: the rule of
    TensorFlow's `ExponentialMovingAverage(num_updates=t)`, which `diffusers.training_utils.EMAModel` has too.

    The mean of the last k snapshots (LAWA, arXiv 2209.14981) keeps k copies, and adds them up when it is used.

    Args:
        trainer (`Trainer`): prepared for training.
        options (`AverageOptions`): which average is kept, and where.

    Raises:
        UsageError: a trained parameter does not consist of ordinary numbers.
    """

    def __init__(self, trainer: Trainer, options: AverageOptions) -> None:
        self.trainer = trainer
        self.options = options
        self.strategy = Strategy.of(trainer)
        self.updates = 0
        """Updates so far."""
        self.sets: list[Snapshot] = []
        """The moving average, or the snapshots, the oldest first; empty before the first update."""
        self.trained = self._find_trained()
        for one in self.trained:
            own = self.strategy.own(one.parameter)
            if own is None or not own.is_floating_point():
                kind = type(one.parameter.data).__name__
                raise UsageError(
                    f"'{one.name}' is a {kind} of {one.parameter.dtype}, which cannot be averaged: do not train it, "
                    "or leave the average out"
                )

    def _find_trained(self) -> list[Trained]:
        """Return the trained parameters; a rank may have two copies of a tied weight, under one name."""
        self.strategy.reshard()
        found = []
        for name, parameter in model_of(self.trainer).named_parameters():
            if parameter.requires_grad:
                inner = canonical_name(name).removeprefix(ADAPTER_PREFIX)
                stored = self.strategy.name_in_one_process(inner)
                found.append(Trained(name=stored, parameter=parameter))
        return found

    # ---- updates

    def decay_of_next_update(self) -> float:
        """Return the decay of the next update of a moving average; 0 for the first one."""
        assert self.options.ema_decay is not None
        if self.updates == 0:
            return 0.0
        return min(self.options.ema_decay, (1 + self.updates) / (10 + self.updates))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights of this step into the average. The ranks exchange nothing.

        Args:
            step (`int`): the optimizer step.
        """
        weights = [self.strategy.master_part(one.parameter) for one in self.trained]
        if self.options.ema_decay is not None and self.sets:
            average = self.sets[0]
            _move(average.parts, weights, self.decay_of_next_update())
        else:
            average = self._room_for_snapshot(weights)
            for part, weight in _pairs(average.parts, weights):
                part.copy_(weight)
            self.sets.append(average)
        average.step = step
        self.updates += 1

    def _room_for_snapshot(self, weights: Sequence[Part]) -> Snapshot:
        """Return the oldest snapshot where there are as many as are kept, and otherwise memory for one."""
        if self.options.average_last is not None and len(self.sets) == self.options.average_last:
            return self.sets.pop(0)
        return Snapshot(parts=[self._empty_like(weight) for weight in weights])

    def empty_set(self) -> Snapshot:
        """Return memory for one set of parts."""
        weights = [self.strategy.master_part(one.parameter) for one in self.trained]
        return Snapshot(parts=[self._empty_like(weight) for weight in weights])

    def _empty_like(self, weight: Part) -> Part:
        if weight is None:
            return None
        device = torch.device("cpu") if self.options.average_device == "cpu" else weight.device
        return torch.empty(weight.shape, dtype=torch.float32, device=device)

    # ---- use

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Put the average in the place of the weights in the `with` block, and then the same weights back.

        Before the first update, nothing is changed. Every rank must call it.
        """
        if not self.sets:
            yield
            return
        with torch.no_grad(), self.strategy.changing_weights():
            kept = [self._weight(one).clone() for one in self.trained]
            self._set_weights()
        try:
            yield
        except BaseException:
            with self.strategy.changing_weights():
                self._put_back(kept)
                raise
        with self.strategy.changing_weights():
            self._put_back(kept)

    @torch.no_grad()
    def put_in(self) -> None:
        """Set the weights to the average, for good; the values that are stepped stay. Every rank must call it."""
        with self.strategy.changing_weights():
            self._set_weights()

    def _set_weights(self) -> None:
        for number, one in enumerate(self.trained):
            self.strategy.set_weight(one.parameter, self._mean(number))

    def _mean(self, number: int) -> Part:
        """Return the average of a parameter."""
        parts = [part for part in (each.parts[number] for each in self.sets) if part is not None]
        if len(parts) < 2:
            return next(iter(parts), None)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total / len(parts)

    @torch.no_grad()
    def _put_back(self, kept: Sequence[torch.Tensor]) -> None:
        for one, weight in zip(self.trained, kept, strict=True):
            self._weight(one).copy_(weight)

    def _weight(self, one: Trained) -> torch.Tensor:
        own = self.strategy.own(one.parameter)
        assert own is not None  # checked when this was made
        return own


def _pairs(
    parts: Sequence[Part], weights: Sequence[Part]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parts that this rank has, each with its weight."""
    for part, weight in zip(parts, weights, strict=True):
        if part is not None and weight is not None:
            yield part, weight


def _move(parts: Sequence[Part], weights: Sequence[Part], decay: float) -> None:
    """Move an average towards the weights: in one operation for all that are in float32 on its device."""
    move = get_ema_multi_avg_fn(decay)
    alike: list[tuple[torch.Tensor, torch.Tensor]] = []
    for part, weight in _pairs(parts, weights):
        if weight.dtype == part.dtype and weight.device == part.device:
            alike.append((part, weight))
        else:
            move([part], [weight.to(part)], None)
    if alike:
        averages, values = map(list, zip(*alike, strict=True))
        move(averages, values, None)
