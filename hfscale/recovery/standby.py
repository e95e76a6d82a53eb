"""A launcher that has imported what a training needs, and waits until it is needed.

`hfscale run` starts `python -m hfscale.recovery.standby FD COMMAND` when the ranks have completed their first step. It
imports the packages that a rank has recorded (`RunMemory.write_imports`). After a failure it receives the
environment of the next launch from the file descriptor, and becomes the launcher: `accelerate launch` or `torchrun`
run in this process, and fork the ranks (torchrun's `--run-path --start-method fork`) instead of starting interpreters
that import everything again. It must not initialize CUDA, which a forked process cannot use: modules that do so when
they are imported, such as bitsandbytes and what imports it, are left to the ranks.
"""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from hfscale.core.final_errors import PREEMPTED
from hfscale.core.logging import print_line
from hfscale.core.run_memory import RunMemory
from hfscale.recovery.children import send

_RANK = Path(__file__).parent / "standby_rank.py"
# Of launch/multinode: ends with the exit code of the training, and takes SIGUSR1
_WRAPPER = "exit_code.py"
# Whether there are GPUs is asked without initializing CUDA
_WITHOUT_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# Modules that open a CUDA context, separated by commas; those of each attempt end with a semicolon
_LEFT_OUT = "HFSCALE_STANDBY_LEFT_OUT"
_MAX_ATTEMPTS = 8
_MODULES = {
    "accelerate.commands.launch": ["accelerate", "launch"],
    "torch.distributed.run": ["torchrun"],
}


class Standby:
    """The standby process of one supervisor, or none.

    Args:
        command (`Sequence[str]`): the command of the run.
        memory (`RunMemory`): the folder of the run.
        prepare (`Callable`): what the process runs before its program.
    """

    def __init__(
        self, command: Sequence[str], memory: RunMemory, prepare: Callable[[], None]
    ) -> None:
        self._memory = memory
        self._launcher = launcher_of(command)
        self._prepare = prepare
        self._process: subprocess.Popen[bytes] | None = None
        self._write: int | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process; None if there is none."""
        return self._process.pid if self._process is not None else None

    def start(self, environ: Mapping[str, str]) -> None:
        """Start the process, unless there is one, or no rank has recorded its imports, or the command has no launcher.

        Args:
            environ (`Mapping[str, str]`): the environment variables of the running launch.
        """
        imports = self._memory.read_imports()
        if self._launcher is None or self._process is not None or imports is None:
            return
        read, self._write = os.pipe()
        self._process = subprocess.Popen(  # noqa: S603 - this program
            [sys.executable, "-m", __name__, str(read), *self._launcher],
            env={**environ, **imports["environ"], **_WITHOUT_CUDA},
            pass_fds=[read],
            start_new_session=True,
            preexec_fn=self._prepare,
        )
        os.close(read)

    def become_launcher(self, environ: Mapping[str, str]) -> "subprocess.Popen[bytes] | None":
        """Have the process become the launcher, and return it; None if there is no such process.

        Args:
            environ (`Mapping[str, str]`): the environment variables of the launch.
        """
        if self._process is None or self._process.poll() is not None:
            self.end()
            return None
        assert self._write is not None
        with suppress(BrokenPipeError), os.fdopen(self._write, "w") as file:
            json.dump(dict(environ), file)
        # One that was stopped would never become the launcher
        send(self._process.pid, signal.SIGCONT)
        process = self._process
        self._process = self._write = None
        return process

    def end(self) -> None:
        """End the process, if there is one."""
        if self._process is not None and self._write is not None:
            self._process.kill()
            self._process.wait()
            os.close(self._write)
        self._process = self._write = None


def is_wrapped(command: Sequence[str]) -> bool:
    """Return whether a command is `launch/multinode/exit_code.py`, which handles SIGUSR1 and returns exit codes.

    Args:
        command (`Sequence[str]`): a command.
    """
    return len(command) > 2 and Path(command[1]).name == _WRAPPER


def launcher_of(command: Sequence[str]) -> list[str] | None:
    """Return the command as it begins with `accelerate launch` or `torchrun`; None if it begins with something else.

    `exit_code.py` stays as the first word. A launcher of another Python installation is something else.

    Args:
        command (`Sequence[str]`): a command, such as `["python", "-m", "torch.distributed.run", "train.py"]`.
    """
    program = shutil.which(command[0])
    if program is None or Path(program).parent.resolve() != Path(sys.executable).parent.resolve():
        return None
    name = Path(program).name
    rest = list(command[1:])
    if name.startswith("python") and rest[:1] == ["-m"] and rest[1:2] and rest[1] in _MODULES:
        return _MODULES[rest[1]] + rest[2:]
    if name.startswith("python") and is_wrapped(command):
        launcher = launcher_of(rest[1:])
        return [_WRAPPER, *launcher] if launcher is not None else None
    if name == "torchrun" or (name == "accelerate" and rest[:1] == ["launch"]):
        return [name, *rest]
    return None


def main(descriptor: int, launcher: list[str]) -> int:
    """Import what the ranks need, wait, and become the launcher.

    Args:
        descriptor (`int`): the file descriptor from which the environment of the launch is read.
        launcher (`list[str]`): what `launcher_of` returned.

    Returns:
        `int`: the exit code.
    """
    memory = RunMemory.of_environment()
    imports = memory.read_imports() if memory is not None else None
    left_out = os.environ.pop(_LEFT_OUT, "")
    names = left_out.replace(";", ",").split(",")
    opened = _import_silently(imports["modules"] if imports is not None else [], names)
    if opened:
        _begin_again(left_out, opened, [str(descriptor), *launcher])
    gc.collect()
    gc.freeze()  # the ranks share the memory of what was imported
    with os.fdopen(descriptor) as file:
        text = file.read()
    if not text:  # the supervisor has ended
        return 0
    os.environ.clear()
    os.environ.update(json.loads(text))
    # PET: defaults of torchrun's flags
    os.environ.update(PET_RUN_PATH="1", PET_START_METHOD="fork", **_WITHOUT_CUDA)
    if launcher[0] == _WRAPPER:
        return exit_code_of(lambda: run_launcher(launcher[1:]))
    run_launcher(launcher)
    return 0


def _begin_again(left_out: str, opened: Sequence[str], words: Sequence[str]) -> None:
    """Replace this process by one that does not import some modules: a CUDA context cannot be closed.

    Args:
        left_out (`str`): the modules of earlier attempts, as in the environment variable.
        opened (`Sequence[str]`): the module that has opened a context, and the packages that came with it.
        words (`Sequence[str]`): the arguments of this program.
    """
    if left_out.count(";") >= _MAX_ATTEMPTS:
        print_line(f"hfscale run: no standby launcher: {opened[0]} opens a CUDA context too")
        sys.exit(1)
    print_line(
        f"hfscale run: importing {opened[0]} opens a CUDA context: the ranks of a restart import it themselves"
    )
    environ = os.environ | {_LEFT_OUT: f"{left_out}{','.join(opened)};"}
    os.execve(sys.executable, [sys.executable, "-m", "hfscale.recovery.standby", *words], environ)  # noqa: S606


def _import_silently(modules: Sequence[str], left_out: Sequence[str] = ()) -> list[str]:
    """Import modules; what they print was already printed by the ranks.

    They are modules of installed packages: the first folder of `sys.path`, which is the working directory here, is not
    searched, since a folder in it may have the name of a package.

    Args:
        modules (`Sequence[str]`): their names, in the order in which a rank has imported them.
        left_out (`Sequence[str]`): modules and packages that are not imported.

    Returns:
        `list[str]`: if an import has initialized CUDA, its module and the packages that came with it; otherwise none.
    """
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    first = sys.path.pop(0)
    opened = _import_until_cuda([name for name in modules if not _is_in(name, left_out)])
    sys.path.insert(0, first)
    sys.stdout.flush()
    sys.stderr.flush()
    for number, copy in zip((1, 2), kept, strict=True):
        os.dup2(copy, number)
        os.close(copy)
    os.close(nowhere)
    return opened


def _is_in(name: str, packages: Sequence[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in packages)


def _import_until_cuda(modules: Sequence[str]) -> list[str]:
    for name in modules:
        packages = _packages()
        with suppress(Exception):  # it is imported, or fails, when the script imports it
            import_module(name)
        if _has_cuda_context():
            return [name, *sorted(_packages() - packages)]
    return []


def _packages() -> set[str]:
    return {name.partition(".")[0] for name in sys.modules}


def _has_cuda_context() -> bool:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def run_launcher(launcher: Sequence[str]) -> None:
    """Run `accelerate launch` or `torchrun` in this process, with ranks that begin in `standby_rank`.

    Args:
        launcher (`Sequence[str]`): the launcher and its arguments, without `exit_code.py`.
    """
    if launcher[0] == "accelerate":
        from accelerate.commands.launch import launch_command, launch_command_parser

        parser = launch_command_parser()
        run = launch_command
        arguments = launcher[2:]
    else:
        from torch.distributed.run import get_args_parser
        from torch.distributed.run import run as run_torchrun

        parser = get_args_parser()
        run = run_torchrun
        arguments = launcher[1:]
    args = parser.parse_args(arguments)
    if args.no_python:
        os.environ["PET_RUN_PATH"] = "0"
        args.run_path = False
    else:
        script = ["-m", args.training_script] if args.module else [args.training_script]
        args.training_script_args = [*script, *args.training_script_args]
        args.training_script = str(_RANK)
        args.module = False
    run(args)


def exit_code_of(run: Callable[[], None]) -> int:
    """Run a launcher, and return the exit code that `launch/multinode/exit_code.py` returns.

    Args:
        run (`Callable[[], None]`): the launcher.
    """
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run()
    except ChildFailedError as error:
        print_line(str(error))
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 130 if error.sigval == signal.SIGINT else PREEMPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
