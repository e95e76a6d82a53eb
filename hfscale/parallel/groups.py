"""The optimizer's parameter groups in the unsplit model, put together from those of all ranks.

Each rank's optimizer has groups of the parameters that the rank holds: a stage has only its own ones, and Trainer
divides its groups by the meshes of their parameters. A checkpoint has the groups that the optimizer of one process
would have, with the names of their parameters, so that any layout finds the options of each.

Which groups those are is asked of whoever makes the optimizer: of Trainer's own rule, or of an overridden
`create_optimizer`, which is called once more with a copy of the unsplit model that has no data. Where neither says it,
parameters with the same options make up one group.
"""

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import Trainer

from hfscale.core.collectives import TRAINING
from hfscale.core.logging import get_logger
from hfscale.core.spelling import spelled
from hfscale.core.torch_internals import FakeTensorMode
from hfscale.errors import UsageError
from hfscale.parallel.mesh import ParallelMesh
from hfscale.trainer.parameter_groups import (
    NAMES,
    OF_THE_LAUNCH,
    entries_by_group,
    is_storable,
    packed_state,
    plain,
    unknown_list,
)

logger = get_logger(__name__)

_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Group:
    """A parameter group, or the part of one that a rank holds."""

    names: list[str]
    """Names of its parameters in the unsplit model."""
    options: dict[str, Any]
    """Learning rate, weight decay, betas …, without `params`; plain values only."""
    entries: dict[str, Any] = field(default_factory=dict)
    """What the scheduler keeps for it, by the name of the list."""

    @property
    def key(self) -> str:
        """The options and the scheduler's entries as text, which equal ones have in common."""
        return json.dumps([self.options, self.entries], sort_keys=True, default=repr)


# --- this rank's groups ----------------------------------------------------------------------------------------------


def groups_of_rank(
    optimizer: torch.optim.Optimizer, scheduler: Any, names: Mapping[int, str]
) -> list[Group]:
    """Return the groups of this rank's optimizer by the names of their parameters.

    Args:
        optimizer (`torch.optim.Optimizer`): the optimizer, without Accelerate's wrapper.
        scheduler (`LRScheduler`, *optional*): its scheduler; None: there is none yet.
        names (`Mapping[int, str]`): the `id` of each parameter of this rank -> its name in the unsplit model.

    Raises:
        UsageError: the optimizer steps a tensor that is no parameter of the model.
    """
    groups = optimizer.param_groups
    state = {} if scheduler is None else scheduler.state_dict()
    entries = entries_by_group(state, len(groups))
    made = []
    for group, of_scheduler in zip(groups, entries, strict=True):
        if any(id(parameter) not in names for parameter in group["params"]):
            raise UsageError(
                f"{type(optimizer).__name__} steps tensors that are no parameters of this rank's model: make it of "
                "trainer.model.parameters(), in an overridden create_optimizer or after ParallelTrainer is made"
            )
        made.append(
            Group(
                names=[names[id(parameter)] for parameter in group["params"]],
                options=_plain_options(group),
                entries=plain(of_scheduler),
            )
        )
    return made


def _plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: plain(value) for key, value in group.items() if key not in NAMES and is_storable(value)
    }


def check_storable(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Refuse options and schedules that a checkpoint cannot give back to every layout.

    Args:
        optimizer (`torch.optim.Optimizer`): this rank's optimizer.
        scheduler (`LRScheduler`): its scheduler.

    Raises:
        UsageError: an option is no plain value, or the scheduler keeps something that cannot be assigned to groups or
            loaded without unpickling it.
    """
    instead = f"or write no checkpoints ({spelled('save_strategy', 'no')})"
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key not in NAMES and key not in OF_THE_LAUNCH and not is_storable(value):
                raise UsageError(
                    f"the option {key} of a parameter group of {type(optimizer).__name__} is a "
                    f"{type(value).__name__}, which a checkpoint of ParallelTrainer cannot store: give a number or a "
                    f"text, {instead}"
                )
    state = scheduler.state_dict()
    kind = type(scheduler).__name__
    unknown = unknown_list(state, len(optimizer.param_groups))
    if unknown is not None:
        raise UsageError(
            f"{kind} keeps {unknown}, of which it is not known whether it has an entry for each parameter group, so "
            "that it cannot be stored for other layouts: keep it in a dictionary in an attribute of the scheduler, "
            f"{instead}"
        )
    reason = why_not_loadable(state)
    if reason is not None:
        raise UsageError(
            f"the state of {kind} cannot be loaded from a checkpoint ({reason}): keep plain values in it, {instead}"
        )


def check_schedule(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Refuse a scheduler that sets the rates of another optimizer.

    Args:
        optimizer (`torch.optim.Optimizer`): this rank's optimizer, without Accelerate's wrapper.
        scheduler (`LRScheduler`): the Trainer's scheduler.

    Raises:
        UsageError: it was made with another optimizer, as every scheduler is that is given to the constructor.
    """
    stepped: Any = getattr(scheduler, "optimizer", optimizer)
    if isinstance(stepped, AcceleratedOptimizer):
        stepped = stepped.optimizer
    if stepped is not optimizer:
        raise UsageError(
            f"optimizers has a {type(scheduler).__name__} that was made with another optimizer, so that it would not "
            "change the learning rates of this training: make it in an overridden create_scheduler, of self.optimizer"
        )


# --- the groups of all ranks -----------------------------------------------------------------------------------------


def exchange_groups(groups: Sequence[Group], mesh: ParallelMesh) -> list[list[Group]]:
    """Return the groups of each pipeline rank. Every rank must call it.

    Ranks with the same stages hold the same parameters, so that one of them sends its groups and the others a digest.

    Args:
        groups (`Sequence[Group]`): this rank's groups.
        mesh (`ParallelMesh`): all ranks.

    Raises:
        UsageError: two ranks with the same stages have other groups; raised on every rank.
    """
    content = [asdict(group) for group in groups]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()
    sends = mesh.data_rank == mesh.cp_rank == mesh.tp_rank == 0
    message = [mesh.pp_rank, digest, content if sends else None]
    received = TRAINING.gather("groups of the optimizer", message)
    by_stage: dict[int, tuple[str, list[Group]]] = {}
    for stage, of_rank, sent in received:
        if sent is not None:
            by_stage[stage] = (of_rank, [_received(group) for group in sent])
    for rank, (stage, of_rank, _) in enumerate(received):
        if of_rank != by_stage[stage][0]:
            raise UsageError(
                f"the optimizer of rank {rank} has other parameter groups or other options than that of the other "
                "ranks with the same layers: make the same optimizer and schedule on every rank"
            )
    return [groups for _, (_, groups) in sorted(by_stage.items())]


def _received(fields: Mapping[str, Any]) -> Group:
    return Group(names=fields["names"], options=fields["options"], entries=fields["entries"])


def unsplit_groups(
    by_stage: Sequence[Sequence[Group]],
    composition: Sequence[Group] | None,
    order: Sequence[str],
) -> list[Group]:
    """Return the groups of the unsplit model.

    Args:
        by_stage (`Sequence[Sequence[Group]]`): the groups of each pipeline rank.
        composition (`Sequence[Group]`, *optional*): the groups that the optimizer of one process would have; absent:
            not known.
        order (`Sequence[str]`): the names of all parameters in the order of the unsplit model.

    Raises:
        UsageError: two stages hold one parameter, a tied weight, with different options.
    """
    parts = list(_by_position(by_stage))
    _check_shared(parts)
    position = {name: number for number, name in enumerate(order)}
    if composition is not None:
        whole = _composed(parts, composition)
        if whole is not None:
            return whole
    by_key: dict[str, list[Group]] = {}
    for part in parts:
        if part.names:
            by_key.setdefault(part.key, []).append(part)
    merged = []
    for same in by_key.values():
        names = {name for part in same for name in part.names}
        in_order = sorted(names, key=lambda name: (position.get(name, len(position)), name))
        merged.append(replace(same[0], names=in_order))
    return merged


def _by_position(by_stage: Sequence[Sequence[Group]]) -> Iterator[Group]:
    """Yield the first group of each stage, then the second of each, and so on: as one process would have them."""
    for number in range(max(map(len, by_stage), default=0)):
        for groups in by_stage:
            if number < len(groups):
                yield groups[number]


def _check_shared(parts: Sequence[Group]) -> None:
    known: dict[str, Group] = {}
    for part in parts:
        for name in part.names:
            other = known.setdefault(name, part)
            if other.key != part.key:
                differing = sorted(
                    key
                    for key in {*other.options, *part.options}
                    if other.options.get(key) != part.options.get(key)
                )
                what = differing[0] if differing else "schedule"
                raise UsageError(
                    f"'{name}' is a tied weight that two stages hold, and their optimizers step it with another "
                    f"{what} ({other.options.get(what)} and {part.options.get(what)}): give embedding and head the "
                    "same options"
                )


def _composed(parts: Sequence[Group], composition: Sequence[Group]) -> list[Group] | None:
    """Return the groups of `composition` with the options of their parts; None if parts do not make them up."""
    containing = {name: number for number, group in enumerate(composition) for name in group.names}
    # A part whose names are in several groups, or with other options than another part, was made by another rule
    parts_of: list[list[Group]] = [[] for _ in composition]
    for part in parts:
        numbers = {containing.get(name, -1) for name in part.names}
        if not numbers:
            continue
        number = numbers.pop()
        if numbers or number < 0 or any(part.key != p.key for p in parts_of[number]):
            return None
        parts_of[number].append(part)
    stepped = {name for part in parts for name in part.names}
    first = next((part for part in parts if part.names), None)
    whole = []
    for group, of_group in zip(composition, parts_of, strict=True):
        names = [name for name in group.names if name in stepped]
        if of_group:
            whole.append(replace(of_group[0], names=names))
        else:  # such as Trainer's second group, which adapters leave without parameters
            options = group.options
            entries: dict[str, Any] = {}
            if first is not None:
                options = first.options | options
                entries = first.entries
            whole.append(Group(names=names, options=options, entries=entries))
    return whole


# --- the groups that one process would have --------------------------------------------------------------------------


def copy_without_data(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a model whose parameters have no data. The model is not changed.

    Args:
        model (`nn.Module`): the unsplit model.
        device (`torch.device`): where the parameters of the copy seem to be.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
        for parameter in model.parameters():
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        return deepcopy(model, memo)


def groups_of_one_process(
    trainer: Trainer, unsplit: nn.Module, order: Sequence[str]
) -> list[Group] | None:
    """Ask an overridden `create_optimizer` which groups it makes of the unsplit model.

    Args:
        trainer (`Trainer`): a Trainer that has not made its optimizer; it is as before afterwards.
        unsplit (`nn.Module`): as `copy_without_data` returns it.
        order (`Sequence[str]`): the names of its parameters, in its order.

    Returns:
        `list[Group]` or `None`: the groups; None if the method does not work with a model without data.
    """
    kept = {name: getattr(trainer, name) for name in ("model", "model_wrapped", "optimizer")}
    trainer.model = trainer.model_wrapped = unsplit
    kind = type(trainer)
    name_of = dict(zip(map(id, unsplit.parameters()), order, strict=True))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            kind.create_optimizer(trainer)  # not one that a callback has wrapped
        optimizer: Any = trainer.optimizer
        names = [
            [name_of[id(parameter)] for parameter in group["params"]]
            for group in optimizer.param_groups
        ]
    except Exception as error:
        logger.warning(
            "%s.create_optimizer does not work with a model without data (%s): in checkpoints, parameters with the "
            "same options make up one group",
            kind.__name__,
            " ".join(str(error).split())[:200],
        )
        return None
    finally:
        for name, value in kept.items():
            setattr(trainer, name, value)
    return [
        Group(names=of_group, options=_plain_options(group))
        for of_group, group in zip(names, optimizer.param_groups, strict=True)
    ]


def check_as_in_one_process(groups: Sequence[Group], expected: Sequence[Group]) -> None:
    """Check that every parameter has the options that it would have in one process.

    Args:
        groups (`Sequence[Group]`): the groups of all ranks as their optimizers were made.
        expected (`Sequence[Group]`): those of one process. All learning rates may differ by one factor, by which a
            callback has scaled them.

    Raises:
        UsageError: a parameter has other options, or is not stepped.
    """
    _check_shared(groups)
    wanted = {name: group.options for group in expected for name in group.names}
    found = {name: group.options for group in groups for name in group.names}
    for name in (*wanted, *found):
        if name not in found or name not in wanted:
            where = "in one process only" if name not in found else "on several ranks only"
            raise UsageError(
                f"create_optimizer lets '{name}' be trained {where}: choose parameters by their names and by "
                "requires_grad"
            )
    # The first rate that is not 0 gives the factor, which all others must have
    factor: float | None = None
    for name, options in wanted.items():
        for key in options.keys() & found[name].keys():
            want, have = options[key], found[name][key]
            is_same = want == have or _as_json(want) == _as_json(have)
            if key == "lr" and isinstance(want, int | float) and want:
                ratio = have / want
                factor = ratio if factor is None else factor
                is_same = abs(ratio - factor) <= _TOLERANCE * abs(factor)
            if not is_same:
                raise UsageError(
                    f"create_optimizer gives '{name}' {key} {have} on the rank that holds it and {want} in one "
                    "process: choose options by the names of parameters, not by their number or position"
                )


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


def why_not_loadable(state: Mapping[str, Any]) -> str | None:
    """Return why a file of this state could not be loaded without unpickling it; None if it can be.

    Args:
        state (`Mapping[str, Any]`): the `state_dict()` of a scheduler.
    """
    try:
        torch.load(io.BytesIO(packed_state(state)), weights_only=True)
    except Exception as error:  # pickling raises exceptions of any type
        lines = str(error).splitlines() or [type(error).__name__]
        unsupported = [line for line in lines if "Unsupported" in line]
        return (unsupported or lines)[0].strip()[:200]
    return None
