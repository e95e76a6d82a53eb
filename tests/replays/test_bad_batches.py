"""Bad batches are left out bit for bit, as if the run had never had them: strategies, resumes, limits, clean runs."""

import json
import random
from dataclasses import replace

import pytest
import torch
from bad_batch_runs import (
    QUIET,
    Job,
    Net,
    SaveAt,
    check,
    fingerprint,
    losses_of,
    make_trainer,
    run,
    train_and_save,
    train_both,
)
from forked_ranks import run_ranks
from recipe_runs import environment_of
from tiny import StopAt, logged, tiny_tokenizer
from transformers import Trainer

from hfscale import CommHealthCallback, ScalingCallback
from hfscale.checkpoint.conversion import convert
from hfscale.checkpoint.manifest import read_manifest
from hfscale.errors import DataError, UsageError
from hfscale.facts.support import Combination, rules
from hfscale.replays import outliers

SINGLE = [
    Job(bad={1: "nan", 2: "inf"}, model="net"),
    Job(bad={6: "spike", 12: "nan"}, model="net", seed=1),
    Job(bad={}, model="net", seed=2),
]
LAYOUTS = ["ddp", "fsdp2", "zero1", "zero2", "zero3", "hsdp", "native-fsdp", "native-hsdp", "native-tp", "native-ep"]
PARALLEL = ["tp", "tp-sp", "pp", "pp-interleaved", "dp", "ep", "tp-pp"]
JOBS = [
    Job(bad={1: "nan", 7: "spike"}),
    Job(bad={5: "spike", 8: "inf", 9: "nan"}, seed=1),
    Job(bad={12: "nan"}, seed=2),
]


@pytest.fixture
def judges_early(monkeypatch):
    monkeypatch.setattr(outliers, "MIN_STEPS", 4)
    monkeypatch.setattr(outliers, "REACH", 100.0)
    monkeypatch.setattr(outliers, "MIN_RISE", 100.0)


@pytest.mark.parametrize("job", SINGLE, ids=str)
def test_one_process_equals_a_run_without_the_batches(tmp_path, job, judges_early):
    check("single", job, train_both("single", tmp_path, job, {}))


def test_neither_the_filter_of_losses_nor_missing_clipping_hides_a_batch(tmp_path, judges_early):
    job = Job(bad={2: "nan", 8: "spike"}, seed=6)
    arguments = {"logging_nan_inf_filter": True, "max_grad_norm": 0.0, "gradient_accumulation_steps": 2}
    check("single", job, train_both("single", tmp_path, job, arguments), 2)


def test_ddp_equals_a_run_without_the_batches(tmp_path):
    jobs = [Job(bad={1: "nan", 7: "spike"}, model="net")]
    for job, results in zip(jobs, run("ddp", tmp_path, jobs, gradient_accumulation_steps=2), strict=True):
        for result in results:
            check("ddp", job, result, 2)


@pytest.mark.faults
@pytest.mark.parametrize("layout", LAYOUTS + PARALLEL)
def test_every_strategy_equals_a_run_without_the_batches(tmp_path, layout):
    for job, results in zip(JOBS, run(layout, tmp_path, JOBS), strict=True):
        for result in results:
            check(layout, job, result)


class Writes(torch.nn.Module):
    """A model whose forward pass moves a weight."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x, labels):
        with torch.no_grad():
            self.net.layers[0].bias.add_(0.1)
        return self.net(x, labels)


class Drawing(Trainer):
    """A Trainer that may draw its data itself."""

    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


def skipping_trainer(folder, job, *callbacks, most=10, **arguments):
    health = CommHealthCallback(skip_bad_batches=most, **QUIET)
    return make_trainer("single", folder, job, [health, *callbacks], **arguments)


def listed(folder):
    return json.loads((folder / "hfscale_skipped_batches.json").read_text())["batches"]


RESUMED = Job(bad={3: "nan", 9: "spike"}, model="net", seed=3)


def test_a_resume_continues_with_what_was_left_out(tmp_path, judges_early):
    complete = skipping_trainer(tmp_path / "complete", RESUMED)
    complete.train()
    skipping_trainer(tmp_path / "resumed", RESUMED, StopAt(6)).train()
    resumed = skipping_trainer(tmp_path / "resumed", RESUMED)
    resumed.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-6"))
    assert fingerprint(resumed) == fingerprint(complete)
    assert [batch["step"] for batch in listed(tmp_path / "resumed")] == [3, 9]


def test_a_resume_from_an_earlier_checkpoint_leaves_the_same_batches_out(tmp_path, judges_early, monkeypatch, caplog):
    complete = skipping_trainer(tmp_path, RESUMED, SaveAt(2))
    complete.train()
    before = listed(tmp_path)
    # With these numbers the spike would be trained on
    monkeypatch.setattr(outliers, "MIN_STEPS", 10**6)
    resumed = skipping_trainer(tmp_path, RESUMED)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert fingerprint(resumed) == fingerprint(complete)
    assert listed(tmp_path) == before
    other = replace(RESUMED, seed=4)
    resumed = skipping_trainer(tmp_path, other)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [batch["step"] for batch in listed(tmp_path)] == [3]
    assert "step 9 has other samples" in caplog.text


def test_one_bad_batch_too_many_ends_the_run_with_one_line(tmp_path):
    trainer = skipping_trainer(tmp_path, replace(RESUMED, bad={3: "inf", 5: "nan"}), most=1)
    with pytest.raises(DataError, match=r"step 5: the loss is nan; 1 batches .*skip_bad_batches=1 allows no more"):
        trainer.train()
    assert trainer.state.global_step == 4
    assert [batch["step"] for batch in listed(tmp_path)] == [3]


def test_the_log_names_the_samples_and_their_text(tmp_path, caplog):
    trainer = skipping_trainer(tmp_path, Job(bad={2: "nan"}, steps=3), ScalingCallback())
    trainer.processing_class = tiny_tokenizer()
    trainer.train()
    (batch,) = listed(tmp_path)
    text = batch["worst"]["texts"][0]
    assert text.startswith("w")
    assert f"samples {', '.join(map(str, batch['worst']['samples']))} of the training data: {text!r}" in caplog.text
    assert logged(trainer, "health/skipped_batches")[-1] == 1
    assert len(logged(trainer, "loss")) == 2  # a log of no other step is not made


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"model": Writes}, r"parameter model\.net\.layers\.0\.bias"),
        ({"iterator": True}, "list_iterator"),
        ({"kind": Drawing}, r"Drawing\.training_step"),
    ],
    ids=str,
)
def test_what_cannot_be_undone_is_refused_by_name(tmp_path, change, named):
    arguments = {"auto_find_batch_size": True} if "auto_find_batch_size" in change else {}
    trainer = skipping_trainer(tmp_path, replace(RESUMED, bad={}), **arguments)
    if "model" in change:
        trainer = Trainer(
            model=change["model"](),
            args=trainer.args,
            train_dataset=trainer.train_dataset,
            callbacks=[CommHealthCallback(skip_bad_batches=2, **QUIET)],
        )
    if "iterator" in change:
        trainer.model.place = iter([1, 2])
    if "kind" in change:
        trainer.__class__ = change["kind"]
    with pytest.raises(UsageError, match=rf"skip_bad_batches=\d+.*{named}"):
        trainer.train()


def test_each_rule_names_the_option_and_its_value():
    for rule in rules():
        if "skip_bad_batches" in rule.when:
            assert "skip_bad_batches=7" in rule.text(Combination(skip_bad_batches=7)), rule.name


def test_a_clean_run_of_noisy_small_batches_leaves_out_none(tmp_path):
    job = Job(bad={}, steps=200, model="net")
    trainer = skipping_trainer(tmp_path, job, per_device_train_batch_size=2, warmup_steps=50, logging_steps=50)
    trainer.train()
    assert logged(trainer, "health/skipped_batches")[-1] == 0
    assert not (tmp_path / "hfscale_skipped_batches.json").exists()


def drawn_job(seed):
    """A training with poisons of any kind in any steps; spikes only where there are numbers to compare with."""
    chance = random.Random(seed)
    kinds = {}
    for step in sorted(chance.sample(range(1, 13), chance.randint(1, 4))):
        has_numbers = step - 1 - len(kinds) >= 4
        kinds[step] = chance.choice(["nan", "inf", "spike"] if has_numbers else ["nan", "inf"])
    return Job(bad=kinds, seed=seed, model="net")


@pytest.mark.faults
def test_thirty_drawn_runs_of_one_process(tmp_path, judges_early):
    for seed in range(30):
        job = drawn_job(seed)
        check("single", job, train_both("single", tmp_path / str(seed), job, {}))


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_thirty_drawn_runs(tmp_path, layout):
    jobs = [drawn_job(seed) for seed in range(30, 60)]
    if layout != "ddp":
        jobs = [replace(job, model="llama") for job in jobs]
    for job, results in zip(jobs, run(layout, tmp_path, jobs, timeout_s=500), strict=True):
        for result in results:
            check(layout, job, result)


@pytest.mark.faults
@pytest.mark.parametrize("layout", ["fsdp2", "zero1", "zero3", "native-fsdp"])
def test_all_micro_batches_of_a_step_are_undone(tmp_path, layout):
    jobs = [Job(bad={2: "nan", 8: "spike"}, seed=5)]
    for result in run(layout, tmp_path, jobs, gradient_accumulation_steps=2)[0]:
        check(layout, jobs[0], result, 2)


@pytest.mark.faults
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "zero2"])
def test_a_resume_on_another_number_of_ranks_leaves_the_same_batches_out(tmp_path, layout, judges_early, monkeypatch):
    job = Job(bad={3: "nan", 9: "spike"}, seed=3, dropout=0.0)
    env = environment_of(layout)
    log = tmp_path / "log"
    assert run_ranks(2, train_and_save, tmp_path, layout, job, 6, log=log, env=env) == [0, 0]
    checkpoint = tmp_path / "checkpoint-6"
    converted = tmp_path / "converted" / "checkpoint-6"
    converted.parent.mkdir()
    convert(checkpoint, converted, manifest=read_manifest(checkpoint), strategy="single", world_size=1)
    monkeypatch.setattr(outliers, "MIN_STEPS", 10**6)
    resumed = skipping_trainer(tmp_path, job)
    resumed.train(resume_from_checkpoint=str(converted))
    assert [batch["step"] for batch in listed(tmp_path)] == [3, 9]
    assert losses_of(resumed) == pytest.approx(json.loads((tmp_path / "losses-0.json").read_text()), rel=1e-4)


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_thirty_clean_runs_leave_out_none(tmp_path):
    for seed in range(30):
        model = ("net", "llama")[seed % 2]
        job = Job(bad={}, steps=200, seed=seed, model=model, dropout=0.1)
        options = {"per_device_train_batch_size": 2, "warmup_steps": 30 * (seed % 3), "logging_steps": 100}
        trainer = skipping_trainer(tmp_path / str(seed), job, learning_rate=(1e-3, 1e-2)[seed % 2], **options)
        trainer.train()
        assert logged(trainer, "health/skipped_batches")[-1] == 0, job
