"""A whole cluster's program on one CPU: what each pipeline rank would hold, and how its schedule goes.

Nothing is estimated that can be built: the model is laid out over a mesh of the full size as in a run, on the meta
device and with a process group that sends nothing, once for each kind of stage. Weights, gradients and optimizer
states are then counted; activations and the loss follow the planner's formulas (`hfscale.planner.activations`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore  # no public way to make a world that is not there
from transformers import PreTrainedModel, TrainingArguments

from hfscale.errors import UsageError
from hfscale.facts.hardware import accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.model_shape import ModelShape
from hfscale.parallel.checks import check_config
from hfscale.parallel.mesh import make_mesh
from hfscale.parallel.model import ParallelizedModel, parallelize_model
from hfscale.parallel.partition import StageCut
from hfscale.parallel.stages import StagePlan
from hfscale.planner.frameworks import find_framework
from hfscale.planner.job import Job
from hfscale.planner.memory import kept_and_working, loss_bytes
from hfscale.planner.model_view import view_of

_GIB = 2.0**30
_ADAM_BYTES = 8  # two moments in fp32
_GRADIENT_BYTES = 4  # what FSDP2 sums micro-batches in


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What a rank of one pipeline rank holds at its peak, in GiB."""

    pp_rank: int
    """Which pipeline rank."""
    layers: str
    """Numbers of its layers, by stage."""
    parameters: int
    """Parameters of its stages, over all ranks that share them."""
    states: float
    """Its shard of weights, gradients and optimizer moments."""
    gathered: float
    """Weights whole between forward and backward, and the gradients that micro-batches add up in."""
    activations: float
    """What the backward passes of the micro-batches in flight need."""
    loss: float
    """Logits and their gradients."""

    @property
    def total(self) -> float:
        """All parts, without the CUDA context and NCCL's buffers."""
        return self.states + self.gathered + self.activations + self.loss


def dry_run(
    make_model: Callable[[], PreTrainedModel],
    layout: ParallelLayout,
    plan: StagePlan,
    args: TrainingArguments,
    *,
    block_size: int,
    sequence_parallel: bool = False,
) -> list[RankMemory]:
    """Lay a model out over a world that is not there; returns what its pipeline ranks hold.

    Args:
        make_model (`callable`): makes the model on the meta device.
        layout (`ParallelLayout`): of any size.
        plan (`StagePlan`): its stages.
        args (`TrainingArguments`): batch, accumulation, precision and recomputation are taken from it.
        block_size (`int`): tokens per sequence.
        sequence_parallel (`bool`): whether tensor parallel ranks share each sequence between blocks.

    Raises:
        UsageError: this process is part of a real world.
        LayoutError: the model does not go with the layout.
    """
    if dist.is_initialized():
        raise UsageError("--dry_run pretends a world of its own: start it with python, not with accelerate launch")
    check_config(make_model().config, layout, plan, sequence_parallel=sequence_parallel)
    kinds: dict[tuple[object, ...], ParallelizedModel] = {}
    cuts: list[StageCut] = []
    ranks = []
    for pp_rank in range(layout.pp):
        kind = tuple((len(cuts[i].layers), cuts[i].is_first, cuts[i].is_last) for i in plan.stages_of(pp_rank) if cuts)
        if not kind or kind not in kinds:
            parallelized = _build(make_model(), layout, plan, args, pp_rank, sequence_parallel)
            cuts = parallelized.cuts
            kind = tuple((len(s.cut.layers), s.cut.is_first, s.cut.is_last) for s in parallelized.stages)
            kinds[kind] = parallelized
        own = [cuts[index] for index in plan.stages_of(pp_rank)]
        ranks.append(_memory(kinds[kind], own, layout, plan, args, pp_rank, block_size, sequence_parallel))
    return ranks


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
    cuts: Iterable[StageCut],
    layout: ParallelLayout,
    plan: StagePlan,
    args: TrainingArguments,
    pp_rank: int,
    block_size: int,
    sequence_parallel: bool,
) -> RankMemory:
    cuts = list(cuts)
    parameters = list(parallelized.model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    states = _bytes(parameters) + sum(_local(p) * (_GRADIENT_BYTES + _ADAM_BYTES) for p in trained)
    gathered = 0.0
    shards = layout.dp_shard * layout.cp
    if shards > 1:
        width = 2 if args.bf16 else 4
        whole = [_local(p) * shards for p in parameters]
        summed = sum(_local(p) * shards * _GRADIENT_BYTES for p in trained)
        # One stage alone gathers layer by layer; in a pipeline all stay whole until the last micro-batch.
        gathered = width * max(whole) if layout.pp == 1 else width * sum(whole) + summed
    job = Job(
        shape=ModelShape.from_config(parallelized.model.config.to_dict()),
        gpu=accelerator("H100-80GB"),  # of no consequence for bytes
        layout=layout,
        seq_len=block_size,
        micro_batch=args.per_device_train_batch_size,
        global_batch=args.per_device_train_batch_size * args.gradient_accumulation_steps * layout.data_parallel_size,
        recompute="full" if args.activation_checkpointing or args.gradient_checkpointing else "none",
        sequence_parallel=sequence_parallel,
        loss_parallel=parallelized.vocabulary is not None,
    )
    view, constants = view_of(job.shape), find_framework("hf")
    kept, working = kept_and_working(view, job, constants)
    held = plan.in_flight(pp_rank, job.micro_batches) * sum(len(cut.layers) for cut in cuts)
    loss = loss_bytes(view, job, constants) if any(cut.is_last for cut in cuts) else 0.0
    return RankMemory(
        pp_rank=pp_rank,
        layers=" ".join(f"{cut.layers.start}-{cut.layers.stop - 1}" for cut in cuts),
        parameters=sum(p.numel() for p in parameters),
        states=states / _GIB,
        gathered=gathered / _GIB,
        activations=(held * kept + working) / _GIB,
        loss=loss / _GIB,
    )


def _local(parameter: nn.Parameter) -> int:
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(_local(p) * p.element_size() for p in parameters)


def print_dry_run(ranks: list[RankMemory], layout: ParallelLayout, plan: StagePlan, args: TrainingArguments) -> None:
    """Print memory per pipeline rank and how the schedule goes."""
    micro_batches = args.gradient_accumulation_steps
    table = Table("pp rank", "layers", "parameters", "states", "gathered", "activations", "loss", "GiB", box=None)
    for rank in ranks:
        row = (rank.states, rank.gathered, rank.activations, rank.loss, rank.total)
        table.add_row(str(rank.pp_rank), rank.layers, f"{rank.parameters / 1e9:.2f}B", *(f"{gib:.1f}" for gib in row))
    console = Console(width=110)
    console.print(f"{layout.world_size} ranks: {layout}")
    console.print(table)
    held = [plan.in_flight(rank, micro_batches) for rank in range(layout.pp)]
    console.print(
        f"{plan.schedule}: {plan.stages} stages, {micro_batches} micro-batches a step, at most {max(held):g} held at "
        f"once; a rank waits {plan.bubble_fraction(micro_batches):.1%} of the time by the formula, if all stages are "
        "equally fast"
    )
    console.print("The CUDA context and NCCL's buffers come on top: about 1 to 3 GiB.")
