"""A process without torch that acts as one rank: `supervised.py HOW`, where HOW says how the first launches end."""

import contextlib
import ctypes
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil

from hfscale.core import rank_link
from hfscale.core.rank_link import connect
from hfscale.errors import HealthError, UsageError
from hfscale.islands.client import start_rendezvous

how, folder = sys.argv[1], Path(sys.argv[2])
restarts = int(os.environ["HFSCALE_RUN_RESTARTS"])
supervisor = psutil.Process().parent().parent()
child = os.fork() if how in ("late", "own", "library") else None
if child == 0 and how in ("own", "library"):
    connect(os.environ | {"RANK": "1"}).ending(1, reason="hang: rank 0 does not answer", hosts=["node-b"])
    os._exit(1)
if child == 0:  # another rank, which is preempted and ends before the supervisor has read what it says
    supervisor.suspend()
    other = connect(os.environ | {"RANK": "1"})
    other.say("training", step=0)
    other.ending(75)
    os._exit(75)
if child is not None:
    os.waitpid(child, 0)
    supervisor.resume()
link = connect()
link.training(restarts)
step = 5 if how == "same-step" else restarts + 1
link.progressed(step, step - 1)
if how == "same-step":
    link.memory.write_samples(0, step, [*range(7, 50), "a"])
    link.memory.write_samples(1, step - 1, [3])  # of another step
if how == "garbage":
    (link.memory.folder / "failure.json").mkdir(exist_ok=True)  # it cannot be written
    link._socket.sendall(b'{"event": "ending"')
    link.say("stepped")
if how == "leave":  # a process that the supervisor has to end
    argv = [sys.executable, "-c", "import time; time.sleep(600)", "left-behind"]
    subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
if how == "rendezvous" and restarts == 0:
    start_rendezvous(("127.0.0.1", int((folder / "port").read_text())))
with (folder / "launches").open("a") as file:
    file.write(f"{link.memory.folder} {os.getpid()}\n")
if how == "removed" and restarts == 0:  # the machine clears its memory while the training runs
    shutil.rmtree(link.memory.folder)
    until = time.monotonic() + 60
    while not link.memory.has_progress(0) and time.monotonic() < until:
        link.progressed(7, 6)
        time.sleep(0.01)
    mode = stat.S_IMODE(link.memory.folder.stat().st_mode)
    child = os.fork()
    if child == 0:  # another rank, which starts later
        rank_link._link = None
        found = connect(os.environ | {"RANK": "1"})
        (folder / "found").write_text(f"{found is not None} {mode:o} {link.memory_losses}")
        os._exit(0)
    os.waitpid(child, 0)
if how == "wait":
    signal.signal(signal.SIGUSR1, lambda *_: (link.ending(75), os._exit(75)))
    signal.signal(signal.SIGTERM, lambda *_: ((folder / "saved").touch(), link.ending(75), os._exit(75)))
    while True:
        time.sleep(60)
if how == "health" and restarts < 2:
    link.ending_by(HealthError("bad links", hosts=["node-b", "node-c"] if restarts else ["node-b"]))
    sys.exit(1)
if how == "usage":
    error = UsageError("no such file")
    link.ending_by(error)
    sys.exit(error.exit_code)
if how == "own":  # an error of the user's own code in the first step, which the other rank takes for a hang
    raise RuntimeError("bad batch")
if how == "late":
    time.sleep(3)  # longer than the others may live after a failure
    (folder / "finished").touch()
    sys.exit(75)
if how in ("preempted", "75 as a rank"):
    sys.exit(75)
if how == "2 as a rank":  # such as argparse, or a script that has caught what is wrong
    sys.exit(2)
if how == "library":  # its own code raises RuntimeError, as torch does for a model or data that cannot work
    with contextlib.contextmanager(lambda: (yield from "ab"))():
        pass
if restarts < 2 or how == "same-step":
    if how == "crash":
        ctypes.string_at(0)
    if how == "raise":
        raise TimeoutError("bad\nluck")
    os.kill(os.getpid(), signal.SIGKILL)
link.stepped(step)
