"""A row's words -> values: precision, recomputation, method, network, GPU."""

import re
from collections.abc import Mapping

from hfscale.errors import UsageError
from hfscale.planner.job import Method, Precision, Recompute
from hfscale.planner.row_shape import text_of

RECOMPUTE_WORDS: Mapping[str, Recompute] = {
    "full": "full",
    "block": "full",
    "uniform": "full",
    "yes": "full",
    "true": "full",
    "select": "selective",
    "partial": "selective",
    "no": "none",
    "off": "none",
    "false": "none",
}
"""How a kind of recomputation begins; Megatron's `block` and `uniform` are ways to do it fully."""
LOCAL_NODE = 8
"""GPUs per node."""
LARGEST_SHARE_GB_S = 200.0
"""More than any GPU's share of a network: 800 Gbit/s cards give 100."""


def precision_of(row: Mapping[str, str]) -> tuple[Precision, bool, bool]:
    """Format of the matrix products, whether states are in it too, and whether fp8 scales are per row.

    Raises:
        `UsageError`: It is none that is known.
    """
    text = text_of(row, "precision").lower().replace("bfloat16", "bf16") or "bf16-mixed"
    pure = "pure" in text or text in ("bf16-true", "bf16")
    if "fp8" in text or "float8" in text:
        return "fp8", False, "row" in text
    if "bf16" in text and "fp16" not in text:
        return "bf16", pure, False
    if "fp16" in text or "16-mixed" in text or "float16" in text:
        return "fp16", False, False
    if "fp32" in text or "tf32" in text or "float32" in text:
        return "fp32", False, False
    raise UsageError(f"precision {text!r} is not known: use bf16, fp16, fp8 or fp32, with -mixed or -pure")


def recompute_of(row: Mapping[str, str]) -> Recompute | None:
    """Activation recomputation; None where the column is blank.

    Raises:
        `UsageError`: It is none that is known.
    """
    text = text_of(row, "ac").lower()
    if not text:
        return None
    for word, kind in RECOMPUTE_WORDS.items():
        if text.startswith(word):
            return kind
    raise UsageError(f"ac {text!r} is not known: use none, selective or full")


def method_of(row: Mapping[str, str]) -> tuple[Method, str | None]:
    """Which parameters train, and the column that says so where it is not `method`: a table without one names adapters
    in the model's name, the precision, or a note outside of brackets (`LoRA fine-tune`)."""
    text = text_of(row, "method").lower()
    if text:
        is_adapter = re.search(r"lora\b|adapter", text) is not None
        return ("qlora" if re.search(r"qlora|nf4|4-?bit", text) else "lora" if is_adapter else "full"), None
    for column in ("model", "precision", "ac", "note"):
        told = text_of(row, column).lower()
        if "lora" not in told:  # nearly always, and cheaper than the expressions
            continue
        found = re.search(r"\b(q?)lora\b", re.sub(r"\([^)]*\)", "", told))
        if found is not None:
            return ("qlora" if found[1] else "lora"), column
    return "full", None


def gpu_of(row: Mapping[str, str]) -> tuple[str, str | None]:
    """The GPU's name, and what is assumed of it: a power limit that has no number is not counted."""
    text = text_of(row, "gpu_type")
    if "power" not in text.lower():
        return text, None
    plain = re.sub(r"[-_ ]*power[-_ ]?(?:limited|capped)\b", "", text, flags=re.IGNORECASE)
    return plain, None if plain == text else f"{plain} at its usual power: {text} names no limit"


def is_allocated(row: Mapping[str, str]) -> bool:
    """Whether the table's peaks are those of tensors alone (`max_memory_allocated`, `active`), by its column
    `measure`."""
    told = text_of(row, "measure").lower()
    return "allocated" in told or "active" in told


def assumed(row: Mapping[str, str]) -> list[str]:
    """What was read into a row, beyond its columns' own words."""
    method, column = method_of(row)
    told = [f"method {method}, from the column {column}"] if column else []
    return told + [text for text in (gpu_of(row)[1],) if text]


def interconnect_gb_s(text: str) -> float | None:
    """GB/s per GPU and direction, of a text such as `50 GB/s`, `400Gb/s per GPU`, `3.2Tbps`, `8x400Gb`.

    A total per node, that is a number of cards, terabits or more than any GPU's share, is divided by eight. A kind of
    network without a number (`InfiniBand`) is the reference node's, None.

    Raises:
        `UsageError`: It holds a number that is no bandwidth.
    """
    if not re.search(r"\d", text):
        return None
    found = re.search(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*(G|T)(B|b)(?!i?t?E)", text)
    if not found:
        try:
            return float(text)
        except ValueError:
            raise UsageError(f"interconnect {text!r} holds no bandwidth: write 50 GB/s or 400 Gb/s") from None
    cards, value, scale, unit = found.groups()
    gigabytes = int(cards or 1) * float(value) * (1000 if scale == "T" else 1) / (1 if unit == "B" else 8)
    is_of_node = cards or scale == "T" or "node" in text.lower() or gigabytes > LARGEST_SHARE_GB_S
    return gigabytes / LOCAL_NODE if is_of_node and "per gpu" not in text.lower() else gigabytes
