"""Memory traffic of the operators outside matrix products and attention: norms, residuals, activations, casts.

Operators of uncompiled layers of transformers were counted, and so were Liger Kernel's
(`hfscale/facts/eager_traffic.toml`). Compiled layers and those of other frameworks have a number of passes over the
widths, to which published runs were fitted. All byte counts are those of one micro-batch on one rank.
"""

import math
from collections.abc import Mapping
from typing import Any

from hfscale.core.tables import read_table
from hfscale.facts.activations import layer_widths
from hfscale.planner.activations import regime_of
from hfscale.planner.adapters import target_modules
from hfscale.planner.experts import layer_parameters
from hfscale.planner.frameworks import Framework
from hfscale.planner.job import Job

_EAGER: dict[str, dict[str, Any]] = read_table("facts/eager_traffic.toml")
_SAME_OPERATORS = {"mixed": "bf16"}
"""Regimes whose operators are those of another: FSDP2's weights and residuals are in bf16 before autocast."""
NORM_PART = 0.5
"""Fraction of the reads and writes of hidden-wide activations that norms, residuals and dropout make: they keep 10 of
a layer's 24 h (Korthikanti et al., arXiv 2205.05198, section 4.2.2), and move somewhat more."""
L2_SPEED = 5.0
"""Rate of a level-2 cache relative to that of the memory beside it (`Accelerator.l2_mib`): about 5 TB/s of 1 on an RTX
4090 (Chips and Cheese, Microbenchmarking Nvidia's RTX 4090, 2022; an estimate from its figure, not measured here)."""
WORKING_SET_BYTES = 6.0
"""Bytes per hidden element that an element-wise kernel has in use: in a norm it reads a tensor of 2 bytes that the
previous kernel wrote, and writes one of 4 bytes that the next one reads."""
LIGER_LOGIT_BYTES = 12.0
"""Bytes of memory traffic per logit of Liger Kernel's fused loss: the product writes 2, the kernel reads 2 for the
sum of the exponentials, reads 2 again and writes the gradient in their place, and two products read it
(liger-kernel 0.8.5, ops/fused_linear_cross_entropy.py and ops/cross_entropy.py)."""
LIGER_WEIGHT_BYTES = {"autocast": 18.0, "fp32": 16.0}
"""Bytes of memory traffic per weight of the head and chunk of tokens: each chunk reads the weight for the logits and
for the gradient of its inputs, and reads and writes the sum of the weight's gradients. Under autocast an fp32 weight
is cast again for the first product, whose transposed view autocast does not remember."""
LIGER_HALF_WEIGHT_BYTES = {"full": 8.0, "lora": 4.0, "qlora": 4.0}
"""The same of a weight in 16 bits, which adapters leave without a gradient."""


def elementwise_bytes(job: Job, framework: Framework) -> tuple[float, float]:
    """Compute the bytes that an average layer reads and writes outside matrix products and attention.

    Where transformers' layers run uncompiled, their operators were counted. Otherwise it is a number of passes over
    the widths, which published runs were fitted to.

    Args:
        job (`Job`): the run.
        framework (`Framework`): constants of the training framework.

    Returns:
        `tuple[float, float]`: bytes of the forward and of the backward pass.
    """
    counted = _counted_operators(job)
    if counted is not None:
        of_forward = _counted_bytes(job, counted, "forward")
        of_backward = _counted_bytes(job, counted, "backward")
        return of_forward, of_backward
    shape = job.shape
    tp = job.layout.tp
    left = 1.0
    if job.compile:
        left = framework.compiled_passes
    # Norms and residuals are split only with sequence parallelism, activations inside attention and MLP always.
    outside = NORM_PART / job.sequence_split
    inside = (1 - NORM_PART) / tp
    hidden = framework.passes_h * shape.hidden * (outside + inside)
    gate = 0.5
    if shape.gated:
        gate = 1.0
    inner = framework.passes_f * gate * shape.mlp_width / tp
    widths = hidden + inner
    of_forward = 2 * job.tokens * widths * left
    return of_forward, 2 * of_forward


def share_of_memory_time(job: Job) -> float:
    """Compute the time of element-wise kernels relative to that of all their bytes through the device's memory.

    What a kernel reads was written by the one before it. The part of it that a fast level-2 cache holds does not pass
    through the memory.

    Args:
        job (`Job`): the run; 1 where the device has no such cache.
    """
    if job.gpu.l2_mib is None:
        return 1.0
    elements = job.tokens * job.shape.hidden / job.layout.tp
    working_set = WORKING_SET_BYTES * elements
    cache = job.gpu.l2_mib * 2**20
    held = min(1.0, cache / working_set)
    return 1 - held + held / L2_SPEED


def _counted_operators(job: Job) -> Mapping[str, Any] | None:
    """What was counted for the run's layers; None where they run compiled, in another framework, or were not counted.

    A layer norm is one kernel, and an RMS norm of transformers several.
    """
    if job.stack != "hf" or job.compile:
        return None
    regime = regime_of(job)
    name = _SAME_OPERATORS.get(regime, regime)
    has_layer_norms = job.shape.norm_parameters != job.shape.hidden
    if has_layer_norms:
        name = f"{regime}_layer_norm"
    return _EAGER.get(name)


def has_liger_kernels(job: Job) -> bool:
    """Return whether Liger Kernel computes norms, activations and the loss of uncompiled layers.

    Args:
        job (`Job`): the run; a fused loss in chunks is that of the recipes.
    """
    if job.compile or job.stack != "hf":
        return False
    return job.liger and not job.chunked_loss


def _counted_bytes(job: Job, counted: Mapping[str, Any], direction: str) -> float:
    """Bytes that the operators of an uncompiled layer read and write, with those of its adapters' small products."""
    shape = job.shape
    attention = shape.attention
    norms = shape.norms_per_layer / 2
    gate = 1.0
    if not shape.gated and not counted.get("plain_mlp"):
        gate = 0.5
    widths = {
        "hidden": norms * shape.hidden,
        "mlp": gate * shape.mlp_width,
        "query": attention.query_width,
        "kv": attention.kv_width,
        "normed": layer_widths(shape, job.seq_len)["normed"],
    }
    saved: Mapping[str, float] = {}
    if has_liger_kernels(job):
        saved = _liger_saved(job, counted, direction)
    of_token = 0.0
    for name, size in counted[direction].items():
        left = size - saved.get(name, 0.0)
        of_token += left * widths[name]
    if job.method != "full":
        of_token += _adapter_bytes(job, direction) - _unadapted_bytes(job, counted, direction)
    weights = sum(layer_parameters(job))
    of_weights: float = counted["weights"][direction] * weights
    return job.tokens * of_token + of_weights


def _adapter_bytes(job: Job, direction: str) -> float:
    """Bytes per token of the small products of adapters, which are bound by the memory, and of their dropout.

    Dropout is a kernel for each adapted matrix, which reads the input and writes it with a mask of one byte; in the
    backward pass it reads the gradient and the mask and writes the gradient. Adapters in fp32 have inputs in fp32.
    """
    inputs, outputs, _, _ = job.shape.adapted_widths(target_modules(job))
    dropped = 0.0
    if job.lora_dropout > 0:
        width = 4.0 if regime_of(job) == "lora" else 2.0
        dropped = (2 * width + 1.0) * inputs
    of_a_product = 2.0 * (inputs + outputs)
    if direction == "forward":
        return of_a_product + dropped
    return 2 * of_a_product + dropped


def _unadapted_bytes(job: Job, counted: Mapping[str, Any], direction: str) -> float:
    """Bytes per token that were counted for adapters on all matrices of a dense layer, and that those of a run with
    fewer do not move. The routed experts of a mixture, whose adapters are merged into their weights, have none."""
    shape = job.shape
    query = shape.attention.query_width
    keys_and_values = shape.attention.kv_width
    inputs, outputs, _, _ = shape.adapted_widths(target_modules(job))
    counted_inputs = 5 * shape.hidden + shape.mlp_width
    counted_inputs += query
    counted_outputs = 2 * shape.hidden + 2 * shape.mlp_width
    counted_outputs += query + keys_and_values
    fewer_inputs = max(0.0, counted_inputs - inputs)
    fewer_outputs = max(0.0, counted_outputs - outputs)
    sizes: Mapping[str, float] = counted["adapter"][direction]
    of_inputs = sizes["input"] * fewer_inputs
    of_outputs = sizes["output"] * fewer_outputs
    return of_inputs + of_outputs


def _liger_saved(job: Job, counted: Mapping[str, Any], direction: str) -> Mapping[str, float]:
    """Bytes per unit of a width that Liger Kernel's norms, rotary positions and gated activation move less."""
    if counted.get("plain_mlp"):  # it replaces RMS norms alone
        return {}
    table = "liger_saved"
    if regime_of(job) == "autocast":
        table = "liger_saved_autocast"
    elif job.method != "full":
        table = "liger_saved_lora"
    saved: dict[str, float] = dict(_EAGER[table][direction])
    # Its experts are not used: they are those of transformers (`hfscale.recipe.kernels`)
    if job.shape.moe is not None or not job.shape.gated:
        saved.pop("mlp")
    return saved


def liger_loss_bytes(job: Job) -> float:
    """Compute the bytes that Liger Kernel's fused loss reads and writes, head and loss, forward and backward.

    It computes the logits of a chunk of tokens at a time, so few that they take no more memory than the hidden states,
    rounded up to a power of two. Each chunk reads the whole weight of the head again.

    Args:
        job (`Job`): the run.
    """
    shape = job.shape
    parts = math.ceil(shape.vocab / shape.hidden)
    tokens = math.ceil(job.tokens / parts)
    rounded: int = 2 ** math.ceil(math.log2(tokens))
    chunks = math.ceil(job.tokens / rounded)
    in_half = LIGER_HALF_WEIGHT_BYTES[job.method]
    of_weight = LIGER_WEIGHT_BYTES.get(regime_of(job), in_half)
    weights = shape.vocab * shape.hidden
    logits = job.tokens * shape.vocab
    return chunks * of_weight * weights + LIGER_LOGIT_BYTES * logits
