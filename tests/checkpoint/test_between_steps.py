"""What callbacks do between a save and the next step belongs to the run: its random numbers, and ends of epochs."""

import os
import signal

import pytest
import torch
from tiny import RandomTokens, logged, tiny_arguments, tiny_model
from torch.utils.data import IterableDataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, default_data_collator, set_seed

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint import store
from hfscale.checkpoint.preemption.stop import PreemptionStop
from hfscale.errors import CheckpointError

ROWS, BATCH = 12, 4
EPOCH = ROWS // BATCH


class Calls(TrainerCallback):
    """Calls a function with the Trainer at one event."""

    trainer = None

    def __init__(self, crash=None):
        self.crash, self.ends = crash, []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.crash:
            raise RuntimeError("planned")


class AtSaves(Calls):
    def on_save(self, args, state, control, **kwargs):
        torch.rand(3)


class AtEnds(Calls):
    def on_epoch_end(self, args, state, control, **kwargs):
        self.ends.append(state.global_step)
        torch.rand(3)


class AtBegins(Calls):
    def on_epoch_begin(self, args, state, control, **kwargs):
        torch.rand(3)


class Seeds(Calls):
    def on_epoch_begin(self, args, state, control, **kwargs):
        set_seed(int(state.epoch) + 5)


class Evaluates(Calls):
    def on_epoch_end(self, args, state, control, **kwargs):
        self.trainer.evaluate()


class Unfreezes(Calls):
    """Lets another layer train from the second epoch on."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.model.bert.embeddings.requires_grad_(False)

    def on_epoch_end(self, args, state, control, **kwargs):
        self.trainer.model.bert.embeddings.requires_grad_(True)


class AsksForEvaluations(AtEnds):
    def on_epoch_end(self, args, state, control, **kwargs):
        super().on_epoch_end(args, state, control, **kwargs)
        control.should_evaluate = True


class Stops(AtEnds):
    def on_epoch_end(self, args, state, control, **kwargs):
        super().on_epoch_end(args, state, control, **kwargs)
        control.should_training_stop = True


def model_with_dropout():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForMaskedLM(BertConfig(vocab_size=64, hidden_dropout_prob=0.2, **sizes))


def program(folder, callback, *, save_steps=EPOCH, data=None, model=model_with_dropout, **options):
    arguments = tiny_arguments(
        folder,
        num_train_epochs=3,
        save_strategy="steps",
        save_steps=save_steps,
        logging_steps=1,
        learning_rate=1e-2,
        **({"per_device_train_batch_size": BATCH, "max_steps": -1} | options),
    )
    trainer = Trainer(
        model=model(),
        args=arguments,
        train_dataset=RandomTokens(ROWS) if data is None else data,
        eval_dataset=RandomTokens(4),
        data_collator=default_data_collator,
        callbacks=[SpotCheckpointCallback(asynchronous=False), callback],
    )
    callback.trainer = trainer
    return trainer


def crashed_and_resumed(folder, kind, crash, **options):
    with pytest.raises(RuntimeError, match="planned"):
        program(folder, kind(crash), **options).train()
    callback = kind()
    again = program(folder, callback, **options)
    again.train(resume_from_checkpoint=latest_checkpoint(folder))
    return again, callback


@pytest.mark.parametrize("kind", [Calls, AtSaves, AtEnds, AtBegins, Seeds, Evaluates, Unfreezes, AsksForEvaluations])
@pytest.mark.parametrize("crash", [EPOCH + 1, 2 * EPOCH + 1])
def test_what_callbacks_draw_between_steps_is_drawn_again(tmp_path, kind, crash):
    whole = program(tmp_path / "whole", kind())
    whole.train()
    again, _ = crashed_and_resumed(tmp_path / "crashed", kind, crash)
    assert logged(again, "loss") == logged(whole, "loss")
    assert logged(again, "eval_loss") == logged(whole, "eval_loss")


class Stream(IterableDataset):
    """The rows in order, with no length."""

    def __iter__(self):
        return iter([RandomTokens(ROWS)[number] for number in range(ROWS)])


@pytest.mark.parametrize("kind", [AtBegins, Seeds])
def test_what_callbacks_draw_where_a_pass_over_a_stream_begins_stays(tmp_path, kind):
    options = {"data": Stream(), "max_steps": 3 * EPOCH}
    whole = program(tmp_path / "whole", kind(), **options)
    whole.train()
    again, _ = crashed_and_resumed(tmp_path / "crashed", kind, EPOCH + 1, **options)
    assert logged(again, "loss") == logged(whole, "loss")


@pytest.mark.parametrize("kind", [AtSaves, AtEnds, AtBegins])
def test_inside_an_epoch_too(tmp_path, kind):
    whole = program(tmp_path / "whole", kind(), save_steps=2)
    whole.train()
    again, _ = crashed_and_resumed(tmp_path / "crashed", kind, EPOCH + 2, save_steps=2)
    assert logged(again, "loss") == logged(whole, "loss")


def test_the_end_of_an_epoch_is_made_up_once_and_only_after_a_save_before_it(tmp_path):
    _, callback = crashed_and_resumed(tmp_path / "steps", AtEnds, EPOCH + 1)
    assert callback.ends == [EPOCH, 2 * EPOCH, 3 * EPOCH]
    _, callback = crashed_and_resumed(tmp_path / "inside", AtEnds, EPOCH + 2, save_steps=EPOCH + 1)
    assert callback.ends == [2 * EPOCH, 3 * EPOCH]
    options = {"save_steps": 500}
    kept = program(tmp_path / "epoch", AtEnds(), **options)
    kept.args.save_strategy = "epoch"
    kept.train()
    callback = AtEnds()
    again = program(tmp_path / "epoch", callback, **options)
    again.args.save_strategy = "epoch"
    again.train(resume_from_checkpoint=str(tmp_path / "epoch" / f"checkpoint-{EPOCH}"))
    assert callback.ends == [2 * EPOCH, 3 * EPOCH]


def test_a_complete_run_has_no_further_end(tmp_path):
    program(tmp_path, AtEnds()).train()
    callback = AtEnds()
    program(tmp_path, callback).train(resume_from_checkpoint=latest_checkpoint(tmp_path))
    assert callback.ends == []


def test_a_callback_that_stops_at_the_end_of_an_epoch_stops_the_resumed_run(tmp_path):
    program(tmp_path, Stops()).train()
    callback = Stops()
    again = program(tmp_path, callback)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{EPOCH}"))
    assert (again.state.global_step, callback.ends) == (EPOCH, [EPOCH])


class StopsAt(Calls):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.crash:
            control.should_training_stop = control.should_save = True


def test_a_run_that_goes_on_where_a_callback_had_ended_it_says_so(tmp_path, caplog):
    program(tmp_path, StopsAt(EPOCH + 1)).train()
    assert latest_checkpoint(tmp_path).endswith(f"-{EPOCH + 1}")
    for is_first in (True, False):
        caplog.clear()
        program(tmp_path, Calls()).train(resume_from_checkpoint=latest_checkpoint(tmp_path))
        assert (f"a callback had ended the training at step {EPOCH + 1}" in caplog.text) == is_first


class StopsInStep(AtSaves):
    """Sends the notice of a stop in a step, and draws random numbers at saves."""

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.crash:
            os.kill(os.getpid(), signal.SIGTERM)


def test_the_save_of_a_stop_moves_no_random_numbers(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(PreemptionStop, "exchange_every_s", 0.0)
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": BATCH // 2}
    whole = program(tmp_path / "whole", AtSaves(), **options)
    whole.train()
    drawn = torch.rand(3)
    with pytest.raises(SystemExit):
        program(tmp_path / "run", StopsInStep(EPOCH + 1), **options).train()
    assert latest_checkpoint(tmp_path / "run").endswith(f"-{EPOCH + 1}")
    again = program(tmp_path / "run", AtSaves(), **options)
    again.train(resume_from_checkpoint=latest_checkpoint(tmp_path / "run"))
    assert "had ended the training" not in caplog.text
    assert logged(again, "loss") == logged(whole, "loss")
    assert torch.equal(torch.rand(3), drawn)


def test_states_after_a_save_are_in_the_manifest(tmp_path):
    program(tmp_path, AtSaves()).train()
    checkpoint = tmp_path / f"checkpoint-{EPOCH}"
    assert "hfscale_after_save_0.json" in store.verify(checkpoint).files
    program(tmp_path / "calm", Calls()).train()
    assert not list((tmp_path / "calm").rglob("hfscale_after_save_*"))


@pytest.mark.parametrize("damage", ["{", '{"python": 1}'])
def test_broken_states_after_a_save_are_refused(tmp_path, damage):
    program(tmp_path, AtSaves()).train()
    checkpoint = tmp_path / f"checkpoint-{EPOCH}"
    (checkpoint / "hfscale_after_save_0.json").write_text(damage)
    store.update_manifest(checkpoint)
    with pytest.raises(CheckpointError, match=r"hfscale_after_save_0\.json cannot be read"):
        program(tmp_path, AtSaves()).train(resume_from_checkpoint=str(checkpoint))


class FailsInSave(Calls):
    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.crash:
            raise RuntimeError("planned")


def test_a_launch_that_ended_in_on_save_is_named_by_the_next_one(tmp_path, caplog):
    with pytest.raises(RuntimeError, match="planned"):
        program(tmp_path, FailsInSave(2 * EPOCH)).train()
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint.endswith(f"checkpoint-{2 * EPOCH}")
    program(tmp_path, FailsInSave()).train(resume_from_checkpoint=checkpoint)
    assert caplog.text.count("ended in on_save of its callbacks") == 1
    caplog.clear()
    program(tmp_path, FailsInSave()).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{EPOCH}"))
    assert "ended in on_save" not in caplog.text


class ShufflesRows(Calls):
    def on_epoch_begin(self, args, state, control, **kwargs):
        self.trainer.train_dataset.reverse()


def test_rows_that_change_places_are_named_once(tmp_path, log):
    rows = [RandomTokens(ROWS)[number] for number in range(ROWS)]
    program(tmp_path, ShufflesRows(), data=rows, model=tiny_model).train()
    lines = [line for line in log.messages if "change places or content" in line]
    assert len(lines) == 1
    assert "(a list)" in lines[0]
    log.clear()
    program(tmp_path / "calm", Calls(), data=rows, model=tiny_model).train()
    assert not [line for line in log.messages if "change places" in line]


class EndsEpochs(Calls):
    """Ends each epoch after its second step."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % 2 == 0:
            control.should_epoch_stop = True


def test_an_epoch_that_a_callback_ends_early_is_named_and_not_resumed_from(tmp_path, log):
    whole = program(tmp_path, EndsEpochs(), save_steps=1)
    whole.train()
    assert whole.state.global_step == 6
    lines = [line for line in log.messages if "has ended an epoch at step 2" in line]
    assert len(lines) == 1
    with pytest.raises(CheckpointError, match=r"has ended an epoch at step 2, .* give resume_with_other data$"):
        program(tmp_path, EndsEpochs(), save_steps=1).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_before_the_first_such_epoch_a_run_resumes(tmp_path):
    whole = program(tmp_path / "whole", EndsEpochs(), save_steps=1)
    whole.train()
    again, _ = crashed_and_resumed(tmp_path / "crashed", EndsEpochs, 1, save_steps=1)
    assert logged(again, "loss") == logged(whole, "loss")
    assert again.state.global_step == 6


def test_a_run_that_may_see_other_samples_resumes_after_it(tmp_path):
    program(tmp_path, EndsEpochs(), save_steps=1).train()
    again = program(tmp_path, EndsEpochs(), save_steps=1)
    spot = next(each for each in again.callback_handler.callbacks if isinstance(each, SpotCheckpointCallback))
    spot.resume_with_other = ("data",)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.state.global_step > 3


@pytest.mark.parametrize("kind", [Calls, Stops])
def test_other_ends_of_epochs_are_not_named(tmp_path, log, kind):
    program(tmp_path, kind(), save_steps=2).train()
    assert not [line for line in log.messages if "should_epoch_stop" in line]
