"""Builds what a program consists of: models, data, samplers, collators, optimizers and Trainers."""

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset as HubDataset
from datasets import interleave_datasets
from kinds_sentence_transformers import KINDS as SENTENCE_KINDS
from kinds_transformers import LLAMA, PAD, VISION, bert, t5
from kinds_trl import asked, builder, completed, count_words, labelled, preferred
from peft import LoraConfig, get_peft_model
from program import Program
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler, get_worker_info
from transformers import Trainer, TrainerCallback

from hfscale import initialize_at_width

LENGTH = 12
FIRST_WORD = 70
"""Smaller tokens are the numbers of rows."""
WORDS = 60
RATE = 1e-2
BASE_WIDTH = 16
"""Half of the width of the Llama."""
EVAL_ROWS = 8


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
    if program.model in IMAGE_MODELS:
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


def draw_uniform(source: str, shape: tuple[int, ...], generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw numbers from a generator that belongs to the process, or from the given one."""
    if source == "torch":
        return torch.rand(shape)
    if source == "numpy":
        return torch.from_numpy(np.random.rand(*shape))
    if source == "python":
        count = int(np.prod(shape))
        return torch.tensor([random.random() for _ in range(count)]).reshape(shape)
    return torch.rand(shape, generator=generator)


def augmented(row: dict[str, Any], source: str) -> dict[str, Any]:
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
    """Rows in memory, augmented when they are read."""

    def __init__(self, rows: list[dict[str, Any]], augmentation: str = "none") -> None:
        self.rows = rows
        self.augmentation = augmentation

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return augmented(self.rows[index], self.augmentation)


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


class Collator:
    """Pads, and masks tokens at random."""

    def __init__(self, kind: str) -> None:
        self.source = kind.removesuffix("_mask")
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


class OwnModel(torch.nn.Module):
    """A user's module on images.

    Args:
        kind (`str`): `batch_norm`; `running_mean`, whose forward pass replaces a buffer; `counter`, which counts its
            passes in a buffer; `plain_counter`, which counts them in an attribute; `noise_in_place`, which changes its
            input.
        dropout (`float`): probability of dropout.
    """

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind = kind
        self.first = torch.nn.Linear(3 * 16 * 16, 16)
        self.norm = torch.nn.BatchNorm1d(16) if kind == "batch_norm" else torch.nn.LayerNorm(16)
        self.dropout = torch.nn.Dropout(dropout)
        self.last = torch.nn.Linear(16, 3)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("passes", torch.zeros(()))
        self.calls = 0

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return loss and logits."""
        if self.kind == "noise_in_place" and self.training:
            pixel_values.mul_(0.7)
        hidden = self.norm(self.first(pixel_values.flatten(1)))
        if self.kind == "running_mean":
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
            hidden = hidden - self.mean
        if self.kind == "counter":
            if self.training:
                self.passes += 1
            hidden = hidden / (1 + 0.1 * self.passes)
        if self.kind == "plain_counter":
            self.calls += self.training
            hidden = hidden / (1 + 0.1 * self.calls)
        logits = self.last(self.dropout(hidden.relu()))
        loss = torch.nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


OWN_MODELS = ("batch_norm", "running_mean", "counter", "plain_counter", "noise_in_place")
IMAGE_MODELS = ("vit", *OWN_MODELS)


def model_of(program: Program) -> torch.nn.Module:
    """Return the model, always with the same weights."""
    model = float_model_of(program)
    return model.bfloat16() if program.extra == "bf16_model" else model


def float_model_of(program: Program) -> torch.nn.Module:
    """Return the model with float32 weights."""
    transformers.set_seed(0)
    dropout = program.dropout
    if program.model in OWN_MODELS:
        return OwnModel(program.model, dropout)
    if program.model == "bert":
        return bert("BertForMaskedLM", hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    if program.model == "vit":
        config = transformers.ViTConfig(**VISION, hidden_dropout_prob=dropout, num_labels=3)
        return transformers.ViTForImageClassification(config)
    if program.model == "t5":
        model = t5()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = dropout
        return model
    tied = {"tie_word_embeddings": program.model == "tied"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(LLAMA | tied), attention_dropout=dropout))
    if program.learning == "base_width":
        initialize_at_width(model, base_width=BASE_WIDTH)
    if program.model != "lora":
        return model
    targets = ["q_proj", "v_proj", "embed_tokens"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, lora_dropout=dropout, task_type="CAUSAL_LM"))


class CountingSGD(torch.optim.SGD):
    """An optimizer that counts in a dictionary."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("counts", defaultdict(int))["steps"] += 1
        return super().step(closure)


class InsideOptimizer(torch.optim.Optimizer):
    """An optimizer that steps with another one inside, whose states its `state_dict` leaves out, as many SAMs do."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": RATE})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, lr=RATE)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base_optimizer.step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


def optimizer_of(program: Program, model: torch.nn.Module) -> torch.optim.Optimizer | None:
    """Return a user's optimizer; None if Trainer makes it."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if program.optimizer == "groups":
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        others = [parameter for parameter in parameters if parameter.ndim <= 1]
        return torch.optim.AdamW(
            [{"params": matrices}, {"params": others, "lr": RATE / 4, "weight_decay": 0}], lr=RATE
        )
    if program.optimizer == "numpy_rate":
        return torch.optim.AdamW(parameters, lr=np.geomspace(1e-3, 1e-1, 3)[1])
    if program.optimizer == "numpy_betas":
        return torch.optim.AdamW(parameters, lr=RATE, betas=(np.float64(0.9), np.float64(0.99)))
    if program.optimizer == "counting":
        return CountingSGD(parameters, lr=RATE)
    if program.optimizer == "inside":
        return InsideOptimizer(parameters)
    if program.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)
    if program.optimizer == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=RATE)
    return torch.optim.AdamW(parameters, lr=RATE) if program.schedule.endswith("LR") else None


def scheduler_of(program: Program, optimizer: torch.optim.Optimizer) -> Any:
    """Return a user's scheduler; None if Trainer makes it."""
    schedulers = torch.optim.lr_scheduler
    if program.schedule == "MultiStepLR":
        return schedulers.MultiStepLR(optimizer, [3, 7, 12], gamma=0.5)
    if program.schedule == "OneCycleLR":
        return schedulers.OneCycleLR(optimizer, max_lr=RATE, total_steps=200)
    if program.schedule == "SequentialLR":
        warmup = schedulers.LinearLR(optimizer, 0.1, total_iters=4)
        restarts = schedulers.CosineAnnealingWarmRestarts(optimizer, 5)
        return schedulers.SequentialLR(optimizer, [warmup, restarts], [4])
    if program.schedule == "CyclicLR":
        return schedulers.CyclicLR(optimizer, RATE / 10, RATE, step_size_up=4, cycle_momentum=False)
    if program.schedule == "LambdaLR":
        return schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return None


def total_steps(program: Program) -> int:
    """Return the number of optimizer steps of a program whose data has no length."""
    batches = -(-program.rows // (program.batch * program.processes))
    return program.epochs * -(-batches // program.accumulation)


SCHEDULES: dict[str, dict[str, Any]] = {
    "warmup": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 6},
    "cosine_restarts": {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    "wsd": {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 3}},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "mode": "max"}},
}


EXTRA: dict[str, dict[str, Any]] = {
    "drop_last": {"dataloader_drop_last": True},
    "local_tokens": {"average_tokens_across_devices": False},
    "neftune": {"neftune_noise_alpha": 5.0},
    "eval_on_start": {"eval_on_start": True},
    "persistent_workers": {"dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "dispatch_batches": {"accelerator_config": {"dispatch_batches": True}},
    "split_batches": {"accelerator_config": {"split_batches": True}},
    "unseeded_sampler": {"accelerator_config": {"use_seedable_sampler": False}},
    "log_by_epoch": {"logging_strategy": "epoch"},
    "log_every_3": {"logging_steps": 3},
    "count_tokens": {"include_num_input_tokens_seen": "all"},
    "seeds": {"seed": 7, "data_seed": 11},
    "eval_delay": {"eval_delay": 2},
    "accuracy": {"metric_for_best_model": "eval_accuracy", "greater_is_better": True},
    "batch_metrics": {"batch_eval_metrics": True},
    "callback_states": {"restore_callback_states_from_checkpoint": True},
    "find_batch_size": {"auto_find_batch_size": True},
    "find_smaller_batch": {"auto_find_batch_size": True},
    "find_smaller_batch_later": {"auto_find_batch_size": True},
    "unused_columns": {"remove_unused_columns": False},
    "jit_checkpoint": {"enable_jit_checkpoint": True},
}
"""Training arguments that a program has beside its fields."""


def arguments_of(program: Program, folder: str, *, other_batch: bool = False, processes: int = 1) -> dict[str, Any]:
    """Return the training arguments.

    Args:
        program (`Program`): the program.
        folder (`str`): the output directory.
        other_batch (`bool`): whether another batch per device makes the same global batch.
        processes (`int`): how many processes train; where it is not the number of the program, the batch per device
            makes the same global batch.
    """
    batch, accumulation = program.batch, program.accumulation
    if processes != program.processes:
        batch = batch * program.processes // processes
    if other_batch:
        batch, accumulation = (batch // 2, accumulation * 2) if accumulation == 1 else (batch * 2, accumulation // 2)
    arguments = {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": program.epochs,
        "logging_steps": 1,
        "learning_rate": RATE,
        "max_grad_norm": program.clipping,
        "label_smoothing_factor": program.smoothing,
        "save_strategy": program.save_strategy,
        "save_steps": program.save_steps,
        "save_total_limit": program.limit,
        "save_only_model": program.only_model,
        "eval_strategy": program.eval_strategy,
        "eval_steps": program.eval_steps,
        "dataloader_num_workers": program.workers,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "lr_scheduler_type": program.schedule,
    }
    if program.schedule.endswith("LR"):
        arguments["lr_scheduler_type"] = "constant"
    arguments |= SCHEDULES.get(program.schedule, {})
    if program.schedule == "inverse_sqrt":
        arguments["warmup_steps"] = 3
    if program.optimizer == "adafactor":
        arguments["optim"] = "adafactor"
    if program.best != "none":
        arguments |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
        arguments["greater_is_better"] = program.best == "highest"
    if program.data.endswith("stream"):
        arguments["max_steps"] = total_steps(program)
    if program.sampler in ("group_by_length", "sequential"):
        arguments["train_sampling_strategy"] = program.sampler
    arguments |= EXTRA.get(program.extra, {})
    if program.extra == "max_steps":
        arguments["max_steps"] = total_steps(program) * 2 // 3
    if program.extra == "accuracy" and program.best == "none":
        arguments.pop("metric_for_best_model")
        arguments.pop("greater_is_better")
    return arguments


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


def trainer_class(program: Program) -> type[Trainer]:
    """Return Trainer, or a user's subclass that overrides some of its methods."""
    base = transformers.Seq2SeqTrainer if program.trainer == "Seq2SeqTrainer" else Trainer
    methods: dict[str, Any] = {}

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = base.compute_loss(self, model, inputs, return_outputs=True, **kwargs)
        logits = outputs["logits"]
        loss = loss + 1e-3 * logits.float().pow(2).mean()
        return (loss, outputs) if return_outputs else loss

    def annealed_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = base.compute_loss(self, model, inputs, return_outputs=True, **kwargs)
        if model.training:
            self.calls = getattr(self, "calls", 0) + 1
            self.recent = [*getattr(self, "recent", []), float(loss.detach())][-3:]
            loss = loss * min(1.0, self.calls / 20) / (1 + sum(self.recent))
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model, inputs, *args, **kwargs):
        if inputs["labels"].ndim > 1:  # a user's augmentation in place
            inputs["labels"][:, 1:] = inputs["labels"][:, 1:].roll(1, dims=1)
        else:
            inputs["pixel_values"].mul_(0.9)
        return base.training_step(self, model, inputs, *args, **kwargs)

    def evaluate(self, *args, **kwargs):
        metrics = base.evaluate(self, *args, **kwargs)
        metrics["eval_twice"] = 2 * metrics["eval_loss"]
        return metrics

    def get_train_dataloader(self):
        loader = DataLoader(
            self.train_dataset, batch_size=self._train_batch_size, shuffle=True, collate_fn=self.data_collator
        )
        return self.accelerator.prepare(loader)

    def _get_train_sampler(self, train_dataset=None):
        return sampler_of(program.sampler, len(self.train_dataset))

    def create_optimizer(self, *args, **kwargs):
        if self.optimizer is None:
            head = [parameter for name, parameter in self.model.named_parameters() if "lm_head" in name]
            head = [parameter for parameter in head if parameter.requires_grad]
            rest = [
                each for each in self.model.parameters() if each.requires_grad and all(each is not h for h in head)
            ]
            groups = [{"params": rest}, *([{"params": head, "lr": RATE / 10}] if head else [])]
            self.optimizer = torch.optim.NAdam(groups, lr=RATE)
        return self.optimizer

    def log(self, logs, *args, **kwargs):
        logs["rows_seen"] = float(self.state.global_step * program.batch)
        return base.log(self, logs, *args, **kwargs)

    overrides = {
        "create_optimizer": create_optimizer,
        "log": log,
        "compute_loss": compute_loss,
        "annealed_loss": annealed_loss,
        "training_step": training_step,
        "evaluate": evaluate,
        "dataloader": get_train_dataloader,
    }
    if program.trainer in overrides:
        method = overrides[program.trainer]
        methods["compute_loss" if method is annealed_loss else method.__name__] = method
    if program.sampler not in ("default", "group_by_length", "sequential"):
        methods["_get_train_sampler"] = _get_train_sampler
    return type("OwnTrainer", (base,), methods) if methods else base


ASKING = (
    "saves_when_asked",
    "stops_when_asked",
    "evaluates_when_asked",
    "rate_set_by_hand",
    "frozen_at_first",
    "changes_settings",
    "draws_between_steps",
)


class Asking(TrainerCallback):
    """A user's callback that decides by the step.

    Args:
        kind (`str`): what it does, one of `ASKING`.
        steps (`int`): the steps of the whole training.
    """

    def __init__(self, kind: str, steps: int) -> None:
        self.kind = kind
        self.steps = steps

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        """Change the rate or what is trained."""
        if self.kind == "rate_set_by_hand" and state.global_step % 4 == 3:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        if self.kind == "frozen_at_first":
            first = next(iter(model.parameters()))
            first.requires_grad_(state.global_step >= 3 and first.is_floating_point())
        if self.kind == "changes_settings" and state.global_step == 2:
            args.max_grad_norm = 0.05
            next(iter(model.parameters())).requires_grad_(False)
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.3

    def on_step_end(self, args, state, control, **kwargs):
        """Ask for a save, an evaluation or the end."""
        if self.kind == "saves_when_asked" and state.global_step % 4 == 1:
            control.should_save = True
        if self.kind == "evaluates_when_asked" and state.global_step % 4 == 1:
            control.should_evaluate = True
        if self.kind == "stops_when_asked" and state.global_step >= self.steps * 3 // 4:
            control.should_training_stop = True


class DrawsBetweenSteps(Asking):
    """Draws random numbers after saves, and where epochs begin and end."""

    def on_save(self, args, state, control, **kwargs):
        """As a text that is generated for each save."""
        torch.rand(2)

    def on_epoch_begin(self, args, state, control, **kwargs):
        """As another order of the data."""
        np.random.rand(2)

    def on_epoch_end(self, args, state, control, **kwargs):
        """As an evaluation of the callback's own."""
        torch.rand(3)
        random.random()


def accuracy(prediction: Any, compute_result: bool = True) -> dict[str, float]:
    """Return the share of labels that the largest logit names."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    best, labels = torch.as_tensor(logits).argmax(-1), torch.as_tensor(prediction.label_ids)
    known = labels != -100
    return {"accuracy": float((best == labels)[known].float().mean())}


def trainer_of(program: Program, arguments: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
    """Return the Trainer of a program."""
    if program.extra in ASKING:
        kind = DrawsBetweenSteps if program.extra == "draws_between_steps" else Asking
        callbacks = [*callbacks, kind(program.extra, total_steps(program))]
    if program.early_stopping:
        callbacks = [*callbacks, transformers.EarlyStoppingCallback(program.early_stopping)]
    if program.trainer == "SentenceTransformerTrainer":
        return SENTENCE_KINDS[0].build(Path(arguments["output_dir"]), callbacks, **arguments)
    if program.trainer == "CrossEncoderTrainer":
        kind = next(kind for kind in SENTENCE_KINDS if "Cross" in kind.trainer)
        return kind.build(Path(arguments["output_dir"]), callbacks, **arguments)
    if program.trainer in TRL:
        return TRL[program.trainer](Path(arguments["output_dir"]), callbacks, **arguments)
    model = model_of(program)
    optimizer = optimizer_of(program, model)
    scheduler = scheduler_of(program, optimizer) if optimizer is not None else None
    is_seq2seq = program.trainer == "Seq2SeqTrainer"
    kind = transformers.Seq2SeqTrainingArguments if is_seq2seq else transformers.TrainingArguments
    made = trainer_class(program)(
        model=model,
        args=kind(**arguments),
        train_dataset=data_of(program),
        eval_dataset=Rows(rows_of(program, EVAL_ROWS)),
        data_collator=Collator(program.collator),
        callbacks=callbacks,
        optimizers=(optimizer, scheduler),
        compute_metrics=accuracy if program.extra in ("accuracy", "batch_metrics") else None,
    )
    made.remove_callback(transformers.PrinterCallback)
    if program.extra.startswith("find_smaller_batch"):
        passes = 4 if program.extra.endswith("later") else 0
        model.register_forward_pre_hook(LimitedMemory(program.batch, passes), with_kwargs=True)
    return made


class LimitedMemory:
    """Runs out of memory in training on as many rows as the arguments have.

    Args:
        batch (`int`): that number of rows.
        passes (`int`): how many passes fit before.
    """

    def __init__(self, batch: int, passes: int) -> None:
        self.batch = batch
        self.passes = passes

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a pass, before it is made."""
        first = next(iter(kwargs.values()))
        if not model.training or len(first) < self.batch:
            return
        self.passes -= 1
        if self.passes < 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more")


GENERATION = {"num_generations": 2, "max_completion_length": 4, "beta": 0.0, "gradient_checkpointing": False}
TRL = {
    "SFTTrainer": builder("SFT", completed, gradient_checkpointing=False),
    "DPOTrainer": builder("DPO", preferred, gradient_checkpointing=False),
    "GRPOTrainer": builder("GRPO", asked, options=lambda: {"reward_funcs": count_words}, **GENERATION),
    "RewardTrainer": builder(
        "Reward", preferred, model="LlamaForSequenceClassification", gradient_checkpointing=False
    ),
    "KTOTrainer": builder("KTO", labelled, gradient_checkpointing=False),
    "RLOOTrainer": builder("RLOO", asked, options=lambda: {"reward_funcs": count_words}, **GENERATION),
}
