"""This rank's part of the trained parameters as one flat fp32 tensor in host memory, under any strategy."""

import json
import re
from typing import Any

import torch
import xxhash
from torch import nn
from transformers import Trainer

from hfscale.errors import UsageError
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.tensors import place_of

_HASHED_VALUES = 1 << 24
"""Values that are copied to the host at a time."""


class PartOfParameters:
    """Reads and writes the trained parameters that this rank holds.

    Under FSDP2, ZeRO-3 and `ParallelTrainer` these are its shards, otherwise complete parameters. With master weights
    in fp32 (ZeRO) those are read and written, and the parameters follow.

    Fragment f of P has the layers whose number is f modulo P (the strided pattern of Streaming DiLoCo, arXiv
    2501.18512), and the last one also has all that is in no layer: embeddings, final norm and head. The values are in
    the order of the fragments. The rule depends on names alone, so that all ranks that hold a part or a copy of a
    parameter have it in the same fragment.

    Args:
        trainer (`Trainer`): prepared for training.
        fragments (`int`): number of fragments P.
    """

    def __init__(self, trainer: Trainer, fragments: int = 1) -> None:
        self._trainer = trainer
        self._strategy = Strategy.of(trainer)
        self._fragments: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(fragments)]
        for name, parameter in model_of(trainer).named_parameters():
            if parameter.requires_grad:
                layer = _layer(name)
                self._fragments[-1 if layer is None else layer % fragments].append(
                    (name, parameter)
                )
        self.sizes = [
            sum(self._local(one).numel() for _, one in fragment) for fragment in self._fragments
        ]
        """Values of each fragment that this rank holds."""
        self.layers = 1 + max((_layer(name) or 0 for name, _ in self._of(None)), default=0)
        """Number of the last layer that this rank holds a part of, from 1."""

    def describe(self) -> str:
        """Return the names, shapes and positions of what this rank holds: ranks with the same text hold the same."""
        rows: list[Any] = []
        for name, parameter in self._of(None):
            place = place_of(parameter)
            axes = None if place is None else [list(axis) for axis in place.axes if axis]
            rows.append([name, list(self._local(parameter).shape), axes])
        place_in_model = self._strategy.part_of_model()
        if place_in_model:
            rows.append(place_in_model)
        return json.dumps(rows)

    @torch.no_grad()
    def digest_of_frozen(self) -> str:
        """Return a hash of the parameters that this rank holds and does not train, and of their names.

        With adapters these are the weights of the base model, which islands never exchange.
        """
        self._strategy.reshard()
        digest = xxhash.xxh3_128()
        for name, parameter in model_of(self._trainer).named_parameters():
            if not parameter.requires_grad:
                digest.update(name.encode())
                flat = self._local(parameter).detach().reshape(-1)
                for piece in flat.split(_HASHED_VALUES):
                    digest.update(piece.cpu().contiguous().view(torch.uint8).numpy())
        return digest.hexdigest()

    @torch.no_grad()
    def read(self, fragment: int | None = None) -> torch.Tensor:
        """Return a copy of the values, flat fp32. Every rank must call it.

        Args:
            fragment (`int`, *optional*): number of the fragment; None: all values.
        """
        self._strategy.reshard()
        flat = self.empty(fragment)
        for parameter, part in self._split(flat, fragment):
            part.copy_(self._strategy.master(parameter).reshape(-1))
        return flat

    def empty(self, fragment: int | None = None) -> torch.Tensor:
        """Return a tensor for the values of a fragment, or of all."""
        return torch.empty(
            sum(self.sizes) if fragment is None else self.sizes[fragment], dtype=torch.float32
        )

    @torch.no_grad()
    def write(self, flat: torch.Tensor, fragment: int | None = None) -> None:
        """Set the values. Every rank must call it.

        Args:
            flat (`torch.Tensor`): as `read` returns them.
            fragment (`int`, *optional*): number of the fragment; None: all values.
        """
        with self._strategy.changing_weights():
            for parameter, part in self._split(flat, fragment):
                local = self._local(parameter)
                self._strategy.set_master(parameter, part.view(local.shape).to(local.device))

    def _of(self, fragment: int | None) -> list[tuple[str, nn.Parameter]]:
        if fragment is not None:
            return self._fragments[fragment]
        return [named for members in self._fragments for named in members]

    def _split(
        self, flat: torch.Tensor, fragment: int | None
    ) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Pair the parameters of a fragment with their parts of a flat tensor."""
        parameters = [parameter for _, parameter in self._of(fragment)]
        return list(
            zip(
                parameters,
                flat.split([self._local(one).numel() for one in parameters]),
                strict=True,
            )
        )

    def _local(self, parameter: nn.Parameter) -> torch.Tensor:
        own = self._strategy.own(parameter)
        if own is None:
            raise UsageError(
                f"islands exchange parameters of ordinary numbers, and a {type(parameter.data).__name__} is none"
            )
        return own


def _layer(name: str) -> int | None:
    """Return the number of the layer of a parameter, the first number in its name; None if it is in no layer."""
    found = re.search(r"\.(\d+)\.", name)
    return None if found is None else int(found[1])
