"""Logits of an evaluation: completed on the last stage, sent to all ranks, and gathered as Trainer gathers them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hfscale.core.collectives import TRAINING
from hfscale.errors import UsageError
from hfscale.parallel.mesh import ParallelMesh
from hfscale.parallel.model import ParallelizedModel


class Predictions:
    """Collects the logits of the micro-batches of an evaluation step.

    Args:
        parallelized (`ParallelizedModel`): the model.
        mesh (`ParallelMesh`): all ranks.
        last_rank (`int`): the pipeline rank that has the last stage.
    """

    def __init__(self, parallelized: ParallelizedModel, mesh: ParallelMesh, last_rank: int) -> None:
        self._parallelized = parallelized
        self._mesh = mesh
        self._last_rank = last_rank
        self._collected: list[torch.Tensor] | None = None
        self._outputs = 0
        """Tensors that the model has returned in the place of logits alone."""

    @property
    def are_wanted(self) -> bool:
        """Whether an evaluation step is running whose logits are wanted."""
        return self._collected is not None

    @contextmanager
    def collecting(self, *, wanted: bool) -> Iterator[None]:
        """Collect the logits of the step in the `with` block.

        Args:
            wanted (`bool`): whether they are wanted; else nothing is collected.
        """
        self._collected = [] if wanted else None
        self._outputs = 0
        try:
            yield
        finally:
            self._collected = None

    def add(self, logits: Any) -> None:
        """Add what Trainer's `prediction_step` returns as the logits of a micro-batch, on the last stage.

        Args:
            logits: a tensor of (rows, this rank's part of the sequence, this rank's part of the vocabulary).
        """
        if self._collected is None:
            return
        if not isinstance(logits, torch.Tensor):
            self._outputs = len(logits)  # `take` raises it on all ranks
            return
        if self._parallelized.vocab_loss is not None:
            logits = self._parallelized.vocab_loss.gather(logits)
        if self._parallelized.context is not None:
            logits = self._parallelized.context.gather_sequence(logits, 1)
        self._collected.append(logits.detach())

    def take(self, length: int, device: torch.device) -> torch.Tensor | None:
        """Return the logits of the step on every rank; to be called on all of them, after its passes.

        Args:
            length (`int`): tokens of a sequence, without what was added to split them.
            device (`torch.device`): where the logits are to be.

        Returns:
            (rows, length, vocabulary); None where they are not wanted.

        Raises:
            UsageError: the model returns something else than logits.
        """
        if self._collected is None:
            return None
        outputs = max(TRAINING.gather("outputs that are no logits", self._outputs))
        if outputs:
            raise UsageError(
                f"predictions would have {outputs} tensors per sample, and each stage has a part of them: only logits "
                "can be predicted; give ignore_keys, or leave output_hidden_states, output_attentions and "
                "output_router_logits out of the model's config"
            )
        own = torch.cat(self._collected)[:, :length].contiguous() if self._collected else None
        if self._mesh.layout.pp == 1:
            return own
        shape = None if own is None else [*own.shape, str(own.dtype).removeprefix("torch.")]
        *sizes, dtype = next(filter(None, TRAINING.gather("shape of the predictions", shape)))
        if own is None:
            own = torch.empty(sizes, dtype=getattr(torch, dtype), device=device)
        dist.broadcast(own, group=self._mesh.pp_group, group_src=self._last_rank)
        return own


def gather_samples(tensor: torch.Tensor, mesh: ParallelMesh, samples: int | None) -> torch.Tensor:
    """Gather a tensor from the ranks that have other samples, in the order of the samples.

    Args:
        tensor (`torch.Tensor`): (this rank's samples, …), of one shape on all ranks.
        mesh (`ParallelMesh`): all ranks.
        samples (`int`, *optional*): the number of samples to return; the others fill the last batches up. Absent: all.

    Returns:
        (samples, …), equal on every rank.
    """
    # Ranks that share a sequence have the same samples and follow one another on this axis
    tensor = _gathered(tensor, mesh, "dp_shard_cp", every=mesh.layout.cp)
    return _gathered(tensor, mesh, "dp_replicate")[:samples]


def _gathered(tensor: torch.Tensor, mesh: ParallelMesh, axis: str, every: int = 1) -> torch.Tensor:
    axis_mesh = mesh.device_mesh[axis]
    if axis_mesh.size() == every:
        return tensor
    own = tensor.contiguous()
    parts = [torch.empty_like(own) for _ in range(axis_mesh.size())]
    dist.all_gather(parts, own, group=axis_mesh.get_group())
    return torch.cat(parts[::every])
