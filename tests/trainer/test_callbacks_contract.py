"""The contract that every callback of hfscale fulfils."""

import json
import re

import pytest
from conftest import REPOSITORY
from tiny import logged, make_callback, tiny_tokenizer
from tiny import tiny_trainer as trainer_without_tokenizer
from transformers import TrainerCallback

import hfscale
from hfscale import latest_checkpoint
from hfscale.errors import HfScaleError
from hfscale.health.jitter import CHECKS

CALLBACKS = sorted(name for name in hfscale.__all__ if name.endswith("Callback"))
NO_PARTS = (
    "ScalingCallback",
    "SampleGenerationCallback",
    "DiLoCoCallback",
    "TraceCallback",
    "AlertCallback",
    "WeightAveragingCallback",
)
PARTS = [name for name in CALLBACKS if name not in NO_PARTS]
SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "lr_scheduler_type": "constant"}
PREFIXES = ("scaling/", "checkpoint/", "gpu/", "lr_scaling/")
MEASURED_TIMES = ("goodput",)  # differ between two runs
NEED_MORE_THAN_ONE_SHORT_RUN = {
    "scaling/efficiency",
    "scaling/comm_fraction",
    "scaling/noise_scale",
    "scaling/straggler_skew",
    "health/replay_compared",
    "scaling/global_batch",  # with batch_schedule: tests/lr_scaling/test_growing_batch.py
    "scaling/straggler_ratio",
    "health/replay_mismatches",  # with replay_every_steps: tests/replays/test_replay.py
    "health/replay_s",
    "health/skipped_batches",  # with skip_bad_batches: tests/replays/test_bad_batches.py
    "moe/max_load",  # of a model with experts: tests/metrics/test_expert_load.py
    "moe/entropy",
    "moe/dropped_fraction",
}

every_callback = pytest.mark.parametrize("name", CALLBACKS)


def tiny_trainer(*args, **kwargs):
    return trainer_without_tokenizer(*args, tokenizer=tiny_tokenizer(), **kwargs)


def documented_keys(name):
    """The metric keys in the table of a callback's docstring."""
    return set(re.findall(r"^\s*\| `([a-z_]+/[a-z_]+)` \|", getattr(hfscale, name).__doc__, re.MULTILINE))


def logged_keys(trainer):
    return {key for entry in trainer.state.log_history for key in entry if key.startswith(PREFIXES)}


def test_there_are_four_parts_and_scaling_callback():
    assert len(PARTS) == 4
    assert len(hfscale.ScalingCallback().parts) == 4


@every_callback
def test_trains_with_default_arguments(tmp_path, name):
    trainer = tiny_trainer(tmp_path, make_callback(name))
    trainer.train()
    assert trainer.state.global_step == 4


@every_callback
def test_does_not_change_the_training(tmp_path, name):
    plain = tiny_trainer(tmp_path / "plain")
    plain.train()
    trainer = tiny_trainer(tmp_path / "with", make_callback(name))
    trainer.train()
    assert logged(trainer, "loss") == logged(plain, "loss")
    assert logged(trainer, "grad_norm") == logged(plain, "grad_norm")


@every_callback
@pytest.mark.parametrize("restores", [False, True])
def test_state_survives_a_resume(tmp_path, name, restores):
    """Whether or not transformers is asked to restore callbacks by making new instances."""
    uninterrupted = tiny_trainer(tmp_path / "uninterrupted", make_callback(name), **SAVING)
    uninterrupted.train()
    tiny_trainer(tmp_path / "run", make_callback(name), **(SAVING | {"max_steps": 3})).train()
    resumed = tiny_trainer(
        tmp_path / "run", make_callback(name), restore_callback_states_from_checkpoint=restores, **SAVING
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    for key in ("lr_scaling/factor", "scaling/tokens_seen"):
        assert logged(resumed, key)[-1:] == logged(uninterrupted, key)[-1:]
    first, second = (
        json.loads((tmp_path / run / "checkpoint-6" / "trainer_state.json").read_text())["stateful_callbacks"]
        for run in ("uninterrupted", "run")
    )
    first, second = (
        {part: kept for part, kept in state.get("hfscale", {}).items() if part not in MEASURED_TIMES}
        for state in (first, second)
    )
    assert first == second


@every_callback
def test_resumes_a_run_that_began_without_it(tmp_path, name):
    tiny_trainer(tmp_path, **(SAVING | {"max_steps": 3})).train()
    trainer = tiny_trainer(tmp_path, make_callback(name), **SAVING)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert trainer.state.global_step == 6


@every_callback
def test_can_be_added_after_the_trainer_was_made(tmp_path, name):
    trainer = tiny_trainer(tmp_path, **SAVING)
    trainer.add_callback(make_callback(name))
    trainer.train()
    assert documented_keys(name) & {"scaling/tokens_seen", "lr_scaling/factor", "checkpoint/bytes"} <= logged_keys(
        trainer
    )


@every_callback
def test_can_train_twice(tmp_path, name):
    trainer = tiny_trainer(tmp_path, make_callback(name), **SAVING)
    trainer.train()
    once = logged(trainer, "scaling/tokens_seen")
    trainer.train()
    assert logged(trainer, "scaling/tokens_seen") == once
    assert len(trainer.callback_handler.callbacks) <= 5


@every_callback
def test_logs_no_key_that_is_not_documented(tmp_path, name):
    metrics = hfscale.ScalingMetricsCallback(peak_tflops=1.0, usd_per_gpu_hour=2.0)
    options = {"metrics": metrics} if name == "ScalingCallback" else {}
    trainer = tiny_trainer(tmp_path, make_callback(name, **options), eval_strategy="steps", eval_steps=2, **SAVING)
    trainer.train()
    documented = documented_keys(name) if name != "ScalingCallback" else set().union(*map(documented_keys, PARTS))
    assert logged_keys(trainer) <= documented
    if name == "ScalingCallback":  # everything but what only a GPU has
        absent = {key for key in documented - logged_keys(trainer) if not key.startswith("gpu/")}
        absent -= {check.key for check in CHECKS}  # logged from a part of their limits on
        absent.discard("scaling/padding_fraction")  # these batches have no attention mask
        absent.discard("checkpoint/slowdown")  # a save as small as these may be written before the next step
        assert absent == NEED_MORE_THAN_ONE_SHORT_RUN


def test_the_documentation_explains_every_metric_key():
    page = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
    missing = [key for part in PARTS for key in documented_keys(part) if f"`{key}`" not in page]
    assert missing == []


@every_callback
def test_outside_a_trainer_it_raises_an_error(name, tmp_path):
    from transformers import TrainerControl, TrainerState, TrainingArguments

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(HfScaleError, match="Trainer"):
        make_callback(name).on_train_begin(arguments, TrainerState(), TrainerControl())


def test_scaling_callback_passes_each_event_to_each_part_in_order():
    seen = []

    class Part(TrainerCallback):
        def __init__(self, number):
            self.number = number

        def __getattribute__(self, name):
            if name.startswith("on_"):
                return lambda *args, **kwargs: seen.append((name, object.__getattribute__(self, "number")))
            return object.__getattribute__(self, name)

    callback = hfscale.ScalingCallback(
        comm_health=Part(1), lr_scaling=Part(2), spot_checkpoint=Part(3), metrics=Part(4)
    )
    events = [name for name in dir(TrainerCallback) if name.startswith("on_")]
    for event in events:
        getattr(callback, event)(None, None, None)
    assert seen == [(event, part) for event in events for part in (1, 2, 3, 4)]


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "groups",
    [
        pytest.param(["+".join(name for name in CALLBACKS if name not in PARTS)], id="together"),
        pytest.param(CALLBACKS, id="each alone", marks=pytest.mark.faults),
    ],
)
def test_all_work_in_two_processes(launch, tmp_path, groups):
    done = launch(2, REPOSITORY / "tests" / "workers" / "contract.py", *groups)
    assert done.code == 0, done.err[-3000:]
    for group in groups:
        losses = json.loads((tmp_path / f"{group}.json").read_text())
        assert losses["resumed"] == losses["uninterrupted"]
        if not {"ScalingCallback", "SpotCheckpointCallback"} & set(group.split("+")):
            continue
        newest = latest_checkpoint(tmp_path / group)
        assert newest is not None
        manifest = json.loads((tmp_path / group / "checkpoint-6" / "hfscale_manifest.json").read_text())
        assert (manifest["strategy"], manifest["world_size"], manifest["global_batch_size"]) == ("ddp", 2, 8)
        assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(manifest["files"])
