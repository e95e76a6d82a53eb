"""Tensor parallelism by the plan that transformers has for a model, with a fix for the gradients that it gets wrong.

After every backward pass, transformers 5.23 sums the gradient of `replicated_with_grad_allreduce` parameters (the q/k
norms of Qwen3 and Gemma 3) over the ranks, together with what earlier micro-batches have accumulated there: with more
than one micro-batch the earlier ones count several times. Here no hook is installed for these parameters; their
gradients are summed once per step (`hfscale.parallel.gradients.sum_partial_gradients`).
"""

from dataclasses import dataclass, replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from hfscale.facts.support import check_support
from hfscale.parallel.adapters import plan_of_adapters
from hfscale.parallel.descriptions import describe_config
from hfscale.parallel.partition import IdentityStage

PARTIAL_GRADIENT_STYLE = "replicated_with_grad_allreduce"
"""transformers' style of parameters that every rank holds, with the gradient of its own heads only."""


@dataclass(frozen=True, kw_only=True)
class PackedParameter:
    """How a parameter that holds several matrices in one is composed."""

    dim: int
    """The dim along which the matrices are concatenated."""
    parts: int
    """The number of matrices."""


def tensor_parallel_plan(model: PreTrainedModel, tp_size: int) -> dict[str, str]:
    """Look up the tensor-parallel style of each module and parameter; to be called before the model is split.

    Modules that PEFT has wrapped are planned by `hfscale.parallel.adapters.plan_of_adapters`.

    Args:
        model (`PreTrainedModel`): the unsplit model.
        tp_size (`int`): ranks that share each matrix.

    Returns:
        Name of a module or parameter -> style.

    Raises:
        UnsupportedModelError: transformers has no plan for the model.
    """
    asked = replace(describe_config(model.config), engine="parallel_trainer", tp=tp_size)
    # The class of a model may have a plan that its config has not
    check_support(replace(asked, tp_plan=bool(model.tp_plan)), "tp_plan")
    # No public way: the expansion of a plan to this model's own modules. test_parallel_sequence.py fails when it
    # moves.
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=tp_size))
    plan_of_adapters(model, plan)
    return plan


def packed_parameters(model: PreTrainedModel) -> dict[str, PackedParameter]:
    """Find the parameters of an unsplit model that hold several matrices in one, such as gate and up of experts.

    Args:
        model (`PreTrainedModel`): the unsplit model.

    Returns:
        Name -> composition; empty where transformers has no tensor-parallel plan for the model.
    """
    if not model.tp_plan:
        return {}
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES  # absent in 5.15

    plan = tensor_parallel_plan(model, 2)
    found = {}
    for name, parameter in model.named_parameters():
        style = plan.get(name, "")
        if style.startswith("packed") and parameter.ndim > 1:
            dim = parameter.ndim - (2 if style == "packed_colwise" else 1)
            found[name] = PackedParameter(dim=dim, parts=ALL_PARALLEL_STYLES[style].split_factor)
    return found


def apply_tensor_parallel(model: nn.Module, plan: dict[str, str], mesh: DeviceMesh) -> set[str]:
    """Shard the parameters of a model over the tensor parallel ranks and hook its modules, in place.

    Args:
        model (`nn.Module`): a model that may lack the modules of other stages.
        plan (`dict`): name -> style, of the unsplit model.
        mesh (`DeviceMesh`): the tensor parallel ranks, one axis.

    Returns:
        Names of the parameters that every rank holds completely, with only a part of their gradient.
    """
    if not plan:
        return set()
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism  # absent in 5.15

    parameters = dict(model.named_parameters())
    modules = {
        name for name, module in model.named_modules() if not isinstance(module, IdentityStage)
    }
    plan = {name: style for name, style in plan.items() if name in modules or name in parameters}
    partial = {name for name, style in plan.items() if style == PARTIAL_GRADIENT_STYLE}
    apply_tensor_parallelism(
        model, mesh, {name: style for name, style in plan.items() if name not in partial}
    )
    return {name for name in parameters if name in partial or name.rpartition(".")[0] in partial}
