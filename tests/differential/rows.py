"""Builds the data of a program: rows, datasets, streams, collators and samplers."""

import random
from typing import Any

import numpy as np
import torch
from datasets import Dataset as HubDataset
from datasets import interleave_datasets
from kinds_transformers import PAD
from program import Program
from torch.utils.data import Dataset, IterableDataset, Sampler, WeightedRandomSampler, get_worker_info

LENGTH = 12
FIRST_WORD = 70
"""Smaller tokens are the numbers of rows."""
WORDS = 60
MODELS_OF_TOKENS = ("llama", "tied", "bert", "lora", "t5")
"""The others are models of images."""


def text_row(number: int, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Return a row of tokens, the first of which is its number."""
    generator = torch.Generator().manual_seed(number)
    words = torch.randint(FIRST_WORD, FIRST_WORD + WORDS, (length - 1,), generator=generator)
    tokens = torch.cat([torch.tensor([number + 1]), words])
    return {"input_ids": tokens, "labels": tokens.clone()}


def packed_row(number: int) -> dict[str, torch.Tensor]:
    """Return a row of two documents with their own positions."""
    half = LENGTH // 2
    return text_row(number) | {"position_ids": torch.arange(half).repeat(2)}


def image_row(number: int) -> dict[str, Any]:
    """Return an image, the first pixel of which has the number of the row."""
    pixels = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(number))
    pixels[0, 0, 0] = (number + 1) / 100
    return {"pixel_values": pixels, "labels": number % 3}


def rows_of(program: Program, count: int) -> list[dict[str, Any]]:
    """Return the rows of a program, before augmentation."""
    if program.model not in MODELS_OF_TOKENS:
        return [image_row(number) for number in range(count)]
    if program.data == "packed" and program.model == "llama":
        return [packed_row(number) for number in range(count)]
    if program.data == "padded" or program.sampler == "group_by_length":
        return [text_row(number, 5 + number % 7) for number in range(count)]
    return [text_row(number) for number in range(count)]


def row_ids(batch: Any, *, numbered: bool) -> list[Any]:
    """Return what identifies each row of a batch.

    Args:
        batch (`Any`): what the Trainer's loader yields.
        numbered (`bool`): whether the first token of a row is its number, as `text_row` makes it.
    """
    if isinstance(batch, list):  # GRPO and its kind: rows that no collator has touched
        return [str(row["prompt"]) for row in batch]
    if "pixel_values" in batch:
        return [round(float(value) * 100) for value in batch["pixel_values"][:, 0, 0, 0]]
    names = [name for name in batch if name.endswith("input_ids")]
    if not names:  # texts that no tokenizer has touched
        texts = [values for values in batch.values() if isinstance(values, list | tuple)]
        return [" ".join(map(str, row)) for row in zip(*texts, strict=True)]
    if numbered:
        return batch["input_ids"][:, 0].tolist()
    tokens = batch[sorted(names)[0]]
    return [" ".join(str(token) for token in row.tolist() if token != PAD) for row in tokens]


def draw_uniform(source: Any, shape: tuple[int, ...], generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw numbers from a generator that belongs to the process, by its name, or from the given one."""
    if isinstance(source, np.random.Generator):
        return torch.from_numpy(source.random(shape))
    if isinstance(source, random.Random):
        count = int(np.prod(shape))
        return torch.tensor([source.random() for _ in range(count)]).reshape(shape)
    if source == "torch":
        return torch.rand(shape)
    if source == "numpy":
        return torch.from_numpy(np.random.rand(*shape))
    if source == "python":
        count = int(np.prod(shape))
        return torch.tensor([random.random() for _ in range(count)]).reshape(shape)
    return torch.rand(shape, generator=generator)


def augmented(row: dict[str, Any], source: Any) -> dict[str, Any]:
    """Change a row with random numbers."""
    if source == "none":
        return dict(row)
    if "pixel_values" in row:
        pixels = row["pixel_values"] + 0.1 * draw_uniform(source, (3, 16, 16)).float()
        pixels[0, 0, 0] = row["pixel_values"][0, 0, 0]
        return {"pixel_values": pixels, "labels": row["labels"]}
    tokens = torch.as_tensor(row["input_ids"]).clone()
    is_other = draw_uniform(source, tuple(tokens.shape)) < 0.2
    is_other[0] = False
    tokens[is_other] = FIRST_WORD
    return dict(row) | {"input_ids": tokens}


class Rows(Dataset):
    """Rows in memory, augmented when they are read: also by a generator of the dataset's own, or by a level."""

    def __init__(self, rows: list[dict[str, Any]], augmentation: str = "none") -> None:
        own = {"own_numpy": np.random.default_rng(3), "own_python": random.Random(3)}
        self.rows = rows
        self.augmentation: Any = own.get(augmentation, augmentation)
        self.level = 0
        """Of a curriculum that follows the steps; a callback moves it."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.augmentation == "harder":
            return self._at_level(self.rows[index])
        return augmented(self.rows[index], self.augmentation)

    def _at_level(self, row: dict[str, Any]) -> dict[str, Any]:
        name, value = ("pixel_values", self.level / 10) if "pixel_values" in row else ("input_ids", self.level)
        changed = torch.as_tensor(row[name]).clone()
        changed[1:3] = value if name == "pixel_values" else FIRST_WORD + value % WORDS
        return dict(row) | {name: changed}


class Stream(IterableDataset):
    """Rows in order, each worker its share."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return map(dict, self.rows[first::step])


class RandomStream(IterableDataset):
    """Rows in an order that each pass draws from the global generator of torch, in the process that reads them."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self):
        return iter([dict(self.rows[number]) for number in torch.randperm(len(self.rows)).tolist()])


MODULE_GENERATOR = np.random.default_rng(8)


class Collator:
    """Pads, and masks tokens at random."""

    def __init__(self, kind: str) -> None:
        self.source: Any = kind.removesuffix("_mask")
        self.generator = torch.Generator().manual_seed(5)
        self.batches = 0

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = {}
        self.batches += 1
        for name in rows[0]:
            values = [torch.as_tensor(row[name]) for row in rows]
            if name in ("input_ids", "labels", "position_ids") and values[0].ndim:
                fill = -100 if name == "labels" else PAD
                batch[name] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)
                continue
            batch[name] = torch.stack(values)
        if self.source == "default" or "input_ids" not in batch:
            return batch
        tokens = batch["input_ids"]
        share = 0.02 * self.batches if self.source == "counting" else 0.3
        is_masked = (draw_uniform(self.source, tuple(tokens.shape), self.generator) < share) & (tokens != PAD)
        is_masked[:, 0] = False
        batch["input_ids"] = tokens.masked_fill(is_masked, FIRST_WORD)
        return batch


def module_collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Mask with a generator of the module."""
    return masked(Collator("default")(rows), MODULE_GENERATOR)


def closure_collate() -> Any:
    """Return a function that masks with a generator that only it knows."""
    generator = random.Random(2)

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return masked(Collator("default")(rows), generator)

    return collate


def masked(batch: dict[str, torch.Tensor], generator: Any) -> dict[str, torch.Tensor]:
    """Mask tokens of a batch at random."""
    if "input_ids" not in batch:
        return batch
    tokens = batch["input_ids"]
    is_masked = (draw_uniform(generator, tuple(tokens.shape)) < 0.3) & (tokens != PAD)
    is_masked[:, 0] = False
    return batch | {"input_ids": tokens.masked_fill(is_masked, FIRST_WORD)}


def collator_of(kind: str) -> Any:
    """Return a user's collator."""
    if kind == "module_mask":
        return module_collate
    return closure_collate() if kind == "closure_mask" else Collator(kind)


class OwnBatches:
    """A batch sampler: neighbours share a batch, and the batches come in an order of its own.

    Args:
        size (`int`): number of rows.
        batch_size (`int`): rows of a batch.
    """

    drop_last = False

    def __init__(self, size: int, batch_size: int) -> None:
        self.size = size
        self.batch_size = batch_size
        self.generator = random.Random(0)

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)

    def __iter__(self):
        rows = list(range(self.size))
        batches = [rows[first : first + self.batch_size] for first in range(0, self.size, self.batch_size)]
        self.generator.shuffle(batches)
        return iter(batches)


class EpochBatches(OwnBatches):
    """A batch sampler that packs its batches anew once it is told the epoch."""

    def __init__(self, size: int, batch_size: int) -> None:
        super().__init__(size, batch_size)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(epoch)).tolist()
        self.batches = [order[first : first + self.batch_size] for first in range(0, self.size, self.batch_size)]

    def __iter__(self):
        return iter(self.batches)


class Ordered(Sampler):
    """A sampler of the kinds that people write.

    Args:
        kind (`str`): `set_epoch`, `numpy_curriculum`, `python_shuffle` or `counts_passes`.
        size (`int`): number of rows.
    """

    def __init__(self, kind: str, size: int) -> None:
        self.kind = kind
        self.size = size
        self.epoch = 0
        self.passes = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self):
        if self.kind == "numpy_curriculum":
            return iter((np.arange(self.size) + np.random.uniform(0, 8, self.size)).argsort().tolist())
        if self.kind == "python_shuffle":
            order = list(range(self.size))
            random.shuffle(order)
            return iter(order)
        self.passes += 1
        seed = self.epoch if self.kind == "set_epoch" else self.passes
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(seed)).tolist())


class OrderedByEpoch(Ordered):
    """A sampler that is told the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def sampler_of(kind: str, size: int) -> Sampler:
    """Return a user's sampler."""
    if kind.startswith("weighted"):
        generator = torch.Generator().manual_seed(7) if kind == "weighted_generator" else None
        return WeightedRandomSampler([1.0 + row % 5 for row in range(size)], size, generator=generator)
    return OrderedByEpoch(kind, size) if kind == "set_epoch" else Ordered(kind, size)


def data_of(program: Program) -> Any:
    """Return the training data."""
    rows = rows_of(program, program.rows)
    if program.data == "stream":
        return Stream(rows)
    if program.data == "random_stream":
        return RandomStream(rows)
    if program.data in ("datasets", "shuffled_stream", "mixed_stream"):
        plain = [{name: torch.as_tensor(value).tolist() for name, value in row.items()} for row in rows]
        dataset = HubDataset.from_list(plain)
        if program.data == "shuffled_stream":
            return dataset.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=8).with_format("torch")
        if program.data == "mixed_stream":
            half = len(dataset) // 2
            parts = [dataset.select(range(half)), dataset.select(range(half, len(dataset)))]
            streams = [part.to_iterable_dataset() for part in parts]
            mixed = interleave_datasets(streams, probabilities=[0.7, 0.3], seed=5, stopping_strategy="all_exhausted")
            return mixed.with_format("torch")
        dataset = dataset.with_format("torch")
        if program.augmentation != "none":
            return dataset.with_transform(lambda batch: augmented_batch(batch, program.augmentation))
        return dataset
    return Rows(rows, program.augmentation)


def augmented_batch(batch: dict[str, list[Any]], source: str) -> dict[str, list[Any]]:
    """Augment the columns of some rows, as `with_transform` passes them."""
    columns = list(batch)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    rows = [{name: torch.as_tensor(value) for name, value in row.items()} for row in rows]
    changed = [augmented(row, source) for row in rows]
    return {name: [row[name] for row in changed] for name in columns}
