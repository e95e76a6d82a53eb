"""What a checkpoint consists of: one capture for each way in which a strategy holds its state.

| strategy | module | what this rank writes |
|---|---|---|
| one process, DDP | unsharded.py | on the main process, all that Trainer writes |
| FSDP2 | fsdp2.py | its shards, as Accelerate writes them |
| DeepSpeed's ZeRO | zero.py | the partitions that the engine hands over while Trainer's own method runs |
| transformers' `distributed_config` | native.py | its shards, under the names in the undistributed model |
| `ParallelTrainer` | parallel.py | its shards, which the Trainer itself names |

`capture.py` has their protocol, and `capture_of` is the one choice which of them a Trainer gets. A test runs the same
checks over all of them. To add a strategy, write a module with a `Capture` and add it to the table below.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hfscale.checkpoint.captures.capture import Capture
from hfscale.checkpoint.captures.fsdp2 import Fsdp2Capture
from hfscale.checkpoint.captures.native import NativeCapture
from hfscale.checkpoint.captures.parallel import ParallelCapture
from hfscale.checkpoint.captures.unsharded import UnshardedCapture
from hfscale.checkpoint.captures.zero import ZeroCapture
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.fsdp2 import Fsdp2
from hfscale.trainer.strategies.native import Native
from hfscale.trainer.strategies.parallel import Parallel
from hfscale.trainer.strategies.replicated import Replicated
from hfscale.trainer.strategies.zero import Zero

if TYPE_CHECKING:
    from transformers import Trainer

CAPTURES: Mapping[type[Strategy], type[Capture]] = {
    Replicated: UnshardedCapture,
    Fsdp2: Fsdp2Capture,
    Zero: ZeroCapture,
    Native: NativeCapture,
    Parallel: ParallelCapture,
}
"""The capture of each strategy, and of the strategies that extend it."""


def capture_of(trainer: "Trainer", own_methods: Sequence[str] = ()) -> Capture:
    """Return the capture of the strategy that runs a Trainer.

    Args:
        trainer (`Trainer`): prepared for training.
        own_methods (`Sequence[str]`): what `hfscale.checkpoint.overrides.own_methods` returns for it.
    """
    kinds = type(Strategy.of(trainer)).__mro__
    capture = next(CAPTURES[kind] for kind in kinds if kind in CAPTURES)
    return capture(trainer, own_methods)
