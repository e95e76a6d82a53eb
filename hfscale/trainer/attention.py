"""Which implementation of attention a model of transformers uses."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig  # its name from 5.0 on


def attention_implementation(config: "PreTrainedConfig") -> str | None:
    """Return the name of the attention implementation that a model's config asks for; None where it names none.

    Args:
        config (`PreTrainedConfig`): the config of a model.
    """
    name: str | None = config._attn_implementation
    return name


def forget_attention_implementation(config: "PreTrainedConfig") -> None:
    """Let transformers choose the attention implementation of the next model that is made from a config.

    Args:
        config (`PreTrainedConfig`): the config of a model; changed in place.
    """
    config._attn_implementation = None
