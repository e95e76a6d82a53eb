"""Writes the checkpoints of one Trainer: in the background where possible, otherwise while training waits.

The files are those that Trainer writes, in its layout, made by the same calls; a test compares them byte for byte.
"""

import ast
import inspect
import json
import os
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from hfscale.checkpoint.contents import (
    DeferredWrites,
    FsdpStateCopy,
    ModelState,
    can_defer,
    complete_checkpoint,
    fits_in_host_memory,
    frozen_state,
    is_sharded_fsdp2,
    parameter_names,
    processes_on_this_host,
    processing_files,
    rng_name,
    rng_state,
    take_tensors,
    write_files,
    write_model,
)
from hfscale.checkpoint.formats.dcp import save_shards
from hfscale.checkpoint.host_copy import HostCopy
from hfscale.checkpoint.identity import identity_of
from hfscale.checkpoint.manifest import Manifest
from hfscale.checkpoint.native import NativeState
from hfscale.checkpoint.writer import (
    CheckpointJob,
    CheckpointWriter,
    open_to_subclass,
    unfinished_folder,
)
from hfscale.core import distributed
from hfscale.core.activity import activity
from hfscale.core.collectives import SAVING, TRAINING
from hfscale.core.logging import get_logger
from hfscale.core.run_files import UNFINISHED
from hfscale.core.versions import is_peft_model, saves_safetensors
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.hub import push_checkpoint
from hfscale.trainer.state import global_batch_size, model_of, output_folder
from hfscale.trainer.strategies.native import native_layout
from hfscale.trainer.strategies.parallel import is_parallel_trainer
from hfscale.trainer.strategy import running_strategy

logger = get_logger(__name__)

# Methods that a subclass of Trainer may override; then the subclass's code must run, on the live model.
_WRITING_METHODS = (
    "_save_checkpoint",
    "save_model",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
)
_MODEL_METHODS = ("save_model", "_save")
# Callbacks of transformers whose `on_save` reads no file of the checkpoint (wandb's only under WANDB_LOG_MODEL).
_ON_SAVE_READS_NOTHING = ("WandbCallback", "TrackioCallback", "SwanLabCallback")
_SHARDS = "shards"  # key of what `SelfSharded.sharded_state` returns


class SelfSharded(Protocol):
    """Returns what a checkpoint consists of, which Trainer's own methods do not write: a `ParallelTrainer` or a
    `NativeState`."""

    def sharded_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors that this rank writes: subfolder of the checkpoint -> name -> live tensor."""

    def checkpoint_files(self) -> dict[str, bytes]:
        """Return the files that one rank writes for all, by path relative to the checkpoint."""


class TrainerSaving:
    """Writes a Trainer's checkpoints until the end of its training.

    Args:
        adapter (`TrainerAdapter`): the adapter of a Trainer that is prepared, as in `on_train_begin`. Every rank must
            make its `TrainerSaving` at the same point.
        asynchronous (`bool`): write in the background where the files are exactly the same; otherwise Trainer's own
            method writes while training waits. `synchronous_because` says why training waits.
        begin (`Callable`): called as `begin(state, args)` before each save, on every rank.
        committed (`Callable`): called as `committed(checkpoint, manifest, best, seconds)` on the committing rank when
            a checkpoint is complete and has its final name; possibly on another thread.
    """

    def __init__(
        self,
        adapter: TrainerAdapter,
        *,
        asynchronous: bool,
        begin: Callable[[TrainerState, TrainingArguments], None],
        committed: Callable[[Path, Manifest, Path | None, float], None],
    ) -> None:
        trainer = adapter.trainer
        self.writer = CheckpointWriter()
        self._adapter = adapter
        self._trainer = trainer
        self._begin = begin
        self._committed = committed
        self._strategy = running_strategy(trainer)
        self._global_batch_size = global_batch_size(trainer)
        self._identity = identity_of(trainer) if trainer.args.local_process_index == 0 else None
        self._original = adapter.replace_saving(self._save, self.writer.wait)
        self._own_methods = own_methods(trainer)
        self.has_readers = any(map(_reader_of_saves, trainer.callback_handler.callbacks))
        """Whether `on_save` of another callback may read or write files of the checkpoint."""
        self.commits = trainer.args.should_save
        """Whether this rank commits the checkpoints."""
        self._host_copy = HostCopy()
        self._has_fitted = False
        self._model = ModelState(trainer)
        self._fsdp = FsdpStateCopy(trainer) if self._strategy == "fsdp2" else None
        self._native = NativeState(trainer) if self._strategy == "native" else None
        self._sharded: SelfSharded | None = (
            trainer if is_parallel_trainer(trainer) else self._native
        )
        self._deferred: DeferredWrites | None = None
        self.synchronous_because = None if asynchronous else "asynchronous is False"
        """Why training waits for each save; None if it does not."""
        if asynchronous:
            self.synchronous_because = why_synchronous(trainer, self._strategy)
        self._agree_with_other_ranks()
        if asynchronous:
            if self.synchronous_because is not None:
                logger.info("training waits for each save: %s", self.synchronous_because)
            elif self._writes_own_model:
                method = next(name for name in self._own_methods if name in _MODEL_METHODS)
                logger.info(
                    "training waits in each save until %s.%s has written the model; the rest is in the background",
                    type(trainer).__name__,
                    method,
                )
            if self.synchronous_because is None and self._strategy.startswith("zero"):
                self._deferred = DeferredWrites(trainer, self._host_copy)
        trainer_writes = self.synchronous_because is not None or self._deferred is not None
        self._processing_files = (
            {} if trainer_writes or self._sharded is not None else processing_files(trainer)
        )

    def _agree_with_other_ranks(self) -> None:
        """Wait for each save on all ranks if one must, and expect readers if one has any: callbacks may differ."""
        reasons = TRAINING.gather("start: saving", [self.synchronous_because, self.has_readers])
        if self.synchronous_because is None:
            others = [
                f"{reason} (on rank {rank})"
                for rank, (reason, _) in enumerate(reasons)
                if reason is not None
            ]
            self.synchronous_because = others[0] if others else None
        self.has_readers = any(has_readers for _, has_readers in reasons)

    @activity("saving")
    def _save(self, model: Any, trial: Any) -> None:
        """Save a checkpoint; this replaces `Trainer._save_checkpoint`."""
        begun = time.monotonic()
        self.writer.wait()  # one save at a time: the buffers are about to be filled again
        with TRAINING.agreed("save: begin"):
            self._begin(self._trainer.state, self._trainer.args)
        if self._deferred is not None:
            self.writer.start(self._job_of_trainer(model, trial, begun))
            return
        self._check_memory()
        if self.synchronous_because is None and trial is None:
            self.writer.start(self._job_of_copy(model, begun))
            return
        if self._native is not None:
            self._save_native(model, trial, begun)
            return
        pushed: list[str] = []
        with self._adapter.pushes_delayed(pushed):
            job = self._job_of_trainer(model, trial, begun)
        self.writer.run(job)
        if pushed:
            push_checkpoint(self._trainer, job.target)

    def _save_native(self, model: Any, trial: Any, begun: float) -> None:
        """Save while training waits; Trainer's own method would leave out what a training resumes from."""
        with self._adapter.pushes_delayed([]):
            job = self._job_of_copy(model, begun, run_dir=Path(self._adapter.output_dir(trial)))
        self.writer.run(job)
        if self._trainer.args.push_to_hub:
            push_checkpoint(self._trainer, job.target)

    @property
    def _is_complete(self) -> bool:
        """Whether a checkpoint has all that a training resumes from.

        Of a natively distributed model it always has: `save_only_model` only says that Trainer itself cannot.
        """
        return self._native is not None or not self._trainer.args.save_only_model

    def why_no_optional_save(self) -> str | None:
        """Return why `save_optional` cannot save the complete state of this Trainer; None if it can."""
        if not self._is_complete:
            return "save_only_model leaves out the optimizer"
        return (
            f"{type(self._trainer).__name__} has its own {self._own_methods[0]}"
            if self._own_methods
            else None
        )

    def expected_bytes(self) -> int:
        """Return about how many bytes this rank writes: weights, and 12 bytes for each trained one in mixed precision.

        These are AdamW's two moments and a master copy in fp32 (Rajbhandari et al., arXiv 1910.02054, section 3.1);
        where there is no copy it is too much. Sharded or replicated, all ranks together write each weight once.
        """
        is_local = is_parallel_trainer(self._trainer)
        total = 0
        for parameter in model_of(self._trainer).parameters():
            part = (
                parameter.to_local() if is_local and isinstance(parameter, DTensor) else parameter
            )
            size = getattr(parameter, "ds_numel", part.numel())
            total += size * (parameter.element_size() + 12 * parameter.requires_grad)
        return total if is_local else total // distributed.world_size()

    @activity("saving")
    def save_optional(
        self, run_dir: Path, committed: Callable[[Manifest], None], *, on_each_node: bool = False
    ) -> None:
        """Save the state into another output directory; an error there does not end the training.

        Every rank must call it at the same point, and nothing may be in flight. Neither `begin` nor `committed` of
        this object is called, and no callback's `on_save`.

        Args:
            run_dir (`Path`): the other output directory.
            committed (`Callable`): called with the manifest on the committing rank, possibly on another thread.
            on_each_node (`bool`): `run_dir` is another folder on each node. The first rank of each node commits the
                files of its node, and writes there what one rank writes for all.
        """
        begun = time.monotonic()
        self.writer.wait()
        self._check_memory()
        parts: dict[str, Any] = {"run_dir": run_dir, "is_optional": True, "on_commit": committed}
        if on_each_node:
            parts |= {"commits": self._trainer.args.local_process_index == 0, "is_shared": False}
        if self._native is not None or (
            self._deferred is None and self.synchronous_because is None
        ):
            with self._saved_on_each_node() if on_each_node else nullcontext():
                job = self._job_of_copy(self._trainer.model, begun, is_optional=True)
        else:
            job = self._job_of_trainer(self._trainer.model, None, begun, optional_dir=run_dir)
        job = replace(job, **parts)
        if self._deferred is None and self.synchronous_because is not None:
            self.writer.run(job)
        else:
            self.writer.start(job)

    @contextmanager
    def _saved_on_each_node(self) -> Iterator[None]:
        """Have the first rank of each node save what rank 0 saves, within the `with` block."""
        args = self._trainer.args
        before, args.save_on_each_node = args.save_on_each_node, True
        try:
            yield
        finally:
            args.save_on_each_node = before

    def _check_memory(self) -> None:
        """Change to saves for which training waits if a copy does not fit into host memory. All ranks must call it."""
        if (
            self.synchronous_because is None
            and self._deferred is None
            and not self._fits_in_memory()
        ):
            self.synchronous_because = (
                "a copy of its state does not fit into the host's free memory"
            )
            logger.warning("training waits for each save: %s", self.synchronous_because)

    # --- in the background ------------------------------------------------------------------------------------------

    def _job_of_copy(
        self, model: Any, begun: float, *, is_optional: bool = False, run_dir: Path | None = None
    ) -> CheckpointJob:
        trainer = self._trainer
        run_dir = run_dir or output_folder(trainer.args)
        failed = None
        write = None
        write_collectively = None
        try:
            if self._own_methods:
                self._run_own_methods(model, run_dir)
            else:
                trainer.store_flos()
                if not is_optional:
                    _note_best(trainer, run_dir)
            write, write_collectively = self._capture(
                processes_on_this_host() if is_optional else None
            )
        except (
            Exception
        ) as error:  # the other ranks must learn of it instead of waiting for this one
            failed = error
        return self._job(
            run_dir, begun, write=write, write_collectively=write_collectively, error=failed
        )

    def _run_own_methods(self, model: Any, run_dir: Path) -> None:
        """Call the subclass's `_save_checkpoint` without what is written in the background.

        What its own methods write is written now, and so is `trainer_state.json`.
        """
        with (
            self._writing_to_unfinished(run_dir),
            self._adapter.methods_skipped(self._deferred_methods),
        ):
            self._original(model, None)
        _note_best(self._trainer, run_dir)
        if self.commits:
            folder = unfinished_folder(run_dir, self._trainer.state.global_step)
            _name_best(folder / TRAINER_STATE_NAME, self._trainer.state.best_model_checkpoint)

    @property
    def _deferred_methods(self) -> list[str]:
        """Methods of Trainer that write, in a synchronous save, what a background save copies."""
        model = [] if self._writes_own_model else ["save_model"]
        return [*model, "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state"]

    @property
    def _writes_own_model(self) -> bool:
        return any(name in _MODEL_METHODS for name in self._own_methods)

    def _capture(
        self, ranks_per_node: int | None
    ) -> tuple[Callable[[Path], None], Callable[[Path], None] | None]:
        """Copy what the next step changes.

        Args:
            ranks_per_node (`int`, *optional*): as for `save_shards`.

        Returns:
            The function that writes this rank's copies into a folder, and the one, if there is one, that all ranks
            must call together.
        """
        trainer = self._trainer
        full = self._is_complete
        saves = self._trainer.args.should_save
        rng = rng_state(trainer) if full else None
        state = frozen_state(trainer) if saves and not self._own_methods else None
        names = parameter_names(trainer) if saves else None
        files = self._sharded.checkpoint_files() if self._sharded is not None and saves else {}
        live = self._live_state()
        write_collectively = self._fsdp.take(ranks_per_node) if self._fsdp is not None else None
        write_saved_tensors = take_tensors(self._adapter.saved_tensors) if full else None
        # Otherwise it does not change until it has been written
        is_copied = self.synchronous_because is None
        copied = self._host_copy.take(live) if is_copied else live
        if _SHARDS in copied:
            write_collectively = partial(_write_shards, copied[_SHARDS], ranks_per_node)

        def write(folder: Path) -> None:
            if "model" in copied:
                write_model(trainer, folder, copied["model"], self._processing_files)
            for name in (OPTIMIZER_NAME, SCHEDULER_NAME, SCALER_NAME):
                if name in copied:
                    torch.save(copied[name], folder / name)
            write_files(folder, files)
            if write_saved_tensors is not None:
                write_saved_tensors(folder)
            if rng is not None:
                torch.save(rng, folder / rng_name(trainer))
            if state is not None:
                state.save_to_json(str(folder / TRAINER_STATE_NAME))
            if saves:
                complete_checkpoint(trainer, folder, names)

        return write, write_collectively

    def _live_state(self) -> dict[str, Any]:
        """Return what this rank has to copy, by the name of its file, without copying it."""
        trainer = self._trainer
        if self._sharded is not None:
            return {_SHARDS: self._sharded.sharded_state()}
        if not trainer.args.should_save:
            return {}
        live: dict[str, Any] = {}
        if self._fsdp is None and not self._writes_own_model:
            live["model"] = self._model.live()
        if not trainer.args.save_only_model:
            if self._fsdp is None:
                assert trainer.optimizer is not None
                live[OPTIMIZER_NAME] = trainer.optimizer.state_dict()
            assert trainer.lr_scheduler is not None  # Trainer makes both before the first step
            live[SCHEDULER_NAME] = trainer.lr_scheduler.state_dict()
            if trainer.accelerator.scaler is not None:
                live[SCALER_NAME] = trainer.accelerator.scaler.state_dict()
        return live

    def _fits_in_memory(self) -> bool:
        """Return whether the first copy fits on every host; later ones use its buffers. All ranks must call it."""
        if self._has_fitted:
            return True
        with TRAINING.agreed("save: size"):
            live = self._live_state()
            wanted = self._host_copy.bytes_to_allocate(live) + (
                self._fsdp.bytes() if self._fsdp is not None else 0
            )
            each_rank_copies = self._fsdp is not None or _SHARDS in live
            fits = fits_in_host_memory(
                wanted, copies=processes_on_this_host() if each_rank_copies else 1
            )
        self._has_fitted = TRAINING.maximum("save: memory", [float(not fits)])[0] == 0
        return self._has_fitted

    # --- while training waits ---------------------------------------------------------------------------------------

    def _job_of_trainer(
        self, model: Any, trial: Any, begun: float, *, optional_dir: Path | None = None
    ) -> CheckpointJob:
        """Have Trainer's own method write into the unfinished folder; DeepSpeed's partitions are written later.

        In the output directory of an optional save, `optional_dir`, there is no best checkpoint.
        """
        trainer = self._trainer
        run_dir = optional_dir or Path(self._adapter.output_dir(trial))
        best = trainer.state.best_model_checkpoint
        failed = None
        write_tensors = None
        deferring = self._deferred.collecting() if self._deferred is not None else nullcontext()
        try:
            with deferring, self._writing_to_unfinished(run_dir):
                self._original(model, trial)
            if optional_dir is None:
                _note_best(trainer, run_dir)
            else:
                trainer.state.best_model_checkpoint = best
            if trainer.args.should_save:
                folder = unfinished_folder(run_dir, trainer.state.global_step)
                _name_best(folder / TRAINER_STATE_NAME, trainer.state.best_model_checkpoint)
                complete_checkpoint(trainer, folder, parameter_names(trainer))
            write_tensors = take_tensors(self._adapter.saved_tensors) if self._is_complete else None
        except (
            Exception
        ) as error:  # the other ranks must learn of it instead of waiting for this one
            failed = error
        writes: list[Callable[[Path], object]] = []
        if self._deferred is not None:
            writes.append(self._deferred.write)
        if write_tensors is not None:
            writes.append(write_tensors)

        def write_all(folder: Path) -> None:
            for write in writes:
                write(folder)

        return self._job(run_dir, begun, error=failed, write=write_all)

    @contextmanager
    def _writing_to_unfinished(self, run_dir: Path) -> Iterator[None]:
        """Have Trainer's method write into the unfinished folder, which a subclass's methods see as `checkpoint-N`.

        They may read what they have written beside it, as ms-swift does with the first weights of PiSSA.
        """
        step = self._trainer.state.global_step
        own = {"save_model" if name == "_save" else name for name in self._own_methods} - {
            "_save_checkpoint"
        }
        folder = str(unfinished_folder(run_dir, step))
        with ExitStack() as stack:
            if self._own_methods:
                stack.enter_context(open_to_subclass(run_dir, step, is_holder=self.commits))
                stack.enter_context(
                    self._adapter.folder_shown_as(
                        sorted(own), folder, str(run_dir / Path(folder).name)
                    )
                )
            stack.enter_context(self._adapter.output_dir_replaced(str(run_dir / UNFINISHED)))
            yield

    def _job(self, run_dir: Path, begun: float, **parts: Any) -> CheckpointJob:
        args = self._trainer.args
        state = self._trainer.state
        target = run_dir / f"checkpoint-{state.global_step}"
        best = Path(state.best_model_checkpoint) if state.best_model_checkpoint else None
        layout = native_layout(self._trainer.model)
        return CheckpointJob(
            run_dir=run_dir,
            step=state.global_step,
            strategy=self._strategy,
            global_batch_size=self._global_batch_size,
            layout=layout.to_dict() if layout is not None else None,
            identity=self._identity,
            commits=args.should_save,
            is_shared=not args.save_on_each_node,
            on_commit=lambda manifest: self._committed(
                target, manifest, best, time.monotonic() - begun
            ),
            started_at=begun,
            **parts,
        )


def why_synchronous(trainer: Trainer, strategy: str) -> str | None:
    """Return why checkpoints of this Trainer cannot be written in the background.

    Args:
        trainer (`Trainer`): prepared for training.
        strategy (`str`): its strategy, as `running_strategy` returns it.

    Returns:
        `str` or `None`: the reason, as a clause for a log line; None if they can be written in the background.
    """
    args = trainer.args
    if strategy.startswith("zero") and not can_defer(trainer):
        return "DeepSpeed's own engine writes"
    is_parallel = is_parallel_trainer(trainer)
    if strategy.startswith("fsdp") and not is_sharded_fsdp2(trainer):
        return "the weights are gathered from all ranks to be written"
    if strategy == "fsdp2" and args.save_only_model:
        return "save_only_model under FSDP leaves no state to write"
    if args.device.type not in ("cpu", "cuda"):
        return f"it is not tested on {args.device.type}"
    if not saves_safetensors(args):
        return "save_safetensors is False"
    if args.push_to_hub and args.hub_strategy != "end":
        return "push_to_hub uploads the folder at once"
    name = type(trainer).__name__
    own = own_methods(trainer)
    others = [method for method in own if method not in ("_save_checkpoint", *_MODEL_METHODS)]
    if others or (own and is_parallel):
        return f"{name} has its own {(others or own)[0]}"
    if "_save_checkpoint" in own and not _ends_with_trainers(type(trainer)):
        return f"{name}._save_checkpoint may read the files after Trainer has written them"
    if is_peft_model(trainer.model) and strategy != "native":
        model: Any = trainer.model
        other_adapters = {str(config.peft_type.value) for config in model.peft_config.values()} - {
            "LORA"
        }
        if other_adapters:
            return f"adapters of type {min(other_adapters)} are made when they are written"
    readers = [name for name in map(_reader_of_saves, trainer.callback_handler.callbacks) if name]
    return f"{readers[0]}.on_save may read the checkpoint" if readers else None


def _write_shards(
    copied: dict[str, dict[str, Any]], ranks_per_node: int | None, folder: Path
) -> None:
    """Write the shards as torch's distributed checkpoints; every rank must call it."""
    for name, tensors in copied.items():
        save_shards(tensors, folder / name, SAVING, ranks_per_node=ranks_per_node)


def own_methods(trainer: Trainer) -> list[str]:
    """Return the methods by which a checkpoint is written and that the Trainer's class overrides.

    Args:
        trainer (`Trainer`): any Trainer.
    """
    return [name for name in _WRITING_METHODS if not _is_known(type(trainer), name)]


def _ends_with_trainers(kind: type) -> bool:
    """Return whether each `_save_checkpoint` of the class and its bases ends with the call of that of its base.

    Then nothing in it can read what Trainer writes. It is False where the source is not available.
    """
    for base in kind.__mro__[: kind.__mro__.index(Trainer)]:
        method = vars(base).get("_save_checkpoint")
        if method is None:
            continue
        try:
            (function,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
        except (OSError, TypeError, SyntaxError, ValueError):
            return False
        if not isinstance(function, ast.FunctionDef) or function.decorator_list:
            return False
        last = function.body[-1]
        call = last.value if isinstance(last, ast.Expr | ast.Return) else None
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith(
            ")._save_checkpoint"
        ):
            return False
    return True


def _is_known(kind: type, method: str) -> bool:
    """Return whether the method is Trainer's own, or that of `ParallelTrainer`, which hands over its shards."""
    home = next(base for base in kind.__mro__ if method in vars(base))
    return home is Trainer or "sharded_state" in vars(home)


def _reader_of_saves(callback: TrainerCallback) -> str | None:
    """Return the callback's name if its `on_save` may read the checkpoint, else None."""
    kind = type(callback)
    if kind.on_save is TrainerCallback.on_save or kind.on_save.__module__.startswith("hfscale."):
        return None
    logs_model = os.environ.get("WANDB_LOG_MODEL", "").lower() == "checkpoint"
    if (
        kind.__module__.startswith("transformers.")
        and kind.__name__ in _ON_SAVE_READS_NOTHING
        and not logs_model
    ):
        return None
    return kind.__name__


def _note_best(trainer: Trainer, run_dir: Path) -> None:
    """Record the best checkpoint, as `Trainer._save_checkpoint` does.

    It is the one of the best step, if that one exists or is being written.
    """
    state = trainer.state
    if trainer.args.save_strategy == "no" or not state.best_global_step:
        return
    best = run_dir / f"checkpoint-{state.best_global_step}"
    if state.best_global_step == state.global_step or best.exists():
        state.best_model_checkpoint = str(best)


def _name_best(trainer_state: Path, best: str | None) -> None:
    """Correct the best checkpoint in `trainer_state.json`: Trainer may have named it by the unfinished folder."""
    if not trainer_state.is_file():
        return  # a subclass has not called Trainer's method
    fields = json.loads(trainer_state.read_text(encoding="utf-8"))
    if fields["best_model_checkpoint"] != best:
        fields["best_model_checkpoint"] = best
        trainer_state.write_text(
            json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
