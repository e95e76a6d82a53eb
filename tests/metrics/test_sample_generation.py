"""SampleGenerationCallback: prompts, what is written where, and what is refused."""

import json
import os
import threading

import pytest
import torch
from forked_ranks import run_ranks
from recipe_runs import output
from tiny import logged, tiny_model, tiny_tokenizer, tiny_trainer

import hfscale.trainer.generation
from hfscale import SampleGenerationCallback, ScalingCallback
from hfscale.errors import DataError, HfScaleError, UsageError
from hfscale.health.diagnosis import slow_activity
from hfscale.metrics.prompts import read_prompts
from hfscale.recipe.parsing import parse_arguments

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <turn> {% endfor %}"
    "{% if add_generation_prompt %}w9 {% endif %}"
)
CHAT = {"messages": [{"role": "w7", "content": "w8"}]}


def chat_tokenizer():
    return tiny_tokenizer(additional_special_tokens=["<turn>"], chat_template=TEMPLATE)


def samples_of(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def train(folder, *, prompts=("w3 w4", CHAT), tokenizer=None, model=None, resume=None, **options):
    settings = {name: options.pop(name) for name in ("temperature", "seed", "max_new_tokens") if name in options}
    samples = SampleGenerationCallback(prompts, every_steps=2, **({"max_new_tokens": 5} | settings))
    trainer = tiny_trainer(
        folder, ScalingCallback(), samples, tokenizer=tokenizer or chat_tokenizer(), model=model, **options
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_generations_are_written_and_logged(tmp_path, caplog):
    trainer = train(tmp_path)
    found = samples_of(tmp_path)
    assert [(sample["step"], sample["sample"]) for sample in found] == [(2, 1), (2, 2), (4, 1), (4, 2)]
    assert [sample["prompt"] for sample in found[:2]] == ["w3 w4", "w7 w8 <turn> w9 "]
    assert all(sample["new_tokens"] == 5 or sample["finished"] for sample in found)
    ids = torch.tensor([[3, 4]])
    trainer.model.eval()
    expected = trainer.model.generate(ids, max_new_tokens=found[2]["new_tokens"], do_sample=False)
    assert found[2]["generation"] == trainer.processing_class.decode(expected[0, 2:], skip_special_tokens=True)
    assert any("step 4, sample 1: w3 w4 -> " in line for line in caplog.messages)


def test_a_full_disk_for_the_samples_ends_nothing(tmp_path, caplog):
    (tmp_path / "samples.jsonl").symlink_to("/dev/full")
    assert train(tmp_path).state.global_step == 4
    assert "writing measurements failed" in caplog.text
    assert any("step 4, sample 1: w3 w4 -> " in line for line in caplog.messages)


@pytest.mark.parametrize(
    "options",
    [{"activation_checkpointing": True}, {"temperature": 1.0}, {"neftune_noise_alpha": 5.0}],
    ids=["recomputed activations", "sampled", "noise on the embeddings"],
)
def test_the_training_stays_bit_equal(tmp_path, options):
    dropout = {"attention_dropout": 0.3}
    trainer = train(tmp_path / "with", model=tiny_model(**dropout), **options)
    options.pop("temperature", None)
    plain = tiny_trainer(tmp_path / "plain", tokenizer=chat_tokenizer(), model=tiny_model(**dropout), **options)
    plain.train()
    assert logged(trainer, "loss") == logged(plain, "loss")
    assert logged(trainer, "grad_norm") == logged(plain, "grad_norm")
    assert {name for name, module in trainer.model.named_modules() if not module.training} == set()


def test_a_module_in_evaluation_mode_stays_in_it(tmp_path):
    model = tiny_model()
    trainer = tiny_trainer(tmp_path, model=model)
    model.train()
    model.lm_head.eval()
    with hfscale.trainer.generation.generation_mode(trainer):
        assert not model.training
    assert model.training
    assert not model.lm_head.training


def test_the_same_seed_gives_the_same_samples_and_another_seed_others(tmp_path):
    first, second, other = (
        train(tmp_path / name, temperature=1.0, seed=seed) and samples_of(tmp_path / name)
        for name, seed in (("first", 1), ("second", 1), ("other", 2))
    )
    assert first == second
    assert first != other


def test_a_generation_ends_at_the_turn_of_the_template(tmp_path):
    model = tiny_model()
    with torch.no_grad():  # the next token is <turn> (1) for every prompt
        model.lm_head.weight.zero_()
        model.model.norm.weight.fill_(0.0)
        model.model.norm.weight[0] = 1.0
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[1, 0] = 1e3
    train(tmp_path, model=model, learning_rate=0.0)
    assert [(sample["generation"], sample["new_tokens"], sample["finished"]) for sample in samples_of(tmp_path)] == [
        ("", 1, True)
    ] * 4


def test_a_resumed_run_repeats_the_samples_of_the_steps_that_it_repeats(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    train(tmp_path, **saving)
    before = samples_of(tmp_path)
    train(tmp_path, resume=str(tmp_path / "checkpoint-3"), **saving)
    assert samples_of(tmp_path) == before
    assert [sample["step"] for sample in before] == [2, 2, 4, 4, 6, 6]


def test_the_time_counts_as_evaluation_and_not_as_training(tmp_path):
    trainer = train(tmp_path)
    seconds = trainer.state.stateful_callbacks["hfscale"]["goodput"]["seconds"]
    assert seconds["evaluate"] > 0


@pytest.mark.long
def test_wandb_gets_a_table(tmp_path):
    import wandb

    run = wandb.init(mode="offline", dir=str(tmp_path), reinit="finish_previous")
    train(tmp_path)
    run.finish()
    tables = sorted(tmp_path.rglob("media/table/samples_*.table.json"))
    assert len(tables) == 2
    table = json.loads(tables[0].read_text())
    assert table["columns"] == ["step", "prompt", "generation", "new_tokens", "finished"]
    assert [row[1] for row in table["data"]] == ["w3 w4", "w7 w8 <turn> w9 "]


def test_the_hang_watch_sees_that_a_rank_generates(tmp_path):
    seen = []

    class Watched(SampleGenerationCallback):
        def _answer(self, *args, **kwargs):
            seen.append(slow_activity(threading.get_ident()))
            return super()._answer(*args, **kwargs)

    tiny_trainer(tmp_path, Watched(["w3"], every_steps=4, max_new_tokens=2), tokenizer=chat_tokenizer()).train()
    assert seen == ["generating"]


def _fails_on_rank_1(folder):
    from hfscale.metrics import sample_generation

    def answer(self, model, index, tokenizer, *, together):
        if index == 1:
            raise MemoryError("too many")
        return {"prompt": "", "generation": "", "new_tokens": 1, "finished": False}

    sample_generation.SampleGenerationCallback._answer = answer
    with pytest.raises(HfScaleError, match="rank 1 could not generate samples: MemoryError: too many"):
        train(folder)
    (folder / f"raised-{os.environ['RANK']}").touch()


@pytest.mark.world(2)
def test_if_one_rank_fails_every_rank_raises(tmp_path):
    assert run_ranks(2, _fails_on_rank_1, tmp_path / "out", log=tmp_path / "log") == [0, 0], output(tmp_path)
    assert len(list(tmp_path.glob("out/raised-*"))) == 2


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "part"),
        [
            (([],), "prompts"),
            (("w3",), "prompts"),
            ((["w3"], {"every_steps": 0}), "every_steps is 0"),
            ((["w3"], {"max_new_tokens": 0}), "max_new_tokens is 0"),
            ((["w3"], {"temperature": -1.0}), "temperature is -1.0"),
        ],
    )
    def test_arguments(self, arguments, part):
        prompts, options = (*arguments, {})[:2]
        with pytest.raises(UsageError, match=part):
            SampleGenerationCallback(prompts, **options)

    def test_a_trainer_without_a_tokenizer(self, tmp_path):
        with pytest.raises(UsageError, match="processing_class"):
            tiny_trainer(tmp_path, SampleGenerationCallback(["w3"])).train()

    def test_a_tokenizer_without_a_template(self, tmp_path):
        with pytest.raises(UsageError, match=r"prompt 2 .*chat template"):
            train(tmp_path, tokenizer=tiny_tokenizer())

    def test_a_prompt_that_the_template_refuses(self, tmp_path):
        template = "{{ raise_exception('no such role') }}"
        with pytest.raises(UsageError, match="prompt 2: no such role"):
            train(tmp_path, tokenizer=tiny_tokenizer(chat_template=template))

    def test_a_prompt_longer_than_the_model(self, tmp_path):
        with pytest.raises(UsageError, match="prompt 2 has 64 tokens and the model 64 positions"):
            train(tmp_path, prompts=["w3", " ".join(["w4"] * 64)])

    def test_a_prompt_without_tokens(self, tmp_path):
        with pytest.raises(UsageError, match="prompt 1 has no tokens"):
            train(tmp_path, prompts=[" "])

    def test_a_model_that_does_not_generate(self, tmp_path):
        from transformers import LlamaForSequenceClassification

        with pytest.raises(UsageError, match="LlamaForSequenceClassification"):
            train(tmp_path, model=LlamaForSequenceClassification(tiny_model().config))

    @pytest.mark.parametrize(
        ("name", "content", "part"),
        [
            ("missing.txt", None, "missing.txt cannot be read"),
            ("empty.txt", "\n \n", "empty.txt has no prompt"),
            ("p.jsonl", '{"prompt": "a"}\nline', "p.jsonl:2 is not JSON"),
            ("p.jsonl", '\n{"text": "a"}', 'p.jsonl:2 has neither "prompt"'),
            ("p.jsonl", '{"messages": []}', "p.jsonl:1 has neither"),
            ("p.jsonl", '{"messages": [{"content": "a"}]}', "p.jsonl:1 has neither"),
            ("p.jsonl", '{"messages": [{"role": "assistant", "content": "a"}]}', "p.jsonl:1: the last message"),
        ],
    )
    def test_files(self, tmp_path, name, content, part):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=part):
            read_prompts(tmp_path / name)

    def test_bytes_that_are_not_text(self, tmp_path):
        (tmp_path / "p.txt").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(DataError, match=r"p\.txt cannot be read: it is not UTF-8"):
            read_prompts(tmp_path / "p.txt")

    @pytest.mark.parametrize(
        ("flags", "part"),
        [
            (["--merge_adapters", "true"], "--use_peft"),
            (["--merge_adapters", "true", "--use_peft", "true"], "--model_name_or_path"),
            (
                ["--merge_adapters", "--use_peft", "--load_in_4bit", "--model_name_or_path", "x"],
                "--merge_adapters true and --load_in_4bit true",
            ),
            (["--sample_steps", "0"], "--sample_steps is 0"),
        ],
    )
    def test_flags(self, flags, part):
        with pytest.raises(UsageError, match=part):
            parse_arguments(flags)


def test_files_of_prompts(tmp_path):
    text, records_file = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("one\n\n two\n")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    lines = [{"prompt": "one"}, CHAT | {"tools": tools}, {"prompt": CHAT["messages"]}]
    records_file.write_text("\n".join(map(json.dumps, lines)))
    assert read_prompts(text) == ["one", " two"]
    assert read_prompts(records_file) == ["one", CHAT | {"tools": tools}, CHAT]
