"""Which errors come back when the same command is started again, so that nothing should start it."""

import dis
import gc
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from hfscale.core.disk_errors import causes_of, storage_error
from hfscale.errors import HfScaleError

PREEMPTED = 75
"""Exit code of a preempted process (EX_TEMPFAIL of sysexits.h)."""
_ERRORS_OF_CODE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""Errors of a script, a model or data, whichever code raises them."""
_ERRORS_OF_MACHINES = (OSError, MemoryError, EOFError)
"""Errors of a machine, a network or a store, also of the hub and of `requests`: they can pass."""
_OF_DEVICES = ("torch", "torch._C", "torch.cuda", "torch.distributed")
"""Modules of the errors that torch raises for a device or a collective; deeper ones are of compilers."""
_FOLDERS_OF_DEVICES = tuple(f"torch{os.sep}{name}{os.sep}" for name in ("cuda", "distributed"))
_TEXTS_OF_DEVICES = ("CUDA", "CUDNN", "CUBLAS", "NCCL", "GLOO", "NVML")
"""What the plain RuntimeErrors of a device or a collective have in their text, in capitals."""
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_RAISE = dis.opmap["RAISE_VARARGS"]
_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
_NOT_OF_USER = (
    "<frozen",
    *(f"{path}{os.sep}" for path in (*_INSTALLED, Path(__file__).parent.parent)),
)
"""How the names of files begin whose code is not the user's."""


def is_final(error: BaseException) -> bool:
    """Return whether an error comes back when the same command is started again, whenever it came.

    That is so for a full or forbidden disk, and for all errors of hfscale except those that may pass, such as
    `HealthError`, and those with exit code 75. The errors that have caused it (`raise ... from`) count too.

    Args:
        error (`BaseException`): what ended a rank.
    """
    for cause in _stated_causes(error):
        if isinstance(cause, HfScaleError):
            return not cause.may_pass and cause.exit_code != PREEMPTED
    return isinstance(error, Exception) and storage_error(error) is not None


def is_of_user(error: BaseException) -> bool:
    """Return whether a script, a model or data has raised an error, and not a machine, a network or a peer.

    Before the first step such an error comes back at each start. An error of a type that libraries raise for anything,
    such as RuntimeError, is the user's own where a `raise` of the user's own code has raised it.

    Args:
        error (`BaseException`): what ended a rank.
    """
    causes = list(causes_of(error))
    if not all(map(_can_be_of_user, causes)):
        return False
    return isinstance(error, _ERRORS_OF_CODE) or _is_raised_by_user(error.__traceback__)


def recurring_error(error: BaseException) -> str:
    """Return type, text and place of an error, by which it is known again; "" of an error that can pass.

    A library raises RuntimeError and its own types for a model or data that cannot work as well as for a machine. An
    error that ends two launches at the same place with the same text, before any step, comes back at each start. Those
    of a machine, a network, a device or a collective are not among them, whose peer or device may be back later.

    Args:
        error (`BaseException`): what ended a rank.
    """
    if not all(map(_can_recur, causes_of(error))):
        return ""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    if any(folder in place for folder in _FOLDERS_OF_DEVICES):
        return ""
    text = _ADDRESS.sub("0x", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:500]} at {place}"


def _can_recur(error: BaseException) -> bool:
    if not isinstance(error, Exception) or isinstance(error, (*_ERRORS_OF_MACHINES, HfScaleError)):
        return False
    is_of_device = type(error).__module__.startswith(_OF_DEVICES[2:])
    if is_of_device or type(error).__module__ in _OF_DEVICES:
        return False
    text = str(error).upper()
    return not any(name in text for name in _TEXTS_OF_DEVICES)


def _can_be_of_user(error: BaseException) -> bool:
    if type(error).__module__.partition(".")[0] == "torch":  # of a device or a collective
        return False
    is_known = isinstance(error, (*_ERRORS_OF_MACHINES, HfScaleError))
    return isinstance(error, Exception) and not is_known


def _is_raised_by_user(trace: TracebackType | None) -> bool:
    """Return whether the innermost frame is of no installed package, and a `raise` of it has raised the error."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    is_of_package = code.co_filename.startswith(_NOT_OF_USER)
    return not is_of_package and code.co_code[trace.tb_lasti] == _RAISE


def _stated_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then the one that it was raised from, then the one that this was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def has_optimizer() -> bool:
    """Return whether an optimizer of torch exists in this process, so that it may have trained."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    return any(issubclass(type(one), torch.optim.Optimizer) for one in gc.get_objects())
