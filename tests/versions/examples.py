"""The programs' own examples, and what is changed of them for a tiny model on a CPU without a network.

`OPTIONS` are the options that the examples set:

- LLaMA-Factory: examples/train_lora/qwen3_lora_sft.yaml
- ms-swift: examples/train/demo.sh
- axolotl: examples/llama-3/fft-8b.yaml; the random matrices of its LoRA example are others in each run, with and
  without the callback

`changes` replaces the model, the data and what needs a GPU, and makes the run so long, and its saves so frequent, that
it can be killed between two of them.
"""

import itertools
import json
from pathlib import Path
from typing import Any

RECORDS = 640
SAVED = 40
"""Steps between two checkpoints."""

OPTIONS: dict[str, dict[str, Any]] = {
    "llamafactory": {
        "trust_remote_code": True,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": 8,
        "lora_target": "all",
        "template": "qwen3_nothink",
        "cutoff_len": 2048,
        "max_samples": 1000,
        "preprocessing_num_workers": 16,
        "dataloader_num_workers": 4,
        "logging_steps": 10,
        "plot_loss": True,
        "overwrite_output_dir": True,
        "save_only_model": False,
        "report_to": "none",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "learning_rate": 1.0e-4,
        "num_train_epochs": 3.0,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "ddp_timeout": 180000000,
        "resume_from_checkpoint": None,
    },
    "ms-swift": {
        "tuner_type": "lora",
        "num_train_epochs": 1,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "learning_rate": 1e-4,
        "lora_rank": 8,
        "lora_alpha": 32,
        "target_modules": "all-linear",
        "gradient_accumulation_steps": 16,
        "eval_steps": 50,
        "save_total_limit": 2,
        "logging_steps": 5,
        "max_length": 2048,
        "system": "You are a helpful assistant.",
        "warmup_ratio": 0.05,
        "dataloader_num_workers": 4,
        "model_author": "swift",
        "model_name": "swift-robot",
    },
    "axolotl": {
        "model_type": "LlamaForCausalLM",
        "tokenizer_type": "AutoTokenizer",
        "load_in_8bit": False,
        "load_in_4bit": False,
        "strict": False,
        "val_set_size": 0.05,
        "sample_packing": True,
        "pad_to_sequence_len": True,
        "gradient_accumulation_steps": 8,
        "micro_batch_size": 1,
        "num_epochs": 1,
        "lr_scheduler": "cosine",
        "learning_rate": 2e-5,
        "train_on_inputs": False,
        "group_by_length": False,
        "tf32": False,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "early_stopping_patience": None,
        "resume_from_checkpoint": None,
        "logging_steps": 1,
        "warmup_steps": 100,
        "evals_per_epoch": 2,
        "weight_decay": 0.0,
    },
}
"""By program, what its example sets."""


def make_records(folder: Path) -> None:
    """Write the records of the examples, as `make_inputs` writes those of the other runs."""
    words = [f"w{3 + number % 50} w{4 + number * 7 % 50}" for number in range(RECORDS + 1)]
    pairs = list(itertools.pairwise(words))
    alpaca = [{"instruction": question, "input": "", "output": answer} for question, answer in pairs]
    (folder / "data" / "example.json").write_text(json.dumps(alpaca))
    known = json.loads((folder / "data" / "dataset_info.json").read_text())
    known["example"] = {"file_name": "example.json"}
    (folder / "data" / "dataset_info.json").write_text(json.dumps(known))
    chats = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in pairs
    ]
    (folder / "data" / "example.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def changes(program: str, folder: Path) -> dict[str, Any]:
    """Return what is changed of an example."""
    if program == "llamafactory":
        return {
            "model_name_or_path": str(folder / "model"),
            "dataset_dir": str(folder / "data"),
            "dataset": "example",
            "template": "default",  # the tiny tokenizer has no tokens for turns
            "save_steps": SAVED,
            "bf16": False,
            "use_cpu": True,
        }
    if program == "ms-swift":
        return {
            "model": folder / "model",
            "model_type": "llama",
            "template": "chatml",
            "dataset": folder / "data" / "example.jsonl",
            "num_train_epochs": 6,
            "dataloader_num_workers": 1,  # more than a core for each is an alarm
            "save_steps": SAVED,
            "torch_dtype": "float32",
            "use_hf": True,
            "check_model": False,  # it would ask ModelScope
            "use_cpu": True,
            "report_to": "none",
        }
    rows = {"path": str(folder / "data" / "example.json"), "ds_type": "json", "type": "alpaca"}
    return {
        "base_model": str(folder / "model"),
        "datasets": [rows],
        "dataset_prepared_path": str(folder / "prepared-example"),
        "sequence_len": 64,
        "num_epochs": 6,
        "optimizer": "adamw_torch",
        "save_steps": SAVED,
        "bf16": False,
        "seed": 1,
    }


def example(program: str, folder: Path) -> dict[str, Any]:
    """Return the options of a program's example with the changes."""
    return OPTIONS[program] | changes(program, folder)
