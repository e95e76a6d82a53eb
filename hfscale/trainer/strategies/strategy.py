"""`Strategy`: how the engine of a training holds and steps its tensors.

A capability asks the strategy for facts and for tensors, and decides by itself what it does with them. So no method
here is named after a capability, and a new strategy is one class.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hfscale.errors import StrategyMismatchError
from hfscale.facts.strategies import STRATEGIES, WEIGHTS, StrategyFacts
from hfscale.facts.support import Combination
from hfscale.trainer.state import model_of, stepped_optimizer, unwrap_compiled
from hfscale.trainer.strategies.description import (
    check_described,
    describe_request,
    with_trainer,
)
from hfscale.trainer.strategies.requested import requested
from hfscale.trainer.strategies.tensors import full_numel, own_part, sharded_modules

if TYPE_CHECKING:
    from transformers import Trainer

_KEPT_AS = "_hfscale_strategy"


class Strategy:
    """How the model of one Trainer is distributed, and its optimizer stepped.

    Get it with `Strategy.of(trainer)`. The name, the facts and `axes` hold from the moment at which the Trainer is
    made; everything about tensors and wrappers holds once the model is prepared, as in `on_train_begin`.

    Args:
        trainer (`Trainer`): a Trainer or a subclass of it.
        facts (`StrategyFacts`): what the name of the strategy says.
    """

    kinds: ClassVar[list[type["Strategy"]]] = []
    """The classes; the first one that runs a Trainer is its strategy."""

    engine: ClassVar[str] = "trainer"
    """What trains, as the rules of `hfscale.facts.support` know it."""
    engine_steps: bool = False
    """Whether an engine steps the optimizer at the end of the last backward pass, before Trainer's own step."""
    runs_stages: bool = False
    """Whether a schedule calls the stages of the model, and nobody calls the model as a whole."""
    steps_at_last_batch: bool = False
    """Whether all micro-batches of a step are computed in the `training_step` of the last one."""
    has_plain_forward: bool = True
    """Whether the model can be called with other inputs than those of a training step, such as those of `generate`."""
    sends_values: bool = False
    """Whether ranks send each other what they have computed of a micro-batch within `without_effect`."""

    def __init__(self, trainer: "Trainer", facts: StrategyFacts) -> None:
        self.trainer = trainer
        self.facts = facts
        self._made_for = _signature(trainer)

    @classmethod
    def of(cls, trainer: "Trainer") -> "Strategy":
        """Return the strategy of a Trainer.

        It is made anew when the model has been prepared (again), as `auto_find_batch_size` and some Trainers of TRL
        do, and for each training that `TrainerAdapter` sees.

        Args:
            trainer (`Trainer`): a Trainer or a subclass of it.
        """
        kept: Strategy | None = vars(trainer).get(_KEPT_AS)
        if kept is not None and kept._made_for == _signature(trainer):
            return kept
        for kind in cls.kinds:
            name = kind.name_in(trainer)
            if name is not None:
                made = kind(trainer, STRATEGIES[name])
                setattr(trainer, _KEPT_AS, made)
                return made
        raise AssertionError("the last kind runs every Trainer")

    @staticmethod
    def forget(trainer: "Trainer") -> None:
        """Have the next `of` make the strategy anew; `TrainerAdapter` calls it when a training ends.

        Args:
            trainer (`Trainer`): the Trainer.
        """
        vars(trainer).pop(_KEPT_AS, None)

    @classmethod
    def name_in(cls, trainer: "Trainer") -> str | None:
        """Return the name of the strategy if this class runs a Trainer; None if another one does.

        Args:
            trainer (`Trainer`): a Trainer or a subclass of it.
        """
        raise NotImplementedError

    # ---- facts

    @property
    def name(self) -> str:
        """The name of the strategy in a manifest, such as `zero2`."""
        return self.facts.name

    @property
    def shards(self) -> frozenset[str]:
        """Which of weights, gradients and optimizer states no rank holds completely (`hfscale.facts.strategies`)."""
        return self.facts.shards

    @property
    def replicas(self) -> bool:
        """Whether several ranks may hold the same values of a parameter, which must stay equal."""
        return True

    @property
    def equal_gradients(self) -> bool:
        """Whether ranks that hold the same values of a parameter have the same gradients when the optimizer steps."""
        return True

    @property
    def waits_in_layers(self) -> bool:
        """Whether ranks wait for each other in the layers of a forward, and not only in the backward pass."""
        return False

    @property
    def gathers_layers(self) -> bool:
        """Whether FSDP2 gathers the weights of a layer before it, and a rank then computes the layer alone."""
        return False

    @property
    def reduces_by_scatter(self) -> bool:
        """Whether FSDP2 reduces gradients to shards by a reduce-scatter."""
        return False

    @property
    def has_effectless_backward(self) -> bool:
        """Whether gradients are computed within `without_effect`, where nobody keeps them."""
        return True

    @property
    def shares_layers(self) -> bool:
        """Whether some ranks compute a layer together, or compute other layers than others."""
        return False

    @property
    def shares_data(self) -> bool:
        """Whether each rank holds all weights and steps them itself, so that ranks differ in their data alone."""
        return not self.shards and not self.engine_steps

    def axes(self) -> dict[str, int]:
        """Return the sizes of the parallel axes, by the names of `hfscale.facts.layout.ParallelLayout`."""
        world = self.trainer.args.world_size
        axes = self.trainer.accelerator.parallelism_config
        cp = 1
        tp = 1
        replicate = 1
        if axes is not None:
            cp = max(axes.cp_size, axes.sp_size)
            tp = axes.tp_size
            replicate = axes.dp_replicate_size
        if WEIGHTS not in self.shards:
            return {"dp_replicate": world // cp // tp, "dp_shard": 1, "cp": cp, "tp": tp, "pp": 1}
        shard = world // replicate // cp // tp
        return {"dp_replicate": replicate, "dp_shard": shard, "cp": cp, "tp": tp, "pp": 1}

    @property
    def schedule(self) -> str:
        """The schedule of the pipeline (`hfscale.facts.schedules`); any name where there is no pipeline."""
        return "1F1B"

    @property
    def stages_per_rank(self) -> int:
        """The number of pipeline stages that a rank has."""
        return 1

    @property
    def splits_sequences(self) -> bool:
        """Whether ranks that share matrices split the sequences between them (sequence parallelism)."""
        return False

    def expert_ranks(self) -> int:
        """Return the number of ranks that share the experts of a layer."""
        return 1

    def manifest_layout(self) -> dict[str, int] | None:
        """Return the sizes that a checkpoint's manifest has beside the name; None where it has none."""
        return None

    def offload(self) -> str:
        """Return what is kept in the CPU's memory, by the planner's names: `none`, `optimizer` or `full`."""
        return "none"

    def engine_config(self) -> dict[str, Any]:
        """Return the live config of the engine that steps the optimizer; empty where Trainer steps it itself."""
        return {}

    def doubts(self) -> list[str]:
        """Return what the engine does in another way than its config or the arguments say, each as one line."""
        return []

    def set_accumulation(self, micro_batches: int) -> None:
        """Tell the engine how many micro-batches the next step has; nothing to tell where Trainer steps itself.

        Args:
            micro_batches (`int`): micro-batches of the step.
        """

    def why_not_accumulated(self, micro_batches: int) -> str | None:
        """Return why no step can have so many micro-batches; None where one can.

        Args:
            micro_batches (`int`): micro-batches of the step.
        """
        return None

    # ---- tensors

    def own(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what this rank holds of a tensor; see `own_part`.

        Args:
            tensor (`torch.Tensor`): a parameter, a state of the optimizer, or any other tensor.
        """
        return own_part(tensor)

    def full_numel(self, parameter: torch.Tensor) -> int:
        """Return the number of elements of a parameter on all ranks together.

        Args:
            parameter (`torch.Tensor`): a parameter of the model.
        """
        return full_numel(parameter)

    def part_of_model(self) -> list[int]:
        """Return where this rank's part of the model is, as far as the placements of its tensors do not say it."""
        return []

    def ask_engine(self, ask: Callable[[float], bool]) -> Callable[[], None]:
        """Have the engine ask before each of its updates, and skip those that are refused as fp16 skips a step.

        Args:
            ask (`Callable`): called on every rank with the squared norm of the gradients that this rank updates with;
                returns the same on all ranks.

        Returns:
            `Callable`: ends it. Where Trainer steps the optimizer, nothing is asked.
        """
        return lambda: None

    def torch_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of torch inside of those of Accelerate and DeepSpeed."""
        optimizer: torch.optim.Optimizer = stepped_optimizer(self.trainer.optimizer)
        return optimizer

    def stepped_order(self) -> list[str]:
        """Return the names of the parameters in the order in which the ranks share the optimizer's work by position.

        It must be one order on all ranks and in all launches. Empty where each parameter is stepped by itself.
        """
        return []

    def full_state_dicts(self) -> AbstractContextManager[None]:
        """Have Trainer's `save_model` write complete weights within the context, and not each rank its part."""
        return nullcontext()

    def reshard(self) -> None:
        """Free gathered weights: then the parameters of the model are the shards that the optimizer steps."""
        for module in sharded_modules(model_of(self.trainer)):
            module.reshard()

    def ddp(self) -> DistributedDataParallel | None:
        """Return DDP's wrapper of the model; None where nothing, or something else, has wrapped it."""
        wrapper = self.wrapper()
        return wrapper if isinstance(wrapper, DistributedDataParallel) else None

    def stages(self) -> Sequence[nn.Module] | None:
        """Return the stages of the model that this rank calls; None where the model is called as a whole."""
        return None

    def staged_model(self) -> nn.Module:
        """Return the model whose modules the stages consist of, under its names without adapters."""
        return model_of(self.trainer)

    def expert_layers(self) -> Mapping[str, int] | None:
        """Return the number of experts of each layer of all stages, by name; None where one rank sees all layers."""
        return None

    def master(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return this rank's part of the values that the optimizer steps. Every rank must call it.

        Args:
            parameter (`nn.Parameter`): a trained parameter of the model.
        """
        own = self.own(parameter)
        assert own is not None  # a trained parameter has bits of its own
        return own

    def set_master(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Set the values that the optimizer steps, and the weight that follows from them. Every rank must call it.

        Call it within `changing_weights`.

        Args:
            parameter (`nn.Parameter`): a trained parameter of the model.
            value (`torch.Tensor`): this rank's part of it, of the shape that `own` has.
        """
        own = self.own(parameter)
        assert own is not None
        with torch.no_grad():
            own.copy_(value)

    def master_part(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return what this rank keeps of the values that the optimizer steps, without an exchange or a copy.

        Args:
            parameter (`nn.Parameter`): a trained parameter of the model.

        Returns:
            `torch.Tensor` or `None`: of the shape that `own` has, or flat where `interval` says of what; None: the
                rank keeps nothing of it, or the tensor has no bits of its own.
        """
        return self.own(parameter)

    def interval(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """Return start and end of `master_part` in the flattened parameter; there may be padding after the end.

        Args:
            parameter (`nn.Parameter`): a trained parameter of which this rank keeps a part.

        Returns:
            `tuple` or `None`: None where the placements of the parameter say what the rank holds.
        """
        return None

    def set_weight(self, parameter: nn.Parameter, part: torch.Tensor | None) -> None:
        """Set the weight alone, and not the values that the optimizer steps. Every rank must call it.

        Call it within `changing_weights`.

        Args:
            parameter (`nn.Parameter`): a trained parameter of the model.
            part (`torch.Tensor`, *optional*): in the place of `master_part`, of any data type and on any device; None
                where that is None.
        """
        own = self.own(parameter)
        assert own is not None
        assert part is not None
        with torch.no_grad():
            own.copy_(part.view(own.shape))

    def name_in_one_process(self, name: str) -> str:
        """Return the name that a parameter has in the undistributed model, under which checkpoints store it.

        Args:
            name (`str`): its name in the model that is trained, without the wrappers of adapters.
        """
        return name

    @contextmanager
    def changing_weights(self) -> Iterator[None]:
        """Let `set_master` and `set_weight` change weights in the `with` block; then all copies of them follow.

        Where the block raises, the copies are dropped without an exchange: the other ranks may not come.
        """
        self.reshard()
        yield

    # ---- contexts

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Let a caller enter the model below its root, as `generate` of PEFT does; afterwards all is sharded again."""
        yield
        self.reshard()

    def why_effects_remain(self) -> str | None:
        """Return why `without_effect` cannot be used in this training, with how to fix it; None if it can."""
        return None

    @contextmanager
    def without_effect(self) -> Iterator[nn.Module]:
        """Let a micro-batch be computed in the `with` block without training on it.

        Use it before the first micro-batch of a step: no gradients of the model are kept. Random numbers, and what
        modules and the Trainer hold, are the caller's business.

        Yields:
            `nn.Module`: what `training_step` is given as the model.
        """
        with self._gradients_dropped():
            yield self.trainer.model_wrapped
        model_of(self.trainer).zero_grad()

    @contextmanager
    def _gradients_dropped(self) -> Iterator[None]:
        """Keep the backward pass from reaching other ranks or an engine where that could not be undone."""
        yield

    # ---- what was asked for

    def check(self, environ: Mapping[str, str] = os.environ) -> None:
        """Compare the strategy and the wrapper of the prepared model with the request.

        Args:
            environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its config.

        Raises:
            StrategyMismatchError: another strategy was asked for, or the model is not wrapped for this one.
            UsageError: the strategy does not support the adapters of the model.
            MissingDependencyError: the installed versions cannot train this model with the strategy.
        """
        self.check_request(environ)
        asked = requested(self.trainer.args, environ)
        is_left_to_script = asked.is_replicated or asked.is_set_by_script
        if (
            not (self.facts.is_set_by_script and is_left_to_script)
            and asked.family != self.facts.family
        ):
            fix = {
                "zero": "unset ACCELERATE_USE_CPU, and on a machine without GPUs pass --use_cpu true",
                "fsdp": (
                    "accelerate runs FSDP on accelerators only; "
                    "on a machine without GPUs use DDP or ZeRO"
                ),
            }.get(asked.family, "check the --config_file given to accelerate launch")
            raise StrategyMismatchError(
                f"{asked.family.upper()} was asked for but {self.name.upper()} would run: {fix}"
            )
        self.check_support(environ)
        wrapper = self.wrapper()
        if not self.is_wrapped(wrapper):
            raise StrategyMismatchError(
                f"{self.name.upper()} was asked for but the model is a bare {type(wrapper).__name__}: "
                "let the Trainer wrap the model itself"
            )

    def check_request(self, environ: Mapping[str, str] = os.environ) -> None:
        """Check that nothing else is asked to distribute the model of a script. It needs no prepared model.

        Args:
            environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its config.

        Raises:
            StrategyMismatchError: the launcher or the arguments request something else too.
        """

    def check_support(
        self,
        environ: Mapping[str, str] = os.environ,
        *,
        callback_saves: bool = False,
        grows_batch: bool = False,
        skip_bad_batches: int | None = None,
        base_width: int | None = None,
    ) -> None:
        """Refuse a training that the table of what works with what refuses. It needs no prepared model.

        `TrainerAdapter` calls it at the beginning of each training, so that any callback of hfscale refuses it.

        Args:
            environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its config.
            callback_saves (`bool`): whether a callback writes checkpoints, although `save_strategy` may be `no`.
            grows_batch (`bool`): whether the global batch changes during the training.
            skip_bad_batches (`int`, *optional*): how many bad batches the run may leave out; None: none is looked for.
            base_width (`int`, *optional*): the width at which the learning rate was tuned.

        Raises:
            HfScaleError: it does not work; the class is that of the rule, most often `UsageError`.
            MissingDependencyError: the installed versions cannot train this model with the strategy.
        """
        asked = replace(self.combination(environ), base_width=base_width)
        if callback_saves:
            asked = replace(asked, saves=True)
        if grows_batch:
            finds_batch = self.trainer.args.auto_find_batch_size
            asked = replace(asked, batch_schedule=True, auto_find_batch_size=finds_batch)
        if skip_bad_batches is not None:
            finds_batch = self.trainer.args.auto_find_batch_size
            asked = replace(
                asked, skip_bad_batches=skip_bad_batches, auto_find_batch_size=finds_batch
            )
        check_described(asked, self.trainer.args, environ)
        self.check_versions()

    def check_versions(self) -> None:
        """Check that the installed versions can train this model with the strategy.

        Raises:
            MissingDependencyError: they cannot.
        """

    def combination(self, environ: Mapping[str, str] = os.environ) -> Combination:
        """Describe the training for the rules of `hfscale.facts.support`.

        Args:
            environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its config.
        """
        asked = with_trainer(describe_request(self.trainer.args, environ), self.trainer)
        asked = replace(asked, engine=self.engine, strategy=self.name, offload=self.offload())
        axes = self.axes()
        asked = replace(asked, tp=axes["tp"], pp=axes["pp"], cp=axes["cp"])
        return replace(asked, expert_parallel=self.expert_ranks())

    # ---- what runs

    def wrapper(self) -> nn.Module:
        """Return the module with which the strategy has wrapped the model.

        Accelerate compiles what DDP has wrapped; under FSDP2 it compiles first, and shards the compiled model.
        """
        prepared: nn.Module = self.trainer.model_wrapped
        return prepared if isinstance(prepared, FSDPModule) else unwrap_compiled(prepared)

    def is_wrapped(self, wrapper: nn.Module) -> bool:
        """Return whether a module is what the strategy makes of a model.

        Args:
            wrapper (`nn.Module`): what `wrapper` returned.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """Describe how the prepared model is distributed: wrapper, placements, this rank's share, offload.

        For example `FSDPLlamaForCausalLM, Replicate() Shard(dim=0) over dp_replicate=2 x dp_shard_cp=2, 50.0% of the
        parameters per rank`.
        """
        parts = self._layout_parts()
        placements = self._placements()
        if placements is not None:
            parts.append(placements)
        parts.append(f"{self._parameter_share():.1%} of the parameters per rank")
        return ", ".join([*parts, *self._traits()])

    def _layout_parts(self) -> list[str]:
        return [type(self.wrapper()).__name__]

    def _traits(self) -> list[str]:
        """Return what else is worth knowing, such as what is offloaded."""
        return []

    def _placements(self) -> str | None:
        """Return the placements of the first distributed parameter; None if there is none."""
        first = next((p for p in self.wrapper().parameters() if isinstance(p, DTensor)), None)
        if first is None:
            return None
        mesh = first.device_mesh
        axes = zip(mesh.mesh_dim_names or ("dp_shard",), mesh.shape, strict=True)
        sizes = " x ".join(f"{name}={size}" for name, size in axes)
        return f"{' '.join(map(str, first.placements))} over {sizes}"

    def _parameter_share(self) -> float:
        """Return the elements that this rank keeps between steps over all, with the padding of the last shard."""
        kept = 0
        for parameter in self.wrapper().parameters():
            own = self.own(parameter)
            kept += parameter.numel() if own is None else own.numel()
        return kept / self._all_elements()

    def _all_elements(self) -> int:
        return sum(self.full_numel(parameter) for parameter in self.wrapper().parameters())


def _signature(trainer: "Trainer") -> tuple[Any, ...]:
    """Return what changes when a model is prepared, or distributed in another way."""
    kind = trainer.accelerator.state.distributed_type
    return id(trainer.model), id(trainer.model_wrapped), kind
