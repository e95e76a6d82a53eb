"""Checks that the checkpoints of a strategy can hold the adapters of a model."""

from typing import TYPE_CHECKING, Any

from hfscale.core.versions import is_peft_model
from hfscale.facts.support import Combination, check_support
from hfscale.trainer.state import model_of, unwrap_compiled
from hfscale.trainer.strategies.strategy import Strategy

if TYPE_CHECKING:
    from transformers import Trainer


def check_adapters(trainer: "Trainer") -> None:
    """Check that the checkpoints of the running strategy can hold the adapters of the model, if it has some.

    Args:
        trainer (`Trainer`): prepared for training.

    Raises:
        UsageError: they cannot be saved, or a resumed run would not have all of them.
    """
    model = unwrap_compiled(model_of(trainer))
    if not is_peft_model(model):
        return
    config: Any = model.peft_config[model.active_adapter]
    check_support(
        Combination(
            strategy=Strategy.of(trainer).name,
            adapter=str(config.peft_type.value).lower(),
            frozen_adapter=_has_frozen_matrices(model),
        )
    )


def _has_frozen_matrices(model: Any) -> bool:
    """Return whether a LoRA matrix of an adapter in use does not train, as the A matrices of LoRA-FA."""
    in_use = {f".{name}." for name in model.active_adapters}
    return any(
        "lora_" in name
        and not parameter.requires_grad
        and any(adapter in f"{name}." for adapter in in_use)
        for name, parameter in model.named_parameters()
    )
