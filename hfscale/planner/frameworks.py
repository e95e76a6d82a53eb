"""The constants of the software that trains, by *stack*, and those that all stacks share; from `frameworks.toml`.

The time constants are fitted by `benchmarks/planner_fit.py` on published runs, a few per stack, never one per run.
"""

import difflib
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from hfscale.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Framework:
    """How well one kind of software uses the hardware, and what it keeps in memory."""

    name: str
    """`hf`, `titan` or `megatron`."""
    about: str
    """Which software it stands for."""

    # -- time ---------------------------------------------------------------------------------------------------------
    matmul: float
    """Sustained rate of large matrix products, as part of the best one measured on the device alone."""
    fp8_gain: float
    """Speed of fp8 matrix products with their casts, over bf16 ones."""
    fp8_rowwise_gain: float
    """The same with a scale per row."""
    attention_ampere: float
    """Rate of the attention kernel, as part of the device's bf16 peak: Ampere, Ada."""
    attention_hopper: float
    """The same on Hopper and later, whose peak older kernels reach less of."""
    passes_h: float
    """Reads and writes of a hidden-wide activation per layer's forward pass, outside matrices and attention."""
    passes_f: float
    """Reads and writes of an MLP-wide activation per layer's forward pass."""
    compiled_passes: float
    """What torch.compile leaves of both."""
    loss_bytes: float
    """Bytes moved per logit by head and cross-entropy, forward and backward."""
    overlap_dp: float
    """Part of the data-parallel traffic under a computation that costs nothing."""
    overlap_tp: float
    """Part of the tensor-parallel traffic that is hidden."""
    selective_matmul: float
    """Part of the matrix products that selective recomputation runs again."""
    selective_attention: float
    """Part of attention that it runs again."""
    launch_s: float
    """Host time to launch one layer's forward pass; a GPU that is faster waits."""
    pass_s: float
    """Time of a recomputed layer's pass that does not grow with its tokens, in Megatron-DeepSpeed of 2022: BLOOM's
    prototypes lose a tenth at two sequences per micro-batch against four, however they are cut."""
    step_s: float
    """Host and optimizer time per step that no model explains: logging, data, clipping."""

    # -- memory -------------------------------------------------------------------------------------------------------
    kept_h: float
    """Bytes kept per token and layer, in hidden widths: norms, residuals."""
    kept_q: float
    """Bytes kept per token and layer, in query widths: queries, attention output."""
    kept_kv: float
    """Bytes kept per token and layer, in key and value widths."""
    kept_f: float
    """Bytes kept per token and layer, in MLP widths, where the MLP is gated."""
    kept_f_plain: float
    """The same where it is not."""
    kept_e: float
    """Bytes kept per token and layer of experts, in hidden widths, for each expert that a token passes: its input, and
    its output where that is weighted by the router."""
    compiled_kept: float
    """What torch.compile leaves of the kept bytes."""
    loss_kept: float
    """Bytes per logit at the loss's peak."""
    compiled_loss_kept: float
    """The same where torch.compile compiles the loss too."""
    split_loss_kept: float
    """The same where the loss is computed on logits that are split over tensor-parallel ranks."""
    gradient_bytes: float
    """Bytes per parameter of the gradients that are reduced."""
    context_gib: float
    """CUDA context and libraries."""


@dataclass(frozen=True, kw_only=True)
class SharedConstants:
    """Constants of hardware and networks under any stack."""

    memory_rate: float
    """Part of the memory bandwidth that streaming kernels reach."""
    link_rate: float
    """Part of the NVLink or PCIe bandwidth that collectives reach."""
    network_rate: float
    """Part of the network's bandwidth that collectives reach."""
    hop_s: float
    """Latency of one step of a ring inside a node."""
    network_hop_s: float
    """Latency of one step of a ring between nodes."""
    misaligned: float
    """Rate of matrices whose width per rank is no multiple of 64, against those whose is."""
    power_exponent: float
    """Sustained rate goes with (power limit / the series' usual one) to this."""
    node_drift: float
    """Slowdown per doubling of the number of nodes: stragglers and jitter."""
    ring_attention: float
    """Rate of attention in blocks around a ring of context-parallel ranks, against that of whole sequences."""
    imbalance: float
    """Busiest over average rank of a mixture of experts."""
    fragmentation: float
    """Memory the allocator reserves, over what is in use."""
    group_gib: float
    """NCCL's buffers of a group of ranks."""


@cache
def _table() -> dict[str, dict[str, float]]:
    text = resources.files("hfscale.planner").joinpath("frameworks.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def shared_constants() -> SharedConstants:
    """The constants that all stacks share."""
    return SharedConstants(**_table()["shared"])


@cache
def find_framework(name: str) -> Framework:
    """The stack called `name`.

    Raises:
        `UsageError`: There is none; the message names those there are.
    """
    names = framework_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UsageError(f"stack {name!r} is not known{hint}: use one of {', '.join(names)}")
    return Framework(name=name, **_table()[name])  # type: ignore[arg-type]


def framework_names() -> tuple[str, ...]:
    """All stacks."""
    return tuple(name for name in _table() if name != "shared")
