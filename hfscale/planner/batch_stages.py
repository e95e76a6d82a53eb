"""The global batches of a schedule that `plan` and `estimate` compute with."""

from dataclasses import replace

from hfscale.core.spelling import spelled
from hfscale.errors import UsageError
from hfscale.facts.batch_schedule import BatchSchedule, parse_batch_schedule
from hfscale.planner.job import Job


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


def why_not_piped(job: Job, schedule: BatchSchedule) -> str | None:
    """Explain why the pipeline of a job does not run with a batch of a schedule; None where it runs with each.

    Args:
        job (`Job`): the run.
        schedule (`BatchSchedule`): its global batches.
    """
    ranks = job.layout.pp
    for size in schedule.sizes:
        of_size = replace(job, global_batch=size)
        micro_batches = of_size.micro_batches
        if job.schedule_runs(micro_batches):
            continue
        name = spelled("batch_schedule")
        counted = f"{name}: {size} sequences are {micro_batches} micro-batches"
        return f"{counted}, with which {job.schedule_name} on {ranks} pipeline ranks does not run"
    return None
