"""The relative error of the gradient that a strategy accumulates in bf16, against the exact sum.

Two processes train a small Llama in bf16 for one step of 64 micro-batches each, with plain SGD, so that the change of
the fp32 weights is the gradient that the strategy has accumulated. The control adds up the gradients of the same
micro-batches, computed with the same weights in bf16, in fp64: what remains is the error of accumulation and reduction
alone. `before` is what DeepSpeed and Accelerate do by default, `after` what the shipped configs and the recipes set.

    accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 -m benchmarks.gradient_accumulation

is what `measure` runs, for each strategy. It needs no GPU; the arithmetic of bf16 is the same there.
"""

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from benchmarks.launched import launch_benchmark, send_result

STRATEGIES = ("zero1", "zero2", "zero3", "fsdp2")
MICRO_BATCHES = 64
LENGTH = 32
LEARNING_RATE = 100.0  # so large that the change of the weights is not lost in rounding them to fp32
VARIANT = "HFSCALE_BENCHMARK_VARIANT"


def measure() -> dict[str, Any]:
    """Launch two processes for each strategy, with and without the settings."""
    errors: dict[str, dict[str, float]] = {}
    for strategy in STRATEGIES:
        errors[strategy] = {}
        for variant in ("before", "after"):
            os.environ[VARIANT] = variant
            found = launch_benchmark("benchmarks.gradient_accumulation", processes=2, config=strategy)
            errors[strategy][variant] = found["error"]
            if strategy == "fsdp2":
                errors["fsdp2, sync_each_batch"] = errors.get("fsdp2, sync_each_batch", {}) | {
                    variant: found["error_synced"]
                }
    del os.environ[VARIANT]
    return {"summary": errors, "processes": 2, "micro_batches": MICRO_BATCHES}


class Bytes(Dataset[dict[str, torch.Tensor]]):
    """Sequences of the bytes of this module's own text."""

    def __init__(self, count: int) -> None:
        text = (Path(__file__).read_bytes() * 100)[: count * LENGTH]
        self.rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(count, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def accumulated_error(*, as_recipes: bool, sync_each_batch: bool = False, micro_batches: int = MICRO_BATCHES) -> float:
    """Train for one step, and return the relative error of the accumulated gradient. Every rank calls it.

    Args:
        as_recipes (`bool`): whether gradients are summed as the shipped configs and the recipes say, and not as
            DeepSpeed and Accelerate do by default.
        sync_each_batch (`bool`): whether Accelerate reduces the gradients of each micro-batch.
        micro_batches (`int`): micro-batches of each rank.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator

    from hfscale.parallel.arguments import ParallelArguments
    from hfscale.recipe.gradient_precision import sum_gradients_in_fp32
    from hfscale.recipe.layout import set_up_parallelism

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            bf16=True,
            max_steps=1,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=micro_batches,
            optim="sgd",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": sync_each_batch}},
        )
        set_up_parallelism(ParallelArguments(), args)
        if args.deepspeed_plugin is not None and not as_recipes:
            for key in ("data_types", "communication_data_type"):
                args.deepspeed_plugin.hf_ds_config.config.pop(key, None)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
        model = LlamaForCausalLM(config)
        control = copy.deepcopy(model)
        data = Bytes(micro_batches * args.world_size)
        trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=default_data_collator)
        if as_recipes:
            sum_gradients_in_fp32(trainer)
        seen: list[torch.Tensor] = []
        hook = model.register_forward_pre_hook(
            lambda module, args, inputs: seen.append(inputs["input_ids"].clone()), with_kwargs=True
        )
        trainer.train()
        hook.remove()
        changed = master_weights(trainer)
    initial = {name: parameter.detach().clone() for name, parameter in control.named_parameters()}
    for parameter in control.parameters():  # not the buffers, which stay in fp32
        parameter.data = parameter.data.bfloat16()
    if trainer.is_deepspeed_enabled:  # it makes its fp32 weights from those in bf16
        initial = dict(control.named_parameters())
    squared_error = squared_norm = 0.0
    for name, gradient in exact_gradient(control, seen).items():
        found = (initial[name].detach().double() - changed[name].double()) / LEARNING_RATE
        squared_error += float((found - gradient).square().sum())
        squared_norm += float(gradient.square().sum())
    return (squared_error / squared_norm) ** 0.5


def master_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the fp32 weights that the optimizer has stepped, in full. Every rank calls it."""
    if trainer.is_deepspeed_enabled:
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(p) for name, p in trainer.model.named_parameters()}
    return {name: p.full_tensor().detach() for name, p in trainer.model.named_parameters()}


def exact_gradient(model: torch.nn.Module, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the mean over the ranks of the gradients of all micro-batches, added up in fp64.

    Args:
        model (`nn.Module`): the model in bf16, before the step.
        batches (`list[torch.Tensor]`): token ids of each micro-batch of this rank.
    """
    names = [name for name, _ in model.named_parameters()]
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    # As Trainer: the loss of a micro-batch is divided by the tokens of all ranks, and multiplied by the ranks.
    ranks = dist.get_world_size()
    tokens = sum(batch.shape[0] * (batch.shape[1] - 1) for batch in batches) * ranks
    for batch in batches:
        loss = model(input_ids=batch, labels=batch, num_items_in_batch=tokens).loss * ranks
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for name, gradient in zip(names, gradients, strict=True):
            total[name] += gradient.double()
    for gradient in total.values():
        dist.all_reduce(gradient)
        gradient /= ranks
    return total


def worker() -> None:
    """Run in each process of the launch."""
    as_recipes = os.environ.get(VARIANT, "after") == "after"
    result = {"error": round(accumulated_error(as_recipes=as_recipes), 6)}
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        result["error_synced"] = round(accumulated_error(as_recipes=as_recipes, sync_each_batch=True), 6)
    if dist.get_rank() == 0:
        send_result(result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    worker()
