"""Recipes tell transformers whether a batch holds several documents, so that it does not wait for the GPU to find out.

transformers looks in each forward pass whether the positions of a batch without attention mask restart, and reads the
answer from the device: no kernel of a micro-batch can be launched before all those of the one before it have ended.
A recipe knows the answer: a model that numbers the tokens itself numbers each row from 0 on, and rows have positions
of their own because they hold several documents.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel, masking_utils

from hfscale.core.attributes import replaced
from hfscale.recipe.arguments import RecipeTrainingMixin
from hfscale.recipe.document_attention import NoMaskError, is_dense, run_until_mask
from hfscale.trainer.attention import attention_implementation
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.tensors import unsharded_twin

if TYPE_CHECKING:
    from transformers import Trainer

_FIND = "find_packed_sequence_indices"


@contextmanager
def documents_are_known(trainer: "Trainer") -> Iterator[None]:
    """Let the forward passes of a Trainer of the recipes read no positions from the device, where they need not.

    Models that are compiled as a whole do not read them, and pipeline stages get positions of their own.

    Args:
        trainer (`Trainer`): its model is called in the `with` block, and has its attention implementation.
    """
    args = trainer.args
    model: Any = trainer.model
    base = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    strategy = Strategy.of(trainer)
    if (
        not isinstance(args, RecipeTrainingMixin)
        or strategy.runs_stages
        or strategy.combination().compile_full
        or not hasattr(masking_utils, _FIND)
        or not _numbers_tokens(base)
    ):
        yield
        return
    # A dense mask makes torch take another kernel than no mask does: there transformers looks as before
    are_cut = args.cuts_attention and not is_dense(str(attention_implementation(base.config)))
    known = _KnownDocuments(are_cut=are_cut)
    decoder = base.base_model
    hooks = (
        decoder.register_forward_pre_hook(known.expect, with_kwargs=True),
        decoder.register_forward_hook(known.forget, always_call=True),
    )
    try:
        with replaced(masking_utils, _FIND, known.find):
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _KnownDocuments:
    """What is known of the batch whose forward pass is running."""

    def __init__(self, *, are_cut: bool) -> None:
        self._are_cut = are_cut
        self._look = getattr(masking_utils, _FIND)
        self._is_one: bool | None = None  # None: it is not known

    def expect(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note whether the batch has positions: a forward pre-hook of the decoder."""
        self._is_one = None
        if len(args) > 1:  # positions may be among them
            return
        if kwargs.get("position_ids") is None:
            self._is_one = True
        elif self._are_cut:
            self._is_one = False

    def forget(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Know nothing of the masks of other models: a forward hook of the decoder."""
        self._is_one = None

    def find(self, position_ids: torch.Tensor) -> torch.Tensor | None:
        """Return the number of the document of each token, (rows, sequence); None if each row is one document.

        It stands for the function of transformers.
        """
        if self._is_one is None:
            found: torch.Tensor | None = self._look(position_ids)
            return found
        if self._is_one:
            return None
        begins = position_ids.diff(dim=-1) != 1
        return nn.functional.pad(begins.cumsum(-1), (1, 0))


class _Positions(Exception):  # noqa: N818 (not an error)
    """Ends a forward with the positions that the decoder has made."""

    def __init__(self, positions: torch.Tensor) -> None:
        super().__init__()
        self.positions = positions


def _numbers_tokens(model: PreTrainedModel) -> bool:
    """Return whether the decoder of a model numbers the tokens of a row 0, 1, 2 …, whatever they are."""
    config = model.config
    if config.get_text_config() is not config:  # positions of images are others
        return False

    def end(positions: torch.Tensor) -> None:
        raise _Positions(positions)

    def at_mask(**_: Any) -> None:
        raise NoMaskError  # it was made without the positions

    padding = config.pad_token_id or 0
    ids = torch.tensor([[0, 0, 0], [padding, padding, 0]])
    try:
        with replaced(masking_utils, _FIND, end):
            run_until_mask(unsharded_twin(model), {"input_ids": ids}, at_mask)
    except _Positions as made:
        return bool((made.positions == torch.arange(3)).all())
    except Exception:  # whatever a model raises for inputs that it does not expect
        return False
    return False
