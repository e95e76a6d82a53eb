"""What Accelerate's FSDP needs of a model: layers that it has, a head that is gathered where a loss reads it."""

import functools
from typing import TYPE_CHECKING, Any

from torch import nn

from hfscale.core.versions import finds_final_norm

if TYPE_CHECKING:
    from transformers import Trainer


def name_layers_that_are_there(model: nn.Module) -> None:
    """Leave out of `_no_split_modules` the layers that a model does not have.

    Accelerate (1.15, `set_auto_wrap_policy`) wraps the layers that are named there, and fails at one that is missing.
    transformers (5.23) names those of the vision tower for the language models of Qwen3.5 too.

    Args:
        model (`nn.Module`): the model of a Trainer that trains with FSDP.
    """
    named = getattr(model, "_no_split_modules", None) or ()
    there = {type(module).__name__ for module in model.modules()}
    kept = [name for name in named if name in there]
    if 0 < len(kept) < len(named):
        model._no_split_modules = set(kept)  # type: ignore[assignment]


def gather_head_with_root(trainer: "Trainer") -> None:
    """Have FSDP2 gather the head of a model for trainers of TRL, whose loss reads its weight.

    Accelerate (1.15, `fsdp2_prepare_model`) makes one unit of the final norm and the head, which is gathered where the
    norm is called. Of models whose norm it does not find, such as vision-language models, the head is a unit of its
    own, which nobody calls. TRL (1.16, `add_fused_lm_head`) then gathers the weight itself, by a function that adds up
    no gradients of ranks, so that each rank trains its rows of the head on its own samples. Here such a head stays
    with the rest of the model, which is gathered for each step. Frozen and tied heads are not concerned.

    Args:
        trainer (`Trainer`): one that trains with FSDP; `prepare` of its Accelerator is replaced if it is one of TRL's.
    """
    is_of_trl = any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)
    if not is_of_trl:
        return
    prepare = trainer.accelerator.prepare

    @functools.wraps(prepare)
    def prepare_without_head(*args: Any, **kwargs: Any) -> Any:
        models = [one for one in args if isinstance(one, nn.Module) and _has_head_alone(one)]
        for model in models:
            vars(model)["get_output_embeddings"] = lambda: None
        try:
            return prepare(*args, **kwargs)
        finally:
            for model in models:
                del vars(model)["get_output_embeddings"]

    trainer.accelerator.prepare = prepare_without_head


def _has_head_alone(model: Any) -> bool:
    """Return whether Accelerate would make a unit of a trained head alone."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or finds_final_norm(model):
        return False
    embedding = model.get_input_embeddings()
    is_tied = getattr(embedding, "weight", None) is head.weight
    return not is_tied and any(weight.requires_grad for weight in head.parameters())
