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
from collections.abc import Mapping
from dataclasses import replace

from hfscale.errors import LayoutError
from hfscale.facts.hardware import Accelerator, accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.model_shape import ModelShape
from hfscale.planner.estimate import with_recompute_that_fits
from hfscale.planner.frameworks import stack as find_stack
from hfscale.planner.job import Job, can_overlap_experts, is_fine_grained
from hfscale.planner.memory import GIB, memory_of
from hfscale.planner.model_view import view_of
from hfscale.planner.row_shape import row_shape, text_of, whole
from hfscale.planner.row_words import gpu_of, interconnect_gb_s, method_of, precision_of, recompute_of
from hfscale.planner.states import state_bytes

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
    stack = text_of(row, "stack") or infer_stack(row, layout)
    find_stack(stack)
    # Megatron keeps fp32 masters whatever it calls its precision.
    pure = pure and stack != "megatron"
    zero = whole(row, "zero")
    if zero is None:
        is_sharded = layout.dp_shard > 1 or (layout.cp > 1 and stack == "titan")
        zero = 3 if is_sharded else 1 if stack == "megatron" and layout.dp_replicate > 1 else 0
    micro, total = _batch(row, layout)
    old = is_before_flash(row, gpu, stack)
    stages = whole(row, "virtual_stages") or (1 if old else _usual_virtual_stages(shape, layout, stack))
    job = Job(
        shape=shape,
        gpu=gpu,
        layout=layout,
        seq_len=seq_len,
        micro_batch=micro,
        global_batch=total,
        stack=stack,
        zero=zero,
        precision=precision,
        pure=pure,
        rowwise_fp8=rowwise,
        compile=compiled,
        compiled_loss=stack == "hf" or text_of(row, "loss").lower() == "compiled",
        recompute=recompute_of(row) or "none",
        method=method_of(row)[0],
        virtual_stages=stages,
        sequence_parallel=(not old and stack != "hf") or "sp" in text_of(row, "ac").lower().split("+"),
        loss_parallel=stack != "hf",
        flash_attention=not old,
        expert_parallel=_expert_parallel(shape, layout, stack),
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


def infer_stack(row: Mapping[str, str], layout: ParallelLayout) -> str:
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


def is_before_flash(row: Mapping[str, str], gpu: Accelerator, stack: str) -> bool:
    """Whether a run keeps attention scores in memory: Megatron on Ampere or Volta with fp16, or recomputing whole
    layers of short sequences, as before flash attention (2022) and not since."""
    if stack != "megatron" or (gpu.bf16_tflops or 0) > 400:
        return False
    precision, ac = text_of(row, "precision").lower(), text_of(row, "ac").lower()
    return "fp16" in precision or (ac.startswith("full") and (whole(row, "seq_len") or 0) <= 2048)


def _sharded_if_it_must(job: Job) -> Job:
    """Replicas whose states alone do not fit are shards, whatever the source calls them."""
    if job.zero == 3 or job.data_parallel == 1 or job.layout.pp > 1:
        return job
    states = state_bytes(view_of(job.shape), job, find_stack(job.stack))
    if (states.parameters + states.gradients + states.optimizer) / GIB <= job.gpu.memory_gib:
        return job
    return replace(job, zero=3, layout=replace(job.layout, dp_replicate=1, dp_shard=job.data_parallel))


def _largest_micro_batch(job: Job) -> Job:
    """Where a row names no micro-batch: one sequence in a pipeline, else the largest power of two up to 16 that
    fits."""
    if job.layout.pp > 1:
        return job
    view, constants = view_of(job.shape), find_stack(job.stack)
    per_rank = job.global_batch // job.data_parallel
    best = job
    for micro in (2, 4, 8, 16):
        trial = replace(job, micro_batch=micro)
        if per_rank % micro or memory_of(view, trial, constants).total > job.gpu.memory_gib:
            break
        best = trial
    return best


def _usual_virtual_stages(shape: ModelShape, layout: ParallelLayout, stack: str) -> int:
    """Megatron interleaves wherever it can: the most chunks that divide the layers of the fullest stage, up to
    eight."""
    if stack != "megatron" or layout.pp == 1:
        return 1
    even = (total // layout.pp for total in (shape.layers, shape.layers + 2) if total % layout.pp == 0)
    each = next(even, -(-shape.layers // layout.pp))
    return max(v for v in range(1, min(each, 8) + 1) if each % v == 0 and v * layout.pp <= shape.layers)


def _expert_parallel(shape: ModelShape, layout: ParallelLayout, stack: str) -> int:
    if shape.moe is None or stack != "megatron":
        return 1
    ranks = layout.data_parallel_size * layout.cp
    return max(d for d in range(1, min(shape.moe.experts, ranks) + 1) if shape.moe.experts % d == 0 and ranks % d == 0)
