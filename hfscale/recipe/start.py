"""The start of a run: its flags are checked together, its output directory is locked, its checkpoint is found."""

from dataclasses import dataclass

from transformers import EarlyStoppingCallback, TrainerCallback, set_seed

from hfscale.checkpoint.callback import SpotCheckpointCallback
from hfscale.checkpoint.loading import readable_checkpoint
from hfscale.core.spelling import speaking
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.support import Combination, check_support
from hfscale.health.callback import CommHealthCallback
from hfscale.islands.flags import island_callbacks
from hfscale.lr_scaling.callback import LRScalingCallback
from hfscale.metrics.alerts import AlertCallback
from hfscale.metrics.callback import ScalingMetricsCallback
from hfscale.metrics.profiler import ProfilerCallback
from hfscale.metrics.sample_generation import SampleGenerationCallback, read_prompts
from hfscale.parallel.arguments import ParallelArguments, plan_stages
from hfscale.recipe.arguments import (
    CALLBACK_FLAGS,
    DataArguments,
    RecipeTrainingMixin,
    ScalingArguments,
    SourceArguments,
    complete_early_stopping,
)
from hfscale.recipe.compatibility import check_compatibility
from hfscale.recipe.entrypoint import check_output_dir
from hfscale.recipe.layout import is_native, set_up_data_parallelism, set_up_parallelism
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.recipe.models import check_same_experts
from hfscale.recipe.resume import resume_point
from hfscale.recipe.router_bias import check_router_bias
from hfscale.scaling import ScalingCallback
from hfscale.trainer.state import output_folder
from hfscale.trainer.strategies.requested import check_launch
from hfscale.why.callback import TraceCallback, read_steps


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """What a recipe needs to know after `start_run`."""

    layout: ParallelLayout
    """The sizes of the parallel axes."""
    checkpoint: str | None
    """The checkpoint to resume from, in a form that this launch can read; None to start from scratch."""
    callbacks: list[TrainerCallback]
    """`ScalingCallback`, and the callbacks for `--islands`, `--sample_prompts`, `--profile_steps`, `--trace_steps` and
    `--early_stopping_patience`."""


@speaking("recipe", CALLBACK_FLAGS)
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
    if parallel_trainer:
        layout, _ = plan_stages(parallel_args or ParallelArguments(), training_args)
        check_compatibility(model_args, training_args)
    else:
        layout = _layout_of_accelerate(parallel_args, training_args)
        check_compatibility(model_args, training_args, layout)
    check_router_bias(model_args, training_args, islands=scaling_args.islands)
    training_args.check_method(model_args)
    complete_early_stopping(training_args, scaling_args.early_stopping_patience)
    check_output_dir(str(output_folder(training_args)))
    callbacks = _callbacks(
        data_args, scaling_args, training_args, layout, can_generate=not parallel_trainer
    )
    checkpoint = resume_point(training_args, scaling_args.checkpoint_remote)
    training_args.keep_global_batch(checkpoint, data_parallel_size=layout.data_parallel_size)
    if is_native(layout):
        check_same_experts(checkpoint, model_args)
    if not parallel_trainer:  # ParallelTrainer converts checkpoints itself
        checkpoint = readable_checkpoint(
            training_args, checkpoint, strategy="native" if is_native(layout) else None
        )
    set_seed(training_args.seed)
    return RunStart(layout=layout, checkpoint=checkpoint, callbacks=callbacks)


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
    if data_args.sample_prompts is not None:
        callbacks.append(sample_generation(data_args, layout, can_generate=can_generate))
    callbacks.append(ProfilerCallback(training_args.profile_steps or ()))
    if scaling_args.trace_steps is not None:
        with speaking("recipe", {"steps": "trace_steps"}):
            callbacks.append(TraceCallback(read_steps(scaling_args.trace_steps)))
    if scaling_args.alert_webhook is not None:
        with speaking("recipe", {"webhook": "alert_webhook"}):
            callbacks.append(AlertCallback(webhook=scaling_args.alert_webhook))
    if scaling_args.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(scaling_args.early_stopping_patience))
    return callbacks


def sample_generation(
    data_args: SourceArguments, layout: ParallelLayout, *, can_generate: bool
) -> SampleGenerationCallback:
    """Return the callback for `--sample_prompts`.

    Args:
        data_args (`SourceArguments`): the file of prompts, and how often to generate from it.
        layout (`ParallelLayout`): the axes of the run.
        can_generate (`bool`): whether the trainer's model can generate; that of `ParallelTrainer` cannot.

    Raises:
        UsageError: the run cannot generate, or the prompts cannot be read.
    """
    assert data_args.sample_prompts is not None
    engine = "trainer" if can_generate else "parallel_trainer"
    asked = Combination(
        engine=engine,
        strategy="native" if is_native(layout) else None,
        tp=layout.tp,
        cp=layout.cp,
        sample_prompts=data_args.sample_prompts,
    )
    check_support(asked, "sample_prompts")
    with speaking("recipe", {"every_steps": "sample_steps", "prompts": "sample_prompts"}):
        prompts = read_prompts(data_args.sample_prompts)
        return SampleGenerationCallback(prompts, every_steps=data_args.sample_steps)


def _scaling_callback(
    data_args: SourceArguments, scaling_args: ScalingArguments, training_args: RecipeTrainingMixin
) -> ScalingCallback:
    """Return the callback for health, learning rate, checkpoints and metrics."""
    if isinstance(data_args, DataArguments):
        block_size: int | None = data_args.block_size
    else:
        block_size = vars(training_args).get("max_length")  # of SFT and DPO; GRPO has none
    return ScalingCallback(
        comm_health=CommHealthCallback(),
        lr_scaling=LRScalingCallback(
            rule=scaling_args.lr_scaling_rule,
            base_global_batch_size=scaling_args.base_global_batch_size,
            block_size=block_size,
            base_block_size=scaling_args.base_block_size,
            critical_batch_size=scaling_args.critical_batch_size,
            warmup_scale=scaling_args.warmup_scale,
        ),
        spot_checkpoint=SpotCheckpointCallback(
            on_preemption="return",  # `train` ends the recipe
            every_minutes=scaling_args.save_minutes,
            asynchronous=scaling_args.asynchronous_save,
            remote=scaling_args.checkpoint_remote,
            notice_s=scaling_args.notice_s,
            resume_with_other=scaling_args.resume_with_other or (),
        ),
        metrics=ScalingMetricsCallback(
            peak_tflops=scaling_args.peak_tflops,
            usd_per_gpu_hour=scaling_args.usd_per_gpu_hour,
            baseline=scaling_args.scaling_baseline,
            noise_scale=scaling_args.noise_scale,
        ),
    )
