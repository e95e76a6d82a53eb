"""Makes every Trainer of a process train for a few steps on CPUs, evaluate, log, save, and reach the end of its data.

Only the processes that `hfscale check` starts call this. Nothing is written where the user keeps runs, and nothing is
reported to trackers or the hub.
"""

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import SequentialSampler, Subset

from hfscale.check.parallel_run import data_replicas
from hfscale.core.records import append_record
from hfscale.core.run_files import JSONL_NAME

_KEPT = ("loss", "grad_norm", "learning_rate")
_LOOKED_AT = 256
"""Rows of a dataset whose columns are looked at."""


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
        wanted = os.environ.get("ACCELERATE_USE_FSDP", "false") == "true" or any(
            options.get(name) is not None for name in ("fsdp_plugin", "parallelism_config")
        )
        if wanted:
            from hfscale.trainer.strategies.fsdp2 import (
                let_fsdp_run_on_cpu,  # it loads transformers
            )

            let_fsdp_run_on_cpu()
        init_state(self, *arguments, **options)

    state.PartialState.__init__ = partial
    state.AcceleratorState.__init__ = full


def shorten_arguments(
    module: Any,
    *,
    steps: int,
    output_dir: str,
    accumulation: int | None = None,
    alone: bool = False,
) -> None:
    """Change all `TrainingArguments` that are made later.

    Args:
        module (`module`): `transformers.training_args`.
        steps (`int`): optimizer steps of a training.
        output_dir (`str`): the folder that replaces the output directory.
        accumulation (`int`, *optional*): for runs that are compared, which compute in fp32: a step has so many times
            as many micro-batches, and a batch of an evaluation so many times as many rows.
        alone (`bool`): whether this is one process for a command of several: no layout is kept.
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
        if accumulation is not None:
            self.bf16 = False
            self.gradient_accumulation_steps *= accumulation
            self.per_device_eval_batch_size *= accumulation
            self.eval_strategy = self.save_strategy = "no"
            self.load_best_model_at_end = False
        if alone:
            self.deepspeed = self.fsdp = self.parallelism_config = None
        self.eval_steps = (
            half if self.eval_steps is None or self.eval_steps < 1 else min(half, self.eval_steps)
        )
        self.save_steps = half if self.save_steps < 1 else min(half, self.save_steps)
        post_init(self)

    module.TrainingArguments.__post_init__ = shortened


def shorten_trainings(
    module: Any,
    *,
    steps: int,
    report: Callable[[str, int], None],
    prepare: Callable[[Any], None] | None = None,
) -> None:
    """Change all Trainers that are made later: less data, with the same remainder at its end.

    Args:
        module (`module`): `transformers.trainer`.
        steps (`int`): optimizer steps of a training.
        report (`Callable[[str, int], None]`): is called with what was done, and the number of steps so far.
        prepare (`Callable`, *optional*): for runs that are compared, whose rows come in their order: is called with
            each Trainer.
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

        def on_epoch_end(
            self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
        ) -> None:
            if state.epoch is not None and state.epoch >= 1:
                report("end of data", state.global_step)

    @functools.wraps(init)
    def shortened(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        args = self.args
        replicas = data_replicas(self)
        per_step = args.train_batch_size * args.gradient_accumulation_steps * replicas
        kinds = [] if prepare is not None else _kinds_of_rows(self.train_dataset)
        if len(kinds) > 1 or prepare is not None:
            self._get_train_sampler = lambda *_, **__: SequentialSampler(self.train_dataset)
        if len(kinds) > 1:
            report("another kind of rows", 0)
        # A last step that is not full has other rows on other numbers of ranks
        if prepare is not None:
            self.train_dataset = _full_steps(self.train_dataset, steps, per_step)
        self.train_dataset = _part(
            self.train_dataset, steps, per_step, kinds, args.train_batch_size
        )
        per_step = args.eval_batch_size * replicas
        if isinstance(self.eval_dataset, Mapping):
            self.eval_dataset = {
                name: _part(one, 2, per_step) for name, one in self.eval_dataset.items()
            }
        else:
            self.eval_dataset = _part(self.eval_dataset, 2, per_step)
        # Before those of the user, which may exchange something
        self.callback_handler.callbacks.insert(0, Reports())
        if prepare is not None:
            prepare(self)

    module.Trainer.__init__ = shortened


def keep_log(trainer: Any, folder: Path) -> None:
    """Keep loss, gradient norm and learning rate of each log of a Trainer, as runs with hfscale do.

    Args:
        trainer (`Trainer`): a Trainer that has not trained yet.
        folder (`Path`): where the file is written; made if it does not exist.
    """
    log = trainer.log

    def log_and_keep(logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        if trainer.is_world_process_zero() and "loss" in logs:
            kept: dict[str, Any] = {name: logs[name] for name in _KEPT if name in logs}
            folder.mkdir(parents=True, exist_ok=True)
            append_record(folder / JSONL_NAME, {"step": trainer.state.global_step, **kept})
        log(logs, *arguments, **options)

    trainer.log = log_and_keep


class _Part(Subset):  # type: ignore[type-arg]
    """Some rows of a dataset, with its other attributes."""

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def _kinds_of_rows(dataset: Any) -> list[list[int]]:
    """Return the numbers of some rows of a dataset, by the columns that have a value, such as text with images."""
    if not _has_rows(dataset):
        return []
    rows = len(dataset)
    kinds: dict[frozenset[str], list[int]] = {}
    for index in range(0, rows, max(1, rows // _LOOKED_AT)):
        row = dataset[index]
        if not isinstance(row, Mapping):
            return []
        filled = (name for name, value in row.items() if value is not None and not _is_empty(value))
        kinds.setdefault(frozenset(filled), []).append(index)
    return list(kinds.values())


def _is_empty(value: Any) -> bool:
    return isinstance(value, (str, bytes, list, tuple, dict)) and not value


def _has_rows(dataset: Any) -> bool:
    return (
        dataset is not None
        and hasattr(dataset, "__len__")
        and hasattr(dataset, "__getitem__")
        and len(dataset) > 0
    )


def _part(
    dataset: Any, steps: int, per_step: int, kinds: list[list[int]] | None = None, batch: int = 1
) -> Any:
    """Return the rows of the first steps, and as many of the end as its last step has.

    Args:
        dataset (`Dataset`, *optional*): a dataset; a stream is returned as it is.
        steps (`int`): the steps for which it is to last.
        per_step (`int`): the rows of a step of all ranks.
        kinds (`list[list[int]]`, *optional*): rows of several kinds; each batch is of one, the next of another, so
            that the ranks have batches of different kinds at the same time.
        batch (`int`): the rows of a batch of one rank.
    """
    if not _has_rows(dataset):
        return dataset
    rows = len(dataset)
    rest = rows % per_step
    first = (steps - 1) * per_step if rest else steps * per_step
    if kinds is not None and len(kinds) > 1:
        number = min(first + rest, rows)
        kept = [_row_of(kinds, index // batch, index) for index in range(number)]
    elif rows <= first + rest:
        return dataset
    else:
        kept = [*range(first), *range(rows - rest, rows)]
    return _selected(dataset, kept)


def _full_steps(dataset: Any, steps: int, per_step: int) -> Any:
    """Return the first rows of a dataset, as many as some full steps have; a dataset of less than one as it is."""
    if not _has_rows(dataset) or len(dataset) < per_step:
        return dataset
    return _selected(dataset, list(range(min(steps, len(dataset) // per_step) * per_step)))


def _selected(dataset: Any, rows: list[int]) -> Any:
    return dataset.select(rows) if hasattr(dataset, "select") else _Part(dataset, rows)


def _row_of(kinds: list[list[int]], batch: int, index: int) -> int:
    """Return a row for a batch whose kind follows from its number."""
    kind = kinds[batch % len(kinds)]
    return kind[index % len(kind)]
