"""Writes the checkpoints of one Trainer: in the background where possible, otherwise while training waits.

The files are those that Trainer writes, in its layout, made by the same calls; a test compares them byte for byte.
What they consist of is decided once, by the choice of a `Capture`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from hfscale.checkpoint.best import name_best, note_best
from hfscale.checkpoint.captures import capture_of
from hfscale.checkpoint.captures.capture import Captured, write_shards
from hfscale.checkpoint.contents import (
    fits_in_host_memory,
    processes_on_this_host,
    take_rng_state,
    take_tensors,
    take_trainer_state,
    write_files,
)
from hfscale.checkpoint.identity import identity_of
from hfscale.checkpoint.manifest import Identity, Manifest
from hfscale.checkpoint.overrides import (
    model_methods,
    own_methods,
    reader_of_saves,
    why_own_methods_wait,
)
from hfscale.checkpoint.rank_files import take_json
from hfscale.checkpoint.writer import (
    CheckpointJob,
    CheckpointWriter,
    open_to_subclass,
    report_removal,
    unfinished_folder,
)
from hfscale.core.activity import activity
from hfscale.core.collectives import TRAINING
from hfscale.core.logging import get_logger
from hfscale.core.run_files import UNFINISHED
from hfscale.core.versions import saves_safetensors
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.hub import push_checkpoint
from hfscale.trainer.state import global_batch_size
from hfscale.trainer.strategies import Strategy

logger = get_logger(__name__)

_COPIED_METHODS = ("_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")
"""Methods of Trainer whose files a background save copies and writes itself; the model's is the fourth."""


class TrainerSaving:
    """Writes a Trainer's checkpoints until the end of its training.

    A save is made in one of two ways. Either the state is copied between two steps, which is what `Capture.take` does,
    or Trainer's own method writes into the unfinished folder: where training waits, and where the engine decides what
    is written.

    Args:
        adapter (`TrainerAdapter`): the adapter of a Trainer that is prepared, as in `on_train_begin`. Every rank must
            make its `TrainerSaving` at the same point.
        asynchronous (`bool`): write in the background where the files are exactly the same; otherwise Trainer's own
            method writes while training waits. `synchronous_because` says why training waits.
        begin (`Callable`): called as `begin(state, args)` before each save, on every rank.
        committed (`Callable`): called as `committed(checkpoint, manifest, best, seconds)` on the committing rank when
            a checkpoint is complete and has its final name; possibly on another thread.
        identity (`Identity`, *optional*): what the Trainer trains. Default: as it is now.
    """

    def __init__(
        self,
        adapter: TrainerAdapter,
        *,
        asynchronous: bool,
        begin: Callable[[TrainerState, TrainingArguments], None],
        committed: Callable[[Path, Manifest, Path | None, float], None],
        identity: Identity | None = None,
    ) -> None:
        trainer = adapter.trainer
        self.writer = CheckpointWriter()
        self._adapter = adapter
        self._trainer = trainer
        self._begin = begin
        self._committed = committed
        self._strategy = Strategy.of(trainer)
        self._identity = None
        if trainer.args.local_process_index == 0:
            self._identity = identity or identity_of(trainer)
        self._original = adapter.checkpoints.replace_saving(self._save, self.writer.wait)
        self._own_methods = own_methods(trainer)
        self._capture = capture_of(trainer, self._own_methods)
        self._has_fitted = False
        self.has_readers = any(map(reader_of_saves, trainer.callback_handler.callbacks))
        """Whether `on_save` of another callback may read or write files of the checkpoint."""
        self.commits = trainer.args.should_save
        """Whether this rank commits the checkpoints."""
        self.synchronous_because: str | None = "asynchronous is False"
        """Why training waits for each save; None if it does not."""
        if asynchronous:
            self.synchronous_because = self._why_synchronous()
        self._agree_with_other_ranks()
        if asynchronous:
            self._log_mode()
        if self.synchronous_because is None:
            self._capture.prepare()

    def _why_synchronous(self) -> str | None:
        """Return why checkpoints of this Trainer cannot be written in the background: the first reason found."""
        of_strategy = self._capture.why_synchronous()
        if of_strategy is not None:
            return of_strategy
        return _why_arguments_wait(self._trainer.args) or _why_user_code_waits(self._trainer)

    def _agree_with_other_ranks(self) -> None:
        """Wait for each save on all ranks if one must, and expect readers if one has any: callbacks may differ."""
        reasons = TRAINING.gather("start: saving", [self.synchronous_because, self.has_readers])
        for rank, (reason, has_readers) in enumerate(reasons):
            if self.synchronous_because is None and reason is not None:
                self.synchronous_because = f"{reason} (on rank {rank})"
            self.has_readers = self.has_readers or has_readers

    def _log_mode(self) -> None:
        writers_of_model = model_methods(self._own_methods)
        if self.synchronous_because is not None:
            logger.info("training waits for each save: %s", self.synchronous_because)
        elif writers_of_model:
            logger.info(
                "training waits in each save until %s.%s has written the model; the rest is in the background",
                type(self._trainer).__name__,
                writers_of_model[0],
            )

    @property
    def _trainer_writes(self) -> bool:
        """Whether Trainer's own method writes a checkpoint, and not what `Capture.take` returns."""
        if self._capture.trainer_writes:
            return True
        return self.synchronous_because is not None and not self._capture.replaces_trainer

    @activity("saving")
    def _save(self, model: Any, trial: Any) -> None:
        """Save a checkpoint; this replaces `Trainer._save_checkpoint`."""
        begun = time.monotonic()
        self.writer.wait()  # one save at a time: the buffers are about to be filled again
        run_dir = Path(self._adapter.checkpoints.output_dir(trial))
        with TRAINING.agreed("save: begin"):
            if self.commits:
                report_removal(run_dir, self._trainer.state.global_step)
            self._begin(self._trainer.state, self._trainer.args)
        self._capture.exchange()
        self._check_memory()
        if self.synchronous_because is None:
            self.writer.start(self._make_job(model, trial, run_dir, begun))
            return
        pushed: list[str] = []
        # Trainer would upload the folder before it is committed
        with self._adapter.checkpoints.pushes_delayed(pushed):
            job = self._make_job(model, trial, run_dir, begun)
        self.writer.run(job)
        if pushed or (self._capture.replaces_trainer and self._trainer.args.push_to_hub):
            push_checkpoint(self._trainer, job.target)

    @property
    def is_complete(self) -> bool:
        """Whether the checkpoints have what a resume needs besides the model."""
        return self._capture.is_complete

    def why_no_optional_save(self) -> str | None:
        """Return why `save_optional` cannot save the complete state of this Trainer; None if it can."""
        if not self._capture.is_complete:
            return "save_only_model leaves out the optimizer"
        if self._own_methods:
            return f"{type(self._trainer).__name__} has its own {self._own_methods[0]}"
        return None

    def expected_bytes(self) -> int:
        """Return about how many bytes this rank writes."""
        return self._capture.expected_bytes()

    @activity("saving")
    def save_optional(
        self,
        run_dir: Path,
        committed: Callable[[Manifest], None],
        *,
        make_folder: Callable[[Path], None],
        on_each_node: bool = False,
    ) -> None:
        """Save the state into another output directory; an error there does not end the training.

        Every rank must call it at the same point, and nothing may be in flight. Neither `begin` nor `committed` of
        this object is called, and no callback's `on_save`.

        Args:
            run_dir (`Path`): the other output directory.
            committed (`Callable`): called with the manifest on the committing rank, possibly on another thread.
            make_folder (`Callable`): makes the folder in which the checkpoint is written, and raises an `OSError`
                where another part has to make one above it first.
            on_each_node (`bool`): `run_dir` is another folder on each node. The first rank of each node commits the
                files of its node, and writes there what one rank writes for all.
        """
        begun = time.monotonic()
        self.writer.wait()
        self._capture.exchange()
        self._check_memory()
        copies_on_each_node = on_each_node and not self._trainer_writes
        with self._saved_on_each_node() if copies_on_each_node else nullcontext():
            model = self._trainer.model
            job = self._make_job(model, None, run_dir, begun, make_folder=make_folder)
        job = replace(job, is_optional=True, on_commit=committed)
        if on_each_node:
            leads_node = self._trainer.args.local_process_index == 0
            job = replace(job, commits=leads_node, is_shared=False)
        if self.synchronous_because is None:
            self.writer.start(job)
        else:
            self.writer.run(job)

    @contextmanager
    def _saved_on_each_node(self) -> Iterator[None]:
        """Have the first rank of each node save what rank 0 saves, within the `with` block."""
        args = self._trainer.args
        before, args.save_on_each_node = args.save_on_each_node, True
        try:
            yield
        finally:
            args.save_on_each_node = before

    def reserve_memory(self) -> None:
        """Start to allocate the memory of the first copy, if there will be one. All ranks must call it after a step.

        The copy would otherwise wait for it. It is the memory that the copy would allocate, and no more; whether it
        fits is decided now instead of at the first save.
        """
        if self.synchronous_because is not None or self._capture.trainer_writes:
            return
        self._capture.exchange()
        self._check_memory()
        if self.synchronous_because is None:
            self._capture.reserve()

    def stop_reserving(self) -> None:
        """Allocate no more of what `reserve_memory` has started to allocate."""
        self._capture.stop_reserving()

    def _check_memory(self) -> None:
        """Change to saves for which training waits if a copy does not fit into host memory. All ranks must call it."""
        if self.synchronous_because is None and not self._fits_in_memory():
            self.synchronous_because = (
                "a copy of its state does not fit into the host's free memory"
            )
            logger.warning("training waits for each save: %s", self.synchronous_because)

    def _fits_in_memory(self) -> bool:
        """Return whether the first copy fits on every host; later ones use its buffers. All ranks must call it."""
        if self._has_fitted or self._capture.trainer_writes:
            return True
        with TRAINING.agreed("save: size"):
            copies = processes_on_this_host() if self._capture.is_on_each_rank else 1
            wanted = self._capture.bytes_to_allocate()
            for source in self._adapter.announced.shards.values():
                wanted += source.bytes_to_allocate()
            fits = fits_in_host_memory(wanted, copies=copies)
        self._has_fitted = TRAINING.maximum("save: memory", [float(not fits)])[0] == 0
        return self._has_fitted

    # --- one checkpoint ---------------------------------------------------------------------------------------------

    def _make_job(
        self,
        model: Any,
        trial: Any,
        run_dir: Path,
        begun: float,
        *,
        make_folder: Callable[[Path], None] | None = None,
    ) -> CheckpointJob:
        """Collect what this rank writes of a checkpoint, between two steps.

        Args:
            model (`Any`): as Trainer passes it to `_save_checkpoint`.
            trial (`Any`): likewise.
            run_dir (`Path`): the output directory that gets the checkpoint.
            begun (`float`): when the save began, on the clock of `time.monotonic`.
            make_folder (`Callable`, *optional*): as for `save_optional`, where the output directory is another one,
                in which there is no best checkpoint.
        """
        failed: Exception | None = None
        captured = Captured()
        is_optional = make_folder is not None
        # An optional checkpoint may be in another folder on each node
        ranks_per_node = processes_on_this_host() if is_optional else None
        try:
            if make_folder is not None:  # before Trainer makes it with all that is above it
                step = self._trainer.state.global_step
                make_folder(unfinished_folder(run_dir, step))
            self._run_trainers_method(model, trial, run_dir, is_optional=is_optional)
            captured = self._take(ranks_per_node)
        except Exception as error:
            failed = error  # the other ranks must learn of it instead of waiting for this one
        job = self._job(run_dir, begun, captured, failed)
        return replace(job, make_folder=make_folder)

    def _run_trainers_method(
        self, model: Any, trial: Any, run_dir: Path, *, is_optional: bool
    ) -> None:
        """Have `_save_checkpoint` write what is not copied, and note the best checkpoint as it does.

        It is not called where everything is copied, unless a subclass has code of its own in it.
        """
        state = self._trainer.state
        best = state.best_model_checkpoint
        if self._trainer_writes or self._own_methods:
            with (
                self._capture.collecting(),
                self._writing_to_unfinished(run_dir),
                self._adapter.checkpoints.methods_skipped(self._copied_methods()),
            ):
                self._original(model, trial)
        elif trial is None:  # Trainer does not count operations in a search
            self._trainer.store_flos()
        if is_optional:
            state.best_model_checkpoint = best
        else:
            note_best(self._trainer, run_dir)
        if self._trainer.args.should_save:
            folder = unfinished_folder(run_dir, state.global_step)
            name_best(folder / TRAINER_STATE_NAME, state.best_model_checkpoint)

    def _copied_methods(self) -> list[str]:
        """Return the methods of Trainer that must not write in a save, since it copies what they would write."""
        if self._trainer_writes:
            return []
        if model_methods(self._own_methods):
            return list(_COPIED_METHODS)
        return ["save_model", *_COPIED_METHODS]

    def _take(self, ranks_per_node: int | None) -> Captured:
        """Copy what the next step changes and Trainer's own method has not written.

        Args:
            ranks_per_node (`int`, *optional*): as for `save_shards`.
        """
        trainer = self._trainer
        writes: list[Callable[[Path], None]] = []
        write_collectively = None
        if not self._trainer_writes:
            if self._capture.is_complete:
                writes.append(take_rng_state(trainer))
            if trainer.args.should_save and not self._own_methods:
                writes.append(take_trainer_state(trainer))
            state = self._capture.take(
                copies=self.synchronous_because is None, ranks_per_node=ranks_per_node
            )
            if state.write is not None:
                writes.append(state.write)
            write_collectively = state.write_collectively
        if self._capture.is_complete:
            writes.append(take_tensors(self._adapter.announced.tensors))
            writes.append(take_json(self._adapter.announced.json))
            write_collectively = self._take_shards(writes, write_collectively, ranks_per_node)
        additions = self._capture.additions()
        if additions is not None:
            writes.append(additions)

        def write_all(folder: Path) -> None:
            for write in writes:
                write(folder)

        return Captured(write=write_all, write_collectively=write_collectively)

    def _take_shards(
        self,
        writes: list[Callable[[Path], None]],
        write_collectively: Callable[[Path], None] | None,
        ranks_per_node: int | None,
    ) -> Callable[[Path], None] | None:
        """Take what callbacks keep in checkpoints of their own, in addition to what is written already.

        Args:
            writes (`list[Callable]`): gets what writes the small files.
            write_collectively (`Callable`, *optional*): what is written collectively before.
            ranks_per_node (`int`, *optional*): as for `save_shards`.
        """
        if not self._adapter.announced.shards:
            return write_collectively
        copies = self.synchronous_because is None
        shards = {}
        for name, source in self._adapter.announced.shards.items():
            shards[name] = source.take(copies=copies)
            if self._trainer.args.should_save:
                files = {f"{name}/{file}": content for file, content in source.files().items()}
                writes.append(partial(write_files, files=files))
        if self._trainer.args.save_on_each_node:
            ranks_per_node = processes_on_this_host()

        def write_all(folder: Path) -> None:
            if write_collectively is not None:
                write_collectively(folder)
            write_shards(shards, ranks_per_node, folder)

        return write_all

    @contextmanager
    def _writing_to_unfinished(self, run_dir: Path) -> Iterator[None]:
        """Have Trainer's method write into the unfinished folder, which a subclass's methods see as `checkpoint-N`.

        They may read what they have written beside it, as ms-swift does with the first weights of PiSSA.
        """
        step = self._trainer.state.global_step
        # `_save` is called by `save_model` with the same folder, and `_save_checkpoint` gets none
        own = set(self._own_methods) - {"_save_checkpoint", "_save"}
        if "_save" in self._own_methods:
            own.add("save_model")
        folder = str(unfinished_folder(run_dir, step))
        with ExitStack() as stack:
            if self._own_methods:
                stack.enter_context(open_to_subclass(run_dir, step, is_holder=self.commits))
                stack.enter_context(
                    self._adapter.checkpoints.folder_shown_as(
                        sorted(own), folder, str(run_dir / Path(folder).name)
                    )
                )
            stack.enter_context(
                self._adapter.checkpoints.output_dir_replaced(str(run_dir / UNFINISHED))
            )
            yield

    def _job(
        self, run_dir: Path, begun: float, captured: Captured, error: Exception | None
    ) -> CheckpointJob:
        args = self._trainer.args
        state = self._trainer.state
        target = run_dir / f"checkpoint-{state.global_step}"
        best = Path(state.best_model_checkpoint) if state.best_model_checkpoint else None

        def committed(manifest: Manifest) -> None:
            self._committed(target, manifest, best, time.monotonic() - begun)

        return CheckpointJob(
            run_dir=run_dir,
            step=state.global_step,
            strategy=self._strategy.name,
            global_batch_size=global_batch_size(self._trainer),
            layout=self._strategy.manifest_layout(),
            identity=self._identity,
            commits=args.should_save,
            is_shared=not args.save_on_each_node,
            on_commit=committed,
            started_at=begun,
            error=error,
            write=captured.write,
            write_collectively=captured.write_collectively,
        )


def _why_arguments_wait(args: TrainingArguments) -> str | None:
    """Return the argument for which training has to wait for each save, as a clause; None if there is none."""
    if args.device.type not in ("cpu", "cuda"):
        return f"it is not tested on {args.device.type}"
    if not saves_safetensors(args):
        return "save_safetensors is False"
    if args.push_to_hub and args.hub_strategy != "end":
        return "push_to_hub uploads the folder at once"
    return None


def _why_user_code_waits(trainer: Trainer) -> str | None:
    """Return which method or callback may need the complete save, as a clause; None if there is none."""
    methods = why_own_methods_wait(trainer, own_methods(trainer))
    if methods is not None:
        return methods
    for name in map(reader_of_saves, trainer.callback_handler.callbacks):
        if name is not None:
            return f"{name}.on_save may read the checkpoint"
    return None
