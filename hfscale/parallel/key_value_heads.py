"""Key and value heads that are fewer than the tensor parallel ranks.

Each rank holds the complete key and value projections, and uses the head that its query heads attend to. So a head
is used by tp / heads ranks, each of which has the part of its gradient that comes from its own query heads; the parts
are summed once per step (`hfscale.parallel.gradients.sum_partial_gradients`), as those of q/k norms.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedModel

from hfscale.parallel.tensor import PARTIAL_GRADIENT_STYLE

_PROJECTIONS = ("k_proj", "v_proj")


def can_share_heads(config: PreTrainedConfig) -> bool:
    """Return whether keys and values are projected by matrices of their own, which tensor parallelism splits by rows.

    Args:
        config (`PreTrainedConfig`): the config of a text model.
    """
    plan = config.base_model_tp_plan or {}
    return any(name.endswith(".k_proj") and style == "colwise" for name, style in plan.items())


def plan_shared_heads(
    model: PreTrainedModel, tensor_plan: dict[str, str], tp_size: int
) -> tuple[str, ...]:
    """Change the tensor-parallel plan so that every rank holds the projections to fewer heads than ranks.

    Args:
        model (`PreTrainedModel`): the unsplit model.
        tensor_plan (`dict`): name -> style; changed in place.
        tp_size (`int`): tensor parallel ranks.

    Returns:
        The names of these projections.
    """
    shared = []
    for name, attention in model.named_modules():
        for own in _PROJECTIONS:
            projection = getattr(attention, own, None)
            full_name = f"{name}.{own}"
            if not isinstance(projection, nn.Module) or not hasattr(attention, "head_dim"):
                continue
            parts = [
                part
                for part in tensor_plan
                if part == full_name or part.startswith(f"{full_name}.")
            ]
            # Only a projection that the plan splits into heads can leave a rank without a whole one.
            is_split = any(tensor_plan[part] == "colwise" for part in parts)
            if not is_split or _heads_of(projection, attention) % tp_size == 0:
                continue
            for part in parts:
                del tensor_plan[part]
            inner = (part for part, _ in projection.named_modules(prefix=full_name))
            tensor_plan |= dict.fromkeys(inner, PARTIAL_GRADIENT_STYLE)
            shared.append(full_name)
    return tuple(shared)


def apply_shared_heads(
    model: PreTrainedModel,
    shared: Collection[str],
    mesh: DeviceMesh,
    *,
    summed_blocks: Collection[str],
) -> None:
    """Hook projections that every rank holds, in place, so that each rank uses the heads of its own query heads.

    Args:
        model (`PreTrainedModel`): a model that may lack the modules of other stages; its query projections are split.
        shared (`Collection[str]`): the result of `plan_shared_heads`.
        mesh (`DeviceMesh`): the tensor parallel ranks, one axis.
        summed_blocks (`Collection[str]`): blocks at whose input the gradients of all ranks are summed in any case.
    """
    modules = dict(model.named_modules())
    for full_name in shared:
        if full_name not in modules:
            continue
        name, _, _ = full_name.rpartition(".")
        attention, projection = modules[name], modules[full_name]
        heads = _heads_of(projection, attention)
        own = mesh.get_local_rank() * heads // mesh.size()
        projection.register_forward_hook(partial(_keep_head, own, attention.head_dim))
        if name not in summed_blocks:
            projection.register_forward_pre_hook(partial(_sum_gradient_of_input, mesh.get_group()))
        if full_name.endswith("k_proj"):
            # The query heads of this rank share one key-value head.
            attention.num_key_value_groups = attention.num_key_value_groups * heads // mesh.size()


def _heads_of(projection: Any, attention: Any) -> int:
    return int(projection.out_features) // int(attention.head_dim)


def _keep_head(
    number: int, width: int, module: nn.Module, args: Any, output: torch.Tensor
) -> torch.Tensor:
    """(batch, sequence, heads x width) -> (batch, sequence, width)."""
    return output.narrow(-1, number * width, width)


def _sum_gradient_of_input(group: dist.ProcessGroup, module: nn.Module, args: Any) -> Any:
    return (_SumGradient.apply(args[0], group), *args[1:])  # type: ignore[no-untyped-call]  # of torch


class _SumGradient(torch.autograd.Function):
    """The identity, whose gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None
