"""The rank of this process and the number of processes. `hfscale.core.collectives` exchanges values between them."""

import torch
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


def last_barrier() -> None:
    """Wait for all ranks of the default process group, before it is destroyed.

    Without it a rank that ends early can abort the last collective of the others (SIGABRT). With NCCL the device of
    this thread is used, which must be the rank's own: torch opens a context on it, and warns if it is not named.
    """
    dist.barrier(device_ids=[torch.cuda.current_device()] if "nccl" in dist.get_backend() else None)
