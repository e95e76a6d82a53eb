"""Losses that no rank can compute alone: cross-entropy over a sharded vocabulary, and the load balancing of experts.

**Cross-entropy.** Each tensor parallel rank has the logits of its part of the vocabulary, and no rank ever holds all
logits of a token. The ranks exchange three numbers per token: the largest logit, the sum of the exponentials, and the
logit of the label (Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3). Label smoothing needs a fourth: the sum
of all logits.

**Load balancing.** The loss of a mixture-of-experts layer with E experts is E sum_i f_i P_i, where f_i is the share of
the tokens whose top-k choices include expert i and P_i is the expert's mean probability (Fedus et al., Switch
Transformers, arXiv 2101.03961, equations 4 to 6). Here it is computed per layer, so that it does not depend on how
layers are assigned to stages: its mean over layers, micro-batches and data parallel ranks, times
`router_aux_loss_coef`. transformers first averages f and P over all layers, which no stage can do, and adds the loss
once per accumulated micro-batch.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hfscale.core.spelling import spelled
from hfscale.errors import UnsupportedModelError

IGNORED_LABEL = -100
"""The label of positions that transformers' losses leave out."""
# Of a head whose complete logits every rank gets
_GATHERED_STYLES = ("colwise_gather_output", "colwise_rep")


# --- cross-entropy over a sharded vocabulary -------------------------------------------------------------------------


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Losses of tokens, and the gradient of this rank's logits, from this rank's part of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        smoothing: float,
        group: dist.ProcessGroup,
        first: int,
        vocabulary: int,
    ) -> torch.Tensor:
        """(tokens, this rank's entries), (tokens,) -> (tokens,), which is the same on all ranks.

        `first` is the first of this rank's entries, and `vocabulary` the number of all.

        With V entries and smoothing e, the loss is -(1 - e) log p_label - e / V sum_j log p_j (Szegedy et al.,
        arXiv 1512.00567, section 7), where -log p_j = log sum exp(z - max z) - (z_j - max z).
        """
        width = logits.shape[-1]
        peak = logits.amax(dim=-1).float()
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        shifted = logits.float() - peak[:, None]
        column = labels - first
        is_local = (column >= 0) & (column < width)
        column = torch.where(is_local, column, 0)[:, None]
        label_logits = torch.where(is_local, shifted.gather(-1, column).squeeze(-1), 0.0)
        logit_sums = shifted.sum(dim=-1) if smoothing else torch.zeros_like(label_logits)
        probabilities = shifted.exp_()
        sums = torch.stack([probabilities.sum(dim=-1), label_logits, logit_sums])
        dist.all_reduce(sums, group=group)
        probabilities /= sums[0][:, None]
        ctx.save_for_backward(probabilities, column, is_local)
        ctx.smoothing = smoothing
        ctx.vocabulary = vocabulary
        ctx.dtype = logits.dtype
        return sums[0].log() - (1 - smoothing) * sums[1] - smoothing / vocabulary * sums[2]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of column j is p_j - e / V, minus 1 - e where j is the label."""
        probabilities, column, is_local = ctx.saved_tensors
        per_token = gradients[0][:, None]
        gradient = (probabilities - ctx.smoothing / ctx.vocabulary) * per_token
        gradient.scatter_add_(-1, column, (ctx.smoothing - 1) * is_local[:, None] * per_token)
        return gradient.to(ctx.dtype), None, None, None, None, None


@dataclass(frozen=True, kw_only=True)
class VocabParallelLoss:
    """The loss function of a model whose logits are sharded over the tensor parallel ranks."""

    group: dist.ProcessGroup
    """The tensor parallel ranks, in the order of their parts of the vocabulary."""
    vocabulary: int
    """Entries of the whole vocabulary. Where the ranks do not divide it, the last one has fewer, as `torch.chunk`
    gives them."""
    epsilon: float = 0.0
    """Label smoothing."""

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = IGNORED_LABEL,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Compute what transformers' `ForCausalLMLoss` computes, from this rank's logits.

        Args:
            logits (`torch.Tensor`): (batch, sequence, this rank's entries).
            labels (`torch.Tensor`): (batch, sequence), not shifted; unused where `shift_labels` is given.
            vocab_size (`int`): entries of the whole vocabulary.
            num_items_in_batch (`int` or `torch.Tensor`, *optional*): tokens to divide the sum by; absent: those here.
            ignore_index (`int`): the label of positions that are left out.
            shift_labels (`torch.Tensor`, *optional*): the label of each position's successor, (batch, sequence).

        Returns:
            The loss, a scalar.

        Raises:
            UnsupportedModelError: the logits are not this rank's part of the vocabulary.
        """
        own = self._entries()
        if vocab_size != self.vocabulary or logits.shape[-1] != len(own):
            raise UnsupportedModelError(
                f"{logits.shape[-1]} logits are not this rank's {len(own)} of {self.group.size()} ranks' parts of a "
                f"vocabulary of {vocab_size}: set {spelled('tp_size', 1)}"
            )
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return self._mean(logits, shift_labels, num_items_in_batch, ignore_index)

    def of_output(
        self,
        model_output: Mapping[str, torch.Tensor],
        labels: torch.Tensor,
        shift_labels: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Compute the loss of a causal language model's output, as a Trainer calls its label smoother.

        Args:
            model_output (`Mapping`): its `logits` are (batch, sequence, this rank's entries).
            labels (`torch.Tensor`): (batch, sequence).
            shift_labels (`bool`): whether the labels are still to be shifted.
            num_items_in_batch (`int` or `torch.Tensor`, *optional*): tokens to divide the sum by; absent: those here.

        Returns:
            The loss, a scalar.
        """
        shifted = None if shift_labels else labels
        return self(
            model_output["logits"],
            labels,
            self.vocabulary,
            num_items_in_batch,
            shift_labels=shifted,
        )

    @torch.no_grad()
    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary. Call it on every tensor parallel rank.

        Args:
            logits (`torch.Tensor`): (…, this rank's entries).

        Returns:
            (…, vocabulary), equal on every rank, without a gradient.
        """
        most = -(-self.vocabulary // self.group.size())
        own = nn.functional.pad(logits, (0, most - logits.shape[-1])).contiguous()
        parts = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(parts, own, group=self.group)
        return torch.cat(parts, dim=-1)[..., : self.vocabulary]

    def _entries(self) -> range:
        """Return the entries of the vocabulary whose logits this rank has."""
        most = -(-self.vocabulary // self.group.size())
        first = most * self.group.rank()
        return range(first, min(first + most, self.vocabulary))

    def _mean(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        items: torch.Tensor | int | None,
        ignored: int,
    ) -> torch.Tensor:
        labels = labels.reshape(-1).to(logits.device)
        counts = labels != ignored
        first = self._entries().start
        losses: torch.Tensor = _VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]  # of torch
            logits.flatten(0, -2),
            labels.clamp(min=0),
            self.epsilon,
            self.group,
            first,
            self.vocabulary,
        )
        total = torch.where(counts, losses, 0.0).sum()
        return total / (counts.sum() if items is None else torch.as_tensor(items).to(total.device))


def without_shifting(smoother: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a Trainer's label smoother for labels that were shifted before the sequences were split over ranks.

    Args:
        smoother (`callable`): the smoother for complete sequences.
    """

    def smooth(
        model_output: Any, labels: torch.Tensor, shift_labels: bool = False, **options: Any
    ) -> torch.Tensor:
        return smoother(model_output, labels, shift_labels=False, **options)

    return smooth


def keep_logits_sharded(model: PreTrainedModel, plan: dict[str, str], head: str) -> bool:
    """Change the tensor-parallel plan of an unsplit model so that its head returns this rank's logits only.

    Args:
        model (`PreTrainedModel`): the model.
        plan (`dict`): module name -> style; changed in place.
        head (`str`): name of the model's head.

    Returns:
        Whether the plan was changed. It is not where transformers shards the head in another way, or where the model
        has a loss of its own.
    """
    if plan.get(head) not in _GATHERED_STYLES or model.loss_function is not ForCausalLMLoss:
        return False
    plan |= {name: "colwise" for name in plan if name == head or name.startswith(f"{head}.")}
    return True


# --- load balancing of experts ---------------------------------------------------------------------------------------


class RouterBalanceLoss:
    """Records the router logits of this rank's layers and computes their load-balancing loss.

    Args:
        model (`PreTrainedModel`): the unsplit model, with `output_router_logits` in its config.
        gather_sequence (`callable`, *optional*): `gather_sequence(local, dim)` gathers sequences of which each rank
            has a part, since f and P are means over all tokens of a micro-batch; absent: each rank has all tokens.

    Raises:
        UnsupportedModelError: the model's routers, or the weight of the loss, cannot be found.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        gather_sequence: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
    ) -> None:
        config = model.config.get_text_config()
        # No public way to learn which module's output the model reports as router logits. test_parallel.py::
        # test_families_and_the_load_balancing_of_experts fails when it moves.
        recorders = (
            getattr(module, "_can_record_outputs", None) or {} for module in model.modules()
        )
        recorder = next(
            (found["router_logits"] for found in recorders if "router_logits" in found), None
        )
        experts: int | None = getattr(config, "num_local_experts", None) or getattr(
            config, "num_experts", None
        )
        coefficient: float | None = getattr(config, "router_aux_loss_coef", None)
        if (
            recorder is None
            or not hasattr(recorder, "target_class")
            or experts is None
            or coefficient is None
        ):
            raise UnsupportedModelError(
                f"output_router_logits is true: the load-balancing loss of {config.model_type} is not supported; set "
                "it to false in the model's config"
            )
        self._recorder: Any = recorder
        self._experts = experts
        self._coefficient = coefficient
        self._top_k = config.num_experts_per_tok
        self._layers = sum(isinstance(m, recorder.target_class) for m in model.modules())
        self._recorded = threading.local()  # another thread may recompute activations meanwhile
        self._gather_sequence = gather_sequence
        self.micro_batches = 1
        """Micro-batches of the step that contain labels."""
        self.has_added_rows = False
        """Whether some of them have rows that were added because others have more."""

    @staticmethod
    def is_enabled(model: PreTrainedModel) -> bool:
        """Return whether the model's config asks for the load-balancing loss."""
        return bool(getattr(model.config.get_text_config(), "output_router_logits", False))

    def watch(self, stage: nn.Module) -> None:
        """Register hooks that record the router logits of the layers in `stage` during a forward."""
        for module in stage.modules():
            if isinstance(module, self._recorder.target_class):
                module.register_forward_hook(self._record)

    def _record(self, module: nn.Module, args: Any, output: Any) -> None:
        logits = getattr(self._recorded, "logits", None)
        if logits is not None:  # None while activations are recomputed
            logits.append(output[self._recorder.index] if isinstance(output, tuple) else output)

    def start_forward(self) -> None:
        """Start recording; to be called before a stage's forward."""
        self._recorded.logits = []

    def finish_forward(
        self,
        attention_mask: torch.Tensor | None,
        not_padding: torch.Tensor | None,
        labels: torch.Tensor | None,
        batch: int,
    ) -> torch.Tensor:
        """Stop recording and compute the stage's share of the loss for the micro-batch that has just passed it.

        Args:
            attention_mask (`torch.Tensor`, *optional*): (batch, sequence), the padding mask.
            not_padding (`torch.Tensor`, *optional*): (batch, this rank's part of the sequence), false in all of an
                added row.
            labels (`torch.Tensor`, *optional*): (batch, sequence).
            batch (`int`): sequences of the micro-batch.

        Returns:
            A scalar; 0 where all labels are ignored.
        """
        recorded: list[torch.Tensor] = self._recorded.logits
        self._recorded.logits = None
        if self.has_added_rows and not_padding is not None:
            attention_mask = self._without_added_rows(attention_mask, not_padding)
        if self._gather_sequence is not None:
            recorded = [
                self._gather_sequence(r.reshape(batch, -1, r.shape[-1]), 1).flatten(0, 1)
                for r in recorded
            ]
        losses = [
            torch.as_tensor(
                load_balancing_loss_func((r,), self._experts, self._top_k, attention_mask)
            )
            for r in recorded
        ]
        if not losses:
            return torch.zeros(())
        share = self._coefficient / (self._layers * self.micro_batches)
        has_labels = (labels != IGNORED_LABEL).any() if labels is not None else 1.0
        return torch.stack(losses).sum() * share * has_labels

    def _without_added_rows(
        self, attention_mask: torch.Tensor | None, not_padding: torch.Tensor
    ) -> torch.Tensor:
        """Return a mask that is 0 in rows without a token, unless all are: a micro-batch that only fills the schedule,
        whose loss does not count, but would be NaN."""
        if self._gather_sequence is not None:
            not_padding = self._gather_sequence(not_padding.to(torch.uint8), 1).bool()
        if attention_mask is None:
            attention_mask = torch.ones_like(not_padding, dtype=torch.int64)
        rows = not_padding.any(dim=1, keepdim=True)
        return attention_mask * (rows | ~rows.any())


class AttachLoss(torch.autograd.Function):
    """The identity on hidden states, which also starts a loss's backward pass: the loss gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """Return a copy of `hidden`: schedules detach a stage's output in place, which a view does not allow.

        Args:
            ctx: torch's context of the function.
            hidden (`torch.Tensor`): (rows, sequence, hidden).
            loss (`torch.Tensor`): a scalar.
        """
        ctx.dtype = loss.dtype
        ctx.device = loss.device
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient of `hidden` unchanged, and 1 as the gradient of the loss.

        Args:
            ctx: torch's context of the function.
            gradients (`torch.Tensor`): one, the gradient of the copy, (rows, sequence, hidden).
        """
        return gradients[0], torch.ones((), dtype=ctx.dtype, device=ctx.device)
