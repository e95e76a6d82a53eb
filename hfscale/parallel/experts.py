"""Expert parallelism: the experts of a layer are spread over the ranks of its stage, which exchange tokens for them.

The `ep` ranks of a group are neighbours among the tensor, context and data parallel ranks of a stage, `tp` counted
first, so that the exchange stays in a node where `ep` is at most its number of GPUs. Each of them has other experts,
whole ones: experts are not tensor parallel. The ranks of a tensor parallel group, which see the same tokens, each send
a part of them, and gather the results. transformers' own functions send a token to the ranks of its experts and back,
by two all-to-alls per layer, without a limit on the tokens of an expert
(`transformers.distributed.expert_parallel.AllToAllEP`).

| parameters | are sharded over | their gradient is reduced over |
|---|---|---|
| experts | `ep` by expert, and `efsdp` (FSDP2) | `efsdp` and `dp_replicate`; the exchange has summed it over `ep` |
| all others | `tp` by its plan, and `dp_shard_cp` (FSDP2) | `dp_shard_cp` and `dp_replicate` |
| adapters of experts | `dp_shard_cp` (FSDP2) | `dp_shard_cp` and `dp_replicate`, and summed over `tp` |

A rank has the adapters of all experts, and adds those of its own (hfscale/trainer/expert_adapters.py).

efsdp = dp_shard x cp x tp / ep. Where ep is larger than dp_shard x cp x tp, a group is made of complete replicas of
all other parameters, and efsdp is 1: with dp_shard 1 dense layers are those of DDP, and each rank has experts of its
own. A stage runs the same micro-batches in the same order on all ranks of a group, so the exchanges of a schedule
match.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from hfscale.core.spelling import spelled
from hfscale.core.versions import is_lora_layer
from hfscale.errors import UnsupportedModelError
from hfscale.facts.experts import DISPATCH_STYLE, expert_rules
from hfscale.facts.support import check_support
from hfscale.parallel.descriptions import describe_config
from hfscale.parallel.mesh import ParallelMesh, local_tensor
from hfscale.parallel.overlap import Turns, register_overlapped_exchange
from hfscale.parallel.tensor import PackedParameter
from hfscale.trainer.expert_adapters import is_wrapped_parameter

_SHARDED_STYLE = "grouped_gemm"
"""transformers' style of the parameters of such a module: sharded by expert."""
_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def expert_parallel_plan(model: PreTrainedModel) -> dict[str, str]:
    """Look up the expert-parallel style of each module and parameter; to be called before the model is split.

    Args:
        model (`PreTrainedModel`): the unsplit model, with its adapters if it has any.

    Returns:
        Name of a parameter or module -> style, parameters first.

    Raises:
        UnsupportedModelError: the model has no experts that can be spread, or other parameters in them.
    """
    generic = expert_rules(model.ep_plan)
    names = [name for name, _ in model.named_parameters()]
    names += [name for name, module in model.named_modules() if not is_lora_layer(module)]
    plan = {}
    for name in names:
        style = generic.get(_LAYER_NUMBER.sub(".*", _plain(name)))
        if style is not None:
            plan[name] = style
    modules = [name for name, style in plan.items() if style == DISPATCH_STYLE]
    if not modules:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no layer whose experts could be spread over ranks: leave "
            f"{spelled('ep_size')} out"
        )
    # A parameter of the experts that is not split would get the gradients of this rank's tokens only.
    for name in modules:
        for own, _ in model.get_submodule(name).named_parameters(prefix=name):
            if plan.get(own) != _SHARDED_STYLE:
                raise UnsupportedModelError(
                    f"{spelled('ep_size')} is set, and {own} of {type(model).__name__} belongs to no expert: leave "
                    f"{spelled('ep_size')} out"
                )
    return plan


def check_adapters_of_experts(model: PreTrainedModel, tp: int) -> None:
    """Refuse adapters of experts that are not spread where tensor parallelism splits the experts themselves.

    Args:
        model (`PreTrainedModel`): the unsplit model, with its adapters if it has any.
        tp (`int`): ranks that share each matrix.

    Raises:
        UsageError: the experts have adapters, and `tp` is greater than 1.
    """
    adapted = any(is_wrapped_parameter(module) for module in model.modules())
    asked = replace(
        describe_config(model.config),
        strategy="parallel",
        tp=tp,
        expert_parallel=1,
        expert_adapters=adapted,
    )
    check_support(asked, "expert_adapters")


def _plain(name: str) -> str:
    """Return the name that a module or parameter has without adapters."""
    return name.replace(".base_layer", "")


def is_of_experts(name: str, plan: Mapping[str, str]) -> bool:
    """Return whether a module or parameter is one of experts that are spread, or inside of them or of their adapters.

    Args:
        name (`str`): its name.
        plan (`Mapping`): the result of `expert_parallel_plan`.
    """
    roots = {_plain(own) for own, style in plan.items() if style == DISPATCH_STYLE}
    plain = _plain(name)
    return any(plain == root or plain.startswith(f"{root}.") for root in roots)


def apply_expert_parallel(
    model: nn.Module, plan: Mapping[str, str], mesh: ParallelMesh, *, turns: Turns | None = None
) -> None:
    """Keep this rank's experts of every layer, in place, and let the layers exchange tokens for the others.

    Args:
        model (`nn.Module`): a model that may lack the modules of other stages.
        plan (`Mapping`): the result of `expert_parallel_plan` for the unsplit model.
        mesh (`ParallelMesh`): all ranks.
        turns (`Turns`, *optional*): has the exchange of one pass overlap with another pass; absent: a pass waits.
    """
    # Absent before 5.21
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    assert mesh.expert_mesh is not None  # expert parallelism is asked for
    present = {
        name for items in (model.named_parameters(), model.named_modules()) for name, _ in items
    }
    own = {name: style for name, style in plan.items() if name in present}
    exchange = "all_to_all" if turns is None else register_overlapped_exchange(turns)
    if own:
        apply_expert_parallelism(
            model, mesh.expert_mesh["ep"], mesh.device_mesh["tp"], own, ep_implementation=exchange
        )


def modules_of_experts(model: nn.Module, plan: Mapping[str, str]) -> Iterable[tuple[str, Any]]:
    """Yield name and module of each layer's experts that a rank holds.

    Args:
        model (`nn.Module`): a model that may lack the modules of other stages.
        plan (`Mapping`): the result of `expert_parallel_plan` for the unsplit model.
    """
    return (
        (name, module) for name, module in model.named_modules() if plan.get(name) == DISPATCH_STYLE
    )


def shard_experts(
    model: nn.Module,
    plan: Mapping[str, str],
    mesh: ParallelMesh,
    packed: Mapping[str, PackedParameter],
    options: Mapping[str, Any],
) -> None:
    """Apply FSDP2 or HSDP to each layer's experts over the ranks that hold the same ones.

    Their gradient is a sum over the tokens of all ranks of the group, which FSDP2 cannot know: it is divided by the
    number of ranks that have different tokens, as those of all other parameters are.

    Args:
        model (`nn.Module`): the model; layers are to be sharded after their experts.
        plan (`Mapping`): the result of `expert_parallel_plan` for the unsplit model.
        mesh (`ParallelMesh`): all ranks.
        packed (`Mapping`): parameters that hold several matrices in one.
        options (`Mapping`): arguments of `fully_shard` that do not depend on the mesh.
    """
    layout = mesh.layout
    for name, experts in modules_of_experts(model, plan):
        dims = {
            id(parameter): _dim_to_shard(parameter, mesh.efsdp, packed.get(f"{name}.{own}"))
            for own, parameter in experts.named_parameters()
        }
        placement = partial(_placement, dims)
        fully_shard(experts, mesh=mesh.expert_data_mesh, shard_placement_fn=placement, **options)
        experts.set_gradient_divide_factor(float(layout.dp_replicate * layout.dp_shard * layout.cp))
        if mesh.efsdp > 1:
            # torch divides inside of the collective where the factor is not the group's size, which gloo cannot.
            # A group of one rank has no collective, and is divided once in any case.
            experts.set_force_sum_reduction_for_comms(True)


def _placement(dims: Mapping[int, int], parameter: nn.Parameter) -> Shard:
    return Shard(dims[id(parameter)])


def _dim_to_shard(parameter: nn.Parameter, shards: int, packing: PackedParameter | None) -> int:
    """Choose the dim along which FSDP2 shards a parameter of this rank's experts: whole experts where they divide,
    else another dim that does and along which no matrices are packed, else experts unevenly."""
    sizes = local_tensor(parameter).shape
    packed_dim = packing.dim if packing is not None else None
    possible = [dim for dim, size in enumerate(sizes) if size % shards == 0 and dim != packed_dim]
    return possible[0] if possible else 0
