"""LoRA on the stacked parameters of experts: without copies that are kept, and on experts that ranks share.

PEFT multiplies the tokens by W + BA, one matrix for each expert, and autograd keeps all of them until the backward
pass: as many bytes as the experts of every layer have in the precision of the computation. Here autograd keeps W, A
and B, and the backward pass forms the sum again for what it reads of it.

Experts are shared by ranks through transformers (`DistributedConfig(ep_size=...)`) or in `ParallelTrainer`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hfscale.core.torch_internals import has_saved_tensor_hooks
from hfscale.core.versions import is_lora_layer, is_peft_model, require, what_is_missing
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.tensors import is_distributed_tensor

if TYPE_CHECKING:
    from transformers import Trainer

_AXIS = "ep"
"""The axis of transformers' meshes whose ranks share the experts of a layer."""
_INSTALLED = "_hfscale_experts"
_FEATURE = "adapters of experts that ranks share"


def spread_expert_adapters(trainer: "Trainer") -> None:
    """Have adapters of experts added by `add_own_adapters`, in place. A model without such adapters stays as it is.

    Under DeepSpeed, which gathers parameters by hooks of its own, they stay those of PEFT.

    Args:
        trainer (`Trainer`): its model is changed.

    Raises:
        MissingDependencyError: PEFT is too old for experts that ranks share.
    """
    strategy = Strategy.of(trainer)
    if is_peft_model(trainer.model) and not strategy.engine_steps:
        add_own_adapters(trainer.model)


def add_own_adapters(model: nn.Module) -> None:
    """Let each rank add to its experts the adapters of these, and autograd keep the parts of the sum.

    PEFT 0.21 keeps the adapters of all experts of a layer in two matrices that every rank has, and adds their product
    to the stacked parameter. That fails where a rank holds some of the experts ("aten.baddbmm.default got mixed
    torch.Tensor and DTensor"). Here the product is taken for these alone, between the hooks with which FSDP2 gathers
    and releases the parameter. The other experts' adapters then have a gradient of 0 on this rank, and the average
    over all ranks, which Trainer takes of adapters, is that of the global batch, as the gradients of experts are.

    Call it after FSDP2 has sharded the model. It may be called again.

    Args:
        model (`nn.Module`): the model, with or without adapters.

    Raises:
        MissingDependencyError: PEFT is too old for experts that ranks share.
    """
    by_experts: dict[nn.Module, list[Any]] = {}
    modules: list[Any] = list(model.modules())
    for module in modules:
        if is_wrapped_parameter(module) and not hasattr(module, _INSTALLED):
            by_experts.setdefault(module.get_base_layer(), []).append(module)
    for experts, wrappers in by_experts.items():
        parameters = [wrapper.get_param() for wrapper in wrappers]
        is_spread = any(map(_is_spread, parameters))
        if is_spread:
            require(_FEATURE)
        # An older PEFT gives no factors of the product, and keeps the sum
        is_added = what_is_missing(_FEATURE) is None and all(map(_is_stack, parameters))
        if is_spread or is_added:
            _ExpertAdapters(experts, wrappers).install()


def _is_spread(parameter: nn.Parameter) -> bool:
    """Return whether ranks share the experts of a stacked parameter."""
    return is_distributed_tensor(parameter) and _AXIS in (
        parameter.device_mesh.mesh_dim_names or ()
    )


def _is_stack(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has the matrices of several experts, in a format in which torch adds."""
    is_added = parameter.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return parameter.ndim == 3 and parameter.shape[0] > 1 and is_added


def is_wrapped_parameter(module: nn.Module) -> bool:
    """Return whether a module is PEFT's wrapper of a parameter, such as that of all experts of a layer.

    Args:
        module (`nn.Module`): a module of a model.
    """
    return is_lora_layer(module) and hasattr(module, "parameter_name")


@dataclass(frozen=True, kw_only=True)
class _Sum:
    """The matrices W + scaling x left right of some experts, and how to form them again."""

    weight: torch.Tensor
    """(experts, rows, columns)."""
    left: torch.Tensor
    """(experts, rows, rank)."""
    right: torch.Tensor
    """(experts, rank, columns)."""
    scaling: float
    formed: torch.Tensor
    """Their sum, which is kept as long as the forward pass runs."""

    @classmethod
    def of(
        cls, weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scaling: float
    ) -> "_Sum":
        formed = torch.baddbmm(weight, left, right, alpha=scaling).contiguous()
        return cls(weight=weight, left=left, right=right, scaling=scaling, formed=formed)

    def recipe(self) -> Callable[[int, int], torch.Tensor]:
        """Return a function that forms the matrices of the experts of a range, and that keeps no sum."""
        dtype = self.formed.dtype
        parts = (self.weight.detach(), self.left.detach(), self.right.detach())
        return partial(_form, parts, self.scaling, dtype)


def _form(
    parts: tuple[torch.Tensor, ...], scaling: float, dtype: torch.dtype, first: int, end: int
) -> torch.Tensor:
    # What autocast did in the forward pass is the format of the sum; it is off in the backward pass
    weight, left, right = (part[first:end].to(dtype) for part in parts)
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        return torch.baddbmm(weight, left, right, alpha=scaling).contiguous()


@dataclass(frozen=True, kw_only=True)
class _View:
    """A view of a sum that the backward pass reads."""

    form: Callable[[int, int], torch.Tensor]
    elements: int
    """Elements of the matrix of one expert."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def read(self) -> torch.Tensor:
        """Form what the view shows."""
        steps = zip(self.size, self.stride, strict=True)
        last = self.offset + sum((length - 1) * step for length, step in steps)
        first = self.offset // self.elements
        formed = self.form(first, last // self.elements + 1)
        return formed.as_strided(self.size, self.stride, self.offset - first * self.elements)


class _SavedSums:
    """Has autograd keep views of sums instead of the sums, from `enter` to `leave`.

    Args:
        sums (`list[_Sum]`): those of one layer.
    """

    def __init__(self, sums: list[_Sum]) -> None:
        self._sums = {one.formed.untyped_storage().data_ptr(): one for one in sums}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def enter(self) -> None:
        self._hooks.__enter__()

    def leave(self) -> None:
        self._hooks.__exit__()
        self._sums.clear()

    def _pack(self, tensor: torch.Tensor) -> "torch.Tensor | _View":
        found = self._sums.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if found is None or tensor.dtype != found.formed.dtype:
            return tensor
        return _View(
            form=found.recipe(),
            elements=math.prod(found.formed.shape[1:]),
            size=tensor.size(),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    @staticmethod
    def _unpack(kept: "torch.Tensor | _View") -> torch.Tensor:
        return kept.read() if isinstance(kept, _View) else kept


class _ExpertAdapters:
    """Replaces the forward passes of PEFT's wrappers by hooks of the module that holds the experts.

    Args:
        experts (`nn.Module`): the module.
        wrappers (`list[peft.tuners.lora.layer.ParamWrapper]`): the wrappers of its stacked parameters.
    """

    def __init__(self, experts: nn.Module, wrappers: list[Any]) -> None:
        self._experts = experts
        self._wrappers = wrappers
        self._stored: dict[str, nn.Parameter] = {}
        self._saved: _SavedSums | None = None

    def install(self) -> None:
        """Install the hooks: the first after FSDP2 has gathered the parameters, the last before it releases them."""
        self._experts.register_forward_pre_hook(self._add)
        self._experts.register_forward_hook(self._restore, prepend=True, always_call=True)
        for wrapper in self._wrappers:
            wrapper.forward = partial(_forward_of_base, wrapper)
            setattr(wrapper, _INSTALLED, True)

    def _add(self, module: nn.Module, args: Any) -> None:
        sums = []
        for wrapper in self._wrappers:
            adapters = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
            if wrapper.disable_adapters or wrapper.merged or not adapters:
                continue
            sums += self._add_to(module, wrapper, adapters)
        # Recomputed layers keep nothing of them, and have hooks of their own, which ours would hide
        if sums and torch.is_grad_enabled() and not has_saved_tensor_hooks():
            self._saved = _SavedSums(sums)
            self._saved.enter()

    def _add_to(self, module: nn.Module, wrapper: Any, adapters: list[str]) -> list[_Sum]:
        """Replace a stacked parameter by its sum with all adapters."""
        name: str = wrapper.parameter_name
        stored: Any = module._parameters[name]
        is_spread = _is_spread(stored)
        own = stored.to_local() if is_spread else stored
        count = own.shape[0]
        first = stored.device_mesh.get_local_rank(_AXIS) * count if is_spread else 0
        sums = []
        for adapter in adapters:
            left, right, scaling = wrapper.get_delta_factors(adapter)
            sums.append(
                _Sum.of(own, left[first : first + count], right[first : first + count], scaling)
            )
            own = sums[-1].formed
        adapted: Any = own
        if is_spread:
            adapted = DTensor.from_local(
                own,
                stored.device_mesh,
                stored.placements,
                run_check=False,
                shape=stored.shape,
                stride=stored.stride(),
            )
        self._stored[name] = stored
        module._parameters[name] = adapted
        # The sum of a second adapter has the first one's sum as its weight, which would be kept
        return sums if len(sums) == 1 else []

    def _restore(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._saved is not None:
            self._saved.leave()
            self._saved = None
        module._parameters.update(self._stored)
        self._stored = {}


def _forward_of_base(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    return wrapper.base_layer(*args, **kwargs)
