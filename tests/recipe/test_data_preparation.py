"""One process prepares the data while the others wait without a time limit, and a failure on one rank ends all."""

import os
import signal
import time
from datetime import timedelta

import datasets
import pytest
import torch.distributed as dist
from forked_ranks import run_ranks
from ports import free_port

from hfscale.errors import DataError, HealthError
from hfscale.recipe import preparation
from hfscale.recipe.preparation import one_process_prepares

TIME_LIMIT_S = 4.0


def prepare(folder, action=lambda rank: None, *, cache="cache", seconds=0.0, node_size=None, limit_s=60.0):
    """Record in which order the ranks run the block, and what they raise, in files of `folder`."""
    rank = int(os.environ["RANK"])
    if node_size is not None:
        os.environ.update(LOCAL_RANK=str(rank % node_size), LOCAL_WORLD_SIZE=str(node_size))
    datasets.config.HF_DATASETS_CACHE = folder / cache.format(node=rank // (node_size or 99))
    datasets.config.HF_DATASETS_CACHE.mkdir(exist_ok=True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit_s))
    (folder / f"started-{rank}").touch()
    while len(list(folder.glob("started-*"))) < dist.get_world_size():  # none dies before all have started
        time.sleep(0.01)
    try:
        with one_process_prepares("the data"):
            prepared = (datasets.config.HF_DATASETS_CACHE / "prepared").exists()
            (folder / f"entered-{rank}").write_text(str(prepared))
            if not prepared:
                time.sleep(seconds)
            action(rank)
            (datasets.config.HF_DATASETS_CACHE / "prepared").touch()
    except HealthError as error:
        (folder / f"error-{rank}").write_text(str(error))
        raise SystemExit(3) from None
    dist.barrier()


@pytest.fixture
def run(tmp_path):
    """Return a function that runs ranks whose store is in the process of the launcher, which a rank does not end."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    env = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    yield lambda ranks, function: run_ranks(ranks, function, log=tmp_path / "log", env=env, ends_all=False)
    del store


def found_prepared(folder, ranks):
    return [(folder / f"entered-{rank}").read_text() == "True" for rank in range(ranks)]


@pytest.mark.world(3)
@pytest.mark.long
def test_the_others_wait_longer_than_a_collective_may_take(run, tmp_path):
    codes = run(3, lambda: prepare(tmp_path, seconds=2 * TIME_LIMIT_S, limit_s=TIME_LIMIT_S))
    assert codes == [0, 0, 0]
    assert found_prepared(tmp_path, 3) == [False, True, True]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["prepared"]


@pytest.mark.world(4)
@pytest.mark.parametrize(
    ("cache", "expected"), [("cache", [False, True, True, True]), ("cache-{node}", [False, True, False, True])]
)
@pytest.mark.long
def test_nodes_share_one_preparation_only_if_they_share_the_cache(run, tmp_path, cache, expected):
    """Two nodes of two processes."""
    codes = run(4, lambda: prepare(tmp_path, lambda rank: time.sleep(rank / 2), cache=cache, node_size=2))
    assert codes == [0, 0, 0, 0]
    assert found_prepared(tmp_path, 4) == expected


def fail(rank):
    raise DataError("--train_file a.jsonl, row 7: no messages")


def die(rank):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.world(3)
@pytest.mark.parametrize(
    ("failing", "action", "code", "reason"),
    [
        (0, fail, 1, "rank 0 could not prepare the data: --train_file a.jsonl, row 7: no messages"),
        (2, fail, 1, "rank 2 could not prepare the data: --train_file a.jsonl, row 7: no messages"),
        (0, die, -signal.SIGKILL, "rank 0 has died while the data was prepared: see its output"),
        (2, die, -signal.SIGKILL, "rank 2 has died while the data was prepared: see its output"),
    ],
)
def test_a_failure_of_one_rank_ends_all_at_once(run, tmp_path, failing, action, code, reason):
    began_at = time.monotonic()
    codes = run(3, lambda: prepare(tmp_path, lambda rank: action(rank) if rank == failing else None))
    assert time.monotonic() - began_at < 45
    assert codes == [code if rank == failing else 3 for rank in range(3)]
    assert {path.read_text() for path in tmp_path.glob("error-*")} == {reason}


@pytest.mark.world(2)
def test_a_rank_that_dies_before_another_one_has_looked_for_its_process(run, tmp_path):
    found = preparation.find_process

    def find_late(description):
        while found(description) is not None:
            time.sleep(0.01)

    def prepare_late():
        if os.environ["RANK"] == "1":
            preparation.find_process = find_late
        prepare(tmp_path, lambda rank: die(rank) if rank == 0 else None)

    assert run(2, prepare_late) == [-signal.SIGKILL, 3]
    assert (tmp_path / "error-1").read_text() == "rank 0 has died while the data was prepared: see its output"


@pytest.mark.world(2)
def test_a_process_of_another_machine_without_signs_of_life_is_taken_to_be_dead(run, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "_BEAT_S", 0.2)

    def on_own_machine():
        preparation.SILENCE_S = 1.5 if os.environ["RANK"] == "0" else 60.0  # rank 1 waits for a slow rank 0
        preparation.socket.gethostname = lambda: f"node{os.environ['RANK']}"
        prepare(tmp_path, lambda rank: die(rank) if rank == 1 else None, node_size=1)

    codes = run(2, on_own_machine)
    assert codes == [3, -signal.SIGKILL]
    assert "rank 1 has shown no sign of life" in (tmp_path / "error-0").read_text()


@pytest.mark.world(2)
def test_a_long_preparation_is_logged(run, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "LOG_EVERY_S", 0.5)
    monkeypatch.setattr(preparation, "_BEAT_S", 0.1)
    assert run(2, lambda: prepare(tmp_path, seconds=1.5)) == [0, 0]
    assert (tmp_path / "log" / "rank-0.log").read_text().count("preparing the data for 0 minutes: 0 of 2") >= 2


def test_a_single_process_prepares_without_a_launcher(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with one_process_prepares("the data"):
        pass


ENDED_WHEN_FORKED = """
import os, signal, sys
sys.modules.pop("hfscale.recipe.preparation", None)  # of the fork server: it is imported after the next line
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))  # runs before that of `preparation`
from hfscale.recipe.preparation import one_process_prepares
signal.signal(signal.SIGTERM, lambda *_: None)
with one_process_prepares("the data"):
    pid = os.fork()
    if pid == 0:
        os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
"""


def test_a_process_that_its_pool_ends_when_it_is_forked_does_not_stay(python):
    done = python("-c", ENDED_WHEN_FORKED)
    assert done.code == 0, done.err
