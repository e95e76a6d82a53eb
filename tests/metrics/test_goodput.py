"""Goodput and cost over restarts, compared with known times."""

import json

import pytest
from tiny import logged, tiny_trainer
from transformers import TrainerCallback

from hfscale import ScalingMetricsCallback
from hfscale.core.lives import Life, lives_of
from hfscale.core.records import append_record, begin_records, last_sign_of_life, read_events, read_records
from hfscale.core.run_memory import RESTARTS_VARIABLE
from hfscale.errors import UsageError
from hfscale.metrics.goodput import GoodputTracker, rate
from hfscale.report.run_data import load_run
from hfscale.report.summary import headline


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def life(begun, ended, world_size, *, end_step=None, is_pause=False):
    return Life(
        begun=begun,
        ended=ended,
        first_step=0,
        world_size=world_size,
        end_step=end_step,
        is_pause=is_pause,
        saves=(),
    )


def test_goodput_of_an_uninterrupted_run():
    clock, saved = Clock(), {}
    goodput_tracker = GoodputTracker(saved, now=clock)
    clock.now = 1010.0  # imports, loading
    goodput_tracker.begin(launched_at=1000.0, world_size=4)
    clock.now = 1110.0
    goodput_tracker.fold({"compute": 80.0, "data_wait": 15.0, "save": 5.0})
    assert goodput_tracker.goodput() == pytest.approx(80 / 110)
    assert saved["seconds"] == {"start_up": 10.0, "compute": 80.0, "data_wait": 15.0, "save": 5.0}
    assert goodput_tracker.gpu_hours() == pytest.approx(4 * 110 / 3600)


def test_steps_after_the_checkpoint_are_lost_and_the_time_until_the_relaunch_is_down_time():
    clock, saved = Clock(), {}
    first = GoodputTracker(saved, now=clock)
    first.begin(launched_at=1000.0, world_size=4)
    clock.now = 1060.0
    first.update({"compute": 60.0})
    checkpoint = json.loads(json.dumps(saved))  # the content of the checkpoint; its save takes 10 s
    clock.now = 1100.0
    first.update({"compute": 90.0, "save": 10.0})  # 30 s more of steps, then the machine is lost
    clock.now = 1500.0
    again = GoodputTracker(checkpoint, now=clock)
    again.begin(launched_at=1480.0, world_size=2, lives=[life(1000.0, 1100.0, 4)], save=(1070.0, 10.0))
    clock.now = 1600.0
    again.fold({"compute": 100.0})
    assert checkpoint["seconds"] == {
        "compute": 160.0,
        "save": 10.0,
        "lost": 30.0,
        "down": 380.0,
        "start_up": 20.0,
    }
    assert sum(checkpoint["seconds"].values()) == 600.0  # every second since the first launch is in one phase
    assert again.goodput() == pytest.approx(160 / 600)
    # The time between launches costs nothing: 100 s on 4 GPUs, 120 s on 2.
    assert again.gpu_hours() == pytest.approx((100 * 4 + 120 * 2) / 3600)


def test_a_launch_that_saved_nothing_is_lost_completely():
    clock, saved = Clock(), {}
    clock.now = 1300.0
    goodput_tracker = GoodputTracker(saved, now=clock)
    goodput_tracker.begin(launched_at=1290.0, world_size=2, lives=[life(1000.0, 1200.0, 2)])
    clock.now = 1400.0
    goodput_tracker.fold({"compute": 100.0})
    assert saved["seconds"] == {"lost": 200.0, "down": 90.0, "start_up": 10.0, "compute": 100.0}
    assert goodput_tracker.goodput() == pytest.approx(0.25)
    assert goodput_tracker.gpu_hours() == pytest.approx(2 * (200 + 110) / 3600)


def test_every_launch_since_the_checkpoint_counts_with_its_own_processes():
    """By hand: 100 s on 8 kept, then 40 s on 8, 100 s on 2 and 50 s on 4 lost, with 3 gaps, and 60 s on 8."""
    clock, saved = Clock(), {}
    tracker = GoodputTracker(saved, now=clock)
    tracker.begin(launched_at=1000.0, world_size=8)
    clock.now = 1100.0
    tracker.fold({"compute": 100.0})
    lives = [life(1000.0, 1140.0, 8), life(2040.0, 2140.0, 2), life(3040.0, 3090.0, 4)]
    clock.now = 4100.0
    again = GoodputTracker(saved, now=clock)
    again.begin(launched_at=4090.0, world_size=8, lives=lives)
    clock.now = 4150.0
    again.fold({"compute": 50.0})
    assert saved["seconds"] == {"compute": 150.0, "lost": 190.0, "down": 900.0 + 900.0 + 1000.0, "start_up": 10.0}
    assert sum(saved["seconds"].values()) == 3150.0
    assert again.gpu_hours() == pytest.approx((140 * 8 + 100 * 2 + 50 * 4 + 60 * 8) / 3600)
    assert again.goodput() == pytest.approx(150 / 3150)


def test_a_pause_after_a_completed_training_is_no_down_time():
    clock, saved = Clock(), {}
    tracker = GoodputTracker(saved, now=clock)
    tracker.begin(launched_at=1000.0, world_size=1)
    clock.now = 1100.0
    tracker.fold({"compute": 100.0})
    clock.now = 9000.0
    again = GoodputTracker(saved, now=clock)
    completed = life(1000.0, 1105.0, 1, end_step=8, is_pause=True)
    again.begin(launched_at=9000.0, world_size=1, lives=[completed], step=8)
    clock.now = 9100.0
    again.fold({"compute": 100.0})
    assert saved["seconds"] == {"compute": 200.0, "other": 5.0, "paused": 7895.0, "start_up": 0.0}
    assert again.goodput() == pytest.approx(200 / 205)
    assert again.gpu_hours() == pytest.approx(205 / 3600)


def timeline(*launches):
    """Events of launches: begin, step, processes, the previous record, and the events of each."""
    events = []
    for begun, step, world_size, previous, *own in launches:
        events.append(
            {"event": "launch", "time": begun, "step": step, "world_size": world_size, "max_steps": 8}
            | ({"previous_alive": previous} if previous else {})
        )
        events += own
    return events


def test_launches_are_read_from_a_timeline():
    save = {"event": "save", "time": 1100.0, "step": 4}
    end = {"event": "end", "time": 3100.0, "step": 8}
    stopped = end | {"step": 6, "status": "preempted", "reason": "SIGINT: checkpoint-6 is committed"}
    events = timeline((1000.0, 0, 8, None, save), (2000.0, 4, 2, 1140.0), (3000.0, 4, 4, 2050.0, stopped))
    lives = lives_of(events, 3120.0)
    assert [(one.begun, one.ended, one.world_size) for one in lives] == [
        (1000.0, 1140.0, 8),
        (2000.0, 2050.0, 2),
        (3000.0, 3120.0, 4),
    ]
    assert [one.is_pause for one in lives] == [False, False, True]
    spot = stopped | {"reason": "SIGTERM: checkpoint-6 is committed"}
    assert not lives_of(timeline((3000.0, 4, 4, None, spot)))[0].is_pause
    assert lives_of(timeline((3000.0, 4, 4, None, end)))[0].is_pause  # of an earlier version, at its last step
    assert not lives_of(timeline((3000.0, 4, 4, None, end | {"step": 6})))[0].is_pause


class KilledError(Exception):
    pass


class KillAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KilledError


@pytest.mark.parametrize("is_lost", [True, False])
def test_launches_on_a_disk_that_was_lost_are_counted(tmp_path, monkeypatch, is_lost):
    """The third launch under `hfscale run` resumes; the files of the others are there only if their disk is."""
    arguments = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    with pytest.raises(KilledError):
        tiny_trainer(tmp_path / "out", ScalingMetricsCallback(), KillAt(3), **arguments).train()
    folder = tmp_path / "new" if is_lost else tmp_path / "out"
    monkeypatch.setenv(RESTARTS_VARIABLE, "2")
    again = tiny_trainer(folder, ScalingMetricsCallback(), **arguments)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    run = load_run(folder)
    assert (run.lost_launches, run.restarts) == ((2, 2) if is_lost else (0, 1))
    assert any(f"launch {3 if is_lost else 2} begins at step 2" in alarm["text"] for alarm in run.alarms)


def test_the_report_has_the_last_log_of_a_run_and_calls_no_pause_a_restart(tmp_path):
    """10 steps logged at 7, and 3 more after it was completed: 13 steps of 4 sequences of 16 tokens."""
    price = {"usd_per_gpu_hour": 3600.0}
    arguments = {"save_strategy": "steps", "save_steps": 5, "logging_steps": 7}
    tokens = 4 * 16
    tiny_trainer(tmp_path, ScalingMetricsCallback(**price), max_steps=10, **arguments).train()
    run = load_run(tmp_path)
    assert [record["step"] for record in run.records] == [7, 10]
    assert run.last("scaling/tokens_seen") == 10 * tokens
    assert {one.state for one in run.checkpoints} == {"of Trainer, not checked"}
    continued = tiny_trainer(tmp_path, ScalingMetricsCallback(**price), max_steps=13, **arguments)
    continued.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    run = load_run(tmp_path)
    assert run.last("scaling/tokens_seen") == 13 * tokens
    assert (run.launches, run.restarts) == (2, 0)
    assert run.alarms == []
    assert run.split["paused"] > 0
    assert {"lost", "down"}.isdisjoint(run.split)
    up_s = sum(attempt.ended - attempt.begun for attempt in run.attempts)
    assert run.last("scaling/usd") == pytest.approx(up_s, rel=0.05)  # one process at 1 USD per second


def test_a_run_without_a_log_does_not_ask_for_what_was_given(tmp_path):
    callback = ScalingMetricsCallback(peak_tflops=1.0, usd_per_gpu_hour=1.0)
    trainer = tiny_trainer(tmp_path, callback, KillAt(3), logging_steps=500)
    with pytest.raises(KilledError):
        trainer.train()
    notes = {tile.name: tile.note for tile in headline(load_run(tmp_path))}
    assert {notes[name] for name in ("Cost", "MFU", "Goodput")} == {"nothing is logged yet"}


@pytest.mark.timing
def test_goodput_and_cost_of_a_killed_and_relaunched_training(tmp_path):
    """Each number of the resumed run must agree with the timeline and the log of both launches."""
    arguments = {"save_strategy": "steps", "save_steps": 3, "max_steps": 8}
    with pytest.raises(KilledError):
        tiny_trainer(tmp_path, ScalingMetricsCallback(usd_per_gpu_hour=3.6), KillAt(5), **arguments).train()
    kept = read_records(tmp_path / "scaling.jsonl")
    again = tiny_trainer(tmp_path, ScalingMetricsCallback(usd_per_gpu_hour=3.6), **arguments)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    events = read_events(tmp_path)
    assert [event["event"] for event in events if event["event"] != "finding"] == [
        "launch",
        "setup",
        "workload",
        "job",
        "save",
        "launch",
        "alarm",  # about the restart
        "setup",
        "workload",
        "job",
        "save",
        "save",
        "end",
    ]
    launches = [event for event in events if event["event"] == "launch"]
    assert launches[1]["step"] == 3
    assert launches[1]["previous_alive"] == kept[-1]["time"]
    last = read_records(tmp_path / "scaling.jsonl")[-1]
    wall = last["time"] - launches[0]["time"]
    split = again.state.stateful_callbacks["hfscale"]["goodput"]["seconds"]
    assert split["lost"] > 0
    assert sum(split.values()) == pytest.approx(wall, rel=0.02, abs=0.05)
    assert last["scaling/goodput"] == pytest.approx(split["compute"] / wall, rel=0.02, abs=0.005)
    up = wall - split["down"]
    assert last["scaling/usd"] == pytest.approx(up * 3.6 / 3600, rel=0.02, abs=1e-4)
    per_million = last["scaling/usd"] / last["scaling/tokens_seen"] * 1e6
    assert last["scaling/usd_per_million_tokens"] == pytest.approx(per_million)


def test_without_a_price_no_cost_is_logged(tmp_path):
    trainer = tiny_trainer(tmp_path, ScalingMetricsCallback())
    trainer.train()
    assert logged(trainer, "scaling/usd") == logged(trainer, "scaling/usd_per_million_tokens") == []
    assert len(logged(trainer, "scaling/goodput")) == 4


def test_the_users_price_goes_before_the_price_list():
    assert rate("NVIDIA H100 80GB HBM3", 2.5).usd_per_gpu_hour == 2.5
    listed = rate("NVIDIA H100 80GB HBM3", None)
    assert 1 < listed.usd_per_gpu_hour < 20
    assert "read 20" in listed.source
    assert rate("cpu, 1 thread", None) is None
    with pytest.raises(UsageError, match="usd_per_gpu_hour is 0"):
        ScalingMetricsCallback(usd_per_gpu_hour=0)


class TestRecords:
    def write(self, folder, name, *lines):
        (folder / name).write_text(
            "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
        )

    def test_unfinished_lines_and_other_text_are_skipped(self, tmp_path):
        self.write(tmp_path, "scaling.jsonl", {"step": 1, "time": 5.0}, "[]", "null", '{"step": 2, "ti')
        assert read_records(tmp_path / "scaling.jsonl") == [{"step": 1, "time": 5.0}]
        assert last_sign_of_life(tmp_path) == 5.0
        assert last_sign_of_life(tmp_path / "nowhere") is None

    def test_an_unfinished_line_does_not_corrupt_the_next_one(self, tmp_path):
        self.write(tmp_path, "hfscale_timeline.jsonl", {"event": "launch", "step": 0, "time": 1.0})
        path = tmp_path / "hfscale_timeline.jsonl"
        path.write_text(path.read_text() + '{"event": "sa')
        begin_records(tmp_path, 5)
        append_record(path, {"event": "launch", "step": 5, "time": 9.0}, durable=True)
        assert [event["step"] for event in read_events(tmp_path)] == [0, 5]

    @pytest.mark.parametrize(
        ("events", "has_checkpoint", "is_kept"),
        [
            (["launch"], False, True),
            (["launch", "save"], False, True),
            (["launch", "end"], False, False),
            (["launch", "save"], True, False),
        ],
    )
    def test_a_timeline_without_checkpoint_and_end_is_continued(self, tmp_path, events, has_checkpoint, is_kept):
        if has_checkpoint:  # the event "save" is written when a save begins
            (tmp_path / "checkpoint-3.superseded").mkdir()
        self.write(tmp_path, "hfscale_timeline.jsonl", *({"event": e, "step": 0, "time": 1.0} for e in events))
        begin_records(tmp_path, 0)
        assert bool(read_events(tmp_path)) == is_kept
        assert len(list(tmp_path.glob("hfscale_timeline*"))) == 1
