"""A checkpoint knows what it is a state of, and a training of something else does not resume from it by mistake."""

import json
import shutil
from dataclasses import fields

import datasets
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import RandomTokens, tiny_arguments, tiny_model, tiny_tokenizer, tiny_trainer
from transformers import Gemma4TextConfig, Trainer, TrainerCallback, default_data_collator

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint import identity
from hfscale.checkpoint.conversion import convert
from hfscale.checkpoint.identity import check_identity, identity_of
from hfscale.checkpoint.identity_differences import ASPECTS
from hfscale.checkpoint.loading import CONVERSIONS
from hfscale.checkpoint.manifest import read_manifest
from hfscale.checkpoint.store import verify
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.core.spelling import speaking
from hfscale.errors import CheckpointError, ParameterError, UsageError
from hfscale.recipe.arguments import ScalingArguments
from hfscale.recipe.finish import train

SAVING = {"save_strategy": "steps", "save_steps": 2}


def rows(count=64, shift=0):
    """Return a dataset of token ids, as TRL and the recipes make it."""
    ids = [[(row * 7 + column + shift) % 62 + 2 for column in range(8)] for row in range(count)]
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})


def trainer_of(folder, *, kind=Trainer, model=None, data=None, evaluation=None, tokenizer=None, other=(), **arguments):
    """Return a Trainer with the callback, on `rows()` unless other data are given."""
    return kind(
        model=model if model is not None else tiny_model(),
        args=tiny_arguments(folder, **(SAVING | arguments)),
        train_dataset=rows() if data is None else data,
        eval_dataset=evaluation,
        callbacks=[SpotCheckpointCallback(resume_with_other=other)],
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a folder with the checkpoints 2 and 4 of a run of four steps."""
    folder = tmp_path_factory.mktemp("written")
    trainer_of(folder, tokenizer=tiny_tokenizer()).train()
    return folder


@pytest.fixture
def run(written, tmp_path):
    """Return a copy of it."""
    return shutil.copytree(written, tmp_path / "run")


class OtherTrainer(Trainer):
    """A subclass of a user, whose task is that of Trainer."""


class DPOTrainer(Trainer):
    """Stands for a class of TRL."""

    __module__ = "trl.trainer.dpo_trainer"


class Seq2SeqTrainer(Trainer):
    """Stands for that of transformers."""

    __module__ = "transformers.trainer_seq2seq"


def lora(**options):
    return get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"], **({"r": 4} | options)))


OTHERS = {
    "another trainer (class Trainer -> DPOTrainer)": lambda: {"kind": DPOTrainer},
    "another model (hidden_size 32 -> 16)": lambda: {"model": tiny_model(hidden_size=16)},
    "another adapter (type none -> LORA)": lambda: {"model": lora()},
    "another tokenizer (content)": lambda: {"tokenizer": renamed_tokenizer()},
    "another data (rows 64 -> 40": lambda: {"data": rows(40)},
    "another data (content)": lambda: {"data": rows(64, shift=1)},
    "another data (kind rows -> stream)": lambda: {"data": rows().to_iterable_dataset()},
}


def renamed_tokenizer():
    tokenizer = tiny_tokenizer()
    fields = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = fields["model"]["vocab"]
    vocabulary["v8"] = vocabulary.pop("w8")
    vocabulary["v9"] = vocabulary.pop("w9")
    changed = type(tokenizer.backend_tokenizer).from_str(json.dumps(fields))
    return type(tokenizer)(tokenizer_object=changed, eos_token="<end>", pad_token="<end>")


@pytest.mark.parametrize("difference", OTHERS)
def test_a_training_of_something_else_stops_before_it_loads(run, difference):
    parts = {"tokenizer": tiny_tokenizer(), "max_steps": 6} | OTHERS[difference]()
    other = trainer_of(run, **parts)
    weights = {name: value.clone() for name, value in other.model.state_dict().items()}
    with pytest.raises(UsageError) as caught:
        other.train(resume_from_checkpoint=latest_checkpoint(run))
    word = difference.split()[1]
    message = str(caught.value)
    assert difference in message
    assert message.endswith(f"resume_with_other {word}")
    assert "checkpoint-4" in message
    assert all(torch.equal(value, weights[name]) for name, value in other.model.state_dict().items())
    assert [path.name for path in sorted(run.glob("checkpoint-*"))] == ["checkpoint-2", "checkpoint-4"]


def test_the_newest_checkpoint_that_trainer_finds_itself_is_checked(run):
    with pytest.raises(UsageError, match="another trainer"):
        trainer_of(run, kind=DPOTrainer, max_steps=6).train(resume_from_checkpoint=True)


def test_a_callback_that_was_added_late_checks_too(run):
    late = Trainer(
        model=tiny_model(),
        args=tiny_arguments(run, max_steps=6, **SAVING),
        train_dataset=rows(40),
        data_collator=default_data_collator,
    )
    late.add_callback(SpotCheckpointCallback())
    with pytest.raises(UsageError, match="rows 64 -> 40"):
        late.train(resume_from_checkpoint=str(run / "checkpoint-4"))


def test_a_converted_checkpoint_has_the_name_of_its_source(run):
    converted = run / CONVERSIONS / "checkpoint-4-as-ddp-x1-51b4b7ab1b3544ae"
    shutil.copytree(run / "checkpoint-4", converted)
    with pytest.raises(UsageError, match=r"^checkpoint-4 is of another run"):
        trainer_of(run, data=rows(40), max_steps=6).train(resume_from_checkpoint=str(converted))


def test_several_differences_are_one_line_with_all_words(run):
    other = trainer_of(run, kind=DPOTrainer, data=rows(40), max_steps=6)
    with pytest.raises(UsageError) as caught, speaking("recipe"):
        other.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert "use another --output_dir" in str(caught.value)
    assert str(caught.value).endswith("give --resume_with_other trainer data")
    assert "\n" not in str(caught.value)


def test_a_recipe_whose_run_is_shorter_is_not_finished_by_another_ones_checkpoint(run):
    """It would end at once with exit code 0, since the checkpoint has all of its steps."""
    from hfscale import ScalingCallback

    other = trainer_of(run, kind=DPOTrainer, max_steps=3)
    other.pop_callback(SpotCheckpointCallback)
    other.add_callback(ScalingCallback())
    with pytest.raises(UsageError, match="another trainer"):
        train(other, str(run / "checkpoint-4"))


def test_what_the_user_allows_may_differ(run):
    other = trainer_of(run, kind=DPOTrainer, data=rows(40), other=["trainer", "data"], max_steps=6)
    other.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert other.state.global_step == 6
    identity = read_manifest(run / "checkpoint-6").identity
    assert identity["trainer"] == {"class": "DPOTrainer"}
    assert identity["data"]["rows"] == 40


SAME = {
    "a subclass of a user": lambda folder: {"kind": OtherTrainer},
    "the trainer of sequences": lambda folder: {"kind": Seq2SeqTrainer},
    "batch sizes": lambda folder: {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "a learning rate and its schedule": lambda folder: {"learning_rate": 1e-3, "warmup_steps": 3},
    "precision and recomputation": lambda folder: {"bf16": True, "activation_checkpointing": True},
    "more workers": lambda folder: {"dataloader_num_workers": 1},
    "another path of the same data": lambda folder: {"data": moved(folder)},
    "other columns": lambda folder: {"data": rows().add_column("length", [8] * 64)},
    "a function on the rows": lambda folder: {"data": rows().with_transform(with_tensors)},
    "data that are not resumed": lambda folder: {"data": rows(40), "ignore_data_skip": True},
    "an evaluation": lambda folder: {"eval_strategy": "no", "logging_steps": 3},
}


def moved(folder):
    rows().save_to_disk(folder / "elsewhere")
    return datasets.load_from_disk(str(folder / "elsewhere"))


def with_tensors(batch):
    torch.rand(1)  # as an augmentation, of which no more numbers may be drawn than Trainer's
    return {name: torch.tensor(values) for name, values in batch.items()}


@pytest.mark.parametrize("change", SAME)
def test_what_may_change_within_a_run_is_not_refused(written, tmp_path, change):
    check_identity(
        trainer_of(written, tokenizer=tiny_tokenizer(), **SAME[change](tmp_path)), str(written / "checkpoint-4")
    )


class Chooses(Trainer):
    """Resumes from the newest checkpoint, whatever it is asked for."""

    def train(self, resume_from_checkpoint=None, **kwargs):
        return super().train(resume_from_checkpoint=latest_checkpoint(self.args.output_dir), **kwargs)


class TestOncePerResume:
    """The comparison is made once, wherever the checkpoint comes from; and each other checkpoint is compared too."""

    @pytest.fixture
    def compared(self, monkeypatch):
        """The checkpoints that have been compared, by name."""
        found = []
        compare = identity._check

        def counted(trainer, checkpoint, allowed):
            found.append(checkpoint.name)
            compare(trainer, checkpoint, allowed)

        monkeypatch.setattr(identity, "_check", counted)
        return found

    def test_of_an_argument_of_train(self, run, compared):
        trainer = trainer_of(run, tokenizer=tiny_tokenizer(), max_steps=5)
        trainer.train(resume_from_checkpoint=True)
        assert compared == ["checkpoint-4"]
        trainer.args.max_steps = 6
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))
        assert compared == ["checkpoint-4", "checkpoint-4"]  # of another training

    def test_of_a_recipe(self, run, compared):
        trainer = trainer_of(run, tokenizer=tiny_tokenizer(), max_steps=5)
        (spot,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, SpotCheckpointCallback))
        spot.check_identity(trainer, str(run / "checkpoint-4"))  # as `hfscale.recipe.finish.train` does
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))
        assert compared == ["checkpoint-4"]

    def test_of_a_subclass_that_chooses_the_checkpoint(self, run, compared):
        trainer_of(run, kind=Chooses, tokenizer=tiny_tokenizer(), max_steps=5).train()
        assert compared == ["checkpoint-4"]
        with pytest.raises(UsageError, match="another data"):
            trainer_of(run, kind=Chooses, data=rows(40), tokenizer=tiny_tokenizer(), max_steps=6).train()

    def test_after_a_training_that_was_refused(self, run, compared):
        trainer = trainer_of(run, data=rows(40), tokenizer=tiny_tokenizer(), max_steps=5)
        for _ in range(2):
            with pytest.raises(UsageError, match="another data"):
                trainer.train(resume_from_checkpoint=True)
        assert compared == ["checkpoint-4", "checkpoint-4"]

    def test_after_a_training_that_broke_off_before_it_began(self, run, compared):
        class Break(TrainerCallback):
            def on_train_begin(self, args, state, control, **kwargs):
                raise RuntimeError("broken off")

        trainer = trainer_of(run, tokenizer=tiny_tokenizer(), max_steps=5)
        trainer.callback_handler.callbacks.insert(0, Break())
        with pytest.raises(RuntimeError, match="broken off"):
            trainer.train(resume_from_checkpoint=True)
        trainer.train_dataset = rows(40)
        with pytest.raises(UsageError, match="another data"):
            trainer.train(resume_from_checkpoint=True)
        assert compared == ["checkpoint-4", "checkpoint-4"]


def test_a_model_whose_layers_differ_has_an_identity(tmp_path):
    """Gemma 4, whose layers with attention to all tokens have fewer key-value heads."""
    model = tiny_model()
    model.config = Gemma4TextConfig(num_key_value_heads=4, num_global_key_value_heads=2, attention_k_eq_v=True)
    found = identity_of(trainer_of(tmp_path, model=model))["model"]
    assert found["num_attention_heads"] == model.config.num_attention_heads
    assert "num_key_value_heads" not in found


def test_no_random_number_is_drawn_for_the_identity(tmp_path):
    data = rows().with_transform(with_tensors)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    identity_of(trainer_of(tmp_path, data=data, model=tiny_model()))
    torch.manual_seed(0)
    assert torch.equal(before, torch.get_rng_state())
    calls = []
    counted = rows().with_transform(lambda batch: calls.append(1) or batch)
    identity_of(trainer_of(tmp_path, data=counted))
    assert not calls


class Ordered(RandomTokens):
    """Rows in an order that no seed determines, and that a callback may draw again."""

    def __init__(self):
        super().__init__()
        self.shuffle()

    def shuffle(self):
        self.order = torch.from_numpy(np.random.default_rng().permutation(len(self)))

    def __getitem__(self, index):
        return super().__getitem__(int(self.order[index]))


def test_rows_that_a_launch_has_shuffled_anew_are_not_those_of_the_checkpoint(tmp_path):
    trainer_of(tmp_path, data=Ordered()).train()
    with pytest.raises(UsageError, match=r"another data \(other rows, order or numbers in order: "):
        trainer_of(tmp_path, data=Ordered(), max_steps=6).train(resume_from_checkpoint=True)
    trainer_of(tmp_path, data=Ordered(), other=["data"], max_steps=6).train(resume_from_checkpoint=True)


def test_rows_that_the_process_has_shuffled_itself_are(tmp_path):
    """As in a notebook, whose cell is run again."""
    trainer = trainer_of(tmp_path, data=Ordered())
    trainer.train()
    trainer.train_dataset.shuffle()
    trainer.args.max_steps = 6
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6


class ShufflesEachEpoch(TrainerCallback):
    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
        if state.epoch:
            train_dataloader.dataset.shuffle()


def test_an_order_that_the_checkpoint_restores_is_not_compared(tmp_path):
    """Each epoch draws its order: that of the epoch of the checkpoint is in it."""

    def begin(**arguments):
        trainer = trainer_of(tmp_path, data=Ordered(), per_device_train_batch_size=16, save_steps=1, **arguments)
        trainer.add_callback(ShufflesEachEpoch())
        return trainer

    first = begin(max_steps=6)
    first.train()
    shutil.rmtree(tmp_path / "checkpoint-6")
    resumed = begin(max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.log_history[-2]["loss"] == first.state.log_history[-2]["loss"]


def test_other_evaluation_data_are_said(tmp_path, caplog):
    """As a sample of them that each launch draws."""

    def begin(first, **arguments):
        chosen = rows().select(range(first, first + 20))
        return trainer_of(tmp_path, evaluation=chosen, eval_strategy="steps", eval_steps=2, **arguments)

    begin(0).train()
    begin(0, max_steps=5).train(resume_from_checkpoint=True)
    assert "evaluation data" not in caplog.text
    begin(9, max_steps=6).train(resume_from_checkpoint=True)
    (line,) = [each.getMessage() for each in caplog.records if "evaluation data are not" in each.getMessage()]
    assert "in input_ids, labels" in line


def test_labels_with_other_numbers_are_another_model(tmp_path):
    def model(names):
        return tiny_model(id2label=dict(enumerate(names)))

    trainer_of(tmp_path, model=model(["cat", "dog", "horse"])).train()
    with pytest.raises(UsageError, match=r"another model \(its labels have other numbers: does a set order them\?\)"):
        trainer_of(tmp_path, model=model(["dog", "cat", "horse"]), max_steps=5).train(resume_from_checkpoint=True)
    trainer_of(tmp_path, model=model(["a cat", "a dog", "a horse"]), max_steps=5).train(resume_from_checkpoint=True)


DATED = "{{ strftime_now('%Y-%m-%d') }}{% for message in messages %}{{ message.content }}{% endfor %}"


def test_tokens_of_a_template_that_writes_the_date_differ_on_another_day(tmp_path, caplog):
    """As those of Llama 3.2 and gpt-oss: a run that goes on after midnight is not refused."""
    trainer_of(tmp_path, tokenizer=tiny_tokenizer(chat_template=DATED)).train()
    resumed = trainer_of(tmp_path, tokenizer=tiny_tokenizer(chat_template=DATED), data=rows(64, shift=1), max_steps=5)
    with pytest.raises(UsageError, match=r"another data \(content\)"):
        check_identity(resumed, str(tmp_path / "checkpoint-4"))
    manifest = tmp_path / "checkpoint-4" / MANIFEST_NAME
    fields = json.loads(manifest.read_text())
    fields["identity"]["data"]["date"] = "2026-11-28"
    manifest.write_text(json.dumps(fields))
    check_identity(resumed, str(tmp_path / "checkpoint-4"))
    (line,) = [record.getMessage() for record in caplog.records if "writes the date" in record.getMessage()]
    assert "2026-11-28" in line
    fewer = trainer_of(tmp_path, tokenizer=tiny_tokenizer(chat_template=DATED), data=rows(40), max_steps=5)
    with pytest.raises(UsageError, match="rows 64 -> 40"):
        check_identity(fewer, str(tmp_path / "checkpoint-4"))


def test_a_larger_vocabulary_is_the_same_model_and_tokenizer(tmp_path):
    extended, model = tiny_tokenizer(), tiny_model()
    extended.add_tokens(["<new>", "<newer>"])
    model.resize_token_embeddings(72)
    before = identity_of(trainer_of(tmp_path, tokenizer=tiny_tokenizer()))
    now = identity_of(trainer_of(tmp_path, tokenizer=extended, model=model))
    assert before == now


def test_the_rank_of_adapters_is_named_before_torch_refuses_their_shapes(tmp_path):
    trainer_of(tmp_path, model=lora()).train()
    same = trainer_of(tmp_path, model=lora(), max_steps=5)
    same.train(resume_from_checkpoint=latest_checkpoint(tmp_path))
    with pytest.raises(UsageError, match=r"another adapter \(r 4 -> 8\)"):
        trainer_of(tmp_path, model=lora(r=8), max_steps=6).train(resume_from_checkpoint=latest_checkpoint(tmp_path))


def test_shares_of_rows_on_other_numbers_of_processes_are_not_refused(run):
    """A script may give each process its own part of the rows."""
    manifest = run / "checkpoint-4" / MANIFEST_NAME
    fields = json.loads(manifest.read_text()) | {"world_size": 2}
    for per_process, is_same in ((31, False), (32, True), (33, True)):
        fields["identity"]["data"]["rows"] = per_process
        manifest.write_text(json.dumps(fields))
        resumed = trainer_of(run, data=RandomTokens(65), max_steps=5)
        if is_same:
            check_identity(resumed, str(run / "checkpoint-4"))
        else:
            with pytest.raises(UsageError, match="rows 31 -> 65"):
                check_identity(resumed, str(run / "checkpoint-4"))


def test_the_share_of_an_island_is_not_compared(tmp_path):
    from hfscale.islands.data import island_share

    for data in (rows(), RandomTokens(64)):
        share = identity_of(trainer_of(tmp_path, data=island_share(data, islands=2, island=1)))
        assert share["data"] == {"kind": "rows"}


def test_manifests_of_earlier_versions_and_of_later_ones_are_read(run):
    manifest = run / "checkpoint-4" / MANIFEST_NAME
    fields = json.loads(manifest.read_text())
    identity = fields.pop("identity")
    manifest.write_text(json.dumps(fields))
    assert read_manifest(run / "checkpoint-4").identity is None
    trainer_of(run, kind=DPOTrainer, data=rows(40), max_steps=5).train(
        resume_from_checkpoint=str(run / "checkpoint-4")
    )
    later = {
        **fields,
        "of_a_later_version": 1,
        "identity": {**identity, "colour": {"of": "x"}, "trainer": {"kind": 1}},
    }
    manifest.write_text(json.dumps(later))
    check_identity(trainer_of(run), str(run / "checkpoint-4"))


@pytest.mark.parametrize("broken", ["text", ["list"], {"model": "llama"}])
def test_a_broken_identity_is_refused(run, broken):
    manifest = run / "checkpoint-4" / MANIFEST_NAME
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"identity": broken}))
    with pytest.raises(CheckpointError, match="is not a manifest"):
        read_manifest(run / "checkpoint-4")


def test_a_conversion_keeps_the_identity(run, tmp_path):
    source = run / "checkpoint-4"
    manifest = verify(source)
    converted = convert(source, tmp_path / "checkpoint-4", manifest=manifest, strategy="zero2", world_size=2)
    assert converted.identity == manifest.identity
    assert manifest.identity is not None


def test_an_unknown_word_is_refused_and_all_words_are_in_the_help_of_the_recipes():
    (flag,) = (field for field in fields(ScalingArguments) if field.name == "resume_with_other")
    assert flag.metadata["help"].endswith(f"{', '.join(ASPECTS)}.")
    with pytest.raises(ParameterError, match="resume_with_other is 'dataset': use some of trainer, model"):
        SpotCheckpointCallback(resume_with_other=["data", "dataset"])
    assert SpotCheckpointCallback(resume_with_other="data trainer").resume_with_other == {"data", "trainer"}


def test_a_data_set_of_several_parts_counts_all_rows(tmp_path):
    plain = tiny_trainer(tmp_path)
    plain.train_dataset = {"a": RandomTokens(10), "b": RandomTokens(5)}
    found = identity_of(plain)["data"]
    assert (found["kind"], found["rows"]) == ("rows", 15)
    assert {"sample.a.rows", "sample.b.rows"} <= set(found)


def test_files_of_the_checkpoint_are_those_of_plain_trainer(run):
    names = {path.name for path in (run / "checkpoint-4").iterdir()}
    assert load_file(run / "checkpoint-4" / "model.safetensors")
    assert not {name for name in names if "identity" in name}
