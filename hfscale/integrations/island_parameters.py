"""This rank's part of the trained parameters as one flat fp32 tensor in host memory, under any strategy."""

import json
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import Trainer

from hfscale.integrations.strategy import is_parallel_trainer, running_strategy


class PartOfParameters:
    """Reads and writes the trained parameters that this rank holds.

    Under FSDP2, ZeRO-3 and `ParallelTrainer` these are its shards, otherwise complete parameters. With master weights
    in fp32 (ZeRO) those are read and written, and the parameters follow.

    Args:
        trainer (`Trainer`): prepared for training.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._strategy = running_strategy(trainer)
        named = trainer.model.named_parameters()
        self._named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.numel = sum(self._local(parameter).numel() for _, parameter in self._named)
        """Values that this rank holds."""

    def describe(self) -> str:
        """Return the names, shapes and positions of what this rank holds: ranks with the same text hold the same."""
        rows: list[Any] = []
        for name, parameter in self._named:
            place = None
            if isinstance(parameter, DTensor):
                coordinate = parameter.device_mesh.get_coordinate() or []
                axes = zip(parameter.placements, coordinate, strict=True)
                place = [[str(placement), index] for placement, index in axes if not placement.is_replicate()]
            rows.append([name, list(self._local(parameter).shape), place])
        if is_parallel_trainer(self._trainer):
            mesh = self._trainer.mesh
            rows.append([mesh.pp_rank, mesh.tp_rank])
        if self._strategy == "zero3":
            rows.append(self._trainer.args.process_index)
        return json.dumps(rows)

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        """Return a copy of the values, flat fp32. Every rank must call it."""
        self._reshard()
        flat = torch.empty(self.numel, dtype=torch.float32)
        for (_, parameter), part in zip(self._named, self._split(flat), strict=True):
            part.copy_(self._master(parameter).reshape(-1))
        return flat

    @torch.no_grad()
    def write(self, flat: torch.Tensor) -> None:
        """Set the values. Every rank must call it.

        Args:
            flat (`torch.Tensor`): as `read` returns them.
        """
        self._reshard()
        for (_, parameter), part in zip(self._named, self._split(flat), strict=True):
            local = self._local(parameter)
            value = part.view(local.shape).to(local.device)
            local.copy_(value)
            if self._strategy.startswith("zero"):
                self._set_master(parameter, value)

    def _split(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flat.split([self._local(parameter).numel() for _, parameter in self._named])

    def _local(self, parameter: nn.Parameter) -> torch.Tensor:
        if isinstance(parameter, DTensor):
            return parameter.to_local()
        return parameter.ds_tensor if self._strategy == "zero3" else parameter.data

    def _master(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the values that the optimizer steps: under ZeRO a copy of them in fp32."""
        if self._strategy == "zero3":
            from deepspeed.utils import safe_get_local_fp32_param

            return safe_get_local_fp32_param(parameter)
        if self._strategy.startswith("zero"):
            from deepspeed.utils import safe_get_full_fp32_param

            master = safe_get_full_fp32_param(parameter)
            return parameter.data if master is None else master
        return self._local(parameter)

    def _set_master(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        if self._strategy == "zero3":
            from deepspeed.utils import safe_set_local_fp32_param

            safe_set_local_fp32_param(parameter, value.float())
        else:
            from deepspeed.utils import safe_set_full_fp32_param

            safe_set_full_fp32_param(parameter, value.float())

    def _reshard(self) -> None:
        """Make FSDP2 free what it has gathered: then the parameters are the shards that the optimizer steps."""
        for module in self._trainer.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
