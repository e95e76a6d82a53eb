"""Reads and writes safetensors files with one tensor in memory at a time.

The format (https://huggingface.co/docs/safetensors): eight bytes with the length of the header, little-endian; the
header, which is JSON with the dtype, shape and byte range of each tensor; the data. safetensors' own `save_file` needs
all tensors at once, so this module writes the header and then each tensor.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hfscale.checkpoint.formats.view import TensorRef
from hfscale.core.spelling import spelled
from hfscale.core.text_files import read_json
from hfscale.errors import CheckpointError, UsageError

INDEX_SUFFIX = ".index.json"
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


def weight_files(name_or_path: str, revision: str | None = None) -> list[str]:
    """Return the safetensors files that transformers would read of a model, which are downloaded if need be.

    Args:
        name_or_path (`str`): a folder, or a hub id.
        revision (`str`, *optional*): the revision of a hub id.

    Raises:
        UsageError: there are none.
    """
    # Commands about checkpoints load no transformers
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
    from transformers.utils.hub import get_checkpoint_shard_files

    try:
        single = cached_file(
            name_or_path,
            SAFE_WEIGHTS_NAME,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
        )
        if single is not None:
            return [single]
        index = cached_file(name_or_path, SAFE_WEIGHTS_INDEX_NAME, revision=revision)
        return list(get_checkpoint_shard_files(name_or_path, index, revision=revision)[0])
    except OSError as error:
        named = spelled("model_name_or_path", name_or_path)
        raise UsageError(
            f"{named} has no {SAFE_WEIGHTS_NAME}: other formats cannot be read in parts; give a folder or hub id with "
            "safetensors files"
        ) from error


def read_weights(folder: Path, stem: str) -> dict[str, TensorRef] | None:
    """Return the tensors of `stem.safetensors`, or of the shards that `stem.safetensors.index.json` names.

    Args:
        folder (`Path`): folder of the files.
        stem (`str`): `model` or `adapter_model`.

    Returns:
        `dict[str, TensorRef]`: the tensors by name, or None if neither file exists.

    Raises:
        CheckpointError: a file is broken, or the index names a file outside the folder.
    """
    single = folder / f"{stem}.safetensors"
    index = folder / f"{stem}.safetensors{INDEX_SUFFIX}"
    if single.is_file():
        return dict(_tensors(single))
    if not index.is_file():
        return None
    try:
        files = set(read_json(index)["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error}") from None
    weights: dict[str, TensorRef] = {}
    for name in sorted(files):
        if Path(name).name != name:
            raise CheckpointError(f"{index} names '{name}', which is not a file next to it")
        weights.update(_tensors(folder / name))
    return weights


def _tensors(path: Path) -> Iterator[tuple[str, TensorRef]]:
    try:
        # memory-mapped: tensors are read when needed
        file: Any = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from None
    for name in file.keys():  # noqa: SIM118
        entry = file.get_slice(name)
        if entry.get_dtype() not in _DTYPES:
            raise CheckpointError(
                f"{path}: '{name}' has the dtype {entry.get_dtype()}, which hfscale cannot convert"
            )

        def read(name: str = name) -> torch.Tensor:
            return torch.as_tensor(file.get_tensor(name))

        yield (
            name,
            TensorRef(shape=tuple(entry.get_shape()), dtype=_DTYPES[entry.get_dtype()], read=read),
        )


def write_weights(
    folder: Path,
    stem: str,
    weights: Mapping[str, TensorRef],
    *,
    max_shard_bytes: int | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write `stem.safetensors`, or numbered shards and their index, as `from_pretrained` and Trainer read them.

    Args:
        folder (`Path`): folder of the files.
        stem (`str`): `model` or `adapter_model`.
        weights (`Mapping[str, TensorRef]`): the tensors by name.
        max_shard_bytes (`int`, *optional*): maximal bytes of tensors per file, unless a single tensor is larger; by
            default all tensors are written to one file.
        dtype (`torch.dtype`, *optional*): data type for all floating-point tensors; by default each keeps its own.
    """
    if dtype is not None:
        weights = {name: cast_ref(ref, dtype) for name, ref in weights.items()}
    shards = list(_shards(weights, max_shard_bytes))
    if len(shards) == 1:
        _write(folder / f"{stem}.safetensors", shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / name, shard)
        weight_map |= dict.fromkeys(shard, name)
    metadata = {"total_size": sum(ref.bytes for ref in weights.values())}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (folder / f"{stem}.safetensors{INDEX_SUFFIX}").write_text(
        json.dumps(index, indent=1) + "\n", encoding="utf-8"
    )


def cast_ref(ref: TensorRef, dtype: torch.dtype) -> TensorRef:
    """Return a reference that reads a floating-point tensor in another data type.

    Args:
        ref (`TensorRef`): a tensor; one of integers stays as it is.
        dtype (`torch.dtype`): the data type.
    """
    if not ref.dtype.is_floating_point:
        return ref
    return TensorRef(shape=ref.shape, dtype=dtype, read=lambda: ref.read().to(dtype))


def _shards(weights: Mapping[str, TensorRef], limit: int | None) -> Iterator[dict[str, TensorRef]]:
    shard: dict[str, TensorRef] = {}
    size = 0
    for name, ref in weights.items():
        if shard and limit is not None and size + ref.bytes > limit:
            yield shard
            shard = {}
            size = 0
        shard[name] = ref
        size += ref.bytes
    yield shard


def _write(path: Path, weights: Mapping[str, TensorRef]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, ref in weights.items():
        header[name] = {
            "dtype": _DTYPE_NAMES[ref.dtype],
            "shape": list(ref.shape),
            "data_offsets": [end, end := end + ref.bytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data to eight bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for ref in weights.values():
            tensor = ref.read().contiguous().reshape(-1)
            tensor.view(torch.uint8).numpy().tofile(file)
