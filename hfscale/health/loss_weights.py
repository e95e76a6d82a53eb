"""Whether every token of a step has the same weight in the loss of a Trainer."""

from typing import Any

from transformers import Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from hfscale.core.versions import is_peft_model, sequence_parallel_size
from hfscale.trainer.state import model_of


def why_tokens_weigh_unequally(trainer: Trainer) -> str | None:
    """Return a warning if a language model's loss is a mean of means, with how to change it; None if it is not.

    Trainer gives the number of tokens of all ranks and micro-batches to models that take it. Of other models it
    averages the means of the micro-batches, so that a token weighs more in a micro-batch that has fewer.

    Args:
        trainer (`Trainer`): prepared for training. One with a `compute_loss` of its own, as those of TRL, is left to
            itself.
    """
    parts = (
        trainer.args.gradient_accumulation_steps * trainer.args.world_size // trainer.get_tp_size()
    )
    is_left_out = (
        parts == 1
        or trainer.model_accepts_loss_kwargs
        or trainer.compute_loss_func is not None
        or type(trainer).compute_loss is not Trainer.compute_loss
        or sequence_parallel_size(trainer) > 1  # where DeepSpeed weighs the ranks
    )
    model: Any = model_of(trainer)
    base = model.get_base_model() if is_peft_model(model) else model
    if is_left_out or getattr(base, "loss_function", None) is not ForCausalLMLoss:
        return None
    return (
        f"{type(base).__name__} lets Trainer average the means of {parts} micro-batches, in which tokens do not have "
        "the same weight if their numbers differ (accepts_loss_kwargs of its class, or a forward without **kwargs): "
        "give Trainer a compute_loss_func that divides the sum by num_items_in_batch (docs/own_trainer.md)"
    )
