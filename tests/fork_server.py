"""A process that imports torch, transformers, accelerate and DeepSpeed once and forks the processes that tests start.

A launch by `python -m accelerate.commands.launch` spends most of its time in imports: once for the launcher, once
more for every rank. Here Accelerate's own launcher runs in a fork of this process, with its usual config, flags and
environment; only torch's elastic agent is replaced, by forks of the same process, one per rank. `tests/fork_client.py`
is the other end of the pipe. This process reads one JSON job per line and writes one JSON line per event:

    {"id": 1, "kind": "launch", "argv": ["--config_file", …], "ranks": 1, "cwd": …, "env": {…}, "out": …, "err": …}
    {"id": 1, "pids": [123]}
    {"id": 1, "pid": 123, "code": 0}       # a negative code is the signal that ended the process
"""

import faulthandler
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ports import free_port

from hfscale.core.progress_locks import own_progress_locks

MODULES = (
    "accelerate.commands.launch",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "peft",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "transformers.trainer",
    "transformers.integrations.deepspeed",
    "transformers.models.llama.modeling_llama",
    "deepspeed.module_inject.auto_ep_layer",
    "torch.utils.cpp_extension",
    "transformers.hf_argparser",
    "rich.panel",
    "rich.table",
    "hfscale.metrics.profiler",
    "hfscale.metrics.progress",
    "hfscale.scaling",
    "hfscale.recipe.sequence_parallel",
    "hfscale.parallel.trainer",
    "hfscale.recipe.compatibility",
    "hfscale.recipe.data",
    "hfscale.recipe.entrypoint",
    "hfscale.recipe.layout",
    "hfscale.recipe.models",
    "hfscale.recipe.parsing",
    "hfscale.recipe.resume",
)
"""The modules that recipes and workers import. None of them may start a thread or choose a device on import."""
KILL_AFTER_S = 5.0
EVENTS = 3
"""File descriptor of the events: a copy of standard output, to which libraries print."""


class RunInFork(BaseException):
    """Raised in a forked process to unwind the server's stack, so that the interpreter later exits as usual."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run


def serve() -> None:
    """Start jobs and report how their processes ended, until standard input ends."""
    running: dict[int, int] = {}
    buffer = b""
    while True:
        if select.select([0], [], [], 0.02 if running else None)[0]:
            received = os.read(0, 65536)
            if not received:
                return
            buffer += received
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            job = json.loads(line)
            pids = [_fork(lambda rank=rank, job=job: _run(job, rank)) for rank in range(job["ranks"])]
            running |= dict.fromkeys(pids, job["id"])
            _send(id=job["id"], pids=pids)
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                _send(id=running.pop(pid), pid=pid, code=os.waitstatus_to_exitcode(status))


def _send(**event: Any) -> None:
    os.write(EVENTS, json.dumps(event).encode() + b"\n")


def _fork(run: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        raise RunInFork(run)
    return pid


def _run(job: dict[str, Any], rank: int) -> None:
    """Run one process of a job."""
    os.environ.clear()
    os.environ.update(job["env"])
    os.setsid()
    os.close(EVENTS)
    for descriptor, name, flags in ((0, os.devnull, os.O_RDONLY), (1, job["out"], 0), (2, job["err"], 0)):
        opened = os.open(name, flags or os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    faulthandler.register(signal.SIGUSR2, file=2)  # the client sends it to a process that hangs
    own_progress_locks()
    os.chdir(job["cwd"])
    if job["kind"] == "launch":
        _launch(job["argv"])
    else:
        if job["ranks"] > 1:
            os.environ.update(_rank_environment(rank, job["ranks"], job["port"]))
        _run_script(job["argv"])


def _launch(argv: list[str]) -> None:
    """Run `accelerate launch` with an elastic agent that forks."""
    import torch.distributed.run
    from accelerate.commands import launch

    torch.distributed.run.run = _agent
    launch.simple_launcher = _simple_launcher
    sys.argv = ["accelerate-launch", *argv]
    launch.main()


def _simple_launcher(args: Any) -> None:
    """Run the command of a single-process launch in this process, in the environment that Accelerate prepared."""
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    command, environment = prepare_simple_launcher_cmd_env(args)
    os.environ.clear()
    os.environ.update(environment)
    _run_script(command[1:])


def _agent(args: Any) -> None:
    """Do what torch's agent does on one node: start the ranks, and end them all when one has failed."""
    count, port = int(args.nproc_per_node), free_port()
    environment = dict(os.environ)  # Accelerate removes its variables when the fork unwinds its frames
    script = (["-m"] if args.module else []) + [args.training_script, *args.training_script_args]

    def rank_of(rank: int) -> Callable[[], None]:
        def run() -> None:
            os.environ.update(environment | _rank_environment(rank, count, port))
            _run_script(script)

        return run

    alive = {_fork(rank_of(rank)) for rank in range(count)}
    failed_at: float | None = None
    while alive:
        for pid in list(alive):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                alive.remove(pid)
                if status and failed_at is None:
                    failed_at = time.monotonic()
                    _signal_all(alive, signal.SIGTERM)
        if failed_at is not None and time.monotonic() - failed_at > KILL_AFTER_S:
            _signal_all(alive, signal.SIGKILL)
        time.sleep(0.01)
    if failed_at is not None:
        sys.exit(1)


def _signal_all(pids: set[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def _rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in (names | address).items()}


def _run_script(argv: list[str]) -> None:
    """Run what `python argv…` would run."""
    if argv[0] == "-u":
        argv = argv[1:]
    if argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        exec(compile(argv[1], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102  the test wrote it
        return
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0], run_name="__main__")


def _cache_cpu_info() -> None:
    """Let DeepSpeed's CPU Adam ask for the processor once: py-cpuinfo starts a process at each call."""
    if "deepspeed" not in sys.modules:
        return
    import cpuinfo

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()


if __name__ == "__main__":
    os.dup2(1, EVENTS)
    os.dup2(2, 1)
    others = os.environ.get("HFSCALE_TEST_PRELOAD")  # of tests/differential
    for module in others.split(",") if others else MODULES:
        with suppress(ImportError):  # not every environment of tests/versions can import all of them
            importlib.import_module(module)
    sys.stdout.flush()  # else each fork prints what the imports have printed
    gc.collect()
    gc.freeze()  # a fork's garbage collection then does not visit, and so copy, the imported objects
    _cache_cpu_info()
    run_next: Callable[[], None] | None = None
    try:
        serve()
    except RunInFork as forked:
        run_next = forked.run
    while run_next is not None:  # a fork of a fork arrives here too
        run = run_next
        run_next = None
        try:
            run()
        except RunInFork as forked:
            run_next = forked.run
