"""Reads a row of a table of runs (`hfscale estimate --table`) as a `Job`, and infers what the row leaves blank.

docs/planner_measure.md lists the columns; others, such as measured values, are ignored. What free text says is read in
`hfscale.planner.table_text`. What is inferred:

- the model's shape, where widths are blank: from the catalogue's model of that name, or from the parameter count;
- whether the MLP is gated and the head tied: from the parameter count, otherwise from ffn = 4 x hidden;
- a mixture of experts: from a name of the catalogue, or from the text of name and note;
- the method: from the text of name, precision, recomputation and note;
- the framework: from the layout and the spelling of precision and recomputation (`infer_framework`);
- a blank recomputation: the least that fits the memory;
- a blank micro-batch: one sequence with a pipeline, otherwise the largest that fits;
- the exchange of many small experts: overlapped with another micro-batch in Megatron (`experts.expert_exchange_s`);
- a blank ZeRO stage: 1 in Megatron, and 3 where the states of a replica alone do not fit.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from hfscale.errors import LayoutError, UsageError
from hfscale.facts.hardware import Accelerator, accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.models import catalogue, catalogue_shape
from hfscale.planner.estimate import with_least_checkpointing
from hfscale.planner.frameworks import find_framework
from hfscale.planner.job import Job, can_overlap_experts, is_fine_grained
from hfscale.planner.memory import GIB, memory_of, state_bytes
from hfscale.planner.options import ActivationCheckpointing, Method, Precision
from hfscale.planner.table_text import (
    adapters_in,
    experts_in,
    interconnect_gb_s,
    names_pytorch_3d,
    without_power_limit,
)

# -- the model's shape ------------------------------------------------------------------------------------------------


DEFAULT_VOCAB = 50304
"""Vocabulary where a row names none: GPT-2's, padded to a multiple of 128."""
ASPECT = 107
"""Hidden width per layer of GPT-like models, used where neither is known: Llama 7B to 65B have 102 to 128."""


def text_of(row: Mapping[str, str], key: str) -> str:
    """Return the text of a cell without surrounding blanks; empty where the table has no such column.

    Args:
        row (`Mapping[str, str]`): the cells of a row by column.
        key (`str`): the column.
    """
    cell = row.get(key)
    return cell.strip() if cell else ""


def number(row: Mapping[str, str], key: str) -> float | None:
    """Read a cell as a number above 0.

    Args:
        row (`Mapping[str, str]`): the cells of a row by column.
        key (`str`): the column.

    Returns:
        `float`, *optional*: the number; None where the cell is blank.

    Raises:
        UsageError: the cell is not a number above 0.
    """
    text = text_of(row, key)
    if not text:
        return None
    return _number_of(key, text)


def _number_of(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{key} is {text!r}: it must be a number, or blank") from None
    if not 0 < value < 1e18:
        raise UsageError(f"{key} is {text}: it must be a number above 0, or blank")
    return value


def integer(row: Mapping[str, str], key: str) -> int | None:
    """Read a cell as an integer above 0, or also 0 for a ZeRO stage.

    Args:
        row (`Mapping[str, str]`): the cells of a row by column.
        key (`str`): the column.

    Returns:
        `int`, *optional*: the integer; None where the cell is blank.

    Raises:
        UsageError: the cell is not such an integer.
    """
    text = text_of(row, key)
    if key == "zero" and text in ("0", "0.0"):
        return 0
    if not text:
        return None
    value = _number_of(key, text)
    if value != int(value):
        raise UsageError(f"{key} is {text}: it must be an integer, or blank")
    return int(value)


def row_shape(row: Mapping[str, str]) -> ModelShape:
    """Infer the shape of a row's model from its widths, its name or its number of parameters.

    Args:
        row (`Mapping[str, str]`): the cells of a row by column.

    Raises:
        UsageError: a cell is not a number, or the widths are neither given nor can be inferred.
        UnsupportedModelError: the widths do not fit together.
    """
    layers = integer(row, "layers")
    hidden = integer(row, "hidden")
    vocab = integer(row, "vocab") or DEFAULT_VOCAB
    billions = number(row, "params_b")
    model = text_of(row, "model")
    if layers is None and hidden is None:
        known = catalogue_shape(model)
        if known is not None:
            return known
    if (layers is None or hidden is None) and billions is None:
        raise UsageError(
            f"model {model!r} has neither widths nor params_b: fill in layers, hidden, heads, ffn and vocab"
        )
    if hidden is None:
        layers, hidden = _usual_aspect(billions or 0.0, layers)
    elif layers is None:
        # Published tables round the parameters, so that a layer count from them is only near.
        of_layers = (billions or 0.0) * 1e9 - vocab * hidden
        layers = max(1, round(of_layers / (12 * hidden**2)))
    assert layers is not None
    heads = integer(row, "heads") or _usual_heads(hidden, integer(row, "tp") or 1)
    kv_heads = integer(row, "kv_heads") or heads
    ffn = integer(row, "ffn") or 4 * hidden
    mixture = _known_mixture(model, layers, hidden)
    if mixture is not None:
        return mixture
    experts = experts_in(model, text_of(row, "note"))
    return _shape(layers, hidden, heads, kv_heads, ffn, vocab, billions, experts)


@lru_cache(maxsize=1024)
def _known_mixture(model: str, layers: int, hidden: int) -> ModelShape | None:
    """The catalogue's mixture of experts whose name is part of `model`, with so many of its layers; a row has no
    columns for experts. None where there is no such name, or the widths are another model's."""
    plain = re.sub(r"[\s_]+", "-", model.casefold())
    for name, entry in catalogue().items():
        if name not in plain:
            continue
        if entry["hidden_size"] != hidden or layers > entry["num_hidden_layers"]:
            continue
        shape = catalogue_shape(name)
        if shape is not None and shape.moe is not None:
            return replace(
                shape,
                layers=layers,
                windows=shape.windows[:layers],
                moe_layers=shape.moe_layers[:layers],
                other_layers=shape.other_layers[:layers],
                mlp_only=shape.mlp_only[:layers],
            )
    return None


@lru_cache(maxsize=4096)
def _shape(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    billions: float | None,
    experts: tuple[int, int],
) -> ModelShape:
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "head_dim": max(1, hidden // heads),
    }
    if experts[0]:
        moe = {
            "model_type": "mixtral",
            "num_local_experts": experts[0],
            "num_experts_per_tok": experts[1],
        }
        return ModelShape.from_config({**config, **moe, "sliding_window": None})
    gated = ffn != 4 * hidden
    tied = False
    if billions is not None:
        attention = 2 * hidden * (hidden + kv_heads * config["head_dim"])
        totals = {
            (is_gated, is_tied): layers * (attention + matrices * hidden * ffn)
            + embeddings * vocab * hidden
            for is_gated, matrices in ((True, 3), (False, 2))
            for is_tied, embeddings in ((False, 2), (True, 1))
        }
        nearest = min(totals, key=lambda kind: abs(totals[kind] / 1e9 - billions))
        # If none is near, the parameter count is of another model, for example with fewer layers.
        if abs(totals[nearest] / 1e9 - billions) < 0.04 * billions:
            gated, tied = nearest
    family = "llama" if gated else "nemotron"
    return ModelShape.from_config({**config, "model_type": family, "tie_word_embeddings": tied})


def _usual_aspect(billions: float, layers: int | None) -> tuple[int, int]:
    """Layers and hidden width of a GPT-like model with so many parameters, which are 12 L h^2 without embeddings."""
    layers = layers or max(1, round((billions * 1e9 / (12 * ASPECT**2)) ** (1 / 3)))
    return layers, max(128, round((billions * 1e9 / (12 * layers)) ** 0.5 / 128) * 128)


def _usual_heads(hidden: int, tp: int) -> int:
    """Number of heads with a width of 128, or the nearest that tensor parallelism can split."""
    fitting = [heads for heads in range(tp, hidden // 32 + 1, tp) if hidden % heads == 0]
    return min(fitting, key=lambda heads: abs(hidden / heads - 128), default=tp)


# -- one column at a time ---------------------------------------------------------------------------------------------


RECOMPUTE_WORDS: Mapping[str, ActivationCheckpointing] = {
    "full": "full",
    "block": "full",
    "uniform": "full",
    "yes": "full",
    "true": "full",
    "select": "selective",
    "partial": "selective",
    "no": "none",
    "off": "none",
    "false": "none",
}
"""Beginnings of words for recomputation; Megatron's `block` and `uniform` are full recomputation."""


def _precision_of(row: Mapping[str, str]) -> tuple[Precision, bool, bool]:
    """Format of the matrix products, whether states are in this format too, and whether fp8 scales are per row; a
    blank cell is `bf16-mixed`."""
    # The order decides: fp8 and fp16 runs also name bf16, as the format of what is not in theirs.
    text = text_of(row, "precision").lower().replace("bfloat16", "bf16") or "bf16-mixed"
    pure = "pure" in text or text in ("bf16-true", "bf16")
    if "fp8" in text or "float8" in text:
        return "fp8", False, "row" in text
    if "bf16" in text and "fp16" not in text:
        return "bf16", pure, False
    if "fp16" in text or "16-mixed" in text or "float16" in text:
        return "fp16", False, False
    if "fp32" in text or "tf32" in text or "float32" in text:
        return "fp32", False, False
    raise UsageError(f"precision is {text!r}: use bf16, fp16, fp8 or fp32, with -mixed or -pure")


def _recompute_of(row: Mapping[str, str]) -> ActivationCheckpointing | None:
    """Activation recomputation of a row; None where the column is blank."""
    text = text_of(row, "ac").lower()
    if not text:
        return None
    for word, kind in RECOMPUTE_WORDS.items():
        if text.startswith(word):
            return kind
    raise UsageError(f"ac is {text!r}: use none, selective or full")


def method_of(row: Mapping[str, str]) -> tuple[Method, str | None]:
    """Read or infer which parameters train.

    A table without the column `method` may name adapters in the model's name, the precision, the recomputation or a
    note (`LoRA fine-tune`). What is in brackets there is ignored.

    Returns:
        `tuple[Method, str | None]`: the method, and the column that it was inferred from; None if that is the column
            `method`, or if nothing indicates adapters.
    """
    text = text_of(row, "method").lower()
    if text:
        if re.search(r"qlora|nf4|4-?bit", text):
            return "qlora", None
        if re.search(r"lora\b|adapter", text):
            return "lora", None
        return "full", None
    return adapters_in(
        {column: text_of(row, column) for column in ("model", "precision", "ac", "note")}
    )


def _gpu_of(row: Mapping[str, str]) -> tuple[str, str | None]:
    """Name of the GPU without a power limit that has no number, and an assumption about it, or None."""
    text = text_of(row, "gpu_type")
    plain = without_power_limit(text)
    if plain == text:
        return plain, None
    return plain, f"{plain} at its usual power, because {text} gives no limit"


def is_allocated(row: Mapping[str, str]) -> bool:
    """Return whether the row's peak memory is that of tensors alone, by its column `measure`.

    Such a peak is that of `max_memory_allocated`, or of torch's `active` memory.
    """
    measure = text_of(row, "measure").lower()
    return "allocated" in measure or "active" in measure


def is_reserved(row: Mapping[str, str]) -> bool:
    """Return whether the row's peak memory is what torch's allocator reserved, by its column `measure`.

    Such a peak leaves out the CUDA context and NCCL's buffers.
    """
    return "reserved" in text_of(row, "measure").lower()


def assumed(row: Mapping[str, str]) -> list[str]:
    """List what was inferred from a row that no column of its own states, one line each."""
    assumptions = []
    method, column = method_of(row)
    if column:
        assumptions.append(f"method {method}, from the column {column}")
    _, power = _gpu_of(row)
    if power:
        assumptions.append(power)
    return assumptions


# -- the job ----------------------------------------------------------------------------------------------------------


REQUIRED = ("model", "seq_len", "gpus", "gpu_type")
"""Columns that a table must have."""


def job_of(row: Mapping[str, str]) -> Job:
    """Read a row as a job, and infer what the row leaves blank.

    Args:
        row (`Mapping[str, str]`): the cells of a row by column.

    Raises:
        UnknownHardwareError: the GPU is in no table.
        LayoutError: the number of GPUs or the sequence length is blank, or sizes do not fit together.
        UnsupportedModelError: the model's widths do not fit together.
        UsageError: a cell is not a number, or a name is unknown.
    """
    gpu = accelerator(_gpu_of(row)[0])
    gpus = integer(row, "gpus") or _product(row)
    if gpus is None:
        raise LayoutError("gpus is blank: give the number of GPUs of the run")
    seq_len = integer(row, "seq_len")
    if seq_len is None:
        raise LayoutError("seq_len is blank: give the tokens per sequence")
    shape = row_shape(row)
    layout = _layout(row, gpus)
    framework = text_of(row, "stack") or infer_framework(row, layout)
    find_framework(framework)
    job = _as_given(row, gpu, shape, layout, seq_len=seq_len, framework=framework)
    job = _pipeline_batch(job)
    job.check()
    # The order matters: what shards and how large the micro-batch is decide whether activations are recomputed.
    if not text_of(row, "zero") and not text_of(row, "dp_shard"):
        job = _sharded_if_needed(job)
    if not text_of(row, "micro_batch"):
        job = _largest_micro_batch(job)
    if is_fine_grained(job.shape) and can_overlap_experts(job):  # as DeepSeek-V3 in Megatron
        job = replace(job, overlapped_experts=True)
    if not _recompute_of(row):
        job = with_least_checkpointing(job)
    return job


def _as_given(
    row: Mapping[str, str],
    gpu: Accelerator,
    shape: ModelShape,
    layout: ParallelLayout,
    *,
    seq_len: int,
    framework: str,
) -> Job:
    """The job with what the row's columns say, and the framework's usual values for blank cells."""
    precision, pure, rowwise = _precision_of(row)
    # Megatron keeps fp32 master copies with every precision, unless its optimizer is set to bf16.
    pure = (pure and framework != "megatron") or text_of(row, "states").lower() == "bf16"
    zero = integer(row, "zero")
    if zero is None:
        zero = _usual_zero(layout, framework)
    micro = integer(row, "micro_batch") or 1
    is_old = _is_before_flash(row, gpu, framework)
    stages = integer(row, "virtual_stages")
    if stages is None:
        stages = 1 if is_old else _usual_virtual_stages(shape, layout, framework)
    loss = text_of(row, "loss").lower()
    splits_sequences = "sp" in text_of(row, "ac").lower().split("+")
    return Job(
        shape=shape,
        gpu=gpu,
        layout=layout,
        seq_len=seq_len,
        micro_batch=micro,
        global_batch=integer(row, "global_batch_seqs") or micro * layout.data_parallel_size,
        stack=framework,
        zero=zero,
        precision=precision,
        pure_bf16=pure,
        rowwise_fp8=rowwise,
        compile=text_of(row, "compile").lower() in ("yes", "true", "1"),
        compiled_loss=framework == "hf" or loss == "compiled",
        loss_kernel=loss == "kernel",
        norm_kernel=text_of(row, "norm").lower() == "kernel",
        bf16_gradients="bf16 gradients" in text_of(row, "states").lower(),
        activation_checkpointing=_recompute_of(row) or "none",
        method=method_of(row)[0],
        virtual_stages=stages,
        sequence_parallel=splits_sequences or (not is_old and framework != "hf"),
        loss_parallel=framework != "hf",
        flash_attention=not is_old,
        first_flash=text_of(row, "attention").lower() == "flash1",
        expert_parallel=_expert_parallel(shape, layout, framework),
        network_gb_s=interconnect_gb_s(text_of(row, "interconnect")),
    )


# -- one column at a time ---------------------------------------------------------------------------------------------


def _usual_zero(layout: ParallelLayout, framework: str) -> int:
    """The ZeRO stage of a run whose table names none."""
    if layout.dp_shard > 1 or (layout.cp > 1 and framework == "titan"):
        return 3
    if framework == "megatron" and layout.dp_replicate > 1:
        return 1
    return 0


def _product(row: Mapping[str, str]) -> int | None:
    """Product of the axes, if the row gives a data-parallel axis; otherwise None."""
    axes = [integer(row, axis) for axis in ("dp_replicate", "dp_shard", "tp", "pp", "cp")]
    if axes[0] is axes[1] is None:
        return None
    return math.prod(size or 1 for size in axes)


def _layout(row: Mapping[str, str], gpus: int) -> ParallelLayout:
    """The layout; blank data-parallel axes get the ranks that the other axes leave."""
    tp, pp, cp = (integer(row, axis) or 1 for axis in ("tp", "pp", "cp"))
    shard = integer(row, "dp_shard")
    replicate = integer(row, "dp_replicate")
    # Tables name no axis where all ranks are data parallel: alone they shard, under other axes they are replicas.
    if shard is None and replicate is None:
        left, over = divmod(gpus, tp * pp * cp)
        if over or left < 1:
            raise LayoutError(
                f"tp {tp} x pp {pp} x cp {cp} does not divide {gpus} GPUs: correct one of them"
            )
        if tp == pp == 1 and left > 1:
            shard = left
        else:
            replicate = left
    layout = ParallelLayout(dp_replicate=replicate or 1, dp_shard=shard or 1, cp=cp, tp=tp, pp=pp)
    layout.check_world_size(gpus)
    return layout


def _pipeline_batch(job: Job) -> Job:
    """The job with its micro-batch divided for the pipeline, if it is the rank's full batch.

    torchtitan divides the batch of a rank into as many micro-batches as there are stages. Otherwise the pipeline would
    run a single micro-batch.
    """
    pp = job.layout.pp
    if pp == 1 or job.micro_batch == 1 or job.global_batch != job.micro_batch * job.data_parallel:
        return job
    parts = max(part for part in range(1, pp + 1) if job.micro_batch % part == 0)
    return replace(job, micro_batch=job.micro_batch // parts)


# -- what is inferred -------------------------------------------------------------------------------------------------


def infer_framework(row: Mapping[str, str], layout: ParallelLayout) -> str:
    """Infer the framework that a row's columns indicate.

    - `titan`: the name nanotron, picotron or torchtitan, torchao's spelling of fp8 (`float8`), a compiled model, or
      torchtitan's kinds of selective recomputation (`-op`, `-layer`);
    - `megatron`: otherwise, Transformer Engine's fp8 (`TE`), tensor or pipeline parallelism, or data parallelism that
      shards no parameters on more than one GPU;
    - `hf`: sharded data parallelism in eager mode; `titan` where the column `compile` is blank.

    Args:
        row (`Mapping[str, str]`): the cells of a row by column.
        layout (`ParallelLayout`): ranks along each axis.
    """
    precision = text_of(row, "precision").lower()
    ac = text_of(row, "ac").lower()
    compiled = text_of(row, "compile").lower()
    # Each framework spells what it does in words of its own, which a table of published runs copies.
    is_sharded_only = layout.tp == layout.pp == 1 and (
        layout.dp_shard > 1 or layout.world_size == 1
    )
    if names_pytorch_3d(text_of(row, column) for column in ("model", "note", "source")):
        return "titan"
    if "float8" in precision or compiled in ("yes", "true", "1"):
        return "titan"
    if ac.startswith("selective-"):
        return "titan"
    if not is_sharded_only:
        if compiled == "" and layout.dp_shard > 1 and layout.pp == 1:
            return "titan"
        return "megatron"
    if compiled in ("no", "false", "0") or layout.world_size == 1:
        return "hf"
    return "titan"


def _is_before_flash(row: Mapping[str, str], gpu: Accelerator, framework: str) -> bool:
    """Whether a run keeps attention scores in memory, as before flash attention (2022): a run of Megatron on Ampere or
    Volta with fp16, or with full recomputation of short sequences."""
    if framework != "megatron" or (gpu.bf16_tflops or 0) > 400:
        return False
    precision = text_of(row, "precision").lower()
    ac = text_of(row, "ac").lower()
    return "fp16" in precision or (ac.startswith("full") and (integer(row, "seq_len") or 0) <= 2048)


def _sharded_if_needed(job: Job) -> Job:
    """The job with sharded parameters, if the states of a replica alone do not fit, even if the source calls the ranks
    replicas."""
    if job.zero == 3 or job.data_parallel == 1 or job.layout.pp > 1:
        return job
    states = state_bytes(job, find_framework(job.stack))
    if (states.parameters + states.gradients + states.optimizer) / GIB <= job.gpu.memory_gib:
        return job
    return replace(
        job, zero=3, layout=replace(job.layout, dp_replicate=1, dp_shard=job.data_parallel)
    )


def _largest_micro_batch(job: Job) -> Job:
    """The job with the largest micro-batch, a power of two up to 16, that fits; with a pipeline it is unchanged."""
    if job.layout.pp > 1:
        return job
    constants = find_framework(job.stack)
    per_rank = job.global_batch // job.data_parallel
    best = job
    for micro in (2, 4, 8, 16):
        trial = replace(job, micro_batch=micro)
        if per_rank % micro or memory_of(trial, constants).needed > job.gpu.memory_gib:
            break
        best = trial
    return best


def _usual_virtual_stages(shape: ModelShape, layout: ParallelLayout, framework: str) -> int:
    """Stages per rank: in Megatron the most, up to eight, that divide the layers of the fullest rank; otherwise
    one."""
    if framework != "megatron" or layout.pp == 1:
        return 1
    even = (
        total // layout.pp for total in (shape.layers, shape.layers + 2) if total % layout.pp == 0
    )
    each = next(even, -(-shape.layers // layout.pp))
    possible = range(1, min(each, 8) + 1)
    return max(v for v in possible if each % v == 0 and v * layout.pp <= shape.layers)


def _expert_parallel(shape: ModelShape, layout: ParallelLayout, framework: str) -> int:
    """Ranks that share the experts of a layer: in Megatron as many as possible; otherwise one."""
    if shape.moe is None or framework != "megatron":
        return 1
    ranks = layout.data_parallel_size * layout.cp
    return max(
        d
        for d in range(1, min(shape.moe.experts, ranks) + 1)
        if shape.moe.experts % d == 0 and ranks % d == 0
    )
