"""Whether an optimizer takes the steps of one process where ranks share parameters, found out by trying it.

Adam updates each element of a parameter by itself, so that a rank may update its shard alone. Others need the norm of
a complete parameter, its rows, or all parameters. No list of names tells which: a copy of the optimizer steps small
tensors that are sharded as the parameters are, and complete ones, before the first step of the training.
"""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hfscale.core.spelling import spelled
from hfscale.core.torch_internals import StridedShard
from hfscale.errors import UsageError
from hfscale.parallel.mesh import local_tensor, shard_dim, shard_like
from hfscale.trainer.parameter_groups import NAMES

_STEPS = 3
_ROWS = 4
"""Elements of a rank's shard along each dim."""
_LR = 0.01
"""A warm-up begins with a rate of 0, which would show nothing."""
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(frozen=True, kw_only=True)
class StateKind:
    """How an optimizer keeps one of its states."""

    number: type | None
    """The type of a Python number; None for a tensor."""
    dtype: torch.dtype | None
    """The data type of a tensor."""


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """A parameter group with one parameter of each way in which ranks share them."""

    group: dict[str, Any]
    templates: list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """What an optimizer is tried with."""

    optimizer: torch.optim.Optimizer
    samples: Sequence[_Sample]
    begin: Sequence[torch.Tensor]
    """Values of the complete parameters."""
    gradients: Sequence[Sequence[torch.Tensor]]
    """Their gradients in each step."""


class _Trial:
    """A copy of an optimizer that steps parameters of its own.

    Args:
        optimizer (`torch.optim.Optimizer`): it is not changed.
        samples (`Sequence[_Sample]`): groups whose options are used; some parameters of an optimizer have a state from
            the beginning.
        values (`Sequence[torch.Tensor]`): values for the parameters of all of them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        samples: Sequence[_Sample],
        values: Sequence[torch.Tensor],
    ) -> None:
        # `copy.copy` of an optimizer leaves out what a subclass keeps in attributes of its own
        self.optimizer: Any = object.__new__(type(optimizer))
        self.optimizer.__dict__.update(optimizer.__dict__)
        self.optimizer.__dict__.pop("step", None)  # one that a scheduler has wrapped
        for name in _HOOKS:
            setattr(self.optimizer, name, OrderedDict())
        self.parameters = [torch.nn.Parameter(value.clone()) for value in values]
        self.state: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.optimizer.state = self.state
        self.optimizer.param_groups = []
        remaining = iter(self.parameters)
        for sample in samples:
            own = [next(remaining) for _ in sample.templates]
            self.optimizer.param_groups.append(_tried_options(sample.group) | {"params": own})
            for parameter, template in zip(own, sample.templates, strict=True):
                for key, value in optimizer.state.get(template, {}).items():
                    self.state[parameter][key] = _initial_state(value, template, parameter)

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        type(self.optimizer).step(self.optimizer)


def _tried_options(group: dict[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key not in NAMES}
    if isinstance(options.get("lr"), torch.Tensor):
        options["lr"] = torch.full_like(options["lr"], _LR)
    elif isinstance(options.get("lr"), int | float):
        options["lr"] = _LR
    return options


def _initial_state(value: Any, template: torch.Tensor, parameter: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != template.shape or value.ndim == 0:
        return value.clone()
    own = local_tensor(value)
    first = float(own.flatten()[0]) if own.numel() else 0.0
    return torch.full_like(parameter.detach(), first, dtype=value.dtype)


def check_update(
    optimizer: torch.optim.Optimizer, *, stages: int, saves: bool
) -> dict[str, StateKind]:
    """Check that an optimizer takes the steps of one process, and that its states can be saved.

    The ranks that share parameters call it together.

    Args:
        optimizer (`torch.optim.Optimizer`): this rank's optimizer, which has not taken a step.
        stages (`int`): ranks of the pipeline: each has an optimizer of its own.
        saves (`bool`): whether checkpoints will have its states.

    Returns:
        `dict[str, StateKind]`: the kinds of its states by key.

    Raises:
        UsageError: it does not; the message names the optimizer and how to fix it.
    """
    if getattr(optimizer, "steps_shards_as_wholes", False):
        return {}
    samples = list(_samples(optimizer))
    if not samples:
        return {}
    with torch.random.fork_rng():
        return _try_samples(optimizer, samples, stages=stages, saves=saves)


def _samples(optimizer: torch.optim.Optimizer) -> Iterator[_Sample]:
    """Yield the groups that differ in more than their learning rate, at least two parameters in all."""
    found: dict[str, _Sample] = {}
    for group in optimizer.param_groups:
        templates = list(_one_of_each(group["params"]))
        options = {k: v for k, v in group.items() if k not in (*NAMES, "lr", "initial_lr")}
        key = repr((options, [_placement(template) for template in templates]))
        if templates and key not in found:
            found[key] = _Sample(group=group, templates=templates)
    for sample in found.values():
        # An update may depend on the other parameters
        is_only_one = len(found) == len(sample.templates) == 1
        yield replace(sample, templates=sample.templates * 2) if is_only_one else sample


def _placement(parameter: torch.Tensor) -> tuple[Any, ...]:
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        return (parameter.ndim, parameter.dtype, mesh.mesh_dim_names, parameter.placements)
    return (parameter.ndim, parameter.dtype)


def _one_of_each(parameters: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield one parameter of each way in which they are sharded."""
    known = set()
    for parameter in parameters:
        if _placement(parameter) not in known:
            known.add(_placement(parameter))
            yield parameter


def _try_samples(
    optimizer: torch.optim.Optimizer, samples: Sequence[_Sample], *, stages: int, saves: bool
) -> dict[str, StateKind]:
    kind = type(optimizer).__name__
    generator = torch.Generator().manual_seed(0)
    templates = [template for sample in samples for template in sample.templates]
    begin, *gradients = [
        [_drawn(template, generator) for template in templates] for _ in range(1 + _STEPS)
    ]
    steps = _Steps(optimizer=optimizer, samples=samples, begin=begin, gradients=gradients)
    whole = _Trial(optimizer, samples, begin)
    others = f"choose another optimizer, such as {spelled('optim', 'adamw_torch')}"
    try:
        for of_step in gradients:
            whole.step(of_step)
    except Exception as error:  # an optimizer raises exceptions of any type
        raise UsageError(
            f"{kind} cannot step parameters as Trainer has it do ({_line(error)}): {others}"
        ) from error
    if any(map(torch.equal, whole.parameters, begin)):
        raise UsageError(
            f"{kind} does not step the parameters of its param_groups, so that it is not known whether its steps are "
            f"those of one process: make one optimizer that keeps its states in `state`, or {others}"
        )
    if stages > 1:
        _check_alone(steps, whole, others)
    trial = whole
    if any(isinstance(template, DTensor) for template in templates):
        trial = _check_sharded(steps, whole, others)
    if saves:
        _check_states(kind, trial, others)
    return {key: _kind_of(value) for state in trial.state.values() for key, value in state.items()}


def _drawn(template: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random values of a small full tensor that can be sharded as a parameter is."""
    shape = [_ROWS] * template.ndim
    if isinstance(template, DTensor):
        for position, placement in enumerate(template.placements):
            dim = shard_dim(placement)
            if dim is not None:
                shape[dim] *= template.device_mesh.size(position)
            if isinstance(placement, StridedShard):
                assert dim is not None  # it shards one
                shape[dim] *= int(placement.split_factor)
    device = local_tensor(template).device
    return torch.randn(shape, generator=generator).to(device, template.dtype)


def _check_alone(steps: _Steps, whole: _Trial, others: str) -> None:
    """Check that the update of a parameter does not depend on the others, of which each stage has its own."""
    single = [
        replace(sample, templates=[template])
        for sample in steps.samples
        for template in sample.templates
    ]
    for number, sample in enumerate(single):
        alone = _Trial(steps.optimizer, [sample], [steps.begin[number]])
        for of_step in steps.gradients:
            alone.step([of_step[number]])
        if not _is_close(alone.parameters[0], whole.parameters[number]):
            raise UsageError(
                f"{type(steps.optimizer).__name__} updates a parameter depending on other parameters, of which each "
                f"stage has its own ones only: set {spelled('pp_size', 1)}, or {others}"
            )


def _check_sharded(steps: _Steps, whole: _Trial, others: str) -> _Trial:
    """Check that shards are updated as complete parameters; return the trial with shards."""
    kind = type(steps.optimizer).__name__
    templates = [template for sample in steps.samples for template in sample.templates]

    def sharded(full: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [shard_like(value, like) for value, like in zip(full, templates, strict=True)]

    instead = (
        f"use a layout in which ranks share no parameters ({spelled('pp_size')} alone), or {others}"
    )
    trial = _Trial(steps.optimizer, steps.samples, sharded(steps.begin))
    try:
        for of_step in steps.gradients:
            trial.step(sharded(of_step))
    except Exception as error:  # torch raises exceptions of any type
        raise UsageError(
            f"{kind} cannot update parameters that ranks share ({_line(error)}): {instead}"
        ) from error
    wanted = sharded([parameter.detach() for parameter in whole.parameters])
    for have, want in zip(trial.parameters, wanted, strict=True):
        if not _is_close(local_tensor(have.detach()), local_tensor(want)):
            raise UsageError(
                f"{kind} needs complete parameters, and would update a shard in another way: {instead}"
            )
    return trial


def _check_states(kind: str, trial: _Trial, others: str) -> None:
    """Check that every state is a number or of the shape of its parameter, unless one rank has all of it."""
    for parameter in trial.parameters:
        for key, value in trial.state.get(parameter, {}).items():
            if value is None or isinstance(value, bool | int | float):
                continue
            if isinstance(value, torch.Tensor):
                is_plain = not isinstance(value, DTensor)
                if is_plain and (value.ndim == 0 or not isinstance(parameter, DTensor)):
                    continue
                if value.shape == parameter.shape and isinstance(value, DTensor):
                    continue
            raise UsageError(
                f"the state {key} of {kind} is neither a number nor of the shape of its parameter, so that it cannot "
                f"be saved for other layouts: {others}, use a layout in which ranks share no parameters "
                f"({spelled('pp_size')} alone), or write no checkpoints ({spelled('save_strategy', 'no')})"
            )


def _kind_of(value: Any) -> StateKind:
    if isinstance(value, torch.Tensor):
        return StateKind(number=None, dtype=value.dtype)
    return StateKind(number=type(value), dtype=None)


def _is_close(have: torch.Tensor, want: torch.Tensor) -> bool:
    rtol, atol = (1e-5, 1e-6) if want.dtype.itemsize >= 4 else (2e-2, 1e-3)
    return bool(torch.allclose(have, want, rtol=rtol, atol=atol, equal_nan=True)) and math.isfinite(
        float(have.detach().abs().sum())
    )


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
