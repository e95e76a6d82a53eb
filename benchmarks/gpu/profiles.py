"""Parts: where the milliseconds of a step go, from the trace that `--profile_steps` writes."""

import json
from collections import Counter
from typing import Any

from benchmarks.gpu.part import CannotRunError, report
from benchmarks.gpu.recipe_runs import run_recipe
from benchmarks.gpu.settings import TINY

KINDS = (
    ("attention", ("flash", "fmha", "sdpa", "flex", "cudnn_generated")),
    ("matrix products", ("gemm", "cutlass", "nvjet", "cublas", "xmma", "matmul")),
    ("communication", ("nccl",)),
    # Inductor names a kernel after all operations that it fuses, of which a copy may be one
    ("Triton kernels", ("triton",)),
    ("optimizer and clipping", ("adam", "multi_tensor")),
    ("loss", ("softmax", "cross_entropy", "nll", "scatter", "gather")),
    ("reductions", ("reduce", "norm")),
    ("copies and casts", ("memcpy", "memset", "copy", "cat", "fill")),
)
"""Kinds of kernels, and parts of the names of theirs; the first that fits counts."""
STEP = 12
if TINY:
    STEP = 2


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    name = kernel.lower()
    for kind, parts in KINDS:
        if any(part in name for part in parts):
            return kind
    return "element-wise"


def summarize(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum up the kernels of a step.

    Args:
        events (`list[dict]`): The events of a trace, with `ts` and `dur` in microseconds.

    Returns:
        `dict[str, Any]`: `step_ms`, `busy_ms`, `ms` by kind of kernel, `launches` and `waits`. Empty without a GPU.
    """
    device = ("kernel", "gpu_memcpy", "gpu_memset")
    kernels = sorted((event["ts"], event["dur"], event["name"]) for event in events if event.get("cat") in device)
    if not kernels:
        return {}
    busy = 0.0
    begin = end = kernels[0][0]
    by_kind: Counter[str] = Counter()
    for start, duration, name in kernels:
        stop = start + duration
        busy += max(0.0, stop - max(start, end))  # kernels of several streams overlap
        end = max(end, stop)
        by_kind[kind_of(name)] += duration
    names = [event.get("name", "") for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    return {
        "step_ms": round((end - begin) / 1e3, 1),
        "busy_ms": round(busy / 1e3, 1),
        "ms": {kind: round(microseconds / 1e3, 1) for kind, microseconds in by_kind.most_common()},
        "launches": sum("Launch" in name for name in names),
        "waits": sum("ynchronize" in name for name in names),
    }


def profile(shape: str) -> None:
    """Profile a step of the recipe with its defaults.

    Args:
        shape (`str`): The name of a shape.
    """
    done = run_recipe(shape, ["--profile_steps", str(STEP), "--max_steps", str(STEP + 2)], limit_s=120)
    path = done.folder / "profile" / f"step-{STEP}.json"
    found = summarize(json.loads(path.read_text())["traceEvents"])
    if not found:
        raise CannotRunError(f"needs a CUDA GPU: {path.name} has no kernels")
    report(profile=shape, **found)
