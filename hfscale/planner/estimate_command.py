"""`hfscale estimate`: memory and time of one layout, or of every row of a table of runs."""

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hfscale.errors import HfScaleError, UsageError
from hfscale.facts.hardware import find_accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.planner.estimate import Estimate, estimate, estimate_job
from hfscale.planner.job import MAX_RANKS, Method, Offload, Optimizer, Precision, Recompute, Schedule, check_pure
from hfscale.planner.memory import GIB, allocated_gib
from hfscale.planner.table import REQUIRED, assumed, is_allocated, job_of


def run(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A built-in name, hub id or config.json.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS …", help="With --script: the script's arguments.")
    ] = None,
    script: Annotated[
        Path | None, typer.Option(help="Trace a step of this training script instead, which calls Trainer.train.")
    ] = None,
    table: Annotated[Path | None, typer.Option(help="A CSV file of runs instead; prints a JSON line per row.")] = None,
    gpu: Annotated[str | None, typer.Option(help="A GPU of hardware.toml, or a calibrated one: H100-80GB.")] = None,
    gpus: Annotated[int, typer.Option(help="Number of GPUs.")] = 1,
    dp_replicate: Annotated[int | None, typer.Option(help="Replicas of the parameters.")] = None,
    dp_shard: Annotated[int | None, typer.Option(help="Ranks that share one replica (FSDP2, ZeRO-3).")] = None,
    cp: Annotated[int, typer.Option(help="Context-parallel ranks.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    virtual_stages: Annotated[int, typer.Option(help="Pipeline stages per rank.")] = 1,
    schedule: Annotated[Schedule, typer.Option(help="Pipeline schedule.")] = "1f1b",
    zero: Annotated[int | None, typer.Option(help="ZeRO stage: 0, 1, 2, 3 (FSDP2 is 3).")] = None,
    micro_batch: Annotated[int, typer.Option(help="Sequences per data-parallel rank and micro-batch.")] = 1,
    global_batch: Annotated[int | None, typer.Option(help="Sequences per step.")] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence.")] = 4096,
    activation_checkpointing: Annotated[Recompute, typer.Option(help="Activation recomputation.")] = "none",
    precision: Annotated[Precision, typer.Option(help="Format of the matrix products.")] = "bf16",
    pure_bf16: Annotated[
        bool, typer.Option("--pure-bf16", help="Parameters, gradients and optimizer states are in bf16.")
    ] = False,
    liger: Annotated[bool, typer.Option("--liger", help="The loss is fused (use_liger_kernel).")] = False,
    compile: Annotated[bool, typer.Option("--compile", help="The model runs under torch.compile.")] = False,
    stack: Annotated[str, typer.Option(help="Training framework: hf, titan or megatron.")] = "hf",
    method: Annotated[Method, typer.Option(help="Which parameters train.")] = "full",
    lora_rank: Annotated[int, typer.Option(help="Rank of the adapters.")] = 16,
    optimizer: Annotated[Optimizer, typer.Option(help="The optimizer.")] = "adamw",
    expert_parallel: Annotated[int, typer.Option(help="Ranks that share the experts of a layer.")] = 1,
    overlapped_experts: Annotated[
        bool,
        typer.Option("--overlapped-experts", help="Tokens are sent to experts while another micro-batch is computed."),
    ] = False,
    offload: Annotated[Offload, typer.Option(help="States kept in the CPU's memory.")] = "none",
    gpus_per_node: Annotated[int, typer.Option(help="GPUs that NVLink or PCIe connects.")] = 8,
    network_gb_s: Annotated[float | None, typer.Option(help="GB/s per GPU between nodes, one direction.")] = None,
    hardware: Annotated[Path | None, typer.Option(help="A file written by `hfscale plan --calibrate`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print memory and time of one layout, or of every row of a table."""
    if table is not None:
        if model is not None:
            raise UsageError(f"give a MODEL ({model}) or --table ({table}), not both")
        _run_table(table)
        return
    if script is not None:
        argv = [str(script), *([] if model is None else [model]), *(arguments or [])]
        axes = {"--cp": cp, "--tp": tp, "--pp": pp}
        stage = (3 if dp_shard is not None and dp_shard > 1 else 0) if zero is None else zero
        _run_script(argv, gpu, gpus, axes, stage, precision, gpus_per_node, network_gb_s, hardware, as_json=as_json)
        return
    if arguments:
        raise UsageError(f"'{arguments[0]}' belongs to no option: give one MODEL, or --script FILE -- ARGS")
    if model is None or gpu is None:
        raise UsageError("give a MODEL and --gpu, such as llama-3.1-8b --gpu H100-80GB, or --table FILE.csv")
    check_pure(pure_bf16, precision)
    layout = _fill_layout(gpus, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp, pp=pp, zero=zero)
    result = estimate(
        model,
        gpu=gpu,
        layout=layout,
        seq_len=seq_len,
        micro_batch=micro_batch,
        global_batch=global_batch,
        virtual_stages=virtual_stages,
        schedule=schedule,
        zero=(3 if layout.dp_shard > 1 else 0) if zero is None else zero,
        recompute=activation_checkpointing,
        precision=precision,
        pure=pure_bf16,
        fused_loss=liger,
        compile=compile,
        stack=stack,
        method=method,
        lora_rank=lora_rank,
        optimizer=optimizer,
        expert_parallel=expert_parallel,
        overlapped_experts=overlapped_experts,
        offload=offload,
        gpus_per_node=gpus_per_node,
        network_gb_s=network_gb_s,
        hardware=hardware,
    )
    if as_json:
        print(json.dumps(result.to_dict()))
    else:
        _print_estimate(result)


def _run_script(
    argv: Sequence[str],
    gpu: str | None,
    gpus: int,
    axes: Mapping[str, int],
    zero: int,
    precision: Precision,
    gpus_per_node: int,
    network_gb_s: float | None,
    hardware: Path | None,
    *,
    as_json: bool,
) -> None:
    """Trace a script and print its estimate, with data parallelism over all GPUs."""
    from hfscale.planner.script import estimate_script, trace_script

    if gpu is None:
        raise UsageError("--script needs --gpu, such as H100-80GB")
    if not Path(argv[0]).is_file():
        raise UsageError(f"--script {argv[0]} is not a file: give a training script")
    if zero not in (0, 1, 2, 3):
        raise UsageError(f"--zero is {zero}: use a ZeRO stage of 0, 1, 2 or 3")
    if not 1 <= gpus <= MAX_RANKS:
        raise UsageError(f"--gpus is {gpus}: give a number from 1 to {MAX_RANKS:,}")
    for name, size in axes.items():
        if size > 1:
            raise UsageError(f"--script is estimated with data parallelism alone: leave {name} out")
    row = find_accelerator(gpu, hardware)
    counts = trace_script(argv, gpus=gpus, precision="bf16" if precision == "fp8" else precision)
    found = estimate_script(
        counts,
        gpu=row,
        gpus=gpus,
        zero=zero,
        precision=precision,
        gpus_per_node=gpus_per_node,
        network_gb_s=network_gb_s,
    )
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    flops = counts["matmul_flops"] + counts["attention_flops"]
    print(f"{argv[0]}: {counts['model']}, {counts['parameters'] / 1e9:.2f}B parameters, {gpus} {row.name}")
    print(f"  ZeRO stage {zero}, micro-batch of {counts['tokens']:,} tokens x {counts['grad_accum']} per step and GPU")
    print(
        f"traced: {flops / 1e12:.2f} TFLOP, {counts['saved_bytes'] / GIB:.2f} GiB saved for the backward pass, "
        f"{found.collective_bytes / GIB:.2f} GiB sent per step"
    )
    print(f"memory {found.memory.total:.1f} GiB of {row.memory_gib:g}: {'fits' if found.fits else 'does NOT fit'}")
    for name, gib in vars(found.memory).items():
        print(f"  {name:14}{gib:8.2f} GiB")
    print(f"step {found.time.total:.3f} s")
    for name, seconds in vars(found.time).items():
        print(f"  {name:14}{seconds:8.3f} s  {seconds / found.time.total:4.0%}")
    print(f"{found.tokens_per_s_per_gpu:,.0f} tokens/s/GPU")


def _fill_layout(
    gpus: int, *, dp_replicate: int | None, dp_shard: int | None, cp: int, tp: int, pp: int, zero: int | None
) -> ParallelLayout:
    """Complete the given axes: remaining ranks shard the parameters; with a ZeRO stage below 3 they are replicas."""
    named = ParallelLayout(
        dp_replicate=1 if dp_replicate is None else dp_replicate,
        dp_shard=1 if dp_shard is None else dp_shard,
        cp=cp,
        tp=tp,
        pp=pp,
    )
    remaining, over = divmod(gpus, named.world_size)
    if remaining > 1 and not over:
        if dp_shard is None and zero in (None, 3):
            named = replace(named, dp_shard=remaining)
        elif dp_replicate is None:
            named = replace(named, dp_replicate=remaining)
    named.check_world_size(gpus)
    return named


def _print_estimate(result: Estimate) -> None:
    """Print an estimate as two small tables: memory in GiB and time of a step in seconds."""
    job = result.job
    memory = result.memory
    time = result.time
    print(f"{job.shape.model_type} {job.shape.total_parameters / 1e9:.2f}B on {job.layout.world_size} {job.gpu.name}")
    print(f"  {job.layout}, ZeRO stage {job.zero}, micro-batch {job.micro_batch} x {job.micro_batches} per step")
    verdict = "fits" if result.fits else "does NOT fit" if result.fits_word == "no" else "may not fit"
    low, high = result.memory_range
    print(
        f"memory {memory.total:.1f} GiB ({low:.1f} to {high:.1f}) of {job.gpu.memory_gib:g}: {verdict} "
        f"({result.fits_word}: {result.fits_probability:.0%})"
    )
    for name, gib in vars(memory).items():
        print(f"  {name:14}{gib:8.2f} GiB")
    print(f"peak: {result.peak.description}")
    print(f"CPU memory of a node, to load, offload and save: {result.host_gib_per_node:,.0f} GiB")
    slowest, fastest = result.time_range[::-1]
    print(f"step {time.total:.3f} s ({fastest:.3f} to {slowest:.3f})")
    for name, seconds in vars(time).items():
        print(f"  {name:14}{seconds:8.3f} s  {seconds / time.total:4.0%}")
    mfu = "" if result.mfu is None else f", MFU {result.mfu:.1%} (attention in full)"
    print(f"{result.tokens_per_s_per_gpu:,.0f} tokens/s/GPU{mfu}")


def _run_table(path: Path) -> None:
    """Print a JSON line for every row of a CSV table in UTF-8. The line of a wrong row contains an error."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in REQUIRED if name not in (reader.fieldnames or ())]
            if missing:
                raise UsageError(f"--table {path} has no column {', '.join(missing)}: it needs {', '.join(REQUIRED)}")
            for number, row in enumerate(reader):
                sys.stdout.write(json.dumps(table_line(number, row)) + "\n")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--table {path} cannot be read: {reason}; give a CSV file in UTF-8") from None


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
            raise UsageError("the row has more cells than the table has columns: quote cells that contain a comma")
        result = estimate_job(job_of(row))
    except HfScaleError as error:
        numbers = dict.fromkeys(("tokens_per_s_per_gpu", "peak_mem_gib", "mfu"))
        return {"row": number, **numbers, "error": " ".join(str(error).split())}
    mfu = result.mfu
    assumptions = assumed(row)
    return {
        "row": number,
        "tokens_per_s_per_gpu": round(result.tokens_per_s_per_gpu, 4),
        "peak_mem_gib": round(allocated_gib(result.memory) if is_allocated(row) else result.memory.total, 4),
        "mfu": None if mfu is None else round(mfu, 5),
        "error": None,
        **({"assumed": assumptions} if assumptions else {}),
    }


COMMAND = run
