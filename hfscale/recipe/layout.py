"""Sizes of the parallel axes: read from the flags and the launcher's config, checked, and passed to the library.

| strategy | axes | implemented by |
|---|---|---|
| FSDP2 | dp_replicate x dp_shard x cp | Accelerate's `ParallelismConfig` (HSDP, ring attention) |
| DeepSpeed | cp | Accelerate and DeepSpeed's Ulysses sequence parallelism |
| neither, with tp, ep or fsdp | dp_replicate x dp_shard x tp; ep among these | transformers' `DistributedConfig` |

transformers shards the model itself when it is loaded (`NativeParallelLayout`).
"""

import math
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from accelerate import ParallelismConfig
from transformers.distributed import DistributedConfig

from hfscale.core.spelling import Speaker, speaking, spelled
from hfscale.core.versions import require, sizes_of_layers
from hfscale.errors import LayoutError, UsageError
from hfscale.facts.expert_layout import ExpertLayout
from hfscale.facts.experts import check_experts_divide
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.strategies import StrategyFacts
from hfscale.facts.support import check_support
from hfscale.parallel.arguments import ParallelArguments
from hfscale.parallel.descriptions import describe_arguments, describe_config, quantization_of
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.fsdp2 import let_fsdp_run_on_cpu
from hfscale.trainer.strategies.requested import launched_size, requested

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, Trainer, TrainingArguments

_SIZES = (
    "tp",
    "pp",
    "cp",
    "expert_parallel",
    "sequence_parallel",
    "dry_run",
    "dp_sizes",
    "fsdp_size",
)
"""Properties of a layout, by which it is checked before the other flags."""


@dataclass(frozen=True, kw_only=True)
class NativeParallelLayout(ExpertLayout):
    """Holds the sizes with which transformers itself shards a model while it is loaded; `dp_shard` is its `fsdp_size`.

    Raises:
        LayoutError: a size is not an integer of at least 1.
    """

    spans_replicas: ClassVar[bool] = False

    def check_world_size(self, world_size: int) -> None:
        """Check that the sizes multiply to the processes that were started.

        Args:
            world_size (`int`): number of processes that the launcher started.

        Raises:
            LayoutError: they do not; the message gives a `fsdp_size` or a number of processes that fits.
        """
        if self.world_size == world_size:
            return
        shards, left_over = divmod(world_size, self.dp_replicate * self.tp)
        fix = f" or set fsdp_size={shards}" if left_over == 0 and shards >= 1 else ""
        raise LayoutError(
            f"fsdp_size {self.dp_shard} x dp_replicate_size {self.dp_replicate} x tp_size {self.tp} needs "
            f"{self.world_size} processes, but the world has {world_size}: start {self.world_size} processes{fix}"
        )


def is_native(layout: ParallelLayout | None) -> bool:
    """Return whether transformers itself shards the model; one process loads it as it is.

    Args:
        layout (`ParallelLayout`, *optional*): the size of every axis.
    """
    return isinstance(layout, NativeParallelLayout) and layout.world_size > 1


def strategy_of(layout: ParallelLayout, by_launcher: StrategyFacts) -> str:
    """Return the name of the strategy that a layout makes of what the launcher requests, as rules know it.

    Args:
        layout (`ParallelLayout`): the size of every axis.
        by_launcher (`StrategyFacts`): what the launcher and the arguments request.
    """
    if by_launcher.by_fsdp or by_launcher.by_deepspeed:
        return by_launcher.name
    if layout.tp > 1:
        return "parallel"
    return "native" if is_native(layout) else by_launcher.name


def launcher_attention(by_launcher: StrategyFacts, environ: Mapping[str, str] = os.environ) -> str:
    """Return the attention with which the launcher splits sequences over ranks.

    Args:
        by_launcher (`StrategyFacts`): what the launcher and the arguments request.
        environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its config.
    """
    if not by_launcher.by_deepspeed:
        return "sdpa"
    return environ.get("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", "sdpa")


def set_up_parallelism(
    parallel: ParallelArguments,
    args: "TrainingArguments",
    environ: MutableMapping[str, str] = os.environ,
) -> ParallelLayout:
    """Decide the layout, check it against the number of processes, and put it into `args` for the Trainer.

    Flags win over the launcher's config; `dp_shard` is the number of processes that the other axes leave. Call this
    before the model is loaded. On a machine without accelerators it also lets FSDP2 and sequence parallelism run.

    Args:
        parallel (`ParallelArguments`): the sizes given as flags.
        args (`TrainingArguments`): its `parallelism_config` is set, and its `save_only_model` where Trainer itself
            saves no optimizer.
        environ (`MutableMapping[str, str]`): the environment of the process, which holds the launcher's config.

    Returns:
        `ParallelLayout`: the size of every axis.

    Raises:
        LayoutError: the product of the sizes is not the number of processes.
        UsageError: the strategy does not support one of the sizes, or only recipes/tp_pp does.
    """
    if requested(args, environ).is_replicated and (parallel.tp_size or 1) > 1:
        # Where the launcher leaves it, for everything that reads the request later
        environ["PARALLELISM_CONFIG_TP_SIZE"] = str(parallel.tp_size)
    by_launcher = requested(args, environ)
    layout = _layout(parallel, by_launcher, args.world_size, environ)
    attention = launcher_attention(by_launcher, environ)
    asked = replace(
        describe_arguments(args, environ),
        strategy=strategy_of(layout, by_launcher),
        tp=layout.tp,
        pp=parallel.pp_size,
        cp=layout.cp,
        expert_parallel=parallel.ep_size,
        sequence_parallel=parallel.sequence_parallel,
        dry_run=parallel.dry_run,
        dp_sizes=bool(parallel.dp_replicate_size or parallel.dp_shard_size),
        fsdp_size=parallel.fsdp_size,
    )
    with speaking(_speaker(parallel)):
        check_support(asked, *_SIZES)
    if parallel.fsdp_size and parallel.dp_shard_size not in (None, parallel.fsdp_size):
        fsdp = spelled("fsdp_size", parallel.fsdp_size)
        shard = spelled("dp_shard_size", parallel.dp_shard_size)
        raise LayoutError(f"{fsdp} and {shard} are the same: give one")
    layout.check_world_size(args.world_size)
    if isinstance(layout, NativeParallelLayout):
        layout.check_experts()
        _require_versions(layout)
    if by_launcher.by_deepspeed and layout.cp > 1:
        require("sequence parallelism of DeepSpeed", "cp_size")
        from accelerate.utils import DeepSpeedSequenceParallelConfig

        handler = DeepSpeedSequenceParallelConfig(
            sp_seq_length_is_variable=True, sp_attn_implementation=attention
        )
        args.parallelism_config = ParallelismConfig(
            sp_size=layout.cp,
            sp_backend="deepspeed",
            sp_handler=handler,
            dp_shard_size=layout.dp_shard,
        )
    elif by_launcher.by_fsdp and (layout.dp_replicate > 1 or layout.cp > 1):
        args.parallelism_config = ParallelismConfig(
            dp_replicate_size=layout.dp_replicate, dp_shard_size=layout.dp_shard, cp_size=layout.cp
        )
    if isinstance(layout, NativeParallelLayout):
        # Trainer raises otherwise; `SpotCheckpointCallback` saves the complete state
        args.save_only_model = True
    if args.use_cpu:
        _enable_on_cpu(by_launcher, layout)
    return layout


def set_up_data_parallelism(args: "TrainingArguments", *, trl: bool) -> ParallelLayout:
    """Decide how the processes share the data and the weights, as the launcher's config asks.

    Args:
        args (`TrainingArguments`): the arguments of the training.
        trl (`bool`): whether one of TRL's trainers will train.

    Returns:
        `ParallelLayout`: the sizes of the data-parallel axes.

    Raises:
        UsageError: the launcher's config splits sequences or matrices.
        LayoutError: its sizes do not fit the number of processes.
    """
    layout = set_up_parallelism(ParallelArguments(), args)
    asked = replace(describe_arguments(args), trl=trl, tp=layout.tp, pp=layout.pp, cp=layout.cp)
    with speaking("launcher"):
        check_support(asked, "trl")
    if layout.ranks_per_replica > 1:
        raise UsageError(
            f"cp_size {layout.cp} and tp_size {layout.tp} in the launcher's config: this recipe is data parallel; "
            "launch with accelerate_configs/ddp.yaml or zero1.yaml, or run recipes/sharded/train.py"
        )
    return layout


def _layout(
    parallel: ParallelArguments,
    by_launcher: StrategyFacts,
    world_size: int,
    environ: Mapping[str, str],
) -> ParallelLayout:
    def size(axis: str, flag: int | None) -> int | None:
        return flag if flag is not None else launched_size(axis, environ)

    cp = size("sp" if by_launcher.by_deepspeed else "cp", parallel.cp_size) or 1
    tp = size("tp", parallel.tp_size) or 1
    has_native_flags = parallel.ep_size or parallel.fsdp_size or parallel.dp_replicate_size
    if by_launcher.is_replicated and not has_native_flags:
        return ParallelLayout(dp_replicate=world_size, cp=cp, tp=tp)
    dp_replicate = size("dp_replicate", parallel.dp_replicate_size) or 1
    dp_shard = parallel.fsdp_size or size("dp_shard", parallel.dp_shard_size)
    # Not given, or given by a launcher's config whose other axes a flag has changed: the processes that are left.
    is_given = parallel.fsdp_size is not None or parallel.dp_shard_size is not None
    if (
        dp_shard is None
        or by_launcher.by_deepspeed
        or (not is_given and _changes_another_axis(parallel))
    ):
        dp_shard = max(1, world_size // (dp_replicate * cp * tp))
    sizes = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    if not (by_launcher.by_fsdp or by_launcher.by_deepspeed):
        return NativeParallelLayout(**sizes, ep=parallel.ep_size or 1)
    return ParallelLayout(**sizes)


def _speaker(parallel: ParallelArguments) -> Speaker:
    """Who gives the sizes: the launcher's config where no flag does."""
    sizes = [value for name, value in vars(parallel).items() if name.endswith("_size")]
    has_flags = (
        any(size is not None for size in sizes)
        or parallel.sequence_parallel
        or parallel.dry_run is not None
    )
    return "recipe" if has_flags else "launcher"


def _changes_another_axis(parallel: ParallelArguments) -> bool:
    return any(
        size is not None
        for size in (parallel.dp_replicate_size, parallel.cp_size, parallel.tp_size)
    )


def _enable_on_cpu(by_launcher: StrategyFacts, layout: ParallelLayout) -> None:
    """Let FSDP and meshes run on gloo. Accelerate turns FSDP into DDP on CPUs, and refuses the rest."""
    if by_launcher.by_fsdp or by_launcher.is_set_by_script:
        let_fsdp_run_on_cpu()
    if by_launcher.by_deepspeed and layout.cp > 1:
        import deepspeed

        deepspeed.init_distributed(
            dist_backend="gloo"
        )  # accelerate does it for GPUs only, and Ulysses needs its groups


def finish_on_cpu(trainer: "Trainer") -> None:
    """Keep FSDP2's CPU offload from pinning memory if there is no accelerator. Call it when the Trainer exists."""
    if not trainer.args.use_cpu or not Strategy.of(trainer).facts.by_fsdp:
        return
    from torch.distributed.fsdp import CPUOffloadPolicy

    plugin = trainer.accelerator.state.fsdp_plugin
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)


def distributed_config(
    layout: ParallelLayout, args: "TrainingArguments"
) -> DistributedConfig | None:
    """Make the value of `from_pretrained(distributed_config=…)`.

    Args:
        layout (`ParallelLayout`): the size of every axis.
        args (`TrainingArguments`): its `bf16` chooses the mixed precision.

    Returns:
        `DistributedConfig`, *optional*: the config; None where transformers does not shard the model, which is
        everywhere but under a `NativeParallelLayout` of several ranks.

    Raises:
        MissingDependencyError: the installed transformers is too old.
    """
    if not isinstance(layout, NativeParallelLayout) or layout.world_size == 1:
        return None
    _require_versions(layout)
    sizes: dict[str, Any] = {
        "tp_size": layout.tp,
        "ep_size": layout.ep,
        "fsdp_size": layout.dp_shard,
    }
    if layout.dp_replicate > 1:
        sizes["dp_replicate_size"] = layout.dp_replicate  # from transformers 5.23
    return DistributedConfig(fsdp_mixed_precision=bool(args.bf16), **sizes)


def _require_versions(layout: NativeParallelLayout) -> None:
    """Check that the installed transformers can shard a model as a layout asks."""
    require("transformers' own sharding", "fsdp_size")
    if layout.tp > 1:
        require("tensor parallelism of transformers", "tp_size")
    if layout.ep > 1 or layout.dp_replicate > 1:
        name = "ep_size" if layout.ep > 1 else "dp_replicate_size"
        require("expert parallelism and replicas of transformers", name)


def check_model(
    layout: ParallelLayout,
    config: "PreTrainedConfig",
    args: "TrainingArguments",
    *,
    block_size: int,
) -> None:
    """Check that the model's heads and the sequence are divisible by the axes, before any weight is read.

    Args:
        layout (`ParallelLayout`): the size of every axis.
        config (`PreTrainedConfig`): the model's config.
        args (`TrainingArguments`): the arguments of the training.
        block_size (`int`): tokens per sequence.

    Raises:
        LayoutError: the heads or the sequence are not divisible; the message names the sizes that fit.
        UsageError: the table of what works with what refuses the model's family, or its quantised weights.
    """
    text = config.get_text_config()
    asked = replace(describe_config(config), engine="trainer", tp=layout.tp)
    if quantization_of(config) == "mxfp4":
        asked = replace(asked, quantized=False)  # `load_weights` dequantises those of gpt-oss
    if isinstance(layout, NativeParallelLayout):
        asked = replace(asked, strategy="native", expert_parallel=layout.ep)
    check_support(asked)
    if isinstance(layout, NativeParallelLayout):
        check_experts_divide(layout.ep, text)
    if layout.tp == layout.cp == 1:
        return
    heads = text.num_attention_heads
    key_value_heads = sizes_of_layers(text, "num_key_value_heads") or (heads,)
    common = math.gcd(heads, *key_value_heads)
    if common % layout.tp:
        of_keys = " or ".join(map(str, key_value_heads))
        raise LayoutError(
            f"tp_size {layout.tp} does not divide the model's {heads} attention heads and {of_keys} "
            f"key-value heads: choose one of {_divisors(common)}"
        )
    if layout.cp > 1 and requested(args).by_deepspeed and heads % layout.cp:
        raise LayoutError(
            f"cp_size {layout.cp} under DeepSpeed does not divide the model's {heads} attention heads: choose one of "
            f"{_divisors(heads)}"
        )
    if layout.cp > 1:
        # Ring attention gives each rank an early and a late piece to balance the causal mask
        pieces = 2 * layout.cp
        if block_size % pieces:
            raise LayoutError(
                f"cp_size {layout.cp} needs --block_size to be a multiple of {pieces}: {block_size} is not, "
                f"{block_size // pieces * pieces or pieces} is"
            )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
