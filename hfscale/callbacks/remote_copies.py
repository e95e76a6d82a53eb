"""The second home of a run's checkpoints, as a training uses it."""

from pathlib import Path

from transformers import TrainerState

from hfscale.checkpoint.remote import RemoteStore, Uploader, fetch_newest
from hfscale.checkpoint.store import UNFINISHED
from hfscale.errors import StorageError
from hfscale.utils import distributed
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

_LOOK_S = 5.0


class RemoteCopies:
    """Fetches a newer checkpoint before a training, and copies each committed one beside it.

    Args:
        url (`str`): a folder of a remote store, such as `s3://bucket/run`.

    Raises:
        UsageError: it is no URL.
    """

    def __init__(self, url: str) -> None:
        self.store = RemoteStore(url)
        self._uploader: Uploader | None = None
        self._output_dir = Path()

    def fetch(self, output_dir: Path) -> None:
        """Bring the newest checkpoint of the store into `output_dir` where that has none as new."""
        fetch_newest(self.store, output_dir)

    def begin(self, output_dir: Path, state: TrainerState, *, limit: int | None, committed: str | None) -> None:
        """On rank 0: what the store has of later steps gives way, and it gets the checkpoint the run begins at."""
        self._output_dir = output_dir
        if not state.is_world_process_zero:
            return
        self._uploader = Uploader(self.store, limit=limit, links=output_dir / UNFINISHED / "upload")
        try:
            for step in self.store.archive(after_step=state.global_step):
                logger.info(
                    "set aside checkpoint-%d in %s: of a later step than this run begins at", step, self.store.url
                )
            is_there = state.global_step in self.store.committed_steps()
        except StorageError as error:
            logger.warning("%s; training goes on, and its checkpoints will be offered there", error)
            return
        if committed is not None and is_there:
            self._uploader.last_uploaded = committed
        elif committed is not None:
            self._uploader.offer(output_dir / committed)

    def offer(self, checkpoint: Path, best: Path | None) -> None:
        """Copy a checkpoint that has just been committed; on the rank that did it."""
        if self._uploader is not None:
            self._uploader.offer(checkpoint, best.name if best is not None else None)

    @property
    def expected_s(self) -> float:
        """Seconds that the copy of a checkpoint of now is expected to take on this rank."""
        return self._uploader.expected_s if self._uploader is not None else 0.0

    def wait(self, last: str | None) -> None:
        """Until the checkpoint `last` is in the store, or was refused twice; all ranks wait."""
        uploader, tried_again = self._uploader, False
        while True:
            busy = uploader is not None and not uploader.wait(_LOOK_S)
            if uploader is not None and not busy and not tried_again and last is not None:
                tried_again = True
                if uploader.last_uploaded != last:
                    uploader.offer(self._output_dir / last)
                    busy = True
            if not distributed.all_max([float(busy)])[0]:
                return
