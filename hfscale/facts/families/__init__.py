"""The model families that hfscale can size, one row each, as transformers 5.23 builds them.

To add a family: read its `modeling_<family>.py` and `configuration_<family>.py`, write a row with what differs from
the defaults of `Family`, and add small configs of it to `tests/test_model_shape.py`, which compares every row with the
model that transformers builds. A family with layers that are neither attention nor MLP (state-space, linear attention)
needs more than a row.

| file | holds |
|---|---|
| `family.py` | the columns: `Family`, `ExpertFamily` |
| `rules.py` | functions for columns that are neither a literal nor the value of one config key |
| `llama.py`, `gpt.py`, `moe.py` | the rows |
"""

import difflib
from collections.abc import Mapping

from hfscale.errors import UnsupportedModelError
from hfscale.facts.config_reader import TEXT_MODELS
from hfscale.facts.families.family import Family
from hfscale.facts.families.gpt import GPT_FAMILIES
from hfscale.facts.families.llama import LLAMA_FAMILIES
from hfscale.facts.families.moe import MOE_FAMILIES

FAMILIES: Mapping[str, Family] = {**LLAMA_FAMILIES, **GPT_FAMILIES, **MOE_FAMILIES}
"""model_type -> its row."""


def family_of(model_type: str) -> Family:
    """Returns the row of a model type.

    Raises:
        `UnsupportedModelError`: There is none; the message gives the nearest model types.
    """
    family = FAMILIES.get(model_type)
    if family is None:
        known = sorted({*FAMILIES, *TEXT_MODELS})
        nearest = difflib.get_close_matches(model_type, known, n=3, cutoff=0.5) or known
        raise UnsupportedModelError(
            f"model_type {model_type!r} is unknown: use one of {', '.join(nearest)}, or "
            "add a row for it to hfscale/facts/families"
        )
    return family
