"""A row of a table of runs -> a `Job`: what the columns say, and what is inferred where they are blank.

Columns: model, params_b, layers, hidden, heads, kv_heads, ffn, vocab, seq_len, micro_batch, global_batch_seqs, gpus,
gpu_type, dp_shard, dp_replicate, tp, pp, cp, precision, ac, compile; beside them stack, virtual_stages, zero,
interconnect, method, loss (`compiled`) and measure, if there. Measured columns and the row's source are not read; of a
note, whether it tells of adapters, where no column does (row_words.py). What is inferred:

- the model's shape, where the widths are blank, from the catalogue's model of that name or the parameter count;
- whether the MLP is gated and the head tied, from the parameter count, else from ffn = 4 x hidden;
- the stack, from the layout and the spelling of precision and recomputation (`infer_stack`);
- a blank recomputation as the least that fits the memory;
- a blank micro-batch as one sequence in a pipeline, else as the largest that fits;
- the exchange of many small experts as hidden behind another micro-batch in Megatron (`experts.py`);
- blank ZeRO as 1 in Megatron, and as 3 where the states of a replica alone do not fit.
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
from hfscale.planner.estimate import with_recompute_that_fits
from hfscale.planner.frameworks import find_framework
from hfscale.planner.job import Job, Method, Precision, Recompute, can_overlap_experts, is_fine_grained
from hfscale.planner.memory import GIB, memory_of, state_bytes
from hfscale.planner.model_view import view_of

# -- the model's shape ------------------------------------------------------------------------------------------------


DEFAULT_VOCAB = 50304
"""GPT-2's vocabulary padded to a multiple of 128, where a row names none."""
ASPECT = 107
"""Hidden width per layer of GPT-like models where neither is known: Llama 7B to 65B have 102 to 128."""


def text_of(row: Mapping[str, str], key: str) -> str:
    """A cell without the blanks around it; empty where the table has no such column."""
    cell = row.get(key)
    return cell.strip() if cell else ""


def number(row: Mapping[str, str], key: str) -> float | None:
    """A cell as a number above 0; None where it is blank.

    Raises:
        `UsageError`: It is no number, or not above 0.
    """
    text = text_of(row, key)
    return _number_of(key, text) if text else None


def _number_of(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{key} {text!r} is not a number: correct it, or leave it blank") from None
    if not 0 < value < 1e18:
        raise UsageError(f"{key} {text} is not a number above 0: correct it, or leave it blank")
    return value


def whole(row: Mapping[str, str], key: str) -> int | None:
    """A cell as a whole number above 0, or 0 for a ZeRO stage; None where it is blank.

    Raises:
        `UsageError`: It is something else.
    """
    text = text_of(row, key)
    if key == "zero" and text in ("0", "0.0"):
        return 0
    if not text:
        return None
    value = _number_of(key, text)
    if value != int(value):
        raise UsageError(f"{key} {text} is not a whole number: correct it, or leave it blank")
    return int(value)


def row_shape(row: Mapping[str, str]) -> ModelShape:
    """The shape that a row describes.

    Raises:
        `HfScaleError`: The widths are neither given nor to be inferred.
    """
    layers, hidden = whole(row, "layers"), whole(row, "hidden")
    vocab = whole(row, "vocab") or DEFAULT_VOCAB
    billions, model = number(row, "params_b"), text_of(row, "model")
    if layers is None and hidden is None and (known := catalogue_shape(model)) is not None:
        return known
    if (layers is None or hidden is None) and billions is None:
        raise UsageError(f"model {model!r} has neither widths nor params_b: fill in layers, hidden, heads, ffn, vocab")
    if hidden is None:
        layers, hidden = _usual_aspect(billions or 0.0, layers)
    elif layers is None:
        layers = max(1, round(((billions or 0.0) * 1e9 - vocab * hidden) / (12 * hidden**2)))
    assert layers is not None
    heads = whole(row, "heads") or _usual_heads(hidden, whole(row, "tp") or 1)
    kv_heads, ffn = whole(row, "kv_heads") or heads, whole(row, "ffn") or 4 * hidden
    if (mixture := _known_mixture(model, layers, hidden)) is not None:
        return mixture
    experts = (0, 0)
    if found := _EXPERTS.search(model):
        experts = int(found[1]), int(found[2])
    elif found := _TIMES.search(model):
        experts = int(found[1]), 2
    return _shape(layers, hidden, heads, kv_heads, ffn, vocab, billions, experts)


_EXPERTS = re.compile(r"(\d+)\s*e(?:xperts?)?\W*top\W*(\d+)", flags=re.IGNORECASE)
"""`8e top2` in a model's name: a mixture of 8 experts of which a token passes 2."""
_TIMES = re.compile(r"\b(\d+)x\d+(?:\.\d+)?b\b", flags=re.IGNORECASE)
"""`8x7B` in a model's name: a mixture of 8 experts of which, as in Mixtral, a token passes 2."""


@lru_cache(maxsize=1024)
def _known_mixture(model: str, layers: int, hidden: int) -> ModelShape | None:
    """The catalogue's mixture of experts that a name tells of, of so many of its layers: a row has no columns for
    experts. None where the name tells of none, or the widths are another model's."""
    plain = re.sub(r"[\s_]+", "-", model.casefold())
    for name, entry in catalogue().items():
        if name in plain and entry["hidden_size"] == hidden and layers <= entry["num_hidden_layers"]:
            shape = catalogue_shape(name)
            if shape is not None and shape.moe is not None:
                return replace(
                    shape, layers=layers, windows=shape.windows[:layers], moe_layers=shape.moe_layers[:layers]
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
        moe = {"model_type": "mixtral", "num_local_experts": experts[0], "num_experts_per_tok": experts[1]}
        return ModelShape.from_config({**config, **moe, "sliding_window": None})
    gated, tied = ffn != 4 * hidden, False
    if billions is not None:
        attention = 2 * hidden * (hidden + kv_heads * config["head_dim"])
        totals = {
            (kind, shared): layers * (attention + (3 if kind else 2) * hidden * ffn)
            + (1 if shared else 2) * vocab * hidden
            for kind in (True, False)
            for shared in (False, True)
        }
        nearest = min(totals, key=lambda kind: abs(totals[kind] / 1e9 - billions))
        # Further off, the parameter count is of another model: a stack of fewer layers, say.
        if abs(totals[nearest] / 1e9 - billions) < 0.04 * billions:
            gated, tied = nearest
    family = "llama" if gated else "nemotron"
    return ModelShape.from_config({**config, "model_type": family, "tie_word_embeddings": tied})


def _usual_aspect(billions: float, layers: int | None) -> tuple[int, int]:
    """Layers and hidden width of a GPT-like model of so many parameters, 12 L h^2 without embeddings."""
    layers = layers or max(1, round((billions * 1e9 / (12 * ASPECT**2)) ** (1 / 3)))
    return layers, max(128, round((billions * 1e9 / (12 * layers)) ** 0.5 / 128) * 128)


def _usual_heads(hidden: int, tp: int) -> int:
    """Heads of 128 or the nearest width that tensor parallelism can split."""
    fitting = [heads for heads in range(tp, hidden // 32 + 1, tp) if hidden % heads == 0]
    return min(fitting, key=lambda heads: abs(hidden / heads - 128), default=tp)


# -- one column at a time ---------------------------------------------------------------------------------------------


RECOMPUTE_WORDS: Mapping[str, Recompute] = {
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
"""How a kind of recomputation begins; Megatron's `block` and `uniform` are ways to do it fully."""
LOCAL_NODE = 8
"""GPUs per node."""
LARGEST_SHARE_GB_S = 200.0
"""More than any GPU's share of a network: 800 Gbit/s cards give 100."""


def precision_of(row: Mapping[str, str]) -> tuple[Precision, bool, bool]:
    """Format of the matrix products, whether states are in it too, and whether fp8 scales are per row.

    Raises:
        `UsageError`: It is none that is known.
    """
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
    raise UsageError(f"precision {text!r} is not known: use bf16, fp16, fp8 or fp32, with -mixed or -pure")


def recompute_of(row: Mapping[str, str]) -> Recompute | None:
    """Activation recomputation; None where the column is blank.

    Raises:
        `UsageError`: It is none that is known.
    """
    text = text_of(row, "ac").lower()
    if not text:
        return None
    for word, kind in RECOMPUTE_WORDS.items():
        if text.startswith(word):
            return kind
    raise UsageError(f"ac {text!r} is not known: use none, selective or full")


def method_of(row: Mapping[str, str]) -> tuple[Method, str | None]:
    """Which parameters train, and the column that says so where it is not `method`: a table without one names adapters
    in the model's name, the precision, or a note outside of brackets (`LoRA fine-tune`)."""
    text = text_of(row, "method").lower()
    if text:
        is_adapter = re.search(r"lora\b|adapter", text) is not None
        return ("qlora" if re.search(r"qlora|nf4|4-?bit", text) else "lora" if is_adapter else "full"), None
    for column in ("model", "precision", "ac", "note"):
        told = text_of(row, column).lower()
        if "lora" not in told:  # nearly always, and cheaper than the expressions
            continue
        found = re.search(r"\b(q?)lora\b", re.sub(r"\([^)]*\)", "", told))
        if found is not None:
            return ("qlora" if found[1] else "lora"), column
    return "full", None


def gpu_of(row: Mapping[str, str]) -> tuple[str, str | None]:
    """The GPU's name, and what is assumed of it: a power limit that has no number is not counted."""
    text = text_of(row, "gpu_type")
    if "power" not in text.lower():
        return text, None
    plain = re.sub(r"[-_ ]*power[-_ ]?(?:limited|capped)\b", "", text, flags=re.IGNORECASE)
    return plain, None if plain == text else f"{plain} at its usual power: {text} names no limit"


def is_allocated(row: Mapping[str, str]) -> bool:
    """Whether the table's peaks are those of tensors alone (`max_memory_allocated`, `active`), by its column
    `measure`."""
    told = text_of(row, "measure").lower()
    return "allocated" in told or "active" in told


def assumed(row: Mapping[str, str]) -> list[str]:
    """What was read into a row, beyond its columns' own words."""
    method, column = method_of(row)
    told = [f"method {method}, from the column {column}"] if column else []
    return told + [text for text in (gpu_of(row)[1],) if text]


def interconnect_gb_s(text: str) -> float | None:
    """GB/s per GPU and direction, of a text such as `50 GB/s`, `400Gb/s per GPU`, `3.2Tbps`, `8x400Gb`.

    A total per node, that is a number of cards, terabits or more than any GPU's share, is divided by eight. A kind of
    network without a number (`InfiniBand`) is the reference node's, None.

    Raises:
        `UsageError`: It holds a number that is no bandwidth.
    """
    if not re.search(r"\d", text):
        return None
    found = re.search(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*(G|T)(B|b)(?!i?t?E)", text)
    if not found:
        try:
            return float(text)
        except ValueError:
            raise UsageError(f"interconnect {text!r} holds no bandwidth: write 50 GB/s or 400 Gb/s") from None
    cards, value, scale, unit = found.groups()
    gigabytes = int(cards or 1) * float(value) * (1000 if scale == "T" else 1) / (1 if unit == "B" else 8)
    is_of_node = cards or scale == "T" or "node" in text.lower() or gigabytes > LARGEST_SHARE_GB_S
    return gigabytes / LOCAL_NODE if is_of_node and "per gpu" not in text.lower() else gigabytes


# -- the job ----------------------------------------------------------------------------------------------------------


REQUIRED = ("model", "seq_len", "gpus", "gpu_type")
"""Columns without which nothing can be said."""


def job_of(row: Mapping[str, str]) -> Job:
    """The job that a row describes.

    Raises:
        `HfScaleError`: A value is missing, is no number, or does not fit the others.
    """
    gpu = accelerator(gpu_of(row)[0])
    gpus = whole(row, "gpus") or _product(row)
    if gpus is None:
        raise LayoutError("gpus is blank: give the number of GPUs of the run")
    seq_len = whole(row, "seq_len")
    if seq_len is None:
        raise LayoutError("seq_len is blank: give the tokens per sequence")
    shape = row_shape(row)
    layout = _layout(row, gpus)
    precision, pure, rowwise = precision_of(row)
    compiled = text_of(row, "compile").lower() in ("yes", "true", "1")
    framework = text_of(row, "stack") or infer_framework(row, layout)
    find_framework(framework)
    # Megatron keeps fp32 masters whatever it calls its precision.
    pure = pure and framework != "megatron"
    zero = whole(row, "zero")
    if zero is None:
        is_sharded = layout.dp_shard > 1 or (layout.cp > 1 and framework == "titan")
        zero = 3 if is_sharded else 1 if framework == "megatron" and layout.dp_replicate > 1 else 0
    micro, total = _batch(row, layout)
    old = is_before_flash(row, gpu, framework)
    stages = whole(row, "virtual_stages") or (1 if old else _usual_virtual_stages(shape, layout, framework))
    job = Job(
        shape=shape,
        gpu=gpu,
        layout=layout,
        seq_len=seq_len,
        micro_batch=micro,
        global_batch=total,
        framework=framework,
        zero=zero,
        precision=precision,
        pure=pure,
        rowwise_fp8=rowwise,
        compile=compiled,
        compiled_loss=framework == "hf" or text_of(row, "loss").lower() == "compiled",
        recompute=recompute_of(row) or "none",
        method=method_of(row)[0],
        virtual_stages=stages,
        sequence_parallel=(not old and framework != "hf") or "sp" in text_of(row, "ac").lower().split("+"),
        loss_parallel=framework != "hf",
        flash_attention=not old,
        expert_parallel=_expert_parallel(shape, layout, framework),
        network_gb_s=interconnect_gb_s(text_of(row, "interconnect")),
    )
    job = _pipeline_batch(job)
    job.check()
    if _whole_is_blank(row, "zero", "dp_shard"):
        job = _sharded_if_it_must(job)
    if _whole_is_blank(row, "micro_batch"):
        job = _largest_micro_batch(job)
    job = _overlapped(job)
    return job if recompute_of(row) else with_recompute_that_fits(job)


# -- one column at a time ---------------------------------------------------------------------------------------------


def _product(row: Mapping[str, str]) -> int | None:
    """Number of GPUs that the axes multiply to, where a row names the data-parallel ones."""
    axes = [whole(row, axis) for axis in ("dp_replicate", "dp_shard", "tp", "pp", "cp")]
    return None if axes[0] is axes[1] is None else math.prod(size or 1 for size in axes)


def _layout(row: Mapping[str, str], gpus: int) -> ParallelLayout:
    """The layout; a blank data-parallel axis takes the ranks that the others leave."""
    tp, pp, cp = (whole(row, axis) or 1 for axis in ("tp", "pp", "cp"))
    shard, replicate = whole(row, "dp_shard"), whole(row, "dp_replicate")
    if shard is None and replicate is None:
        left, over = divmod(gpus, tp * pp * cp)
        if over or left < 1:
            raise LayoutError(f"tp={tp} x pp={pp} x cp={cp} do not divide {gpus} GPUs: correct one of them")
        shard, replicate = (left, 1) if tp == pp == 1 and left > 1 else (1, left)
    layout = ParallelLayout(dp_replicate=replicate or 1, dp_shard=shard or 1, cp=cp, tp=tp, pp=pp)
    layout.check_world_size(gpus)
    return layout


def _batch(row: Mapping[str, str], layout: ParallelLayout) -> tuple[int, int]:
    """Micro-batch and global batch, in sequences; a global batch that is blank is one micro-batch per rank."""
    ranks = layout.data_parallel_size
    micro, total = whole(row, "micro_batch"), whole(row, "global_batch_seqs")
    micro = micro or 1
    return micro, total or micro * ranks


def _pipeline_batch(job: Job) -> Job:
    """torchtitan's batch per rank is cut into as many micro-batches as there are stages: where a row's micro-batch is
    the rank's whole batch, the pipeline would otherwise run a single micro-batch."""
    pp = job.layout.pp
    if pp == 1 or job.micro_batch == 1 or job.global_batch != job.micro_batch * job.data_parallel:
        return job
    parts = max(part for part in range(1, pp + 1) if job.micro_batch % part == 0)
    return replace(job, micro_batch=job.micro_batch // parts)


def _overlapped(job: Job) -> Job:
    """Megatron trains mixtures of many small experts as DeepSeek-V3 was, their exchange hidden where it can be."""
    is_hidden = is_fine_grained(job.shape) and can_overlap_experts(job)
    return replace(job, overlapped_experts=True) if is_hidden else job


def _whole_is_blank(row: Mapping[str, str], *keys: str) -> bool:
    return not any(text_of(row, key) for key in keys)


# -- what is inferred -------------------------------------------------------------------------------------------------


def infer_framework(row: Mapping[str, str], layout: ParallelLayout) -> str:
    """The stack that a row's columns point to.

    torchao's spelling of fp8 (`float8`), a compiled model and torchtitan's kinds of selective recomputation (`-op`,
    `-layer`) are `titan`; Transformer Engine's fp8 (`TE`), and tensor or pipeline parallelism without the above, are
    `megatron`, as is data parallelism that shards no parameters on more than one GPU; sharded data parallelism in
    eager mode is `hf`, and where the column says nothing `titan`.
    """
    precision, ac = text_of(row, "precision").lower(), text_of(row, "ac").lower()
    compiled = text_of(row, "compile").lower()
    is_sharded_only = layout.tp == layout.pp == 1 and (layout.dp_shard > 1 or layout.world_size == 1)
    if "float8" in precision or "mxfp8" in precision or compiled in ("yes", "true", "1"):
        return "titan"
    if ac.startswith("selective-"):
        return "titan"
    if not is_sharded_only:
        if compiled == "" and layout.dp_shard > 1 and layout.pp == 1:
            return "titan"
        return "megatron"
    return "hf" if compiled in ("no", "false", "0") or layout.world_size == 1 else "titan"


def is_before_flash(row: Mapping[str, str], gpu: Accelerator, framework: str) -> bool:
    """Whether a run keeps attention scores in memory: Megatron on Ampere or Volta with fp16, or recomputing whole
    layers of short sequences, as before flash attention (2022) and not since."""
    if framework != "megatron" or (gpu.bf16_tflops or 0) > 400:
        return False
    precision, ac = text_of(row, "precision").lower(), text_of(row, "ac").lower()
    return "fp16" in precision or (ac.startswith("full") and (whole(row, "seq_len") or 0) <= 2048)


def _sharded_if_it_must(job: Job) -> Job:
    """Replicas whose states alone do not fit are shards, whatever the source calls them."""
    if job.zero == 3 or job.data_parallel == 1 or job.layout.pp > 1:
        return job
    states = state_bytes(view_of(job.shape), job, find_framework(job.framework))
    if (states.parameters + states.gradients + states.optimizer) / GIB <= job.gpu.memory_gib:
        return job
    return replace(job, zero=3, layout=replace(job.layout, dp_replicate=1, dp_shard=job.data_parallel))


def _largest_micro_batch(job: Job) -> Job:
    """Where a row names no micro-batch: one sequence in a pipeline, else the largest power of two up to 16 that
    fits."""
    if job.layout.pp > 1:
        return job
    view, constants = view_of(job.shape), find_framework(job.framework)
    per_rank = job.global_batch // job.data_parallel
    best = job
    for micro in (2, 4, 8, 16):
        trial = replace(job, micro_batch=micro)
        if per_rank % micro or memory_of(view, trial, constants).total > job.gpu.memory_gib:
            break
        best = trial
    return best


def _usual_virtual_stages(shape: ModelShape, layout: ParallelLayout, framework: str) -> int:
    """Megatron interleaves wherever it can: the most chunks that divide the layers of the fullest stage, up to
    eight."""
    if framework != "megatron" or layout.pp == 1:
        return 1
    even = (total // layout.pp for total in (shape.layers, shape.layers + 2) if total % layout.pp == 0)
    each = next(even, -(-shape.layers // layout.pp))
    return max(v for v in range(1, min(each, 8) + 1) if each % v == 0 and v * layout.pp <= shape.layers)


def _expert_parallel(shape: ModelShape, layout: ParallelLayout, framework: str) -> int:
    if shape.moe is None or framework != "megatron":
        return 1
    ranks = layout.data_parallel_size * layout.cp
    return max(d for d in range(1, min(shape.moe.experts, ranks) + 1) if shape.moe.experts % d == 0 and ranks % d == 0)
