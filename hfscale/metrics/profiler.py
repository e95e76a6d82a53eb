"""ProfilerCallback: PyTorch profiler traces of chosen steps, and NVTX ranges for Nsight Systems."""

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.core.best_effort import best_effort
from hfscale.core.logging import get_logger
from hfscale.core.options import takes_options
from hfscale.errors import ParameterError
from hfscale.metrics.options import ProfilerOptions
from hfscale.metrics.step_ranges import StepRanges
from hfscale.trainer.state import output_folder

logger = get_logger(__name__)


def device_of(args: TrainingArguments) -> str:
    """Return the type of the device that trains, such as `cuda`, which is also that of ROCm."""
    return args.device.type


class ProfilerCallback(TrainerCallback):
    """Writes a trace of each chosen step of rank 0 to `output_dir/profile/step-N.json`, which Perfetto can open.

    A trace includes forward, backward and optimizer step, but not the wait for the batch. Profiled steps are slower;
    the other steps are not affected. The callback logs no metric keys.

    With `nvtx`, every step on every rank has NVTX ranges (`StepRanges`), which `nsys profile --trace cuda,nvtx` shows.

    Raises:
        ParameterError: `nvtx` is given, and the training does not run on a CUDA or ROCm device.
    """

    @takes_options(ProfilerOptions)
    def __init__(self, options: ProfilerOptions) -> None:
        self.steps = frozenset(options.steps)
        self.nvtx = options.nvtx
        self._profile: profile | None = None
        self._ranges: StepRanges | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._stop_ranges()  # of a training that broke off
        if not self.nvtx:
            return
        device = device_of(args)
        if device != "cuda":
            rule = f"this training runs on the device {device!r}, and NVTX ranges need a CUDA or ROCm device"
            raise ParameterError("nvtx", True, rule)
        self._ranges = StepRanges(torch.cuda.nvtx)
        self._ranges.start(kwargs["model"])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._ranges is not None:
            self._ranges.begin_step(state.global_step + 1)
        if state.global_step + 1 not in self.steps or not state.is_world_process_zero:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available() and not args.use_cpu:
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._ranges is not None:
            self._ranges.end_micro_batch()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._ranges is not None:
            self._ranges.begin_optimizer()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._ranges is not None:
            self._ranges.end_optimizer()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._stop_ranges()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._ranges is not None:
            self._ranges.end_step()
        if self._profile is None:
            return
        self._profile.stop()
        path = output_folder(args) / "profile" / f"step-{state.global_step}.json"
        with best_effort("writing a profile", path.parent, (OSError, RuntimeError)):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(path))
            logger.info("profiled step %d: %s", state.global_step, path)
        self._profile = None

    def _stop_ranges(self) -> None:
        if self._ranges is not None:
            self._ranges.stop()
            self._ranges = None
