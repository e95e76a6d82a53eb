"""The embedded default of the recipes: a small Llama on the source files of the Python standard library.

Every machine that runs hfscale has this text. The tokenizer is trained on it at the first use and cached. The
conversations, preferences and prompts for fine-tuning are questions about the library's functions, answered by their
docstrings.
"""

import ast
import hashlib
import os
import platform
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hfscale.core.disk_errors import writing
from hfscale.core.durable_files import write_atomically
from hfscale.errors import DataError

VOCAB_SIZE = 4096
EOS_TOKEN = "<|endoftext|>"  # noqa: S105 (not a password)
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '### ' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n' }}
{%- else -%}
{{ message['content'] + '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '### assistant\\n' }}
{%- endif -%}
"""
"""The chat template of `default_tokenizer`. It marks what the assistant says, with the end-of-text token after it."""
SYSTEM_PROMPT = "You answer questions about the Python standard library."
_LONGEST_ANSWER = 800
"""Characters of the longest docstring that is an answer: with its question it has fewer than 512 tokens."""
_NOT_LIBRARY = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "__pycache__",
}
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
        raise DataError(
            f"this Python has no standard library sources in {root}: give --train_file or --dataset_name"
        )
    return sorted(files)


def read_sources(split: str) -> Iterator[dict[str, str]]:
    """Yield one record `{"text": …}` per module of a split.

    Args:
        split (`str`): `validation`, which is every 20th module, or `train`, the others.

    Raises:
        DataError: this Python has no source files.
    """
    for path in _files_of(split):
        with tokenize.open(path) as file:  # reads the file's own encoding declaration
            yield {"text": file.read()}


def _files_of(split: str) -> list[Path]:
    """Return the modules of a split, `train` or `validation`."""
    files = source_files()
    held_out = files[::_EVALUATE_ONE_IN]
    return held_out if split == "validation" else sorted(set(files) - set(held_out))


def chat_records(split: str) -> Iterator[dict[str, Any]]:
    """Yield conversations `{"messages": [{"role": …, "content": …}, …]}`: a system prompt and one or two questions.

    Args:
        split (`str`): `validation` or `train`, which are about the modules of `read_sources`.

    Raises:
        DataError: this Python has no source files.
    """
    for name, docstring, signature in _documented_functions(split):
        messages = [
            _said("system", SYSTEM_PROMPT),
            _said("user", _question(name)),
            _said("assistant", docstring),
        ]
        if signature:
            messages += [
                _said("user", "How is it called?"),
                _said("assistant", f"{name}({signature})"),
            ]
        yield {"messages": messages}


def preference_records(split: str) -> Iterator[dict[str, Any]]:
    """Yield preferences `{"prompt": …, "chosen": …, "rejected": …}`, each a list of messages.

    The chosen answer is the docstring of the function, the rejected one that of the function before it.

    Args:
        split (`str`): `validation` or `train`, which are about the modules of `read_sources`.

    Raises:
        DataError: this Python has no source files.
    """
    before = ""
    for name, docstring, _ in _documented_functions(split):
        if before not in ("", docstring):
            yield {
                "prompt": [_said("user", _question(name))],
                "chosen": [_said("assistant", docstring)],
                "rejected": [_said("assistant", before)],
            }
        before = docstring


def prompt_records(split: str) -> Iterator[dict[str, Any]]:
    """Yield prompts `{"prompt": [message], "answer": text}`, for reward functions that compare with the answer.

    Args:
        split (`str`): `validation` or `train`, which are about the modules of `read_sources`.

    Raises:
        DataError: this Python has no source files.
    """
    for name, docstring, _ in _documented_functions(split):
        yield {"prompt": [_said("user", _question(name))], "answer": docstring}


RECORDS: dict[str, Callable[[str], Iterator[dict[str, Any]]]] = {
    "text": read_sources,
    "chat": chat_records,
    "preference": preference_records,
    "prompt": prompt_records,
}
"""The embedded records by their kind."""


def _documented_functions(split: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, docstring and parameters of the public functions of a split's modules that are not in a package."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in _files_of(split):
        if path.parent != root or path.stem.startswith("_"):
            continue
        with tokenize.open(path) as file:
            module = ast.parse(file.read())
        for function in ast.walk(module):
            if not isinstance(function, ast.FunctionDef):
                continue
            docstring = ast.get_docstring(function)
            if (
                docstring
                and len(docstring) <= _LONGEST_ANSWER
                and not function.name.startswith("_")
            ):
                yield f"{path.stem}.{function.name}", docstring, ast.unparse(function.args)


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _question(name: str) -> str:
    return f"What does {name} do?"


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

    Its chat template is `CHAT_TEMPLATE`.

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
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(path), eos_token=EOS_TOKEN, pad_token=EOS_TOKEN
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def default_config(tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
    """Return the config of a Llama of about four million parameters, with grouped-query attention and tied embeddings.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): gives the vocabulary size and the special tokens.
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
