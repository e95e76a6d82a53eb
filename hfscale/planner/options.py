"""Each option of `hfscale plan`, `hfscale estimate` and their functions, declared once.

`hfscale.planner.option_fields` derives from the fields the signatures and docstrings of `hfscale.plan` and
`hfscale.estimate`, the table of docs/api.md, the checks, and how an error names an option: as its caller wrote it.
`hfscale.planner.command_line` derives the flags of the commands and their help.

A `Job` and a `PlanRequest` inherit the options that formulas use.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hfscale.core.options import Check
from hfscale.core.spelling import spelled
from hfscale.errors import LayoutError, ParameterError
from hfscale.facts.batch_schedule import parse_batch_schedule
from hfscale.facts.hardware import Accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.planner.extra_options import ExtraOptions
from hfscale.planner.option_fields import (
    HARDWARE,
    INPUT,
    ISLANDS,
    LAYOUT,
    METHOD,
    MODEL,
    OUTPUT,
    REQUIRED,
    SEARCH,
    option,
)

ActivationCheckpointing = Literal["none", "selective", "full"]
"""Which activations are dropped in the forward pass and computed again in the backward pass."""
Precision = Literal["fp32", "bf16", "fp16", "fp8"]
"""Format of the matrix products; states are in fp32 unless `pure_bf16`."""
Method = Literal["full", "lora", "qlora"]
"""Which parameters train; `qlora` keeps the frozen ones in 4 bits."""
Optimizer = Literal[
    "adamw",
    "adamw_foreach",
    "adamw_bf16",
    "adamw_8bit",
    "sgd",
    "sgd_momentum",
    "adafactor",
    "muon",
]
"""Optimizers, which differ in the size of their states. `adamw` is fused, Trainer's default; `adamw_foreach` is
Trainer's `adamw_torch`, which was its default until 2025."""
Offload = Literal["none", "optimizer", "full"]
"""What is kept in the CPU's memory: with `optimizer` the optimizer states, which are updated there; with `full` also
parameters and gradients."""
Task = Literal["text", "sft", "dpo", "grpo", "vision", "distillation"]
"""What a step trains on: packed sequences of text or chats (`text`); with TRL chats or completions (`sft`), pairs of a
chosen and a rejected sequence (`dpo`), completions that the model generates in the step (`grpo`), conversations with
images (`vision`), or completions that the model generates and a teacher predicts (`distillation`)."""
TeacherDtype = Literal["bfloat16", "float32"]
"""Format of a teacher's weights."""
Schedule = Literal["1f1b", "gpipe", "zero_bubble", "zbv", "dualpipev"]
"""Pipeline schedules; `1f1b` with several virtual stages is the interleaved one. See `hfscale.facts.schedules`."""
AverageDevice = Literal["device", "cpu"]
"""Where an average of the weights is kept: with the weights, or in the CPU's memory."""
ExpertsImplementation = Literal["grouped_mm", "batched_mm", "eager"]
"""How transformers computes the experts of a layer: in one grouped product; with a copy of its expert's matrices for
each token; or in a loop over the experts."""
Objective = Literal["time", "cost", "gpus"]
"""What choices are ranked by."""

MAX_GPUS = 131_072
"""Largest number of GPUs that is searched."""
MAX_RANKS = 10**6
"""Largest number of ranks that is not taken for a typing mistake."""
MAX_SIZE = 10**9
"""Largest size of a run that is not taken for a typing mistake."""
MAX_INTERRUPTIONS = 60.0
"""Largest number of preemptions per spot node and hour that is not taken for a typing mistake: one a minute."""


# -- checks -----------------------------------------------------------------------------------------------------------


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer, and not a truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def a_size(name: str, value: Any) -> None:
    """Check that a size is an integer from 1 to `MAX_SIZE`."""
    if not is_integer(value) or value < 1:
        raise LayoutError(f"{spelled(name)} is {value!r}: it must be an integer of at least 1")
    if value > MAX_SIZE:
        raise LayoutError(f"{spelled(name)} is {value}: it must be at most {MAX_SIZE:,}")


def an_amount(name: str, value: Any) -> None:
    """Check that an amount is above 0 and finite."""
    if not 0 < value < math.inf:
        raise ParameterError(name, value, "it must be a finite number above 0")


def a_batch_schedule(name: str, value: Any) -> None:
    """Check that a batch schedule can be read."""
    if not isinstance(value, str):
        raise ParameterError(name, value, "write it as text, such as '256@0,512@1B'")
    parse_batch_schedule(value)


def at_most(limit: int) -> Check:
    """Return the check that a number of GPUs is an integer from 1 to `limit`."""

    def check(name: str, value: Any) -> None:
        if not is_integer(value) or not 1 <= value <= limit:
            raise LayoutError(f"{spelled(name)} is {value}: give a number from 1 to {limit:,}")

    return check


def a_zero_stage(name: str, value: Any) -> None:
    """Check that a value is a stage of ZeRO."""
    if value not in (0, 1, 2, 3):
        raise LayoutError(f"{spelled(name)} is {value!r}: use a ZeRO stage of 0, 1, 2 or 3")


def interruptions(name: str, value: Any) -> None:
    """Check a number of preemptions per spot node and hour."""
    if not 0 <= value <= MAX_INTERRUPTIONS:
        rule = (
            f"give preemptions per spot node and hour, from 0 to {MAX_INTERRUPTIONS:g}, such as "
            "0.02 for one in two days"
        )
        raise ParameterError(name, value, rule)


def a_factor(name: str, value: Any) -> None:
    """Check that a ratio of the largest to the average is at least 1 and finite."""
    if not 1 <= value < math.inf:
        raise ParameterError(name, value, "it must be a finite number of at least 1, such as 1.2")


def a_fraction(name: str, value: Any) -> None:
    """Check that a value is at least 0 and below 1."""
    if not 0 <= value < 1:
        raise ParameterError(name, value, "it must be at least 0 and below 1")


def a_decay(name: str, value: Any) -> None:
    """Check that a decay is above 0 and below 1."""
    if not 0 < value < 1:
        raise ParameterError(name, value, "it must be above 0 and below 1, such as 0.999")


def several(name: str, value: Any) -> None:
    """Check that a mean is of several snapshots."""
    if value < 2:
        raise ParameterError(name, value, "it must be at least 2")


def a_count(name: str, value: Any) -> None:
    """Check that there is at least one of something."""
    if value < 1:
        raise ParameterError(name, value, "it must be at least 1")


# -- the options ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run that `plan` and `estimate` share."""

    task: Task = option(
        "text",
        group=MODEL,
        help="What a step trains on: text (or chats), or with TRL sft, vision, dpo (the batch counts pairs), grpo or "
        "distillation (it counts completions)",
        flag_of=("plan",),
    )
    seq_len: int = option(
        4096,
        estimate=REQUIRED,
        group=MODEL,
        unit="tokens",
        check=a_size,
        help="Tokens per sequence; with grpo and distillation prompt and completion, with vision those of images too",
    )
    global_batch: int | None = option(
        None,
        group=MODEL,
        unit="sequences",
        check=a_size,
        help="Sequences per step; dpo: pairs, grpo: completions",
        notes={
            "plan": "by default a usual batch for this training",
            "estimate": "by default one micro-batch per data-parallel rank",
        },
    )
    num_generations: int = option(
        8,
        plan=None,
        group=MODEL,
        task="grpo",
        help="Completions per prompt with grpo",
        unset="8, as in TRL",
        flag_of=("plan",),
    )
    max_completion_length: int = option(
        512,
        plan=None,
        group=MODEL,
        unit="tokens",
        task=("grpo", "distillation"),
        help="Tokens of a sequence to generate with grpo or distillation",
        unset="512",
        flag_of=("plan",),
    )
    beta: float = option(
        0.0,
        plan=None,
        group=MODEL,
        task="grpo",
        help="Coefficient of the KL divergence with grpo; above 0 a reference model is kept",
        unset="0, as in TRL",
        flag_of=("plan",),
    )
    precompute_ref_log_probs: bool = option(
        False,
        group=MODEL,
        task="dpo",
        help="With dpo the reference's log-probabilities are computed before the training, which keeps no reference "
        "model",
        flag_of=("plan",),
    )
    teacher: str | None = option(
        None,
        group=MODEL,
        task="distillation",
        help="The model that distillation imitates: a built-in name, hub id or config.json",
        flag_of=("plan",),
    )
    teacher_dtype: TeacherDtype = option(
        "bfloat16",
        group=MODEL,
        task="distillation",
        help="Format of the teacher's weights",
        flag_of=("plan",),
    )
    whole_teacher: bool = option(
        False,
        group=MODEL,
        task="distillation",
        help="Each rank of FSDP2 keeps the whole teacher, where ranks share its weights otherwise",
        flag_of=("plan",),
    )
    images: int = option(
        1,
        group=MODEL,
        task="vision",
        check=a_size,
        help="Images per sequence with vision; an image that the processor cuts counts as its parts",
        flag_of=("plan",),
    )
    train_vision_tower: bool = option(
        False,
        group=MODEL,
        task="vision",
        help="The vision tower is trained too",
        flag_of=("plan",),
    )
    frozen_projector: bool = option(
        False,
        group=MODEL,
        task="vision",
        help="What leads from the vision tower to the language model is frozen, as it is with adapters",
        flag_of=("plan",),
    )
    stack: str = option(
        "hf",
        group=MODEL,
        help="Training framework whose constants are used: hf, titan or megatron",
    )
    expert_imbalance: float | None = option(
        None,
        group=MODEL,
        check=a_factor,
        help="Tokens of the fullest of the ranks that share experts, relative to the average",
        unset="1.1",
    )
    method: Method = option("full", group=METHOD, help="Which parameters train")
    lora_rank: int = option(
        16, group=METHOD, needs="method", check=a_count, help="Rank of the adapters"
    )
    lora_target_modules: str | None = option(
        None,
        group=METHOD,
        needs="method",
        help="Modules with adapters, separated by commas, such as q_proj,v_proj",
        unset="every linear layer but the head, and the experts where PEFT adapts them",
    )
    lora_dropout: float = option(
        0.0,
        group=METHOD,
        needs="method",
        check=a_fraction,
        help="Dropout on the input of the adapters",
    )
    precision: Precision = option("bf16", group=METHOD, help="Format of the matrix products")
    pure_bf16: bool = option(
        False,
        group=METHOD,
        aliases=("pure",),
        help="Parameters, gradients and optimizer states are in bf16, as the matrix products",
    )
    optimizer: Optimizer = option("adamw", group=METHOD, help="The optimizer")
    ema_decay: float | None = option(
        None,
        group=METHOD,
        check=a_decay,
        help="Decay of a moving average of the trained weights, which is kept in fp32 (--ema_decay of the recipes)",
        unset="no such average",
    )
    average_device: AverageDevice = option(
        "device",
        group=METHOD,
        help="Where the average is kept: with the weights (device), or in the CPU's memory (cpu)",
    )
    activation_offload: bool = option(
        False,
        group=METHOD,
        aliases=("activation_offloading",),
        help="What the backward pass needs of a layer waits in the CPU's memory (activation_offloading of TRL's "
        "trainers, recipes/sft and recipes/dpo)",
    )
    compile: bool | None = option(
        None,
        group=METHOD,
        help="The model runs under torch.compile",
        unset="what the recipes do on an NVIDIA GPU: they compile layers with which it was tried",
    )
    liger: bool | None = option(
        None,
        estimate=False,
        group=METHOD,
        aliases=("fused_loss",),
        help="The loss is fused and never holds all logits at once (use_liger_kernel)",
        unset="both are tried where a recipe can",
    )
    gpus_per_node: int = option(
        8, group=HARDWARE, check=a_size, help="GPUs that NVLink or PCIe connects"
    )
    network_gb_s: float | None = option(
        None,
        group=HARDWARE,
        unit="GB/s",
        text=True,
        help="Bandwidth between nodes per GPU, one direction; on the command line also 100Gbps, or 100Gbps/node for a "
        "card that the GPUs of a node share",
        unset="that of the vendor's reference node",
    )


@dataclass(frozen=True, kw_only=True)
class LayoutOptions(RunOptions):
    """Options of a run whose layout is given."""

    micro_batch: int = option(
        1,
        group=LAYOUT,
        unit="sequences",
        check=a_size,
        help="Sequences per data-parallel rank and micro-batch",
    )
    zero: int = option(
        0,
        group=LAYOUT,
        check=a_zero_stage,
        help="ZeRO stage, what data-parallel ranks shard: 0 nothing, 1 optimizer states, 2 also gradients, 3 also "
        "parameters (FSDP2)",
    )
    activation_checkpointing: ActivationCheckpointing = option(
        "none",
        group=METHOD,
        aliases=("recompute",),
        help="Activation recomputation",
    )
    offload: Offload = option("none", group=METHOD, help="States kept in the CPU's memory")
    average_last: int | None = option(
        None,
        group=METHOD,
        check=several,
        help="Number of snapshots of the trained weights, in fp32, of which the mean is kept",
        unset="no such mean",
    )
    experts_implementation: ExpertsImplementation = option(
        "grouped_mm",
        group=METHOD,
        help="How transformers computes the experts of a layer (its experts_implementation)",
    )
    use_dora: bool = option(
        False,
        group=METHOD,
        needs="method",
        help="Adapters are those of DoRA, which scales the columns of each matrix",
    )
    virtual_stages: int = option(1, group=LAYOUT, check=a_size, help="Pipeline stages per rank")
    schedule: Schedule = option("1f1b", group=LAYOUT, help="Pipeline schedule")
    expert_parallel: int = option(
        1, group=LAYOUT, check=a_size, help="Ranks that share the experts of a layer"
    )
    overlapped_experts: bool = option(
        False,
        group=LAYOUT,
        help="Tokens are sent to their experts while another micro-batch is computed",
    )
    sequence_parallel: bool | None = option(
        None,
        group=LAYOUT,
        help="Tensor-parallel ranks also split norms and residuals along the sequence",
        unset="what the framework does with this layout",
        flag_of=(),
    )
    loss_parallel: bool | None = option(
        None,
        group=LAYOUT,
        help="The loss is computed on logits that stay split over the tensor-parallel ranks",
        unset="what the framework does with this layout",
        flag_of=(),
    )
    reshard: bool = option(
        True,
        group=LAYOUT,
        help="ZeRO-3 frees gathered parameters after the forward pass",
        flag_of=(),
    )
    flash_attention: bool = option(
        True, group=METHOD, help="Attention scores are never written to memory", flag_of=()
    )
    compiled_loss: bool = option(
        True,
        group=METHOD,
        help="torch.compile, if used, compiles the loss too, as in Hugging Face's models and torchtitan since 2025",
        flag_of=(),
    )
    rowwise_fp8: bool = option(
        False, group=METHOD, help="fp8 scales are per row instead of per tensor", flag_of=()
    )
    generation_rounds: int = option(
        1,
        group=MODEL,
        help="Rounds in which the completions of a step are generated, with grpo",
        flag_of=(),
    )


@dataclass(frozen=True, kw_only=True)
class HardwareOptions:
    """Options that name the hardware."""

    gpu: str | Accelerator = option(
        group=HARDWARE,
        text=True,
        help="A GPU of hardware.toml, or a calibrated one: H100-80GB",
        notes={"plan": "on the command line also several: H100-80GB,A100-80GB"},
    )
    hardware: Path | None = option(
        None,
        group=HARDWARE,
        help="A file written by hfscale plan --calibrate",
        unset="~/.config/hfscale/hardware.toml",
    )
    link_gb_s: float | None = option(
        None,
        group=HARDWARE,
        unit="GB/s",
        check=an_amount,
        help="Bandwidth that GPUs of one node reach between each other, per GPU and direction, such as nccl-tests' "
        "busbw: 3 on a board with few PCIe lanes",
        unset="that of NVLink, or what devices without it reach over full PCIe lanes",
    )


@dataclass(frozen=True, kw_only=True)
class GpusOption:
    """The number of GPUs, which `plan` and both commands have; `estimate` gets a layout instead."""

    gpus: int = option(
        1,
        plan=REQUIRED,
        group=HARDWARE,
        text=True,
        unit="number",
        help="Number of GPUs",
        notes={"plan": "with the objective cost or gpus, the most to use"},
    )


@dataclass(frozen=True, kw_only=True)
class BatchScheduleOption:
    """The schedule of a global batch that grows."""

    batch_schedule: str | None = option(
        None,
        group=MODEL,
        check=a_batch_schedule,
        help="Global batch that grows, in sequences @ tokens seen, such as 256@0,512@1B",
        unset="the global batch is constant",
    )


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RunOptions, GpusOption, HardwareOptions, BatchScheduleOption, ExtraOptions):
    """Options of `hfscale.plan`."""

    tokens: float | None = option(
        None,
        group=SEARCH,
        unit="tokens",
        check=an_amount,
        text=True,
        help="Tokens to train on, such as 500M or 1T on the command line; hours and cost need them",
    )
    objective: Objective = option("time", group=SEARCH, help="What to rank by; gpus: fewest")
    top: int = option(5, group=SEARCH, check=a_count, help="Number of choices to show")
    min_gpus: bool = option(False, group=SEARCH, help="The fewest GPUs are searched for too")
    deadline: float | None = option(
        None,
        group=SEARCH,
        unit="hours",
        check=an_amount,
        aliases=("deadline_hours",),
        help="Longest duration of the run; choices that take longer are left out",
    )
    budget: float | None = option(
        None,
        group=SEARCH,
        unit="USD",
        check=an_amount,
        aliases=("budget_usd",),
        help="Highest cost of the run; choices that cost more, or whose cost is not known, are left out",
    )
    usd_per_gpu_hour: float | None = option(
        None,
        group=SEARCH,
        unit="USD",
        check=an_amount,
        help="Your price, instead of the providers'",
    )
    provider: str | None = option(
        None,
        group=SEARCH,
        help="The only provider to compute costs at, such as AWS; the beginning of its name is enough",
    )
    spot: bool = option(False, group=SEARCH, help="Costs are computed at spot prices only")
    spot_interruptions: float | None = option(
        None,
        group=SEARCH,
        check=interruptions,
        help="Preemptions per spot node and hour",
        unset="an assumed rate, which the plan prints",
    )
    prices: Path | None = option(
        None,
        group=SEARCH,
        help="Your price list, with rows as in hfscale/facts/prices.toml",
        unset="the user's own, if it exists",
    )


@dataclass(frozen=True, kw_only=True)
class EstimateOptions(LayoutOptions, HardwareOptions, BatchScheduleOption):
    """Options of `hfscale.estimate`."""

    layout: ParallelLayout | Mapping[str, int] = option(
        group=LAYOUT,
        help="Ranks along each axis: dp_replicate, dp_shard, cp, tp and pp; ep is expert_parallel",
        flag_of=(),
    )


@dataclass(frozen=True, kw_only=True)
class AxisOptions:
    """The flags of `hfscale estimate` for the axes of the layout; `estimate` has `layout` instead."""

    dp_replicate: int | None = option(
        None, group=LAYOUT, check=a_size, help="Replicas of the parameters"
    )
    dp_shard: int | None = option(
        None,
        group=LAYOUT,
        check=a_size,
        help="Ranks that share one replica (FSDP2, ZeRO-3)",
        unset="the remaining GPUs",
    )
    cp: int = option(1, group=LAYOUT, check=a_size, help="Context-parallel ranks")
    tp: int = option(1, group=LAYOUT, check=a_size, help="Tensor-parallel ranks")
    pp: int = option(1, group=LAYOUT, check=a_size, help="Pipeline stages")


@dataclass(frozen=True, kw_only=True)
class IslandOptions:
    """The flags of `hfscale plan` for islands."""

    islands: int | None = option(
        None,
        group=ISLANDS,
        help="Number of places that exchange now and then (DiLoCo), each with as many GPUs as --gpus says",
    )
    island_bandwidth: str | None = option(
        None, group=ISLANDS, help="Link between islands, one direction: 1Gbps", text=True
    )
    island_steps: int = option(
        100, group=ISLANDS, needs="islands", help="Steps between two exchanges of the islands"
    )
    island_overlap_steps: int = option(
        0,
        group=ISLANDS,
        needs="islands",
        help="Steps that train while a round of the islands exchanges",
    )
    island_fragments: int = option(
        1,
        group=ISLANDS,
        needs="islands",
        help="Parts of the parameters, of whole layers, that have rounds in turn",
    )
    island_bits: int = option(
        32,
        group=ISLANDS,
        needs="islands",
        help="Bits per value that islands exchange: 32, 8, 4; with a density 2",
    )
    island_density: float | None = option(
        None,
        group=ISLANDS,
        needs="islands",
        help="Fraction of the values that islands exchange (top-k): 0.0156",
        unset="all of them",
    )


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """How a command prints."""

    as_json: bool = option(
        False,
        group=OUTPUT,
        flag="json",
        help="Print one JSON object",
        flag_of=("plan", "estimate", "tune"),
    )


@dataclass(frozen=True, kw_only=True)
class PlanOutput(JsonOption):
    """What `hfscale plan` writes."""

    emit: Path | None = option(
        None, group=OUTPUT, help="Write configs, script and launch command to this folder"
    )
    choice: int = option(
        1, group=OUTPUT, check=a_count, help="Number of the choice that --emit writes"
    )
    force: bool = option(
        False,
        group=OUTPUT,
        needs="emit",
        help="--emit also replaces files that you have changed or written",
    )
    details: bool = option(
        False,
        group=OUTPUT,
        help="Print how each number is made up, what was rejected, advice and assumptions too",
    )
    plot: Path | None = option(
        None, group=OUTPUT, help="Draw memory, time and cost into this file (svg, png or pdf)"
    )
    calibrate: bool = option(
        False,
        group=INPUT,
        help="Measure this machine and write the file MODEL, by default that of --hardware",
    )


@dataclass(frozen=True, kw_only=True)
class EstimateInput(JsonOption):
    """What `hfscale estimate` reads instead of a model."""

    script: Path | None = option(
        None,
        group=INPUT,
        help="Trace a step of this training script instead, which calls Trainer.train",
    )
    table: Path | None = option(
        None, group=INPUT, help="A CSV file of runs instead; prints a JSON line per row"
    )
