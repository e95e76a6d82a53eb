"""Checks of a model's config against a layout, made before a model is built or a process group exists."""

import math
from dataclasses import replace

from transformers import PreTrainedConfig

from hfscale.core.spelling import spelled
from hfscale.core.versions import sizes_of_layers
from hfscale.errors import LayoutError
from hfscale.facts.expert_layout import ExpertLayout
from hfscale.facts.experts import check_experts_divide
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.support import check_support
from hfscale.parallel.descriptions import describe_split
from hfscale.parallel.key_value_heads import can_share_heads
from hfscale.parallel.stages import StagePlan


def check_config(
    config: PreTrainedConfig,
    layout: ParallelLayout,
    plan: StagePlan,
    *,
    sequence_parallel: bool = False,
    checks_parity: bool = False,
    model_class: type | None = None,
) -> None:
    """Make sure that a model can be parallelized over a layout.

    Args:
        config (`PreTrainedConfig`): the model's config.
        layout (`ParallelLayout`): sizes of the axes.
        plan (`StagePlan`): the pipeline stages.
        sequence_parallel (`bool`): whether the tensor parallel ranks split sequences between blocks.
        checks_parity (`bool`): whether the run compares a small model under this layout with one process first.
        model_class (`type`, *optional*): the model's class, where there is a model: code that is not transformers' own
            is no tested family, whatever the config calls it.

    Raises:
        LayoutError: heads, vocabulary, layers or experts do not divide over the axes; the message names the nearest
            sizes.
        UsageError: the weights are quantised; the model's family or its attention implementation does not support
            one of the axes; or no test has compared the family under them, and the run does not compare it either.
    """
    text = config.get_text_config()
    asked = replace(
        describe_split(config, layout, sequence_parallel=sequence_parallel),
        check_parity=checks_parity,
    )
    if model_class is not None and model_class.__module__.partition(".")[0] != "transformers":
        asked = replace(asked, family=f"{config.model_type} ({model_class.__name__})")
    check_support(asked)
    if text.num_hidden_layers < plan.stages:
        possible = text.num_hidden_layers // plan.per_rank
        raise LayoutError(
            f"{spelled('pp_size')} is {plan.pp}: with {plan.per_rank} stages per rank it makes {plan.stages} stages, "
            f"but the model has {text.num_hidden_layers} layers: set {spelled('pp_size', max(1, possible))}"
        )
    if layout.tp > 1:
        _check_tensor_sizes(config, layout.tp)
    if isinstance(layout, ExpertLayout):
        check_experts_divide(layout.ep, text)


def _check_tensor_sizes(config: PreTrainedConfig, tp: int) -> None:
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = math.gcd(*sizes_of_layers(text, "num_key_value_heads")) or heads
    shares = can_share_heads(text)
    legal = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0 and _divides_or_shares(n, kv_heads, shares=shares)
    ]
    if tp not in legal:
        what = f"{heads} attention heads" if heads % tp else f"{kv_heads} key-value heads"
        nearest = min(legal, key=lambda n: abs(n - tp))
        raise LayoutError(
            f"{spelled('tp_size')} is {tp}, which does not divide the model's {what}: set "
            f"{spelled('tp_size', nearest)} (one of {', '.join(map(str, legal[:12]))})"
        )
    if -(-text.vocab_size // tp) * (tp - 1) >= text.vocab_size:
        raise LayoutError(
            f"{spelled('tp_size')} is {tp}, too many for the model's {text.vocab_size} vocabulary entries"
        )


def _divides_or_shares(tp: int, kv_heads: int, *, shares: bool) -> bool:
    """Return whether each rank gets whole key-value heads, or several ranks share one."""
    return kv_heads % tp == 0 or (shares and tp % kv_heads == 0)
