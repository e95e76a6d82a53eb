"""Plans of a global batch that grows: steps, hours, what is left out, and what is emitted."""

from dataclasses import replace

import pytest

import hfscale
from hfscale.errors import HfScaleError, UsageError
from hfscale.planner.emit import recipe_yaml

RUN = {"gpu": "H100-80GB", "gpus": 64, "tokens": 10e9, "seq_len": 4096, "usd_per_gpu_hour": 2.0}
SCHEDULE = "256@0,512@1B,1024@4B"


def test_steps_and_hours_follow_from_the_schedule(tmp_path):
    found = hfscale.plan("llama-3.1-8b", **RUN, batch_schedule=SCHEDULE)
    tokens_per_step = [batch * 4096 for batch in (256, 512, 1024)]
    parts = [1e9, 3e9, 6e9]
    expected = sum(part / per_step for part, per_step in zip(parts, tokens_per_step, strict=True))
    best = found.choices[0]
    assert best.steps == pytest.approx(expected, abs=3)
    assert best.to_dict()["optimizer_steps"] == best.steps
    constant = {batch: hfscale.plan("llama-3.1-8b", **RUN, global_batch=batch) for batch in (256, 1024)}
    bounds = sorted(_same(best, plan).hours for plan in constant.values())
    assert bounds[0] <= best.hours <= bounds[1]
    text = recipe_yaml(found, best, tmp_path)
    assert f'batch_schedule: "{SCHEDULE}"' in text
    assert f"max_steps: {best.steps}" in text
    assert "gradient_accumulation_steps" not in text


def _same(choice, plan):
    job = choice.estimate.job
    return next(
        other
        for other in plan.choices
        if other.estimate.job.layout == job.layout and other.estimate.job.zero == job.zero
    )


def test_layouts_that_do_not_run_with_it_are_left_out():
    found = hfscale.plan("llama-3.1-70b", **RUN, batch_schedule="1024@0,2048@1B", top=50)
    for choice in found.choices:
        job = choice.estimate.job
        if job.layout.cp > 1:
            assert job.runs_parallel_trainer
        assert job.offload == "none"
    assert any("batch_schedule" in rejected.reason for rejected in found.rejected)


def test_a_pipeline_must_run_with_the_micro_batches_of_each_batch():
    found = hfscale.plan("llama-3.1-70b", **RUN, batch_schedule="64@0,96@1B,1024@3B", top=50)
    pipelines = [choice.estimate.job for choice in found.choices if choice.estimate.job.layout.pp > 1]
    assert pipelines
    for job in pipelines:
        for batch in (64, 96, 1024):
            assert job.schedule_runs(replace(job, global_batch=batch).micro_batches)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None, "usd_per_gpu_hour": None}, "tokens"),
        ({"global_batch": 256}, "give one of them"),
        ({"batch_schedule": "auto:256..1024"}, "not known before"),
        ({"task": "dpo"}, "text and sft"),
        ({"batch_schedule": "256@0,512"}, "write it as"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        hfscale.plan("llama-3.1-8b", **RUN | {"batch_schedule": SCHEDULE} | changes)


LAYOUT = {"gpu": "H100-80GB", "layout": {"dp_shard": 16}, "zero": 3, "seq_len": 4096, "micro_batch": 2}


def test_an_estimate_has_the_steps_of_each_batch():
    found = hfscale.estimate("llama-3.1-8b", **LAYOUT, batch_schedule=SCHEDULE)
    for stage, batch in zip(found.stages, (256, 512, 1024), strict=True):
        constant = hfscale.estimate("llama-3.1-8b", **LAYOUT, global_batch=batch)
        assert (stage.global_batch, stage.micro_batches) == (batch, batch // 32)
        assert stage.step_time_s == pytest.approx(constant.time.total)
        assert stage.tokens_per_s_per_gpu == pytest.approx(constant.tokens_per_s_per_gpu)
    assert [stage.from_tokens // 4096 for stage in found.stages] == [0, 244141, 976563]
    assert found.job.global_batch == 1024  # what is said of memory holds for the largest
    assert [row["global_batch"] for row in found.to_dict()["batch_schedule"]] == [256, 512, 1024]
    assert "batch_schedule" not in constant.to_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch": 256}, "give one of them"),
        ({"batch_schedule": "auto:256..1024"}, "not known before"),
        ({"batch_schedule": "256@0,520@1B"}, "a batch of 520, which is not a multiple of the 32 sequences"),
        ({"layout": {"dp_shard": 8, "cp": 2}}, "never compared with one process"),
        (
            {"layout": {"dp_shard": 4, "pp": 4}, "batch_schedule": "16@0,64@1B"},
            "16 sequences are 2 micro-batches, with which 1F1B on 4 pipeline ranks does not run",
        ),
    ],
)
def test_what_cannot_be_estimated_is_refused(changes, message):
    with pytest.raises(HfScaleError, match=message):
        hfscale.estimate("llama-3.1-8b", **LAYOUT | {"batch_schedule": SCHEDULE} | changes)
