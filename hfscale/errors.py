"""Every exception of hfscale, one tree.

    HfScaleError                       exit code 1: the thing asked for cannot be done
    ├── UsageError (ValueError)        exit code 2: what was typed or written is wrong
    │   ├── ConfigFileError            a YAML, JSON or TOML file is missing, unreadable, broken or has an unknown key
    │   ├── DataError                  a text or table to train on cannot be read as it says it is
    │   ├── LayoutError                sizes of a parallel layout, a batch or a world that do not fit together
    │   ├── UnknownHardwareError       a GPU or provider name that is in no table
    │   └── UnsupportedModelError      a model whose shape hfscale cannot work out
    ├── StrategyMismatchError          the strategy that runs is not the strategy asked for
    ├── CheckpointError                a checkpoint is incomplete, corrupt or of another kind
    ├── StorageError                   the output directory is full, read-only or gone
    ├── HealthError                    a node, a link, a rank or the training itself is sick
    └── MissingDependencyError (ImportError)   an optional package is needed and not installed

Each message is one line that names the value, the reason and the mend; the command line and the recipes print it
as it is, without a traceback, and exit with `exit_code`.
"""


class HfScaleError(Exception):
    """Base of all errors that hfscale raises on purpose."""

    exit_code = 1


class UsageError(HfScaleError, ValueError):
    """A flag, a value or a file given by the user is wrong."""

    exit_code = 2


class ConfigFileError(UsageError):
    """A configuration file is missing, unreadable, broken or holds an unknown key."""


class DataError(UsageError):
    """A file to train on is missing, unreadable, empty or not in the format its name says."""


class LayoutError(UsageError):
    """Parallel sizes, batch sizes and the number of processes do not fit together."""


class UnknownHardwareError(UsageError):
    """A GPU or provider name that stands in no table."""


class UnsupportedModelError(UsageError):
    """A model config whose architecture or keys hfscale does not know."""


class StrategyMismatchError(HfScaleError):
    """The run that started is not the run that was asked for."""


class CheckpointError(HfScaleError):
    """A checkpoint is incomplete, corrupt, or not what the run needs."""


class StorageError(HfScaleError):
    """The output directory cannot be written: full, read-only or gone."""


class HealthError(HfScaleError):
    """A node, a link, a rank or the training itself is not well enough to go on."""


class MissingDependencyError(HfScaleError, ImportError):
    """An optional package that the request needs is not installed."""
