"""What happens to gradients between the last backward pass and the optimizer step: sums, norm and clipping."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from hfscale.parallel.mesh import ParallelMesh, local_tensor


@torch.no_grad()
def align_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give each gradient the placements of its parameter.

    The backward pass returns some gradients replicated, such as the embedding's.

    Args:
        parameters (`Iterable[nn.Parameter]`): this rank's parameters; their `grad` is replaced.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor):
            continue
        assert isinstance(parameter, DTensor)  # torch gives a plain parameter no sharded gradient
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


@torch.no_grad()
def sum_partial_gradients(parameters: Iterable[nn.Parameter], mesh: ParallelMesh) -> None:
    """Sum, over the tensor parallel ranks, gradients of which each rank has a part, with a single all-reduce.

    To be called once per optimizer step, after the data parallel reduction.

    Args:
        parameters (`Iterable[nn.Parameter]`): `ParallelizedModel.partial_gradients`; their gradients are
            changed in place.
        mesh (`ParallelMesh`): all ranks.
    """
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    if mesh.layout.tp == 1 or not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=mesh.tp_group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


class TiedWeight:
    """A weight that the first stage uses as embedding and the last as head, with a copy on each of the two.

    Both copies start equal and take the same optimizer steps from the same gradient, the sum of both, so they stay
    equal. Make it on every rank, since every rank takes part in making its process groups.

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
        """The copy that norms and checkpoints leave out; None on ranks without one."""
        self._group: dist.ProcessGroup | None = None
        self._head_rank: int | None = None
        if first_rank != last_rank:
            self._group, self._head_rank = _pair_group(mesh, first_rank, last_rank)

    @torch.no_grad()
    def equalize(self) -> None:
        """Copy the head's values to the embedding: an unsplit model with newly drawn weights keeps the head's."""
        if self._group is not None and self.copies:
            dist.broadcast(local_tensor(self.copies[0]), src=self._head_rank, group=self._group)
        elif len(self.copies) == 2:
            local_tensor(self.copies[0]).copy_(local_tensor(self.copies[1]))

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Set the gradient of both copies to their sum."""
        gradients = [local_tensor(copy.grad) for copy in self.copies if copy.grad is not None]
        if not gradients:
            return
        if self._group is not None:
            dist.all_reduce(gradients[0], group=self._group)
        elif len(gradients) == 2:
            embedding, head = gradients
            embedding.add_(head)
            head.copy_(embedding)


def _pair_group(
    mesh: ParallelMesh, first: int, last: int
) -> tuple[dist.ProcessGroup | None, int | None]:
    """Make the groups of corresponding ranks of the first and last stage, on every rank; return this rank's group and
    the global rank that holds its head."""
    ranks = mesh.device_mesh.mesh.flatten(1)  # (pp, all other axes)
    own: tuple[dist.ProcessGroup | None, int | None] = (None, None)
    for pair in zip(ranks[first].tolist(), ranks[last].tolist(), strict=True):
        group = dist.new_group(list(pair))
        if dist.get_rank() in pair:
            own = (group, pair[1])
    return own


@torch.no_grad()
def gradient_norm(parameters: Sequence[nn.Parameter], mesh: ParallelMesh) -> torch.Tensor:
    """Compute the 2-norm of the whole model's gradient. Call it on every rank.

    Each rank adds up the squares that it holds, divided by the number of ranks that hold the same ones, and one sum
    over the world gives the total: sqrt(sum_ranks sum_p ||g_p||^2 / copies_p).

    Args:
        parameters (`Sequence[nn.Parameter]`): this rank's parameters, without second copies of tied weights.
        mesh (`ParallelMesh`): all ranks.

    Returns:
        A scalar, equal on every rank.
    """
    by_copies: Mapping[int, list[torch.Tensor]] = defaultdict(list)
    device = torch.device(mesh.device_mesh.device_type)
    for parameter in parameters:
        if parameter.grad is not None:
            by_copies[_copies(parameter.grad, mesh)].append(local_tensor(parameter.grad))
    squares = torch.zeros(
        (), device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32
    )
    for copies, gradients in by_copies.items():
        squares += torch.nn.utils.get_total_norm(gradients).to(squares.dtype) ** 2 / copies
    dist.all_reduce(squares)
    return squares.sqrt().float()


def _copies(gradient: torch.Tensor, mesh: ParallelMesh) -> int:
    """Return the number of ranks of one stage that hold the same elements as this one."""
    layout = mesh.layout
    copies = layout.tp * layout.cp * layout.dp_shard * layout.dp_replicate
    if isinstance(gradient, DTensor):
        for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
            copies //= 1 if isinstance(placement, Replicate) else size
    return copies


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Multiply every gradient by max_norm / (norm + 1e-6) where that is below 1, as `torch.nn.utils.clip_grad_norm_`
    does.

    Args:
        parameters (`Iterable[nn.Parameter]`): this rank's parameters, with second copies of tied weights; their
            gradients are changed in place.
        norm (`torch.Tensor`): the result of `gradient_norm`, a scalar.
        max_norm (`float`): the largest norm that is not clipped.
    """
    holders = []  # plain tensors: DTensors of several meshes cannot be scaled together
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local_tensor(parameter.grad)
            holder = gradient.detach()
            holder.grad = gradient
            holders.append(holder)
    torch.nn.utils.clip_grads_with_norm_(holders, max_norm, norm)
