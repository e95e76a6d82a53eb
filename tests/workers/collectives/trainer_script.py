"""A plain Trainer script of a user; `--fault NAME` puts a collective where it depends on the rank."""

import argparse

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="none")
parser.add_argument("--output_dir", default="runs/own")
options = parser.parse_args()


class Faults(TrainerCallback):
    """Exchanges something on rank 0 only."""

    def on_step_end(self, args, state, control, **kwargs):
        if options.fault == "barrier" and state.global_step == 2 and dist.get_rank() == 0:
            dist.barrier()

    def on_save(self, args, state, control, **kwargs):
        if options.fault == "save" and args.should_save:
            dist.all_reduce(torch.ones(3))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if options.fault == "error" and dist.get_rank() == 1 and state.global_step == 2:
            raise ValueError("no loss on this rank")

    def on_evaluate(self, args, state, control, **kwargs):
        if options.fault == "group" and dist.get_rank() == 0:
            dist.new_group([0])


rows = [{"input_ids": torch.arange(8) + row, "labels": torch.arange(8) + row} for row in range(101)]
config = LlamaConfig(vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
arguments = TrainingArguments(
    options.output_dir, per_device_train_batch_size=2, eval_strategy="epoch", save_strategy="epoch", report_to="wandb"
)
trainer = Trainer(
    LlamaForCausalLM(config), arguments, train_dataset=rows, eval_dataset=rows[:30], callbacks=[Faults()]
)
trainer.train()
