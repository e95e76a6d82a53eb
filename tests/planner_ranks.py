"""Models and counts of the tests that compare the planner's memory with what the ranks of a training hold."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from transformers.distributed.expert_parallel import AllToAllEP

from benchmarks.activations import LiveBytes
from hfscale.facts.layout import ParallelLayout
from hfscale.parallel.mesh import make_mesh
from hfscale.parallel.model import ParallelModel, parallelize_model
from hfscale.parallel.pipeline import Pipeline
from hfscale.parallel.stages import StagePlan
from hfscale.parallel.weights import build_model


class LocalBytes(LiveBytes):
    """Counts the parts of DTensors that this rank holds."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations follow, on the local tensors
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def received_tokens() -> Iterator[list[int]]:
    """Count the copies of tokens that this rank's experts get, at each call of a layer's experts.

    Yields:
        The list to which the counts are appended.
    """
    received: list[int] = []
    dispatch = AllToAllEP._dispatch_tokens

    def counted(*given):
        sent = dispatch(*given)
        received.append(len(sent[0]))
        return sent

    with mock.patch.object(AllToAllEP, "_dispatch_tokens", counted):
        yield received


def parallel_model(
    config: Any,
    layout: ParallelLayout,
    plan: StagePlan,
    *,
    loss_of: Callable[[Any, dict[str, torch.Tensor]], torch.Tensor],
    prepare: Callable[[Any], None] = lambda model: None,
    sequence_parallel: bool = False,
) -> ParallelModel:
    """Build the model of a config that `ParallelTrainer` trains in bf16 under a layout, on this rank's CPU.

    Args:
        config (`PreTrainedConfig`): of the model, whose weights are drawn.
        layout (`ParallelLayout`): of all ranks.
        plan (`StagePlan`): schedule and stages of the pipeline.
        loss_of (`Callable`): computes the loss of a stage's view of the model and of its inputs.
        prepare (`Callable`, *optional*): changes the complete model before it is split.
        sequence_parallel (`bool`): whether the ranks of tensor parallelism split the sequences.
    """
    mesh = make_mesh(layout, "cpu")
    model = build_model(config, seed=0, dtype=torch.float32)
    prepare(model)
    parts = parallelize_model(
        model, mesh, plan, loss_of, compute_dtype=torch.bfloat16, sequence_parallel=sequence_parallel
    )
    parts.model._apply(torch.clone)  # read from a file, the tensors are no views of others
    pipeline = Pipeline(
        parts.stages,
        plan,
        mesh.pp_group,
        torch.device("cpu"),
        hidden_size=config.hidden_size,
        dtype=torch.bfloat16,
        sequence_parts=parts.sequence_parts,
    )
    return ParallelModel(parts, pipeline).train()
