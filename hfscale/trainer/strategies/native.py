"""What transformers itself has distributed while it loaded a model: `from_pretrained(distributed_config=...)`."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from hfscale.core.versions import (
    distributed_sizes,
    divides_expert_gradients_twice,
    installed,
    is_lora_layer,
    is_peft_model,
)
from hfscale.errors import StrategyMismatchError, UsageError
from hfscale.facts.support import Combination
from hfscale.trainer.strategies.fsdp2 import ShardedByLayers, has_distributed_parameters
from hfscale.trainer.strategies.requested import requested

if TYPE_CHECKING:
    from transformers import Trainer


@dataclass(frozen=True, kw_only=True)
class NativeLayout:
    """Holds the sizes of transformers' `DistributedConfig`.

    Dense parameters are spread over `dp_replicate x fsdp x tp` ranks, which are all ranks. The experts are spread over
    the same ranks in another way: `ep` ranks hold the experts of a layer, and the other ranks shard or replicate them.
    """

    dp_replicate: int = 1
    """Replicas of the parameters (HSDP)."""
    fsdp: int = 1
    """Ranks that shard the parameters of a replica (FSDP2)."""
    tp: int = 1
    """Ranks that share each matrix, and see the same batch."""
    ep: int = 1
    """Ranks that share the experts of a layer, and exchange tokens for them."""
    pp: int = 1
    """Ranks that share the layers; transformers has this for inference only."""

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that read different samples."""
        return self.dp_replicate * self.fsdp

    @property
    def shares_layers(self) -> bool:
        """Whether some ranks compute a layer together, so that no rank computes it alone."""
        return self.tp * self.ep * self.pp > 1

    def to_dict(self) -> dict[str, int]:
        """Return the sizes as a checkpoint's manifest has them."""
        return asdict(self)

    def __str__(self) -> str:
        sizes = " x ".join(
            f"{axis}={size}" for axis, size in self.to_dict().items() if size > 1 and axis != "ep"
        )
        return (
            f"{sizes or 'one rank'}, experts over {self.ep} ranks"
            if self.ep > 1
            else sizes or "one rank"
        )


class Native(ShardedByLayers):
    """A model that transformers has distributed (`native`): FSDP2, replicas, tensor and expert parallelism."""

    has_plain_forward = False

    @classmethod
    def name_in(cls, trainer: "Trainer") -> str | None:
        """Return `native` if the model was loaded with a `distributed_config`."""
        return None if native_layout(trainer.model) is None else "native"

    @property
    def layout(self) -> NativeLayout:
        """The sizes with which transformers has distributed the model."""
        layout = native_layout(self.trainer.model)
        assert layout is not None  # else it would have another strategy
        return layout

    @property
    def shares_layers(self) -> bool:
        """Whether ranks share matrices, experts or layers."""
        return self.layout.shares_layers

    @property
    def gathers_layers(self) -> bool:
        """Whether FSDP2 shards the layers, and no ranks share them."""
        return not self.shares_layers

    @property
    def reduces_by_scatter(self) -> bool:
        """Whether gradients are reduced to shards: without shards, FSDP2 averages them as they are."""
        return self.layout.fsdp > 1

    def axes(self) -> dict[str, int]:
        """Return the sizes of the parallel axes."""
        layout = self.layout
        sizes = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.fsdp, "tp": layout.tp}
        return {"cp": 1, "pp": 1, **sizes}

    def expert_ranks(self) -> int:
        """Return the number of ranks that share the experts of a layer."""
        return self.layout.ep

    def manifest_layout(self) -> dict[str, int]:
        """Return the sizes that the manifest has."""
        return self.layout.to_dict()

    def check_request(self, environ: Mapping[str, str] = os.environ) -> None:
        """Check that neither FSDP nor DeepSpeed is asked to distribute the model once more."""
        asked = requested(self.trainer.args, environ)
        if asked.by_fsdp or asked.by_deepspeed:
            raise StrategyMismatchError(
                f"{asked.family.upper()} was asked for but NATIVE would run: the model was loaded with "
                "distributed_config; "
                "launch with torchrun, or load it without"
            )
        if self.layout.tp == 1 and is_peft_model(self.trainer.model):
            _check_adapters(self.trainer.model)

    def combination(self, environ: Mapping[str, str] = os.environ) -> Combination:
        """Describe the training; rules know tensor parallelism as another strategy."""
        asked = super().combination(environ)
        if self.layout.tp > 1:
            asked = replace(asked, strategy="parallel")
        return replace(asked, pp=self.layout.pp)

    def _wait_for_last_batch(self, model: Any) -> None:
        """Do as transformers does until the last micro-batch: with replicas, shards are reduced at each one."""
        if self.layout.dp_replicate > 1:
            model.set_requires_all_reduce(False)
        else:
            model.set_requires_gradient_sync(False)

    def is_wrapped(self, wrapper: nn.Module) -> bool:
        """Return whether the model has distributed parameters."""
        return has_distributed_parameters(wrapper)

    def _layout_parts(self) -> list[str]:
        return [*super()._layout_parts(), str(self.layout)]


def native_layout(model: object) -> NativeLayout | None:
    """Return the sizes with which transformers has distributed a model; None if it has not.

    Args:
        model (`object`): the model of a Trainer, with or without adapters of PEFT.
    """
    sizes = distributed_sizes(model)
    return None if sizes is None else NativeLayout(**sizes)


def _check_adapters(model: Any) -> None:
    """Refuse adapters of a part of a matrix, whose products have another shape than those of the matrix."""
    for name, module in model.named_modules():
        matrix = getattr(module, "base_layer", None)
        if not is_lora_layer(module):
            continue
        if not isinstance(matrix, nn.Linear):
            continue
        outputs = module.out_features
        expected = matrix.out_features
        if outputs == expected:
            continue
        problem = f"the adapters of {name} have {outputs} outputs instead of {expected}"
        cause = "PEFT takes the shape of a shard where distributed_config has replicas (huggingface/peft#3578)"
        fix = "load the model without dp_replicate_size, or train it with recipes/sharded"
        raise UsageError(f"{problem}: {cause}; {fix}")


def why_expert_gradients_are_small(model: Any, device_type: str) -> str | None:
    """Return that transformers divides the gradients of the experts twice, if it does; None if they are right.

    Args:
        model (`Any`): the model of a Trainer, with or without adapters of PEFT.
        device_type (`str`): the device of the ranks, such as `cuda`.

    Returns:
        `str` or `None`: one line with the cause, what it changes and how to avoid it.
    """
    layout = native_layout(model)
    if layout is None or layout.fsdp == 1 or layout.ep == 1 or layout.ep < layout.fsdp * layout.tp:
        return None
    base: Any = model.get_base_model() if is_peft_model(model) else model
    if "ep_dispatch_experts" not in base.ep_plan.values() or not divides_expert_gradients_twice(
        device_type
    ):
        return None
    return (
        f"transformers {installed('transformers')} divides the gradients of the experts twice by fsdp_size "
        f"{layout.fsdp} where no two ranks hold the same experts (ep_size {layout.ep}): gradient norms, clipping and "
        "the updates of optimizers other than Adam's kind are wrong; upgrade (pip install --upgrade "
        "'transformers>=5.23'), or give a smaller ep_size"
    )
