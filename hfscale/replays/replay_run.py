"""How a micro-batch is computed twice, and trained on once (`Strategy.without_effect`).

| strategy | what is computed twice | the gradients of the replay |
|---|---|---|
| one process, DDP | forward and backward pass of the first micro-batch of a step | stay on the rank, and are dropped |
| FSDP2, HSDP, transformers' own sharding | the same | are reduced, and dropped: FSDP2 can drop no others |
| ZeRO-0 to ZeRO-2 | the same, of the module inside of the engine | are returned to us, which the engine does not see |
| ZeRO-3 | the forward pass alone: what the engine does with gradients cannot be undone | there are none |
| `ParallelTrainer` | all micro-batches of the step, through the same schedule | are reduced, and dropped |

Whatever else the computation moves is put back: what modules, the Trainer and the batch hold (`KeptState`), and the
random states of the process. The weights are not copied. The first replay of a launch checks that they stay the same.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer

from hfscale.core.attributes import replaced
from hfscale.replays.replay_state import (
    check_kept,
    check_weights,
    hash_weights,
    put_random_states_back,
    random_states,
    state_of,
)
from hfscale.trainer.strategies import Strategy


class MicroBatch:
    """Computes a micro-batch of a training as often as asked, and trains on it at most once.

    Args:
        trainer (`Trainer`): prepared for training, one that `check_can_replay` accepts.
        training_step (`Callable`): that of the Trainer.
        batch (`tuple`): what `training_step` is called with after the model: the batch, further arguments, keywords.
        asked (`str`): the argument that asks for replays, for messages.

    Raises:
        UsageError: the model, the Trainer or the batch refers to something that cannot be set back.
    """

    def __init__(
        self,
        trainer: Trainer,
        training_step: Callable[..., Any],
        batch: tuple[Any, ...],
        asked: str,
    ) -> None:
        self._trainer = trainer
        self._strategy = Strategy.of(trainer)
        self._training_step = training_step
        self._batch = batch
        self._asked = asked
        self._randoms = random_states()
        kept = state_of(trainer, batch)
        check_kept(kept, asked)
        self._kept = kept

    def replay(self) -> torch.Tensor:
        """Compute it, and leave everything as it was.

        Returns:
            The loss.
        """
        inputs, args, kwargs = self._batch
        is_quiet = replaced(self._trainer, "log", _log_nothing)
        without_effect = self._strategy.without_effect()
        with is_quiet, without_effect as model:
            loss: torch.Tensor = self._training_step(model, inputs, *args, **kwargs)
        put_random_states_back(self._randoms)
        return loss

    def put_back(self) -> None:
        """Let model, Trainer and batch hold what they held."""
        self._kept.put_back()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return hashes of the weights, by name, as `hash_weights`."""
        trainer, kept = self._trainer, self._kept
        return hash_weights(trainer, kept)

    def check_weights(self, before: dict[str, torch.Tensor]) -> None:
        """Check that a replay has changed no weight.

        Args:
            before (`dict[str, torch.Tensor]`): what `weights` returned before it.

        Raises:
            UsageError: it has: a forward pass, or the loss, writes parameters.
        """
        now = self.weights()
        check_weights(before, now, self._asked)


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand for `Trainer.log`."""
