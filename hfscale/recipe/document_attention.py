"""Attention that is cut at the boundaries of packed documents, which transformers does where positions restart.

What cuts depends on the attention implementation (`transformers.masking_utils`, `modeling_flash_attention_utils`):

- eager and sdpa get a mask of (batch, 1, sequence, sequence) in which each document is a block;
- flex_attention gets a block mask, whose blocks outside of documents are not computed;
- flash_attention_* finds the boundaries itself, but only in batches of one row. In larger batches it ignores them, so
  `pass_document_lengths` passes them as keywords (`cu_seq_lens_q` and so on), for any number of rows.

Some models do not cut, without an error: they make their masks without the positions, or have layers that pass a state
along the sequence. `cut_attention` refuses them.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from hfscale.core.spelling import spelled
from hfscale.errors import UnsupportedModelError, UsageError
from hfscale.trainer.attention import attention_implementation
from hfscale.trainer.strategies.tensors import full_shape

if TYPE_CHECKING:
    from peft import PeftModel

_DENSE = ("eager", "sdpa")
_CUT_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""The values of `layer_types` in a config whose layers see other tokens through a mask only."""
_PROBE = "hfscale_mask_probe"


def cut_attention(model: "PreTrainedModel | PeftModel") -> str:
    """Prepare a model for rows of several documents, of which `position_ids` tell the boundaries.

    Args:
        model (`PreTrainedModel` or `PeftModel`): a causal language model, not yet wrapped for training.

    Returns:
        The name of its attention implementation.

    Raises:
        UnsupportedModelError: tokens of one document would reach the next one.
        UsageError: the attention implementation does not cut.
    """
    base: Any = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    name = attention_implementation(base.config)
    if name not in (*_DENSE, "flex_attention") and not is_flash_attention(name):
        given = spelled("attn_implementation", name)
        uncut = spelled("document_attention", False)
        raise UsageError(
            f"{given} is not known to cut attention between documents: use sdpa, flex_attention or "
            f"flash_attention_2, or give {uncut}"
        )
    reason = reason_not_to_cut(base)
    if reason is not None:
        uncut = spelled("document_attention", False)
        unpacked = spelled("packing", "none")
        fix = f"give {uncut}, or {unpacked}"
        raise UnsupportedModelError(
            f"the attention of {type(base).__name__} cannot be cut between documents: {reason}; {fix}"
        )
    if is_flash_attention(name):
        base.base_model.register_forward_pre_hook(pass_document_lengths, with_kwargs=True)
    return str(name)


def reason_not_to_cut(model: PreTrainedModel) -> str | None:
    """Return why attention cannot be cut between the documents of a row; None if it can.

    Args:
        model (`PreTrainedModel`): a causal language model, also one on the meta device or partitioned by ZeRO-3.
    """
    others = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _CUT_LAYERS
    if model._is_stateful or others:
        return f"it has layers that pass a state along the sequence ({', '.join(sorted(others)) or 'recurrent'})"
    parameters = inspect.signature(model.base_model.forward).parameters
    if "position_ids" not in parameters:
        return "it takes no position_ids"
    if not is_flash_attention(attention_implementation(model.config)):
        return _reason_of_masks(model)
    if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters.values()):
        return "it takes no keywords for FlashAttention"
    return None


class _Seen(Exception):  # noqa: N818 (not an error)
    """Ends a forward when it is known whether its mask is cut."""

    def __init__(self, *, is_cut: bool) -> None:
        super().__init__()
        self.is_cut = is_cut


class NoMaskError(Exception):
    """A decoder has reached its layers and has made no mask."""


def _reason_of_masks(model: PreTrainedModel) -> str | None:
    """Let the decoder make a mask for a row of two documents, and return why it is not cut between them."""

    def look(*, mask_function: Any, **_: Any) -> None:
        second = torch.tensor(3)
        first = torch.tensor(1)  # positions in the row
        raise _Seen(is_cut=not bool(mask_function(torch.tensor(0), torch.tensor(0), second, first)))

    inputs = {
        "inputs_embeds": torch.zeros(1, 4, model.config.get_text_config().hidden_size),
        "position_ids": torch.tensor([[0, 1, 0, 1]]),
    }
    try:
        run_until_mask(model, inputs, look)
    except _Seen as seen:
        return None if seen.is_cut else "it makes its masks without position_ids"
    except NoMaskError:
        return "it makes attention masks of its own"
    except Exception as error:  # whatever a model raises for inputs that it does not expect
        return f"its masks cannot be examined ({type(error).__name__})"
    return "it makes attention masks of its own"


def run_until_mask(
    model: PreTrainedModel, inputs: dict[str, Any], at_mask: Callable[..., Any]
) -> None:
    """Run the decoder of a model on a CPU and without memory for its parameters, until it makes its mask.

    Args:
        model (`PreTrainedModel`): a causal language model, also one on the meta device, sharded, or partitioned by
            ZeRO-3; it stays as it is.
        inputs (`dict[str, Any]`): keywords of the decoder.
        at_mask (`Callable`): called with what a mask function of transformers gets; it raises.

    Raises:
        NoMaskError: it has made none before its first layer.
    """

    def stop(*_: Any) -> None:
        raise NoMaskError

    decoder = model.base_model
    layers = max(
        (module for module in decoder.modules() if isinstance(module, nn.ModuleList)), key=len
    )
    before_layers = layers[0].register_forward_pre_hook(stop)
    tensors = {
        name: torch.zeros((), dtype=tensor.dtype).expand(full_shape(tensor))
        for name, tensor in (*decoder.named_parameters(), *decoder.named_buffers())
    }
    original: Any = attention_implementation(model.config)
    AttentionInterface.register(_PROBE, stop)
    AttentionMaskInterface.register(_PROBE, at_mask)
    try:
        model.set_attn_implementation(_PROBE)
        with torch.no_grad():
            functional_call(decoder, tensors, kwargs={"use_cache": False, **inputs})
    finally:
        before_layers.remove()
        model.set_attn_implementation(original)


def is_dense(name: str) -> bool:
    """Return whether an attention implementation needs a mask of (batch, 1, sequence, sequence) to cut.

    Args:
        name (`str`): the name of the implementation.
    """
    return name in _DENSE


def is_flash_attention(name: str | None) -> bool:
    """Return whether an attention implementation is some version of FlashAttention, also one of the hub's kernels.

    Args:
        name (`str`, *optional*): the name of the implementation.
    """
    return name is not None and "flash" in name


def pass_document_lengths(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the boundaries of documents to a decoder's keywords: a forward pre-hook for FlashAttention.

    Args:
        module (`nn.Module`): the decoder.
        args (`tuple`): its positional arguments.
        kwargs (`dict`): its keywords; where they have `position_ids` (rows, sequence) and no mask, the boundaries are
            added.

    Returns:
        The arguments and the keywords.
    """
    positions = kwargs.get("position_ids")
    if (
        positions is None
        or kwargs.get("attention_mask") is not None
        or kwargs.get("past_key_values") is not None
    ):
        return args, kwargs
    (queries, keys), (longest, _) = prepare_fa_kwargs_from_position_ids(positions)
    length = int(longest)  # the one time that this waits for the device, instead of once per layer
    lengths = {
        "cu_seq_lens_q": queries,
        "cu_seq_lens_k": keys,
        "max_length_q": length,
        "max_length_k": length,
    }
    return args, kwargs | lengths
