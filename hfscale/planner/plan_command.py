"""`hfscale plan`: ranks the layouts for a model, with memory, time and cost; with --calibrate measures the machine."""

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hfscale.core.flags import parse_bandwidth
from hfscale.errors import UsageError
from hfscale.facts.compression import Compression
from hfscale.facts.hardware import read_hardware_file, user_hardware_file
from hfscale.planner.islands import Islands, judge_islands
from hfscale.planner.job import Method, Optimizer, Precision, Task, check_pure
from hfscale.planner.plan import Objective, plan, plan_gpu_types

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def run(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A built-in name, hub id or config.json; with --calibrate, the file to write."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="A GPU of hardware.toml, or a calibrated one: H100-80GB; or several: H100-80GB,A100-80GB."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Number of GPUs; with --objective cost or gpus, the most to use.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs that NVLink or PCIe connects.")] = 8,
    task: Annotated[
        Task, typer.Option(help="What a step trains on: text (or chats); with TRL sft, dpo or grpo.")
    ] = "text",
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence; with grpo prompt and completion.")] = 4096,
    global_batch: Annotated[
        int | None, typer.Option(help="Sequences per step; dpo: pairs, grpo: completions.")
    ] = None,
    num_generations: Annotated[int | None, typer.Option(help="grpo: completions per prompt (8).")] = None,
    max_completion_length: Annotated[int | None, typer.Option(help="grpo: tokens to generate (512).")] = None,
    beta: Annotated[
        float | None, typer.Option(help="grpo: KL coefficient; above 0 a reference model is kept (0).")
    ] = None,
    precompute_ref_log_probs: Annotated[
        bool, typer.Option("--precompute-ref-log-probs", help="dpo: no reference model during the training.")
    ] = False,
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on: 500M, 1T.")] = None,
    method: Annotated[Method, typer.Option(help="Which parameters train.")] = "full",
    lora_rank: Annotated[int, typer.Option(help="Rank of the adapters.")] = 16,
    stack: Annotated[str, typer.Option(help="Training framework: hf, titan or megatron.")] = "hf",
    precision: Annotated[Precision, typer.Option(help="Format of the matrix products.")] = "bf16",
    optimizer: Annotated[Optimizer, typer.Option(help="The optimizer.")] = "adamw",
    compile: Annotated[bool, typer.Option("--compile", help="The model runs under torch.compile.")] = False,
    liger: Annotated[
        bool | None,
        typer.Option("--liger/--no-liger", help="The loss is fused (use_liger_kernel); by default both are tried."),
    ] = None,
    pure_bf16: Annotated[
        bool, typer.Option("--pure-bf16", help="Parameters, gradients and optimizer states are in bf16.")
    ] = False,
    network_gb_s: Annotated[float | None, typer.Option(help="GB/s per GPU between nodes, one direction.")] = None,
    objective: Annotated[Objective, typer.Option(help="What to rank by; gpus: fewest.")] = "time",
    min_gpus: Annotated[bool, typer.Option("--min-gpus", help="Also search for the fewest GPUs.")] = False,
    deadline: Annotated[float | None, typer.Option(help="Hours that the run may take.")] = None,
    budget: Annotated[float | None, typer.Option(help="USD that the run may cost.")] = None,
    usd_per_gpu_hour: Annotated[float | None, typer.Option(help="Your price, instead of the providers'.")] = None,
    spot_interruptions: Annotated[float | None, typer.Option(help="Preemptions per spot node and hour.")] = None,
    prices: Annotated[Path | None, typer.Option(help="Your price list, rows as in hfscale/facts/prices.toml.")] = None,
    islands: Annotated[
        int | None, typer.Option(help="Number of places that exchange now and then (DiLoCo), each with --gpus GPUs.")
    ] = None,
    island_bandwidth: Annotated[str | None, typer.Option(help="Link between islands, one direction: 1Gbps.")] = None,
    island_steps: Annotated[int, typer.Option(help="Steps between two exchanges of the islands.")] = Islands.steps,
    island_overlap_steps: Annotated[
        int, typer.Option(help="Steps that train while a round of the islands exchanges.")
    ] = Islands.overlap_steps,
    island_fragments: Annotated[
        int, typer.Option(help="Parts of the parameters, of whole layers, that have rounds in turn.")
    ] = Islands.fragments,
    island_bits: Annotated[
        int, typer.Option(help="Bits per value that islands exchange: 32, 8, 4; with a density 2.")
    ] = 32,
    island_density: Annotated[
        float | None, typer.Option(help="Fraction of the values that islands exchange (top-k): 0.0156.")
    ] = None,
    top: Annotated[int, typer.Option(help="Number of choices to show.")] = 5,
    emit: Annotated[Path | None, typer.Option(help="Write configs, script and launch command to this folder.")] = None,
    choice: Annotated[int, typer.Option(help="Number of the choice that --emit writes.")] = 1,
    plot: Annotated[
        Path | None, typer.Option(help="Draw memory, time and cost into this file (svg, png or pdf).")
    ] = None,
    hardware: Annotated[
        Path | None, typer.Option(help="A file written by --calibrate (default: ~/.config/hfscale/hardware.toml).")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Measure this machine and write the file MODEL, by default that of --hardware."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Ranks the layouts that fit; returns the exit code, 1 if nothing fits."""
    if calibrate:
        if gpu is not None or gpus is not None:
            raise UsageError("--calibrate measures this machine: leave out --gpu and --gpus, and plan afterwards")
        return _run_calibration(None if model is None else Path(model), as_json=as_json)
    if model is None or gpu is None or gpus is None:
        raise UsageError("give a MODEL, --gpu and --gpus, such as llama-3.1-8b --gpu H100-80GB --gpus 8")
    check_pure(pure_bf16, precision)
    if top < 1:
        raise UsageError(f"--top is {top}: give a number of choices of at least 1")
    places = _islands(
        islands,
        island_bandwidth,
        Compression(bits=island_bits, density=island_density),
        steps=island_steps,
        overlap_steps=island_overlap_steps,
        fragments=island_fragments,
    )
    options: dict[str, Any] = {
        "gpus": gpus,
        "gpus_per_node": gpus_per_node,
        "seq_len": seq_len,
        "global_batch": global_batch,
        "tokens": None if tokens is None else _parse_tokens(tokens),
        "method": method,
        "lora_rank": lora_rank,
        "stack": stack,
        "precision": precision,
        "optimizer": optimizer,
        "pure": pure_bf16,
        "compile": compile,
        "fused_loss": liger,
        "network_gb_s": network_gb_s,
        "task": task,
        "num_generations": num_generations,
        "max_completion_length": max_completion_length,
        "beta": beta,
        "precompute_ref_log_probs": precompute_ref_log_probs,
        "objective": objective,
        "min_gpus": min_gpus,
        "deadline_hours": deadline,
        "budget_usd": budget,
        "usd_per_gpu_hour": usd_per_gpu_hour,
        "spot_interruptions": spot_interruptions,
        "prices": prices,
        "hardware": hardware,
        "top": top,
    }
    if "," in gpu:
        if places is not None:
            raise UsageError(f"--gpu is {gpu}: --islands takes one GPU; compare first, then name the one")
        if emit is not None or plot is not None:
            raise UsageError(f"--gpu is {gpu}: --emit and --plot take one GPU; compare first, then name the one")
        names = [name.strip() for name in gpu.split(",") if name.strip()]
        if not names:
            raise UsageError(f"--gpu is {gpu!r}: give names of GPUs, such as H100-80GB,A100-80GB")
        return _compare(model, names, options, as_json=as_json)
    result = plan(model, gpu=gpu, **options)
    written = []
    if emit is not None and result.choices:
        from hfscale.planner.emit import emit as write_files

        written += write_files(result, emit, number=choice)
    if plot is not None and result.choices:
        from hfscale.planner.plot import draw

        draw(result, plot)
        written.append(plot)
    verdict = None
    if places is not None and result.choices:
        verdict = judge_islands(result.choices[0].estimate, places, result.tokens)
    if as_json:
        more = {"files": [str(path) for path in written]} if written else {}
        print(json.dumps({**result.to_dict(), **({} if verdict is None else {"islands": verdict.to_dict()}), **more}))
    else:
        from hfscale.planner.plan_view import show

        show(result, written, verdict)
    return 0 if result.choices else 1


def _islands(count: int | None, bandwidth: str | None, compression: Compression, **steps: int) -> Islands | None:
    """Return what `--islands` and its options describe; None without it."""
    if count is None:
        if bandwidth is not None:
            raise UsageError(
                f"--island-bandwidth is {bandwidth}, and --islands is missing: give the number of islands"
            )
        return None
    if bandwidth is None:
        raise UsageError(f"--islands is {count}: give --island-bandwidth too, such as 1Gbps")
    link = parse_bandwidth(bandwidth)
    return Islands(count=count, link_bytes_s=link, compression=compression, **steps)


def _compare(model: str, gpu_types: list[str], options: dict[str, Any], *, as_json: bool) -> int:
    """Plan for several types of GPU and print the first choice on each."""
    plans, failed = plan_gpu_types(model, gpu_types=gpu_types, **options)
    if as_json:
        print(json.dumps({"plans": [found.to_dict() for found in plans], "failed": failed}))
    else:
        from hfscale.planner.plan_view import show_gpu_types

        show_gpu_types(plans, failed)
    return 0 if any(found.choices for found in plans) else 1


def _run_calibration(file: Path | None, *, as_json: bool) -> int:
    """Measure this machine. The main process writes the file, by default the user's, and prints how to plan with
    it."""
    path = file or user_hardware_file()
    if path.suffix != ".toml":
        raise UsageError(f"--calibrate writes TOML, and the file is {path}: use a name such as hardware.toml")
    if path.exists():
        read_hardware_file(path)  # report a wrong file before minutes of measuring
    from hfscale.health.calibrate import calibrate, write

    found = calibrate()
    if int(os.environ.get("RANK", "0")) > 0:
        return 0
    gpu = write(found, path)
    if as_json:
        print(json.dumps({"file": str(path), "gpu": asdict(gpu), "measurements": found.measurements}))
        return 0
    for name, value in asdict(gpu).items():
        if name.startswith("achieved") and value is not None:
            print(f"{name.removeprefix('achieved_')}: {value:.4g}")
    if found.processes == 1:
        print("one process cannot measure collectives: use accelerate launch -m hfscale plan --calibrate")
    flags = "" if gpu.bf16_tflops else " --precision " + ("fp16" if gpu.fp16_tflops else "fp32")
    flags += "" if path == user_hardware_file() else f" --hardware {path}"
    print(f"Written: {path}; plan with it: hfscale plan MODEL --gpu {gpu.name} --gpus N{flags}")
    return 0


def _parse_tokens(text: str) -> float:
    """Parse a number of tokens such as `500M`, `1.5T` or `1e12`; K, M, B or G, and T are powers of 1000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([KMBGT]?)", text.strip().replace(",", ""), flags=re.IGNORECASE)
    tokens = float(found[1]) * _UNITS[found[2].upper()] if found else 0.0
    if not 0 < tokens < 1e18:
        raise UsageError(f"--tokens is {text!r}: write a number of tokens such as 500M, 20B or 1T")
    return tokens


COMMAND = run
