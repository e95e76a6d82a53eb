"""A bit that is flipped under `hfscale run`: it is not trained on, its host is listed, and the losses do not change.

Part of the long suite, `make test-faults`. One or two nodes run on this machine; a rank computes one wrong bit in a
step that is replayed. Snapshots are taken at every step, so the newest one is of a step that no replay has verified.
"""

import json
import os
import socket

import pytest
from preemption_trials import losses
from test_node_loss import NO_DROPOUT, largest_difference, nodes  # noqa: F401  a fixture
from test_recovery import PARALLEL, server, supervise  # noqa: F401  a fixture

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
STEPS, REPLAYED = 12, 8
CONTENT = {"replay_every": 2, "model": {"attention_dropout": 0.1}}
SAID = {
    "output": f"step {REPLAYED} gave two different results",
    "state": f"between the end of step {REPLAYED - 1} and the beginning of step {REPLAYED} on rank 1",
}


def flip(rank, kind="output"):
    return {"module": "layers.1.mlp.up_proj.weight", "rank": rank, "step": REPLAYED, "kind": kind}


@pytest.mark.parametrize(
    ("strategy", "kind", "save_steps"),
    [
        *((strategy, "output", steps) for strategy in ("ddp", "fsdp2", "zero2") for steps in (3, 1000)),
        ("fsdp2", "state", 3),
    ],
)
def test_on_one_node_it_goes_on_from_before(server, launch_environment, tmp_path, strategy, kind, save_steps):  # noqa: F811
    env, hosts = launch_environment(strategy), tmp_path / "bad-hosts"
    options = ("--exclude-bad-hosts", str(hosts))
    runs = {}
    for name, fault in {"plain": None, "flipped": flip(1, kind)}.items():
        more = CONTENT | {"flip": fault}
        done, events = supervise(
            server, tmp_path / name, env, [], save_steps=save_steps, steps=STEPS, options=options, **more
        )
        assert done.returncode == 0, done.stderr[-3000:]
        runs[name] = [event for event in events if event["event"] == "restart"]
    (restart,) = runs["flipped"]
    assert not runs["plain"]
    assert SAID[kind] in json.dumps(restart)
    assert hosts.read_text().split() == [socket.gethostname()]
    assert losses(tmp_path / "flipped") == losses(tmp_path / "plain")
    resumed = resumed_after(tmp_path / "flipped")
    assert resumed == (6 if save_steps == 3 else REPLAYED - 1)  # verified; and the newest, where nothing older is left


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_on_two_nodes_all_go_on_from_before(nodes, tmp_path, strategy):  # noqa: F811
    hosts = tmp_path / "bad-hosts"
    arguments = {"max_steps": STEPS, "save_steps": 3}
    runs = {}
    for name, fault in {"plain": None, "flipped": flip(2)}.items():
        options = ("--exclude-bad-hosts", str(hosts))
        runs[name] = nodes(name, strategy, *options, arguments=arguments, **CONTENT, flip=fault)
        runs[name].finish()
    assert not runs["plain"].events("restart")
    assert any(
        f"step {REPLAYED} gave two different results" in json.dumps(event) and "on rank 2" in json.dumps(event)
        for event in runs["flipped"].events("restart")
    )
    assert hosts.read_text().split() == [socket.gethostname()]
    assert losses(runs["flipped"].folder) == losses(runs["plain"].folder)
    assert resumed_after(runs["flipped"].folder) == 6


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a process another host name")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_on_two_nodes_the_bad_host_leaves_and_the_other_goes_on(nodes, tmp_path, strategy):  # noqa: F811
    hosts = tmp_path / "bad-hosts"
    options = ("--exclude-bad-hosts", str(hosts), "--min-nodes", "1", "--node-wait", "5")
    more = {"arguments": {"max_steps": STEPS, "save_steps": 3}, "replay_every": 2, "keeps_batch": True}
    runs = {}
    for name, fault in {"plain": None, "flipped": flip(2)}.items():
        runs[name] = nodes(name, strategy, *options, hosts={1: "bad-host"}, model=NO_DROPOUT, flip=fault, **more)
        if fault is not None:
            assert runs[name].running.pop(1).wait(600) == 1
        runs[name].finish()
    assert hosts.read_text().split() == ["bad-host"]
    (left,) = runs["flipped"].events("left")
    assert left["text"] == "leaves the run: the health checks blame this host, bad-host"
    assert largest_difference(losses(runs["flipped"].folder), losses(runs["plain"].folder)) < 1e-5
    assert resumed_after(runs["flipped"].folder) == 6


def resumed_after(folder):
    """The step after which the second launch of a run has begun."""
    events = [json.loads(line) for line in (folder / "out" / "hfscale_timeline.jsonl").read_text().splitlines()]
    (recovery,) = [event for event in events if event["event"] == "recovery"]
    return recovery["step"] - 1
