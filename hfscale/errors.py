"""All exceptions of hfscale.

    HfScaleError                       exit code 1: the request cannot be carried out
    ├── UsageError (ValueError)        exit code 2: a flag, value or file of the user is wrong
    │   ├── ParameterError             a parameter has a value that it cannot have
    │   ├── ConfigFileError            a YAML, JSON or TOML file is missing, unreadable, invalid or has an unknown key
    │   ├── DataError                  training data is missing, unreadable, empty or not in the format of its name
    │   ├── OutputDirInUseError        exit code 75: another machine still holds the output directory; try again later
    │   ├── LayoutError                parallel sizes, batch sizes and the number of processes do not fit together
    │   ├── UnknownHardwareError       the name of a GPU or provider is in no table
    │   └── UnsupportedModelError      the architecture or a key of a model config is not supported
    ├── StrategyMismatchError          the strategy that would run is not the one that was asked for
    ├── CheckpointError                a checkpoint is incomplete, corrupt or not what the run needs
    │   └── CheckpointChangedError     checkpoints have come or gone while a training was starting
    ├── StorageError                   a directory or store cannot be written or read
    ├── HealthError                    a node, a link, a rank or the training itself is not healthy
    └── MissingDependencyError (ImportError)   exit code 2: a package is needed that is not installed or too old

Each message is one line with what is wrong, the value, and how to fix it. It is printed without a traceback where such
an error ends a program, which exits with `exit_code`.
"""

from collections.abc import Iterable
from typing import Any

from hfscale.core.error_lines import show_in_one_line
from hfscale.core.spelling import spelled, spelled_value

_OF_WORKER = "Caught "
"""How torch begins the message of an error that it brings from a worker into the training's process."""


class HfScaleError(Exception):
    """Base class of all errors of hfscale."""

    exit_code = 1
    may_pass = False
    """Whether the same command can succeed when it is started again at once."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        show_in_one_line(HfScaleError)


class UsageError(HfScaleError, ValueError):
    """A flag, a value or a file of the user is wrong."""

    exit_code = 2

    def __init__(self, *args: object) -> None:
        super().__init__(*map(_without_worker, args))


def _without_worker(message: object) -> object:
    """Return the message of an error that a worker of a `DataLoader` has raised: torch adds the worker's traceback."""
    if not (isinstance(message, str) and message.startswith(_OF_WORKER)):
        return message
    return message.strip().rpartition("Error: ")[2]


class ParameterError(UsageError):
    """A parameter has a value that it cannot have.

    The message names it as its caller wrote it (`hfscale.core.spelling`).

    Args:
        parameter (`str`): the name of the parameter.
        value (`object`): its value.
        rule (`str`): which values it may have, or what to do.
    """

    def __init__(self, parameter: str, value: object, rule: str) -> None:
        super().__init__(parameter, value, rule)
        self.parameter = parameter
        self.value = value
        self.rule = rule
        self._message = f"{spelled(parameter)} is {spelled_value(value)}: {rule}"

    def __str__(self) -> str:
        return self._message


class ConfigFileError(UsageError):
    """A configuration file is missing, unreadable, invalid or has an unknown key."""


class DataError(UsageError):
    """Training data is missing, unreadable, empty or not in the format of its name."""


class OutputDirInUseError(UsageError):
    """Another machine still holds the lock of the output directory: the same command can succeed later."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h, as after a preemption


class LayoutError(UsageError):
    """Parallel sizes, batch sizes and the number of processes do not fit together."""


class UnknownHardwareError(UsageError):
    """The name of a GPU or provider is in no table."""


class UnsupportedModelError(UsageError):
    """The architecture or a key of a model config is not supported."""


class StrategyMismatchError(HfScaleError):
    """The strategy or the ranks of a run are not those that were asked for."""


class CheckpointError(HfScaleError):
    """A checkpoint is incomplete, corrupt, or not what the run needs."""


class CheckpointChangedError(CheckpointError):
    """A checkpoint has come into the store, or files of one have gone, while a training was starting."""

    may_pass = True


class StorageError(HfScaleError):
    """A directory or store cannot be written or read: full, read-only, missing or unreachable."""


class HealthError(HfScaleError):
    """A node, a link, a rank or the training itself is not healthy enough to continue.

    Args:
        *args (`Any`): those of `Exception`.
        hosts (`Iterable[str]`): the hosts that are to blame, if they are known.
    """

    may_pass = True  # a relaunched run resumes before the fault, and a node can recover

    def __init__(self, *args: Any, hosts: Iterable[str] = ()) -> None:
        super().__init__(*args)
        self.hosts = tuple(hosts)


class MissingDependencyError(HfScaleError, ImportError):
    """A package that the request needs is not installed, or an earlier version of it is."""

    exit_code = 2  # another start does not install it, so a scheduler must not try again
