"""A causal language model parallelized over a mesh: split into stages, each sharded over its ranks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from hfscale.core.spelling import spelled
from hfscale.errors import UsageError
from hfscale.parallel.adapter_weights import check_written, mark_memory
from hfscale.parallel.adapters import base_names, has_adapters, is_on_meta
from hfscale.parallel.context import ContextParallel
from hfscale.parallel.experts import (
    apply_expert_parallel,
    check_adapters_of_experts,
    expert_parallel_plan,
    is_of_experts,
    shard_experts,
)
from hfscale.parallel.gradients import TiedWeight
from hfscale.parallel.key_value_heads import apply_shared_heads, plan_shared_heads
from hfscale.parallel.losses import RouterBalanceLoss, VocabParallelLoss, keep_logits_sharded
from hfscale.parallel.mesh import ParallelMesh
from hfscale.parallel.overlap import Turns
from hfscale.parallel.own_loss import OWN_SHAPE
from hfscale.parallel.partition import (
    IdentityStage,
    ModelStructure,
    StageSpec,
    layer_costs,
    partition_by_cost,
    remove_other_stages,
    stage_view,
)
from hfscale.parallel.pipeline import Pipeline, Stage, pad_to_multiple
from hfscale.parallel.sequence import (
    SequencePlan,
    apply_sequence_parallel,
    insert_stage_input,
    plan_sequence_parallel,
)
from hfscale.parallel.stages import StagePlan
from hfscale.parallel.tensor import (
    PackedParameter,
    apply_tensor_parallel,
    packed_parameters,
    tensor_parallel_plan,
)
from hfscale.parallel.tracing import trace_structure
from hfscale.trainer.expert_adapters import add_own_adapters
from hfscale.trainer.expert_counter import expert_layers

LossFunction = Callable[[PreTrainedModel, dict[str, Any]], torch.Tensor]
"""`loss(view, inputs)`: the loss of one micro-batch on the last stage, a scalar."""
WeightFiller = Callable[[PreTrainedModel, Mapping[str, str]], None]
"""`fill(model, aliases)` gives values to this rank's parameters; `aliases` maps names to the names under which
checkpoints keep the same weights."""


@dataclass(frozen=True, kw_only=True)
class ParallelizedModel:
    """The result of `parallelize_model`."""

    model: PreTrainedModel
    """The model that was given, changed in place: this rank's modules only, sharded, under the names they had."""
    structure: ModelStructure
    """Names of its parts."""
    specs: list[StageSpec]
    """All stages of the pipeline."""
    stages: list[Stage]
    """This rank's stages."""
    partial_gradients: list[nn.Parameter]
    """Parameters whose gradient has to be summed over the tensor parallel ranks."""
    has_adapters: bool
    """Whether it has adapters of PEFT."""
    packed: dict[str, PackedParameter]
    """Parameters that hold several matrices in one."""
    balance: RouterBalanceLoss | None
    """The load-balancing loss of a mixture of experts, where its config asks for one."""
    tied: TiedWeight | None
    """The weight that first and last stage share, where there are several stages."""
    sequence_parts: int
    """Into how many parts a sequence is split between the blocks of a layer."""
    vocab_loss: VocabParallelLoss | None
    """The loss for logits that are sharded over the tensor parallel ranks; None where each rank has all logits."""
    context: ContextParallel | None
    """Splits sequences over the context parallel ranks; None without context parallelism."""
    expert_layers: dict[str, int]
    """The number of experts of each module of experts in the unsplit model, by name."""
    embedded_ids: int
    """Rows of the unsplit model's table of token embeddings: ids are smaller."""
    predicted_ids: int
    """Rows of its head: labels are smaller."""
    turns: Turns | None
    """The turns of two passes that the schedule pairs, where the exchange of tokens for experts overlaps with them."""

    @property
    def sequence_multiple(self) -> int:
        """The length of every sequence, in tokens, has to be a multiple of this number."""
        return self.context.multiple if self.context is not None else self.sequence_parts


def parallelize_model(
    model: PreTrainedModel,
    mesh: ParallelMesh,
    plan: StagePlan,
    loss: LossFunction,
    *,
    compute_dtype: torch.dtype | None = None,
    fill: WeightFiller | None = None,
    sequence_parallel: bool = False,
    shard_logits: bool = True,
    overlap_exchange: bool = True,
) -> ParallelizedModel:
    """Reduce a model, in place, to the modules and shards that this rank holds. Call it on every rank.

    Its weights may be real and are then sharded. Or they are on the meta device: then `fill` is called after sharding,
    and no rank ever holds more than its own part.

    Args:
        model (`PreTrainedModel`): an unsplit causal language model, with its adapters if it has any.
        mesh (`ParallelMesh`): all ranks.
        plan (`StagePlan`): the number of stages and the ranks that hold them.
        loss (`callable`): `loss(view, inputs)`, the loss of one micro-batch on the last stage, a scalar.
        compute_dtype (`torch.dtype`, *optional*): the type of matrix products; absent: that of the weights.
        fill (`callable`, *optional*): `fill(model, aliases)` gives values to a model on the meta device; absent: it
            stays without memory.
        sequence_parallel (`bool`): whether tensor parallel ranks keep a part of the sequence each between blocks.
        shard_logits (`bool`): whether each of them keeps its part of the logits, where the model's loss allows it.
        overlap_exchange (`bool`): whether the exchange of tokens for experts overlaps with computation, where the
            schedule runs a forward and a backward pass as a pair.

    Returns:
        The parallelized model.

    Raises:
        UnsupportedModelError: the model cannot be parallelized in this way.
        UsageError: the attention implementation does not support context parallelism, or `fill` cannot read weights.
        LayoutError: there are fewer layers than stages.
    """
    tp_mesh = mesh.device_mesh["tp"]
    device = torch.device(mesh.device_mesh.device_type)

    # 1. Make every plan first: all of them need the names, shapes and ties of the unsplit model.
    expert_plan = expert_parallel_plan(model) if mesh.expert_mesh is not None else {}
    tensor_plan = tensor_parallel_plan(model, mesh.layout.tp) if mesh.layout.tp > 1 else {}
    if not expert_plan:
        check_adapters_of_experts(model, mesh.layout.tp)
    tensor_plan = {
        name: style for name, style in tensor_plan.items() if not is_of_experts(name, expert_plan)
    }
    shared_heads = plan_shared_heads(model, tensor_plan, mesh.layout.tp)
    packed = packed_parameters(model)
    layers_with_experts = expert_layers(model)
    structure = ModelStructure.of(model)
    if plan.stages > 1:
        structure = trace_structure(model, structure)
    is_sharded = shard_logits and keep_logits_sharded(model, tensor_plan, structure.head)
    vocabulary = model.get_parameter(f"{structure.head}.weight").shape[0]
    # An attribute, not a parameter, where PEFT wraps the table
    table: Any = model.get_submodule(structure.token_embedding).weight
    embedded_ids = int(table.shape[0])
    is_adapted = has_adapters(model)  # a rank may have none of them
    vocab_loss = (
        VocabParallelLoss(group=mesh.tp_group, vocabulary=vocabulary) if is_sharded else None
    )
    sequence_plan = (
        plan_sequence_parallel(model, structure, tensor_plan)
        if sequence_parallel and tensor_plan
        else None
    )
    sequence_parts = mesh.layout.tp if sequence_plan is not None else 1
    turns = Turns() if expert_plan and overlap_exchange and plan.pairs_passes else None
    specs = partition_by_cost(*layer_costs(model, structure), plan.stages)
    own_specs = [specs[index] for index in plan.stages_of(mesh.pp_rank)]

    # 2. Replace the attention and count the routers while the model has all layers, and before stages are made, which
    #    keep references to the config that is set here.
    context = None
    if mesh.cp_mesh is not None:
        context = ContextParallel(model, mesh.cp_mesh, sequence_parts=sequence_parts)
    balance = None
    if RouterBalanceLoss.is_enabled(model):
        balance = RouterBalanceLoss(model, context.gather_sequence if context is not None else None)

    # 3. Remove the other stages' layers, so that they are neither sharded nor moved to the device.
    remove_other_stages(model, structure, own_specs)

    # 4. Shard over tensor and expert parallel ranks before data parallel ones: FSDP2 shards these shards again.
    partial_gradients = _shard_over_tensor_ranks(model, structure, tensor_plan, sequence_plan, mesh)
    summed_blocks = sequence_plan.sharded if sequence_plan is not None else ()
    apply_shared_heads(model, shared_heads, tp_mesh, summed_blocks=summed_blocks)
    if expert_plan:
        apply_expert_parallel(model, expert_plan, mesh, turns=turns)
        own_names = base_names(model)
        # The adapters of an expert get their gradient on the ranks that hold the expert.
        partial_gradients |= {
            n
            for n, _ in model.named_parameters()
            if n not in own_names and is_of_experts(n, expert_plan)
        }

    # 5. Move real weights to the device after step 4, so that it never has to hold more than this rank's shards.
    if not is_on_meta(model):
        model.to(device)  # type: ignore[arg-type]  # transformers wraps `to` in a way that loses the type of `self`
    _tie_weights(model, structure, plan)  # sharding has made two parameters of a tied one

    # 6. Make the stages after step 4, because they are views of its sharded modules, and before step 7, whose roots
    #    they are.
    stages = [
        _make_stage(
            model,
            structure,
            spec,
            loss,
            balance,
            context,
            vocab_loss,
            tp_mesh if sequence_plan else None,
        )
        for spec in own_specs
    ]

    # 7. Shard over data and context parallel ranks.
    if mesh.data_mesh.size() > 1 or compute_dtype is not None:
        _shard_over_data_ranks(model, structure, stages, mesh, compute_dtype, packed, expert_plan)
    add_own_adapters(model)  # between FSDP2's hooks

    # 8. Give a model on the meta device its memory and values last, when every parameter is this rank's shard.
    was_on_meta = is_on_meta(model)
    if was_on_meta and fill is not None:
        model.to_empty(device=device)
        mark_memory(model)
        _tie_weights(model, structure, plan)  # getting memory has made two parameters of a tied one
        aliases = (
            {f"{structure.head}.weight": f"{structure.token_embedding}.weight"}
            if structure.tied
            else {}
        )
        fill(model, aliases)
        _tie_weights(model, structure, plan)
        check_written(model)

    # 9. Connect the copies of a weight that is tied across stages once both have their values. Every rank does so,
    #    since making process groups is a collective.
    tied = None
    if structure.tied and plan.stages > 1:
        tied = _tie_across_stages(model, structure, mesh, plan, own_specs)
        if not was_on_meta or fill is not None:
            tied.equalize()

    parameters = dict(model.named_parameters())
    return ParallelizedModel(
        model=model,
        structure=structure,
        specs=specs,
        stages=stages,
        partial_gradients=[parameters[name] for name in sorted(partial_gradients)],
        has_adapters=is_adapted,
        packed=packed,
        balance=balance,
        tied=tied,
        sequence_parts=sequence_parts,
        vocab_loss=vocab_loss,
        context=context,
        expert_layers=layers_with_experts,
        embedded_ids=embedded_ids,
        predicted_ids=vocabulary,
        turns=turns,
    )


def _tie_weights(model: PreTrainedModel, structure: ModelStructure, plan: StagePlan) -> None:
    """Make embedding and head of a single stage one parameter again."""
    if structure.tied and plan.stages == 1:
        model.get_submodule(structure.head).weight = model.get_submodule(
            structure.token_embedding
        ).weight


def _tie_across_stages(
    model: PreTrainedModel,
    structure: ModelStructure,
    mesh: ParallelMesh,
    plan: StagePlan,
    own: list[StageSpec],
) -> TiedWeight:
    has_embedding = own[0].is_first
    has_head = own[-1].is_last
    return TiedWeight(
        model.get_parameter(f"{structure.token_embedding}.weight") if has_embedding else None,
        model.get_parameter(f"{structure.head}.weight") if has_head else None,
        mesh,
        first_rank=plan.rank_of(0),
        last_rank=plan.rank_of(plan.stages - 1),
    )


def _shard_over_tensor_ranks(
    model: PreTrainedModel,
    structure: ModelStructure,
    tensor_plan: dict[str, str],
    sequence_plan: SequencePlan | None,
    mesh: ParallelMesh,
) -> set[str]:
    """Apply tensor parallelism, and sequence parallelism where it is planned; return the names of the parameters of
    whose gradient each rank has only a part."""
    tp_mesh = mesh.device_mesh["tp"]
    if sequence_plan is None:
        return apply_tensor_parallel(model, tensor_plan, tp_mesh)
    partial = apply_tensor_parallel(
        model, sequence_plan.remaining_tensor_plan(tensor_plan), tp_mesh
    )
    return partial | apply_sequence_parallel(model, structure, sequence_plan, tp_mesh)


def _make_stage(
    model: PreTrainedModel,
    structure: ModelStructure,
    spec: StageSpec,
    loss: LossFunction,
    balance: RouterBalanceLoss | None,
    context: ContextParallel | None,
    vocab_loss: VocabParallelLoss | None,
    sequence_mesh: DeviceMesh | None,
) -> Stage:
    """Make a stage; `sequence_mesh` has the ranks of sequence parallelism and is None without it."""
    view = stage_view(model, structure, spec)
    if vocab_loss is not None:
        view.loss_function = vocab_loss
    stage_hidden_states = None
    if sequence_mesh is not None:
        stage_hidden_states = insert_stage_input(
            view, structure, spec, sequence_mesh
        ).stage_hidden_states
    return Stage(view, structure, spec, loss, balance, stage_hidden_states, context)


def _shard_over_data_ranks(
    model: PreTrainedModel,
    structure: ModelStructure,
    stages: list[Stage],
    mesh: ParallelMesh,
    compute_dtype: torch.dtype | None,
    packed: Mapping[str, PackedParameter],
    expert_plan: Mapping[str, str],
) -> None:
    """Apply FSDP2 or HSDP to each layer's spread experts and the rest of the layer, the embedding, the norm with the
    head, and the rest of each stage.

    With several stages the parameters stay gathered between forward and backward, because gathering them for each
    micro-batch would cost more than the pipeline gains; a single stage gathers them twice, as full sharding does.
    """
    packed_by_rows = {
        id(p) for n, p in model.named_parameters() if n in packed and packed[n].dim == 0
    }
    has_single_stage = stages[0].spec.stages == 1
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"reshard_after_forward": has_single_stage, "mp_policy": policy}
    if expert_plan:
        # Their inputs stay as the layer computes them: routing weights in fp32 are not rounded.
        kept = replace(policy, cast_forward_inputs=False)
        shard_experts(model, expert_plan, mesh, packed, options | {"mp_policy": kept})
    options |= {
        # The rows of a packed parameter belong to several matrices: it is sharded by columns, so that each part stays
        # one rectangle.
        "shard_placement_fn": lambda parameter: (
            Shard(1) if id(parameter) in packed_by_rows else None
        ),
        "mesh": mesh.data_mesh,
    }
    # One weight with two uses is gathered with the whole stage
    is_shared = structure.tied and has_single_stage
    for unit in _fsdp_units(model, structure, is_shared=is_shared):
        fully_shard(unit, **options)
    for stage in stages:
        fully_shard(stage, **options)


def _fsdp_units(
    model: PreTrainedModel, structure: ModelStructure, *, is_shared: bool
) -> Iterator[Any]:
    """Yield the modules, or lists of modules, whose parameters are gathered together."""
    for layer in structure.layers_of(model):
        if not isinstance(layer, IdentityStage):
            yield layer
    embedding = model.get_submodule(structure.token_embedding)
    if not isinstance(embedding, IdentityStage) and not is_shared:
        yield embedding
    tail = [
        model.get_submodule(name)
        for name in structure.after
        if not (is_shared and name == structure.head)
    ]
    if tail and not isinstance(tail[0], IdentityStage):
        yield tail


class ParallelModel(nn.Module):
    """The module that a Trainer calls: a forward over all micro-batches of a step runs the pipeline.

    Args:
        parallelized (`ParallelizedModel`): the model.
        pipeline (`Pipeline`): runs its stages.
    """

    def __init__(self, parallelized: ParallelizedModel, pipeline: Pipeline) -> None:
        super().__init__()
        self.stages = nn.ModuleList(parallelized.stages)
        self._pipeline = pipeline
        self._context = parallelized.context
        self._multiple = parallelized.sequence_multiple
        self._counts_all_tokens = parallelized.balance is not None

    def forward(self, *, micro_batches: int, **inputs: torch.Tensor) -> torch.Tensor:
        """Run the pipeline: forward and backward in training mode, else forward only.

        Args:
            micro_batches (`int`): number of micro-batches.
            inputs (`torch.Tensor`): the model's keywords, each (micro-batches x rows, sequence).

        Returns:
            The result of `Pipeline.train` or `Pipeline.evaluate`, a scalar.

        Raises:
            UsageError: sequences would have to be padded, and the model's loss counts padding; or context parallelism
                does not support one of the inputs.
            LayoutError: the schedule does not support this number of micro-batches.
        """
        length = inputs["input_ids"].shape[1]
        padded = -(-length // self._multiple) * self._multiple
        if padded != length:
            if self._counts_all_tokens and "attention_mask" not in inputs:
                raise UsageError(
                    f"output_router_logits counts all tokens, and sequences of {length} tokens would be padded to a "
                    f"multiple of {self._multiple} to be split: set {spelled('block_size', padded)}"
                )
            kept = {name: value for name, value in inputs.items() if name == OWN_SHAPE}
            inputs = (
                pad_to_multiple({n: v for n, v in inputs.items() if n not in kept}, self._multiple)
                | kept
            )
        if self._context is not None:
            inputs = self._context.shard_inputs(inputs)
        if self.training:
            return self._pipeline.train(micro_batches, inputs)
        return self._pipeline.evaluate(micro_batches, inputs)
