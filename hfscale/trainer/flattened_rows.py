"""Whether documents see each other where a collator puts the rows of a batch one after another, without padding.

Such a collator passes where each document begins, in the forms that transformers has for it. Whether a model uses one
of them depends on its family, and neither TRL nor transformers says so where it uses none: each document sees those
before it.
"""

import copy
from collections.abc import Set
from typing import Any

import torch
from transformers import DataCollatorWithFlattening, PreTrainedModel, Trainer

from hfscale.core.versions import is_peft_model
from hfscale.facts.experts import COUNTS_OF_EXPERTS
from hfscale.trainer.attention import attention_implementation, forget_attention_implementation
from hfscale.trainer.small_model import make_config_small, switch_dropout_off
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies.tensors import class_without_shards

_VOCABULARY, _EXPERTS = 64, 16
_FIRST, _SECOND = 5, 7
"""Tokens of two documents."""
_TOLERANCE = 1e-4
"""Relative difference of logits in fp32 that rounding explains."""
_POSITIONS = "position_ids"
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_NUMBERS = "seq_idx"
BOUNDARIES = frozenset({_POSITIONS, *_LENGTHS, _NUMBERS})
"""Keywords by which transformers' models learn where documents begin."""


def why_documents_mix(trainer: Trainer) -> str | None:
    """Return a warning if the documents of a batch see each other; None if they do not, or if that is not known.

    Args:
        trainer (`Trainer`): prepared for training. Models of several modalities are not examined, nor is
            FlashAttention, which has no mask.
    """
    passed = _boundaries_passed(trainer.data_collator)
    if not passed:
        return None
    model: Any = model_of(trainer)
    base = model.get_base_model() if is_peft_model(model) else model
    if not isinstance(base, PreTrainedModel) or base.config.get_text_config() is not base.config:
        return None
    if "flash" in str(attention_implementation(base.config)):
        return None
    try:
        is_apart = documents_are_apart(base, trainer.args.device, passed)
    except Exception:  # whatever a model raises for sizes that it does not expect
        return None
    if is_apart:
        return None
    return (
        f"{type(base).__name__} does not cut its attention where documents begin: those that are packed one after "
        f"another see each other; train without packing and padding_free"
    )


def _boundaries_passed(collator: Any) -> Set[str]:
    """Return the keywords that a collator without padding passes; none for any other collator."""
    if isinstance(collator, DataCollatorWithFlattening):
        asked = vars(collator)
        found = {_POSITIONS} if asked["return_position_ids"] else set()
        if asked.get("return_flash_attn_kwargs"):
            found.update(_LENGTHS)
        if asked.get("return_seq_idx"):
            found.add(_NUMBERS)
        return found
    return BOUNDARIES if getattr(collator, "padding_free", False) is True else frozenset()  # TRL's


def documents_are_apart(
    model: PreTrainedModel, device: torch.device, passed: Set[str] = BOUNDARIES
) -> bool:
    """Return whether a document has the same logits after two others: those of a small model of the same config.

    Args:
        model (`PreTrainedModel`): a causal language model of one modality, which may be sharded; it stays as it is.
        device (`torch.device`): where the small model runs. Some layers need a GPU.
        passed (`Set[str]`): which of `BOUNDARIES` the model is called with.

    Raises:
        Exception: whatever a model raises for sizes, or a device, that it does not expect.
    """
    keywords = {name: value for name, value in boundaries(device).items() if name in passed}
    with torch.random.fork_rng(devices=[]):  # everything is drawn on the CPU
        torch.default_generator.manual_seed(0)
        small = _small_model(model, device)
        first, other, second = (
            torch.randint(_VOCABULARY, (1, length)).to(device)
            for length in (_FIRST, _FIRST, _SECOND)
        )
    logits = []
    with torch.no_grad():
        for before in (first, other):
            row = torch.cat([before, second], 1)
            of_row = small(input_ids=row, **keywords).logits[0]
            logits.append(of_row[_FIRST:])
    after_first, after_other = logits
    difference = (after_first - after_other).abs().max()
    return bool(difference <= _TOLERANCE * after_first.abs().max())


def _small_model(model: PreTrainedModel, device: torch.device) -> Any:
    config = copy.deepcopy(model.config)
    make_config_small(config)
    config.vocab_size = _VOCABULARY
    if config.pad_token_id is not None:
        config.pad_token_id = 0
    for name in COUNTS_OF_EXPERTS:
        if (getattr(config, name, None) or 0) > _EXPERTS:
            setattr(config, name, _EXPERTS)
    config.use_cache = False
    forget_attention_implementation(config)
    with torch.device("cpu"):
        small = class_without_shards(model)(config)
    switch_dropout_off(small)
    return small.to(device=device, dtype=torch.float32).eval()


def boundaries(device: torch.device) -> dict[str, Any]:
    """Return what TRL's collator passes with two documents.

    Args:
        device (`torch.device`): the device of the tensors.
    """
    positions = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])
    lengths = torch.tensor([0, _FIRST, _FIRST + _SECOND], dtype=torch.int32, device=device)
    of_token = torch.repeat_interleave(torch.arange(2), torch.tensor([_FIRST, _SECOND]))
    return {
        _POSITIONS: positions.unsqueeze(0).to(device),
        "cu_seq_lens_q": lengths,
        "cu_seq_lens_k": lengths,
        "max_length_q": _SECOND,
        "max_length_k": _SECOND,
        _NUMBERS: of_token.unsqueeze(0).to(device=device, dtype=torch.int32),
    }
