"""Reads what the free text of a table of runs says: names of models and GPUs, notes, and descriptions of networks.

Tables of published runs have no columns for experts, adapters or the software, and name them in a text. Where a table
has such a column, it decides (`hfscale.planner.table`).
"""

import re
from collections.abc import Iterable, Mapping

from hfscale.errors import UsageError
from hfscale.planner.options import Method

GPUS_PER_NODE = 8
"""GPUs per node that are assumed."""
LARGEST_SHARE_GB_S = 200.0
"""A bandwidth above this, GB/s, is not that of a single GPU: 800 Gbit/s cards have 100 GB/s."""

_EXPERTS = re.compile(r"(\d+)\s*e(?:xperts?)?\W*top\W*(\d+)", flags=re.IGNORECASE)
"""`8e top2` in a model's name: a mixture of 8 experts, 2 of them per token."""
_ACTIVE_EXPERTS = re.compile(
    r"(\d+)\s*(?:routed\s+)?experts?\W*(\d+)\s*(?:active|activated|selected|used|per\s+token)",
    flags=re.IGNORECASE,
)
"""`64 experts, 6 active` in a model's name."""
_MIXTURE = re.compile(
    r"moe\b|mixture[ -]of|\bexperts?\b|\d+(?:\.\d+)?b-?a\d+(?:\.\d+)?b|\b\d+e\b"
    r"|\b(?:mixtral|dbrx|grok|arctic|gpt-?oss|kimi-?k2)|deepseek-?v[23]",
    flags=re.IGNORECASE,
)
"""Words of a mixture of experts in a model's name that do not give the experts: `MoE`, `30B-A3B`, `17B-16E`, or the
name of a series that has no dense model."""
_TIMES = re.compile(r"\b(\d+)x\d+(?:\.\d+)?b\b", flags=re.IGNORECASE)
"""`8x7B` in a model's name: a mixture of 8 experts, 2 of them per token as in Mixtral."""
_PYTORCH_3D = re.compile(r"nanotron|picotron|torchtitan", flags=re.IGNORECASE)
"""Software that combines the axes in PyTorch without Megatron's fused kernels."""
_POWER_LIMIT = re.compile(r"[-_ ]*power[-_ ]?(?:limited|capped)\b", flags=re.IGNORECASE)
"""A power limit without a number in a GPU's name: `H100-80GB power-limited`."""


def experts_in(model: str, note: str) -> tuple[int, int]:
    """Return the experts of a layer and of a token that a model's name or a note says; zeros for a dense model.

    Args:
        model (`str`): the model's name.
        note (`str`): the note.

    Raises:
        UsageError: the name is that of a mixture of experts, and neither says of how many.
    """
    text = f"{model} {note}"
    if found := _EXPERTS.search(text) or _ACTIVE_EXPERTS.search(text):
        return int(found[1]), int(found[2])
    if found := _TIMES.search(model):
        return int(found[1]), 2
    if found := _MIXTURE.search(model):
        raise UsageError(
            f"model {model!r} is a mixture of experts ({found[0]}), and the row does not say of how many: write the "
            "experts and those of a token into the name, such as '8e top2', or use a name of the catalogue"
        )
    return 0, 0


def adapters_in(texts: Mapping[str, str]) -> tuple[Method, str | None]:
    """Return the method of training that texts such as `LoRA fine-tune` say; what is in brackets there is ignored.

    Args:
        texts (`Mapping[str, str]`): the texts by column.

    Returns:
        `tuple[Method, str | None]`: the method, and the column that says so; `full` and None where none does.
    """
    for column, text in texts.items():
        lower = text.lower()
        if "lora" not in lower:  # the usual case, and faster than the regular expressions
            continue
        found = re.search(r"\b(q?)lora\b", re.sub(r"\([^)]*\)", "", lower))
        if found is not None:
            return ("qlora" if found[1] else "lora"), column
    return "full", None


def names_pytorch_3d(texts: Iterable[str]) -> bool:
    """Return whether a text names nanotron, picotron or torchtitan, which combine the axes in PyTorch.

    Args:
        texts (`Iterable[str]`): the texts.
    """
    return any(_PYTORCH_3D.search(text) for text in texts)


def without_power_limit(gpu: str) -> str:
    """Return the name of a GPU without a power limit that has no number.

    Args:
        gpu (`str`): the name, such as `H100-80GB power-limited`.
    """
    return _POWER_LIMIT.sub("", gpu)


def interconnect_gb_s(text: str) -> float | None:
    """Read GB/s per GPU and direction in a text such as `50 GB/s`, `400Gb/s per GPU`, `3.2Tbps` or `8x400Gb`.

    A total per node, that is a number of cards, terabits or more than a single GPU can have, is divided by eight. A
    number without a unit is in GB/s.

    Returns:
        `float`, *optional*: the bandwidth; None for a kind of network without a number (`InfiniBand`), which stands
            for that of the reference node.

    Raises:
        UsageError: the text has a number that is not a bandwidth.
    """
    if not re.search(r"\d", text):
        return None
    found = re.search(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*(G|T)(B|b)(?!i?t?E)", text)
    if not found:
        try:
            return float(text)
        except ValueError:
            raise UsageError(
                f"interconnect is {text!r}, which has no bandwidth: write 50 GB/s or 400 Gb/s"
            ) from None
    cards, value, scale, unit = found.groups()
    gigabytes = int(cards or 1) * float(value)
    if scale == "T":
        gigabytes *= 1000
    if unit == "b":
        gigabytes /= 8
    # Papers give the bandwidth of a node or of a GPU without saying of which.
    is_of_node = cards or scale == "T" or "node" in text.lower() or gigabytes > LARGEST_SHARE_GB_S
    if is_of_node and "per gpu" not in text.lower():
        return gigabytes / GPUS_PER_NODE
    return gigabytes
