"""A rank without torch for faults of the standby process: standby_faults.py FOLDER FAILURES.

It records its process and takes steps until it is killed; the launch after the last failure ends by itself.
"""

import os
import sys
import time
from pathlib import Path

from hfscale.core.rank_link import connect

folder, failures = Path(sys.argv[1]), int(sys.argv[2])
restarts, rank = int(os.environ["HFSCALE_RUN_RESTARTS"]), int(os.environ["RANK"])
link = connect()
link.training(restarts)
link.progressed(restarts + 1, restarts)
if rank == 0:
    link.memory.write_imports()
link.stepped(restarts + 1)
(folder / f".rank-{restarts}-{rank}").write_text(str(os.getpid()))
(folder / f".rank-{restarts}-{rank}").replace(folder / f"rank-{restarts}-{rank}")  # a reader finds all of it
while restarts < failures:
    time.sleep(0.05)
