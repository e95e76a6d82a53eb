"""What a training does with a remote store; a part of `SpotCheckpointCallback`, which calls it from its own events."""

from pathlib import Path

from hfscale import distributed
from hfscale.checkpoint.remote import RemoteStore
from hfscale.checkpoint.uploader import Uploader, bring_newest
from hfscale.checkpoint.writer import UNFINISHED
from hfscale.errors import StorageError
from hfscale.logs import get_logger

logger = get_logger(__name__)

_LOOK_S = 5.0


class RemoteCopies:
    """Fetches before a training, copies beside it, waits after it. Without a URL nothing of that happens.

    Args:
        url (`str`, *optional*): folder of the store.

    Raises:
        UsageError: not a URL, of an unknown kind, or with credentials in it.
        MissingDependencyError: the package for that kind of store is not installed.
    """

    def __init__(self, url: str | None) -> None:
        self.store = RemoteStore(url) if url is not None else None
        self.uploader: Uploader | None = None
        """On rank 0, from `begin` on."""

    def fetch(self, output_dir: Path) -> None:
        """Bring the store's newest checkpoint where it is newer than the local one. Every rank must call it.

        Raises:
            StorageError: the store cannot be read, and there is no local checkpoint.
        """
        if self.store is not None:
            bring_newest(self.store, output_dir)

    def begin(self, output_dir: Path, step: int, *, committed: str | None, limit: int | None) -> None:
        """On rank 0: what the store has of later steps than `step` gives way; it gets the checkpoint begun at."""
        if self.store is None or distributed.rank() != 0:
            return
        self.uploader = Uploader(self.store, limit=limit, links=output_dir / UNFINISHED / "upload")
        try:
            for later in self.store.set_aside(after_step=step):
                logger.info("set aside checkpoint-%d in %s: this run begins before it", later, self.store.url)
            is_there = step in self.store.committed_steps()
        except StorageError as error:
            logger.warning("%s; training goes on, and its checkpoints will be offered there", error)
            return
        if is_there:
            self.uploader.last_uploaded = f"checkpoint-{step}"
        elif committed is not None:
            self.uploader.offer(output_dir / committed)

    def offer(self, checkpoint: Path, best: Path | None) -> None:
        """Have a checkpoint copied, beside the training. Call it before rotation may delete it."""
        if self.uploader is not None:
            self.uploader.offer(checkpoint, best.name if best is not None else None)

    def wait(self, output_dir: Path, last: str | None) -> None:
        """Until the checkpoint named `last` is in the store, or was refused twice. Every rank must call it: one that
        went on alone would give up on the others."""
        if self.store is None:
            return
        tried_again = False
        while True:
            busy = self.uploader is not None and not self.uploader.wait(_LOOK_S)
            if self.uploader is not None and not busy and not tried_again and last is not None:
                tried_again = True
                if self.uploader.last_uploaded != last:
                    self.uploader.offer(output_dir / last)
                    busy = True
            if not distributed.all_max([float(busy)])[0]:
                return
