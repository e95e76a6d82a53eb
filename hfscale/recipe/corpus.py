"""The embedded default of the recipes: a small Llama on the source files of the Python standard library.

Every machine that runs hfscale has this text. The tokenizer is trained on it at the first use and cached.
"""

import hashlib
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from hfscale.checkpoint.store import write_atomically
from hfscale.errors import DataError
from hfscale.utils.disk_errors import writing

VOCAB_SIZE = 4096
EOS_TOKEN = "<|endoftext|>"  # noqa: S105 (not a password)
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
_EVALUATE_ONE_IN = 20


def source_files() -> list[Path]:
    """Return the standard library's modules, without tests and installed packages, in a fixed order.

    Raises:
        DataError: this Python has no source files (a frozen or zipped build).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - _NOT_LIBRARY  # installed packages can be large: never walk them
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(f"this Python has no standard library sources in {root}: give --train_file or --dataset_name")
    return sorted(files)


def read_sources(split: str) -> Iterator[dict[str, str]]:
    """Yield one record `{"text": …}` per module of a split.

    Args:
        split (`str`): `validation`, which is every 20th module, or `train`, the others.

    Raises:
        DataError: this Python has no source files.
    """
    for number, path in enumerate(source_files()):
        if (number % _EVALUATE_ONE_IN == 0) == (split == "validation"):
            with tokenize.open(path) as file:  # reads the file's own encoding declaration
                yield {"text": file.read()}


def fingerprint() -> str:
    """Return a key that changes with the text: the Python version and a hash of the paths and lengths of all files.

    Raises:
        DataError: this Python has no source files.
    """
    names = "".join(f"{path}:{path.stat().st_size};" for path in source_files())
    digest = hashlib.sha256(names.encode()).hexdigest()[:12]
    return f"python{platform.python_version()}-{digest}"


def default_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of `VOCAB_SIZE` tokens trained on the corpus, cached after the first call.

    Call this on the main process first; the others then find the tokenizer in the cache.

    Raises:
        DataError: this Python has no source files.
        StorageError: the cache cannot be written.
    """
    path = _cache_folder() / f"{fingerprint()}-bpe{VOCAB_SIZE}.json"
    if not path.is_file():
        content = _train_bpe().to_str(pretty=True)
        with writing(f"the cache {path.parent}", "set XDG_CACHE_HOME to a folder that can"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)  # other runs may write it at the same time
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=EOS_TOKEN, pad_token=EOS_TOKEN)


def default_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Return the config of a Llama of about four million parameters, with grouped-query attention and tied embeddings.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): gives the vocabulary size and the special tokens.
    """
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
