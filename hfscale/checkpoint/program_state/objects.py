"""Finds the objects of the user's program that an object leads to, and the random generators that they draw from.

The program's own are the classes and functions that no library defines (`LIBRARIES`): of an object of a library, only
what it leads to counts, such as the function that a `datasets.Dataset` transforms its rows with.
"""

import dis
import functools
import inspect
import io
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Trainer

from hfscale.checkpoint.program_state.values import NOTHING
from hfscale.checkpoint.random_states import GENERATOR_KINDS

LIBRARIES = frozenset(sys.stdlib_module_names) | {
    "accelerate",
    "axolotl",
    "datasets",
    "deepspeed",
    "hfscale",
    "llamafactory",
    "peft",
    "sentence_transformers",
    "swift",
    "torch",
    "transformers",
    "trl",
    "unsloth",
}
"""Packages of others, also where they are not installed but read from a folder with their source."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})

_MAX_DEPTH = 6
_MAX_ENTRIES = 64
"""Entries of a list or dictionary that are looked at: longer ones are data."""
_METHODS_THAT_READ = ("__getitem__", "__getitems__", "__iter__", "__call__")
"""Methods of datasets, samplers and collators that may draw from a generator of their module."""
_NOT_SEARCHED = (
    str,
    bytes,
    int,
    float,
    type,
    types.ModuleType,
    torch.Tensor,
    np.ndarray,
    io.IOBase,
)


STATEFUL = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
"""Objects that have more state than a checkpoint keeps of the program."""


class Holder:
    """A place with named values: the attributes of an object, or variables of a function.

    Args:
        read (`Callable[[], dict]`): returns the values by name.
        write (`Callable[[str, Any], None]`): sets one.
    """

    def __init__(self, read: Any, write: Any) -> None:
        self.read = read
        self.write = write


@dataclass
class Found:
    """What a search has found, by the path of attributes that leads to it."""

    generators: dict[str, Any] = field(default_factory=dict)
    holders: dict[str, Holder] = field(default_factory=dict)
    iterators: list[str] = field(default_factory=list)
    """Iterators of libraries and generators that the program holds, whose position cannot be kept."""
    stateful: dict[str, Any] = field(default_factory=dict)
    """Modules, optimizers and schedules that the program holds."""


class Search:
    """A search of objects and of what they lead to.

    Args:
        apart (`Iterable[Any]`): objects that are not entered.
        only_own (`bool`): do not enter objects of libraries, nor what their classes keep in an object of the program.
        names (`frozenset[str]`): attributes of modules and Trainers that count, beside those that the program's own
            classes among their bases assign. Engines give them further ones, such as the counts of DeepSpeed.
    """

    def __init__(
        self,
        apart: Iterable[Any] = (),
        *,
        only_own: bool = False,
        names: frozenset[str] = frozenset(),
    ) -> None:
        self.found = Found()
        # No object is found twice, and no `id` is used again
        self._seen = {id(each): each for each in apart}
        self._only_own = only_own
        self._names = names

    def enter(self, path: str, value: Any) -> None:
        """Search an object, even if it is one of `apart`.

        Args:
            path (`str`): its name.
            value (`Any`): the object.
        """
        self._seen.pop(id(value), None)
        self._enter(path, value, 0, is_held=False)

    def _enter(self, path: str, value: Any, depth: int, *, is_held: bool) -> None:
        if value is None or isinstance(value, _NOT_SEARCHED) or id(value) in self._seen:
            return
        if is_held and isinstance(value, STATEFUL):
            self.found.stateful[path] = value
        is_own = is_of_program(value)
        is_entered = is_own or isinstance(value, _CONTAINERS)
        if not self._only_own:
            # Loggers, threads and their kind lead to everything in the process
            is_function = isinstance(value, types.FunctionType)
            is_entered = is_entered or is_function or not _is_of_python(value)
        if isinstance(value, GENERATOR_KINDS):
            self.found.generators[path] = value
        elif depth == _MAX_DEPTH or not is_entered:
            return
        self._seen[id(value)] = value
        if isinstance(value, GENERATOR_KINDS):
            return
        if isinstance(value, Iterator) and not is_own:
            if is_held:
                self.found.iterators.append(path)
            return
        if is_own:
            self.found.holders |= _holders_of(value, path, self._names)
        for name, inner in _parts_of(value, is_own=is_own, only_own=self._only_own):
            held = is_own or (is_held and isinstance(value, _CONTAINERS))
            self._enter(path_to(path, name), inner, depth + 1, is_held=held)


_CONTAINERS = (
    dict,
    list,
    tuple,
    functools.partial,
    types.MethodType,
    types.SimpleNamespace,
    Iterator,
)


def path_to(path: str, name: str) -> str:
    """Return the path of an attribute. What is only around the program's own object is left out, so that all
    strategies have the same paths: Accelerate's batch sampler on several processes, and `ParallelTrainer`'s check of
    ids."""
    return path if name in ("batch_sampler", "unchecked_collator") else f"{path}.{name}"


def _is_of_python(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in sys.stdlib_module_names


def is_of_program(value: Any) -> bool:
    """Return whether a function, or one of the classes of an object, is the user's."""
    if isinstance(value, types.FunctionType):
        return _is_own_module(value.__module__)
    return any(_is_own_module(base.__module__) for base in type(value).__mro__)


@functools.cache
def _is_own_module(name: str | None) -> bool:
    """Return whether a module is of the user's program: it is not installed, as packages of others are."""
    if name is None or name.partition(".")[0] in LIBRARIES:
        return False
    # A class of compiled code may name a module that is none
    module = sys.modules.get(name, sys.modules.get(name.partition(".")[0]))
    file = getattr(module, "__file__", None)
    return file is None or _INSTALLED.isdisjoint(Path(file).parts)


def _parts_of(value: Any, *, is_own: bool, only_own: bool) -> Iterator[tuple[str, Any]]:
    """Yield what an object consists of and may draw with, by name."""
    if isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield "function", value.__func__
    elif isinstance(value, types.FunctionType):
        yield from _variables_of(value)
    elif isinstance(value, functools.partial):
        yield "func", value.func
        yield "args", value.args
        yield "keywords", value.keywords
    elif isinstance(value, dict):
        yield from ((str(key), value[key]) for key in list(value)[:_MAX_ENTRIES])
    elif isinstance(value, list | tuple):
        yield from ((str(number), entry) for number, entry in enumerate(value[:_MAX_ENTRIES]))
    else:
        kind: Any = type(value)
        hidden = names_of_libraries(kind) if is_own and only_own else frozenset()
        for name, inner in attributes_of(value).items():
            if name not in hidden:
                yield name, inner
        for name in _METHODS_THAT_READ:
            method = getattr(type(value), name, None)
            if isinstance(method, types.FunctionType):
                yield name, method


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those in `__slots__`."""
    found = dict(getattr(value, "__dict__", ()))
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            inner = getattr(value, name, NOTHING)
            if inner is not NOTHING and name not in ("__dict__", "__weakref__"):
                found[name] = inner
    return found


def _variables_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function uses and does not make itself: defaults, closure and globals."""
    for number, default in enumerate(function.__defaults__ or ()):
        yield f"default{number}", default
    yield from (function.__kwdefaults__ or {}).items()
    yield from _closure_of(function).items()
    for name in function.__code__.co_names:
        # Other globals would lead through whole programs
        if isinstance(function.__globals__.get(name), GENERATOR_KINDS):
            yield name, function.__globals__[name]


def _closure_of(function: types.FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    return found


# --- where the program keeps values ---------------------------------------------------------------------------------


def _holders_of(value: Any, path: str, names: frozenset[str]) -> dict[str, Holder]:
    """Return the places of an object or a function of the program that may have values, by path."""
    if isinstance(value, types.FunctionType):
        return {path: _variables_holder(value), **_globals_holders(value)}
    kind: Any = type(value)  # a class is hashable, which mypy does not know
    hidden = names_of_libraries(kind)
    known = None
    if isinstance(value, torch.nn.Module | Trainer):
        known = names | names_of_program(kind)

    def read() -> dict[str, Any]:
        found = attributes_of(value)
        is_kept = [
            name for name in found if name not in hidden and (known is None or name in known)
        ]
        return {name: found[name] for name in is_kept}

    holders = {path: Holder(read, lambda name, inner: setattr(value, name, inner))}
    for method in _methods_of(type(value), of_program=True):
        holders |= _globals_holders(method)
    return holders


def _variables_holder(function: types.FunctionType) -> Holder:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def write(name: str, inner: Any) -> None:
        if name in cells:
            cells[name].cell_contents = inner

    return Holder(lambda: _closure_of(function), write)


def _globals_holders(function: types.FunctionType) -> dict[str, Holder]:
    """Return the global variables that a function assigns or may change in place, under the name of its module."""
    space = function.__globals__
    stored = stored_names(function.__code__, "STORE_GLOBAL")
    used = set(function.__code__.co_names)
    names = frozenset(
        name
        for name in used
        if name in stored or isinstance(space.get(name), list | dict | np.ndarray | torch.Tensor)
    )
    if not names:
        return {}

    def read() -> dict[str, Any]:
        return {name: space[name] for name in names if name in space}

    place = f"{function.__module__}.{function.__qualname__}.globals"
    return {place: Holder(read, space.__setitem__)}


@functools.cache
def names_of_libraries(kind: type) -> frozenset[str]:
    """Return the attributes that the classes of libraries among the bases of a class give its objects."""
    names = {
        name
        for base in kind.__mro__
        if not _is_own_module(base.__module__)
        for name in inspect.get_annotations(base)
    }
    return frozenset(names).union(*_assigned_by(kind, of_program=False))


@functools.cache
def names_of_program(kind: type) -> frozenset[str]:
    """Return the attributes that the methods of the program's own classes among the bases of a class assign."""
    return frozenset().union(*_assigned_by(kind, of_program=True))


def _assigned_by(kind: type, *, of_program: bool) -> Iterator[frozenset[str]]:
    for method in _methods_of(kind, of_program=of_program):
        yield stored_names(method.__code__, "STORE_ATTR")


def _methods_of(kind: type, *, of_program: bool) -> Iterator[types.FunctionType]:
    """Yield the functions of those bases of a class that are the program's own, or of those that are not."""
    for base in kind.__mro__:
        if _is_own_module(base.__module__) == of_program:
            for member in vars(base).values():
                function = _function_of(member)
                if function is not None:
                    yield function


def _function_of(member: Any) -> types.FunctionType | None:
    member = getattr(member, "__func__", getattr(member, "fget", member))
    while hasattr(member, "__wrapped__"):
        member = member.__wrapped__
    return member if isinstance(member, types.FunctionType) else None


@functools.cache
def stored_names(code: types.CodeType, operation: str) -> frozenset[str]:
    """Return the names that the code of a function assigns.

    Args:
        code (`CodeType`): the code.
        operation (`str`): how it assigns them: `STORE_ATTR` or `STORE_GLOBAL`.
    """
    number = dis.opmap[operation]
    names = set()
    argument = 0
    # `dis.get_instructions` would take ten times as long, and a training asks for all methods of its Trainer
    for found, byte in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = argument << 8 | byte
        if found == number:
            names.add(code.co_names[argument])
        if found != dis.EXTENDED_ARG:
            argument = 0
    return frozenset(names)
