"""What the other packages use of `ParallelTrainer`, whose class is in a package above them."""

from typing import TYPE_CHECKING, Protocol, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import nn
    from transformers import Trainer

    from hfscale.facts.layout import ParallelLayout

    class HasSchedule(Protocol):
        """The part of a `StagePlan` that describes a training."""

        schedule: str

        @property
        def per_rank(self) -> int: ...

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
        def keeping_batches(self) -> AbstractContextManager[None]: ...
        def checkpoint_files(self) -> dict[str, bytes]: ...


def is_parallel_trainer(trainer: "Trainer") -> "TypeGuard[SelfShardedTrainer]":
    """Return whether a Trainer is a `ParallelTrainer`, which itself returns what a checkpoint consists of.

    It is recognised by a method, since its class is in a package that imports this one.

    Args:
        trainer (`Trainer`): a Trainer or a subclass of it.
    """
    return hasattr(type(trainer), "sharded_state")
