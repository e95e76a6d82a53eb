"""`Changes`: what is replaced on a Trainer and on its parts during a training, and how it is put back."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers import Trainer

from hfscale.core.collectives import TRAINING
from hfscale.core.versions import has_epoch_methods
from hfscale.trainer.frames import training_frame

_ABSENT = object()


class Changes:
    """What is changed on one Trainer, in the order of the changes.

    Every change is made on an instance, never on a class or a module of a library. It lasts until `restore`, or, if it
    is a lasting one, until `restore_lasting`. The last change is undone first. An attribute that other code has
    replaced since is left alone.

    `TrainerAdapter` calls `restore` where `train`, which it wraps, ends. A callback that is added while a training
    runs is too late for that: then the first change wraps the two methods of Trainer in which the rest takes place.

    Args:
        trainer (`Trainer`): the Trainer.
        restore (`Callable`): called where such a training ends; it calls `restore` of this object.
    """

    def __init__(self, trainer: Trainer, restore: Callable[[], None]) -> None:
        self.sees_whole_training = False
        """Whether `train` is running and is wrapped."""
        self._trainer = trainer
        self._restore_all = restore
        self._undo: dict[Any, Callable[[], object]] = {}  # of the running training, oldest first
        self._undo_before_loop: dict[Any, Callable[[], object]] | None = None
        self._undo_lasting: dict[Any, Callable[[], object]] = {}
        self._final_error: BaseException | None = None

    def replace(self, owner: Any, name: str, value: Any, *, lasting: bool = False) -> None:
        """Set an attribute of an instance until the end of the training.

        Args:
            owner (`Any`): the Trainer, or another instance.
            name (`str`): the attribute.
            value (`Any`): what it is until then.
            lasting (`bool`, *optional*): until `restore_lasting` instead.
        """
        if not lasting:
            self.watch()
        undo = self._undo_lasting if lasting else self._undo
        before = vars(owner).get(name, _ABSENT)
        earlier = undo.pop((id(owner), name), lambda: None)
        setattr(owner, name, value)

        def put_back() -> None:
            if vars(owner).get(name, _ABSENT) is not value:
                return
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
            earlier()

        undo[id(owner), name] = put_back

    def put_back(self, owner: Any, name: str, *, lasting: bool = False) -> None:
        """Undo the changes of one attribute before the end of the training; nothing happens if there are none.

        Args:
            owner (`Any`): the instance.
            name (`str`): the attribute.
            lasting (`bool`, *optional*): the lasting ones.
        """
        found = [self._undo_lasting]
        if not lasting:
            found = [self._undo, self._undo_before_loop or {}]
        for undo in found:
            undo.pop((id(owner), name), lambda: None)()

    def is_replaced(self, owner: Any, name: str) -> bool:
        """Return whether an attribute has a lasting change.

        Args:
            owner (`Any`): the instance.
            name (`str`): the attribute.
        """
        return (id(owner), name) in self._undo_lasting

    @contextmanager
    def methods_replaced(self, methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
        """Replace methods of the Trainer within the `with` block.

        Args:
            methods (`Mapping`): the methods by their names.
        """
        for name, method in methods.items():
            self.replace(self._trainer, name, method)
        try:
            yield
        finally:
            for name in methods:
                self.put_back(self._trainer, name)

    def at_end(self, key: Any, call: Callable[[], object]) -> None:
        """Have `call()` made by `restore`, also when the training raises.

        Args:
            key (`Any`): what the call is for; a later one with the same key replaces it.
            call (`Callable`): called without arguments; the last one added is called first. Its result is ignored.
        """
        self.watch()
        self._undo[key] = call

    def when_unused(self, key: Any, call: Callable[[], object]) -> None:
        """Have `call()` made by `restore_lasting`.

        Args:
            key (`Any`): as in `at_end`.
            call (`Callable`): called without arguments.
        """
        self._undo_lasting[key] = call

    def begin_loop(self) -> None:
        """Undo what an earlier loop of this training has changed: `auto_find_batch_size` begins another one.

        What was changed before the first loop stays.
        """
        undo, self._undo = self._undo, {}
        if self._undo_before_loop is None:
            self._undo_before_loop = undo
        else:
            _call_all(undo)

    def restore(self) -> None:
        """Undo every change that lasts until the end of the training."""
        undo, self._undo = self._undo, {}
        before = self._undo_before_loop
        self._undo_before_loop = None
        self._final_error = None
        try:
            _call_all(undo)
        finally:
            _call_all(before or {})

    def restore_lasting(self) -> None:
        """Undo the lasting changes."""
        _call_all(self._undo_lasting)

    def raise_at_end(self, error: BaseException) -> None:
        """Have `raise_final_error` raise an error in this training.

        Args:
            error (`BaseException`): the exception. Every rank must give one: they wait for each other before.
        """
        self.watch()
        self._final_error = error

    def raise_final_error(self) -> None:
        """Raise the error of `raise_at_end`, if there is one."""
        if self._final_error is not None:
            TRAINING.barrier("end")  # a rank that ends first makes the launcher end the others
            raise self._final_error

    def is_training(self) -> bool:
        """Return whether a training of this Trainer is on the call stack."""
        frame = training_frame()
        return frame is not None and frame.f_locals.get("self") is self._trainer

    def watch(self) -> None:
        """If a training is running that began before `train` was wrapped, restore at its end."""
        if self.sees_whole_training or "running" in self._undo or not self.is_training():
            return
        self._undo["running"] = lambda: None
        # In older versions an exception between two steps is not seen; the next training then restores first.
        steps_name = "_run_epoch" if has_epoch_methods() else "training_step"
        end_name = "_finalize_training" if has_epoch_methods() else "_finish_current_push"
        take_steps, finalize = getattr(self._trainer, steps_name), getattr(self._trainer, end_name)

        @functools.wraps(take_steps)
        def take_steps_or_restore(*args: Any, **kwargs: Any) -> Any:
            try:
                return take_steps(*args, **kwargs)
            except BaseException:
                self._restore_all()
                raise

        @functools.wraps(finalize)
        def finalize_and_restore(*args: Any, **kwargs: Any) -> Any:
            try:
                result = finalize(*args, **kwargs)
                self.raise_final_error()
                return result
            finally:
                self._restore_all()

        self.replace(self._trainer, steps_name, take_steps_or_restore)
        self.replace(self._trainer, end_name, finalize_and_restore)


def _call_all(undo: dict[Any, Callable[[], object]]) -> None:
    """Call the last one first, and all of them even if one raises."""
    with ExitStack() as stack:
        for call in undo.values():
            stack.callback(call)
