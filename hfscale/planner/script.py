"""Estimates a step of a user's own script from the counts of its trace (`hfscale.planner.trace`).

Each rank runs the traced micro-batch; data-parallel communication, the optimizer and what the ranks share are added.
Matrix products, attention and other operators run at the rates that the planner uses for its models. Not modelled are
the time that the CPU needs to launch operators, and fusion by torch.compile.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hfscale.core.text_files import parse_json
from hfscale.errors import HfScaleError, UsageError
from hfscale.facts.hardware import Accelerator
from hfscale.planner.frameworks import find_framework, shared_constants
from hfscale.planner.job import OPTIMIZERS
from hfscale.planner.kernels import Rates
from hfscale.planner.launchable import TRAINER_OPTIMIZERS
from hfscale.planner.memory import GIB, Memory
from hfscale.planner.network import Group, Network
from hfscale.planner.options import Precision
from hfscale.planner.throughput import StepTime

TRACER = "hfscale.planner.trace"
"""The module that traces, which needs torch and runs in a process of its own."""
RESULT = "hfscale-trace: "
"""What the line with its result begins with."""
_OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
CAUSAL_PAIRS = 0.5
"""Part of the pairs of positions that attention kernels compute for a causal model."""


@dataclass(frozen=True, kw_only=True)
class ScriptEstimate:
    """Holds the estimate of a script's step."""

    counts: Mapping[str, Any]
    """What was traced."""
    gpu: Accelerator
    """The device."""
    gpus: int
    """Number of data-parallel ranks."""
    memory: Memory
    """Peak memory of a rank. Its activations include the parameters that autocast has converted; its loss is the
    largest tensor of the step once more: the gradient of the logits in a language model."""
    time: StepTime
    """Duration of an optimizer step."""
    collective_bytes: float
    """Bytes that each rank sends per optimizer step."""

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.memory.needed <= self.gpu.memory_gib

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        """Tokens per second and device, those of a decoder included; None where the inputs are no tokens."""
        if self.counts["tokens"] is None:
            return None
        return float(self.counts["tokens"] * self.counts["grad_accum"] / self.time.total)

    @property
    def samples_per_s_per_gpu(self) -> float:
        """Samples per second and device."""
        return float(self.counts["samples"] * self.counts["grad_accum"] / self.time.total)

    def to_dict(self) -> dict[str, Any]:
        """Return the content that `hfscale estimate --script … --json` prints, as a dictionary."""
        speed = {"samples_per_s_per_gpu": self.samples_per_s_per_gpu}
        if self.tokens_per_s_per_gpu is not None:
            speed["tokens_per_s_per_gpu"] = self.tokens_per_s_per_gpu
        return {
            "memory_gib": {**asdict(self.memory), "total": self.memory.total},
            "fits": self.fits,
            "step_time_s": self.time.total,
            "time_s": asdict(self.time),
            **speed,
            "collective_gib": self.collective_bytes / GIB,
            "traced": dict(self.counts),
        }


@dataclass(frozen=True, kw_only=True)
class _Work:
    """The part of a `Job` that decides the rates of its device."""

    gpu: Accelerator
    precision: Precision
    rowwise_fp8: bool = False


def trace_script(argv: Sequence[str], *, gpus: int, precision: Precision) -> dict[str, Any]:
    """Trace one micro-batch of a script in a process of its own.

    Args:
        argv (`Sequence[str]`): the script and its arguments.
        gpus (`int`): number of ranks of its process group.
        precision (`str`): `fp32`, or the format of autocast: `bf16` or `fp16`.

    Returns:
        `dict`: the counts, see `hfscale.planner.trace.trace_step`.

    Raises:
        HfScaleError: the script failed, or did not call `Trainer.train`.
    """
    command = [sys.executable, "-m", TRACER, str(gpus), precision, *argv]
    own = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "WANDB_MODE": "disabled"}
    environment = {
        name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER
    } | own
    done = subprocess.run(  # noqa: S603  # a list of arguments, without a shell
        command, capture_output=True, text=True, check=False, env=environment
    )
    results = [
        line.removeprefix(RESULT) for line in done.stdout.splitlines() if line.startswith(RESULT)
    ]
    if results:
        counts: dict[str, Any] = parse_json(results[-1])
        return counts
    reason = (done.stderr.strip().splitlines() or ["no output"])[-1].strip()
    raise HfScaleError(
        f"{argv[0]} cannot be traced ({reason}): estimate its model instead, with hfscale estimate MODEL"
    )


def estimate_script(
    counts: Mapping[str, Any],
    *,
    gpu: Accelerator,
    gpus: int,
    zero: int,
    precision: Precision,
    gpus_per_node: int = 8,
    network_gb_s: float | None = None,
) -> ScriptEstimate:
    """Estimate memory and time of a traced script.

    Args:
        counts (`Mapping`): what `trace_script` returned.
        gpu (`Accelerator`): the device.
        gpus (`int`): number of data-parallel ranks.
        zero (`int`): what they shard: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters (FSDP2).
        precision (`str`): format of the matrix products.
        gpus_per_node (`int`): GPUs that NVLink or PCIe connects.
        network_gb_s (`float`, *optional*): bandwidth between nodes per GPU and direction, GB/s.

    Raises:
        UsageError: the states of the script's optimizer are not known, or no peak of the device for the precision.
    """
    names = {trainer: name for name, trainer in TRAINER_OPTIMIZERS.items()}
    if counts["optimizer"] not in names:
        raise UsageError(
            f"the script's optim is {counts['optimizer']}: the states of {', '.join(names)} are known"
        )
    optimizer = OPTIMIZERS[names[counts["optimizer"]]]
    framework = find_framework("hf")
    shared = shared_constants()
    trained = counts["trainable_parameters"]
    shards = [gpus if zero >= stage else 1 for stage in (1, 2, 3)]
    in_use = {
        "parameters": counts["parameter_bytes"] / shards[2],
        "gradients": counts["gradient_bytes"] / shards[1],
        "optimizer": trained * optimizer["state_bytes"] / shards[0],
        # Under FSDP2 converted parameters are gathered for each layer instead of being kept.
        "activations": counts["saved_bytes"] - (counts["cast_bytes"] if zero == 3 else 0),
        "loss": counts["largest_bytes"],
    }
    parts = {name: size / GIB for name, size in in_use.items()}
    memory = Memory(
        **parts,
        buffers=(parts["activations"] + parts["loss"]) * (shared.fragmentation - 1),
        context=framework.context_gib,
    )
    rates = Rates(_Work(gpu=gpu, precision=precision), framework, shared)
    pairs = CAUSAL_PAIRS if "CausalLM" in counts["model"] else 1.0
    compute_s = (
        counts["matmul_flops"] / rates.matmul
        + counts["attention_flops"] * pairs / rates.attention
        + counts["other_bytes"] / rates.memory
    ) * counts["grad_accum"]
    own = counts["collective_bytes"] * counts["grad_accum"]
    volume = _data_parallel_bytes(counts, gpus, zero) + own
    network = Network.of(gpu, node_size=gpus_per_node, network_gb_s=network_gb_s, shared=shared)
    seconds = volume / network.bandwidth(Group(size=gpus)) if gpus > 1 else 0.0
    time = StepTime(
        compute=compute_s,
        communication=seconds * (1 - framework.overlap_dp),
        bubble=0.0,
        optimizer=trained * optimizer["traffic_bytes"] / shards[0] / rates.memory
        + framework.step_s,
    )
    return ScriptEstimate(
        counts=counts, gpu=gpu, gpus=gpus, memory=memory, time=time, collective_bytes=volume
    )


def _data_parallel_bytes(counts: Mapping[str, Any], gpus: int, zero: int) -> float:
    """Bytes that each rank sends per step in rings: an all-reduce of the gradients (two passes), or with ZeRO-3 two
    gathers of the parameters in 16 bits and a reduce-scatter of the gradients in each micro-batch."""
    share = (gpus - 1) / gpus
    if zero < 3:
        return float(2 * share * counts["gradient_bytes"])
    return float(
        share * counts["grad_accum"] * (2 * 2 * counts["parameters"] + counts["gradient_bytes"])
    )
