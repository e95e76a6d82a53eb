"""A row of a table of runs -> the model's shape.

Where the widths are blank they are the catalogue's model of that name, or follow from the parameter count; whether
the MLP is gated and the head tied follows from it too, else from ffn = 4 x hidden; a mixture of experts from the name:
one of the catalogue's, or `8e top2`, or `8x7B`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from hfscale.errors import UsageError
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.models import catalogue, catalogue_shape

DEFAULT_VOCAB = 50304
"""GPT-2's vocabulary padded to a multiple of 128, where a row names none."""
ASPECT = 107
"""Hidden width per layer of GPT-like models where neither is known: Llama 7B to 65B have 102 to 128."""


def text_of(row: Mapping[str, str], key: str) -> str:
    """A cell without the blanks around it; empty where the table has no such column."""
    cell = row.get(key)
    return cell.strip() if cell else ""


def number(row: Mapping[str, str], key: str) -> float | None:
    """A cell as a number above 0; None where it is blank.

    Raises:
        `UsageError`: It is no number, or not above 0.
    """
    text = text_of(row, key)
    return _number_of(key, text) if text else None


def _number_of(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{key} {text!r} is not a number: correct it, or leave it blank") from None
    if not 0 < value < 1e18:
        raise UsageError(f"{key} {text} is not a number above 0: correct it, or leave it blank")
    return value


def whole(row: Mapping[str, str], key: str) -> int | None:
    """A cell as a whole number above 0, or 0 for a ZeRO stage; None where it is blank.

    Raises:
        `UsageError`: It is something else.
    """
    text = text_of(row, key)
    if key == "zero" and text in ("0", "0.0"):
        return 0
    if not text:
        return None
    value = _number_of(key, text)
    if value != int(value):
        raise UsageError(f"{key} {text} is not a whole number: correct it, or leave it blank")
    return int(value)


def row_shape(row: Mapping[str, str]) -> ModelShape:
    """The shape that a row describes.

    Raises:
        `HfScaleError`: The widths are neither given nor to be inferred.
    """
    layers, hidden = whole(row, "layers"), whole(row, "hidden")
    vocab = whole(row, "vocab") or DEFAULT_VOCAB
    billions, model = number(row, "params_b"), text_of(row, "model")
    if layers is None and hidden is None and (known := catalogue_shape(model)) is not None:
        return known
    if (layers is None or hidden is None) and billions is None:
        raise UsageError(f"model {model!r} has neither widths nor params_b: fill in layers, hidden, heads, ffn, vocab")
    if hidden is None:
        layers, hidden = _usual_aspect(billions or 0.0, layers)
    elif layers is None:
        layers = max(1, round(((billions or 0.0) * 1e9 - vocab * hidden) / (12 * hidden**2)))
    assert layers is not None
    heads = whole(row, "heads") or _usual_heads(hidden, whole(row, "tp") or 1)
    kv_heads, ffn = whole(row, "kv_heads") or heads, whole(row, "ffn") or 4 * hidden
    if (mixture := _known_mixture(model, layers, hidden)) is not None:
        return mixture
    experts = (0, 0)
    if found := _EXPERTS.search(model):
        experts = int(found[1]), int(found[2])
    elif found := _TIMES.search(model):
        experts = int(found[1]), 2
    return _shape(layers, hidden, heads, kv_heads, ffn, vocab, billions, experts)


_EXPERTS = re.compile(r"(\d+)\s*e(?:xperts?)?\W*top\W*(\d+)", flags=re.IGNORECASE)
"""`8e top2` in a model's name: a mixture of 8 experts of which a token passes 2."""
_TIMES = re.compile(r"\b(\d+)x\d+(?:\.\d+)?b\b", flags=re.IGNORECASE)
"""`8x7B` in a model's name: a mixture of 8 experts of which, as in Mixtral, a token passes 2."""


@lru_cache(maxsize=1024)
def _known_mixture(model: str, layers: int, hidden: int) -> ModelShape | None:
    """The catalogue's mixture of experts that a name tells of, of so many of its layers: a row has no columns for
    experts. None where the name tells of none, or the widths are another model's."""
    plain = re.sub(r"[\s_]+", "-", model.casefold())
    for name, entry in catalogue().items():
        if name in plain and entry["hidden_size"] == hidden and layers <= entry["num_hidden_layers"]:
            shape = catalogue_shape(name)
            if shape is not None and shape.moe is not None:
                return replace(
                    shape, layers=layers, windows=shape.windows[:layers], moe_layers=shape.moe_layers[:layers]
                )
    return None


@lru_cache(maxsize=4096)
def _shape(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    billions: float | None,
    experts: tuple[int, int],
) -> ModelShape:
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "head_dim": max(1, hidden // heads),
    }
    if experts[0]:
        moe = {"model_type": "mixtral", "num_local_experts": experts[0], "num_experts_per_tok": experts[1]}
        return ModelShape.from_config({**config, **moe, "sliding_window": None})
    gated, tied = ffn != 4 * hidden, False
    if billions is not None:
        attention = 2 * hidden * (hidden + kv_heads * config["head_dim"])
        totals = {
            (kind, shared): layers * (attention + (3 if kind else 2) * hidden * ffn)
            + (1 if shared else 2) * vocab * hidden
            for kind in (True, False)
            for shared in (False, True)
        }
        nearest = min(totals, key=lambda kind: abs(totals[kind] / 1e9 - billions))
        # Further off, the parameter count is of another model: a stack of fewer layers, say.
        if abs(totals[nearest] / 1e9 - billions) < 0.04 * billions:
            gated, tied = nearest
    family = "llama" if gated else "nemotron"
    return ModelShape.from_config({**config, "model_type": family, "tie_word_embeddings": tied})


def _usual_aspect(billions: float, layers: int | None) -> tuple[int, int]:
    """Layers and hidden width of a GPT-like model of so many parameters, 12 L h^2 without embeddings."""
    layers = layers or max(1, round((billions * 1e9 / (12 * ASPECT**2)) ** (1 / 3)))
    return layers, max(128, round((billions * 1e9 / (12 * layers)) ** 0.5 / 128) * 128)


def _usual_heads(hidden: int, tp: int) -> int:
    """Heads of 128 or the nearest width that tensor parallelism can split."""
    fitting = [heads for heads in range(tp, hidden // 32 + 1, tp) if hidden % heads == 0]
    return min(fitting, key=lambda heads: abs(hidden / heads - 128), default=tp)
