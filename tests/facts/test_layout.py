"""ParallelLayout: axis sizes, world size, and errors if they do not fit."""

import dataclasses
from typing import Any

import pytest

from hfscale.errors import LayoutError
from hfscale.facts.layout import ParallelLayout

LAYOUT = ParallelLayout(dp_replicate=2, dp_shard=3, cp=5, tp=7, pp=11)


def test_sizes_multiply() -> None:
    assert LAYOUT.world_size == 2 * 3 * 5 * 7 * 11
    assert LAYOUT.data_parallel_size == 2 * 3
    assert LAYOUT.ranks_per_replica == 5 * 7 * 11
    assert str(LAYOUT) == "dp_replicate=2 x dp_shard=3 x cp=5 x tp=7 x pp=11"


def test_one_process_is_the_default() -> None:
    assert ParallelLayout() == ParallelLayout(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1)
    assert ParallelLayout().world_size == ParallelLayout().data_parallel_size == 1


def test_layouts_are_values() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LAYOUT.tp = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        ParallelLayout(2, 3)  # type: ignore[misc]
    assert len({LAYOUT, dataclasses.replace(LAYOUT), ParallelLayout()}) == 2


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "cp", "tp", "pp"])
@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True, None])
def test_invalid_sizes_are_refused(axis: str, size: Any) -> None:
    with pytest.raises(LayoutError, match=f"{axis} is {size!r}: it must be an integer of at least 1") as caught:
        ParallelLayout(**{axis: size})
    assert isinstance(caught.value, ValueError)


def test_a_matching_world_size_is_accepted() -> None:
    LAYOUT.check_world_size(2310)


@pytest.mark.parametrize(
    ("layout", "world_size", "message"),
    [
        (
            ParallelLayout(tp=4, pp=2),
            32,
            "needs 8 processes, but the world has 32: start 8 processes or set dp_shard=4",
        ),
        (ParallelLayout(dp_replicate=2, dp_shard=8), 8, "start 16 processes or set dp_shard=4"),
        (ParallelLayout(tp=3), 8, "needs 3 processes, but the world has 8: start 3 processes"),
        (ParallelLayout(tp=16), 8, "start 16 processes"),
    ],
)
def test_another_world_size_is_refused_with_a_fix(layout: ParallelLayout, world_size: int, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        layout.check_world_size(world_size)
    assert str(caught.value).startswith(str(layout))
    assert str(caught.value).endswith(message)
