"""Weights in fp32 are cast to bf16 once per optimizer step, not once per micro-batch.

Autocast casts the weights of linear layers in each forward pass, though they change only when the optimizer steps.
Here all of them are cast together before the first micro-batch of a step, into copies that the other micro-batches
read too: 6 bytes of memory traffic per weight and micro-batch less. What is computed is the same, bit for bit: the
values of the copies, and gradients that are cast to fp32 and added up as before. The copies take 2 bytes per weight,
as much as those that autocast keeps until the backward pass.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, TrainerCallback

from hfscale.core.logging import get_logger
from hfscale.core.torch_internals import version_of
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.replicated import Replicated

if TYPE_CHECKING:
    from transformers import Trainer

logger = get_logger(__name__)


class _ReadCopy(torch.autograd.Function):
    """Returns the copy of a weight; its gradient is that of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.to(torch.float32), None


class WeightCopy:
    """The bf16 copy of a parameter; None until it is made. A copy of a module has no copy of its own."""

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeightCopy":
        return WeightCopy()

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCopy, ()


class CastOnceLinear(nn.Linear):
    """A linear layer that reads bf16 copies of its parameters in training, where there are any.

    `cast_weights_once` makes it from the linear layers of a model.
    """

    weight_copy: WeightCopy | None = None
    bias_copy: WeightCopy | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product of the input and the weight, and add the bias.

        Args:
            input (`torch.Tensor`): (..., in_features).
        """
        weight, bias = self.parameters_for(input)
        return functional.linear(input, weight, bias)

    def parameters_for(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias, or what reads their copies under autocast in training.

        Args:
            input (`torch.Tensor`): the input of the layer; autocast is looked up for its device.
        """
        kind = input.device.type
        if not (torch.is_grad_enabled() and self.training and torch.is_autocast_enabled(kind)):
            return self.weight, self.bias
        weight = _read(self.weight, self.weight_copy)
        if self.bias is None:
            return weight, None
        return weight, _read(self.bias, self.bias_copy)


def _read(parameter: torch.Tensor, copy: WeightCopy | None) -> torch.Tensor:
    if copy is None or copy.tensor is None:
        return parameter
    read: torch.Tensor = _ReadCopy.apply(parameter, copy.tensor)  # type: ignore[no-untyped-call]
    return read


class CastWeightsOnce(TrainerCallback):
    """Casts the parameters of linear layers before the first micro-batch of an optimizer step.

    They are cast again where one of them was written between two micro-batches, or is kept elsewhere.

    Args:
        modules (`list[CastOnceLinear]`): the layers.
    """

    def __init__(self, modules: list[CastOnceLinear]) -> None:
        copies: dict[torch.Tensor, WeightCopy] = {}  # a weight that layers share is cast once
        for module in modules:
            module.weight_copy = copies.setdefault(module.weight, WeightCopy())
            if module.bias is not None:
                module.bias_copy = copies.setdefault(module.bias, WeightCopy())
        self.casts = 0
        """How often all of them were cast."""
        self.hooks: list[RemovableHandle] = []
        """Those that call `cast`, until the end of the training."""
        self._copies = copies
        self._cast_state: list[
            tuple[int, int]
        ] = []  # where the parameters were and how often they had been written

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Have the next forward pass cast them.

        Args:
            args (`TrainingArguments`): those of the Trainer.
            state (`TrainerState`): its state.
            control (`TrainerControl`): its control.
            kwargs (`Any`): what else Trainer passes.
        """
        self._cast_state = []

    def cast(self, module: nn.Module, args: Any) -> None:
        """Cast them where it was not done for this step: a forward pre-hook of the decoder.

        Args:
            module (`nn.Module`): the decoder.
            args (`tuple`): its positional arguments.
        """
        if not (module.training and torch.is_grad_enabled()):
            return
        state = [(weight.data_ptr(), version_of(weight)) for weight in self._copies]
        if state == self._cast_state:
            return
        self._cast_state = state
        self.casts += 1
        with torch.no_grad():
            for weight, copy in self._copies.items():
                if copy.tensor is None or copy.tensor.device != weight.device:
                    copy.tensor = torch.empty_like(weight, dtype=torch.bfloat16)
            copies = [copy.tensor for copy in self._copies.values() if copy.tensor is not None]
            torch._foreach_copy_(copies, list(self._copies))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Free the copies, and make no others.

        Args:
            args (`TrainingArguments`): those of the Trainer.
            state (`TrainerState`): its state.
            control (`TrainerControl`): its control.
            kwargs (`Any`): what else Trainer passes.
        """
        while self.hooks:
            self.hooks.pop().remove()
        for copy in self._copies.values():
            copy.tensor = None


def cast_weights_once(trainer: "Trainer") -> CastWeightsOnce | None:
    """Let a Trainer of the recipes cast its fp32 weights once per optimizer step, where it has several micro-batches.

    Sharded weights are not concerned: FSDP2 and DeepSpeed keep or gather them in bf16. Models that are compiled as a
    whole are left alone, as nothing runs between their layers and the start of the forward pass.

    Args:
        trainer (`Trainer`): call it before `train()`, after `choose_loss`, which replaces the head.

    Returns:
        `CastWeightsOnce`, *optional*: the callback that was added; None where nothing was changed.
    """
    args = trainer.args
    if args.gradient_accumulation_steps == 1 or trainer.accelerator.mixed_precision != "bf16":
        return None
    strategy = Strategy.of(trainer)
    if not isinstance(strategy, Replicated) or strategy.combination().compile_full:
        return None
    model: Any = trainer.model
    modules = [module for module in model.modules() if _is_cast_by_autocast(module)]
    if not modules:
        return None
    for module in modules:
        if type(module) is nn.Linear:
            # As FSDP2 does it: hooks, parameters and references to the module stay.
            module.__class__ = CastOnceLinear
    callback = CastWeightsOnce(modules)
    base = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    callback.hooks.append(base.base_model.register_forward_pre_hook(callback.cast))
    trainer.add_callback(callback)
    logger.info("weights: cast to bf16 once per optimizer step, not in each micro-batch")
    return callback


def _is_cast_by_autocast(module: nn.Module) -> bool:
    """Return whether a module is a plain linear layer of trained parameters in fp32."""
    if type(module) is not nn.Linear and not isinstance(module, CastOnceLinear):
        return False
    parameters = [*module.parameters(recurse=False)]
    return bool(parameters) and all(
        type(parameter) is nn.Parameter
        and parameter.requires_grad
        and parameter.dtype == torch.float32
        for parameter in parameters
    )
