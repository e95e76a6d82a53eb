"""Compares the planner with published runs of mixtures of experts, to none of which it is fitted.

`data/experts.csv` has the runs whose layout was published:

- AutoModel: NVIDIA NeMo AutoModel, docs/performance-summary.mdx of 2026-06-12, with the sizes that the table leaves
  out and the recomputation from examples/llm_benchmark. Parameters and the states of Adam are in bf16 there.
  Norms, activations and the exchange are kernels of TransformerEngine and DeepEP, which is planned as compiled layers
  and `fused_exchange`.
- Megatron-Bridge: NVIDIA NeMo Megatron-Bridge, docs/performance-summary-archive.md, containers 25.09 (DeepSeek-V3 on
  H100), 25.11 and 26.02, without the runs that drop tokens. Recomputation was not published: the least that fits.
- transformers: huggingface/transformers#45436, FSDP2 without expert parallelism.

All tokens were routed evenly to the experts, but for the last source. Left out are runs whose kernels, batch or model
the planner does not know (huggingface/trl#6869, transformers#46126, Nemotron 3 Super and Ultra).
"""

import csv
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import hfscale
from hfscale.facts.hardware import accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.models import find_model
from hfscale.planner.estimate import Estimate, estimate_job, with_least_checkpointing
from hfscale.planner.job import Job, can_overlap_experts

DATA = Path(__file__).parent / "data" / "experts.csv"
PLANS = (("qwen3-235b-a22b", 256), ("deepseek-v3", 256), ("deepseek-v3", 1024), ("gpt-oss-120b", 64), ("kimi-k2", 256))
"""Models and numbers of H100 for which `hfscale plan` searches a layout."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the planner says about a published run."""

    source: str
    model: str
    run: str
    """GPUs, format of the matrix products, layout and batch."""
    tokens_per_s_per_gpu: float
    """Published."""
    predicted: float
    """Tokens per second and GPU that the planner predicts."""
    error: float
    """Of the prediction, relative to what was published."""
    recompute: str
    peak_gib: float
    """Predicted peak memory of the fullest GPU."""
    device_gib: float
    fits: str
    """The planner's word for the probability that the run fits, which it did."""
    peak_error: float | None = None
    """Of the predicted peak, where one was published."""


def jobs(path: Path = DATA) -> list[tuple[dict[str, str], Job]]:
    """Read the published runs.

    Args:
        path (`Path`): the table.

    Returns:
        Each row with its job.
    """
    with path.open(newline="", encoding="utf-8") as file:
        return [(row, _job(row)) for row in csv.DictReader(file)]


def _job(row: dict[str, str]) -> Job:
    sizes = {name: int(row[name]) for name in ("tp", "pp")}
    is_megatron = row["stack"] == "megatron"
    is_automodel = row["source"].startswith("AutoModel")
    axis = "dp_replicate" if is_megatron else "dp_shard"
    layout = ParallelLayout(**sizes, **{axis: int(row["gpus"]) // sizes["tp"] // sizes["pp"]})
    # The planner's Megatron divides experts by tensor parallelism too; the runs gave those ranks other experts.
    experts = int(row["ep"]) // sizes["tp"]
    job = Job(
        shape=find_model(row["model"]),
        gpu=accelerator(row["gpu"]),
        layout=layout,
        seq_len=int(row["seq_len"]),
        micro_batch=int(row["micro_batch"]),
        global_batch=int(row["global_batch"]),
        stack=row["stack"],
        zero=1 if is_megatron else 3,
        precision=row["precision"],
        pure_bf16=row["states"] == "bf16",
        expert_parallel=experts,
        expert_imbalance=1.0 if row["source"].partition(" ")[0] != "transformers" else None,
        virtual_stages=int(row["virtual_stages"]),
        sequence_parallel=sizes["tp"] > 1,
        loss_parallel=row["stack"] != "hf",
        bare_experts=is_automodel,
        fused_exchange=is_automodel,
        compile=is_automodel,
        bf16_gradients=row["source"].startswith("Megatron-Bridge"),  # its performance recipes
    )
    job.check()
    if not row["recompute"]:
        job = with_least_checkpointing(job)
    else:
        job = replace(job, activation_checkpointing=row["recompute"])
    return replace(job, overlapped_experts=True) if can_overlap_experts(job) else job


def compare(row: dict[str, str], found: Estimate) -> Row:
    """Compare an estimate with its published run.

    Args:
        row (`dict[str, str]`): the published run.
        found (`Estimate`): what the planner says.
    """
    published, predicted = float(row["tokens_per_s_per_gpu"]), found.tokens_per_s_per_gpu
    axes = " ".join(f"{axis} {row[axis]}" for axis in ("tp", "pp", "ep") if row[axis] != "1")
    peak = float(row["peak_gb"]) * 1e9 / 2**30 if row["peak_gb"] else None
    return Row(
        source=row["source"],
        model=row["model"],
        run=f"{row['gpus']} {row['precision']}, {axes or 'shard'}, {row['global_batch']} x {row['seq_len']}",
        tokens_per_s_per_gpu=published,
        predicted=round(predicted, 1),
        error=round(predicted / published - 1, 4),
        recompute=str(found.job.activation_checkpointing),
        peak_gib=round(found.memory.needed, 1),
        device_gib=round(found.job.gpu.memory_gib, 1),
        fits=found.fits_word,
        peak_error=None if peak is None else round(found.memory.needed / peak - 1, 4),
    )


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the errors by source, and how many runs are said not to fit.

    Args:
        rows (`Sequence[Row]`): all comparisons.
    """
    by_source: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_source[row.source].append(row)
    return {
        source: {
            "rows": len(found),
            "median_error": round(statistics.median(abs(row.error) for row in found), 4),
            "bias": round(statistics.median(row.error for row in found), 4),
            "fits": {word: count for word in ("yes", "likely", "uncertain", "no") if (count := _count(found, word))},
        }
        for source, found in sorted(by_source.items())
    }


def _count(rows: Sequence[Row], word: str) -> int:
    return sum(row.fits == word for row in rows)


def searched() -> list[dict[str, Any]]:
    """Return the first choice of `hfscale plan` for models and numbers of H100 on which others have trained them."""
    found = []
    for model, gpus in PLANS:
        choices = hfscale.plan(model, gpu="H100-80GB", gpus=gpus, seq_len=4096, global_batch=1024).choices
        best = choices[0].estimate
        found.append(
            {
                "model": model,
                "gpus": gpus,
                "layout": best.job.layout_summary,
                "recompute": best.job.activation_checkpointing,
                "peak_gib": round(best.memory.needed, 1),
                "fits": best.fits_word,
                "tokens_per_s_per_gpu": round(best.tokens_per_s_per_gpu, 1),
            }
        )
    return found


def measure() -> dict[str, Any]:
    """Compare all published runs, and search a layout for the largest of their models."""
    rows = [compare(row, estimate_job(job)) for row, job in jobs()]
    return {
        "summary": figures(rows),
        "plans": searched(),
        "rows": [{name: value for name, value in asdict(row).items() if value is not None} for row in rows],
    }
