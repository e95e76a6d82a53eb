"""A node that is lost with its memory under `hfscale run --nodes 2`: the run goes on from its partner's copies.

Part of the long suite, `make test-faults`. Two supervisors with two ranks each run on this machine. A node is lost
when its supervisor, its launcher and its ranks are killed and its memory folder is removed. The environment variable
HFSCALE_NODE_RUNS is the number of runs, each with several losses, 3 by default, and HFSCALE_SEED selects other
moments. A file that HFSCALE_RECOVERY_RESULTS names receives one JSON line per run.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY
from ports import free_port
from preemption_trials import losses
from test_recovery import ARGUMENTS, SERVER, environment, server  # noqa: F401  fixtures

from hfscale.recovery.connections import connect, receive, send
from hfscale.recovery.coordinator import Coordinator
from hfscale.recovery.run_memory import RunMemory

pytestmark = [pytest.mark.faults, pytest.mark.timeout(0)]
RUNS, SEED = int(os.environ.get("HFSCALE_NODE_RUNS", "3")), os.environ.get("HFSCALE_SEED", "0")
STRATEGIES = ("ddp", "fsdp2", "zero3")
STEPS, LOSSES = 24, 3


class Nodes:
    """Two nodes on this machine that run one training."""

    def __init__(self, address, folder, env, *options):
        folder.mkdir()
        self.folder, self.server, self.options = folder, address, options
        self.address = f"127.0.0.1:{free_port()}"
        self.running = {}
        spec = {"folder": str(folder), "arguments": ARGUMENTS | {"save_steps": 1000, "max_steps": STEPS}, "kills": []}
        spec |= {"env": env, "local_world": 2, "ports": [free_port() for _ in range(LOSSES + 5)], "keeps_batch": True}
        spec |= {"pauses": {"step": 0.05}}
        (folder / "spec.json").write_text(json.dumps(spec))

    def start(self, node):
        memory = self.folder / f"memory-{node}"
        memory.mkdir(exist_ok=True)
        self.running[node] = subprocess.Popen(
            [
                *(sys.executable, "-m", "hfscale", "run", "--nodes", "2", "--node-rank", str(node)),
                *("--rendezvous", self.address, "--memory-dir", str(memory), "--memory-interval-steps", "1"),
                *("--max-restarts", "50", "--log", str(self.folder / f"run-{node}.jsonl"), *self.options, "--"),
                *(sys.executable, str(SERVER), "launch", str(self.server), str(self.folder / "spec.json")),
            ],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "HFSCALE_RUN_TOKEN": "secret"},
            stderr=(self.folder / f"stderr-{node}").open("a"),
        )

    def furthest(self, node):
        return max(
            (RunMemory(p).furthest()[0] for p in (self.folder / f"memory-{node}").glob("hfscale-run-*")), default=0
        )

    def lose(self, node):
        """End a node and remove its memory."""
        supervisor = self.running.pop(node)
        supervisor.kill()
        supervisor.wait()
        shutil.rmtree(self.folder / f"memory-{node}")

    def wait_for(self, condition):
        until = time.monotonic() + 200
        while not condition():
            assert time.monotonic() < until, self.output()
            assert all(process.poll() is None for process in self.running.values()), self.output()
            time.sleep(0.05)

    def output(self):
        return [(path.name, path.read_text()[-2000:]) for path in sorted(self.folder.glob("stderr-*"))]

    def finish(self):
        for process in self.running.values():
            assert process.wait(200) == 0, self.output()

    def events(self, kind):
        paths = sorted(self.folder.glob("run-*.jsonl"))
        return [event for path in paths for event in map(json.loads, path.open()) if event["event"] == kind]


@pytest.fixture
def nodes(server, environment, tmp_path):  # noqa: F811
    made = []

    def make(name, strategy, *options):
        made.append(Nodes(server, tmp_path / name, environment(strategy), *options))
        for node in (0, 1):
            made[-1].start(node)
        return made[-1]

    yield make
    for process in [process for run in made for process in run.running.values()]:
        if process.poll() is None:
            process.kill()
            process.wait()


known = {}


def uninterrupted(nodes, strategy):
    if strategy not in known:
        run = nodes("whole", strategy)
        run.finish()
        known[strategy] = losses(run.folder)
    return known[strategy]


def record(run, strategy, mode, lost):
    """What one run has measured; both nodes report a recovery, the slower one counts."""
    parts = ("ending", "waiting", "starting", "loading", "first step")
    recoveries = {}
    for event in sorted(run.events("recovered"), key=lambda event: event["time"]):
        seconds = sum(event[part] for part in parts)
        failed_at = event["time"] - seconds
        known = next((at for at in recoveries if abs(at - failed_at) < 0.5), failed_at)
        recoveries[known] = (event["steps_lost"], round(seconds, 2))
    copies = run.events("replicated")
    return {
        "strategy": strategy,
        "continued_on": mode,
        "lost_nodes": lost,
        "steps_lost": [steps for steps, _ in recoveries.values()],
        "seconds": [seconds for _, seconds in recoveries.values()],
        "copies": len(copies),
        "bytes_sent": sum(event["bytes"] for event in copies),
    }


def write(result):
    if "HFSCALE_RECOVERY_RESULTS" in os.environ:
        with Path(os.environ["HFSCALE_RECOVERY_RESULTS"]).open("a") as file:
            file.write(json.dumps(result) + "\n")


@pytest.mark.parametrize("number", range(RUNS))
def test_a_lost_node_is_replaced_and_no_loss_changes(nodes, number):
    chance = random.Random(f"{SEED}-{number}")
    strategy = STRATEGIES[number % len(STRATEGIES)]
    expected = uninterrupted(nodes, strategy)
    run = nodes("run", strategy)
    lost = []
    for at in sorted(chance.sample(range(3, STEPS - 2), LOSSES)):
        node = chance.randrange(2)
        run.wait_for(lambda at=at, node=node: run.furthest(node) >= at)
        time.sleep(chance.uniform(0, 0.1))
        run.lose(node)
        lost.append(node)
        run.start(node)
    run.finish()
    found = losses(run.folder)
    write(record(run, strategy, "replacement", lost) | {"losses_equal": found == expected})
    assert found == expected


def test_a_lost_node_is_not_replaced_and_the_other_goes_on(nodes):
    expected = uninterrupted(nodes, "ddp")
    run = nodes("run", "ddp", "--min-nodes", "1", "--node-wait", "5")
    run.wait_for(lambda: run.furthest(1) >= 8)
    run.lose(1)
    run.finish()
    found = losses(run.folder)
    write(record(run, "ddp", "remaining", [1]) | {"losses_equal": found == expected})
    assert found == pytest.approx(expected, rel=0.02)  # other ranks draw other dropout masks


def test_128_nodes_of_8_ranks_agree_on_a_snapshot_whose_part_one_node_has_lost():
    nodes, ranks, files = 128, 8, 3
    coordinator = Coordinator(
        ("127.0.0.1", port := free_port()),
        b"secret",
        nodes=nodes,
        min_nodes=nodes,
        wait_s=600,
        max_restarts=1,
        report=print,
    )
    connected, started = threading.Barrier(nodes + 1), [0.0] * nodes

    def part(index, place):
        names = [f"part_{file}/__{index * ranks + rank}_0.distcp" for rank in range(ranks) for file in range(files)]
        manifest = {"step": 7, "files": {name: {"bytes": 10, "xxh3_128": "0" * 32} for name in names}}
        return {"folder": "f", "step": 7, "place": place, "index": index, "count": nodes, "manifest": manifest}

    def node(index):
        with connect(("127.0.0.1", port), b"secret") as connection:
            connected.wait()
            parts = [part((index - 1) % nodes, "replicas"), *([part(index, "parts")] if index != 5 else [])]
            ready = {"node": index, "nodes": nodes, "address": ["127.0.0.1", 1], "parts": parts, "folders": ["f"]}
            send(connection, {"event": "ready", "failure": None} | ready)
            assemble = receive(connection)
            (snapshot,) = assemble["snapshots"]
            if len(snapshot["manifest"]["files"]) == nodes * ranks * files:
                send(connection, {"event": "assembled", "round": assemble["round"], "failed": []})
                assert receive(connection)["event"] == "start"
                started[index] = time.monotonic()

    threads = [threading.Thread(target=node, args=(index,)) for index in range(nodes)]
    for thread in threads:
        thread.start()
    connected.wait()
    began = time.monotonic()
    for thread in threads:
        thread.join(300)
    coordinator.close()
    assert min(started) > began
    write({"agreement_s": round(max(started) - began, 2), "nodes": nodes, "ranks": nodes * ranks})
