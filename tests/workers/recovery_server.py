"""Imports everything once, then forks the ranks of supervised trainings, in place of a launcher.

`hfscale run -- python recovery_server.py launch SOCKET SPEC` asks the server that listens on SOCKET to fork the ranks,
with the environment of the supervisor, and ends as a launcher does: when a rank fails, the others receive SIGTERM, and
the exit code is 1; a SIGTERM is passed on to the ranks. A rank kills itself at the moments that the trial names.

On several nodes the spec has `local_world`, the ranks of each node, and `ports`, one for each launch.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

TERM_TO_KILL_S = 30.0
CLONE_NEWUTS = 0x04000000  # <linux/sched.h>


def take_host_name(name):
    """Give this process another host name; only root can."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(name)


def launch(address, spec):
    """Ask the server for one launch, and return its exit code."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    environ = {name: value for name, value in os.environ.items() if name.startswith("HFSCALE_")}
    spec = json.loads(Path(spec).read_text()) | {"environ": environ, "host": socket.gethostname()}
    if "local_world" in spec:
        spec["world"] = spec["local_world"] * int(environ["HFSCALE_RUN_NODES"])
        spec["first_rank"] = spec["local_world"] * int(environ["HFSCALE_RUN_NODE_RANK"])
    connection.sendall(json.dumps(spec).encode() + b"\n")
    signal.signal(signal.SIGTERM, lambda *_: connection.sendall(b"T"))
    return int(connection.makefile().readline() or 1)


def serve(address):
    """Serve launches, one after another, until the standard input ends."""
    import gc

    import deepspeed  # noqa: F401  accelerate imports it where it is installed
    import preemption_server
    import torch
    import transformers
    from ports import free_port
    from workers import shifted_clock

    class KillingPhases(preemption_server.Phases):
        """Kills its own process at the moments of the trial."""

        def __init__(self, spec, rank, reached, sent):
            super().__init__(spec, rank, reached, sent)
            restarts = int(os.environ["HFSCALE_RUN_RESTARTS"])
            self.kill = next((k for k in spec["kills"] if [k["restart"], k["rank"]] == [restarts, rank]), None)

        def enter(self, name):
            super().enter(name)
            kill = self.kill
            if kill is not None and [kill["phase"], kill["at"]] == [name, self.counts[name]]:
                number = signal.Signals[kill.get("signal", "SIGKILL")]
                threading.Timer(kill["after_s"], os.kill, (os.getpid(), number)).start()

    def fork_ranks(spec):
        port = spec["ports"][int(spec["environ"]["HFSCALE_RUN_RESTARTS"])] if "ports" in spec else free_port()
        first, pids = spec.get("first_rank", 0), []
        for rank in range(first, first + spec.get("local_world", spec["world"])):
            pid = os.fork()
            if pid == 0:
                if spec["host"] != socket.gethostname():
                    take_host_name(spec["host"])
                disturb(spec)
                preemption_server.Phases = KillingPhases
                preemption_server.SavingTrainer = transformers.Trainer  # one that overrides methods has no snapshots
                preemption_server.become_rank(
                    spec | {"env": spec["env"] | spec["environ"]}, rank, port, reached=-1, sent=-1
                )
            pids.append(pid)
        return pids

    def disturb(spec):
        """Have the date follow a file, and each flush of a file take long while another file exists."""
        if "clock" in spec:
            shifted_clock.install(spec["clock"])
        if "slow" in spec:
            slow, flush = Path(spec["slow"]), os.fsync
            os.fsync = lambda descriptor: (time.sleep(0.3 if slow.exists() else 0.0), flush(descriptor))[1]

    def wait(pids, connection):
        """Wait for all ranks as a launcher does; they are killed if the process that asked for them has ended."""
        codes, terminated_at, is_there = {}, None, True
        while len(codes) < len(pids):
            for pid in set(pids) - set(codes):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            if any(codes.values()) and terminated_at is None:
                terminated_at = time.monotonic()
                end(set(pids) - set(codes), signal.SIGTERM)
            if terminated_at is not None and time.monotonic() - terminated_at > TERM_TO_KILL_S:
                end(set(pids) - set(codes), signal.SIGKILL)
            if select.select([connection], [], [], 0.02)[0]:
                told = is_there and connection.recv(1)
                is_there, terminated_at = bool(told), terminated_at or time.monotonic()
                end(set(pids) - set(codes), signal.SIGTERM if is_there else signal.SIGKILL)
                time.sleep(0.02)
        return int(any(codes.values()))

    def end(pids, number):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, number)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    torch.set_num_threads(1)
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    while True:
        connection, _ = listener.accept()
        spec = json.loads(connection.makefile("rb", buffering=0).readline())
        if os.fork() == 0:  # one process for each launcher, of which there are several at a time on several nodes
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = wait(fork_ranks(spec), connection)
            with suppress(OSError):
                connection.sendall(b"%d\n" % code)
            os._exit(0)
        connection.close()


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    sys.exit(launch(*sys.argv[2:]) if sys.argv[1] == "launch" else serve(sys.argv[2]))
