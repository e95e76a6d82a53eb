"""Context parallelism: each of several ranks keeps a part of every sequence, through the whole model.

Attention is the one place where tokens meet. There queries stay where they are and keys and values of the whole
sequence are gathered, layer by layer (Llama Team, arXiv 2407.21783, section 3.3.2): few bytes where heads share keys
and values, and any mask can be had. Of 2 x cp equal chunks rank i holds chunks i and 2 x cp - 1 - i, one early and one
late, so that the work of a causal mask is the same on every rank.

The model is not changed. Its attention and its masks are asked for by name, through transformers' public registries
`AttentionInterface` and `AttentionMaskInterface`; the name of `ContextParallel.kernel` leads here, and from here to
the implementation that the model had, with the keys of the whole sequence and the mask's rows of this rank's tokens.
"""

import copy
import math
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices, packed_sequence_compatibility_function

from hfscale.errors import UnsupportedModelError, UsageError

_IGNORED = -100  # the label that transformers' losses skip
_KERNELS = ("sdpa", "eager")
_PACKED = "packed_position_ids"  # of whole sequences, beside the model's keywords
_CUT = ("input_ids", "labels", "shift_labels", "position_ids", "attention_mask")
_numbers = count()


def own_positions(length: int, rank: int, ranks: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Which of `length` tokens a rank holds, (length / ranks,), in its order: those of chunks `rank` and
    2 x ranks - 1 - `rank`."""
    chunks = torch.arange(length, device=device).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def in_order(parts: torch.Tensor, ranks: int, dim: int) -> torch.Tensor:
    """The ranks' parts one after the other along `dim` -> the same tokens in the order of the sequence."""
    chunks = parts.chunk(2 * ranks, dim=dim)
    early = [chunks[2 * rank] for rank in range(ranks)]
    late = [chunks[2 * rank + 1] for rank in reversed(range(ranks))]
    return torch.cat([*early, *late], dim=dim)


class ContextParallel:
    """Cuts a step's inputs to this rank's tokens, and is the attention of the model that works on them.

    Args:
        model (`PreTrainedModel`): whole; its attention implementation is set to `kernel`.
        mesh (`DeviceMesh`): the ranks that share a sequence, one axis.
        sequence_parts (`int`): into how many parts sequence parallelism cuts what a rank has of a sequence.

    Raises:
        UsageError: an attention implementation that makes masks of its own.
        UnsupportedModelError: a model that does not ask for its attention by name.
    """

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh, *, sequence_parts: int = 1) -> None:
        self.mesh, self.rank, self.ranks = mesh, mesh.get_local_rank(), mesh.size()
        self.multiple = self.ranks * math.lcm(2, sequence_parts)
        """What the length of a sequence has to be a multiple of."""
        self.kernel = f"context_parallel_{next(_numbers)}"
        """The name of this attention, one for each model."""
        self._original = check_kernel(model.config._attn_implementation, self.ranks)
        self._chunks = (self.rank, 2 * self.ranks - 1 - self.rank)
        self._biases: dict[tuple[int, int], torch.Tensor] = {}
        self._packed: torch.Tensor | None = None
        self._is_padded = False
        _own_config(model)
        AttentionInterface.register(self.kernel, self._attend)
        AttentionMaskInterface.register(self.kernel, self._mask)
        model.set_attn_implementation(self.kernel)
        if model.config._attn_implementation != self.kernel:
            raise UnsupportedModelError(
                f"cp_size {self.ranks}: the attention of {type(model).__name__} cannot be replaced; set --cp_size 1"
            )

    @classmethod
    def over(cls, model: PreTrainedModel, mesh: DeviceMesh | None, *, sequence_parts: int) -> "ContextParallel | None":
        """Over the ranks of a mesh; None where there is none."""
        return cls(model, mesh, sequence_parts=sequence_parts) if mesh is not None else None

    # --- inputs -----------------------------------------------------------------------------------------------------

    def cut(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A step's inputs, each (micro-batches x rows, length), a multiple of `multiple` -> what this rank gives to
        its stages.

        `input_ids`, `position_ids` and `shift_labels`, the label of each token's successor, are this rank's part,
        (rows, length / cp); `labels` and `attention_mask` stay whole: for who counts them, and for masks.

        Raises:
            UsageError: an input of which it is not known whether it is to be cut.
        """
        unknown = sorted(inputs.keys() - set(_CUT)) + [name for name, value in inputs.items() if value.ndim != 2]
        if unknown:
            raise UsageError(
                f"cp_size {self.ranks}: input {unknown[0]} is none of {', '.join(_CUT)}, of (batch, sequence): leave "
                "it out or set --cp_size 1"
            )
        if "labels" in inputs and "shift_labels" not in inputs:
            following = nn.functional.pad(inputs["labels"], (0, 1), value=_IGNORED)[:, 1:]
            inputs = inputs | {"shift_labels": following}
        tokens = inputs["input_ids"]
        chunk = tokens.shape[1] // (2 * self.ranks)
        for number in self._chunks:  # here, for in a layer that is computed again no tensor of this kind can be made
            seen = (number + 1) * chunk
            self._biases.setdefault((chunk, seen), causal_lower_right(chunk, seen))
        positions = own_positions(tokens.shape[1], self.rank, self.ranks, tokens.device)
        whole = {name: inputs[name] for name in ("labels", "attention_mask") if name in inputs}
        own = {name: inputs[name][:, positions] for name in ("input_ids", "shift_labels") if name in inputs}
        given = inputs.get("position_ids")
        own["position_ids"] = positions.expand(tokens.shape[0], -1) if given is None else given[:, positions]
        if given is not None and "attention_mask" not in inputs and find_packed_sequence_indices(given) is not None:
            own[_PACKED] = (
                given  # as transformers takes them: without a mask, positions that start again part sequences
            )
        if "attention_mask" in inputs and bool(inputs["attention_mask"].all()):
            del whole["attention_mask"]
        return whole | own

    def enter(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The model's keywords for a micro-batch, from its part of `cut`; to be called when a stage's forward starts.

        They hold a mask of the whole sequence, so that transformers takes its length for that of the keys, and does
        not look for packed sequences in positions of which this rank has a part.
        """
        inputs = dict(inputs)
        self._packed = inputs.pop(_PACKED, None)
        self._is_padded = "attention_mask" in inputs
        if not self._is_padded:
            rows, length = inputs["position_ids"].shape
            inputs["attention_mask"] = inputs["position_ids"].new_ones(rows, length * self.ranks)
        return inputs

    # --- attention --------------------------------------------------------------------------------------------------

    def whole(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's tokens along `dim` -> those of all ranks, in order; on the way back each rank gets the sum of
        what all ranks have of its tokens' gradient."""
        parts = DTensor.from_local(part, self.mesh, [Shard(dim)], run_check=False)
        gathered = parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return in_order(gathered, self.ranks, dim)

    def _attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, Any]:
        """(batch, heads, sequence / cp, width) each -> (batch, sequence / cp, heads, width)."""
        widths = [key.shape[-1], value.shape[-1]]
        both = self.whole(torch.cat([key, value], dim=-1), dim=2)
        key, value = both.split(widths, dim=-1)
        attend = self._implementation(module)
        if attention_mask is not None:
            return attend(module, query, key, value, attention_mask, **options)
        # Causal and nothing else: each of the two chunks sees what comes before it, and no mask need be in memory.
        chunk = query.shape[2] // 2
        outputs = []
        for own, number in zip(query.split(chunk, dim=2), self._chunks, strict=True):
            seen = (number + 1) * chunk
            bias = self._biases[chunk, seen]
            outputs.append(attend(module, own, key[:, :, :seen], value[:, :, :seen], bias, **options)[0])
        return torch.cat(outputs, dim=1), None

    def _implementation(self, module: nn.Module) -> Callable[..., tuple[torch.Tensor, Any]]:
        if self._original == "eager":  # each family has its own, under one name in the file of its attention
            return sys.modules[type(module).__module__].eager_attention_forward
        return AttentionInterface()[self._original]

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
        """The rows of a mask that are this rank's tokens', (batch, 1, sequence / cp, sequence); None where it is
        causal and nothing else. `mask_function` says of two places in the sequence whether one sees the other."""
        indices = find_packed_sequence_indices(self._packed) if self._packed is not None else None
        is_causal = allow_is_causal_skip and indices is None and not self._is_padded
        if self._original == "sdpa" and is_causal and (local_size is None or kv_length < local_size):
            return None
        if indices is not None:
            mask_function = packed_sequence_compatibility_function(mask_function, self._packed, indices)
        positions = own_positions(kv_length, self.rank, self.ranks, device)

        def of_own(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return mask_function(batch, head, positions[query], key)

        return AttentionMaskInterface()[self._original](
            kv_length=kv_length,
            mask_function=of_own,
            attention_mask=attention_mask if self._is_padded else None,
            allow_is_causal_skip=False,
            local_size=local_size,
            device=device,
            **options,
        )


def _own_config(model: PreTrainedModel) -> None:
    """Give `model` a copy of its config: what is set in it is not to reach another model that was made from it."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        if id(getattr(module, "config", None)) in copies:
            module.config = copies[id(module.config)]


def check_kernel(name: str | None, cp: int) -> str:
    """Make sure that an attention implementation takes masks that are made for it; returns its name.

    Raises:
        UsageError: it does not.
    """
    if name not in _KERNELS:
        raise UsageError(
            f"cp_size {cp} gathers keys around sdpa or eager attention, not {name}: give --attn_implementation sdpa"
        )
    return name


class ShiftedBefore:
    """A Trainer's label smoother for labels that have been shifted before sequences were cut.

    Args:
        smoother (`callable`): the one for whole sequences.
    """

    def __init__(self, smoother: Callable[..., torch.Tensor]) -> None:
        self._smoother = smoother

    def __call__(self, model_output: Any, labels: torch.Tensor, shift_labels: bool = False, **options: Any) -> Any:
        """The smoothed loss; nothing is shifted again."""
        return self._smoother(model_output, labels, shift_labels=False, **options)
