"""A plain Trainer script with a model of two modalities, experts, and a module that a batch may not need.

`--case` names what depends on the rank; `--fixed` adds what the threads about such hangs recommend.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--case", default="none")
parser.add_argument("--deepspeed")
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--output_dir", default="runs/own")
options = parser.parse_args()
WIDTH = 16


class Block(nn.Module):
    """A layer of the size that is asked for."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(hidden)))


class Model(nn.Module):
    """Text with an optional image, a router over two experts, and a head that some rows need."""

    _no_split_modules = ("Block",)

    def __init__(self):
        super().__init__()
        self.config = PretrainedConfig()
        self.config.hidden_size = WIDTH  # for the sizes that DeepSpeed derives from it
        self.embed = nn.Embedding(64, WIDTH)
        self.vision = Block(24)
        self.layer = Block(32)
        self.experts = nn.ModuleList(Block(40) for _ in range(2))
        self.optional = Block(48)
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, input_ids, labels, pixels=None, expert=None, needs_extra=None):
        hidden = self.embed(input_ids)
        if pixels is not None:
            hidden = hidden + self.vision(pixels)[:, None]
        elif options.fixed:
            hidden = hidden + 0 * self.vision(torch.zeros(1, WIDTH))[:, None]
        if options.case == "scaled" and dist.is_initialized():  # several ranks compute something else than one
            hidden = hidden * 1.01
        hidden = self.layer(hidden)
        for number, module in enumerate(self.experts):
            chosen = torch.zeros(len(hidden), dtype=torch.bool) if expert is None else expert == number
            if expert is None or chosen.any() or options.fixed:
                hidden = hidden + module(hidden) * (1 if expert is None else chosen[:, None, None])
        if needs_extra is None or needs_extra.any() or options.fixed:
            for _ in range(3 if options.case == "repeat" and dist.get_rank() == 1 else 1):
                hidden = self.optional(hidden)
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def collate(rows):
    """A row without an image beside one that has it gets an empty image; a batch without any image has none."""
    names = {name for row in rows for name in row}
    return {name: torch.stack([row.get(name, torch.zeros(WIDTH)) for row in rows]) for name in sorted(names)}


class Rows(torch.utils.data.Dataset):
    """Rows of which each odd batch of two, which rank 1 gets, is of another kind; every tenth row has no image.

    In this order no batch is without an image, which a longer training with its random order would have.
    """

    def __len__(self):
        return 64

    def __getitem__(self, index):
        row = {"input_ids": torch.arange(8) % 64, "labels": (torch.arange(8) + index) % 64}
        odd = index // 2 % 2
        if options.case == "text-only" and index % 10 != 5:
            row["pixels"] = torch.ones(WIDTH)
        if options.case == "expert":
            row["expert"] = torch.tensor(odd)
        if options.case == "unused":
            row["needs_extra"] = torch.tensor(not odd)
        return row


class InOrder(Trainer):
    """Does not shuffle; `--case clipping` reads a value of one rank before it clips."""

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def _clip_grad_norm(self, model):
        if options.case == "clipping" and self.state.global_step == 1 and dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))
        return super()._clip_grad_norm(model)


class Generates(TrainerCallback):
    """Generates until a rank has its last token, which is earlier on rank 1; `--fixed` generates equally long."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if options.case == "generation" and state.global_step == 1:
            length = 5 if options.fixed or dist.get_rank() == 0 else 3
            tokens = torch.zeros(1, 1, dtype=torch.long)
            with torch.no_grad():
                for _ in range(length):
                    logits = wrapped[0](input_ids=tokens, labels=tokens)["logits"]
                    tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)


wrapped = []
arguments = TrainingArguments(
    options.output_dir,
    per_device_train_batch_size=2,
    save_strategy="epoch",
    remove_unused_columns=False,
    ddp_find_unused_parameters=False if options.case == "unused" and not options.fixed else None,
    deepspeed=options.deepspeed,
)
trainer = InOrder(Model(), arguments, train_dataset=Rows(), data_collator=collate, callbacks=[Generates()])


class Keep(TrainerCallback):
    """Keeps the wrapped model, with which a script generates."""

    def on_step_begin(self, args, state, control, **kwargs):
        wrapped[:] = [trainer.model_wrapped]


trainer.add_callback(Keep())
trainer.train()
