"""Sizes of the mesh axes of a run whose experts are spread over ranks."""

from dataclasses import dataclass
from typing import ClassVar

from hfscale.errors import LayoutError
from hfscale.facts.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True)
class ExpertLayout(ParallelLayout):
    """Holds the sizes of a mixture of experts whose experts are spread over the ranks of a stage.

    Raises:
        LayoutError: a size is not an integer of at least 1.
    """

    ep: int = 1
    """Ranks that share the experts of a layer. They are among the ranks of the other axes: the world has no factor of
    them."""

    spans_replicas: ClassVar[bool] = True
    """Whether the ranks that share experts may be those of several replicas."""

    @property
    def ranks_of_replica(self) -> int:
        """Ranks of a stage that hold one replica of the parameters."""
        return self.dp_shard * self.cp * self.tp

    @property
    def efsdp(self) -> int:
        """Ranks that hold the same experts of a replica, and shard them; 1 where `ep` spans replicas."""
        return max(1, self.ranks_of_replica // self.ep)

    @property
    def expert_replicas(self) -> int:
        """Replicas of the experts of a stage: `dp_replicate`, or fewer where `ep` spans replicas."""
        return self.dp_replicate * self.ranks_of_replica // (self.ep * self.efsdp)

    def check_experts(self) -> None:
        """Check that groups of `ep` ranks are complete in a stage of a replica, or consist of complete ones.

        Raises:
            LayoutError: they are not; the message names the sizes that fit.
        """
        ranks = self.ranks_of_replica
        fitting = [size for size in range(self.tp, ranks + 1, self.tp) if ranks % size == 0]
        if self.spans_replicas:
            fitting += [
                ranks * n for n in range(2, self.dp_replicate + 1) if self.dp_replicate % n == 0
            ]
        if self.ep == 1 or self.ep in fitting:
            return
        # The rule has a part for each axis, and only those of the axes in use help.
        rule = f"divide the {ranks} ranks of one replica"
        if self.pp > 1:
            rule += " in a stage"
        if self.tp > 1:
            rule += f" and be a multiple of tp_size {self.tp}"
        if self.spans_replicas and self.dp_replicate > 1:
            rule += ", or be those of several"
        raise LayoutError(
            f"ep_size {self.ep} must {rule}: choose one of {', '.join(map(str, fitting))}"
        )

    @property
    def summary(self) -> str:
        """The axes of more than one rank, such as `shard 8 pp 2 ep 4`; `one GPU` if there are none."""
        sizes = super().summary
        return f"{sizes} ep {self.ep}" if self.ep > 1 else sizes

    def __str__(self) -> str:
        sizes = super().__str__()
        return f"{sizes}, experts over {self.ep} ranks" if self.ep > 1 else sizes
