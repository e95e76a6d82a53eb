"""The embedded text: the same everywhere, split in two without overlap, with a tokenizer that decodes it exactly."""

import sysconfig
import tokenize
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hfscale.errors import DataError, StorageError
from hfscale.recipe import corpus


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache that the tests of this module share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tokenizer(cache: Path, monkeypatch: pytest.MonkeyPatch) -> PreTrainedTokenizerFast:
    """Return the tokenizer, which the first test trains and the others read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return corpus.default_tokenizer()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a standard library of 25 modules, and add files that do not belong to it."""
    root = tmp_path / "lib"
    for name in ["site-packages/other.py", "test/test_x.py", "json/tests/t.py", "notes.txt", "a/__pycache__/a.py"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("not the library\n")
    for number in range(25):
        (root / "a" / f"module{number:02}.py").write_text(f"number = {number}\n" * 20)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return root


def test_the_sources_are_the_library_in_a_fixed_order(library: Path) -> None:
    assert corpus.source_files() == [library / "a" / f"module{number:02}.py" for number in range(25)]


def test_train_and_validation_together_are_the_library() -> None:
    splits = {split: [record["text"] for record in corpus.read_sources(split)] for split in ("train", "validation")}
    again = [record["text"] for record in corpus.read_sources("train")]
    everything = []
    for path in corpus.source_files():
        with tokenize.open(path) as file:
            everything.append(file.read())
    assert splits["train"] == again
    assert sorted(splits["train"] + splits["validation"]) == sorted(everything)
    assert len(splits["validation"]) == -(-len(everything) // 20)
    assert sum(map(len, everything)) > 5_000_000


def test_a_module_is_in_one_split(library: Path) -> None:
    train, validation = (
        {record["text"] for record in corpus.read_sources(split)} for split in ("train", "validation")
    )
    assert train.isdisjoint(validation)
    assert (len(train), len(validation)) == (23, 2)


def test_the_fingerprint_changes_with_the_text(library: Path) -> None:
    before = corpus.fingerprint()
    assert corpus.fingerprint() == before
    (library / "site-packages" / "other.py").write_text("anything")
    assert corpus.fingerprint() == before
    (library / "a" / "module03.py").write_text("longer than it was " * 100)
    changed = corpus.fingerprint()
    assert changed != before
    (library / "a" / "module03.py").rename(library / "a" / "module03b.py")
    assert corpus.fingerprint() not in (before, changed)


def test_a_python_without_sources_says_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="give --train_file or --dataset_name") as caught:
        corpus.source_files()
    assert str(tmp_path) in str(caught.value)


@pytest.mark.long
def test_source_text_is_decoded_exactly(tokenizer: PreTrainedTokenizerFast) -> None:
    paths = [path for path in corpus.source_files() if path.name in ("ast.py", "this.py", "unicode_escape.py")]
    assert len(paths) == 3
    for text in [*(path.read_text(encoding="utf-8") for path in paths), "\t naïve 🦊 你好 \r\n\x00  "]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_vocabulary_is_full_and_knows_python(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == corpus.VOCAB_SIZE
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == tokenizer.convert_tokens_to_ids(corpus.EOS_TOKEN)
    assert len(tokenizer("def return self import")["input_ids"]) == 4


def test_machines_with_the_same_library_train_the_same_tokenizer(library: Path) -> None:
    assert corpus._train_bpe().to_str() == corpus._train_bpe().to_str()


def test_the_second_call_finds_the_first_ones_tokenizer(
    tokenizer: PreTrainedTokenizerFast, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_train_bpe", lambda: pytest.fail("trained twice"))
    assert corpus.default_tokenizer().get_vocab() == tokenizer.get_vocab()
    assert len(list((cache / "hfscale").iterdir())) == 1  # and nothing half written beside it


def test_a_cache_that_cannot_be_written_is_named(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="Not a directory; set XDG_CACHE_HOME") as caught:
        corpus.default_tokenizer()
    assert str(tmp_path / "file" / "hfscale") in str(caught.value)


def test_the_default_model_is_small_and_fits_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    config = corpus.default_config(tokenizer)
    model = AutoModelForCausalLM.from_config(config)
    assert 3_000_000 < sum(parameter.numel() for parameter in model.parameters()) < 6_000_000
    assert model.get_output_embeddings().weight.shape[0] == len(tokenizer)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert config.eos_token_id == tokenizer.eos_token_id


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a standard library of 21 modules with two documented functions each."""
    for number in range(21):
        functions = (
            "".join(f'def f{k}(x, y={k}):\n    """Return {number}.{k}."""\n' for k in (1, 2))
            + 'def _private():\n    """Nothing."""\n\ndef plain():\n    pass\n'
        )
        (tmp_path / f"m{number:02}.py").write_text(functions)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})


def test_questions_are_answered_by_docstrings(documented: None) -> None:
    records = {
        kind: {split: list(make(split)) for split in ("train", "validation")} for kind, make in corpus.RECORDS.items()
    }
    assert {kind: len(splits["train"]) for kind, splits in records.items()} == {
        "text": 19,
        "chat": 38,
        "preference": 37,
        "prompt": 38,
    }
    question, answer = (
        {"role": "user", "content": "What does m00.f2 do?"},
        {"role": "assistant", "content": "Return 0.2."},
    )
    chat = records["chat"]["validation"][1]["messages"]
    assert chat[1:3] == [question, answer]
    assert chat[4] == {"role": "assistant", "content": "m00.f2(x, y=2)"}
    assert records["preference"]["validation"][0] == {
        "prompt": [question],
        "chosen": [answer],
        "rejected": [{"role": "assistant", "content": "Return 0.1."}],
    }
    assert records["prompt"]["validation"][1] == {"prompt": [question], "answer": "Return 0.2."}


def test_the_chat_template_marks_what_the_assistant_says(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "It is 2."},
        {"role": "user", "content": "Thanks."},
    ]
    rendered = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, mask in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(marked) == "It is 2.<|endoftext|>"
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith(prompt + "It is 2.")
