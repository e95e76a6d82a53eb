"""Compares what two runs have logged at each step: data, learning rate, loss, gradient norm."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hfscale.why.difference import Difference, Earlier
from hfscale.why.run_folder import Fingerprint, RunFolder, elements_on_cpu
from hfscale.why.settings import lowest_of_both, most_ranks
from hfscale.why.tolerance import relative_difference, relative_tolerance

_MODULUS = 2**64
SETTLING_STEPS = 3
"""Steps after which a difference that only grows slowly counts as rounding that the training has amplified."""
JUMP = 4.0
"""A difference is more than drift if it is this many times the largest one of the `SETTLING_STEPS` logs before."""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """What the comparison of two runs' logs has found."""

    difference: Difference
    """The first difference, or none."""
    before: Sequence[Earlier] = ()
    """What differed in the same place or just before, besides settings."""
    steps: int = 0
    """Number of logged steps that both runs have."""
    last_step: int | None = None
    """The last of them."""
    drifts_from: int | None = None
    """The step from which the runs differ by more than the tolerance, but grow apart slowly."""
    largest: float = 0.0
    """The largest relative difference of the loss over these steps."""


def compare_curves(a: RunFolder, b: RunFolder, *, exact: bool) -> Curves:
    """Find the first logged step at which two runs differ beyond what the arithmetic explains.

    Args:
        a (`RunFolder`): the first run.
        b (`RunFolder`): the second run.
        exact (`bool`): whether they must agree bit by bit.

    Returns:
        `Curves`: the difference, with its kind: `data` if other rows were read, `optimizer` for another learning rate,
            `weights` if the runs began with other weights, `forward` for the loss, `backward` for the gradient norm.
    """
    steps = sorted(a.numbers.keys() & b.numbers.keys())
    found = [
        one
        for one in (_first_data(a.fingerprints, b.fingerprints), _first_weights(a, b, exact=exact))
        if one is not None
    ]
    number, drifts_from = _first_number(a, b, steps, exact=exact)
    if number is not None:
        found.append(number)
    first = min(found, key=Difference.order, default=Difference(kind="none"))
    before: list[Earlier] = []
    if first.kind == "forward" and first.step is not None:
        rng = _rng_before(a.fingerprints, b.fingerprints, first.step) if exact else None
        if rng is not None:
            before.append(rng)
        first = _place(first, steps, a, b, rng)
    losses = [
        relative_difference(a.numbers[s]["loss"], b.numbers[s]["loss"])
        for s in steps
        if _has(a, b, s, "loss") and a.begins[s] == b.begins[s]
    ]
    return Curves(
        difference=first,
        before=before,
        steps=len(steps),
        last_step=steps[-1] if steps else None,
        drifts_from=drifts_from if not first.is_one else None,
        largest=max(losses, default=0.0),
    )


def _has(a: RunFolder, b: RunFolder, step: int, key: str) -> bool:
    return key in a.numbers[step] and key in b.numbers[step]


def _first_number(
    a: RunFolder, b: RunFolder, steps: Sequence[int], *, exact: bool
) -> tuple[Difference | None, int | None]:
    """Return the first difference of a number, and the step from which the runs only drift apart."""
    dtype = lowest_of_both(a, b)
    ranks = most_ranks(a, b)
    elements = elements_on_cpu(a, b)
    recent: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    drifts_from = None
    for index, step in enumerate(steps):
        for key, kind in (
            ("learning_rate", "optimizer"),
            ("loss", "forward"),
            ("grad_norm", "backward"),
        ):
            if not _has(a, b, step, key):
                continue
            x, y, is_mean = a.numbers[step][key], b.numbers[step][key], False
            if key == "loss" and a.begins[step] != b.begins[step]:
                begin = min(a.begins[step], b.begins[step])
                means = [_mean_loss(run, begin, step) for run in (a, b)]
                if means[0] is None or means[1] is None:
                    continue
                x, y, is_mean = means[0], means[1], True
            apart = relative_difference(x, y)
            difference = Difference(kind=kind, step=step, operation=key, a=x, b=y)
            if key == "learning_rate":
                if apart > 1e-9:  # both are computed in double precision, from the same formula
                    return difference, None
                continue
            if exact and not is_mean:
                if apart > 0:
                    return difference, None
                continue
            is_norm = key == "grad_norm"
            limit = relative_tolerance(
                dtype, ranks=ranks, steps=step, chained=is_norm, of_norm=elements if is_norm else 0
            )
            before = recent[key][-SETTLING_STEPS:]
            recent[key].append(apart)
            if apart <= limit:
                continue
            if (
                index < SETTLING_STEPS
                or math.isinf(apart)
                or apart > JUMP * max(before, default=0.0)
            ):
                return difference, None
            drifts_from = drifts_from or step
    return None, drifts_from


def _mean_loss(run: RunFolder, begin: int, step: int) -> float | None:
    """Return the mean loss of the steps after `begin` up to `step`; None if the logs of a run do not divide there."""
    total, end = 0.0, step
    while end > begin:
        if (
            end not in run.numbers
            or "loss" not in run.numbers[end]
            or not begin <= run.begins[end] < end
        ):
            return None
        total += run.numbers[end]["loss"] * (end - run.begins[end])
        end = run.begins[end]
    return total / (step - begin)


def _place(
    first: Difference, steps: Sequence[int], a: RunFolder, b: RunFolder, rng: Earlier | None
) -> Difference:
    """Say what a loss that differs comes from: other random numbers, other weights before the step, or the forward."""
    assert first.step is not None
    if rng is not None:
        return _changed(first, "rng")
    earlier = [step for step in steps if step < first.step]
    if not earlier:
        return first
    models = [_weights_hash(run, earlier[-1]) for run in (a, b)]
    if None not in models and models[0] == models[1]:
        return first  # the checkpoint before this step is the same
    return _changed(first, "optimizer") if first.step - earlier[-1] == 1 else first


def _changed(one: Difference, kind: str) -> Difference:
    return Difference(kind=kind, step=one.step, operation=one.operation, a=one.a, b=one.b)


def _weights_hash(run: RunFolder, step: int) -> tuple[tuple[str, str], ...] | None:
    manifest = run.manifests.get(step)
    if manifest is None:
        return None
    files = [
        (name, record.xxh3_128)
        for name, record in manifest.files.items()
        if name.endswith(".safetensors")
    ]
    return tuple(sorted(files)) or None


# ---- data, random states, weights


def _first_data(a: Sequence[Fingerprint], b: Sequence[Fingerprint]) -> Difference | None:
    """Return the first window in which the runs have trained on other rows."""
    for x, y in _common_windows(a, b):
        for name in ("inputs", "labels"):
            first, second = getattr(x, name), getattr(y, name)
            if first is None or second is None:
                continue
            if (first * y.copies - second * x.copies) % _MODULUS:
                return Difference(
                    kind="data",
                    step=x.begun + 1,
                    operation=name,
                    a=f"{first:016x}",
                    b=f"{second:016x}",
                )
    return None


def _common_windows(
    a: Sequence[Fingerprint], b: Sequence[Fingerprint]
) -> list[tuple[Fingerprint, Fingerprint]]:
    """Join the windows of two runs that log at other steps, until they begin and end together."""
    found = []
    i = j = 0
    while i < len(a) and j < len(b):
        x, y = a[i], b[j]
        if x.begun != y.begun:  # a window of one run alone
            i, j = (i + 1, j) if x.begun < y.begun else (i, j + 1)
            continue
        while x.step != y.step:
            if x.step < y.step:
                i += 1
                if i == len(a) or a[i].begun != x.step:
                    break
                x = _joined(x, a[i])
            else:
                j += 1
                if j == len(b) or b[j].begun != y.step:
                    break
                y = _joined(y, b[j])
        if x.step != y.step:
            continue
        found.append((x, y))
        i, j = i + 1, j + 1
    return found


def _joined(first: Fingerprint, second: Fingerprint) -> Fingerprint:
    def added(name: str) -> int | None:
        x, y = getattr(first, name), getattr(second, name)
        return None if x is None or y is None else (x + y) % _MODULUS

    return Fingerprint(
        begun=first.begun,
        step=second.step,
        inputs=added("inputs"),
        labels=added("labels"),
        copies=first.copies,
        rng=second.rng,
        weights=first.weights,
    )


def _rng_before(a: Sequence[Fingerprint], b: Sequence[Fingerprint], step: int) -> Earlier | None:
    """Return the random states before a step if they differ and the step has drawn from them."""
    states: list[Mapping[int, str | None]] = [{one.step: one.rng for one in run} for run in (a, b)]
    common = sorted(states[0].keys() & states[1].keys())
    earlier = [one for one in common if one < step]
    drawn = step in states[0] and (not earlier or states[0][step] != states[0][earlier[-1]])
    where = earlier[-1] if earlier else step
    if (
        not common
        or where not in states[0]
        or not drawn
        or states[0][where] == states[1].get(where)
    ):
        return None
    if not earlier and len(common) > 1 and states[0][common[0]] == states[0][common[1]]:
        return None  # the run draws nothing while it trains
    return Earlier(
        kind="rng", name=f"random states after step {where}", a=states[0][where], b=states[1][where]
    )


def _first_weights(a: RunFolder, b: RunFolder, *, exact: bool) -> Difference | None:
    """Return the difference of the weights with which two launches at the same step began."""
    starts = [{one.begun: one.weights for one in run.fingerprints if one.weights} for run in (a, b)]
    for begun in sorted(starts[0].keys() & starts[1].keys()):
        x, y = starts[0][begun], starts[1][begun]
        if x.get("elements", 0) <= 0 or y.get("elements", 0) <= 0:
            continue
        copies = y["elements"] / x["elements"]
        if copies != 1.0 and exact:
            continue
        if max(copies, 1 / copies) % 1:
            continue  # not the same parameters, as with padded shards
        first, second = x["norm"], y["norm"] / copies**0.5
        apart = relative_difference(first, second)
        # The squares are added up in double precision; only a resumed run begins with weights that have been rounded.
        if apart > (1e-12 if begun == 0 else 1e-6):
            return Difference(
                kind="weights", step=begun + 1, operation="norm", a=x["norm"], b=y["norm"]
            )
    return None
