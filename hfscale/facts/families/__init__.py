"""The model families that hfscale can size, one table of `families.toml` each, as transformers 5.23 builds them.

To add a family: read its `modeling_<family>.py` and `configuration_<family>.py`, write a table with what differs from
the defaults of `Family`, and add small configs of it to `test_model_shape.py`, which compares every family with
the model that transformers builds. A family with layers that are neither attention, the gated delta rule (linear
attention), Mamba-2 nor MLP needs more than a table.

| file | holds |
|---|---|
| `families.toml` | the families |
| `family.py` | the columns: `Family`, `ExpertFamily` |
| `rules.py` | functions for columns that are neither a literal nor the value of one config key |
"""

import difflib
from collections.abc import Mapping
from typing import Any

from hfscale.core.tables import read_table
from hfscale.errors import UnsupportedModelError
from hfscale.facts.config_reader import TEXT_MODELS
from hfscale.facts.families import rules
from hfscale.facts.families.family import ExpertFamily, Family


def _family(row: Mapping[str, Any]) -> Family:
    columns = _columns(row)
    if "experts" in row:
        columns["experts"] = ExpertFamily(**_columns(row["experts"]))
    return Family(**columns)


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a row, with functions in place of the names of rules, and tuples in place of lists."""
    columns = {}
    for column, value in row.items():
        if isinstance(value, str):
            value = vars(rules).get(value, value)
        columns[column] = tuple(value) if isinstance(value, list) else value
    return columns


_ROWS = read_table("facts/families/families.toml")
FAMILIES: Mapping[str, Family] = {name: _family(row) for name, row in _ROWS.items()}
"""model_type -> its row."""


def family_of(model_type: str) -> Family:
    """Return the row of a model type.

    Raises:
        UnsupportedModelError: there is none; the message gives the nearest model types.
    """
    family = FAMILIES.get(model_type)
    if family is None:
        known = sorted({*FAMILIES, *TEXT_MODELS})
        nearest = difflib.get_close_matches(model_type, known, n=3, cutoff=0.8)
        meant = f" (did you mean {', '.join(nearest)}?)" if nearest else ""
        raise UnsupportedModelError(
            f"model_type {model_type!r} is unknown{meant}: only decoders are planned; estimate a script that trains "
            "it, also encoders, speech and images, with hfscale estimate --script train.py, or add a table for it to "
            "hfscale/facts/families/families.toml"
        )
    return family
