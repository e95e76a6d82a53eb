"""Averages the weights of several checkpoints or model folders, with one tensor of each in memory at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hfscale.checkpoint.export import (
    DEFAULT_SHARD_BYTES,
    find_config,
    published,
    stored_weights,
    write_model_folder,
)
from hfscale.checkpoint.formats.safetensors_files import read_weights
from hfscale.checkpoint.formats.view import TensorRef
from hfscale.errors import CheckpointError

_STEMS = ("model", "adapter_model")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One of the checkpoints or model folders that are averaged."""

    folder: Path
    """The folder, which has been verified if it has a manifest."""
    strategy: str | None
    """The strategy under which a checkpoint was written; None: it is a folder of `save_pretrained`."""

    def config_folders(self, model: Path | None) -> list[Path]:
        """Return the folders that may have the config, the likeliest first.

        Args:
            model (`Path`, *optional*): the folder that has it.
        """
        return [model] if model else [self.folder, self.folder.parent]

    def weights(self, model: Path | None = None) -> dict[str, TensorRef]:
        """Return the weights by the names that `save_pretrained` writes.

        Args:
            model (`Path`, *optional*): a folder with the config; by default this one, or the one above it.

        Raises:
            CheckpointError: the folder has no weights or no config, or a file is broken.
        """
        if self.strategy is not None:
            weights = stored_weights(self.folder, self.strategy)
            return published(weights, find_config(weights, self.config_folders(model)))
        for stem in _STEMS:
            found = read_weights(self.folder, stem)
            if found is not None:
                return found
        raise CheckpointError(
            f"{self.folder} has neither model.safetensors nor adapter_model.safetensors: name a checkpoint, or a "
            "folder that save_pretrained has written"
        )


def average(
    sources: Sequence[Source],
    target: Path,
    *,
    model: Path | None = None,
    dtype: str = "auto",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> list[str]:
    """Write the mean of the weights into the new folder `target`, with config and tokenizer of the first source.

    Values are added up in float32, or in float64 where they are stored so. Tensors of integers, such as counters, are
    those of the last source.

    Args:
        sources (`Sequence[Source]`): at least two.
        target (`Path`): the new folder.
        model (`Path`, *optional*): as for `hfscale.checkpoint.export.export`.
        dtype (`str`): likewise.
        max_shard_bytes (`int`): likewise.

    Returns:
        `list[str]`: names of the files.

    Raises:
        CheckpointError: the sources have other names or shapes than the first one, or a file is broken.
        FileExistsError: `target` exists.
    """
    weights = [source.weights(model) for source in sources]
    for source, others in zip(sources[1:], weights[1:], strict=True):
        _check_same(sources[0].folder, weights[0], source.folder, others)
    means = {name: _mean([each[name] for each in weights]) for name in weights[0]}
    return write_model_folder(
        means,
        target,
        config_folder=find_config(means, sources[0].config_folders(model)),
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )


def _check_same(
    first: Path, weights: Mapping[str, TensorRef], other: Path, others: Mapping[str, TensorRef]
) -> None:
    """Check that two sources are of one model.

    Raises:
        CheckpointError: a weight is in one of them only, or has two shapes.
    """
    hint = "average checkpoints of one model"
    for name in sorted(weights.keys() ^ others.keys()):
        having, lacking = (first, other) if name in weights else (other, first)
        raise CheckpointError(f"{lacking} has no '{name}', which {having} has: {hint}")
    for name, ref in weights.items():
        if ref.shape != others[name].shape:
            shape = list(others[name].shape)
            raise CheckpointError(
                f"'{name}' has the shape {list(ref.shape)} in {first} and {shape} in {other}: {hint}"
            )


def _mean(refs: Sequence[TensorRef]) -> TensorRef:
    first = refs[0]
    if not first.dtype.is_floating_point:
        return refs[-1]

    def read() -> torch.Tensor:
        total = _wide(first.read())
        for ref in refs[1:]:
            total += _wide(ref.read())
        return (total / len(refs)).to(first.dtype)

    return TensorRef(shape=first.shape, dtype=first.dtype, read=read)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in which values can be added up."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.to(wide, copy=True)
