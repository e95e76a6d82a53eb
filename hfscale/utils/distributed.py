"""The rank of this process and the number of processes. `hfscale.utils.collectives` exchanges values between them."""

import torch.distributed as dist


def is_distributed() -> bool:
    """Return whether a default process group of more than one process exists."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Return the global rank; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1
