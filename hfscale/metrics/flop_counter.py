"""Counts the FLOPs of real training steps, for models and trainers whose FLOPs no formula gives.

It uses the formulas of `torch.utils.flop_counter`. Unlike torch's `FlopCounterMode` it separates recomputation from
model FLOPs, and names the operators that it cannot count.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker
from transformers import PreTrainedModel, Trainer

from hfscale.core.torch_internals import TorchDispatchMode, is_in_torch_dispatch_mode
from hfscale.core.versions import context_parallel_size, sequence_parallel_size
from hfscale.trainer.attention import attention_implementation
from hfscale.trainer.batches import is_compiled
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies import Strategy

if TYPE_CHECKING:
    from hfscale.metrics.tokens import TokenCounter

_WITHOUT_FLOPS = (
    "aten",
    "prim",
    "prims",
    "c10d",
    "_c10d_functional",
    "c10d_functional",
    "fsdp",
    "_dtensor",
    "profiler",
)
"""Namespaces whose operators multiply no matrices, except for those of `flop_registry` and the ones named here."""
_NOT_COUNTED = (
    "aten::_int_mm",
    "aten::_weight_int4pack_mm",
    "aten::_weight_int8pack_mm",
    "aten::_scaled_grouped_mm",
    "aten::_cudnn_rnn",
    "aten::miopen_rnn",
    "aten::mkldnn_rnn_layer",
    "aten::_trilinear",
    "aten::_cdist_forward",
)
_COUNTED_ATTENTION = (None, "eager", "sdpa")


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> int:
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
) -> int:
    """Count the scores again, and the gradients of value, scores, query and key."""
    flops: int = (
        query.shape[:-1].numel() * key.shape[-2] * (6 * query.shape[-1] + 4 * value.shape[-1])
    )
    return flops


def _grouped_mm(one: torch.Tensor, other: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Count the product of experts' matrices and their tokens: each row belongs to one expert."""
    experts = one.shape[0] if one.ndim == other.ndim == 3 else 1
    return 2 * experts * one.shape[-2] * one.shape[-1] * other.shape[-1]


_FORMULAS: dict[str, Callable[..., int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention,
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "aten::_grouped_mm": _grouped_mm,
}
"""Formulas of operators that `flop_registry` does not have."""


class StepFlops(TorchDispatchMode):
    """Counts the FLOPs of loss and backward of one step, while it is active.

    Model FLOPs are those that the mathematics needs: all forwards of the loss, of reference models too, and the
    backward. Hardware FLOPs also include what the backward computes a second time: checkpointed layers, and the scores
    of attention.

    Args:
        counter (`TokenCounter`): says whether a forward of the model is running: such a forward is no recomputation
            even if it runs during a backward, as in sentence-transformers' cached losses.
    """

    def __init__(self, counter: "TokenCounter") -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.model_flops = 0.0
        """Model FLOPs of this process so far."""
        self.hardware_flops = 0.0
        """Executed FLOPs of this process so far."""
        self.not_counted: set[str] = set()
        """Names of operators that have been executed and may have FLOPs that are not counted."""
        self._counter = counter
        self._tracker = ModuleTracker()  # not entered: it only tells whether a backward is running
        self._is_active = False

    def start(self) -> None:
        """Begin to count, unless another dispatch mode is active, which would have to be left first."""
        if not self._is_active and not is_in_torch_dispatch_mode():
            self._is_active = True
            self.__enter__()  # type: ignore[no-untyped-call]  # of torch

    def stop(self) -> None:
        """Stop counting."""
        if self._is_active:
            self._is_active = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # of torch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute an operator and count its FLOPs."""
        kwargs = kwargs or {}
        name = func.name()
        formula = _FORMULAS.get(name.partition(".")[0])
        if formula is None:
            registered = flop_registry.get(getattr(func, "overloadpacket", func))
            if registered is None:
                if (
                    name.partition("::")[0] not in _WITHOUT_FLOPS
                    or name.partition(".")[0] in _NOT_COUNTED
                ):
                    self.not_counted.add(name.partition(".")[0])
                return self._run_without_formula(func, args, kwargs)
            formula = registered
        result = func(*args, **kwargs)
        try:
            self._add(name, formula(*args, **kwargs, out_val=result))
        except Exception:  # a formula that does not know these shapes must not end the training
            self.not_counted.add(name)
        return result

    def _run_without_formula(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Execute an operator; in inference mode those that consist of others have not been decomposed yet."""
        if torch.is_inference_mode_enabled() and func is not torch.ops.prim.device.default:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)

    def _add(self, name: str, flops: float) -> None:
        self.hardware_flops += flops
        if self._tracker.is_bw and torch.is_grad_enabled() and not self._counter.is_in_forward:
            return
        # One of the five products of the backward of fused attention computes the scores again.
        self.model_flops += flops * 4 / 5 if "attention" in name and "backward" in name else flops


def reason_not_to_count(trainer: Trainer) -> str | None:
    """Return why the FLOPs of this training cannot be counted; None if they can.

    Args:
        trainer (`Trainer`): the Trainer, with its model prepared.
    """
    sequence_ranks = context_parallel_size(trainer) * sequence_parallel_size(trainer)
    shares_sequences = trainer.get_tp_size() * sequence_ranks > 1
    if shares_sequences or Strategy.of(trainer).shares_layers:
        return (
            "FLOPs are not counted where ranks share a sequence, a matrix or the experts of a layer"
        )
    if isinstance(trainer.model_wrapped, nn.DataParallel):
        return "FLOPs are not counted in the threads of nn.DataParallel"
    model = model_of(trainer)
    if any(
        is_compiled(module) for root in (trainer.model_wrapped, model) for module in root.modules()
    ):
        return "FLOPs of a compiled model cannot be counted"
    for module in model.modules():
        attention = (
            attention_implementation(module.config) if isinstance(module, PreTrainedModel) else None
        )
        if attention not in _COUNTED_ATTENTION:
            return f"the FLOPs of {attention} cannot be counted (attn_implementation sdpa or eager can)"
    return None


def has_own_loss(trainer: Trainer) -> bool:
    """Return whether a subclass of Trainer computes the loss, in which it may call several models.

    Args:
        trainer (`Trainer`): the Trainer; a `ParallelTrainer` computes the loss of Trainer.
    """
    has_override = type(trainer).compute_loss is not Trainer.compute_loss
    return has_override and not Strategy.of(trainer).runs_stages


def extends_loss(trainer: Trainer) -> bool:
    """Return whether the subclass's `compute_loss` calls that of its base class.

    Args:
        trainer (`Trainer`): a Trainer of which `has_own_loss` is true.
    """
    code = type(trainer).compute_loss.__code__
    return "compute_loss" in code.co_names and "__class__" in code.co_freevars
