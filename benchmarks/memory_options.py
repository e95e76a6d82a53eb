"""Measures tokens/s and peak memory of a model of 1.2B parameters on one GPU with each memory and speed option.

The control is the default of plain Trainer: fp32 weights, no recomputation, the unfused loss. Every option is a
separate run of the sharded recipe on random weights; the rounds run all options in turn. Needs a CUDA GPU.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).parent.parent
ROUNDS = 2
STEPS = 30
SHAPE = {  # Llama-3.2-1B
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}
RECOMPUTE = ["--activation_checkpointing", "true"]
OPTIONS = {
    "plain Trainer (fp32)": ["--bf16", "false"],
    "bf16": [],
    "bf16, recompute full": RECOMPUTE,
    "bf16, recompute selective": [*RECOMPUTE, "--recompute", "selective"],
    "bf16, Liger": ["--use_liger_kernel", "true"],
    "bf16, regional compile": ["--torch_compile_regional", "true"],
    "bf16, Liger, regional compile": ["--use_liger_kernel", "true", "--torch_compile_regional", "true"],
    "bf16, Liger, recompute full": ["--use_liger_kernel", "true", *RECOMPUTE],
    "bf16, LoRA": ["--use_peft", "true"],
}


def measure() -> dict[str, Any]:
    """Run every option `ROUNDS` times and return medians, and the reason if an option failed."""
    if not torch.cuda.is_available():
        sys.exit("memory_options needs a CUDA GPU")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in OPTIONS}
    failures = {}
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "config.json").write_text(json.dumps(SHAPE))
        for _ in range(ROUNDS):
            for name, flags in OPTIONS.items():
                outcome = _run(Path(root), flags)
                if isinstance(outcome, str):
                    failures[name] = outcome
                else:
                    runs[name].append(outcome)
    table = {
        name: {key: round(statistics.median(run[key] for run in found), 4) for key in found[0]}
        for name, found in runs.items()
        if found
    }
    return {"summary": table, "failures": failures, "model": "Llama-3.2-1B", "block_size": 2048, "batch": 4}


def _run(root: Path, flags: list[str]) -> dict[str, float] | str:
    """Return the metrics of the last log of one run, or the last line of its standard error if it failed."""
    output_dir = Path(tempfile.mkdtemp(dir=root))
    command = [
        sys.executable,
        REPOSITORY / "recipes" / "sharded" / "train.py",
        "--config_name",
        root / "config.json",
        "--block_size",
        "2048",
        "--per_device_train_batch_size",
        "4",
        "--max_steps",
        STEPS,
        "--logging_steps",
        "10",
        "--save_strategy",
        "no",
        "--validation_split_percentage",
        "0",
        "--disable_tqdm",
        "true",
        "--tokenizer_name",
        _tokenizer(root),
        "--output_dir",
        output_dir,
        "--train_file",
        _text(root),
        *flags,
    ]
    done = subprocess.run(
        [*map(str, command)], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=900
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no output"])[-1]
    last = json.loads((output_dir / "scaling.jsonl").read_text().splitlines()[-1])
    keys = ("scaling/tokens_per_s_per_gpu", "scaling/mfu", "gpu/memory_peak_gib")
    return {key: last[key] for key in keys if key in last}


def _tokenizer(root: Path) -> Path:
    folder = root / "tokenizer"
    if not folder.is_dir():
        from hfscale.recipe import corpus

        corpus.default_tokenizer().save_pretrained(folder)
    return folder


def _text(root: Path) -> Path:
    path = root / "text.txt"
    if not path.is_file():
        from hfscale.recipe import corpus

        path.write_text("\n".join(record["text"] for record in corpus.read_sources("train")))
    return path
