"""The averaged weights of a checkpoint, which any strategy on any number of ranks reads as they are.

    hfscale_average/average.json        how the average was made: the content of `AverageMetadata`
    hfscale_average/.metadata, *.distcp a torch distributed checkpoint (DCP) with tensors in float32

The tensors are `average.<parameter>`, or `snapshot.<number>.<parameter>` for the mean of the last snapshots. Names are
those of the trained parameters in the undistributed model, without the wrappers of adapters, as in
`hfscale.checkpoint.formats.parallel`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hfscale.checkpoint.formats.dcp import tensor_ref
from hfscale.checkpoint.formats.view import TensorRef, check_names
from hfscale.checkpoint.manifest import checkpoint_files
from hfscale.checkpoint.pickles import read_dcp_metadata
from hfscale.core.text_files import read_json
from hfscale.errors import CheckpointError

FOLDER = "hfscale_average"
"""Folder of a checkpoint that holds the average."""
METADATA_NAME = "average.json"
EMA = "average"
"""Group of the tensors of an exponential moving average."""
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class AverageMetadata:
    """How the average of a checkpoint was made."""

    decay: float | None = None
    """The decay of an exponential moving average; None: it is the mean of snapshots."""
    every_steps: int
    """Optimizer steps between two updates."""
    updates: int
    """Updates so far."""
    snapshots: tuple[int, ...] = ()
    """The steps of the snapshots that are kept, the oldest first."""
    evaluated: bool = False
    """Whether the evaluations of the run were made with the averaged weights."""

    @property
    def groups(self) -> list[str]:
        """Return the prefixes of the tensors, each of which stands for a complete set of weights."""
        if self.decay is not None:
            return [EMA] if self.updates else []
        return [snapshot_group(number) for number in range(len(self.snapshots))]

    def to_json(self) -> str:
        """Return the content of the file."""
        return json.dumps({"format": _FORMAT, **asdict(self)}) + "\n"


def snapshot_group(number: int) -> str:
    """Return the group of the tensors of a snapshot.

    Args:
        number (`int`): its number, from 0, the oldest first.
    """
    return f"snapshot.{number}"


def read_average_metadata(checkpoint: Path) -> AverageMetadata | None:
    """Return how the average of a checkpoint was made; None if the checkpoint has no average.

    Args:
        checkpoint (`Path`): the folder of the checkpoint.

    Raises:
        CheckpointError: the file is broken, or another version of hfscale has written it.
    """
    path = checkpoint / FOLDER / METADATA_NAME
    try:
        fields = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    try:
        if fields["format"] != _FORMAT:
            raise CheckpointError(
                f"{path} has format {fields['format']}, this version of hfscale reads {_FORMAT}"
            )
        metadata = AverageMetadata(
            decay=None if fields["decay"] is None else float(fields["decay"]),
            every_steps=int(fields["every_steps"]),
            updates=int(fields["updates"]),
            snapshots=tuple(int(step) for step in fields["snapshots"]),
            evaluated=fields["evaluated"] is True,
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__} {error}") from None
    is_decay = metadata.decay is None or 0 < metadata.decay < 1
    if not is_decay or metadata.updates < 0:
        raise CheckpointError(f"{path} has a decay or a number of updates that is out of range")
    return metadata


def stored_groups(
    checkpoint: Path, metadata: AverageMetadata
) -> list[tuple[str, dict[str, TensorRef]]]:
    """Return the stored sets of weights, each with its group and its tensors by the names of the parameters.

    Args:
        checkpoint (`Path`): the folder of the checkpoint.
        metadata (`AverageMetadata`): what `read_average_metadata` returned.

    Raises:
        CheckpointError: the files are broken, or the sets have other names or shapes than each other.
    """
    if not metadata.groups:
        return []
    folder = checkpoint / FOLDER
    entries = read_dcp_metadata(folder)
    found = []
    for group in metadata.groups:
        refs = {}
        for name, entry in entries.items():
            if name.startswith(f"{group}.") and entry.shape is not None:
                refs[name.removeprefix(f"{group}.")] = tensor_ref(folder, name, entry)
        check_names(refs)
        found.append((group, refs))
    first = _shapes(found[0][1])
    if not first or any(_shapes(refs) != first for _, refs in found):
        raise CheckpointError(f"{folder} does not hold the weights that its {METADATA_NAME} names")
    return found


def _shapes(refs: Mapping[str, TensorRef]) -> dict[str, tuple[int, ...]]:
    return {name: ref.shape for name, ref in refs.items()}


def average_files(checkpoint: Path) -> list[str]:
    """Return the files of the average, by their paths in the checkpoint; empty if there is none.

    Args:
        checkpoint (`Path`): the folder of the checkpoint.
    """
    return [name for name in checkpoint_files(checkpoint) if name.startswith(f"{FOLDER}/")]
