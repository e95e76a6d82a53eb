"""A global batch that grows: equal to a loop by hand, under every strategy that allows it, resumed at any step."""

import copy
from dataclasses import replace

import pytest
from growing_runs import (
    ARGUMENTS,
    LR,
    NATIVE,
    PARALLEL,
    PASSES,
    ROWS,
    by_hand,
    killed,
    make,
    on_ranks,
    refused_on_ranks,
    result_of,
    train,
    zero,
)
from tiny import LENGTH, RandomTokens, StopAt, logged, tiny_arguments, tiny_model, tiny_trainer
from transformers import Trainer, TrainerCallback

from hfscale import LRScalingCallback, ScalingCallback, latest_checkpoint
from hfscale.errors import UsageError
from hfscale.facts.support import Combination, why_not
from hfscale.trainer.accumulation import MicroBatches
from hfscale.trainer.state import growing_batch_state

CONSTANT = {"gradient_accumulation_steps": 2}
STRATEGIES = ["ddp", "fsdp2", "zero1", "zero2", "zero3", *PARALLEL, *NATIVE]
"""Strategies of two processes."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The uninterrupted training of one process, and the same by hand."""
    trainer = train(tmp_path_factory.mktemp("whole"))
    hand = by_hand(trainer.train_dataset.order)
    return trainer, result_of(trainer), hand


def assert_equal(result, expected, rel=1e-6):
    for key, values in expected.items():
        assert result[key] == pytest.approx(values, rel=rel, abs=1e-9), key


def test_one_process_equals_a_loop_by_hand(reference):
    trainer, result, hand = reference
    assert_equal(result, hand)
    assert set(hand["scaling/global_batch"]) == {4, 8, 16, 24}  # three changes
    state = trainer.state
    assert state.global_step == state.max_steps == len(hand["loss"])
    assert state.epoch == PASSES
    assert growing_batch_state(state) | {"moved_at": 0} == {
        "pass": PASSES,
        "in_pass": 0,
        "samples": PASSES * ROWS,
        "moved_at": 0,
    }
    assert trainer.args.gradient_accumulation_steps == 1  # the user's again
    last = state.log_history[-1]
    rate = last["train_samples_per_second"] * last["train_runtime"]
    assert rate == pytest.approx(PASSES * ROWS, rel=1e-2)


@pytest.mark.long
def test_another_batch_per_device_continues(tmp_path, reference):
    *_, hand = reference
    train(tmp_path, stop=8)
    assert_equal(result_of(train(tmp_path, resume=8, per_device_train_batch_size=4)), hand)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(3, marks=pytest.mark.long),  # inside a stage
        6,  # inside a pass, after a change
        pytest.param(10, marks=pytest.mark.long),  # at the end of a pass
    ],
)
def test_a_resumed_training_equals_the_uninterrupted_one(tmp_path, reference, step):
    _, whole, _ = reference
    train(tmp_path, stop=step)
    resumed = train(tmp_path, resume=step)
    result = result_of(resumed)
    assert result["loss"] == whole["loss"]
    assert result["learning_rate"] == whole["learning_rate"]
    last = resumed.state.log_history[-1]
    seen = last["train_samples_per_second"] * last["train_runtime"]
    before = sum(sizes_of_steps(whole)[:step])
    assert seen == pytest.approx(PASSES * ROWS - before, rel=1e-2)


def test_a_schedule_with_an_absolute_end_is_the_same_after_a_resume(tmp_path):
    """`polynomial` ends at 1e-7, so that its shape depends on the rate from which it is made."""
    arguments = {"lr_scheduler_type": "polynomial"}
    whole = result_of(train(tmp_path / "whole", **arguments))
    train(tmp_path / "run", stop=8, **arguments)
    resumed = result_of(train(tmp_path / "run", resume=8, **arguments))
    assert resumed["learning_rate"] == whole["learning_rate"]


def sizes_of_steps(result):
    ends = [round(epoch * ROWS) for epoch in result["epoch"]]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.world(2)
def test_two_ranks_equal_one_process_and_one_process_continues(tmp_path, reference):
    *_, hand = reference
    first = on_ranks(tmp_path, "ddp", stop=9)
    assert_equal(first, {key: values[:9] for key, values in hand.items()})
    resumed = train(tmp_path, resume=9)
    assert_equal(result_of(resumed), hand)


@pytest.mark.long
@pytest.mark.world(2)
@pytest.mark.parametrize("step", [2, 7, 10, 15])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_equals_the_loop_by_hand_and_resumes(tmp_path, reference, strategy, step):
    *_, hand = reference
    first = on_ranks(tmp_path, strategy, stop=step)
    assert_equal(first, {key: values[:step] for key, values in hand.items()}, rel=1e-5)
    assert_equal({"loss": first["loss"]}, {"loss": hand["loss"][:step]})
    resumed = on_ranks(tmp_path, strategy, resume=step)
    assert_equal({"loss": resumed["loss"]}, {"loss": hand["loss"]})
    assert_equal(resumed, hand, rel=1e-5)


@pytest.mark.long
@pytest.mark.world(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_that_is_interrupted_five_times_equals_the_loop_by_hand(tmp_path, reference, strategy):
    *_, hand = reference
    step = None
    for stop in (2, 5, 7, 10, 13, None):  # in a stage, after a change, in a pass, at its end, in the last stage
        result = on_ranks(tmp_path, strategy, stop=stop, resume=step)
        step = stop
    assert_equal({"loss": result["loss"]}, {"loss": hand["loss"]})
    assert_equal(result, hand, rel=1e-5)


@pytest.mark.long
@pytest.mark.world(2)
@pytest.mark.parametrize(("ranks", "then"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_another_number_of_processes_continues(tmp_path, reference, strategy, ranks, then):
    *_, hand = reference
    for step in (5, 8, 13):
        folder = tmp_path / str(step)
        folder.mkdir()
        on_ranks(folder, strategy, ranks, stop=step)
        assert_equal(on_ranks(folder, strategy, then, resume=step), hand, rel=2e-6)


@pytest.mark.long
@pytest.mark.world(2)
def test_a_killed_training_continues_on_one_process_less(tmp_path, reference):
    *_, hand = reference
    killed(tmp_path, 9, ranks=2)
    checkpoint = latest_checkpoint(str(tmp_path))
    step = int(checkpoint.rpartition("-")[2])
    assert 0 < step < 9
    assert_equal(result_of(train(tmp_path, resume=step)), hand, rel=2e-6)


@pytest.mark.world(2)
def test_stages_of_a_pipeline_equal_the_loop_by_hand_and_tensor_parallel_ranks_continue(tmp_path, reference):
    *_, hand = reference
    first = on_ranks(tmp_path, "pp2", stop=7)
    assert_equal(first, {key: values[:7] for key, values in hand.items()})
    assert_equal(on_ranks(tmp_path, "tp2", resume=7), hand)


@pytest.mark.long
@pytest.mark.world(4)
@pytest.mark.parametrize(("strategy", "batch"), [("tp2_pp2", 2), ("pp2", 1), ("tp2", 2)])
def test_four_ranks_of_two_axes_equal_the_loop_by_hand_and_resume(tmp_path, reference, strategy, batch):
    *_, hand = reference
    rows = {"per_device_train_batch_size": batch}
    on_ranks(tmp_path, strategy, 4, stop=8, **rows)
    assert_equal(on_ranks(tmp_path, strategy, 4, resume=8, **rows), hand, rel=2e-6)


@pytest.mark.parametrize(
    ("sizes", "schedule", "message"),
    [
        (
            {"pp_size": 2},
            "2@0,8@20samples",
            "2 sequences are 1 micro-batches of 2: 1F1B on 2 pipeline ranks runs with 2 ",
        ),
        (
            {"pp_size": 2, "pipeline_schedule": "Interleaved1F1B"},
            "8@0,10@20samples",
            "10 sequences are 5 micro-batches of 2: Interleaved1F1B on 2 pipeline ranks runs with 4 ",
        ),
    ],
)
@pytest.mark.world(2)
def test_a_batch_that_the_pipeline_cannot_run_is_refused_before_the_first_step(tmp_path, sizes, schedule, message):
    said = refused_on_ranks(tmp_path, sizes, schedule)
    assert message in said
    assert "batch_schedule" in said


@pytest.mark.long
@pytest.mark.world(4)
def test_replicas_of_shards_equal_the_loop_by_hand(tmp_path, reference):
    *_, hand = reference
    one_each = {"per_device_train_batch_size": 1}
    on_ranks(tmp_path, "hsdp", 4, stop=8, **one_each)
    assert_equal(on_ranks(tmp_path, "hsdp", 4, resume=8, **one_each), hand, rel=2e-6)


@pytest.mark.long
def test_steps_bound_the_training_and_count_its_passes(tmp_path, reference):
    _, whole, _ = reference
    trainer = train(tmp_path, max_steps=12, options={"lr_clock": "steps"})
    result = result_of(trainer)
    assert trainer.state.global_step == 12
    assert result["epoch"] == whole["epoch"][:12]
    factors = result["lr_scaling/factor"]
    rates = [LR * factor * (1 - step / 12) for step, factor in enumerate(factors)]
    assert result["learning_rate"] == pytest.approx(rates)


@pytest.mark.long
def test_the_rule_none_keeps_the_rate(tmp_path):
    result = result_of(train(tmp_path, max_steps=11, lr_scheduler_type="constant", options={"rule": "none"}))
    assert set(result["learning_rate"]) == {LR}
    assert result["scaling/global_batch"][-1] == 16


def test_tokens_and_a_warm_up_in_steps_of_the_first_batch(tmp_path):
    schedule = f"4@0,6@{8 * LENGTH}"
    options = {"batch_schedule": schedule, "block_size": LENGTH, "rule": "none"}
    arguments = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4, "max_steps": 5}
    result = result_of(train(tmp_path, options=options, **arguments))
    # 16 sequences of warm-up, after 0, 4, 8, 14 and 20 of them
    assert result["learning_rate"] == pytest.approx([0, LR / 4, LR / 2, LR * 7 / 8, LR])
    assert result["scaling/global_batch"] == [4, 4, 6, 6, 6]


class TestMeasured:
    @pytest.mark.long
    def test_the_batch_doubles_at_twice_the_noise_scale(self, tmp_path, monkeypatch):
        monkeypatch.setattr("hfscale.metrics.meters.noise_scale.NoiseScale.value", lambda self: 20.0)
        options = {"batch_schedule": "auto:4..32"}
        trainer = train(tmp_path, options=options, num_train_epochs=2)
        batches = result_of(trainer)["scaling/global_batch"]
        assert batches[:4] == [4, 8, 16, 16]  # 32 is above the noise scale
        assert trainer.state.epoch == 2
        assert trainer.state.max_steps == trainer.state.global_step == len(batches)

        train(tmp_path / "again", options=options, num_train_epochs=2, stop=2)
        resumed = train(tmp_path / "again", options=options, num_train_epochs=2, resume=2)
        assert result_of(resumed) == result_of(trainer)

    def test_what_is_not_measured_is_refused(self, tmp_path):
        trainer = Trainer(
            model=tiny_model(),
            args=tiny_arguments(tmp_path, **ARGUMENTS),
            train_dataset=RandomTokens(),
            callbacks=[LRScalingCallback(batch_schedule="auto:4..32")],
        )
        with pytest.raises(UsageError, match="ScalingMetricsCallback"):
            trainer.train()
        trainer = make(tmp_path, options={"batch_schedule": "auto:2..32"})
        with pytest.raises(UsageError, match="two micro-batches per step"):
            trainer.train()


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"batch_schedule": "4@0,7@20samples"}, {}, r"use 6 or 8"),
        ({"batch_schedule": "4@0,8@64", "block_size": 32}, {}, "rows have 16 tokens"),
        ({}, {"gradient_accumulation_steps": 8}, "gradient_accumulation_steps is 8"),
        ({"batch_schedule": "auto:4..16"}, {"max_steps": 4}, "lr_clock='steps'"),
        ({"batch_schedule": "auto:4..16", "lr_clock": "steps"}, {}, "lr_clock='tokens'"),
        ({}, {"train_sampling_strategy": "group_by_length"}, "group_by_length"),
        ({}, {"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({}, {"deepspeed": zero(0)}, "zero0"),
        (
            {},
            {"deepspeed": zero(2, optimizer={"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}})},
            "AdamW",
        ),
        (
            {},
            {"deepspeed": zero(2, zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})},
            "offload",
        ),
    ],
)
def test_what_cannot_be_right_is_refused_before_the_first_step(tmp_path, options, arguments, message):
    trainer = make(tmp_path, options=options, **arguments)
    with pytest.raises(UsageError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_trainer_that_reads_all_micro_batches_of_a_step_at_once_is_refused(tmp_path):
    """As TRL's DistillationTrainer, GOLDTrainer and others: they keep them in this attribute."""
    trainer = make(tmp_path)
    trainer._buffered_inputs = None
    with pytest.raises(UsageError, match="generates completions"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    "asked",
    [
        {"engine": "trainer", "strategy": "fsdp1"},
        {"engine": "trainer", "strategy": "fsdp2", "cp": 2},
        {"engine": "trainer", "strategy": "ddp", "islands": 2},
    ],
)
def test_what_was_not_compared_is_refused(asked):
    combination = Combination(**asked)
    if asked["strategy"] != "fsdp1":
        assert why_not(combination) is None
    assert "batch_schedule" in why_not(replace(combination, batch_schedule=True), "batch_schedule")


@pytest.mark.long
def test_a_constant_batch_continues_with_a_schedule_and_not_the_reverse(tmp_path, reference):
    _, whole, _ = reference
    tiny_trainer(tmp_path / "constant", ScalingCallback(), StopAt(3), **ARGUMENTS | CONSTANT).train()
    checkpoint = tmp_path / "constant" / "checkpoint-3"
    trainer = make(tmp_path / "then")
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert result_of(trainer)["loss"] == whole["loss"]
    assert logged(trainer, "learning_rate") == whole["learning_rate"]

    train(tmp_path / "growing", stop=3)
    trainer = tiny_trainer(tmp_path / "a", ScalingCallback(), **ARGUMENTS)
    with pytest.raises(UsageError, match="batch_schedule"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "growing" / "checkpoint-3"))
    (checkpoint / "hfscale_manifest.json").unlink()
    trainer = make(tmp_path / "c")
    with pytest.raises(UsageError, match="constant global batch"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


class Events(TrainerCallback):
    def __init__(self):
        self.begun, self.ended, self.rates = [], [], []

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun.append(state.global_step)

    def on_substep_end(self, args, state, control, **kwargs):
        assert len(self.begun) == state.global_step + 1

    def on_step_end(self, args, state, control, **kwargs):
        self.ended.append(state.global_step - 1)


def test_events_stay_in_pairs_and_a_decay_at_the_end_completes(tmp_path):
    """transformers#33671: steps that the ends of passes shift; Megatron-Bridge#2609: a decay that stays open."""
    events = Events()
    arguments = {
        "lr_scheduler_type": "warmup_stable_decay",
        "warmup_steps": 4,
        "lr_scheduler_kwargs": {"num_decay_steps": 20, "min_lr_ratio": 0.0},
    }
    trainer = make(tmp_path, events, options={"rule": "none"}, num_train_epochs=2, **arguments)
    trainer.train()
    assert events.begun == events.ended == list(range(trainer.state.global_step))
    rates = logged(trainer, "learning_rate")
    assert rates[0] == 0
    assert max(rates) == LR
    assert trainer.lr_scheduler.get_last_lr() == pytest.approx([0, 0], abs=1e-12)


def test_micro_batches_count_from_their_step():
    number = MicroBatches(3, first=4)
    assert number == 3
    assert [step % number for step in range(4, 8)] == [0, 1, 2, 0]
    assert type(copy.deepcopy(number)) is int  # as when it is pickled, in training_args.bin
