"""What islands must have in common, as they tell the rendezvous when they join."""

import hashlib
import json
from typing import Any

from transformers import PreTrainedTokenizerBase, Trainer

from hfscale import __version__


def digest_of(value: Any) -> str:
    """Return a hash of a JSON value.

    Args:
        value (`Any`): what JSON can represent.
    """
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def terms_of_model(trainer: Trainer, parameters: int, frozen: str) -> dict[str, str]:
    """Return what tells the model of one island from that of another, by names that an error shows.

    Args:
        trainer (`Trainer`): the Trainer.
        parameters (`int`): number of parameters.
        frozen (`str`): a hash of the weights that are not trained.
    """
    tokenizer = trainer.processing_class
    vocabulary = tokenizer.get_vocab() if isinstance(tokenizer, PreTrainedTokenizerBase) else {}
    return {
        "version": __version__,
        "model": f"{type(trainer.model).__name__} of {parameters}",
        "weights that are not trained": frozen,
        "tokenizer": digest_of(sorted(vocabulary.items())),
    }
