"""How a global batch is divided among ranks and micro-batches."""


def split_batch(global_batch_size: int, ranks: int, per_device: int) -> tuple[int, int] | None:
    """Divide a global batch into a per-device batch and gradient-accumulation steps.

    Args:
        global_batch_size (`int`): sequences per optimizer step.
        ranks (`int`): data-parallel ranks.
        per_device (`int`): the largest per-device batch, in sequences.

    Returns:
        `tuple[int, int] | None`: The largest per-device batch that fits and the accumulation steps, or None if the
            global batch is not a multiple of `ranks`.
    """
    per_rank, left_over = divmod(global_batch_size, ranks)
    if left_over or per_rank == 0:
        return None
    while per_rank % per_device:
        per_device -= 1
    return per_device, per_rank // per_device
