"""The options of `CommHealthCallback`."""

from dataclasses import dataclass
from typing import Literal

from hfscale.core.options import Options, option, positive, positive_or_none


@dataclass(frozen=True, kw_only=True)
class HealthOptions(Options):
    """The options of `CommHealthCallback`."""

    preflight: bool = option(True, help="Ranks check each other before the first step")
    hang_after_s: float | None = option(
        60.0,
        check=positive_or_none,
        help="Seconds of silence that count as a hang, or ten steps where that is longer",
        details="None: hangs are not watched for. In the first three steps, and while a rank compiles, saves, "
        "evaluates, generates or computes rewards, it is 30 minutes without any progress, or `10 * hang_after_s` "
        "where that is longer.",
    )
    on_hang: Literal["report", "abort"] = option(
        "report",
        help="What happens after the report of a hang: nothing, or the processes end, so that the launcher restarts "
        "them",
        details="Under `hfscale run` it is `abort`.",
    )
    stragglers: bool = option(True, help="Each rank's own work is timed, which shows slow ranks")
    on_bad_training: Literal["warn", "stop"] = option(
        "warn",
        help="What happens at a NaN or infinite loss, where replicas differ and where a replay gives another result: "
        "a warning, or the run ends",
        details="With `stop`, what was saved after the last good log is set aside; after a replay, what was saved "
        "after the last one without a difference. Under `hfscale run` a replay with another result always ends the "
        "launch, and the next one resumes from before.",
    )
    replay_every_steps: int | None = option(
        None,
        check=positive,
        help="Steps from one replay to the next, which finds GPUs that compute wrongly",
        unset="nothing is replayed",
        details="It works under any strategy and takes as long as a micro-batch, under `ParallelTrainer` as long as "
        "a step.",
    )
    skip_bad_batches: int | None = option(
        None,
        check=positive,
        unit="batches",
        help="How many bad batches the run may leave out: those of a step whose loss or gradient norm is NaN, "
        "infinite or far above those before",
        unset="none is looked for",
        details="Such a step is undone before the optimizer steps; with one more bad batch the run ends. Each step "
        "then waits for the GPU.",
    )
    gc_every_steps: int | None = option(
        None,
        check=positive,
        help="Steps from one collection of Python's garbage to the next, which all ranks make in the same step",
        unset="Python collects by itself, each rank in other steps",
        details="Each of them is a pause that the other ranks wait for. Of twenty collections one is complete; the "
        "others leave out objects that have survived two.",
    )
