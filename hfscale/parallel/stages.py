"""How many stages a pipeline has, and which rank holds which; the schedules' arithmetic is in
`hfscale.facts.schedules`."""

from dataclasses import dataclass

from hfscale.core.spelling import spelled
from hfscale.errors import LayoutError, ParameterError
from hfscale.facts.schedules import (
    PAIRED_PASSES,
    SCHEDULES,
    bubble_fraction,
    in_flight,
    rank_of_stage,
    supports,
)


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The number of pipeline stages, and which rank holds which.

    Raises:
        ParameterError: the schedule is unknown, or does not support this number of stages per rank.
    """

    schedule: str = "1F1B"
    """A name in `hfscale.facts.schedules.SCHEDULES`."""
    pp: int = 1
    """Pipeline ranks."""
    virtual_stages: int | None = None
    """Stages per rank; absent: 1, or 2 where the schedule has several per rank."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ParameterError(
                "pipeline_schedule", self.schedule, f"use one of {', '.join(SCHEDULES)}"
            )
        asked = self.virtual_stages
        if asked is None:
            return
        placement = SCHEDULES[self.schedule]
        if asked < 1 or (placement == "line" and asked != 1) or (placement == "v" and asked != 2):
            has = {"line": "one stage", "v": "two stages", "loop": "one or more stages"}[placement]
            fix = (
                f"use {spelled('pipeline_schedule', 'Interleaved1F1B')}"
                if placement == "line"
                else f"leave {spelled('virtual_stages')} out"
            )
            raise ParameterError(
                "virtual_stages", asked, f"{self.schedule} has {has} per rank; {fix}"
            )

    @property
    def per_rank(self) -> int:
        """Stages that each rank holds."""
        return 1 if SCHEDULES[self.schedule] == "line" or self.pp == 1 else self.virtual_stages or 2

    @property
    def stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self.pp * self.per_rank

    @property
    def pairs_passes(self) -> bool:
        """Whether the schedule pairs forward passes with backward passes."""
        return self.pp > 1 and self.schedule in PAIRED_PASSES

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that holds a stage, both counted from 0."""
        return rank_of_stage(self.schedule, stage, self.pp)

    def stages_of(self, rank: int) -> list[int]:
        """Return the numbers of the stages that a pipeline rank holds, from 0, in ascending order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def supports(self, micro_batches: int) -> bool:
        """Return whether the schedule supports this number of micro-batches per step."""
        return supports(
            self.schedule, pp=self.pp, stages_per_rank=self.per_rank, micro_batches=micro_batches
        )

    def micro_batches_for(self, wanted: int) -> int:
        """Return the smallest number of micro-batches, at least `wanted`, that the schedule supports."""
        return next(
            number
            for number in range(wanted, wanted + 4 * self.stages + 1)
            if self.supports(number)
        )

    def why_not(self, micro_batches: int) -> str | None:
        """Return why the schedule does not run with a number of micro-batches per step; None where it does.

        Args:
            micro_batches (`int`): micro-batches per step.
        """
        if self.supports(micro_batches):
            return None
        return (
            f"{self.schedule} on {self.pp} pipeline ranks runs with {self._nearest(micro_batches)} micro-batches, not "
            f"with {micro_batches}"
        )

    def _nearest(self, micro_batches: int) -> int:
        """Return the number of micro-batches next to the given one that the schedule supports."""
        above = self.micro_batches_for(micro_batches)
        below = next(
            (number for number in range(micro_batches - 1, 0, -1) if self.supports(number)), above
        )
        return min(below, above, key=lambda number: abs(number - micro_batches))

    def check_micro_batches(self, micro_batches: int) -> None:
        """Check that the schedule supports a number of micro-batches per step.

        Args:
            micro_batches (`int`): micro-batches per step, which are the `gradient_accumulation_steps`.

        Raises:
            LayoutError: the schedule does not support it; the message gives the nearest number that it supports.
        """
        reason = self.why_not(micro_batches)
        if reason is not None:
            nearest = self._nearest(micro_batches)
            raise LayoutError(
                f"{spelled('gradient_accumulation_steps')} is {micro_batches}: {reason}; set "
                f"{spelled('gradient_accumulation_steps', nearest)}"
            )

    def forward_ticks(self, micro_batches: int) -> list[list[tuple[int, int]]]:
        """Divide the forward passes of an evaluation into ticks, in each of which a rank computes at most one.

        A rank takes all micro-batches through one of its stages before it begins with its next one. What is computed
        in a tick can be sent and received right after it, by sender and receiver in one batch: so all ranks have the
        same order of transfers, and none can wait for another in a circle.

        Args:
            micro_batches (`int`): number of micro-batches, also one that the schedule does not support.

        Returns:
            For each tick the passes that run in it, as (stage, micro-batch), both counted from 0.
        """
        tick_of: dict[tuple[int, int], int] = {}
        free_from = [0] * self.pp  # by rank
        for stage in range(self.stages):
            rank = self.rank_of(stage)
            for number in range(micro_batches):
                after_previous_stage = tick_of[stage - 1, number] + 1 if stage else 0
                tick_of[stage, number] = max(free_from[rank], after_previous_stage)
                free_from[rank] = tick_of[stage, number] + 1
        ticks: list[list[tuple[int, int]]] = [[] for _ in range(max(free_from))]
        for forward_pass, tick in tick_of.items():
            ticks[tick].append(forward_pass)
        return ticks

    def in_flight(self, rank: int, micro_batches: int) -> float:
        """Return the number of micro-batches whose activations a pipeline rank holds at once.

        Args:
            rank (`int`): the pipeline rank, from 0.
            micro_batches (`int`): micro-batches per step.

        Returns:
            The number, counted in the rank's share of the layers: a micro-batch in one of its v stages counts 1/v.
        """
        return in_flight(
            self.schedule,
            pp=self.pp,
            stages_per_rank=self.per_rank,
            micro_batches=micro_batches,
            rank=rank,
        )

    def bubble_fraction(self, micro_batches: int) -> float:
        """Return the share of the schedule's time in which a rank idles, from 0 to 1.

        Stages are taken as equally fast, a backward pass as twice as long as a forward pass, and communication as
        free.

        Args:
            micro_batches (`int`): micro-batches per step.
        """
        return bubble_fraction(
            self.schedule, pp=self.pp, stages_per_rank=self.per_rank, micro_batches=micro_batches
        )
