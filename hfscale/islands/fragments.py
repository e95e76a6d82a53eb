"""Fragments of a model that are exchanged one after another (Streaming DiLoCo, arXiv 2501.18512)."""

import re
from collections.abc import Sequence

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def assign_fragments(names: Sequence[str], sizes: Sequence[int], count: int) -> list[list[int]]:
    """Assigns every parameter to one of `count` fragments.

    Fragment p has the layers p, p + count, p + 2 * count, ...: the strided pattern of Streaming DiLoCo. Parameters
    outside layers, such as the embedding, go to the fragment with the fewest values, the largest first.

    Args:
        names (`Sequence[str]`): Names of the parameters; the first number in a name is its layer.
        sizes (`Sequence[int]`): Number of values of each.
        count (`int`): Number of fragments, at least 1.

    Returns:
        `list[list[int]]`: Per fragment the positions of its parameters in `names`, ascending.
    """
    fragments: list[list[int]] = [[] for _ in range(count)]
    values = [0] * count
    layers = {position: _LAYER.search(name) for position, name in enumerate(names)}
    outside = sorted((position for position in layers if layers[position] is None), key=lambda at: (-sizes[at], at))
    for position, found in layers.items():
        if found is not None:
            fragment = int(found[1]) % count
            fragments[fragment].append(position)
            values[fragment] += sizes[position]
    for position in outside:
        fragment = values.index(min(values))
        fragments[fragment].append(position)
        values[fragment] += sizes[position]
    return [sorted(fragment) for fragment in fragments]
