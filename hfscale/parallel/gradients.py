"""What stands between the last backward and the optimizer step: sums that are still due, the norm, the clip."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from hfscale.parallel.mesh import ParallelMesh
from hfscale.parallel.shards import local_tensor


@torch.no_grad()
def sum_partial_gradients(parameters: Iterable[nn.Parameter], mesh: ParallelMesh) -> None:
    """Add up, over the tensor parallel ranks, gradients of which each rank has its own heads' part.

    Once per optimizer step, after the data parallel reduction; in one message.
    """
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    if mesh.layout.tp == 1 or not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=mesh.tp_group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


class TiedWeight:
    """A weight that the first stage uses as embedding and the last as head, each in a copy of its own.

    Both copies begin equal, and take the same step from the same gradient, the sum of both: so they stay one weight.

    Args:
        embedding (`nn.Parameter`, *optional*): this rank's copy as embedding, where it holds the first stage.
        head (`nn.Parameter`, *optional*): this rank's copy as head, where it holds the last stage.
        mesh (`ParallelMesh`): all ranks.
        first_rank, last_rank (`int`): pipeline ranks of the first and last stage.
    """

    def __init__(
        self,
        embedding: nn.Parameter | None,
        head: nn.Parameter | None,
        mesh: ParallelMesh,
        *,
        first_rank: int,
        last_rank: int,
    ) -> None:
        self.copies = [copy for copy in (embedding, head) if copy is not None]
        self.duplicate = head
        """The copy that counts no second time in norms and checkpoints; None on ranks without one."""
        self._group, self._last = None, None
        if first_rank != last_rank:
            self._group, self._last = _pair_group(mesh, first_rank, last_rank)

    @torch.no_grad()
    def equalize(self) -> None:
        """Give the embedding the head's values: freshly drawn, the head is what a model in one piece would keep."""
        if self._group is not None and self.copies:
            dist.broadcast(local_tensor(self.copies[0]), src=self._last, group=self._group)
        elif len(self.copies) == 2:
            local_tensor(self.copies[0]).copy_(local_tensor(self.copies[1]))

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Make the gradient of both copies their sum."""
        if not self.copies or self.copies[0].grad is None:
            return
        if self._group is not None:
            dist.all_reduce(local_tensor(self.copies[0].grad), group=self._group)
        elif len(self.copies) == 2:
            embedding, head = (local_tensor(copy.grad) for copy in self.copies)
            embedding.add_(head)
            head.copy_(embedding)


def _pair_group(mesh: ParallelMesh, first: int, last: int) -> tuple[dist.ProcessGroup | None, int | None]:
    """The group of this rank's first and last stage and the global rank of the last; every rank makes all groups."""
    ranks = mesh.device_mesh.mesh.flatten(1)  # (pp, all other axes)
    mine: tuple[dist.ProcessGroup | None, int | None] = (None, None)
    for pair in zip(ranks[first].tolist(), ranks[last].tolist(), strict=True):
        group = dist.new_group(list(pair))
        if dist.get_rank() in pair:
            mine = (group, pair[1])
    return mine


@torch.no_grad()
def align_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Lay each gradient out as its parameter is: backward returns some of them, the embedding's first, whole."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


@torch.no_grad()
def gradient_norm(parameters: Sequence[nn.Parameter], mesh: ParallelMesh) -> torch.Tensor:
    """The 2-norm of the whole model's gradient, a scalar, equal on every rank.

    Each rank adds up the squares it holds, divided by the number of ranks that hold the same ones, and one sum over
    the world gives the total: sqrt(sum_ranks sum_p ||g_p||^2 / copies_p).

    Args:
        parameters: this rank's, without second copies of tied weights.
        mesh (`ParallelMesh`): all ranks.
    """
    by_copies: Mapping[int, list[torch.Tensor]] = defaultdict(list)
    device = torch.device(mesh.device_mesh.device_type)
    for parameter in parameters:
        if parameter.grad is not None:
            by_copies[_copies(parameter.grad, mesh)].append(local_tensor(parameter.grad))
    squares = torch.zeros((), device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
    for copies, gradients in by_copies.items():
        squares += torch.nn.utils.get_total_norm(gradients).to(squares.dtype) ** 2 / copies
    dist.all_reduce(squares)
    return squares.sqrt().float()


def _copies(gradient: torch.Tensor, mesh: ParallelMesh) -> int:
    """How many ranks of one stage hold the same elements as this one."""
    layout = mesh.layout
    copies = layout.tp * layout.cp * layout.dp_shard * layout.dp_replicate
    if isinstance(gradient, DTensor):
        for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
            copies //= 1 if isinstance(placement, Replicate) else size
    return copies


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Clip: multiply every gradient by max_norm / (norm + 1e-6) where that is below 1, as
    `torch.nn.utils.clip_grad_norm_` does."""
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
