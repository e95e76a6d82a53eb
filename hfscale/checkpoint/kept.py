"""Which checkpoints a training leaves: the limit of Trainer, `state_limit`, and the temporary ones of stops."""

from collections.abc import Sequence
from pathlib import Path

from transformers import TrainerState

from hfscale.checkpoint.retention import drop_states
from hfscale.checkpoint.store import DELETING, delete_newest, keep_only, list_checkpoints, rotate
from hfscale.core.best_effort import best_effort
from hfscale.core.logging import get_logger
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.errors import CheckpointError
from hfscale.trainer.state import saved_state

logger = get_logger(__name__)

_STATE_NAME, _TEMPORARY = "checkpoints", "temporary"  # in `trainer_state.json`


class KeptCheckpoints:
    """Deletes what a training does not keep, after the commit of a newer checkpoint.

    Args:
        run_dir (`Path`): the folder of the checkpoints.
        limit (`int`, *optional*): `save_total_limit`; None or 0: all that are not temporary.
        state_limit (`int`, *optional*): the checkpoints that keep their training state; None: all.
    """

    def __init__(self, run_dir: Path, *, limit: int | None, state_limit: int | None) -> None:
        self._run_dir = run_dir
        self._given_limit = limit
        self._state_limit = state_limit
        self.limit = limit if limit is not None and limit > 0 else None
        """Checkpoints to keep; None: all that are not temporary."""
        self.temporary: list[int] = []
        """The steps of the temporary checkpoints."""

    def begin(self, state: TrainerState) -> None:
        """Go on with the checkpoints of the launch before, which may have been killed before it deleted any.

        Args:
            state (`TrainerState`): the state with which the training begins.
        """
        self.temporary = _temporary_steps(state)
        self.rotate(state.best_model_checkpoint)

    def note(self, state: TrainerState, *, is_temporary: bool) -> None:
        """Note in the state whether the checkpoint that is about to be written is temporary.

        Args:
            state (`TrainerState`): the state that is saved.
            is_temporary (`bool`): neither Trainer nor the user asked for a save at this step.
        """
        earlier = _temporary_steps(state)
        steps = {step for step in earlier if (self._run_dir / f"checkpoint-{step}").exists()}
        steps -= {state.global_step}
        if is_temporary:
            steps.add(state.global_step)
        self.temporary = saved_state(state, _STATE_NAME)[_TEMPORARY] = sorted(steps)

    def rotate(self, best: Path | str | None) -> None:
        """Delete what is beyond the limits; a file that cannot be deleted is said, and nothing else.

        Args:
            best (`Path` or `str`, *optional*): the best checkpoint, which is kept.
        """
        keep = Path(best) if best is not None else None
        with best_effort(DELETING, self._run_dir):
            rotate(self._run_dir, limit=self.limit, keep=keep, temporary=self.temporary)
        if self._state_limit is None:
            return
        with best_effort(DELETING, self._run_dir, (OSError, CheckpointError)):
            for checkpoint in drop_states(self._run_dir, limit=self._state_limit, best=keep):
                logger.info("%s keeps its weights only (state_limit)", checkpoint.name)

    def rotate_at_end(self, best: Path | None) -> str | None:
        """Leave the checkpoints that Trainer would leave at the end of a training.

        Args:
            best (`Path`, *optional*): the best checkpoint.

        Returns:
            `str` or `None`: the name of the newest checkpoint that is left.
        """
        with best_effort(DELETING, self._run_dir):
            delete_newest(self._run_dir, temporary=self.temporary, best=best)
            if self._given_limit == 1 and best is not None:
                keep_only(self._run_dir, best)
        left = committed_checkpoints(self._run_dir)
        return left[-1].name if left else None


def committed_checkpoints(run_dir: Path) -> Sequence[Path]:
    """Return the checkpoints with a manifest, in the order of their steps.

    Args:
        run_dir (`Path`): the folder of the checkpoints.
    """
    return [path for path in list_checkpoints(run_dir) if (path / MANIFEST_NAME).is_file()]


def _temporary_steps(state: TrainerState) -> list[int]:
    steps: list[int] = saved_state(state, _STATE_NAME).get(_TEMPORARY, [])
    return list(steps)
