"""Where a causal language model keeps its embeddings, layers and head, found by looking, not by a list of families."""

import re
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from hfscale.errors import UnsupportedModelError


@dataclass(frozen=True, kw_only=True)
class ModelStructure:
    """Module names within a causal language model, in the order in which a token passes them."""

    decoder: str
    """The module that holds the layers, such as `model` or `model.decoder`."""
    token_embedding: str
    """The table of token embeddings."""
    before: tuple[str, ...]
    """What else stands before the layers: learned positions, a norm of the embeddings."""
    layers: str
    """The list of layers."""
    depth: int
    """How many layers it has."""
    after: tuple[str, ...]
    """What follows the layers: the final norm, the head."""
    head: str
    """The module whose `weight` turns hidden states into logits; one of `after`."""
    tied: bool
    """Whether head and token embedding share their weight."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelStructure":
        """Look at a whole `model`, on any device.

        Raises:
            UnsupportedModelError: it has no stack of decoder layers between embeddings and a head.
        """
        names = {id(module): name for name, module in model.named_modules()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        depth = model.config.get_text_config().num_hidden_layers
        stacks = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == depth and name.count(".") <= 2
        ]
        if embedding is None or head is None or id(head) not in names or len(stacks) != 1 or "." not in stacks[0][0]:
            raise UnsupportedModelError(
                f"{type(model).__name__} is not a stack of {depth} layers between token embeddings and a head: it "
                "cannot be cut into pipeline stages; use pp_size 1"
            )
        layers = stacks[0][0]
        decoder = layers.rpartition(".")[0]
        before, after = [], []
        passed = False
        for name, child in model.get_submodule(decoder).named_children():
            full = f"{decoder}.{name}"
            passed = passed or full == layers
            acts = any(True for _ in child.parameters()) or (passed and "Norm" in type(child).__name__)
            if full != layers and child is not embedding and acts:
                (after if passed and not _is_embedding(child) else before).append(full)
        outer = decoder.split(".")[0]
        after += [
            name for name, child in model.named_children() if name != outer and any(True for _ in child.parameters())
        ]
        return cls(
            decoder=decoder,
            token_embedding=names[id(embedding)],
            before=tuple(before),
            layers=layers,
            depth=depth,
            after=tuple(after),
            head=names[id(head)],
            tied=getattr(embedding, "weight", None) is getattr(head, "weight", None),
        )

    def layer_of(self, name: str) -> int | None:
        """The number of the layer that a parameter or module belongs to; None outside the layers."""
        match = re.match(rf"{re.escape(self.layers)}\.(\d+)(\.|$)", name)
        return int(match[1]) if match else None


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)
