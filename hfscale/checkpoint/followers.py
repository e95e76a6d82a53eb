"""Keeps weights that follow the model that is trained in its checkpoints: TRL's reference models and averages.

With `sync_ref_model` TRL moves a reference model towards the model that is trained every few steps, and `BEMACallback`
an average of its weights; no checkpoint of Trainer holds either, and a resumed run would begin with the first ones
again. Here a checkpoint keeps them, once for all ranks; where ranks share a reference model, its tensors are gathered
one by one. What else callbacks of TRL move is named when a run begins, and a resume is refused; so is the run itself
where `hfscale run` is to start it again.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor
from transformers import Trainer

from hfscale.core import distributed
from hfscale.core.collectives import TRAINING
from hfscale.core.logging import get_logger
from hfscale.core.rank_link import connect
from hfscale.errors import CheckpointError, UsageError
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.tensors import is_distributed_tensor, kept_of

logger = get_logger(__name__)

NAME = "hfscale_followers"
FILE = f"{NAME}_outer_0.safetensors"
"""The file of a checkpoint, which rank 0 writes."""
_MODEL = "ref_model"
_AVERAGE = "running_model"
_OTHERS = "shadow_weights"
"""Attributes in which callbacks of TRL keep weights that they move after steps: the model of `sync_ref_model` and of
teachers that average the student; the average of BEMA; the weights of teachers that are adapters."""
_FIX = "leave the callback out, or give a teacher that stays"


def _moving(trainer: Trainer, name: str) -> Iterator[Any]:
    """Yield the callbacks of TRL that have an attribute."""
    for callback in trainer.callback_handler.callbacks:
        is_of_trl = any(kind.__module__.startswith("trl.") for kind in type(callback).__mro__)
        if is_of_trl and name in vars(callback):
            yield callback


def _models(trainer: Trainer) -> list[nn.Module]:
    """Return the models that follow, in the order of the callbacks that move them; adapters have none."""
    found = [getattr(callback, _MODEL) for callback in _moving(trainer, _MODEL)]
    return [model for model in found if model is not None]


def why_not_kept(trainer: Trainer) -> str | None:
    """Return what follows the trained model and is in no checkpoint, as a clause; None: nothing.

    Args:
        trainer (`Trainer`): a Trainer whose training begins.
    """
    other = next(_moving(trainer, _OTHERS), None)
    if other is None and not Strategy.of(trainer).facts.is_replicated:
        other = next(_moving(trainer, _AVERAGE), None)
    if other is None:
        return None
    return f"{type(other).__name__} moves weights that no checkpoint holds"


class Followers:
    """Keeps weights that follow the trained ones in the checkpoints of a training, and resumes with them.

    Make it when a training begins that saves.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains.

    Raises:
        UsageError: something follows that no checkpoint holds, and the run resumes, or `hfscale run` is to restart it;
            raised on every rank.
        CheckpointError: the checkpoint's file is broken, or of other models; raised on every rank.
    """

    def __init__(self, adapter: TrainerAdapter) -> None:
        self._trainer = trainer = adapter.trainer
        self._averages: Path | None = None
        checkpoint = adapter.resumes_from
        reason = why_not_kept(trainer)
        if reason is not None:
            _refuse(reason, checkpoint)
            return
        has_models = bool(_models(trainer))
        has_average = next(_moving(trainer, _AVERAGE), None) is not None
        if not has_models and not has_average:
            return
        adapter.announced.tensors[NAME] = self._copies
        if checkpoint is None:
            return
        file = Path(checkpoint) / FILE
        if has_models:
            with TRAINING.agreed("start: models that follow"):  # the file may be broken
                _read(file, _of_models(trainer))
        if has_average:
            self._averages = file

    def step_begins(self) -> None:
        """Give averages the weights of the checkpoint: their callbacks begin after this one, with the trained ones."""
        if self._averages is None:
            return
        file, self._averages = self._averages, None
        with TRAINING.agreed("start: averages"):
            _read(file, _of_averages(self._trainer))

    def _copies(self) -> dict[str, torch.Tensor]:
        """Return copies of the weights on the CPU, of rank 0; every rank must call it."""
        copies = {}
        for name, weight in (_of_models(self._trainer) | _of_averages(self._trainer)).items():
            with _complete(weight) as whole:
                if distributed.rank() == 0:
                    copies[name] = whole.to("cpu", copy=True).contiguous()
        return copies


def _refuse(reason: str, checkpoint: str | None) -> None:
    """Refuse a run that resumes, or that is to be restarted, without what follows; warn of one that cannot resume."""
    if checkpoint is not None:
        raise UsageError(
            f"{checkpoint}: {reason}, so that this run would continue with the first ones and other losses: start it "
            f"from scratch, or {_FIX}"
        )
    (is_supervised,) = TRAINING.maximum("start: restarted", [float(connect() is not None)])
    if is_supervised:
        raise UsageError(
            f"hfscale run cannot restart this run, as {reason}: {_FIX}, or start it without hfscale run"
        )
    logger.warning("%s: this run cannot be resumed once it is stopped; %s", reason, _FIX)


def _of_models(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return all parameters of the models by names that tell the models apart; a tied one is there once."""
    return {
        f"{number}.{name}": weight
        for number, model in enumerate(_models(trainer))
        for name, weight in model.named_parameters()
    }


def _of_averages(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return what averages consist of: the averaged weights, and those of the step at which they began."""
    found: dict[str, torch.Tensor] = {}
    for number, callback in enumerate(_moving(trainer, _AVERAGE)):
        if callback.running_model is None:  # it has not begun
            continue
        parts = dict(callback.running_model.named_parameters())
        parts |= {f"begin.{at}": weight for at, weight in enumerate(callback.theta0_params)}
        parts |= {f"mean.{at}": weight for at, weight in enumerate(callback.ema_params)}
        found |= {f"average.{number}.{name}": weight for name, weight in parts.items()}
    return found


@contextmanager
def _complete(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the complete tensor of a weight of which ranks may have parts. Every rank must enter."""
    if is_distributed_tensor(weight):
        sharded: Any = weight.detach()
        yield sharded.full_tensor()
    elif kept_of(weight) is not weight:
        import deepspeed

        with deepspeed.zero.GatheredParameters([weight]):
            yield weight.detach()
    else:
        yield weight.detach()


def _set(weight: torch.Tensor, saved: torch.Tensor) -> None:
    """Give a weight, of which ranks may have parts, the values of a complete tensor. Every rank must call it."""
    if is_distributed_tensor(weight):
        whole = saved.to(weight.device, weight.dtype)
        weight.copy_(distribute_tensor(whole, weight.device_mesh, weight.placements))
    elif kept_of(weight) is not weight:
        import deepspeed

        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            if distributed.rank() == 0:
                weight.copy_(saved)
    else:
        weight.copy_(saved)


def _shape(weight: torch.Tensor) -> torch.Size:
    """Return the shape of the complete tensor of a weight, of which ranks may have parts."""
    if kept_of(weight) is not weight:
        return torch.Size(weight.ds_shape)  # type: ignore[attr-defined]  # of a parameter of ZeRO-3
    return weight.shape


def _read(file: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Give weights the values of a checkpoint, by their names."""
    if not file.is_file():
        raise CheckpointError(
            f"{file.parent} does not hold the weights that follow the trained ones: an earlier version or plain "
            "Trainer has saved it; start from scratch, or leave sync_ref_model or the callback that moves them out"
        )
    try:
        saved = safetensors.torch.load_file(file)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({type(error).__name__}): use another checkpoint"
        ) from None
    if any(
        name not in saved or saved[name].shape != _shape(each) for name, each in weights.items()
    ):
        raise CheckpointError(
            f"{file} is of another reference model or average: resume with the one of the checkpoint"
        )
    with torch.no_grad():
        for name, weight in weights.items():
            _set(weight, saved[name])
