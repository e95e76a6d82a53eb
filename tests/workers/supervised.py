"""A process without torch that acts as one rank: `supervised.py HOW`, where HOW says how the first launches end."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from hfscale.core.rank_link import connect
from hfscale.errors import HealthError, UsageError
from hfscale.islands.client import start_rendezvous

how, folder = sys.argv[1], Path(sys.argv[2])
restarts = int(os.environ["HFSCALE_RUN_RESTARTS"])
supervisor = psutil.Process().parent().parent()
child = os.fork() if how == "late" else None
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
link.progress.write(step, step - 1)
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
if how == "wait":
    signal.signal(signal.SIGUSR1, lambda *_: (link.ending(75), os._exit(75)))
    while True:
        time.sleep(60)
if how == "health" and restarts < 2:
    link.ending_by(HealthError("bad links", hosts=["node-b", "node-c"] if restarts else ["node-b"]))
    sys.exit(1)
if how == "usage":
    error = UsageError("no such file")
    link.ending_by(error)
    sys.exit(error.exit_code)
if how == "late":
    time.sleep(3)  # longer than the others may live after a failure
    (folder / "finished").touch()
    sys.exit(75)
if how == "preempted":
    sys.exit(75)
if restarts < 2 or how == "same-step":
    if how == "crash":
        ctypes.string_at(0)
    if how == "raise":
        raise RuntimeError("bad\nluck")
    os.kill(os.getpid(), signal.SIGKILL)
link.stepped(step)
