"""Records hashes of what a rank computes in a micro-batch, in order, and says which rank was the first to differ.

Recorded are the outputs of all modules that have no modules inside, the gradients of these outputs, the gradients of
parameters before their reduction, and, where ranks depend on each other within a micro-batch, what a rank sends to
others. What is sent is the input of a collective, so it differs on the rank that computed it before it differs on any
other one.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hfscale.core.bit_hash import HashQueue, numbers_of
from hfscale.core.nested import tensors_in
from hfscale.core.torch_internals import TorchDispatchMode
from hfscale.trainer.strategies.tensors import own_part

SENDS = {
    "all_gather_into_tensor": 0,
    "all_reduce": 0,
    "all_to_all_single": 0,
    "reduce_scatter_tensor": 0,
    "_allgather_base_": 1,
    "_reduce_scatter_base_": 1,
    "allgather_": 1,
    "allreduce_": 0,
    "alltoall_": 1,
    "alltoall_base_": 1,
    "reduce_scatter_": 1,
    "send": 0,
}
"""torch's collectives by the name of the operator: the position of the argument that a rank sends."""
_NAMESPACES = ("c10d", "_c10d_functional")
_LAYER = re.compile(r"\.(\d+)(?:\.|$)")
_FORWARD, _BACKWARD = 0, 1
_AFTER_ALL_LAYERS = 2**31


Place = tuple[int, int, int]
"""Where in a micro-batch a value is computed; places of several ranks can be compared, and smaller is earlier.

It consists of the phase (0 forward, 1 backward), the number of the layer (in the backward pass its negative), and how
many values the rank has recorded before."""


class Record:
    """The hashes of a micro-batch on this rank, by name, in the order of their computation.

    Args:
        layers (`Mapping[str, int]`): the number of the layer of each module, by name.
    """

    def __init__(self, layers: Mapping[str, int]) -> None:
        self._layers = layers
        self._hashes = HashQueue()  # in the order of the places
        self._places: dict[str, Place] = {}
        self._last = ("the inputs", _FORWARD, -1)
        self._numbers: dict[str, int] = {}
        self._values: dict[str, int] | None = None

    def computed(self, phase: int, module: str, name: str, tensor: torch.Tensor) -> None:
        """Add a value of a module; a module that is called again adds further values with a number.

        Args:
            phase (`int`): 0 for the forward pass, 1 for the backward pass.
            module (`str`): the name of the module.
            name (`str`): what it is.
            tensor (`torch.Tensor`): the value.
        """
        layer = self._layers.get(module, -1)
        depth = layer if phase == _FORWARD else -layer
        self._last = (name, phase, depth)
        self._add(name, phase, depth, tensor)

    def sent(self, operator: str, tensor: torch.Tensor) -> None:
        """Add what a collective sends; it belongs to the value that was computed before it.

        Args:
            operator (`str`): the name of the collective.
            tensor (`torch.Tensor`): what this rank sends.
        """
        name, phase, depth = self._last
        self._add(f"what {operator.strip('_')} sends after the {name}", phase, depth, tensor)

    def loss(self, tensor: torch.Tensor) -> None:
        """Add the loss.

        Args:
            tensor (`torch.Tensor`): the loss of the micro-batch.
        """
        self._add("loss", _FORWARD, _AFTER_ALL_LAYERS, tensor)

    def _add(self, name: str, phase: int, depth: int, tensor: torch.Tensor) -> None:
        number = self._numbers.get(name, 0) + 1
        self._numbers[name] = number
        full_name = name if number == 1 else f"{name} #{number}"
        self._places[full_name] = (phase, depth, len(self._places))
        self._hashes.add(tensor)

    @property
    def values(self) -> dict[str, int]:
        """The hashes as numbers, by name; the first call waits for the device once."""
        if self._values is None:
            numbers = numbers_of(self._hashes.take())
            self._values = dict(zip(self._places, numbers, strict=True))
        return self._values

    def place(self, name: str) -> Place:
        """Return where a value was computed.

        Args:
            name (`str`): its name.
        """
        return self._places[name]

    def differing(self, other: "Record") -> list[str]:
        """Return the names of the values that another record of the same micro-batch does not have, in their order.

        What only one of both sends is left out: the gradients of a replay may be reduced where those of the training
        wait for the last micro-batch.

        Args:
            other (`Record`): the other record.
        """
        theirs = other.values
        wrong = [
            name
            for name, value in self.values.items()
            if theirs.get(name, None if not name.startswith("what ") else value) != value
        ]
        return sorted(wrong, key=self._places.__getitem__)


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Return the number of the layer of each module: -1 before all layers, and a large one after them.

    Args:
        model (`nn.Module`): the model, or the part of it that this rank has under its names in the whole model.
    """
    numbers = {}
    has_layers_before = False
    for name, _ in model.named_modules():
        found = _LAYER.search(name)
        has_layers_before |= found is not None
        numbers[name] = int(found[1]) if found else _AFTER_ALL_LAYERS if has_layers_before else -1
    return numbers


@contextmanager
def recorded(
    model: nn.Module, layers: Mapping[str, int], *, gradients: bool, sends: bool
) -> Iterator[Record]:
    """Record what this rank computes in the `with` block.

    Args:
        model (`nn.Module`): the model of the Trainer.
        layers (`Mapping[str, int]`): the number of the layer of each module.
        gradients (`bool`): whether gradients are recorded too.
        sends (`bool`): whether it is recorded what collectives send.

    Yields:
        `Record`: complete after the block, once `loss` has been added.
    """
    record = Record(layers)
    handles: list[Any] = []
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            handles.append(module.register_forward_hook(partial(_leave, record, name, gradients)))
    for name, parameter in model.named_parameters():
        if gradients and parameter.requires_grad:
            module_name = name.rpartition(".")[0]
            handles.append(
                parameter.register_hook(
                    partial(_gradient, record, module_name, f"gradient of {name}")
                )
            )
    try:
        with _Sends(record) if sends else nullcontext():
            yield record
    finally:
        for handle in handles:
            handle.remove()


def _leave(
    record: Record, name: str, gradients: bool, module: nn.Module, args: Any, output: Any
) -> None:
    if not isinstance(output, torch.Tensor):
        return
    own = own_part(output)
    if own is None:
        return
    record.computed(_FORWARD, name, f"output of {name}", own)
    if gradients and output.requires_grad:
        output.register_hook(partial(_gradient, record, name, f"gradient of the output of {name}"))


def _gradient(record: Record, module: str, name: str, gradient: torch.Tensor | None) -> None:
    own = None if gradient is None else own_part(gradient)
    if own is not None:
        record.computed(_BACKWARD, module, name, own)


class _Sends(TorchDispatchMode):
    """Records what this rank gives to collectives."""

    def __init__(self, record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # which lets the DTensor run first, and shows its collectives
        name = func.name().partition(".")[0].rpartition("::")
        if name[0] in _NAMESPACES and name[2] in SENDS:
            for tensor in tensors_in(args[SENDS[name[2]]]):
                own = own_part(tensor)
                if own is not None:
                    self._record.sent(name[2], own)
        return func(*args, **(kwargs or {}))


# ---- which rank


def first_ranks(places: Sequence[Sequence[int] | None]) -> list[int]:
    """Return the ranks whose first difference is the earliest; ranks that are given it by others differ later.

    Args:
        places (`Sequence`): the place of the first difference of each rank; None where there is none.
    """
    earliest = min(list(place) for place in places if place is not None)
    return [
        rank for rank, place in enumerate(places) if place is not None and list(place) == earliest
    ]
