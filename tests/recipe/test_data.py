"""Packing of text into sequences: the order of tokens, every file format, and one clear line for a broken file."""

import codecs
import csv
import gzip
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, IterableDataset
from tiny import byte_level_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hfscale.errors import DataError, StorageError
from hfscale.recipe import corpus, packing
from hfscale.recipe.arguments import DataArguments
from hfscale.recipe.data import load_packed_datasets
from hfscale.recipe.sources import HELD_OUT, load_splits

BLOCK = 16
KINDS = ("txt", "json", "jsonl", "csv", "parquet")
DOCUMENTS = [f"Document {number}: the quick brown fox jumps over {number * 7} lazy dogs.\n" for number in range(120)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer([*DOCUMENTS, "blank lines\n\n\n" * 99])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let `datasets` keep its cache below `tmp_path` and show no progress bars."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    datasets.disable_progress_bars()
    yield folder
    datasets.enable_progress_bars()


@pytest.fixture
def load(tokenizer: PreTrainedTokenizerFast) -> Callable[..., tuple[Any, Any]]:
    """Return a function that returns the packed training and evaluation sequences: `load(train_file=…)`."""

    def run(seed: int = 0, **flags: Any) -> tuple[Any, Any]:
        paths = {name: str(value) for name, value in flags.items() if "file" in name}
        return load_packed_datasets(DataArguments(**{"block_size": BLOCK} | flags | paths), tokenizer, seed=seed)

    return run


def write(path: Path, records: list[str], column: str = "text") -> Path:
    """Write the records to a file in the format of its extension."""
    if path.suffix == ".txt":
        path.write_bytes("".join(records).encode())
    elif path.suffix == ".json":
        path.write_text(json.dumps([{column: record, "number": 1} for record in records]))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({column: record, "number": 1}) + "\n" for record in records))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([[column, "number"], *([record, 1] for record in records)])
    else:
        pyarrow.parquet.write_table(pyarrow.table({column: records, "number": [1] * len(records)}), path)
    return path


def tokens(dataset: Any) -> list[int]:
    """Concatenate the blocks, and check that each has BLOCK tokens, equal labels and no other fields."""
    stream: list[int] = []
    for block in dataset:
        assert set(block) == {"input_ids", "labels"}
        assert len(block["input_ids"]) == BLOCK
        assert block["labels"] == block["input_ids"]
        stream += block["input_ids"]
    return stream


def fails(load: Callable[..., Any], *parts: str, kind: type[Exception] = DataError, **flags: Any) -> None:
    """Assert an error of one line that contains all of `parts`."""
    with pytest.raises(kind) as caught:
        load(**flags)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


# The packed sequences.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("streaming", [False, True])
def test_every_file_format_packs_into_the_same_stream(
    kind: str, streaming: bool, tmp_path: Path, load: Any, tokenizer: Any
) -> None:
    path = write(tmp_path / f"train.{kind}", DOCUMENTS)
    train, evaluation = load(train_file=path, validation_split_percentage=0, streaming=streaming)
    assert isinstance(train, IterableDataset if streaming else Dataset)
    assert evaluation is None
    stream = tokens(train)
    if kind == "txt":
        expected = tokenizer("".join(DOCUMENTS))["input_ids"]
    else:
        expected = [token for text in DOCUMENTS for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert stream == expected[: len(stream)]
    assert len(expected) - len(stream) < BLOCK


@pytest.mark.parametrize("flags", [{"packing": "bestfit"}, {"document_attention": True}, {"packing": "none"}])
def test_a_stream_has_the_packed_documents_of_a_prepared_dataset(flags: Any, tmp_path: Path, load: Any) -> None:
    flags = flags | {"train_file": write(tmp_path / "train.jsonl", DOCUMENTS), "validation_split_percentage": 0}
    prepared, _ = load(block_size=128, **flags)
    streamed, _ = load(block_size=128, streaming=True, **flags)
    assert list(streamed) == list(prepared)
    positions = "attention_mask" if flags.get("packing") == "none" else "position_ids"
    assert set(prepared.column_names) == {"input_ids", "labels", positions}
    assert len(prepared[0]["input_ids"]) <= 128


def test_batches_drop_less_than_a_block_each(
    tmp_path: Path, load: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_BATCH_TOKENS", 40 * BLOCK)
    monkeypatch.setattr(packing, "_BATCH_BLOCKS", 1)
    train, _ = load(train_file=write(tmp_path / "train.jsonl", DOCUMENTS * 5), validation_split_percentage=0)
    everything = sum(len(tokenizer(text)["input_ids"]) + 1 for text in DOCUMENTS * 5)
    packed = len(tokens(train))
    assert packed < everything  # there was more than one batch
    assert packed > 0.95 * everything


def test_short_lines_fill_blocks_longer_than_a_thousand_of_them(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "train.txt", ["a\n"] * 5000)
    args = DataArguments(train_file=str(path), block_size=4096, validation_split_percentage=0)
    train, _ = load_packed_datasets(args, tokenizer, seed=0)
    assert len(train) == 10_000 // 4096


def test_tokens_of_a_continuous_text_span_its_line_ends(tmp_path: Path, load: Any, tokenizer: Any) -> None:
    lines = ["a line\n", "\n", "\n"] * 2000
    train, _ = load(train_file=write(tmp_path / "train.txt", lines), validation_split_percentage=0)
    ids = tokens(train)
    assert len(ids) < 1.01 * len(tokenizer("".join(lines))["input_ids"])
    assert "".join(lines).startswith(tokenizer.decode(ids))


@pytest.mark.parametrize("kind", KINDS)
def test_unicode_is_decoded_exactly(kind: str, tmp_path: Path, load: Any, tokenizer: Any) -> None:
    text = "naïve 🦊👩‍👩‍👧 你好世界 \u2028 \x0c \x85 \x1c ﷽ e\u0301 \t|\n" * 60
    train, _ = load(train_file=write(tmp_path / f"train.{kind}", [text]), validation_split_percentage=0)
    ids = tokens(train)
    whole = tokenizer(text)["input_ids"]
    assert len(whole) - len(ids) < BLOCK
    assert tokenizer.decode(whole) == text
    assert ids == whole[: len(ids)]


def test_windows_line_ends_are_converted_in_txt_and_kept_in_json(tmp_path: Path, load: Any, tokenizer: Any) -> None:
    lines = ["one two three\r\n", "four five six\r\n"] * 40
    for kind, expected in (("txt", "".join(lines).replace("\r\n", "\n")), ("jsonl", "".join(lines))):
        path = write(tmp_path / f"train.{kind}", lines if kind == "txt" else ["".join(lines)])
        train, _ = load(train_file=path, validation_split_percentage=0)
        assert expected.startswith(tokenizer.decode(tokens(train)))


@pytest.mark.parametrize("kind", ["txt", "csv", "jsonl"])
def test_a_byte_order_mark_is_not_text(kind: str, tmp_path: Path, load: Any, tokenizer: Any) -> None:
    path = write(tmp_path / f"train.{kind}", DOCUMENTS)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    train, _ = load(train_file=path, validation_split_percentage=0)
    assert tokenizer.decode(tokens(train)).startswith("Document 0")


def test_a_text_with_null_values_trains_on_the_others(tmp_path: Path, load: Any, tokenizer: Any) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + '\n{"text": null}\n' for text in DOCUMENTS))
    train, _ = load(train_file=path, validation_split_percentage=0)
    assert tokenizer.decode(tokens(train)).startswith(f"{DOCUMENTS[0]}<end>{DOCUMENTS[1]}<end>")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_the_only_column_of_strings_is_the_text(
    kind: str, streaming: bool, tmp_path: Path, load: Any, tokenizer: Any
) -> None:
    path = write(tmp_path / f"train.{kind}", DOCUMENTS, column="content")
    train, _ = load(train_file=path, validation_split_percentage=0, streaming=streaming)
    assert tokenizer.decode(tokens(train)).startswith(DOCUMENTS[0])


def test_a_file_name_with_wildcards_names_one_file(tmp_path: Path, load: Any, tokenizer: Any) -> None:
    write(tmp_path / "a1.txt", ["wrong " * 100])
    for name in ("a[1].txt", "a*.txt"):
        path = write(tmp_path / name, [f"{name} right\n"] * 40)
        train, _ = load(train_file=path, validation_split_percentage=0)
        assert "wrong" not in tokenizer.decode(tokens(train))


# Evaluation text.


@pytest.mark.parametrize("kind", ["txt", "csv"])
def test_a_validation_file_of_another_format_is_used(kind: str, tmp_path: Path, load: Any, tokenizer: Any) -> None:
    validation = write(tmp_path / f"validation.{kind}", ["something else\n"] * 40)
    train, evaluation = load(train_file=write(tmp_path / "train.jsonl", DOCUMENTS), validation_file=validation)
    assert "else" not in tokenizer.decode(tokens(train))
    text = tokenizer.decode(tokens(evaluation))
    assert text.startswith("something else\nsomething" if kind == "txt" else "something else\n<end>something")


def test_a_validation_file_is_used_with_a_dataset(tmp_path: Path, load: Any, tokenizer: Any) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.jsonl", DOCUMENTS)
    validation = write(tmp_path / "validation.txt", ["something else\n"] * 40)
    train, evaluation = load(dataset_name=str(folder), validation_file=validation)
    assert tokenizer.decode(tokens(train)).startswith(f"{DOCUMENTS[0]}<end>")
    assert tokenizer.decode(tokens(evaluation)).startswith("something else\nsomething")


def test_only_the_validation_split_of_a_dataset_is_evaluated(tmp_path: Path, load: Any, tokenizer: Any) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for split in ("train", "validation", "test"):
        write(folder / f"{split}.jsonl", [f"{split} {text}" for text in DOCUMENTS])
    train, evaluation = load(dataset_name=str(folder))
    assert tokenizer.decode(tokens(train)).count("train") == len(DOCUMENTS)
    assert tokenizer.decode(tokens(evaluation)).count("validation") == len(DOCUMENTS)
    assert set(load_splits(DataArguments(dataset_name=str(folder)), seed=0)) == {"train", "validation"}
    train, evaluation = load(dataset_name=str(folder), dataset_train_split="test")
    assert tokenizer.decode(tokens(train)).count("test") == len(DOCUMENTS)
    assert tokenizer.decode(tokens(evaluation)).count("validation") == len(DOCUMENTS)


def test_the_seed_decides_the_random_split_of_records(tmp_path: Path) -> None:
    args = DataArguments(train_file=str(write(tmp_path / "train.jsonl", DOCUMENTS)), validation_split_percentage=10)
    first, again, other = (load_splits(args, seed=seed) for seed in (1, 1, 2))
    train, validation = list(first["train"]["text"]), list(first[HELD_OUT]["text"])
    assert sorted(train + validation) == sorted(DOCUMENTS)
    assert len(validation) == 12
    assert validation == list(again[HELD_OUT]["text"])
    assert train == list(again["train"]["text"])
    assert validation != list(other[HELD_OUT]["text"])


def test_a_continuous_text_is_split_at_its_end(tmp_path: Path, load: Any, tokenizer: Any) -> None:
    train, evaluation = load(train_file=write(tmp_path / "train.txt", DOCUMENTS), validation_split_percentage=10)
    assert "".join(DOCUMENTS[:108]).startswith(tokenizer.decode(tokens(train)))
    assert "".join(DOCUMENTS[108:]).startswith(tokenizer.decode(tokens(evaluation)))


@pytest.mark.parametrize("flags", [{"streaming": True}, {"validation_split_percentage": 0}])
def test_a_text_that_is_not_split_is_used_for_training_only(flags: dict[str, Any], tmp_path: Path, load: Any) -> None:
    _, evaluation = load(train_file=write(tmp_path / "train.txt", DOCUMENTS), **flags)
    assert evaluation is None


def test_too_few_records_are_not_split(tmp_path: Path, load: Any) -> None:
    train, evaluation = load(train_file=write(tmp_path / "train.jsonl", DOCUMENTS[:19]))
    assert evaluation is None
    assert len(train) > 1


def test_an_evaluation_text_below_a_block_is_left_out(tmp_path: Path, load: Any) -> None:
    validation = write(tmp_path / "validation.txt", ["short"])
    train, evaluation = load(train_file=write(tmp_path / "train.txt", DOCUMENTS), validation_file=validation)
    assert len(train) > 1
    assert evaluation is None


@pytest.mark.parametrize("streaming", [False, True])
def test_a_limit_on_samples_keeps_the_first_ones(streaming: bool, tmp_path: Path, load: Any) -> None:
    path = write(tmp_path / "train.txt", DOCUMENTS)
    flags = {"train_file": path, "validation_file": path, "streaming": streaming}
    whole, _ = load(**flags)
    some, all_of_them = load(**flags, max_train_samples=3, max_eval_samples=1_000_000)
    assert tokens(some) == tokens(whole)[: 3 * BLOCK]
    assert tokens(all_of_them) == tokens(whole)


# The cache.


def packed_files(cache: Path) -> int:
    return len(list(cache.rglob("cache-*.arrow")))


def test_the_cache_depends_on_the_file_and_the_flags(tmp_path: Path, load: Any, tokenizer: Any, cache: Path) -> None:
    path = write(tmp_path / "train.txt", DOCUMENTS)
    first, _ = load(train_file=path, validation_split_percentage=0)
    files = packed_files(cache)
    again, _ = load(train_file=path, validation_split_percentage=0, max_train_samples=5)
    assert packed_files(cache) == files  # the cache is used, since the flag changes no token
    assert tokens(again) == tokens(first)[: 5 * BLOCK]

    longer = DataArguments(train_file=str(path), block_size=2 * BLOCK, validation_split_percentage=0)
    assert {len(block["input_ids"]) for block in load_packed_datasets(longer, tokenizer, seed=0)[0]} == {2 * BLOCK}

    length, modified = path.stat().st_size, path.stat().st_mtime_ns
    path.write_text("X" * length)
    os.utime(path, ns=(modified + 1_000_000_000,) * 2)
    changed, _ = load(train_file=path, validation_split_percentage=0)
    assert set(tokenizer.decode(tokens(changed))) == {"X"}


def test_a_full_disk_is_reported_as_such(tmp_path: Path, load: Any, cache: Path) -> None:
    path = write(tmp_path / "train.txt", DOCUMENTS * 20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        fails(load, str(cache), "HF_DATASETS_CACHE", kind=StorageError, train_file=path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# Mistakes of users.


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["txt", "json", "jsonl", "csv"])
def test_text_that_is_not_utf8_names_the_byte(kind: str, streaming: bool, tmp_path: Path, load: Any) -> None:
    path = write(tmp_path / f"train.{kind}", [*DOCUMENTS, "caf@\n"])
    content = path.read_bytes().replace(b"caf@", b"caf\xe9")
    path.write_bytes(content)
    offset = content.index(b"\xe9")
    fails(load, f"--train_file {path}", f"byte {offset} is 0xe9", "iconv", train_file=path, streaming=streaming)


def test_utf16_and_truncated_text_are_reported_differently(tmp_path: Path, load: Any) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes("".join(DOCUMENTS).encode("utf-16"))
    fails(load, "byte 0 is 0xff", "iconv -f UTF-16", train_file=path)
    path.write_bytes(b"x" * 1000 + "é".encode()[:1])
    fails(load, "byte 1000 is 0xc3", train_file=path)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("gone.txt", None, ["gone.txt does not exist"]),
        ("empty.txt", b"", ["empty.txt is empty"]),
        ("short.txt", b"hi", ["short.txt is shorter than one block of 16 tokens", "--block_size"]),
        ("blank.txt", b"\n\n", ["shorter than one block"]),
        ("notes.md", b"hello", ["ends in none of .txt, .json, .jsonl, .csv, .parquet", "rename or convert"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', ["cannot be read as json", "row 1", "fix it"]),
        ("a.json", b'{"text": "a"', ["cannot be read as json"]),
        ("a.json", b"42", ["cannot be read as json"]),
        ("a.json", b"[]", ["a.json has no records"]),
        ("a.csv", b"text\n", ["a.csv has no records"]),
        ("a.csv", b'text\n"never closed\n', ["cannot be read as csv"]),
        ("lies.json", b"just text\n", ["cannot be read as json", "rename it"]),
        ("lies.parquet", b"just text\n", ["cannot be read as parquet", "rename it"]),
        ("lies.txt", b"\x00\x01\x02\x93" * 99, ["lies.txt is not UTF-8 text", "binary data", "another format"]),
        ("a.jsonl", b'{"a": "x", "b": "y"}\n', ["has no column 'text', only 'a', 'b'", "rename"]),
        ("a.csv", b"a,b\n1,2\n", ["has no column 'text', only 'a', 'b'"]),
        ("a.jsonl", b'{"text": 1}\n', ["not every 'text' is a string"]),
        ("a.jsonl", b'{"text": ["a", "b"]}\n', ["not every 'text' is a string"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', ["not every 'text' is a string"]),
        ("a.csv", b"text\n1\n2\n", ["not every 'text' is a string"]),
    ],
)
def test_a_broken_file_is_named_with_how_to_fix_it(
    name: str, content: bytes | None, parts: list[str], tmp_path: Path, load: Any
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    fails(load, f"--train_file {path}", *parts, train_file=path)


def test_the_wrong_one_of_two_files_is_named(tmp_path: Path, load: Any) -> None:
    train, validation = write(tmp_path / "train.txt", DOCUMENTS), tmp_path / "validation.jsonl"
    validation.write_bytes(b'{"text": ')
    fails(load, f"--validation_file {validation}", "as json", train_file=train, validation_file=validation)
    validation.write_bytes(b'{"text": "caf\xe9"}')
    fails(load, f"--validation_file {validation}", "byte 13", train_file=train, validation_file=validation)
    fails(load, "--validation_file none.txt does not exist", train_file=train, validation_file="none.txt")


def test_a_folder_is_not_a_file(tmp_path: Path, load: Any) -> None:
    fails(load, f"--train_file {tmp_path} is not a file", "--dataset_name", train_file=tmp_path)


@pytest.mark.parametrize(
    ("content", "part"),
    [(b"short", "shorter than one block"), (b"\xff" * 99, "byte 0 is 0xff"), (b"\n", "shorter than one block")],
)
def test_a_stream_is_checked_before_training(content: bytes, part: str, tmp_path: Path, load: Any) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(content)
    fails(load, str(path), part, train_file=path, streaming=True)


def test_a_compressed_text_without_its_extension_is_read(tmp_path: Path, load: Any, tokenizer: Any) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(gzip.compress("".join(DOCUMENTS).encode()))
    train, _ = load(train_file=path, validation_split_percentage=0)
    assert tokenizer.decode(tokens(train)).startswith(DOCUMENTS[0])


def test_datasets_that_cannot_be_loaded_are_named(tmp_path: Path, load: Any) -> None:
    fails(load, "--dataset_name no/such cannot be loaded", dataset_name="no/such")
    folder = tmp_path / "folder"
    folder.mkdir()
    fails(load, f"--dataset_name {folder} cannot be loaded", dataset_name=str(folder))
    write(folder / "test.jsonl", DOCUMENTS)
    fails(load, "has no split 'train', only test", dataset_name=str(folder))


def test_without_a_source_it_is_the_embedded_corpus(
    load: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = sorted(Path(json.__file__).parent.glob("*.py"))
    monkeypatch.setattr(corpus, "source_files", lambda: modules)
    train, evaluation = load()
    assert tokenizer.decode(tokens(train)).startswith(f"{modules[1].read_text()}<end>{modules[2].read_text()}<end>")
    assert modules[0].read_text().startswith(tokenizer.decode(tokens(evaluation)))


def test_a_beginning_of_text_token_starts_each_document(tmp_path: Path, load: Any) -> None:
    """The tokenizers of Llama 3 and Gemma add one; the tokenizer of these tests does not."""
    backend = Tokenizer(models.WordLevel({"<b>": 0, "<e>": 1, "a": 2}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<b> $A", special_tokens=[("<b>", 0)])
    own = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<b>", eos_token="<e>")
    path = write(tmp_path / "train.jsonl", ["a a"] * BLOCK)
    args = DataArguments(train_file=str(path), block_size=BLOCK, validation_split_percentage=0)
    train, _ = load_packed_datasets(args, own, seed=0)
    assert tokens(train) == [0, 2, 2, 1] * BLOCK
    running = write(tmp_path / "train.txt", ["a a\n"] * BLOCK)
    args = DataArguments(train_file=str(running), block_size=BLOCK, validation_split_percentage=0)
    train, _ = load_packed_datasets(args, own, seed=0)
    assert set(tokens(train)) == {2}


def test_empty_documents_are_left_out(tmp_path: Path, load: Any, tokenizer: Any) -> None:
    """Wikitext has a blank record after each line."""
    full, _ = load(train_file=write(tmp_path / "a.jsonl", ["some words"] * 99), validation_split_percentage=0)
    path = write(tmp_path / "b.jsonl", ["some words", "", " \n"] * 99)
    blank, _ = load(train_file=path, validation_split_percentage=0)
    assert tokens(blank) == tokens(full)


def test_what_is_held_out_and_not_evaluated_is_trained_on(tmp_path: Path, load: Any) -> None:
    path = write(tmp_path / "train.jsonl", DOCUMENTS * 40)
    train, evaluation = load(train_file=path, validation_split_percentage=50)
    limited, one = load(train_file=path, validation_split_percentage=50, max_eval_samples=1)
    assert list(one) == list(evaluation.take(1))
    assert list(limited) == [*train, *evaluation.skip(1)]
