"""A causal language model laid out over a mesh: cut into stages, each cut over tensor and data parallel ranks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from hfscale.errors import UsageError
from hfscale.parallel.balance import RouterBalance
from hfscale.parallel.batches import pad_to_multiple
from hfscale.parallel.context import ContextParallel
from hfscale.parallel.gradients import TiedWeight
from hfscale.parallel.mesh import ParallelMesh
from hfscale.parallel.partition import IdentityStage, Stage, StageCut, cut_by_cost, layer_costs, prune, stage_view
from hfscale.parallel.schedule import Pipeline
from hfscale.parallel.sequence import apply_sequences, enter, plan_sequences
from hfscale.parallel.stages import StagePlan
from hfscale.parallel.structure import ModelStructure
from hfscale.parallel.tensor import Packed, apply_plan, packed_parameters, tensor_parallel_plan
from hfscale.parallel.vocabulary import VocabularyLoss, leave_logits_cut

Loss = Callable[[PreTrainedModel, dict[str, Any]], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class ParallelizedModel:
    """What `parallelize_model` made of a model."""

    model: PreTrainedModel
    """The model that was given: this rank's modules alone, cut, under the names they had."""
    structure: ModelStructure
    """Where its parts are."""
    cuts: list[StageCut]
    """All stages of the pipeline."""
    stages: list[Stage]
    """This rank's."""
    partial: list[nn.Parameter]
    """Parameters whose gradient is to be summed over the tensor parallel ranks."""
    is_adapted: bool
    """Whether it has LoRA adapters."""
    packed: dict[str, Packed]
    """Parameters that hold several matrices in one."""
    balance: RouterBalance | None
    """The load-balancing loss of a mixture of experts, where its config asks for one."""
    tied: TiedWeight | None
    """The weight that first and last stage share, where they are two."""
    sequence_parts: int
    """Into how many parts a sequence is cut between the blocks of a layer."""
    vocabulary: VocabularyLoss | None
    """The loss of logits that are cut over the tensor parallel ranks; None where each holds them whole."""
    context: ContextParallel | None
    """What cuts sequences over the context parallel ranks; None where each rank has its own."""


def parallelize_model(
    model: PreTrainedModel,
    mesh: ParallelMesh,
    plan: StagePlan,
    loss: Loss,
    *,
    compute_dtype: torch.dtype | None = None,
    fill: Callable[[PreTrainedModel, Mapping[str, str]], None] | None = None,
    sequence_parallel: bool = False,
    cut_logits: bool = True,
) -> ParallelizedModel:
    """Cut `model`, in place, to what this rank holds of it.

    Its weights may be real, and are cut, or on the meta device: then `fill` is called for them after the cut, and no
    rank ever has more than its own part.

    Args:
        model (`PreTrainedModel`): a whole causal language model, adapters inside it included.
        mesh (`ParallelMesh`): all ranks.
        plan (`StagePlan`): how many stages, and who holds them.
        loss (`callable`): `loss(view, inputs)`, the loss of one micro-batch on the last stage.
        compute_dtype (`torch.dtype`, *optional*): what matrices are multiplied in, from weights of the model's type;
            absent: that type.
        fill (`callable`, *optional*): for a model on the meta device: `fill(model, aliases)` gives values to this
            rank's memory, once there is some; `aliases` are names whose weights checkpoints keep under others.
            Absent: such a model stays without memory.
        sequence_parallel (`bool`): whether tensor parallel ranks keep a part of the sequence each between blocks.
        cut_logits (`bool`): whether each of them keeps its part of the logits, where the model's loss allows it.

    Raises:
        UnsupportedModelError: a model that cannot be cut so.
        LayoutError: fewer layers than stages.
    """
    tensor_plan = tensor_parallel_plan(model, mesh.layout.tp) if mesh.layout.tp > 1 else {}
    packed = packed_parameters(model)
    structure = ModelStructure.of(model)
    tp_mesh = mesh.device_mesh["tp"]
    is_cut = cut_logits and leave_logits_cut(model, tensor_plan, structure.head)
    vocabulary = VocabularyLoss(group=mesh.tp_group) if is_cut else None
    sequences = plan_sequences(model, structure, tensor_plan) if sequence_parallel and tensor_plan else None
    sequence_parts = mesh.layout.tp if sequences is not None else 1
    context = ContextParallel.over(model, mesh.cp_mesh, sequence_parts=sequence_parts)
    balance = RouterBalance.of(model, context and context.whole)
    cuts = cut_by_cost(*layer_costs(model, structure), plan.stages)
    own = [cuts[index] for index in plan.stages_of(mesh.pp_rank)]
    prune(model, structure, own)
    partial = apply_plan(model, sequences.rest_of(tensor_plan) if sequences else tensor_plan, tp_mesh)
    partial |= apply_sequences(model, structure, sequences, tp_mesh) if sequences is not None else set()
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.to(torch.device(mesh.device_mesh.device_type))
    _tie(model, structure, plan)
    stages = []
    for cut in own:
        view = stage_view(model, structure, cut)
        if vocabulary is not None:
            view.loss_function = vocabulary
        entrance = enter(view, structure, cut, tp_mesh) if sequences is not None else None
        stages.append(Stage(view, structure, cut, loss, balance, entrance and entrance.stage_hidden_states, context))
    if mesh.data_mesh.size() > 1 or compute_dtype is not None:
        _shard(model, structure, stages, mesh, compute_dtype, packed)
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    if is_meta and fill is not None:
        model.to_empty(device=torch.device(mesh.device_mesh.device_type))
        _tie(model, structure, plan)
        fill(model, {f"{structure.head}.weight": f"{structure.token_embedding}.weight"} if structure.tied else {})
        _tie(model, structure, plan)
    tied = None
    if structure.tied and plan.stages > 1:
        first, last = own[0].is_first, own[-1].is_last
        tied = TiedWeight(
            model.get_submodule(structure.token_embedding).weight if first else None,
            model.get_submodule(structure.head).weight if last else None,
            mesh,
            first_rank=plan.rank_of(0),
            last_rank=plan.rank_of(plan.stages - 1),
        )
        if not is_meta or fill is not None:
            tied.equalize()
    parameters = dict(model.named_parameters())
    return ParallelizedModel(
        model=model,
        structure=structure,
        cuts=cuts,
        stages=stages,
        partial=[parameters[name] for name in sorted(partial)],
        is_adapted=any(".lora_" in name for name in parameters),
        packed=packed,
        balance=balance,
        tied=tied,
        sequence_parts=sequence_parts,
        vocabulary=vocabulary,
        context=context,
    )


def _tie(model: PreTrainedModel, structure: ModelStructure, plan: StagePlan) -> None:
    """Make embedding and head one parameter again: cutting them and giving them memory has made two."""
    if structure.tied and plan.stages == 1:
        model.get_submodule(structure.head).weight = model.get_submodule(structure.token_embedding).weight


def _shard(
    model: PreTrainedModel,
    structure: ModelStructure,
    stages: list[Stage],
    mesh: ParallelMesh,
    compute_dtype: torch.dtype | None,
    packed: Mapping[str, Packed],
) -> None:
    """FSDP2 or HSDP over the data parallel ranks: per layer, embedding, norm with head, and the rest of each stage.

    With several stages the parameters stay whole between forward and backward (gathering them for each micro-batch
    would cost more than the pipeline gives); a single stage gathers twice, as full sharding does.
    """
    packed_rows = {id(p) for n, p in model.named_parameters() if n in packed and packed[n].dim == 0}
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        # The rows of a packed matrix belong to several: cut its columns, so that each part stays one rectangle.
        "shard_placement_fn": lambda parameter: Shard(1) if id(parameter) in packed_rows else None,
        "mesh": mesh.data_mesh,
        "reshard_after_forward": stages[0].cut.stages == 1,
        "mp_policy": policy if compute_dtype is not None else MixedPrecisionPolicy(),
    }
    shared = structure.tied and stages[0].cut.stages == 1  # one weight, two uses: gathered with the whole stage
    for module in _units(model, structure, shared=shared):
        fully_shard(module, **options)
    for stage in stages:
        fully_shard(stage, **options)


def _units(model: PreTrainedModel, structure: ModelStructure, *, shared: bool) -> Iterator[Any]:
    for layer in model.get_submodule(structure.layers):
        if not isinstance(layer, IdentityStage):
            yield layer
    embedding = model.get_submodule(structure.token_embedding)
    if not isinstance(embedding, IdentityStage) and not shared:
        yield embedding
    tail = [model.get_submodule(name) for name in structure.after if not (shared and name == structure.head)]
    if tail and not isinstance(tail[0], IdentityStage):
        yield tail


class ParallelModel(nn.Module):
    """What a Trainer calls instead of the model: a forward over a whole step's micro-batches runs the pipeline.

    Args:
        parallelized (`ParallelizedModel`): the model.
        pipeline (`Pipeline`): its stages' schedule.
    """

    def __init__(self, parallelized: ParallelizedModel, pipeline: Pipeline) -> None:
        super().__init__()
        self.stages = nn.ModuleList(parallelized.stages)
        self._pipeline, self._context = pipeline, parallelized.context
        self._multiple = (
            parallelized.context.multiple if parallelized.context is not None else parallelized.sequence_parts
        )
        self._counts_tokens = parallelized.balance is not None

    def forward(self, *, micro_batches: int, **inputs: torch.Tensor) -> torch.Tensor:
        """In training mode forward and backward, else forward only: see `Pipeline.train` and `Pipeline.evaluate`.

        Raises:
            UsageError: sequences that have to be lengthened, of a model whose loss counts their tokens.
        """
        length = inputs["input_ids"].shape[1]
        padded = -(-length // self._multiple) * self._multiple
        if padded != length:
            if self._counts_tokens and "attention_mask" not in inputs:
                raise UsageError(
                    f"output_router_logits counts all tokens, and sequences of {length} that are cut would be padded "
                    f"to a multiple of {self._multiple}: set --block_size {padded}"
                )
            inputs = pad_to_multiple(inputs, self._multiple)
        if self._context is not None:
            inputs = self._context.cut(inputs)
        if self.training:
            return self._pipeline.train(micro_batches, inputs)
        return self._pipeline.evaluate(micro_batches, inputs)
