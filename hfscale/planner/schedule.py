"""When each pipeline rank works on which micro-batch, for drawing and for checking the bubble."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One pass of one micro-batch on one rank."""

    rank: int
    """Pipeline rank."""
    micro_batch: int
    """Which, from 0."""
    is_forward: bool
    """Forward or backward pass."""
    start: float
    """When it begins, in the units of the times given."""
    end: float
    """When it ends."""


def one_f_one_b(stages: int, micro_batches: int, *, forward: float = 1.0, backward: float = 2.0) -> list[Slot]:
    """The 1F1B schedule (Narayanan et al., PipeDream-Flush, arXiv 2006.09503): rank r first takes p - r - 1 forward
    passes, then one forward and one backward in turn, then the backward passes that are left."""
    waiting = [_order(rank, stages, micro_batches) for rank in range(stages)]
    done: dict[tuple[bool, int, int], float] = {}
    free = [0.0] * stages
    slots = []
    while any(waiting):
        for rank, queue in enumerate(waiting):
            while queue:
                is_forward, micro_batch = queue[0]
                if is_forward:
                    needs = None if rank == 0 else (True, rank - 1, micro_batch)
                else:
                    needs = (True, rank, micro_batch) if rank == stages - 1 else (False, rank + 1, micro_batch)
                if needs is not None and needs not in done:
                    break
                queue.pop(0)
                start = max(free[rank], done[needs] if needs is not None else 0.0)
                end = start + (forward if is_forward else backward)
                done[is_forward, rank, micro_batch] = free[rank] = end
                slots.append(Slot(rank=rank, micro_batch=micro_batch, is_forward=is_forward, start=start, end=end))
    return slots


def _order(rank: int, stages: int, micro_batches: int) -> list[tuple[bool, int]]:
    ahead = min(stages - rank - 1, micro_batches)
    order = [(True, number) for number in range(ahead)]
    for number in range(micro_batches):
        if number + ahead < micro_batches:
            order.append((True, number + ahead))
        order.append((False, number))
    return order
