"""Which model families were tested under which kind of parallelism in `ParallelTrainer`, and which do not work.

The names are transformers' `model_type`; `parallel_families.toml` has them, each unsupported one with the reason. The
tests named below compare losses and gradients with those of the model in one piece.
"""

from collections.abc import Mapping
from typing import Any

from hfscale.core.tables import read_table

_TABLE: Mapping[str, Any] = read_table("facts/parallel_families.toml")

PIPELINE_TESTED: frozenset[str] = frozenset(_TABLE["pipeline_tested"])
"""Families whose pipeline stages compute the same as the model in one piece (test_parallel_families.py)."""

PIPELINE_UNSUPPORTED: Mapping[str, str] = _TABLE["pipeline_unsupported"]
"""Families with a tensor-parallel plan whose stages would not compute the same as the model in one piece -> the
reason."""

TENSOR_PARALLEL_UNSUPPORTED: Mapping[str, str] = _TABLE["tensor_parallel_unsupported"]
"""Families whose tensor-parallel plan in transformers 5.23 fails or computes something else than the model in one
piece -> the reason."""

TENSOR_PARALLEL_PLAN_MISSING: frozenset[str] = frozenset(_TABLE["tensor_parallel_plan_missing"])
"""Families of `hfscale.facts.families` whose config class in transformers 5.23 has no `base_model_tp_plan`."""

SEQUENCE_PARALLEL_TESTED = PIPELINE_TESTED - TENSOR_PARALLEL_UNSUPPORTED.keys()
"""Families that compute the same with sequence parallelism (test_parallel_sequence.py)."""

CONTEXT_PARALLEL_UNSUPPORTED: Mapping[str, str] = _TABLE["context_parallel_unsupported"]
"""Families that do not compute the same when each rank has a part of every sequence -> the reason."""

CONTEXT_PARALLEL_TESTED = (PIPELINE_TESTED | {"gpt2", "gpt_bigcode"}) - CONTEXT_PARALLEL_UNSUPPORTED.keys()
"""Families that compute the same with context parallelism (test_parallel_context.py)."""
