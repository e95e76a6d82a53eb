"""Counts what a model is trained on: tokens, padding, samples, and the sizes that its FLOPs depend on.

Sizes are read from the shapes of the inputs on the host. What only their values tell, such as the ones in an attention
mask, is added up on the device and read at the next log, so nothing waits for a GPU in between.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hfscale.core.logging import get_logger
from hfscale.core.replaying import is_replaying
from hfscale.trainer.batches import (
    NOT_PADDING,
    TOKENS,
    BatchEntry,
    packed_padding,
    runs_a_method,
)

logger = get_logger(__name__)

WORK_SIZES = 7
"""Length of `TokenCounter.work`."""
_MEDIA = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
_IGNORED_LABEL = -100


@dataclass(kw_only=True)
class TokenCounts:
    """Holds what one process has trained on in a part of the run."""

    tokens: int = 0
    """Positions of token sequences, padding included, of encoder and decoder."""
    unmasked: int = 0
    """Those of `tokens` in inputs that do not tell what is padding."""
    padding: int = 0
    """Those of `tokens` that are known to be padding."""
    samples: int = 0
    """Sequences, images or audio clips."""
    main_tokens: int = 0
    """`tokens` without those of the decoder of an encoder-decoder model."""
    attended: int = 0
    """Sum of the squared lengths of the sequences of `main_tokens`; divided by these, their mean length."""


class TokenCounter:
    """Counts what enters a model in training, once for each sequence that is trained on.

    It has hooks on every module through which a batch can enter the model. Of nested calls the outermost counts, so
    the count is the same with and without wrappers (DDP, FSDP, DeepSpeed, PEFT), and where a trainer calls the model
    without its wrapper or without its head. Forwards without gradients (generation, reference passes, evaluations)
    and forwards in evaluation mode do not count. A hook that `torch.compile` traces does nothing; then the compiled
    module counts.
    """

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens that this process has counted, padding included."""
        self.work = [0.0] * WORK_SIZES
        """What the FLOPs of the counted forwards depend on, linearly in most models. With n positions of length l in
        the main input and m positions of length k in the decoder, the sums of: samples, n, n l, m, m k, n k, and the
        size of images or audio that are given in addition to tokens."""
        self.inputs: tuple[str, ...] = ()
        """Names of the tensors in the last counted batch."""
        self._counts = TokenCounts()
        self._on_device: dict[str, torch.Tensor] = {}
        self._outermost: nn.Module | None = None
        self._is_counted = False
        self._warned = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.watcher: Callable[[Mapping[str, torch.Tensor]], None] | None = None
        """Called with the tensors of each batch that is counted."""

    def attach(self, entries: Sequence[BatchEntry]) -> None:
        """Count the batches that enter these modules from now on, instead of those of earlier modules.

        Args:
            entries (`Sequence[BatchEntry]`): the modules; `hfscale.trainer.batches.batch_entries` finds them.
        """
        self.detach()
        for entry in entries:
            enter = partial(self._enter, entry)
            self._handles.append(entry.module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(entry.module.register_forward_hook(self._leave, always_call=True))

    def detach(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.step_begin()

    def step_begin(self) -> None:
        """Forget a forward that has not returned, which happens if an exception was caught."""
        self._outermost = None
        self._is_counted = False

    @property
    def is_in_forward(self) -> bool:
        """Whether a counted forward is running."""
        return self._is_counted

    def take(self) -> TokenCounts:
        """Return the counts since the last call. It waits for the device."""
        counts, self._counts = self._counts, TokenCounts()
        sums = {name: int(value) for name, value in self._on_device.items()}
        self._on_device = {}
        counts.padding -= sums.get("real", 0)
        counts.samples += sums.get("documents", 0)
        counts.attended += sums.get("attended", 0)
        return counts

    # --- hooks -------------------------------------------------------------------------------------------------------

    def _enter(
        self, entry: BatchEntry, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.compiler.is_compiling() or self._outermost is not None or is_replaying():
            return
        if runs_a_method(args):
            return
        named = {**dict(zip(entry.names, args, strict=False)), **kwargs}
        nested = [] if any(name in named for name in TOKENS) else list(_dictionaries(args, kwargs))
        if nested and not entry.counts_nested:
            return
        self._outermost = module
        self._is_counted = module.training and torch.is_grad_enabled()
        if not self._is_counted:
            return
        batches = [
            {
                name: value
                for name, value in batch.items()
                if isinstance(value, torch.Tensor) and name != NOT_PADDING
            }
            for batch in nested or [named]
        ]
        for tensors in batches:
            self._count(entry, tensors)
            if self.watcher is not None:
                self.watcher(tensors)
        if not any(batches) and not self._warned:
            self._warned = True
            logger.warning(
                "tokens are not counted: %s gets no tensor by name and no dictionary of tensors, so throughput and "
                "MFU are not known",
                type(module).__name__,
            )

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_compiling() and self._outermost is module:
            self.step_begin()

    # --- one batch ---------------------------------------------------------------------------------------------------

    def _count(self, entry: BatchEntry, batch: Mapping[str, torch.Tensor]) -> None:
        self.inputs = tuple(name for name, value in batch.items() if value.ndim)
        media = sum(batch[name].numel() for name in _MEDIA if name in batch)
        shape = _token_shape(batch, entry.names)
        length = 0
        if shape is not None:
            samples = shape[0]
            length = shape[-1]
            tokens = shape.numel()
            samples = self._count_main(batch, shape)
        else:
            samples = next((value.shape[0] for value in batch.values() if value.ndim), 0)
            tokens = media or next((value.numel() for value in batch.values()), 0)
            length = tokens // samples if samples else 0
            media = 0
            self._counts.samples += samples
        decoder = (
            self._count_decoder(batch, shape) if entry.is_encoder_decoder else torch.Size((0, 0))
        )
        sizes = (
            samples,
            tokens,
            tokens * length,
            decoder.numel(),
            decoder.numel() * decoder[-1],
            tokens * decoder[-1],
            media,
        )
        for index, size in enumerate(sizes):
            self.work[index] += size

    def _count_main(self, batch: Mapping[str, torch.Tensor], shape: torch.Size) -> int:
        """Count the main token sequences; return their number, or the number of rows if they are packed."""
        tokens = shape.numel()
        rows = batch["offsets"].shape[0] if len(shape) == 1 and "offsets" in batch else shape[0]
        mask = batch.get("attention_mask")
        positions = batch.get("position_ids")
        self.tokens += tokens
        self._counts.tokens += tokens
        self._counts.main_tokens += tokens
        if mask is None and positions is not None and positions.shape == shape:
            # Packed sequences: each starts at position 0, and sum(2 p + 1) is its squared length.
            padding = packed_padding(positions)
            self._add("documents", ((positions == 0) & ~padding).sum())
            self._add("attended", 2 * positions.sum() + tokens)
            self._count_padding(tokens, ~padding)
            return rows
        self._counts.samples += rows
        self._counts.attended += tokens * shape[-1]
        self._count_padding(tokens, mask if mask is not None and mask.shape == shape else None)
        return rows

    def _count_decoder(
        self, batch: Mapping[str, torch.Tensor], main: torch.Size | None
    ) -> torch.Size:
        """Count the sequences of the decoder and return their shape."""
        labels = batch.get("labels")
        mask = batch.get("decoder_attention_mask")
        inputs = batch.get("decoder_input_ids")
        embeddings = batch.get("decoder_inputs_embeds")
        has_labels = labels is not None and labels.ndim == 2
        if inputs is not None:
            shape = inputs.shape
        elif embeddings is not None:
            shape = embeddings.shape[:-1]
        elif labels is not None and has_labels:
            shape = labels.shape
        else:
            # Classifiers give the decoder the same tokens
            shape = main if main is not None else torch.Size((0, 0))
            mask = batch.get("attention_mask") if mask is None else mask
        self.tokens += shape.numel()
        self._counts.tokens += shape.numel()
        if mask is None and labels is not None and has_labels:
            mask = labels != _IGNORED_LABEL
        self._count_padding(
            shape.numel(), mask if mask is not None and mask.shape == shape else None
        )
        return shape

    def _count_padding(self, tokens: int, mask: torch.Tensor | None) -> None:
        if mask is None:
            self._counts.unmasked += tokens
        else:
            self._counts.padding += tokens  # `take` subtracts those that are not padding
            self._add("real", (mask != 0).sum())

    def _add(self, name: str, value: torch.Tensor) -> None:
        total = self._on_device.get(name)
        self._on_device[name] = value if total is None else total + value


def _dictionaries(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return the dictionaries that batches are in, such as the features of sentence-transformers, at any depth.

    A positional argument is a batch if it is a dictionary; a keyword only if there are tokens in it, since models pass
    outputs of an encoder, which are dictionaries too.

    Args:
        args (`Sequence`): positional arguments of a forward.
        kwargs (`Mapping`): its keywords.
    """
    for value in args:
        yield from _innermost(value)
    for value in kwargs.values():
        yield from (batch for batch in _innermost(value) if any(name in batch for name in TOKENS))


def _innermost(value: Any) -> Iterator[Mapping[str, Any]]:
    """Return the dictionaries in a value that hold no other ones."""
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = [part for part in value.values() if isinstance(part, Mapping)]
        if not parts:
            yield value
    elif isinstance(value, list | tuple):
        parts = [part for part in value if isinstance(part, Mapping)]
    for part in parts:
        yield from _innermost(part)


def _token_shape(batch: Mapping[str, torch.Tensor], names: Sequence[str]) -> torch.Size | None:
    """Return the shape (..., sequence) of the main token sequences; None if the batch has no tokens."""
    if "input_ids" in batch:
        return batch["input_ids"].shape
    if "inputs_embeds" in batch:
        return batch["inputs_embeds"].shape[:-1]
    first = batch.get(names[0]) if names else None
    if first is not None and first.ndim == 2 and not first.is_floating_point():
        # A model of the user's own, whose forward has another name for its tokens
        return first.shape
    return None
