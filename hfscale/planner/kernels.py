"""Duration of one layer's computation on one rank: matrix products, attention, element-wise operations.

Every part is the time of its FLOPs at the sustained rate plus the time of its memory traffic at the sustained memory
bandwidth. All durations are in seconds. `tokens` are those of a micro-batch on one rank.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from hfscale.core.spelling import spelled
from hfscale.errors import UsageError
from hfscale.facts.hardware import Accelerator, Dtype, peak_tflops
from hfscale.facts.layer_shape import AttentionShape, Linear
from hfscale.facts.model_shape import LayerKind
from hfscale.planner.activations import weight_bytes
from hfscale.planner.adapters import has_merged_experts
from hfscale.planner.elementwise import (
    elementwise_bytes,
    has_liger_kernels,
    liger_loss_bytes,
    share_of_memory_time,
)
from hfscale.planner.experts import expert_costs, imbalance_of, layer_parameters
from hfscale.planner.frameworks import Framework, SharedConstants
from hfscale.planner.job import HOPPER_TFLOPS, Job
from hfscale.planner.options import Precision

DEFAULT_ACHIEVED = 0.8
"""Rate of the best matrix product relative to the peak, where none was measured: 80% on H100, 87% on A100 (Bekman, ML
Engineering, 2025)."""
GEFORCE_ACHIEVED = 1.0
"""The same for GeForce cards, which clock higher than the datasheet of the peak says, and whose tensor cores run at
half rate, so that the power limit does not slow them: an RTX 5060 Ti reached 47.0 of 47.4 TFLOP/s
(QuantumDrizzy/BLACKWALL, 2026), and all of a training step 148 of 165 on an RTX 4090 (torchtune's README: Llama 3.1
8B, LoRA with recomputation, 3,083 tokens/s)."""
USUAL_POWER_W = {"H100": 700.0, "H200": 700.0, "A100": 400.0, "B200": 1000.0}
"""Power limit, W, of the device on which the best matrix product of its series was measured."""
ALIGNMENT = 64
"""Widths that fill tensor-core tiles are multiples of this many 2-byte elements (NVIDIA, Matrix Multiplication
Background User's Guide)."""
TENSOR_CORE_WIDTH = 8
"""Matrices of 2-byte elements run on tensor cores if their widths are multiples of this many elements, 16 bytes
(NVIDIA, Matrix Multiplication Background User's Guide, table 1); others run at the fp32 rate. Flash attention pads its
heads."""
BACKWARD_ATTENTION = 2.5
"""FLOPs of flash attention's backward pass relative to its forward pass (Dao, arXiv 2307.08691, section 4)."""
SCORE_BYTES = 14.0
"""Bytes of memory traffic per attention score without flash attention, at 2 bytes per element: scores are written,
read and written by the fused softmax and by dropout with its mask, and read again (Korthikanti et al., arXiv
2205.05198, section 4.1, count what is kept)."""
EAGER_SCORE_BYTES = 24.0
"""The same in Hugging Face's `eager_attention_forward`, in which every operation is a kernel of its own (transformers
5.23): the product writes 2 bytes, scaling and the mask read and write 4 each, the softmax reads 2 and writes 4 in
fp32, the cast reads 4 and writes 2, and the product with the values reads 2."""
SOFTCAP_BYTES = {"gemma2": 12.0}
"""Further bytes of families that cap the scores: a division, a tanh and a multiplication."""
FP8_CAST_BYTES = 4.0
"""Bytes of memory traffic per element to cast an activation for an fp8 product: it is read in bf16 and written in fp8
twice, once transposed (Transformer Engine). Cast weights are reused by all micro-batches of a step."""
NF4_BYTES = 0.5 + 1 / 16 + 2.0
"""Bytes of memory traffic per parameter in NF4 and pass, in addition to the product's own 2 bytes: 4 bits and their
scales are read and 2 bytes are written, because the product runs on a copy in bf16 (bitsandbytes, `matmul_4bit`)."""
LONG_CONTEXT = 32_768
"""Tokens per sequence above which attention kernels come nearer to the peak of Hopper and later devices: the constants
were fitted to shorter sequences."""
LONG_CONTEXT_GAIN = 0.21
"""Relative gain per doubling of the sequence above `LONG_CONTEXT`, for at most five doublings. Set by hand so that a
million tokens run at about 60% of the peak, between what flash attention 2 and 3 reach (arXiv 2407.08608) and what TRL
published for a million tokens on eight H100."""
MERGE_BYTES = 8.0
"""Bytes of memory traffic per expert parameter and pass where experts have adapters: the product of an adapter's two
matrices is written and read, the weight is read and their sum is written (peft 0.21.2, `_LoraParameterProxy`); in the
backward pass the gradient of the sum is written, and read for each of the two matrices."""
MOE_PASSES = 12.0
"""Reads and writes of a hidden-wide activation, per expert that a token passes, to sort tokens by expert and back."""


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Holds the duration of an average layer's forward pass by part, in seconds."""

    matmul: float
    """Matrix products."""
    attention: float
    """Attention scores and the weighted sum of the values."""
    elementwise: float
    """Norms, activation functions, residuals, rotary positions."""
    elementwise_backward: float
    """The same in the backward pass."""
    routing: float = 0.0
    """Sorting tokens by expert and back."""
    merging: float = 0.0
    """Forming the merged copy of experts with adapters."""
    merged_matmul: float = 0.0
    """The part of `matmul` that multiplies with merged copies, whose gradients are formed too."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.matmul + self.attention + self.elementwise + self.routing + self.merging


class Work(Protocol):
    """What decides the rates of a device; a `Job` has it."""

    @property
    def gpu(self) -> Accelerator:
        """The device."""

    @property
    def precision(self) -> Precision:
        """Format of the matrix products."""

    @property
    def rowwise_fp8(self) -> bool:
        """Whether fp8 scales are per row."""


class Rates:
    """Computes the sustained rates of a device with a training framework.

    The attributes are `matmul`, `bf16_matmul` (the rate of products that are not in fp8) and `attention` in FLOP/s,
    and `memory` in bytes of memory traffic per second; `is_hopper` is whether the device is one of Hopper or later.

    Args:
        job (`Work`): the run, which gives the device and the format of the matrix products.
        framework (`Framework`): constants of the training framework.
        shared (`SharedConstants`): constants of hardware and networks.

    Raises:
        UsageError: no peak of the format is known for the device.
    """

    def __init__(self, job: Work, framework: Framework, shared: SharedConstants) -> None:
        gpu = job.gpu
        peak = _bf16_like_peak(job)
        best = _matmul_rate(gpu, peak, shared, job.precision)
        self.matmul = best * framework.matmul
        self.bf16_matmul = self.matmul
        if job.precision == "fp8" and gpu.fp8_tflops:
            self.matmul *= framework.fp8_rowwise_gain if job.rowwise_fp8 else framework.fp8_gain
        # Flash attention 2 reaches 35-40% of the peak there, and 50-70% on earlier devices (Shah et al.,
        # FlashAttention-3, arXiv 2407.08608)
        self.is_hopper = peak >= HOPPER_TFLOPS
        share = framework.attention_hopper if self.is_hopper else framework.attention_ampere
        self.attention = best * share
        self.memory = 1e12 * (gpu.achieved_memory_tb_s or gpu.memory_tb_s * shared.memory_rate)


def _bf16_like_peak(job: Work) -> float:
    """Dense peak, TFLOP/s, of the format of matrix products that are not in fp8; a UsageError if none is known."""
    gpu = job.gpu
    if job.precision == "fp32":
        peak = gpu.tf32_tflops or gpu.fp32_tflops
    else:
        # Products that are not in fp8 are in bf16
        format_of_products: Dtype = "fp16" if job.precision == "fp16" else "bf16"
        peak = peak_tflops(gpu, format_of_products)
    if peak is None:
        formats: tuple[Dtype, ...] = ("bf16", "fp16", "fp8")
        has = [name for name in formats if peak_tflops(gpu, name)]
        raise UsageError(
            f"{spelled('precision')} is {job.precision}, but no {job.precision} peak of {gpu.name} is known: use "
            f"{' or '.join(has)}"
        )
    return peak


def _power_factor(gpu: Accelerator, shared: SharedConstants) -> float:
    """Relative sustained rate of a device whose power limit is below the usual one of its series; 1 for PCIe cards,
    and where one of the limits is not known."""
    usual = USUAL_POWER_W.get(gpu.name.partition("-")[0])
    if usual is None or gpu.power_w is None or "PCIe" in gpu.name or gpu.power_w >= usual:
        return 1.0
    return float((gpu.power_w / usual) ** shared.power_exponent)


def _matmul_rate(
    gpu: Accelerator, peak: float, shared: SharedConstants, precision: Precision
) -> float:
    """Rate, FLOP/s, of the best large matrix product on a device, measured on it if possible; `peak` is in TFLOP/s."""
    measured = {"fp16": gpu.achieved_fp16_tflops, "fp32": gpu.achieved_fp32_tflops}.get(precision)
    if measured:
        return measured * 1e12
    best = gpu.achieved_bf16_tflops
    is_geforce = any("GeForce" in name for name in gpu.device_names)
    share = GEFORCE_ACHIEVED if is_geforce else DEFAULT_ACHIEVED
    if best and gpu.bf16_tflops:
        share = best / gpu.bf16_tflops
    return peak * 1e12 * share * _power_factor(gpu, shared)


def layer_forward(
    job: Job, framework: Framework, shared: SharedConstants, rates: Rates
) -> LayerTime:
    """Compute the duration of an average layer's forward pass by part, in seconds.

    Args:
        job (`Job`): the run.
        framework (`Framework`): constants of the training framework.
        shared (`SharedConstants`): constants of hardware and networks.
        rates (`Rates`): sustained rates of the device.
    """
    matmul = attention = merged = 0.0
    merging = 0.0
    merges = has_merged_experts(job)
    if merges:
        merging = MERGE_BYTES * layer_parameters(job)[1] / rates.memory
    for kind in job.shape.layer_kinds:
        matmul += kind.share * _matrices_s(kind.linears, job, shared, rates)
        if merges:
            of_experts = [linear for linear in kind.linears if linear.copies > 1]
            merged += kind.share * _matrices_s(of_experts, job, shared, rates)
        attention += kind.share * _attention_s(kind, job, shared, rates)
    forward, backward = elementwise_bytes(job, framework)
    experts = expert_costs(job, weight_bytes(job))
    memory = rates.memory / share_of_memory_time(job)
    return LayerTime(
        matmul=matmul,
        attention=attention,
        elementwise=forward / memory + experts.forward_bytes / rates.memory,
        elementwise_backward=backward / memory + experts.backward_bytes / rates.memory,
        routing=_routing_s(job, framework, rates),
        merging=merging,
        merged_matmul=merged,
    )


def _matrices_s(
    linears: Iterable[Linear], job: Job, shared: SharedConstants, rates: Rates
) -> float:
    """Duration of matrix products of a layer's forward pass."""
    tokens = job.tokens
    tp = job.layout.tp
    seconds = 0.0
    is_fp8 = job.precision == "fp8"
    for linear in linears:
        k = linear.inputs
        n = linear.outputs
        rows = float(tokens)
        copies = 1.0
        rate = rates.matmul
        is_expert = linear.copies > 1
        if is_expert:
            copies = linear.copies / job.expert_parallel
            received = tokens * job.expert_parallel * linear.used / linear.copies
            rows = received * imbalance_of(job, shared)
        # Of a pair of matrices, tensor-parallel ranks split the outputs of the first and the inputs of the second.
        if is_expert and job.spreads_experts:
            rows /= tp
        elif linear.outputs == job.shape.hidden:
            k = k // tp
        else:
            n = n // tp
        if k % ALIGNMENT or n % ALIGNMENT:
            rate *= shared.misaligned
        moved = 2 * (rows * k + k * n + rows * n)
        if is_fp8:
            moved += FP8_CAST_BYTES * rows * k
        if job.method == "qlora" and job.shape.is_quantized(linear):
            moved += NF4_BYTES * k * n
        seconds += copies * (2 * rows * k * n / rate + moved / rates.memory)
    return seconds


def _attention_s(kind: LayerKind, job: Job, shared: SharedConstants, rates: Rates) -> float:
    """Duration of attention, or of linear attention, in a layer's forward pass.

    Causal flash attention computes half of the scores; without it (`Job.writes_scores`) all scores are computed and
    pass through memory. A query at position i attends to min(i, w) keys in a window of w; their mean over a sequence
    of S is w (1 - w / 2S).
    """
    attention = kind.mixer
    tokens = job.tokens
    if attention is None:
        return 0.0
    if not isinstance(attention, AttentionShape):
        return attention.flops_per_token * tokens / rates.attention
    heads = attention.heads / job.layout.tp
    seq_len = job.seq_len
    reach = seq_len if kind.window is None else min(seq_len, kind.window)
    widths = heads * (attention.head_dim + attention.value_head_dim)
    if not job.writes_scores:
        keys = reach * (1 - reach / (2 * seq_len))
        rate = rates.attention * reach / (reach + shared.attention_half)
        if job.first_flash:
            rate *= shared.first_flash
        # The constants were fitted to shorter sequences
        elif rates.is_hopper and job.stack == "hf" and seq_len > LONG_CONTEXT:
            rate *= 1 + LONG_CONTEXT_GAIN * min(5.0, math.log2(seq_len / LONG_CONTEXT))
        if job.layout.cp > 1:
            rate *= shared.ring_attention
        return 2 * widths * keys * tokens / rate
    scores = heads * tokens * seq_len
    rate = rates.bf16_matmul
    # Heads of an odd width do not run on tensor cores
    if attention.head_dim % TENSOR_CORE_WIDTH != 0 and job.gpu.fp32_tflops:
        rate = job.gpu.fp32_tflops * 1e12
    moved = SCORE_BYTES
    if job.stack == "hf":
        moved = EAGER_SCORE_BYTES + SOFTCAP_BYTES.get(job.shape.model_type, 0.0)
    return 2 * widths * seq_len * tokens / rate + moved * scores / rates.memory


def _routing_s(job: Job, framework: Framework, rates: Rates) -> float:
    shape = job.shape
    left = framework.compiled_passes if job.compile else 1.0
    split = job.layout.tp if job.spreads_experts else job.sequence_split
    width = shape.moe_share * MOE_PASSES * shape.top_k * shape.hidden / split
    return 2 * job.tokens * width * left / rates.memory


def head_s(job: Job, framework: Framework, rates: Rates) -> float:
    """Compute the seconds of head and cross-entropy of one micro-batch, forward and backward.

    TRL's tiled loss computes the logits again in the backward pass (TRL 1.16, kernels/chunked_logprob.py).

    Args:
        job (`Job`): the run.
        framework (`Framework`): constants of the training framework.
        rates (`Rates`): sustained rates of the device.
    """
    shape = job.shape
    vocab = shape.vocab / job.layout.tp
    passes = 3.0 if job.method == "full" else 2.0
    if job.task != "text":
        passes += 1.0
    products = passes * 2 * job.tokens * shape.hidden * vocab / rates.bf16_matmul
    if has_liger_kernels(job):
        return products + liger_loss_bytes(job) / rates.memory
    logits = vocab if job.loss_parallel else shape.vocab
    return products + framework.loss_bytes * job.tokens * logits / rates.memory
