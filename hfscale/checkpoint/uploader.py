"""Committed checkpoints on their way to a remote store beside the training, and back from it before one begins."""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from hfscale.checkpoint.manifest import MANIFEST_NAME, read_manifest
from hfscale.checkpoint.remote import RemoteStore, redacted
from hfscale.checkpoint.store import UNFINISHED, checkpoint_step, latest_checkpoint, verify
from hfscale.errors import CheckpointError, HfScaleError, StorageError
from hfscale.utils import distributed
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

_LONGEST_DOWNLOAD = timedelta(hours=24)
_brought: set[tuple[str, str]] = set()

Result = TypeVar("Result")


class Uploader:
    """Copies checkpoints to a remote store on a thread of its own, the newest first.

    What the store refuses is said once, in one warning; training goes on, and the next checkpoint is tried again.

    Args:
        store (`RemoteStore`): where to.
        limit (`int`, *optional*): checkpoints to keep there; None: all.
        links (`Path`): a folder on the run's file system. What is being copied is linked there first, so that rotation
            cannot take it away half-copied.
    """

    def __init__(self, store: RemoteStore, *, limit: int | None, links: Path) -> None:
        self.store, self.limit, self._links = store, limit, links
        self._next: tuple[Path, str | None] | None = None
        self._changed = threading.Condition()
        self._busy = self._has_warned = False
        self.last_uploaded: str | None = None
        """Name of the newest checkpoint that is whole in the store, as far as this process put it there."""
        self.last_upload_s = 0.0
        """Seconds that the last copy took; 0 before the first."""

    def offer(self, checkpoint: Path, best: str | None = None) -> None:
        """Have `checkpoint` copied. One that still waits for its turn gives way: the newest is worth most.

        Args:
            best (`str`, *optional*): name of the best checkpoint, which rotation leaves in the store.
        """
        linked = _link(checkpoint, self._links)
        with self._changed:
            waiting, self._next = self._next, (linked, best)
            if not self._busy:
                self._busy = True
                threading.Thread(target=self._work, name="hfscale-upload", daemon=True).start()
        if waiting is not None and waiting[0] != linked:
            logger.info("%s is not copied to %s: %s follows it", waiting[0].name, self.store.url, checkpoint.name)
            _unlink(waiting[0], self._links)

    @property
    def expected_s(self) -> float:
        """Seconds until a checkpoint that were offered now would be in the store, as far as the last copy tells."""
        return self.last_upload_s * (2 if self._busy else 1)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being copied, or for `timeout_s` seconds; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                task, self._next = self._next, None
                if task is None:
                    self._busy = False
                    self._changed.notify_all()
                    return
            self._copy(*task)

    def _copy(self, checkpoint: Path, best: str | None) -> None:
        begun = time.monotonic()
        try:
            self.store.upload(checkpoint)
            self.last_uploaded, self.last_upload_s = checkpoint.name, time.monotonic() - begun
            logger.debug("%s is in %s", checkpoint.name, self.store.url)
            if self.limit is not None:
                self.store.rotate(limit=self.limit, keep=best)
        except Exception as error:
            level = logging.DEBUG if self._has_warned else logging.WARNING
            self._has_warned = True
            logger.log(
                level,
                "%s was not copied: %s; training goes on with the local checkpoints",
                checkpoint.name,
                redacted(error),
            )
        finally:
            _unlink(checkpoint, self._links)


def _link(checkpoint: Path, links: Path) -> Path:
    """A second name for each file of `checkpoint`; the checkpoint itself where the file system has no hard links."""
    target = links / checkpoint.name
    try:
        manifest = read_manifest(checkpoint)
        for name in (*manifest.files, MANIFEST_NAME):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).unlink(missing_ok=True)
            (target / name).hardlink_to(checkpoint / name)
    except OSError:
        return checkpoint
    return target


def _unlink(checkpoint: Path, links: Path) -> None:
    if checkpoint.parent == links:
        shutil.rmtree(checkpoint, ignore_errors=True)


def bring_newest(store: RemoteStore, output_dir: Path) -> None:
    """Where the store has a newer whole checkpoint than `output_dir`, fetch it. Every rank must call it.

    Rank 0 goes first, then the first rank of each other node whose `output_dir` does not show it: on shared storage it
    is fetched once. Once per process; a store that cannot be read is told in a warning if there is a local checkpoint.

    Raises:
        StorageError: on every rank: the store cannot be read and there is no local checkpoint, so that the run would
            begin afresh beside its own checkpoints; or a fetch broke off.
    """
    if (store.url, str(output_dir)) in _brought:
        return
    _brought.add((store.url, str(output_dir)))
    group = distributed.own_group(_LONGEST_DOWNLOAD)
    step, problem = None, None
    if distributed.rank() == 0:
        step, problem = _guarded(lambda: _fetch_newest(store, output_dir))
    (step, problem), *_ = distributed.gather_json([step, problem], group)
    if problem is None and step is not None:
        leads_node = distributed.rank() != 0 and os.environ.get("LOCAL_RANK") == "0"
        if leads_node and not _is_whole(output_dir / f"checkpoint-{step}"):
            _, problem = _guarded(lambda: store.download(step, output_dir, output_dir / UNFINISHED / "download"))
        problem = next((told for told in distributed.gather_json(problem, group) if told is not None), None)
    if problem is not None:
        raise StorageError(f"{problem}; make it readable, or begin without it")


def _guarded(action: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """What `action` returns, or else what the other ranks are to be told."""
    try:
        return action(), None
    except (HfScaleError, OSError) as error:
        return None, redacted(error)


def _fetch_newest(store: RemoteStore, output_dir: Path) -> int | None:
    """The step that was fetched, if one was."""
    local = latest_checkpoint(output_dir)
    local_step = checkpoint_step(Path(local)) if local else -1
    try:
        steps = store.committed_steps()
    except StorageError as error:
        if local is None:
            raise
        logger.warning("%s; the newest local checkpoint is taken", error)
        return None
    for step in reversed([step for step in steps if step > local_step]):
        try:
            fetched = store.download(step, output_dir, output_dir / UNFINISHED / "download")
        except CheckpointError as error:
            logger.warning("passed over in %s: %s", store.url, error)
            continue
        logger.info("fetched %s from %s", fetched.name, store.url)
        return step
    return None


def _is_whole(checkpoint: Path) -> bool:
    try:
        verify(checkpoint)
    except CheckpointError:
        return False
    return True
