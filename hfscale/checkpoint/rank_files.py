"""Small JSON files of a checkpoint that each rank writes for itself: `NAME_RANK.json`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hfscale.core import distributed
from hfscale.core.text_files import read_json
from hfscale.errors import CheckpointError

_Parsed = TypeVar("_Parsed")


def take_json(sources: Mapping[str, Callable[[], dict[str, Any]]]) -> Callable[[Path], None]:
    """Write JSON values of this rank as text, and return the function that writes it into the folder of a checkpoint.

    Args:
        sources (`Mapping`): `Announced.json` of the Trainer's adapter.
    """
    rank = distributed.rank()
    taken = {f"{name}_{rank}.json": json.dumps(source()) for name, source in sources.items()}

    def write(folder: Path) -> None:
        for name, text in taken.items():
            (folder / name).write_text(text, encoding="utf-8")

    return write


def read_checked(path: Path, parse: Callable[[Any], _Parsed]) -> _Parsed:
    """Return what a file of a rank says.

    Args:
        path (`Path`): the file.
        parse (`Callable`): takes the values of the file and returns what they mean; it raises `KeyError`, `TypeError`
            or `ValueError` where they are not what this package writes.

    Raises:
        CheckpointError: the file cannot be read, or `parse` refuses it.
    """
    try:
        return parse(read_json(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = type(error).__name__
        raise CheckpointError(f"{path} cannot be read ({reason}): use another checkpoint") from None


def read_of_rank(
    checkpoint: Path, name: str, parse: Callable[[Any], _Parsed]
) -> tuple[_Parsed, int] | None:
    """Return what the file of this rank says, else that of rank 0, and whose file it is.

    Args:
        checkpoint (`Path`): the folder of the checkpoint.
        name (`str`): the files' name without the rank.
        parse (`Callable`): as for `read_checked`.

    Returns:
        `tuple` or `None`: what `parse` returned, and the rank; None if neither has a file, as in checkpoints of older
        versions.

    Raises:
        CheckpointError: the file cannot be read, or `parse` refuses it.
    """
    for rank in (distributed.rank(), 0):
        path = checkpoint / f"{name}_{rank}.json"
        if path.is_file():
            return read_checked(path, parse), rank
    return None
