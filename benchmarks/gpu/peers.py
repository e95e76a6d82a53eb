"""Parts: what a user would run instead, with the same shape: Trainer, TRL's SFTTrainer, a loop in PyTorch."""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

from benchmarks.gpu.part import report
from benchmarks.gpu.prediction import predict
from benchmarks.gpu.settings import ON_GPU, TINY, work_folder
from benchmarks.gpu.shapes import LORA_RANK, Shape, config_folder, random_tokens, shape_named

DIFFERENT_ROWS = 256
WARM_UP_STEPS, STEPS = 8, 20
if TINY:
    WARM_UP_STEPS, STEPS = 1, 3
RUNS = {"trainer": "Trainer", "trl": "TRL's SFTTrainer", "loop": "loop in PyTorch, eager"}
OPTION_NAMES = {"torch_compile": "torch_compile", "use_liger_kernel": "Liger"}


class Tokens(Dataset):
    """Random tokens, as many rows as any run needs.

    Args:
        length (`int`): Tokens per row.
    """

    def __init__(self, length: int) -> None:
        self.rows = torch.from_numpy(random_tokens(DIFFERENT_ROWS, length))

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.rows[index % DIFFERENT_ROWS]
        return {"input_ids": ids, "labels": ids}


class Watch(TrainerCallback):
    """Measures the steps after the first ones."""

    seconds_per_step: float

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == WARM_UP_STEPS:
            start_measuring()
            self.begun = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wait_for_gpu()
        self.seconds_per_step = (time.perf_counter() - self.begun) / (state.global_step - WARM_UP_STEPS)


def wait_for_gpu() -> None:
    """Wait until the GPU has done what it was given."""
    if ON_GPU:
        torch.cuda.synchronize()


def start_measuring() -> None:
    """Wait for the GPU and forget its highest use of memory so far."""
    wait_for_gpu()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()


def trainer(shape: str, *options: str) -> None:
    """Measure transformers' Trainer.

    Args:
        shape (`str`): The name of a shape.
        options (`str`): `torch_compile`, `use_liger_kernel`: arguments of the Trainer that are set.
    """
    of_shape = shape_named(shape)
    model = _with_adapters(_random_model(shape), of_shape)
    arguments = TrainingArguments(**_arguments(of_shape), **dict.fromkeys(options, True))
    watch = Watch()
    run = Trainer(model=model, args=arguments, train_dataset=Tokens(of_shape.length), callbacks=[watch])
    run.train()
    compiled = "torch_compile" in options
    predicted = predict(shape, compiled=compiled, fused_loss="use_liger_kernel" in options)
    name = " and ".join([RUNS["trainer"], *(OPTION_NAMES[option] for option in options)])
    _report(shape, name, watch.seconds_per_step, predicted)


def trl(shape: str) -> None:
    """Measure SFTTrainer of TRL on rows that need no packing.

    Args:
        shape (`str`): The name of a shape.
    """
    from datasets import Dataset as Table
    from trl import SFTConfig, SFTTrainer

    of_shape = shape_named(shape)
    rows = random_tokens(DIFFERENT_ROWS, of_shape.length).tolist()
    watch = Watch()
    peft_config = None
    if of_shape.lora:
        peft_config = _adapters()
    run = SFTTrainer(
        _random_model(shape),
        args=SFTConfig(**_arguments(of_shape), max_length=of_shape.length, packing=False),
        train_dataset=Table.from_dict({"input_ids": rows * 4}),
        peft_config=peft_config,
        processing_class=AutoTokenizer.from_pretrained(config_folder(shape)),
        callbacks=[watch],
    )
    run.train()
    _report(shape, RUNS["trl"], watch.seconds_per_step, {})


def loop(shape: str) -> None:
    """Measure a loop without Trainer: autocast in bf16, fused AdamW, nothing compiled, no log.

    Args:
        shape (`str`): The name of a shape.
    """
    of_shape = shape_named(shape)
    model = _with_adapters(_random_model(shape), of_shape)
    if of_shape.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    step = _loop_step(model, of_shape)
    for _ in range(2):
        step()
    start_measuring()
    begun = time.perf_counter()
    steps = STEPS - WARM_UP_STEPS
    for _ in range(steps):
        step()
    wait_for_gpu()
    _report(shape, RUNS["loop"], (time.perf_counter() - begun) / steps, {})


def _loop_step(model: torch.nn.Module, shape: Shape) -> Callable[[], None]:
    """Return a function that trains a model for one step."""
    device = next(model.parameters()).device
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=ON_GPU)
    rows = torch.from_numpy(random_tokens(shape.accumulation * shape.micro_batch, shape.length))
    batches = rows.view(shape.accumulation, shape.micro_batch, shape.length).to(device)

    def step() -> None:
        for ids in batches:
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss / shape.accumulation
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _random_model(shape: str) -> Any:
    """Initialise a model where it trains: in bf16 for adapters, else in fp32."""
    dtype = torch.float32
    if shape_named(shape).lora:
        dtype = torch.bfloat16
    device = "cpu"
    if ON_GPU:
        device = "cuda"
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config_folder(shape)), dtype=dtype)


def _adapters() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")


def _with_adapters(model: Any, shape: Shape) -> Any:
    if not shape.lora:
        return model
    from peft import get_peft_model

    return get_peft_model(model, _adapters())


def _arguments(shape: Shape) -> dict[str, Any]:
    """Return the arguments that Trainer and SFTTrainer share."""
    return {
        "output_dir": tempfile.mkdtemp(dir=work_folder()),
        "max_steps": STEPS,
        "per_device_train_batch_size": shape.micro_batch,
        "gradient_accumulation_steps": shape.accumulation,
        "bf16": ON_GPU,
        "use_cpu": not ON_GPU,
        "report_to": "none",
        "logging_steps": 5,
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": shape.recompute,
        "learning_rate": 1e-5,
    }


def _report(shape: str, run: str, seconds_per_step: float, predicted: dict[str, float]) -> None:
    of_shape = shape_named(shape)
    memory = {}
    if ON_GPU:
        memory["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    report(
        shape=shape,
        method=of_shape.method,
        run=run,
        tokens_s=round(of_shape.tokens_per_step / seconds_per_step),
        **memory,
        step_ms=round(1e3 * seconds_per_step, 1),
        **predicted,
    )
