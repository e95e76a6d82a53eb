"""Context parallelism: several ranks hold a part of every sequence each, from the embedding to the loss.

Attention is the only operation in which tokens interact. There queries stay on their rank, and the keys and values of
the complete sequence are gathered layer by layer (Llama Team, arXiv 2407.21783, section 3.3.2): with grouped-query
attention these are few bytes, and any attention mask can be used. A sequence is divided into 2 x cp equal chunks, and
rank i holds chunks i and 2 x cp - 1 - i, one early and one late, so that a causal mask gives every rank the same work.

The model's code is not changed. transformers looks up its attention and its masks by name, in the public registries
`AttentionInterface` and `AttentionMaskInterface`. Under the name `ContextParallel.kernel` it finds the functions of
this module, which call the model's original implementation with the keys of the complete sequence and with the mask's
rows of this rank's tokens.

Shapes below: B = batch, S = tokens of the complete sequence, H = heads, D = width of a head.
"""

import copy
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices

from hfscale.core.spelling import spelled
from hfscale.core.torch_internals import without_dispatch_modes
from hfscale.errors import UnsupportedModelError, UsageError
from hfscale.facts.support import check_support
from hfscale.parallel.descriptions import describe_config
from hfscale.parallel.losses import IGNORED_LABEL
from hfscale.trainer.attention import attention_implementation
from hfscale.trainer.batches import NOT_PADDING

# Positions of complete sequences, passed along with the model's keywords
_PACKED_POSITIONS = "packed_position_ids"
_INPUTS = ("input_ids", "labels", "shift_labels", "position_ids", "attention_mask")
_kernel_numbers = count()


def local_positions(
    length: int, rank: int, ranks: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Compute the positions of the tokens that a rank holds: those of chunks `rank` and 2 x ranks - 1 - `rank`.

    Args:
        length (`int`): tokens of a sequence, S; a multiple of 2 x ranks.
        rank (`int`): index of the rank among those that share the sequence, from 0.
        ranks (`int`): number of ranks that share it.
        device (`torch.device` or `str`): the device of the result.

    Returns:
        A tensor (S / ranks,) of positions, in the order in which the rank holds the tokens.
    """
    chunks = torch.arange(length, device=device).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def restore_order(gathered: torch.Tensor, ranks: int, dim: int) -> torch.Tensor:
    """Put the tokens of all ranks, concatenated in rank order, into the order of the sequence.

    Args:
        gathered (`torch.Tensor`): S long along `dim`, each rank's tokens as `local_positions` orders them.
        ranks (`int`): number of ranks that share the sequence.
        dim (`int`): the dim of the tokens.

    Returns:
        A tensor of the same shape.
    """
    chunks = gathered.chunk(2 * ranks, dim=dim)
    early = [chunks[2 * rank] for rank in range(ranks)]
    late = [chunks[2 * rank + 1] for rank in reversed(range(ranks))]
    return torch.cat([*early, *late], dim=dim)


class ContextParallel:
    """Selects this rank's tokens from a step's inputs, and computes the model's attention for them.

    Args:
        model (`PreTrainedModel`): the unsplit model; its attention implementation is set to `kernel`.
        mesh (`DeviceMesh`): the ranks that share a sequence, one axis.
        sequence_parts (`int`): number of parts into which sequence parallelism splits a rank's tokens; 1 without it.

    Raises:
        UsageError: the model uses an attention implementation that makes masks of its own.
        UnsupportedModelError: the model does not look up its attention by name.
    """

    def __init__(
        self, model: PreTrainedModel, mesh: DeviceMesh, *, sequence_parts: int = 1
    ) -> None:
        self.mesh = mesh
        self.rank = mesh.get_local_rank()
        self.ranks = mesh.size()
        self.multiple = self.ranks * math.lcm(2, sequence_parts)
        """The length of every sequence, in tokens, has to be a multiple of this number."""
        self.kernel = f"context_parallel_{next(_kernel_numbers)}"
        """The name under which this attention is registered, one for each model."""
        self._original = str(attention_implementation(model.config))
        asked = replace(describe_config(model.config), engine="parallel_trainer", cp=self.ranks)
        check_support(asked, "attention")  # others make masks of their own
        self._chunks = (self.rank, 2 * self.ranks - 1 - self.rank)
        self._causal_biases: dict[tuple[int, int], torch.Tensor] = {}
        self._packed_positions: torch.Tensor | None = None
        self._is_padded = False
        _copy_config(model)
        AttentionInterface.register(self.kernel, self._attend)
        AttentionMaskInterface.register(self.kernel, self._mask)
        model.set_attn_implementation(self.kernel)
        if attention_implementation(model.config) != self.kernel:
            raise UnsupportedModelError(
                f"{spelled('cp_size')} is {self.ranks}: the attention of {type(model).__name__} cannot be replaced; "
                f"set {spelled('cp_size', 1)}"
            )

    # --- inputs -----------------------------------------------------------------------------------------------------

    def shard_inputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Select this rank's tokens from the inputs of a step.

        Args:
            inputs (`dict`): tensors of (B, S), where S is a multiple of `multiple`.

        Returns:
            The inputs for this rank's stages. `input_ids`, `position_ids` and `shift_labels` (the label of each
            token's successor) and `not_padding` are (B, S / cp). `labels` and `attention_mask` stay (B, S), for
            counting tokens and for masks.

        Raises:
            UsageError: one of the inputs is not known, or is not a tensor of (B, S).
        """
        inputs = dict(inputs)
        not_padding = inputs.pop(NOT_PADDING, None)
        self._check_inputs(inputs)
        tokens = inputs["input_ids"]
        batch, length = tokens.shape
        self._make_causal_biases(length // (2 * self.ranks))
        positions = local_positions(length, self.rank, self.ranks, tokens.device)
        complete: tuple[str, ...] = ("labels", "attention_mask")
        sharded = {name: inputs[name] for name in complete if name in inputs}

        # Labels are shifted before sequences are split: the successor of a rank's last token is on another rank.
        shift_labels = inputs.get("shift_labels")
        if shift_labels is None and "labels" in inputs:
            shift_labels = nn.functional.pad(inputs["labels"], (0, 1), value=IGNORED_LABEL)[:, 1:]
        sharded["input_ids"] = tokens[:, positions]
        if not_padding is not None:
            sharded[NOT_PADDING] = not_padding[:, positions]
        if shift_labels is not None:
            sharded["shift_labels"] = shift_labels[:, positions]

        given = inputs.get("position_ids")
        sharded["position_ids"] = (
            positions.expand(batch, -1) if given is None else given[:, positions]
        )
        if (
            given is not None
            and "attention_mask" not in inputs
            and find_packed_sequence_indices(given) is not None
        ):
            # As in transformers: without a mask, positions that restart separate packed sequences.
            sharded[_PACKED_POSITIONS] = given
        if "attention_mask" in inputs and bool(inputs["attention_mask"].all()):
            del sharded["attention_mask"]
        return sharded

    def _check_inputs(self, inputs: dict[str, torch.Tensor]) -> None:
        unknown = sorted(inputs.keys() - set(_INPUTS)) + [
            name for name, value in inputs.items() if value.ndim != 2
        ]
        if unknown:
            raise UsageError(
                f"{spelled('cp_size')} is {self.ranks}: input {unknown[0]} is none of {', '.join(_INPUTS)} of shape "
                f"(batch, sequence): leave it out or set {spelled('cp_size', 1)}"
            )

    def _make_causal_biases(self, chunk: int) -> None:
        """Make the causal masks of this rank's two chunks here and not in the layers: while a layer's activations are
        recomputed, or while a dispatch mode records operations, no tensor of this kind can be made."""
        with without_dispatch_modes():
            for number in self._chunks:
                visible = (number + 1) * chunk
                self._causal_biases.setdefault((chunk, visible), causal_lower_right(chunk, visible))

    def prepare_micro_batch(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Make the model's keywords for a micro-batch; to be called at the start of a stage's forward.

        They contain a padding mask of the complete sequence. Therefore transformers takes its length for the number of
        keys, and does not look for packed sequences in positions of which this rank has a part.

        Args:
            inputs (`dict`): the micro-batch's rows of the result of `shard_inputs`.

        Returns:
            The keywords, among them `attention_mask` of (B, S).
        """
        inputs = dict(inputs)
        self._packed_positions = inputs.pop(_PACKED_POSITIONS, None)
        self._is_padded = "attention_mask" in inputs
        if not self._is_padded:
            batch, length = inputs["position_ids"].shape
            inputs["attention_mask"] = inputs["position_ids"].new_ones(batch, length * self.ranks)
        return inputs

    # --- attention --------------------------------------------------------------------------------------------------

    def gather_sequence(self, local: torch.Tensor, dim: int) -> torch.Tensor:
        """Gather the tokens of all ranks, in order, from this rank's tokens along `dim`.

        In the backward pass each rank gets the sum, over all ranks, of the gradient of its tokens.

        Args:
            local (`torch.Tensor`): this rank's tokens, S / cp long along `dim`.
            dim (`int`): the dim of the tokens.

        Returns:
            The tensor of the complete sequence, S long along `dim`, equal on every rank.
        """
        shards = DTensor.from_local(local, self.mesh, [Shard(dim)], run_check=False)
        gathered = shards.redistribute(placements=[Replicate()]).to_local(
            grad_placements=[Partial()]
        )
        return restore_order(gathered, self.ranks, dim)

    def _attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Compute the attention of this rank's tokens: query, key, value (B, H, S / cp, D) -> (B, S / cp, H, D)."""
        widths = [key.shape[-1], value.shape[-1]]
        gathered = self.gather_sequence(torch.cat([key, value], dim=-1), dim=2)
        key, value = gathered.split(widths, dim=-1)
        attend = self._original_attention(module)
        if attention_mask is not None:
            return attend(module, query, key, value, attention_mask, **options)
        # A purely causal mask: each of the two chunks attends to what precedes it, and no mask is held in memory.
        chunk = query.shape[2] // 2
        outputs = []
        for chunk_query, number in zip(query.split(chunk, dim=2), self._chunks, strict=True):
            visible = (number + 1) * chunk
            bias = self._causal_biases[chunk, visible]
            output, _ = attend(
                module, chunk_query, key[:, :, :visible], value[:, :, :visible], bias, **options
            )
            outputs.append(output)
        return torch.cat(outputs, dim=1), None

    def _original_attention(self, module: nn.Module) -> Callable[..., tuple[torch.Tensor, Any]]:
        attend: Callable[..., tuple[torch.Tensor, Any]]
        # Each family has its own, under the same name in the file of its attention
        if self._original == "eager":
            attend = sys.modules[type(module).__module__].eager_attention_forward
        else:
            attend = AttentionInterface()[self._original]
        return attend

    def _mask(
        self,
        *,
        kv_length: int,
        mask_function: Callable[..., torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        allow_is_causal_skip: bool = True,
        local_size: int | None = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> torch.Tensor | None:
        """Make the mask's rows for this rank's tokens, (B, 1, S / cp, S); None where the mask is purely causal.

        `mask_function` tells whether one position of the sequence attends to another.
        """
        packed = self._packed_positions
        indices = find_packed_sequence_indices(packed) if packed is not None else None
        is_causal = allow_is_causal_skip and indices is None and not self._is_padded
        if (
            self._original == "sdpa"
            and is_causal
            and (local_size is None or kv_length < local_size)
        ):
            return None
        if packed is not None and indices is not None:
            # From 5.23
            from transformers.masking_utils import packed_sequence_compatibility_function

            mask_function = packed_sequence_compatibility_function(mask_function, packed, indices)
        positions = local_positions(kv_length, self.rank, self.ranks, device)

        def local_mask_function(
            batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
        ) -> torch.Tensor:
            return mask_function(batch, head, positions[query], key)

        mask: torch.Tensor | None = AttentionMaskInterface()[self._original](
            kv_length=kv_length,
            mask_function=local_mask_function,
            attention_mask=attention_mask if self._is_padded else None,
            allow_is_causal_skip=False,
            local_size=local_size,
            device=device,
            **options,
        )
        return mask


def _copy_config(model: PreTrainedModel) -> None:
    """Give a model its own copy of its config, so that changes do not reach other models made from the same config."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        if id(getattr(module, "config", None)) in copies:
            module.config = copies[id(module.config)]
