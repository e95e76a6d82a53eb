"""The subclasses of Trainer that users write."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from program import RATE, Program
from rows import EpochBatches, OwnBatches, sampler_of
from torch.utils.data import DataLoader
from transformers import Trainer

NAMES = {
    "annealed_loss": "compute_loss",
    "mixup": "training_step",
    "adversarial": "training_step",
    "dataloader": "get_train_dataloader",
    "own_batches": "get_train_dataloader",
    "epoch_batches": "get_train_dataloader",
    "saves_more": "_save_checkpoint",
}
"""The methods that are overridden, where they have another name than the Trainer of a program."""


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

    def mixup(self, model, inputs, *args, **kwargs):
        share = float(np.random.beta(0.5, 0.5))
        if "pixel_values" in inputs:
            pixels = inputs["pixel_values"]
            others = pixels[torch.randperm(len(pixels))]
            inputs["pixel_values"] = share * pixels + (1 - share) * others
        elif share < 0.5:
            inputs["labels"] = inputs["labels"].roll(1, dims=1)
        return base.training_step(self, model, inputs, *args, **kwargs)

    def adversarial(self, model, inputs, *args, **kwargs):
        loss = base.training_step(self, model, inputs, *args, **kwargs)
        weight = next(each for each in model.parameters() if each.grad is not None)
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.add_(0.01 * weight.grad / (weight.grad.norm() + 1e-8))
        base.training_step(self, model, inputs, *args, **kwargs)
        with torch.no_grad():
            weight.copy_(kept)
        return loss

    def create_scheduler(self, num_training_steps, optimizer=None):
        if self.lr_scheduler is None:
            schedule = lambda step: max(0.1, 1 - step / num_training_steps)  # noqa: E731  as users write it
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, schedule)
        return self.lr_scheduler

    def own_batches(self):
        kind = OwnBatches if program.trainer == "own_batches" else EpochBatches
        sampler = kind(len(self.train_dataset), self._train_batch_size)
        loader = DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)

    def saves_more(self, model, trial, *args, **kwargs):
        base._save_checkpoint(self, model, trial, *args, **kwargs)
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        if self.is_world_process_zero():
            (folder / "notes.txt").write_text(str(self.state.epoch))

    def log(self, logs, *args, **kwargs):
        logs["rows_seen"] = float(self.state.global_step * program.batch)
        return base.log(self, logs, *args, **kwargs)

    overrides = {
        "create_optimizer": create_optimizer,
        "create_scheduler": create_scheduler,
        "log": log,
        "compute_loss": compute_loss,
        "annealed_loss": annealed_loss,
        "training_step": training_step,
        "mixup": mixup,
        "adversarial": adversarial,
        "evaluate": evaluate,
        "dataloader": get_train_dataloader,
        "own_batches": own_batches,
        "epoch_batches": own_batches,
        "saves_more": saves_more,
    }
    if program.trainer in overrides:
        methods[NAMES.get(program.trainer, program.trainer)] = overrides[program.trainer]
    if program.sampler not in ("default", "group_by_length", "sequential"):
        methods["_get_train_sampler"] = _get_train_sampler
    return type("OwnTrainer", (base,), methods) if methods else base


def loss_function(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return a loss as users write it, for `compute_loss_func`."""
    logits = outputs["logits"]
    if labels.ndim == 2:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=-100)
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)
