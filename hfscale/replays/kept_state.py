"""Keeps what objects hold while something is computed with them, and puts it back: values, and which objects they are.

`KeptState` enters objects from their attributes on, as `copy.deepcopy` does, but copies nothing that refers to other
objects: each object stays the same one, and gets its earlier contents back.

| object | what is kept |
|---|---|
| any object with attributes, such as a module | its attributes, also those that appear or vanish; each is entered |
| dict, list, set, deque, and classes derived from them | their entries; each is entered |
| tensor, array | which memory it has, and the numbers in it; of a tensor that is a leaf also its gradient |
| parameter | its gradient, where nobody else drops it; the numbers are not copied, see `parameters` |
| generator of random numbers | its state |
| function of a program, bound method, partial | the variables that it closes over, its attributes, its object |
| iterator, generator | cannot be kept: see `problems` |

Not entered are objects of libraries that distribute a training or store its data (`_NOT_ENTERED`), classes, Python
modules and files. So attributes of a class and global variables are not kept.
"""

import io
import operator
import random
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from hfscale.core.bit_hash import bits_of
from hfscale.core.torch_internals import is_traceable_wrapper_subclass

_ATOMS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    Enum,
    range,
    slice,
    types.ModuleType,
    types.BuiltinFunctionType,
    io.IOBase,
    random.SystemRandom,
    torch.dtype,
    torch.device,
)
"""Objects that nothing changes, or that are not part of a training."""

_NOT_ENTERED = (
    "accelerate",
    "bitsandbytes.optim",
    "concurrent",
    "contextlib",
    "datasets",
    "deepspeed",
    "hfscale",
    "logging",
    "multiprocessing",
    "pyarrow",
    "threading",
    "tokenizers",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "torch.utils.hooks",
    "transformers.tokenization",
    "transformers.trainer_callback",
    "wandb",
    "weakref",
)
"""Modules of Python whose objects are not entered: what they hold belongs to an engine, a data set or a log."""


class KeptState:
    """What objects hold now.

    Args:
        roots (`Mapping[str, Any]`): name -> an object that is kept with all that it refers to. It is entered whatever
            its class is.
        left_out (`Collection[Any]`): objects that are not entered.
        model (`nn.Module`, *optional*): its modules are entered whatever their class is, and the gradients of its
            parameters are not kept.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        *,
        left_out: Collection[Any] = (),
        model: nn.Module | None = None,
    ) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        """Parameters outside of the model, by name: what is written to them is not put back."""
        self.problems: list[str] = []
        """What cannot be kept: each with its name and why."""
        self._puts_back: list[Callable[[], object]] = []
        self._empty: list[dict[Any, Any]] = []
        self._entered = {id(root) for root in roots.values()}
        if model is not None:
            self._entered.update(id(module) for module in model.modules())
        # The model itself may be among the former, as the wrapper of a Trainer without one
        without = [held for held in left_out if id(held) not in self._entered]
        if model is not None:
            without += model.parameters()
        self._seen: dict[int, Any] = {id(held): held for held in without}
        for name, root in roots.items():
            self._keep(name, root)

    def put_back(self) -> None:
        """Let all objects hold what they held; it can be called again."""
        with torch.no_grad():
            for put_back in self._puts_back:
                put_back()
        for held in self._empty:
            if held:
                _kind_of(held).clear(held)

    def _keep(self, name: str, held: Any) -> None:
        kind = type(held)
        keep = _KEEP_BY_TYPE.get(kind)
        if keep is None:
            # What is done with an object follows from its type alone, and most of them are of few types
            keep = _KEEP_BY_TYPE[kind] = self._find_keep(kind)
        if keep is _ATOM or id(held) in self._seen:
            return
        self._seen[id(held)] = held
        keep(self, name, held)

    def _find_keep(self, kind: type) -> "Keep":
        """Return what keeps the objects of a type."""
        if issubclass(kind, _ATOMS):
            return _ATOM
        for kinds, keep in self._KINDS:
            if issubclass(kind, kinds):
                return keep
        if issubclass(kind, Iterator):
            return KeptState._name_problem
        return KeptState._keep_object

    def _name_problem(self, name: str, held: Any) -> None:
        kind = type(held).__name__
        self.problems.append(f"{name} is of the type {kind}, which cannot be set back")

    def _keep_object(self, name: str, held: Any) -> None:
        if self._is_entered(held):
            self._keep_attributes(name, held)

    def _is_entered(self, held: Any) -> bool:
        return id(held) in self._entered or not _is_of_library(type(held).__module__)

    # ---- values

    def _keep_parameter(self, name: str, held: nn.Parameter) -> None:
        self.parameters[name] = held
        self._keep_gradient(held)

    def _keep_tensor(self, name: str, held: torch.Tensor) -> None:
        # Whether a tensor is a parameter, its type does not always say
        if isinstance(held, nn.Parameter):
            self._keep_parameter(name, held)
            return
        if held.is_meta:
            return
        self._puts_back.append(_tensor_kept(held))
        if held.is_leaf and held.requires_grad:
            self._keep_gradient(held)

    def _keep_gradient(self, held: torch.Tensor) -> None:
        # FSDP2 may hold a gathered parameter that is a result, of which torch warns when it is asked for its gradient
        if not held.is_leaf:
            return
        gradient = held.grad
        put_back = None if gradient is None else _tensor_kept(gradient)

        def put_gradient_back() -> None:
            held.grad = gradient
            if put_back is not None:
                put_back()

        self._puts_back.append(put_gradient_back)

    def _keep_array(self, name: str, held: Any) -> None:
        kept = held.copy()

        def put_back() -> None:
            if held.flags.writeable:
                held[...] = kept

        self._puts_back.append(put_back)
        if held.dtype == object:
            for index, item in enumerate(held.flat):
                self._keep(f"{name}[{index}]", item)

    def _keep_torch_generator(self, name: str, held: torch.Generator) -> None:
        self._puts_back.append(partial(held.set_state, held.get_state()))

    def _keep_numpy_generator(self, name: str, held: np.random.Generator) -> None:
        bits, state = held.bit_generator, held.bit_generator.state
        self._puts_back.append(lambda: setattr(bits, "state", state))

    def _keep_numpy_state(self, name: str, held: np.random.RandomState) -> None:
        self._puts_back.append(partial(held.set_state, held.get_state()))

    def _keep_python_random(self, name: str, held: random.Random) -> None:
        self._puts_back.append(partial(held.setstate, held.getstate()))

    # ---- containers

    def _keep_dict(self, name: str, held: dict[Any, Any]) -> None:
        self._keep_entries(name, held)
        if hasattr(held, "__dict__"):
            self._keep_entries(name, vars(held), is_attributes=True)

    def _keep_entries(
        self, name: str, held: dict[Any, Any], *, is_attributes: bool = False
    ) -> None:
        if not held:
            self._empty.append(held)
            return
        kept = list(_kind_of(held).items(held))
        self._puts_back.append(partial(_put_entries_back, held, kept))
        for key, item in kept:
            part = f".{key}" if is_attributes else f"[{key!r}]"
            self._keep(name + part, item)

    def _keep_list(self, name: str, held: list[Any]) -> None:
        kept = list(held)

        def put_back() -> None:
            if not _are_same(held, kept):
                list.__setitem__(held, slice(None), kept)

        self._puts_back.append(put_back)
        self._keep_all(name, kept)

    def _keep_bytes(self, name: str, held: Any) -> None:
        kept = held[:]

        def put_back() -> None:
            if held != kept:
                held[:] = kept

        self._puts_back.append(put_back)

    def _keep_deque(self, name: str, held: deque[Any]) -> None:
        kept = list(held)

        def put_back() -> None:
            if not _are_same(held, kept):
                held.clear()
                held.extend(kept)

        self._puts_back.append(put_back)
        self._keep_all(name, kept)

    def _keep_set(self, name: str, held: set[Any]) -> None:
        kept = set(held)

        def put_back() -> None:
            if held != kept:
                held.clear()
                held.update(kept)

        self._puts_back.append(put_back)

    def _keep_tuple(self, name: str, held: tuple[Any, ...]) -> None:
        self._keep_all(name, held)

    def _keep_all(self, name: str, items: Collection[Any]) -> None:
        for index, item in enumerate(items):
            self._keep(f"{name}[{index}]", item)

    # ---- objects

    def _keep_module(self, name: str, held: nn.Module) -> None:
        if not self._is_entered(held):
            return
        # The parameters themselves belong to the strategy, which may exchange them in a forward pass
        own = vars(held)["_parameters"]
        self._seen[id(own)] = own
        for key, parameter in own.items():
            self._keep(f"{name}.{key}", parameter)
        for registered in ("_buffers", "_modules"):
            entries = vars(held)[registered]
            self._seen[id(entries)] = entries
            self._keep_entries(name, entries, is_attributes=True)
        self._keep_attributes(name, held)

    def _keep_attributes(self, name: str, held: Any) -> None:
        if hasattr(held, "__dict__"):
            self._keep_entries(name, vars(held), is_attributes=True)
        for key in _slots(type(held)):
            if hasattr(held, key):
                item = getattr(held, key)
                self._puts_back.append(partial(object.__setattr__, held, key, item))
                self._keep(f"{name}.{key}", item)

    def _keep_method(self, name: str, held: types.MethodType) -> None:
        self._keep(f"{name}.__self__", held.__self__)
        self._keep(name, held.__func__)

    def _keep_partial(self, name: str, held: Any) -> None:
        self._keep(name, held.func)
        self._keep_all(name, held.args)
        for key, item in held.keywords.items():
            self._keep(f"{name}.{key}", item)

    def _keep_function(self, name: str, held: types.FunctionType) -> None:
        if _is_of_library(held.__globals__.get("__name__", ""), functions=True):
            return
        self._keep_entries(name, held.__dict__, is_attributes=True)
        names = held.__code__.co_freevars
        cells = held.__closure__ or ()
        for key, cell in zip(names, cells, strict=True):
            try:
                item = cell.cell_contents
            except ValueError:  # it is not assigned yet
                continue
            self._puts_back.append(partial(setattr, cell, "cell_contents", item))
            self._keep(f"{name}.{key}", item)

    _KINDS: tuple[tuple[Any, "Keep"], ...] = (
        (torch.Tensor, _keep_tensor),
        (torch.Generator, _keep_torch_generator),
        (np.random.Generator, _keep_numpy_generator),
        (np.random.RandomState, _keep_numpy_state),
        (random.Random, _keep_python_random),
        (np.ndarray, _keep_array),
        (dict, _keep_dict),
        (list, _keep_list),
        ((bytearray, array), _keep_bytes),
        (deque, _keep_deque),
        (set, _keep_set),
        (tuple, _keep_tuple),
        (nn.Module, _keep_module),
        (types.MethodType, _keep_method),
        (partial, _keep_partial),
        (types.FunctionType, _keep_function),
    )


Keep = Callable[[KeptState, str, Any], None]


def _keep_nothing(state: KeptState, name: str, held: Any) -> None:
    """Stand for what keeps an object that nothing changes."""


_ATOM: Keep = _keep_nothing
_KEEP_BY_TYPE: dict[type, Keep] = {}


def _is_of_library(module: str, *, functions: bool = False) -> bool:
    """Return whether a Python module is one of those whose objects are not entered.

    Args:
        module (`str`): its name.
        functions (`bool`): whether it is that of a function: what those of torch and transformers close over, such as
            the wrappers of a forward method, does not change.
    """
    names: tuple[str, ...] = _NOT_ENTERED
    if functions:
        names = (*names, "torch", "transformers")
    return any(_is_in(module, name) for name in names)


def _is_in(module: str, name: str) -> bool:
    """Return whether a Python module is a package, is in it, or continues its name after an underscore."""
    return module == name or module.startswith((f"{name}.", f"{name}_"))


def _slots(kind: type) -> Iterator[str]:
    """Yield the names of the slots of a class that a program has written."""
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        if isinstance(slots, str):
            slots = (slots,)
        for key in slots:
            if key in ("__dict__", "__weakref__"):
                continue
            is_private = key.startswith("__") and not key.endswith("__")
            if is_private:
                prefix = base.__name__.lstrip("_")
                key = f"_{prefix}{key}"
            yield key


def _tensor_kept(held: torch.Tensor) -> Callable[[], None]:
    """Return a function that gives a tensor its memory and the numbers in it back.

    It writes through `.data`, so that graphs of earlier computations do not see a write.
    """
    if is_traceable_wrapper_subclass(held) or held.layout != torch.strided:
        return _values_kept(held.detach())
    memory = held.data
    part = _without_repetition(memory)
    numbers = part.clone()
    is_inference = held.is_inference()

    def put_back() -> None:
        if not is_inference:
            held.data = memory
        if _has_equal_bits(part, numbers):
            return  # memory that nothing has written may be read-only
        with torch.inference_mode(is_inference):
            part.copy_(numbers)

    return put_back


def _values_kept(held: torch.Tensor) -> Callable[[], None]:
    values = held.clone()

    def put_back() -> None:
        held.copy_(values)

    return put_back


def _has_equal_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are known to have the same bits, without waiting for a GPU."""
    if tensor.device.type != "cpu" or tensor.is_complex():
        return False
    return torch.equal(bits_of(tensor), bits_of(other))


def _without_repetition(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor in which each element has memory of its own, as `Tensor.expand` does not give it."""
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _kind_of(held: dict[Any, Any]) -> Any:
    """Return the class whose methods read and write a dict, since its own may have been overridden."""
    return OrderedDict if isinstance(held, OrderedDict) else dict


def _put_entries_back(held: dict[Any, Any], kept: list[tuple[Any, Any]]) -> None:
    """Give a dict its entries back, in their order."""
    kind = _kind_of(held)
    now = list(kind.items(held))
    if len(now) == len(kept) and all(map(_is_same_entry, now, kept)):
        return
    kind.clear(held)
    for key, item in kept:
        kind.__setitem__(held, key, item)


def _is_same_entry(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[0] is other[0] and one[1] is other[1]


def _are_same(held: Collection[Any], kept: Collection[Any]) -> bool:
    """Return whether two collections have the same objects in the same order."""
    return len(held) == len(kept) and all(map(operator.is_, held, kept))
