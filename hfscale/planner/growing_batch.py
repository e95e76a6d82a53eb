"""Plans of a global batch that grows: which layouts run it, and the steps and speed that follow from the schedule."""

import math
from dataclasses import dataclass, replace

from hfscale.core.spelling import spelled
from hfscale.errors import UsageError
from hfscale.facts import support
from hfscale.facts.batch_schedule import BatchSchedule, Data, count
from hfscale.planner.batch_stages import planned_schedule, why_not_piped
from hfscale.planner.estimate import Estimate, estimate_job
from hfscale.planner.job import Job
from hfscale.planner.launchable import describe
from hfscale.planner.options import PlanOptions


@dataclass(frozen=True, kw_only=True)
class GrowingPlan:
    """A schedule of the global batch, and the tokens of the training."""

    text: str
    """The schedule as it was written."""
    schedule: BatchSchedule
    """With thresholds in sequences."""
    tokens: float
    """Tokens to train on."""

    def largest(self, job: Job) -> Job:
        """Return a job with the largest batch of the schedule: one that accumulates may need more memory.

        Args:
            job (`Job`): the run.
        """
        return replace(job, global_batch=max(self.schedule.sizes))

    def why_not(self, job: Job) -> str | None:
        """Explain why a job does not run with a growing batch.

        Args:
            job (`Job`): the run.
        """
        asked = replace(describe(job), batch_schedule=True)
        reason = support.why_not(asked, "batch_schedule")
        if reason is None:
            reason = why_not_piped(job, self.schedule)
        if reason is None and not estimate_job(self.largest(job)).fits:
            return (
                f"does not fit in memory when it accumulates {max(self.schedule.sizes)} sequences"
            )
        return reason

    def steps(self, job: Job) -> int:
        """Return the optimizer steps of the training.

        Args:
            job (`Job`): the run.
        """
        units = math.ceil(self.tokens / job.seq_len / self.schedule.unit)
        data = Data(micro_batch=self.schedule.unit, per_pass=units)
        return count(self.schedule, data, passes=1).steps

    def tokens_per_s(self, estimate: Estimate) -> float:
        """Return the tokens per second of all GPUs, over the whole training.

        Args:
            estimate (`Estimate`): a layout with any global batch.
        """
        job = estimate.job
        stages = self.schedule.stages
        ends = [*(stage.after * job.seq_len for stage in stages[1:]), math.inf]
        begins = [0, *ends]
        seconds = 0.0
        for stage, begin, end in zip(stages, begins, ends, strict=False):
            tokens = min(end, self.tokens) - begin
            if tokens <= 0:
                break
            of_stage = estimate_job(replace(job, global_batch=stage.batch))
            seconds += tokens / of_stage.tokens_per_s_per_gpu / job.layout.world_size
        return self.tokens / seconds


def growing_plan(options: PlanOptions) -> GrowingPlan | None:
    """Return what the options say of a growing batch; None where the batch is constant.

    Args:
        options (`PlanOptions`): the options of a plan.

    Raises:
        UsageError: the schedule does not go with other options.
    """
    text = options.batch_schedule
    if text is None:
        return None
    name = spelled("batch_schedule", text)
    schedule = planned_schedule(text, seq_len=options.seq_len, global_batch=options.global_batch)
    if options.task not in ("text", "sft"):
        raise UsageError(
            f"{name} is planned for text and sft only, not for {spelled('task', options.task)}"
        )
    if options.tokens is None:
        raise UsageError(f"{name} needs the tokens to train on: give {spelled('tokens')}")
    return GrowingPlan(text=text, schedule=schedule, tokens=options.tokens)
