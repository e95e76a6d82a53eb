"""How transformers itself has distributed a model while it loaded it: `from_pretrained(distributed_config=...)`."""

from dataclasses import asdict, dataclass

from hfscale.core.versions import distributed_sizes


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
        sizes = " x ".join(f"{axis}={size}" for axis, size in self.to_dict().items() if size > 1 and axis != "ep")
        return f"{sizes or 'one rank'}, experts over {self.ep} ranks" if self.ep > 1 else sizes or "one rank"


def native_layout(model: object) -> NativeLayout | None:
    """Return the sizes with which transformers has distributed a model; None if it has not.

    Args:
        model (`object`): the model of a Trainer, with or without adapters of PEFT.
    """
    sizes = distributed_sizes(model)
    return None if sizes is None else NativeLayout(**sizes)
