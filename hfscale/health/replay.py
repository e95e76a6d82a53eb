"""Computes the first micro-batch of some steps twice and compares them bit by bit: silent data corruption.

A GPU, a CPU or its memory can compute a wrong number without any error. The same micro-batch with the same random
numbers gives the same bits, unless an operation is not deterministic by itself; those are found at the first replay,
by a third computation, and left out from then on.

What is compared is what each rank computes on its own: the loss, the outputs of all modules that have no modules
inside, their gradients, and the gradients of parameters before their reduction (under FSDP2 without the last). So the
first value that differs names the rank.
"""

import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerState

from hfscale.core.bit_hash import bit_hash
from hfscale.core.collectives import TRAINING
from hfscale.core.findings import Finding
from hfscale.core.logging import get_logger
from hfscale.core.replaying import replaying
from hfscale.core.torch_internals import is_traceable_wrapper_subclass
from hfscale.errors import UsageError
from hfscale.trainer.state import model_of
from hfscale.trainer.strategy import running_strategy

logger = get_logger(__name__)
STRATEGIES = ("single", "ddp", "fsdp2")
_MAX_NAMED = 3
Judge = Callable[[Finding], None]


class StepReplay:
    """Replays the first micro-batch of every N-th step.

    Args:
        trainer (`Trainer`): prepared for training.
        every_steps (`int`): N.
        found (`Callable`): called on every rank with the finding, if a rank has computed two different results.

    Raises:
        UsageError: the strategy or the arguments do not allow it.
    """

    def __init__(self, trainer: Trainer, every_steps: int, found: Judge) -> None:
        strategy = running_strategy(trainer)
        if strategy not in STRATEGIES:
            raise UsageError(
                f"replay_every_steps is {every_steps}: a step cannot be replayed under {strategy}, only under "
                f"{', '.join(STRATEGIES)}; leave it out"
            )
        if trainer.args.torch_compile:
            raise UsageError(f"replay_every_steps is {every_steps}: a compiled model has no hooks; leave it out")
        self._trainer = trainer
        self._every = every_steps
        self._found = found
        self._strategy = strategy
        self._last = trainer.state.global_step
        self._excluded: set[str] | None = None
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
        return {"health/replay_mismatches": float(self.mismatches), "health/replay_s": seconds}

    def wrap(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `training_step` that replays the micro-batch first, where one is due.

        Args:
            training_step (`Callable`): that of the Trainer.
        """

        @wraps(training_step)
        def step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            number = self._trainer.state.global_step + 1
            if number % self._every or number == self._last:
                return training_step(model, inputs, *args, **kwargs)
            self._last = number
            return self._replayed(partial(training_step, model), inputs, args, kwargs)

        return step

    def _replayed(self, training_step: Callable[..., Any], inputs: Any, args: Any, kwargs: Any) -> Any:
        begun = time.perf_counter()
        model = model_of(self._trainer)
        randoms = _random_states()
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        digests = []
        for _ in range(2 if self._excluded is None else 1):
            with replaying(), self._without_reduction(), _recorded(model) as digest:
                loss = training_step(_copied(inputs), *args, **kwargs)
                digest["loss"] = bit_hash(loss)
            digests.append(digest)
            model.zero_grad()
            _restore(randoms)
            with torch.no_grad():
                for buffer, kept in buffers:
                    buffer.copy_(kept)
        self._seconds += time.perf_counter() - begun
        with _recorded(model) as digest:
            loss = training_step(inputs, *args, **kwargs)
            digest["loss"] = bit_hash(loss)
        begun = time.perf_counter()
        read = [_read(one) for one in (*digests, digest)]
        if self._excluded is None:
            self._excluded = _not_deterministic(read[0], read[1])
            self._report_excluded()
        self._compare(read[-2], read[-1])
        self._seconds += time.perf_counter() - begun
        return loss

    @contextmanager
    def _without_reduction(self) -> Iterator[None]:
        """Keep the gradients of a replay on this rank; FSDP2 reduces them, since it can drop no others."""
        wrapped: Any = self._trainer.model_wrapped
        if self._strategy == "fsdp2":
            reduces = self._trainer.accelerator.sync_gradients
            model: Any = model_of(self._trainer)
            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(True)  # gradients that are not reduced cannot be dropped
            try:
                yield
            finally:
                model.set_requires_gradient_sync(bool(reduces))
            return
        with wrapped.no_sync() if self._strategy == "ddp" else nullcontext():
            yield

    def _report_excluded(self) -> None:
        assert self._excluded is not None
        of_ranks = TRAINING.gather("replay: excluded", sorted(self._excluded))
        together = sorted({name for names in of_ranks for name in names})
        self._excluded = set(together)
        if together:
            logger.warning(
                "%d values of a step are not deterministic and are not compared when it is replayed: %s%s",
                len(together),
                ", ".join(together[:_MAX_NAMED]),
                " …" if len(together) > _MAX_NAMED else "",
            )

    def _compare(self, first: dict[str, int], second: dict[str, int]) -> None:
        """Exchange the first value that differs on each rank; all ranks come to the same conclusion."""
        assert self._excluded is not None
        wrong = [name for name in second if name not in self._excluded and first.get(name) != second[name]]
        answers = TRAINING.gather("replay", [wrong[:1], socket.gethostname()])
        bad = [(rank, names[0], host) for rank, (names, host) in enumerate(answers) if names]
        if not bad:
            return
        self.mismatches += 1
        rank, name, host = bad[0]
        step = self._trainer.state.global_step + 1
        self._found(
            Finding(
                level="error",
                check="replay",
                problem=f"step {step} gave two different results, first in {name} on rank {rank}",
                fix=f"take {host} out of the run, and resume from an earlier checkpoint",
                ranks=tuple(number for number, *_ in bad),
                host=host,
            )
        )


# ---- what is compared


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Record hashes of what this rank computes for itself, by name, in order."""
    found: dict[str, torch.Tensor] = {}

    def add(name: str, tensor: torch.Tensor) -> None:
        number = 1
        while f"{name} #{number}" in found:  # a module may be called more than once
            number += 1
        found[f"{name} #{number}" if number > 1 or name in found else name] = bit_hash(tensor)

    def leave(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and _is_plain(output):
            add(f"output of {name}", output)
            if output.requires_grad:
                output.register_hook(partial(add, f"gradient of the output of {name}"))

    handles: list[Any] = []
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            handles.append(module.register_forward_hook(partial(leave, name)))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            handles.append(parameter.register_hook(partial(add, f"gradient of {name}")))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _is_plain(tensor: torch.Tensor) -> bool:
    return not is_traceable_wrapper_subclass(tensor) and not tensor.is_complex()


def _read(found: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the hashes as numbers; it waits for the device once."""
    values = torch.stack(list(found.values())).tolist()
    return dict(zip(found, values, strict=True))


def _not_deterministic(first: Mapping[str, int], second: Mapping[str, int]) -> set[str]:
    """Return the names from the first value on that differs: what follows from it may be equal by chance only."""
    names = list(first)
    wrong = [number for number, name in enumerate(names) if first[name] != second.get(name)]
    return set(names[wrong[0] :]) if wrong else set()


# ---- what is restored


def _random_states() -> tuple[Any, ...]:
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return (random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu)


def _restore(states: tuple[Any, ...]) -> None:
    of_python, of_numpy, of_torch, of_gpu = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    if of_gpu is not None:
        torch.cuda.set_rng_state(of_gpu)


def _copied(inputs: Any) -> Any:
    """Return a copy of a batch from which a trainer may take entries."""
    return dict(inputs) if type(inputs) is dict else inputs.copy() if hasattr(inputs, "copy") else inputs
