"""How transformers itself has distributed a model while it loaded it: `from_pretrained(distributed_config=...)`."""

from dataclasses import asdict, dataclass
from typing import Any

from hfscale.core.versions import (
    distributed_sizes,
    divides_expert_gradients_twice,
    installed,
    is_peft_model,
)


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


def native_layout(model: object) -> NativeLayout | None:
    """Return the sizes with which transformers has distributed a model; None if it has not.

    Args:
        model (`object`): the model of a Trainer, with or without adapters of PEFT.
    """
    sizes = distributed_sizes(model)
    return None if sizes is None else NativeLayout(**sizes)


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
