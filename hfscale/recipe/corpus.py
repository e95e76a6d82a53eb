"""What the recipes train when nothing is named: a small Llama on the Python standard library's own source files.

Every machine that runs hfscale has this text. The tokenizer is trained on it on the spot and cached.
"""

import hashlib
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from hfscale.errors import DataError, StorageError

VOCAB_SIZE = 4096
EOS_TOKEN = "<|endoftext|>"  # noqa: S105 (not a password)
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
_EVALUATE_ONE_IN = 20


def source_files() -> list[Path]:
    """The standard library's modules, without tests and installed packages, in a fixed order.

    Raises:
        DataError: this Python has no source files (a frozen or zipped build).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - _NOT_LIBRARY  # what is installed beside the library can be large: never entered
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(f"this Python has no standard library sources in {root}: give --train_file or --dataset_name")
    return sorted(files)


def read_sources(split: str) -> Iterator[dict[str, str]]:
    """One record `{"text": …}` per module; every 20th module is `validation`, the others are `train`."""
    for number, path in enumerate(source_files()):
        if (number % _EVALUATE_ONE_IN == 0) == (split == "validation"):
            with tokenize.open(path) as file:  # honours the file's own encoding line
                yield {"text": file.read()}


def fingerprint() -> str:
    """Changes when the text does: the Python version with the paths and lengths of all files."""
    names = "".join(f"{path}:{path.stat().st_size};" for path in source_files())
    digest = hashlib.sha256(names.encode()).hexdigest()[:12]
    return f"python{platform.python_version()}-{digest}"


def default_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCAB_SIZE` tokens trained on the corpus, from the cache after the first time.

    Call it on the main process first; the others then find it in the cache.

    Raises:
        StorageError: the cache cannot be written.
    """
    path = _cache_folder() / f"{fingerprint()}-bpe{VOCAB_SIZE}.json"
    if not path.is_file():
        content = _train_bpe().to_str(pretty=True)
        temporary = path.with_suffix(f".{os.getpid()}")  # other runs may be writing it too
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(content, encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise StorageError(
                f"the cache {path.parent} cannot be written: {error.strerror}: set XDG_CACHE_HOME to a folder that can"
            ) from error
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=EOS_TOKEN, pad_token=EOS_TOKEN)


def default_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """A Llama of about four million parameters: grouped-query attention, tied embeddings, like its large siblings."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "hfscale"


def _train_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((record["text"] for record in read_sources("train")), trainer)
    return tokenizer
