"""What a `compute_loss` of the user's keeps and logs on the ranks of the last stage, brought to those of the others.

Trainer logs on rank 0, which holds the first stage. There a metric that `compute_loss` keeps on `self`, or passes to
`self.log`, would be missing. After each step the attributes of the Trainer that have changed, and the logs, are sent
to all ranks of the replica, as JSON: numbers, texts, small tensors, and lists, dicts, sets and queues of them.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from transformers import Trainer

from hfscale.core.collectives import TRAINING
from hfscale.core.spelling import spelled
from hfscale.errors import UsageError

_LARGEST_TENSOR = 4096
"""Elements of the largest tensor that is sent: metrics are small."""
_KNOWN, _UNKNOWN = "known", "unknown"
_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "deque": deque}


class LossRecords:
    """Follows what `compute_loss` keeps in a Trainer's attributes and in the variables of a `compute_loss_func`.

    Args:
        trainer (`Trainer`): the Trainer.
        source (`int`): the rank of the process that computes the loss of this rank's replica.
        rank (`int`): this rank.
        pp (`int`): number of pipeline ranks, for messages.
    """

    def __init__(self, trainer: Trainer, *, source: int, rank: int, pp: int) -> None:
        self._trainer = trainer
        self._source = source
        self._rank = rank
        self._is_source = rank == source
        self._pp = pp
        self._logs: list[dict[str, float]] | None = None
        self._error: Exception | None = None

    def take_log(self, logs: Mapping[str, float]) -> bool:
        """Keep a log that `compute_loss` makes until the end of the step.

        Args:
            logs (`Mapping[str, float]`): what it gave to `Trainer.log`.

        Returns:
            Whether it was kept: false outside of `recording`, where it is an ordinary log.
        """
        if self._logs is None:
            return False
        self._logs.append(dict(logs))
        return True

    def fail(self, error: Exception) -> None:
        """Have all ranks raise an error at the end of `recording`, and not wait for the last stage.

        Args:
            error (`Exception`): what `compute_loss` has raised. The ranks on which it has not get its class and first
                line as a UsageError.
        """
        self._error = self._error or error

    def _sentence(self) -> str | None:
        """Return what the other ranks say of the error of `compute_loss`."""
        error = self._error
        if error is None or isinstance(error, UsageError):
            return None if error is None else str(error)
        first_line = str(error).partition("\n")[0]
        return (
            f"compute_loss has failed on rank {self._rank}, whose pipeline stage computes the loss: "
            f"{type(error).__name__}: {first_line}"
        )

    @contextmanager
    def recording(self) -> Iterator[list[dict[str, float]]]:
        """Bring what `compute_loss` keeps in the `with` block to all ranks, at its end. Enter it on every rank.

        Returns:
            A list that has the logs of the block afterwards, equal on all ranks of the replica.

        Raises:
            UsageError: it keeps what cannot be sent, or `fail` was called on another rank.
            Exception: what `fail` was called with on this rank.
        """
        places = self._places()
        before = [_encoded_values(place) for place in places] if self._is_source else []
        own_logs: list[dict[str, float]] = []
        self._logs = own_logs
        arrived: list[dict[str, float]] = []
        try:
            yield arrived
        finally:
            self._logs = None
        message: dict[str, Any] = {}
        if self._is_source:
            changes = [_changes(old, place) for old, place in zip(before, places, strict=True)]
            message = {"logs": self._encoded_logs(own_logs), "changes": changes}
        message["error"] = self._sentence()
        messages = TRAINING.gather("what compute_loss has kept and logged", message)
        if self._error is not None:
            raise self._error
        # Every rank raises what one of them has found: those of other replicas would wait in the next step
        for of_rank in messages:
            if of_rank["error"] is not None:
                raise UsageError(of_rank["error"])
        for of_rank in messages:
            changed_places = of_rank.get("changes", ())
            self._refuse_unknown([name for changed in changed_places for name in changed[_UNKNOWN]])
        received = messages[self._source]
        arrived.extend(_decode(received["logs"]))
        if not self._is_source:
            for place, changed in zip(self._places(), received["changes"], strict=True):
                for name, value in changed[_KNOWN].items():
                    place[name] = _updated(place.get(name), _decode(value))

    def _encoded_logs(self, logs: list[dict[str, float]]) -> Any:
        try:
            return _encode(logs)
        except TypeError as error:
            self.fail(
                UsageError(
                    f"compute_loss gives self.log a value that cannot be sent to the ranks of other pipeline stages "
                    f"({error}): log numbers"
                )
            )
            return _encode([])

    def _refuse_unknown(self, names: list[str]) -> None:
        if names:
            raise UsageError(
                f"compute_loss keeps what is not plain as {names[0]}, which cannot be sent to the ranks of the other "
                f"pipeline stages: keep numbers or small tensors, or set {spelled('pp_size', 1)} (it is {self._pp})"
            )

    def _places(self) -> list[Any]:
        """Return what maps names to values that `compute_loss` may keep: attributes, and variables of a closure."""
        function = self._trainer.compute_loss_func
        places: list[Any] = [vars(self._trainer)]
        if function is None:
            return places
        owner = getattr(function, "__self__", function)  # of a bound method
        attributes = vars(owner) if hasattr(owner, "__dict__") else {}
        return [*places, attributes, getattr(function, "keywords", {}), _Cells(function)]


class _Cells:
    """The variables of a function's closure, by name."""

    def __init__(self, function: Any) -> None:
        cells = getattr(function, "__closure__", None) or ()
        names = function.__code__.co_freevars if cells else ()
        self._cells = dict(zip(names, cells, strict=True))

    def items(self) -> list[tuple[str, Any]]:
        found = []
        for name, cell in self._cells.items():
            with suppress(ValueError):  # a variable that has no value yet
                found.append((name, cell.cell_contents))
        return found

    def get(self, name: str) -> Any:
        return dict(self.items()).get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value


def _encoded_values(place: Any) -> dict[str, str | int]:
    """Return each value as a text, or the identity of one that has no such form."""
    encoded: dict[str, str | int] = {}
    for name, value in list(place.items()):
        try:
            encoded[name] = json.dumps(_encode(value))
        except TypeError:
            encoded[name] = id(value)
    return encoded


def _changes(before: Mapping[str, Any], place: Any) -> dict[str, Any]:
    """Return what has another value than before, and the names of what has changed and no such form."""
    after = _encoded_values(place)
    changed = {name: value for name, value in after.items() if value != before.get(name)}
    known = {name: json.loads(value) for name, value in changed.items() if isinstance(value, str)}
    return {_KNOWN: known, _UNKNOWN: [name for name in changed if name not in known]}


def _encode(value: Any) -> Any:
    """Return a value in a form that JSON can represent.

    Raises:
        TypeError: it is neither plain nor a container of what is plain.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        if value.numel() > _LARGEST_TENSOR or value.layout is not torch.strided:
            raise TypeError("a large tensor")
        dtype = str(value.dtype).removeprefix("torch.")
        return {"kind": "tensor", "dtype": dtype, "value": value.detach().cpu().tolist()}
    if isinstance(value, Mapping):
        return {
            "kind": "dict",
            "value": [[_encode(key), _encode(own)] for key, own in value.items()],
        }
    for kind, container in _CONTAINERS.items():
        if isinstance(value, container):
            return {"kind": kind, "value": [_encode(own) for own in value]}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a scalar of numpy
        return value.item()
    raise TypeError(type(value).__name__)


def _decode(value: Any) -> Any:
    """Return the value that `_encode` has been given; other mappings are dicts then, and tensors are on the CPU."""
    if not isinstance(value, dict):
        return value
    if value["kind"] == "tensor":
        return torch.tensor(value["value"], dtype=getattr(torch, value["dtype"]))
    if value["kind"] == "dict":
        return {_decode(key): _decode(own) for key, own in value["value"]}
    return _CONTAINERS[value["kind"]](_decode(own) for own in value["value"])


def _updated(own: Any, value: Any) -> Any:
    """Return a container of this rank with other contents, since others may refer to it; anything else is replaced."""
    if isinstance(own, dict) and isinstance(value, dict):
        new = {key: _updated(own.get(key), item) for key, item in value.items()}
        own.clear()
        own.update(new)
        return own
    if isinstance(own, list | deque) and isinstance(value, list | deque):
        own.clear()
        own.extend(value)
        return own
    if isinstance(own, set) and isinstance(value, set):
        own.clear()
        own.update(value)
        return own
    return value
