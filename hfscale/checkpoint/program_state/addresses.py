"""Dictionaries by `id()` or `data_ptr()` of parameters and modules, which are other numbers in another launch."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch

from hfscale.checkpoint.program_state.objects import Holder

_LOOKED_AT = 8
"""Keys of a dictionary that are looked at."""


class Addresses:
    """The numbers by which a program may know the parameters, buffers and modules of a model.

    Args:
        model (`Module`): the model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        objects = [*tensors, *model.modules()]
        self._numbers = {id(each) for each in objects}
        for tensor in tensors:
            if not tensor.is_meta:
                self._numbers.add(tensor.data_ptr())
        self._numbers.discard(0)  # of an empty tensor

    def is_key_of(self, value: Any) -> bool:
        """Return whether a value is a dictionary with one of the numbers among its first keys.

        Args:
            value (`Any`): the value.
        """
        if not isinstance(value, Mapping):
            return False
        keys = islice(value, _LOOKED_AT)
        return any(isinstance(key, int) and key in self._numbers for key in keys)

    def without(self, holder: Holder) -> Holder:
        """Return a place without its dictionaries by such numbers.

        Args:
            holder (`Holder`): the place.
        """

        def read() -> dict[str, Any]:
            values: dict[str, Any] = holder.read()
            return {name: value for name, value in values.items() if not self.is_key_of(value)}

        return Holder(read, holder.write)

    def names_in(self, holder: Holder) -> list[str]:
        """Return the names of such dictionaries in a place.

        Args:
            holder (`Holder`): the place.
        """
        return [name for name, value in holder.read().items() if self.is_key_of(value)]
