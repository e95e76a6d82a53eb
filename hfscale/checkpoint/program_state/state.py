"""Keeps what a subclass of Trainer, modules and functions of the user count per step, and resumes with it.

Restored are the attributes of a Trainer's subclass that no library gives it, those of modules of the user's classes,
the variables of the functions that they and `compute_loss_func` use, and the settings of a library's objects that a
step uses (`settings`); of all these, what has changed since the training began and `values` can keep, and the states
of random generators.

The user's callbacks get the states of their generators back, but not their values: some count what one launch does.
Where one changes a number among its attributes and has no part in Trainer's own states of callbacks
(`ExportableState`), a line says so at the first save; collections are mostly records. Another line names iterators,
whose position cannot be kept.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from hfscale.checkpoint.program_state.addresses import Addresses
from hfscale.checkpoint.program_state.kept_values import KeptValues, check_values
from hfscale.checkpoint.program_state.objects import (
    Found,
    Holder,
    Search,
    is_of_program,
    names_of_program,
)
from hfscale.checkpoint.program_state.settings import hooks_of, parts_of, replaced, settings_of
from hfscale.checkpoint.program_state.values import MOST_NUMBERS
from hfscale.checkpoint.random_states import generator_state, plain, set_generator_state
from hfscale.checkpoint.rank_files import read_of_rank
from hfscale.core import distributed
from hfscale.core.collectives import TRAINING
from hfscale.core.logging import get_logger
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.state import (
    micro_batch_size,
    micro_batches_of_pass,
    model_of,
    stepped_optimizer,
    unwrap_compiled,
)
from hfscale.trainer.strategies.tensors import own_part

logger = get_logger(__name__)

NAME = "hfscale_program_state"
"""The file of a rank is `hfscale_program_state_RANK.json`."""
_MOST_NAMED = 5
_MARKED = 64


class ProgramState(TrainerCallback):
    """What the objects of a training's steps hold. It comes after all other callbacks, and `_Before` before them.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains.
        saved (`dict[str, Any]`, *optional*): what the checkpoint keeps from which the training resumes.
    """

    def __init__(self, adapter: TrainerAdapter, saved: dict[str, Any] | None) -> None:
        self._adapter = adapter
        self._resumed = saved
        self._values: KeptValues | None = None
        self._of_callbacks: KeptValues | None = None
        self._found = Found()
        self._addresses: Addresses | None = None
        self._marks: dict[str, float] = {}
        self._parts: dict[str, Any] = {}
        self._told = False

    def begin(self) -> None:
        """Note the first values, when all callbacks have begun; resume at the beginning of a pass."""
        if self._values is not None:
            return
        self._found = self._search()
        self._addresses = Addresses(model_of(self._adapter.trainer))
        places = self._found.holders.items()
        own = {path: self._addresses.without(place) for path, place in places}
        settings = settings_of(self._adapter.trainer, self._model())
        self._values = KeptValues(own | settings)
        self._parts = parts_of(self._adapter.trainer, self._model())
        callbacks = self._search_callbacks()
        self._of_callbacks = KeptValues(callbacks.holders)
        self._found.generators |= callbacks.generators
        self._marks = {path: _mark(each) for path, each in self._found.stateful.items()}
        if not self._is_inside_pass():
            self._resume()

    def _model(self) -> torch.nn.Module:
        return unwrap_compiled(model_of(self._adapter.trainer))

    def _is_inside_pass(self) -> bool:
        trainer = self._adapter.trainer
        return micro_batches_of_pass(trainer, trainer.state.global_step) > 0

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._resume()  # what callbacks do here, they had done before the save

    def _search(self) -> Found:
        trainer = self._adapter.trainer
        callbacks = trainer.callback_handler.callbacks
        modules = dict(self._model().named_modules())
        data = (trainer.data_collator, trainer.train_dataset, trainer.eval_dataset)
        kinds: list[Any] = [type(each) for each in (trainer, *callbacks) if is_of_program(each)]
        names = frozenset[str]().union(*(names_of_program(kind) for kind in kinds))
        search = Search((*modules.values(), *data, *callbacks), only_own=True, names=names)
        search.enter("trainer", trainer)
        search.enter("compute_loss_func", trainer.compute_loss_func)
        search.enter("optimizer", stepped_optimizer(trainer.optimizer))
        schedule = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
        search.enter("schedule", schedule)
        search.enter("schedule.lr_lambdas", getattr(schedule, "lr_lambdas", None))
        for name, module in modules.items():
            path = f"model.{name}" if name else "model"
            if is_of_program(module):
                search.enter(path, module)
                search.found.holders[f"{path}.buffers"] = _buffers_not_saved(module)
            for number, hook in enumerate(hooks_of(module)):
                search.enter(f"{path}.hook{number}", hook)
        return search.found

    def _search_callbacks(self) -> Found:
        trainer = self._adapter.trainer
        callbacks = trainer.callback_handler.callbacks
        data = (trainer.data_collator, trainer.train_dataset, trainer.eval_dataset)
        search = Search((trainer, *model_of(trainer).modules(), *data, *callbacks), only_own=True)
        for callback in callbacks:
            if is_of_program(callback) and not isinstance(callback, ExportableState):
                search.enter(type(callback).__name__, callback)
        return search.found

    # --- evaluations ------------------------------------------------------------------------------------------------

    def take(self) -> Callable[[], None]:
        """Return the function that puts back what an evaluation has moved."""
        if self._values is None:
            return lambda: None
        put_values_back = self._values.take()
        states = {path: generator_state(each) for path, each in self._found.generators.items()}

        def put_back() -> None:
            put_values_back()
            for path, state in states.items():
                if state is not None:
                    set_generator_state(self._found.generators[path], state)

        return put_back

    @contextmanager
    def around_made_up(self) -> Iterator[None]:
        """Let an evaluation that is made up find what the checkpoint keeps, which then has what it has moved."""
        self.begin()
        assert self._values is not None
        if self._resumed is None:
            yield
            return
        self._set(self._resumed)
        yield
        self._resumed = self.saved()

    # --- the checkpoint ---------------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint of this step keeps, as JSON values."""
        if self._values is None:  # an evaluation that is made up may save before the first step
            return self._resumed or {"values": {}, "generators": {}}
        if not self._told:
            self._told = True
            self._tell()
        self._tell_of_parts()
        states = {path: generator_state(each) for path, each in self._found.generators.items()}
        generators = {path: plain(state) for path, state in states.items() if state is not None}
        values = self._values.changed()
        return {"values": values, "generators": generators, "launch": _launch(self._adapter)}

    def _tell(self) -> None:
        """Say what is in no checkpoint, at the first save: by then the program has made what it makes in a step."""
        assert self._of_callbacks is not None
        assert self._values is not None
        later = self._search()
        for name in self._values.changed_and_not_kept():
            logger.warning(
                "%s changes while the model trains and has more than %d numbers, so that no checkpoint keeps it: a "
                "resumed run begins with the first one; make it a persistent buffer of the model (register_buffer)",
                name,
                MOST_NUMBERS,
            )
        self._tell_of_addresses(later)
        warn_of_iterators({*self._found.iterators, *later.iterators})
        for path, each in later.stateful.items():
            # `OptimizerStates` knows what is saved of optimizers in the optimizer
            is_optimizer = isinstance(each, torch.optim.Optimizer)
            if is_optimizer and path.startswith("optimizer."):
                continue
            mark = _mark(each)
            if mark != self._marks.get(path):
                logger.warning(
                    "%s changes while the model trains, and no checkpoint keeps it: a resumed run begins with the "
                    "first one; make it a part of the model or of the optimizer, or save its state_dict in on_save "
                    "and load it in on_train_begin",
                    path,
                )
        for path, values in self._of_callbacks.changed(only_single=True).items():
            logger.warning(
                "the callback %s changes %s while the model trains, and no checkpoint keeps that: a resumed run "
                "begins with the first value; compute it from state.global_step, or make the callback an "
                "ExportableState and set restore_callback_states_from_checkpoint=True",
                path,
                ", ".join(list(values)[:_MOST_NAMED]),
            )

    def _tell_of_parts(self) -> None:
        """Name what was replaced since the last save, once."""
        now = parts_of(self._adapter.trainer, self._model())
        names = replaced(self._parts, now)
        self._parts = now
        if not names:
            return
        logger.warning(
            "%s: the program has replaced this while the model trains, and no checkpoint keeps it: a resumed run "
            "begins with the first one; replace it in on_train_begin too, by state.global_step",
            _some_of(names),
        )

    def _tell_of_addresses(self, found: Found) -> None:
        assert self._addresses is not None
        optimizer = stepped_optimizer(self._adapter.trainer.optimizer)
        kind = type(optimizer)
        loads_itself = kind.load_state_dict is not torch.optim.Optimizer.load_state_dict
        for path, place in found.holders.items():
            # Then the optimizer has put its own into this launch
            if path == "optimizer" and loads_itself:
                continue
            for name in self._addresses.names_in(place):
                logger.warning(
                    "%s.%s is kept by id() or data_ptr() of parameters or modules, which are other numbers in a "
                    "resumed run, so that no checkpoint keeps it: keep it by the name of the parameter",
                    path,
                    name,
                )

    def _resume(self) -> None:
        saved, self._resumed = self._resumed, None
        if saved is None:
            return
        self._set(saved)
        names = [f"{path}.{name}" for path, values in saved["values"].items() for name in values]
        names += [path for path in saved["generators"] if path in self._found.generators]
        if names:
            logger.info(
                "restored from the checkpoint, beside what Trainer restores: %s", _some_of(names)
            )

    def _set(self, saved: dict[str, Any]) -> None:
        """Give the program the values and the states of its generators that a checkpoint keeps."""
        assert self._values is not None
        self._values.restore(saved["values"])
        for path, state in saved["generators"].items():
            if path in self._found.generators:
                set_generator_state(self._found.generators[path], state)
            else:
                logger.warning(
                    "the checkpoint has the state of a random number generator of %s, and this launch has none there: "
                    "what it draws may be other numbers",
                    path,
                )


def _some_of(names: list[str]) -> str:
    """Return the first names as a text, and how many more there are."""
    text = ", ".join(names[:_MOST_NAMED])
    more = len(names) - _MOST_NAMED
    if more > 0:
        text += f" and {more} more"
    return text


def _buffers_not_saved(module: torch.nn.Module) -> Holder:
    """Return the place of the buffers of a module that its `state_dict` leaves out."""
    names = sorted(module._non_persistent_buffers_set)

    def read() -> dict[str, Any]:
        return {name: module._buffers.get(name) for name in names}

    return Holder(read, partial(setattr, module))


def _mark(stateful: Any) -> float:
    """Return a number that another state very likely has another of, from some elements of each tensor."""
    if isinstance(stateful, torch.optim.Optimizer):
        return float(len(stateful.state))
    if not isinstance(stateful, torch.nn.Module):
        return float(stateful.last_epoch)
    tensors = [*stateful.parameters(), *stateful.buffers()]
    parts = [own_part(each.detach()) for each in tensors if each.device.type != "meta"]
    heads = [part.reshape(-1)[:_MARKED] for part in parts if part is not None]
    sums = [head.double().sum().cpu() for head in heads]
    return float(torch.stack(sums).sum()) if sums else 0.0


def warn_of_iterators(paths: Iterable[str]) -> None:
    """Name iterators that the program holds, once each.

    Args:
        paths (`Iterable[str]`): the paths of attributes that lead to them.
    """
    for path in sorted(set(paths)):
        logger.warning(
            "%s is an iterator, whose position is in no checkpoint: a resumed run begins it anew; count in an "
            "attribute what it has given, and skip as many when it is made",
            path,
        )


class _Before(TrainerCallback):
    """Calls `begin` before the callbacks of the user hear of the first pass."""

    def __init__(self, program: ProgramState) -> None:
        self._program = program

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._program.begin()


def keep_program_state(adapter: TrainerAdapter) -> None:
    """Keep what the program's own objects count in the checkpoints of this training, and resume with it.

    Call it when a training begins.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains.

    Raises:
        CheckpointError: the file of a rank is broken; raised on every rank.
    """
    saved = None
    if adapter.resumes_from is not None:
        with TRAINING.agreed("start: program state"):  # the file of one rank may be broken
            found = read_of_rank(Path(adapter.resumes_from), NAME, _parse)
        if found is not None:
            saved, _ = found
            _warn_of_other_ranks(adapter, saved.get("launch"))
    program = ProgramState(adapter, saved)
    adapter.announced.json[NAME] = program.saved
    adapter.prepend_callback(_Before(program))
    adapter.append_callback(program)
    adapter.evaluations.put_back_if_cut("program state", program.take)
    adapter.evaluations.around_made_up("program state", program.around_made_up)


def _launch(adapter: TrainerAdapter) -> dict[str, int]:
    """Return what decides which random numbers a rank draws."""
    batch = micro_batch_size(adapter.trainer)
    return {"processes": distributed.world_size(), "rows per device": batch}


def _warn_of_other_ranks(adapter: TrainerAdapter, saved: Any) -> None:
    now = _launch(adapter)
    if not isinstance(saved, dict):
        return
    changed = [
        f"{now[name]} {name} after {saved[name]}"
        for name in now
        if saved.get(name, now[name]) != now[name]
    ]
    if changed:
        logger.warning(
            "resumed with %s: the random numbers that each process draws, as for dropout, the masks of a collator and "
            "the order of later passes of a sampler without a seed, are not those of an uninterrupted run, and a loss "
            "that compares the rows of a device's batch with each other, as KTO's and contrastive ones do, is another",
            " and ".join(changed),
        )


def _parse(saved: Any) -> dict[str, Any]:
    check_values(saved["values"])
    dict(saved["generators"])
    return dict(saved)
