"""A run to estimate: a model on GPUs, its batch, its layout, and how it uses memory."""

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, get_args

from hfscale.core.options import check_options
from hfscale.core.spelling import spelled
from hfscale.core.tables import read_table
from hfscale.errors import LayoutError, UnsupportedModelError, UsageError
from hfscale.facts.activations import factors_of, has_scores
from hfscale.facts.hardware import Accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.schedules import (
    PLANNER_SCHEDULES,
    SCHEDULES,
    rank_layers,
    schedule_name,
    supports,
)
from hfscale.facts.support import Combination, check_support
from hfscale.facts.tower_shape import TowerShape
from hfscale.planner.options import MAX_RANKS, LayoutOptions, Precision, Schedule
from hfscale.planner.task_checks import check_task

OPTIMIZERS: dict[str, dict[str, Any]] = read_table("planner/optimizers.toml")
"""What is known about each `Optimizer`: `state_bytes`, `traffic_bytes`, `update_share`, and its name in Trainer,
`trainer`, if any."""

HOPPER_TFLOPS = 700.0
"""bf16 peak, TFLOP/s, from which a device counts as Hopper or later."""
FUSED_HEAD_WIDTH = 128
"""Widest heads that cuDNN's fused attention trains with before Hopper."""


def planner_schedule(name: str) -> Schedule:
    """Return the planner's name of a schedule of torch; `Interleaved1F1B` is 1F1B with several stages per rank.

    Args:
        name (`str`): a name in `hfscale.facts.schedules.SCHEDULES`.
    """
    schedules: tuple[Schedule, ...] = get_args(Schedule)
    with_one_stage = "1F1B" if name == "Interleaved1F1B" else name
    return next(one for one in schedules if PLANNER_SCHEDULES[one] == with_one_stage)


@dataclass(frozen=True, kw_only=True)
class Job(LayoutOptions):
    """Describes one run to estimate. `check` tests whether its sizes fit together."""

    shape: ModelShape
    """The model."""
    gpu: Accelerator
    """The device, one per rank."""
    layout: ParallelLayout
    """Ranks along each axis."""
    tower: TowerShape | None = None
    """What reads images, with the task `vision`."""
    teacher_shape: ModelShape | None = None
    """The teacher, with the task `distillation`."""
    # These options are inherited, and never None in a job.
    seq_len: int = field()
    micro_batch: int = field()
    global_batch: int = field()
    compile: bool = False
    liger: bool = False
    sequence_parallel: bool = True
    loss_parallel: bool = True
    chunked_loss: bool = False
    """Whether a fused loss (`liger`) is that of the recipes (`--fused_loss chunked`), and not that of Liger Kernel."""
    loss_kernel: bool = False
    """Whether one kernel computes the loss, which keeps nothing but bf16 logits and their gradient (flash-attn's
    cross-entropy, the default of llm-foundry)."""
    norm_kernel: bool = False
    """Whether one kernel computes each norm, which keeps nothing but its input and its output (torchtitan's Triton
    kernel of 2024)."""

    first_flash: bool = False
    """Whether attention runs in the first flash attention (Dao et al., arXiv 2205.14135) or its version in Triton, as
    in llm-foundry's tables, which were measured with torch 1.13."""
    bf16_gradients: bool = False
    """Whether Megatron keeps and reduces gradients in bf16, as NeMo's performance recipes do
    (`grad_reduce_in_fp32 = False`). Megatron-LM itself accumulates them in fp32 where parameters are in bf16
    (megatron/training/arguments.py)."""
    bare_experts: bool = False
    """Whether experts that no two ranks share are no unit of FSDP2, which then holds no copy of them and of their
    gradients (NeMo AutoModel, nemo_automodel/components/moe/parallelizer.py). FSDP2 copies also where one rank shards
    (torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py, `wait_for_unshard`)."""

    fused_exchange: bool = False
    """Whether a token is sent once to each rank that has some of its experts, by DeepEP's kernels, as in NeMo
    AutoModel. Otherwise it is sent to each of its experts, unless `overlapped_experts` says the same of Megatron."""

    @cached_property
    def data_parallel(self) -> int:
        """Number of ranks that read different sequences."""
        return self.layout.dp_replicate * self.layout.dp_shard

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches per step and data-parallel rank."""
        return max(1, self.global_batch // (self.data_parallel * self.micro_batch))

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank, after context parallelism."""
        return self.micro_batch * self.sequences_per_example * self.seq_len // self.layout.cp

    @property
    def has_pure_adamw(self) -> bool:
        """Whether AdamW keeps its moments in the format of pure bf16 parameters."""
        return self.pure_bf16 and self.optimizer in ("adamw", "adamw_foreach")

    @property
    def averages(self) -> int:
        """Copies of the trained weights in fp32 that an average keeps: one, or the snapshots of a mean."""
        if self.average_last is not None:
            return self.average_last
        return int(self.ema_decay is not None)

    @property
    def averages_on_host(self) -> bool:
        """Whether they are in the CPU's memory: they are asked to be, or the weights that the optimizer steps are."""
        return self.average_device == "cpu" or self.offload != "none"

    @property
    def value_bytes(self) -> float:
        """Bytes of a value in the format of the matrix products; those in fp8 are kept in bf16."""
        return 4.0 if self.precision == "fp32" else 2.0

    @property
    def sequence_split(self) -> int:
        """Ranks that split the activations between the matrix products: those of sequence parallelism."""
        return self.layout.tp if self.sequence_parallel else 1

    @property
    def logits_split(self) -> int:
        """Ranks that split the logits over the vocabulary."""
        return self.layout.tp if self.loss_parallel else 1

    @property
    def adapter_rank(self) -> int:
        """Rank of the adapters; 0 where all parameters train."""
        return 0 if self.method == "full" else self.lora_rank

    @property
    def writes_scores(self) -> bool:
        """Whether attention scores are written to memory: without flash attention, in Hugging Face's families that
        support neither it nor SDPA, and in Megatron where no fused kernel takes the heads (`has_unfused_heads`)."""
        if not self.flash_attention or self.has_unfused_heads:
            return True
        return self.stack == "hf" and has_scores(self.shape.model_type)

    @property
    def has_unfused_heads(self) -> bool:
        """Whether Megatron computes attention unfused because keys are wider than values, as in latent attention.

        Transformer Engine disables flash attention 2 for such heads, and cuDNN's kernels take heads wider than 128
        from Hopper on only (transformer_engine/pytorch/attention/dot_product_attention/utils.py,
        `get_attention_backend`; common/fused_attn/fused_attn.cpp, `nvte_get_fused_attn_backend`).
        """
        attention = self.shape.attention
        peak = self.gpu.bf16_tflops or self.gpu.fp16_tflops or 0.0
        return (
            self.stack == "megatron"
            and attention.head_dim != attention.value_head_dim
            and attention.head_dim > FUSED_HEAD_WIDTH
            and peak < HOPPER_TFLOPS
        )

    @cached_property
    def runs_parallel_trainer(self) -> bool:
        """Whether `ParallelTrainer` trains (recipes/tp_pp): all pipelines of Hugging Face's stack, and experts that
        are spread with tensor or context parallelism or over replicas."""
        return self.stack == "hf" and needs_parallel_trainer(self.layout, self.expert_parallel)

    @property
    def is_native(self) -> bool:
        """Whether transformers distributes the model itself (`distributed_config`), as expert parallelism of Hugging
        Face's stack does among data-parallel ranks."""
        return self.spreads_experts and not self.runs_parallel_trainer

    @property
    def spreads_experts(self) -> bool:
        """Whether whole experts are spread over ranks by transformers' functions, as in Hugging Face's stack.

        The ranks of a tensor-parallel group have different experts, and each sends a part of the tokens they share.
        """
        return self.stack == "hf" and self.expert_parallel > 1

    @property
    def layout_summary(self) -> str:
        """The axes of more than one rank, and the ranks that share experts, such as `shard 16 ep 8`."""
        return layout_summary(self.layout, self.expert_parallel)

    @property
    def known_zero(self) -> int:
        """The ZeRO stage by which rules know the run: `ParallelTrainer` shards by FSDP2, also where one rank does."""
        is_one = self.layout.dp_shard * self.layout.cp == 1
        return 3 if self.runs_parallel_trainer and is_one and self.zero == 0 else self.zero

    @property
    def sequences_per_example(self) -> int:
        """Sequences that a unit of the batch has: two in a pair of `dpo`."""
        return 2 if self.task == "dpo" else 1

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a step trains on, over all ranks."""
        return self.global_batch * self.sequences_per_example * self.seq_len

    @property
    def generates(self) -> bool:
        """Whether a step trains on completions that the model generates in it."""
        return self.task in ("grpo", "distillation")

    @property
    def trains_projector(self) -> bool:
        """Whether what leads from the vision tower to the language model is trained."""
        return self.method == "full" and not self.frozen_projector

    @property
    def shares_teacher(self) -> bool:
        """Whether the ranks of FSDP2 share the teacher's weights."""
        return self.zero == 3 and self.layout.dp_shard > 1 and not self.whole_teacher

    @property
    def has_reference_pass(self) -> bool:
        """Whether a step computes log-probabilities of the reference."""
        return (self.task == "dpo" and not self.precompute_ref_log_probs) or (
            self.task == "grpo" and self.beta > 0
        )

    @property
    def has_reference_model(self) -> bool:
        """Whether the reference is a model of its own: with adapters it is the policy without them."""
        return self.has_reference_pass and self.method == "full"

    @property
    def is_megatron_deepspeed(self) -> bool:
        """Whether the framework is Megatron-DeepSpeed of 2021 and 2022, with which BLOOM and MT-NLG were trained: it
        sharded optimizer states before flash attention existed, when Megatron-LM itself did not."""
        return self.stack == "megatron" and self.zero == 1 and not self.flash_attention

    @cached_property
    def schedule_name(self) -> str:
        """The schedule's name in `hfscale.facts.schedules.SCHEDULES`."""
        return schedule_name(self.schedule, self.virtual_stages)

    def schedule_runs(self, micro_batches: int) -> bool:
        """Return whether the schedule of the pipeline runs with a number of micro-batches per step.

        Args:
            micro_batches (`int`): micro-batches per step.
        """
        return supports(
            self.schedule_name,
            pp=self.layout.pp,
            stages_per_rank=self.virtual_stages,
            micro_batches=micro_batches,
        )

    @property
    def is_v_shaped(self) -> bool:
        """Whether the first pipeline rank holds both ends of the model."""
        return SCHEDULES[self.schedule_name] == "v"

    @property
    def embedding_is_a_layer(self) -> bool:
        """Whether pipeline stages count the embedding and the head as a layer each (`layer_split`)."""
        pp = self.layout.pp
        layers = self.shape.layers
        return self.rank_layers is None and pp > 2 and layers % pp != 0 and (layers + 2) % pp == 0

    @cached_property
    def layer_split(self) -> tuple[int, int]:
        """Number of layers of the fullest pipeline rank, and of the one with the head.

        `ParallelTrainer` divides layers by cost (`rank_layers`). The other frameworks count the embedding and the head
        as a layer each if the layers do not divide but would with two more, as for BLOOM and Llama 3 405B; otherwise
        the first stages hold one layer more.
        """
        pp = self.layout.pp
        layers = self.shape.layers
        if self.rank_layers is not None:
            return max(self.rank_layers), self.rank_layers[0 if self.is_v_shaped else -1]
        if layers % pp == 0 or pp == 1:
            return layers // pp, layers // pp
        if self.stage_units > layers:
            each = self.stage_units // pp
            return (each if pp > 2 else each - 1), each - 1
        return -(-layers // pp), layers // pp

    @cached_property
    def stage_units(self) -> int:
        """Layers that the pipeline's stages divide; two more where the embedding and the head count as a layer
        each."""
        layers = self.shape.layers
        is_counted = (
            self.stack != "hf" and layers % self.layout.pp and (layers + 2) % self.layout.pp == 0
        )
        return layers + 2 if is_counted else layers

    @cached_property
    def rank_layers(self) -> tuple[int, ...] | None:
        """Number of layers of each pipeline rank of `ParallelTrainer`; None without pipeline and for other
        frameworks."""
        if self.stack != "hf" or self.layout.pp == 1:
            return None
        head = self.shape.head_layers
        return rank_layers(
            self.shape.layers, head, self.layout.pp, self.virtual_stages, self.schedule_name
        )

    def check(self) -> None:
        """Check that all options are known and all sizes fit together.

        Raises:
            LayoutError: sizes do not fit together; the message gives the numbers and what would fit.
            UnsupportedModelError: the key-value heads do not divide the attention heads.
            UsageError: an option is unknown, or the device does not support the precision.
        """
        check_options(type(self), vars(self))
        if self.layout.world_size > MAX_RANKS:
            raise LayoutError(
                f"layout {self.layout} has {self.layout.world_size:,} ranks: use at most {MAX_RANKS:,}"
            )
        if self.precision == "fp8" and self.gpu.fp8_tflops is None:
            raise UsageError(
                f"{spelled('precision')} is fp8, but no fp8 peak of {self.gpu.name} is known: use "
                f"{spelled('precision')} bf16"
            )
        if self.precision == "bf16" and self.gpu.bf16_tflops is None:
            other = "fp16" if self.gpu.fp16_tflops else "fp32"
            raise UsageError(
                f"{spelled('precision')} is bf16, but {self.gpu.name} does not support it: use "
                f"{spelled('precision')} {other}"
            )
        self._check_model()
        self._check_experts()
        self._check_averages()
        self._check_activation_offload()
        check_task(self, strategy_of(self))
        share = self.data_parallel * self.micro_batch
        if self.global_batch % share:
            fit = max(share, round(self.global_batch / share) * share)
            raise LayoutError(
                f"{spelled('global_batch')} is {self.global_batch}, which is not a multiple of {self.data_parallel} "
                f"data-parallel ranks x {spelled('micro_batch')} {self.micro_batch}: use {fit}"
            )

    def _check_model(self) -> None:
        tp = self.layout.tp
        pp = self.layout.pp
        cp = self.layout.cp
        shape = self.shape
        check_memory_is_known(shape, self.stack)
        if self.method == "qlora":
            asked = Combination(planned=True, method=self.method, family=shape.model_type)
            check_support(asked, "family")
        # Each would otherwise be a fraction of a head, a layer or an expert in the formulas, without an error.
        heads = shape.attention.heads
        kv_heads = shape.attention.kv_heads
        if heads % kv_heads:
            raise UnsupportedModelError(
                f"num_key_value_heads is {kv_heads}, which does not divide num_attention_heads {heads}: use a divisor "
                f"of {heads} in the model's config"
            )
        if heads % tp:
            raise LayoutError(
                f"{spelled('tp')} is {tp}, which does not divide {heads} attention heads: use {_divisor(heads, tp)}"
            )
        common = shape.common_kv_heads
        if common % tp and tp % common:
            raise LayoutError(
                f"{spelled('tp')} is {tp}, which does not divide {common} key-value heads: use {_divisor(common, tp)}"
            )
        if pp * self.virtual_stages > self.stage_units:
            raise LayoutError(
                f"{spelled('pp')} {pp} x {spelled('virtual_stages')} {self.virtual_stages} needs "
                f"{pp * self.virtual_stages} layers, and the model has {shape.layers}: use {spelled('pp')} of at most "
                f"{shape.layers // self.virtual_stages}"
            )
        if self.virtual_stages > 1 and pp == 1:
            raise LayoutError(
                f"{spelled('virtual_stages')} is {self.virtual_stages}, which needs a pipeline: set {spelled('pp')} "
                "above 1"
            )
        if self.is_v_shaped and self.virtual_stages != 2 and pp > 1:
            raise LayoutError(
                f"{spelled('virtual_stages')} is {self.virtual_stages}, but {spelled('schedule')} {self.schedule} "
                "has 2 stages "
                "per rank: use 2"
            )
        if cp > 1 and self.seq_len % (2 * cp):
            raise LayoutError(
                f"{spelled('cp')} is {cp}, which splits sequences into {2 * cp} parts, and {spelled('seq_len')} "
                f"{self.seq_len} "
                f"does not divide by that: use {self.seq_len // (2 * cp) * 2 * cp or 2 * cp}"
            )
        if self.method != "full" and self.lora_rank < 1:
            raise UsageError(
                f"{spelled('lora_rank')} is {self.lora_rank}: give a rank of at least 1, such as 16"
            )
        if self.expert_parallel > 1 and (
            shape.moe is None or shape.moe.experts % self.expert_parallel
        ):
            experts = shape.moe.experts if shape.moe else 0
            raise LayoutError(
                f"{spelled('expert_parallel')} is {self.expert_parallel}, which does not divide {experts} experts: "
                "use 1"
            )
        if self.stack == "hf" and self.expert_parallel > 1:
            self._check_spread_experts()
        if self.overlapped_experts and not can_overlap_experts(self):
            raise LayoutError(
                f"{spelled('overlapped_experts')} needs {spelled('stack')} megatron, {spelled('expert_parallel')} "
                "above 1, at "
                "least two micro-batches, no full recomputation, and in a pipeline "
                f"{spelled('virtual_stages')} above 1: set these, or leave it out"
            )

    def _check_experts(self) -> None:
        given = spelled("experts_implementation", self.experts_implementation)
        if self.experts_implementation != "grouped_mm" and self.shape.moe is None:
            raise UsageError(
                f"{given} needs a mixture of experts, which this model is not: leave it out"
            )
        asked = Combination(
            planned=True,
            engine=self.stack,
            method=self.method,
            compile=self.compile,
            expert_parallel=self.expert_parallel,
            experts_implementation=self.experts_implementation,
        )
        check_support(asked, "experts_implementation")

    def _check_activation_offload(self) -> None:
        if not self.activation_offload:
            return
        asked = Combination(
            planned=True,
            engine="parallel_trainer" if self.runs_parallel_trainer else self.stack,
            recompute=self.activation_checkpointing,
            expert_parallel=self.expert_parallel,
            activation_offload=self.activation_offload,
        )
        check_support(asked, "activation_offload")

    def _check_averages(self) -> None:
        if self.ema_decay is not None and self.average_last is not None:
            given = spelled("average_last", self.average_last)
            other = spelled("ema_decay", self.ema_decay)
            raise UsageError(f"{given} excludes {other}: give one of them")
        if self.average_device == "cpu" and not self.averages:
            given = spelled("average_device", "cpu")
            raise UsageError(f"{given} has no average to keep: give {spelled('ema_decay')} too")
        asked = Combination(planned=True, engine=self.stack, averages=bool(self.averages))
        check_support(asked, "averages")

    def _check_spread_experts(self) -> None:
        asked = Combination(
            planned=True,
            engine="parallel_trainer" if self.runs_parallel_trainer else "trainer",
            trl=self.task != "text",
            task=self.task,
            expert_parallel=self.expert_parallel,
            zero=self.known_zero,
            tp=self.layout.tp,
            pp=self.layout.pp,
            cp=self.layout.cp,
            method=self.method,
            offload=self.offload,
        )
        check_support(asked, "expert_parallel")
        fitting = expert_groups(self.shape, self.layout)
        if self.expert_parallel not in fitting:
            layout = self.layout
            ranks = layout.dp_shard * layout.cp * layout.tp
            axes = spelled("dp_shard") if ranks == layout.dp_shard else "a stage of it"
            multiple = (
                f", or is no multiple of {spelled('tp')} {layout.tp}" if layout.tp > 1 else ""
            )
            multiple += ", and is no number of complete replicas" if layout.dp_replicate > 1 else ""
            near = max((size for size in fitting if size <= self.expert_parallel), default=1)
            raise LayoutError(
                f"{spelled('expert_parallel')} is {self.expert_parallel}, which does not divide the {ranks} ranks "
                f"that share one replica ({axes}){multiple}: use {near}"
            )


def check_memory_is_known(shape: ModelShape, stack: str) -> None:
    """Check that the memory of a model's layers is known as a framework computes them.

    Args:
        shape (`ModelShape`): the model.
        stack (`str`): the training framework.

    Raises:
        UnsupportedModelError: some of its layers carry a state or have other heads, and they were not measured, or
            only in transformers.
    """
    if shape.other_attention is None:
        return
    if stack != "hf":
        raise UnsupportedModelError(
            f"the memory of {shape.model_type} is not known in the stack {stack}, only in hf: use --stack hf"
        )
    factors_of(shape.model_type, "mixed", "none")


def check_pure(pure_bf16: bool, precision: Precision) -> None:
    """Check that parameters and states in bf16 (`--pure-bf16`) belong to the format of the matrix products.

    Raises:
        UsageError: the matrix products are in fp16 or fp32.
    """
    if pure_bf16 and precision not in ("bf16", "fp8"):
        raise UsageError(
            f"{spelled('pure_bf16')} is given with {spelled('precision')} {precision}: use {spelled('precision')} "
            "bf16, or leave it out"
        )


FINE_GRAINED = 64
"""Number of experts from which a mixture counts as one of many small experts, as DeepSeek's: Mixtral and Grok have 8,
DBRX 16."""


def is_fine_grained(shape: ModelShape) -> bool:
    """Return whether a model is a mixture of many small experts, at least `FINE_GRAINED`."""
    return shape.moe is not None and shape.moe.experts >= FINE_GRAINED


def can_overlap_experts(job: Job) -> bool:
    """Return whether tokens can be sent to their experts while another micro-batch is computed.

    Megatron-Core can do this (`--overlap-moe-expert-parallel-comm`) with expert parallelism, at least two
    micro-batches, no full recomputation, and in a pipeline several stages per rank.
    """
    is_interleaved = job.layout.pp == 1 or job.virtual_stages > 1
    has_two_micro_batches = job.expert_parallel > 1 and job.micro_batches > 1
    return (
        job.stack == "megatron"
        and has_two_micro_batches
        and job.activation_checkpointing != "full"
        and is_interleaved
    )


def expert_groups(shape: ModelShape, layout: ParallelLayout) -> list[int]:
    """Return the numbers of ranks above 1 over which Hugging Face's stack can spread the experts of a layer.

    Args:
        shape (`ModelShape`): the model; without experts there are none.
        layout (`ParallelLayout`): ranks along each axis. The ranks are those of a stage of one replica, in complete
            tensor-parallel groups, or those of several complete replicas.
    """
    if shape.moe is None:
        return []
    ranks = layout.dp_shard * layout.cp * layout.tp
    inside = [size for size in range(layout.tp, ranks + 1, layout.tp) if ranks % size == 0]
    across = [
        ranks * number
        for number in range(2, layout.dp_replicate + 1)
        if layout.dp_replicate % number == 0
    ]
    return [size for size in (*inside, *across) if size > 1 and shape.moe.experts % size == 0]


def needs_parallel_trainer(layout: ParallelLayout, expert_parallel: int) -> bool:
    """Return whether only `ParallelTrainer` of Hugging Face's stack runs a layout: pipelines, and experts that are not
    spread among the data-parallel ranks of one replica.

    Tensor and context parallelism without spread experts are those of Trainer.

    Args:
        layout (`ParallelLayout`): ranks along each axis.
        expert_parallel (`int`): ranks that share the experts of a layer.
    """
    if layout.pp > 1 or expert_parallel == 1:
        return layout.pp > 1
    return layout.tp * layout.cp > 1 or (
        layout.dp_replicate > 1 and expert_parallel > layout.dp_shard
    )


def _divisor(number: int, near: int) -> int:
    """The largest divisor of `number` up to `near`."""
    return max(d for d in range(1, min(number, near) + 1) if number % d == 0)


def layout_summary(layout: ParallelLayout, expert_parallel: int) -> str:
    """Return the axes of more than one rank, and the ranks that share experts, such as `shard 16 ep 8`.

    Args:
        layout (`ParallelLayout`): ranks along each axis.
        expert_parallel (`int`): the data-parallel ranks that share the experts of a layer, which are no axis of their
            own.
    """
    return f"{layout.summary} ep {expert_parallel}" if expert_parallel > 1 else layout.summary


def layout_sizes(layout: ParallelLayout, expert_parallel: int) -> dict[str, int]:
    """Return the sizes of a layout's axes, and of expert parallelism as `ep`, for JSON.

    Args:
        layout (`ParallelLayout`): ranks along each axis.
        expert_parallel (`int`): ranks that share the experts of a layer.
    """
    return {**asdict(layout), "ep": expert_parallel}


def strategy_of(job: Job) -> str:
    """Return the name of a job's strategy, as it is used in checkpoints and configs."""
    layout = job.layout
    if job.offload != "none":
        return f"zero{max(1, job.zero)}"
    if job.is_native:
        return "native"
    if layout.world_size == 1:
        return "single"
    if layout.tp > 1 or job.runs_parallel_trainer or layout.pp > 1:
        return "parallel"
    if job.zero == 3:
        return "fsdp2"
    return ("ddp", "zero1", "zero2")[job.zero]


def splits_activations(framework: str, layout: ParallelLayout, expert_parallel: int = 1) -> bool:
    """Return whether a framework's tensor parallelism also splits activations between the matrices by default.

    These are norms and residuals, split along the sequence, and the logits, on which the loss is computed as they are.
    transformers' tensor-parallel plans all-reduce the full activation and gather the logits instead.
    `ParallelTrainer` keeps the logits split and can split the sequence (`--sequence_parallel`); plans for it do.

    Args:
        framework (`str`): the training framework: `hf`, `titan` or `megatron`.
        layout (`ParallelLayout`): ranks along each axis.
        expert_parallel (`int`): ranks that share the experts of a layer.
    """
    return framework != "hf" or (layout.tp > 1 and needs_parallel_trainer(layout, expert_parallel))
