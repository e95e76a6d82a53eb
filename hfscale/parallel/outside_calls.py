"""Calls of the Trainer's model outside of a step, such as `model.generate(...)` in a callback: right, or an error."""

import functools
from typing import Any

from hfscale.core.spelling import spelled
from hfscale.errors import UsageError
from hfscale.facts.layout import ParallelLayout
from hfscale.parallel.mesh import reshard
from hfscale.parallel.model import ParallelizedModel
from hfscale.parallel.own_loss import LossModel


def guard_calls(
    parallelized: ParallelizedModel, layout: ParallelLayout, loss_model: LossModel | None
) -> None:
    """Have calls of a parallelized model return what the unsplit model returns, or end with an error.

    They run the model's only stage, so that every rank has to make them; the logits are complete.

    Args:
        parallelized (`ParallelizedModel`): the model; `model.forward` is replaced.
        layout (`ParallelLayout`): sizes of the axes.
        loss_model (`LossModel`, *optional*): the model that a `compute_loss` of the user's gets; there the Trainer's
            own model does the same.
    """
    model: Any = parallelized.model
    original = model.forward

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if loss_model is not None and loss_model.is_computing:
            return loss_model.call(*args, **kwargs)
        _check_layout(parallelized, layout)
        (stage,) = parallelized.stages
        output = stage.call_model(*args, **kwargs)
        reshard(stage)
        if parallelized.vocab_loss is not None:
            output.logits = parallelized.vocab_loss.gather(output.logits)
        return output

    if layout.data_parallel_size > 1:
        # Ranks with other prompts stop elsewhere, and gather parameters together until all have stopped
        model.generate = functools.partial(model.generate, synced_gpus=True)
    model.forward = call  # of this model only


def _check_layout(parallelized: ParallelizedModel, layout: ParallelLayout) -> None:
    axis = "pp" if layout.pp > 1 else "cp" if layout.cp > 1 else None
    if axis is not None:
        option = spelled(f"{axis}_size", 1)
    elif parallelized.sequence_parts > 1:
        option = f"{spelled('sequence_parallel')} to false"
    else:
        return
    held = "layers" if axis == "pp" else "sequence"
    raise UsageError(
        f"the model is called outside of a training or evaluation step, and a rank of this layout has a part of its "
        f"{held}: set {option}, or call a model that `hfscale checkpoints export` has written"
    )
