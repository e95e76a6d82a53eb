"""The load-balancing loss of mixtures of experts, layer by layer, so that it is the same however layers are dealt.

Per layer, with E experts, f_i the share of tokens whose top-k choices include expert i and P_i its mean probability,
E sum_i f_i P_i (Fedus et al., Switch Transformers, arXiv 2101.03961, equations 4 to 6); here its mean over layers,
micro-batches and data parallel ranks, times `router_aux_loss_coef`. transformers multiplies f and P that it has
averaged over all layers first, which no stage knows, and adds the loss once per accumulated micro-batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hfscale.errors import UnsupportedModelError


class RouterBalance:
    """Watches the routers of this rank's layers, and makes a loss of what they say.

    Args:
        model (`PreTrainedModel`): whole, with `output_router_logits` in its config.
        whole (`callable`, *optional*): `whole(part, dim)` gathers sequences of which each rank has a part: f and P are
            means over all tokens of a micro-batch.

    Raises:
        UnsupportedModelError: its routers or the weight of the loss are not to be found.
    """

    def __init__(
        self, model: PreTrainedModel, whole: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    ) -> None:
        config = model.config.get_text_config()
        # No public way: which module's output the model reports as router logits.
        recorders = (getattr(module, "_can_record_outputs", None) or {} for module in model.modules())
        self._recorder: Any = next((found["router_logits"] for found in recorders if "router_logits" in found), None)
        self._experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        self._coefficient = getattr(config, "router_aux_loss_coef", None)
        if not hasattr(self._recorder, "target_class") or None in (self._experts, self._coefficient):
            raise UnsupportedModelError(
                f"output_router_logits of {config.model_type}: its load-balancing loss is not known; set it to false "
                "in the model's config"
            )
        self._top_k = config.num_experts_per_tok
        self._layers = sum(isinstance(m, self._recorder.target_class) for m in model.modules())
        self._logits: list[torch.Tensor] | None = None
        self._whole = whole
        self.micro_batches = 1
        """Micro-batches of the step that hold tokens to learn from."""

    @classmethod
    def of(
        cls, model: PreTrainedModel, whole: Callable[[torch.Tensor, int], torch.Tensor] | None
    ) -> "RouterBalance | None":
        """Of a model whose config asks for it; None for others."""
        asked = getattr(model.config.get_text_config(), "output_router_logits", False)
        return cls(model, whole) if asked else None

    def watch(self, stage: nn.Module) -> None:
        """Follow the routers in `stage` from now on."""
        for module in stage.modules():
            if isinstance(module, self._recorder.target_class):
                module.register_forward_hook(self._note)

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._logits is not None:  # not while activations are computed again
            self._logits.append(output[self._recorder.index] if isinstance(output, tuple) else output)

    def begin(self) -> None:
        """A stage's forward starts."""
        self._logits = []

    def take(self, mask: torch.Tensor | None, labels: torch.Tensor | None, rows: int) -> torch.Tensor:
        """The stage's share of the loss for the micro-batch of so many `rows` that has just passed, 0 where all labels
        are ignored."""
        logits, self._logits = self._logits or [], None
        if self._whole is not None:
            logits = [self._whole(one.reshape(rows, -1, one.shape[-1]), 1).flatten(0, 1) for one in logits]
        losses = [load_balancing_loss_func((one,), self._experts, self._top_k, mask) for one in logits]
        if not losses:
            return torch.zeros(())
        share = self._coefficient / (self._layers * self.micro_batches)
        learns = (labels != -100).any() if labels is not None else 1.0
        return torch.stack(losses).sum() * share * learns


class WithLoss(torch.autograd.Function):
    """Hidden states that carry a loss to the backward pass: its gradient is 1 wherever theirs comes from."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """A copy of `hidden`: schedules detach what a stage returns in place, which a view does not allow."""
        ctx.dtype, ctx.device = loss.dtype, loss.device
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient of `hidden`, and 1 for the loss."""
        return gradients[0], torch.ones((), dtype=ctx.dtype, device=ctx.device)
