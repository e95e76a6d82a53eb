"""`hfscale estimate`: memory and time of one layout, or of every row of a table of runs."""

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hfscale.core.flags import parse_network
from hfscale.core.options import check_options
from hfscale.core.spelling import speaking, spelled
from hfscale.core.text_files import bounded_lines
from hfscale.errors import HfScaleError, UsageError
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.own_hardware import find_accelerator
from hfscale.planner.command_line import check_one_kind, make_command, parse_gpus
from hfscale.planner.estimate import Estimate, estimate_job, estimate_with
from hfscale.planner.job import check_pure
from hfscale.planner.memory import GIB, Memory, allocated_gib
from hfscale.planner.network import with_link
from hfscale.planner.option_fields import check_needs, make_options
from hfscale.planner.options import (
    MAX_RANKS,
    AxisOptions,
    EstimateInput,
    EstimateOptions,
    GpusOption,
    a_zero_stage,
    at_most,
)
from hfscale.planner.table import REQUIRED, assumed, is_allocated, is_reserved, job_of


def run(
    model: str | None,
    arguments: list[str] | None,
    axis_flags: dict[str, Any],
    given: dict[str, Any],
    gpu_flags: dict[str, Any],
    input_flags: dict[str, Any],
) -> int:
    """Print memory and time of one layout, or of every row of a table; return the exit code.

    Args:
        model (`str`, *optional*): the model; with `--script` its first argument.
        arguments (`list[str]`, *optional*): with `--script` its other arguments.
        axis_flags (`dict[str, Any]`): the flags of `AxisOptions`.
        given (`dict[str, Any]`): the flags of `EstimateOptions`.
        gpu_flags (`dict[str, Any]`): the flag of `GpusOption`.
        input_flags (`dict[str, Any]`): the flags of `EstimateInput`.
    """
    source = EstimateInput(**input_flags)
    if source.table is not None:
        if model is not None:
            raise UsageError(f"give a MODEL ({model}) or --table ({source.table}), not both")
        _run_table(source.table)
        return 0
    if given["network_gb_s"] is not None:
        network = parse_network(given["network_gb_s"], given["gpus_per_node"])
        given = given | {"network_gb_s": network}
    gpu = given["gpu"]
    gpus = parse_gpus(gpu_flags["gpus"])
    if gpu is not None:
        check_one_kind(gpu)
    check_needs(EstimateOptions, "estimate", given)
    axes = AxisOptions(**axis_flags)
    check_options(AxisOptions, vars(axes))
    zero = given["zero"]
    # Where a script is traced, the place of the model holds its first argument
    if source.script is not None:
        argv = [str(source.script), *([] if model is None else [model]), *(arguments or [])]
        if zero is None:
            zero = 3 if (axes.dp_shard or 1) > 1 else 0
        _run_script(argv, gpus, axes, given | {"zero": zero}, as_json=source.as_json)
        return 0
    if arguments:
        raise UsageError(
            f"'{arguments[0]}' belongs to no option: give one MODEL, or --script FILE -- ARGS"
        )
    if model is None or gpu is None:
        raise UsageError(
            "give a MODEL and --gpu, such as llama-3.1-8b --gpu H100-80GB, or --table FILE.csv"
        )
    at_most(MAX_RANKS)("gpus", gpus)
    check_pure(given["pure_bf16"], given["precision"])
    layout = _fill_layout(gpus, axes, zero)
    if zero is None:
        zero = 3 if layout.dp_shard > 1 else 0
    result = estimate_with(
        model, make_options(EstimateOptions, "estimate", given | {"layout": layout, "zero": zero})
    )
    if source.as_json:
        print(json.dumps(result.to_dict()))
    else:
        _print_estimate(result)
    return 0


def _size(counts: Mapping[str, Any]) -> str:
    """The size of a traced micro-batch: its tokens, or where it has none its samples."""
    if counts.get("tokens") is None:
        return f"{counts['samples']:,} samples"
    return f"{counts['tokens']:,} tokens"


def _run_script(
    argv: Sequence[str], gpus: int, axes: AxisOptions, given: Mapping[str, Any], *, as_json: bool
) -> None:
    """Trace a script and print its estimate, with data parallelism over all GPUs."""
    from hfscale.planner.script import estimate_script, trace_script

    if given["gpu"] is None:
        gpu = spelled("gpu")
        raise UsageError(f"{spelled('script')} needs {gpu}, such as H100-80GB")
    if not Path(argv[0]).is_file():
        raise UsageError(f"{spelled('script', argv[0])} is not a file: give a training script")
    zero = given["zero"]
    precision = given["precision"]
    a_zero_stage("zero", zero)
    at_most(MAX_RANKS)("gpus", gpus)
    for name in ("cp", "tp", "pp"):
        if getattr(axes, name) > 1:
            script = spelled("script")
            axis = spelled(name)
            raise UsageError(f"{script} is estimated with data parallelism alone: leave {axis} out")
    row = with_link(find_accelerator(given["gpu"], given["hardware"]), given["link_gb_s"])
    counts = trace_script(argv, gpus=gpus, precision="bf16" if precision == "fp8" else precision)
    found = estimate_script(
        counts,
        gpu=row,
        gpus=gpus,
        zero=zero,
        precision=precision,
        gpus_per_node=given["gpus_per_node"],
        network_gb_s=given["network_gb_s"],
    )
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    flops = counts["matmul_flops"] + counts["attention_flops"]
    print(
        f"{argv[0]}: {counts['model']}, {counts['parameters'] / 1e9:.2f}B parameters, {gpus} {row.name}"
    )
    print(
        f"  ZeRO stage {zero}, micro-batch of {_size(counts)} x {counts['grad_accum']} per step and GPU"
    )
    print(
        f"traced: {flops / 1e12:.2f} TFLOP, {counts['saved_bytes'] / GIB:.2f} GiB saved for the backward pass, "
        f"{found.collective_bytes / GIB:.2f} GiB sent per step"
    )
    print(
        f"memory {found.memory.total:.1f} GiB of {row.memory_gib:g}: {'fits' if found.fits else 'does NOT fit'}"
    )
    for name, gib in vars(found.memory).items():
        print(f"  {name:14}{gib:8.2f} GiB")
    print(f"step {found.time.total:.3f} s")
    for name, seconds in vars(found.time).items():
        print(f"  {name:14}{seconds:8.3f} s  {seconds / found.time.total:4.0%}")
    if found.tokens_per_s_per_gpu is None:
        print(f"{found.samples_per_s_per_gpu:,.2f} samples/s/GPU")
    else:
        print(f"{found.tokens_per_s_per_gpu:,.0f} tokens/s/GPU")


def _fill_layout(gpus: int, axes: AxisOptions, zero: int | None) -> ParallelLayout:
    """Complete the given axes: remaining ranks shard the parameters; with a ZeRO stage below 3 they are replicas."""
    named = ParallelLayout(**{name: size or 1 for name, size in asdict(axes).items()})
    remaining, over = divmod(gpus, named.world_size)
    if remaining > 1 and not over:
        if axes.dp_shard is None and zero in (None, 3):
            named = replace(named, dp_shard=remaining)
        elif axes.dp_replicate is None:
            named = replace(named, dp_replicate=remaining)
    named.check_world_size(gpus)
    return named


def _print_estimate(result: Estimate) -> None:
    """Print an estimate as two small tables: memory in GiB and time of a step in seconds."""
    job = result.job
    memory = result.memory
    time = result.time
    print(
        f"{job.shape.model_type} {job.shape.total_parameters / 1e9:.2f}B on {job.layout.world_size} {job.gpu.name}"
    )
    print(
        f"  {job.layout}, ZeRO stage {job.zero}, micro-batch {job.micro_batch} x {job.micro_batches} per step"
    )
    if result.fits:
        verdict = "fits"
    elif result.fits_word == "no":
        verdict = "does NOT fit"
    else:
        verdict = "may not fit"
    low, high = result.needed_range
    print(
        f"memory {memory.needed:.1f} GiB ({low:.1f} to {high:.1f}) of {job.gpu.memory_gib:g}: {verdict} "
        f"({result.fits_word}: {result.fits_probability:.0%})"
    )
    for name, gib in vars(memory).items():
        print(f"  {name:14}{gib:8.2f} GiB")
    print(f"peak: {result.peak.description}")
    if memory.cached:
        low, high = result.memory_range
        print(
            f"nvidia-smi shows {memory.total:.1f} GiB ({low:.1f} to {high:.1f}): freed blocks are kept while there is "
            "room (cached)"
        )
    needed = f"{result.host_gib_per_node:,.0f} GiB of {result.host_gib_assumed:,.0f} assumed"
    saving = f"{result.saving_host_gib_per_node:,.0f} GiB"
    print(
        f"CPU memory of a node, to load and offload: {needed}; to save in the background: {saving}"
    )
    slowest, fastest = result.time_range[::-1]
    print(f"step {time.total:.3f} s ({fastest:.3f} to {slowest:.3f})")
    for name, seconds in vars(time).items():
        print(f"  {name:14}{seconds:8.3f} s  {seconds / time.total:4.0%}")
    mfu = "" if result.mfu is None else f", MFU {result.mfu:.1%} (attention in full)"
    print(f"{result.tokens_per_s_per_gpu:,.0f} tokens/s/GPU{mfu}")
    for stage in result.stages:
        batch = (
            f"{stage.global_batch} sequences, {job.micro_batch} x {stage.micro_batches} per step"
        )
        speed = f"{stage.step_time_s:.3f} s, {stage.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
        print(f"from {stage.from_tokens:,} tokens: {batch}, {speed}")


def _run_table(path: Path) -> None:
    """Print a JSON line for every row of a CSV table in UTF-8. The line of a wrong row contains an error."""
    table = spelled("table", str(path))
    try:
        reader = csv.DictReader(bounded_lines(path, encoding="utf-8-sig"))
        missing = [name for name in REQUIRED if name not in (reader.fieldnames or ())]
        if missing:
            columns = ", ".join(missing)
            needed = ", ".join(REQUIRED)
            raise UsageError(f"{table} has no column {columns}: it needs {needed}")
        for number, row in enumerate(reader):
            sys.stdout.write(json.dumps(table_line(number, row)) + "\n")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{table} cannot be read: {reason}; give a CSV file in UTF-8") from None


@speaking("python")  # an error of a row names its column
def table_line(number: int, row: dict[str, Any]) -> dict[str, Any]:
    """Estimate one row of a table.

    Args:
        number (`int`): the row's number, from 0.
        row (`dict`): column -> cell, as `csv.DictReader` returns it.

    Returns:
        The printed fields: row, tokens per second and GPU, peak memory in GiB, MFU (0 to 1), error, and where cells
        were blank, the assumptions. In the line of a row with an error the other numbers are None.
    """
    try:
        if None in row:
            raise UsageError(
                "the row has more cells than the table has columns: quote cells that contain a comma"
            )
        result = estimate_job(job_of(row))
    except HfScaleError as error:
        numbers = dict.fromkeys(("tokens_per_s_per_gpu", "peak_mem_gib", "mfu"))
        return {"row": number, **numbers, "error": " ".join(str(error).split())}
    mfu = result.mfu
    assumptions = assumed(row)
    return {
        "row": number,
        "tokens_per_s_per_gpu": round(result.tokens_per_s_per_gpu, 4),
        "peak_mem_gib": round(_measured_gib(result.memory, row), 4),
        "mfu": None if mfu is None else round(mfu, 5),
        "error": None,
        **({"assumed": assumptions} if assumptions else {}),
    }


def _measured_gib(memory: Memory, row: Mapping[str, str]) -> float:
    """The part of a peak that the row's source measured, by its column `measure`."""
    if is_allocated(row):
        return allocated_gib(memory)
    if is_reserved(row):
        return memory.total - memory.context
    return memory.total


COMMAND = make_command(
    run,
    AxisOptions,
    EstimateOptions,
    GpusOption,
    EstimateInput,
    function="estimate",
    arguments={
        "model": Annotated[
            str | None,
            typer.Argument(metavar="MODEL", help="A built-in name, hub id or config.json."),
        ],
        "arguments": Annotated[
            list[str] | None,
            typer.Argument(metavar="-- ARGS …", help="With --script: the script's arguments."),
        ],
    },
    defaults={"zero": None},
)
EXAMPLES = (
    "hfscale estimate llama-3.1-8b --gpu H100-80GB --gpus 8 --activation-checkpointing full --global-batch 64",
    "hfscale estimate --table runs.csv",
)
