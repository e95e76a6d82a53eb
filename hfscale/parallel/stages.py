"""How many stages a pipeline has, which rank holds which, and what a schedule makes of them.

| name | stages per rank | source |
|---|---|---|
| GPipe | 1 | Huang et al., arXiv 1811.06965 |
| 1F1B | 1 | Narayanan et al., arXiv 2006.09503 |
| Interleaved1F1B | `virtual_stages` | Narayanan et al., arXiv 2104.04473 |
| InterleavedZeroBubble | `virtual_stages` | ZB1P of Qi et al., arXiv 2401.10241 |
| ZBV | 2, in a V | section 6 of the same |
| DualPipeV | 2, in a V | DeepSeek-V3, arXiv 2412.19437; V-shaped by Qi et al. |
"""

from dataclasses import dataclass

from hfscale.errors import LayoutError, UsageError

SHAPES = {
    "GPipe": "line",
    "1F1B": "line",
    "Interleaved1F1B": "loop",
    "InterleavedZeroBubble": "loop",
    "ZBV": "v",
    "DualPipeV": "v",
}
"""Every schedule by its name in `--pipeline_schedule`, and how it deals stages to ranks: `line`: one each; `loop`:
several, dealt round; `v`: two, there and back."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """How many stages there are, and which rank holds which.

    Raises:
        UsageError: a schedule of another name, or another number of stages per rank than it takes.
    """

    schedule: str = "1F1B"
    """One of `SHAPES`."""
    pp: int = 1
    """Pipeline ranks."""
    virtual_stages: int | None = None
    """Stages per rank; absent: as few as the schedule takes."""

    def __post_init__(self) -> None:
        if self.schedule not in SHAPES:
            raise UsageError(f"--pipeline_schedule {self.schedule} is none of {', '.join(SHAPES)}")
        shape, asked = SHAPES[self.schedule], self.virtual_stages
        if asked is not None and ((shape == "line" and asked != 1) or (shape == "v" and asked != 2) or asked < 1):
            mend = "use Interleaved1F1B for several" if shape == "line" else "leave it out"
            supports = {"line": "one stage", "v": "two stages", "loop": "one or more stages"}[shape]
            raise UsageError(f"--virtual_stages {asked}: {self.schedule} has {supports} per rank; {mend}")

    @property
    def per_rank(self) -> int:
        """Stages that each rank holds."""
        return 1 if SHAPES[self.schedule] == "line" or self.pp == 1 else self.virtual_stages or 2

    @property
    def stages(self) -> int:
        """Stages in all."""
        return self.pp * self.per_rank

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        if SHAPES[self.schedule] == "v" and stage >= self.pp:
            return self.stages - 1 - stage
        return stage % self.pp

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a pipeline rank holds, in their order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def supports(self, micro_batches: int) -> bool:
        """Whether the schedule can run so many micro-batches in a step."""
        if self.pp == 1:
            return True
        if self.schedule == "DualPipeV":
            return micro_batches >= self.stages
        rounds = max(1, micro_batches // self.pp) if SHAPES[self.schedule] == "loop" else 1
        return micro_batches >= self.pp and micro_batches % rounds == 0

    def micro_batches_for(self, wanted: int) -> int:
        """The least number of micro-batches from `wanted` on that the schedule can run."""
        return next(number for number in range(wanted, wanted + 4 * self.stages + 1) if self.supports(number))

    def check_micro_batches(self, micro_batches: int) -> None:
        """Make sure that the schedule can run so many micro-batches (`gradient_accumulation_steps`) a step.

        Raises:
            LayoutError: it cannot; the message names the nearest number that it can.
        """
        if self.supports(micro_batches):
            return
        above = self.micro_batches_for(micro_batches)
        below = next((number for number in range(micro_batches - 1, 0, -1) if self.supports(number)), above)
        nearest = min(below, above, key=lambda number: abs(number - micro_batches))
        raise LayoutError(
            f"{micro_batches} micro-batches per step do not keep {self.schedule} on {self.pp} pipeline ranks going: "
            f"set --gradient_accumulation_steps {nearest}"
        )

    def in_flight(self, rank: int, micro_batches: int) -> float:
        """Micro-batches whose activations a pipeline rank holds at once, counted in its share of the layers.

        GPipe: all; 1F1B: as many as ranks from there on; interleaved: p(1 + (p-1)/(pv)) at most; ZBV p; DualPipeV
        p + 1/2. Sources: the table of this module.
        """
        if self.pp == 1:
            return 1.0
        in_flight = {
            "GPipe": micro_batches,
            "1F1B": self.pp - rank,
            "Interleaved1F1B": self.pp + (self.pp - 1) / self.per_rank,
            "InterleavedZeroBubble": self.pp + (self.pp - 1) / self.per_rank,
            "ZBV": self.pp,
            "DualPipeV": self.pp + 0.5,
        }[self.schedule]
        return min(float(in_flight), float(micro_batches))

    def idle_fraction(self, micro_batches: int) -> float:
        """Share of the schedule's time that a rank waits, by the schedule's formula with a backward of twice the
        forward (input and weight gradients alike), equal stages and free communication.

        Idle time over p ranks, m micro-batches, v stages per rank, with F = I = W = 1 and B = 2: (p-1)(F+B) for GPipe
        and 1F1B, by v for the interleaved ones, (p-1)(F+I-W)/v for InterleavedZeroBubble, (p-1)max(F,I)/2 for ZBV
        and (p-1)/2 for DualPipeV; work m(F+B). Sources: the table of this module.
        """
        ranks, stages = self.pp - 1, self.per_rank
        idle = {
            "GPipe": ranks * 3.0,
            "1F1B": ranks * 3.0,
            "Interleaved1F1B": ranks * 3.0 / stages,
            "InterleavedZeroBubble": ranks * 1.0 / stages,
            "ZBV": ranks * 0.5,
            "DualPipeV": ranks * 0.5,
        }[self.schedule]
        return idle / (idle + 3.0 * micro_batches)
