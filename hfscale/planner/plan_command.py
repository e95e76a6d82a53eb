"""`hfscale plan`: ranks the layouts for a model, with memory, time and cost; with --calibrate measures the machine."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hfscale.core.flags import parse_bandwidth, parse_network
from hfscale.core.launch_variables import launch_number
from hfscale.core.options import check_options, names_of, options_of
from hfscale.core.spelling import spelled
from hfscale.errors import ParameterError, UsageError
from hfscale.facts.compression import Compression
from hfscale.facts.own_hardware import read_hardware_file, user_hardware_file
from hfscale.planner.command_line import check_one_kind, make_command, parse_gpus
from hfscale.planner.islands import Islands, judge_islands
from hfscale.planner.job import check_pure
from hfscale.planner.option_fields import check_needs, default_of, flag_of, make_options
from hfscale.planner.options import IslandOptions, PlanOptions, PlanOutput
from hfscale.planner.plan import plan_gpu_types, plan_with

_COMPARE_FIRST = "compare first, then name the one"
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def run(
    model: str | None,
    given: dict[str, Any],
    island_flags: dict[str, Any],
    output_flags: dict[str, Any],
) -> int:
    """Rank the layouts that fit; return the exit code, 1 if nothing fits.

    Args:
        model (`str`, *optional*): the model; with `--calibrate` the file to write.
        given (`dict[str, Any]`): the flags of `PlanOptions`.
        island_flags (`dict[str, Any]`): the flags of `IslandOptions`.
        output_flags (`dict[str, Any]`): the flags of `PlanOutput`.
    """
    output = PlanOutput(**output_flags)
    gpu = given["gpu"]
    gpus = given["gpus"]
    if output.calibrate:
        if gpu is not None or gpus is not None:
            asked = spelled("calibrate")
            hardware = " and ".join(map(spelled, ("gpu", "gpus")))
            raise UsageError(
                f"{asked} measures this machine: leave out {hardware}, and plan afterwards"
            )
        return _run_calibration(None if model is None else Path(model), as_json=output.as_json)
    if model is None or gpu is None or gpus is None:
        raise UsageError(
            "give a MODEL, --gpu and --gpus, such as llama-3.1-8b --gpu H100-80GB --gpus 8"
        )
    check_pure(given["pure_bf16"], given["precision"])
    check_needs(PlanOptions, "plan", given)
    check_needs(IslandOptions, "plan", island_flags)
    check_needs(PlanOutput, "plan", output_flags)
    check_options(PlanOutput, output_flags)
    # The command that is printed at the end has the values as they were typed.
    typed = given
    if given["tokens"] is not None:
        given = given | {"tokens": _parse_tokens(given["tokens"])}
    if given["network_gb_s"] is not None:
        network = parse_network(given["network_gb_s"], given["gpus_per_node"])
        given = given | {"network_gb_s": network}
    check_one_kind(gpu)
    given = given | {"gpus": parse_gpus(gpus)}
    options = make_options(PlanOptions, "plan", given)
    places = _islands(IslandOptions(**island_flags))
    if "," in gpu:
        if places is not None:
            islands = spelled("islands")
            rule = f"{islands} takes one GPU; {_COMPARE_FIRST}"
            raise ParameterError("gpu", gpu, rule)
        if output.emit is not None or output.plot is not None:
            emit_name = spelled("emit")
            plot_name = spelled("plot")
            rule = f"{emit_name} and {plot_name} take one GPU; {_COMPARE_FIRST}"
            raise ParameterError("gpu", gpu, rule)
        names = [name.strip() for name in gpu.split(",") if name.strip()]
        if not names:
            given_gpu = f"{spelled('gpu')} is {gpu!r}"
            raise UsageError(f"{given_gpu}: give names of GPUs, such as H100-80GB,A100-80GB")
        return _compare(model, names, options, as_json=output.as_json)
    result = plan_with(model, options)
    written = []
    if output.emit is not None and result.choices:
        from hfscale.planner.emit import emit

        written += emit(result, output.emit, number=output.choice, force=output.force)
    if output.plot is not None and result.choices:
        from hfscale.planner.plot import draw

        draw(result, output.plot)
        written.append(output.plot)
    verdict = None
    if places is not None and result.choices:
        verdict = judge_islands(result.choices[0].estimate, places, result.tokens)
    if output.as_json:
        values = result.to_dict()
        if verdict is not None:
            values["islands"] = verdict.to_dict()
        if written:
            values["files"] = [str(path) for path in written]
        print(json.dumps(values))
    else:
        from hfscale.planner.plan_view import show, show_details

        if output.details:
            show_details(result, written, verdict)
        else:
            show(
                result, written, verdict, command=_typed(model, {**typed, "choice": output.choice})
            )
    return 0 if result.choices else 1


def _typed(model: str, given: Mapping[str, Any]) -> list[str]:
    """Return the words of a command that plans the same, without what it prints or writes."""
    words = ["hfscale", "plan", model]
    for name, value in given.items():
        cls = PlanOutput if name == "choice" else PlanOptions
        if value is None or value == default_of(cls, name, "plan"):
            continue
        flag = flag_of(options_of(cls)[name].flag or name)
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag.removeprefix('--')}")
        else:
            words += [flag, str(value)]
    return words


def _islands(flags: IslandOptions) -> Islands | None:
    """Return what `--islands` and its options describe; None without it."""
    with names_of(Compression):
        compression = Compression(bits=flags.island_bits, density=flags.island_density)
    bandwidth = flags.island_bandwidth
    if flags.islands is None:
        if bandwidth is not None:
            given = f"{spelled('island_bandwidth')} is {bandwidth}"
            islands = spelled("islands")
            raise UsageError(f"{given}, and {islands} is missing: give the number of islands")
        return None
    if bandwidth is None:
        needed = spelled("island_bandwidth")
        raise ParameterError("islands", flags.islands, f"give {needed} too, such as 1Gbps")
    return Islands(
        count=flags.islands,
        link_bytes_s=parse_bandwidth(bandwidth),
        compression=compression,
        steps=flags.island_steps,
        overlap_steps=flags.island_overlap_steps,
        fragments=flags.island_fragments,
    )


def _compare(model: str, gpu_types: list[str], options: PlanOptions, *, as_json: bool) -> int:
    """Plan for several types of GPU and print the first choice on each."""
    plans, failed = plan_gpu_types(model, gpu_types, options)
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
        given = spelled("calibrate")
        raise UsageError(
            f"{given} writes TOML, and the file is {path}: use a name such as hardware.toml"
        )
    if path.exists():
        read_hardware_file(path)  # report a wrong file before minutes of measuring
    from hfscale.check.calibrate import calibrate, write

    found = calibrate()
    if launch_number("RANK", 0) > 0:
        return 0
    gpu = write(found, path)
    if as_json:
        print(
            json.dumps({"file": str(path), "gpu": asdict(gpu), "measurements": found.measurements})
        )
        return 0
    for name, value in asdict(gpu).items():
        if name.startswith("achieved") and value is not None:
            print(f"{name.removeprefix('achieved_')}: {value:.4g}")
    if found.processes == 1:
        print(
            "one process cannot measure collectives: use accelerate launch -m hfscale plan --calibrate"
        )
    flags = "" if gpu.bf16_tflops else " --precision " + ("fp16" if gpu.fp16_tflops else "fp32")
    flags += "" if path == user_hardware_file() else f" --hardware {path}"
    print(f"Written: {path}; plan with it: hfscale plan MODEL --gpu {gpu.name} --gpus N{flags}")
    return 0


def _parse_tokens(text: str) -> float:
    """Parse a number of tokens such as `500M`, `1.5T` or `1e12`; K, M, B or G, and T are powers of 1000."""
    found = re.fullmatch(
        r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([KMBGT]?)", text.strip().replace(",", ""), flags=re.IGNORECASE
    )
    tokens = float(found[1]) * _UNITS[found[2].upper()] if found else 0.0
    if not 0 < tokens < 1e18:
        given = f"{spelled('tokens')} is {text!r}"
        raise UsageError(f"{given}: write a number of tokens such as 500M, 20B or 1T")
    return tokens


COMMAND = make_command(
    run,
    PlanOptions,
    IslandOptions,
    PlanOutput,
    function="plan",
    arguments={
        "model": Annotated[
            str | None,
            typer.Argument(
                metavar="MODEL",
                help="A built-in name, hub id or config.json; with --calibrate, the file to write.",
            ),
        ]
    },
    defaults={"gpus": None},
)
EXAMPLES = (
    "hfscale plan llama-3.1-8b --gpu H100-80GB --gpus 8 --tokens 20B",
    "hfscale plan qwen3-8b --gpu A100-80GB --gpus 8 --method lora --tokens 500M --emit runs/plan",
)
