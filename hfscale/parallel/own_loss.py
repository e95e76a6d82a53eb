"""What a `compute_loss` or `compute_loss_func` of the user's sees: the micro-batch as in one process, or an error.

With pipeline stages the last stage's ranks alone compute the loss. There the tokens are not the model's input any
more, and other ranks do not learn what the function keeps or logs. Therefore:

- the function gets the micro-batch in the shape in which it came, with its tokens, and complete logits;
- `model(...)` has to be called with that micro-batch, and once: earlier stages have computed nothing else;
- what the function keeps in the Trainer's attributes, or logs, is sent to the ranks of the other stages;
- reading the weights of the whole model, and collectives with ranks of other stages, are errors that name them;
- after an error of the function the model is still computed, forward and backward, so that no other rank waits, and at
  the end of the step all of them raise it.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer
from transformers.utils import TransformersKwargs

from hfscale.core.spelling import spelled
from hfscale.core.torch_internals import TorchDispatchMode, dispatch_modes, group_of
from hfscale.errors import UsageError
from hfscale.parallel.mesh import ParallelMesh
from hfscale.parallel.partition import StageEntry

OWN_SHAPE = "own_shape"
"""Key of a micro-batch's own shape among the inputs of a step: a CPU tensor (rows, 2) with its rows and length."""
TOKENS = "tokens"
"""Key of the tokens among the inputs of a step, for the last stage, which gets hidden states in their place."""
OF_OWN_LOSS = (OWN_SHAPE, TOKENS)
"""Keys of the inputs of a step that only the stage reads which computes a loss of the user's."""
_LABELS = ("labels", "shift_labels")
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def has_own_loss(trainer: Trainer) -> bool:
    """Return whether a Trainer's loss is computed by code of its user: an overridden `compute_loss`, or a
    `compute_loss_func`.

    Args:
        trainer (`Trainer`): it may have been made by its constructor or not yet.
    """
    function: Any = inspect.unwrap(trainer.compute_loss)  # hfscale's meters wrap it
    is_overridden = getattr(function, "__func__", function) is not Trainer.compute_loss
    return is_overridden or getattr(trainer, "compute_loss_func", None) is not None


def model_keywords(model: PreTrainedModel) -> frozenset[str]:
    """Return the inputs that a model reads; any other one of a batch is for the user's loss.

    Args:
        model (`PreTrainedModel`): the model.
    """
    own = inspect.signature(type(model).forward).parameters
    return frozenset(own) | frozenset(TransformersKwargs.__annotations__)


def own_shapes(
    batches: list[dict[str, torch.Tensor]], micro_batches: int, rows: int
) -> torch.Tensor:
    """Return the shape that each micro-batch has before all are padded to one.

    Args:
        batches (`list[dict]`): inputs of the model, with `input_ids` of (rows, sequence) each.
        micro_batches (`int`): number of micro-batches.
        rows (`int`): rows of each micro-batch after padding.

    Returns:
        A tensor (micro-batches x rows, 2) on the CPU: in each row the rows and the length of its micro-batch.
    """
    shapes = [list(batch["input_ids"].shape) for batch in batches]
    shapes += [shapes[-1]] * (micro_batches - len(shapes))
    return torch.tensor(shapes).repeat_interleave(rows, dim=0)


# --- the model that compute_loss gets --------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _MicroBatch:
    """What the stages before this one have computed of a micro-batch."""

    hidden: torch.Tensor | None
    """Their hidden states, (rows, sequence, hidden); None where this stage is also the first."""
    inputs: dict[str, Any]
    """The micro-batch, as `compute_loss` gets it."""
    calls: int = 0
    """How often the model has been called."""
    output: Any = None
    """What the model has returned."""
    is_in_model: bool = False
    """Whether the model is being called, or has failed."""


class LossModel:
    """The model that `compute_loss` gets: a view of the last stage whose call completes the micro-batch.

    Args:
        view (`PreTrainedModel`): the last stage's view of the model.
        mesh (`ParallelMesh`): all ranks.
        model (`nn.Module`): the Trainer's model, which `compute_loss` may also use.
        is_sequence_split (`bool`): whether sequence parallelism splits the hidden states between stages.
    """

    def __init__(
        self,
        view: PreTrainedModel,
        mesh: ParallelMesh,
        model: nn.Module,
        *,
        is_sequence_split: bool,
    ) -> None:
        self._view = view
        self._keywords = model_keywords(view)
        self._is_sequence_split = is_sequence_split
        self._pp = mesh.layout.pp
        self._is_split = mesh.layout.world_size > 1
        entries = (module for module in view.modules() if isinstance(module, StageEntry))
        self._entry = next(entries, None)
        self._batch: _MicroBatch | None = None
        self._outputs: set[Any] = set()
        ranks = mesh.device_mesh.mesh[mesh.pp_rank].flatten().tolist()
        self._is_alone_in_stage = len(ranks) == 1
        self._collectives = _SameStage(frozenset(ranks), self._pp)
        self.model = copy.copy(view)
        """The model to be given to `compute_loss`."""
        self.model.forward = self._forward()  # of this copy only
        for seen in (self.model, model):
            seen.named_parameters = self._guarded(seen.named_parameters)  # type: ignore[method-assign]
            seen.state_dict = self._guarded(seen.state_dict)  # type: ignore[method-assign]

    @property
    def is_computing(self) -> bool:
        """Whether `compute_loss` runs at the moment."""
        return self._batch is not None

    @contextmanager
    def computing(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Have `compute_loss` called in the `with` block, on one micro-batch.

        Args:
            inputs (`dict`): the stage's inputs, with `OWN_SHAPE`, and `TOKENS` where this is not the first stage.

        Returns:
            The inputs for `compute_loss`, in the shape that they have in one process.

        Raises:
            UsageError: `compute_loss` does what it cannot do on ranks that hold a part of the model.
        """
        inputs = _in_own_shape(inputs, is_sequence_split=self._is_sequence_split)
        hidden = inputs.pop("inputs_embeds", None) if TOKENS in inputs else None
        if hidden is not None:
            inputs = {"input_ids": inputs.pop(TOKENS), **inputs}
        self._batch = _MicroBatch(hidden=hidden, inputs=dict(inputs))
        self._outputs = set()
        try:
            yield inputs
        finally:
            self._batch = None

    def guarded(
        self, compute_loss: Callable[..., Any], fail: Callable[[Exception], None]
    ) -> Callable[..., Any]:
        """Return a `compute_loss` that ends with an error where it does what it cannot do on this layout.

        Args:
            compute_loss (`callable`): the user's.
            fail (`callable`): called with an error of the function where ranks of other stages wait for its loss. Then
                the function returns a loss of 0, which all parameters of the stage have a gradient of.
        """

        @functools.wraps(compute_loss)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return self._checked(compute_loss, *args, **kwargs)
            except Exception as error:
                if self._pp == 1:
                    raise
                output = self._completed_output(error)
                fail(error)
            loss = 0.0 * output.logits.float().nan_to_num().sum()
            # Trainer gives it by its name
            return (loss, output) if kwargs.get("return_outputs") else loss

        return guarded

    def may_complete(self, error: Exception) -> bool:
        """Return whether a step can be completed without the model's passes of a micro-batch.

        Args:
            error (`Exception`): what has been raised instead of the micro-batch's loss.
        """
        return isinstance(error, UsageError) or self._is_alone_in_stage

    def _checked(self, compute_loss: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            with self._collectives if self._pp > 1 else nullcontext():
                result = compute_loss(*args, **kwargs)
        except RuntimeError as error:
            if "DTensor" not in str(error):
                raise
            raise self._reads_weights() from error
        loss = result[0] if isinstance(result, tuple) else result
        if isinstance(loss, DTensor):
            raise self._reads_weights()
        self._check_loss(loss)
        return result

    def _completed_output(self, error: Exception) -> Any:
        """Return the model's output of a micro-batch whose `compute_loss` has failed.

        The ranks of this stage exchange activations and gathered parameters in the model's passes, and earlier stages
        wait for its gradients.
        """
        batch = self._batch
        assert batch is not None
        if batch.is_in_model:  # it has failed in the middle of its exchanges
            raise error
        if batch.output is None:
            batch.calls = 0
            self.call(
                **{key: value for key, value in batch.inputs.items() if key in self._keywords}
            )
        return batch.output

    def _forward(self) -> Callable[..., Any]:
        @functools.wraps(self._view.forward)  # code reads its signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.call(*args, **kwargs)

        return forward

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the last stage on the micro-batch: what `model(...)` does in `compute_loss`.

        Args:
            args, kwargs: as for the model's `forward`.

        Returns:
            The model's output, with complete logits.

        Raises:
            UsageError: with several stages, these are not the inputs of the micro-batch, or it is the second call.
        """
        batch = self._batch
        assert batch is not None  # the Trainer gives this model to `compute_loss` only
        bound = inspect.signature(type(self._view).forward).bind_partial(
            self._view, *args, **kwargs
        )
        given = {name: bound.arguments[name] for name in list(bound.arguments)[1:]}
        given |= given.pop("kwargs", {})
        batch.calls += 1
        if batch.hidden is not None:
            self._check_call(batch, given)
            del given["input_ids"]
            given["inputs_embeds"] = batch.hidden
            assert self._entry is not None  # of every stage but the first
            self._entry.receive(batch.hidden)
        given.setdefault("use_cache", False)
        self._batch = None  # the model's own code may read its parameters
        batch.is_in_model = True
        try:
            with self._collectives.suspended():
                output = type(self._view).forward(self._view, **given)
        finally:
            self._batch = batch
        batch.is_in_model = False
        batch.output = output
        tensors = output.values() if isinstance(output, Mapping) else output
        self._outputs |= {tensor.grad_fn for tensor in tensors if isinstance(tensor, torch.Tensor)}
        return output

    def _check_call(self, batch: _MicroBatch, given: Mapping[str, Any]) -> None:
        if batch.calls > 1:
            raise self._unlike_one_process("calls the model twice")
        passed_before = [name for name in batch.inputs if name in self._keywords - {*_LABELS}]
        tensors = {name for name, value in given.items() if isinstance(value, torch.Tensor)}
        for name in {*passed_before, *tensors} - {*_LABELS, "num_items_in_batch"}:
            if not _is_same(given.get(name), batch.inputs.get(name)):
                raise self._unlike_one_process(
                    f"calls the model with another {name} than that of the batch"
                )

    def _unlike_one_process(self, what: str) -> UsageError:
        return UsageError(
            f"compute_loss {what}, but the earlier pipeline stages have computed the batch, once: set "
            f"{spelled('pp_size', 1)}"
        )

    def _reads_weights(self) -> UsageError:
        return UsageError(
            "compute_loss reads the weights of the model, of which a rank of this layout has a part: leave such a "
            "term out of the loss (weight_decay is one that any layout has), or train in one process"
        )

    def _guarded(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """Have reading all weights inside of `compute_loss` refused where this rank has a part of them. The first one
        may be read, since that is how code learns the device or the type of a model."""

        @functools.wraps(read)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if not (self.is_computing and self._is_split):
                return read(*args, **kwargs)
            if read.__name__ == "state_dict":
                raise self._reads_weights()
            return self._first_of(read(*args, **kwargs))

        return guarded

    def _first_of(self, items: Iterator[Any]) -> Iterator[Any]:
        for number, item in enumerate(items):
            if number:
                raise self._reads_weights()
            yield item

    def _check_loss(self, loss: torch.Tensor) -> None:
        """Make sure that a loss depends on the weights through the model's outputs only, or on those of the head."""
        if self._pp == 1:
            return
        read = _leaves(loss, self._outputs)
        head = getattr(self._view.get_output_embeddings(), "weight", None)
        own = {id(parameter) for _, parameter in self._view.named_parameters()} if read else set()
        if any(id(leaf) in own and leaf is not head for leaf in read):
            raise self._reads_weights()


def _is_same(given: Any, own: Any) -> bool:
    if not (isinstance(given, torch.Tensor) and isinstance(own, torch.Tensor)):
        return given is own
    # Not by identity: in a dispatch mode a tensor that moves to the device on which it is is copied
    is_alike = (given.shape, given.dtype, given.device) == (own.shape, own.dtype, own.device)
    return is_alike and torch.equal(given, own)


def _in_own_shape(inputs: dict[str, Any], *, is_sequence_split: bool) -> dict[str, Any]:
    """Cut the padding off that was added to give all micro-batches of a step one shape."""
    inputs = dict(inputs)
    own = inputs.pop(OWN_SHAPE, None)
    if own is None:
        return inputs
    rows, length = own[0].tolist()  # on the CPU
    if is_sequence_split and inputs["labels"].shape[1] != length:
        raise UsageError(
            f"compute_loss would see padding: sequences of {length} tokens are padded to be split over the ranks of "
            f"{spelled('tp_size')}; leave {spelled('sequence_parallel')} out, or have the data collator pad all of "
            "them to one length that the ranks divide"
        )
    until = None if is_sequence_split else length
    return {
        name: _cut(value, rows, until) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }


def _cut(value: torch.Tensor, rows: int, length: int | None) -> torch.Tensor:
    return value[:rows, :length] if value.ndim > 1 else value[:rows]


def _leaves(loss: torch.Tensor, stop: set[Any]) -> list[torch.Tensor]:
    """Return the leaves that a loss depends on otherwise than through the nodes of `stop`."""
    found = []
    nodes = [loss.grad_fn]
    seen = {None, *stop}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of torch's AccumulateGrad
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        nodes.extend(next_node for next_node, _ in node.next_functions)  # type: ignore[union-attr]
    return found


class _SameStage(TorchDispatchMode):
    """Refuses collectives in which a rank of another stage would have to take part, and does not."""

    def __init__(self, ranks: frozenset[int], pp: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._ranks = ranks
        self._pp = pp

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Have the model's own operations run without this mode, which would cost time."""
        modes = dispatch_modes()
        if not modes or modes[-1] is not self:
            yield
            return
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # of torch
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]  # of torch

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace in _COLLECTIVES:
            groups = [group for group in map(group_of, args) if group is not None]
            if any(
                not self._ranks.issuperset(dist.get_process_group_ranks(group)) for group in groups
            ):
                name = func.name().split("::")[1].split(".")[0].strip("_")
                raise UsageError(
                    f"compute_loss calls a collective ({name}) over ranks of other pipeline stages, which do not run "
                    f"it: exchange after the step, in a callback, or set {spelled('pp_size', 1)} (it is {self._pp})"
                )
        return func(*args, **(kwargs or {}))
