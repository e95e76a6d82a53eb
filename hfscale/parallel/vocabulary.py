"""A loss over a vocabulary that is cut over tensor parallel ranks: no rank ever holds a token's logits whole.

The cross-entropy of a token needs of the other ranks three numbers: the largest logit, the sum of exponentials, and
the logit of its label (Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3). With label smoothing a fourth: the
sum of all logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from hfscale.errors import UnsupportedModelError

_IGNORED = -100  # the label that transformers' losses skip
_GATHERED = ("colwise_gather_output", "colwise_rep")  # transformers' styles of a head whose logits every rank gets


class _CutCrossEntropy(torch.autograd.Function):
    """Losses of tokens from one rank's columns of their logits, and the gradient of those columns."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, smoothing: float, group: dist.ProcessGroup
    ) -> torch.Tensor:
        """(tokens, vocabulary / tp), (tokens,) -> (tokens,): equal on all ranks.

        With V words and smoothing e, -(1 - e) log p_label - e / V sum_j log p_j (Szegedy et al., arXiv 1512.00567,
        section 7), where -log p_j = log sum exp(z - max z) - (z_j - max z).
        """
        width, tp = logits.shape[-1], group.size()
        peak = logits.amax(dim=-1).float()
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        shifted = logits.float() - peak[:, None]
        column = labels - group.rank() * width
        is_mine = (column >= 0) & (column < width)
        column = torch.where(is_mine, column, 0)[:, None]
        of_label = torch.where(is_mine, shifted.gather(-1, column).squeeze(-1), 0.0)
        of_all = shifted.sum(dim=-1) if smoothing else torch.zeros_like(of_label)
        probabilities = shifted.exp_()
        sums = torch.stack([probabilities.sum(dim=-1), of_label, of_all])
        dist.all_reduce(sums, group=group)
        probabilities /= sums[0][:, None]
        ctx.save_for_backward(probabilities, column, is_mine)
        ctx.smoothing, ctx.vocabulary, ctx.dtype = smoothing, width * tp, logits.dtype
        return sums[0].log() - (1 - smoothing) * sums[1] - smoothing / (width * tp) * sums[2]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Of column j: p_j - e / V, less 1 - e where it is the label's."""
        probabilities, column, is_mine = ctx.saved_tensors
        of_token = gradients[0][:, None]
        gradient = (probabilities - ctx.smoothing / ctx.vocabulary) * of_token
        gradient.scatter_add_(-1, column, (ctx.smoothing - 1) * is_mine[:, None] * of_token)
        return gradient.to(ctx.dtype), None, None, None


@dataclass(frozen=True, kw_only=True)
class VocabularyLoss:
    """What a model calls for its loss, and a Trainer to smooth labels, where each rank has its part of the logits."""

    group: dist.ProcessGroup
    """The tensor parallel ranks, in the order of their parts of the vocabulary."""
    epsilon: float = 0.0
    """Label smoothing."""

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = _IGNORED,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """As transformers' `ForCausalLMLoss`, a scalar; logits are (batch, sequence, vocabulary / tp).

        Raises:
            UnsupportedModelError: the model has made logits of another width of them.
        """
        if logits.shape[-1] * self.group.size() != vocab_size:
            raise UnsupportedModelError(
                f"{logits.shape[-1]} logits on each of {self.group.size()} ranks are not a vocabulary of "
                f"{vocab_size}: set --tp_size 1"
            )
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return self._mean(logits, shift_labels, num_items_in_batch, ignore_index)

    def smoother(self, epsilon: float) -> "VocabularySmoother":
        """The same with smoothed labels, to be called as a Trainer calls its own."""
        return VocabularySmoother(loss=replace(self, epsilon=epsilon))

    def _mean(
        self, logits: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | int | None, ignored: int
    ) -> torch.Tensor:
        labels = labels.reshape(-1).to(logits.device)
        counts = labels != ignored
        losses = _CutCrossEntropy.apply(logits.flatten(0, -2), labels.clamp(min=0), self.epsilon, self.group)
        total = torch.where(counts, losses, 0.0).sum()
        return total / (counts.sum() if items is None else torch.as_tensor(items).to(total.device))


@dataclass(frozen=True, kw_only=True)
class VocabularySmoother:
    """What a Trainer calls with `label_smoothing_factor`, in place of transformers' `LabelSmoother`."""

    loss: VocabularyLoss
    """With its `epsilon`."""

    def __call__(
        self,
        model_output: Mapping[str, torch.Tensor],
        labels: torch.Tensor,
        shift_labels: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """The smoothed loss, a scalar, of a causal language model's output."""
        logits = model_output["logits"]
        vocabulary = logits.shape[-1] * self.loss.group.size()
        return self.loss(logits, labels, vocabulary, num_items_in_batch, shift_labels=None if shift_labels else labels)


def leave_logits_cut(model: PreTrainedModel, plan: dict[str, str], head: str) -> bool:
    """Change a whole model's tensor-parallel `plan` so that its head hands on each rank's part of the logits.

    Returns:
        Whether it could: not where transformers cuts the head another way or the model has a loss of its own.
    """
    if plan.get(head) not in _GATHERED or model.loss_function is not ForCausalLMLoss:
        return False
    plan |= {name: "colwise" for name in plan if name == head or name.startswith(f"{head}.")}
    return True
