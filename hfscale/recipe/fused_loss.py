"""A loss that never holds all logits: the head and the cross-entropy are computed for a part of the tokens at a time.

An ordinary loss holds 14 bytes for each token and each entry of the vocabulary: the logits in bf16 and in fp32, their
log-probabilities and the gradient. Here the gradients of the head's weight and input are computed in the forward pass,
part by part, and the logits of a part are gone before those of the next one.

It happens inside of the forward of the head (`ChunkedLossHead`), so that FSDP2 and ZeRO-3 have gathered its weight.
`torch.nn.functional.linear_cross_entropy` of torch 2.13 does the same, but with inputs in bf16 it adds up the loss in
bf16, which was off by 0.1% to 0.8% in a test on a CPU; Liger's kernel waits for the GPU in each forward pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils import ModelOutput

from hfscale.core.versions import is_peft_model
from hfscale.recipe.weight_casts import CastOnceLinear
from hfscale.trainer.hooks import wrap_prediction_steps
from hfscale.trainer.strategies.tensors import unsharded_twin

if TYPE_CHECKING:
    from transformers import Trainer

FUSED_LOSSES = ("auto", "chunked", "liger", "none")
"""Values of `--fused_loss`."""
CHUNK_TOKENS = 1024
"""Tokens whose logits exist at a time. A matrix product of this many rows is limited by the matrix units of a GPU and
not by reading the weight, which needs some 300 rows on an H100 (989 TFLOP/s in bf16, 3.35 TB/s)."""
_IGNORED = -100


def _log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of targets (N, 1) in fp32; logits are (N, V)."""
    of_all = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    return of_all.gather(1, targets)


def _replace_by_gradient(
    logits: torch.Tensor, targets: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor:
    """Replace logits (N, V) by the gradient of their cross-entropy, whose rows are multiplied by factors (N, 1).

    Returns:
        `torch.Tensor`: the log-probabilities of the targets, (N, 1) in fp32.
    """
    probabilities = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    of_targets = probabilities.gather(1, targets)
    minus_one = probabilities.new_full((1, 1), -1.0)
    probabilities.exp_()
    probabilities.scatter_add_(1, targets, minus_one.expand_as(targets))
    torch.mul(probabilities, factors, out=logits)  # in the format of the matrix products
    return of_targets


def _replace_by_gradient_without_scatter(
    logits: torch.Tensor, targets: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor:
    """Do the same in operations of which Inductor makes two passes over the logits; a scatter would be one more."""
    log_probabilities = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    of_targets = log_probabilities.gather(1, targets)
    probabilities = log_probabilities.exp()
    tokens = torch.arange(logits.shape[1], device=logits.device)
    expected = (tokens == targets).float()
    gradient = (probabilities - expected) * factors
    logits.copy_(gradient)
    return of_targets


@cache
def _differentiation(is_compiled: bool) -> Callable[..., torch.Tensor]:
    """Return `_replace_by_gradient`, compiled or not.

    Eager operations read and write some 36 bytes per logit in bf16: a copy in fp32 (6), its log-probabilities (16 by
    torch's kernel for many columns, 8 at least), their exponential (8) and its multiple in bf16 (6). Compiled, the
    logits are read twice and written once (6).
    """
    if is_compiled:
        return torch.compile(_replace_by_gradient_without_scatter, dynamic=False)
    return _replace_by_gradient


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The cross-entropy of `hidden @ weight.T + bias`, summed over the tokens and multiplied by `scale`.

    Shapes: hidden (N, H), weight (V, H), bias (V) or None, labels (N), scale () or a number. It reads nothing from the
    device.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        scale: torch.Tensor | float,
        has_backward: bool,
        is_compiled: bool,
    ) -> torch.Tensor:
        needs = [has_backward and need for need in ctx.needs_input_grad[:3]]
        gradients = [
            torch.empty_like(tensor) if need and tensor is not None else None
            for tensor, need in zip((hidden, weight, bias), needs, strict=True)
        ]
        of_hidden, of_weight, of_bias = gradients
        if of_bias is not None:
            of_bias.zero_()
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), CHUNK_TOKENS):
                rows = slice(start, start + CHUNK_TOKENS)
                is_counted = labels[rows] != _IGNORED
                targets = labels[rows].clamp(min=0).unsqueeze(1)
                logits = hidden[rows] @ weight.T  # (tokens, V), replaced by their gradient
                if bias is not None:
                    logits += bias
                factors = torch.where(is_counted, scale, 0.0).unsqueeze(1)
                if any(needs):
                    # The last part has other shapes in each batch: it would be compiled again
                    is_whole = len(logits) == CHUNK_TOKENS
                    differentiate = _differentiation(is_compiled and is_whole)
                    of_targets = differentiate(logits, targets, factors)
                else:
                    of_targets = _log_probabilities(logits, targets)
                loss -= torch.where(is_counted, of_targets.squeeze(1), 0.0).sum()
                if of_hidden is not None:
                    torch.mm(logits, weight, out=of_hidden[rows])
                if of_weight is not None:
                    # The first part overwrites what the memory held
                    of_weight.addmm_(logits.T, hidden[rows], beta=min(start, 1))
                if of_bias is not None:
                    of_bias += logits.sum(0)
                del logits  # before the logits of the next part are made
        ctx.gradients = gradients
        return loss * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError(
                "the loss was differentiated twice, and its gradients are kept for one backward pass"
            )
        gradients, ctx.gradients = ctx.gradients, None
        scaled = (None if one is None else one.mul_(gradient) for one in gradients)
        return *scaled, None, None, None, None


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    num_items: torch.Tensor | int | None = None,
    *,
    is_compiled: bool = False,
) -> torch.Tensor:
    """Compute the cross-entropy of a linear head, as transformers' `ForCausalLMLoss` does, without all logits.

    Args:
        hidden (`torch.Tensor`): the input of the head, (batch, sequence, hidden); under autocast it is cast as the
            head would cast it.
        weight (`torch.Tensor`): the weight of the head, (vocabulary, hidden).
        bias (`torch.Tensor`, *optional*): the bias of the head, (vocabulary).
        labels (`torch.Tensor`): the token that follows each position, (batch, sequence); -100 is not counted.
        num_items (`torch.Tensor` or `int`, *optional*): what the sum is divided by. Default: the labels that count.
        is_compiled (`bool`): whether Inductor writes the kernels between the matrix products.

    Returns:
        `torch.Tensor`: the loss, a scalar in fp32, which can be differentiated once.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    labels = labels.reshape(-1)
    count = (labels != _IGNORED).sum() if num_items is None else num_items
    loss: torch.Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]).to(dtype),
        weight.to(dtype),
        None if bias is None else bias.to(dtype),
        labels,
        1.0 / count,
        torch.is_grad_enabled(),
        is_compiled,
    )
    return loss


@dataclass(frozen=True, kw_only=True)
class _Targets:
    """What the loss of one forward pass needs besides the input of the head."""

    labels: torch.Tensor
    """The token that follows each position, (batch, sequence)."""
    num_items: torch.Tensor | int | None
    """What the sum of the losses is divided by; None: the labels that count."""

    @classmethod
    def of(cls, inputs: dict[str, Any]) -> "_Targets | None":
        """Read them from the keywords of a model; None if these ask for no loss."""
        labels = inputs.get("labels")
        if labels is None:
            return None
        following = inputs.get("shift_labels")
        if following is None:
            following = nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]
        return cls(labels=following, num_items=inputs.get("num_items_in_batch"))


class ChunkedLossHead(CastOnceLinear):
    """A head that returns the loss, a scalar, instead of the logits, if its model was called for a loss.

    `compute_loss_in_chunks` makes it from the head of a model.
    """

    targets: _Targets | None = None
    """Those of the forward pass that is running; None: it returns logits."""
    loss_is_enough: bool = False
    """Whether an evaluation needs no logits."""
    is_compiled: bool = False
    """Whether Inductor writes the kernels between the matrix products."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the loss if there are targets, else the logits.

        Args:
            input (`torch.Tensor`): the hidden states, (batch, sequence, hidden).
        """
        targets = self.targets
        if targets is None:
            return super().forward(input)
        weight, bias = self.parameters_for(input)
        return chunked_cross_entropy(
            input,
            weight,
            bias,
            targets.labels,
            targets.num_items,
            is_compiled=self.is_compiled,
        )

    def expect(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the targets of the forward pass that begins: a forward pre-hook of the model.

        Args:
            model (`nn.Module`): the model, with its adapters.
            args (`tuple`): its positional arguments.
            kwargs (`dict`): its keywords.
        """
        self.targets = _Targets.of(kwargs) if model.training or self.loss_is_enough else None

    def leave_out_logits(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Leave the logits out of the output of a model whose head has returned a loss: a forward hook of the model.

        Args:
            model (`nn.Module`): the model, with its adapters.
            args (`tuple`): its positional arguments.
            output (`ModelOutput`): its output.
        """
        targets = self.targets
        self.targets = None
        if targets is None or not isinstance(output, ModelOutput):
            return output
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})


class _ShardedChunkedLossHead(FSDPModule, ChunkedLossHead):
    """The same for a head that transformers itself has sharded by FSDP2, while it loaded the model."""


def _loss_of_head(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any
) -> torch.Tensor:
    """Return the loss if the head has computed it, else compute it from the logits: the model's `loss_function`."""
    if logits.ndim == 0:
        return logits.clone()  # models add to it in place
    return ForCausalLMLoss(logits, labels, vocab_size, **kwargs)


def compute_loss_in_chunks(model: Any) -> ChunkedLossHead:
    """Let a model compute its loss without all logits, in training and where an evaluation needs no logits.

    Args:
        model (`PreTrainedModel` or `PeftModel`): a model for which `reason_not_to_chunk` gives no reason, not yet
            wrapped for training; changed in place. Called with labels in training, it returns no logits.

    Returns:
        `ChunkedLossHead`: its head, with the same parameters.
    """
    base = _base_of(model)
    head: Any = base.get_output_embeddings()
    # As FSDP2 does it: hooks, parameters and references to the module stay.
    head.__class__ = _ShardedChunkedLossHead if isinstance(head, FSDPModule) else ChunkedLossHead
    base.loss_function = _loss_of_head
    model.register_forward_pre_hook(head.expect, with_kwargs=True)
    model.register_forward_hook(head.leave_out_logits)
    return cast(ChunkedLossHead, head)


def evaluate_without_logits(trainer: "Trainer", head: ChunkedLossHead) -> None:
    """Let the evaluations of a Trainer that need the loss alone compute no logits.

    Args:
        trainer (`Trainer`): its method `prediction_step` is replaced.
        head (`ChunkedLossHead`): the head of its model.
    """

    @contextmanager
    def loss_is_enough(prediction_loss_only: bool) -> Iterator[None]:
        head.loss_is_enough = prediction_loss_only
        try:
            yield
        finally:
            head.loss_is_enough = False

    wrap_prediction_steps(trainer, loss_is_enough)


def reason_not_to_chunk(model: Any) -> str | None:
    """Return why the loss of a model cannot be computed in chunks; None if it can.

    Args:
        model (`PreTrainedModel` or `PeftModel`): the model of a Trainer that has not been prepared.
    """
    base = _base_of(model)
    if not isinstance(base, PreTrainedModel):
        return "it is not a model of transformers"
    if isinstance(base, FSDPModule):
        base = unsharded_twin(base)
    head = base.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its head is no plain linear layer ({type(head).__name__})"
    if base.loss_function is not ForCausalLMLoss:
        return "its loss is not that of a causal language model"
    return _reason_of_logits(base, head)


def _base_of(model: Any) -> Any:
    return model.get_base_model() if is_peft_model(model) else model


class _Reached(Exception):  # noqa: N818 (not an error)
    """Ends a forward at the loss."""

    def __init__(self, call: "_LossCall") -> None:
        super().__init__()
        self.call = call


@dataclass(frozen=True, kw_only=True)
class _LossCall:
    """How the forward of a model calls its loss function."""

    keeps_logits: bool
    """Whether the logits are those that the head has returned."""
    keeps_labels: bool
    """Whether the labels are those that the model was given."""
    others: dict[str, Any]
    """Arguments besides logits, labels and the size of the vocabulary."""


def loss_takes_number_of_tokens(model: PreTrainedModel) -> bool:
    """Return whether a model divides the loss of all its labels by `num_items_in_batch`, if it is given that.

    Args:
        model (`PreTrainedModel`): a model, which may be sharded.
    """
    twin = unsharded_twin(model)
    head = twin.get_output_embeddings()
    if twin.loss_function is not ForCausalLMLoss or not isinstance(head, nn.Linear):
        return False
    call = _call_of_loss(twin, head, num_items_in_batch=1)
    return (
        isinstance(call, _LossCall)
        and call.keeps_labels
        and call.others == {"num_items_in_batch": 1}
    )


def _reason_of_logits(model: PreTrainedModel, head: nn.Linear) -> str | None:
    """Return whether a model does more than compute its loss from the logits of its head.

    Gemma 2 caps the logits before, Granite and Cohere multiply them by a constant.
    """
    call = _call_of_loss(model, head)
    if isinstance(call, str):
        return call
    is_plain = call.keeps_logits and call.keeps_labels and not call.others
    return None if is_plain else "it changes logits or labels before the loss"


def _call_of_loss(model: PreTrainedModel, head: nn.Linear, **keywords: Any) -> _LossCall | str:
    """Let a model compute a loss, without its decoder and its head, and return how it does; a reason if unknown."""
    decoder: Any = model.base_model
    device = head.weight.device
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    hidden = torch.zeros(1, 2, head.in_features, device=device)
    logits = torch.zeros(1, 2, head.out_features, device=device)

    def at_loss(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(("logits", "labels", "vocab_size"), args, strict=False)), **kwargs}
        own_logits, own_labels, size = (
            given.pop(name, None) for name in ("logits", "labels", "vocab_size")
        )
        keeps_labels = own_labels is tokens and size == head.out_features
        raise _Reached(
            _LossCall(keeps_logits=own_logits is logits, keeps_labels=keeps_labels, others=given)
        )

    def stub_decoder(*args: Any, **kwargs: Any) -> Any:
        return MoeModelOutputWithPast(last_hidden_state=hidden)

    def stub_head(*args: Any, **kwargs: Any) -> Any:
        return logits

    original = model.loss_function
    patched = [(decoder, stub_decoder), (head, stub_head)]
    saved = [(module, vars(module).get("forward")) for module, _ in patched]
    try:
        model.loss_function = at_loss
        for module, forward in patched:
            module.forward = forward
        model.forward(input_ids=tokens, labels=tokens, **keywords)
    except _Reached as reached:
        return reached.call
    except Exception as error:  # whatever a model raises for inputs that it does not expect
        return f"its forward pass cannot be examined ({type(error).__name__})"
    finally:
        model.loss_function = original
        for module, forward in saved:
            if forward is None:
                del module.forward
            else:
                module.forward = forward
    return "it computes its loss in a way of its own"
