"""`TraceCallback`: writes what chosen steps compute, for the comparison with another run by `hfscale why`."""

import time
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from hfscale.core.best_effort import best_effort
from hfscale.core.logging import get_logger
from hfscale.core.options import takes_options
from hfscale.core.replaying import is_replaying
from hfscale.core.run_files import TRACES_NAME
from hfscale.errors import UsageError
from hfscale.trainer.adapter import AdapterCallback, TrainerAdapter
from hfscale.trainer.strategies import Strategy
from hfscale.why.options import TraceOptions
from hfscale.why.recording import StepRecorder, why_no_operations

logger = get_logger(__name__)


class TraceCallback(AdapterCallback):
    """Writes traces of chosen optimizer steps to `output_dir/hfscale_trace/step-N/rank-R.jsonl`.

    A trace has, of each rank, hash and norm of what goes in and out of every module, of the gradients on the way back,
    of the gradients of all parameters before and after clipping, of optimizer states and weights before and after the
    step; hashes of batches and random states; and the settings of modules and optimizer. `hfscale why RUN_A RUN_B`
    compares the traces of two runs. The callback logs no metric keys, changes nothing that is computed, and costs
    nothing in other steps.

    Under torch.compile modules and operations are not traced, only the rest; with flex attention, operations are not.

    Args:
        **options: the options, see below.

    Raises:
        ParameterError: a step is below 1, or there are more than 32.
        UsageError: when training begins: the run uses DeepSpeed or `ParallelTrainer`, whose steps have no events
            between their parts.
    """

    @takes_options(TraceOptions)
    def __init__(self, options: TraceOptions) -> None:
        self.options = options
        self.steps = frozenset(options.steps)
        self._begin_run()

    def _begin_run(self) -> None:
        self._recorder: StepRecorder | None = None
        self._is_attached = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self.steps:
            return
        # Of a training loop that `auto_find_batch_size` has restarted
        if self._recorder is not None:
            self._recorder.discard()
            self._recorder = None
        adapter = TrainerAdapter.current()
        strategy = Strategy.of(adapter.trainer)
        if strategy.engine_steps or strategy.runs_stages:
            name = "DeepSpeed" if strategy.engine_steps else "ParallelTrainer"
            raise UsageError(
                f"steps cannot be traced under {name}: trace the same training under FSDP2 or DDP"
            )
        if not self._is_attached:
            self._is_attached = True
            adapter.at_training_end(self._detach)
            adapter.wrap_training_step(self._record)
        if args.torch_compile:
            logger.warning(
                "modules and operations are not traced under torch.compile; the rest of a step is"
            )
        elif self.options.operations:
            reason = why_no_operations(adapter.trainer)
            if reason is not None:
                logger.warning("a trace has modules and no single operations: %s", reason)
        folder = adapter.checkpoints.run_dir() / TRACES_NAME
        if state.is_world_process_zero and state.global_step == 0 and folder.is_dir():
            with best_effort("writing a trace", folder):  # those of another run
                folder.rename(folder.with_name(f"{TRACES_NAME}-until-{int(time.time())}"))

    def _record(self, training_step: Any) -> Any:
        def step_or_record(*args: Any, **kwargs: Any) -> Any:
            if self._recorder is None or is_replaying():
                return training_step(*args, **kwargs)
            return self._recorder.wrap(training_step)(*args, **kwargs)

        return step_or_record

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step + 1 in self.steps:
            adapter = TrainerAdapter.current()
            step = state.global_step + 1
            self._recorder = StepRecorder(
                adapter.trainer,
                adapter.checkpoints.run_dir(),
                step,
                operations=self.options.operations,
            )
            self._recorder.begin()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._recorder is not None:
            self._recorder.end()
            self._recorder = None

    def _detach(self) -> None:
        self._is_attached = False
        if self._recorder is not None:
            self._recorder.discard()
            self._recorder = None
