"""`WeightAveragingCallback`: keeps an average of the trained weights, evaluates and exports it."""

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.averaging.options import AverageOptions
from hfscale.averaging.storage import StoredAverage
from hfscale.averaging.weights import AveragedWeights
from hfscale.checkpoint.contents import write_files
from hfscale.checkpoint.formats.average import FOLDER, read_average_metadata
from hfscale.checkpoint.formats.dcp import save_shards
from hfscale.core.activity import activity
from hfscale.core.attributes import replaced
from hfscale.core.collectives import START, TRAINING
from hfscale.core.logging import get_logger
from hfscale.core.options import names_of, takes_options
from hfscale.core.run_files import AVERAGE_NAME
from hfscale.core.spelling import spelled
from hfscale.errors import UsageError
from hfscale.facts.support import check_support
from hfscale.trainer.adapter import AdapterCallback, TrainerAdapter
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.description import offload_device

logger = get_logger(__name__)


class WeightAveragingCallback(AdapterCallback):
    """Keeps an average of the trained weights: a moving one (`ema_decay`), or the mean of the last k (`average_last`).

    The average is in float32, of the values that the optimizer steps (under ZeRO, DeepSpeed's fp32 copies), and each
    rank keeps what it holds of them: a shard under FSDP2, its partition under ZeRO, its part under `ParallelTrainer`.
    It is updated after an optimizer step, which sends nothing to other ranks; a step that fp16 skips does not count.
    Only trained parameters are averaged, with adapters those alone. Buffers, such as the running statistics of
    BatchNorm, are those of the training: a warning names the first module that has such statistics.

    At the end the averaged model is written into the folder `average` of the output directory, for `from_pretrained`,
    in the data type of the final model; not where a notice ended the run, which is to be resumed. Checkpoints keep the
    average, so that a resumed run continues with the same bits, also under another strategy and on another number of
    ranks. From a checkpoint without one it starts anew, and a log line says so.

    With `evaluate_average`, evaluations during the training see the averaged weights, also if an evaluation raises the
    same weights are back afterwards, bit by bit. The metrics keep their names, so that the best model, early stopping
    and schedules follow them. `load_best_model_at_end` then loads the average of the best checkpoint. Without
    `evaluate_average` it loads the weights of that checkpoint, and `average` is that of the last step.

    It logs no metric keys.

    Args:
        **options: the options, see below.

    Raises:
        UsageError: no average or both are asked for, a number is out of range, or, when training begins, the run has
            weights that cannot be averaged or a strategy under which they cannot be.
        CheckpointError: training resumes from a checkpoint whose average is broken.
    """

    averages_weights = True

    @takes_options(AverageOptions)
    def __init__(self, options: AverageOptions) -> None:
        if not options.is_given:
            other = spelled("average_last")
            raise UsageError(f"give {spelled('ema_decay')}, such as 0.999, or {other}")
        self.options = options
        self._begin_run()

    def _begin_run(self) -> None:
        self.average: AveragedWeights | None = None
        """The average of the running training, or of the last one."""
        self._stored: StoredAverage | None = None

    def before_train(self, adapter: TrainerAdapter) -> None:
        """Refuse a training whose weights cannot be averaged, before Trainer prepares it."""
        if adapter.trainer.model is not None:
            self._check(adapter)

    def _check(self, adapter: TrainerAdapter) -> None:
        """Refuse what the table of what works with what refuses, and a second average.

        Raises:
            UsageError: it is refused.
        """
        trainer = adapter.trainer
        strategy = Strategy.of(trainer)
        config = strategy.engine_config()
        zero = config.get("zero_optimization", {})
        asked = replace(
            strategy.combination(),
            average=True,
            evaluate_average=self.options.evaluate_average,
            optimizer_device=offload_device(config, "optimizer"),
            gathers_weights=bool(zero.get("stage3_gather_16bit_weights_on_model_save")),
        )
        with names_of(AverageOptions):
            check_support(asked, "average", "evaluate_average")
        kinds = [type(each) for each in trainer.callback_handler.callbacks]
        if kinds.count(WeightAveragingCallback) > 1:
            raise UsageError("the Trainer has two WeightAveragingCallbacks: give it one")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._begin_run()
        adapter = TrainerAdapter.current()
        self._check(adapter)
        with START.agreed("start: average"):
            self.average = AveragedWeights(adapter.trainer, self.options)
            self._stored = StoredAverage(self.average)
            if adapter.resumes_from is not None:
                self._resume(adapter.resumes_from)
        adapter.announced.shards[FOLDER] = self._stored
        if self.options.evaluate_average:
            adapter.evaluations.wrap_evaluate("average", self._with_average)
        adapter.before_last_log(lambda: self._finish(adapter))
        adapter.append_callback(_AfterOthers(self))
        _warn_of_statistics(model_of(adapter.trainer))

    def _resume(self, checkpoint: str) -> None:
        assert self._stored is not None
        why_not = self._stored.load(Path(checkpoint))
        if why_not is not None:
            logger.warning("%s: %s; the average starts anew", checkpoint, why_not)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.average is None or state.global_step % self.options.every_steps:
            return
        if self.average.trainer.accelerator.optimizer_step_was_skipped:
            return
        self.average.update(state.global_step)

    def _with_average(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `Trainer.evaluate`, so that it sees the averaged weights."""
        is_in_use = False

        @functools.wraps(evaluate)
        def evaluate_average(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_in_use
            # With several evaluation sets evaluate() calls itself for each
            if is_in_use or self.average is None:
                return evaluate(*args, **kwargs)
            is_in_use = True
            try:
                with self.average.in_use():
                    return evaluate(*args, **kwargs)
            finally:
                is_in_use = False

        return evaluate_average

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the average to a checkpoint of plain Trainer; `SpotCheckpointCallback` writes it with its own."""
        adapter = TrainerAdapter.current()
        if self._stored is None or adapter.checkpoints.has_saver:
            return
        folder = adapter.checkpoints.run_dir() / f"checkpoint-{state.global_step}" / FOLDER
        with TRAINING.agreed("save: folder of the average"):
            if args.should_save:
                # Of an earlier training that has saved the same step
                shutil.rmtree(folder, ignore_errors=True)
        save_shards(self._stored.take(copies=False), folder, TRAINING)
        with TRAINING.agreed("save: average"):
            if args.should_save:
                write_files(folder, self._stored.files())

    # ---- the end

    def _finish(self, adapter: TrainerAdapter) -> None:
        """Write the averaged model, unless the average of the best checkpoint is yet to be loaded."""
        if adapter.trainer.args.load_best_model_at_end:
            adapter.checkpoints.wait_for_save()  # it may be that of the best checkpoint
        if not self._loads_best(adapter):
            self._export(adapter)

    def _loads_best(self, adapter: TrainerAdapter) -> bool:
        """Return whether Trainer is about to load, or has loaded, a checkpoint whose average was evaluated."""
        trainer = adapter.trainer
        best = trainer.state.best_model_checkpoint
        if not trainer.args.load_best_model_at_end or best is None:
            return False
        metadata = read_average_metadata(Path(best))
        return metadata is not None and metadata.evaluated and metadata.updates > 0

    def end(self) -> None:
        """Replace the weights of the best checkpoint by their average, if that was evaluated, on every rank."""
        adapter = TrainerAdapter.current()
        if self.average is None or self._stored is None or not self._loads_best(adapter):
            return
        best = str(adapter.trainer.state.best_model_checkpoint)
        with TRAINING.agreed("end: average of the best model"):
            why_not = self._stored.load(Path(best))
            if why_not is not None:
                raise UsageError(
                    f"{best}: {why_not}; its average, which was evaluated, cannot be loaded"
                )
        self.average.put_in()
        logger.info("the model has the averaged weights of the best checkpoint, %s", best)
        self._export(adapter)

    @activity("saving")
    def _export(self, adapter: TrainerAdapter) -> None:
        """Write the averaged model for `from_pretrained`. Every rank must call it."""
        if self.average is None or adapter.announced.is_interrupted or not self.average.sets:
            return
        trainer = adapter.trainer
        target = adapter.checkpoints.run_dir() / AVERAGE_NAME
        unfinished = target.with_name(f".{AVERAGE_NAME}-unfinished")
        with TRAINING.agreed("end: folder of the average"):
            if trainer.args.should_save:
                shutil.rmtree(unfinished, ignore_errors=True)
        with (
            self.average.in_use(),
            self.average.strategy.full_state_dicts(),
            replaced(trainer.args, "push_to_hub", False),  # it is no save of the model of the run
        ):
            trainer.save_model(str(unfinished))
        # Some Trainer classes, such as SentenceTransformerTrainer, write on every rank
        TRAINING.barrier("end: files of the average")
        with TRAINING.agreed("end: average"):
            if trainer.args.should_save:
                shutil.rmtree(target, ignore_errors=True)
                unfinished.rename(target)
        logger.info("the averaged model is in %s", target)


class _AfterOthers(TrainerCallback):
    """Ends the average after the other callbacks: they may complete the best model."""

    def __init__(self, callback: WeightAveragingCallback) -> None:
        self._callback = callback

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._callback.end()


def _warn_of_statistics(model: nn.Module) -> None:
    """Warn where a module has running statistics, which are not averaged."""
    for name, module in model.named_modules():
        if getattr(module, "track_running_stats", False):
            logger.warning(
                "'%s' is a %s: its running statistics are not averaged, and the averaged model has those of the "
                "training; compute them again with torch.optim.swa_utils.update_bn",
                name,
                type(module).__name__,
            )
            return
