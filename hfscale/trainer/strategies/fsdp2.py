"""FSDP2 by Accelerate."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hfscale.core.versions import is_peft_model, why_fsdp2_cannot_tie, why_full_files_lose_adapters
from hfscale.errors import MissingDependencyError
from hfscale.trainer.state import model_of, unwrap_compiled
from hfscale.trainer.strategies.strategy import Strategy

if TYPE_CHECKING:
    from transformers import Trainer


class ShardedByLayers(Strategy):
    """What all strategies have in common that shard a model by `fully_shard`."""

    sends_values = True
    """Gradients are reduced within `without_effect` too: FSDP2 can drop no others."""

    @property
    def waits_in_layers(self) -> bool:
        """Whether ranks wait in the layers: each gathers its weights."""
        return True

    @property
    def gathers_layers(self) -> bool:
        """Whether a rank computes a layer alone once its weights are there."""
        return not self.shares_layers

    @property
    def reduces_by_scatter(self) -> bool:
        """Whether gradients are reduced to shards."""
        return True

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather what the root module holds itself: a call below it finds the weights of all modules."""
        model: Any = _eager_model(self.trainer)
        if isinstance(model, FSDPModule):
            model.unshard()
        yield
        self.reshard()

    @contextmanager
    def _gradients_dropped(self) -> Iterator[None]:
        """Let FSDP2 reduce the gradients also where the training would wait for the last micro-batch."""
        model: Any = model_of(self.trainer)
        if not isinstance(model, FSDPModule):
            yield
            return
        model.set_requires_gradient_sync(True)
        try:
            yield
        finally:
            if not self.trainer.accelerator.sync_gradients:
                self._wait_for_last_batch(model)

    def _wait_for_last_batch(self, model: Any) -> None:
        """Have FSDP2 add up the gradients of the micro-batches, as the training had it."""
        model.set_requires_gradient_sync(False)


class Fsdp2(ShardedByLayers):
    """FSDP2 by Accelerate (`fsdp2`), with replicas too; and FSDP1 (`fsdp1`), which the support table refuses."""

    @classmethod
    def name_in(cls, trainer: "Trainer") -> str | None:
        """Return the name with the version if Accelerate has set up FSDP."""
        state = trainer.accelerator.state
        if state.distributed_type != DistributedType.FSDP:
            return None
        return f"fsdp{state.fsdp_plugin.fsdp_version}"

    @property
    def _plugin(self) -> Any:
        return self.trainer.accelerator.state.fsdp_plugin

    def offload(self) -> str:
        """Return `full` where FSDP2 keeps parameters, gradients and states in the CPU's memory."""
        return "full" if self._is_offloaded else "none"

    @property
    def _is_offloaded(self) -> bool:
        # Accelerate sets the base class of the policy where nothing is offloaded
        return isinstance(self._plugin.cpu_offload, CPUOffloadPolicy)

    @contextmanager
    def full_state_dicts(self) -> Iterator[None]:
        """Have Accelerate gather the shards when Trainer saves the model: with any other type it writes none."""
        before = self._plugin.state_dict_type
        self._plugin.set_state_dict_type("FULL_STATE_DICT")
        try:
            yield
        finally:
            self._plugin.set_state_dict_type(before)

    @property
    def replicas(self) -> bool:
        """Whether several ranks hold the same shards (HSDP)."""
        return self.axes()["dp_replicate"] > 1

    @property
    def has_plain_forward(self) -> bool:  # type: ignore[override]  # it depends on the version
        """Whether the model can be called as one process calls it: FSDP1's cannot."""
        return self.is_wrapped(self.wrapper())

    def check_versions(self) -> None:
        """Check that Accelerate saves all adapters, and ties the embeddings again after it has sharded them."""
        problem = None
        model = unwrap_compiled(model_of(self.trainer))
        if is_peft_model(model) and self._plugin.state_dict_type.name == "FULL_STATE_DICT":
            problem = why_full_files_lose_adapters()
        if problem is None and _ties_embeddings(model):
            problem = why_fsdp2_cannot_tie()
        if problem is not None:
            raise MissingDependencyError(problem)

    def is_wrapped(self, wrapper: nn.Module) -> bool:
        """Return whether `fully_shard` has been applied to it."""
        return isinstance(wrapper, FSDPModule)

    def _placements(self) -> str | None:
        placements = super()._placements()
        if placements is not None and not self._plugin.reshard_after_forward:
            placements += ", kept from forward to backward"
        return placements

    def _traits(self) -> list[str]:
        return ["offloaded to cpu"] if self._is_offloaded else []


def has_distributed_parameters(module: nn.Module) -> bool:
    """Return whether a module has a parameter of which a rank holds a part.

    Args:
        module (`nn.Module`): any module.
    """
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _eager_model(trainer: "Trainer") -> nn.Module:
    """Return the model without wrappers and without what `torch.compile` makes of it."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    return unwrap_compiled(model)


def _ties_embeddings(model: Any) -> bool:
    base = model.get_base_model() if is_peft_model(model) else model
    if not isinstance(base, PreTrainedModel) or base.get_output_embeddings() is None:
        return False
    return bool(base.config.get_text_config().tie_word_embeddings)


def let_fsdp_run_on_cpu() -> None:
    """Have Accelerate set up FSDP2 and device meshes on CPUs, over gloo. Call it before the Trainer is made.

    Accelerate supports them on GPUs only: on CPUs it silently runs DDP instead of FSDP, and refuses meshes.
    """
    state = PartialState()  # the one of the process
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU
