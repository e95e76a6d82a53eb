"""Writes the files of a choice of a plan: Accelerate YAML, DeepSpeed JSON, recipe and the launch command."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from hfscale.core.launch_file import (
    Beside,
    Expanded,
    Word,
    comment,
    launch_script,
    quoted,
    yaml_text,
)
from hfscale.core.shipped import shipped_root
from hfscale.core.spelling import spelled
from hfscale.core.written_files import LAUNCH_FILE, write_files
from hfscale.errors import UsageError
from hfscale.facts.models import catalogue
from hfscale.facts.support import LISTS, find_rule
from hfscale.planner.adapters import target_modules
from hfscale.planner.extras import trains_from_scratch
from hfscale.planner.job import OPTIMIZERS, Job, strategy_of
from hfscale.planner.launchable import (
    TRAINER_OPTIMIZERS,
    compiles_by_default,
    describe,
    recipe_of,
    uses_deepspeed,
    why_not,
)
from hfscale.planner.memory import trained_parameters
from hfscale.planner.plan import Choice, Plan

LEARNING_RATE = 1e-5
"""A low learning rate to start full fine-tuning with; a comment in the recipe's YAML asks the user to replace it."""
LORA_LEARNING_RATE = 2e-4
"""The usual learning rate of LoRA (Hu et al., arXiv 2106.09685, appendix D)."""
TASK_LEARNING_RATES = {"sft": 2e-5, "dpo": 1e-6, "grpo": 1e-6, "vision": 2e-5, "distillation": 2e-5}
"""TRL's own learning rates (TRL 1.16, trainer/sft_config.py, dpo_config.py, grpo_config.py)."""
LORA_FACTOR = 10.0
"""Factor on them for adapters: "about 10x" (TRL's documentation, page PEFT integration; Schulman et al., LoRA Without
Regret, 2025)."""
WARM_UP = 0.03
"""Part of the steps in which the learning rate rises, as in Tulu 3 (allenai/open-instruct, docs/tulu3.md)."""
MAX_EVAL_SAMPLES = 512
"""Sequences of an evaluation, as in the shipped recipes."""
LARGE_CHECKPOINT_BYTES = 100e9
"""Size from which a checkpoint is saved once an hour, and not every 15 minutes, the default of the recipes."""
PRECISION_FLAGS: dict[str, dict[str, Any]] = {"fp16": {"fp16": True}, "fp32": {"bf16": False}}
"""Recipe flags of the precisions that are neither the recipe's default (bf16) nor set by the launcher (fp8)."""
SYNC_EACH_BATCH = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
"""Without it accelerate reduces gradients only with the last micro-batch, and FSDP2 keeps them unsharded until
then."""


def emit(plan: Plan, folder: Path, *, number: int = 1, force: bool = False) -> list[Path]:
    """Write the files of a choice into a folder, or none of them if the user has changed one that is there.

    Args:
        plan (`Plan`): the plan.
        folder (`Path`): the folder; it is created if it does not exist.
        number (`int`): number of the choice, counted from 1.
        force (`bool`): whether files of the folder are replaced that hfscale did not write, or that were changed.

    Returns:
        `list[Path]`: the files written.

    Raises:
        UsageError: the plan has no such choice, or no recipe runs it; the message names the next that can be run. Or a
            file would be replaced that was changed.
        StorageError: the folder cannot be written.
    """
    choice = _chosen(plan, number)
    files = {
        "accelerate.yaml": accelerate_yaml(plan, choice, folder),
        "recipe.yaml": recipe_yaml(plan, choice, folder),
        "train.py": (shipped_root() / str(recipe_of(choice.estimate.job))).read_text(
            encoding="utf-8"
        ),
        LAUNCH_FILE: launch_sh(choice, folder),
    }
    if uses_deepspeed(choice.estimate.job):
        files["deepspeed.json"] = json.dumps(deepspeed_config(choice.estimate.job), indent=2) + "\n"
    write_files(folder, files, asked=spelled("emit", str(folder)), force=force)
    return [folder / name for name in files]


def _chosen(plan: Plan, number: int) -> Choice:
    """The choice of this number, after checking that it can be launched."""
    emit_name = spelled("emit")
    if not plan.choices:
        raise UsageError(
            f"{emit_name}: no layout fits, so there is nothing to write; plan for more GPUs"
        )
    if plan.request.stack != "hf":
        given = f"{spelled('stack')} is {plan.request.stack}"
        fix = f"plan with {spelled('stack', 'hf')}"
        raise UsageError(f"{emit_name} writes files for stack hf only, and {given}: {fix}")
    more = f"raise {spelled('top')}"
    if not 1 <= number <= len(plan.choices):
        given = f"{spelled('choice')} is {number}"
        there_are = f"there are {len(plan.choices)} choices"
        raise UsageError(f"{given}, and {there_are}: {more}, or give a smaller number")
    choice = plan.choices[number - 1]
    reason = why_not(choice.estimate.job)
    if reason is None:
        return choice
    other = plan.next_launchable
    if other is None:
        fix = f"none of the {len(plan.choices)} choices can: {more}"
    else:
        other_number, other_choice = other
        job = other_choice.estimate.job
        fix = f"{spelled('choice', other_number)} can ({strategy_of(job)}, {job.layout_summary})"
    refused = f"choice {number}, {choice.estimate.job.layout_summary}, cannot be launched"
    raise UsageError(f"{emit_name}: {refused} ({reason}); {fix}")


def launch_command(job: Job, folder: Path | None) -> list[Word]:
    """Build the launch command as a list of words.

    For several machines it contains shell variables that differ between machines.

    Args:
        job (`Job`): a run that a recipe can run (`launchable.why_not`).
        folder (`Path`, *optional*): the folder with `accelerate.yaml`, `train.py` and `recipe.yaml`; None in a script
            beside them, wherever they are moved.
    """

    def path(name: str) -> Word:
        return Beside(name) if folder is None else str(folder / name)

    command: list[Word] = ["accelerate", "launch", "--config_file", path("accelerate.yaml")]
    if node_count(job) > 1:
        command += ["--machine_rank", Expanded("MACHINE_RANK")]
        command += ["--main_process_ip", Expanded("MAIN_IP"), "--main_process_port", "29500"]
    if folder is None and uses_deepspeed(job):
        command += ["--deepspeed_config_file", path("deepspeed.json")]
    return [*command, path("train.py"), "--config", path("recipe.yaml")]


def node_count(job: Job) -> int:
    """Count the machines of a run.

    Args:
        job (`Job`): the run.
    """
    return math.ceil(job.layout.world_size / job.gpus_per_node)


def offload_ranks(job: Job) -> int:
    """Count the ranks of a machine that share its cores for an optimizer on the CPU; 0 without offload.

    Args:
        job (`Job`): the run.
    """
    if job.offload == "none":
        return 0
    return min(job.gpus_per_node, job.layout.world_size)


def launch_sh(choice: Choice, folder: Path) -> str:
    """Return the text of `launch.sh`, a script with the launch command.

    Args:
        choice (`Choice`): a choice that a recipe can run.
        folder (`Path`): the folder with `accelerate.yaml` and `recipe.yaml`.
    """
    job = choice.estimate.job
    nodes = node_count(job)
    about = [quoted(launch_command(job, folder))]
    if nodes > 1:
        about.append(
            f"Run on each of the {nodes} machines, with MACHINE_RANK from 0 to {nodes - 1} and MAIN_IP that of rank 0."
        )
    return launch_script(
        launch_command(job, None), about=about, nodes=nodes, offload_ranks=offload_ranks(job)
    )


def accelerate_yaml(plan: Plan, choice: Choice, folder: Path) -> str:
    """Return the text of `accelerate.yaml`, the Accelerate config.

    Args:
        plan (`Plan`): the plan, which gives the model's name for a comment.
        choice (`Choice`): a choice that a recipe can run.
        folder (`Path`): the folder that the file is for; the launch command in its first line contains it.
    """
    job = choice.estimate.job
    layout = job.layout
    nodes = node_count(job)
    lines = [
        comment(quoted(launch_command(job, folder))),
        comment(
            f"{plan.model} on {layout.world_size} {job.gpu.name}: {strategy_of(job)}, {job.layout_summary}."
        ),
        f"# Estimated: {choice.estimate.memory.total:.0f} GiB per GPU, {choice.estimate.time.total:.2f} s per step.",
        "compute_environment: LOCAL_MACHINE",
        *_strategy_lines(job, folder, nodes),
        *_axis_lines(job),
        f"num_machines: {nodes}",
        "machine_rank: 0",
        f"num_processes: {layout.world_size}",
        "use_cpu: false",
    ]
    if nodes == 1:
        lines.append("main_process_port: 0")
    if job.precision == "fp8":
        lines += ["mixed_precision: fp8", "fp8_config:", "  backend: AO # needs torchao"]
    elif not uses_deepspeed(job):  # with a deepspeed_config_file the key is not allowed
        lines.append(
            "mixed_precision: bf16 # for your own script; the recipes decide it themselves (--bf16)"
        )
    return "\n".join(lines) + "\n"


def _strategy_lines(job: Job, folder: Path, nodes: int) -> list[str]:
    """Lines that choose the strategy."""
    strategy = strategy_of(job)
    if uses_deepspeed(job):
        return _deepspeed_lines(job, folder, nodes)
    if strategy == "fsdp2":
        return _fsdp_lines(job)
    if job.layout.world_size == 1:
        return ['distributed_type: "NO"']
    line = "distributed_type: MULTI_GPU"
    if job.runs_parallel_trainer:
        line += " # ParallelTrainer shards the model, accelerate must not wrap it again"
    elif strategy in ("parallel", "native"):
        line += " # transformers shards the model, accelerate must not wrap it again"
    return [line]


def _deepspeed_lines(job: Job, folder: Path, nodes: int) -> list[str]:
    lines = [
        "distributed_type: DEEPSPEED",
        "deepspeed_config:",
        f"  deepspeed_config_file: {_scalar(str(folder / 'deepspeed.json'))}",
        f"  zero3_init_flag: {_scalar(job.zero == 3)}",
    ]
    # launch.sh runs on each machine; by default accelerate would start the other machines over ssh
    if nodes > 1:
        lines.append("  deepspeed_multinode_launcher: standard")
    return lines


def _fsdp_lines(job: Job) -> list[str]:
    """Lines as in accelerate_configs/fsdp2.yaml; with fp8 as in fp8.yaml, where torchao changes layers before they are
    sharded."""
    return [
        "distributed_type: FSDP",
        "fsdp_config:",
        "  fsdp_version: 2",
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP # one unit per decoder layer",
        f"  fsdp_reshard_after_forward: {_scalar(job.reshard)}",
        "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        f"  fsdp_cpu_ram_efficient_loading: {_scalar(job.precision != 'fp8')}",
        "  fsdp_activation_checkpointing: false # recipe.yaml decides",
    ]


def _axis_lines(job: Job) -> list[str]:
    """Lines of the mesh sizes, if the strategy has more than one axis."""
    layout = job.layout
    if strategy_of(job) not in ("fsdp2", "parallel") or layout.dp_shard == layout.world_size:
        return []
    if job.runs_parallel_trainer:
        return []
    sizes = {
        "dp_replicate_size": layout.dp_replicate,
        "dp_shard_size": layout.dp_shard,
        "cp_size": layout.cp,
        "tp_size": layout.tp,
    }
    lines = [f"  parallelism_config_{name}: {size}" for name, size in sizes.items() if size > 1]
    if layout.cp > 1:
        lines.append("  parallelism_config_cp_comm_strategy: allgather")
    return ["parallelism_config:", *lines]


def deepspeed_config(job: Job) -> dict[str, Any]:
    """Build the DeepSpeed config from the shipped one of the job's ZeRO stage.

    Its `auto` values are filled in from the training arguments.
    """
    shipped = shipped_root() / "ds_configs" / f"zero{max(1, job.zero)}.json"
    config: dict[str, Any] = json.loads(shipped.read_text(encoding="utf-8"))
    parts = {"none": (), "optimizer": ("optimizer",), "full": ("optimizer", "param")}[job.offload]
    for part in parts:
        config["zero_optimization"][f"offload_{part}"] = {"device": "cpu", "pin_memory": True}
    return config


def recipe_yaml(plan: Plan, choice: Choice, folder: Path) -> str:
    """Return the text of `recipe.yaml`, which contains the recipe's flags.

    Args:
        plan (`Plan`): the plan, which gives the model and, if it is known, the number of tokens for `max_steps`.
        choice (`Choice`): a choice that a recipe can run.
        folder (`Path`): the folder that the file is for; the launch command in its first line contains it.
    """
    job = choice.estimate.job
    has_reference = job.task == "grpo" and job.beta > 0
    has_adapters = job.method != "full"
    values = _model_flags(plan.model, needs_weights=has_adapters or has_reference)
    if job.task == "text":
        values["block_size"] = job.seq_len
    else:
        values |= task_flags(job)
    values |= layout_flags(job if plan.growing is None else plan.growing.largest(job))
    # In the order in which a reader of the file looks for them: model, layout, precision, method, optimizer.
    values |= PRECISION_FLAGS.get(job.precision, {})
    if job.precision == "fp32" and job.gpu.tf32_tflops:
        values["tf32"] = True
    if job.compile or compiles_by_default(job):
        # FSDP2 shards layers, between which a full graph breaks
        values["torch_compile_regional"] = job.compile
    if job.liger and job.chunked_loss:
        values["fused_loss"] = "chunked"
    elif job.liger:
        values["use_liger_kernel"] = True
    if job.method != "full":
        values |= _adapter_flags(job)
    if job.method == "qlora":
        values["load_in_4bit"] = True
    values["optim"] = TRAINER_OPTIMIZERS[job.optimizer]
    if job.ema_decay is not None:
        values |= {"ema_decay": job.ema_decay, "average_device": job.average_device}
    if job.activation_offload:
        values["activation_offloading"] = True
    values |= plan.extras.flags
    values["learning_rate"] = learning_rate(job)
    values |= {"lr_scheduler_type": "cosine", "warmup_steps": WARM_UP}
    if choice.steps is not None:
        values["max_steps"] = choice.steps
    if plan.growing is not None:
        del values["gradient_accumulation_steps"]
        values["batch_schedule"] = plan.growing.text
    values |= evaluation_flags(choice) | save_flags(choice)
    values["output_dir"] = f"runs/{_name(plan.model)}"
    gpus = f"{job.layout.world_size} {job.gpu.name}"
    lines = [
        comment(quoted(launch_command(job, folder))),
        comment(
            f"{plan.model}, {job.global_batch * job.sequences_per_example} x {job.seq_len} tokens per step on {gpus}."
        ),
        "#",
        "# Set your data (dataset_name or train_file) and your learning rate; the one below is a low one to start "
        "with.",
    ]
    if job.task == "grpo":
        lines.append("# Name your reward_functions: rewards.py:is_correct.")
    lines += ["", *(f"{name}: {_scalar(value)}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def evaluation_flags(choice: Choice) -> dict[str, Any]:
    """Build the recipe flags of the evaluations, one for each save.

    There are none where sequences are cut over GPUs, which evaluations are not, and none of generated completions.

    Args:
        choice (`Choice`): a choice that a recipe can run.
    """
    job = choice.estimate.job
    is_cut = job.layout.cp > 1 and not job.runs_parallel_trainer
    if is_cut or job.generates:
        return {"validation_split_percentage": 0}
    return {
        "eval_strategy": "steps",
        "eval_steps": _steps_between_saves(choice),
        "max_eval_samples": MAX_EVAL_SAMPLES,
        "per_device_eval_batch_size": job.micro_batch,
    }


def save_flags(choice: Choice) -> dict[str, Any]:
    """Build the recipe flags of the checkpoints, of which large ones are saved once an hour.

    Args:
        choice (`Choice`): a choice that a recipe can run.
    """
    return {
        "save_steps": _steps_between_saves(choice),
        "save_minutes": _minutes_between_saves(choice.estimate.job),
        "save_total_limit": 2,
    }


def _minutes_between_saves(job: Job) -> int:
    size = (4.0 + OPTIMIZERS[job.optimizer]["state_bytes"]) * trained_parameters(job)
    return 60 if size >= LARGE_CHECKPOINT_BYTES else 15


def _steps_between_saves(choice: Choice) -> int:
    """Steps that are predicted to take the time between two saves, rounded to 1, 2 or 5 times a power of ten."""
    estimate = choice.estimate
    steps = 60 * _minutes_between_saves(estimate.job) / estimate.time.total
    power = 10 ** math.floor(math.log10(max(1.0, steps)))
    factor = max(one for one in (1, 2, 5) if one == 1 or one * power <= steps)
    return int(power * factor)


def layout_flags(job: Job) -> dict[str, Any]:
    """Build the recipe flags that follow from the layout: pipeline stages, the split of the batch, recomputation."""
    if job.runs_parallel_trainer:
        flags = stage_flags(job)
    else:
        flags = native_flags(job)
    flags["per_device_train_batch_size"] = job.micro_batch
    flags["gradient_accumulation_steps"] = job.micro_batches
    # transformers' own replicas reduce gradients over the ranks of a replica with each micro-batch, and over the
    # replicas with the last one, unless each micro-batch is to do both.
    defers_replicas = job.is_native and job.layout.dp_replicate > 1
    is_sharded = job.zero == 3 and not job.runs_parallel_trainer and not uses_deepspeed(job)
    if is_sharded and job.micro_batches > 1 and not defers_replicas:
        flags["accelerator_config"] = SYNC_EACH_BATCH
    # TRL's default is to recompute
    if job.activation_checkpointing != "none" or job.task != "text":
        flags["activation_checkpointing"] = job.activation_checkpointing != "none"
    if job.activation_checkpointing == "selective":
        flags["recompute"] = "selective"
    return flags


def learning_rate(job: Job) -> float:
    """Return a learning rate to start with: a low one, or with a task that of TRL."""
    is_full = job.method == "full"
    if job.task == "text":
        return LEARNING_RATE if is_full else LORA_LEARNING_RATE
    rate = TASK_LEARNING_RATES[job.task]
    return rate if is_full else rate * LORA_FACTOR


def task_flags(job: Job) -> dict[str, Any]:
    """Build the flags of TRL that belong to the job's task."""
    if job.task == "sft":
        packs = (
            job.shape.model_type not in LISTS["documents_mixed"]
        )  # the recipe refuses to pack these
        return {"max_length": job.seq_len, "packing": packs}
    if job.task == "dpo":
        flags: dict[str, Any] = {"max_length": job.seq_len}
        if job.precompute_ref_log_probs:
            flags["precompute_ref_log_probs"] = True
        return flags
    if job.task == "vision":
        flags = {"max_length": job.seq_len}
        if job.train_vision_tower:
            flags["train_vision_tower"] = True
        if job.method == "full" and not job.trains_projector:
            flags["train_projector"] = False
        return flags
    if job.task == "distillation":
        return _teacher_flags(job)
    flags = {
        "num_generations": job.num_generations,
        "max_completion_length": job.max_completion_length,
        "beta": job.beta,
    }
    if job.generation_rounds > 1:
        flags["steps_per_generation"] = job.micro_batches // job.generation_rounds
    return flags


def _teacher_flags(job: Job) -> dict[str, Any]:
    """The recipe flags of a distillation. DeepSpeed keeps the teacher in the format of the training."""
    assert job.teacher is not None, "checked by `check_task`"
    name = _model_flags(job.teacher, needs_weights=True)["model_name_or_path"]
    flags: dict[str, Any] = {
        "teacher_model_name_or_path": name,
        "max_completion_length": job.max_completion_length,
    }
    if not uses_deepspeed(job):
        flags["teacher_dtype"] = job.teacher_dtype
    if job.whole_teacher and job.zero == 3:
        flags["shard_teacher"] = False
    return flags


def native_flags(job: Job) -> dict[str, Any]:
    """Build the recipe flags by which transformers shards the model itself; none where it does not."""
    if not job.is_native:
        return {}
    flags = {"fsdp_size": job.layout.dp_shard}
    if job.layout.dp_replicate > 1:
        flags["dp_replicate_size"] = job.layout.dp_replicate
    return flags | {"ep_size": job.expert_parallel}


def stage_flags(job: Job) -> dict[str, Any]:
    """Build the recipe flags of `ParallelTrainer`'s mesh and schedule."""
    layout = job.layout
    flags: dict[str, Any] = {"tp_size": layout.tp, "pp_size": layout.pp}
    if layout.cp > 1:
        flags["cp_size"] = layout.cp
    if job.expert_parallel > 1:
        flags["ep_size"] = job.expert_parallel
    flags["dp_replicate_size"] = layout.dp_replicate
    flags["dp_shard_size"] = layout.dp_shard
    flags["pipeline_schedule"] = job.schedule_name
    if job.virtual_stages > 1:
        flags["virtual_stages"] = job.virtual_stages
    if job.sequence_parallel:
        flags["sequence_parallel"] = True
    unchecked = replace(describe(job), check_parity=False)
    if find_rule(unchecked, "check_parity") is not None:  # no test has compared it with one process
        flags["check_parity"] = True
    return flags


def _adapter_flags(job: Job) -> dict[str, Any]:
    """The recipe flags of the adapters."""
    values: dict[str, Any] = {"use_peft": True, "lora_r": job.lora_rank}
    modules = target_modules(job)
    if job.lora_target_modules is not None and not isinstance(modules, str):
        values["lora_target_modules"] = list(modules)
    if job.lora_dropout:
        values["lora_dropout"] = job.lora_dropout
    return values


def _model_flags(model: str, *, needs_weights: bool) -> dict[str, Any]:
    """The recipe flag of the model: a checkpoint, or a folder with only a config, which is trained from scratch.

    Adapters are trained for the weights of a checkpoint, and TRL loads a reference model from it: the folder must have
    them by then.
    """
    path = Path(model)
    folder = path.parent if path.is_file() else path
    if not folder.is_dir() or (model.casefold() in catalogue() and not path.exists()):
        built_in = catalogue().get(model.casefold())
        if built_in:
            return {"model_name_or_path": built_in["hub"][0]}
        return {"model_name_or_path": model}
    if needs_weights or not trains_from_scratch(model):
        return {"model_name_or_path": str(folder)}
    return {"config_name": str(folder)}


def _name(model: str) -> str:
    """A short name of the model for a folder."""
    path = Path(model)
    if path.is_file():
        path = path.resolve().parent
    return path.name or "plan"


def _scalar(value: object) -> str:
    """A value as YAML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        return json.dumps(value)  # JSON is YAML
    if isinstance(value, str):
        return yaml_text(value)
    # YAML 1.1 reads 1e-05 as text, because a float needs a decimal point.
    return f"{value:.1e}" if isinstance(value, float) else str(value)
