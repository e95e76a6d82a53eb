"""The start of a run: its flags are checked together, its output directory is locked, its checkpoint is found."""

from dataclasses import dataclass, replace
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback, set_seed

from hfscale.averaging.callback import WeightAveragingCallback
from hfscale.averaging.options import AverageOptions
from hfscale.core.option_flags import from_flags, options_from
from hfscale.core.options import names_of
from hfscale.core.spelling import speaking, spelled
from hfscale.errors import UsageError
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.support import check_support
from hfscale.islands.flags import island_callbacks
from hfscale.metrics.alerts import AlertCallback
from hfscale.metrics.profiler import ProfilerCallback
from hfscale.metrics.sample_generation import SampleGenerationCallback
from hfscale.parallel.arguments import ParallelArguments, plan_stages
from hfscale.parallel.descriptions import describe_arguments
from hfscale.recipe.arguments import (
    OF_CALLBACKS,
    DataArguments,
    RecipeTrainingMixin,
    ScalingArguments,
    SourceArguments,
    complete_early_stopping,
)
from hfscale.recipe.compatibility import check_compatibility
from hfscale.recipe.entrypoint import check_output_dir
from hfscale.recipe.layout import (
    is_native,
    set_up_data_parallelism,
    set_up_parallelism,
    strategy_of,
)
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.recipe.models import check_same_experts
from hfscale.recipe.resume import readable_copy, resume_point
from hfscale.scaling import PARTS, ScalingCallback
from hfscale.trainer.state import output_folder
from hfscale.trainer.strategies.requested import check_launch, requested
from hfscale.why.callback import TraceCallback


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """What a recipe needs to know after `start_run`."""

    layout: ParallelLayout
    """The sizes of the parallel axes."""
    checkpoint: str | None
    """The checkpoint to resume from, in a form that this launch can read; None to start from scratch."""
    callbacks: list[TrainerCallback]
    """`ScalingCallback`, and the callbacks for `--islands`, `--sample_prompts`, `--profile_steps`, `--trace_steps`,
    averaged weights, `--alert_webhook` and `--early_stopping_patience`."""


@speaking("recipe")
def start_run(
    model_args: ModelArguments,
    data_args: SourceArguments,
    scaling_args: ScalingArguments,
    training_args: RecipeTrainingMixin,
    parallel_args: ParallelArguments | None = None,
    *,
    parallel_trainer: bool = False,
) -> RunStart:
    """Check the flags together, lock the output directory and find the checkpoint to resume from, on every rank.

    Call it before anything is loaded. It also makes the callbacks, keeps the global batch of the checkpoint if the
    number of processes has changed, and sets the seed.

    Args:
        model_args (`ModelArguments`): the flags of the model.
        data_args (`SourceArguments`): the flags of the data.
        scaling_args (`ScalingArguments`): the flags of the callbacks.
        training_args (`RecipeTrainingMixin`): the flags of the training. The parallel axes, early stopping and the
            accumulation of a resumed run are set in them.
        parallel_args (`ParallelArguments`, *optional*): the sizes of the parallel axes. Without them the run is data
            parallel.
        parallel_trainer (`bool`): whether `ParallelTrainer` will train, which splits the model itself.

    Returns:
        `RunStart`: layout, checkpoint and callbacks.

    Raises:
        UsageError: two flags exclude each other, or another run uses the output directory.
        LayoutError: sizes, batch and number of processes do not fit together.
        StrategyMismatchError: the launcher started another number of processes than this run has.
        CheckpointError: there are checkpoints, and none is usable.
        StorageError: the output directory or the remote store cannot be used.
        MissingDependencyError: a flag needs a package that is not installed.
    """
    check_launch(training_args)
    _check_data(model_args, data_args)
    if parallel_trainer:
        sizes = parallel_args or ParallelArguments()
        is_batch_changing = scaling_args.batch_schedule is not None
        layout, _ = plan_stages(sizes, training_args, is_batch_changing=is_batch_changing)
        described = None
    else:
        layout = _layout_of_accelerate(parallel_args, training_args)
        described = layout
    averaging = AverageOptions(**options_from(AverageOptions, scaling_args))
    check_compatibility(
        model_args,
        training_args,
        described,
        islands=scaling_args.islands,
        average=averaging.is_given,
        skip_bad_batches=scaling_args.skip_bad_batches,
    )
    training_args.check_method(model_args)
    complete_early_stopping(training_args, scaling_args.early_stopping_patience)
    check_output_dir(str(output_folder(training_args)))
    callbacks = _callbacks(
        data_args, scaling_args, training_args, layout, can_generate=not parallel_trainer
    )
    with names_of(*OF_CALLBACKS):
        checkpoint = resume_point(training_args, scaling_args.checkpoint_remote)
    if scaling_args.batch_schedule is None:  # which decides the global batch of each step itself
        training_args.keep_global_batch(checkpoint, data_parallel_size=layout.data_parallel_size)
    if is_native(layout):
        check_same_experts(checkpoint, model_args)
    if not parallel_trainer:  # ParallelTrainer converts checkpoints itself
        checkpoint = readable_copy(
            training_args, checkpoint, strategy="native" if is_native(layout) else None
        )
    set_seed(training_args.seed)
    return RunStart(layout=layout, checkpoint=checkpoint, callbacks=callbacks)


def _check_data(model_args: ModelArguments, data_args: SourceArguments) -> None:
    """Check that a named model has a training text: the embedded one is for the embedded model."""
    if data_args.dataset_name or data_args.train_file or data_args.data_mix:
        return
    for name in ("model_name_or_path", "config_name"):
        model = vars(model_args)[name]
        if model is not None:
            texts = f"{spelled('dataset_name')} or {spelled('train_file')}"
            given = spelled(name, model)
            raise UsageError(f"{given} is given without a training text: give {texts}")


def _layout_of_accelerate(
    parallel_args: ParallelArguments | None, training_args: RecipeTrainingMixin
) -> ParallelLayout:
    """Set up the axes that Accelerate and transformers implement."""
    if parallel_args is None:
        return set_up_data_parallelism(training_args, trl=training_args.records is not None)
    return set_up_parallelism(parallel_args, training_args)


def _callbacks(
    data_args: SourceArguments,
    scaling_args: ScalingArguments,
    training_args: RecipeTrainingMixin,
    layout: ParallelLayout,
    *,
    can_generate: bool,
) -> list[TrainerCallback]:
    """Return the callbacks that the flags ask for. The first one is `ScalingCallback`."""
    callbacks: list[TrainerCallback] = [_scaling_callback(data_args, scaling_args, training_args)]
    callbacks += island_callbacks(scaling_args)
    if scaling_args.sample_prompts is not None:
        callbacks.append(
            sample_generation(scaling_args, training_args, layout, can_generate=can_generate)
        )
    callbacks.append(from_flags(ProfilerCallback, scaling_args))
    if scaling_args.trace_steps is not None:
        callbacks.append(from_flags(TraceCallback, scaling_args))
    if AverageOptions(**options_from(AverageOptions, scaling_args)).is_given:
        callbacks.append(from_flags(WeightAveragingCallback, scaling_args))
    if scaling_args.alert_webhook is not None:
        callbacks.append(from_flags(AlertCallback, scaling_args))
    if scaling_args.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(scaling_args.early_stopping_patience))
    return callbacks


def sample_generation(
    scaling_args: ScalingArguments,
    training_args: RecipeTrainingMixin,
    layout: ParallelLayout,
    *,
    can_generate: bool,
) -> SampleGenerationCallback:
    """Return the callback for `--sample_prompts`.

    Args:
        scaling_args (`ScalingArguments`): the file of prompts, and how often to generate from it.
        training_args (`RecipeTrainingMixin`): the flags of the training.
        layout (`ParallelLayout`): the axes of the run.
        can_generate (`bool`): whether the trainer's model can generate; that of `ParallelTrainer` cannot.

    Raises:
        UsageError: the run cannot generate, or the prompts cannot be read.
    """
    engine = "trainer" if can_generate else "parallel_trainer"
    by_launcher = requested(training_args)
    asked = replace(
        describe_arguments(training_args),
        engine=engine,
        strategy=strategy_of(layout, by_launcher),
        tp=layout.tp,
        cp=layout.cp,
        sample_prompts=scaling_args.sample_prompts,
    )
    check_support(asked, "sample_prompts")
    return from_flags(SampleGenerationCallback, scaling_args)


def _scaling_callback(
    data_args: SourceArguments, scaling_args: ScalingArguments, training_args: RecipeTrainingMixin
) -> ScalingCallback:
    """Return the callback for health, learning rate, checkpoints and metrics."""
    if isinstance(data_args, DataArguments):
        block_size: int | None = data_args.block_size
    else:
        block_size = vars(training_args).get("max_length")  # of SFT and DPO; GRPO has none
    others: dict[str, dict[str, Any]] = {
        "lr_scaling": {"block_size": block_size},
        "spot_checkpoint": {"on_preemption": "return"},  # `train` ends the recipe
    }
    parts = {}
    for name, part in PARTS.items():
        parts[name] = from_flags(part, scaling_args, **others.get(name, {}))
    return ScalingCallback(**parts)  # type: ignore[arg-type]
