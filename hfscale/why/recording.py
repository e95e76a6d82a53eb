"""Records one optimizer step on one rank: what goes in and out of every module, gradients, states and weights."""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer

from hfscale.core.best_effort import best_effort
from hfscale.core.distributed import rank
from hfscale.core.durable_files import write_atomically
from hfscale.trainer.attention import attention_implementation
from hfscale.trainer.batch_digest import BatchDigest, rng_digest
from hfscale.trainer.setup import run_setup, tied_parameters
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies import Strategy
from hfscale.why.digests import Digest, DigestQueue
from hfscale.why.operations import OperationRecorder
from hfscale.why.trace_files import FORMAT, MAX_LINES, Event, trace_path

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of names that torch.compile and activation checkpointing add."""
_MAX_TENSORS = 8
"""Tensors that are recorded of the arguments of a module, and of what it returns."""
_PLAIN = (bool, int, float, str)


def why_no_operations(trainer: Trainer) -> str | None:
    """Return why single operations of a training cannot be recorded; None if they can be.

    torch compiles nothing while operations are recorded, and refuses to run flex attention without its compiler.

    Args:
        trainer (`Trainer`): prepared for training.
    """
    if trainer.args.torch_compile:
        return "the model is compiled (torch_compile)"
    models = [each for each in model_of(trainer).modules() if isinstance(each, PreTrainedModel)]
    if any(attention_implementation(each.config) == "flex_attention" for each in models):
        return "torch compiles flex_attention: attn_implementation sdpa is recorded too"
    return None


class StepRecorder:
    """Records one step; `begin` and `end` are called around it.

    Nothing that the training computes is changed: hooks return nothing, and digests draw no random numbers.

    Args:
        trainer (`Trainer`): prepared for training.
        output_dir (`Path`): the output directory of the run.
        step (`int`): the optimizer step, counted from 1.
        operations (`bool`): whether single operations are recorded too.
    """

    def __init__(self, trainer: Trainer, output_dir: Path, step: int, *, operations: bool) -> None:
        self._trainer = trainer
        self._model = model_of(trainer)
        self._path = trace_path(output_dir, step, rank())
        self._step = step
        self._is_compiled = bool(trainer.args.torch_compile)
        self._events: list[Event] = []
        self._queue = DigestQueue()
        self._handles: list[Any] = []
        self._entered: list[str] = [""]
        self._micro = 0
        self._is_in_micro = False
        self._is_backward = False
        self._operations: OperationRecorder | None = None
        if operations and why_no_operations(trainer) is None:
            self._operations = OperationRecorder(
                lambda name, tensor: self._tensor("operation", self._at, name, tensor)
            )
        self._parameters = [(plain_name(name), p) for name, p in self._model.named_parameters()]

    @property
    def _at(self) -> str:
        """The module whose code is running."""
        return self._entered[-1]

    # ---- the parts of a step

    def begin(self) -> None:
        """Record what the step starts from, and put hooks on the model and the optimizer."""
        with self._recording():
            self._settings()
            self._weights("weights")
            for name, buffer in self._model.named_buffers():
                self._tensor("weights", plain_name(name), "buffer", buffer)
            self._states("states")
        inner = Strategy.of(self._trainer).torch_optimizer()
        self._handles.append(inner.register_step_pre_hook(self._before_update))
        self._handles.append(inner.register_step_post_hook(self._after_update))
        if not self._is_compiled:
            self._hook_modules()

    def wrap(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `training_step` that records a micro-batch.

        Args:
            training_step (`Callable`): that of the Trainer.
        """

        @functools.wraps(training_step)
        def record(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._before_micro(inputs)
            try:
                loss = training_step(model, inputs, *args, **kwargs)
            finally:
                self._is_in_micro = False
                if self._operations is not None:
                    self._operations.stop()
            self._after_micro(loss)
            return loss

        return record

    def end(self) -> None:
        """Remove the hooks, and write the file."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._queue.empty()
        # Without tensors that wrap others
        events = [event for event in self._events if event.value is not None]
        setup = run_setup(self._trainer)
        header = {
            "format": FORMAT,
            "step": self._step,
            "rank": rank(),
            "world_size": self._trainer.args.world_size,
            "layout": setup["layout"],
            "parts": {"modules": not self._is_compiled, "operations": self._operations is not None},
            **({"setup": setup} if rank() == 0 else {}),
        }
        ending = "truncated" if len(self._events) >= MAX_LINES else "lines"
        end = Event(phase="end", micro=0, name="", value_name=ending, value=len(events))
        text = json.dumps(header) + "\n" + "".join(event.to_line() for event in (*events, end))
        with best_effort("writing a trace", self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, text)

    def discard(self) -> None:
        """Remove the hooks without writing, if the step is not completed."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ---- hooks

    def _hook_modules(self) -> None:
        for full_name, module in self._model.named_modules():
            name = plain_name(full_name)
            enter, leave = (
                functools.partial(self._enter, name),
                functools.partial(self._leave, name),
            )
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(leave, always_call=True))
        for name, parameter in self._parameters:
            if parameter.requires_grad:
                give = functools.partial(self._gradient, "local_gradient", name, "gradient")
                self._handles.append(parameter.register_hook(give))

    def _enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._is_in_micro:
            return
        if module is self._model:
            self._is_backward = False
        if self._is_backward:  # recomputation of a checkpointed layer
            self._entered.append(name)
            return
        with self._recording():
            self._values(
                name, "input", {**{str(i): value for i, value in enumerate(args)}, **kwargs}
            )
        self._entered.append(name)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not self._is_in_micro or len(self._entered) < 2:
            return
        self._entered.pop()
        if not self._is_backward:
            with self._recording():
                self._values(name, "output", {"": output})

    def _values(self, name: str, kind: str, values: Mapping[str, Any]) -> None:
        tensors = [
            (key, tensor) for key, value in values.items() for key, tensor in _flat(key, value)
        ]
        for key, tensor in tensors[:_MAX_TENSORS]:
            value_name = f"{kind} {key}".strip()
            self._tensor("forward", name, value_name, tensor)
            if tensor.requires_grad:
                hook = functools.partial(
                    self._gradient, "backward", name, f"gradient of {value_name}"
                )
                self._handles.append(tensor.register_hook(hook))

    def _gradient(
        self, phase: str, name: str, value_name: str, gradient: torch.Tensor | None
    ) -> None:
        # Autograd calls hooks of values that got no gradient too
        if not self._is_in_micro or gradient is None:
            return
        with self._recording():
            if phase == "backward":
                self._is_backward = True
                self._entered = ["", name]
            self._tensor(phase, name, value_name, gradient)

    # ---- a micro-batch

    def _before_micro(self, inputs: Any) -> None:
        with self._recording():
            if isinstance(inputs, Mapping):
                batch = {
                    str(name): value
                    for name, value in inputs.items()
                    if isinstance(value, torch.Tensor)
                }
                for name, value in batch.items():
                    self._tensor("batch", "", name, value)
                rows = BatchDigest()
                rows.see(batch)
                for name, total in rows.take().items():
                    self._add("batch", "", f"rows of {name}", f"{total:016x}")
            self._add("rng", "", "before", rng_digest())
        self._entered = [""]
        self._is_backward = False
        self._is_in_micro = True
        if self._operations is not None:
            self._operations.start()

    def _after_micro(self, loss: Any) -> None:
        with self._recording():
            self._add("rng", "", "after", rng_digest())
            if isinstance(loss, torch.Tensor):
                self._tensor("loss", "", "loss", loss)
            if self._trainer.accelerator.sync_gradients:
                self._gradients("gradient")
            self._micro += 1

    # ---- parameters and optimizer

    def _settings(self) -> None:
        for full_name, module in self._model.named_modules():
            name = plain_name(full_name)
            self._add("settings", name, "class", type(module).__name__.removeprefix("FSDP"))
            for attribute, value in sorted(vars(module).items()):
                if not attribute.startswith("_") and type(value) in _PLAIN:
                    self._add("settings", name, attribute, value)
        for name, parameter in self._parameters:
            self._add("settings", name, "requires_grad", parameter.requires_grad)
        self._add("settings", "", "tied parameters", tied_parameters(self._model))
        self._add("settings", "", "max_grad_norm", self._trainer.args.max_grad_norm)
        optimizer: Any = self._trainer.optimizer
        for number, group in enumerate(optimizer.param_groups):
            for key, value in sorted(group.items()):
                if isinstance(value, torch.Tensor) and value.numel() == 1:
                    value = value.item()
                if type(value) in _PLAIN or (
                    isinstance(value, tuple | list) and all(type(v) in _PLAIN for v in value)
                ):
                    self._add("settings", f"optimizer group {number}", key, value)

    def _weights(self, phase: str) -> None:
        for name, parameter in self._parameters:
            self._tensor(phase, name, "weight", parameter)

    def _states(self, phase: str) -> None:
        states = Strategy.of(self._trainer).torch_optimizer().state
        for name, parameter in self._parameters:
            for key, value in sorted(
                states.get(parameter, {}).items(), key=lambda item: str(item[0])
            ):
                if isinstance(value, torch.Tensor):
                    self._tensor(phase, name, str(key), value)

    def _gradients(self, phase: str) -> None:
        for name, parameter in self._parameters:
            if parameter.grad is not None:
                self._tensor(phase, name, "gradient", parameter.grad)

    def _before_update(self, *_: Any) -> None:
        with self._recording():
            self._gradients("clipping")

    def _after_update(self, *_: Any) -> None:
        with self._recording():
            self._states("optimizer")
            self._weights("updated")

    # ---- events

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Leave the operations of the recording itself out."""
        if self._operations is None:
            with torch.no_grad():
                yield
            return
        was_paused, self._operations.is_paused = self._operations.is_paused, True
        try:
            with torch.no_grad():
                yield
        finally:
            self._operations.is_paused = was_paused

    def _tensor(self, phase: str, name: str, value_name: str, tensor: torch.Tensor) -> None:
        if len(self._events) >= MAX_LINES:
            return
        index = len(self._events)
        micro = self._micro
        self._events.append(
            Event(phase=phase, micro=micro, name=name, value_name=value_name, value=None)
        )

        def give(digest: Digest) -> None:
            self._events[index] = Event(
                phase=phase, micro=micro, name=name, value_name=value_name, value=digest.to_list()
            )

        self._queue.add(tensor, give)

    def _add(self, phase: str, name: str, value_name: str, value: Any) -> None:
        if len(self._events) < MAX_LINES:
            self._events.append(
                Event(phase=phase, micro=self._micro, name=name, value_name=value_name, value=value)
            )


def plain_name(name: str) -> str:
    """Return the name of a module or parameter without the parts that wrappers add.

    Args:
        name (`str`): as `named_modules` and `named_parameters` return it.
    """
    for part in _WRAPPERS:
        name = name.replace(part, "").replace(part.rstrip("."), "")
    return name.removesuffix(".")


def _flat(key: str, value: Any, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors in nested containers, with names that say where they are."""
    if isinstance(value, torch.Tensor):
        yield key, value
    elif depth < 3 and isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _flat(f"{key} {inner}".strip(), item, depth + 1)
    elif depth < 3 and isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from _flat(f"{key} {number}".strip(), item, depth + 1)
