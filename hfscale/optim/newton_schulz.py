"""Orthogonal factors of matrices that one rank holds, or that several ranks hold rows of.

The orthogonal factor of a matrix G = U S V^T is U V^T. Newton-Schulz iterations approximate it with matrix products
alone; they need the whole matrix. Ranks that hold rows of several matrices exchange them, so that each rank gets a
whole matrix, computes its factor, and sends the rows back: each factor is computed once, and not on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial whose slope at zero is largest: K. Jordan et al., Muon: An optimizer for hidden layers in
neural networks, 2024, https://kellerjordan.github.io/posts/muon/. The singular values of the result lie between 0.7
and 1.2 and are not exactly 1, which that text found to be harmless."""
EPSILON = 1e-7
"""Smallest norm by which a matrix is divided, as in `torch.optim.Muon`."""


def orthogonal_factor(matrix: Tensor, *, iterations: int, dtype: torch.dtype) -> Tensor:
    """Return the approximate orthogonal factor of a matrix, or of each one of a stack.

    Args:
        matrix (`Tensor`): shape (rows, columns), or (stack, rows, columns).
        iterations (`int`): Newton-Schulz iterations.
        dtype (`torch.dtype`): the format in which they are computed, which is that of the result.
    """
    a, b, c = COEFFICIENTS
    factor = matrix.to(dtype)
    is_tall = factor.size(-2) > factor.size(-1)
    if is_tall:
        factor = factor.mT
    factor = factor / factor.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    multiply_add = torch.baddbmm if factor.ndim == 3 else torch.addmm
    for _ in range(iterations):
        gram = factor @ factor.mT
        polynomial = multiply_add(gram, gram, gram, beta=b, alpha=c)
        factor = multiply_add(factor, polynomial, factor, beta=a)
    return factor.mT if is_tall else factor


def orthogonal_factors(
    matrices: Sequence[Tensor], *, iterations: int, dtype: torch.dtype
) -> list[Tensor]:
    """Return this rank's part of the orthogonal factor of each matrix. Every rank calls it with the same matrices.

    Args:
        matrices (`Sequence[Tensor]`): plain tensors, or `DTensor`s of any placement without partial sums. Those of
            three dimensions are stacks of matrices, as transformers keeps the weights of experts.
        iterations (`int`): Newton-Schulz iterations.
        dtype (`torch.dtype`): the format in which they are computed.

    Returns:
        `list[Tensor]`: plain tensors of `dtype`, each with the shape of the matrix's part on this rank.
    """
    factors: dict[int, Tensor] = {}
    exchanged: dict[tuple[DeviceMesh, int], dict[int, DTensor]] = {}
    for index, matrix in enumerate(matrices):
        if not isinstance(matrix, DTensor) or _is_whole(matrix):
            factors[index] = orthogonal_factor(_local(matrix), iterations=iterations, dtype=dtype)
        elif (axis := _axis_of_rows(matrix)) is not None:
            exchanged.setdefault((matrix.device_mesh, axis), {})[index] = matrix
        else:
            factors[index] = _gathered_factor(matrix, iterations=iterations, dtype=dtype)
    for (mesh, axis), found in exchanged.items():
        exchange = _RowExchange(
            group=mesh.get_group(axis), ranks=mesh.size(axis), rank=mesh.get_local_rank(axis)
        )
        indices = list(found)
        for begin in range(0, len(indices), exchange.ranks):
            chunk = indices[begin : begin + exchange.ranks]
            parts = exchange.factors(
                [found[index] for index in chunk], iterations=iterations, dtype=dtype
            )
            factors.update(zip(chunk, parts, strict=True))
    return [factors[index] for index in range(len(matrices))]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded_axes(matrix: DTensor) -> list[int]:
    """Return the axes of the mesh over which a tensor is split."""
    return [
        axis
        for axis, placement in enumerate(matrix.placements)
        if not isinstance(placement, Replicate) and matrix.device_mesh.size(axis) > 1
    ]


def _is_whole(matrix: DTensor) -> bool:
    """Return whether this rank holds whole matrices: the complete tensor, or some of the matrices of a stack."""
    return all(
        matrix.ndim == 3 and _is_by_stack(matrix.placements[axis]) for axis in _sharded_axes(matrix)
    )


def _is_by_stack(placement: Placement) -> bool:
    """Return whether each rank has some matrices of a stack; FSDP2 makes strided shards of what expert parallelism has
    sharded before."""
    return getattr(placement, "dim", None) == 0


def _axis_of_rows(matrix: DTensor) -> int | None:
    """Return the axis of the mesh whose ranks hold consecutive rows of a matrix; None for any other placement."""
    axes = _sharded_axes(matrix)
    if matrix.ndim != 2 or len(axes) != 1 or matrix.placements[axes[0]] != Shard(0):
        return None
    return axes[0]


def _gathered_factor(matrix: DTensor, *, iterations: int, dtype: torch.dtype) -> Tensor:
    """Gather a matrix on every rank, which computes its factor and keeps its part."""
    mesh = matrix.device_mesh
    full = cast(DTensor, matrix.to(dtype)).full_tensor()
    factor = orthogonal_factor(full, iterations=iterations, dtype=dtype)
    replicated = DTensor.from_local(factor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=matrix.placements).to_local()


@dataclass(frozen=True, kw_only=True)
class _RowExchange:
    """Ranks that hold consecutive rows of the same matrices, as FSDP2 splits parameters."""

    group: dist.ProcessGroup
    ranks: int
    rank: int

    def factors(
        self, matrices: Sequence[DTensor], *, iterations: int, dtype: torch.dtype
    ) -> list[Tensor]:
        """Return this rank's rows of the factor of each matrix; there are at most as many matrices as ranks.

        The ranks beyond the number of matrices send their rows and compute nothing.
        """
        rows = [self._rows(matrix.size(0)) for matrix in matrices]
        columns = [matrix.size(1) for matrix in matrices]
        own = [rows[index][self.rank] * columns[index] for index in range(len(matrices))]
        padding = [0] * (self.ranks - len(matrices))
        here = self.rank if self.rank < len(matrices) else None
        incoming = (
            [0] * self.ranks if here is None else [count * columns[here] for count in rows[here]]
        )

        parts = torch.cat([_local(matrix).to(dtype).flatten() for matrix in matrices])
        whole = parts.new_empty(sum(incoming))
        dist.all_to_all_single(whole, parts, incoming, [*own, *padding], group=self.group)
        if here is not None:
            matrix = whole.view(matrices[here].shape)
            whole = orthogonal_factor(matrix, iterations=iterations, dtype=dtype).flatten()
        dist.all_to_all_single(parts, whole, [*own, *padding], incoming, group=self.group)
        return [
            part.view(rows[index][self.rank], columns[index])
            for index, part in enumerate(torch.split(parts, own))
        ]

    def _rows(self, total: int) -> list[int]:
        """Return the number of rows that each rank holds of a matrix of `total` rows, as `Shard` splits them."""
        full = -(-total // self.ranks)
        return [max(0, min(full, total - full * rank)) for rank in range(self.ranks)]
