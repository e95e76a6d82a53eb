"""`ParallelTrainer`: Hugging Face's Trainer over tensor x pipeline x data parallel ranks.

The interface of Trainer stays the same: `TrainingArguments`, callbacks, datasets and collators, evaluation, logs,
checkpoints, resuming. The differences are internal:

- the `gradient_accumulation_steps` batches of a step are the pipeline's micro-batches, run by one schedule;
- ranks that share a sample (tensor, pipeline and context parallel ones) read the same batches and count once;
- the loss is that of the last stage, sent to all ranks.
"""

import inspect
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
from transformers.trainer_utils import EvalLoopOutput, has_length

from hfscale.checkpoint.formats.parameter_names import parameter_order, trained_names
from hfscale.checkpoint.load_once import weights_to_load
from hfscale.core.collectives import TRAINING
from hfscale.core.spelling import spelled
from hfscale.core.versions import is_peft_model, require
from hfscale.errors import UsageError
from hfscale.parallel import gradients
from hfscale.parallel.adapter_weights import draw_adapters
from hfscale.parallel.adapters import check_adapters, saved_names
from hfscale.parallel.arguments import (
    ParallelArguments,
    check_arguments,
    has_changing_batch,
    plan_stages,
)
from hfscale.parallel.checkpoints import ParallelCheckpointTrainer, reshard_all
from hfscale.parallel.checks import check_config
from hfscale.parallel.dry_run import dry_run, print_dry_run, with_largest_batch
from hfscale.parallel.groups import copy_without_data
from hfscale.parallel.loss_records import LossRecords
from hfscale.parallel.losses import without_shifting
from hfscale.parallel.mesh import make_mesh
from hfscale.parallel.model import ParallelizedModel, ParallelModel, parallelize_model
from hfscale.parallel.outside_calls import guard_calls
from hfscale.parallel.own_loss import (
    OWN_SHAPE,
    TOKENS,
    LossModel,
    has_own_loss,
    model_keywords,
    own_shapes,
)
from hfscale.parallel.parity import CaseParity, check_parity
from hfscale.parallel.pipeline import Pipeline, StageTimes, stack_batches, with_labels_of_first
from hfscale.parallel.predictions import Predictions, gather_samples
from hfscale.parallel.vocabulary import CheckedCollator
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
        signature = inspect.signature(Trainer.__init__)
        given = signature.bind_partial(self, model, args, *positional, **kwargs).arguments
        is_batch_changing = has_changing_batch(given.get("callbacks"))
        self.layout, self.stage_plan = plan_stages(
            parallel, args, is_batch_changing=is_batch_changing
        )
        self._sequence_parallel = parallel.sequence_parallel
        self.compute_loss_func = given.get("compute_loss_func")
        self._check_arguments(
            args, model_init=given.get("model_init"), optimizers=given.get("optimizers")
        )
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
        if weights_from is not None:
            weights_from = weights_to_load(args, weights_from)
        self.parallelized: ParallelizedModel = parallelize_model(
            causal_lm,
            self.mesh,
            self.stage_plan,
            self._loss_of_last_stage,
            compute_dtype=torch.bfloat16 if args.bf16 else None,
            fill=partial(_fill_weights, seed=args.seed, weights_from=weights_from),
            sequence_parallel=parallel.sequence_parallel,
            shard_logits=not has_own_loss(self),
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
        self._own_loss = self._follow_own_loss() if has_own_loss(self) else None
        self._keywords = model_keywords(causal_lm)
        for stage in self.parallelized.stages if self._own_loss is not None else ():
            stage.keywords = self._keywords
        self._loss_model: LossModel | None = None
        if self._own_loss is not None and self.parallelized.stages[-1].spec.is_last:
            self._loss_model = LossModel(
                self.parallelized.stages[-1].view,
                self.mesh,
                model,
                is_sequence_split=self.parallelized.sequence_parts > 1,
            )
        guard_calls(self.parallelized, self.layout, self._loss_model)
        last_rank = self.stage_plan.rank_of(self.stage_plan.stages - 1)
        self._predictions = Predictions(self.parallelized, self.mesh, last_rank)
        self._buffered_batches: list[dict[str, torch.Tensor]] = []
        self._num_items: torch.Tensor | int | None = None
        self._is_in_stage = False
        self._is_evaluating = False

    def _check_arguments(self, args: TrainingArguments, **given: Any) -> None:
        """Check what the Trainer was given, and what its attributes have become since."""
        check_arguments(
            args,
            pp=self.layout.pp,
            cp=self.layout.cp,
            sequence_parallel=self._sequence_parallel,
            compute_loss=has_own_loss(self),
            **given,
        )

    def _check_attributes(self) -> None:
        self._check_arguments(self.args, model_init=self.model_init)
        if has_own_loss(self) and self._own_loss is None:
            raise UsageError(
                "compute_loss was replaced after the Trainer was made, which has split the model for its own loss: "
                "override it in a subclass, or give compute_loss_func to the constructor"
            )

    def _follow_own_loss(self) -> LossRecords:
        rank_of_loss = self.stage_plan.rank_of(self.stage_plan.stages - 1)
        return LossRecords(
            self,
            source=dist.get_global_rank(self.mesh.pp_group, rank_of_loss),
            rank=dist.get_rank(),
            pp=self.layout.pp,
        )

    @staticmethod
    def print_dry_run(
        make_model: Callable[[], PreTrainedModel],
        args: TrainingArguments,
        parallel: ParallelArguments,
        *,
        block_size: int,
        batch_schedule: str | None = None,
    ) -> None:
        """Print, for a world of `parallel.dry_run` ranks, what each rank holds and how long it waits; without a GPU.

        Args:
            make_model (`callable`): makes the model on the meta device.
            args (`TrainingArguments`): batch, accumulation, precision and recomputation are taken from it.
            parallel (`ParallelArguments`): sizes of the axes and the schedule.
            block_size (`int`): tokens per sequence.
            batch_schedule (`str`, *optional*): the global batches of the training, as `LRScalingCallback` takes them.
                A step of the largest one is simulated.

        Raises:
            LayoutError: the sizes do not fit together or the model.
            ParameterError: the schedule has a batch with which the pipeline does not run.
            UsageError: this process is part of a real process group, or the model does not support one of the axes.
            UnsupportedModelError: the model cannot be parallelized in this way.
        """
        is_changing = batch_schedule is not None
        layout, plan = plan_stages(
            parallel, args, world_size=parallel.dry_run, is_batch_changing=is_changing
        )
        if batch_schedule is not None:
            args = with_largest_batch(args, layout, plan, batch_schedule)
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
        if not isinstance(
            data_loader.collate_fn, CheckedCollator
        ):  # a loader may be prepared often
            data_loader.collate_fn = CheckedCollator(
                data_loader.collate_fn,
                ids=self.parallelized.embedded_ids,
                labels=self.parallelized.predicted_ids,
            )
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

    def _prepare_for_training(
        self, max_steps: int, *args: Any, **kwargs: Any
    ) -> tuple[nn.Module, DataLoader[Any]]:
        """Give Trainer the module that runs the pipeline instead of the model."""
        self._check_attributes()
        self.begin_optimizer()
        _, data_loader = super()._prepare_for_training(max_steps, *args, **kwargs)  # type: ignore[no-untyped-call]  # of Trainer
        self._check_last_step(max_steps, data_loader)
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
        self._check_empty_micro_batches(micro_batches - len(batches), num_items_in_batch)
        if self.parallelized.balance is not None:
            self.parallelized.balance.micro_batches = len(batches)
            self.parallelized.balance.has_added_rows = (
                len({len(batch["input_ids"]) for batch in batches}) > 1
            )
        extra = set(batches[0]) - self._keywords if self._own_loss is not None else set()
        inputs = stack_batches(batches, micro_batches, extra=extra)
        if self._own_loss is not None:
            rows = len(inputs["input_ids"]) // micro_batches
            inputs[OWN_SHAPE] = own_shapes(batches, micro_batches, rows)
        loss = self._run_pipeline(inputs, micro_batches, num_items_in_batch)
        gradients.align_gradients(self.parallelized.model.parameters())
        gradients.sum_partial_gradients(self.parallelized.partial_gradients, self.mesh)
        if self.parallelized.tied is not None:
            self.parallelized.tied.sum_gradients()
        return loss

    def _check_last_step(self, max_steps: int, data_loader: DataLoader[Any]) -> None:
        """Refuse a training whose last step of an epoch could not be completed, before its first one."""
        if not has_length(data_loader) or TrainerAdapter.of(self).announced.grows_batch:
            return
        micro_batches = len(data_loader)
        steps, rest = divmod(micro_batches, self.args.gradient_accumulation_steps)
        if not rest or steps >= max_steps:
            return
        complete = self.stage_plan.micro_batches_for(rest)
        counted = None
        if self.model_accepts_loss_kwargs or self.compute_loss_func is not None:
            counted = 1
        self._check_empty_micro_batches(complete - rest, counted)

    def _check_empty_micro_batches(self, added: int, items: torch.Tensor | int | None) -> None:
        """Make sure that micro-batches which only fill the schedule add nothing to the loss."""
        if not added or (items is not None and self._own_loss is None):
            return
        why = (
            "compute_loss may count"
            if self._own_loss is not None
            else f"{type(self.parallelized.model).__name__} has no loss over counted tokens, to which they would add"
        )
        raise UsageError(
            f"the last step of an epoch has {added} micro-batches too few for {self.stage_plan.schedule}, and {why} "
            f"empty ones: give {spelled('max_steps')}, so that the run ends before that step"
        )

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
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Any]:
        """Compute loss and logits of a batch as Trainer does, the loss over those of all data parallel ranks.

        Args:
            model (`nn.Module`): unused; `parallel_model` is run.
            inputs (`dict`): the model's keywords, each (batch, sequence).
            prediction_loss_only (`bool`): whether logits and labels are left out.
            ignore_keys (`list[str]`, *optional*): keys of the model's output that are no predictions.

        Returns:
            The loss, a scalar that is equal on every rank, or None without labels; the logits, (batch, sequence,
            vocabulary), on every rank; and the labels.

        Raises:
            UsageError: the model returns more than logits, of which other stages have a part.
        """
        inputs = self._prepare_inputs(inputs)
        labels = tuple(inputs.get(name) for name in self.label_names)
        has_labels = bool(labels) and all(label is not None for label in labels)
        counted = inputs
        # A loss of the user's may read anything else of the rows that fill the batch up
        if self._own_loss is None:
            counted = with_labels_of_first(inputs, self._samples_of(len(inputs["input_ids"])))
        items = self._get_num_items_in_batch([counted], self.args.device)
        if items is not None:  # else a batch without labels would have a loss of NaN
            inputs = counted
        self.parallel_model.eval()
        rows, length = inputs["input_ids"].shape
        # Any other loss than the sum over counted tokens is one of the complete batch
        is_sum = items is not None and self._own_loss is None and self.model_accepts_loss_kwargs
        micro_batches = min(self.stage_plan.stages, rows) if is_sum else 1
        if self.parallelized.balance is not None:
            self.parallelized.balance.micro_batches = micro_batches
            self.parallelized.balance.has_added_rows = False
        self._ignored_keys = ignore_keys
        with self._predictions.collecting(wanted=not prediction_loss_only):
            loss = self._run_pipeline(dict(inputs), micro_batches, items)
            logits = self._predictions.take(length, self.args.device)
        reshard_all(self.parallelized)
        if prediction_loss_only:
            return loss, None, None
        returned = labels[0] if len(labels) == 1 else labels
        return loss if has_labels else None, logits, returned if has_labels else None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate as Trainer does, but gather what ranks with other samples have, and each sample once.

        Args:
            args, kwargs: as for `Trainer.evaluation_loop`.
        """
        self._check_attributes()
        self.gather_function = self._gather_samples
        self._is_evaluating = True
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self._is_evaluating = False

    def _gather_samples(self, tensor: torch.Tensor) -> torch.Tensor:
        return gather_samples(tensor, self.mesh, self._samples_left)

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

    def _get_num_items_in_batch(
        self, batch_samples: list[Any], device: torch.device
    ) -> torch.Tensor | int | None:
        """Count the items as Trainer does, but once for all ranks and micro-batches of a step: inside of the last
        stage, where other ranks do not take part, return that number."""
        if self._is_in_stage:
            return self._num_items
        counted: torch.Tensor | int | None = super()._get_num_items_in_batch(batch_samples, device)
        return counted

    def _run_pipeline(
        self, inputs: dict[str, torch.Tensor], micro_batches: int, items: torch.Tensor | int | None
    ) -> torch.Tensor:
        self._num_items = items
        if self._own_loss is None or self.layout.pp == 1:
            return self._loss_of_step(inputs, micro_batches)
        with self._own_loss.recording() as logs:
            loss = self._loss_of_step({**inputs, TOKENS: inputs["input_ids"]}, micro_batches)
        for logged in logs:
            super().log(logged)  # an overridden `log` has seen it on the last stage
        return loss

    def _loss_of_step(self, inputs: dict[str, torch.Tensor], micro_batches: int) -> torch.Tensor:
        loss: torch.Tensor = (
            self.parallel_model(micro_batches=micro_batches, **inputs).detach().clone()
        )
        if self._own_loss is not None and not self.parallel_model.training:
            dist.all_reduce(loss, group=self.mesh.pp_group)
            return loss  # of this rank's batch, which Trainer gathers
        # The tp ranks of the last stage hold the same loss; ranks with other tokens have scaled theirs for averaging.
        if dist.is_initialized():
            dist.all_reduce(loss)
        layout = self.layout
        copies = layout.tp * layout.cp * layout.data_parallel_size
        return loss / copies

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer does. What `compute_loss` logs on the last stage is logged by all ranks after the step.

        Args:
            logs (`dict[str, float]`): the values.
            args, kwargs: as for `Trainer.log`.
        """
        if self._own_loss is None or not self._own_loss.take_log(logs):
            super().log(logs, *args, **kwargs)

    def _loss_of_last_stage(self, view: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
        """Compute the loss of one micro-batch by Trainer's own `training_step` or `prediction_step`.

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
        self._is_in_stage = True
        try:
            if self._loss_model is None:
                loss = self._loss_of_micro_batch(view, {**inputs, "use_cache": False})
            else:
                assert self._own_loss is not None  # made together
                guarded = self._loss_model.guarded(self.compute_loss, self._own_loss.fail)
                with (
                    self._loss_model.computing(inputs) as own,
                    _replaced(self, "compute_loss", guarded),
                ):
                    loss = self._loss_of_micro_batch(self._loss_model.model, own)
        except Exception as error:
            # Errors of the model are raised at once: other ranks of this stage may wait in an exchange of its passes
            is_own = self._loss_model is not None and self._loss_model.may_complete(error)
            if self._own_loss is None or self.layout.pp == 1 or not is_own:
                raise
            # The other stages wait for this one: the step is completed, and then every rank raises the error
            self._own_loss.fail(error)
            loss = inputs["inputs_embeds"].sum() * 0.0
        finally:
            self._is_in_stage = False
        return loss * self.layout.cp

    def _loss_of_micro_batch(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        if self.parallel_model.training:
            taken: list[torch.Tensor] = []
            # The only place where Trainer's own rule has scaled the loss and not detached it: the schedule starts the
            # backward pass
            with _replaced(
                self.accelerator, "backward", lambda loss, **options: taken.append(loss)
            ):
                super().training_step(model, inputs, self._num_items)
            return taken[0]
        loss, logits, _ = super().prediction_step(
            model, inputs, not self._predictions.are_wanted, self._ignored_keys
        )
        self._predictions.add(logits)
        return torch.zeros((), device=self.args.device) if loss is None else loss

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
        tokens = inputs["input_ids"].numel()
        operations = 6 * tokens * self.parameter_counts[0]
        return operations // self.layout.ranks_per_replica


def _fill_weights(
    model: PreTrainedModel, aliases: Mapping[str, str], *, seed: int, weights_from: str | None
) -> None:
    draw_weights(model, seed=seed, parameters=weights_from is None)
    if weights_from is not None:
        read_weights(model, weights_from, aliases=aliases)
    draw_adapters(model, seed=seed)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object an attribute of its own in the `with` block, in place of what it has there or its class."""
    attributes = vars(owner)
    before = {key: attributes[key] for key in (name,) if key in attributes}
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        attributes.update(before)
