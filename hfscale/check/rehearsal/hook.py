"""What every Python process of a watched launch command runs first, before anything of the user.

The command puts a folder with a `sitecustomize` module in front of PYTHONPATH, which calls `install`. That works under
every launcher and with every script, since environment variables reach all processes. It imports nothing but a finder:
torch, Accelerate and transformers are changed when the process imports them, and only a process that makes a process
group is watched. A `sitecustomize` of the environment itself is run too.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ADDRESS = "HFSCALE_REHEARSAL_SOCKET"
"""The variable with the path of the socket on which the command listens."""
STEPS = "HFSCALE_REHEARSAL_STEPS"
"""The variable with the number of optimizer steps."""
FOLDER = "HFSCALE_REHEARSAL_OUTPUT"
"""The variable with the folder that replaces every output directory."""
COMPARED = "HFSCALE_REHEARSAL_ACCUMULATION"
"""The variable of runs that are compared: how many times as many micro-batches a step has."""
RESUMED = "HFSCALE_REHEARSAL_CHECKPOINT"
"""The variable with the checkpoint from which a run with `ParallelTrainer` is resumed."""
LOADED = "HFSCALE_REHEARSAL_EXPORT"
"""The variable with the folder that one process loads at its end, as another run has exported it."""
SMALL = "HFSCALE_REHEARSAL_SMALL_MODEL"
"""The variable that makes models small."""
_TRACED_STEPS = (1, 2)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with each of some modules when it has been imported."""

    def __init__(self, functions: dict[str, Callable[[Any], None]]) -> None:
        self._functions = functions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        function = self._functions.pop(fullname, None)
        if function is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            function(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def install(folder: str) -> None:
    """Watch this process if it becomes a rank, and shorten its training.

    Args:
        folder (`str`): the folder whose `sitecustomize` calls this.
    """
    functions = {
        "torch.distributed.distributed_c10d": _watch_groups,
        "accelerate.state": _use_cpu,
        "transformers.training_args": _shorten_arguments,
        "transformers.trainer": _shorten_trainings,
    }
    if COMPARED in os.environ:
        # As one process without the launcher's config has
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        functions["hfscale.parallel.arguments"] = _ask_for_cases
        functions["hfscale.parallel.trainer"] = _start_parallel_trainers_equally
    if SMALL in os.environ:
        functions["transformers.modeling_utils"] = _make_models_small
    sys.meta_path.insert(0, _AfterImport(functions))
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    other = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if other is not None and other.loader is not None:
        other.loader.exec_module(importlib.util.module_from_spec(other))


def _recorder() -> Any:
    from hfscale.check.rehearsal.recorder import recorder

    return recorder(os.environ[ADDRESS])


def _watch_groups(c10d: Any) -> None:
    """Record from the moment when this process makes its first process group."""
    init, new = c10d.init_process_group, c10d.new_group

    @functools.wraps(init)
    def init_process_group(*arguments: Any, **options: Any) -> Any:
        if "RANK" in os.environ:
            _recorder()
        return init(*arguments, **options)

    @functools.wraps(new)
    def new_group(ranks: Any = None, *arguments: Any, **options: Any) -> Any:
        everyone = range(c10d.get_world_size())
        if "RANK" in os.environ:
            _recorder().new_group(
                sorted(everyone if ranks is None else ranks),
                bool(options.get("use_local_synchronization")),
            )
        return new(ranks, *arguments, **options)

    c10d.init_process_group = init_process_group
    c10d.new_group = new_group


def _use_cpu(state: Any) -> None:
    from hfscale.check.short_run import use_cpu

    use_cpu(state)


def _make_models_small(module: Any) -> None:
    from hfscale.check.small_model import make_models_small

    make_models_small(module)


def _ask_for_cases(module: Any) -> None:
    from hfscale.check.parallel_run import ask_for_cases

    ask_for_cases(module, alone="RANK" not in os.environ)


def _start_parallel_trainers_equally(module: Any) -> None:
    from hfscale.check.parallel_run import keep_results, start_parallel_trainers_equally

    start_parallel_trainers_equally(module)
    keep_results(
        module,
        Path(os.environ[FOLDER]),
        checkpoint=os.environ.get(RESUMED),
        other_export=os.environ.get(LOADED),
    )


def _shorten_arguments(module: Any) -> None:
    from hfscale.check.short_run import shorten_arguments

    accumulation = os.environ.get(COMPARED)
    shorten_arguments(
        module,
        steps=int(os.environ[STEPS]),
        output_dir=os.environ[FOLDER],
        accumulation=None if accumulation is None else int(accumulation),
        alone=accumulation is not None and "RANK" not in os.environ,
    )


def _shorten_trainings(module: Any) -> None:
    from hfscale.check.short_run import shorten_trainings

    def report(name: str, step: int) -> None:
        if "RANK" in os.environ:
            _recorder().event(name, step)

    prepare = _compare if COMPARED in os.environ else None
    shorten_trainings(module, steps=int(os.environ[STEPS]), report=report, prepare=prepare)


def _compare(trainer: Any) -> None:
    """Give a Trainer the weights that the compared run has too, and keep what it computes."""
    from hfscale.check.equal_start import start_equally
    from hfscale.check.parallel_run import PARITY, keep_cases
    from hfscale.check.short_run import keep_log
    from hfscale.trainer.strategies import Strategy
    from hfscale.why.callback import TraceCallback

    if hasattr(trainer, PARITY):
        keep_cases(trainer, Path(os.environ[FOLDER]))
        keep_log(trainer, Path(os.environ[FOLDER]))
        return
    start_equally(trainer.model)
    if not Strategy.of(trainer).engine_steps:
        trainer.add_callback(TraceCallback(_TRACED_STEPS, operations=False))
    keep_log(trainer, Path(os.environ[FOLDER]))
