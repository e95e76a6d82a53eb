"""What a checkpoint is a state of: the Trainer's task, the model, its adapters, the tokenizer and the data.

A manifest holds it, and a training that resumes under another one stops, unless the user allows it. Only what cannot
change within one run is part of it. Strategy, number of processes, batch sizes, learning rates, precision, kernels,
paths and versions of libraries are not; nor is the size of the vocabulary, which a model may pad or extend. What is
unknown, on either side, is not compared.
"""

import datetime
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash
from torch.utils.data import IterableDataset
from transformers import PretrainedConfig, Trainer

from hfscale.checkpoint.data_order.order import restored_places
from hfscale.checkpoint.dataset_rows import SAMPLE, labels_of, row_hashes
from hfscale.checkpoint.identity_differences import (
    ASPECTS,
    DATE,
    EVALUATION,
    HASH,
    changed_evaluation,
    describe_samples,
    differences,
    is_of_another_day,
)
from hfscale.checkpoint.loading import CONVERSIONS
from hfscale.checkpoint.manifest import Identity, read_manifest
from hfscale.core.collectives import START
from hfscale.core.logging import get_logger
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.core.spelling import spelled
from hfscale.core.versions import is_peft_model, sizes_of_layers
from hfscale.errors import ParameterError, UsageError
from hfscale.trainer.state import model_of, unwrap_compiled

logger = get_logger(__name__)

_LIBRARIES = ("transformers", "trl", "sentence_transformers")
"""A subclass of a user has the task of the class of these libraries that it extends."""
_SAME_TASK = {"Seq2SeqTrainer": "Trainer"}  # it evaluates in another way
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "num_experts",
    "num_local_experts",
)
_SAMPLED_TOKENS = 64
_SAMPLED_COLUMNS = (
    "input_ids",
    "prompt_ids",
    "prompt_input_ids",
    "text",
    "messages",
    "prompt",
    "conversations",
)
"""Columns of a dataset in the order in which one is looked for: none of them holds a path."""


def identity_of(trainer: Trainer) -> Identity:
    """Return what a Trainer trains: for each of `ASPECTS` that is known, and the evaluation, its properties by name.

    Args:
        trainer (`Trainer`): any Trainer, before or during its training.
    """
    found: Identity = {
        "trainer": {"class": _task(type(trainer))},
        "model": _model_properties(trainer),
        "adapter": _adapter_properties(trainer),
        "tokenizer": _tokenizer_properties(getattr(trainer, "processing_class", None)),
        "data": _data_properties(trainer.train_dataset),
    }
    if found["data"] and _writes_date(getattr(trainer, "processing_class", None)):
        found["data"][DATE] = datetime.date.today().isoformat()
    if trainer.args.eval_strategy != "no":
        found[EVALUATION] = {**row_hashes(trainer.eval_dataset)}
    return {aspect: properties for aspect, properties in found.items() if properties}


def words_of(resume_with_other: Iterable[str]) -> frozenset[str]:
    """Return the words of `resume_with_other`, which may also be one text, as a set.

    Args:
        resume_with_other (`Iterable[str]`): some of `ASPECTS`.
    """
    if isinstance(resume_with_other, str):
        return frozenset(resume_with_other.split())
    return frozenset(resume_with_other)


def check_words(name: str, value: Any) -> None:
    """Check that words are some of `ASPECTS`."""
    for word in sorted(words_of(value)):
        if word not in ASPECTS:
            raise ParameterError(name, word, f"use some of {', '.join(ASPECTS)}")


def check_identity(trainer: Trainer, checkpoint: str | None, allowed: Iterable[str] = ()) -> None:
    """Check that a checkpoint is a state of what the Trainer trains. Every rank must call it.

    A checkpoint without a manifest, or with that of an earlier version, is not checked.

    Args:
        trainer (`Trainer`): the Trainer that is about to resume.
        checkpoint (`str`, *optional*): the checkpoint; None: it starts from scratch.
        allowed (`Iterable[str]`): those of `ASPECTS` that may differ.

    Raises:
        UsageError: it is a state of something else; raised on every rank.
        CheckpointError: the manifest of the checkpoint is broken; raised on every rank.
    """

    def check() -> None:
        if checkpoint is not None:
            _check(trainer, Path(checkpoint), frozenset(allowed))

    # Also where this rank has no checkpoint: another one may have one
    START.on_rank_0("identity", check)


def _check(trainer: Trainer, checkpoint: Path, allowed: frozenset[str]) -> None:
    if not (checkpoint / MANIFEST_NAME).is_file():
        return
    manifest = read_manifest(checkpoint)
    before = manifest.identity or {}
    now = identity_of(trainer) if before else {}
    if trainer.state.global_step:  # the same process has trained on them, and may have changed them
        restored = set(now.get("data", {}))
    else:
        restored = {f"{SAMPLE}.{place}" for place in restored_places(checkpoint)}
    other_evaluation = changed_evaluation(before, now)
    if other_evaluation:
        logger.warning(
            "the evaluation data are not those of %s (%s), so that its metrics, and the best checkpoint, cannot be "
            "compared with later ones",
            checkpoint,
            describe_samples(other_evaluation),
        )
    found = differences(before, now, restored)
    if is_of_another_day(before, now, restored):
        days = (before["data"][DATE], now["data"][DATE])
        logger.warning(
            "the chat template writes the date into each conversation: the rows of this launch say %s, and those that "
            "%s was trained on %s, so their tokens differ",
            *reversed(days),
            checkpoint,
        )
        found.pop("data", None)
    processes = (manifest.world_size, trainer.args.world_size)
    is_data_ignored = trainer.args.ignore_data_skip or _are_shares(before, now, processes)
    for aspect in {*allowed, "data"} if is_data_ignored else allowed:
        found.pop(aspect, None)
    if found:
        is_converted = checkpoint.parent.name == CONVERSIONS
        shown = checkpoint.name.partition("-as-")[0] if is_converted else checkpoint
        raise UsageError(
            f"{shown} is of another run: {'; '.join(found.values())}: use another {spelled('output_dir')}, or, to "
            f"resume from it nevertheless, give {spelled('resume_with_other')} {' '.join(found)}"
        )


def _are_shares(before: Identity, now: Identity, processes: tuple[int, int]) -> bool:
    """Return whether each process may have a dataset with its own share of the same rows, on other numbers of them."""
    old, new = before.get("data", {}).get("rows"), now.get("data", {}).get("rows")
    if not (isinstance(old, int) and isinstance(new, int)) or processes[0] == processes[1]:
        return False
    return abs(old * processes[0] - new * processes[1]) <= max(processes)


def _task(kind: type) -> str:
    """Return the name of the class of a library that a class of Trainer is or extends."""
    known = (base for base in kind.__mro__ if base.__module__.partition(".")[0] in _LIBRARIES)
    name = next(known, Trainer).__name__
    return _SAME_TASK.get(name, name)


def _model_properties(trainer: Trainer) -> dict[str, str | int]:
    """Return the family and the sizes of a model that has a config of transformers."""
    config = getattr(unwrap_compiled(model_of(trainer)), "config", None)
    if not isinstance(config, PretrainedConfig):
        return {}
    text = config.get_text_config()
    found: dict[str, str | int] = {"model_type": config.model_type, **labels_of(config)}
    for name in _SIZES:
        values = sizes_of_layers(text, name)
        if len(values) == 1:
            found[name] = values[0]
    return found


def _adapter_properties(trainer: Trainer) -> dict[str, str | int]:
    """Return the kind of a model's adapters; of LoRA also the rank."""
    model: Any = unwrap_compiled(model_of(trainer))
    # transformers' own `add_adapter` sets the attribute too, on a model of its own.
    configs = (
        list(model.peft_config.values())
        if is_peft_model(model) or vars(model).get("peft_config")
        else []
    )
    if not configs:
        return {"type": "none"}
    found: dict[str, str | int] = {
        "type": "+".join(sorted({str(config.peft_type.value) for config in configs}))
    }
    rank = getattr(configs[0], "r", None)
    return found | {"r": rank} if type(rank) is int else found


def _tokenizer_properties(tokenizer: Any) -> dict[str, str | int]:
    """Return the size of a tokenizer's vocabulary without added tokens, and a hash of a sample of it."""
    size = getattr(tokenizer, "vocab_size", None)
    if type(size) is not int or size < 1 or not hasattr(tokenizer, "convert_ids_to_tokens"):
        return {}
    sampled = sorted(
        {number * (size - 1) // _SAMPLED_TOKENS for number in range(_SAMPLED_TOKENS + 1)}
    )
    return {"vocab_size": size, HASH: _hash(tokenizer.convert_ids_to_tokens(sampled))}


def _writes_date(tokenizer: Any) -> bool:
    """Return whether the chat template of a tokenizer or processor writes the date of today, as that of Llama 3.2."""
    templates = [
        getattr(each, "chat_template", None)
        for each in (tokenizer, getattr(tokenizer, "tokenizer", None))
    ]
    return any("strftime_now" in str(template) for template in templates if template)


def _data_properties(dataset: Any) -> dict[str, str | int]:
    """Return whether training data are a stream, and of others the number of rows and a hash of three of them.

    The share of an island has neither, since it depends on their number.
    """
    if dataset is None:
        return {}
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")
    if is_stream:
        return {"kind": "stream"}
    if hasattr(dataset, "hfscale_shares"):
        return {"kind": "rows"}
    parts = list(dataset.values()) if isinstance(dataset, Mapping) else [dataset]
    if not all(hasattr(part, "__len__") for part in parts):
        return {"kind": "stream"}
    found: dict[str, str | int] = {"kind": "rows", "rows": sum(len(part) for part in parts)}
    found |= row_hashes(dataset)
    sample = [_sampled_rows(part) for part in parts]
    return found | {HASH: _hash(sample)} if all(sample) else found


def _sampled_rows(dataset: Any) -> list[Any]:
    """Return a column of the first, the middle and the last row, without calling functions of users."""
    library = sys.modules.get("datasets")  # Trainer works without it
    if library is None or not isinstance(dataset, library.Dataset) or not len(dataset):
        return []
    column = next((name for name in _SAMPLED_COLUMNS if name in dataset.column_names), None)
    if column is None:
        return []
    table = dataset.with_format("arrow", columns=[column])
    return [
        table[row].column(column).to_pylist()
        for row in sorted({0, len(dataset) // 2, len(dataset) - 1})
    ]


def _hash(content: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, default=str).encode())
