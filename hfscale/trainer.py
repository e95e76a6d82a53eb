"""`ParallelTrainer`: Hugging Face's Trainer over tensor x pipeline x data parallel ranks.

What a Trainer user knows stays: `TrainingArguments`, callbacks, datasets and collators, evaluation, logs, checkpoints,
resume. What is different underneath:

- a step's `gradient_accumulation_steps` batches are the pipeline's micro-batches, run by one schedule;
- ranks that share a sample (tensor and pipeline parallel ones) read the same batches and count once;
- the loss is that of the last stage, sent to all ranks.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from peft import PeftModel
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from hfscale.arguments import ParallelArguments
from hfscale.callbacks.log_keys import LogKeys
from hfscale.checkpoint.store import write_atomically
from hfscale.errors import CheckpointError, UsageError
from hfscale.parallel import export, gradients, state
from hfscale.parallel.batches import stack_batches
from hfscale.parallel.checks import check_config
from hfscale.parallel.clock import StageTimes
from hfscale.parallel.mesh import make_mesh
from hfscale.parallel.model import LaidOut, ParallelModel, lay_out
from hfscale.parallel.schedule import Pipeline
from hfscale.stage_flags import check_arguments, plan_stages
from hfscale.weights import draw_weights, read_weights

_SCHEDULER_FILE = "scheduler.json"


class ParallelTrainer(Trainer):
    """A Trainer whose model is cut over `tp_size` x `pp_size` ranks, and repeated or sharded over the others.

    | metric key | unit | meaning |
    |---|---|---|
    | `scaling/bubble_fraction` | ratio | share of the pipeline schedule's time in which a rank waits, mean of all |

    Args:
        model (`PreTrainedModel` or `PeftModel`): whole and the same on every rank, or on the meta device. It is cut
            in place: each rank keeps its part.
        args (`TrainingArguments`): of any kind.
        parallel (`ParallelArguments`, *optional*): sizes of the axes; absent: all ranks are data parallel.
        weights_from (`str`, *optional*): a folder of safetensors or a hub id, for a model on the meta device; each
            rank reads its part. Absent: they are drawn from `args.seed`, the same under every layout.
        kwargs: as for `Trainer`.

    Raises:
        LayoutError: sizes that do not fit together, the world, or the model.
        UsageError: a model or an argument that does not go with it.
    """

    def __init__(
        self,
        model: PreTrainedModel | nn.Module,
        args: TrainingArguments,
        *positional: Any,
        parallel: ParallelArguments | None = None,
        weights_from: str | None = None,
        **kwargs: Any,
    ) -> None:
        parallel = parallel or ParallelArguments()
        self.layout, self.stage_plan = plan_stages(parallel, args)
        check_arguments(args, **kwargs)
        check_config(model.config, self.layout, self.stage_plan, sequence_parallel=parallel.sequence_parallel)
        self.mesh = make_mesh(self.layout, args.device.type)
        causal = model.get_base_model() if _is_adapted(model) else model
        self.whole_sizes = tuple(
            sum(p.numel() for p in model.parameters() if p.requires_grad or not only_trained)
            for only_trained in (False, True)
        )
        """Parameters of the whole model: all, and those that are trained."""
        self.laid_out: LaidOut = lay_out(
            causal,
            self.mesh,
            self.stage_plan,
            self._loss_of_last_stage,
            compute_dtype=torch.bfloat16 if args.bf16 else None,
            fill=partial(_fill, seed=args.seed, weights_from=weights_from),
            sequence_parallel=parallel.sequence_parallel,
            cut_logits=kwargs.get("compute_loss_func") is None,
        )
        super().__init__(model, args, *positional, **kwargs)
        if self.laid_out.vocabulary is not None and self.label_smoother is not None:
            self.label_smoother = self.laid_out.vocabulary.smoother(self.label_smoother.epsilon)
        # The Trainer's own way to leave a model alone: no wrapper, no placement.
        self.is_distributed_loading_by_transformers = True
        self.accelerator.prepare_data_loader = self._prepare_data_loader
        hidden = causal.config.get_text_config().hidden_size
        dtype = torch.bfloat16 if args.bf16 else causal.dtype
        self.pipeline = Pipeline(
            self.laid_out.stages, self.stage_plan, self.mesh.pp_group, args.device, hidden_size=hidden, dtype=dtype,
            sequence_parts=self.laid_out.sequence_parts,
        )  # fmt: skip
        self.parallel_model = ParallelModel(self.laid_out, self.pipeline)
        self._waiting: list[dict[str, torch.Tensor]] = []
        self._items: torch.Tensor | int | None = None

    # --- batches: ranks that share a sample count once --------------------------------------------------------------

    def get_tp_size(self) -> int:
        """Ranks that read the same samples; what Trainer divides the world by."""
        return self.layout.ranks_per_replica

    def _prepare_data_loader(self, data_loader: DataLoader, *args: Any, **kwargs: Any) -> DataLoader:
        accelerator = self.accelerator
        prepared = prepare_data_loader(
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
        accelerator._dataloaders.append(prepared)
        return prepared

    # --- a step -----------------------------------------------------------------------------------------------------

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple[nn.Module, DataLoader]:
        _, data_loader = super()._prepare_for_training(*args, **kwargs)
        self.model_wrapped = self.parallel_model
        if self.layout.pp > 1:
            LogKeys.of(self).add(StageTimes(self.pipeline.clock, Path(self.args.output_dir)).keys)
        return self.parallel_model, data_loader

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Trainer would send rank 0's plain parameters to all; here other ranks hold other ones."""

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Keep a micro-batch; with the last one of the step, run the schedule and complete the gradients."""
        self._waiting.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = self._waiting, []
        self.parallel_model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        micro_batches = self.stage_plan.micro_batches_for(len(batches))
        if micro_batches > len(batches) and num_items_in_batch is None:
            raise UsageError(
                f"the last step of an epoch has {len(batches)} micro-batches, {self.stage_plan.schedule} needs "
                f"{micro_batches}, and {type(self.laid_out.model).__name__} has no loss over counted tokens to "
                "fill them up: give --max_steps, so that the run ends before"
            )
        if self.laid_out.balance is not None:
            self.laid_out.balance.micro_batches = len(batches)
        loss = self._run(stack_batches(batches, micro_batches), micro_batches, num_items_in_batch)
        gradients.align_gradients(self.laid_out.model.parameters())
        gradients.sum_partial_gradients(self.laid_out.partial, self.mesh)
        if self.laid_out.tied is not None:
            self.laid_out.tied.sum_gradients()
        return loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, None, None]:
        """The loss over the batches of all data parallel ranks; logits stay where they are."""
        inputs = self._prepare_inputs(inputs)
        items = self._get_num_items_in_batch([inputs], self.args.device)
        self.parallel_model.eval()
        micro_batches = min(self.stage_plan.stages, inputs["input_ids"].shape[0])
        self.current_gradient_accumulation_steps = micro_batches
        if self.laid_out.balance is not None:
            self.laid_out.balance.micro_batches = micro_batches
        loss = self._run(dict(inputs), micro_batches, items)
        state.reshard_all(self.laid_out)
        return loss, None, None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As in Trainer; a batch's loss, which all ranks know, counts once per sample."""
        self.gather_function = self._once_per_sample
        return super().evaluation_loop(*args, **kwargs)

    def _once_per_sample(self, losses: torch.Tensor) -> torch.Tensor:
        gathered = losses.repeat(self.layout.data_parallel_size)
        state_ = self.accelerator.gradient_state
        return gathered[: state_.remainder] if state_.end_of_dataloader and state_.remainder > 0 else gathered

    def _run(
        self, inputs: dict[str, torch.Tensor], micro_batches: int, items: torch.Tensor | int | None
    ) -> torch.Tensor:
        self._items = items
        with self.compute_loss_context_manager():
            loss = self.parallel_model(micro_batches=micro_batches, **inputs).detach().clone()
        # The last stage's ranks hold it, tp of them alike; data parallel ranks have scaled theirs to average.
        dist.all_reduce(loss) if dist.is_initialized() else None
        return loss / (self.layout.tp * self.layout.data_parallel_size)

    def _loss_of_last_stage(self, view: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
        """One micro-batch's loss as Trainer computes it: label smoothing and `compute_loss_func` included."""
        loss = self.compute_loss(view, {**inputs, "use_cache": False}, num_items_in_batch=self._items)
        scaled = (self.model_accepts_loss_kwargs and self._items is not None) or self.compute_loss_func is not None
        return loss if scaled else loss / self.current_gradient_accumulation_steps

    # --- gradients --------------------------------------------------------------------------------------------------

    def _counted_once(self) -> list[nn.Parameter]:
        duplicate = self.laid_out.tied.duplicate if self.laid_out.tied is not None else None
        return [p for p in self.laid_out.model.parameters() if p is not duplicate]

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        return gradients.gradient_norm(self._counted_once(), self.mesh) if grad_norm is None else grad_norm

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        norm = gradients.gradient_norm(self._counted_once(), self.mesh)
        gradients.scale_gradients(self.laid_out.model.parameters(), norm, self.args.max_grad_norm)
        return norm

    # --- what is logged ---------------------------------------------------------------------------------------------

    def floating_point_ops(self, inputs: dict[str, torch.Tensor | Any]) -> int:
        """6 N D of the whole model, shared among the ranks that work on a sample: Trainer adds up all ranks."""
        return 6 * inputs["input_ids"].numel() * self.whole_sizes[0] // self.layout.ranks_per_replica

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Within training the model's part of a checkpoint (the rest follows); else a `from_pretrained` folder."""
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if _internal_call:
            state.save(folder, self.laid_out, None if self.args.save_only_model else self.optimizer.optimizer)
        else:
            export.write_weights(folder, self.laid_out, self.mesh)
        if not self.args.should_save:
            return
        if _is_adapted(self.model):
            self.model.peft_config[self.model.active_adapter].save_pretrained(str(folder))
        else:
            self.laid_out.model.config.save_pretrained(folder)
            if self.laid_out.model.can_generate():
                self.laid_out.model.generation_config.save_pretrained(folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The optimizer's state is saved with the model; of the scheduler its position alone: its lists have an
        entry per parameter group, and how many groups there are depends on the layout."""
        if self.args.should_save:
            scheduler = self.lr_scheduler
            position = {"last_epoch": scheduler.last_epoch, "base_lrs": sorted(set(scheduler.base_lrs))}
            write_atomically(Path(output_dir) / _SCHEDULER_FILE, json.dumps(position) + "\n")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not (Path(resume_from_checkpoint) / state.FOLDER).is_dir():
            raise CheckpointError(
                f"{resume_from_checkpoint} was not written by ParallelTrainer: begin from the weights of a model "
                "folder with --model_name_or_path, or afresh with --resume_from_checkpoint false"
            )
        state.load_model(Path(resume_from_checkpoint), self.laid_out)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state.load_optimizer(Path(checkpoint), self.laid_out, self.optimizer.optimizer)
        state.restore_position(self.lr_scheduler, json.loads((Path(checkpoint) / _SCHEDULER_FILE).read_text("utf-8")))

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """It is where it belongs since `lay_out`."""


def _is_adapted(model: nn.Module) -> bool:
    return isinstance(model, PeftModel)


def _fill(model: PreTrainedModel, aliases: Mapping[str, str], *, seed: int, weights_from: str | None) -> None:
    draw_weights(model, seed=seed, parameters=weights_from is None)
    if weights_from is not None:
        read_weights(model, weights_from, aliases=aliases)
