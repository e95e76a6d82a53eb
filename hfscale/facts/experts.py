"""What the configs of transformers say about the experts of a mixture."""

from collections.abc import Mapping
from typing import Any

from hfscale.errors import LayoutError
from hfscale.facts.config_reader import ALIASES

DISPATCH_STYLE = "ep_dispatch_experts"
"""The style of transformers' expert-parallel plans that sends tokens to the ranks of their experts."""


def number_of_experts(config: Any) -> int | None:
    """Return the number of routed experts of a layer; None for a dense model.

    Args:
        config (`PreTrainedConfig`): the config of the language model.
    """
    return next(
        (count for name in ALIASES["num_experts"] if (count := getattr(config, name, None))), None
    )


def spreads_experts(config: Any) -> bool:
    """Return whether transformers has a plan by which the experts of a family exchange tokens over ranks.

    Args:
        config (`PreTrainedConfig`): the config of the language model.
    """
    return DISPATCH_STYLE in (getattr(config, "base_model_ep_plan", None) or {}).values()


def expert_rules(plan: Mapping[str, str]) -> dict[str, str]:
    """Return the rules of an expert-parallel plan that are about the experts.

    The plan of Gemma 4 also splits the dense MLP beside the experts over the ranks that share them. transformers 5.23
    cannot shard such weights by FSDP2 ("Cannot concatenate overlapping meshes"), and these ranks see different batches
    unless `ep_size` is `tp_size`. Without these rules the dense MLP is treated like that of other families.

    Args:
        plan (`Mapping`): name of a module or parameter -> style, as the configs and models of transformers have it.
    """
    dispatching = [name for name, style in plan.items() if style == DISPATCH_STYLE]
    return {
        name: style
        for name, style in plan.items()
        if any(name == experts or name.startswith(f"{experts}.") for experts in dispatching)
    }


def set_expert_rules(config: Any) -> None:
    """Let transformers spread the experts, and nothing else, over the ranks that share them.

    Args:
        config (`PreTrainedConfig`): the config of the language model, before the model is made. Its
            `base_model_ep_plan` is replaced by `expert_rules` of it.
    """
    plan = getattr(config, "base_model_ep_plan", None) or {}
    if (rules := expert_rules(plan)) != plan:
        config.base_model_ep_plan = rules


def unset_expert_rules(config: Any) -> None:
    """Undo `set_expert_rules`: transformers 5.23 would save the rules into `config.json`.

    Args:
        config (`PreTrainedConfig`): the config of the language model, after the model was made.
    """
    config.__dict__.pop("base_model_ep_plan", None)


def check_experts_divide(ep: int, config: Any) -> None:
    """Check that every rank gets the same number of experts.

    Args:
        ep (`int`): ranks that share the experts of a layer.
        config (`PreTrainedConfig`): the config of the language model.

    Raises:
        LayoutError: the number of experts is smaller than `ep`, or not a multiple of it; the message names the sizes
            that fit.
    """
    experts = number_of_experts(config)
    if ep > 1 and experts is not None and experts % ep:
        fitting = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        raise LayoutError(
            f"ep_size {ep} does not divide the model's {experts} experts: choose one of {fitting}"
        )
