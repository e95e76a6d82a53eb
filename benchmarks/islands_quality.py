"""Final loss of DiLoCo beside data-parallel training at equal tokens, on the embedded corpus.

The islands of a run are simulated one after another in this process, with the package's encoding of the exchange: what
is measured is the quality of the algorithm, without any link. Every step uses the same rows in all variants: data
parallelism averages their gradients, an island trains on its part of them.
"""

import copy
import math
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from transformers import LlamaConfig, LlamaForCausalLM

from hfscale.facts.compression import Compression
from hfscale.islands.outer import OUTER_LR, OUTER_MOMENTUM, OuterOptimizer
from hfscale.recipe.corpus import read_sources

BLOCK = 64
ROWS = 4
"""Rows per island and step."""
WIDTH, LAYERS = 64, 2
LEARNING_RATE = 1e-3
WARM_STEPS, STEPS = 500, 1500
"""Steps in one place, which all variants share, and after them."""
VARIANTS: dict[str, tuple[Compression | None, int]] = {  # compression, fragments
    "one_island": (None, 1),
    "diloco_32_bits": (Compression(), 1),
    "diloco_32_bits_2_fragments": (Compression(), 2),
    "diloco_4_bits": (Compression(bits=4), 1),
    "diloco_top_k_2_bits": (Compression(bits=2, density=64 / 4096), 1),
}


def quality(
    variants: dict[str, tuple[Compression | None, int]] = VARIANTS,
    *,
    islands: int = 2,
    inner_steps: int = 100,
    seeds: int = 3,
) -> dict[str, Any]:
    """Trains every variant with every seed.

    Args:
        variants (`dict`): compression and number of fragments by name.
        islands (`int`): number of islands.
        inner_steps (`int`): steps between two exchanges, H.
        seeds (`int`): number of seeds; a seed determines the initial weights and the order of the rows.

    Returns:
        `dict`: by variant the evaluation losses, and their difference from those of "ddp", relative, as a mean.
    """
    torch.set_num_threads(1)
    rows, held_out = read_rows("train"), read_rows("validation")[:1024]
    losses: dict[str, list[float]] = {name: [] for name in ("warm_start", "ddp", *variants)}
    for seed in range(seeds):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        used = rows[order[: (WARM_STEPS + STEPS) * islands * ROWS]]
        batches = used.view(WARM_STEPS + STEPS, islands, ROWS, BLOCK)
        together = batches.view(WARM_STEPS + STEPS, 1, islands * ROWS, BLOCK)
        torch.manual_seed(seed)
        ddp = [_Island(make_model())]
        _train(ddp, together[:WARM_STEPS])
        losses["warm_start"].append(_evaluate(ddp[0].model, held_out))
        warm = copy.deepcopy(ddp[0])
        _train(ddp, together[WARM_STEPS:])
        losses["ddp"].append(_evaluate(ddp[0].model, held_out))
        for name, (compression, fragments) in variants.items():
            trained = [copy.deepcopy(warm) for _ in range(1 if compression is None else islands)]
            exchange = None if compression is None else _Exchange(trained, compression, inner_steps, fragments)
            _train(trained, batches[WARM_STEPS:, : len(trained)], exchange)
            losses[name].append(_evaluate(trained[0].model, held_out))
        print({name: round(found[-1], 4) for name, found in losses.items()}, flush=True)
    base = losses["ddp"]
    return {
        name: {
            "losses": found,
            "relative_to_ddp": sum(a / b - 1 for a, b in zip(found, base, strict=True)) / len(base),
        }
        for name, found in losses.items()
    }


def read_rows(split: str) -> Tensor:
    """Returns the corpus as rows of `BLOCK` tokens, which are bytes: a small vocabulary makes the runs short."""
    tokens = b"".join(record["text"].encode() for record in read_sources(split))
    return torch.frombuffer(bytearray(tokens[: len(tokens) // BLOCK * BLOCK]), dtype=torch.uint8).view(-1, BLOCK)


def make_model(layers: int = LAYERS) -> Any:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


class _Island:
    """A model with its optimizer and schedule; a deep copy continues as the original would."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
        self.steps = 0

    def step(self, rows: Tensor) -> None:
        """Take a step on rows of bytes."""
        progress = self.steps / (WARM_STEPS + STEPS)  # of a cosine schedule, after 50 steps of warm-up
        rate = LEARNING_RATE * min(1.0, (self.steps + 1) / 50) * (1 + math.cos(math.pi * progress)) / 2
        self.optimizer.param_groups[0]["lr"] = rate
        self.model(input_ids=rows.long(), labels=rows.long()).loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1


def _train(islands: list[_Island], batches: Tensor, exchange: "_Exchange | None" = None) -> None:
    """Trains on batches of the shape [steps, islands, rows, BLOCK]."""
    for step, rows in enumerate(batches, 1):
        for island, own in zip(islands, rows, strict=True):
            island.step(own)
        if exchange is not None:
            exchange(step, is_last=step == len(batches))


class _Exchange:
    """The outer step: the published constants of DiLoCo (arXiv 2311.08105), or with top-k those of SparseLoCo."""

    def __init__(self, islands: list[_Island], compression: Compression, inner_steps: int, fragments: int) -> None:
        self._inner_steps = inner_steps
        self._fragments = fragments
        lr, momentum = (OUTER_LR, OUTER_MOMENTUM) if compression.density is None else (1.0, 0.0)
        self._members = [_fragments_of(island.model, fragments) for island in islands]
        vectors = [parameters_to_vector(fragment).detach() for fragment in self._members[0]]
        sizes = [vector.numel() for vector in vectors]
        flags: dict[str, Any] = {"lr": lr, "momentum": momentum, "compression": compression, "sizes": sizes}
        self._outer = [OuterOptimizer(torch.cat(vectors), **flags) for _ in islands]

    @torch.no_grad()
    def __call__(self, step: int, *, is_last: bool) -> None:
        """Exchange the fragment that is due after a step, if one is."""
        due, before = (number * self._fragments // self._inner_steps for number in (step, step - 1))
        if due == before and not is_last:
            return
        fragment = None if is_last else (due - 1) % self._fragments
        parameters = [[*chain(*one)] if fragment is None else one[fragment] for one in self._members]
        pairs = zip(self._outer, parameters, strict=True)
        sent = [outer.pseudo_gradient(parameters_to_vector(own), fragment) for outer, own in pairs]
        for outer, own in zip(self._outer, parameters, strict=True):
            outer.step(outer.decode([bytearray(payload.numpy()) for payload in sent]))
            # A copy: the parameters become views of the vector, and training must not change the anchor.
            vector_to_parameters(outer.anchor_of(fragment).clone(), own)


def _fragments_of(model: Any, fragments: int) -> list[list[nn.Parameter]]:
    """Returns the parameters of each fragment, as `DiLoCoCallback` divides them."""
    members: list[list[nn.Parameter]] = [[] for _ in range(fragments)]
    for name, parameter in model.named_parameters():
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        members[numbers[0] % fragments if numbers else -1].append(parameter)
    return members


@torch.no_grad()
def _evaluate(model: Any, rows: Tensor) -> float:
    losses = [model(input_ids=part, labels=part).loss.item() for part in rows.long().split(64)]
    return sum(losses) / len(losses)
