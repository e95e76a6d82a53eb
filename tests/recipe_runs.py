"""Runs the recipes under any strategy in forked ranks, which takes seconds since the libraries are imported once."""

import json
import runpy
import shutil
import sys
from pathlib import Path

from conftest import RECIPE, REPOSITORY
from forked_ranks import run_ranks
from transformers import LlamaConfig, MixtralConfig, PreTrainedTokenizerBase

from hfscale.recipe import corpus

SHARDED = REPOSITORY / "recipes" / "sharded" / "train.py"
TP_PP = REPOSITORY / "recipes" / "tp_pp" / "train.py"
STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "parallel")
GLOBAL_BATCH = 12  # for one to four ranks
SAMPLES = 36  # three steps an epoch
FLAGS = [
    "--config_name",
    "model",
    "--tokenizer_name",
    "tokenizer",
    "--train_file",
    "text.txt",
    "--block_size",
    "16",
    "--max_train_samples",
    str(SAMPLES),
    "--validation_split_percentage",
    "0",
    "--max_steps",
    "6",
    "--save_steps",
    "100",
    "--logging_steps",
    "1",
    "--lr_scheduler_type",
    "linear",
    "--warmup_steps",
    "2",
    "--learning_rate",
    "1e-2",
    "--weight_decay",
    "0.1",
    "--optim",
    "adamw_torch",
    "--disable_tqdm",
    "true",
    "--output_dir",
    "out",
    "--use_cpu",
    "true",
]
GEMMA_4_EXPERTS = {
    "num_experts": 4,
    "top_k_experts": 2,
    "enable_moe_block": True,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "hidden_size_per_layer_input": 0,
}
"""Sizes of the text part of a small Gemma 4 with experts, in addition to those of any model."""
_FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}


def environment_of(strategy: str) -> dict[str, str]:
    """Return the environment that `accelerate launch` gives the ranks of a strategy."""
    if strategy.startswith("zero"):
        return {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(REPOSITORY / "ds_configs" / f"{strategy}.json"),
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": str(strategy == "zero3").lower(),
        }
    return dict(_FSDP) if strategy == "fsdp2" else {}


def warm_up() -> None:
    """Import everything that a rank would import, before the ranks are forked."""
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    import peft  # noqa: F401
    from transformers import Trainer  # noqa: F401

    import hfscale.checkpoint.loading  # noqa: F401
    from hfscale import ParallelTrainer, ScalingCallback  # noqa: F401


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
"""Sizes of the models of a workplace."""


def save_model(folder: Path, tokenizer: PreTrainedTokenizerBase | None = None, **sizes: int) -> Path:
    """Fill a folder with a tokenizer, by default the embedded one, and the config of a small Llama of two layers."""
    tokenizer = tokenizer or corpus.default_tokenizer()
    tokenizer.save_pretrained(folder)
    config = {"vocab_size": len(tokenizer), "num_hidden_layers": 2, **SIZES, **sizes}
    LlamaConfig(**config).save_pretrained(folder)
    return folder


def make_workplace(folder: Path) -> Path:
    """Fill a folder with a tokenizer, a text, the DeepSpeed configs and three model configs, and return it.

    The models are `model` with one layer, `deep` with two layers and untied embeddings, and `experts`, a mixture of
    experts.
    """
    tokenizer = corpus.default_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    sizes = {"vocab_size": len(tokenizer), **SIZES}
    LlamaConfig(**sizes, num_hidden_layers=1, tie_word_embeddings=True).save_pretrained(folder / "model")
    LlamaConfig(**sizes, num_hidden_layers=2, tie_word_embeddings=False).save_pretrained(folder / "deep")
    MixtralConfig(**sizes, num_hidden_layers=2, num_local_experts=4).save_pretrained(folder / "experts")
    (folder / "text.txt").write_text("".join(f"line {n} is not line {n * n % 89}\n" for n in range(800)))
    shutil.copytree(REPOSITORY / "ds_configs", folder / "ds_configs")
    return folder


def vocabulary_of(workplace: Path) -> int:
    """Return the number of tokens of a workplace's models."""
    config = json.loads((workplace / "deep" / "config.json").read_text())
    return int(config["vocab_size"])


def run_recipe(
    folder: Path, strategy: str, ranks: int, *flags: str, hsdp: bool = False, tp: int | None = None, pp: int = 1
) -> None:
    """Train with `folder` as the working directory; fail with the output of the ranks if one of them fails.

    Args:
        folder (`Path`): a folder of `make_workplace`.
        strategy (`str`): `single`, one of `STRATEGIES`, or `native`, whose sizes are among the flags.
        ranks (`int`): number of processes.
        flags (`str`): further flags of the recipe.
        hsdp (`bool`): whether FSDP2 keeps two replicas.
        tp (`int`, *optional*): tensor-parallel size of `parallel`. Default: 2 if the number of ranks is even.
        pp (`int`): pipeline-parallel size of `parallel`.
    """
    script = RECIPE if strategy in ("single", "ddp") else TP_PP if strategy == "parallel" else SHARDED
    data_ranks = ranks
    if strategy == "parallel":
        tp = tp or 2 - ranks % 2
        data_ranks = ranks // (tp * pp)
        micro_batches = 3 if pp > 1 else 1
        batch = GLOBAL_BATCH // data_ranks // micro_batches
        flags = (
            "--tp_size",
            str(tp),
            "--pp_size",
            str(pp),
            "--gradient_accumulation_steps",
            str(micro_batches),
            "--per_device_train_batch_size",
            str(batch),
            *flags,
        )
    env = environment_of(strategy)
    if hsdp:
        env |= {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(ranks // 2)}
    if "--per_device_train_batch_size" not in flags:
        flags = ("--per_device_train_batch_size", str(GLOBAL_BATCH // ranks), *flags)
    codes = run_ranks(ranks, _recipe, script, folder, [*FLAGS, *flags], log=folder / "log", env=env)
    assert codes == [0] * ranks, f"{strategy} on {ranks}: {codes}\n" + output(folder)[-8000:]


def output(folder: Path) -> str:
    """Return what the ranks of the last run printed."""
    return "\n".join(path.read_text() for path in sorted((folder / "log").iterdir()))


def _recipe(script: Path, folder: Path, flags: list[str]) -> None:
    """Run a recipe in this process, which is a rank, with `folder` as its working directory."""
    import os

    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    sys.argv = [str(script), *flags]
    runpy.run_path(str(script), run_name="__main__")


def logged(folder: Path, key: str) -> dict[int, float]:
    """Return the values of `key` by step from `scaling.jsonl`; the last record of a step counts."""
    records = [json.loads(line) for line in (folder / "out" / "scaling.jsonl").read_text().splitlines()]
    return {record["step"]: record[key] for record in records}
