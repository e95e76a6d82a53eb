"""Writes files that a user may edit, and never replaces one that was edited.

The SHA-256 of each file is kept in comments of `launch.sh`, which is always among them.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from hfscale.core.disk_errors import writing
from hfscale.core.spelling import spelled
from hfscale.errors import UsageError

LAUNCH_FILE = "launch.sh"
"""The file with the hashes of all files, its own included."""
_RECORD = re.compile(r"^# sha256 ([0-9a-f]{64}) (\S+)\n", re.MULTILINE)
_NOTE = "# Files with these hashes are replaced when they are written again; one that was changed is kept:\n"


def write_files(folder: Path, files: Mapping[str, str], *, asked: str, force: bool = False) -> None:
    """Write files into a folder, or none of them if the user has changed one that would be replaced.

    Args:
        folder (`Path`): the folder; it is created if it does not exist.
        files (`Mapping[str, str]`): name -> text; one of them is `launch.sh`, a shell script.
        asked (`str`): what the user gave, such as `--emit runs/plan`, for errors.
        force (`bool`): whether files are replaced that were changed, or that were not written by this function.

    Raises:
        UsageError: a file that would be replaced was changed, or a name in the files is no text in UTF-8.
        StorageError: the folder cannot be written.
    """
    contents = {name: _encode(text, asked) for name, text in files.items()}
    contents[LAUNCH_FILE] = _with_hashes(contents)
    fix = "give another folder"
    if not force:
        with writing(asked, fix):
            check_unchanged(folder, contents, asked=asked)
    with writing(asked, fix):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        (folder / LAUNCH_FILE).chmod(0o755)


def check_unchanged(folder: Path, contents: Mapping[str, bytes | None], *, asked: str) -> None:
    """Check that no file of a folder is replaced that differs from what `write_files` wrote there.

    Args:
        folder (`Path`): the folder.
        contents (`Mapping[str, bytes | None]`): name -> new content; None if the file is to be deleted.
        asked (`str`): what the user gave, for the error.

    Raises:
        UsageError: there is such a file; the message names it.
    """
    written = _read_hashes(folder / LAUNCH_FILE)
    for name, content in contents.items():
        path = folder / name
        if not path.is_file():
            continue
        found = path.read_bytes()
        if name == LAUNCH_FILE:
            found_hash = _hash(_RECORD.sub("", found.decode("utf-8", "replace")).encode("utf-8"))
        else:
            found_hash = _hash(found)
        if found != content and written.get(name) != found_hash:
            fix = f"give another folder, or {spelled('force', True)} to replace it"
            raise UsageError(f"{asked}: {path} was changed, or hfscale did not write it: {fix}")


def _encode(text: str, asked: str) -> bytes:
    """Return a text as bytes; names of files that are no UTF-8 cannot be written into one."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(
            f"{asked!a}: a name in the files is not UTF-8 text: rename the model's folder, or give another folder"
        ) from None


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _with_hashes(contents: Mapping[str, bytes]) -> bytes:
    """Return launch.sh with the hashes below its first line; its own is that of the text without them."""
    first, _, rest = contents[LAUNCH_FILE].decode("utf-8").partition("\n")
    without = f"{first}\n{_NOTE}{rest}"
    hashes = {name: _hash(content) for name, content in contents.items()}
    hashes[LAUNCH_FILE] = _hash(without.encode("utf-8"))
    records = "".join(f"# sha256 {found} {name}\n" for name, found in hashes.items())
    return f"{first}\n{_NOTE}{records}{rest}".encode()


def _read_hashes(launch_file: Path) -> dict[str, str]:
    """Return the hashes that an earlier `write_files` has kept; none if the file does not exist."""
    if not launch_file.is_file():
        return {}
    text = launch_file.read_text(encoding="utf-8", errors="replace")
    return {name: found for found, name in _RECORD.findall(text)}
