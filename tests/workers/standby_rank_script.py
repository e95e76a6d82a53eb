"""Run by a launcher in the tests of `hfscale.recovery.standby`: records what this process is, and ends as it is told.

standby_rank_script.py FOLDER HOW: the first launch kills rank 0 when each node has a standby process.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
from importlib import import_module
from pathlib import Path

import psutil

from hfscale.core.rank_link import connect

folder, how = Path(sys.argv[1]), sys.argv[2]
restarts, rank = int(os.environ["HFSCALE_RUN_RESTARTS"]), int(os.environ["RANK"])
link = connect()
link.training(restarts)
link.progressed(restarts + 1, restarts)
threads = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
signals = [number.name for number in signal.valid_signals() if callable(signal.getsignal(number))]
seen = {
    "argv": sys.argv,
    "path": sys.path[0],
    "file": __file__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "signals": signals,
    "launcher": psutil.Process().parent().cmdline(),
    "threads": threads,
    "omp": os.environ.get("OMP_NUM_THREADS"),
    "flags": sorted(name for name in os.environ if name.startswith("PET_")),
    "token": "HFSCALE_RUN_TOKEN" in os.environ,
}
(folder / f"seen-{restarts}-{rank}.json").write_text(json.dumps(seen))
if restarts == 0:
    if os.environ["LOCAL_RANK"] == "0":
        import_module("torch.distributed.run")  # the standby process imports it too
        link.memory.write_imports()
        link.stepped(1)
        launcher = psutil.Process().parent()
        while how != "none" and not any(
            "hfscale.recovery.standby" in child.cmdline() for child in launcher.parent().children()
        ):
            time.sleep(0.05)
        (folder / f"standby-{rank}").touch()
    if rank == 0:
        while len(list(folder.glob("standby-*"))) < int(os.environ["GROUP_WORLD_SIZE"]):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
if how == "early" and restarts == 1:
    os.kill(os.getpid(), signal.SIGKILL)
link.stepped(restarts + 1)
atexit.register(lambda: (folder / f"atexit-{rank}").touch())
threading.Thread(target=lambda: (time.sleep(0.2), (folder / f"thread-{rank}").touch())).start()
if how == "usage":
    link.ending(2, final=True, reason="wrong")
    sys.exit(2)
if how == "raise" and restarts == 1:
    raise RuntimeError("bad luck")
