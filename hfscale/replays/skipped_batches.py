"""Which batches a run has left out: kept in its checkpoints, and in a file of its output directory.

- `trainer_state.json` of each checkpoint has them under `stateful_callbacks`, `hfscale`, `skipped_batches`. So a
  resume continues with the same count and the same numbers to compare with, under any strategy.
- `hfscale_skipped_batches.json` of the output directory is for people. And a run that resumes from an earlier
  checkpoint leaves the same batches out again.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfscale.core.collectives import TRAINING
from hfscale.core.durable_files import write_atomically
from hfscale.core.logging import get_logger
from hfscale.core.run_files import SKIPPED_NAME
from hfscale.core.text_files import read_json
from hfscale.errors import CheckpointError
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.state import saved_state

logger = get_logger(__name__)

_STATE = "skipped_batches"
_FORMAT = 1


class SkippedBatches:
    """The batches that a run has left out, and those that an earlier launch has left out at later steps.

    Every rank must make it, when training begins.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer, whose state is that of the beginning of the training.

    Raises:
        CheckpointError: the file of the output directory cannot be read.
    """

    def __init__(self, adapter: TrainerAdapter) -> None:
        trainer = adapter.trainer
        self.state = saved_state(trainer.state, _STATE)
        """What checkpoints keep: the live dictionary."""
        self.batches: list[dict[str, Any]] = self.state.setdefault("batches", [])
        self.window: dict[str, list[float]] = self.state.setdefault(
            "window", {"loss": [], "grad_norm": []}
        )
        self._path = adapter.checkpoints.run_dir() / SKIPPED_NAME
        self._writes = trainer.state.is_world_process_zero
        step = trainer.state.global_step
        later: list[dict[str, Any]] = []
        with TRAINING.agreed("start: batches that were left out"):
            if self._writes:
                later = _later_batches(self._path, step)
        later = TRAINING.gather("start: batches to leave out", later)[0]
        self._later = {int(batch["step"]): batch for batch in later}
        self._write()

    def later(self, step: int) -> dict[str, Any] | None:
        """Return what an earlier launch has left out at a step that this one has yet to take; None if nothing.

        Args:
            step (`int`): the number of the step, from 1.
        """
        return self._later.get(step)

    def add(self, batch: dict[str, Any]) -> None:
        """Add a batch that is left out now. Every rank must give the same.

        Args:
            batch (`dict[str, Any]`): JSON values; `step` is the number of the step, from 1.
        """
        self._later.pop(batch["step"], None)
        self.batches.append(batch)
        self._write()

    def forget(self, step: int) -> None:
        """Forget a batch of an earlier launch that is not the one of this step any more.

        Args:
            step (`int`): the number of the step.
        """
        self._later.pop(step, None)
        self._write()

    def _write(self) -> None:
        batches = [*self.batches, *self._later.values()]
        if not self._writes or not (batches or self._path.exists()):
            return
        content = {"format": _FORMAT, "batches": batches}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _later_batches(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the batches of the file at later steps; none where the training begins from scratch."""
    if not path.exists():
        return []
    try:
        content = read_json(path)
        batches = content["batches"]
        later = [batch for batch in batches if int(batch["step"]) > step]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}): it says which batches the run leaves out; repair or delete it"
        ) from error
    if step == 0:
        if later:
            logger.info("%s is of an earlier run, and is written anew", path)
        return []
    return later


def same_samples(batch: Mapping[str, Any], samples: list[Any] | None) -> bool:
    """Return whether a batch that was left out consists of these samples, as far as both are known.

    Args:
        batch (`Mapping[str, Any]`): the batch that was left out.
        samples (`list`, *optional*): the samples of a step, in order; None: they are not known.
    """
    known = batch.get("samples")
    return known is None or samples is None or known == samples
