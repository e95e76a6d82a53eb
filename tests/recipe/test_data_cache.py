"""Prepared data is found again if and only if the content of the files, the tokenizer and the flags are the same."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import datasets
import pytest
from forked_ranks import run_ranks
from transformers import PreTrainedTokenizerFast

from hfscale.errors import DataError
from hfscale.recipe import corpus
from hfscale.recipe.arguments import DataArguments
from hfscale.recipe.cache import load_by_content
from hfscale.recipe.data import load_packed_datasets
from hfscale.recipe.entrypoint import run
from hfscale.recipe.preparation import one_process_prepares

DOCUMENTS = [{"text": f"document {number} of the text"} for number in range(60)]
CHAT = [
    {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
    for n in range(30)
]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}\n{% endfor %}"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    datasets.disable_progress_bars()
    yield folder
    datasets.enable_progress_bars()


@pytest.fixture
def train(tmp_path):
    return write(tmp_path / "train.jsonl", DOCUMENTS)


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prepare(cache, path, **flags):
    """Return the token sequences, and the files of tokens that were written for them."""
    before = set(cache.rglob("cache-*.arrow"))
    args = DataArguments(**{"train_file": str(path), "block_size": 16, "validation_split_percentage": 0} | flags)
    dataset, _ = load_packed_datasets(args, corpus.default_tokenizer(), seed=0)
    return [row["input_ids"] for row in dataset], set(cache.rglob("cache-*.arrow")) - before


def test_the_same_content_is_tokenised_once(cache, train, tmp_path):
    """Also after it was touched, moved or copied to where another file was."""
    rows, written = prepare(cache, train)
    assert written
    assert prepare(cache, train) == (rows, set())
    os.utime(train, (1, 1))
    assert prepare(cache, train) == (rows, set())
    moved = train.rename(tmp_path / "moved.jsonl")
    assert prepare(cache, moved) == (rows, set())
    assert prepare(cache, shutil.copy(moved, train)) == (rows, set())


def test_another_content_is_tokenised_even_if_path_length_and_time_are_the_same(cache, train):
    rows, _ = prepare(cache, train)
    before = train.stat()
    write(train, [{"text": record["text"].replace("document", "DOCUMENT")} for record in DOCUMENTS])
    os.utime(train, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (train.stat().st_size, train.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    others, written = prepare(cache, train)
    assert written
    assert others != rows


def test_other_flags_and_another_template_are_tokenised(cache, tmp_path):
    chat, template = write(tmp_path / "chat.jsonl", CHAT), tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    flags = {"chat_template": str(template), "block_size": 32}
    _, written = prepare(cache, chat, **flags)
    assert written
    assert not prepare(cache, chat, **flags)[1]
    assert not prepare(cache, chat, **flags, max_train_samples=5, show_samples=1)[1]
    assert prepare(cache, chat, **flags, loss_on="all")[1]
    assert prepare(cache, chat, **flags | {"block_size": 64})[1]
    template.write_text(TEMPLATE.replace("<{{", "[{{"))
    assert prepare(cache, chat, **flags)[1]


def test_flags_that_change_no_token_do_not_tokenise_again(cache, train):
    rows, _ = prepare(cache, train)
    assert prepare(cache, train, max_eval_samples=7, validation_split_percentage=0) == (rows, set())


@pytest.mark.parametrize("records", [DOCUMENTS, CHAT])
def test_the_rows_do_not_depend_on_the_number_of_processes(cache, records, tmp_path, monkeypatch):
    monkeypatch.setattr("hfscale.recipe.packing._BATCH_TOKENS", 100)
    monkeypatch.setattr("hfscale.recipe.packing._BATCH_BLOCKS", 1)
    path = write(tmp_path / "train.jsonl", records)
    rows, _ = prepare(cache, path, preprocessing_num_workers=1)
    shutil.rmtree(cache)
    environ, variables = os.environ, dict(os.environ)
    assert prepare(cache, path, preprocessing_num_workers=3)[0] == rows
    assert os.environ is environ
    assert environ == variables


class Killed(PreTrainedTokenizerFast):
    """Is killed, as if memory were short, where the text says so."""

    def __call__(self, texts, **kwargs):
        if any("DIE" in text for text in texts):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(texts, **kwargs)


def test_a_worker_that_is_killed_ends_the_preparation(cache, tmp_path):
    """Also where SIGTERM is handled as a preemption notice, as in a recipe: the workers inherit the handler."""
    path = write(tmp_path / "train.jsonl", [*DOCUMENTS, {"text": "DIE"}])
    tokenizer = Killed(tokenizer_object=corpus.default_tokenizer().backend_tokenizer, eos_token=corpus.EOS_TOKEN)
    args = DataArguments(train_file=str(path), block_size=16, preprocessing_num_workers=3)

    def main():
        with one_process_prepares("the data"):
            load_packed_datasets(args, tokenizer, seed=0)

    assert run_ranks(1, run, main, log=tmp_path / "log") == [1]
    assert f"hfscale: error: --train_file {path}: a process" in (tmp_path / "log" / "rank-0.log").read_text()


def test_a_folder_is_known_by_its_content(cache, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    path = write(folder / "train.jsonl", DOCUMENTS)
    flags = {"train_file": None, "dataset_name": str(folder)}
    rows, written = prepare(cache, path, **flags)
    assert written
    os.utime(path, (1, 1))
    assert prepare(cache, path, **flags) == (rows, set())
    write(path, DOCUMENTS[:-1])
    assert prepare(cache, path, **flags)[1]


def test_a_file_is_read_once_for_its_hash(cache, train, monkeypatch):
    monkeypatch.setattr("hfscale.recipe.cache._SETTLED_NS", -(10**12))  # as if it had been written long ago
    rows, _ = prepare(cache, train)
    monkeypatch.delattr("hfscale.recipe.cache.FileRecord.of")
    assert prepare(cache, train) == (rows, set())


def test_a_file_that_changes_while_it_is_read_is_refused(cache, train):
    def load(folder):
        with train.open("a") as file:
            file.write('{"text": "more"}\n')
        return datasets.DatasetDict(train=datasets.Dataset.from_list(DOCUMENTS))

    with pytest.raises(DataError, match=r"--train_file train\.jsonl has changed while it was read"):
        load_by_content([train], load, options=(), source="--train_file train.jsonl")
    assert [path.name for path in (cache / "hfscale").iterdir()] == []


@pytest.mark.world(3)
def test_runs_at_the_same_time_and_a_killed_one_leave_a_complete_cache(cache, train, tmp_path):
    """The last one is killed while the others load, and all write the same records."""

    def load_late():
        rank = int(os.environ["RANK"])

        def load(folder):
            (tmp_path / f"loads-{rank}").touch()
            while len(list(tmp_path.glob("loads-*"))) < 3:
                time.sleep(0.01)
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return datasets.load_dataset("json", data_files={"train": str(train)}, cache_dir=folder)

        found = load_by_content([train], load, options=(), source="--train_file train.jsonl")["train"]
        (tmp_path / f"found-{rank}").write_text(json.dumps([found[:], found._fingerprint]))

    assert run_ranks(3, load_late, log=tmp_path / "log", ends_all=False) == [0, 0, -signal.SIGKILL]
    first, second = ((tmp_path / f"found-{rank}").read_text() for rank in range(2))
    assert first == second
    assert json.loads(first)[0]["text"] == [record["text"] for record in DOCUMENTS]
    rows, _ = prepare(cache, train)
    assert rows


def test_the_folder_of_a_killed_process_is_deleted_by_the_next_one(cache, train):
    """A folder whose process lives is kept, and so is one that was made just now."""

    def load(folder):
        held, abandoned, new = (cache / "hfscale" / f"loading-{name}" for name in ("held", "abandoned", "new"))
        for other in (abandoned, new):
            other.mkdir()
            (other / "lock").touch()
        Path(folder).rename(held)
        held.joinpath("data").touch()
        for old in (held, abandoned):
            os.utime(old, (time.time() - 100, time.time() - 100))
        load_by_content([train], read, options=(), source="--train_file train.jsonl")
        assert [path.is_dir() for path in (held, abandoned, new)] == [True, False, True]
        held.rename(folder)
        return read(folder)

    def read(folder):
        return datasets.load_dataset("json", data_files={"train": str(train)}, cache_dir=folder)

    load_by_content([train], load, options=("another",), source="--train_file train.jsonl")
