"""Constants of the training frameworks, and constants that all of them share, from `frameworks.toml`.

A framework is what `--stack` names: `hf` (Transformers, Accelerate and DeepSpeed), `titan` (torchtitan, torchtune) or
`megatron`. Its time constants are fitted by `benchmarks/planner_fit.py` to published runs, a few per framework.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from hfscale.core.spelling import spelled
from hfscale.core.tables import read_table
from hfscale.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Describes how well a training framework uses the hardware, and what it keeps in memory."""

    name: str
    """`hf`, `titan` or `megatron`."""
    about: str
    """The software that it stands for."""

    # -- time ---------------------------------------------------------------------------------------------------------
    matmul: float
    """Sustained rate of large matrix products, relative to the best one measured on the device alone."""
    fp8_gain: float
    """Speed of fp8 matrix products with their casts, relative to bf16 products."""
    fp8_rowwise_gain: float
    """The same with an fp8 scale per row."""
    attention_ampere: float
    """Rate of the attention kernel relative to the best matrix product measured on the device alone, on Ampere and
    Ada."""
    attention_hopper: float
    """The same on Hopper and later, where kernels reach less of it."""
    passes_h: float
    """Reads and writes of a hidden-wide activation per layer's forward pass, outside matrices and attention."""
    passes_f: float
    """Reads and writes of an MLP-wide activation per layer's forward pass."""
    compiled_passes: float
    """Fraction of both that is left with torch.compile."""
    loss_bytes: float
    """Bytes of memory traffic per logit of head and cross-entropy, forward and backward."""
    overlap_dp: float
    """Fraction of the data-parallel communication that a computation at the same time hides."""
    overlap_tp: float
    """Fraction of the tensor-parallel communication that is hidden."""
    selective_matmul: float
    """Fraction of the matrix products that selective recomputation runs again."""
    selective_attention: float
    """Fraction of attention that selective recomputation runs again."""
    launch_s: float
    """CPU time to launch one layer's forward pass, seconds; a GPU that is faster idles."""
    pass_s: float
    """Seconds of a recomputed layer's pass that do not depend on the number of tokens, in Megatron-DeepSpeed of 2022:
    BLOOM's prototypes are a tenth slower with two sequences per micro-batch than with four, in every layout."""
    step_s: float
    """Seconds per step that are not modelled: logging, data, clipping."""

    # -- errors for sources that the fit has not seen (benchmarks/planner_fit.py) -------------------------------------
    time_error: float
    """Error of predicted times that half of the runs keep, in logarithm: smaller differences between two layouts mean
    nothing."""
    time_range: float
    """Error of predicted times that 80% of the runs keep, in logarithm."""
    memory_range: float
    """Error of predicted peaks that 80% of the runs keep, in logarithm."""
    reading_range: float
    """The same of what nvidia-smi shows where layers are not compiled (benchmarks/planner_published.py)."""

    # -- memory -------------------------------------------------------------------------------------------------------
    kept: Mapping[str, float] | None = None
    """Bytes kept per token and layer and unit of a width: `hidden` (norms, residuals), `query` (queries, attention
    output), `kv`, `mlp` or `plain_mlp` (gated or not), and `routed`, the hidden width for each expert that a token
    passes (its input, and its output where the router weighs it). None for Hugging Face's models, whose bytes differ
    between families (`hfscale.facts.activations`)."""
    compiled_kept: float
    """Fraction of the kept bytes that is left with torch.compile."""
    loss_kept: float
    """Bytes per logit at the loss's peak."""
    compiled_loss_kept: float
    """The same where torch.compile compiles the loss too."""
    split_loss_kept: float
    """The same where the loss is computed on logits that stay split over tensor-parallel ranks."""
    gradient_bytes: float
    """Bytes per reduced gradient."""
    context_gib: float
    """Memory of CUDA context and libraries, GiB."""
    cached: float
    """Freed blocks that the allocator keeps while the device has room, relative to what is not states."""


@dataclass(frozen=True, kw_only=True)
class SharedConstants:
    """Holds the constants of hardware and networks that are the same for all frameworks."""

    memory_rate: float
    """Fraction of the memory bandwidth that streaming kernels reach."""
    link_rate: float
    """Fraction of the NVLink or PCIe bandwidth that collectives reach."""
    network_rate: float
    """Fraction of the network's bandwidth that collectives reach."""
    hop_s: float
    """Latency of one step of a ring inside a node, seconds."""
    network_hop_s: float
    """Latency of one step of a ring between nodes, seconds."""
    misaligned: float
    """Relative rate of matrix products whose width per rank is not a multiple of 64."""
    power_exponent: float
    """Exponent of (power limit / usual power limit of the series) in the sustained rate."""
    node_drift: float
    """Relative slowdown per doubling of the number of nodes, by stragglers and jitter."""
    first_flash: float
    """Rate of the first flash attention relative to the second one."""
    attention_half: float
    """Tokens per sequence with which attention kernels reach half of their rate for long sequences."""
    ring_attention: float
    """Rate of attention in blocks around a ring of context-parallel ranks, relative to that of unsplit sequences."""
    moe_time_range: float
    """Error of predicted times of mixtures of experts that 80% of the runs keep, in logarithm."""
    imbalance: float
    """Tokens of the busiest rank of a mixture of experts, relative to the average."""
    fragmentation: float
    """Memory that the allocator reserves for what is not states, relative to what is in use."""
    group_gib: float
    """Memory of NCCL's buffers per group of ranks, GiB."""


_TABLE: dict[str, dict[str, Any]] = read_table("planner/frameworks.toml")


@cache
def shared_constants() -> SharedConstants:
    """Return the constants that all frameworks share."""
    return SharedConstants(**_TABLE["shared"])


@cache
def find_framework(name: str) -> Framework:
    """Return the framework called `name`.

    Raises:
        UsageError: there is none of this name; the message lists the names.
    """
    names = framework_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UsageError(
            f"{spelled('stack')} is {name!r}, which is not known{hint}: use one of {', '.join(names)}"
        )
    return Framework(name=name, **_TABLE[name])


def framework_names() -> tuple[str, ...]:
    """List the names of all frameworks."""
    return tuple(name for name in _TABLE if name != "shared")
