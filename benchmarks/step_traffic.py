"""Bytes that a step reads and writes for each parameter, under each strategy, without matrix products.

A small Llama trains for three steps of one and of four micro-batches in bf16, as the recipes do, with 2 and with 6
layers. The operators of the third step are counted; the difference between the two models, divided by that of their
parameters, is what grows with the parameters. Sequences have 16 tokens, so that activations are few. One process and
two show what is divided among the ranks. Collectives are counted too, as the copies that they are on one process.

Layers are not compiled. What runs uncompiled on a GPU too is all that differs between strategies: casts of weights and
gradients, sums, copies to buckets, the optimizer.
"""

import os
import sys
import tempfile
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.launched import launch_benchmark, send_result

STRATEGIES = ("fsdp2", "zero1", "zero2", "zero3")
MICRO_BATCHES = (1, 4)
PROCESSES = (1, 2)
LAYERS = (2, 6)
HIDDEN = 256
LENGTH = 16
COUNTED_STEP = 2
IN_PLACE = {
    "_fused_adamw_": 12 / 16,
    "_foreach_mul_": 1.0,
    "allreduce_": 0.0,
}
"""Bytes that an operator writes to its arguments without returning them, relative to those that it reads."""
NO_TRAFFIC = frozenset(
    ("_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "new_empty", "split", "chunk", "embedding")
)


class Traffic(TorchDispatchMode):
    """Counts bytes by operator while `is_counting`, but for views, products and attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.is_counting = False
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_product = func.overloadpacket in flop_registry or name.startswith("_scaled_dot")
        if not self.is_counting or func.is_view or is_product or name in NO_TRAFFIC:
            return result
        read = _bytes_of((args, kwargs))
        self.bytes[name] += read + _bytes_of(result) + round(read * IN_PLACE.get(name, 0.0))
        return result


def _bytes_of(values: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def measure() -> dict[str, Any]:
    """Launch one process alone, and each strategy on one process and on two."""
    found = {"one process": launch_benchmark("benchmarks.step_traffic", "alone", processes=1)}
    for strategy in STRATEGIES:
        for processes in PROCESSES:
            key = f"{strategy}, processes: {processes}"
            found[key] = launch_benchmark("benchmarks.step_traffic", processes=processes, config=strategy)
    summary = {key: {count: values["total"] for count, values in each.items()} for key, each in found.items()}
    return {"summary": summary, "bytes_per_parameter": found}


def train(layers: int, micro_batches: int) -> tuple[int, Counter[str]]:
    """Train a model for three steps; return its parameters, and the bytes of the third step by operator.

    Args:
        layers (`int`): Layers of the model.
        micro_batches (`int`): Micro-batches of a step.
    """
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        default_data_collator,
    )

    from hfscale.parallel.arguments import ParallelArguments
    from hfscale.recipe.gradient_precision import sum_gradients_in_fp32
    from hfscale.recipe.layout import set_up_parallelism

    traffic = Traffic()

    class CountOneStep(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            traffic.is_counting = state.global_step == COUNTED_STEP

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            traffic.is_counting = False

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            bf16=True,
            max_steps=COUNTED_STEP + 1,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=micro_batches,
            optim="adamw_torch_fused",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        set_up_parallelism(ParallelArguments(), args)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=HIDDEN,
            intermediate_size=3 * HIDDEN,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
        model = LlamaForCausalLM(config)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        row = {"input_ids": torch.arange(LENGTH), "labels": torch.arange(LENGTH)}
        rows: Any = [row] * (8 * micro_batches)
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=rows,
            data_collator=default_data_collator,
            callbacks=[CountOneStep()],
        )
        sum_gradients_in_fp32(trainer)
        with traffic:
            trainer.train()
    return parameters, traffic.bytes


def per_parameter(micro_batches: int) -> dict[str, float]:
    """Return the bytes of a step for each parameter of a layer, by operator, and their sum as `total`.

    Args:
        micro_batches (`int`): Micro-batches of a step.
    """
    (few, of_few), (many, of_many) = (train(layers, micro_batches) for layers in LAYERS)
    found = {name: (count - of_few[name]) / (many - few) for name, count in of_many.items()}
    kept = {name: round(count, 2) for name, count in sorted(found.items(), key=lambda each: -each[1]) if count > 0.5}
    return {"total": round(sum(found.values()), 1), **kept}


def worker() -> None:
    """Run in each process of the launch."""
    torch.set_num_threads(1)
    if "alone" in sys.argv:
        _leave_group()
    result = {f"{count} micro-batches": per_parameter(count) for count in MICRO_BATCHES}
    if not dist.is_initialized() or dist.get_rank() == 0:
        send_result(result)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _leave_group() -> None:
    """Have Accelerate see no process group, of which the launcher has set the variables."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


if __name__ == "__main__":
    worker()
