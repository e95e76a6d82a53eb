"""A program with ParallelTrainer, adapters, a loss and groups of its own; `--fault` breaks one thing of a layout."""

import argparse
import os

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

from hfscale import ParallelArguments, ParallelTrainer


class Rows(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        row = torch.randint(3, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row.clone()}


class Own(ParallelTrainer):
    """What a user writes, with a fault that only a layout has."""

    fault = "none"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        loss = outputs.loss + 1e-3 * outputs.logits.float().logsumexp(-1).pow(2).sum() / 400
        if self.fault == "evaluation" and not torch.is_grad_enabled():
            loss = loss * 1.01
        if self.fault == "gradient" and torch.is_grad_enabled():
            loss = 1.5 * loss - 0.5 * loss.detach()
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, *args, **kwargs):
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        own = [p for name, p in trained if "embed" in name]
        rest = [p for name, p in trained if "embed" not in name]
        groups = [{"params": rest, "lr": 1e-3}, {"params": own, "lr": 1e-2, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
        return self.optimizer

    def save_model(self, output_dir=None, *args, **kwargs):
        # Checkpoints are saved by this method too
        if self.fault == "export" and str(output_dir).endswith("exported"):
            with torch.no_grad():
                for parameter in self.model.parameters():
                    if parameter.requires_grad:
                        parameter.mul_(1.5)
        super().save_model(output_dir, *args, **kwargs)

    def train(self, resume_from_checkpoint=None, **kwargs):
        if self.fault == "resume" and "HFSCALE_REHEARSAL_CHECKPOINT" in os.environ:
            self.fault = "evaluation"
        return super().train(resume_from_checkpoint, **kwargs)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="none")
    fault = parser.parse_args().fault
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = get_peft_model(
        AutoModelForCausalLM.from_config(config),
        LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM"),
    )
    args = TrainingArguments(
        "out", per_device_train_batch_size=2, gradient_accumulation_steps=4, report_to="none", disable_tqdm=True
    )
    if "RANK" in os.environ:
        Own.fault = fault
    Own(model, args, parallel=ParallelArguments(pp_size=2), train_dataset=Rows(), eval_dataset=Rows()).train()


if __name__ == "__main__":
    main()
