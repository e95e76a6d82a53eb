"""Makes every Trainer of a process train for a few steps on CPUs, evaluate, log, save, and reach the end of its data.

Only the processes that `hfscale check` starts call this. Nothing is written where the user keeps runs, and nothing is
reported to trackers or the hub.
"""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import Subset


def use_cpu(state: Any) -> None:
    """Have Accelerate use CPUs and gloo, also for FSDP, which it would replace by DDP without a word.

    Args:
        state (`module`): `accelerate.state`.
    """
    init_partial, init_state = state.PartialState.__init__, state.AcceleratorState.__init__

    @functools.wraps(init_partial)
    def partial(self: Any, cpu: bool = False, **options: Any) -> None:
        init_partial(self, True, **options)

    @functools.wraps(init_state)
    def full(self: Any, *arguments: Any, **options: Any) -> None:
        state.PartialState()
        shared = state.PartialState._shared_state
        wanted = os.environ.get("ACCELERATE_USE_FSDP", "false") == "true" or any(
            options.get(name) is not None for name in ("fsdp_plugin", "parallelism_config")
        )
        if wanted and shared["distributed_type"] == state.DistributedType.MULTI_CPU:
            shared["distributed_type"] = state.DistributedType.MULTI_GPU
        init_state(self, *arguments, **options)

    state.PartialState.__init__ = partial
    state.AcceleratorState.__init__ = full


def shorten_arguments(module: Any, *, steps: int, output_dir: str) -> None:
    """Change all `TrainingArguments` that are made later.

    Args:
        module (`module`): `transformers.training_args`.
        steps (`int`): optimizer steps of a training.
        output_dir (`str`): the folder that replaces the output directory.
    """
    post_init = module.TrainingArguments.__post_init__

    @functools.wraps(post_init)
    def shortened(self: Any) -> None:
        self.output_dir = output_dir
        self.use_cpu = True
        self.fp16 = False
        self.tf32 = None
        self.report_to = "none"
        self.push_to_hub = False
        self.logging_steps = 1
        self.num_train_epochs = 1
        self.max_steps = min(self.max_steps, steps) if self.max_steps > 0 else -1
        half = max(1, steps // 2)
        self.eval_steps = half if self.eval_steps is None or self.eval_steps < 1 else min(half, self.eval_steps)
        self.save_steps = half if self.save_steps < 1 else min(half, self.save_steps)
        post_init(self)

    module.TrainingArguments.__post_init__ = shortened


def shorten_trainings(module: Any, *, steps: int, report: Callable[[str, int], None]) -> None:
    """Change all Trainers that are made later: less data, with the same remainder at its end.

    Args:
        module (`module`): `transformers.trainer`.
        steps (`int`): optimizer steps of a training.
        report (`Callable[[str, int], None]`): is called with what was done, and the number of steps so far.
    """
    init = module.Trainer.__init__

    class Reports(module.TrainerCallback):  # type: ignore[misc]
        """Reports the events of a training."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            report("step", state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            report("log", state.global_step)

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            report("evaluation", state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            report("save", state.global_step)

        def on_epoch_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
            if state.epoch is not None and state.epoch >= 1:
                report("end of data", state.global_step)

    @functools.wraps(init)
    def shortened(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        args = self.args
        per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self.train_dataset = _part(self.train_dataset, steps, per_step)
        per_step = args.eval_batch_size * args.world_size
        if isinstance(self.eval_dataset, Mapping):
            self.eval_dataset = {name: _part(one, 2, per_step) for name, one in self.eval_dataset.items()}
        else:
            self.eval_dataset = _part(self.eval_dataset, 2, per_step)
        self.callback_handler.callbacks.insert(0, Reports())  # before those of the user, which may exchange something

    module.Trainer.__init__ = shortened


class _Part(Subset):  # type: ignore[type-arg]
    """Some rows of a dataset, with its other attributes."""

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def _part(dataset: Any, steps: int, per_step: int) -> Any:
    """Return the rows of the first steps, and as many of the end as its last step has.

    Args:
        dataset (`Dataset`, *optional*): a dataset; a stream is returned as it is.
        steps (`int`): the steps for which it is to last.
        per_step (`int`): the rows of a step of all ranks.
    """
    if dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return dataset
    rows = len(dataset)
    rest = rows % per_step
    first = (steps - 1) * per_step if rest else steps * per_step
    if rows <= first + rest:
        return dataset
    kept = [*range(first), *range(rows - rest, rows)]
    return dataset.select(kept) if hasattr(dataset, "select") else _Part(dataset, kept)
