"""Computes the first micro-batch of some steps twice and compares them bit by bit: silent data corruption.

A GPU, a CPU or its memory can compute a wrong number without any error. The same micro-batch with the same random
numbers gives the same bits, unless an operation is not deterministic by itself; those are found at the first replay,
by a third computation, and left out from then on.

`replay_run` says what is computed twice under each strategy, and `replay_record` what is compared: the loss, the
outputs of all modules that have no modules inside, their gradients, and the gradients of parameters before their
reduction. Where ranks depend on each other within a micro-batch, what they send is compared too, and the rank on which
the earliest value differs is named.

What both computations use is compared by hashes: `state_hashes` compares the weights and the states of the optimizer
of a rank with what they were, and `replica_hashes` with those of other ranks.
"""

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from transformers import Trainer, TrainerState

from hfscale.core.attributes import replaced
from hfscale.core.collectives import TRAINING
from hfscale.core.findings import Finding
from hfscale.core.logging import get_logger
from hfscale.core.replaying import replaying
from hfscale.core.spelling import spelled
from hfscale.replays.replay_record import Record, first_ranks, layer_numbers, recorded
from hfscale.replays.replay_run import MicroBatch
from hfscale.replays.replay_state import check_state
from hfscale.replays.replayable import check_can_replay
from hfscale.replays.replica_hashes import ReplicaHashes
from hfscale.replays.state_hashes import StateHashes, corruption_errors
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies import Strategy

logger = get_logger(__name__)
_MAX_NAMED = 3
Judge = Callable[[list[Finding], int], None]


class StepReplay:
    """Replays the first micro-batch of every N-th step.

    Args:
        trainer (`Trainer`): prepared for training.
        every_steps (`int`): N.
        found (`Callable`): called on every rank if a rank has computed two different results, with one finding for
            each host, and the last step in which a replay has found nothing, or with which the training began.

    Raises:
        UsageError: the strategy, the arguments, the class of the Trainer or what it refers to do not allow it.
    """

    def __init__(self, trainer: Trainer, every_steps: int, found: Judge) -> None:
        self._asked = f"{spelled('replay_every_steps')} is {every_steps}"
        with TRAINING.agreed("replay: start"):
            check_can_replay(trainer, self._asked)
            check_state(trainer, self._asked)
        self._trainer = trainer
        self._every = every_steps
        self._found = found
        strategy = Strategy.of(trainer)
        # Then nothing is compared in which other ranks have had a part
        self._is_independent = not strategy.sends_values
        self._is_last_only = strategy.steps_at_last_batch
        self._record = partial(
            recorded,
            model_of(trainer),
            layer_numbers(model_of(trainer)),
            gradients=strategy.has_effectless_backward,
            sends=not self._is_independent,
        )
        self._last = self._verified = trainer.state.global_step
        self._has_engine = strategy.engine_steps
        self._replicas = ReplicaHashes(trainer)
        self._states = StateHashes(trainer)
        self._has_begun = self._is_learning = False
        self._is_equal = True
        self._excluded: set[str] | None = None
        self._compared: float | None = None
        self.mismatches = 0
        """Replays so far in which a rank has differed."""
        self._seconds = 0.0

    def keys(self, state: TrainerState, logs: Mapping[str, float]) -> dict[str, float]:
        """Return the metric keys of a log.

        Args:
            state (`TrainerState`): the state of the Trainer.
            logs (`Mapping[str, float]`): the keys that Trainer logs.
        """
        if "train_runtime" in logs:  # the record that ends a training
            return {}
        seconds, self._seconds = self._seconds, 0.0
        found = {"health/replay_mismatches": float(self.mismatches), "health/replay_s": seconds}
        if self._compared is not None:
            found["health/replay_compared"] = self._compared
        return found

    def wrap(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `training_step` that replays the micro-batch first, where one is due.

        Args:
            training_step (`Callable`): that of the Trainer.
        """

        @wraps(training_step)
        def step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            number = self._trainer.state.global_step + 1
            if not self._has_begun:
                self._remember()
            is_due = number % self._every == 0 and number != self._last
            if self._is_last_only and not self._trainer.accelerator.sync_gradients:
                is_due = False  # nothing is computed before the last micro-batch
            if not is_due:
                with self._stepping_engine():
                    return training_step(model, inputs, *args, **kwargs)
            if self._is_equal:
                self._verified = self._last
            self._last = number
            return self._replayed(training_step, model, inputs, args, kwargs)

        return step

    def step_ended(self) -> None:
        """Hash the weights and the states of the optimizer if the next step is replayed.

        Call it after each step, when Trainer has logged, evaluated and saved what was due.
        """
        if (self._trainer.state.global_step + 1) % self._every == 0:
            self._remember()

    def before_update(self) -> None:
        """Compare them before the update of a step that is replayed; call it on all ranks when gradients are clipped.

        DeepSpeed has updated by then; there they are compared before its engine steps.
        """
        if not self._has_engine:
            self._compare_before_update()

    def _compare_before_update(self) -> None:
        if self._last == self._trainer.state.global_step + 1:
            begun = time.perf_counter()
            self._compare_states("the update")
            self._seconds += time.perf_counter() - begun

    @contextmanager
    def _stepping_engine(self) -> Iterator[None]:
        """Compare before DeepSpeed updates, which is the end of the backward pass of the last micro-batch."""
        if not self._has_engine or self._last != self._trainer.state.global_step + 1:
            yield
            return
        engine: Any = self._trainer.model_wrapped
        update = engine.step

        def compare_and_update(*args: Any, **kwargs: Any) -> Any:
            self._compare_before_update()
            return update(*args, **kwargs)

        with replaced(engine, "step", compare_and_update):
            yield

    def _remember(self) -> None:
        begun = time.perf_counter()
        self._has_begun = True
        self._states.remember(self._trainer.state.global_step)
        self._seconds += time.perf_counter() - begun

    def _compare_states(self, until: str) -> bool:
        """Compare what this rank holds with what it was; return whether something is wrong, the same on all ranks."""
        found = self._states.compare(
            self._trainer.state.global_step + 1, until, learns=self._is_learning
        )
        if found:
            self._is_equal = False
            self.mismatches += 1
            self._found(found, self._verified)
        return bool(found)

    def _replayed(
        self, training_step: Callable[..., Any], model: Any, inputs: Any, args: Any, kwargs: Any
    ) -> Any:
        begun = time.perf_counter()
        self._is_learning = self._excluded is None
        self._is_equal = True
        if not self._compare_states("the beginning"):
            self._compare_replicas()
        records = self._replay(training_step, (inputs, args, kwargs))
        self._seconds += time.perf_counter() - begun
        with self._record() as record, self._stepping_engine():
            loss = training_step(model, inputs, *args, **kwargs)
            record.loss(loss)
        begun = time.perf_counter()
        if self._excluded is None:
            self._excluded = _not_deterministic(records[0], records[1])
            self._report_excluded(len(records[0].values))
        self._compare(records[-1], record)
        self._seconds += time.perf_counter() - begun
        return loss

    def _replay(self, training_step: Callable[..., Any], called: tuple[Any, ...]) -> list[Record]:
        """Compute the micro-batch once, or twice in the first replay of a launch, which checks the weights too."""
        weights = None
        with TRAINING.agreed("replay: state"):
            micro_batch = MicroBatch(self._trainer, training_step, called, self._asked)
            if self._is_learning:
                weights = micro_batch.weights()
        records = []
        for _ in range(2 if self._is_learning else 1):
            with replaying(), self._record() as record:
                record.loss(micro_batch.replay())
            micro_batch.put_back()  # after the hooks of the record have been removed
            records.append(record)
        if weights is not None:
            with TRAINING.agreed("replay: weights"):
                micro_batch.check_weights(weights)
        return records

    def _report_excluded(self, values: int) -> None:
        """Say what is not compared from now on, and which share of the values of a micro-batch is."""
        assert self._excluded is not None
        own = len(self._excluded)
        self._compared = (values - own) / values
        of_ranks = TRAINING.gather("replay: excluded", sorted(self._excluded))
        together = sorted({name for names in of_ranks for name in names})
        self._excluded = set(together)
        if together:
            logger.warning(
                "%d values of a step are not deterministic and are not compared when it is replayed: %s%s; %.0f%% are "
                "compared (health/replay_compared; torch.use_deterministic_algorithms(True), or attention by "
                "sdpa instead of a FlashAttention kernel, raises it)",
                len(together),
                ", ".join(together[:_MAX_NAMED]),
                " …" if len(together) > _MAX_NAMED else "",
                100 * self._compared,
            )

    def _compare_replicas(self) -> None:
        """Compare what several ranks hold alike, before it is used; all ranks come to the same conclusion."""
        if self._excluded and not self._is_independent:
            # What ranks compute alike without an exchange, such as the gradient of a norm, may differ
            return
        found = self._replicas.compare(self._trainer.state.global_step + 1)
        if found:
            self._is_equal = False
            self.mismatches += 1
            self._found(found, self._verified)

    def _compare(self, first: Record, second: Record) -> None:
        """Exchange the first value that differs on each rank; all ranks come to the same conclusion."""
        assert self._excluded is not None
        name = next((name for name in second.differing(first) if name not in self._excluded), None)
        key = None if name is None else second.place(name)
        answers = TRAINING.gather("replay", [name, key, socket.gethostname()])
        names, keys, hosts = zip(*answers, strict=True)
        ranks = [rank for rank, name in enumerate(names) if name is not None]
        if not ranks:
            return
        self._is_equal = False
        if not self._is_independent:
            ranks = first_ranks(keys)
        self.mismatches += 1
        step = self._trainer.state.global_step + 1

        def problem(rank: int, where: str) -> str:
            return f"step {step} gave two different results, first in {names[rank]} on {where}"

        self._found(corruption_errors("replay", ranks, hosts, problem), self._verified)


def _not_deterministic(first: Record, second: Record) -> set[str]:
    """Return the names from the first value on that differs: what follows from it may be equal by chance only."""
    wrong = second.differing(first)
    if not wrong:
        return set()
    begin = second.place(wrong[0])
    return {name for name in second.values if second.place(name) >= begin}
