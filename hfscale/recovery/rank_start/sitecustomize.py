"""Python imports this module when a process starts (the `site` module): `hfscale run` has its folder in PYTHONPATH.

A rank whose script ends before it imports hfscale, by a wrong flag or a missing package, reports itself as it ends, so
that the supervisor knows that a restart cannot help. The `sitecustomize` of the user or of the system, which this one
hides, is imported afterwards.
"""

import atexit
import importlib.machinery
import importlib.util
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib costs each process 10 ms


_IN_RANK = "HFSCALE_RUN_IN_RANK"
"""`rank_start.IN_RANK`; hfscale is not imported here."""


def _report() -> None:
    if "hfscale" in sys.modules:  # it reports by itself
        return
    try:
        from hfscale.core.rank_link import report_uncaught_error
    except ImportError:  # the launcher uses an environment without hfscale
        return
    report_uncaught_error()


def _import_hidden() -> None:
    sys.path[:] = [path for path in sys.path if path != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec(__name__, sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[__name__] = module
    spec.loader.exec_module(module)


# What a rank starts, such as torch's compile workers, can outlive it, and must not speak for it
if "RANK" in os.environ and _IN_RANK not in os.environ:
    os.environ[_IN_RANK] = "1"
    atexit.register(_report)
_import_hidden()
