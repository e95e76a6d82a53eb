"""`ParallelTrainer` as the other packages see it: its class is in a package above them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Protocol, TypeGuard

from torch import nn

from hfscale.facts.layout import ParallelLayout
from hfscale.trainer.strategies.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch
    from transformers import Trainer

    class HasSchedule(Protocol):
        """The part of a `StagePlan` that describes a training."""

        schedule: str

        @property
        def per_rank(self) -> int: ...
        def why_not(self, micro_batches: int) -> str | None: ...

    class HasParts(Protocol):
        """The part of a `ParallelizedModel` that describes a training."""

        @property
        def model(self) -> nn.Module: ...
        @property
        def stages(self) -> Sequence[nn.Module]: ...
        @property
        def sequence_parts(self) -> int: ...
        @property
        def expert_layers(self) -> Mapping[str, int]: ...

    class HasMeshRanks(Protocol):
        """The part of a `ParallelMesh` that says what this rank holds."""

        @property
        def pp_rank(self) -> int: ...
        @property
        def tp_rank(self) -> int: ...

    class SelfShardedTrainer(Trainer):
        """A Trainer that distributes its model itself: the interface of `ParallelTrainer`. It has no code."""

        layout: ParallelLayout
        stage_plan: HasSchedule
        parallelized: HasParts
        mesh: HasMeshRanks
        parameter_counts: tuple[int, int]

        def sharded_state(self) -> dict[str, dict[str, torch.Tensor]]: ...
        def exchange_groups(self) -> None: ...
        def keeping_batches(self) -> AbstractContextManager[None]: ...
        def checkpoint_files(self) -> dict[str, bytes]: ...
        def name_in_one_process(self, name: str) -> str: ...


class Parallel(Strategy):
    """`ParallelTrainer`: tensor, pipeline, context and data parallelism (`parallel`)."""

    trainer: "SelfShardedTrainer"
    engine = "parallel_trainer"
    runs_stages = True
    steps_at_last_batch = True
    has_plain_forward = False
    sends_values = True

    @classmethod
    def name_in(cls, trainer: "Trainer") -> str | None:
        """Return `parallel` for a `ParallelTrainer`."""
        return "parallel" if is_parallel_trainer(trainer) else None

    @property
    def waits_in_layers(self) -> bool:
        """Whether ranks wait in the layers: they share matrices, sequences and stages."""
        return True

    @property
    def shares_layers(self) -> bool:
        """Whether ranks share layers, or have others than their peers."""
        return True

    def axes(self) -> dict[str, int]:
        """Return the sizes of the parallel axes."""
        return {
            axis.name: getattr(self.trainer.layout, axis.name) for axis in fields(ParallelLayout)
        }

    @property
    def schedule(self) -> str:
        """The schedule of the pipeline."""
        return self.trainer.stage_plan.schedule

    @property
    def stages_per_rank(self) -> int:
        """The number of pipeline stages that a rank has."""
        return self.trainer.stage_plan.per_rank

    def why_not_accumulated(self, micro_batches: int) -> str | None:
        """Return why the schedule of the pipeline does not run with so many micro-batches; None where it does."""
        return self.trainer.stage_plan.why_not(micro_batches)

    @property
    def splits_sequences(self) -> bool:
        """Whether the ranks of tensor parallelism split the sequences."""
        return self.trainer.parallelized.sequence_parts > 1

    def expert_ranks(self) -> int:
        """Return the number of ranks that share the experts of a layer."""
        return int(getattr(self.trainer.layout, "ep", 1))

    def stages(self) -> "Sequence[nn.Module]":
        """Return the stages of the pipeline that this rank has."""
        return self.trainer.parallelized.stages

    def staged_model(self) -> nn.Module:
        """Return the model without PEFT's wrapper."""
        return self.trainer.parallelized.model

    def expert_layers(self) -> "Mapping[str, int]":
        """Return the number of experts of each layer of all stages, by name."""
        return self.trainer.parallelized.expert_layers

    def part_of_model(self) -> list[int]:
        """Return the stage of the pipeline, and the place among the ranks that share a matrix."""
        mesh = self.trainer.mesh
        return [mesh.pp_rank, mesh.tp_rank]

    def name_in_one_process(self, name: str) -> str:
        """Return the name in the undistributed model: a stage may have a copy of a tied weight."""
        return self.trainer.name_in_one_process(name)

    @contextmanager
    def _gradients_dropped(self) -> Iterator[None]:
        """Keep the batches of the step, so that the training can compute them once more."""
        with self.trainer.keeping_batches():
            yield

    def is_wrapped(self, wrapper: nn.Module) -> bool:
        """Return True: `ParallelTrainer` distributes the model itself."""
        return True

    def _layout_parts(self) -> list[str]:
        sizes = ((axis, size) for axis, size in vars(self.trainer.layout).items() if size > 1)
        layout = " x ".join(f"{axis}={size}" for axis, size in sizes)
        parts = [layout or "one rank", self.trainer.stage_plan.schedule]
        sequence_parts = self.trainer.parallelized.sequence_parts
        if sequence_parts > 1:
            parts.append(f"sequences cut over {sequence_parts} ranks")
        return parts

    def _all_elements(self) -> int:
        return self.trainer.parameter_counts[0]


def is_parallel_trainer(trainer: "Trainer") -> "TypeGuard[SelfShardedTrainer]":
    """Return whether a Trainer is a `ParallelTrainer`, which itself returns what a checkpoint consists of.

    It is recognised by a method, since its class is in a package that imports this one.

    Args:
        trainer (`Trainer`): a Trainer or a subclass of it.
    """
    return hasattr(type(trainer), "sharded_state")
