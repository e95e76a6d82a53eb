"""`TraceCallback`: writes what chosen steps compute, for the comparison with another run by `hfscale why`."""

import time
from collections.abc import Sequence
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from hfscale.core.best_effort import best_effort
from hfscale.core.logging import get_logger
from hfscale.core.replaying import is_replaying
from hfscale.core.run_files import TRACES_NAME
from hfscale.errors import ParameterError, UsageError
from hfscale.trainer.adapter import AdapterCallback, TrainerAdapter
from hfscale.trainer.strategies import Strategy
from hfscale.why.recording import StepRecorder

logger = get_logger(__name__)
MAX_STEPS = 32
"""Steps that one callback traces at most, which bounds the files."""


def read_steps(text: str) -> list[int]:
    """Read numbers of steps that are separated by commas or spaces.

    Args:
        text (`str`): such as `5,6`.

    Raises:
        ParameterError: one of them is not a number.
    """
    words = text.replace(",", " ").split()
    if not words or not all(word.lstrip("-").isdigit() for word in words):
        raise ParameterError("steps", text, "give numbers of steps, such as 5,6")
    return [int(word) for word in words]


class TraceCallback(AdapterCallback):
    """Writes traces of chosen optimizer steps to `output_dir/hfscale_trace/step-N/rank-R.jsonl`.

    A trace has, of each rank, hash and norm of what goes in and out of every module, of the gradients on the way back,
    of the gradients of all parameters before and after clipping, of optimizer states and weights before and after the
    step; hashes of batches and random states; and the settings of modules and optimizer. `hfscale why RUN_A RUN_B`
    compares the traces of two runs. The callback logs no metric keys, changes nothing that is computed, and costs
    nothing in other steps.

    Under torch.compile modules and operations are not traced, only the rest.

    Args:
        steps (`Sequence[int]`): numbers of the optimizer steps to trace, counted from 1, at most 32.
        operations (`bool`): whether each operation (`aten.mm`, …) is traced too, which takes most of the time.

    Raises:
        ParameterError: a step is below 1, or there are more than 32.
        UsageError: when training begins: the run uses DeepSpeed or `ParallelTrainer`, whose steps have no events
            between their parts.
    """

    def __init__(self, steps: Sequence[int], *, operations: bool = True) -> None:
        for step in steps:
            if step < 1:
                raise ParameterError(
                    "steps", list(steps), f"{step} is below 1, and steps are counted from 1"
                )
        if len(set(steps)) > MAX_STEPS:
            raise ParameterError(
                "steps", f"a list of {len(set(steps))}", f"at most {MAX_STEPS} steps can be traced"
            )
        self.steps = frozenset(steps)
        self.operations = operations
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
        folder = adapter.run_dir() / TRACES_NAME
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
                adapter.trainer, adapter.run_dir(), step, operations=self.operations
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
