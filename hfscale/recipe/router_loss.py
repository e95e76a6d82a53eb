"""The load-balancing loss of a mixture of experts: its weight by a flag, averaged over ranks and micro-batches.

With `output_router_logits`, transformers' models add `router_aux_loss_coef` times this loss to that of each
micro-batch. Trainer (5.23, `compute_loss` and `training_step`) then scales the sum as if it were divided by the tokens
of all ranks and micro-batches, as the cross-entropy is: times the ranks, and not divided by the micro-batches. The
weight of the load-balancing loss would grow with both.
"""

from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from hfscale.core.logging import get_logger
from hfscale.core.spelling import spelled
from hfscale.errors import UsageError
from hfscale.recipe.arguments import RecipeTrainingArguments
from hfscale.trainer.strategies import Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, Trainer

logger = get_logger(__name__)

_NAME = "router_aux_loss_coef"


def set_router_loss(config: "PreTrainedConfig", coefficient: float | None) -> None:
    """Let a model add the load-balancing loss as `--router_aux_loss_coef` asks.

    Args:
        config (`PreTrainedConfig`): the model's config; changed in place.
        coefficient (`float`, *optional*): the weight of the loss; 0 turns it off, None leaves the config as it is.

    Raises:
        UsageError: the family has no such loss.
    """
    if coefficient is None:
        return
    text = config.get_text_config()
    if not hasattr(text, _NAME):
        given = spelled(_NAME, coefficient)
        other = spelled("router_bias_update_rate")
        raise UsageError(
            f"{given}: {text.model_type} has no load-balancing loss in transformers (for those that balance their "
            f"experts by a bias, as DeepSeek-V3 and GLM-4.5 do, there is {other}); leave it out"
        )
    text.output_router_logits = coefficient > 0
    text.router_aux_loss_coef = coefficient


def name_experts(config: "PreTrainedConfig") -> None:
    """Let a config give its number of experts as `num_experts`, by which TRL asks for it (1.16, `_fused_forward`).

    Args:
        config (`PreTrainedConfig`): a model's config; the map of names of its class gets an entry, as those of other
            families have.
    """
    text = config.get_text_config()
    if not hasattr(text, "output_router_logits") or hasattr(text, "num_experts"):
        return
    for name in ("num_local_experts", "n_routed_experts"):
        if hasattr(text, name):
            type(text).attribute_map = {**type(text).attribute_map, "num_experts": name}
            return


def average_router_loss(trainer: "Trainer") -> None:
    """Average the load-balancing loss over the ranks and micro-batches of a step. Call it before `trainer.train()`.

    The weight in the model's config does not change, only that with which this launch computes. `ParallelTrainer`
    averages it itself; TRL's trainers have flags of their own.

    Args:
        trainer (`Trainer`): a trainer of the recipes.
    """
    args = trainer.args
    if not isinstance(args, RecipeTrainingArguments) or Strategy.of(trainer).runs_stages:
        return
    ranks = args.world_size // trainer.get_tp_size() if args.average_tokens_across_devices else 1
    parts = ranks * args.gradient_accumulation_steps if trainer.model_accepts_loss_kwargs else 1
    assert trainer.model is not None  # the recipes give it
    for module in trainer.model.modules():
        config = module.config.get_text_config() if isinstance(module, PreTrainedModel) else None
        if (
            config is None
            or not hasattr(module, _NAME)
            or not getattr(config, "output_router_logits", False)
        ):
            continue
        module.router_aux_loss_coef = config.router_aux_loss_coef / parts
        logger.info(
            "load-balancing loss: weight %g, averaged over ranks and micro-batches",
            config.router_aux_loss_coef,
        )
