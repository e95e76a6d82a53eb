"""Balances the experts of a mixture by the bias of their router: after each step it moves towards an even load.

In DeepSeek-V3 and the families after it a bias per expert (`e_score_correction_bias`) is added to the router's scores
for the choice of experts, and not to their weights. transformers loads and saves it, and never changes it. Here it
changes as in "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (arXiv:2408.15664), algorithm 1:
after each step that of an expert with fewer tokens than the average one grows by the update rate, and that of one with
more shrinks by it. DeepSeek-V3 was trained with a rate of 0.001 (arXiv:2412.19437, section 4.2).

The bias is a buffer of the model, which every checkpoint holds; nothing else needs to be saved.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled

from hfscale.core.collectives import TRAINING
from hfscale.core.distributed import is_distributed
from hfscale.core.logging import get_logger
from hfscale.core.spelling import spelled
from hfscale.errors import UsageError
from hfscale.recipe.arguments import RecipeTrainingArguments
from hfscale.trainer.expert_counter import (
    NOTHING_COUNTED,
    counter_of,
    modules_of_experts,
    number_of_experts,
)
from hfscale.trainer.state import model_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, Trainer

logger = get_logger(__name__)

BIAS = "e_score_correction_bias"
"""transformers' name of the buffer, in the router of a layer or in the module that holds router and experts."""


def check_has_bias(config: "PreTrainedConfig", rate: float) -> None:
    """Check, before weights are loaded, that the routers of a model have a bias.

    Under ZeRO-3, where transformers cannot make a model on the meta device, it is checked when training begins.

    Args:
        config (`PreTrainedConfig`): the model's config.
        rate (`float`): `--router_bias_update_rate`; with 0 nothing is checked.

    Raises:
        UsageError: the family has none.
    """
    if rate == 0 or is_deepspeed_zero3_enabled():
        return
    with torch.device("meta"):
        _require_bias(biased_routers(AutoModelForCausalLM.from_config(config)), config, rate)


def _require_bias(layers: Collection[str], config: "PreTrainedConfig", rate: float) -> None:
    """Make a model without a layer whose router has a bias a UsageError."""
    if not layers:
        family = config.get_text_config().model_type
        other = spelled("router_aux_loss_coef")
        raise UsageError(
            f"{_given(rate)}: the routers of {family} have no bias that balances their experts, as those of "
            f"deepseek_v3 and glm4_moe do: leave it out (or give {other})"
        )


def _given(rate: float) -> str:
    """Return the option and its value, for errors."""
    return spelled("router_bias_update_rate", rate)


def biased_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold the bias of a router, by the name of their experts, which have the same parent.

    Args:
        model (`nn.Module`): the model, with or without wrappers.
    """
    found = {}
    for name, experts in modules_of_experts(model).items():
        parent = model.get_submodule(name.rpartition(".")[0])
        holders = [
            module
            for module in parent.modules()
            if BIAS in dict(module.named_buffers(recurse=False))
        ]
        if len(holders) == 1 and _bias_of(holders[0]).shape == (number_of_experts(experts),):
            found[name] = holders[0]
    return found


def _bias_of(router: nn.Module) -> torch.Tensor:
    """Return the bias as it is now: moving or casting a model replaces its buffers."""
    return router.get_buffer(BIAS)


def update_bias(bias: torch.Tensor, tokens: torch.Tensor, rate: float) -> None:
    """Move the bias of each expert towards an even load.

    Args:
        bias (`torch.Tensor`): of a router, (experts,); changed in place.
        tokens (`torch.Tensor`): of each expert in all sequences of a step, (experts,), as integers, so that the sign
            does not depend on rounding or on how the sequences were spread over ranks.
        rate (`float`): by how much.
    """
    missing = tokens.sum() - tokens * len(tokens)  # (average - tokens) x experts
    bias.add_(missing.sign(), alpha=rate)


class RouterBiasCallback(TrainerCallback):
    """Updates the bias of the routers after each optimizer step, from the tokens of each expert on all ranks.

    Padding does not count (`ExpertCounter`). Ranks that compute the same tokens all count them, which changes no sign.
    With a pipeline each rank has counts and biases of its own layers, and adds those of other ranks.

    Args:
        trainer (`Trainer`): the trainer of the run.
        rate (`float`): by how much a bias changes in a step.
    """

    def __init__(self, trainer: "Trainer", rate: float) -> None:
        self._trainer = trainer
        self._rate = rate

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to count, when the model is as it will be trained.

        Raises:
            UsageError: there is no bias, or it is not in fp32, where a small step may change nothing.
        """
        model: Any = model_of(self._trainer)
        self._routers = biased_routers(model)
        own = {name: str(_bias_of(router).dtype) for name, router in self._routers.items()}
        # With a pipeline each rank has some of the layers, and all ranks are to end with the same error.
        layers = {
            name: dtype
            for found in TRAINING.gather("biases of routers", own)
            for name, dtype in found.items()
        }
        _require_bias(layers, model.config, self._rate)
        for name, dtype in layers.items():
            if dtype != str(torch.float32):
                raise UsageError(
                    f"{_given(self._rate)}: the bias of the router of {name} is in {dtype}, where such a step may "
                    "change nothing: use FSDP2, which keeps it in fp32, or leave it out"
                )
        self._counter = counter_of(self._trainer)
        self._has_counted = False
        logger.info(
            "router bias: moves by %g towards an even load after each step, in %d layers",
            self._rate,
            len(layers),
        )

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update: all backward passes of the step are done, and nothing has been saved of it yet.

        Raises:
            UsageError: the attention mask does not tell which tokens are padding, or no token was counted in the first
                step.
        """
        unknown = self._counter.unknown_mask
        if unknown:
            raise UsageError(
                f"{_given(self._rate)}: an attention mask {unknown} does not tell which tokens are padding, which "
                "would count in the load of the experts: have the data collator give one of (batch, sequence), or "
                "leave it out"
            )
        counts = torch.cat(self._counter.counts)
        if is_distributed():
            dist.all_reduce(counts)
        if not self._has_counted:
            self._has_counted = bool(counts.any())  # waits for a GPU, so in the first step only
            if not self._has_counted:
                raise UsageError(f"{_given(self._rate)}: {NOTHING_COUNTED}")
        sizes = [len(own) for own in self._counter.counts]
        for name, tokens in zip(self._counter.layers, counts.split(sizes), strict=True):
            if name in self._routers:
                update_bias(_bias_of(self._routers[name]), tokens[:-1], self._rate)
        self._counter.reset()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop counting."""
        self._counter.detach()


def balance_by_bias(trainer: "Trainer") -> None:
    """Let a trainer update the bias of its model's routers, if the flags ask for it. Call it before `trainer.train()`.

    Args:
        trainer (`Trainer`): a trainer of the recipes.
    """
    args = trainer.args
    if isinstance(args, RecipeTrainingArguments) and args.router_bias_update_rate > 0:
        trainer.add_callback(RouterBiasCallback(trainer, args.router_bias_update_rate))
