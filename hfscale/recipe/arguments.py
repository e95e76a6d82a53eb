"""The flags of the recipes as dataclasses for `HfArgumentParser`, with the checks of their values.

Flag names are those of Hugging Face's `run_clm.py` where it has them. Every `TrainingArguments` flag is accepted as
well.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate.utils import DynamoBackend, parse_flag_from_env
from transformers import TrainingArguments, get_scheduler
from transformers.integrations import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import IntervalStrategy, SchedulerType

from hfscale.averaging.options import AverageOptions
from hfscale.core.flags import require_from_0, require_positive
from hfscale.core.nvidia_driver import check_gpus_of_driver
from hfscale.core.option_flags import check_flags, flag, options_taken_by, with_flags_of
from hfscale.core.spelling import spelled
from hfscale.core.text_files import parse_json, read_text
from hfscale.core.versions import pass_activation_checkpointing, require
from hfscale.errors import HfScaleError, MissingDependencyError, ParameterError, UsageError
from hfscale.facts.compression import Compression
from hfscale.facts.support import Combination, check_support
from hfscale.islands.options import IslandOptions
from hfscale.metrics.added_options import AlertOptions, ProfilerOptions, SampleOptions
from hfscale.recipe.compression import METHODS, ONE_BIT_OPTIMIZERS
from hfscale.recipe.fused_loss import FUSED_LOSSES
from hfscale.recipe.modalities import freeze_beside_text
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.recipe.optimizer import DEFAULT_OPTIMIZER, OPTIMIZERS, hidden_from_transformers
from hfscale.recipe.recompute import RECOMPUTE_POLICIES, checkpointing_kwargs
from hfscale.recipe.resume import keep_global_batch
from hfscale.scaling import PARTS
from hfscale.why.options import TraceOptions

# The mixin is used in front of subclasses of TrainingArguments; as a subclass itself it would reset their defaults.
if TYPE_CHECKING:
    from transformers import PreTrainedModel

    _TrainingArguments = TrainingArguments
else:
    _TrainingArguments = object

LOSS_ON = ("assistant", "completion", "all")
"""Values of `--loss_on`."""
PACKINGS = ("none", "concat", "bestfit")
"""Values of `--packing`."""

OF_CALLBACKS = (
    *map(options_taken_by, PARTS.values()),
    IslandOptions,
    Compression,
    SampleOptions,
    TraceOptions,
    ProfilerOptions,
    AlertOptions,
    AverageOptions,
)
"""The options of the callbacks, from which their flags follow."""

JSON_FLAGS = (
    "lr_scheduler_kwargs",
    "accelerator_config",
    "fsdp_config",
    "gradient_checkpointing_kwargs",
    "activation_checkpointing_kwargs",
)
"""Flags of transformers whose value is a JSON mapping or, unless they end in `kwargs`, a file that holds one."""

JSON_FLAGS_OF_TRL = (
    "model_init_kwargs",
    "teacher_model_init_kwargs",
    "dataset_kwargs",
    "generation_kwargs",
    "chat_template_kwargs",
)
"""Flags of TRL's arguments whose value is a JSON mapping; each class has some of them."""


@dataclass(kw_only=True)
class SourceArguments:
    """Which records the model is trained on.

    Raises:
        UsageError: two flags exclude each other, or a value is out of range.
    """

    dataset_name: str | None = flag("Dataset of the hub, or a folder that `datasets` can load.")
    dataset_config_name: str | None = flag("Configuration of that dataset.")
    dataset_train_split: str = flag("Split of that dataset to train on.", default="train")
    train_file: str | None = flag(
        "Training text: .txt, .json, .jsonl, .csv or .parquet; or token file: .ds."
    )
    data_mix: str | None = flag("YAML list of several datasets and files, with the weight of each.")
    validation_file: str | None = flag("Evaluation text, in one of the same formats.")
    validation_split_percentage: int = flag(
        "Share of the training text used for evaluation if there is no evaluation text; 0 on the command line also "
        "leaves out the evaluations of the YAML file.",
        default=5,
    )
    streaming: bool = flag(
        "Read the dataset during training instead of preparing it first.", default=False
    )
    max_train_samples: int | None = flag(
        "Limit on the number of training sequences (TRL: records)."
    )
    max_eval_samples: int | None = flag(
        "Limit on the number of evaluation sequences (TRL: records)."
    )

    def __post_init__(self) -> None:
        self.named_by: str | None = None  # the line of --data_mix that names this source
        named = [name for name in ("dataset_name", "train_file", "data_mix") if getattr(self, name)]
        if len(named) > 1:
            both = " and ".join(map(spelled, named[:2]))
            raise UsageError(f"{both} both name the training text: give one of them")
        dataset = spelled("dataset_name")
        for name in ("validation_file", "streaming"):
            if getattr(self, name) and not named:
                given = spelled(name)
                either = f"{spelled('train_file')} or {dataset}"
                raise UsageError(f"{given} is given without {either}: give one of them too")
        if self.dataset_config_name and not self.dataset_name:
            given = spelled("dataset_config_name", self.dataset_config_name)
            raise UsageError(f"{given} is given without {dataset}: give both")
        require_positive(self, "max_train_samples", "max_eval_samples")
        require_from_0(self, validation_split_percentage=100)


@dataclass(kw_only=True)
class DataArguments(SourceArguments):
    """Which text the model is trained on, and how it becomes sequences.

    Raises:
        UsageError: two flags exclude each other, or a value is out of range.
    """

    block_size: int = flag("Tokens per sequence; text is packed into full blocks.", default=1024)
    preprocessing_num_workers: int | None = flag(
        "Number of processes that tokenise on each node. Default: its ranks."
    )
    packing: str | None = flag(
        "How documents become sequences: none (one each, padded), concat (joined, then cut) or bestfit (complete "
        "ones that fit together). Default: concat for text, bestfit for conversations.",
        choices=PACKINGS,
    )
    document_attention: bool | None = flag(
        "Whether attention is cut at the boundaries of packed documents. Default: true with bestfit."
    )
    loss_on: str | None = flag(
        "Tokens to train on: "
        + ", ".join(LOSS_ON)
        + ". Default: assistant for conversations, completion for prompts "
        "with completions, all for text.",
        choices=LOSS_ON,
    )
    chat_template: str | None = flag(
        "File with the Jinja template of conversations. Default: the tokenizer's."
    )
    show_samples: int = flag(
        "Number of training samples to print, with the tokens that are trained on.", default=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "block_size", "preprocessing_num_workers")
        require_from_0(self, "show_samples")
        if self.chat_template and not Path(self.chat_template).is_file():
            given = spelled("chat_template", self.chat_template)
            raise UsageError(f"{given} is not a file: give one with a Jinja template")
        rows = Combination(packing=self.packing, document_attention=self.document_attention)
        check_support(rows)


@dataclass(kw_only=True)
@with_flags_of(*OF_CALLBACKS)
class ScalingArguments:
    """Options of the callbacks: a field for each of their flags.

    Raises:
        UsageError: a value is out of range, or the baseline is not a file.
    """

    early_stopping_patience: int | None = flag(
        "Stop after this many evaluations without a lower loss."
    )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        require_positive(self, "early_stopping_patience")
        check_flags(self, *OF_CALLBACKS)
        baseline = self.scaling_baseline
        if baseline is not None and not Path(baseline).is_file():
            raise UsageError(
                f"{spelled('scaling_baseline', baseline)} is not a file: record one with hfscale sweep"
            )


@dataclass(kw_only=True)
class RecipeTrainingMixin(_TrainingArguments):
    """The flags, defaults and checks that the recipes add to `TrainingArguments` or to a subclass of a library.

    It is the first base class: `class SFTArguments(RecipeTrainingMixin, SFTConfig)`. Every other flag keeps the
    default and the meaning that it has in the library.

    Raises:
        UsageError: a value is unknown or out of range, or two flags exclude each other.
        MissingDependencyError: `--deepspeed` is given and DeepSpeed is not installed.
    """

    is_of_recipe: ClassVar[bool] = True
    """By this the rules of what works with what know a recipe; it is no flag."""

    records: ClassVar[str | None] = None
    """With TRL, the kind of records that its trainer needs: a key of `hfscale.recipe.trl.COLUMNS`."""

    task: ClassVar[str] = "text"
    """What a step trains on, as the rules of what works with what name it."""

    reads_images: ClassVar[bool] = False
    """Whether the model reads images with its text, so that its class is one of image-text models."""

    output_dir: str | None = flag(
        "Folder for checkpoints, metrics and the model.", default="runs/default"
    )
    optim: str = flag(
        "The optimizer: one of transformers' or muon, which orthogonalizes updates of the matrices of hidden layers.",
        default=DEFAULT_OPTIMIZER,
        choices=OPTIMIZERS,
    )
    logging_steps: float = flag("Steps between two logs.", default=10)
    save_total_limit: int | None = flag("Number of committed checkpoints to keep.", default=3)
    report_to: list[str] | None = field(
        default_factory=lambda: ["none"],
        metadata={
            "help": "Trackers that receive the metrics: wandb, tensorboard, … Files are always written."
        },
    )
    activation_checkpointing: bool | None = field(
        default=None,
        metadata={
            "help": "Recompute activations in the backward pass: less memory, about 20%% slower.",
            "nargs": "?",
            "const": True,
        },
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keywords of torch.utils.checkpoint, as JSON."}
    )
    bf16: bool | None = flag("bf16 mixed precision. Default: on if the hardware has it.")  # type: ignore[assignment]
    recompute: str = flag(
        "What --activation_checkpointing recomputes: complete layers (full), or all but attention and every second "
        "matrix product (selective).",
        default="full",
        choices=RECOMPUTE_POLICIES,
    )
    torch_compile_regional: bool | None = field(
        default=None,
        metadata={
            "help": "Compile one layer and reuse it for all equal ones instead of compiling the full model: much "
            "faster to compile. Default: on an NVIDIA GPU, for text and models with which it was tried.",
            "nargs": "?",
            "const": True,
        },
    )
    ddp_find_unused_parameters: bool | None = flag(
        "Search each backward pass for parameters without a gradient; only models that skip some need it.",
        default=False,
    )
    ddp_broadcast_buffers: bool | None = flag(
        "Send rank 0's buffers to all ranks before each step; those of language models are constant.",
        default=False,
    )
    logging_nan_inf_filter: bool = flag(
        "Leave NaN and infinite losses out of the log, which waits for the GPU twice per micro-batch and hides them.",
        default=False,
    )
    dataloader_num_workers: int = flag("Processes per rank that load batches.", default=2)
    dataloader_persistent_workers: bool = flag("Keep these processes between epochs.", default=True)
    dataloader_prefetch_factor: int | None = flag(
        "Batches that each of them loads in advance.", default=4
    )
    resume_from_checkpoint: str | None = flag(
        "true: resume from the newest verified checkpoint of output_dir, or start from scratch if there is none; "
        "false: start from scratch; a path: resume from that checkpoint.",
        default="true",
    )
    load_once: str | None = flag(
        "Folder on the disk of each node: all nodes together read each byte of the model and of the checkpoint once "
        "from the file system they share, and send it to each other. Default: each reads what it needs."
    )

    def __post_init__(self) -> None:
        # huggingface_hub also reads the variable, and no checkpoint's training_args.bin holds it
        if self.hub_token:
            os.environ["HF_TOKEN"] = self.hub_token
            self.hub_token = None
        self._set_hardware_defaults()
        self._check_numbers()
        if self.max_steps == 0 or self.max_steps < -1:
            given = spelled("max_steps", self.max_steps)
            raise UsageError(f"{given} trains nothing: give 1 or more, or -1 to count epochs")
        if self.save_strategy == "best" and self.metric_for_best_model is None:
            given = spelled("save_strategy", "best")
            metric = spelled("metric_for_best_model")
            raise UsageError(f"{given} needs a metric: give {metric}, such as loss")
        self.cuts_attention = False  # until a model's attention is cut between documents
        if self.torch_compile_regional:
            use_regional_compilation(self)
        if self.recompute == "selective":
            self.activation_checkpointing_kwargs = self._selective_kwargs()
        for name in (*JSON_FLAGS, *JSON_FLAGS_OF_TRL):
            content = _check_json(
                f"--{name}", vars(self).get(name), is_text=name.endswith("kwargs")
            )
            if name == "accelerator_config":
                self._copy_batches_asynchronously(content)
        if (
            self.torch_compile_backend
            and self.torch_compile_backend.upper() not in DynamoBackend.list()
        ):
            given = spelled("torch_compile_backend", self.torch_compile_backend)
            known = ", ".join(DynamoBackend.list()).lower()
            raise UsageError(f"{given} is not known: choose one of {known}")
        if self.deepspeed:
            require("DeepSpeed", "--deepspeed")
        _check_deepspeed_config(self.deepspeed)
        pass_activation_checkpointing(self)
        with hidden_from_transformers(self):
            super().__post_init__()  # type: ignore[no-untyped-call]
        for name in self.report_to or []:
            if name not in INTEGRATION_TO_CALLBACK:
                given = spelled("report_to", name)
                known = ", ".join(INTEGRATION_TO_CALLBACK)
                raise UsageError(f"{given} is not known: choose one of all, none, {known}")
            if name == "wandb":
                require("W&B", "--report_to wandb")
        _check_scheduler(self)

    def check_method(self, model_args: ModelArguments) -> None:
        """Check what the training method needs of the model. A subclass for a method overrides it.

        Args:
            model_args (`ModelArguments`): the flags of the model and of the adapters.
        """

    def choose_trained_parts(self, model: "PreTrainedModel", *, use_peft: bool) -> None:
        """Freeze what a recipe of text does not train. A subclass for records of another kind overrides it.

        Args:
            model (`PreTrainedModel`): the model, before adapters are added.
            use_peft (`bool`): whether adapters of the language model are trained.
        """
        freeze_beside_text(model)

    @property
    def flattens_rows(self) -> bool:
        """Whether a Trainer of TRL puts the rows of a batch one after another."""
        return False

    def keep_global_batch(
        self, checkpoint: str | None, *, data_parallel_size: int | None = None
    ) -> None:
        """Keep the checkpoint's global batch, as `hfscale.recipe.resume.keep_global_batch` explains.

        Args:
            checkpoint (`str`, *optional*): the checkpoint to resume from.
            data_parallel_size (`int`, *optional*): number of ranks that read different samples. Default: all.
        """
        keep_global_batch(self, checkpoint, data_parallel_size=data_parallel_size)

    def _set_hardware_defaults(self) -> None:
        if not self.use_cpu and not parse_flag_from_env("ACCELERATE_USE_CPU"):
            _require_usable_gpus()
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        if self.bf16 is None:  # a launcher's config that asks for fp8 is not overruled
            is_open = not (
                self.fp16 or self.use_cpu or os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8"
            )
            self.bf16 = is_open and torch.cuda.is_bf16_supported(including_emulation=False)
        if os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16" and not (self.bf16 or self.fp16):
            # That of the config is for scripts without such a flag
            os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        if self.use_cpu:
            self.dataloader_pin_memory = False  # there is no device to copy to
        if self.dataloader_num_workers == 0:
            self.dataloader_persistent_workers = False
            self.dataloader_prefetch_factor = None

    def _copy_batches_asynchronously(self, config: dict[str, Any] | None) -> None:
        """Complete `--accelerator_config`: no copy of a batch to the GPU waits for it, unless the user wants that.

        Args:
            config (`dict`, *optional*): the content of the flag; None if it is not given.
        """
        is_mapping = self.accelerator_config is None or isinstance(
            self.accelerator_config, dict | str
        )
        # A copy from memory that is not pinned waits in any case
        if is_mapping and self.dataloader_pin_memory:
            self.accelerator_config = {"non_blocking": True} | (config or {})

    def _check_numbers(self) -> None:
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
            adam_beta1=1,
            adam_beta2=1,
            label_smoothing_factor=1,
            seed=2**32,
        )

    def _selective_kwargs(self) -> dict[str, object]:
        selective = spelled("recompute", self.recompute)
        if not self.activation_checkpointing:
            needed = spelled("activation_checkpointing", True)
            raise UsageError(f"{selective} chooses what is recomputed: give {needed} too")
        if self.activation_checkpointing_kwargs:
            kwargs = spelled("activation_checkpointing_kwargs")
            raise UsageError(f"{selective} and {kwargs} exclude each other: give one")
        return checkpointing_kwargs(self.recompute)


@dataclass(kw_only=True)
class RecipeTrainingArguments(RecipeTrainingMixin, TrainingArguments):
    """`TrainingArguments` with the defaults and checks of the recipes, the choice of the loss, and the compression of
    DDP's gradients."""

    fused_loss: str = flag(
        "How the loss is computed: chunked (head and cross-entropy for a part of the tokens at a time), liger (by its "
        "kernel) or none (from all logits). auto takes the first that works on an NVIDIA GPU, and none elsewhere.",
        default="auto",
        choices=FUSED_LOSSES,
    )
    use_liger_kernel: bool | None = flag(  # type: ignore[assignment]
        "Liger's kernels for layers and, unless --fused_loss names another, the loss. Default: for layers on an "
        "NVIDIA GPU, if liger-kernel is installed and nothing compiles them."
    )
    router_aux_loss_coef: float | None = flag(
        "Weight of the loss that balances the experts of a mixture; 0: none. Default: as the model's config says."
    )
    router_bias_update_rate: float = flag(
        "Change of routers' bias per step towards an even load of the experts (DeepSeek-V3: 0.001).",
        default=0.0,
    )
    gradient_compression: str = flag(
        "How DDP compresses the gradients that it sends: " + ", ".join(METHODS) + ".",
        default="none",
        choices=METHODS,
    )
    powersgd_rank: int = flag("Rank of PowerSGD's approximation.", default=4)
    topk_fraction: float = flag(
        "Fraction of the gradient's elements that topk sends.", default=0.01
    )
    compression_start_step: int = flag(
        "Uncompressed steps before powersgd, topk or a 1-bit optimizer starts.", default=1000
    )

    def __post_init__(self) -> None:
        require_positive(self, "powersgd_rank", "topk_fraction")
        require_from_0(
            self, "compression_start_step", "router_aux_loss_coef", "router_bias_update_rate"
        )
        if self.gradient_compression in ONE_BIT_OPTIMIZERS and self.compression_start_step == 0:
            method = self.gradient_compression
            rule = f"{method} needs a warm-up in which it measures the variance of the gradients"
            fix = "give 15 to 25% of the steps"
            raise ParameterError("compression_start_step", 0, f"{rule}; {fix}")
        if self.fused_loss == "liger" and self.use_liger_kernel is False:
            loss = spelled("fused_loss", "liger")
            layers = spelled("use_liger_kernel", False)
            raise UsageError(f"{loss} and {layers} exclude each other: give one of them")
        super().__post_init__()


def use_regional_compilation(args: RecipeTrainingMixin) -> None:
    """Set that layers are compiled, and not the full model.

    Args:
        args (`RecipeTrainingMixin`): changed in place; Accelerate reads the environment.
    """
    args.torch_compile = args.torch_compile_regional = True
    os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"


def complete_early_stopping(args: TrainingArguments, patience: int | None) -> None:
    """Complete the flags of early stopping: its metric becomes the loss if none is given.

    Args:
        args (`TrainingArguments`): changed in place.
        patience (`int`, *optional*): `--early_stopping_patience`. With None nothing changes.

    Raises:
        UsageError: early stopping is requested without evaluations.
    """
    if patience is None:
        return
    args.metric_for_best_model = args.metric_for_best_model or "loss"
    args.greater_is_better = False
    if args.eval_strategy == "no":
        given = spelled("early_stopping_patience")
        strategy = spelled("eval_strategy", "steps")
        steps = spelled("eval_steps")
        raise UsageError(f"{given} counts evaluations: give {strategy} and {steps} too")


def check_evaluation(args: TrainingArguments, *, has_evaluation: bool) -> None:
    """Check that there is text to evaluate on where the flags ask for evaluations.

    Args:
        args (`TrainingArguments`): the flags of the training.
        has_evaluation (`bool`): whether there is an evaluation text.

    Raises:
        UsageError: evaluations are requested without a text.
    """
    if args.eval_strategy != "no" and not has_evaluation:
        strategy = IntervalStrategy(args.eval_strategy).value
        given = spelled("eval_strategy", strategy)
        text = spelled("validation_file")
        raise UsageError(f"{given} needs text to evaluate on: give {text}")


def _check_json(name: str, value: object, *, is_text: bool) -> dict[str, Any] | None:
    """Return a JSON mapping, or the content of a file that holds one; None for a value that is neither.

    Args:
        name (`str`): how the user gave the value, such as `--fsdp_config`.
        value (`object`): JSON text or the path of a file; anything but a string has been parsed already.
        is_text (`bool`): whether the value cannot be a path. Text that begins with `{` never is one.

    Raises:
        UsageError: a text is neither; the message begins with `name`.
    """
    if not isinstance(value, str):
        return value if isinstance(value, dict) else None
    try:
        is_text = is_text or value.startswith("{")
        content = parse_json(value if is_text else read_text(Path(value)))
    except OSError as error:
        raise UsageError(f"{name} {value} is neither a JSON mapping nor a readable file") from error
    except json.JSONDecodeError as error:
        position = f"line {error.lineno} column {error.colno}"
        raise UsageError(f"{name} {value} is not JSON: {position}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} {value} is not UTF-8 text: byte {error.start}: save it as UTF-8"
        ) from error
    if not isinstance(content, dict):
        raise UsageError(f"{name} {value} is not a JSON mapping")
    return content


def _check_deepspeed_config(deepspeed: object) -> None:
    """Name the file of a broken DeepSpeed config, which transformers and accelerate do not.

    Args:
        deepspeed (`object`): the value of `--deepspeed`, which wins over the launcher's config.
    """
    name = "--deepspeed"
    value = deepspeed
    if not value and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        name = "deepspeed_config_file"  # the key of the Accelerate config
        value = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    # The libraries refuse other wrong values and name them
    if isinstance(value, str) and Path(value).is_file():
        _check_json(name, value, is_text=False)


def _require_usable_gpus() -> None:
    """Raise an error if this machine has GPUs and torch sees none: the run would silently train on the CPU."""
    for finding in check_gpus_of_driver():
        if finding.level == "error":
            raise MissingDependencyError(
                f"{finding.message}; or train on the CPU with --use_cpu true"
            )


def _check_scheduler(args: TrainingArguments) -> None:
    """Let transformers check the schedule and its arguments before a model is loaded."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
    kwargs = args.lr_scheduler_kwargs or {}
    assert isinstance(kwargs, dict)  # TrainingArguments has read the JSON
    name = f"{SchedulerType(args.lr_scheduler_type).value} with --lr_scheduler_kwargs '{json.dumps(kwargs)}'"
    with errors_name_flag("--lr_scheduler_type", name):
        get_scheduler(
            args.lr_scheduler_type, optimizer, 1, 10, scheduler_specific_kwargs=dict(kwargs)
        )


@contextmanager
def errors_name_flag(flag: str, value: object) -> Iterator[None]:
    """Turn whatever a library raises about a name or a file into a UsageError that names the flag it came from.

    Args:
        flag (`str`): the flag, such as `--config_name`.
        value (`object`): its value.

    Raises:
        UsageError: the code inside the context raised an error that is neither one of hfscale nor a lack of memory.
    """
    try:
        yield
    except (HfScaleError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if (
            isinstance(value, str)
            and value.startswith(("/", "./", "../", "~"))
            and not Path(value).exists()
        ):
            raise UsageError(
                f"{flag} {value} does not exist: correct the path, or give a name on the hub"
            ) from error
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise UsageError(f"{flag} {value} cannot be used: {kind}{one_line(error)}") from error


def one_line(error: Exception) -> str:
    """Return an error's message without line breaks, at most about 300 characters long."""
    message = " ".join(str(error).split())
    return message if len(message) <= 300 else f"{message[:300]}…"
