"""Generation with a model that is being trained: the tokens that end it, and what each strategy needs for it."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jinja2.exceptions import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfscale.core.versions import context_parallel_size, sequence_parallel_size
from hfscale.facts.strategies import WEIGHTS
from hfscale.trainer.state import unwrap_compiled
from hfscale.trainer.strategies import Strategy

if TYPE_CHECKING:
    from transformers import GenerationConfig, Trainer

_ANSWER = "hfscale-probe"


def turn_end_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token with which the chat template ends an assistant's turn.

    It differs from the tokenizer's end-of-sequence token in many base models that have a chat template.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): a tokenizer, with or without a chat template.

    Returns:
        `int | None`: the id of the token; None without a template, and where no special token follows the answer.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    rendered = _rendered_turn(tokenizer, "a", _ANSWER)
    if rendered is None:  # the template of a vision-language model may need contents in parts
        parts = [[{"type": "text", "text": text}] for text in ("a", _ANSWER)]
        rendered = _rendered_turn(tokenizer, *parts)
    if rendered is None:
        return None
    rest = tokenizer(rendered.rpartition(_ANSWER)[2].lstrip(), add_special_tokens=False)[
        "input_ids"
    ]
    added = tokenizer.added_tokens_decoder
    return rest[0] if rest and rest[0] in added and added[rest[0]].special else None


def _rendered_turn(tokenizer: PreTrainedTokenizerBase, question: Any, answer: Any) -> str | None:
    """Return a conversation of two turns as text; None where the template refuses it or leaves the answer out."""
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    try:
        rendered = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except (TemplateError, TypeError):  # it may need a system message
        return None
    return rendered if _ANSWER in rendered else None


def stop_tokens(config: "GenerationConfig", tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of the tokens that end a generation: those of the model, of the tokenizer and of its template.

    Args:
        config (`GenerationConfig`): the generation config of the model.
        tokenizer (`PreTrainedTokenizerBase`): the tokenizer.
    """
    of_model = config.eos_token_id if config.eos_token_id is not None else []
    ids = [*(of_model if isinstance(of_model, list) else [of_model]), tokenizer.eos_token_id]
    ids.append(turn_end_token(tokenizer))
    return list(dict.fromkeys(token for token in ids if token is not None))


def reason_not_to_generate(trainer: "Trainer") -> str | None:
    """Return why the model of a Trainer cannot generate while it is trained; None if it can.

    Args:
        trainer (`Trainer`): a Trainer whose strategy is set up.
    """
    strategy = Strategy.of(trainer)
    if not strategy.has_plain_forward:
        return f"the strategy {strategy.name} has no forward for generation"
    if context_parallel_size(trainer) * sequence_parallel_size(trainer) > 1:
        return "context and sequence parallelism split the sequence over ranks"
    model = _unwrapped(trainer)
    if not (hasattr(model, "generate") and getattr(model, "can_generate", lambda: False)()):
        return f"{type(model).__name__} has no head that predicts the next token"
    return None


def generates_together(trainer: "Trainer") -> bool:
    """Return whether each forward needs all ranks, because every rank holds a part of each weight.

    Args:
        trainer (`Trainer`): a Trainer whose strategy is set up.
    """
    return WEIGHTS in Strategy.of(trainer).shards and trainer.args.world_size > 1


@contextmanager
def generation_mode(trainer: "Trainer") -> Iterator[PreTrainedModel]:
    """Yield the model of a training ready for `generate`, and restore the training's state at the end of the block.

    Restored are the states of the random number generators, the training mode of every module, and the shards of
    FSDP2. Compiled code is not used, since it is for the shapes of the training. Activations are not recomputed and
    dropout is off, because the modules are in evaluation mode.

    Args:
        trainer (`Trainer`): the Trainer, between two steps.
    """
    model = _unwrapped(trainer)
    in_training = [module for module in model.modules() if module.training]
    device = trainer.args.device
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        devices = [torch.accelerator.current_device_index()] if device.type != "cpu" else []
        stack.enter_context(
            torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")
        )
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(trainer.accelerator.autocast())
        stack.enter_context(Strategy.of(trainer).gathered())
        try:
            model.eval()
            yield model
        finally:
            for module in in_training:
                module.training = True
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _unwrapped(trainer: "Trainer") -> Any:
    return unwrap_compiled(
        trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    )
