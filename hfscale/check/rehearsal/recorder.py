"""Announces every collective of this process before it is entered.

torch sends each collective of every backend through one operator of its dispatcher (`c10d::allreduce_` and others),
whether DDP's reducer in C++, FSDP2, DeepSpeed, a DTensor or a script calls it. A kernel at the dispatch key
`BackendSelect`, which is part of every call and in every mode of autograd, sees its arguments and passes them on
unchanged; so the ranks compute what they compute without it.
"""

import functools
import json
import os
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from hfscale.check.rehearsal.entries import NEW_GROUP, Entry
from hfscale.core.launch_variables import launch_number
from hfscale.core.nested import tensors_in
from hfscale.core.torch_internals import torch_bindings

_SKIPPED = ("check_for_nan", "recv_any_source_")
_COMPARED = {
    "allreduce_": "tensors",
    "allreduce_coalesced_": "tensors",
    "broadcast_": "tensors",
    "reduce_": "tensors",
    "_allgather_base_": "input_tensor",
    "allgather_": "input_tensors",
    "allgather_coalesced_": "input_list",
    "allgather_into_tensor_coalesced_": "inputs",
    "_reduce_scatter_base_": "output_tensor",
    "reduce_scatter_": "output_tensors",
    "reduce_scatter_tensor_coalesced_": "outputs",
    "gather_": "input_tensors",
    "scatter_": "output_tensors",
    "send": "tensors",
    "recv_": "tensors",
}
"""The argument of each operator whose sizes are the same on all ranks."""
_LONGEST_STACK = 60
_KEPT = 8
"""The last results that stay in memory, so that no thread of gloo is the last to hold a tensor that Python has seen.

It would need the interpreter's lock to drop it, and `terminate` ends the process if the interpreter is at its end.
"""
_PHASES = (
    ("evaluation", ("evaluate", "evaluation_loop", "predict", "prediction_step", "on_evaluate")),
    ("save", ("_save_checkpoint", "save_model", "save_state", "save_pretrained", "on_save")),
    ("log", ("log", "_maybe_log_save_evaluate")),
    ("clipping", ("clip_grad_norm_", "_clip_grad_norm", "_get_grad_norm")),
    ("backward", ("backward", "_run_backward", "_engine_run_backward")),
    ("optimizer", ("optimizer_step",)),
    ("forward", ("training_step", "compute_loss", "_call_impl")),
    ("data", ("get_batch_samples",)),
)
"""The functions in which a phase is entered; the first phase of which one is on the stack."""
_LIBRARIES = ("transformers", "accelerate", "torch", "trl", "deepspeed")


class Recorder:
    """Announces the collectives of this rank over a socket.

    Args:
        address (`str`): the path of the socket on which the command listens.
    """

    def __init__(self, address: str) -> None:
        self.step = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._names: dict[int, dict[int, str]] = {}
        self._kept: deque[Any] = deque(maxlen=_KEPT)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._send(
            {
                "kind": "hello",
                "rank": launch_number("RANK", 0),
                "world_size": launch_number("WORLD_SIZE", 1),
                "pid": self._pid,
                "argv": sys.orig_argv,
            }
        )

    def install(self) -> None:
        """Record from now on: all operators of torch's process groups, and the error with which this process ends."""
        library = torch.library.Library("c10d", "IMPL")
        for full_name in sorted(torch_bindings._dispatch_get_all_op_names()):
            name = full_name.removeprefix("c10d::")
            if name != full_name and name not in _SKIPPED:
                operator = getattr(torch.ops.c10d, name).default
                library.impl(name, self._kernel(name, operator), "BackendSelect", with_keyset=True)
        self._library = library  # its kernels are removed with it
        shown = sys.excepthook

        def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            text = " ".join(f"{kind.__name__}: {error}".split())[:500]
            stack = [_frame_text(frame.f_code, line) for frame, line in traceback.walk_tb(trace)]
            self._send({"kind": "error", "text": text, "stack": stack})
            shown(kind, error, trace)

        sys.excepthook = report

    def event(self, name: str, step: int) -> None:
        """Report what the Trainer has done.

        Args:
            name (`str`): `step`, `log`, `evaluation`, `save` or `end of data`.
            step (`int`): optimizer steps that are complete.
        """
        self.step = step
        self._send({"kind": "event", "name": name, "step": step})

    def new_group(self, ranks: Sequence[int], only_members: bool) -> None:
        """Announce that a process group is made, which all ranks must do in the same order, as a collective of all.

        Args:
            ranks (`Sequence[int]`): the ranks of the new group.
            only_members (`bool`): whether only its ranks must make it.
        """
        world = dist.group.WORLD
        name = f"of ranks {list(ranks)}" if only_members or world is None else world.group_name
        members = tuple(ranks) if only_members else tuple(range(dist.get_world_size()))
        self._announce(name, members, NEW_GROUP, how=f"ranks {list(ranks)}")

    def _kernel(self, name: str, operator: Any) -> Callable[..., Any]:
        below = torch_bindings._dispatch_keyset_full_after(torch_bindings.DispatchKey.BackendSelect)
        positions = {
            argument.name: index for index, argument in enumerate(operator._schema.arguments)
        }

        def kernel(keyset: Any, *arguments: Any) -> Any:
            if os.getpid() == self._pid:
                self._record(
                    name,
                    {key: arguments[at] for key, at in positions.items() if at < len(arguments)},
                )
            result = operator.redispatch(keyset & below, *arguments)
            self._kept.append(result)
            return result

        return kernel

    def _record(self, name: str, arguments: Mapping[str, Any]) -> None:
        group = dist.ProcessGroup.unbox(arguments["process_group"])
        ranks = tuple(dist.get_process_group_ranks(group))
        tensors = tensors_in(arguments[_COMPARED[name]]) if name in _COMPARED else []
        how = []
        if "reduce_op" in arguments:
            how.append(dist.ReduceOp.RedOpType(arguments["reduce_op"].op()).name)
        if "root_rank" in arguments:
            how.append(f"root {ranks[arguments['root_rank']]}")
        sends, receives = _splits(name, arguments, len(ranks))
        peer = arguments.get("dst", arguments.get("src"))
        if peer is not None:
            how.append(f"tag {arguments['tag']}")
        self._announce(
            group.group_name,
            ranks,
            name.strip("_"),
            sizes=tuple(tensor.numel() for tensor in tensors),
            dtype=_dtypes(
                tensors or tensors_in(arguments.get("input", arguments.get("input_tensors", [])))
            ),
            how=" ".join(how).lower(),
            sends=sends,
            receives=receives,
            peer=None if peer is None else ranks[peer],
        )

    def _announce(self, group: str, ranks: tuple[int, ...], name: str, **fields: Any) -> None:
        frames = _frames()
        functions = [
            (frame.f_code.co_name, str(frame.f_globals.get("__name__", ""))) for frame in frames
        ]
        entry = Entry(
            group=f"{group} with ranks {', '.join(map(str, ranks))}",
            ranks=ranks,
            name=name,
            phase=_phase(functions),
            step=self.step,
            module=self._module(frames),
            stack=tuple(
                _frame_text(frame.f_code, frame.f_lineno) for frame in frames[-_LONGEST_STACK:]
            ),
            **fields,
        )
        self._send({"kind": "entry", "entry": entry.to_dict()})

    def _module(self, frames: Sequence[FrameType]) -> str:
        """Return the name of the innermost module of the model that is being computed."""
        named = [frame.f_locals.get("self") for frame in frames if frame.f_code is _CALL]
        modules = [module for module in named if isinstance(module, torch.nn.Module)]
        if not modules:
            return ""
        root, innermost = modules[0], modules[-1]
        names = self._names.get(id(root))
        if names is None or id(innermost) not in names:
            names = {id(module): name for name, module in root.named_modules()}
            self._names[id(root)] = names
        return names.get(id(innermost), "").removeprefix("module.") or type(innermost).__name__

    def _send(self, message: Mapping[str, Any]) -> None:
        if os.getpid() != self._pid:
            return
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            self._socket.sendall(line)


_CALL = torch.nn.Module._call_impl.__code__


def _frames() -> list[FrameType]:
    """The frames of this thread, the innermost last, without those of this module and of the import system."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _frame_text(code: CodeType, line: int) -> str:
    return f"{Path(code.co_filename)}:{line} in {code.co_name}"


def _phase(functions: Sequence[tuple[str, str]]) -> str:
    """Return the phase of the training to which a stack belongs, from its functions and their modules."""
    of_libraries = {name for name, module in functions if module.partition(".")[0] in _LIBRARIES}
    return next((phase for phase, names in _PHASES if of_libraries.intersection(names)), "script")


def _dtypes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))


def _splits(
    name: str, arguments: Mapping[str, Any], ranks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the elements that an all-to-all sends to each rank and receives from each."""
    if name == "alltoall_":
        sent, received = (
            tensors_in(arguments["input_tensors"]),
            tensors_in(arguments["output_tensors"]),
        )
        return tuple(tensor.numel() for tensor in sent), tuple(
            tensor.numel() for tensor in received
        )
    if name == "alltoall_base_":
        rows = _rows(arguments["input"], arguments["input_split_sizes"], ranks)
        return rows, _rows(arguments["output"], arguments["output_split_sizes"], ranks)
    return (), ()


def _rows(tensor: torch.Tensor, split_sizes: Sequence[int], ranks: int) -> tuple[int, ...]:
    if not split_sizes:
        return (tensor.numel() // ranks,) * ranks
    row = tensor[0].numel() if tensor.shape[0] else 1
    return tuple(size * row for size in split_sizes)


@functools.cache
def recorder(address: str) -> Recorder:
    """Return the recorder of this process, which records from the first call on.

    Args:
        address (`str`): the path of the socket on which the command listens.
    """
    made = Recorder(address)
    made.install()
    return made
