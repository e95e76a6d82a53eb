"""Keeps models that follow the one that is trained in its checkpoints: TRL's reference models and teachers.

With `sync_ref_model` TRL moves a reference model towards the model that is trained every few steps, and no checkpoint
of Trainer holds it: a resumed run would begin with the first one again. Here a checkpoint keeps its weights, once for
all ranks, where each rank has complete models (one process, DDP). What else callbacks of TRL move, and a reference
model that ranks share, is named when a run begins, and a resume is refused.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from transformers import Trainer

from hfscale.core import distributed
from hfscale.core.collectives import TRAINING
from hfscale.core.logging import get_logger
from hfscale.errors import CheckpointError, UsageError
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.strategies import Strategy

logger = get_logger(__name__)

NAME = "hfscale_followers"
FILE = f"{NAME}_outer_0.safetensors"
"""The file of a checkpoint, which rank 0 writes."""
_MODEL = "ref_model"
_OTHERS = ("shadow_weights", "running_model")
"""Attributes in which callbacks of TRL keep weights that they move after steps: the model of `sync_ref_model` and of
teachers that average the student; the weights of teachers that are adapters, and those of BEMA."""


def _moving(trainer: Trainer, *names: str) -> Iterator[Any]:
    """Yield the callbacks of TRL that have one of these attributes."""
    for callback in trainer.callback_handler.callbacks:
        is_of_trl = any(kind.__module__.startswith("trl.") for kind in type(callback).__mro__)
        if is_of_trl and any(name in vars(callback) for name in names):
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
    other = next(_moving(trainer, *_OTHERS), None)
    if other is not None:
        return f"{type(other).__name__} moves weights that no checkpoint holds"
    if _models(trainer) and not Strategy.of(trainer).facts.is_replicated:
        return "the reference model follows the trained one, and under this strategy no checkpoint holds it"
    return None


def keep_followers(adapter: TrainerAdapter) -> None:
    """Keep the models that follow the trained one in the checkpoints of a training, and resume with them.

    Call it when a training begins that saves.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains.

    Raises:
        UsageError: the run resumes, and something follows that no checkpoint holds; raised on every rank.
        CheckpointError: the checkpoint's file is broken, or of other models; raised on every rank.
    """
    trainer = adapter.trainer
    checkpoint = adapter.resumes_from
    reason = why_not_kept(trainer)
    fix = "leave sync_ref_model out, or give a teacher that stays"
    if reason is not None and checkpoint is not None:
        raise UsageError(
            f"{checkpoint}: {reason}, so that this run would continue with the first ones and other losses: start it "
            f"from scratch, or {fix}"
        )
    if reason is not None:
        logger.warning("%s: this run cannot be resumed once it is stopped; %s", reason, fix)
        return
    models = _models(trainer)
    if not models:
        return
    adapter.announced.tensors[NAME] = lambda: _copies(models)
    if checkpoint is None:
        return
    with TRAINING.agreed("start: models that follow"):  # the file may be broken
        _read(Path(checkpoint) / FILE, models)


def _weights(models: list[nn.Module]) -> dict[str, nn.Parameter]:
    """Return all parameters of some models by names that tell the models apart; a tied one is there once."""
    return {
        f"{number}.{name}": weight
        for number, model in enumerate(models)
        for name, weight in model.named_parameters()
    }


def _copies(models: list[nn.Module]) -> dict[str, torch.Tensor]:
    """Return copies of the weights on the CPU, of rank 0; every rank has the same."""
    if distributed.rank() > 0:
        return {}
    return {
        name: weight.detach().to("cpu", copy=True).contiguous()
        for name, weight in _weights(models).items()
    }


def _read(file: Path, models: list[nn.Module]) -> None:
    """Give the models the weights of a checkpoint."""
    if not file.is_file():
        raise CheckpointError(
            f"{file.parent} does not hold the reference model that follows the trained one: an earlier version or "
            "plain Trainer has saved it; start from scratch, or leave sync_ref_model out"
        )
    try:
        saved = safetensors.torch.load_file(file)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({type(error).__name__}): use another checkpoint"
        ) from None
    weights = _weights(models)
    shapes = {name: weight.shape for name, weight in weights.items()}
    if shapes != {name: tensor.shape for name, tensor in saved.items()}:
        raise CheckpointError(
            f"{file} is of another reference model: resume with the one of the checkpoint"
        )
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(saved[name])
