"""ZeRO by DeepSpeed, whose engine holds the optimizer and steps it in the last backward pass of a step.

DeepSpeed is imported inside the functions: it is an optional dependency, and its import takes a second.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import nn

from hfscale.core.attributes import replaced
from hfscale.core.launch_variables import launch_number
from hfscale.core.logging import get_logger
from hfscale.core.versions import sequence_parallel_size
from hfscale.errors import UsageError
from hfscale.facts.deepspeed import inert_settings
from hfscale.facts.strategies import WEIGHTS
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies.description import offload_device
from hfscale.trainer.strategies.requested import deepspeed_config, stage_of
from hfscale.trainer.strategies.strategy import Strategy

if TYPE_CHECKING:
    from transformers import Trainer

logger = get_logger(__name__)

_FLAT_GROUPS = ("bit16_groups", "fp16_groups", "bf16_groups")
"""Attributes of DeepSpeed's optimizers (0.19) with the parameters of each group: of stages 1 and 2, of 3, and of bf16
without a stage."""
_FRAGMENT = "_hp_mapping"
"""Attribute of a parameter under stages 1 and 2: the part of its fp32 copy that this rank steps; None: no part. There
is no public way to this part alone: `safe_get_full_fp32_param` sends all of it to all ranks."""
_BEFORE_UPDATE = "_update_scale"
"""Method of the optimizers of stages 1 to 3 that they call in `step` between the reduction of the gradients and the
question whether `overflow` is set, in which case they skip the update. There is no public event between the two."""
_PARTITION_GROUP = "_dp_group"
"""Attribute of such a parameter: the ranks that share its fp32 copy."""


def check_hpz(config: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Compare the ranks that share a copy of the parameters under hpZ with those of a node, and warn if they differ.

    Args:
        config (`dict`): the DeepSpeed config.
        environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its numbers of ranks.

    Raises:
        UsageError: DeepSpeed cannot divide the ranks into groups of this size.
    """
    size = config.get("zero_optimization", {}).get("zero_hpz_partition_size", 1)
    ranks = launch_number("WORLD_SIZE", 1, environ)
    of_node = launch_number("LOCAL_WORLD_SIZE", 0, environ)
    if size in (1, of_node) or of_node == 0:  # which some launchers do not say
        return
    problem = f"zero_hpz_partition_size is {size} in the DeepSpeed config"
    if ranks % min(size, ranks):
        raise UsageError(
            f"{problem}, which does not divide {ranks} processes: set it to {of_node}, those of a node"
        )
    if of_node % size:
        effect = "so that parameters are gathered over the network"
    else:
        effect = f"so that each of them keeps 2 bytes x parameters / {size} more"
    logger.warning(
        "%s and a node has %d processes, %s: set it to %d", problem, of_node, effect, of_node
    )


class Zero(Strategy):
    """ZeRO of stage 0 to 3 (`zero0` … `zero3`).

    Stage 0 shards nothing: it is DDP by DeepSpeed's engine. Under stages 1 and 2 the optimizer's states are
    partitions of flat tensors, and under stage 3 also the weights.
    """

    engine_steps = True

    @classmethod
    def name_in(cls, trainer: "Trainer") -> str | None:
        """Return the name with the stage if Accelerate has set up DeepSpeed."""
        state = trainer.accelerator.state
        if state.distributed_type != DistributedType.DEEPSPEED:
            return None
        return f"zero{stage_of(deepspeed_config(state.deepspeed_plugin))}"

    @property
    def _shards_weights(self) -> bool:
        return WEIGHTS in self.shards

    @property
    def waits_in_layers(self) -> bool:
        """Whether ranks wait in the layers: under stage 3, which gathers the weights of each."""
        return self._shards_weights

    @property
    def has_effectless_backward(self) -> bool:
        """Whether gradients can be computed without effect: what the engine of stage 3 does cannot be undone."""
        return not self._shards_weights

    @property
    def replicas(self) -> bool:
        """Whether several ranks hold the same weights: under stage 3 each holds other shards."""
        return not self._shards_weights

    def offload(self) -> str:
        """Return what is kept in the CPU's memory or on a disk."""
        config = self.engine_config()
        if offload_device(config, "param") != "none":
            return "full"
        return "optimizer" if offload_device(config, "optimizer") != "none" else "none"

    def engine_config(self) -> dict[str, Any]:
        """Return DeepSpeed's config, with the values that transformers has filled in for `auto`."""
        return deepspeed_config(self.trainer.accelerator.state.deepspeed_plugin)

    def doubts(self) -> list[str]:
        """Return what of DeepSpeed's config has no effect, and whether gradients are clipped at another norm."""
        config = self.engine_config()
        found = inert_settings(config)
        if "gradient_clipping" in config:
            return found
        wanted = self.trainer.args.max_grad_norm or 0.0
        used = self._engine.gradient_clipping()
        if used != wanted:
            found.append(
                f"the DeepSpeed config has no gradient_clipping, so that DeepSpeed clips gradients at {used:g}, "
                f"its default, and not at max_grad_norm={wanted:g}: set gradient_clipping to auto"
            )
        return found

    def set_accumulation(self, micro_batches: int) -> None:
        """Tell the engine how many micro-batches the next step has.

        Accelerate tells it in each backward pass whether that ends the step; the engine counts samples by this number.
        """
        engine = self._engine
        if hasattr(engine, "set_train_batch_size"):  # a training that begins has no engine yet
            per_micro_batch = engine.train_micro_batch_size_per_gpu() * engine.dp_world_size
            engine.set_train_batch_size(micro_batches * per_micro_batch)

    # ---- tensors

    @property
    def _engine(self) -> Any:
        """DeepSpeed's engine, which has no types."""
        return self.trainer.model_wrapped

    def stepped_order(self) -> list[str]:
        """Return the names in the order in which DeepSpeed joins the parameters to flat partitions."""
        engine_optimizer = self._engine.optimizer
        names = {id(each): name for name, each in model_of(self.trainer).named_parameters()}
        order = []
        for attribute in _FLAT_GROUPS:
            groups = getattr(engine_optimizer, attribute, None)
            for parameter in chain(*(groups or ())):
                name = names.get(id(parameter), "")
                order.append(name)
        return order

    def part_of_model(self) -> list[int]:
        """Return the rank under stage 3, where the shard of a parameter does not say of which rank it is."""
        return [self.trainer.args.process_index] if self._shards_weights else []

    def master(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the fp32 copy that DeepSpeed steps; the weight itself where it has none."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_local_fp32_param

        if self._shards_weights:
            local: torch.Tensor = safe_get_local_fp32_param(parameter)
            return local
        full: torch.Tensor | None = safe_get_full_fp32_param(parameter)
        return parameter.data if full is None else full

    def set_master(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Set the weight, and the fp32 copy that DeepSpeed steps."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        super().set_master(parameter, value)
        set_copy = safe_set_local_fp32_param if self._shards_weights else safe_set_full_fp32_param
        set_copy(parameter, value.float())

    def master_part(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return this rank's partition of the fp32 copy that DeepSpeed steps; without such copies, the weight."""
        if self._shards_weights:
            from deepspeed.utils import safe_get_local_fp32_param

            local: torch.Tensor = safe_get_local_fp32_param(parameter)
            return local
        if not hasattr(parameter, _FRAGMENT):
            return self.own(parameter)
        fragment = getattr(parameter, _FRAGMENT)
        return None if fragment is None else fragment.get_hp_fragment()

    def interval(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """Return which values of the flattened parameter this rank has in its partition."""
        if self._shards_weights:
            stage3: Any = parameter
            rank = torch.distributed.get_rank(group=stage3.ds_process_group)
            size = stage3.partition_numel()
            return min(rank * size, stage3.ds_numel), min((rank + 1) * size, stage3.ds_numel)
        if not hasattr(parameter, _FRAGMENT):
            return None
        address = getattr(parameter, _FRAGMENT).lp_fragment_address
        return address.start, address.start + address.numel

    def set_weight(self, parameter: nn.Parameter, part: torch.Tensor | None) -> None:
        """Set the weight; under stages 1 and 2 each rank has all of it, so that the ranks exchange their parts."""
        if self._shards_weights or not hasattr(parameter, _FRAGMENT):
            super().set_weight(parameter, part)
            return
        full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if part is not None:
            interval = self.interval(parameter)
            assert interval is not None
            full[slice(*interval)] = part.to(full)
        group = getattr(parameter, _PARTITION_GROUP)
        # Each value is in the part of one rank, so that the sum is exact
        torch.distributed.all_reduce(full, group=group)
        with torch.no_grad():
            parameter.data.copy_(full.view(parameter.shape))

    @contextmanager
    def changing_weights(self) -> Iterator[None]:
        """Partition the small parameters that stage 3 keeps gathered, and gather them again afterwards."""
        if not self._shards_weights:
            yield
            return
        optimizer = self._engine.optimizer
        optimizer.checkpoint_event_prologue()
        try:
            yield
        except BaseException:
            # Layers gather what is partitioned when they need it, from the changed partitions
            optimizer.invalidate_secondary_tensor()
            raise
        optimizer.checkpoint_event_epilogue()

    def ask_engine(self, ask: Callable[[float], bool]) -> Callable[[], None]:
        """Ask where the engine has reduced the gradients and looks whether they have overflowed.

        It steps nothing then, drops the gradients, and tells Accelerate that the step was skipped.
        """
        optimizer = self._engine.optimizer
        update_scale = getattr(optimizer, _BEFORE_UPDATE)

        def ask_and_update_scale(has_overflow: bool = False) -> None:
            square = math.inf if has_overflow else _squared_norm(optimizer.averaged_gradients)
            if not ask(square):
                optimizer.overflow = True
            update_scale(has_overflow)

        setattr(optimizer, _BEFORE_UPDATE, ask_and_update_scale)
        return lambda: delattr(optimizer, _BEFORE_UPDATE)

    # ---- contexts

    def why_effects_remain(self) -> str | None:
        """Return what of DeepSpeed does not allow it."""
        if sequence_parallel_size(self.trainer) > 1:
            return "DeepSpeed's sequence parallelism cannot be replayed; leave it out"
        if self._shards_weights:
            return None
        if self._engine.fp16_enabled():
            return f"under {self.name} a step in fp16 cannot be replayed; use bf16, or leave it out"
        args = self.trainer.args
        options: Any = args.gradient_checkpointing_kwargs or {}
        if args.gradient_checkpointing and options.get("use_reentrant"):
            return (
                f"under {self.name} reentrant activation checkpointing cannot be replayed; "
                "set use_reentrant to false"
            )
        return None

    @contextmanager
    def without_effect(self) -> Iterator[nn.Module]:
        """Let a micro-batch be computed so that the engine sees no gradients.

        Under stages 0 to 2 the module inside of the engine computes them, and they are returned to nobody. Under stage
        3 there is no backward pass, since what the engine does with gradients cannot be undone.
        """
        engine = self._engine
        if self._shards_weights:
            backward, model = _compute_nothing, engine
        else:
            backward, model = self._local_backward, engine.module
        with replaced(self.trainer.accelerator, "backward", backward):
            yield model

    def _local_backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute the gradients without accumulating them, so that no hook of the engine runs."""
        parameters = model_of(self.trainer).parameters()
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        torch.autograd.grad(loss, trained, allow_unused=True)

    # ---- what runs

    def check_support(self, environ: Mapping[str, str] = os.environ, **asked: Any) -> None:
        super().check_support(environ, **asked)
        args: Any = self.trainer.args
        if not getattr(args, "is_of_recipe", False):  # which asks before it loads the model
            check_hpz(deepspeed_config(args.deepspeed_plugin), environ)

    def is_wrapped(self, wrapper: nn.Module) -> bool:
        """Return whether it is an engine of DeepSpeed."""
        return type(wrapper).__name__.endswith("Engine")  # without importing deepspeed

    def _traits(self) -> list[str]:
        share = self._optimizer_share()
        traits = [] if share is None else [f"{share:.1%} of the optimizer"]
        for part in ("optimizer", "param"):
            device = offload_device(self.engine_config(), part)
            if device != "none":
                traits.append(f"{part} offloaded to {device}")
        partition_size = getattr(self._engine.optimizer, "zero_hpz_partition_size", 1)
        if partition_size > 1:
            traits.append(f"copies over {partition_size} ranks")
        if sequence_parallel_size(self.trainer) > 1:
            traits.append(f"sequences cut over {self._engine.sequence_parallel_size} ranks")
        return traits

    def _optimizer_share(self) -> float | None:
        """Return the share of the parameters that stages 1 and 2 update on this rank; None under the others."""
        # ZeRO-1 in bf16 with gradients that are accumulated in fp32 has an optimizer of its own, `BF16_Optimizer`.
        names = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        optimizer = getattr(self.wrapper(), "optimizer", None)
        found = [getattr(optimizer, name) for name in names if hasattr(optimizer, name)]
        if not found:
            return None
        kept: int = sum(partition.numel() for partition in found[0])
        trained = sum(p.numel() for p in self.wrapper().parameters() if p.requires_grad)
        return kept / trained


def _squared_norm(gradients: Mapping[int, Sequence[torch.Tensor | None] | None]) -> float:
    """Return the sum of the squares of all gradients of a rank, by parameter group, which waits for a GPU."""
    squares = [
        gradient.detach().double().square().sum()
        for group in gradients.values()
        for gradient in group or ()
        if gradient is not None
    ]
    return float(torch.stack(squares).sum()) if squares else 0.0


def _compute_nothing(loss: torch.Tensor, **kwargs: Any) -> None:
    """Stand for a backward pass."""
