"""Scripts of users that the table of what works with what refuses, each as a function that makes its Trainer.

A case runs in two ranks on a CPU, with Accelerate's and DeepSpeed's own setup; nothing of a run is simulated.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, ParallelismConfig
from forked_ranks import run_ranks
from native_runs import make_model
from parallel_families import small_config
from peft import AdaLoraConfig, LoraConfig, TaskType, get_peft_model
from tiny import LENGTH, RandomTokens, make_callback, tiny_arguments, tiny_model
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, default_data_collator
from transformers.distributed import DistributedConfig

from hfscale.errors import HfScaleError
from hfscale.optim.muon import Muon
from hfscale.recipe.recompute import checkpointing_kwargs
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.fsdp2 import let_fsdp_run_on_cpu

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
REGIONAL = {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true"}


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a script does before it calls `train`."""

    make: Callable[["Place"], Trainer]
    """Makes the Trainer."""
    env: Mapping[str, str] = field(default_factory=dict)
    """What the launcher has left in the environment."""
    callback: str = "ScalingMetricsCallback"
    """The only callback of hfscale that the script has."""
    adds_later: bool = False
    """Whether the callback is added when the Trainer has been made, so that it meets it in the first training."""
    spelled: str = ""
    """A part of the message: parameters as the script or its launcher's config writes them."""
    uses_meshes: bool = False
    """Whether Accelerate is to run FSDP2 or device meshes, which it does for accelerators only."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a rank gives to a script."""

    folder: Path
    callbacks: list[TrainerCallback]
    uses_meshes: bool


def trainer(place: Place, model: Any = None, *, optimizer_cls_and_kwargs: Any = None, **arguments: Any) -> Trainer:
    """Return a Trainer as a script makes it."""
    values = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2} | arguments
    args = tiny_arguments(place.folder / "out", **values)
    if place.uses_meshes:
        let_fsdp_run_on_cpu()
    return Trainer(
        model=tiny_model() if model is None else model,
        args=args,
        train_dataset=WithPositions(),
        data_collator=default_data_collator,
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        callbacks=place.callbacks,
    )


class WithPositions(RandomTokens):
    """The same rows with the positions that Ulysses needs."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return super().__getitem__(index) | {"position_ids": torch.arange(LENGTH)}


def of_jamba() -> Any:
    """Return a small model whose layers have convolutions."""
    return AutoModelForCausalLM.from_config(small_config("jamba"))


def zero(stage: int, *, of_zero: Mapping[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    """Return a config of DeepSpeed."""
    sizes = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    return sizes | {"zero_optimization": {"stage": stage, **(of_zero or {})}} | config


def by_file(config: Mapping[str, Any]) -> dict[str, str]:
    """Return what `accelerate launch` leaves for a config with a `deepspeed_config_file`, whose content this is.

    Accelerate reads the variable as JSON where it names no file.
    """
    sizes = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    content = json.dumps(sizes | dict(config))
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": content}


def ulysses() -> ParallelismConfig:
    """Return sizes by which two ranks share each sequence under DeepSpeed."""
    import deepspeed
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    deepspeed.init_distributed(dist_backend="gloo")  # Accelerate does it for GPUs only
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    return ParallelismConfig(sp_size=2, sp_backend="deepspeed", sp_handler=handler)


def native(place: Place, *, made: Callable[[Path], Path] = make_model, **sizes: int) -> Any:
    """Return a model that transformers has distributed while it loaded it."""
    path = made(place.folder / f"model{os.environ['RANK']}")
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, distributed_config=DistributedConfig(**sizes)
    )


def dense(folder: Path, **config: Any) -> Path:
    """Save a small Llama, and return its folder."""
    tiny_model(**config).save_pretrained(folder)
    return folder


def lora(model: Any, *, trains_a: bool = True, **options: Any) -> Any:
    """Return a model with LoRA; without `trains_a` it is LoRA-FA (Zhang et al., arXiv 2308.03303)."""
    config = LoraConfig(r=4, task_type=TaskType.CAUSAL_LM, target_modules=["q_proj", "v_proj"], **options)
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and (trains_a or "lora_A" not in name))
    return adapted


def in_4_bits(model: Any) -> Any:
    """Return a model as bitsandbytes leaves it, of which this machine needs no more than the mark."""
    model.is_loaded_in_4bit = True
    return model


def adalora(model: Any) -> Any:
    """Return a model with AdaLoRA."""
    config = AdaLoraConfig(
        task_type=TaskType.CAUSAL_LM, target_modules=["q_proj"], init_r=4, target_r=2, total_step=9, tinit=1, tfinal=2
    )
    return get_peft_model(model, config)


def with_hook(made: Trainer, hook: DDPCommunicationHookType) -> Trainer:
    """Let DDP send gradients by one of Accelerate's hooks, as a script does."""
    made.accelerator.ddp_handler = DistributedDataParallelKwargs(comm_hook=hook)
    return made


def grpo(place: Place) -> Trainer:
    """Return TRL's GRPOTrainer with compiled layers."""
    from kinds_trl import generating

    folder = str(place.folder / "out")
    options = {"use_cpu": True, "torch_compile": True, "report_to": [], "max_steps": 2}
    return generating(place.folder, place.callbacks, output_dir=folder, **options)


SCRIPTS: dict[str, list[Script]] = {
    "AutoTP of DeepSpeed": [
        Script(make=lambda f: trainer(f, deepspeed=zero(1, tensor_parallel={"autotp_size": 2}))),
        Script(make=lambda f: trainer(f, deepspeed=zero(1, tensor_parallel={"autotp_size": 2})), adds_later=True),
    ],
    "settings of DeepSpeed that are known not to work": [
        Script(
            make=lambda f: trainer(f, deepspeed=zero(2, expert_parallel={"enabled": True, "autoep_size": 2})),
            spelled="expert_parallel in the DeepSpeed config: AutoEP",
        )
    ],
    "settings of DeepSpeed that no test has shown": [
        Script(
            make=lambda f: trainer(f),
            env=by_file({"zero_optimization": {"stage": 1}, "a_mode_of_tomorrow": {"size": 2}}),
            callback="AlertCallback",
            spelled="a_mode_of_tomorrow in the DeepSpeed config",
        )
    ],
    "DeepSpeed's 1-bit optimizers": [
        Script(
            make=lambda f: trainer(
                f, deepspeed=zero(0, optimizer={"type": "OneBitAdam", "params": {"lr": "auto"}}), save_strategy="no"
            ),
            callback="LRScalingCallback",
        )
    ],
    "Ulysses under ZeRO-1 with bf16 gradients that are accumulated in fp32": [
        Script(
            make=lambda f: trainer(
                f,
                deepspeed=zero(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}),
                bf16=True,
                parallelism_config=ulysses(),
            ),
            spelled="cp_size=2 under ZeRO-1",
        )
    ],
    "Liger Kernel with expert parallelism": [
        Script(
            make=lambda f: trainer(f, native(f, fsdp_size=2, ep_size=2), use_liger_kernel=True, save_strategy="no"),
            spelled="use_liger_kernel=True and ep_size=2",
        )
    ],
    "QLoRA with parameters on NVMe": [
        Script(
            make=lambda f: trainer(
                f,
                lora(in_4_bits(tiny_model())),
                deepspeed=zero(3, of_zero={"offload_param": {"device": "nvme", "nvme_path": str(f.folder)}}),
            ),
            spelled="QLoRA and ZeRO-3 parameters on NVMe",
        )
    ],
    "ring attention on a CPU": [
        Script(
            make=lambda f: trainer(f, parallelism_config=ParallelismConfig(cp_size=2)),
            env=FSDP,
            uses_meshes=True,
            spelled="cp_size=2 under FSDP2",
        ),
        Script(
            make=lambda f: trainer(f),
            env=FSDP | {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"},
            uses_meshes=True,
            spelled="parallelism_config_cp_size: 2 under FSDP2",
        ),
    ],
    "Adafactor with parameters that torch shards": [
        Script(make=lambda f: trainer(f, optim="adafactor"), env=FSDP, uses_meshes=True, callback="AlertCallback")
    ],
    "AdaLoRA and trained prompts under FSDP2": [
        Script(make=lambda f: trainer(f, adalora(tiny_model())), env=FSDP, uses_meshes=True)
    ],
    "adapters with frozen random parameters under DeepSpeed, `ParallelTrainer` and transformers' own sharding": [
        Script(make=lambda f: trainer(f, lora(tiny_model(), trains_a=False), deepspeed=zero(2))),
        Script(make=lambda f: trainer(f, lora(tiny_model(), trains_a=False), deepspeed=zero(0))),
    ],
    "adapters with torch.compile of the full model under FSDP2": [
        Script(make=lambda f: trainer(f, lora(tiny_model()), torch_compile=True), env=FSDP, uses_meshes=True)
    ],
    "LoRA with transformers' tensor parallelism": [
        Script(make=lambda f: trainer(f, lora(native(f, made=dense, tp_size=2)), save_strategy="no"), uses_meshes=True)
    ],
    "Muon with ZeRO": [
        Script(
            make=lambda f: trainer(
                f, model := tiny_model(), optimizer_cls_and_kwargs=(Muon, {"module": model}), deepspeed=zero(2)
            )
        )
    ],
    "GRPO and distillation under DDP with compiled layers": [Script(make=grpo, env=REGIONAL)],
    "context parallelism without FSDP2 or DeepSpeed": [
        Script(make=lambda f: trainer(f, parallelism_config=ulysses()), uses_meshes=True)
    ],
    "gradients compressed by NCCL's hooks on a CPU": [
        Script(make=lambda f: with_hook(trainer(f), DDPCommunicationHookType.BF16)),
        Script(make=lambda f: with_hook(trainer(f), DDPCommunicationHookType.POWER_SGD)),
    ],
    "FSDP1": [Script(make=lambda f: trainer(f), env=FSDP | {"FSDP_VERSION": "1"}, uses_meshes=True)],
    "8-bit optimizers with transformers' own sharding": [
        Script(make=lambda f: trainer(f, native(f, fsdp_size=2), optim="adamw_bnb_8bit", save_strategy="no"))
    ],
    "tensor parallelism under FSDP or DeepSpeed": [
        Script(
            make=lambda f: trainer(f, deepspeed=zero(2), parallelism_config=ParallelismConfig(tp_size=2)),
            uses_meshes=True,
        )
    ],
    "layers with a convolution under ZeRO-3 and torch.compile": [
        Script(
            make=lambda f: trainer(f, of_jamba(), deepspeed=zero(3), torch_compile=True, save_strategy="no"),
            env=REGIONAL,
        )
    ],
}
"""Rule -> scripts that it refuses."""

WORKS: dict[str, Script] = {
    "ZeRO-3 that does not gather the weights for a save": Script(make=lambda f: trainer(f, deepspeed=zero(3))),
    "selective recomputation under ZeRO-3": Script(
        make=lambda f: trainer(
            f,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs=checkpointing_kwargs("selective"),
            deepspeed=zero(3),
        )
    ),
    "frozen adapters in a training that saves nothing": Script(
        make=lambda f: trainer(f, lora(tiny_model(), trains_a=False), deepspeed=zero(2), save_strategy="no")
    ),
    "gradients sent in fp16": Script(make=lambda f: with_hook(trainer(f), DDPCommunicationHookType.FP16)),
    "transformers' own sharding, compiled": Script(
        make=lambda f: trainer(
            f, native(f, fsdp_size=2), torch_compile=True, torch_compile_backend="eager", save_strategy="no"
        )
    ),
    "LoRA under FSDP2": Script(make=lambda f: trainer(f, lora(tiny_model())), env=FSDP, uses_meshes=True),
    "sequences shared under ZeRO-3": Script(
        make=lambda f: trainer(f, deepspeed=zero(3), parallelism_config=ulysses())
    ),
}
"""Scripts that a rule for recipes alone would refuse, and that train."""


def attempt(script: Script, folder: Path, *, checked: bool = True) -> list[dict[str, Any]]:
    """Run a script, and return for each rank what it ended with and the steps that it took."""
    folder.mkdir(parents=True, exist_ok=True)
    run_ranks(2, _run, script, folder, checked, log=folder / "log", env=script.env, timeout_s=180)
    found = [folder / f"rank-{rank}.json" for rank in range(2)]
    return [json.loads(path.read_text()) if path.is_file() else {"lost": True} for path in found]


def _run(script: Script, folder: Path, checked: bool) -> None:
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    if not checked:
        Strategy.check_support = lambda *args, **kwargs: None  # type: ignore[method-assign]
    made: Trainer | None = None
    try:
        callback = make_callback(script.callback)
        place = Place(folder=folder, callbacks=[] if script.adds_later else [callback], uses_meshes=script.uses_meshes)
        made = script.make(place)
        if script.adds_later:
            made.add_callback(callback)
        dist.barrier()  # a rank that is refused ends, and another one may still connect to it
        made.train()
        ended: dict[str, Any] = {"kind": None}
    except HfScaleError as error:
        ended = {"kind": type(error).__name__, "message": str(error)}
    except Exception as error:  # of a library: the script fails in another way
        ended = {"kind": type(error).__name__, "message": f"not hfscale: {error}"}
    ended["steps"] = 0 if made is None else made.state.global_step
    with suppress(AttributeError):
        ended["losses"] = [log["loss"] for log in made.state.log_history if "loss" in log]
    (folder / f"rank-{rank}.json").write_text(json.dumps(ended))
