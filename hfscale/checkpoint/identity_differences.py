"""How what a checkpoint is a state of differs from what a Trainer trains, in words."""

from collections.abc import Container, Iterable, Mapping

from hfscale.checkpoint.dataset_rows import LABEL_NAMES, LABELS, SAMPLE
from hfscale.checkpoint.manifest import Identity

ASPECTS = ("trainer", "model", "adapter", "tokenizer", "data")
"""The parts of an identity; each of them is a word of `resume_with_other`."""
EVALUATION = "evaluation"
"""The part that says what the evaluation reads. It may change: then its metrics are others."""
HASH = "content_hash"
DATE = "date"
"""The property of data whose chat template writes the date into each conversation."""

Properties = Mapping[str, str | int]


def differences(before: Identity, now: Identity, restored: Container[str] = ()) -> dict[str, str]:
    """Return how two identities differ, as far as both are known: a clause for each of `ASPECTS` that does.

    Args:
        before (`Identity`): that of a checkpoint.
        now (`Identity`): that of the Trainer that resumes from it.
        restored (`Container[str]`): samples of the data that may differ, since the checkpoint restores them.
    """
    found = {}
    for aspect in ASPECTS:
        old, new = before.get(aspect, {}), now.get(aspect, {})
        changed = _changed(old, new, restored)
        details = ", ".join(_details(old, new, changed))
        if details:
            found[aspect] = f"another {aspect} ({details})"
    return found


def changed_evaluation(before: Identity, now: Identity) -> list[str]:
    """Return the places of the evaluation data that hold other rows.

    Args:
        before (`Identity`): that of a checkpoint.
        now (`Identity`): that of the Trainer that resumes from it.
    """
    old = before.get(EVALUATION, {})
    new = now.get(EVALUATION, {})
    return _changed(old, new, ())


def is_of_another_day(before: Identity, now: Identity, restored: Container[str]) -> bool:
    """Return whether the rows differ only as those of a chat template that writes the date into them may.

    Args:
        before (`Identity`): that of a checkpoint.
        now (`Identity`): that of the Trainer that resumes from it.
        restored (`Container[str]`): as for `differences`.
    """
    old, new = before.get("data", {}), now.get("data", {})
    days = {old.get(DATE), new.get(DATE)}
    if len(days) == 1 or None in days:
        return False
    changed = _changed(old, new, restored)
    return bool(changed) and all(name == HASH or is_sample(name) for name in changed)


def is_sample(name: str) -> bool:
    """Return whether a property is a hash of some rows.

    Args:
        name (`str`): a property of an identity.
    """
    return name.partition(".")[0] == SAMPLE


def describe_samples(samples: Iterable[str]) -> str:
    """Return which places of a dataset hold other rows, with the usual reason.

    Args:
        samples (`Iterable[str]`): names that `row_hashes` returned.
    """
    places = sorted(name.partition(".")[2] for name in samples)
    where = ", ".join(filter(None, places))
    if where:
        where = f" in {where}"
    return f"other rows, order or numbers{where}: are a split, a shuffle or a set without a seed?"


def _changed(old: Properties, new: Properties, restored: Container[str]) -> list[str]:
    """Return the properties that are known on both sides and differ."""
    found = []
    for name in old:
        is_free = name == DATE or (is_sample(name) and name in restored)
        if name in new and old[name] != new[name] and not is_free:
            found.append(name)
    return found


def _details(old: Properties, new: Properties, changed: list[str]) -> list[str]:
    """Return how the properties of an aspect differ, each as a few words."""
    found = []
    samples = []
    for name in changed:
        if is_sample(name):
            samples.append(name)
        elif name == HASH:
            found.append("content")
        elif name == LABELS:
            # Names may be corrected; the same names with other numbers are other labels
            if old.get(LABEL_NAMES) == new.get(LABEL_NAMES):
                found.append("its labels have other numbers: does a set order them?")
        elif name != LABEL_NAMES:
            found.append(f"{name} {old[name]} -> {new[name]}")
    if samples and not found:
        found.append(describe_samples(samples))
    return found
