"""Remote copies of committed checkpoints, in a bucket of the hub (hf://buckets/…) or any store that fsspec reaches.

The protocol is that of the local disk: the manifest is uploaded last, so its presence is the commit, and a deletion
removes the manifest first. A downloaded checkpoint is compared with its manifest before it gets its final name.

`Uploader` copies checkpoints in the background while training runs; `fetch_newer` brings the newest one back before
training starts.
"""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hfscale.checkpoint.best import best_step_of
from hfscale.checkpoint.hub_bucket import HubBucket
from hfscale.checkpoint.manifest import read_manifest
from hfscale.checkpoint.resumable import check_visible
from hfscale.checkpoint.retention import state_files, steps_without_state, without_state
from hfscale.checkpoint.store import CHECKPOINT_NAME, archive, checkpoint_step, excess_steps, verify
from hfscale.core.best_effort import count_failure
from hfscale.core.disk_errors import PROGRAM_ERRORS
from hfscale.core.exchanges import Exchanges
from hfscale.core.logging import get_logger
from hfscale.core.redaction import redact
from hfscale.core.run_files import MANIFEST_NAME, UNFINISHED
from hfscale.core.versions import require
from hfscale.errors import (
    CheckpointError,
    HfScaleError,
    MissingDependencyError,
    ParameterError,
    StorageError,
    UsageError,
)

logger = get_logger(__name__)

COPYING = "copying a checkpoint"
"""Name of this work in warnings and in the report."""
SUPERSEDED_MANIFEST_NAME = "hfscale_manifest.superseded.json"
_ATTEMPTS = 5
_FIRST_PAUSE_S = 1.0  # each later pause is twice as long: 15 s in all
_FEATURES = dict.fromkeys(("s3", "s3a"), "s3:// remote checkpoints")
_FEATURES |= dict.fromkeys(("gs", "gcs"), "gs:// remote checkpoints")

Result = TypeVar("Result")


class RemoteStore:
    """The checkpoints of one run in a remote folder.

    Args:
        url (`str`): URL of the folder, such as `s3://bucket/run` or `hf://buckets/USER/BUCKET/run`. Credentials and
            endpoints come from the provider's usual environment variables or files.
        attempts (`int`): number of times each operation is tried before it fails.
        first_pause_s (`float`): seconds before the second attempt; each later pause is twice as long.

    Raises:
        ParameterError: the URL is not valid, has an unknown protocol, or contains credentials.
        MissingDependencyError: the package for this protocol is not installed.
    """

    def __init__(
        self, url: str, *, attempts: int = _ATTEMPTS, first_pause_s: float = _FIRST_PAUSE_S
    ) -> None:
        self.url = url.rstrip("/")
        self._attempts = attempts
        self._first_pause_s = first_pause_s
        self._fs, self._root = _open(self.url)
        self._without_state: set[int] = set()

    def check(self) -> None:
        """Check what only the store knows: that a bucket of the hub exists and admits the token.

        Raises:
            UsageError: it does not.
            StorageError: the store cannot be read.
        """
        if isinstance(self._fs, HubBucket):
            self._retry("read", self._fs.check)

    def committed_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints in the store, in ascending order.

        Raises:
            StorageError: the store cannot be read.
        """
        return self._retry("read", self._committed_steps)

    def upload(self, checkpoint: Path) -> None:
        """Copy a committed checkpoint to the store, its manifest last; a copy of the same step is replaced.

        Args:
            checkpoint (`Path`): the local folder `checkpoint-N`. Its name is also the name of the copy.

        Raises:
            StorageError: all attempts to write to the store failed. An incomplete copy has no manifest and is ignored.
            CheckpointError: the local manifest is missing or invalid, or the checkpoint was saved again meanwhile.
            FileNotFoundError: a local file of the checkpoint no longer exists.
        """
        manifest = read_manifest(checkpoint)
        content = (checkpoint / MANIFEST_NAME).read_bytes()
        names = (*manifest.files, MANIFEST_NAME)
        before = _identities(checkpoint, names)
        folder = f"{self._root}/{checkpoint.name}"
        self._retry("written", partial(self._remove, f"{folder}/{MANIFEST_NAME}"))
        for name, record in manifest.files.items():
            self._retry("written", partial(self._put, checkpoint, name, record.bytes))
        if _identities(checkpoint, names) != before:
            raise CheckpointError(f"{checkpoint.name} was saved again while it was copied")
        self._retry("written", partial(self._fs.pipe_file, f"{folder}/{MANIFEST_NAME}", content))

    def download(self, step: int, output_dir: Path, folder: Path) -> Path:
        """Fetch the checkpoint of `step`, compare it with its manifest and move it to `output_dir/checkpoint-N`.

        Local checkpoints of this step and of later steps are archived first.

        Args:
            step (`int`): optimizer step of the checkpoint in the store.
            output_dir (`Path`): output directory of the run.
            folder (`Path`): folder on the same file system, into which the files are downloaded first.

        Returns:
            `Path`: the local path of the checkpoint.

        Raises:
            StorageError: the store cannot be read.
            CheckpointError: the manifest is invalid, or the downloaded files do not match it.
            FileNotFoundError: the store has no checkpoint of this step, or lacks one of its files.
        """
        name = f"checkpoint-{step}"
        temporary = folder / name
        temporary.mkdir(parents=True, exist_ok=True)
        self._retry("read", partial(self._get, name, MANIFEST_NAME, temporary))
        manifest = read_manifest(temporary)  # rejects names that lead out of the folder
        for file in manifest.files:
            self._retry("read", partial(self._get, name, file, temporary))
        verify(temporary)
        # Of this step or later, and none of them good
        for moved in archive(output_dir, after_step=step - 1):
            logger.info("archived in favour of the checkpoint from %s: %s", self.url, moved)
        return temporary.rename(output_dir / name)

    def rotate(
        self, *, limit: int | None, keep: str | None = None, temporary: Collection[int] = ()
    ) -> list[int]:
        """Delete the oldest checkpoints beyond `limit`, as `store.rotate` does locally.

        Args:
            limit (`int`, *optional*): checkpoints to keep, at least 1; None: all that are not temporary.
            keep (`str`, *optional*): name of the best checkpoint.
            temporary (`Collection[int]`): the steps of the temporary checkpoints.

        Returns:
            `list[int]`: the steps of the deleted checkpoints.

        Raises:
            StorageError: the store cannot be read, or a deletion failed in all attempts.
        """
        steps = self.committed_steps()
        best = next((step for step in steps if f"checkpoint-{step}" == keep), None)
        to_delete = excess_steps(steps, limit=limit, best=best, temporary=temporary)
        for step in to_delete:
            folder = f"{self._root}/checkpoint-{step}"
            self._retry("written", partial(self._remove, f"{folder}/{MANIFEST_NAME}"))
            self._retry("written", partial(self._fs.rm, folder, recursive=True))
        return to_delete

    def drop_states(self, *, limit: int, keep: str | None = None) -> list[int]:
        """Delete the training state of all but the newest checkpoints, as `retention.drop_states` does locally.

        Args:
            limit (`int`): number of checkpoints that keep it, at least 1.
            keep (`str`, *optional*): name of the best checkpoint, which keeps it too.

        Returns:
            `list[int]`: the steps of the checkpoints that have lost it.

        Raises:
            StorageError: the store cannot be read, or a deletion failed in all attempts.
            CheckpointError: a manifest is invalid.
        """
        steps = self.committed_steps()
        kept = next((step for step in steps if f"checkpoint-{step}" == keep), None)
        older = steps_without_state(steps, limit=limit, best=kept)
        dropped = [
            step for step in older if step not in self._without_state and self._drop_state(step)
        ]
        self._without_state.update(older)
        return dropped

    def _drop_state(self, step: int) -> bool:
        name = f"checkpoint-{step}"
        with tempfile.TemporaryDirectory() as folder:
            self._retry("read", partial(self._get, name, MANIFEST_NAME, Path(folder)))
            manifest = read_manifest(folder)
        files = state_files(manifest)
        if not files:
            return False
        content = without_state(manifest).to_json().encode()
        target = f"{self._root}/{name}"
        self._retry("written", partial(self._fs.pipe_file, f"{target}/{MANIFEST_NAME}", content))
        for file in files:
            self._retry("written", partial(self._remove, f"{target}/{file}"))
        return True

    def archive(self, *, after_step: int) -> list[int]:
        """Rename the manifests of later steps than `after_step`, which this run will write again.

        The other files of these checkpoints stay in the store.

        Args:
            after_step (`int`): optimizer step at which the run starts.

        Returns:
            `list[int]`: the steps of the archived checkpoints.

        Raises:
            StorageError: the store cannot be read, or a manifest could not be renamed in any attempt.
        """
        later = [step for step in self.committed_steps() if step > after_step]
        self._without_state.difference_update(later)
        for step in reversed(later):  # the newest first, as `store.archive`
            folder = f"{self._root}/checkpoint-{step}"
            source = f"{folder}/{MANIFEST_NAME}"
            target = f"{folder}/{SUPERSEDED_MANIFEST_NAME}"
            self._retry("written", partial(self._fs.mv, source, target))
        return later

    def _committed_steps(self) -> list[int]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        steps = []
        for path in found:
            match = CHECKPOINT_NAME.fullmatch(path.rstrip("/").rsplit("/", 1)[-1])
            if match and self._fs.exists(f"{self._root}/{match[0]}/{MANIFEST_NAME}"):
                steps.append(int(match[1]))
        return sorted(steps)

    def _put(self, checkpoint: Path, name: str, size: int) -> None:
        target = f"{self._root}/{checkpoint.name}/{name}"
        self._fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
        self._fs.put_file(str(checkpoint / name), target)
        self._fs.invalidate_cache(target.rsplit("/", 1)[0])
        if (stored := self._fs.size(target)) != size:
            raise OSError(f"{name} has {stored} bytes there, not {size}")

    def _get(self, checkpoint: str, name: str, folder: Path) -> None:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        self._fs.get_file(f"{self._root}/{checkpoint}/{name}", str(target))

    def _remove(self, path: str) -> None:
        self._fs.invalidate_cache(path.rsplit("/", 1)[0])
        if self._fs.exists(path):
            self._fs.rm_file(path)

    def _retry(self, what: str, operation: Callable[[], Result]) -> Result:
        """Call `operation` until it succeeds: each store has its own exceptions, and most failures are temporary."""
        for attempt in range(self._attempts):
            try:
                return operation()
            except (FileNotFoundError, UsageError, *PROGRAM_ERRORS):
                raise
            except Exception as error:
                if attempt == self._attempts - 1:
                    raise StorageError(
                        f"{self.url} could not be {what}: {redacted_message(error)}"
                    ) from None
                time.sleep(self._first_pause_s * 2**attempt)
        raise AssertionError("unreachable")


def _identities(checkpoint: Path, names: Collection[str]) -> list[tuple[int, int, int]]:
    """Return what changes when a file of a checkpoint is replaced."""
    found = [(checkpoint / name).stat() for name in names]
    return [(one.st_ino, one.st_mtime_ns, one.st_size) for one in found]


def _open(url: str) -> tuple[Any, str]:
    protocol, separator, rest = url.partition("://")
    if not separator or not rest:
        raise ParameterError(
            "remote",
            url,
            "give a URL like s3://bucket/run, hf://buckets/USER/BUCKET/run or file:///path",
        )
    if "@" in rest.split("/", 1)[0] or "?" in rest:
        rule = (
            "it has credentials or options in it, which belong into the environment or the provider's own file: give "
            "only the bucket and the path"
        )
        raise ParameterError("remote", f"{protocol}://…", rule)
    if protocol == "hf":
        bucket = HubBucket(url)
        return bucket, bucket.root
    from fsspec.core import url_to_fs

    try:
        filesystem, root = url_to_fs(url)
    except ImportError:
        if protocol in _FEATURES:
            require(_FEATURES[protocol])
        raise MissingDependencyError(
            f"remote {url}: install the fsspec package for {protocol}://"
        ) from None
    except ValueError:
        rule = f"fsspec does not know the protocol {protocol}://: use s3, gs, hf, file or memory"
        raise ParameterError("remote", url, rule) from None
    return filesystem, root.rstrip("/")


def redacted_message(error: Exception) -> str:
    """Return the error in one line of at most 400 characters, without credentials that a store's error may quote."""
    text = " ".join(str(error).split())
    shown = (
        text
        if isinstance(error, StorageError | CheckpointError)
        else f"{type(error).__name__}: {text}"
    )
    return redact(shown)[:400]


class Uploader:
    """Copies checkpoints to a remote store in a background thread, the newest first.

    If a copy fails, training continues, and the next checkpoint is copied as usual. Failures are counted, and a
    warning is repeated at most every few minutes.

    Args:
        store (`RemoteStore`): the store.
        limit (`int`, *optional*): number of checkpoints to keep in the store; None keeps all.
        links (`Path`): a folder on the run's file system. Each checkpoint that is offered is hard-linked in a folder
            of its own there before it is copied, so that neither rotation nor another save of the same step changes
            its files while they are being copied.
        state_limit (`int`, *optional*): number of them that keep their training state; None: all.
    """

    def __init__(
        self,
        store: RemoteStore,
        *,
        limit: int | None,
        links: Path,
        state_limit: int | None = None,
    ) -> None:
        self.store = store
        self.limit = limit
        self.state_limit = state_limit
        self._links = links
        self._offers = 0
        self._next: tuple[Path, str | None, Collection[int]] | None = None
        self._changed = threading.Condition()
        self._busy = False
        self.last_uploaded: str | None = None
        """Name of the newest checkpoint that this process has copied completely."""
        self.last_upload_s = 0.0
        """Seconds that the last copy took; 0 before the first."""

    def offer(
        self, checkpoint: Path, best: str | None = None, temporary: Collection[int] = ()
    ) -> None:
        """Queue `checkpoint` for copying. It replaces one that is still waiting, because only the newest is needed.

        Args:
            checkpoint (`Path`): a committed checkpoint.
            best (`str`, *optional*): name of the best checkpoint, which rotation leaves in the store.
            temporary (`Collection[int]`): the steps of the temporary checkpoints.
        """
        self._offers += 1
        try:
            linked = _link(checkpoint, self._links / str(self._offers))
        except CheckpointError as error:
            count_failure(COPYING, self.store.url, error)
            return
        with self._changed:
            waiting = self._next
            self._next = (linked, best, temporary)
            if not self._busy:
                self._busy = True
                threading.Thread(target=self._work, name="hfscale-upload", daemon=True).start()
        if waiting is not None and waiting[0] != linked:  # equal where files cannot be linked
            logger.info(
                "%s is not copied to %s: %s is newer and is copied instead",
                waiting[0].name,
                self.store.url,
                checkpoint.name,
            )
            self._unlink(waiting[0])

    @property
    def expected_s(self) -> float:
        """Estimated seconds until a checkpoint that were offered now would be in the store, from the last copy."""
        return self.last_upload_s * (2 if self._busy else 1)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being copied, and return whether that was reached in time.

        Args:
            timeout_s (`float`, *optional*): longest time to wait, in seconds; None waits without a limit.

        Returns:
            `bool`: True if nothing is being copied, False if a copy is still in progress after `timeout_s` seconds.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                task = self._next
                self._next = None
                if task is None:
                    self._busy = False
                    self._changed.notify_all()
                    return
            self._copy(*task)

    def _copy(self, checkpoint: Path, best: str | None, temporary: Collection[int]) -> None:
        started_at = time.monotonic()
        try:
            self.store.upload(checkpoint)
            self.last_uploaded = checkpoint.name
            self.last_upload_s = time.monotonic() - started_at
            logger.debug("%s has been copied to %s", checkpoint.name, self.store.url)
            if self.limit is not None or temporary:
                self.store.rotate(limit=self.limit, keep=best, temporary=temporary)
            if self.state_limit is not None:
                self.store.drop_states(limit=self.state_limit, keep=best)
        except Exception as error:
            if isinstance(error, PROGRAM_ERRORS):
                logger.warning(
                    "%s was not copied because of a defect", checkpoint.name, exc_info=True
                )
            count_failure(
                COPYING,
                self.store.url,
                StorageError(f"{checkpoint.name}: {redacted_message(error)}"),
            )
        finally:
            self._unlink(checkpoint)

    def _unlink(self, checkpoint: Path) -> None:
        if self._links in checkpoint.parents:
            shutil.rmtree(checkpoint.parent, ignore_errors=True)


def _link(checkpoint: Path, links: Path) -> Path:
    """Hard-link the files of `checkpoint` in a new folder in `links`; return it, or `checkpoint` if links fail."""
    target = links / checkpoint.name
    try:
        manifest = read_manifest(checkpoint)
        for name in (*manifest.files, MANIFEST_NAME):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).hardlink_to(checkpoint / name)
    except OSError:
        shutil.rmtree(links, ignore_errors=True)
        return checkpoint
    return target


def fetch_newer(
    store: RemoteStore, output_dir: Path, local: Path | None, exchanges: Exchanges
) -> Path | None:
    """Fetch the newest complete checkpoint of the store if it is newer than the local one, and return its local path.

    Every rank must call it. Rank 0 downloads first, then the first rank of each other node whose `output_dir` does not
    contain the complete checkpoint, so on shared storage it is downloaded once. If the store cannot be read and there
    is a local checkpoint, a warning is logged.

    Args:
        store (`RemoteStore`): the store.
        output_dir (`Path`): output directory of the run.
        local (`Path`, *optional*): the newest local checkpoint that the run can resume from; None: there is none.
        exchanges (`Exchanges`): between all ranks.

    Returns:
        `Path` or `None`: the checkpoint in `output_dir`; None if none is newer.

    Raises:
        UsageError: the hub has no such bucket, or refuses the token; raised on every rank.
        StorageError: the store cannot be read and there is no local checkpoint, so the run would restart from scratch
            although it may have checkpoints; or a download failed. Raised on every rank.
        CheckpointError: a rank does not see what was fetched; raised on every rank.
    """
    try:
        step = exchanges.on_rank_0(
            "fetch a newer checkpoint", lambda: _fetch_newer(store, output_dir, local)
        )
        if step is None:
            return None
        fetched = output_dir / f"checkpoint-{step}"
        leads_node = exchanges.rank != 0 and os.environ.get("LOCAL_RANK") == "0"
        with exchanges.agreed("fetch on each node"):
            if leads_node and not _is_good(fetched):
                store.download(step, output_dir, output_dir / UNFINISHED / "download")
    except UsageError:
        raise
    except (HfScaleError, OSError) as error:
        raise StorageError(
            f"{redacted_message(error)}; make the store readable, or start without the remote"
        ) from None
    check_visible(fetched / MANIFEST_NAME, exchanges)
    return fetched


def fetch_best(
    store: RemoteStore, output_dir: Path, checkpoint: Path, exchanges: Exchanges
) -> None:
    """Fetch the best checkpoint that the state of `checkpoint` names, where it is in the store and not on the disk.

    The final model needs it, and Trainer forgets a best checkpoint that is not there. Every rank must call it.

    Args:
        store (`RemoteStore`): the store.
        output_dir (`Path`): output directory of the run.
        checkpoint (`Path`): the checkpoint to resume from.
        exchanges (`Exchanges`): between all ranks.

    Raises:
        StorageError: a download failed; raised on every rank.
    """
    step = exchanges.on_rank_0(
        "best checkpoint", lambda: _missing_best(store, output_dir, checkpoint)
    )
    if step is None:
        return
    best = output_dir / f"checkpoint-{step}"
    leads_node = exchanges.rank == 0 or os.environ.get("LOCAL_RANK") == "0"
    try:
        with exchanges.agreed("fetch the best checkpoint"):
            if leads_node and not _is_good(best):
                store.download(step, output_dir, output_dir / UNFINISHED / "download")
    except (HfScaleError, OSError) as error:
        raise StorageError(
            f"the best checkpoint, {best.name}, cannot be fetched: {redacted_message(error)}; make the store "
            "readable, or start without the remote"
        ) from None
    logger.info("fetched %s, the best checkpoint, from %s", best.name, store.url)


def _missing_best(store: RemoteStore, output_dir: Path, checkpoint: Path) -> int | None:
    """Return the step of a best checkpoint that is in the store alone; None if there is none."""
    step = best_step_of(checkpoint)
    if step is None or (output_dir / f"checkpoint-{step}").is_dir():
        return None
    try:
        return step if step in store.committed_steps() else None
    except StorageError:
        return None  # which has been reported when a newer checkpoint was looked for


def _fetch_newer(store: RemoteStore, output_dir: Path, local: Path | None) -> int | None:
    """Fetch a checkpoint that is newer than the `local` one, and return its step, or None if there is none.

    Raises:
        StorageError: the store cannot be read, and there is no usable local checkpoint.
        CheckpointError: none of the store's checkpoints is good, and there is no usable local checkpoint.
    """
    local_step = checkpoint_step(local) if local is not None else -1
    try:
        store.check()
        steps = store.committed_steps()
    except StorageError as error:
        if local is None:
            raise
        logger.warning("%s; using the newest local checkpoint", error)
        return None
    for step in reversed([step for step in steps if step > local_step]):
        try:
            fetched = store.download(step, output_dir, output_dir / UNFINISHED / "download")
        except (CheckpointError, FileNotFoundError) as error:
            logger.warning("checkpoint in %s skipped: %s", store.url, redacted_message(error))
            continue
        logger.info("fetched %s from %s", fetched.name, store.url)
        return step
    if steps and local is None:
        raise CheckpointError(
            f"{store.url} has checkpoints, and none of them is complete and unchanged"
        )
    return None


def _is_good(checkpoint: Path) -> bool:
    try:
        verify(checkpoint)
    except CheckpointError:
        return False
    return True
