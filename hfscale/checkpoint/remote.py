"""A second home for committed checkpoints: any store that fsspec reaches (s3://, gs://, file://, memory:// …).

The protocol is that of the disk: files first, the manifest last, so that its presence is the commit; and a deletion
takes the manifest first. What comes back is compared with the manifest before it gets its name.
"""

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hfscale.checkpoint.manifest import MANIFEST_NAME, read_manifest
from hfscale.checkpoint.store import archive, verify
from hfscale.errors import CheckpointError, MissingDependencyError, StorageError, UsageError
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

SUPERSEDED_MANIFEST_NAME = "hfscale_manifest.superseded.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_ATTEMPTS = 5
_FIRST_PAUSE_S = 1.0  # then twice as long each time: 15 s in all
# Credentials belong into the environment or the provider's own file; those that an error quotes are not repeated.
_SECRET = re.compile(
    r"(?i)((?:key|secret|token|signature|password|credential)[\w-]*['\"]?\s*[=:]\s*['\"]?)[^\s'\"&,]+"
)
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}

Result = TypeVar("Result")


class RemoteStore:
    """The checkpoints of one run in a remote folder.

    Args:
        url (`str`): the folder, such as `s3://bucket/run`. Credentials and endpoints are the provider's usual
            environment variables or files.
        attempts (`int`): tries of each action before it counts as failed.
        first_pause_s (`float`): seconds before the second try; each later pause is twice as long.

    Raises:
        UsageError: not a URL, of an unknown kind, or with credentials in it.
        MissingDependencyError: the package for that kind of store is not installed.
    """

    def __init__(self, url: str, *, attempts: int = _ATTEMPTS, first_pause_s: float = _FIRST_PAUSE_S) -> None:
        self.url = url.rstrip("/")
        self._attempts, self._first_pause_s = attempts, first_pause_s
        self._fs, self._root = _open(self.url)

    def committed_steps(self) -> list[int]:
        """Steps of the checkpoints that are there whole, rising.

        Raises:
            StorageError: the store cannot be read.
        """
        return self._retry("read", self._committed_steps)

    def upload(self, checkpoint: Path) -> None:
        """Copy a committed checkpoint there, its manifest last. One of the same step is replaced.

        Raises:
            StorageError: the store refuses, after all tries; the checkpoint there then counts for nothing.
            FileNotFoundError: a file of the checkpoint is gone here.
        """
        manifest = read_manifest(checkpoint)
        folder = f"{self._root}/{checkpoint.name}"
        self._retry("written", partial(self._remove, f"{folder}/{MANIFEST_NAME}"))
        for name, record in manifest.files.items():
            self._retry("written", partial(self._put, checkpoint, name, record.bytes))
        self._retry("written", partial(self._put, checkpoint, MANIFEST_NAME, None))

    def download(self, step: int, output_dir: Path, folder: Path) -> Path:
        """Fetch the checkpoint of `step`, compare it with its manifest and move it to `output_dir/checkpoint-N`.

        Args:
            folder (`Path`): where it is put together; on the same file system.

        Raises:
            StorageError: the store cannot be read.
            CheckpointError: what came does not match its manifest.
        """
        name = f"checkpoint-{step}"
        temporary = folder / name
        temporary.mkdir(parents=True, exist_ok=True)
        self._retry("read", partial(self._get, name, MANIFEST_NAME, temporary))
        manifest = read_manifest(temporary)  # refuses names that lead out of the folder
        for file in manifest.files:
            self._retry("read", partial(self._get, name, file, temporary))
        verify(temporary)
        for moved in archive(output_dir, after_step=step - 1):  # of this step or later, and none of them whole
            logger.info("set aside for the checkpoint from %s: %s", self.url, moved)
        return temporary.rename(output_dir / name)

    def rotate(self, *, limit: int, keep: str | None = None) -> list[int]:
        """Delete the oldest checkpoints beyond `limit` but the one named `keep`; returns their steps.

        Raises:
            StorageError: the store refuses.
        """
        steps = self.committed_steps()
        to_delete = [step for step in steps[: max(len(steps) - max(limit, 1), 0)] if f"checkpoint-{step}" != keep]
        for step in to_delete:
            folder = f"{self._root}/checkpoint-{step}"
            self._retry("written", partial(self._remove, f"{folder}/{MANIFEST_NAME}"))
            self._retry("written", partial(self._fs.rm, folder, recursive=True))
        return to_delete

    def archive(self, *, after_step: int) -> list[int]:
        """Rename the manifests of later steps, which this run will write anew; the files stay. Returns the steps.

        Raises:
            StorageError: the store refuses.
        """
        later = [step for step in self.committed_steps() if step > after_step]
        for step in later:
            folder = f"{self._root}/checkpoint-{step}"
            source, target = f"{folder}/{MANIFEST_NAME}", f"{folder}/{SUPERSEDED_MANIFEST_NAME}"
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
            match = _CHECKPOINT.fullmatch(path.rstrip("/").rsplit("/", 1)[-1])
            if match and self._fs.exists(f"{self._root}/{match[0]}/{MANIFEST_NAME}"):
                steps.append(int(match[1]))
        return sorted(steps)

    def _put(self, checkpoint: Path, name: str, size: int | None) -> None:
        target = f"{self._root}/{checkpoint.name}/{name}"
        self._fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
        self._fs.put_file(str(checkpoint / name), target)
        self._fs.invalidate_cache(target.rsplit("/", 1)[0])
        if size is not None and (there := self._fs.size(target)) != size:
            raise OSError(f"{name} has {there} bytes there, not {size}")

    def _get(self, checkpoint: str, name: str, folder: Path) -> None:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        self._fs.get_file(f"{self._root}/{checkpoint}/{name}", str(target))

    def _remove(self, path: str) -> None:
        self._fs.invalidate_cache(path.rsplit("/", 1)[0])
        if self._fs.exists(path):
            self._fs.rm_file(path)

    def _retry(self, what: str, action: Callable[[], Result]) -> Result:
        """Stores fail in ways of their own (each library has its exceptions), and most of them pass."""
        for attempt in range(self._attempts):
            try:
                return action()
            except FileNotFoundError:
                raise
            except Exception as error:
                if attempt == self._attempts - 1:
                    raise StorageError(f"{self.url} could not be {what}: {redacted(error)}") from None
                time.sleep(self._first_pause_s * 2**attempt)
        raise AssertionError("unreachable")


def _open(url: str) -> tuple[Any, str]:
    protocol, separator, rest = url.partition("://")
    if not separator or not rest:
        raise UsageError(
            f"the remote '{url}' is no URL: give one like s3://bucket/run, gs://bucket/run or file:///path"
        )
    if "@" in rest.split("/", 1)[0] or "?" in rest:
        raise UsageError(
            f"the remote {protocol}://… has credentials or options in it: put those into the environment or the "
            "provider's own file, and give the bucket and path alone"
        )
    from fsspec.core import url_to_fs

    try:
        filesystem, root = url_to_fs(url)
    except ImportError:
        extra = _EXTRAS.get(protocol)
        package = f'"hfscale[{extra}]"' if extra else f"the fsspec package for {protocol}://"
        raise MissingDependencyError(f"the remote {url} needs pip install {package}") from None
    except ValueError:
        raise UsageError(f"the remote {url}: fsspec knows no {protocol}://; try s3, gs, file or memory") from None
    return filesystem, root.rstrip("/")


def redacted(error: Exception) -> str:
    """An error in one line, without the credentials that its words may quote."""
    words = " ".join(str(error).split())
    shown = words if isinstance(error, StorageError | CheckpointError) else f"{type(error).__name__}: {words}"
    return _SECRET.sub(r"\1…", shown)[:400]
