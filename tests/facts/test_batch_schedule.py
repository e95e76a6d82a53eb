"""Schedules of the global batch: how they are read, and the steps that follow from them."""

import math
import random

import pytest

from hfscale.errors import ParameterError
from hfscale.facts.batch_schedule import Data, check_divisible, count, parse_batch_schedule


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("256@0,512@1B,1024@4B", [(256, 0), (512, 10**9), (1024, 4 * 10**9)]),
        (" 8 , 16@1.5k ", [(8, 0), (16, 1500)]),
        ("8@0,16@20tokens", [(8, 0), (16, 20)]),
    ],
)
def test_a_schedule_is_read(text, stages):
    schedule = parse_batch_schedule(text)
    assert [(stage.batch, stage.after) for stage in schedule.stages] == stages
    in_samples = schedule.in_samples(3)
    assert [stage.after for stage in in_samples.stages] == [-(-after // 3) for _, after in stages]
    assert parse_batch_schedule(schedule.text()) == schedule


def test_a_measured_schedule_doubles():
    schedule = parse_batch_schedule("auto:256..4096")
    assert schedule.sizes == (256, 512, 1024, 2048, 4096)
    assert schedule.unit == schedule.first == schedule.batch_after(10**12) == 256


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write it as"),
        ("256@0;512@1B", "write it as"),
        ("256@0,512", "write it as"),
        ("256@0,512@-1", "write it as"),
        ("0@0", "greater than 0"),
        ("256@1B", "256@0"),
        ("256@0,512@0", "greater than the one before"),
        ("256@0,512@2B,1024@1B", "greater than the one before"),
        ("auto:256..768", "auto:256..1024"),
        ("auto:256..128", "greater than the first"),
    ],
)
def test_what_cannot_be_read_is_refused(text, message):
    with pytest.raises(ParameterError, match=message):
        parse_batch_schedule(text)


def test_tokens_need_a_length_and_thresholds_a_sequence_of_their_own():
    with pytest.raises(ParameterError, match="block_size"):
        parse_batch_schedule("4@0,8@100").in_samples(None)
    with pytest.raises(ParameterError, match="16 begins"):
        parse_batch_schedule("4@0,8@10,16@11").in_samples(8)


def test_the_nearest_batches_are_named():
    schedule = parse_batch_schedule("16@0,512@1K")
    check_divisible(schedule, 16)
    with pytest.raises(ParameterError, match="use 24"):
        check_divisible(schedule, 24)
    with pytest.raises(ParameterError, match="use 504 or 528"):
        check_divisible(parse_batch_schedule("24@0,512@1K"), 24)


def one_by_one(schedule, data, passes):
    """Count as a training does: step by step."""
    steps = done = before = position = 0
    while done < math.ceil(passes * data.per_pass):
        size = schedule.batch_after(before + position * data.micro_batch) // data.micro_batch
        taken = min(size, data.per_pass - position)
        steps, done, position = steps + 1, done + taken, position + taken
        if position == data.per_pass:
            before, position = before + data.samples_of_pass, 0
    return steps, before + position * data.micro_batch


def test_steps_are_counted_as_a_training_takes_them():
    rng = random.Random(0)
    for _ in range(300):
        micro_batch = rng.choice([1, 2, 4])
        text, after = f"{4 * rng.randint(1, 3)}@0", 0
        for _ in range(rng.randint(0, 3)):
            after += rng.randint(1, 80)
            text += f",{4 * rng.randint(1, 8)}@{after}samples"
        schedule = parse_batch_schedule(text).in_samples(None)
        rows = rng.randint(1, 70)
        data = Data(micro_batch=micro_batch, per_pass=-(-rows // micro_batch), samples=rows)
        passes = rng.choice([0.4, 1, 2, 2.5, 5])
        found = count(schedule, data, passes=passes)
        assert (found.steps, found.samples) == one_by_one(schedule, data, passes), (text, data)
        assert count(schedule, data, steps=found.steps) == found


def test_steps_without_a_length():
    schedule = parse_batch_schedule("4@0,8@10samples").in_samples(None)
    found = count(schedule, Data(micro_batch=2, per_pass=None), steps=5)
    assert (found.steps, found.samples) == (5, 3 * 4 + 2 * 8)
