"""The model as files for `from_pretrained`, written by all stages at once."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from hfscale.parallel.mesh import ParallelMesh
from hfscale.parallel.model import ParallelizedModel
from hfscale.parallel.state import model_tensors
from hfscale.utils import distributed

ADAPTER_FILE = "adapter_model.safetensors"
_FILE_BYTES = 5 * 10**9  # transformers' own size of a shard


def write_weights(folder: Path, parallelized: ParallelizedModel, mesh: ParallelMesh) -> None:
    """Write safetensors files and their index into `folder`, or an adapter's one file. Call it on every rank.

    One rank of each pipeline rank writes its stages' files; its host memory has to hold the tensors of one file, or
    of one layer where that is more.
    """
    writes = mesh.data_rank == mesh.cp_rank == mesh.tp_rank == 0
    if parallelized.is_adapted:
        _write_adapter(folder, parallelized, writes=writes)
        return
    index: dict[str, str] = {}
    size = 0
    for number, tensors in enumerate(_files(parallelized)):
        if not writes:
            continue
        tensors = revert_weight_conversion(parallelized.model, tensors)
        name = f"model-{mesh.pp_rank:05d}-{number:05d}.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name, {"format": "pt"})
        index |= dict.fromkeys(tensors, name)
        size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    indexes = _gather((index, size))
    if distributed.rank() == 0:
        # A weight that two stages hold (tied ones) is in two files; the index names the first.
        weight_map = {key: name for index, _ in reversed(indexes) for key, name in index.items()}
        text = json.dumps({"metadata": {"total_size": sum(s for _, s in indexes)}, "weight_map": weight_map}, indent=1)
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text + "\n", encoding="utf-8")
    distributed.barrier()


def _files(parallelized: ParallelizedModel) -> Iterator[dict[str, torch.Tensor]]:
    """Whole tensors in host memory, in lots of a file; a layer is never in two. Every rank of a stage must go through
    all of them: putting a tensor together takes all who have a part."""
    lot: dict[str, torch.Tensor] = {}
    held, previous = 0, None
    for name, tensor in model_tensors(parallelized).items():
        layer = parallelized.structure.layer_of(name)
        if held > _FILE_BYTES and layer != previous:
            yield lot
            lot, held = {}, 0
        lot[name] = _whole(tensor)
        held += lot[name].numel() * lot[name].element_size()
        previous = layer
    if lot:
        yield lot


def _write_adapter(folder: Path, parallelized: ParallelizedModel, *, writes: bool) -> None:
    own = {name: _whole(tensor) for name, tensor in model_tensors(parallelized).items()}
    parts = _gather(own if writes else {})
    if distributed.rank() == 0:
        # peft's name of a file leaves out the adapter's own name, and goes through its two wrappers.
        named = {f"base_model.model.{_without_adapter(n)}": t.contiguous() for part in parts for n, t in part.items()}
        save_file(named, folder / ADAPTER_FILE, {"format": "pt"})
    distributed.barrier()


def _without_adapter(name: str) -> str:
    *before, _, last = name.split(".")
    return ".".join([*before, last])


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def _gather(value: Any) -> list[Any]:
    """Everyone's value, in rank order."""
    if not distributed.is_distributed():
        return [value]
    values: list[Any] = [None] * distributed.world_size()
    dist.all_gather_object(values, value, group=distributed.side_group())
    return values
