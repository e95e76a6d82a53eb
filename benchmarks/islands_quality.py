"""Final loss of DiLoCo beside data-parallel training at equal tokens, on the embedded corpus.

The islands of a run are simulated one after another in this process, with the package's encoding of the exchange: what
is measured is the quality of the algorithm, without any link. Every step uses the same rows in all variants: data
parallelism averages their gradients, an island trains on its part of them.
"""

import copy
import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from hfscale.facts.compression import Compression
from hfscale.islands.codec import decode, encode_with_feedback
from hfscale.recipe.corpus import read_sources

BLOCK = 128
ROWS = 4
"""Rows per island and step."""
WIDTH, LAYERS = 64, 2
LEARNING_RATE = 2e-3
VARIANTS: dict[str, Compression | None] = {
    "ddp": None,
    "diloco_32_bits": Compression(),
    "diloco_8_bits": Compression(bits=8),
    "diloco_4_bits": Compression(bits=4),
    "diloco_top_k_2_bits": Compression(bits=2, density=64 / 4096),
}


def quality(*, islands: int = 2, inner_steps: int = 100, steps: int = 2000, seeds: int = 3) -> dict[str, Any]:
    """Trains every variant with every seed.

    Args:
        islands (`int`): number of islands.
        inner_steps (`int`): steps between two exchanges, H.
        steps (`int`): steps of each run.
        seeds (`int`): number of seeds; a seed determines the initial weights and the order of the rows.

    Returns:
        `dict`: by variant the evaluation losses, and their difference from those of "ddp", relative, as a mean.
    """
    rows, held_out = _rows("train"), _rows("validation")[:512]
    losses: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for seed, (name, compression) in itertools.product(range(seeds), VARIANTS.items()):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        order = order.repeat(math.ceil(steps * islands * ROWS / len(rows)))
        batches = rows[order[: steps * islands * ROWS]].view(steps, islands, ROWS, BLOCK)
        if compression is None:
            batches = batches.view(steps, 1, islands * ROWS, BLOCK)
        model = _train(batches, seed, inner_steps, compression)
        losses[name].append(_evaluate(model, held_out))
        print(f"seed {seed} {name}: {losses[name][-1]:.4f}", flush=True)
    base = losses["ddp"]
    return {
        name: {
            "losses": found,
            "relative_to_ddp": sum(a / b - 1 for a, b in zip(found, base, strict=True)) / len(base),
        }
        for name, found in losses.items()
    }


def _rows(split: str) -> Tensor:
    """Returns the corpus as rows of `BLOCK` tokens, which are bytes: a small vocabulary makes the runs short."""
    tokens = b"".join(record["text"].encode() for record in read_sources(split))
    return torch.frombuffer(bytearray(tokens[: len(tokens) // BLOCK * BLOCK]), dtype=torch.uint8).view(-1, BLOCK)


def _train(batches: Tensor, seed: int, inner_steps: int, compression: Compression | None) -> nn.Module:
    """Trains on batches of the shape [steps, islands, rows, BLOCK]; returns the model after the last step."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    shared = LlamaForCausalLM(config)
    steps, islands = batches.shape[:2]
    models = [copy.deepcopy(shared) for _ in range(islands)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1) for model in models]
    schedules = [get_cosine_schedule_with_warmup(optimizer, 50, steps) for optimizer in optimizers]
    exchange = None if compression is None else _Exchange(models, compression)
    for step in range(steps):
        for model, optimizer, schedule, row in zip(models, optimizers, schedules, batches[step].long(), strict=True):
            model(input_ids=row, labels=row).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if exchange is not None and (step + 1) % inner_steps == 0:
            exchange(models)
    return models[0]


class _Exchange:
    """The outer step: the published constants of DiLoCo (arXiv 2311.08105), or with top-k those of SparseLoCo."""

    def __init__(self, models: list[Any], compression: Compression) -> None:
        self.compression = compression
        self.anchor = nn.Parameter(parameters_to_vector(models[0].parameters()).detach().clone())
        self.residuals = [torch.zeros_like(self.anchor.data) for _ in models]
        if compression.density is None:
            self.optimizer = torch.optim.SGD([self.anchor], lr=0.7, momentum=0.9, nesterov=True)
        else:
            self.optimizer = torch.optim.SGD([self.anchor], lr=1.0)

    @torch.no_grad()
    def __call__(self, models: list[Any]) -> None:
        moved = [self.anchor.data - parameters_to_vector(model.parameters()) for model in models]
        pairs = zip(moved, self.residuals, strict=True)
        sent = [encode_with_feedback(change, residual, self.compression) for change, residual in pairs]
        decoded = [decode(payload, self.anchor.numel(), self.compression) for payload in sent]
        self.anchor.grad = torch.stack(decoded).mean(dim=0)
        self.optimizer.step()
        for model in models:
            vector_to_parameters(self.anchor.data, model.parameters())


@torch.no_grad()
def _evaluate(model: Any, rows: Tensor) -> float:
    losses = [model(input_ids=part, labels=part).loss.item() for part in rows.long().split(32)]
    return sum(losses) / len(losses)
