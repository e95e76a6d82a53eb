"""Two corrections for DeepSpeed's Ulysses, where ranks share a sequence."""

import copy
import itertools
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import accelerate
import torch
from torch.utils.data import Dataset

from hfscale.core.versions import sequence_parallel_size
from hfscale.facts.strategies import WEIGHTS
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies import Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer


def fix_sequence_parallel(trainer: "Trainer") -> None:
    """Correct what transformers 5.23 with DeepSpeed 0.19 does wrong when ranks share sequences (`sp_size` above 1).

    Call it after the Trainer is made and before `train()`. Without sequence parallelism it does nothing.

    Args:
        trainer (`Trainer`): its gradients under ZeRO-1 and 2, and its training data loader, are corrected.
    """
    if sequence_parallel_size(trainer) == 1:
        return
    _fix_gradient(trainer)
    adapter = TrainerAdapter.of(trainer)
    adapter.before_each_training(lambda: adapter.wrap_ulysses_loader(SkippableUlyssesLoader))


def _fix_gradient(trainer: "Trainer") -> None:
    """Under ZeRO-1 and 2, divide the gradient by the number of ranks that share a sequence.

    transformers 5.23's `deepspeed_sp_compute_loss` adds up the ranks' losses by a differentiable all-gather, whose
    backward sums over the ranks what each of them already has in full. ZeRO-3 compensates by averaging over all
    ranks; DeepSpeed 0.19's ZeRO-1 and 2 average over the data-parallel ones only. Adam hides the factor (clipping and
    the logged norm do not); SGD takes steps that are too long by that factor.
    """
    size = sequence_parallel_size(trainer)
    if WEIGHTS in Strategy.of(trainer).shards:
        return

    def divide(module: "PreTrainedModel", args: Any, output: Any) -> None:
        if module.training and output.loss is not None and output.loss.requires_grad:
            output.loss.register_hook(lambda gradient: gradient / size)

    model_of(trainer).register_forward_hook(divide)


class SkippableUlyssesLoader:
    """Wraps a Ulysses data loader, so that a resumed Trainer can skip the batches that the run has seen.

    On resume Trainer calls `accelerate.skip_first_batches(loader, count)`. Accelerate makes a new loader from the
    dataset and the batch sampler of the one it is given, and leaves out the first `count` batches. DeepSpeed's loader
    has neither. This class has both: the batch sampler gives the numbers of the micro-batches, and the dataset gives
    the micro-batch of a number.

    Args:
        loader (`UlyssesSPDataLoaderAdapter`): DeepSpeed's loader. When each rank has read a batch from the loader
            below it, `loader.dl`, it makes `sp_world_size` micro-batches: the batch of one rank after the other.
    """

    sampler = None
    prefetch_factor = None  # no workers; Accelerate's default is for loaders that have some

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        # Otherwise the new loader draws a seed from the training's generator
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    @property
    def base_dataloader(self) -> Any:
        """The loader of torch below it, as an attribute of Accelerate's loaders."""
        return getattr(self._loader.dl, "base_dataloader", self._loader.dl)

    @property
    def batch_sampler(self) -> "_Numbers":
        """The number of each micro-batch, as a batch of its own."""
        return _Numbers(len(self))

    @property
    def dataset(self) -> "_MicroBatches":
        """The micro-batches of one pass."""
        return _MicroBatches(self._loader)

    @staticmethod
    def collate_fn(micro_batches: list[Any]) -> Any:
        """Return the only micro-batch of a batch, unchanged.

        Args:
            micro_batches (`list`): one micro-batch, as the dataset returns it.
        """
        (micro_batch,) = micro_batches
        return micro_batch


class _Numbers:
    """The numbers of the micro-batches of a pass, each as a batch of its own.

    They have no end, since the dataset ends the pass; the length is for Accelerate, which computes what is left of it.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        return ([number] for number in itertools.count())


class _MicroBatches(Dataset[Any]):
    """The micro-batches of one pass, by number. They must be read in order, from any first number."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._rest: Iterator[Any] | None = None

    def __getitem__(self, number: int) -> Any:
        if self._rest is None:
            self._rest = self._after(number)
        return next(self._rest)

    def _after(self, count: int) -> Iterator[Any]:
        batches, micro_batches = divmod(count, self._loader.sp_world_size)
        # The next pass uses the loader itself, from its beginning
        rest: Any = copy.copy(self._loader)
        rest.dl = accelerate.skip_first_batches(self._loader.dl, batches)
        rest.iter = iter(rest.dl)
        rest.micro_batches = deque()
        for _ in range(micro_batches):
            next(rest)
        iterator: Iterator[Any] = rest
        return iterator
