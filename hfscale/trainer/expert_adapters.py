"""LoRA on experts that ranks share: by transformers (`DistributedConfig(ep_size=...)`) or in `ParallelTrainer`."""

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hfscale.core.versions import is_lora_layer, is_peft_model, require
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.tensors import is_distributed_tensor

if TYPE_CHECKING:
    from transformers import Trainer

_AXIS = "ep"
"""The axis of transformers' meshes whose ranks share the experts of a layer."""
_INSTALLED = "_hfscale_spread"


def spread_expert_adapters(trainer: "Trainer") -> None:
    """Let each rank add to its experts the adapters of these, in place. A model without such adapters stays as it is.

    PEFT 0.21 keeps the adapters of all experts of a layer in two matrices that every rank has, and adds their product
    to the stacked parameter. That fails where a rank holds some of the experts ("aten.baddbmm.default got mixed
    torch.Tensor and DTensor"). Here the product is taken for these alone, between the hooks with which FSDP2 gathers
    and releases the parameter. The other experts' adapters then have a gradient of 0 on this rank, and the average
    over all ranks, which Trainer takes of adapters, is that of the global batch, as the gradients of experts are.

    Args:
        trainer (`Trainer`): its model is changed.

    Raises:
        MissingDependencyError: PEFT is too old.
    """
    if Strategy.of(trainer).expert_ranks() > 1 and is_peft_model(trainer.model):
        add_own_adapters(trainer.model)


def add_own_adapters(model: nn.Module) -> None:
    """Do the same for any model, after FSDP2 has sharded it. Modules whose experts no ranks share stay as they are.

    Args:
        model (`nn.Module`): the model, with or without adapters.

    Raises:
        MissingDependencyError: PEFT is too old.
    """
    wrappers: list[Any] = [module for module in model.modules() if is_wrapped_parameter(module)]
    for wrapper in wrappers:
        parameter = wrapper.get_param()
        is_spread = is_distributed_tensor(parameter) and _AXIS in (
            parameter.device_mesh.mesh_dim_names or ()
        )
        if is_spread and not hasattr(wrapper, _INSTALLED):
            require("adapters of experts that ranks share")
            _SpreadAdapter(wrapper).install()


def is_wrapped_parameter(module: nn.Module) -> bool:
    """Return whether a module is PEFT's wrapper of a parameter, such as that of all experts of a layer.

    Args:
        module (`nn.Module`): a module of a model.
    """
    return is_lora_layer(module) and hasattr(module, "parameter_name")


class _SpreadAdapter:
    """Replaces the forward pass of one wrapper of PEFT by hooks of the module that holds the experts.

    Args:
        wrapper (`peft.tuners.lora.layer.ParamWrapper`): the wrapper of one stacked parameter.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._experts: nn.Module = wrapper.get_base_layer()
        self._name: str = wrapper.parameter_name
        self._stored: nn.Parameter | None = None

    def install(self) -> None:
        """Install the hooks: the first after FSDP2 has gathered the parameter, the last before it is released."""
        self._experts.register_forward_pre_hook(self._add)
        self._experts.register_forward_hook(self._restore, prepend=True, always_call=True)
        self._wrapper.forward = functools.partial(_forward_of_base, self._wrapper)
        setattr(self._wrapper, _INSTALLED, True)

    def _add(self, module: nn.Module, args: Any) -> None:
        wrapper = self._wrapper
        adapters = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
        stored: Any = module._parameters[self._name]
        if wrapper.disable_adapters or wrapper.merged or not adapters:
            return
        own = stored.to_local()
        count = own.shape[0]
        first = stored.device_mesh.get_local_rank(_AXIS) * count
        for name in adapters:
            left, right, scaling = wrapper.get_delta_factors(name)
            own = torch.baddbmm(
                own, left[first : first + count], right[first : first + count], alpha=scaling
            )
        adapted: Any = DTensor.from_local(
            own,
            stored.device_mesh,
            stored.placements,
            run_check=False,
            shape=stored.shape,
            stride=stored.stride(),
        )
        self._stored = stored
        module._parameters[self._name] = adapted

    def _restore(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stored is not None:
            module._parameters[self._name] = self._stored
            self._stored = None


def _forward_of_base(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    return wrapper.base_layer(*args, **kwargs)
