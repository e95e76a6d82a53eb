"""Loads the states of an optimizer by the names of its parameters, or checks their order where they have none.

torch numbers the parameters of an optimizer, and gives the states of a checkpoint to those of the same numbers. A
script that takes them from a set has them in another order in every process, since Python hashes texts with another
seed in each: without an error where their shapes are equal, as those of adapters are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import Trainer

from hfscale.checkpoint.contents import parameter_names
from hfscale.checkpoint.conversion import read_origin
from hfscale.checkpoint.formats import unsharded
from hfscale.checkpoint.formats.parameter_names import read_parameter_names
from hfscale.core.collectives import TRAINING
from hfscale.core.logging import get_logger
from hfscale.core.run_files import PARAMETERS_NAME
from hfscale.errors import CheckpointError, UsageError
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.state import saved_state
from hfscale.trainer.strategies import Strategy

logger = get_logger(__name__)

Groups = list[list[str]]
_NAME = "optimizer"
_ORDER = "order"
_HOOKS = "_optimizer_load_state_dict_pre_hooks"


@contextmanager
def states_by_name(adapter: TrainerAdapter) -> Iterator[None]:
    """Within the context, let the optimizer load the states of the checkpoint by the names of its parameters.

    Args:
        adapter (`TrainerAdapter`): the adapter of a Trainer that resumes, and has its optimizer.

    Raises:
        CheckpointError: the optimizer has its parameters in other groups, or loads its states by itself.
    """
    found = _other_order(adapter.trainer, adapter.resumes_from)
    if found is None:
        yield
        return
    own, stored = found
    optimizer: Any = Strategy.of(adapter.trainer).torch_optimizer()
    # An optimizer around others may leave out the initialization of torch's class
    if not _same_parameters(own, stored) or not hasattr(optimizer, _HOOKS):
        raise CheckpointError(_describe(str(adapter.resumes_from), own, stored))
    logger.info(
        "the optimizer has its parameters in another order, and gets its states by their names"
    )

    def reorder(_optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        groups = [
            _in_order(group, names, of_checkpoint)
            for group, names, of_checkpoint in zip(state["param_groups"], own, stored, strict=True)
        ]
        return state | {"param_groups": groups}

    hook = optimizer.register_load_state_dict_pre_hook(reorder)
    try:
        yield
    finally:
        hook.remove()


def check_engine_order(adapter: TrainerAdapter) -> None:
    """Check that an engine with flat partitions has the parameters in one order: on all ranks, and as the checkpoint.

    DeepSpeed adds up gradients, and loads states, by their position in these partitions. Every rank must call it when
    training begins.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer, whose engine is there.

    Raises:
        UsageError: a rank has another order; raised on every rank.
        CheckpointError: the checkpoint has another order.
    """
    trainer = adapter.trainer
    names = Strategy.of(trainer).stepped_order()
    order = xxhash.xxh3_64_hexdigest("\n".join(names).encode()) if names else ""
    other = TRAINING.combine("order of the optimizer", order, _first_other)
    if other is not None:
        raise UsageError(
            f"rank {other} gives its parameters to the optimizer in another order than rank 0, and DeepSpeed adds up "
            "gradients by position: make the optimizer from lists, since a set has another order in every process"
        )
    kept = saved_state(trainer.state, _NAME)
    before = kept.pop(_ORDER, order)
    if not order:
        return
    # The states of a conversion have names
    is_original = adapter.resumes_from and read_origin(Path(adapter.resumes_from)) is None
    if is_original and order != before:
        raise CheckpointError(
            f"{adapter.resumes_from} has the states of the optimizer in another order, and DeepSpeed loads them by "
            "position: make the optimizer from lists, since a set has another order in every process"
        )
    kept[_ORDER] = order


def _first_other(orders: list[str]) -> int | None:
    """Return the first rank with another order than rank 0."""
    for rank, order in enumerate(orders):
        if order != orders[0]:
            return rank
    return None


def _in_order(group: dict[str, Any], names: list[str], of_checkpoint: list[str]) -> dict[str, Any]:
    """Return a group of a state dict with the numbers of its parameters in the order of their names."""
    numbers = dict(zip(of_checkpoint, group["params"], strict=True))
    return group | {"params": [numbers[name] for name in names]}


def _other_order(trainer: Trainer, checkpoint: str | None) -> tuple[Groups, Groups] | None:
    """Return the names of the parameters of the optimizer and of a checkpoint by group, where they differ."""
    if checkpoint is None:
        return None
    files = (Path(checkpoint) / PARAMETERS_NAME, Path(checkpoint) / unsharded.OPTIMIZER_NAME)
    if not all(file.is_file() for file in files):
        return None
    if Strategy.of(trainer).facts.file_format != unsharded.FORMAT.name:
        return None
    names = parameter_names(trainer)
    stored = read_parameter_names(Path(checkpoint)).groups
    if names is None or names.groups == stored:
        return None
    return names.groups, stored


def _same_parameters(own: Groups, stored: Groups) -> bool:
    """Return whether the groups have the same parameters, in any order."""
    return list(map(sorted, own)) == list(map(sorted, stored))


def _describe(checkpoint: str, own: Groups, stored: Groups) -> str:
    """Return how the groups differ: the first parameter that would get the states of another one says most."""
    what = f"{len(stored)} parameter groups, and this optimizer has {len(own)}"
    for mine, theirs in zip(chain(*own), chain(*stored), strict=False):
        if mine != theirs:
            what = f"the states of '{theirs}' where this optimizer has '{mine}'"
            break
    return (
        f"{checkpoint} has {what}: make the optimizer with the groups of the run that wrote it, in the same order, "
        "or start from scratch with --resume_from_checkpoint false"
    )
