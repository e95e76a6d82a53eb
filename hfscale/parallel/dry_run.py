"""The program of a whole cluster, built on one CPU: what each pipeline rank would hold, and how long it would wait.

Whatever can be built is not estimated: the model is parallelized over a mesh of the full size as in a real run, on the
meta device and with a process group that sends nothing, once for each kind of pipeline rank. Weights, gradients and
optimizer states are then counted. Activations and the loss follow the planner's formulas
(`hfscale.planner.memory`).
"""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, TrainingArguments

from hfscale.core.spelling import spelled
from hfscale.core.torch_internals import FakeStore
from hfscale.core.versions import recomputes_activations, require
from hfscale.errors import ParameterError, UsageError
from hfscale.facts.batch_schedule import check_divisible, parse_batch_schedule
from hfscale.facts.expert_layout import ExpertLayout
from hfscale.facts.hardware import accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.model_shape import ModelShape
from hfscale.parallel.checks import check_config
from hfscale.parallel.mesh import FSDP_AXES, local_tensor, make_mesh
from hfscale.parallel.model import ParallelizedModel, parallelize_model
from hfscale.parallel.partition import StageSpec
from hfscale.parallel.stages import StagePlan
from hfscale.planner.activations import (
    end_activations,
    exchange_bytes,
    held_bytes,
    kept_and_waiting,
    kept_and_working,
    loss_bytes,
    new_gradient_bytes,
    transient_bytes,
)
from hfscale.planner.frameworks import find_framework
from hfscale.planner.job import Job, planner_schedule

_GIB = 2.0**30
_ADAM_BYTES = 8  # two moments in fp32
_GRADIENT_BYTES = 4  # the type in which FSDP2 sums micro-batches


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What each rank of one pipeline rank holds at its peak, in GiB."""

    pp_rank: int
    """The index of the pipeline rank."""
    layers: str
    """Numbers of its layers, by stage."""
    parameters: int
    """Parameters of its stages, over all ranks that share them."""
    states: float
    """Its shard of weights, gradients and optimizer moments."""
    gathered: float
    """Weights that are gathered between forward and backward, and the gradients in which micro-batches are summed."""
    activations: float
    """Activations that the backward passes of the micro-batches in flight need."""
    loss: float
    """Logits and their gradients, and what embedding and last norm keep."""

    @property
    def total(self) -> float:
        """The sum of all parts, without the CUDA context and NCCL's buffers."""
        return self.states + self.gathered + self.activations + self.loss


def dry_run(
    make_model: Callable[[], PreTrainedModel],
    layout: ParallelLayout,
    plan: StagePlan,
    args: TrainingArguments,
    *,
    block_size: int,
    sequence_parallel: bool = False,
    checks_parity: bool = False,
) -> list[RankMemory]:
    """Parallelize a model over a simulated world.

    Args:
        make_model (`callable`): makes the model on the meta device.
        layout (`ParallelLayout`): sizes of the axes; it may have any number of ranks.
        plan (`StagePlan`): the pipeline stages.
        args (`TrainingArguments`): batch, accumulation, precision and recomputation are taken from it.
        block_size (`int`): tokens per sequence.
        sequence_parallel (`bool`): whether tensor parallel ranks split each sequence between blocks.
        checks_parity (`bool`): whether the run compares a small model under this layout with one process.

    Returns:
        The memory of each pipeline rank, in the order of the ranks.

    Raises:
        UsageError: this process is part of a real process group, or the model does not support one of the axes.
        UnsupportedModelError: the model cannot be parallelized in this way.
        LayoutError: the model does not fit the layout.
        MissingDependencyError: transformers is older than 5.23.
    """
    if dist.is_initialized():
        raise UsageError(
            f"{spelled('dry_run')} simulates all ranks in one process: start it with python, not accelerate launch"
        )
    require("ParallelTrainer", "dry_run")
    config = make_model().config
    check_config(
        config,
        layout,
        plan,
        sequence_parallel=sequence_parallel,
        checks_parity=checks_parity,
    )
    # Pipeline ranks whose stages have the same numbers of layers hold the same, so each kind is built once.
    built: dict[tuple[object, ...], ParallelizedModel] = {}
    specs: list[StageSpec] = []
    ranks = []
    for pp_rank in range(layout.pp):
        if not specs or _kind(specs, plan, pp_rank) not in built:
            parallelized = _build(make_model(), layout, plan, args, pp_rank, sequence_parallel)
            specs = parallelized.specs
            built[_kind(specs, plan, pp_rank)] = parallelized
        own = [specs[index] for index in plan.stages_of(pp_rank)]
        parallelized = built[_kind(specs, plan, pp_rank)]
        ranks.append(
            _memory(parallelized, own, layout, plan, args, pp_rank, block_size, sequence_parallel)
        )
    return ranks


def _kind(specs: list[StageSpec], plan: StagePlan, pp_rank: int) -> tuple[object, ...]:
    own = (specs[index] for index in plan.stages_of(pp_rank))
    return tuple((len(spec.layers), spec.is_first, spec.is_last) for spec in own)


def _build(
    model: PreTrainedModel,
    layout: ParallelLayout,
    plan: StagePlan,
    args: TrainingArguments,
    pp_rank: int,
    sequence_parallel: bool,
) -> ParallelizedModel:
    rank = pp_rank * layout.world_size // layout.pp
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        return parallelize_model(
            model,
            make_mesh(layout, "cpu"),
            plan,
            lambda view, inputs: view(**inputs).loss,
            compute_dtype=torch.bfloat16 if args.bf16 else None,
            sequence_parallel=sequence_parallel,
        )
    finally:
        dist.destroy_process_group()


def _memory(
    parallelized: ParallelizedModel,
    specs: list[StageSpec],
    layout: ParallelLayout,
    plan: StagePlan,
    args: TrainingArguments,
    pp_rank: int,
    block_size: int,
    sequence_parallel: bool,
) -> RankMemory:
    parameters = list(parallelized.model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    states = sum(_local_size(p) * p.element_size() for p in parameters)
    states += sum(_local_size(p) * (_GRADIENT_BYTES + _ADAM_BYTES) for p in trained)
    sums_gradients = layout.pp > 1 or args.gradient_accumulation_steps > 1
    gathered = _gathered_bytes(
        parameters, layout, bytes_per_weight=2 if args.bf16 else 4, sums_gradients=sums_gradients
    )
    job = Job(
        shape=ModelShape.from_config(parallelized.model.config.to_dict()),
        gpu=accelerator("H100-80GB"),  # any: the formulas of bytes do not use it
        layout=layout,
        seq_len=block_size,
        micro_batch=args.per_device_train_batch_size,
        global_batch=args.per_device_train_batch_size
        * args.gradient_accumulation_steps
        * layout.data_parallel_size,
        zero=3,  # bf16 weights, as `parallelize_model` gathers them
        precision="bf16" if args.bf16 else "fp32",
        activation_checkpointing="full" if recomputes_activations(args) else "none",
        expert_parallel=layout.ep if isinstance(layout, ExpertLayout) else 1,
        schedule=planner_schedule(plan.schedule),
        virtual_stages=plan.per_rank,
        sequence_parallel=sequence_parallel,
        loss_parallel=parallelized.vocab_loss is not None,
    )
    constants = find_framework("hf")
    _, working = kept_and_working(job, constants)
    working += exchange_bytes(job)
    if layout.pp > 1:
        working += transient_bytes(job)
        working += new_gradient_bytes(job, sum(_local_size(p) * _shards(p) for p in trained))
    held = held_bytes(
        job, pp_rank, sum(len(spec.layers) for spec in specs), kept_and_waiting(job, constants)
    )
    in_flight = plan.in_flight(pp_rank, job.micro_batches)
    has_loss = any(spec.is_last for spec in specs)
    loss = (
        loss_bytes(job, constants) + in_flight * end_activations(job, constants)
        if has_loss
        else 0.0
    )
    return RankMemory(
        pp_rank=pp_rank,
        layers=" ".join(f"{spec.layers.start}-{spec.layers.stop - 1}" for spec in specs),
        parameters=sum(p.numel() for p in parameters),
        states=states / _GIB,
        gathered=gathered / _GIB,
        activations=(held + working) / _GIB,
        loss=loss / _GIB,
    )


def _gathered_bytes(
    parameters: Iterable[nn.Parameter],
    layout: ParallelLayout,
    *,
    bytes_per_weight: int,
    sums_gradients: bool,
) -> float:
    if layout.dp_shard * layout.cp == 1:
        return 0.0
    weights = [_local_size(p) * _shards(p) * bytes_per_weight for p in parameters]
    # Gradients of several micro-batches are summed before they are reduced and sharded, with the last one.
    gradients = sum(
        _local_size(p) * _shards(p) * _GRADIENT_BYTES for p in parameters if p.requires_grad
    )
    # In a pipeline all weights stay gathered until then, too; a single stage gathers layer by layer.
    gathered = max(weights) if layout.pp == 1 else sum(weights)
    return gathered + (gradients if sums_gradients else 0.0)


def _shards(parameter: nn.Parameter) -> int:
    """Return the number of ranks between which FSDP2 divides what this rank computes with; experts of a single rank
    have a copy for the matrix products, and sums of gradients, too."""
    if not isinstance(parameter, DTensor):
        return 1
    axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.device_mesh.shape, strict=True)
    return math.prod(size for axis, size in axes if axis in FSDP_AXES)


def _local_size(parameter: nn.Parameter) -> int:
    return local_tensor(parameter).numel()


def with_largest_batch(
    args: TrainingArguments, layout: ParallelLayout, plan: StagePlan, batch_schedule: str
) -> TrainingArguments:
    """Return the arguments of a step with the largest batch of a schedule.

    Args:
        args (`TrainingArguments`): those of the training, whose `gradient_accumulation_steps` the schedule decides.
        layout (`ParallelLayout`): sizes of the axes.
        plan (`StagePlan`): the pipeline stages.
        batch_schedule (`str`): the global batches of the training.

    Raises:
        ParameterError: one of them is no number of micro-batches, or the pipeline does not run with so many.
    """
    schedule = parse_batch_schedule(batch_schedule)
    replicas = layout.world_size // layout.ranks_per_replica
    micro_batch = args.per_device_train_batch_size * replicas
    check_divisible(schedule, micro_batch)
    for batch in schedule.sizes:
        reason = plan.why_not(batch // micro_batch)
        if reason is not None:
            raise ParameterError(
                "batch_schedule", schedule.text(), f"with {batch} sequences {reason}"
            )
    of_largest = copy.copy(args)
    of_largest.gradient_accumulation_steps = max(schedule.sizes) // micro_batch
    return of_largest


def print_dry_run(
    ranks: list[RankMemory], layout: ParallelLayout, plan: StagePlan, args: TrainingArguments
) -> None:
    """Print a table of the memory per pipeline rank in GiB, and the share of time in which a rank waits.

    Args:
        ranks (`list[RankMemory]`): the result of `dry_run`.
        layout (`ParallelLayout`): sizes of the axes.
        plan (`StagePlan`): the pipeline stages.
        args (`TrainingArguments`): its `gradient_accumulation_steps` are the micro-batches.
    """
    micro_batches = args.gradient_accumulation_steps
    table = Table(
        "pp rank",
        "layers",
        "parameters",
        "states",
        "gathered",
        "activations",
        "loss",
        "GiB",
        box=None,
    )
    for rank in ranks:
        row = (rank.states, rank.gathered, rank.activations, rank.loss, rank.total)
        table.add_row(
            str(rank.pp_rank),
            rank.layers,
            f"{rank.parameters / 1e9:.2f}B",
            *(f"{gib:.1f}" for gib in row),
        )
    console = Console(width=110)
    console.print(f"{layout.world_size} ranks: {layout}")
    console.print(table)
    in_flight = max(plan.in_flight(rank, micro_batches) for rank in range(layout.pp))
    console.print(
        f"{plan.schedule}: {plan.stages} stages, {micro_batches} micro-batches per step, at most {in_flight:g} in "
        f"flight; by the formula a rank waits {plan.bubble_fraction(micro_batches):.1%} of the time, if all stages "
        "are equally fast"
    )
    console.print("The CUDA context and NCCL's buffers need about 1 to 3 GiB more.")
