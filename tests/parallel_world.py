"""Worlds of forked processes, which inherit all imports, and small training jobs to run in them."""

import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import import_what_ranks_import
from peft import LoraConfig, get_peft_model
from ports import free_port
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hfscale import ParallelArguments, ParallelTrainer, ScalingCallback
from hfscale.optim.muon import Muon
from hfscale.parallel.weights import build_model
from hfscale.recipe.router_bias import RouterBiasCallback
from hfscale.trainer.strategies.fsdp2 import let_fsdp_run_on_cpu

VOCAB, LENGTH = 96, 12
_TIMEOUT_S = 300


def in_world(size: int, work: Callable[[Any], Any], jobs: Sequence[Any]) -> list[Any]:
    """Run `work(job)` for each job in turn on `size` processes.

    Returns:
        Rank 0's results, in order.

    Raises:
        AssertionError: a process failed; the message contains its traceback.
    """
    import_what_ranks_import()
    with tempfile.TemporaryDirectory(prefix="hfscale-world-") as name:
        folder = Path(name)
        _run_ranks(size, work, jobs, folder)
        errors = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("error-*")))
        assert not errors, errors
        done = folder / "results.json"
        assert done.exists(), "the world did not finish in time"
        return json.loads(done.read_text(encoding="utf-8"))


def _run_ranks(size: int, work: Callable[[Any], Any], jobs: Sequence[Any], folder: Path) -> None:
    port = free_port()
    context = get_context("fork")
    processes = [
        context.Process(target=_rank_main, args=(rank, size, port, work, jobs, folder), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(_TIMEOUT_S)
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()


def _rank_main(rank: int, size: int, port: int, work: Callable[[Any], Any], jobs: Sequence[Any], folder: Path) -> None:
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = (folder / f"out-{rank}").open("w", encoding="utf-8")
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    if size > 1:
        os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    try:
        if size > 1:
            dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        results = [work(job) for job in jobs]
        if rank == 0:
            (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
        if size > 1:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        (folder / f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}", encoding="utf-8")
        os._exit(1)
    os._exit(0)


class Tokens(Dataset):
    """`size` sequences, the same in every run.

    With `ragged` they have different lengths and are padded on the right, or are cut with `cut`, which allows one in a
    batch; with `packed` each consists of two texts.
    """

    def __init__(self, size: int = 96, ragged: bool = False, packed: bool = False, cut: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(3, VOCAB, (size, LENGTH), generator=generator)
        self.ragged = ragged
        self.packed = packed
        self.cut = cut

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = {"input_ids": self.rows[index], "labels": self.rows[index].clone()}
        if self.ragged:
            kept = LENGTH - index % 5
            row["attention_mask"] = (torch.arange(LENGTH) < kept).long()
            row["labels"][kept:] = -100
            if self.cut:
                row = {"input_ids": row["input_ids"][:kept], "labels": row["labels"][:kept]}
        if self.packed:
            boundary = 3 + index % 4
            row["position_ids"] = torch.cat([torch.arange(boundary), torch.arange(LENGTH - boundary)])
            row["labels"][boundary] = -100
        return row


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def tiny_config(family: str = "llama", **overrides: Any) -> Any:
    """A config of a family for a model with a few thousand parameters."""
    return AutoConfig.for_model(family, **(SIZES | overrides))


def tiny_causal_lm(family: str = "llama", *, seed: int = 0, **overrides: Any) -> Any:
    """A tiny model with the same weights in every process."""
    return build_model(tiny_config(family, **overrides), seed=seed, dtype=torch.float32)


def empty_causal_lm(family: str = "llama", **overrides: Any) -> Any:
    """A tiny model on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=torch.float32)


class _Log(TrainerCallback):
    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.records.append(dict(logs))


def _model_of(job: dict[str, Any], *, empty: bool) -> Any:
    family, overrides = job.get("family", "llama"), job.get("model", {})
    model = empty_causal_lm(family, **overrides) if empty else tiny_causal_lm(family, seed=7, **overrides)
    if job.get("lora"):
        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(**job["lora"], task_type="CAUSAL_LM"))
        with torch.no_grad():  # as if trained for a while: with a B of zeros, A has no gradient
            for name, parameter in model.named_parameters():
                if "lora_B" in name and not empty:
                    parameter.normal_(std=0.02)
    return model


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train a tiny model for a few steps.

    Keys of `job`: `family`, `model` (overrides of its config), `parallel` (absent: the stock Trainer), `data`, `args`,
    `empty` (start on the meta device), `lora`, `muon`, `bias_rate`, `resume`, `export` and others below.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    parallel = job.get("parallel")
    replica = math.prod((parallel or {}).get(f"{axis}_size", 1) for axis in ("tp", "pp", "cp"))
    rows = job.get("rows", 8)  # sequences per step, whatever the layout
    batch = job.get("batch", 2)
    accumulation = job.get("accumulation", rows // (batch * world // replica))
    defaults = {
        "output_dir": job.get("output_dir", tempfile.gettempdir()),
        "use_cpu": True,
        "max_steps": 3,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "per_device_eval_batch_size": 8 // max(1, world // replica),
        "eval_strategy": "steps",
        "eval_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 7,
    }
    args = TrainingArguments(**(defaults | job.get("args", {})))
    if "ACCELERATE_USE_FSDP" in os.environ:
        let_fsdp_run_on_cpu()
    model = _model_of(job, empty=parallel is not None and bool(job.get("empty")))
    log = _Log()
    data = job.get("data", {})
    common = {
        "model": model,
        "args": args,
        "train_dataset": Tokens(**data),
        "eval_dataset": Tokens(**(data | {"size": job.get("eval_rows", 24)})),
        "callbacks": [*([ScalingCallback()] if job.get("scaling") else []), *job.get("callbacks", ()), log],
    }
    if parallel is None:
        trainer = Trainer(**common)
    else:
        sizes = ParallelArguments(**parallel)
        trainer = ParallelTrainer(**common, parallel=sizes, weights_from=job.get("weights_from"))
    if job.get("muon"):
        options = {"module": model, "lr": args.learning_rate, "dtype": torch.float32}
        trainer.optimizer_cls_and_kwargs = (Muon, options)
    if job.get("bias_rate"):
        trainer.add_callback(RouterBiasCallback(trainer, job["bias_rate"]))
    trainer.train(resume_from_checkpoint=job.get("resume"))
    if job.get("export"):
        trainer.save_model(job["export"])
    result = {
        key: [record[key] for record in log.records if key in record] for key in ("loss", "grad_norm", "eval_loss")
    }
    result["tokens"] = [r["scaling/tokens_seen"] for r in log.records if "scaling/tokens_seen" in r]
    result["load"] = [{key: r[key] for key in r if key.startswith("moe/")} for r in log.records if "moe/entropy" in r]
    result["bubble"] = [r["scaling/bubble_fraction"] for r in log.records if "scaling/bubble_fraction" in r]
    return result
