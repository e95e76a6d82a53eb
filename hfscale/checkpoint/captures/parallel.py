"""What `ParallelTrainer` writes: it returns its shards and its small files itself."""

from collections.abc import Mapping, Sequence

from transformers import Trainer

from hfscale.checkpoint.captures.capture import Capture, LiveState, bytes_of_weight
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies.parallel import Parallel


class ParallelCapture(Capture):
    """Copies the shards of a `ParallelTrainer`.

    Args:
        trainer (`Trainer`): a `ParallelTrainer` that is prepared for training.
        own_methods (`Sequence[str]`): as for `Capture`.
    """

    def __init__(self, trainer: Trainer, own_methods: Sequence[str] = ()) -> None:
        super().__init__(trainer, own_methods)
        assert isinstance(self._strategy, Parallel)  # it is the capture of that strategy
        self._sharded = self._strategy.trainer

    def why_synchronous(self) -> str | None:
        if self._own_methods:
            return f"{type(self._trainer).__name__} has its own {self._own_methods[0]}"
        return None

    def exchange(self) -> None:
        self._sharded.exchange_groups()

    def live(self) -> LiveState:
        return LiveState(shards=self._sharded.sharded_state())

    def files(self) -> Mapping[str, bytes]:
        return self._sharded.checkpoint_files()

    def expected_bytes(self) -> int:
        """Return about how many bytes this rank writes: each rank has stages and shards of its own."""
        total = 0
        for parameter in model_of(self._trainer).parameters():
            own = self._strategy.own(parameter)
            assert own is not None  # a weight has bits of its own
            total += own.numel() * bytes_of_weight(parameter)
        return total
