"""Launched instead of a recipe by tests of the launch alone: records its environment and exits with a given code.

two_nodes.py FOLDER EXIT_CODE ends at once; with a third argument it first waits for a SIGTERM.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

folder, exit_code, wait = Path(sys.argv[1]), int(sys.argv[2]), len(sys.argv) > 3
seen = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
signals: list[int] = []
if wait:
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
report = folder / f".rank-{seen['RANK']}"
report.write_text(json.dumps(seen | {"launcher": os.getppid()}), encoding="utf-8")
report.replace(folder / f"rank-{seen['RANK']}.json")  # so that a reader finds all of it
deadline = time.monotonic() + 120
while wait and not signals and time.monotonic() < deadline:
    time.sleep(0.05)
if signals:
    (folder / f"signalled-{seen['RANK']}").touch()
sys.exit(exit_code)
