"""Whether a tokenizer knows any text: transformers 5 makes one without tokens for a model whose folder has none."""

from typing import Any

_FEW = 512
"""Tokens from which on a tokenizer is not asked: it knows more than special ones."""


def knows_no_text(tokenizer: Any) -> bool:
    """Return whether a tokenizer has special tokens only, so that any text becomes nothing or one token repeated.

    Args:
        tokenizer (`PreTrainedTokenizerBase` or a processor with one): what a training was given; anything else knows
            text.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if not hasattr(tokenizer, "get_added_vocab") or len(tokenizer) > _FEW:
        return False
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    return special.issuperset(tokenizer.get_vocab())
