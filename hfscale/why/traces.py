"""Finds the first difference between the traces of two runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hfscale.why.difference import Difference, Earlier
from hfscale.why.tolerance import relative_difference, relative_tolerance
from hfscale.why.trace_files import Event, RankTrace

_KIND_OF_PHASE = {
    "weights": "weights",
    "states": "optimizer",
    "batch": "data",
    "rng": "rng",
    "forward": "forward",
    "loss": "forward",
    "backward": "backward",
    "local_gradient": "backward",
    "gradient": "gradient",
    "clipping": "clipping",
    "optimizer": "optimizer",
    "updated": "optimizer",
}
_ORDER = {phase: number for number, phase in enumerate(_KIND_OF_PHASE)} | {
    "backward": 7,
    "local_gradient": 7,
}
_RANDOM = ("dropout", "bernoulli", "rand", "normal_", "uniform_", "exponential_", "multinomial")
"""Parts of the names of operations that draw random numbers."""
_AFTER_NORM = ("clipping", "optimizer", "updated")
_OF_INPUT = "gradient of input"
_ATTENTION = "scaled_dot_product"
_MODULUS = 2**64


@dataclass(frozen=True, kw_only=True)
class TraceDifference:
    """What the comparison of the traces of one step has found."""

    difference: Difference
    """The first difference, or none."""
    before: Sequence[Earlier] = field(default=())
    """Settings of modules and optimizer, and random states, that differ."""
    detail: str = ""
    """Which value differs, for the explanation."""
    compared: int = 0
    """Number of values that were compared."""
    skipped: int = 0
    """Values of one run that the other does not have in the same size."""
    unstable_step: int | None = None
    """A step that changes the weights so much that later steps of other layouts cannot be compared (`growth`)."""


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The first value of a rank that differs."""

    order: tuple[int, int, int]
    rank: int
    index: int
    a: Event | None
    b: Event | None


def compare_exactly(step: int, a: Sequence[RankTrace], b: Sequence[RankTrace]) -> TraceDifference:
    """Compare the traces of one step of two runs of the same layout bit by bit.

    Args:
        step (`int`): the step.
        a (`Sequence[RankTrace]`): the traces of all ranks of the first run.
        b (`Sequence[RankTrace]`): those of the second.
    """
    before = _settings(a, b)
    found: list[_Found] = []
    compared = 0
    for x, y in zip(a, b, strict=True):
        first, count = _first_of_rank(x, y)
        compared += count
        if first is not None:
            found.append(first)
    rng = _rng_difference(a, b)
    if not found:
        return TraceDifference(difference=Difference(kind="none"), before=before, compared=compared)
    first = min(found, key=lambda one: (one.order, one.rank))
    difference, detail = _located(step, first, a[first.rank], b[first.rank])
    if rng is not None:
        before = [*before, rng]
        difference = _blame_random_numbers(difference, a[first.rank], rng)
    others = [one.rank for one in found if one.order == first.order]
    if len(a) > 1:
        detail += " on all ranks" if len(others) == len(a) else f" on rank {first.rank} first"
    return TraceDifference(difference=difference, before=before, detail=detail, compared=compared)


def _first_of_rank(a: RankTrace, b: RankTrace) -> tuple[_Found | None, int]:
    """Return the first differing value of a rank, without settings, random states and single operations."""
    left = [
        (i, event)
        for i, event in enumerate(a.events)
        if event.phase in _KIND_OF_PHASE and event.phase != "rng"
    ]
    right = [event for event in b.events if event.phase in _KIND_OF_PHASE and event.phase != "rng"]
    for number, ((index, x), y) in enumerate(zip(left, right, strict=False)):
        if x.key != y.key or (x.value != y.value and not _same_bits(x, y)):
            order = (x.micro, _ORDER[x.phase], index)
            return _Found(order=order, rank=a.rank, index=index, a=x, b=y), number + 1
    if len(left) != len(right):
        number = min(len(left), len(right))
        event = left[number][1] if len(left) > len(right) else right[number]
        index = left[number][0] if len(left) > len(right) else len(a.events)
        one, other = (event, None) if len(left) > len(right) else (None, event)
        order = (event.micro, _ORDER[event.phase], index)
        return _Found(order=order, rank=a.rank, index=index, a=one, b=other), number
    return None, len(left)


def _same_bits(x: Event, y: Event) -> bool:
    return x.is_tensor and y.is_tensor and x.value[:3] == y.value[:3]


def _located(step: int, found: _Found, a: RankTrace, b: RankTrace) -> tuple[Difference, str]:
    """Name module and operation of a difference."""
    event = found.a or found.b
    assert event is not None
    if found.b is not None and found.b.key not in {one.key for one in a.events}:
        event = found.b  # what the second run alone has
    if found.a is None or found.b is None or found.a.key != found.b.key:
        texts = [
            "nothing" if one is None else f"{one.value_name} of {one.name or 'the step'}"
            for one in (found.a, found.b)
        ]
        difference = Difference(
            kind=_KIND_OF_PHASE[event.phase],
            step=step,
            rank=found.rank,
            module=event.name or None,
            operation="structure",
            a=texts[0],
            b=texts[1],
        )
        return difference, f"the runs compute other things: {texts[0]} and {texts[1]}"
    module, operation = _place(found, event, a, b)
    difference = Difference(
        kind=_KIND_OF_PHASE[event.phase],
        step=step,
        rank=found.rank,
        module=module or None,
        operation=operation,
        a=_shown(found.a),
        b=_shown(found.b),
    )
    return difference, f"{event.value_name} of {event.name or 'the step'} differs"


def _place(found: _Found, event: Event, a: RankTrace, b: RankTrace) -> tuple[str, str | None]:
    """Return the module in which a difference arises, and the operation."""
    if event.phase not in ("forward", "backward", "local_gradient", "loss"):
        return event.name, event.value_name
    known = [i for i in range(found.index) if a.events[i].phase in ("forward", "backward")]
    previous = a.events[known[-1]] if known else None
    operation = _operation(a, b, event, known[-1] if known else 0, found.index)
    name = event.name
    arises_outside = event.value_name.startswith("input") or event.value_name.startswith(
        "gradient of output"
    )
    if arises_outside and previous is not None and previous.phase == event.phase:
        name = _common_parent(previous.name, name)
    return name, operation or (event.value_name if event.phase != "local_gradient" else "gradient")


def _common_parent(first: str, second: str) -> str:
    if first == second:
        return first
    x, y = first.split("."), second.split(".")
    common = 0
    while common < min(len(x), len(y)) and x[common] == y[common]:
        common += 1
    return ".".join(x[:common])


def _operation(a: RankTrace, b: RankTrace, event: Event, begin: int, end: int) -> str | None:
    """Return the first operation that differs between two values of the first run; None if none was recorded."""
    wanted = [one for one in a.events[begin:end] if one.phase == "operation"]
    if not wanted:
        return None
    # The same operations of the other run come before the same value.
    position = next((i for i, one in enumerate(b.events) if one.key == event.key), None)
    if position is None:
        return None
    start = position
    while start > 0 and b.events[start - 1].phase in ("operation", "rng"):
        start -= 1
    others = [one for one in b.events[start:position] if one.phase == "operation"]
    for x, y in zip(wanted, others, strict=False):
        if x.value_name != y.value_name or not _same_bits(x, y):
            return (
                y.value_name
                if x.value_name == y.value_name
                else f"{x.value_name} and {y.value_name}"
            )
    if len(wanted) != len(others):
        longer = wanted if len(wanted) > len(others) else others
        return longer[min(len(wanted), len(others))].value_name
    return None


def _shown(event: Event) -> Any:
    if not event.is_tensor:
        return event.value
    shape = "x".join(map(str, event.value[0])) or "scalar"
    return {
        "shape": shape,
        "dtype": event.value[1],
        "hash": event.digest_hash,
        "norm": event.square**0.5,
    }


# ---- random numbers


def _rng_difference(a: Sequence[RankTrace], b: Sequence[RankTrace]) -> Earlier | None:
    """Return the random states before a micro-batch that differ, if the step draws from them."""
    for x, y in zip(a, b, strict=True):
        states = [
            {event.key: event.value for event in trace.events if event.phase == "rng"}
            for trace in (x, y)
        ]
        for key, value in states[0].items():
            if key[3] != "before" or value == states[1].get(key):
                continue
            after = states[0].get((*key[:3], "after"))
            if after != value:
                name = f"random state of rank {x.rank} before micro-batch {key[1]}"
                return Earlier(kind="rng", name=name, a=value, b=states[1].get(key))
    return None


def _blame_random_numbers(difference: Difference, trace: RankTrace, rng: Earlier) -> Difference:
    """Return a difference of the forward as one of random numbers, if it arises where these are drawn."""
    if difference.kind != "forward":
        return difference
    operation = difference.operation or ""
    knows_operations = bool(trace.header.get("parts", {}).get("operations"))
    draws = any(part in operation for part in _RANDOM) or _ATTENTION in operation
    if knows_operations and operation.startswith("aten.") and not draws:
        return difference
    return Difference(
        kind="rng",
        step=difference.step,
        rank=difference.rank,
        module=difference.module,
        operation=difference.operation,
        a=rng.a,
        b=rng.b,
    )


# ---- settings


def _settings(a: Sequence[RankTrace], b: Sequence[RankTrace]) -> list[Earlier]:
    """Return the settings of modules and optimizer that differ on any rank."""
    found: dict[str, Earlier] = {}
    for x, y in zip(a, b, strict=False):
        first, second = _settings_of(x), _settings_of(y)
        for key in first | second:
            if first.get(key) != second.get(key):
                name = ".".join(part for part in key if part)
                where = "" if len(a) == 1 else f" on rank {x.rank}"
                found.setdefault(
                    name,
                    Earlier(
                        kind="config", name=f"{name}{where}", a=first.get(key), b=second.get(key)
                    ),
                )
    return list(found.values())


def _settings_of(trace: RankTrace) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for event in trace.events:
        if event.phase == "settings":
            found[event.name, event.value_name] = event.value
        elif event.phase == "weights":
            found[event.name, "dtype"] = event.value[1]
    return found


# ---- runs of different layouts


@dataclass(kw_only=True)
class _Total:
    """A value of a run, added up over ranks and micro-batches."""

    square: float = 0.0
    sum: float = 0.0
    elements: int = 0
    by_rank: dict[int, tuple[float, int]] = field(default_factory=dict)
    text: int = 0
    plain: Any = None


def compare_within_rounding(
    step: int,
    a: Sequence[RankTrace],
    b: Sequence[RankTrace],
    *,
    dtype: str,
    elements_on_cpu: int = 0,
) -> TraceDifference:
    """Compare the traces of one step of two runs of different layouts on norms and sums over all ranks.

    Values that several ranks hold are recognised by their number of elements. Those that the runs do not have in a
    comparable size, such as activations with other padding, are skipped and counted. So are gradients of inputs: of a
    tensor that several modules use, FSDP2 has one for each use, and other layouts have their sum.

    Args:
        step (`int`): the step.
        a (`Sequence[RankTrace]`): the traces of all ranks of the first run.
        b (`Sequence[RankTrace]`): those of the second.
        dtype (`str`): the format of the lowest precision in which the runs compute.
        elements_on_cpu (`int`): parameters of the model, if a run was on a CPU (`norm_tolerance`).
    """
    first, second = _totals(a), _totals(b)
    scales = [_data_parallel(a), _data_parallel(b)]
    ranks = max(len(a), len(b))
    before = [
        one
        for one in _settings(a[:1], b[:1])
        if isinstance(one.a, float) or isinstance(one.b, float)
    ]
    compared = skipped = 0
    for key, x in sorted(
        first.items(), key=lambda item: _ORDER[item[0][0]]
    ):  # the loss is recorded after the backward
        y = second.get(key)
        phase, _, value_name = key
        if y is None or value_name.startswith(_OF_INPUT) or (not x.elements and not x.text):
            skipped += y is None or value_name.startswith(_OF_INPUT)
            continue
        if phase == "batch":
            if value_name.startswith("rows"):
                compared += 1
                if (x.text * _copies(b) - y.text * _copies(a)) % _MODULUS:
                    return _cross(
                        step,
                        "data",
                        key,
                        f"{x.text:016x}",
                        f"{y.text:016x}",
                        None,
                        before,
                        compared,
                    )
            continue
        copies = _copies_of(x, y)
        if copies is None:
            skipped += 1
            continue
        compared += 1
        squares = [x.square, y.square / copies]
        sums = [x.sum, y.sum / copies]
        if phase == "backward":
            squares = [square / scale**2 for square, scale in zip(squares, scales, strict=True)]
            sums = [total / scale for total, scale in zip(sums, scales, strict=True)]
        elif phase == "loss":
            squares, sums = (
                [0.0, 0.0],
                [x.sum / x.elements * _micros(a), y.sum / y.elements * _micros(b)],
            )
        # Later weights carry the error of gradients
        chained = phase not in ("forward", "loss") or step > 1
        # Clipping has multiplied all gradients by the norm's error
        is_clipped = phase in _AFTER_NORM or step > 1
        of_norm = elements_on_cpu if is_clipped else 0
        limit = relative_tolerance(dtype, ranks=ranks, steps=step, chained=chained, of_norm=of_norm)
        norms = [square**0.5 for square in squares]
        if relative_difference(*norms) > limit or _sums_differ(sums, max(norms), x.elements, limit):
            rank = _odd_rank(x, y, limit) if copies > 1 else None
            return _cross(
                step, _KIND_OF_PHASE[phase], key, *_pair(norms, sums), rank, before, compared
            )
    return TraceDifference(
        difference=Difference(kind="none"), before=before, compared=compared, skipped=skipped
    )


def growth(traces: Sequence[RankTrace]) -> float:
    """Return by how much a step has changed the norm of all weights, relative to what it was.

    A step that changes it much, of a learning rate that is far too large, amplifies rounding without a bound: the
    weights after it hardly depend on those before. 0 if the trace has no weights.

    Args:
        traces (`Sequence[RankTrace]`): the traces of all ranks of a run, of one step.
    """
    squares = dict.fromkeys(("weights", "updated"), 0.0)
    for (phase, _, value_name), total in _totals(traces).items():
        if phase in squares and value_name != "buffer":
            squares[phase] += total.square
    before, after = squares["weights"] ** 0.5, squares["updated"] ** 0.5
    return abs(after - before) / before if before and after else 0.0


def _pair(norms: Sequence[float], sums: Sequence[float]) -> tuple[Any, Any]:
    pairs = [{"norm": norm, "sum": total} for norm, total in zip(norms, sums, strict=True)]
    return pairs[0], pairs[1]


def _cross(
    step: int,
    kind: str,
    key: tuple[str, str, str],
    a: Any,
    b: Any,
    rank: int | None,
    before: list[Earlier],
    compared: int,
) -> TraceDifference:
    _, name, value_name = key
    difference = Difference(
        kind=kind, step=step, rank=rank, module=name or None, operation=value_name, a=a, b=b
    )
    detail = f"{value_name} of {name or 'the step'} differs, added up over ranks"
    return TraceDifference(difference=difference, before=before, detail=detail, compared=compared)


def _sums_differ(sums: Sequence[float], norm: float, elements: int, limit: float) -> bool:
    """Return whether two sums differ by more than the rounding of their terms, of which each may be `limit` of it."""
    explained: float = limit * max(norm * math.sqrt(elements), abs(sums[0]), 1e-30)
    return abs(sums[0] - sums[1]) > explained


def _totals(traces: Sequence[RankTrace]) -> dict[tuple[str, str, str], _Total]:
    found: dict[tuple[str, str, str], _Total] = {}
    for trace in traces:
        for event in trace.events:
            if event.phase not in _KIND_OF_PHASE or event.phase in ("rng", "local_gradient"):
                continue
            if event.phase in ("forward", "backward") and event.is_tensor and not event.value[0]:
                continue  # a loss, which each rank has divided by the tokens of all or by its own
            total = found.setdefault((event.phase, event.name, event.value_name), _Total())
            if event.is_tensor:
                square, elements = total.by_rank.get(trace.rank, (0.0, 0))
                total.by_rank[trace.rank] = (square + event.square, elements + event.elements)
                total.square += event.square
                total.sum += event.sum
                total.elements += event.elements
            elif isinstance(event.value, str) and event.phase == "batch":
                total.text = (total.text + int(event.value, 16)) % _MODULUS
    return found


def _copies_of(x: _Total, y: _Total) -> float | None:
    """Return how often the second run holds what the first one has; None if their sizes do not fit."""
    if not x.elements or not y.elements:
        return None
    copies = y.elements / x.elements
    return copies if copies.is_integer() or (1 / copies).is_integer() else None


def _odd_rank(x: _Total, y: _Total, limit: float) -> int | None:
    """Return the first rank of the second run whose own copy differs from the first run's."""
    for rank, (square, elements) in sorted(y.by_rank.items()):
        if elements == x.elements and relative_difference(square**0.5, x.square**0.5) > limit:
            return rank
    return None


def _layout(traces: Sequence[RankTrace]) -> Mapping[str, Any]:
    layout = traces[0].header.get("layout")
    return layout if isinstance(layout, Mapping) else {}


def _data_parallel(traces: Sequence[RankTrace]) -> int:
    """Return the number of ranks over which gradients are averaged: each rank's own gradients are as many times it."""
    layout = _layout(traces)
    return (
        int(layout.get("dp_replicate", 1))
        * int(layout.get("dp_shard", 1))
        * int(layout.get("cp", 1))
    )


def _copies(traces: Sequence[RankTrace]) -> int:
    """Return how many ranks read the same rows."""
    return max(len(traces) // max(_data_parallel(traces), 1), 1)


def _micros(traces: Sequence[RankTrace]) -> int:
    return 1 + max((event.micro for event in traces[0].events if event.phase == "loss"), default=0)
