"""Whether the loss of a Trainer grows with the number of processes and micro-batches (transformers#47688).

Trainer (5.23) gives a model whose forward takes `**kwargs` the number of items in the batch, and expects it to divide
by that. It multiplies the loss by the number of processes, and does not divide by the number of micro-batches. Many
heads take `**kwargs` and compute a mean with a loss of torch, such as those of BERT, T5 and BART: then loss and
gradients are larger by the number of processes times that of micro-batches.
"""

import ast
import inspect
import textwrap
from typing import Any

from transformers import Trainer

from hfscale.core.counts import counted
from hfscale.core.versions import is_peft_model, sequence_parallel_size
from hfscale.trainer.state import model_of

_COUNT = "num_items_in_batch"
_OWN_LOSSES = ("cross_entropy", "mse_loss", "binary_cross_entropy_with_logits")


def why_loss_grows(trainer: Trainer, micro_batches: int | None = None) -> str | None:
    """Return a warning if the loss grows so, with how to change it; None if it does not, or if that is not known.

    Args:
        trainer (`Trainer`): prepared for training. One with a `compute_loss` of its own is left to itself.
        micro_batches (`int`, *optional*): the most micro-batches of a step; by default those of its arguments.
    """
    args = trainer.args
    if micro_batches is None:
        micro_batches = args.gradient_accumulation_steps
    processes = args.world_size // trainer.get_tp_size()
    if not args.average_tokens_across_devices:
        processes = 1
    factor = processes * micro_batches
    # Where the user's code or transformers divides by the items itself, the number of micro-batches has no effect
    is_left_out = (
        factor == 1
        or not trainer.model_accepts_loss_kwargs
        or trainer.compute_loss_func is not None
        or trainer.label_smoother is not None
        or type(trainer).compute_loss is not Trainer.compute_loss
        or sequence_parallel_size(trainer) > 1
    )
    if is_left_out:
        return None
    model: Any = model_of(trainer)
    base = model.get_base_model() if is_peft_model(model) else model
    if not _drops_item_count(type(base)):
        return None
    return (
        f"{type(base).__name__} does not divide its loss by num_items_in_batch, as Trainer expects: with "
        f"{counted(processes, 'process')} and {counted(micro_batches, 'micro-batch')} per step, loss and "
        f"gradients are {factor} times too large; set model.accepts_loss_kwargs = False before the Trainer is made"
    )


def _drops_item_count(kind: type) -> bool:
    """Return whether the forward of a class computes its loss itself, without the number of items."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward)))  # type: ignore[attr-defined]
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        return False
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg | ast.keyword)}
    used = names | attributes | arguments
    takes_count = _COUNT in used or "loss_function" in used
    computes_loss = any(name.endswith("Loss") or name in _OWN_LOSSES for name in names | attributes)
    return computes_loss and not takes_count
