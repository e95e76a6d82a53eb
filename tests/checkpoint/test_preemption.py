"""Preemption notices: their collection, signals, DataLoader workers, and the reaction of a training on one process."""

import functools
import json
import logging
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from test_checkpoint_writer import paused_saves
from tiny import RandomTokens, logged, tiny_trainer
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from workers.slow_rows import SlowRows

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint.preemption import (
    NOTICES,
    SOURCES,
    Notice,
    Preempted,
    PreemptionNotices,
    SignalWatch,
    assumed_notice_s,
    end_workers,
    shield_workers,
    watch_signals,
)
from hfscale.checkpoint.preemption.stop import PreemptionStop
from hfscale.checkpoint.store import verify
from hfscale.errors import UsageError

SAVING = {"save_strategy": "steps", "save_steps": 100, "max_steps": 8}
returning = functools.partial(SpotCheckpointCallback, on_preemption="return")
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 1}


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    """Each test must leave the signal handlers unchanged and no notices. Ranks agree at each step."""
    monkeypatch.setattr(PreemptionStop, "exchange_every_s", 0.0)
    watch_signals().restore()  # an earlier test may have left a training that it broke off
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before
    assert NOTICES.pending() == []


@pytest.fixture
def long_evaluations(monkeypatch):
    """Evaluations are expected to last longer than any notice leaves."""
    monkeypatch.setattr(PreemptionStop, "_evaluation_left_s", lambda self: math.inf)


def status(output_dir):
    return json.loads((output_dir / "hfscale_status.json").read_text())


class At(TrainerCallback):
    """Calls `action` at the n-th occurrence of an event."""

    def __init__(self, event, count, action):
        self.left = count
        self.action = action
        setattr(self, event, self._count)

    def _count(self, args, state, control, **kwargs):
        self.left -= 1
        if self.left == 0:
            self.action()


def kill(number=signal.SIGTERM):
    return lambda: os.kill(os.getpid(), number)


class TestNotice:
    def test_seconds_left_count_from_the_arrival(self):
        notice = Notice(source="SIGTERM", seconds=3000.0, received=time.monotonic() - 1000)
        assert notice.seconds_left() == pytest.approx(2000, abs=60)
        assert Notice(source="SIGTERM").seconds_left() is None
        late = Notice(source="SIGTERM", received=time.monotonic() - 1000)
        assert late.seconds_left(500) == pytest.approx(-500, abs=60)

    def test_the_first_notice_of_a_source_is_kept_and_can_be_withdrawn(self):
        notices = PreemptionNotices()
        first = Notice(source="SIGTERM", seconds=1.0)
        notices.add(first)
        notices.add(Notice(source="SIGTERM", seconds=99.0))
        assert notices.pending() == [first]
        notices.withdraw("SIGTERM")
        notices.withdraw("SIGTERM")
        assert notices.pending() == []

    def test_a_hint_is_taken_once(self):
        notices = PreemptionNotices()
        notices.add_hint("AWS")
        assert [notices.take_hint(), notices.take_hint()] == [True, False]

    @pytest.mark.parametrize(
        ("source", "environ", "seconds"),
        [
            ("SIGTERM", {}, 30.0),
            ("SIGINT", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}, 120.0),
            ("SIGTERM", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}, 30.0),
            ("SIGUSR1", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}, None),
            ("stop file", {}, None),
        ],
    )
    def test_assumed_seconds_of_a_signal(self, source, environ, seconds):
        assert assumed_notice_s(source, environ) == seconds

    def test_preempted_exits_with_75(self):
        with pytest.raises(SystemExit) as ended:
            raise Preempted("why")
        assert (ended.value.code, ended.value.message) == (75, "why")


class TestSignalWatch:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
    def test_a_signal_adds_a_notice_while_a_training_serves_it(self, number):
        notices, seen = PreemptionNotices(), []
        watch = SignalWatch(notices)
        assert watch.install()
        watch.serve(lambda frame: seen.append(frame.f_code.co_name) or True)
        os.kill(os.getpid(), number)
        assert [notice.source for notice in notices.pending()] == [number.name]
        assert seen
        assert number.name in SOURCES
        watch.done()

    def test_a_second_ctrl_c_interrupts_as_python_does(self):
        watch = SignalWatch(PreemptionNotices())
        watch.install()
        watch.serve(lambda frame: True)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)

    def test_outside_a_training_a_signal_has_its_previous_effect(self):
        """An exception can end a training without `done`: the process must still react to signals."""
        calls, notices = [], PreemptionNotices()
        before = signal.signal(signal.SIGUSR1, lambda *_: calls.append("before"))
        try:
            watch = SignalWatch(notices)
            watch.install()
            watch.serve(lambda frame: False)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert calls == ["before"]
            assert notices.pending() == []
            assert not watch.is_installed
        finally:
            signal.signal(signal.SIGUSR1, before)

    def test_restore_leaves_a_handler_that_was_installed_later(self):
        watch = SignalWatch(PreemptionNotices())
        watch.install()
        before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        watch.restore()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        assert before != signal.SIG_IGN
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def test_no_handler_is_installed_outside_the_main_thread(self):
        watch, done = SignalWatch(PreemptionNotices()), []
        thread = threading.Thread(target=lambda: done.append(watch.install()))
        thread.start()
        thread.join(120)
        assert done == [False]

    @pytest.mark.parametrize(
        ("served", "number", "later", "code"),
        [
            (False, "SIGTERM", 0, 0),
            (False, "SIGUSR1", 6, 75),
            (True, "SIGTERM", 6, 0),
            (False, "SIGINT", 0, -signal.SIGINT),
        ],
    )
    def test_a_watch_of_the_whole_process(self, served, number, later, code):
        """Before the training its first step serves the signal; without one, a repeated signal ends the process.

        After the training the export can finish."""
        program = (
            "import os, signal; from hfscale.checkpoint.preemption import watch_signals\n"
            "watch = watch_signals(whole_process=True)\n"
            f"if {served}: watch.serve(lambda frame: True); watch.done()\n"
            f"os.kill(os.getpid(), signal.{number})\n"
            f"import time; now = time.monotonic(); time.monotonic = lambda: now + {later}\n"
            f"os.kill(os.getpid(), signal.{number})\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=False
        )
        assert done.returncode == code, done.stderr
        assert ("after its first step" in done.stderr) == (not served and number != "SIGINT")


QUICK_GRACE_S = 0.5
"""Takes the place of the seconds that a process waits before it looks at the other ranks."""


def test_sigterm_ends_the_process_once_a_peer_is_dead_and_not_before():
    program = (
        "import os, psutil, signal, subprocess, time\n"
        "from hfscale.checkpoint.preemption import PeerWatch, peers, watch_signals\n"
        f"peers.GRACE_S = {QUICK_GRACE_S}\n"
        "watch_signals(whole_process=True)\n"
        "peer = subprocess.Popen(['sleep', '600'])\n"
        "PeerWatch({'rank 1': psutil.Process(peer.pid)}).start()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        f"time.sleep({3 * QUICK_GRACE_S})\n"
        "print('alive', flush=True)\n"
        "peer.kill()\n"  # and does not wait for it: the peer becomes a zombie
        "time.sleep(200)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stdout) == (143, "alive\n"), done.stderr
    assert "rank 1 has died" in done.stderr


def test_the_rank_that_died_first_is_named_and_not_one_that_left_because_of_it():
    program = (
        "import os, psutil, signal, subprocess, threading\n"
        "from hfscale.checkpoint.preemption import PeerWatch, watch_signals\n"
        "watch_signals(whole_process=True)\n"
        "first, second = (subprocess.Popen(['sleep', '600']) for _ in range(2))\n"
        "watch = PeerWatch({'rank 1': psutil.Process(first.pid), 'rank 2': psutil.Process(second.pid)})\n"
        "waits, go = threading.Event(), threading.Event()\n"
        "class Pause:\n"
        "    def wait(self, seconds):\n"
        "        waits.set(); go.wait()\n"
        "watch._stop_now = Pause()\n"
        "watch.start()\n"
        "second.kill(); second.wait()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "waits.wait(); first.kill(); first.wait(); go.set(); threading.Event().wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 143, done.stderr
    assert "rank 2 has died" in done.stderr


def test_sigterm_before_training_ends_the_process_once_another_rank_of_its_launcher_is_dead(python):
    """The launcher has waited for the dead rank, so that nothing of it is left."""
    launcher = (
        "import os, signal, subprocess, time\n"
        "from hfscale.checkpoint.preemption import peers\n"
        "from hfscale.recipe.entrypoint import run\n"
        f"peers.GRACE_S = {QUICK_GRACE_S}\n"
        "os.environ['LOCAL_WORLD_SIZE'] = '2'\n"
        "other = subprocess.Popen(['sleep', '600'])\n"
        "reader, writer = os.pipe()\n"
        "def main():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        f"    time.sleep({3 * QUICK_GRACE_S})\n"
        "    os.write(writer, b'alive')\n"
        "    time.sleep(120)\n"
        "rank = os.fork()\n"
        "if rank == 0:\n"
        "    os.close(reader)\n"
        "    run(main)\n"
        "    os._exit(0)\n"
        "os.close(writer)\n"
        "print(os.read(reader, 5))\n"
        "other.kill()\n"
        "other.wait()\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]))\n"
    )
    done = python("-c", launcher)
    assert done.out.splitlines()[-2:] == ["b'alive'", "143"], done.err
    assert "has died" in done.err


class TestProtectedWorkers:
    @pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
    def test_survive_the_signals_of_their_rank(self, method):
        loader = DataLoader(SlowRows(), batch_size=1, num_workers=2, multiprocessing_context=method)
        shield_workers(loader)
        rows = []
        for number, row in enumerate(loader):
            rows.append(int(row))
            if number == 1:
                for worker in set(rows):
                    for name in ("SIGTERM", "SIGUSR1", "SIGINT", "SIGTERM"):
                        # From another process, like a launcher: a SIGTERM of the rank itself ends a worker.
                        subprocess.run(["kill", f"-{name}", str(worker)], check=True)
        assert len(rows) == 12
        assert len(set(rows)) == 2

    def test_end_workers_works_though_the_loader_is_in_a_reference_cycle(self):
        loader = DataLoader(SlowRows(), batch_size=1, num_workers=2, persistent_workers=True)
        loader.cycle = [loader]
        shield_workers(loader)
        next(iter(loader))
        workers = multiprocessing.active_children()
        assert len(workers) == 2
        end_workers()
        assert multiprocessing.active_children() == []
        assert [worker.exitcode for worker in workers] == [0, 0]

    def test_die_of_signals_without_the_protection(self):
        """This shows that the other tests can fail."""
        loader = DataLoader(SlowRows(), batch_size=1, num_workers=1)
        kill_all = (subprocess.run(["kill", "-TERM", str(int(row))], check=True) for row in loader)
        with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
            list(kill_all)

    def test_can_be_ended_by_their_rank(self):
        shielded = DataLoader(SlowRows(), num_workers=1)
        shield_workers(shielded)
        worker = shielded.multiprocessing_context.Process(target=time.sleep, args=(600,))
        worker.start()
        worker.terminate()
        worker.join(120)
        assert worker.exitcode == 0

    def test_a_loader_without_workers_is_not_changed(self):
        loader = DataLoader(SlowRows())
        shield_workers(loader)
        assert loader.multiprocessing_context is None


class TestTraining:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
    def test_a_signal_saves_the_step_and_stops(self, tmp_path, number):
        spot = returning()
        trainer = tiny_trainer(tmp_path, At("on_step_begin", 3, kill(number)), spot, **SAVING)
        trainer.train()
        assert trainer.state.global_step == 3
        assert verify(tmp_path / "checkpoint-3").step == 3
        assert spot.preempted == f"{number.name}: checkpoint-3 is committed"
        assert status(tmp_path) == {
            "status": "preempted",
            "step": 3,
            "checkpoint": "checkpoint-3",
            "reason": spot.preempted,
        }

    @pytest.mark.parametrize(
        ("event", "count"), [("on_substep_end", 3), ("on_pre_optimizer_step", 3), ("on_train_begin", 1), ("on_log", 2)]
    )
    def test_the_resumed_run_has_the_losses_of_an_uninterrupted_one(self, tmp_path, event, count):
        arguments = SAVING | {"gradient_accumulation_steps": 2, "lr_scheduler_type": "linear"}
        uninterrupted = tiny_trainer(tmp_path / "uninterrupted", returning(), **arguments)
        uninterrupted.train()
        first = tiny_trainer(tmp_path / "run", returning(), At(event, count, kill()), **arguments)
        first.train()
        assert 1 <= first.state.global_step <= 3
        again = tiny_trainer(tmp_path / "run", returning(), **arguments)
        again.train(resume_from_checkpoint=latest_checkpoint(tmp_path / "run"))
        assert logged(again, "loss") == logged(uninterrupted, "loss")
        assert status(tmp_path / "run")["status"] == "completed"

    @pytest.mark.parametrize("save_strategy", ["steps", "best", "epoch"])
    def test_an_evaluation_is_cut_short_and_gives_no_metrics(self, tmp_path, long_evaluations, save_strategy):
        arguments = SAVING | EVALUATING | {"save_strategy": save_strategy, "metric_for_best_model": "loss"}
        spot, steps = returning(), []
        count = At("on_prediction_step", -1, lambda: None)
        trainer = tiny_trainer(tmp_path, At("on_prediction_step", 9, kill()), spot, count, **arguments)
        trainer.train()
        steps = -1 - count.left
        assert trainer.state.global_step == 4
        assert 8 <= steps <= 10, "the second evaluation was not cut short"
        assert len(logged(trainer, "eval_loss")) == 1
        saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
        assert saved["best_global_step"] == 2
        assert verify(tmp_path / "checkpoint-4").step == 4
        assert spot.preempted == "SIGTERM: checkpoint-4 is committed"

    def test_an_evaluation_due_at_the_stop_costs_one_batch(self, tmp_path):
        uninterrupted = tiny_trainer(tmp_path / "uninterrupted", returning(), **(SAVING | EVALUATING))
        uninterrupted.train()
        count = At("on_prediction_step", -1, lambda: None)
        arguments = SAVING | EVALUATING
        tiny_trainer(tmp_path / "run", At("on_step_begin", 2, kill()), count, returning(), **arguments).train()
        assert count.left == -2
        again = tiny_trainer(tmp_path / "run", returning(), **arguments)
        again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
        assert logged(again, "loss") == logged(uninterrupted, "loss")
        assert logged(again, "eval_loss") == logged(uninterrupted, "eval_loss")

    def test_several_evaluation_sets_are_all_cut_short(self, tmp_path):
        trainer = tiny_trainer(tmp_path, At("on_prediction_step", 1, kill()), returning(), **(SAVING | EVALUATING))
        trainer.eval_dataset = {"one": RandomTokens(8), "two": RandomTokens(8)}
        trainer.train()
        assert trainer.state.global_step == 2
        assert not [entry for entry in trainer.state.log_history if any(key.startswith("eval_") for key in entry)]
        assert trainer.evaluate(), "after the training, evaluate() must work as before"

    def test_a_signal_during_a_save_uses_that_save(self, tmp_path):
        spot = returning()
        arguments = SAVING | {"save_steps": 3}
        trainer = tiny_trainer(tmp_path, At("on_save", 1, kill()), spot, **arguments)
        trainer.train()
        assert trainer.state.global_step == 3
        assert spot.preempted == "SIGTERM: checkpoint-3 is committed"

    def test_a_stop_within_an_epoch_does_not_evaluate_or_save_again(self, tmp_path):
        """Neither the evaluation that is due at the end of an epoch is made, nor a second save of the step."""
        saves = At("on_save", -1, lambda: None)
        arguments = {"save_strategy": "epoch", "eval_strategy": "epoch", "max_steps": 30}
        trainer = tiny_trainer(tmp_path, At("on_step_begin", 5, kill()), returning(), saves, **arguments)
        trainer.train()
        assert (trainer.state.global_step, saves.left) == (5, -2)
        assert logged(trainer, "eval_loss") == []

    def test_the_best_model_is_not_loaded_after_a_stop(self, tmp_path):
        arguments = SAVING | EVALUATING | {"save_steps": 2, "load_best_model_at_end": True}
        trainer = tiny_trainer(tmp_path, At("on_step_begin", 5, kill()), returning(), **arguments)
        trainer._load_best_model = lambda: pytest.fail("it was loaded")
        trainer.train()
        assert trainer.args.load_best_model_at_end

    def test_a_signal_in_the_last_step_has_no_effect(self, tmp_path):
        spot = returning()
        tiny_trainer(tmp_path, At("on_step_begin", 8, kill()), spot, **SAVING).train()
        assert spot.preempted is None
        assert status(tmp_path)["status"] == "completed"

    def test_an_evaluation_after_the_last_step_is_left_for_the_last_save(self, tmp_path):
        count = At("on_prediction_step", -1, lambda: None)
        arguments = SAVING | EVALUATING | {"eval_steps": 8}
        tiny_trainer(tmp_path, At("on_prediction_step", 2, kill()), count, returning(), **arguments).train()
        assert count.left >= -4, "the evaluation was not cut short"
        assert status(tmp_path) == {"status": "completed", "step": 8, "checkpoint": "checkpoint-8", "reason": None}

    def test_the_reason_says_that_nothing_is_saved(self, tmp_path):
        spot = returning()
        tiny_trainer(tmp_path, At("on_step_begin", 2, kill()), spot, max_steps=8).train()
        assert status(tmp_path)["reason"].startswith("SIGTERM: save_strategy is 'no'")
        assert list(tmp_path.glob("checkpoint-*")) == []

    def test_after_an_exception_the_process_reacts_to_signals(self, tmp_path):
        def fail():
            raise RuntimeError("the machine is gone")

        trainer = tiny_trainer(tmp_path, At("on_step_begin", 2, fail), returning(), **SAVING)
        with pytest.raises(RuntimeError):
            trainer.train()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)

    def test_workers_of_both_loaders_survive(self, tmp_path):
        """Another process signals the process group, like a launcher, during an evaluation."""
        seen = []

        def group_kill():
            workers = multiprocessing.active_children()
            seen.append(len(workers))
            subprocess.run(["kill", "-TERM", str(os.getpid()), *(str(worker.pid) for worker in workers)], check=True)

        arguments = SAVING | EVALUATING | {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
        trainer = tiny_trainer(tmp_path, At("on_prediction_step", 2, group_kill), returning(), **arguments)
        trainer.train()
        assert seen == [4]
        assert status(tmp_path)["reason"] == "SIGTERM: checkpoint-2 is committed"


class TestEndOfTheProcess:
    """By default nothing after `train` runs: neither in a script nor in the next cells of a notebook."""

    @pytest.mark.parametrize(("number", "raises"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
    @pytest.mark.parametrize("added_later", [False, True])
    def test_train_raises_when_all_is_saved_and_done(self, tmp_path, number, raises, added_later):
        ended = At("on_train_end", -1, lambda: None)
        arguments = SAVING | EVALUATING | {"save_steps": 2, "load_best_model_at_end": True, "save_total_limit": 2}
        before = [At("on_step_begin", 3, kill(number)), ended]
        callback = SpotCheckpointCallback()
        trainer = tiny_trainer(tmp_path, *before, *([] if added_later else [callback]), **arguments)
        if added_later:
            trainer.add_callback(callback)
        given = trainer.args.to_dict()
        with pytest.raises(raises) as raised:
            trainer.train()
        assert raised.type is (raises if raises is KeyboardInterrupt else Preempted)
        assert getattr(raised.value, "code", 75) == 75
        assert (trainer.state.global_step, ended.left, trainer.is_in_train) == (3, -2, False)
        assert status(tmp_path)["status"] == "preempted"
        assert callback.preempted == f"{number.name}: checkpoint-3 is committed"
        assert trainer.args.to_dict() == given
        saved = torch.load(tmp_path / "checkpoint-3" / "training_args.bin", weights_only=False)
        assert saved.to_dict() == given
        trainer.train(resume_from_checkpoint=latest_checkpoint(tmp_path))
        assert trainer.state.global_step == 8

    def test_a_start_at_step_0_beside_checkpoints_names_the_argument(self, tmp_path, log):
        arguments = SAVING | {"save_steps": 2, "max_steps": 4}
        trainer = tiny_trainer(tmp_path, SpotCheckpointCallback(), **arguments)
        trainer.train(resume_from_checkpoint=latest_checkpoint(tmp_path))
        trainer.train(resume_from_checkpoint=latest_checkpoint(tmp_path))
        warnings = [record.getMessage() for record in log.records if record.levelno == logging.WARNING]
        assert warnings == []
        trainer.train()
        warnings = [record.getMessage() for record in log.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert "resume_from_checkpoint=" in warnings[0]


class TestDeadline:
    def preempted(self, folder, *, write_s, **options):
        spot = returning(**options)
        set_write_s = lambda: setattr(spot.preemption, "last_write_s", write_s)  # noqa: E731
        tiny_trainer(
            folder, At("on_step_begin", 1, set_write_s), At("on_step_begin", 3, kill()), spot, **SAVING
        ).train()
        return spot.preempted

    @pytest.mark.parametrize(("write_s", "saves"), [(None, True), (0.5, True), (19.0, True), (21.0, False)])
    def test_a_save_is_started_only_if_there_is_time(self, tmp_path, write_s, saves):
        """30 s are assumed to be left, of which a save may take two thirds."""
        reason = self.preempted(tmp_path, write_s=write_s)
        assert (tmp_path / "checkpoint-3").is_dir() == saves
        assert ("no further save" in reason) != saves

    @pytest.mark.parametrize(("around_s", "saves"), [(9.0, True), (13.0, False)])
    def test_waiting_and_copying_count_as_part_of_a_save(self, tmp_path, around_s, saves):
        """The wait for a save in flight, and the copy to a remote store."""
        spot = returning()

        def set_times():
            spot.preemption.last_write_s = 8.0
            spot.preemption.around_save_s = lambda: around_s

        tiny_trainer(
            tmp_path, At("on_step_begin", 1, set_times), At("on_step_begin", 3, kill()), spot, **SAVING
        ).train()
        assert (tmp_path / "checkpoint-3").is_dir() == saves
        assert (re.search(r"took 8\.0 s.*\b21\.0 s", spot.preempted) is not None) != saves

    def test_the_save_in_flight_counts(self, tmp_path, monkeypatch):
        spot = returning()
        with paused_saves(monkeypatch) as (go, _):

            def signal_during_save():
                assert spot._saving.writer.in_flight
                spot._saving.writer._last_s = 60.0
                spot.preemption.last_write_s = 1.0
                os.kill(os.getpid(), signal.SIGTERM)

            release = At("on_step_end", 3, go.set)
            tiny_trainer(
                tmp_path, At("on_step_begin", 3, signal_during_save), spot, release, **(SAVING | {"save_steps": 2})
            ).train()
        assert re.search(r"took 1\.0 s.*\b(3|4|5|6)\d\.\d s", spot.preempted), (
            "the save in flight needs a minute in all"
        )
        assert (tmp_path / "checkpoint-2").is_dir()

    def test_notice_s_replaces_the_assumed_time(self, tmp_path):
        reason = self.preempted(tmp_path, write_s=900.0, notice_s=1000.0)
        assert re.match(r"SIGTERM: (1000\.0|9\d\d\.\d) s left.* 900\.0 s", reason)

    @pytest.mark.parametrize("bad", [{"notice_s": 0}, {"notice_s": -3.0}, {"cloud": "gce"}, {"on_preemption": "stop"}])
    def test_wrong_options_are_usage_errors(self, bad):
        with pytest.raises(UsageError, match=r"notice_s is (0|-3\.0)|cloud is 'gce'|on_preemption is 'stop'"):
            SpotCheckpointCallback(**bad)

    def test_the_time_of_a_save_is_measured(self, tmp_path):
        spot = returning()
        tiny_trainer(tmp_path, spot, **(SAVING | {"save_steps": 3, "max_steps": 4})).train()
        assert spot.preemption.last_write_s > 0


class TestStopFile:
    @pytest.mark.parametrize("absolute", [False, True])
    def test_the_stop_file_stops_the_run_and_is_removed(self, tmp_path, absolute):
        path = tmp_path / ("elsewhere" if absolute else "out/hfscale_stop")
        spot = returning(stop_file=str(path) if absolute else "hfscale_stop")
        arguments = SAVING | {"max_steps": 40}
        trainer = tiny_trainer(tmp_path / "out", At("on_step_begin", 3, path.touch), spot, **arguments)
        trainer.train()
        assert 3 <= trainer.state.global_step < 40
        assert spot.preempted == f"stop file: checkpoint-{trainer.state.global_step} is committed"
        assert not path.exists()
        again = tiny_trainer(tmp_path / "out", returning(), **arguments)
        again.train(resume_from_checkpoint=latest_checkpoint(tmp_path / "out"))
        assert again.state.global_step == 40

    def test_the_save_file_gives_one_checkpoint_more_and_is_removed(self, tmp_path):
        path = tmp_path / "hfscale_save"
        arguments = SAVING | {"max_steps": 20, "save_total_limit": 5}
        tiny_trainer(tmp_path, At("on_step_begin", 3, path.touch), returning(), **arguments).train()
        first, last = sorted(int(folder.name.removeprefix("checkpoint-")) for folder in tmp_path.glob("checkpoint-*"))
        assert 3 <= first < last == 20
        assert not path.exists()

    def test_the_stop_file_can_be_turned_off(self, tmp_path):
        (tmp_path / "hfscale_stop").touch()
        trainer = tiny_trainer(tmp_path, returning(stop_file=None), **SAVING)
        trainer.train()
        assert trainer.state.global_step == 8


def test_a_notice_withdrawn_before_the_decision_does_not_stop_the_run(tmp_path):
    """Like a cancelled event of Azure: it is pending while the ranks vote, and withdrawn before they agree."""
    spot = returning()
    agree = spot.preemption._agree_on_stop

    def after_withdrawal(*args):
        NOTICES.withdraw("Azure scheduled event")
        return agree(*args)

    spot.preemption._agree_on_stop = after_withdrawal
    add = lambda: NOTICES.add(Notice(source="Azure scheduled event", seconds=30.0))  # noqa: E731
    trainer = tiny_trainer(tmp_path, At("on_step_begin", 2, add), spot, **SAVING)
    trainer.train()
    assert (trainer.state.global_step, spot.preempted) == (8, None)


def test_a_hint_saves_and_the_run_continues(tmp_path):
    spot = returning()
    hint = lambda: NOTICES.add_hint("AWS spot notice")  # noqa: E731
    saved = []

    class RecordSaves(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            saved.append(state.global_step)

    at_hint = At("on_step_begin", 2, hint)
    tiny_trainer(tmp_path, at_hint, spot, RecordSaves(), **(SAVING | {"max_steps": 40})).train()
    early, last = saved
    assert (2 <= early < 40, last, spot.preempted) == (True, 40, None)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-40"]  # that of the hint is temporary
