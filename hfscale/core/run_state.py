"""Per-training state of objects that serve several trainings."""

from typing import Any


class ResetOnCopy:
    """Per-training state that copies and pickles leave out.

    Base class of objects that serve several trainings, one after another. A subclass sets in `_begin_run` everything
    that belongs to one training. It calls it in `__init__` and when a training begins, so that nothing of an earlier
    training, perhaps of another Trainer, is left. A copy has the state before a training.
    """

    def _begin_run(self) -> None:
        """Give every attribute that belongs to one training its first value, without changing the present value."""

    def __getstate__(self) -> dict[str, Any]:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        twin._begin_run()
        return vars(twin)
