"""Names of torch that have no public path and that several packages use; `hfscale.core` says why."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import _C, ScriptObject, Tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._python_dispatch import is_in_torch_dispatch_mode as is_in_torch_dispatch_mode
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)

StridedShard = _StridedShard
without_dispatch_modes = _disable_current_modes
dispatch_modes = _get_current_dispatch_mode_stack
torch_bindings = _C


def version_of(tensor: Tensor) -> int:
    """Return how often operations have written a tensor in place; what is written through `.data` does not count.

    Args:
        tensor (`torch.Tensor`): a tensor that was not made in inference mode.
    """
    return tensor._version


@contextmanager
def with_dispatch_modes(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Let modes of another thread see the operations of this one, which has none.

    Args:
        modes (`Sequence[TorchDispatchMode]`): what `dispatch_modes()` returned in the other thread.
    """
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for mode in reversed(modes):
            _pop_mode(getattr(mode, "_mode_key", None))


def group_of(argument: Any) -> ProcessGroup | None:
    """Return the process group that an argument of a collective operator stands for; None if it stands for none.

    Args:
        argument: an argument of an operator of `torch.ops.c10d`, which has the group itself, or of
            `torch.ops._c10d_functional`, which has its name.
    """
    try:
        if isinstance(argument, ScriptObject):
            return ProcessGroup.unbox(argument)
        if isinstance(argument, str):
            return _resolve_process_group(argument)  # type: ignore[arg-type]  # a type of torch
    except (RuntimeError, LookupError, ValueError):
        # Another argument of the operator, such as its reduce operation
        return None
    return None


def has_saved_tensor_hooks() -> bool:
    """Return whether this thread is in `saved_tensors_hooks`, as layers are that are recomputed or offloaded."""
    return torch_bindings._autograd._top_saved_tensors_default_hooks(False) is not None
