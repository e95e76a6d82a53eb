"""Tensor parallelism by the plan that transformers has for the model, with what it gets wrong mended.

transformers 5.23 sums the gradient of `replicated_with_grad_allreduce` parameters (the q/k norms of Qwen3 and Gemma 3)
over the ranks after every backward, onto what earlier micro-batches have left there: with more than one micro-batch
the earlier ones count several times. Here such parameters are left alone by the hook, and summed once per step
(`hfscale.parallel.gradients.sum_partial_gradients`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, apply_tensor_parallelism

from hfscale.errors import UnsupportedModelError
from hfscale.parallel.partition import IdentityStage


@dataclass(frozen=True, kw_only=True)
class Packed:
    """How a parameter that holds several matrices in one is put together."""

    dim: int
    """Along which dimension they follow each other."""
    parts: int
    """How many they are."""


_PARTIAL = "replicated_with_grad_allreduce"
_ADAPTED = ".base_layer"  # what peft puts between a linear layer's name and its weight


def tensor_parallel_plan(model: PreTrainedModel, tp_size: int) -> dict[str, str]:
    """The style of each module and parameter by its name; of the whole model, before it is cut into stages.

    With LoRA adapters in the model, the half of an adapter that faces the cut side of its linear layer is cut alike:
    B's rows for layers cut by columns, A's columns for layers cut by rows.

    Raises:
        UnsupportedModelError: transformers has no plan for the model.
    """
    if not model.tp_plan:
        raise UnsupportedModelError(
            f"tp_size {tp_size}: transformers has no tensor-parallel plan for {model.config.model_type}; use tp_size 1"
        )
    # No public way: the expansion of a plan to this model's own modules. tests/test_parallel.py fails where it moves.
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=tp_size))
    for name, module in model.named_modules():
        style = plan.get(name)
        if style is None or not hasattr(module, "base_layer"):
            continue
        del plan[name]
        halves = module.lora_B if style.startswith("colwise") else module.lora_A
        which = "lora_B" if style.startswith("colwise") else "lora_A"
        for part in (f"{name}{_ADAPTED}", *(f"{name}.{which}.{adapter}" for adapter in halves)):
            plan |= {f"{part}.{own}": style for own, _ in model.get_submodule(part).named_parameters(recurse=False)}
            plan[part] = style
    return plan


def packed_parameters(model: PreTrainedModel) -> dict[str, Packed]:
    """The parameters of a whole `model` that hold several matrices in one (gate and up of stacked experts, say)."""
    if not model.tp_plan:
        return {}
    plan, found = tensor_parallel_plan(model, 2), {}
    for name, parameter in model.named_parameters():
        style = plan.get(name, "")
        if style.startswith("packed") and parameter.ndim > 1:
            dim = parameter.ndim - (2 if style == "packed_colwise" else 1)
            found[name] = Packed(dim=dim, parts=ALL_PARALLEL_STYLES[style].split_factor)
    return found


def apply_plan(model: nn.Module, plan: dict[str, str], mesh: DeviceMesh) -> set[str]:
    """Cut the parameters of a (pruned) `model` over `mesh` and hook its modules, in place.

    Returns:
        Names of the parameters that every rank holds whole and has a part of the gradient of.
    """
    if not plan:
        return set()
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    present = {name for name, module in modules.items() if not isinstance(module, IdentityStage)} | set(parameters)
    plan = {name: style for name, style in plan.items() if name in present}
    partial = {name for name, style in plan.items() if style == _PARTIAL}
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if name not in partial})
    return set(_parameters_under(parameters, partial))


def _parameters_under(parameters: Iterable[str], names: set[str]) -> Iterable[str]:
    return (name for name in parameters if name in names or name.rpartition(".")[0] in names)
