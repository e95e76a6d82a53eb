r"""1-bit Adam and 1-bit LAMB: after a warm-up the ranks exchange one bit per parameter instead of gradients.

In the warm-up DDP averages the gradients, and the optimizer is AdamW or LAMB. Then the variance v of the gradients is
frozen and DDP leaves the gradients g_i of each rank i as they are (`leave_or_average`). The optimizer computes

    m_i = beta1 m + (1 - beta1) g_i           momentum of this rank; m is the same on all ranks
    u   = SignMean(m_i / d)                   d = sqrt(v) + eps, the same on all ranks
    m   = d u                                 momentum of all ranks
    w   = w - lr (u + weight_decay w)         1-bit Adam
    w   = w - lr c f (u + weight_decay w)     1-bit LAMB, with a trust ratio c f for each parameter

with Adam's corrections of the bias (Tang et al. 2021, arXiv 2102.02888; Li et al. 2021, arXiv 2104.06069). u is
decoded from the same bytes on all ranks, so the weights stay equal, bit by bit.

Two things differ from the papers, which encode m_i itself. Divided by d, the momentum has one magnitude in all
parameters, which suits the common scale of a block of signs: an element whose d is small gets no noise that is large
for it, and elements without a gradient need no mask. And m_i / d is limited to the largest value that Adam's own
variance allows (Kingma & Ba 2015, arXiv 1412.6980, section 2.1), max(1, (1 - beta1) / sqrt(1 - beta2)): a frozen
variance of an element that had no or few gradients in the warm-up would otherwise let it jump.

The states and their names are those of torch's AdamW, and the corrected variance is what stays constant. So a
checkpoint of AdamW continues with 1-bit Adam, and the reverse. The errors of `SignMean` are not a part of it: a
resumed run starts with errors of zero, as under DeepSpeed.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from hfscale.core.logging import get_logger
from hfscale.recipe.sign_mean import SignMean

logger = get_logger(__name__)

BUCKET = 2**25
"""Elements that are exchanged together; more of them take more memory during the step."""


@dataclass(kw_only=True)
class WarmUp:
    """Counts the steps in which DDP averages the gradients. The optimizer counts, and DDP's hook reads."""

    length: int
    """Number of steps."""
    steps: int = 0
    """Optimizer steps so far."""

    @property
    def is_over(self) -> bool:
        """Whether the optimizer averages, and not DDP."""
        return self.steps >= self.length


def leave_or_average(warm_up: WarmUp, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a gradient during the warm-up, and leave it on its rank afterwards, as a hook of DDP.

    What is left is divided by the square root of the number of ranks N, and the optimizer multiplies by it. The
    gradient of a rank has about sqrt(N) times the norm of the average, which Trainer clips and logs in the warm-up. So
    clipping limits the gradient of a rank to sqrt(N) times `max_grad_norm`, as Lin et al. 2018 do (arXiv 1712.01887,
    section 3.2).

    Args:
        warm_up (`WarmUp`): the steps so far.
        bucket (`dist.GradBucket`): the gradients of some parameters, as one flat tensor.

    Returns:
        `torch.futures.Future[torch.Tensor]`: the bucket, averaged or not.
    """
    gradient = bucket.buffer()
    if not warm_up.is_over:
        return average(gradient)
    left: torch.futures.Future[Tensor] = torch.futures.Future()
    left.set_result(gradient.div_(math.sqrt(dist.get_world_size())))
    return left


def average(gradient: Tensor) -> torch.futures.Future[Tensor]:
    """Average a gradient over the ranks as DDP does without a hook.

    Args:
        gradient (`Tensor`): a flat bucket, changed in place.
    """
    gradient.div_(dist.get_world_size())
    averaged: torch.futures.Future[Tensor] = (
        dist.all_reduce(gradient, async_op=True).get_future().then(lambda done: done.value()[0])
    )
    return averaged


@dataclass(kw_only=True)
class _Bucket:
    """Parameters that are exchanged together. They belong to one group and have taken the same number of steps."""

    group: int
    """Position in `param_groups`."""
    parameters: list[Tensor]
    """The parameters."""
    step: int
    """Steps so far."""
    mean: SignMean
    """The exchange, with its errors."""


class OneBitAdam(AdamW):
    """AdamW that averages its momentum over the ranks itself when a warm-up is over, with one bit per element.

    A parameter that has had a gradient takes part in every step; without a gradient it counts as one with gradient 0.

    Args:
        params: the parameters or groups of them, as for AdamW.
        warm_up (`WarmUp`): shared with DDP's hook `leave_or_average`.
        options: the other options of AdamW.
    """

    def __init__(self, params: Any, *, warm_up: WarmUp, **options: Any) -> None:
        super().__init__(params, **options)
        self._warm_up = warm_up
        self._buckets: list[_Bucket] = []

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of this class or of AdamW. The errors of the exchange start at zero.

        Args:
            state_dict (`dict`): what `state_dict` returned.
        """
        super().load_state_dict(state_dict)
        self._warm_up.steps = max((int(state["step"]) for state in self.state.values()), default=0)
        self._buckets = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. After the warm-up every rank must call it.

        Args:
            closure (`Callable`, *optional*): computes the loss and the gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._warm_up.is_over:
            for bucket in self._current_buckets():
                self._exchange(bucket)
        else:
            self._step_of_warm_up()
        self._warm_up.steps += 1
        return loss

    def _step_of_warm_up(self) -> None:
        """Take a step with the averaged gradients."""
        super().step()

    def _current_buckets(self) -> list[_Bucket]:
        """Return the buckets; they are made when the warm-up is over and when a parameter has its first gradient."""
        members = [
            (index, p) for index, group in enumerate(self.param_groups) for p in group["params"]
        ]
        new = [p for _, p in members if p.grad is not None and not self.state.get(p)]
        for parameter in new:
            self.state[parameter] = self._first_state(parameter)
        if new or not self._buckets:
            by_step: dict[tuple[int, int], list[Tensor]] = {}
            for group, parameter in members:
                if self.state.get(parameter):
                    by_step.setdefault((group, int(self.state[parameter]["step"])), []).append(
                        parameter
                    )
            self._buckets = [
                _Bucket(
                    group=group,
                    parameters=part,
                    step=step,
                    mean=SignMean(_elements(part), part[0].device),
                )
                for (group, step), parameters in sorted(by_step.items(), key=lambda item: item[0])
                for part in _parts(parameters)
            ]
        return self._buckets

    def _first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step."""
        zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros(()), **zeros}

    def _exchange(self, bucket: _Bucket) -> None:
        """Average the momentum of a bucket over the ranks and update its parameters."""
        group = self.param_groups[bucket.group]
        beta1, beta2 = group["betas"]
        states = [self.state[parameter] for parameter in bucket.parameters]
        bucket.step += 1
        correction = 1 - beta2**bucket.step
        growth = correction / (1 - beta2 ** (bucket.step - 1)) if bucket.step > 1 else 1.0
        for state in states:
            state["step"] += 1
            # V / correction stays as it was at the end of the warm-up
            state["exp_avg_sq"].mul_(growth)
        divisors = (
            _flat([state["exp_avg_sq"] for state in states])
            .div_(correction)
            .sqrt_()
            .add_(group["eps"])
        )

        gradients = _flat(
            [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket.parameters]
        )
        gradients.mul_(math.sqrt(dist.get_world_size()))  # see `leave_or_average`
        momentum = _flat([state["exp_avg"] for state in states])
        own = momentum.mul(beta1).add_(gradients, alpha=1 - beta1).div_(divisors)
        limit = max(1.0, (1 - beta1) / math.sqrt(1 - beta2))
        direction = bucket.mean(own.clamp_(-limit, limit))

        sizes = [parameter.numel() for parameter in bucket.parameters]
        rows = zip(
            bucket.parameters, states, direction.split(sizes), divisors.split(sizes), strict=True
        )
        for parameter, state, u, d in rows:
            self._update(
                parameter, state, u.view_as(parameter), d.view_as(parameter), group, bucket.step
            )

    def _update(
        self,
        parameter: Tensor,
        state: dict[str, Tensor],
        direction: Tensor,
        divisor: Tensor,
        group: dict[str, Any],
        step: int,
    ) -> None:
        """Update a parameter and its momentum.

        Args:
            parameter (`Tensor`): changed in place.
            state (`dict`): its state; the momentum is changed in place.
            direction (`Tensor`): u, as the ranks have averaged it.
            divisor (`Tensor`): d.
            group (`dict`): its group.
            step (`int`): its steps, this one included.
        """
        state["exp_avg"].copy_(direction * divisor)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"] / (1 - group["betas"][0] ** step))


def _flat(tensors: list[Tensor]) -> Tensor:
    """Return a copy of tensors as one vector, fp32."""
    return torch.cat([tensor.flatten() for tensor in tensors]).float()


def _elements(parameters: list[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _parts(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters in lists of at most `BUCKET` elements, or of one larger parameter."""
    part: list[Tensor] = []
    for parameter in parameters:
        if part and _elements([*part, parameter]) > BUCKET:
            yield part
            part = []
        part.append(parameter)
    yield part


TRUST_RATIO_RANGE = (0.01, 10.0)
"""Least and largest trust ratio of LAMB in the warm-up (DeepSpeed's `min_coeff` and `max_coeff`)."""
TRUST_RATIO_DECAY = 0.9
"""Decay of the trust ratio's average over the warm-up (DeepSpeed's `coeff_beta`)."""
FACTOR_RANGE = (0.5, 4.0)
"""Least and largest factor of this average after the warm-up (DeepSpeed's `factor_min` and `factor_max`)."""
FACTOR_CHANGE = 0.1
"""Largest relative change of the factor from one step to the next (DeepSpeed's `factor_threshold`)."""


class OneBitLamb(OneBitAdam):
    """LAMB (You et al. 2020, arXiv 1904.00962) in the warm-up, and then 1-bit LAMB (Li et al. 2021, arXiv 2104.06069).

    In the warm-up the trust ratio of a parameter is the norm of its weights over that of its update. Afterwards it is
    its average c over the warm-up times a factor f, which follows how the variance has changed since: besides the
    frozen one, the variance of the gradients that the exchanged momenta imply, (m_t - beta1 m_(t-1)) / (1 - beta1), is
    kept.

    Args:
        params: the parameters or groups of them, as for AdamW.
        warm_up (`WarmUp`): shared with DDP's hook `leave_or_average`.
        options: the options of AdamW but `fused`.
    """

    def _step_of_warm_up(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter] = self.state.get(parameter) or self._first_state(
                    parameter
                )
                state["step"] += 1
                step = int(state["step"])
                state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(
                    parameter.grad, parameter.grad, value=1 - beta2
                )
                direction = (
                    state["exp_avg"]
                    / (1 - beta1**step)
                    / _divisor(state["exp_avg_sq"], group, step)
                )
                update = direction.add_(parameter, alpha=group["weight_decay"])
                ratio = _trust_ratio(parameter, update)
                decay = TRUST_RATIO_DECAY if "trust_ratio" in state else 0.0
                state["trust_ratio"] = decay * state.get("trust_ratio", ratio) + (1 - decay) * ratio
                parameter.sub_(update * ratio * group["lr"])

    def _update(
        self,
        parameter: Tensor,
        state: dict[str, Tensor],
        direction: Tensor,
        divisor: Tensor,
        group: dict[str, Any],
        step: int,
    ) -> None:
        beta1, beta2 = group["betas"]
        momentum = direction * divisor
        gradient = (momentum - beta1 * state["exp_avg"]) / (1 - beta1)
        state["exp_avg"].copy_(momentum)
        if "exp_avg_sq_fresh" not in state:  # the first step after the warm-up
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
            state["trust_factor"] = torch.ones((), device=parameter.device)
        state["exp_avg_sq_fresh"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

        direction = direction / (1 - beta1**step)
        update = direction.add(parameter, alpha=group["weight_decay"])
        # Its first gradient came after the warm-up, or the checkpoint is one of AdamW
        if "trust_ratio" not in state:
            state["trust_ratio"] = _trust_ratio(parameter, update)
        # The factor is that of the directions; the part of the update that is weight decay keeps the factor 1.
        factor = (divisor / _divisor(state["exp_avg_sq_fresh"], group, step)).max()
        share = (_norm(direction) / _norm(update).clamp(min=torch.finfo(torch.float32).tiny)).clamp(
            max=1.0
        )
        factor = (factor * share + 1 - share).clamp(*FACTOR_RANGE)
        last = state["trust_factor"]
        state["trust_factor"] = factor.clamp(last * (1 - FACTOR_CHANGE), last * (1 + FACTOR_CHANGE))
        parameter.sub_(update * state["trust_ratio"] * state["trust_factor"] * group["lr"])


def _divisor(variance: Tensor, group: dict[str, Any], step: int) -> Tensor:
    """Return sqrt(v) + eps with Adam's correction of the bias."""
    corrected: Tensor = variance / (1 - group["betas"][1] ** step)
    return corrected.sqrt_().add_(group["eps"])


def _trust_ratio(parameter: Tensor, update: Tensor) -> Tensor:
    """Return the norm of the weights over that of their update, and 1 where one of them is 0."""
    weights, change = _norm(parameter), _norm(update)
    ratio = (weights / change).clamp(*TRUST_RATIO_RANGE)
    return torch.where((weights > 0) & (change > 0), ratio, torch.ones_like(ratio))


def _norm(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float32)
    return norm
