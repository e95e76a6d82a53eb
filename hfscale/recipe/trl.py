"""What the recipes for TRL's trainers share: arguments, records, reference model, and checks of what TRL supports.

`SFTTrainer`, `DPOTrainer` and `GRPOTrainer` are TRL's own classes. They are imported here so that a missing or too old
TRL is reported in one line.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from traceback import walk_tb
from typing import TYPE_CHECKING

from hfscale.core.flags import require_from_0, require_positive
from hfscale.core.versions import is_fsdp_enabled, require_for_import
from hfscale.errors import DataError, LayoutError, UsageError
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.support import Combination, check_support
from hfscale.parallel.arguments import ParallelArguments
from hfscale.parallel.weights import draw_weights
from hfscale.recipe.arguments import ModelArguments, RecipeTrainingMixin, SourceArguments, one_line
from hfscale.recipe.layout import set_up_parallelism
from hfscale.recipe.models import load_model
from hfscale.recipe.resume import keep_global_batch
from hfscale.recipe.sources import AnyDataset, errors_name_source, load_splits, source_name

require_for_import("TRL recipes")

from jinja2 import TemplateError  # noqa: E402 (after the check)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments

__all__ = [
    "DPOArguments",
    "DPOTrainer",
    "GRPOArguments",
    "GRPOTrainer",
    "SFTArguments",
    "SFTTrainer",
    "check_reference",
    "errors_of_trl",
    "keep_generation_batch",
    "load_records",
    "reference_model",
    "set_up_data_parallelism",
]

_COLUMNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "chat": (("messages",), ("prompt", "completion"), ("conversations",), ("text",)),
    "preference": (("chosen", "rejected"),),
    "prompt": (("prompt",),),
}
"""Kind of records -> sets of columns, of which a dataset needs one."""
_TRL_AND_BELOW = ("trl", "transformers", "accelerate", "peft", "datasets")
"""Packages whose errors in the constructor of a trainer are about flags or records."""


@dataclass(kw_only=True)
class SFTArguments(RecipeTrainingMixin, SFTConfig):
    """TRL's `SFTConfig` with the defaults and checks of the recipes."""

    def __post_init__(self) -> None:
        require_positive(self, "max_length")
        super().__post_init__()


@dataclass(kw_only=True)
class DPOArguments(RecipeTrainingMixin, DPOConfig):
    """TRL's `DPOConfig` with the defaults and checks of the recipes."""

    def __post_init__(self) -> None:
        require_positive(self, "max_length")
        require_from_0(self, "beta")
        super().__post_init__()


@dataclass(kw_only=True)
class GRPOArguments(RecipeTrainingMixin, GRPOConfig):
    """TRL's `GRPOConfig` with the defaults and checks of the recipes."""

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


def set_up_data_parallelism(args: "TrainingArguments") -> ParallelLayout:
    """Decide how the processes share the data and the weights, as the launcher's config asks.

    Args:
        args (`TrainingArguments`): the arguments of the training.

    Returns:
        `ParallelLayout`: the sizes of the data-parallel axes.

    Raises:
        UsageError: the launcher's config splits sequences or matrices.
        LayoutError: its sizes do not fit the number of processes.
    """
    layout = set_up_parallelism(ParallelArguments(), args)
    asked = Combination(engine="trainer", trl=True, tp=layout.tp, pp=layout.pp, cp=layout.cp)
    check_support(asked, "trl", speaker="launcher")
    return layout


def load_records(args: SourceArguments, kind: str, *, seed: int) -> tuple[AnyDataset, AnyDataset | None]:
    """Load the records for one of TRL's trainers, which tokenises them itself.

    Call it in `one_process_prepares`.

    Args:
        args (`SourceArguments`): the source of the records; without one, the embedded ones are loaded.
        kind (`str`): `chat` for SFT, `preference` for DPO or `prompt` for GRPO.
        seed (`int`): chooses the evaluation records of a source that has none of its own.

    Returns:
        `tuple`: the training records, and the evaluation records or None.

    Raises:
        DataError: the source cannot be read or lacks the columns.
        StorageError: the cache of `datasets` cannot be written.
    """
    splits = load_splits(args, seed=seed, embedded=kind)
    for split, records in splits.items():
        with errors_name_source(args, split):
            first = next(iter(records), None)
        if first is None:
            raise DataError(f"{source_name(args, split)} has no records")
        if not any(set(columns) <= first.keys() for columns in _COLUMNS[kind]):
            wanted = ", or ".join(" and ".join(columns) for columns in _COLUMNS[kind])
            raise DataError(
                f"{source_name(args, split)} has the columns {', '.join(first)}: it needs {wanted}; rename its columns"
            )
    limits = {"train": args.max_train_samples, "validation": args.max_eval_samples}
    limited = {
        split: records if limits[split] is None else records.take(limits[split]) for split, records in splits.items()
    }
    return limited["train"], limited.get("validation")


def reference_model(
    model_args: ModelArguments, config: "PreTrainedConfig", training_args: "TrainingArguments"
) -> "PreTrainedModel | None":
    """Return the reference model of DPO where TRL cannot make it itself.

    Args:
        model_args (`ModelArguments`): the flags of the model and of the adapters.
        config (`PreTrainedConfig`): the model's config.
        training_args (`TrainingArguments`): precision and seed.

    Returns:
        `PreTrainedModel`, *optional*: a second model with the initial weights if these were drawn from the config;
        None if TRL disables the adapters, or loads the weights of `--model_name_or_path` a second time.
    """
    if model_args.use_peft or model_args.model_name_or_path:
        return None
    model = load_model(model_args, config, training_args)
    if is_fsdp_enabled():  # of the models, Accelerate sends only the one that is trained from rank 0 to the others
        draw_weights(model, seed=training_args.seed)
    return model


def check_reference(model_args: ModelArguments, training_args: GRPOArguments) -> None:
    """Check that GRPO's trainer can make the reference model that its KL term needs.

    Args:
        model_args (`ModelArguments`): the flags of the model and of the adapters.
        training_args (`GRPOArguments`): its `beta` is the weight of the term.

    Raises:
        UsageError: there is such a term, and neither adapters nor a checkpoint of the model.
    """
    if training_args.beta and not (model_args.use_peft or model_args.model_name_or_path):
        raise UsageError(
            f"--beta {training_args.beta} compares with a reference model, which TRL loads from "
            "--model_name_or_path: give it, or leave --beta out"
        )


def keep_generation_batch(args: GRPOArguments, checkpoint: str | None) -> None:
    """Keep the checkpoint's global batch, and the number of completions that are generated at once.

    It is `keep_global_batch` for GRPO, and has to be called instead of it.

    Args:
        args (`GRPOArguments`): its batch sizes and accumulation steps are changed.
        checkpoint (`str`, *optional*): the checkpoint to resume from.

    Raises:
        CheckpointError: the checkpoint's manifest is broken.
        LayoutError: no batch sizes of this number of processes give those of the checkpoint.
    """
    updates = Fraction(args.steps_per_generation, args.gradient_accumulation_steps)  # per generation
    keep_global_batch(args, checkpoint)
    micro_batch = args.per_device_train_batch_size * args.world_size
    completions = args.given_generation_batch_size or updates * micro_batch * args.gradient_accumulation_steps
    if completions % micro_batch:
        raise LayoutError(
            f"{args.world_size} processes x {args.per_device_train_batch_size} sequences cannot share the run's "
            f"{float(completions):g} completions per generation: start another number of processes, or lower "
            "--per_device_train_batch_size"
        )
    args.generation_batch_size = int(completions)
    args.steps_per_generation = int(completions) // micro_batch


@contextmanager
def errors_of_trl() -> Iterator[None]:
    """Turn what a trainer of TRL raises about flags and records into one line. Use it around its constructor.

    An error that was raised in hfscale, or by the code that calls the constructor, is left as it is.

    Raises:
        UsageError: TRL has refused a flag, a combination of flags or a record.
    """
    try:
        yield
    except (ValueError, TypeError, KeyError, NotImplementedError, TemplateError) as error:
        packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
        if next((name for name in reversed(packages) if name in (*_TRL_AND_BELOW, "hfscale")), None) == "hfscale":
            raise
        raise UsageError(f"TRL refuses these flags or records: {type(error).__name__}: {one_line(error)}") from error
