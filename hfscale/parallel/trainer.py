"""`ParallelTrainer`: Hugging Face's Trainer over tensor x pipeline x data parallel ranks.

The interface of Trainer stays the same: `TrainingArguments`, callbacks, datasets and collators, evaluation, logs,
checkpoints, resuming. The differences are internal:

- the `gradient_accumulation_steps` batches of a step are the pipeline's micro-batches, run by one schedule;
- ranks that share a sample (tensor, pipeline and context parallel ones) read the same batches and count once;
- the loss is that of the last stage, sent to all ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from hfscale.checkpoint.formats.parameter_names import parameter_order, trained_names
from hfscale.core.collectives import TRAINING
from hfscale.core.spelling import spelled
from hfscale.core.versions import is_peft_model, require
from hfscale.errors import UsageError
from hfscale.parallel import gradients
from hfscale.parallel.adapter_weights import draw_adapters
from hfscale.parallel.adapters import check_adapters, saved_names
from hfscale.parallel.arguments import ParallelArguments, check_arguments, plan_stages
from hfscale.parallel.checkpoints import ParallelCheckpointTrainer, reshard_all
from hfscale.parallel.checks import check_config
from hfscale.parallel.dry_run import dry_run, print_dry_run
from hfscale.parallel.groups import copy_without_data
from hfscale.parallel.losses import without_shifting
from hfscale.parallel.mesh import make_mesh
from hfscale.parallel.model import ParallelizedModel, ParallelModel, parallelize_model
from hfscale.parallel.parity import CaseParity, check_parity
from hfscale.parallel.pipeline import Pipeline, StageTimes, stack_batches, with_labels_of_first
from hfscale.parallel.weights import draw_weights, read_weights
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.strategies.requested import check_launch

if TYPE_CHECKING:
    from peft import PeftModel


class ParallelTrainer(ParallelCheckpointTrainer):
    """A Trainer whose model is split over `tp_size` x `pp_size` x `cp_size` ranks, and replicated or sharded over the
    others.

    The methods with an underscore override steps of Trainer for which there are no public hooks; tests/
    test_parallel_plan.py::test_internals_of_libraries_are_where_this_package_uses_them fails when they move.

    | metric key | unit | meaning |
    |---|---|---|
    | `scaling/bubble_fraction` | ratio | share of the pipeline schedule in which a rank waits, mean over ranks |

    Args:
        model (`PreTrainedModel` or `PeftModel`): unsplit and the same on every rank, or on the meta device. It is
            changed in place: each rank keeps its part.
        args (`TrainingArguments`): the run's arguments, also of a subclass.
        positional: further positional arguments of `Trainer`.
        parallel (`ParallelArguments`, *optional*): sizes of the axes; absent: all ranks are data parallel.
        weights_from (`str`, *optional*): a folder of safetensors files or a hub id, for a model on the meta device;
            each rank reads its part. Absent: the weights are drawn from `args.seed`, equal under every layout.
        kwargs: keywords of `Trainer`.

    Raises:
        MissingDependencyError: transformers is older than 5.23.
        StrategyMismatchError: the launcher started another number of processes, or one process has several GPUs.
        LayoutError: the sizes do not fit together, the world, or the model.
        UsageError: an argument is not supported, or the weights cannot be read.
        UnsupportedModelError: the model cannot be parallelized in this way.
    """

    def __init__(
        self,
        model: "PreTrainedModel | PeftModel",
        args: TrainingArguments,
        *positional: Any,
        parallel: ParallelArguments | None = None,
        weights_from: str | None = None,
        **kwargs: Any,
    ) -> None:
        require("ParallelTrainer")
        check_launch(args)
        parallel = parallel or ParallelArguments()
        self.layout, self.stage_plan = plan_stages(parallel, args)
        check_arguments(args, cp=self.layout.cp, **kwargs)
        causal_lm = model.get_base_model() if is_peft_model(model) else model
        assert isinstance(causal_lm, PreTrainedModel)
        check_config(
            model.config,
            self.layout,
            self.stage_plan,
            sequence_parallel=parallel.sequence_parallel,
            checks_parity=parallel.check_parity,
            model_class=type(causal_lm),
        )
        check_adapters(model, self.layout, sequence_parallel=parallel.sequence_parallel)
        self.mesh = make_mesh(self.layout, args.device.type)
        self.parity: list[CaseParity] = []
        """What `check_parity` has compared."""
        if parallel.check_parity:
            self.parity = check_parity(
                model,
                self.mesh,
                self.stage_plan,
                sequence_parallel=parallel.sequence_parallel,
                overlap_exchange=parallel.overlap_exchange,
            )
        if is_peft_model(model):
            # One rank asks PEFT, which may look on the hub for the base model's config
            self.saved_adapters = TRAINING.combine(
                "names of saved adapters", None, lambda _: saved_names(model)
            )
        self.parameter_counts = (
            sum(p.numel() for p in model.parameters()),
            sum(p.numel() for p in model.parameters() if p.requires_grad),
        )
        """Parameters of the unsplit model: all, and those that are trained."""
        self.parameter_names = trained_names(model)
        self.parameter_order = parameter_order(model)
        if type(self).create_optimizer is not Trainer.create_optimizer:
            self._unsplit = copy_without_data(model, args.device)
        self.parallelized: ParallelizedModel = parallelize_model(
            causal_lm,
            self.mesh,
            self.stage_plan,
            self._loss_of_last_stage,
            compute_dtype=torch.bfloat16 if args.bf16 else None,
            fill=partial(_fill_weights, seed=args.seed, weights_from=weights_from),
            sequence_parallel=parallel.sequence_parallel,
            shard_logits=kwargs.get("compute_loss_func") is None,
            overlap_exchange=parallel.overlap_exchange,
        )
        super().__init__(model, args, *positional, **kwargs)
        if self.parallelized.vocab_loss is not None and self.label_smoother is not None:
            smoothed = replace(self.parallelized.vocab_loss, epsilon=self.label_smoother.epsilon)
            self.label_smoother = smoothed.of_output  # type: ignore[assignment]  # Trainer only calls it
        if self.parallelized.context is not None and self.label_smoother is not None:
            shifted_before = without_shifting(self.label_smoother)
            self.label_smoother = shifted_before  # type: ignore[assignment]  # Trainer only calls it
        # Trainer's own switch for a model that it should neither wrap nor move.
        self.is_distributed_loading_by_transformers = True
        self.accelerator.prepare_data_loader = self._prepare_data_loader
        self.pipeline = Pipeline(
            self.parallelized.stages,
            self.stage_plan,
            self.mesh.pp_group,
            args.device,
            hidden_size=causal_lm.config.get_text_config().hidden_size,
            dtype=torch.bfloat16 if args.bf16 else causal_lm.dtype,
            sequence_parts=self.parallelized.sequence_parts,
            turns=self.parallelized.turns,
        )
        self.parallel_model = ParallelModel(self.parallelized, self.pipeline)
        self._buffered_batches: list[dict[str, torch.Tensor]] = []
        self._num_items: torch.Tensor | int | None = None
        self._is_evaluating = False

    @staticmethod
    def print_dry_run(
        make_model: Callable[[], PreTrainedModel],
        args: TrainingArguments,
        parallel: ParallelArguments,
        *,
        block_size: int,
    ) -> None:
        """Print, for a world of `parallel.dry_run` ranks, what each rank holds and how long it waits; without a GPU.

        Args:
            make_model (`callable`): makes the model on the meta device.
            args (`TrainingArguments`): batch, accumulation, precision and recomputation are taken from it.
            parallel (`ParallelArguments`): sizes of the axes and the schedule.
            block_size (`int`): tokens per sequence.

        Raises:
            LayoutError: the sizes do not fit together or the model.
            UsageError: this process is part of a real process group, or the model does not support one of the axes.
            UnsupportedModelError: the model cannot be parallelized in this way.
        """
        layout, plan = plan_stages(parallel, args, world_size=parallel.dry_run)
        ranks = dry_run(
            make_model,
            layout,
            plan,
            args,
            block_size=block_size,
            sequence_parallel=parallel.sequence_parallel,
            checks_parity=parallel.check_parity,
        )
        print_dry_run(ranks, layout, plan, args)

    # --- batches: ranks that share a sample count once --------------------------------------------------------------

    def get_tp_size(self) -> int:
        """Return the number of ranks that read the same samples, by which Trainer divides the number of processes."""
        return self.layout.ranks_per_replica

    def _prepare_data_loader(
        self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any
    ) -> DataLoader[Any]:
        """Prepare a data loader as `Accelerator` does, but with data parallel ranks instead of all processes."""
        accelerator = self.accelerator
        prepared: DataLoader[Any] = prepare_data_loader(
            data_loader,
            accelerator.device,
            num_processes=self.layout.data_parallel_size,
            process_index=self.mesh.data_rank,
            split_batches=accelerator.split_batches,
            put_on_device=True,
            rng_types=accelerator.rng_types.copy() if accelerator.rng_types else None,
            dispatch_batches=False,  # it would send rank 0's batches to ranks of other replicas
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        # No public way to register a data loader that Accelerate has not prepared itself. test_parallel_plan.py
        # fails when it moves.
        accelerator._dataloaders.append(prepared)
        return prepared

    # --- a step -----------------------------------------------------------------------------------------------------

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple[nn.Module, DataLoader[Any]]:
        """Give Trainer the module that runs the pipeline instead of the model."""
        self.begin_optimizer()
        _, data_loader = super()._prepare_for_training(*args, **kwargs)  # type: ignore[no-untyped-call]  # of Trainer
        self.check_optimizer()
        self.model_wrapped = self.parallel_model
        if self.layout.pp > 1:
            assert self.args.output_dir is not None  # TrainingArguments has a default
            TrainerAdapter.of(self).collect(
                StageTimes(self.pipeline.clock, Path(self.args.output_dir))
            )
        return self.parallel_model, data_loader

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: `parallelize_model` has moved it."""

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Buffer a micro-batch. With the last micro-batch of the step, run the schedule and complete the gradients.

        Args:
            model (`nn.Module`): unused; `parallel_model` is run.
            inputs (`dict`): the model's keywords, each (batch, sequence).
            num_items_in_batch (`int` or `torch.Tensor`, *optional*): tokens of the whole step to divide the loss by.

        Returns:
            With the last micro-batch the loss of the whole step, a scalar that is equal on every rank; else 0.

        Raises:
            UsageError: the last step of an epoch has too few micro-batches for the schedule, and the model's loss does
                not allow adding empty ones; or one of the inputs cannot be split.
        """
        self._buffered_batches.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches = self._buffered_batches
        self._buffered_batches = []
        self.parallel_model.train()
        train_optimizer = getattr(self.optimizer, "train", None)  # of schedule-free optimizers
        if callable(train_optimizer):
            train_optimizer()
        micro_batches = self.stage_plan.micro_batches_for(len(batches))
        if micro_batches > len(batches) and num_items_in_batch is None:
            raise UsageError(
                f"the last step of an epoch has {len(batches)} micro-batches, but {self.stage_plan.schedule} needs "
                f"{micro_batches}, and {type(self.parallelized.model).__name__} has no loss over counted tokens, to "
                f"which empty micro-batches would add nothing: give {spelled('max_steps')}, so that the run ends "
                "before that step"
            )
        if self.parallelized.balance is not None:
            self.parallelized.balance.micro_batches = len(batches)
            self.parallelized.balance.has_added_rows = (
                len({len(batch["input_ids"]) for batch in batches}) > 1
            )
        loss = self._run_pipeline(
            stack_batches(batches, micro_batches), micro_batches, num_items_in_batch
        )
        gradients.align_gradients(self.parallelized.model.parameters())
        gradients.sum_partial_gradients(self.parallelized.partial_gradients, self.mesh)
        if self.parallelized.tied is not None:
            self.parallelized.tied.sum_gradients()
        return loss

    @contextmanager
    def keeping_batches(self) -> Iterator[None]:
        """Have the buffered micro-batches still buffered after a training step in the `with` block."""
        kept = list(self._buffered_batches)
        try:
            yield
        finally:
            self._buffered_batches = kept

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, None, None]:
        """Compute the loss over the batches of all data parallel ranks; logits stay on the last stage.

        Args:
            model (`nn.Module`): unused; `parallel_model` is run.
            inputs (`dict`): the model's keywords, each (batch, sequence).
            prediction_loss_only, ignore_keys: unused.

        Returns:
            The loss, a scalar that is equal on every rank, and None in place of logits and of labels.
        """
        inputs = self._prepare_inputs(inputs)
        counted = with_labels_of_first(inputs, self._samples_of(len(inputs["input_ids"])))
        items = self._get_num_items_in_batch([counted], self.args.device)
        if items is not None:  # else a batch without labels would have a loss of NaN
            inputs = counted
        self.parallel_model.eval()
        micro_batches = min(self.stage_plan.stages, inputs["input_ids"].shape[0])
        self.current_gradient_accumulation_steps = micro_batches
        if self.parallelized.balance is not None:
            self.parallelized.balance.micro_batches = micro_batches
            self.parallelized.balance.has_added_rows = False
        loss = self._run_pipeline(dict(inputs), micro_batches, items)
        reshard_all(self.parallelized)
        return loss, None, None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate as Trainer does, but count the loss of a batch, which every rank has, once per sample.

        Args:
            args, kwargs: as for `Trainer.evaluation_loop`.
        """
        self.gather_function = self._once_per_sample
        self._is_evaluating = True
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self._is_evaluating = False

    def _once_per_sample(self, losses: torch.Tensor) -> torch.Tensor:
        return losses.repeat(self.layout.data_parallel_size)[: self._samples_left]

    @property
    def _samples_left(self) -> int | None:
        """Samples in the last batches of an evaluation, which are filled up with others; None: all are counted."""
        state = self.accelerator.gradient_state
        is_last = self._is_evaluating and state.end_of_dataloader and state.remainder > 0
        return state.remainder if is_last else None

    def _samples_of(self, rows: int) -> int:
        """Return how many of the rows of this rank's batch are samples to count; they are the first ones."""
        left = self._samples_left
        return rows if left is None else min(max(left - self.mesh.data_rank * rows, 0), rows)

    def _run_pipeline(
        self, inputs: dict[str, torch.Tensor], micro_batches: int, items: torch.Tensor | int | None
    ) -> torch.Tensor:
        self._num_items = items
        with self.compute_loss_context_manager():
            loss: torch.Tensor = (
                self.parallel_model(micro_batches=micro_batches, **inputs).detach().clone()
            )
        # The tp ranks of the last stage hold the same loss; ranks with other tokens have scaled theirs for averaging.
        if dist.is_initialized():
            dist.all_reduce(loss)
        return loss / (self.layout.tp * self.layout.cp * self.layout.data_parallel_size)

    def _loss_of_last_stage(self, view: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
        """Compute the loss of one micro-batch as Trainer does, with label smoothing and `compute_loss_func`.

        Gradients are averaged over all ranks that have different tokens. Trainer already compensates for the data
        parallel ones. Context parallel ranks each have the loss of their own tokens only, so it is multiplied by cp.
        """
        if self.parallelized.context is not None:
            if self._num_items is None:
                raise UsageError(
                    f"{spelled('cp_size')} is {self.layout.cp}: {type(self.parallelized.model).__name__} has no loss "
                    f"over counted tokens, which the ranks of a sequence could add up; set {spelled('cp_size', 1)}"
                )
            if self.label_smoother is not None:
                inputs = inputs | {"labels": inputs["shift_labels"]}
        loss = self.compute_loss(
            view, {**inputs, "use_cache": False}, num_items_in_batch=self._num_items
        )
        assert isinstance(loss, torch.Tensor)  # a tuple with `return_outputs` only
        if self.parallelized.context is not None:
            return loss * self.layout.cp
        is_scaled = (self.model_accepts_loss_kwargs and self._num_items is not None) or (
            self.compute_loss_func is not None
        )
        return loss if is_scaled else loss / self.current_gradient_accumulation_steps

    # --- gradients --------------------------------------------------------------------------------------------------

    def _distinct_parameters(self) -> list[nn.Parameter]:
        """Return this rank's parameters without second copies of tied weights."""
        duplicate = self.parallelized.tied.duplicate if self.parallelized.tied is not None else None
        return [p for p in self.parallelized.model.parameters() if p is not duplicate]

    def _get_grad_norm(
        self, model: nn.Module, grad_norm: torch.Tensor | None = None
    ) -> torch.Tensor:
        return (
            gradients.gradient_norm(self._distinct_parameters(), self.mesh)
            if grad_norm is None
            else grad_norm
        )

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        norm = gradients.gradient_norm(self._distinct_parameters(), self.mesh)
        gradients.clip_gradients(
            self.parallelized.model.parameters(), norm, self.args.max_grad_norm
        )
        return norm

    # --- logging ---------------------------------------------------------------------------------------------------

    def floating_point_ops(self, inputs: dict[str, torch.Tensor | Any]) -> int:
        """Compute this rank's share of the operations of a micro-batch, forward and backward: 6 N D / ranks.

        N are the parameters of the unsplit model and D the tokens. The number is divided by the ranks that work on the
        same sample, because Trainer sums over all ranks.

        Args:
            inputs (`dict`): the model's keywords, with `input_ids` of (batch, sequence).

        Returns:
            Floating-point operations.
        """
        return (
            6
            * inputs["input_ids"].numel()
            * self.parameter_counts[0]
            // self.layout.ranks_per_replica
        )


def _fill_weights(
    model: PreTrainedModel, aliases: Mapping[str, str], *, seed: int, weights_from: str | None
) -> None:
    draw_weights(model, seed=seed, parameters=weights_from is None)
    if weights_from is not None:
        read_weights(model, weights_from, aliases=aliases)
    draw_adapters(model, seed=seed)
