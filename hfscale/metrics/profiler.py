"""ProfilerCallback: PyTorch profiler traces of chosen steps."""

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.core.best_effort import best_effort
from hfscale.core.logging import get_logger
from hfscale.core.options import takes_options
from hfscale.metrics.options import ProfilerOptions
from hfscale.trainer.state import output_folder

logger = get_logger(__name__)


class ProfilerCallback(TrainerCallback):
    """Writes a trace of each chosen step of rank 0 to `output_dir/profile/step-N.json`, which Perfetto can open.

    A trace includes forward, backward and optimizer step, but not the wait for the batch. Profiled steps are slower;
    the other steps are not affected. The callback logs no metric keys.
    """

    @takes_options(ProfilerOptions)
    def __init__(self, options: ProfilerOptions) -> None:
        self.steps = frozenset(options.steps)
        self._profile: profile | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step + 1 not in self.steps or not state.is_world_process_zero:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available() and not args.use_cpu:
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._profile is None:
            return
        self._profile.stop()
        path = output_folder(args) / "profile" / f"step-{state.global_step}.json"
        with best_effort("writing a profile", path.parent, (OSError, RuntimeError)):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(path))
            logger.info("profiled step %d: %s", state.global_step, path)
        self._profile = None
