"""A process without torch that acts as the only rank of its node: each step, it commits a part of a snapshot.

`node_rank.py FOLDER LAST`: the state is one file per rank, which holds the step; a launch resumes from the newest
complete snapshot, whose files must all be of one step.
"""

import json
import os
import sys
import time
from pathlib import Path

from hfscale.checkpoint.store import commit, list_with_snapshots, verify
from hfscale.core.rank_link import connect
from hfscale.core.run_memory import PARTS, replicated_step

folder, last = Path(sys.argv[1]), int(sys.argv[2])
rank, nodes = os.environ["HFSCALE_RUN_NODE_RANK"], int(os.environ["HFSCALE_RUN_NODES"])
link = connect(os.environ | {"RANK": rank})
output_dir = folder / "out"
found = list_with_snapshots(output_dir)
start, read = 0, []
if found:
    verify(found[-1])
    start = int(found[-1].name.rpartition("-")[2])
    read = sorted(path.name for path in found[-1].glob("state-*"))
    assert [int(path.read_text().split()[0]) for path in found[-1].glob("state-*")] == [start] * len(read)
with (folder / "launches").open("a") as file:
    launch = {"rank": rank, "nodes": nodes, "from": start, "files": read, "pid": os.getpid(), "parent": os.getppid()}
    file.write(json.dumps(launch | {"memory": str(link.memory.folder)}) + "\n")
link.training(start)
own = link.memory.snapshots(output_dir)
(own / PARTS).mkdir(parents=True, exist_ok=True)
for step in range(start + 1, last + 1):
    link.progressed(step, step - 1)
    while not (folder / "go").exists() and step > 3:  # the test decides when a launch may be over
        time.sleep(0.05)
    part = own / PARTS / f"checkpoint-{step}"
    part.mkdir()
    (part / f"state-{rank}").write_text(f"{step} {'x' * 3_000_000}")
    (part / "common").write_text(f"{step} {'y' * 1_000_000}")
    commit(part, step=step, strategy="ddp", world_size=nodes, global_batch_size=8)
    link.progressed(step, step)
    if step == start + 1:
        link.stepped(step)
    link.say("snapshot", folder=own.name, step=step)
    while replicated_step(own) != step:
        time.sleep(0.01)
link.say("trained")
