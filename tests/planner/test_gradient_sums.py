"""The time to add up gradients follows from the bytes that operators were counted to read and write."""

import json

import pytest
from conftest import REPOSITORY
from planner_jobs import job

from hfscale.facts.layout import ParallelLayout
from hfscale.planner.frameworks import find_framework, shared_constants
from hfscale.planner.gradient_sums import (
    CAST_BYTES,
    SUM_BYTES,
    ZERO1_STEP_BYTES,
    ZERO_SHARD_BYTES,
    gradient_sums_s,
)
from hfscale.planner.kernels import Rates

COUNTED = REPOSITORY / "benchmarks" / "results" / "step_traffic.json"
FULL = ("add_", "_to_copy", "copy_", "zero_", "cat", "mul_", "linalg_vector_norm")
"""Operators of ZeRO-1's step that touch all gradients on each rank."""


def counted(strategy, micro_batches):
    return json.loads(COUNTED.read_text())["bytes_per_parameter"][strategy][f"{micro_batches} micro-batches"]


def per_micro_batch(strategy, *operators):
    few, many = counted(strategy, 1), counted(strategy, 4)
    return sum(many.get(name, 0) - few.get(name, 0) for name in operators) / 3


def test_the_constants_are_what_was_counted():
    assert per_micro_batch("one process", "add_") == pytest.approx(SUM_BYTES, abs=0.1)
    assert per_micro_batch("zero1, processes: 2", "add_", "_to_copy") == pytest.approx(CAST_BYTES + SUM_BYTES, abs=0.5)
    casts = ("_to_copy", "copy_", "add_")
    one, two = (per_micro_batch(f"zero2, processes: {ranks}", *casts) for ranks in (1, 2))
    assert 2 * (one - two) == pytest.approx(ZERO_SHARD_BYTES, abs=0.5)
    assert per_micro_batch("zero2, processes: 2", "div_") == 4.0  # read and written in bf16
    step = counted("zero1, processes: 2", 1)
    of_micro_batch = per_micro_batch("zero1, processes: 2", *FULL)
    sharded = 8 / 2  # the copies of the updated parameters
    assert sum(step[name] for name in FULL) - of_micro_batch - sharded == pytest.approx(ZERO1_STEP_BYTES, abs=1.5)


@pytest.mark.parametrize(
    ("layout", "options", "expected"),
    [
        ({}, {"zero": 0, "global_batch": 4}, 3 * SUM_BYTES),
        ({"dp_replicate": 8}, {"zero": 0, "global_batch": 32}, 3 * SUM_BYTES),
        ({"dp_replicate": 8}, {"zero": 0, "global_batch": 8}, 0),
        ({"dp_replicate": 8}, {"zero": 1, "global_batch": 32}, 4 * (CAST_BYTES + SUM_BYTES) + ZERO1_STEP_BYTES),
        ({"dp_replicate": 8}, {"zero": 2, "global_batch": 32}, 4 * (4 + ZERO_SHARD_BYTES / 8)),
        ({"dp_replicate": 8}, {"zero": 2, "global_batch": 32, "precision": "fp32"}, 4 * 8),
        ({"dp_shard": 8}, {"zero": 3, "global_batch": 32}, 0),
        ({"dp_replicate": 8}, {"zero": 1, "stack": "megatron"}, 0),
    ],
)
def test_the_traffic_of_each_strategy(layout, options, expected):
    run = job(layout=ParallelLayout(**layout), **options)
    rates = Rates(run, find_framework(run.stack), shared_constants())
    found = gradient_sums_s(run, rates) * rates.memory / run.shape.total_parameters
    assert found == pytest.approx(expected)
