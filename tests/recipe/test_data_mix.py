"""Several sources are mixed by weight: reproducibly, without losing a record, and with one line for a broken list."""

import itertools
import json
import logging
from collections import Counter

import datasets
import pytest
from test_data_cache import TEMPLATE, write

from hfscale.errors import ConfigFileError, DataError, UsageError
from hfscale.recipe import corpus
from hfscale.recipe.arguments import DataArguments
from hfscale.recipe.data import load_packed_datasets
from hfscale.recipe.sources import load_splits

SIZES = {"apples": 300, "pears": 100, "plums": 40}
WEIGHTS = {"apples": 5, "pears": 3, "plums": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def mix(tmp_path):
    """Return the file of a mix of three sources whose records name them."""
    for name, size in SIZES.items():
        write(tmp_path / f"{name}.jsonl", [{"text": f"{name} {number}"} for number in range(size)])
    items = [f"- {{train_file: {tmp_path / name}.jsonl, weight: {weight}}}\n" for name, weight in WEIGHTS.items()]
    path = tmp_path / "mix.yaml"
    path.write_text("".join(items))
    return path


def records(mix, *, seed=0, **flags):
    flags = {"validation_split_percentage": 0} | flags
    splits = load_splits(DataArguments(data_mix=str(mix), **flags), seed=seed)
    return {split: [record["text"] for record in found] for split, found in splits.items()}


@pytest.mark.parametrize("streaming", [False, True])
def test_records_come_by_weight_and_none_is_lost(mix, streaming, caplog):
    with caplog.at_level(logging.INFO, logger="hfscale"):
        found = records(mix, streaming=streaming)["train"]
    assert set(found) == {f"{name} {number}" for name, size in SIZES.items() for number in range(size)}
    shares = Counter(text.split()[0] for text in found)
    assert {name: shares[name] / len(found) for name in SIZES} == pytest.approx(
        {name: weight / 10 for name, weight in WEIGHTS.items()}, abs=0.05
    )
    lines = [line for line in caplog.messages if "of the records are of" in line]
    assert [line.split("%")[0] for line in lines] == ["50.0", "30.0", "20.0"]
    if not streaming:
        taken = [float(line.split("taken ")[1].split()[0]) for line in lines]
        assert taken == pytest.approx([shares[name] / size for name, size in SIZES.items()], abs=0.3)


def test_the_order_depends_on_the_seed_only(mix):
    assert records(mix) == records(mix)
    assert records(mix, seed=1) != records(mix)
    assert records(mix, streaming=True)["train"] == records(mix)["train"]


def test_evaluation_records_are_held_out_of_every_source_before_it_is_repeated(mix):
    found = records(mix, validation_split_percentage=10)
    assert not set(found["train"]) & set(found["validation"])
    assert Counter(text.split()[0] for text in found["validation"]) == {"apples": 30, "pears": 10, "plums": 4}


def test_an_evaluation_file_takes_no_records_of_the_sources(mix, tmp_path):
    held_out = write(tmp_path / "held_out.jsonl", [{"text": "figs 1"}])
    found = records(mix, validation_file=str(held_out), validation_split_percentage=10)
    assert found["validation"] == ["figs 1"]
    assert len(set(found["train"])) == sum(SIZES.values())


@pytest.mark.parametrize("streaming", [False, True])
def test_a_mixed_text_is_packed(mix, tmp_path, streaming):
    """Also where the columns of text have different names."""
    write(tmp_path / "plums.jsonl", [{"body": f"plums {number}", "id": 1} for number in range(40)])
    args = DataArguments(data_mix=str(mix), block_size=16, validation_split_percentage=0, streaming=streaming)
    tokenizer = corpus.default_tokenizer()
    train, _ = load_packed_datasets(args, tokenizer, seed=0)
    text = tokenizer.decode(list(itertools.chain(*(row["input_ids"] for row in train))))
    assert {part.split()[0] for part in text.split(corpus.EOS_TOKEN)[:-1]} == set(SIZES)


@pytest.mark.parametrize("streaming", [False, True])
def test_conversations_of_several_formats_are_mixed(tmp_path, streaming):
    messages = [{"role": "user", "content": "Which fruit?"}, {"role": "assistant", "content": "An apple."}]
    turns = [{"from": "human", "value": "Which fruit?"}, {"from": "gpt", "value": "A pear."}]
    write(tmp_path / "a.jsonl", [{"messages": messages}] * 20)
    write(tmp_path / "b.jsonl", [{"conversations": turns, "id": "7"}] * 20)
    (tmp_path / "mix.yaml").write_text(
        json.dumps([{"train_file": str(tmp_path / f"{name}.jsonl"), "weight": 1} for name in "ab"])
    )
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    args = DataArguments(
        data_mix=str(tmp_path / "mix.yaml"),
        chat_template=str(tmp_path / "template.jinja"),
        block_size=64,
        validation_split_percentage=0,
        streaming=streaming,
    )
    tokenizer = corpus.default_tokenizer()
    train, _ = load_packed_datasets(args, tokenizer, seed=0)
    trained = [[token for token in row["labels"] if token != -100] for row in train]
    text = tokenizer.decode(list(itertools.chain(*trained)))
    assert text.count("An apple.") >= 20
    assert text.count("A pear.") >= 20
    assert "Which" not in text


@pytest.mark.parametrize(
    ("content", "kind", "parts"),
    [
        ("{train_file: a.jsonl, weight: 1}", ConfigFileError, ["mix.yaml is not a list"]),
        ("", ConfigFileError, ["mix.yaml is not a list"]),
        ("- a.jsonl", ConfigFileError, ["source 1 is 'a.jsonl'"]),
        ("- {train_file: a.jsonl, wieght: 1}", ConfigFileError, ["source 1", "'wieght'", "did you mean weight?"]),
        ("- {train_file: a.jsonl}", ConfigFileError, ["source 1 has the weight None"]),
        ("- {train_file: a.jsonl, weight: 0}", ConfigFileError, ["source 1 has the weight 0"]),
        ("- {train_file: a.jsonl, weight: .nan}", ConfigFileError, ["source 1 has the weight"]),
        ("- {weight: 1}", ConfigFileError, ["source 1", "train_file or dataset_name"]),
        ("- {train_file: 7, weight: 1}", ConfigFileError, ["source 1", "train_file is 7"]),
        ("- {train_file: a.jsonl, split: test, weight: 1}", ConfigFileError, ["source 1", "split"]),
        ("- {train_file: a.txt, weight: 1}", DataError, ["source 1", "a.txt", ".jsonl"]),
        ("- {train_file: missing.jsonl, weight: 1}", DataError, ["source 1: missing.jsonl does not exist"]),
        ("- {train_file: a.jsonl, weight: 1", ConfigFileError, ["mix.yaml is not valid YAML"]),
        (
            "- {train_file: a.jsonl, weight: 1}\n- {train_file: chat.jsonl, weight: 1}",
            DataError,
            ["source 1: a.jsonl has text and", "source 2: chat.jsonl has conversations"],
        ),
    ],
)
def test_a_broken_mix_gives_one_line(content, kind, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", [{"text": "apple"}])
    write(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "Hi"}]}])
    (tmp_path / "mix.yaml").write_text(content)
    with pytest.raises(kind) as caught:
        load_packed_datasets(DataArguments(data_mix="mix.yaml"), corpus.default_tokenizer(), seed=0)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_a_mix_and_a_file_exclude_each_other():
    with pytest.raises(UsageError, match="--train_file and --data_mix"):
        DataArguments(train_file="a.jsonl", data_mix="mix.yaml")
