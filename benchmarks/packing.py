"""Measures what the packing of conversations saves: padding and tokens per second, and that the loss stays the same.

Lengths are drawn from a log-normal distribution with a median of 1/8 of the sequence and sigma 0.9, cut at the
sequence: many short conversations and a few long ones. The same documents are trained on with `none` (each padded to
the longest of its batch), `concat` and `bestfit` (attention cut between documents), in batches of about as many real
tokens. The three take turns, so that other work on the machine affects all of them; ratios to `none` are reported.

The second part trains two equal models with AdamW, one on packed rows and one on the documents of the same rows, one
by one, and reports the largest difference of the loss per trained token.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hfscale.parallel.weights import build_model
from hfscale.recipe import corpus
from hfscale.recipe.document_attention import cut_attention
from hfscale.recipe.packing import Document, RowCollator, pack_rows

BLOCK = 1024
ROWS = 2
"""Rows of a micro-batch of `bestfit` and `concat`."""
DOCUMENTS = 600
TURNS = 12
CURVE_BLOCK, CURVE_STEPS = 128, 60
MODES = ("none", "concat", "bestfit")

Batch = dict[str, torch.Tensor]


def measure() -> dict[str, Any]:
    """Measure in one process, on one device."""
    torch.manual_seed(0)
    return {"summary": _throughput() | {"loss_curve_max_difference": loss_curve_difference()}}


def _documents(number: int, block: int, vocabulary: int) -> list[Document]:
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(np.log(block / 8), 0.9, number).astype(int), 8, block)
    documents = []
    for length in lengths:
        tokens = generator.integers(3, vocabulary, length).tolist()
        prompt = length // 3
        documents.append((tokens, [-100] * prompt + tokens[prompt:]))
    return documents


def _throughput() -> dict[str, Any]:
    tokenizer = corpus.default_tokenizer()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    documents = _documents(DOCUMENTS, BLOCK, len(tokenizer))
    model = build_model(corpus.default_config(tokenizer), seed=0, dtype=torch.float32).to(device)
    cut_attention(model)
    mean = sum(len(tokens) for tokens, _ in documents) / len(documents)
    batches: dict[str, list[Batch]] = {}
    for mode in MODES:
        size = round(ROWS * BLOCK / mean) if mode == "none" else ROWS
        batches[mode] = list(_batches(documents, mode, size, RowCollator(tokenizer)))
    real = {mode: [_real_tokens(batch) for batch in found] for mode, found in batches.items()}
    padding = {
        mode: 1 - sum(real[mode]) / sum(batch["input_ids"].numel() for batch in batches[mode]) for mode in MODES
    }
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    for turn in range(TURNS + 1):
        for mode in MODES:
            batch = batches[mode][turn % len(batches[mode])]
            begun = time.perf_counter()
            model.zero_grad()
            model(**{name: value.to(device) for name, value in batch.items()}, use_cache=False).loss.backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first turn warms up
                rates[mode].append(real[mode][turn % len(batches[mode])] / (time.perf_counter() - begun))
    return {
        "block_size": BLOCK,
        "mean_length": round(mean, 1),
        "padding_fraction": {mode: round(share, 4) for mode, share in padding.items()},
        "real_tokens_per_s": {mode: round(statistics.median(found)) for mode, found in rates.items()},
        "rate_over_none": {
            mode: round(statistics.median(a / b for a, b in zip(rates[mode], rates["none"], strict=True)), 3)
            for mode in MODES[1:]
        },
    }


def _batches(documents: Sequence[Document], mode: str, size: int, collate: RowCollator) -> Iterator[Batch]:
    columns = pack_rows(documents, packing=mode, block_size=BLOCK, cut=mode == "bestfit", pad=0)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    order = np.random.default_rng(1).permutation(len(rows))
    for start in range(0, len(rows) - size + 1, size):
        yield collate([rows[number] for number in order[start : start + size]])


def _real_tokens(batch: Batch) -> int:
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    if "position_ids" not in batch:
        return batch["input_ids"].numel()
    starts = batch["position_ids"] == 0
    padding = starts & torch.nn.functional.pad(starts[:, 1:], (0, 1), value=True)
    return int((~padding).sum())


def loss_curve_difference() -> float:
    """Train on packed rows and on their documents alone, and return the largest difference of a step's loss."""
    tokenizer = corpus.default_tokenizer()
    documents = _documents(20 * CURVE_STEPS, CURVE_BLOCK, len(tokenizer))
    columns = pack_rows(documents, packing="bestfit", block_size=CURVE_BLOCK, cut=True, pad=0)
    collate = RowCollator(tokenizer)
    losses: list[list[float]] = []
    for is_packed in (True, False):
        config = corpus.default_config(tokenizer)
        config.update({"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2})
        model = build_model(config, seed=0, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses.append([])
        for step in range(CURVE_STEPS):
            rows = [{name: values[2 * step + number] for name, values in columns.items()} for number in range(2)]
            trained = sum(label != -100 for row in rows for label in row["labels"])
            parts = rows if is_packed else [part for row in rows for part in _split(row)]
            total = 0.0
            optimizer.zero_grad()
            for part in [collate(parts)] if is_packed else [collate([part]) for part in parts]:
                loss = model(**part, use_cache=False, num_items_in_batch=trained).loss
                loss.backward()
                total += loss.item()
            optimizer.step()
            losses[-1].append(total)
    return max(abs(one - other) for one, other in zip(*losses, strict=True))


def _split(row: dict[str, list[int]]) -> Iterator[dict[str, list[int]]]:
    """Yield the documents of a row, without positions and padding."""
    starts = [place for place, position in enumerate(row["position_ids"]) if position == 0]
    for start, end in zip(starts, [*starts[1:], len(row["position_ids"])], strict=True):
        if end - start > 1:
            yield {name: row[name][start:end] for name in ("input_ids", "labels")}
