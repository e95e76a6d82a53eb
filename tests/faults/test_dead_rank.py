"""A rank dies or stops: the others end within the time limit, and a log line names it.

Part of the long suite, `make test-faults`. The launcher is torch's agent, as users have it, and waits for the ranks.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY, agent_launch
from recipe_runs import make_workplace

pytestmark = pytest.mark.faults
ENDS_WITHIN_S = 60.0


def start(folder, *flags):
    """Start the recipe on four processes, with a log in `folder`, in a process group of its own."""
    make_workplace(folder)
    config = REPOSITORY / "accelerate_configs" / "tp_pp.yaml"
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(config),
        "--num_processes",
        "4",
    ]
    command += [str(REPOSITORY / "recipes" / "tp_pp" / "train.py"), "--tp_size", "2", "--pp_size", "2"]
    command += ["--config_name", str(folder / "deep"), "--tokenizer_name", str(folder / "tokenizer")]
    command += ["--train_file", str(folder / "text.txt"), "--block_size", "32", "--output_dir", str(folder / "run")]
    command += ["--gradient_accumulation_steps", "4", "--max_steps", "100000", "--logging_steps", "5", *flags]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, cwd=folder, env=clean, stdout=log, stderr=log, start_new_session=True)


def ranks_of(launcher):
    """The process ids of the launcher's workers by rank, from their environment."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if parent == launcher.pid and (rank := [e for e in environ if e.startswith(b"RANK=")]):
                found[int(rank[0][5:])] = int(entry.name)
    return found


def wait_for(condition, seconds):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "the condition was not met in time"
        time.sleep(0.2)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("guilty", [0, 3])
def test_a_killed_rank_is_named_and_the_others_end(guilty, tmp_path):
    launcher = start(tmp_path)
    log, records = tmp_path / "log", tmp_path / "run" / "scaling.jsonl"
    workers = {}
    try:
        wait_for(lambda: launcher.poll() is not None or (records.exists() and len(records.read_text()) > 0), 400)
        assert launcher.poll() is None, log.read_text()[-3000:]
        workers = ranks_of(launcher)
        assert sorted(workers) == [0, 1, 2, 3]
        os.kill(workers[guilty], signal.SIGKILL)
        killed = time.monotonic()
        assert launcher.wait(ENDS_WITHIN_S) != 0
        print(f"rank {guilty}: all ended after {time.monotonic() - killed:.1f} s")
        alive = [rank for rank, pid in workers.items() if Path(f"/proc/{pid}").exists()]
        assert alive == []
    finally:
        for pid in workers.values():
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait(30)
    named = re.findall(r"^hfscale: rank (\d+) has died", log.read_text(), re.MULTILINE)
    assert named, log.read_text()[-6000:]
    assert set(named) == {str(guilty)}, log.read_text()[-6000:]


@pytest.mark.world(3)
@pytest.mark.parametrize(("number", "says"), [("SIGKILL", "has died"), ("SIGSTOP", "does not answer")])
def test_ranks_that_wait_in_c_for_a_dead_or_stopped_rank_end(tmp_path, number, says):
    """As with NCCL: no connection is reset, and Python runs no signal handler.

    The launcher sends SIGKILL 30 s after SIGTERM. Only the rank that is killed or stopped ends by SIGKILL.
    """
    worker = REPOSITORY / "tests" / "workers" / "blocked.py"
    begun = time.monotonic()
    done = agent_launch(tmp_path, REPOSITORY / "accelerate_configs" / "ddp.yaml", 3, worker, "1", number)
    assert done.code == 1
    codes = re.findall(r"^\s+exitcode\s+: (-?\d+)", done.err, re.MULTILINE)
    assert len(codes) == 3, done.err[-6000:]
    assert codes.count("-9") == 1, codes
    assert re.search(rf"^hfscale: .*rank 1\b.*{says}", done.err, re.MULTILINE), done.err[-6000:]
    print(f"{number}: all ended after {time.monotonic() - begun:.1f} s")


@pytest.fixture
def two_nodes():
    """Two network namespaces with a link between them, as two nodes have; they need root."""
    nodes = [f"hfscale{number}-{os.getpid()}" for number in range(2)]

    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)

    try:
        made = [ip("netns", "add", node) for node in nodes]
        made.append(ip("link", "add", "link0", "netns", nodes[0], "type", "veth", "peer", "link1", "netns", nodes[1]))
        for number, node in enumerate(nodes):
            made.append(ip("-n", node, "addr", "add", f"10.77.0.{number + 1}/24", "dev", f"link{number}"))
            made += [ip("-n", node, "link", "set", name, "up") for name in ("lo", f"link{number}")]
        if any(command.returncode for command in made):
            pytest.skip("network namespaces are not permitted: " + next(c.stderr for c in made if c.returncode))

        def lose_network():
            """Send what the nodes send each other to an address that nobody has: no connection is reset."""
            for number, node in enumerate(nodes):
                other = f"10.77.0.{2 - number}"
                lost = ip("-n", node, "neigh", "replace", other, "lladdr", "02:00:00:00:00:99", "dev", f"link{number}")
                assert lost.returncode == 0, lost.stderr

        yield nodes, lose_network
    finally:
        for node in nodes:
            ip("netns", "del", node)


@pytest.mark.timeout(600)
def test_both_ends_of_a_lost_network_end(two_nodes, tmp_path):
    """The node with the launcher's store names the lost rank; the other one has no store, and ends by itself."""
    nodes, lose_network = two_nodes
    worker = REPOSITORY / "tests" / "workers" / "lost_network.py"
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.77.0.1"}
    ranks = []
    try:
        for number, node in enumerate(nodes):
            env = os.environ | common | {"RANK": str(number), "MASTER_PORT": "29500"}
            env["GLOO_SOCKET_IFNAME"] = f"link{number}"
            with Path(tmp_path, f"log-{number}").open("w") as log:
                command = ["ip", "netns", "exec", node, sys.executable, str(worker)]
                ranks.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log))
        wait_for(lambda: all((tmp_path / f"trains-{number}").exists() for number in range(2)), 240)
        lose_network()
        lost = time.monotonic()
        codes = [rank.wait(180) for rank in ranks]
        print(f"both ended after {time.monotonic() - lost:.1f} s")
    finally:
        for rank in ranks:
            rank.kill()
    texts = [Path(tmp_path, f"log-{number}").read_text() for number in range(2)]
    assert codes == [1, 1], texts
    assert re.search(r"training hangs at step \d+ for \d+ s: rank 1 \(.*\): does not answer", texts[0]), texts[0]
    assert re.search(r"rank 1 \(.*\) gets no answer from the launcher's store", texts[1]), texts[1]
