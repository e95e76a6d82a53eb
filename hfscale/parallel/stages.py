"""How many stages a pipeline has, and which rank holds which; the schedules' arithmetic is in
`hfscale.facts.schedules`."""

from dataclasses import dataclass

from hfscale.errors import LayoutError, UsageError
from hfscale.facts.schedules import SCHEDULES, bubble_fraction, in_flight, rank_of_stage, supports


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The number of pipeline stages, and which rank holds which.

    Raises:
        `UsageError`: The schedule is unknown, or does not take so many stages per rank.
    """

    schedule: str = "1F1B"
    """A name in `hfscale.facts.schedules.SCHEDULES`."""
    pp: int = 1
    """Pipeline ranks."""
    virtual_stages: int | None = None
    """Stages per rank; by default as few as the schedule takes."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise UsageError(f"--pipeline_schedule is {self.schedule}: use one of {', '.join(SCHEDULES)}")
        asked = self.virtual_stages
        if asked is None:
            return
        placement = SCHEDULES[self.schedule]
        if asked < 1 or (placement == "line" and asked != 1) or (placement == "v" and asked != 2):
            has = {"line": "one stage", "v": "two stages", "loop": "one or more stages"}[placement]
            fix = "use --pipeline_schedule Interleaved1F1B" if placement == "line" else "leave --virtual_stages out"
            raise UsageError(f"--virtual_stages is {asked}, but {self.schedule} has {has} per rank: {fix}")

    @property
    def per_rank(self) -> int:
        """Stages that each rank holds."""
        return 1 if SCHEDULES[self.schedule] == "line" or self.pp == 1 else self.virtual_stages or 2

    @property
    def stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self.pp * self.per_rank

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        return rank_of_stage(self.schedule, stage, self.pp)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a pipeline rank holds, in ascending order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def supports(self, micro_batches: int) -> bool:
        """Whether the schedule runs with so many micro-batches per step."""
        return supports(self.schedule, pp=self.pp, stages_per_rank=self.per_rank, micro_batches=micro_batches)

    def micro_batches_for(self, wanted: int) -> int:
        """The least number of micro-batches, at least `wanted`, that the schedule supports."""
        return next(number for number in range(wanted, wanted + 4 * self.stages + 1) if self.supports(number))

    def check_micro_batches(self, micro_batches: int) -> None:
        """Checks that the schedule supports so many micro-batches (`gradient_accumulation_steps`) per step.

        Raises:
            `LayoutError`: It does not; the message gives the nearest number that it supports.
        """
        if self.supports(micro_batches):
            return
        above = self.micro_batches_for(micro_batches)
        below = next((number for number in range(micro_batches - 1, 0, -1) if self.supports(number)), above)
        nearest = min(below, above, key=lambda number: abs(number - micro_batches))
        raise LayoutError(
            f"--gradient_accumulation_steps is {micro_batches}: {self.schedule} on {self.pp} pipeline ranks does not "
            f"run with so many micro-batches; set --gradient_accumulation_steps {nearest}"
        )

    def in_flight(self, rank: int, micro_batches: int) -> float:
        """Micro-batches whose activations a pipeline rank holds at once, counted in its share of the layers."""
        return in_flight(
            self.schedule, pp=self.pp, stages_per_rank=self.per_rank, micro_batches=micro_batches, rank=rank
        )

    def bubble_fraction(self, micro_batches: int) -> float:
        """Share of the schedule's time that a rank idles, with a backward pass of twice the forward, equal stages and
        free communication."""
        return bubble_fraction(self.schedule, pp=self.pp, stages_per_rank=self.per_rank, micro_batches=micro_batches)
