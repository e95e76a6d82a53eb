"""Whether documents see each other where a collator puts the rows of a batch one after another, without padding.

Such a collator passes where each document begins, in the forms that transformers has for it. Whether a model uses one
of them depends on its family, and neither TRL nor transformers says so where it uses none: each document sees those
before it.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import DataCollatorWithFlattening, PreTrainedModel, Trainer

from hfscale.core.versions import is_peft_model
from hfscale.facts.config_reader import ALIASES
from hfscale.trainer.attention import attention_implementation, forget_attention_implementation
from hfscale.trainer.small_model import make_config_small, switch_dropout_off
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies.tensors import class_without_shards

_VOCABULARY, _EXPERTS = 64, 16
_FIRST, _SECOND = 5, 7
"""Tokens of two documents."""
_TOLERANCE = 1e-4
"""Relative difference of logits in fp32 that rounding explains."""
_OF_LIBRARIES = ("transformers", "trl")

Collator = Callable[[list[dict[str, Any]]], dict[str, Any]]


def why_documents_mix(trainer: Trainer) -> str | None:
    """Return a warning if the documents of a batch see each other; None if they do not, or if that is not known.

    Args:
        trainer (`Trainer`): prepared for training. Models of several modalities are not examined, nor is
            FlashAttention, which has no mask.
    """
    collator: Any = trainer.data_collator
    if not _flattens_rows(collator):
        return None
    model: Any = model_of(trainer)
    base = model.get_base_model() if is_peft_model(model) else model
    if not isinstance(base, PreTrainedModel) or base.config.get_text_config() is not base.config:
        return None
    if "flash" in str(attention_implementation(base.config)):
        return None
    name = type(base).__name__
    try:
        is_apart = documents_are_apart(base, trainer.args.device, collator)
    except Exception as error:  # whatever a model raises for sizes that it does not expect
        return (
            f"whether documents that are packed one after another see each other in {name} is not known: a small "
            f"model of its config could not be tried ({type(error).__name__})"
        )
    if is_apart:
        return None
    return (
        f"{name} does not cut its attention where documents begin: those that are packed one after another see each "
        "other; train without packing and padding_free"
    )


def _flattens_rows(collator: Any) -> bool:
    """Return whether a collator of a library, which draws and counts nothing, puts the rows one after another."""
    if type(collator).__module__.partition(".")[0] not in _OF_LIBRARIES:
        return False
    is_of_trl = getattr(collator, "padding_free", False) is True
    return is_of_trl or isinstance(collator, DataCollatorWithFlattening)


def documents_are_apart(model: PreTrainedModel, device: torch.device, collator: Collator) -> bool:
    """Return whether a document has the same logits after two others: those of a small model of the same config.

    Args:
        model (`PreTrainedModel`): a causal language model of one modality, which may be sharded; it stays as it is.
        device (`torch.device`): where the small model runs. Some layers need a GPU.
        collator (`Callable`): puts the rows of a batch one after another; it decides what tells the model where
            documents begin.

    Raises:
        Exception: whatever a model raises for sizes, or a device, that it does not expect.
    """
    with torch.random.fork_rng(devices=[]):  # everything is drawn on the CPU
        torch.default_generator.manual_seed(0)
        small = _small_model(model, device)
        first, other, second = (
            torch.randint(1, _VOCABULARY, (length,)).tolist()
            for length in (_FIRST, _FIRST, _SECOND)
        )
    logits = []
    with torch.no_grad():
        for before in (first, other):
            batch = collator([{"input_ids": before}, {"input_ids": second}])
            inputs = {
                name: value.to(device) if isinstance(value, torch.Tensor) else value
                for name, value in batch.items()
                if name != "labels"
            }
            of_row = small(**inputs).logits[0]
            logits.append(of_row[_FIRST : _FIRST + _SECOND])
    after_first, after_other = logits
    difference = (after_first - after_other).abs().max()
    return bool(difference <= _TOLERANCE * after_first.abs().max())


def _small_model(model: PreTrainedModel, device: torch.device) -> Any:
    config = copy.deepcopy(model.config)
    make_config_small(config)
    config.vocab_size = _VOCABULARY
    if config.pad_token_id is not None:
        config.pad_token_id = 0
    for name in ALIASES["num_experts"]:
        if (getattr(config, name, None) or 0) > _EXPERTS:
            setattr(config, name, _EXPERTS)
    config.use_cache = False
    forget_attention_implementation(config)
    with torch.device("cpu"):
        small = class_without_shards(model)(config)
    switch_dropout_off(small)
    return small.to(device=device, dtype=torch.float32).eval()
