"""Overlap of the exchange of tokens for experts with computation, in schedules that run two passes as a pair.

DualPipeV pairs a forward pass in one stage of a rank with a backward pass of another micro-batch in its other stage
(DeepSeek-V3, arXiv 2412.19437, section 3.2.1). torch runs the two one after the other. Here they take turns: a pass
starts an exchange and, before it waits for the result, lets the other one compute up to its next exchange.

```
backward | C' starts |               | experts  D' starts |            | attention  C' starts |
forward  |           | attention  D  |                    | experts  C |                      | attention  D ...
```

D: tokens are sent to the ranks of their experts; C: the results are sent back; D', C': their gradients. Only one pass
at a time issues operations, and the order depends only on how many exchanges the two stages have. So all ranks of a
group issue them in the same order, which collectives need, and the results are those of two separate passes.

Exchanges that are repeated to recompute activations are not overlapped: recomputation sets the state of the random
number generators, which the other pass would change.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hfscale.core.torch_internals import TorchDispatchMode, dispatch_modes, with_dispatch_modes

_OTHER = {"forward": "backward", "backward": "forward"}


class PairFailedError(RuntimeError):
    """Raised in one pass of a pair when the other one has failed."""


class Turns:
    """Lets the two passes of a pair take turns in one process.

    The forward pass runs in the thread that calls `run`, the backward pass in a thread of its own.
    """

    def __init__(self) -> None:
        self._forward_thread: int | None = None
        self._both_run = False
        self._turns: dict[str, threading.Semaphore] = {}
        self._error: BaseException | None = None

    def run(
        self, forward: Callable[[], Any], backward: Callable[[], None], device: torch.device
    ) -> Any:
        """Run a pair of passes; the backward pass has the first turn.

        Args:
            forward (`callable`): runs the forward pass.
            backward (`callable`): runs the backward pass, in another thread.
            device (`torch.device`): the device of both passes, which use the same stream.

        Returns:
            The result of the forward pass.

        Raises:
            BaseException: the error of the pass that failed first.
        """
        stream = torch.accelerator.current_stream() if device.type != "cpu" else None
        self._forward_thread = threading.get_ident()
        self._turns = {"forward": threading.Semaphore(0), "backward": threading.Semaphore(0)}
        self._both_run = True
        backward_in_modes = partial(_run_in_modes, backward, dispatch_modes())
        other_thread = threading.Thread(
            target=self._run_backward, args=(backward_in_modes, stream), daemon=True
        )
        result = None
        try:
            other_thread.start()
            self._turns["forward"].acquire()
            self._check_other()
            result = forward()
        except BaseException as error:  # raised below, when the other pass has ended too
            self._error = self._error or error
        self._end("forward")
        other_thread.join()
        self._forward_thread = None
        first_error, self._error = self._error, None
        if first_error is not None:
            raise first_error
        return result

    def _run_backward(self, backward: Callable[[], None], stream: torch.Stream | None) -> None:
        try:
            if stream is not None:
                torch.accelerator.set_stream(stream)  # sets the device, too
            backward()
        except BaseException as error:  # raised by `run`, in the other thread
            self._error = self._error or error
        self._end("backward")

    def pass_on_from(self, current: str) -> None:
        """Let the other pass compute until it passes the turn on or ends. Without a pair it returns at once.

        Args:
            current (`str`): the kind of pass that calls it, `forward` or `backward`.

        Raises:
            PairFailedError: the other pass has failed.
        """
        self._check_other()  # which may have been interrupted while it waited for its turn
        is_recomputed = current == "forward" and threading.get_ident() != self._forward_thread
        if not self._both_run or is_recomputed:
            return
        self._turns[_OTHER[current]].release()
        self._turns[current].acquire()
        self._check_other()

    def _end(self, current: str) -> None:
        """Give the turn to the other pass for good."""
        self._both_run = False
        self._turns[_OTHER[current]].release()

    def _check_other(self) -> None:
        if self._error is not None:
            raise PairFailedError("the other pass of the pair has failed")


def _run_in_modes(run: Callable[[], None], modes: Sequence[TorchDispatchMode]) -> None:
    with with_dispatch_modes(modes):
        run()


# --- the forward pass that waits for the backward pass it is paired with ---------------------------------------------


class Deferred:
    """The result of a forward pass that runs later.

    Args:
        run (`callable`): runs the pass.
    """

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run
        self.value: Any = None
        self._readers: list[Callable[[Any], None]] = []

    def when_done(self, read: Callable[[Any], None]) -> None:
        """Have a function called with the result, once there is one.

        Args:
            read (`callable`): takes the result.
        """
        self._readers.append(read)

    def finish(self, value: Any) -> None:
        """Set the result.

        Args:
            value: the result of `run`.
        """
        self.value = value
        for read in self._readers:
            read(value)


def value_of(result: Any) -> Any:
    """Return the result of a forward pass.

    Args:
        result: the result, or a `Deferred` that has it.
    """
    return result.value if isinstance(result, Deferred) else result


class Pairs:
    """Runs each forward pass that the schedule pairs together with its backward pass.

    torch calls the passes of a pair one right after the other, the forward pass first.

    Args:
        turns (`Turns`): what the exchanges of both passes call.
        actions (`Sequence`): the schedule's actions of this rank, as torch lists them.
        device (`torch.device`): the device of the stages.
    """

    def __init__(self, turns: Turns, actions: Sequence[Any], device: torch.device) -> None:
        self._turns = turns
        self._device = device
        pairs = [
            action.sub_actions for action in actions if action is not None and action.sub_actions
        ]
        self._forwards = {(forward.stage_index, forward.microbatch_index) for forward, _ in pairs}
        self._waiting: Deferred | None = None

    def has(self, stage: int, micro_batch: int) -> bool:
        """Return whether a forward pass is paired with a backward pass.

        Args:
            stage, micro_batch (`int`): which pass it is.
        """
        return (stage, micro_batch) in self._forwards

    def defer(self, run: Callable[[], Any]) -> Deferred:
        """Leave a forward pass to the backward pass that it is paired with.

        Args:
            run (`callable`): runs the forward pass.

        Returns:
            What will have its result.
        """
        self._waiting = Deferred(run)
        return self._waiting

    def run_backward(self, run: Callable[[], None]) -> None:
        """Run a backward pass, together with the forward pass that has been left to it.

        Args:
            run (`callable`): runs the backward pass.
        """
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            run()
        else:
            waiting.finish(self._turns.run(waiting.run, run, self._device))


# --- the exchange ----------------------------------------------------------------------------------------------------


class OverlappedExperts:
    """Brings tokens to the experts of a layer and the results back, as transformers' `AllToAllEP` does, and lets the
    other pass of a pair compute during each exchange. `AllToAllEP` itself waits inside of its private methods, and its
    backward pass inside of an operator of torch.

    Shapes: T = tokens of this rank, K = experts per token, H = the model's width.

    Args:
        experts (`nn.Module`): the experts that this rank keeps, whose `forward` takes tokens and numbers from 0.
        ep_mesh (`DeviceMesh`): the ranks that share the experts of the layer, each the same number.
        tp_mesh (`DeviceMesh`): the ranks that have the same tokens; each sends a part of them.
        turns (`Turns`): the turns of this process.
    """

    def __init__(
        self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, *, turns: Turns
    ) -> None:
        self._compute = experts.forward
        self._own: int = experts.num_experts  # type: ignore[assignment]  # an attribute of transformers' modules
        self._group = ep_mesh.get_group()
        self._ranks = ep_mesh.size()
        self._tp_mesh = tp_mesh
        self._turns = turns

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the experts' weighted sum for each token.

        Args:
            hidden (`torch.Tensor`): hidden states, (T, H).
            chosen (`torch.Tensor`): numbers of each token's experts, (T, K).
            weights (`torch.Tensor`): their weights, (T, K).

        Returns:
            A tensor (T, H).
        """
        tokens = hidden.shape[0]
        if self._tp_mesh.size() > 1:
            hidden, chosen, weights = (self._part(whole) for whole in (hidden, chosen, weights))
        choices = chosen.flatten()
        order = torch.argsort(choices)  # by expert, which is by rank, too
        sent, received, numbers = self._count(choices)
        rows = hidden[order // chosen.shape[1]]
        results = self._exchange(
            self._compute_rows(self._exchange(rows, sent, received), numbers), received, sent
        )
        by_choice = torch.empty_like(results).index_copy(0, order, results).view(*chosen.shape, -1)
        summed = (by_choice * weights.unsqueeze(-1)).sum(dim=1)
        return self._whole(summed, tokens) if self._tp_mesh.size() > 1 else summed

    def _count(self, choices: torch.Tensor) -> tuple[list[int], list[int], torch.Tensor]:
        """Return how many rows this rank sends to each rank and receives from each, and the own expert of each row
        that it receives."""
        counts = choices.new_zeros(self._ranks * self._own).scatter_add_(
            0, choices, torch.ones_like(choices)
        )
        counts = counts.view(self._ranks, self._own)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self._group)
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        own = torch.arange(self._own, device=choices.device).repeat(self._ranks)
        return sent, received, own.repeat_interleave(arriving.flatten(), output_size=sum(received))

    def _exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        result: torch.Tensor = _Exchange.apply(rows, sent, received, self._group, self._turns)  # type: ignore[no-untyped-call]  # of torch
        return result

    def _compute_rows(self, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Compute one expert for each row; no rows are computed as one that is left out, so that gradients flow."""
        is_empty = not len(rows)
        if is_empty:
            rows, numbers = rows.sum(dim=0, keepdim=True), numbers.new_zeros(1)
        numbers = numbers.unsqueeze(-1)
        results: torch.Tensor = self._compute(
            rows, numbers, torch.ones_like(numbers, dtype=rows.dtype)
        )
        return results[:0] if is_empty else results

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a tensor that the tensor parallel ranks share."""
        shared = DTensor.from_local(whole, self._tp_mesh, [Replicate()], run_check=False)
        return shared.redistribute(placements=[Shard(0)]).to_local()

    def _whole(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        """Gather the rows of all tensor parallel ranks, of which there are `rows`."""
        shape, stride = torch.Size([rows, part.shape[1]]), (part.shape[1], 1)
        parts = DTensor.from_local(
            part.contiguous(), self._tp_mesh, [Shard(0)], shape=shape, stride=stride
        )
        return parts.full_tensor()


def register_overlapped_exchange(turns: Turns) -> str:
    """Make `OverlappedExperts` known to transformers.

    Args:
        turns (`Turns`): the turns of this process.

    Returns:
        The name of the implementation, for `apply_expert_parallelism`.
    """
    # Absent before 5.23
    from transformers.distributed.expert_parallel import EPImplementationInterface

    name = "hfscale_overlapped"
    EPImplementationInterface.register(name, partial(OverlappedExperts, turns=turns))
    return name


class _Exchange(torch.autograd.Function):
    """Sends rows to the ranks of a group and receives theirs; meanwhile the other pass of a pair computes."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any, turns: Turns
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group, ctx.turns = sent, received, group, turns
        return _all_to_all(rows, sent, received, group, partial(turns.pass_on_from, "forward"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pass_on = partial(ctx.turns.pass_on_from, "backward")
        rows = _all_to_all(gradient, ctx.received, ctx.sent, ctx.group, pass_on)
        return rows, None, None, None, None


def _all_to_all(
    rows: torch.Tensor,
    sent: list[int],
    received: list[int],
    group: Any,
    meanwhile: Callable[[], None],
) -> torch.Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    work = dist.all_to_all_single(
        result, rows.contiguous(), received, sent, group=group, async_op=True
    )
    meanwhile()
    work.wait()
    return result
