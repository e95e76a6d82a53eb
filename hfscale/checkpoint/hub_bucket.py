"""A bucket of the Hugging Face hub as a store of checkpoints, through the public methods of `HfApi`.

`HfFileSystem` reaches buckets too, but copies each file to a temporary file before it uploads it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hfscale.core.versions import require
from hfscale.errors import ParameterError

FEATURE = "hf:// remote checkpoints"


class HubBucket:
    """The files of one bucket, by the names of those methods of fsspec that `RemoteStore` calls.

    A path is that of a file in the bucket; slashes at its ends do not count. Folders exist only as parts of paths.

    Args:
        url (`str`): `hf://buckets/USER/BUCKET` or a folder below it. The token is that of `hf auth login` or HF_TOKEN,
            the address of the hub that of HF_ENDPOINT.

    Raises:
        ParameterError: the URL is not one of a bucket, there is no token, or HF_HUB_OFFLINE forbids requests.
        MissingDependencyError: the installed huggingface_hub is too old, or hf_xet is not installed.
    """

    def __init__(self, url: str) -> None:
        parts = url.removeprefix("hf://").split("/")
        if len(parts) < 3 or parts[0] != "buckets" or not all(parts):
            raise ParameterError(
                "remote", url, "give a folder of a bucket: hf://buckets/USER/BUCKET/run"
            )
        require(FEATURE)
        from huggingface_hub import HfApi, constants, get_token

        if constants.HF_HUB_OFFLINE:
            raise ParameterError(
                "remote", url, "HF_HUB_OFFLINE is set, so the hub cannot be reached: unset it"
            )
        if get_token() is None:
            rule = "there is no token of the hub: set HF_TOKEN, or log in with `hf auth login`"
            raise ParameterError("remote", url, rule)
        self.url = url
        self.bucket = "/".join(parts[1:3])
        self.root = "/".join(parts[3:])
        self._api = HfApi()

    def check(self) -> None:
        """Check that the hub has the bucket and accepts the token.

        Raises:
            ParameterError: the hub has no such bucket for this token, or refuses the token.
            Exception: the hub does not answer.
        """
        from huggingface_hub.errors import BucketNotFoundError, HfHubHTTPError

        try:
            self._api.bucket_info(self.bucket)
        except HfHubHTTPError as error:
            code = error.response.status_code
            if not isinstance(error, BucketNotFoundError) and code not in (401, 403):
                raise
            rule = (
                f"the hub answers {code}: create the bucket with `hf buckets create {self.bucket}`, or set HF_TOKEN "
                "to a token that may write to it"
            )
            raise ParameterError("remote", self.url, rule) from None

    def ls(self, path: str, *, detail: bool) -> list[str]:
        """Return the paths of the files and folders directly in a folder; `detail` must be False.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        assert not detail
        return [entry.path for entry in self._entries(path, recursive=False)]

    def exists(self, path: str) -> bool:
        """Return whether there is a file with this path."""
        return self._info(path) is not None

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes; None: there is none."""
        info = self._info(path)
        return info.size if info is not None else None

    def makedirs(self, path: str, *, exist_ok: bool) -> None:
        """Do nothing: a folder exists when it has a file."""

    def invalidate_cache(self, path: str | None = None) -> None:
        """Do nothing: nothing is cached."""

    def put_file(self, local: str, path: str) -> None:
        """Upload a local file, and replace what has its path.

        Args:
            local (`str`): the local file.
            path (`str`): its path in the bucket.
        """
        self._batch(add=[(local, path.strip("/"))])

    def pipe_file(self, path: str, content: bytes) -> None:
        """Write a file with the given content.

        Args:
            path (`str`): its path in the bucket.
            content (`bytes`): its content.
        """
        self._batch(add=[(content, path.strip("/"))])

    def get_file(self, path: str, local: str) -> None:
        """Download a file.

        Args:
            path (`str`): its path in the bucket.
            local (`str`): where to write it.

        Raises:
            FileNotFoundError: there is no such file.
        """
        info = self._info(path)
        if info is None:
            raise FileNotFoundError(f"{path.strip('/')} is not in the bucket {self.bucket}")
        with _without_progress_bars():
            self._api.download_bucket_files(self.bucket, [(info, Path(local))])

    def rm_file(self, path: str) -> None:
        """Delete a file."""
        self._batch(delete=[path.strip("/")])

    def rm(self, path: str, *, recursive: bool) -> None:
        """Delete all files below a folder; `recursive` must be True."""
        assert recursive
        self._batch(
            delete=[
                entry.path for entry in self._entries(path, recursive=True) if entry.type == "file"
            ]
        )

    def mv(self, source: str, target: str) -> None:
        """Give a file another path; the hub copies it.

        Args:
            source (`str`): its path.
            target (`str`): its new path.

        Raises:
            FileNotFoundError: there is no such file.
        """
        info = self._info(source)
        if info is None:
            raise FileNotFoundError(f"{source.strip('/')} is not in the bucket {self.bucket}")
        self._batch(copy=[("bucket", self.bucket, info.xet_hash, target.strip("/"))])
        self.rm_file(source)

    def _entries(self, folder: str, *, recursive: bool) -> list[Any]:
        """Return what the hub has below a folder. Its own filter compares characters: `run` also finds `run2/…`."""
        from huggingface_hub.errors import EntryNotFoundError

        folder = folder.strip("/")
        try:
            found = list(
                self._api.list_bucket_tree(self.bucket, folder or None, recursive=recursive)
            )
        except EntryNotFoundError:
            found = []
        below = [entry for entry in found if not folder or entry.path.startswith(f"{folder}/")]
        if folder and not below:
            raise FileNotFoundError(f"{folder} is not in the bucket {self.bucket}")
        return below

    def _info(self, path: str) -> Any | None:
        return next(iter(self._api.get_bucket_paths_info(self.bucket, [path.strip("/")])), None)

    def _batch(self, **operations: Any) -> None:
        with _without_progress_bars():
            self._api.batch_bucket_files(self.bucket, **operations)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Turn the bars of huggingface_hub off, which would appear between the lines of a training's log."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
