"""Whether all files of a checkpoint were still there when the last of them had been loaded.

Trainer loads optimizer, schedule and random states if their files exist, and trains on without them, in silence, if
they do not. A cleaner, a logout (RemoveIPC of systemd-logind) or another process can remove them after the checkpoint
was verified.
"""

from pathlib import Path

from hfscale.checkpoint.manifest import checkpoint_files
from hfscale.core.collectives import TRAINING
from hfscale.errors import CheckpointChangedError


class ResumedFiles:
    """The files of the checkpoint from which a training resumes, as they were before the first was loaded.

    Args:
        checkpoint (`str`): the folder.
    """

    def __init__(self, checkpoint: str) -> None:
        self._folder = Path(checkpoint)
        self._names = checkpoint_files(self._folder) if self._folder.is_dir() else ()

    def check(self) -> None:
        """Check that every file is still there: what is there now was there when it was loaded.

        Every rank must call it, after its last load and before its first step.

        Raises:
            CheckpointChangedError: a file is gone; raised on every rank.
        """
        with TRAINING.agreed("start: loaded files"):
            for name in self._names:
                if not (self._folder / name).exists():
                    raise CheckpointChangedError(
                        f"{self._folder / name} was removed while the training loaded it: start the same command "
                        "again, which resumes from what is left"
                    )
