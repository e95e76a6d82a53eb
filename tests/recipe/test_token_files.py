"""Data that is tokenised already: datatrove's token files, written by datatrove itself, and columns of tokens."""

import json
import re
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import REPOSITORY
from tiny import byte_level_tokenizer
from transformers import LlamaConfig

from hfscale.core.records import read_records
from hfscale.errors import DataError, UsageError
from hfscale.recipe.arguments import DataArguments
from hfscale.recipe.data import load_packed_datasets
from hfscale.recipe.token_files import load_token_files

BLOCK = 16
TEXTS = [f"Document {number}: the quick brown fox jumps over {number * 7} lazy dogs.\n" for number in range(120)]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer(TEXTS)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Let `datasets` keep its cache below `tmp_path`."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def load(tokenizer, **flags):
    return load_packed_datasets(DataArguments(**{"block_size": BLOCK} | flags), tokenizer, seed=0)


def write_tokens(folder, documents, *, name="00000.ds", size=2, tokenizer="ours"):
    """Write a token file as datatrove does."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    np.concatenate([np.asarray(one, dtype=f"<u{size}") for one in documents]).tofile(path)
    np.cumsum([len(one) for one in documents]).astype("<u8").tofile(f"{path}.index")
    Path(f"{path}.metadata").write_text(f"{tokenizer}|{size}\n{sum(map(len, documents))}\n1 T")
    return path


DOCUMENTS = [list(range(number % 7, number % 7 + 3 + number % 11)) for number in range(90)]


def run(*argv, cwd):
    done = subprocess.run(
        [sys.executable, *map(str, argv)], cwd=cwd, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.recipes
def test_a_recipe_trains_on_the_files_of_datatrove_as_on_their_text(tmp_path, tokenizer):
    """The script is the one of docs/tokenized_data.md, without its shuffling of the documents."""
    page = (REPOSITORY / "docs" / "tokenized_data.md").read_text(encoding="utf-8")
    script = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1].replace("<|endoftext|>", "<end>")
    (tmp_path / "prepare.py").write_text(script.replace("seed=0", "shuffle_documents=False"))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "0.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    ).save_pretrained(tmp_path / "config")
    run("prepare.py", "text", "tokenizer/tokenizer.json", "tokens", cwd=tmp_path)
    assert len(list((tmp_path / "tokens").glob("*.ds"))) == 4  # three tasks had no file of text, and wrote no tokens
    flags = ["--config_name", "config", "--tokenizer_name", "tokenizer", "--use_cpu", "--report_to", "none"]
    flags += ["--max_steps", "4", "--logging_steps", "1", "--block_size", "16", "--validation_split_percentage", "0"]
    losses = []
    for name, source in (("of-tokens", ["--dataset_name", "tokens"]), ("of-text", ["--train_file", "text/0.jsonl"])):
        run(REPOSITORY / "recipes" / "ddp" / "train.py", *flags, *source, "--output_dir", name, cwd=tmp_path)
        losses.append([record["loss"] for record in read_records(tmp_path / name / "scaling.jsonl")])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


@pytest.mark.parametrize("size", [2, 4])
def test_rows_are_cut_from_the_file_without_a_copy(size, tmp_path, tokenizer):
    many = [list(range(100))] * 20_000
    path = write_tokens(tmp_path, many, size=size)
    before = pyarrow.total_allocated_bytes()
    train, evaluation = load(tokenizer, train_file=str(path))
    assert pyarrow.total_allocated_bytes() - before < path.stat().st_size / 4  # the ends of the documents
    stream = [token for document in many for token in document]
    rows = [stream[start : start + BLOCK] for start in range(0, len(stream), BLOCK)]
    assert train[1000] == {"input_ids": rows[1000], "labels": rows[1000]}
    assert len(train) == 19_000 * 100 // BLOCK
    assert evaluation[0]["input_ids"] == rows[len(train)]  # the end of the file, in its order
    assert len(evaluation) == 1000 * 100 // BLOCK


@pytest.mark.parametrize(
    "flags",
    [{"packing": "bestfit"}, {"document_attention": True}, {"packing": "none"}],
    ids=["bestfit", "document attention", "none"],
)
def test_documents_are_packed_as_those_of_a_column(flags, tmp_path, tokenizer):
    path = write_tokens(tmp_path, DOCUMENTS)
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": DOCUMENTS}), tmp_path / "tokens.parquet")
    options = {"validation_split_percentage": 0, **flags}
    of_file, _ = load(tokenizer, train_file=str(path), **options)
    of_column, _ = load(tokenizer, train_file=str(tmp_path / "tokens.parquet"), **options)
    assert list(of_file) == list(of_column)
    assert sum(len(document) for document in DOCUMENTS) >= len(list(of_file)) > 0


def test_labels_of_a_column_are_used(tmp_path, tokenizer):
    labels = [[-100, *document[1:]] for document in DOCUMENTS]
    table = pyarrow.table({"input_ids": DOCUMENTS, "labels": labels, "source": ["x"] * len(DOCUMENTS)})
    pyarrow.parquet.write_table(table, tmp_path / "tokens.parquet")
    train, _ = load(tokenizer, train_file=str(tmp_path / "tokens.parquet"), validation_split_percentage=0)
    stream = [label for document in labels for label in document]
    assert train[3] == {
        "input_ids": [token for document in DOCUMENTS for token in document][48:64],
        "labels": stream[48:64],
    }


def test_text_beside_tokens_is_read_as_text(tmp_path, tokenizer):
    table = pyarrow.table({"text": TEXTS, "input_ids": [[1, 2, 3]] * len(TEXTS)})
    pyarrow.parquet.write_table(table, tmp_path / "both.parquet")
    train, _ = load(tokenizer, train_file=str(tmp_path / "both.parquet"), validation_split_percentage=0)
    assert "Document" in tokenizer.decode(train[0]["input_ids"] + train[1]["input_ids"])


def test_sources_of_tokens_are_mixed_and_not_with_text(tmp_path, tokenizer):
    path = write_tokens(tmp_path / "a", DOCUMENTS)
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": DOCUMENTS}), tmp_path / "b.parquet")
    mix = tmp_path / "mix.yaml"
    mix.write_text(f"- {{train_file: {path}, weight: 1}}\n- {{train_file: {tmp_path}/b.parquet, weight: 1}}\n")
    train, _ = load(tokenizer, data_mix=str(mix), validation_split_percentage=0)
    assert len(train) > sum(map(len, DOCUMENTS)) // BLOCK
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    mix.write_text(f"- {{train_file: {path}, weight: 1}}\n- {{train_file: {tmp_path}/c.jsonl, weight: 1}}\n")
    with pytest.raises(DataError, match=r"has tokens and .* has text: give both in one format"):
        load(tokenizer, data_mix=str(mix))


def test_the_fingerprint_depends_on_the_tokens_and_not_on_the_name(tmp_path):
    def fingerprint(path):
        return load_token_files([path], streaming=False, source="it")._fingerprint

    first = write_tokens(tmp_path / "a", DOCUMENTS)
    assert fingerprint(first) == fingerprint(write_tokens(tmp_path / "b", DOCUMENTS))
    changed = [[9, *document[1:]] for document in DOCUMENTS]
    assert fingerprint(first) != fingerprint(write_tokens(tmp_path / "c", changed))
    joined = [DOCUMENTS[0] + DOCUMENTS[1], *DOCUMENTS[2:]]
    assert fingerprint(first) != fingerprint(write_tokens(tmp_path / "d", joined))


def test_an_empty_file_among_others_changes_nothing(tmp_path, tokenizer):
    write_tokens(tmp_path, DOCUMENTS, name="0.ds")
    path = write_tokens(tmp_path, DOCUMENTS, name="1.ds")
    for name in ("1.ds", "1.ds.index"):
        (tmp_path / name).write_bytes(b"")
    train, _ = load(tokenizer, dataset_name=str(path.parent), validation_split_percentage=0)
    assert len(train) == sum(map(len, DOCUMENTS)) // BLOCK


class TestBadInput:
    def fails(self, tokenizer, path, *parts, kind=DataError, **flags):
        with pytest.raises(kind) as caught:
            load(tokenizer, train_file=str(path), **flags)
        message = str(caught.value)
        assert "\n" not in message
        for part in (f"--train_file {path}", *parts):
            assert part in message

    def test_incomplete_files(self, tmp_path, tokenizer):
        path = write_tokens(tmp_path / "a", DOCUMENTS)
        path.write_bytes(path.read_bytes()[:-2])
        self.fails(tokenizer, path, "00000.ds.index ends at token", "was one of them cut?")
        path.write_bytes(path.read_bytes()[:-1])
        self.fails(tokenizer, path, "not a multiple of 2: is it whole?")

    @pytest.mark.parametrize(("name", "how"), [("index", "save_index=True"), ("metadata", "save_final_metadata=True")])
    def test_a_missing_file_beside_it(self, name, how, tmp_path, tokenizer):
        path = write_tokens(tmp_path, DOCUMENTS)
        Path(f"{path}.{name}").unlink()
        self.fails(tokenizer, path, f"00000.ds.{name}", how)

    def test_metadata_of_something_else(self, tmp_path, tokenizer):
        path = write_tokens(tmp_path, DOCUMENTS)
        Path(f"{path}.metadata").write_text("ours|3\n1")
        self.fails(tokenizer, path, "'ours|3'", "'tokenizer|2'")

    def test_masked_tokens(self, tmp_path, tokenizer):
        path = write_tokens(tmp_path, DOCUMENTS)
        Path(f"{path}.loss").write_bytes(b"\1")
        self.fails(tokenizer, path, "masks tokens, which is not supported")

    def test_tokens_of_another_tokenizer(self, tmp_path, tokenizer):
        path = write_tokens(tmp_path, [*DOCUMENTS, [1, 60_000]])
        self.fails(tokenizer, path, f"has the token 60000, and the tokenizer has {len(tokenizer)}")
        column = tmp_path / "tokens.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"input_ids": [[1, 60_000]] * 40}), column)
        self.fails(tokenizer, column, "has the token 60000")

    def test_a_stream(self, tmp_path, tokenizer):
        path = write_tokens(tmp_path, DOCUMENTS)
        self.fails(tokenizer, path, "--streaming is given with", "leave it out", kind=UsageError, streaming=True)

    def test_files_of_two_tokenizers(self, tmp_path, tokenizer):
        write_tokens(tmp_path / "tokens", DOCUMENTS, name="0.ds")
        write_tokens(tmp_path / "tokens", DOCUMENTS, name="1.ds", tokenizer="another")
        with pytest.raises(DataError, match=r"0\.ds: ours, 2 bytes, 1\.ds: another, 2 bytes"):
            load(tokenizer, dataset_name=str(tmp_path / "tokens"))

    def test_a_configuration_or_split_of_a_folder(self, tmp_path, tokenizer):
        write_tokens(tmp_path / "tokens", DOCUMENTS)
        for flags in ({"dataset_config_name": "a"}, {"dataset_train_split": "test"}):
            with pytest.raises(UsageError, match="leave out --dataset_config_name and --dataset_train_split"):
                load(tokenizer, dataset_name=str(tmp_path / "tokens"), **flags)

    def test_flags_for_conversations(self, tmp_path, tokenizer):
        path = write_tokens(tmp_path, DOCUMENTS)
        with pytest.raises(UsageError, match=r"is for conversations, and .* has tokens"):
            load(tokenizer, train_file=str(path), loss_on="assistant")
