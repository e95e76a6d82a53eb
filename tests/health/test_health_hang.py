"""Hangs: which rank is blamed, what may be slow, and real ranks of which one hangs."""

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from conftest import REPOSITORY
from tiny import RandomTokens, tiny_arguments, tiny_model, tiny_trainer
from transformers import Trainer, TrainerCallback
from workers.health_hang import run

from benchmarks.simulated_ranks import StoreProcess
from hfscale import SpotCheckpointCallback
from hfscale.checkpoint.writer import CheckpointJob, CheckpointWriter
from hfscale.core.alarms import listen
from hfscale.core.findings import Finding, blamed_hosts
from hfscale.core.rank_store import RankStore
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.health import hang as hang_module
from hfscale.health.diagnosis import (
    Position,
    Snapshot,
    all_stacks,
    diagnose,
    frames_of,
    positions_of,
    slow_activity,
)
from hfscale.health.hang import HangWatchdog, Limits
from hfscale.trainer.frames import training_frame

HOSTS = dict(enumerate("abcd"))
QUICK = Limits(floor_s=3.0, factor=5, grace_s=3.0, poll_s=0.2)
LIMITS = Limits(poll_s=0.01)
"""The usual limits, for the tests that advance the watchdog's clock themselves."""
LONG_S, TOO_LONG_S = 10 * LIMITS.floor_s, 2 * LIMITS.outside_s


def snap(*positions, step=5, **changes):
    fields = {
        "host": "h",
        "step": step,
        "phase": "compute",
        "idle_s": 70.0,
        "occupation": None,
        "place": "train.py:3 main",
        "positions": positions,
    }
    return Snapshot(**(fields | changes))


def waits(number, operation="all_reduce", group="0", entered=None, **more):
    return Position(
        group=group, ranks=(), entered=entered or number, waiting=number, operation=operation, sizes="[[4]]", **more
    )


def past(number, group="0"):
    return Position(group=group, ranks=(), entered=number)


def blamed(*snapshots):
    given = {rank: snapshot for rank, snapshot in enumerate(snapshots) if snapshot is not None}
    return [(finding.ranks, finding.message) for finding in diagnose(len(snapshots), HOSTS, given)]


class TestBlame:
    def test_a_rank_that_does_not_answer(self):
        (((rank,), text),) = blamed(snap(waits(9)), None, snap(waits(9)))
        assert rank == 1
        assert "does not answer" in text

    def test_a_rank_that_has_not_reached_the_collective_of_two_or_three_ranks(self):
        for ranks in ((snap(waits(9)), snap(past(8))), (snap(waits(9)), snap(past(8)), snap(waits(9)))):
            (((rank,), text),) = blamed(*ranks)
            assert rank == 1
            assert "all_reduce (9 of group 0)" in text
            assert "train.py:3 main" in text

    def test_a_rank_that_has_left_the_collective_has_reached_it(self):
        for ranks in ((snap(waits(9)), snap(past(9))), (snap(waits(9)), snap(waits(9)), snap(past(9)))):
            ((blame, text),) = blamed(*ranks)
            assert blame == ()
            assert "has not reached" not in text
            assert "all ranks" not in text
            assert re.search(r"ranks? 0.* in all_reduce .* rank \d has left it \(in compute of step 5", text)

    def test_the_cause_of_a_chain_of_waits_and_not_a_rank_in_between(self):
        """Rank 1 waits in group 1 for rank 2, and so has not reached group 0's collective."""
        one = snap(past(8), waits(3, group="1"))
        two = snap(past(8), past(2, group="1"))
        (((rank,), _),) = blamed(snap(waits(9)), one, two)
        assert rank == 2

    def test_a_rank_in_another_collective_than_most(self):
        (((rank,), text),) = blamed(snap(waits(9)), snap(waits(9)), snap(waits(9, "all_gather")))
        assert rank == 2
        assert "all_gather" in text
        ((ranks, text),) = blamed(snap(waits(9)), snap(waits(9, "all_gather")))
        assert ranks == (0, 1)

    def test_a_gpu_that_has_not_started_and_a_broken_link(self):
        (((rank,), text),) = blamed(snap(waits(9, started=True)), snap(waits(9, started=False)))
        assert rank == 1
        assert "its GPU has not started it" in text
        ((ranks, text),) = blamed(snap(waits(9)), snap(waits(9)))
        assert ranks == ()
        assert "a link" in text

    def test_ranks_that_have_queued_the_same_collective_of_nccl(self):
        """Without TORCH_NCCL_ENABLE_TIMING all entries stay "scheduled", also those whose kernels run."""
        entry = {
            "process_group": ["0", "default_pg"],
            "is_p2p": False,
            "collective_seq_id": 9,
            "p2p_seq_id": 0,
            "retired": False,
            "state": "scheduled",
            "profiling_name": "nccl:all_reduce",
            "input_sizes": [[4]],
        }
        dump = {"pg_config": {"0": {"name": "0", "ranks": "[0, 1, 2]"}}, "entries": [entry]}
        ((ranks, text),) = blamed(*(snap(*positions_of([dump])) for _ in range(3)))
        assert ranks == ()
        assert "all_reduce [[4]] (9 of group 0)" in text
        assert "which GPU is unknown" in text
        assert "TORCH_NCCL_ENABLE_TIMING=1" in text
        ((ranks, text),) = blamed(*(snap(*positions_of([dump])) for _ in range(2)), snap(past(9)))
        assert "2 of 3 ranks have queued" in text

    def test_no_rank_waits(self):
        (((rank,), _),) = blamed(snap(step=5), snap(step=4), snap(step=5))
        assert rank == 1
        ((ranks, text),) = blamed(snap(phase="between steps"), snap(phase="between steps"))
        assert ranks == ()
        assert "between steps, at train.py:3 main" in text

    @pytest.mark.parametrize("occupation", ["compiling", "saving", "evaluating"])
    def test_an_activity_that_may_be_slow_is_not_a_hang(self, occupation):
        assert blamed(snap(waits(9)), snap(past(8), occupation=occupation)) == []

    def test_the_first_exception_and_not_those_that_it_caused(self):
        gone = "RuntimeError: Connection closed by peer"
        given = {0: snap(error=gone), 1: snap(error="ValueError: a bad batch"), 2: snap(error=gone)}
        (found,) = diagnose(3, HOSTS, given)
        assert (found.ranks, found.check) == ((1,), "exception")
        assert "a bad batch" in found.message
        assert blamed_hosts([found]) == []  # the program is wrong, and not the machine
        broken = {0: snap(error=gone), 1: snap(error="AcceleratorError: CUDA error: uncorrectable ECC error")}
        assert blamed_hosts([Finding.from_dict(one.to_dict()) for one in diagnose(2, HOSTS, broken)]) == ["b"]


def test_a_snapshot_survives_json():
    one = snap(waits(9, started=True), past(3, "1"), error="x", stacks="y")
    assert Snapshot.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_ranks_of_a_large_group_take_little_space_in_json():
    for ranks in (range(16384), range(3, 16384, 16)):
        position = Position(group="0", ranks=tuple(ranks), entered=9)
        assert len(json.dumps(position.to_dict())) < 200
        assert Position.from_dict(position.to_dict()) == position
    uneven = Position(group="0", ranks=(*range(600), 700), entered=9)
    assert Position.from_dict(json.loads(json.dumps(uneven.to_dict()))) == uneven


@pytest.mark.parametrize("listed", [True, False])
def test_the_work_of_a_diagnosis_grows_with_the_number_of_ranks(listed):
    """4,096 ranks in groups of 8, of which one has not arrived: comparing all pairs takes many seconds."""
    ranks, guilty = 4096, 1234
    world = tuple(range(ranks)) if listed else ()
    given = {}
    for rank in range(ranks):
        first = rank - rank % 8
        inner = Position(group=f"tp{first}", ranks=tuple(range(first, first + 8)), entered=7)
        late = rank == guilty
        outer = Position(group="0", ranks=world, entered=8 if late else 9, waiting=None if late else 9, operation="x")
        given[rank] = snap(inner, outer)

    def cpu_s():
        began = time.process_time()
        (found,) = diagnose(ranks, {}, given)
        assert found.ranks == (guilty,)
        return time.process_time() - began

    assert any(cpu_s() < 2 for _ in range(3)), "on a busy machine some calls take longer"


class RecordingStore:
    """Passes the calls of a store on, and keeps the names of the keys that they read."""

    def __init__(self, store):
        self.store = store
        self.read_keys = set()

    def __getattr__(self, name):
        call = getattr(self.store, name)

        def noted(*arguments):
            if name in ("get", "multi_get", "check", "add"):
                self.read_keys.update(arguments[0] if isinstance(arguments[0], list) else arguments[:1])
            return call(*arguments)

        return noted


def test_one_rank_reads_the_answers_and_all_learn_the_verdict(tmp_path):
    ranks, shared = 24, dist.HashStore()
    stores = [RecordingStore(shared) for _ in range(ranks)]
    limits = Limits(grace_s=60.0)  # with all answers rank 0 does not wait so long
    watchdogs = [HangWatchdog(RankStore(store, r, ranks), tmp_path, limits=limits) for r, store in enumerate(stores)]
    asked = [threading.Thread(target=watchdog._examine, args=([],)) for watchdog in watchdogs]
    for thread in asked:
        thread.start()
    for thread in asked:
        thread.join()
    verdicts = {str(watchdog.findings) for watchdog in watchdogs}
    assert len(verdicts) == 1
    assert "stall" in verdicts.pop()
    assert [watchdog.folder is not None for watchdog in watchdogs] == [True] + [False] * (ranks - 1)
    answers = [{key for key in store.read_keys if re.fullmatch(r"hang/0/snapshot/\d+", key)} for store in stores]
    assert [len(keys) for keys in answers] == [ranks] + [0] * (ranks - 1)
    assert len(list(tmp_path.rglob("rank-*.txt"))) == ranks


def test_notes_of_which_few_are_missing_are_read_with_few_requests(monkeypatch):
    shared, ranks, missing = dist.HashStore(), 1000, (17, 600)
    for rank in range(ranks):
        if rank not in missing:
            RankStore(shared, rank, ranks).write("topic", {"rank": rank})
    requests = []
    store = RecordingStore(shared)
    monkeypatch.setattr(store, "check", lambda keys: requests.append(keys) or shared.check(keys), raising=False)
    found = RankStore(store, 0, ranks).read("topic")
    assert found == {rank: {"rank": rank} for rank in range(ranks) if rank not in missing}
    assert len(requests) < 50
    assert RankStore(shared, 0, 3).read("nothing") == {}


def test_positions_of_an_nccl_dump():
    """The fields are those that torch's Flight Recorder writes for NCCL (version 2.10)."""

    def entry(number, state, retired, operation="nccl:all_reduce", is_p2p=False):
        return {
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number,
            "p2p_seq_id": 1,
            "is_p2p": is_p2p,
            "profiling_name": operation,
            "input_sizes": [[7]],
            "state": state,
            "retired": retired,
        }

    dump = {
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "entries": [
            entry(3, "completed", True),
            entry(4, "started", False),
            entry(5, "scheduled", False),
            entry(0, "completed", True, "nccl:send 0->1", True),
        ],
    }
    one, two = positions_of([dump])
    assert (one.ranks, one.entered, one.waiting, one.operation, one.started) == ((0, 1), 5, 4, "all_reduce", True)
    assert (two.group, two.waiting) == ("0/p2p", None)
    assert positions_of([{"entries": []}]) == []


def test_compiling_is_detected_on_the_stack():
    begun, done, source = (
        threading.Event(),
        threading.Event(),
        "def wait(begun, done):\n    begun.set()\n    done.wait()\n",
    )
    scope = {}
    exec(compile(source, "/lib/torch/_dynamo/convert_frame.py", "exec"), scope)  # noqa: S102 - a frame of that file
    thread = threading.Thread(target=scope["wait"], args=(begun, done))
    thread.start()
    begun.wait()
    assert slow_activity(thread.ident) == "compiling"
    assert slow_activity(threading.get_ident()) is None
    assert "convert_frame" in all_stacks()
    done.set()
    thread.join()
    assert frames_of(thread.ident) == []


class CountedWatchdog(HangWatchdog):
    """Counts its polls."""

    def __init__(self, *arguments, **limits):
        super().__init__(*arguments, **limits)
        self.polls = threading.Semaphore(0)

    def _poll(self):
        continues = super()._poll()
        self.polls.release()
        return continues


@pytest.fixture
def clock(monkeypatch):
    """The clock of all watchdogs of a test: only `WithWatchdog.lasts` advances it, however slow the machine is."""
    clock = SimpleNamespace(now=1000.0)
    names = vars(time) | {"monotonic": lambda: clock.now}
    monkeypatch.setattr(hang_module, "time", SimpleNamespace(**names))
    return clock


class WithWatchdog(TrainerCallback):
    """Starts a watchdog of its own for a training."""

    def __init__(self, folder, clock):
        self.folder = folder
        self.clock = clock

    def on_train_begin(self, args, state, control, **kwargs):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        inside = training_frame()
        self.watchdog = CountedWatchdog(RankStore(store, 0, 1), self.folder, limits=LIMITS, inside=inside)
        self.watchdog.start()

    def on_step_begin(self, args, state, control, **kwargs):
        self.watchdog.step_began(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        self.watchdog.step_ended()

    def lasts(self, seconds):
        """Advance the clock as if the caller took so long, and wait until the watchdog has seen it."""
        self.clock.now += seconds
        while self.watchdog.polls.acquire(blocking=False):
            pass
        for _ in range(2):  # the first of these polls may have begun before
            assert self.watchdog.polls.acquire(timeout=120), "the watchdog polls no longer"


@pytest.mark.parametrize(
    ("source", "activity"),
    [
        ("class LLM:\n def generate(self, wait):\n  wait()\ncall = LLM().generate", "generating"),
        ("class GRPO:\n def _prepare_inputs(self, wait):\n  wait()\ncall = GRPO()._prepare_inputs", "generating"),
        ("def generate(wait):\n wait()\ncall = generate", None),  # of rows of a data set
    ],
)
def test_generation_is_detected_on_the_stack(source, activity):
    scope, found = {}, []
    exec(source, scope)  # noqa: S102
    scope["call"](lambda: found.append(slow_activity(threading.get_ident())))
    assert found == [activity]


class SlowCallback(WithWatchdog):
    """Is slow in the first step, in a save and in an evaluation, and with `hang` in a step too."""

    def __init__(self, folder, clock, hang):
        super().__init__(folder, clock)
        self.hang = hang

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1 or (state.global_step == 6 and self.hang):
            self.lasts(LONG_S)
        super().on_step_end(args, state, control, **kwargs)

    def on_save(self, args, state, control, **kwargs):
        self.lasts(LONG_S)

    def on_evaluate(self, args, state, control, **kwargs):
        self.lasts(LONG_S)


@pytest.mark.parametrize("hang", [False, True])
def test_a_long_step_is_a_hang_and_a_long_save_or_evaluation_is_not(tmp_path, clock, hang):
    slow = SlowCallback(tmp_path, clock, hang)
    saving = {"save_strategy": "steps", "save_steps": 8, "eval_strategy": "steps", "eval_steps": 8, "max_steps": 8}
    tiny_trainer(tmp_path, slow, **saving).train()
    watchdog = slow.watchdog
    watchdog.join(120)
    assert bool(watchdog.findings) == hang
    assert not watchdog.is_alive(), "the watchdog must end with the training"
    if hang:
        verdict = json.loads((watchdog.folder / "verdict.json").read_text())
        assert "lasts" in verdict["findings"][0]["message"]
        assert "on_step_end" in (watchdog.folder / "rank-0.txt").read_text()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_wait_inside_a_slow_save_is_no_hang(tmp_path, clock, monkeypatch, asynchronous):
    """The second save waits for the first, and the end of the training for the second."""
    run, training = CheckpointWriter._run, threading.get_ident()
    watching = WithWatchdog(tmp_path, clock)

    def waits_for_the_writer():
        return CheckpointWriter.wait.__code__ in [frame.f_code for frame in frames_of(training)]

    def slow(writer, job):
        until = time.monotonic() + 60  # while the thread of the writer starts, the training has not yet begun to wait
        while threading.get_ident() != training and not waits_for_the_writer() and time.monotonic() < until:
            time.sleep(0.001)
        watching.lasts(LONG_S)
        run(writer, job)

    monkeypatch.setattr(CheckpointWriter, "_run", slow)
    spot = SpotCheckpointCallback(asynchronous=asynchronous, cloud=None)
    saving = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    tiny_trainer(tmp_path, spot, watching, **saving).train()
    assert spot.last_committed == "checkpoint-8"
    assert watching.watchdog.findings == []


def test_a_step_of_the_checkpoint_callback_is_no_save():
    spot, found = SpotCheckpointCallback(cloud=None), []
    spot._pace = SimpleNamespace(begin=lambda is_saving: found.append(slow_activity(threading.get_ident())))
    spot.on_step_begin(None, None, None)
    assert found == [None]


class LLM:
    """Generates, as vLLM's class of this name does."""

    def generate(self, lasts):
        lasts(LONG_S)


class SlowThenShort(WithWatchdog):
    """Generates in the sixth step, and then does something else for a moment without any progress."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 6:
            LLM().generate(self.lasts)
            self.lasts(LIMITS.floor_s / 2)
        super().on_step_end(args, state, control, **kwargs)


def test_the_time_of_a_slow_activity_does_not_count_after_it(tmp_path, clock):
    watching = SlowThenShort(tmp_path, clock)
    tiny_trainer(tmp_path, watching, max_steps=8).train()
    assert watching.watchdog.findings == []


class RewardingTrainer(Trainer):
    """Computes rewards at the sixth step, as TRL's GRPOTrainer does."""

    def _prepare_inputs(self, inputs):
        if self.state.global_step == 5:
            self.compute_rewards()
        return super()._prepare_inputs(inputs)


@pytest.mark.parametrize(("takes_s", "is_hang"), [(LONG_S, False), (TOO_LONG_S, True)])
def test_a_slow_reward_is_no_hang_until_the_longer_deadline(tmp_path, clock, takes_s, is_hang):
    watching = WithWatchdog(tmp_path, clock)
    arguments = {"model": tiny_model(), "args": tiny_arguments(tmp_path, max_steps=7), "callbacks": [watching]}
    trainer = RewardingTrainer(train_dataset=RandomTokens(), **arguments)
    trainer.compute_rewards = lambda: watching.lasts(takes_s)
    trainer.train()
    found = [finding.message for finding in watching.watchdog.findings]
    assert ["lasts" in message for message in found] == [True] * is_hang


class FailingCallback(WithWatchdog):
    """Raises an exception after the warm-up; with `pace_s` it makes each step last that long instead."""

    def __init__(self, folder, clock, pace_s=None):
        super().__init__(folder, clock)
        self.pace_s = pace_s

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        if self.pace_s is not None:
            self.lasts(self.pace_s)
        elif state.global_step == 6:
            raise RuntimeError("out of memory")


def test_a_failed_training_is_not_watched_during_the_next_one(tmp_path, clock):
    first, second = FailingCallback(tmp_path, clock), FailingCallback(tmp_path, clock, pace_s=LIMITS.floor_s / 2)
    again = tiny_trainer(tmp_path, second, max_steps=10)
    with pytest.raises(RuntimeError, match="out of memory"):
        tiny_trainer(tmp_path, first, max_steps=10).train()
    again.train()
    assert first.watchdog.findings == second.watchdog.findings == []
    assert not first.watchdog.is_alive()


class Ended(BaseException):
    """Takes the place of the end of the process."""


def end_process(code):
    raise Ended(code)


@pytest.fixture
def ending(tmp_path, clock, monkeypatch):
    """A watchdog that ends the process after a hang; its clock advances only while it waits."""
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(hang_module.time, "sleep", sleep)
    names = {"getpid": os.getpid, "_exit": end_process}
    monkeypatch.setattr(hang_module, "os", SimpleNamespace(**names))

    def make(world_size):
        return HangWatchdog(RankStore(dist.HashStore(), 0, world_size), tmp_path, limits=LIMITS, abort=True), slept

    return make


def checkpoint_job(folder, write):
    return CheckpointJob(run_dir=folder, step=2, strategy="single", global_batch_size=4, commits=True, write=write)


def test_the_end_after_a_hang_waits_for_the_checkpoint_in_the_background(tmp_path, ending):
    watchdog, _ = ending(1)
    is_waiting = threading.Event()
    writer = CheckpointWriter()
    writer.start(checkpoint_job(tmp_path, lambda folder: is_waiting.wait(60) and (folder / "a").write_text("b")))

    def sleep(seconds):
        if seconds < 1.0:  # one of the polls of the save
            is_waiting.set()
            writer.wait()

    hang_module.time.sleep = sleep
    with pytest.raises(Ended):
        watchdog._examine([])
    assert (tmp_path / "checkpoint-2" / MANIFEST_NAME).exists()


def test_a_hang_raises_one_alarm_and_the_end_waits_for_its_listeners(ending):
    watchdog, _ = ending(1)
    heard = []
    end = listen(heard.append, lambda limit_s: heard.append(limit_s))
    with pytest.raises(Ended):
        watchdog._examine([])
    end()
    alarm, limit_s = heard
    assert (alarm.kind, alarm.level) == ("hang", "error")
    assert "hangs" in alarm.text
    assert 0 < limit_s <= 10


@pytest.mark.parametrize(("ranks", "limit_s"), [(1, LIMITS.outside_s), (2, LIMITS.floor_s)])
def test_the_end_after_a_hang_does_not_wait_for_a_save_that_never_ends(tmp_path, ending, ranks, limit_s):
    """Where a rank has not answered, it is probably dead, and the save cannot end."""
    watchdog, slept = ending(ranks)
    goes_on = threading.Event()
    writer = CheckpointWriter()
    writer.start(checkpoint_job(tmp_path, lambda folder: goes_on.wait(60)))
    with pytest.raises(Ended):
        watchdog._examine([])
    goes_on.set()
    writer.wait()
    waited_s = sum(seconds for seconds in slept if seconds == hang_module._SAVE_POLL_S)
    assert waited_s == pytest.approx(limit_s, abs=2.0)


@pytest.fixture
def store_process():
    """The launcher's store, which can be stopped: like a node that is lost, it answers nothing and closes nothing."""
    store = StoreProcess()
    yield store
    os.kill(store.pid, signal.SIGCONT)
    store.close()


@contextlib.contextmanager
def watched_over(store_process, rank, world_size, folder, **flags):
    """A watchdog whose store is stopped; it has ended afterwards, also if the test fails."""
    client = dist.TCPStore("127.0.0.1", store_process.port, is_master=False, wait_for_workers=False)
    watchdog = HangWatchdog(RankStore(client, rank, world_size), folder, **flags)
    watchdog.start()
    os.kill(store_process.pid, signal.SIGSTOP)
    try:
        yield watchdog
    finally:
        os.kill(store_process.pid, signal.SIGCONT)
        watchdog.stop()


@pytest.mark.parametrize("abort", [False, True])
@pytest.mark.long
def test_a_rank_that_the_store_does_not_answer_reports_its_hang_by_itself(tmp_path, store_process, monkeypatch, abort):
    ended, logged, lines = threading.Event(), threading.Event(), []
    monkeypatch.setattr(hang_module, "os", SimpleNamespace(_exit=lambda code: ended.set()))
    monkeypatch.setattr(hang_module.logger, "error", lambda *line: (lines.append(line), logged.set()))
    limits = Limits(floor_s=0.5, outside_s=0.5, grace_s=0.05, poll_s=0.02)
    with watched_over(store_process, 1, 2, tmp_path, limits=limits, abort=abort) as watchdog:
        assert logged.wait(60)
        (finding,) = watchdog.findings
        assert re.match(r"rank 1 \(.*\) gets no answer from the launcher's store for \d+ s", finding.problem)
        assert ended.wait(60) if abort else not ended.is_set()
        time.sleep(20 * limits.poll_s)
        assert len(lines) == 1
        logged.clear()
        os.kill(store_process.pid, signal.SIGCONT)
        assert logged.wait(60)  # the store answers again: the other rank, which says nothing, is named
        assert [finding.ranks for finding in watchdog.findings] == [(0,)]


@pytest.mark.long
def test_a_rank_that_makes_progress_without_an_answer_of_the_store_reports_no_hang(tmp_path, store_process):
    limits = Limits(floor_s=2.0, outside_s=2.0, grace_s=0.05, poll_s=0.02)
    with watched_over(store_process, 0, 1, tmp_path, limits=limits) as watchdog:
        until = time.monotonic() + 5 * watchdog._verdict_s
        while time.monotonic() < until:
            watchdog.progressed()
            time.sleep(0.01)
        assert watchdog.findings == []


@pytest.mark.world(3)
def test_healthy_ranks_are_not_blamed(tmp_path):
    assert all(result["found"] == [] for result in run(3, "none", 0, LIMITS, tmp_path).results.values())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.world(3)
@pytest.mark.parametrize(("fault", "guilty"), [pytest.param("stop", 0, marks=pytest.mark.long), ("skip", 1)])
def test_the_rank_that_hangs_is_named(tmp_path, fault, guilty):
    ended = run(3, fault, guilty, QUICK, tmp_path)
    assert len(ended.results) == (2 if fault in ("stop", "kill") else 3)
    for result in ended.results.values():
        ((ranks, host, _),) = result["found"]
        assert ranks == (guilty,)
        assert host
    (folder,) = {result["folder"] for result in ended.results.values()} - {None}
    assert {path.name for path in folder.iterdir()} == {"verdict.json", *(f"rank-{r}.txt" for r in ended.results)}


@pytest.mark.world(2)
def test_under_trainer_the_hanging_rank_is_named_and_both_processes_end(launch, tmp_path):
    done = launch(2, REPOSITORY / "tests" / "workers" / "health_training.py")
    assert done.code != 0
    (line,) = done.lines("hfscale: training hangs at step 31")
    assert "rank 1 (" in line
    assert "health_training.py" in line
    (verdict,) = (tmp_path / "out" / "hfscale_hang").glob("*/verdict.json")
    (finding,) = json.loads(verdict.read_text())["findings"]
    assert finding["ranks"] == [1]
    assert (tmp_path / "out" / "checkpoint-28" / MANIFEST_NAME).exists(), "it was in flight at the hang"
    skews = json.loads((tmp_path / "skews.json").read_text())
    assert len(skews) == 3
    assert all(skew >= 1 for skew in skews)


def test_the_flight_recorder_still_has_the_functions_that_are_called():
    """The two functions with a leading underscore that hfscale.health.diagnosis calls."""
    from torch._C import _distributed_c10d

    dump = json.loads(_distributed_c10d._dump_fr_trace_json(True, False))
    assert dump["version"].startswith("2."), "torch's dump has changed: adapt hfscale/health/diagnosis.py"
    assert sys._current_frames()
