"""The global batches of a schedule that `plan` and `estimate` compute with."""

from hfscale.core.spelling import spelled
from hfscale.errors import UsageError
from hfscale.facts.batch_schedule import BatchSchedule, parse_batch_schedule


def planned_schedule(text: str, *, seq_len: int, global_batch: int | None) -> BatchSchedule:
    """Return the schedule that is written, with thresholds in sequences.

    Args:
        text (`str`): the schedule, such as `256@0,512@1B`.
        seq_len (`int`): tokens per sequence.
        global_batch (`int`, *optional*): the global batch that is given too.

    Raises:
        UsageError: the batches follow the training, or a global batch is given too.
        ParameterError: the schedule cannot be read, or two thresholds are the same sequence.
    """
    name = spelled("batch_schedule", text)
    schedule = parse_batch_schedule(text)
    if schedule.is_measured:
        raise UsageError(
            f"{name}: the batches are not known before the training; plan a schedule in tokens"
        )
    if global_batch is not None:
        raise UsageError(f"{name} and {spelled('global_batch', global_batch)}: give one of them")
    return schedule.in_samples(seq_len)
