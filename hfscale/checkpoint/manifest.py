"""The manifest of a checkpoint: which files belong to it, their lengths and their hashes.

`checkpoint-N/hfscale_manifest.json` is written after every other file has reached the disk, so its presence is the
commit. It contains

    {"format": 1, "step": N, "strategy": "ddp", "world_size": 2, "global_batch_size": 16,
     "files": {"model.safetensors": {"bytes": 123, "xxh3_128": "…32 hexadecimal digits…"}, …}}

with paths relative to the checkpoint, in POSIX form. Of a natively distributed model it also has the sizes of its
layout: `"layout": {"dp_replicate": 1, "fsdp": 2, "tp": 1, "ep": 2, "pp": 1}`. `identity` says what is trained, as
`hfscale.checkpoint.identity` describes it:

    "identity": {"trainer": {"class": "SFTTrainer"}, "model": {"model_type": "llama", "hidden_size": 4096, …},
     "adapter": {"type": "LORA", "r": 16}, "tokenizer": {"vocab_size": 128000, "content_hash": "…"},
     "data": {"kind": "rows", "rows": 51760, "content_hash": "…"}}

A reader ignores keys that it does not know; a change that it must not ignore has another `format`.
"""

import heapq
import json
import os
import re
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path, PurePosixPath

import xxhash

from hfscale.core.run_files import MANIFEST_NAME
from hfscale.core.text_files import open_regular, read_json
from hfscale.errors import CheckpointError
from hfscale.facts.strategies import facts_of

_TRAINING_STATE = re.compile(r"scheduler\.pt|rng_state(_\d+)?\.pth")
"""Files that Trainer writes unless it saves the model alone."""
_NEEDED = {
    "unsharded": ("optimizer.pt", "scheduler.pt"),
    "parallel": ("scheduler.pt",),  # its optimizer is in the same files as the model
}
"""Files without which no run can resume, by the format of the strategy."""
FORMAT = 1
Identity = dict[str, dict[str, str | int]]
"""What is trained: aspect -> property -> value (`hfscale.checkpoint.identity`)."""
_CHUNK_BYTES = 8 * 2**20
_PLAIN = re.compile(r"[\w.-]{1,64}", re.ASCII)
_OPENING_BYTES = 2**20
"""Bytes that a reader could read in the time that it takes to open a file; about 1 ms on network storage."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Length and hash of one file of a checkpoint."""

    bytes: int
    """Length in bytes."""
    xxh3_128: str
    """XXH3 128-bit digest of the content, 32 hexadecimal digits."""

    @classmethod
    def of(cls, path: Path) -> "FileRecord":
        """Read the file `path` once and return its record."""
        digest = xxhash.xxh3_128()
        length = 0
        with open_regular(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                length += len(chunk)
        return cls(bytes=length, xxh3_128=digest.hexdigest())


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `hfscale_manifest.json`."""

    step: int
    """Optimizer steps taken when the checkpoint was written."""
    strategy: str
    """`single`, `ddp`, `fsdp2`, `zero1`, `zero2`, `zero3`, `parallel` or `native`."""
    world_size: int
    """Number of processes that wrote it."""
    global_batch_size: int
    """Sequences per optimizer step of the run."""
    files: dict[str, FileRecord]
    """Every other file of the checkpoint, by relative POSIX path."""
    layout: dict[str, int] | None = None
    """Sizes with which transformers distributed the model (`native`); None under the other strategies."""
    identity: Identity | None = None
    """What is trained; None where it is not known, as in checkpoints of earlier versions and of plain Trainer."""
    format: int = FORMAT
    """Version of this format."""

    def share(self, number: int, readers: int) -> list[str]:
        """Return the files that one of several readers reads, so that all have about as many bytes to read.

        Each file, the longest first, goes to the reader with the fewest bytes.

        Args:
            number (`int`): the number of the reader, counted from 0.
            readers (`int`): how many there are.
        """
        if readers == 1:
            return list(self.files)
        loads = [(0, reader) for reader in range(readers)]
        names = []
        for name in sorted(self.files, key=lambda name: (-self.files[name].bytes, name)):
            load, reader = loads[0]
            heapq.heapreplace(loads, (load + self.files[name].bytes + _OPENING_BYTES, reader))
            if reader == number:
                names.append(name)
        return names

    def why_model_only(self) -> str | None:
        """Return why no run can resume from the checkpoint although it is whole; None if one can."""
        needed = _NEEDED.get(facts_of(self.strategy).file_format, ())
        missing = [name for name in needed if name not in self.files]
        has_some = any(_TRAINING_STATE.fullmatch(name) for name in self.files)
        if has_some and not missing:
            return None
        if has_some and missing == ["scheduler.pt"]:
            return f"it has no {missing[0]}: no run can resume from it"
        return (
            "it has no optimizer, learning rate schedule and random states, as save_only_model and state_limit "
            "leave it: no run can resume from it"
        )

    def to_json(self) -> str:
        """Return the manifest as indented JSON."""
        fields = asdict(self)
        # Earlier versions of hfscale read manifests without them
        for name in ("layout", "identity"):
            if fields[name] is None:
                del fields[name]
        return json.dumps(fields, indent=1) + "\n"


def read_manifest(checkpoint: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a checkpoint, check it and return it.

    Raises:
        CheckpointError: the manifest is missing, is not JSON, has another format, or names a file outside the
            checkpoint.
    """
    path = Path(checkpoint) / MANIFEST_NAME
    try:
        fields = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint} is incomplete: it has no {MANIFEST_NAME}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    try:
        if fields["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {fields['format']}, this version of hfscale reads {FORMAT}"
            )
        files = {name: FileRecord(**record) for name, record in fields.pop("files").items()}
        known = {field.name for field in dataclass_fields(Manifest)}
        manifest = Manifest(
            files=files, **{name: value for name, value in fields.items() if name in known}
        )
        _check_identity(manifest.identity)
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a manifest: {type(error).__name__} {error}") from None
    _check_types(path, manifest)
    for name in manifest.files:
        _check_file_name(path, name)
    return manifest


def _check_identity(identity: object) -> None:
    """Raise a TypeError unless it is None or maps names to mappings."""
    if identity is None:
        return
    if not isinstance(identity, dict) or not all(
        isinstance(properties, dict) for properties in identity.values()
    ):
        raise TypeError("identity is not a mapping of mappings")


def _check_types(path: Path, manifest: Manifest) -> None:
    """Reject values of another type: the manifest may come from an untrusted source, and reports show what it says."""
    counts = {
        "step": manifest.step,
        "world_size": manifest.world_size,
        "global_batch_size": manifest.global_batch_size,
    }
    if manifest.layout is not None and not isinstance(manifest.layout, dict):
        raise CheckpointError(
            f"{path} is not a manifest: layout is {manifest.layout!r}, and not an object"
        )
    counts |= {f"layout of {axis}": size for axis, size in (manifest.layout or {}).items()}
    counts |= {f"bytes of {name}": record.bytes for name, record in manifest.files.items()}
    for what, value in counts.items():
        if type(value) is not int or value < 0:
            raise CheckpointError(
                f"{path} is not a manifest: {what} is {value!r}, and not a number from 0"
            )
    texts = {
        "strategy": manifest.strategy,
        **{f"hash of {n}": r.xxh3_128 for n, r in manifest.files.items()},
    }
    for what, text in texts.items():
        if not isinstance(text, str) or not _PLAIN.fullmatch(text):
            raise CheckpointError(
                f"{path} is not a manifest: {what} is {text!r}, and not a plain word"
            )


def _check_file_name(manifest_path: Path, name: str) -> None:
    """Reject a path that leads out of the checkpoint: the manifest may come from an untrusted source."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or "\\" in name or ".." in parts or MANIFEST_NAME in parts:
        raise CheckpointError(
            f"{manifest_path} names '{name}', which is not a plain path inside the checkpoint"
        )


def checkpoint_files(checkpoint: Path) -> list[str]:
    """List every regular file below `checkpoint` except the manifest.

    Symbolic links are left out.

    Returns:
        `list[str]`: sorted relative POSIX paths.
    """
    found = []
    for folder, _, names in os.walk(checkpoint, followlinks=False):
        for name in names:
            path = Path(folder) / name
            if name != MANIFEST_NAME and path.is_file() and not path.is_symlink():
                found.append(path.relative_to(checkpoint).as_posix())
    return sorted(found)


def record_files(checkpoint: Path) -> dict[str, FileRecord]:
    """Read every file of the checkpoint except the manifest, and return the records by relative POSIX path."""
    return {name: FileRecord.of(checkpoint / name) for name in checkpoint_files(checkpoint)}
