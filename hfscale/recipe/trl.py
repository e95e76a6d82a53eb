"""What the recipes for TRL's trainers share: arguments, records, the reference model of DPO, and teachers.

A missing or too old TRL is reported in one line when this module is imported.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

from hfscale.core.flags import require_from_0, require_positive
from hfscale.core.option_flags import flag
from hfscale.core.spelling import speaking, spelled
from hfscale.core.text_files import parse_json
from hfscale.core.versions import is_fsdp_enabled, require
from hfscale.errors import DataError, LayoutError, ParameterError, UsageError
from hfscale.facts.strategies import WEIGHTS
from hfscale.parallel.weights import draw_weights
from hfscale.recipe.arguments import RecipeTrainingMixin, SourceArguments, check_evaluation
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.recipe.models import load_weights
from hfscale.recipe.sources import (
    AnyDataset,
    errors_name_source,
    limit_splits,
    load_splits,
    source_name,
)
from hfscale.recipe.teacher import DTYPES, load_teacher
from hfscale.trainer.strategies.requested import requested

require("TRL recipes")

from trl import (  # noqa: E402 (after the check)
    DistillationConfig,
    DPOConfig,
    GRPOConfig,
    SFTConfig,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

COLUMNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "chat": (("messages",), ("prompt", "completion"), ("conversations",), ("text",)),
    "preference": (("chosen", "rejected"),),
    "prompt": (("prompt",),),
    "pictures": tuple(
        (column, *said)
        for column in ("images", "image")
        for said in (("messages",), ("prompt", "completion"))
    ),
}
"""Kind of records -> sets of columns, of which a dataset needs one."""


@dataclass(kw_only=True)
class SFTArguments(RecipeTrainingMixin, SFTConfig):
    """TRL's `SFTConfig` with the defaults and checks of the recipes."""

    task: ClassVar[str] = "sft"
    records: ClassVar[str | None] = "chat"

    def __post_init__(self) -> None:
        require_positive(self, "max_length")
        super().__post_init__()

    @property
    def flattens_rows(self) -> bool:
        """Whether TRL puts the rows of a batch one after another."""
        packs_documents = self.packing and self.packing_strategy != "wrapped"
        return bool(self.padding_free or packs_documents)


@dataclass(kw_only=True)
class DPOArguments(RecipeTrainingMixin, DPOConfig):
    """TRL's `DPOConfig` with the defaults and checks of the recipes."""

    task: ClassVar[str] = "dpo"
    records: ClassVar[str | None] = "preference"

    def __post_init__(self) -> None:
        require_positive(self, "max_length")
        require_from_0(self, "beta")
        super().__post_init__()


@dataclass(kw_only=True)
class GRPOArguments(RecipeTrainingMixin, GRPOConfig):
    """TRL's `GRPOConfig` with the defaults and checks of the recipes."""

    task: ClassVar[str] = "grpo"
    records: ClassVar[str | None] = "prompt"

    def __post_init__(self) -> None:
        require_positive(
            self,
            "num_generations",
            "max_completion_length",
            "temperature",
            "steps_per_generation",
            "generation_batch_size",
            "num_iterations",
        )
        require_from_0(self, "beta")
        self.given_generation_batch_size = self.generation_batch_size  # GRPOConfig fills it in
        super().__post_init__()

    def check_method(self, model_args: ModelArguments) -> None:
        """Check that TRL can make the reference model that the KL term needs.

        Args:
            model_args (`ModelArguments`): the flags of the model and of the adapters.

        Raises:
            UsageError: there is such a term, and neither adapters nor a checkpoint of the model.
        """
        if self.beta and not (model_args.use_peft or model_args.model_name_or_path):
            model = spelled("model_name_or_path")
            given = spelled("beta", self.beta)
            beta = spelled("beta")
            raise UsageError(
                f"{given} compares with a reference model, which TRL loads from {model}: give it, or leave {beta} out"
            )

    def keep_global_batch(
        self, checkpoint: str | None, *, data_parallel_size: int | None = None
    ) -> None:
        """Keep the checkpoint's global batch, and the number of completions that are generated at once.

        Args:
            checkpoint (`str`, *optional*): the checkpoint to resume from.
            data_parallel_size (`int`, *optional*): number of ranks that read different samples. Default: all.

        Raises:
            CheckpointError: the checkpoint's manifest is broken.
            LayoutError: no batch sizes of this number of processes give those of the checkpoint.
        """
        assert self.steps_per_generation is not None  # GRPOConfig computes it
        # Per generation
        updates = Fraction(self.steps_per_generation, self.gradient_accumulation_steps)
        super().keep_global_batch(checkpoint, data_parallel_size=data_parallel_size)
        micro_batch = self.per_device_train_batch_size * self.world_size
        completions = (
            self.given_generation_batch_size
            or updates * micro_batch * self.gradient_accumulation_steps
        )
        if completions % micro_batch:
            raise LayoutError(
                f"{self.world_size} processes x {self.per_device_train_batch_size} sequences cannot share the run's "
                f"{float(completions):g} completions per generation: start another number of processes, or lower "
                "--per_device_train_batch_size"
            )
        self.generation_batch_size = int(completions)
        self.steps_per_generation = int(completions) // micro_batch


@dataclass(kw_only=True)
class DistillationArguments(RecipeTrainingMixin, DistillationConfig):
    """TRL's `DistillationConfig` with the defaults and checks of the recipes, and how the teacher is kept."""

    records: ClassVar[str | None] = "prompt"
    task: ClassVar[str] = "distillation"

    teacher_dtype: str = flag(
        "Format of the teacher's weights. auto: that of its checkpoint.",
        default="auto",
        choices=DTYPES,
    )
    shard_teacher: bool | None = flag(
        "Whether each rank keeps a part of the teacher's weights and gathers them for its forward pass. Default: "
        "where the strategy shards the model's (FSDP2, ZeRO-3)."
    )

    def __post_init__(self) -> None:
        require_positive(self, "max_completion_length", "temperature")
        require_from_0(self, "beta")
        if self.beta > 1:
            given = spelled("beta", self.beta)
            raise UsageError(f"{given}: give a number from 0 (forward KL) to 1 (reverse KL)")
        super().__post_init__()

    def check_method(self, model_args: ModelArguments) -> None:
        """Check that there is a teacher, and that the strategy can keep it as the flags ask for.

        Args:
            model_args (`ModelArguments`): the flags of the model and of the adapters.

        Raises:
            UsageError: a flag of the teacher is missing, or the strategy excludes it.
        """
        teacher = spelled("teacher_model_name_or_path")
        is_embedded = not (model_args.model_name_or_path or model_args.config_name)
        if not self.teacher_model_name_or_path and not is_embedded:
            raise UsageError(f"{teacher} is missing: name the model that the student imitates")
        strategy = requested(self)
        shards = WEIGHTS in strategy.shards
        if self.shard_teacher is None:
            self.shard_teacher = shards
        if self.shard_teacher and not shards:
            given = spelled("shard_teacher", True)
            raise UsageError(
                f"{given}: under {strategy.name} each rank keeps complete models; use FSDP2 or ZeRO-3 "
                "(accelerate_configs/fsdp2.yaml, zero3.yaml), or leave it out"
            )
        if shards and strategy.by_deepspeed and not self.shard_teacher:
            given = spelled("shard_teacher", False)
            raise UsageError(f"{given}: under ZeRO-3 TRL shards the teacher too; use FSDP2 or DDP")
        if strategy.by_deepspeed and self.teacher_dtype != "auto":
            given = spelled("teacher_dtype", self.teacher_dtype)
            raise UsageError(
                f"{given}: DeepSpeed keeps the teacher in the format of the training; leave it out, or use FSDP2"
            )

    def load_teacher(self, student: "PreTrainedModel") -> "PreTrainedModel":
        """Load the teacher of `--teacher_model_name_or_path` and place it as the strategy needs it.

        Args:
            student (`PreTrainedModel`): the model that is trained, whose vocabulary the teacher must have.

        Raises:
            UsageError: it cannot be loaded, or has another vocabulary.
        """
        given = self.teacher_model_init_kwargs
        try:
            options = dict(parse_json(given) if isinstance(given, str) else given or {})
        except (ValueError, TypeError):
            rule = "it must be a JSON object"
            raise ParameterError("teacher_model_init_kwargs", given, rule) from None
        if self.teacher_model_revision:
            options.setdefault("revision", self.teacher_model_revision)
        options.setdefault("trust_remote_code", self.trust_remote_code)
        self.teacher_model_init_kwargs = None  # TRL takes them for a name alone
        return load_teacher(
            self.teacher_model_name_or_path,
            student,
            self,
            dtype=options.pop("dtype", self.teacher_dtype),
            is_shared=bool(self.shard_teacher),
            options=options,
        )


@speaking("recipe")
def load_records(
    data_args: SourceArguments,
    training_args: RecipeTrainingMixin,
) -> tuple[AnyDataset, AnyDataset | None]:
    """Load the records for one of TRL's trainers, which tokenises them itself. Use `one_process_prepares`.

    Args:
        data_args (`SourceArguments`): the source of the records; without one, the embedded ones are loaded.
        training_args (`SFTArguments`, `DPOArguments`, `GRPOArguments`, `DistillationArguments` or `VisionArguments`):
            decides which columns the records need. Its seed chooses evaluation records where the source has none of
            its own.

    Returns:
        `tuple`: the training records, and the evaluation records or None.

    Raises:
        DataError: the source cannot be read or lacks the columns.
        UsageError: evaluations are requested without records for them.
        StorageError: the cache of `datasets` cannot be written.
    """
    kind = training_args.records
    assert kind is not None
    convert = None
    if training_args.reads_images:
        from hfscale.recipe.images import read_images  # it needs Pillow

        convert = read_images
    splits = load_splits(data_args, seed=training_args.seed, embedded=kind, convert=convert)
    for split, records in splits.items():
        with errors_name_source(data_args, split):
            first = next(iter(records), None)
        if first is None:
            raise DataError(f"{source_name(data_args, split)} has no records")
        if not any(set(columns) <= first.keys() for columns in COLUMNS[kind]):
            wanted = ", or ".join(" and ".join(columns) for columns in COLUMNS[kind])
            raise DataError(
                f"{source_name(data_args, split)} has the columns {', '.join(first)}: it needs {wanted}; rename its "
                "columns"
            )
    train, evaluation = limit_splits(
        splits, train=data_args.max_train_samples, evaluation=data_args.max_eval_samples
    )
    check_evaluation(training_args, has_evaluation=evaluation is not None)
    return train, evaluation


@speaking("recipe")
def reference_model(
    model: "PreTrainedModel", model_args: ModelArguments, training_args: "TrainingArguments"
) -> "PreTrainedModel | None":
    """Return the reference model of DPO where TRL cannot make it itself.

    Args:
        model (`PreTrainedModel`): the model that is trained.
        model_args (`ModelArguments`): the flags of the model and of the adapters.
        training_args (`TrainingArguments`): precision and seed.

    Returns:
        `PreTrainedModel`, *optional*: a second model with the initial weights if these were drawn from the config;
        None if TRL disables the adapters, or loads the weights of `--model_name_or_path` a second time.
    """
    if model_args.use_peft or model_args.model_name_or_path:
        return None
    reference = load_weights(model_args, model.config, training_args)
    # Of the models, Accelerate sends only the one that is trained from rank 0 to the others
    if is_fsdp_enabled():
        draw_weights(reference, seed=training_args.seed)
    return reference
