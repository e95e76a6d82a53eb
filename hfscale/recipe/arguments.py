"""The flags of the recipes, as dataclasses for `HfArgumentParser`, and what each may be.

Names are those of Hugging Face's `run_clm.py` where it has them, and every `TrainingArguments` flag is taken as well.
"""

import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate.utils import DynamoBackend
from transformers import TrainingArguments, get_scheduler
from transformers.integrations import INTEGRATION_TO_CALLBACK

from hfscale.errors import HfScaleError, MissingDependencyError, UsageError
from hfscale.facts.lr_rules import RULES
from hfscale.parallel.arguments import ParallelArguments as ParallelArguments
from hfscale.recipe.compression import METHODS
from hfscale.recipe.recompute import POLICIES, checkpointing_kwargs
from hfscale.utils.flags import flag, require_from_0, require_positive


@dataclass(kw_only=True)
class ModelArguments:
    """Which model, and how much of it is trained."""

    model_name_or_path: str | None = flag("Checkpoint to start from: a hub id or a folder.")
    config_name: str | None = flag("Train from scratch: a config.json, its folder or a hub id.")
    tokenizer_name: str | None = flag("Tokenizer, where it is not the model's: a hub id or a folder.")
    attn_implementation: str | None = flag("sdpa, flash_attention_2, … (transformers chooses by default).")
    use_peft: bool = flag("Train LoRA adapters instead of the whole model.", default=False)
    load_in_4bit: bool = flag("Hold the frozen base of --use_peft in 4 bits (QLoRA; bitsandbytes).", default=False)
    lora_r: int = flag("Rank of the LoRA adapters.", default=16)
    lora_alpha: int = flag("LoRA scaling numerator.", default=32)
    lora_dropout: float = flag("Dropout in front of the adapters.", default=0.0)
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Modules to adapt; default: every linear layer but the head."}
    )

    def __post_init__(self) -> None:
        if self.model_name_or_path and self.config_name:
            raise UsageError(
                "--model_name_or_path starts from a checkpoint and --config_name from scratch: give one of them"
            )
        if self.load_in_4bit and not (self.use_peft and self.model_name_or_path):
            raise UsageError(
                "--load_in_4bit is for the frozen base of adapters: give --use_peft true and --model_name_or_path"
            )
        require_positive(self, "lora_r", "lora_alpha")
        require_from_0(self, lora_dropout=1)


@dataclass(kw_only=True)
class DataArguments:
    """What text is trained on."""

    dataset_name: str | None = flag("Dataset of the hub, or a folder that `datasets` loads.")
    dataset_config_name: str | None = flag("Configuration of that dataset.")
    train_file: str | None = flag("Training text: .txt, .json, .jsonl, .csv or .parquet.")
    validation_file: str | None = flag("Evaluation text, of the same kinds.")
    validation_split_percentage: int = flag("Share of the training text set apart when there is no other.", default=5)
    streaming: bool = flag("Read the dataset while training instead of preparing it first.", default=False)
    block_size: int = flag("Tokens per sequence; text is packed into full blocks.", default=1024)
    max_train_samples: int | None = flag("Use only so many training sequences.")
    max_eval_samples: int | None = flag("Use only so many evaluation sequences.")
    preprocessing_num_workers: int | None = flag("Processes that tokenise.")

    def __post_init__(self) -> None:
        if self.dataset_name and self.train_file:
            raise UsageError("--dataset_name and --train_file both name the training text: give one of them")
        if self.validation_file and not (self.train_file or self.dataset_name):
            raise UsageError("--validation_file is given without --train_file or --dataset_name: give one of them too")
        if self.streaming and not (self.train_file or self.dataset_name):
            raise UsageError("--streaming is given without --train_file or --dataset_name: give one of them too")
        if self.dataset_config_name and not self.dataset_name:
            raise UsageError(f"--dataset_config_name {self.dataset_config_name} is given without --dataset_name")
        require_positive(self, "block_size", "max_train_samples", "max_eval_samples", "preprocessing_num_workers")
        require_from_0(self, validation_split_percentage=100)


@dataclass(kw_only=True)
class ScalingArguments:
    """What hfscale's callbacks do."""

    lr_scaling_rule: str = flag(
        "How the learning rate follows the global batch: " + ", ".join(RULES) + ".", default="auto", choices=RULES
    )
    base_global_batch_size: int | None = flag("Sequences per step that --learning_rate was tuned for.")
    base_block_size: int | None = flag("Tokens per sequence it was tuned for, where that was another length.")
    critical_batch_size: int | None = flag("Sequences per step beyond which the learning rate stops growing.")
    warmup_scale: float = flag("What the warm-up steps are multiplied by.", default=1.0)
    save_minutes: float | None = flag("Save after so many minutes at the latest.", default=15.0)
    notice_s: float | None = flag("Seconds from a signal to the end of the process; default: what the launcher waits.")
    asynchronous_save: bool = flag("Write checkpoints while training goes on, where that is exact.", default=True)
    checkpoint_remote: str | None = flag("Second home of the checkpoints: s3://bucket/run, gs://…, file://…")
    peak_tflops: float | None = flag("Dense peak of one device in TFLOP/s, for MFU on hardware not in the table.")
    usd_per_gpu_hour: float | None = flag("Price of one device, for scaling/usd; default: of the price list.")
    scaling_baseline: str | None = flag("A file of `hfscale sweep` that scaling/efficiency is measured against.")
    noise_scale: bool = flag("Measure the gradient noise scale on the steps that are logged.", default=False)
    early_stopping_patience: int | None = flag("Stop after so many evaluations without a better loss.")

    def __post_init__(self) -> None:
        others = (
            "lr_scaling_rule",
            "asynchronous_save",
            "checkpoint_remote",
            "scaling_baseline",
            "noise_scale",
        )
        require_positive(self, *(name for name in vars(self) if name not in others))
        if self.scaling_baseline is not None and not Path(self.scaling_baseline).is_file():
            raise UsageError(f"--scaling_baseline {self.scaling_baseline} is no file: record one with hfscale sweep")


@dataclass(kw_only=True)
class RecipeTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the defaults of the recipes; every flag means what transformers says it means."""

    output_dir: str | None = flag("Where checkpoints, metrics and the model go.", default="runs/default")
    logging_steps: float = flag("Steps between logs.", default=10)
    save_total_limit: int | None = flag("Committed checkpoints to keep.", default=3)
    report_to: list[str] | None = field(
        default_factory=lambda: ["none"], metadata={"help": "Where metrics go besides files: wandb, tensorboard, …"}
    )
    bf16: bool | None = flag("bf16 mixed precision; default: where the hardware has it.")
    recompute: str = flag(
        "What --activation_checkpointing computes again: whole layers (full), or all but attention and every second "
        "matrix product (selective).",
        default="full",
        choices=POLICIES,
    )
    torch_compile_regional: bool = flag(
        "Compile one layer for all of its kind instead of the whole model: far shorter compilation.", default=False
    )
    profile_steps: list[int] | None = field(
        default=None, metadata={"help": "Optimizer steps whose trace is written to output_dir/profile."}
    )
    gradient_compression: str = flag(
        "What DDP makes of its gradients on the way: " + ", ".join(METHODS) + ".", default="none", choices=METHODS
    )
    powersgd_rank: int = flag("Rank of PowerSGD's approximation.", default=4)
    topk_fraction: float = flag("Share of the gradient that topk sends.", default=0.01)
    compression_start_step: int = flag("Plain steps before powersgd or topk.", default=1000)
    ddp_find_unused_parameters: bool | None = flag(
        "Search each backward for parameters without a gradient; needed only by models that skip some.", default=False
    )
    dataloader_num_workers: int = flag("Processes per rank that load batches.", default=2)
    dataloader_persistent_workers: bool = flag("Keep them between epochs.", default=True)
    dataloader_prefetch_factor: int | None = flag("Batches each of them reads ahead.", default=4)
    resume_from_checkpoint: str | None = flag(
        "true: from the newest verified checkpoint of output_dir, afresh where there is none; "
        "false: afresh; a path: from that checkpoint.",
        default="true",
    )

    def __post_init__(self) -> None:
        if self.hub_token:  # where huggingface_hub looks as well, and no checkpoint's training_args.bin will hold it
            os.environ["HF_TOKEN"], self.hub_token = self.hub_token, None
        has_accelerator = torch.accelerator.is_available()
        self.use_cpu = self.use_cpu or not has_accelerator
        if self.bf16 is None:  # a launcher's config that asks for fp8 is not to be overruled
            is_open = not (self.fp16 or self.use_cpu or os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8")
            self.bf16 = is_open and torch.cuda.is_bf16_supported(including_emulation=False)
        if self.use_cpu:
            self.dataloader_pin_memory = False  # there is nothing to copy to
        if self.dataloader_num_workers == 0:
            self.dataloader_persistent_workers, self.dataloader_prefetch_factor = False, None
        require_positive(
            self,
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "save_total_limit",
            "save_steps",
            "logging_steps",
            "eval_steps",
            "eval_accumulation_steps",
            "num_train_epochs",
            "dataloader_prefetch_factor",
            "ddp_bucket_cap_mb",
            "ddp_timeout",
            "powersgd_rank",
            "topk_fraction",
        )
        require_from_0(
            self,
            "learning_rate",
            "warmup_steps",
            "weight_decay",
            "max_grad_norm",
            "adam_epsilon",
            "eval_delay",
            "neftune_noise_alpha",
            "data_seed",
            "dataloader_num_workers",
            "compression_start_step",
            adam_beta1=1,
            adam_beta2=1,
            label_smoothing_factor=1,
            seed=2**32,
        )
        if self.max_steps == 0 or self.max_steps < -1:
            raise UsageError(f"--max_steps {self.max_steps} trains nothing: give 1 or more, or -1 to go by epochs")
        if self.save_strategy == "best" and self.metric_for_best_model is None:
            raise UsageError("--save_strategy best needs to know by what: give --metric_for_best_model, such as loss")
        if self.torch_compile_regional:
            self.torch_compile = True
            os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"  # where accelerate reads it
        if self.recompute == "selective":
            self.activation_checkpointing_kwargs = self._selective()
        _check_json(
            self,
            "lr_scheduler_kwargs",
            "accelerator_config",
            "fsdp_config",
            "gradient_checkpointing_kwargs",
            "activation_checkpointing_kwargs",
        )
        if self.torch_compile_backend and self.torch_compile_backend.upper() not in DynamoBackend.list():
            raise UsageError(
                f"--torch_compile_backend {self.torch_compile_backend} is none of "
                f"{', '.join(DynamoBackend.list()).lower()}"
            )
        if self.deepspeed and importlib.util.find_spec("deepspeed") is None:
            raise MissingDependencyError('--deepspeed needs DeepSpeed: pip install "hfscale[deepspeed]"')
        super().__post_init__()
        for name in self.report_to or []:
            if name not in INTEGRATION_TO_CALLBACK:
                raise UsageError(f"--report_to {name} is none of all, none, {', '.join(INTEGRATION_TO_CALLBACK)}")
        _check_scheduler(self)

    def _selective(self) -> dict[str, object]:
        if not self.activation_checkpointing:
            raise UsageError("--recompute selective says what is computed again: give --activation_checkpointing true")
        if self.activation_checkpointing_kwargs:
            raise UsageError(
                "--recompute selective and --activation_checkpointing_kwargs exclude each other: give one"
            )
        return checkpointing_kwargs(self.recompute)


def _check_json(arguments: object, *names: str) -> None:
    for name in names:
        value = getattr(arguments, name)
        if not isinstance(value, str):
            continue
        try:
            is_text = value.startswith("{") or name.endswith("kwargs")
            content = json.loads(value if is_text else Path(value).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"--{name} {value} is neither a JSON mapping nor a readable file") from error
        except ValueError as error:
            raise UsageError(f"--{name} {value} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise UsageError(f"--{name} {value} is not a JSON mapping")


def _check_scheduler(args: TrainingArguments) -> None:
    """Some schedules need arguments, and none takes those of another: ask transformers before a model is loaded."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
    kwargs = args.lr_scheduler_kwargs or {}
    name = f"{args.lr_scheduler_type.value} with --lr_scheduler_kwargs '{json.dumps(kwargs)}'"
    with blaming("--lr_scheduler_type", name):
        get_scheduler(args.lr_scheduler_type, optimizer, 1, 10, scheduler_specific_kwargs=dict(kwargs))


@contextmanager
def blaming(flag: str, value: object) -> Iterator[None]:
    """Turn whatever transformers raises about a name or a file into a UsageError that names the flag it came from."""
    try:
        yield
    except (HfScaleError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(value, str) and value.startswith(("/", "./", "../", "~")) and not Path(value).exists():
            raise UsageError(f"{flag} {value} does not exist") from error
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise UsageError(f"{flag} {value} cannot be used: {kind}{one_line(error)}") from error


def one_line(error: Exception) -> str:
    """An error's words without their line breaks, cut where they go on."""
    words = " ".join(str(error).split())
    return words if len(words) <= 300 else f"{words[:300]}…"


def check_evaluation(args: TrainingArguments, *, has_evaluation: bool, patience: int | None) -> None:
    """Complete and check the arguments that need an evaluation text.

    Raises:
        UsageError: evaluations or early stopping are asked for, and there is nothing to evaluate on.
    """
    if patience is not None:
        args.metric_for_best_model, args.greater_is_better = args.metric_for_best_model or "loss", False
        if args.eval_strategy == "no":
            raise UsageError("--early_stopping_patience counts evaluations: give --eval_strategy steps --eval_steps N")
    if args.eval_strategy != "no" and not has_evaluation:
        raise UsageError(
            f"--eval_strategy {args.eval_strategy.value} needs text to evaluate on: give --validation_file"
        )
