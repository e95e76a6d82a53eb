"""A Trainer that runs in a second: a Llama of a few thousand parameters on random tokens."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import hfscale
from hfscale.core.versions import is_at_least

VOCAB = 64
EXPERTS = 4
EXPERT_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
"""Sizes of a small mixture of experts, with the names of several families."""
LENGTH = 16


def byte_level_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of 320 tokens that decodes any text exactly and ends documents with `<end>`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


class RandomTokens(Dataset):
    """A dataset of `size` sequences of `LENGTH` tokens, the same in every run."""

    def __init__(self, size: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(3, VOCAB, (size, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class StopAt(TrainerCallback):
    """Stops the training after a step, with a checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step
        control.should_save |= state.global_step == self.step


def tiny_model(**overrides: Any) -> LlamaForCausalLM:
    """Return a small Llama, always with the same weights; keywords override its config."""
    set_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | overrides)))


def tiny_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `VOCAB` words: `<end>`, `<turn>`, and `w2` … `w63`. Keywords are its options."""
    words = {"<end>": 0, "<turn>": 1, **{f"w{number}": number for number in range(2, VOCAB)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="w2"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>", **options)


class ShrinkingCollator:
    """Masks one more of the labels with each batch that it has made, in evaluations too."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.batches += 1
        batch = {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}
        batch["labels"][:, : self.batches % LENGTH] = -100
        return batch


def make_callback(name: str, **options: Any) -> Any:
    """Return a new callback of hfscale, with the arguments that it cannot do without."""
    required: dict[str, dict[str, Any]] = {
        "AlertCallback": {"webhook": "http://127.0.0.1:9/"},  # nobody listens there
        "SampleGenerationCallback": {"prompts": ["w3 w4", "w5"], "every_steps": 1, "max_new_tokens": 3},
        "TraceCallback": {"steps": [2]},
        "WeightAveragingCallback": {"ema_decay": 0.9},
    }
    return getattr(hfscale, name)(**required.get(name, {}), **options)


def let_old_transformers_resume_on_cpu() -> None:
    """Let torch load what is to be put on `cpu:0`: before 5.22, Trainer asks for it under DDP on a CPU."""
    if not is_at_least("transformers", "5.22"):
        torch.serialization.register_package(
            0, lambda storage: None, lambda storage, location: storage if location == "cpu:0" else None
        )


def tiny_arguments(output_dir: Path | str, **overrides: Any) -> TrainingArguments:
    """Return training arguments for the CPU: four sequences per step, a log at every step, no progress bars.

    With `use_cpu=False` the training uses the first GPU only: all of them in one process would be nn.DataParallel.
    """
    defaults = {
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    arguments = defaults | overrides
    if not is_at_least("transformers", "5.23"):  # which has the name of before, too
        arguments = {name.replace("activation_ch", "gradient_ch"): value for name, value in arguments.items()}
    made = TrainingArguments(output_dir=str(output_dir), **arguments)
    if made.n_gpu > 1:
        made._n_gpu = 1
    return made


def tiny_trainer(
    output_dir: Path | str,
    *callbacks: TrainerCallback,
    model: Any = None,
    optimizers: Any = (None, None),
    tokenizer: Any = None,
    **overrides: Any,
) -> Trainer:
    """Return a Trainer with the given callbacks; other keywords are training arguments."""
    return Trainer(
        model=model if model is not None else tiny_model(),
        args=tiny_arguments(output_dir, **overrides),
        train_dataset=RandomTokens(),
        eval_dataset=RandomTokens(8),
        callbacks=list(callbacks),
        processing_class=tokenizer,
        data_collator=default_data_collator,
        optimizers=optimizers,
    )


def logged(trainer: Trainer, key: str) -> list[float]:
    """Return the values of `key` in the Trainer's log history."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]
