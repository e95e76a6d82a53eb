"""A node that is lost with its memory under `hfscale run --nodes 2`: the run goes on from its partner's copies.

Part of the long suite, `make test-faults`. Two supervisors with two ranks each run on this machine. A node is lost
when its supervisor, its launcher and its ranks are killed and its memory folder is removed. It is replaced in some
runs, each with three losses; in others, with one loss, the remaining node goes on. The environment variables
HFSCALE_NODE_RUNS and HFSCALE_NODE_REMAINING_RUNS are their numbers, by default one for each strategy, and HFSCALE_SEED
selects other moments. The file that HFSCALE_RESULTS names receives all runs and their summary, and keeps those that it
has. The campaign of `benchmarks/results/node_losses.json`:

    HFSCALE_RESULTS=benchmarks/results/node_losses.json HFSCALE_NODE_RUNS=9 HFSCALE_NODE_REMAINING_RUNS=25 \\
        python -m pytest -m faults tests/faults/test_node_loss.py
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import REPOSITORY
from ports import free_port
from preemption_trials import losses
from results import machine
from test_recovery import ARGUMENTS, PARALLEL, SERVER, server  # noqa: F401  a fixture

from hfscale.core.run_memory import RunMemory
from hfscale.recovery.connections import connect, receive
from hfscale.recovery.coordinator import Coordinator

pytestmark = [pytest.mark.faults, pytest.mark.timeout(0)]
STRATEGIES = ("ddp", "fsdp2", "zero3", "tp_pp", "fsdp2_hsdp", "zero2", "zero1")
SMALLER = ("ddp", "fsdp2", "zero3", "zero2")  # those that two ranks can continue, and not the layout of four
RUNS = int(os.environ.get("HFSCALE_NODE_RUNS", str(len(STRATEGIES))))
REMAINING_RUNS = int(os.environ.get("HFSCALE_NODE_REMAINING_RUNS", str(len(SMALLER))))
SEED = os.environ.get("HFSCALE_SEED", "0")
NO_DROPOUT = {"attention_dropout": 0.0}  # two ranks draw other masks than four
STEPS, LOSSES = 24, 3
LIMIT_S = 900  # four ranks on two busy cores take ten seconds for a step


def named(host):
    """The beginning of a command that runs on a host of this name; only root can give one."""
    return ("unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh") if host else ()


class Nodes:
    """The nodes of one training, on this machine. With one of them, its launches choose their ports themselves.

    `hosts` gives the machine another name on some nodes.
    """

    def __init__(self, address, folder, env, *options, count=2, arguments=None, hosts=None, **more):
        folder.mkdir()
        self.hosts = hosts or {}
        self.folder, self.server, self.options, self.count = folder, address, options, count
        self.address = f"127.0.0.1:{free_port()}"
        self.running = {}
        arguments = ARGUMENTS | {"save_steps": 1000, "max_steps": STEPS} | (arguments or {})
        spec = {"folder": str(folder), "arguments": arguments, "kills": [], "env": env, "pauses": {"step": 0.05}}
        if count > 1:
            spec |= {"local_world": 2, "ports": [free_port() for _ in range(LOSSES + 5)]}
        (folder / "spec.json").write_text(json.dumps(spec | more))

    def start(self, node):
        memory = self.folder / f"memory-{node}"
        memory.mkdir(exist_ok=True)
        with self.standard_error(node) as stderr:
            self.running[node] = subprocess.Popen(
                [
                    *named(self.hosts.get(node)),
                    *(sys.executable, "-m", "hfscale", "run", "--memory-dir", str(memory)),
                    *(["--nodes", "2", "--node-rank", str(node), "--rendezvous", self.address] * (self.count > 1)),
                    *("--memory-interval-steps", "1", "--max-restarts", "50", "--log", str(self.log(node))),
                    *(*self.options, "--"),
                    *(sys.executable, str(SERVER), "launch", str(self.server), str(self.folder / "spec.json")),
                ],
                env=os.environ | {"PYTHONPATH": str(REPOSITORY), "HFSCALE_RUN_TOKEN": "secret"},
                stderr=stderr,
            )

    def log(self, node):
        return self.folder / f"run-{node}.jsonl"

    def standard_error(self, node):
        return (self.folder / f"stderr-{node}").open("a")

    def furthest(self, node):
        memories = (self.folder / f"memory-{node}").glob("hfscale-run-*")
        with suppress(FileNotFoundError):  # a launch has just ended
            return max((RunMemory(memory).furthest()[0] for memory in memories), default=0)
        return 0

    def lose(self, node):
        """End a node and remove its memory."""
        supervisor = self.running.pop(node)
        supervisor.kill()
        supervisor.wait()
        memory = self.folder / f"memory-{node}"
        while memory.exists():  # its ranks write until they have been killed too
            shutil.rmtree(memory, ignore_errors=True)

    def wait_for(self, condition):
        until = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < until, self.output()
            assert all(process.poll() is None for process in self.running.values()), self.output()
            time.sleep(0.05)

    def output(self):
        return [(path.name, path.read_text()[-2000:]) for path in sorted(self.folder.glob("stderr-*"))]

    def finish(self):
        for process in self.running.values():
            assert process.wait(LIMIT_S) == 0, self.output()

    def events(self, kind):
        paths = sorted(self.folder.glob("run-*.jsonl"))
        return [event for path in paths for event in map(json.loads, path.open()) if event["event"] == kind]


@pytest.fixture
def nodes(server, launch_environment, tmp_path):  # noqa: F811
    made = []

    def make(name, strategy, *options, **more):
        more["parallel"] = PARALLEL.get(strategy)
        made.append(Nodes(server, tmp_path / name, launch_environment(strategy), *options, **more))
        for node in (0, 1):
            made[-1].start(node)
        return made[-1]

    yield make
    for process in [process for run in made for process in run.running.values()]:
        if process.poll() is None:
            process.kill()
            process.wait()


known = {}


def uninterrupted(nodes, strategy, **more):
    key = json.dumps([strategy, more])
    if key not in known:
        run = nodes("whole", strategy, **more)
        run.finish()
        known[key] = losses(run.folder)
    return known[key]


def record(run, strategy, continued_on, lost):
    """What one run has measured; both nodes report a recovery, the slower one counts."""
    parts = ("ending", "waiting", "starting", "loading", "first step")
    recoveries = {}
    for event in sorted(run.events("recovered"), key=lambda event: event["time"]):
        seconds = sum(event[part] for part in parts)
        failed_at = event["time"] - seconds
        same = next((at for at in recoveries if abs(at - failed_at) < 0.5), failed_at)
        recoveries[same] = (event["steps_lost"], round(seconds, 2))
    copies = run.events("replicated")
    return {
        "strategy": strategy,
        "continued_on": continued_on,
        "lost_nodes": lost,
        "steps_lost": [steps for steps, _ in recoveries.values()],
        "seconds": [seconds for _, seconds in recoveries.values()],
        "copies": len(copies),
        "copy_seconds_median": round(statistics.median(event["seconds"] for event in copies), 4),
        "bytes_sent": sum(event["bytes"] for event in copies),
    }


def keep(result):
    """Add a run to the result file, and summarize all runs in it."""
    if name := os.environ.get("HFSCALE_RESULTS"):
        path = Path(name)
        content = json.loads(path.read_text()) if path.is_file() else {"runs": []}
        key = "runs" if "strategy" in result else "start_agreement"
        content[key] = [*content["runs"], result] if key == "runs" else result
        settings = {"nodes": 2, "ranks_per_node": 2, "steps": STEPS, "memory_interval_steps": 1}
        head = {"machine": machine(), "settings": settings, "summary": summarize(content["runs"])}
        path.write_text(json.dumps(content | head, indent=1) + "\n")


def summarize(runs):
    groups = {}
    for run in runs:
        groups.setdefault((run["strategy"], run["continued_on"]), []).append(run)
    summary = []
    for (strategy, continued_on), of_group in sorted(groups.items()):
        steps = [lost for run in of_group for lost in run["steps_lost"]]
        seconds = [taken for run in of_group for taken in run["seconds"]]
        lost = [node for run in of_group for node in run["lost_nodes"]]
        summary.append(
            {
                "strategy": strategy,
                "continued_on": continued_on,
                "runs": len(of_group),
                "lost_nodes": len(lost),
                "of_which_node_0": lost.count(0),
                "reported_recoveries": len(steps),
                "steps_lost": {str(number): steps.count(number) for number in sorted(set(steps))},
                "seconds_median": round(statistics.median(seconds), 2),
                "seconds_max": max(seconds),
                "largest_relative_difference_of_a_loss": max(run["largest_difference"] for run in of_group),
                "bytes_per_copy": round(sum(r["bytes_sent"] for r in of_group) / sum(r["copies"] for r in of_group)),
            }
        )
    return summary


def largest_difference(found, expected):
    assert found.keys() == expected.keys()
    return max(abs(found[step] / expected[step] - 1) for step in expected)


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
    keep(record(run, strategy, "replacement", lost) | {"largest_difference": largest_difference(found, expected)})
    assert found == expected


@pytest.mark.parametrize("number", range(REMAINING_RUNS))
def test_a_lost_node_is_not_replaced_and_the_other_goes_on(nodes, number):
    chance = random.Random(f"{SEED}-remaining-{number}")
    strategy = SMALLER[number % len(SMALLER)]
    expected = uninterrupted(nodes, strategy, model=NO_DROPOUT)
    more = {"model": NO_DROPOUT, "keeps_batch": True}
    run = nodes("run", strategy, "--min-nodes", "1", "--node-wait", "5", **more)
    at = chance.randrange(3, STEPS - 2)
    run.wait_for(lambda: run.furthest(1) >= at)
    time.sleep(chance.uniform(0, 0.1))
    run.lose(1)
    run.finish()
    difference = largest_difference(losses(run.folder), expected)
    keep(record(run, strategy, "remaining", [1]) | {"largest_difference": difference})
    assert difference < 1e-4  # two ranks accumulate twice as often: the sums are rounded in another order


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
            connection.send({"event": "ready", "host": f"host-{index}", "failure": None} | ready)
            assemble = receive(connection)
            (snapshot,) = assemble["snapshots"]
            if len(snapshot["manifest"]["files"]) == nodes * ranks * files:
                connection.send({"event": "assembled", "round": assemble["round"], "failed": []})
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
    keep({"nodes": nodes, "ranks": nodes * ranks, "seconds": round(max(started) - began, 2)})
