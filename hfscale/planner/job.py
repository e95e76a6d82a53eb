"""What is to be estimated: a model on GPUs, its batch, its layout, and how the run treats memory."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from hfscale.errors import LayoutError, UsageError
from hfscale.facts.hardware import Accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.schedules import SCHEDULES, rank_layers, schedule_name
from hfscale.planner.model_view import view_of

Recompute = Literal["none", "selective", "full"]
"""Activations dropped in the forward pass and computed again in the backward pass."""
Precision = Literal["fp32", "bf16", "fp16", "fp8"]
"""Format of the matrix products; states stay fp32 unless `Job.pure`."""
Method = Literal["full", "lora", "qlora"]
"""Which parameters train; `qlora` holds the frozen ones in 4 bits."""
Optimizer = Literal["adamw", "adamw_bf16", "adamw_8bit", "sgd", "sgd_momentum", "adafactor", "muon"]
"""Optimizers by the size of their states."""
Offload = Literal["none", "optimizer", "full"]
"""What lives in the CPU's memory: optimizer states (and the update), or parameters and gradients too."""
Schedule = Literal["1f1b", "gpipe", "zero_bubble", "zbv", "dualpipev"]
"""Order of a pipeline's micro-batches; `1f1b` with more than one virtual stage is the interleaved one."""

MOST, MOST_RANKS = 10**9, 10**6
"""Largest sizes of a run, and number of its ranks, that are no slip of the keyboard."""

CHOICES = {
    "recompute": get_args(Recompute),
    "precision": get_args(Precision),
    "method": get_args(Method),
    "optimizer": get_args(Optimizer),
    "offload": get_args(Offload),
    "schedule": get_args(Schedule),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to estimate. `check` says whether its numbers fit together."""

    shape: ModelShape
    """The model."""
    gpu: Accelerator
    """The device, one per rank."""
    layout: ParallelLayout
    """Ranks along each axis."""
    seq_len: int
    """Tokens per sequence."""
    micro_batch: int
    """Sequences per data-parallel rank and micro-batch."""
    global_batch: int
    """Sequences per optimizer step, over all ranks."""
    framework: str = "hf"
    """Which software's constants hold: `hf`, `titan`, `megatron`."""
    zero: int = 0
    """States that data-parallel ranks share: 0 none, 1 optimizer, 2 and gradients, 3 and parameters (FSDP)."""
    recompute: Recompute = "none"
    """Activation recomputation."""
    precision: Precision = "bf16"
    """Format of the matrix products."""
    pure: bool = False
    """Whether parameters, gradients and optimizer states are all in the compute format."""
    compile: bool = False
    """Whether torch.compile fuses element-wise work."""
    method: Method = "full"
    """Which parameters train."""
    lora_rank: int = 16
    """Rank of the adapters, with `lora` and `qlora`."""
    optimizer: Optimizer = "adamw"
    """The optimizer."""
    offload: Offload = "none"
    """What lives in the CPU's memory."""
    virtual_stages: int = 1
    """Model chunks per pipeline rank."""
    schedule: Schedule = "1f1b"
    """Pipeline schedule."""
    sequence_parallel: bool = True
    """Whether tensor parallelism also splits norms and residuals along the sequence."""
    loss_parallel: bool = True
    """Whether the loss is computed on logits that stay split over the tensor-parallel ranks."""
    expert_parallel: int = 1
    """Ranks that share the experts of a layer."""
    overlapped_experts: bool = False
    """Whether tokens travel to their experts and back while another micro-batch is computed (`experts.py`)."""
    reshard: bool = True
    """Whether ZeRO-3 frees gathered parameters after the forward pass."""
    flash_attention: bool = True
    """Whether attention scores stay on chip."""
    fused_loss: bool = False
    """Whether logits are never held whole (Liger, chunked cross-entropy)."""
    compiled_loss: bool = True
    """Whether torch.compile, where it is on, compiles the loss too: Hugging Face's models compute it in their forward
    pass, torchtitan compiles it since 2025."""
    rowwise_fp8: bool = False
    """Whether fp8 scales are per row and not per tensor."""
    gpus_per_node: int = 8
    """Ranks that NVLink or PCIe joins."""
    network_gb_s: float | None = None
    """Bandwidth between nodes per GPU, one direction; None takes that of the vendor's reference node."""

    @cached_property
    def data_parallel(self) -> int:
        """Ranks that read different sequences."""
        return self.layout.dp_replicate * self.layout.dp_shard

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches per step and data-parallel rank."""
        return max(1, self.global_batch // (self.data_parallel * self.micro_batch))

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank, after context parallelism."""
        return self.micro_batch * self.seq_len // self.layout.cp

    @property
    def is_megatron_deepspeed(self) -> bool:
        """Whether the software is Megatron-DeepSpeed of 2021 and 2022, as for BLOOM and MT-NLG: optimizer states are
        shared before flash attention, when Megatron-LM itself did not."""
        return self.framework == "megatron" and self.zero == 1 and not self.flash_attention

    @cached_property
    def schedule_name(self) -> str:
        """The schedule's name in `hfscale.facts.schedules.SCHEDULES`."""
        return schedule_name(self.schedule, self.virtual_stages)

    @property
    def is_v_shaped(self) -> bool:
        """Whether the first pipeline rank holds both ends of the model."""
        return SCHEDULES[self.schedule_name] == "v"

    @cached_property
    def layer_split(self) -> tuple[int, int]:
        """Layers of the fullest pipeline rank, and of the one with the head.

        Hugging Face's stack cuts by cost (`rank_layers`). Else, where the layers do not divide but two more would, the
        embedding and the head each count as a layer, as in BLOOM and Llama 3 405B; else the first stages hold one
        layer more.
        """
        pp, layers = self.layout.pp, self.shape.layers
        if self.rank_layers is not None:
            return max(self.rank_layers), self.rank_layers[0 if self.is_v_shaped else -1]
        if layers % pp == 0 or pp == 1:
            return layers // pp, layers // pp
        if (layers + 2) % pp == 0:
            each = (layers + 2) // pp
            return (each if pp > 2 else each - 1), each - 1
        return -(-layers // pp), layers // pp

    @cached_property
    def rank_layers(self) -> tuple[int, ...] | None:
        """Layers of each pipeline rank where Hugging Face's stack cuts the model; None where it does not."""
        if self.framework != "hf" or self.layout.pp == 1:
            return None
        head = view_of(self.shape).head_layers
        return rank_layers(self.shape.layers, head, self.layout.pp, self.virtual_stages, self.schedule_name)

    def check(self) -> None:
        """Whether sizes fit together.

        Raises:
            `LayoutError`: They do not; the message names the numbers and what would fit.
            `UsageError`: A word is not one of those known.
        """
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise UsageError(f"{name} {getattr(self, name)!r} is not known: use one of {', '.join(known)}")
        for name in ("seq_len", "micro_batch", "global_batch", "virtual_stages", "expert_parallel", "gpus_per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LayoutError(f"{name}={value!r} is not a whole number of at least 1: give one")
            if value > MOST:
                raise LayoutError(f"{name}={value} is more than any run has: give a number up to {MOST:,}")
        if self.layout.world_size > MOST_RANKS:
            raise LayoutError(f"{self.layout} is more than {MOST_RANKS:,} ranks: give fewer")
        if self.zero not in (0, 1, 2, 3):
            raise LayoutError(f"zero={self.zero!r} is not a ZeRO stage: use 0, 1, 2 or 3")
        if self.precision == "fp8" and self.gpu.fp8_tflops is None:
            raise UsageError(f"{self.gpu.name} has no fp8 products that are known: use precision bf16")
        if self.precision == "bf16" and self.gpu.bf16_tflops is None:
            other = "fp16" if self.gpu.fp16_tflops else "fp32"
            raise UsageError(f"{self.gpu.name} has no bf16: use precision {other}")
        self._check_model()
        share = self.data_parallel * self.micro_batch
        if self.global_batch % share:
            fit = max(share, round(self.global_batch / share) * share)
            raise LayoutError(
                f"global batch {self.global_batch} is not a multiple of {self.data_parallel} data-parallel ranks x "
                f"micro-batch {self.micro_batch}: use {fit}"
            )

    def _check_model(self) -> None:
        tp, pp, cp, shape = self.layout.tp, self.layout.pp, self.layout.cp, self.shape
        heads, kv_heads = shape.attention.heads, shape.attention.kv_heads
        if heads % tp:
            raise LayoutError(f"tp={tp} does not divide the {heads} attention heads: use {_divisor(heads, tp)}")
        if kv_heads % tp and tp % kv_heads:
            raise LayoutError(f"tp={tp} does not divide the {kv_heads} key-value heads: use {_divisor(kv_heads, tp)}")
        if pp * self.virtual_stages > shape.layers:
            raise LayoutError(
                f"pp={pp} x {self.virtual_stages} virtual stages need as many layers; the model has {shape.layers}: "
                f"use pp={shape.layers // self.virtual_stages} at most"
            )
        if self.virtual_stages > 1 and pp == 1:
            raise LayoutError(f"virtual_stages={self.virtual_stages} needs a pipeline: set pp above 1")
        if self.is_v_shaped and self.virtual_stages != 2 and pp > 1:
            raise LayoutError(f"schedule {self.schedule} has 2 stages per rank, not {self.virtual_stages}: use 2")
        if self.seq_len % (2 * cp if cp > 1 else 1):
            raise LayoutError(f"cp={cp} cuts sequences into {2 * cp} parts, and {self.seq_len} tokens do not divide")
        if self.expert_parallel > 1 and (shape.moe is None or shape.moe.experts % self.expert_parallel):
            experts = shape.moe.experts if shape.moe else 0
            raise LayoutError(f"expert_parallel={self.expert_parallel} does not divide {experts} experts: use 1")
        if self.overlapped_experts and not can_overlap_experts(self):
            raise LayoutError(
                "overlapped_experts needs stack megatron, expert_parallel above 1, two micro-batches, no full "
                "recomputation, and in a pipeline virtual_stages above 1: correct one of them, or leave it out"
            )


FINE_GRAINED = 64
"""Experts from which a mixture is of DeepSeek's kind: Mixtral and Grok have 8, DBRX 16."""


def is_fine_grained(shape: ModelShape) -> bool:
    """Whether a model is a mixture of many small experts."""
    return shape.moe is not None and shape.moe.experts >= FINE_GRAINED


def can_overlap_experts(job: Job) -> bool:
    """Whether the exchange of experts can run beside another micro-batch: as Megatron-Core asks for it
    (`--overlap-moe-expert-parallel-comm`)."""
    is_pipelined_plainly = job.layout.pp > 1 and job.virtual_stages == 1
    has_a_pair = job.expert_parallel > 1 and job.micro_batches > 1
    return job.framework == "megatron" and has_a_pair and job.recompute != "full" and not is_pipelined_plainly


def _divisor(number: int, near: int) -> int:
    return max(d for d in range(1, min(number, near) + 1) if number % d == 0)


def strategy_of(job: Job) -> str:
    """The strategy's name, as checkpoints and configs use it."""
    layout = job.layout
    if job.offload != "none":
        return f"zero{max(1, job.zero)}"
    if layout.world_size == 1:
        return "single"
    if layout.tp > 1 or layout.pp > 1:
        return "parallel"
    if job.zero == 3:
        return "fsdp2"
    return ("ddp", "zero1", "zero2")[job.zero]


def splits_sequences(framework: str, layout: ParallelLayout) -> bool:
    """Whether tensor parallelism also splits norms and residuals along the sequence: transformers' plans reduce the
    whole activation instead; `ParallelTrainer` can split it (`--sequence_parallel`), and its plans do."""
    return framework != "hf" or (layout.pp > 1 and layout.tp > 1)


def splits_logits(framework: str, layout: ParallelLayout) -> bool:
    """Whether the loss is computed on logits that stay split over the tensor-parallel ranks: transformers' plans
    gather them, `ParallelTrainer` does not."""
    return framework != "hf" or (layout.pp > 1 and layout.tp > 1)
