"""Pauses of single ranks are counted and named, and garbage is collected in agreed steps."""

import gc
import json
import os
import resource

import numpy as np
import pytest
import torch
from forked_ranks import run_ranks
from native_runs import make_model
from replay_runs import NATIVE, environment, make_trainer, ranks_of
from tiny import RandomTokens, tiny_arguments, tiny_model, tiny_trainer
from transformers import Trainer, TrainerCallback, TrainerState

from benchmarks.jitter import complete_share, drawn_maxima, expected_maximum
from hfscale import CommHealthCallback
from hfscale.health import jitter
from hfscale.health.jitter import FULL_COLLECTION_EVERY, AgreedCollection, JitterWatch

QUIET = {
    "window_s": 10.0,
    "gc_s": 0.001,
    "cpu_wait_s": 0.01,
    "compiled": 0.0,
    "faults": 0.0,
    "new_pages": 100.0,
    "switches": 10.0,
    "slow_clock": 0.0,
}


class Collections(TrainerCallback):
    """Counts collections by generation, and whether Python collects by itself, in each step."""

    def __init__(self):
        self.generations, self.automatic = [], set()

    def on_train_begin(self, args, state, control, **kwargs):
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase, info):
        if phase == "stop":
            self.generations.append(info["generation"])

    def on_step_begin(self, args, state, control, **kwargs):
        self.automatic.add(gc.isenabled())
        [[] for _ in range(2000)]  # so much that Python would collect
        cycles = [[] for _ in range(2000)]
        for cycle in cycles:
            cycle.append(cycle)

    def on_train_end(self, args, state, control, **kwargs):
        gc.callbacks.remove(self._on_collection)


@pytest.mark.parametrize("every", [None, 3])
def test_garbage_is_collected_in_agreed_steps_only(tmp_path, every):
    seen = Collections()
    tiny_trainer(tmp_path, CommHealthCallback(gc_every_steps=every), seen, max_steps=9, save_strategy="no").train()
    assert seen.automatic == {every is None}
    if every is not None:
        assert seen.generations.count(1) == 3
        assert 0 not in seen.generations
    assert gc.isenabled()


class CollectingSteps(TrainerCallback):
    """Notes the steps in which garbage is collected, of any generation."""

    def __init__(self):
        self.steps = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.state = state
        gc.callbacks.append(self._on_collection)

    def on_step_begin(self, args, state, control, **kwargs):
        kept = [[] for _ in range(1000 * (1 + int(os.environ["RANK"])))]  # ranks would collect in different steps
        assert kept

    def _on_collection(self, phase, info):
        if phase == "stop":
            self.steps.append(self.state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        gc.callbacks.remove(self._on_collection)


def collect_on_rank(layout, folder, every):
    """Train on a rank, and write the steps in which it has collected garbage."""
    torch.set_num_threads(1)
    seen = CollectingSteps()
    health = CommHealthCallback(gc_every_steps=every, preflight=False, hang_after_s=None)
    make_trainer(layout, folder / "out", [health, seen], max_steps=8, save_strategy="no").train()
    (folder / f"steps-{os.environ['RANK']}.json").write_text(json.dumps(seen.steps))


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "layout",
    [
        "ddp",
        *(
            pytest.param(layout, marks=pytest.mark.long)
            for layout in ("fsdp2", "hsdp", "zero1", "zero2", "zero3", "native-ep", "tp-pp")
        ),
    ],
)
def test_all_ranks_collect_in_the_agreed_steps(tmp_path, layout):
    if layout in NATIVE:
        make_model(tmp_path / "model")
    ranks = ranks_of(layout)
    codes = run_ranks(
        ranks, collect_on_rank, layout, tmp_path, 3, log=tmp_path / "log", env=environment(layout), timeout_s=150
    )
    assert codes == [0] * ranks, [path.read_text()[-3000:] for path in (tmp_path / "log").iterdir()]
    for rank in range(ranks):
        assert json.loads((tmp_path / f"steps-{rank}.json").read_text()) == [3, 6]


class CollectingRows(RandomTokens):
    """Yields whether Python collects by itself in the process that reads a row."""

    def __getitem__(self, index):
        row = dict(super().__getitem__(index))
        row["labels"] = torch.full_like(row["labels"], int(gc.isenabled()))
        return row


def test_data_loader_workers_collect_by_themselves(tmp_path):
    """Else cycles that a data set makes would stay in their memory (facebookresearch/dinov3#150)."""
    seen = []

    def loss(outputs, labels, num_items_in_batch=None):
        seen.append((gc.isenabled(), bool(labels.all())))
        return outputs.logits.sum()

    arguments = tiny_arguments(tmp_path, max_steps=3, dataloader_num_workers=1)
    health = CommHealthCallback(gc_every_steps=2)
    data = CollectingRows()
    Trainer(tiny_model(), arguments, train_dataset=data, compute_loss_func=loss, callbacks=[health]).train()
    assert seen == [(False, True)] * 3
    assert gc.isenabled()


def test_some_agreed_collections_are_complete(monkeypatch):
    collected = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: collected.append(generation))
    agreed = AgreedCollection(2)
    for step in range(1, 2 * FULL_COLLECTION_EVERY + 1):
        agreed.step_ended(step)
    assert collected == [1] * (FULL_COLLECTION_EVERY - 1) + [2]


def judged(monkeypatch, *windows, ranks=4):
    """Return the keys and findings of each log, for windows of numbers by (rank, name)."""
    monkeypatch.setattr(jitter, "REPORT_AFTER_S", 0.0)
    watch = JitterWatch([f"node{rank}" for rank in range(ranks)], lambda found, step: None)
    results = []
    for window in windows:
        columns = {name: np.full(ranks, value) for name, value in QUIET.items()}
        for (rank, name), value in window.items():
            columns[name][rank] = value
        results.append(watch.judge(columns, TrainerState()))
    return results


@pytest.mark.parametrize(
    ("name", "value", "check", "key", "logged"),
    [
        ("gc_s", 0.3, "garbage collection", "health/gc_fraction", 0.03),
        ("cpu_wait_s", 2.0, "cpu wait", "health/cpu_wait_fraction", 0.2),
        ("compiled", 4.0, "recompilation", "health/compiled_graphs", 4.0),
        ("faults", 500.0, "page faults", None, None),
        ("new_pages", 1e6, "new memory pages", "health/new_pages_per_s", 1e5),
        ("switches", 5000.0, "thread contention", "health/context_switches_per_s", 500.0),
        ("slow_clock", 0.6, "cpu clock", "health/cpu_clock_missing", 0.6),
    ],
)
def test_a_rank_above_a_limit_in_three_logs_is_named_once(monkeypatch, name, value, check, key, logged):
    results = judged(monkeypatch, *[{(2, name): value}] * 5, {}, *[{(1, name): value}] * 3)
    found = [[(each["check"], each["ranks"]) for each in result["findings"]] for result in results]
    assert found == [[], [], [(check, [2])], [], [], [], [], [], [(check, [1])]]
    if key is not None:
        assert results[0]["keys"] == {key: pytest.approx(logged)}
    assert results[5]["keys"] == {}


@pytest.mark.parametrize("name", ["cpu_wait_s", "slow_clock"])
def test_what_is_not_known_is_neither_logged_nor_found(monkeypatch, name):
    unknown = {(rank, name): float("nan") for rank in range(4)}
    assert judged(monkeypatch, unknown, unknown, unknown)[-1] == {"keys": {}, "findings": []}
    known = unknown | {(1, name): 9.0}
    result = judged(monkeypatch, known, known, known)[-1]
    assert [finding["ranks"] for finding in result["findings"]] == [[1]]
    assert len(result["keys"]) == 1


def test_threads_that_compete_are_reported_once(monkeypatch):
    window = {(2, "cpu_wait_s"): 2.0, (2, "switches"): 5000.0}
    assert [found["check"] for found in judged(monkeypatch, window, window, window)[-1]["findings"]] == ["cpu wait"]


def test_the_clock_of_a_core_is_read(monkeypatch, tmp_path):
    thread = tmp_path / "stat"
    thread.write_text("7 (a ) b) R " + " ".join(str(number) for number in range(4, 53)))
    folder = tmp_path / "cpu39" / "cpufreq"
    folder.mkdir(parents=True)
    (folder / "scaling_cur_freq").write_text("900000\n")
    (folder / "cpuinfo_max_freq").write_text("3000000\n")
    monkeypatch.setattr(jitter, "_THREAD", thread)
    monkeypatch.setattr(jitter, "_CPU", tmp_path)
    assert jitter._missing_clock() == pytest.approx(0.7)
    (folder / "cpuinfo_max_freq").unlink()
    assert np.isnan(jitter._missing_clock())


def test_collections_compilations_and_waiting_are_counted():
    watch = JitterWatch(["node"], lambda found, step: None)
    watch.begin()
    try:
        assert watch.numbers(TrainerState(), {}, {})["compiled"] == 0
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
        gc.collect()
        used = bytearray(2**24)
        numbers = watch.numbers(TrainerState(), {}, {})
    finally:
        watch.end()
    assert numbers["compiled"] == 1
    assert numbers["new_pages"] > len(used) // resource.getpagesize() // 2
    assert 0 < numbers["gc_s"] < numbers["window_s"]
    assert numbers["cpu_wait_s"] >= 0  # a number on Linux
    assert numbers["switches"] >= 0
    assert watch._on_collection not in gc.callbacks


def test_the_longest_pause_of_many_ranks_is_that_of_the_closed_form():
    # 5 ms in each twentieth step: the longest of n ranks is 5 ms unless none of them pauses
    pauses = np.repeat([0.0, 0.005], [95, 5])
    ranks = 8
    closed = 0.005 * (1 - 0.95**ranks)
    assert expected_maximum(pauses, ranks) == pytest.approx(closed, rel=1e-12)
    nothing_together = np.zeros(len(pauses), dtype=bool)
    drawn = drawn_maxima(pauses, nothing_together, ranks, steps=40_000)
    assert drawn.mean() == pytest.approx(closed, rel=0.02)
    # uniform on (0, 1): n / (n + 1)
    even = (np.arange(10_000) + 0.5) / 10_000
    assert expected_maximum(even, 512) == pytest.approx(512 / 513, rel=1e-4)


def test_ranks_that_pause_together_pause_in_these_steps_only():
    pauses = np.array([0.0, 0.0, 0.0, 0.001, 0.003])
    together = pauses > 0
    drawn = drawn_maxima(pauses, together, 64, steps=50_000)
    # In 2 of 5 steps, in which the longest of 64 is that of 3 ms
    assert drawn.mean() == pytest.approx(0.4 * 0.003, rel=0.02)
    assert set(drawn) == {0.0, 0.003}


def test_how_often_python_collects_everything_follows_from_its_limits():
    # 25,000 of 100,000 objects, of which each collection of the middle generation adds 500: 50 of them, 10 steps each
    assert complete_share([400, 600], steps=20, objects=100_000) == pytest.approx(1 / 500)
    assert complete_share([50_000], steps=10, objects=100_000) == pytest.approx(1 / 110)
    assert complete_share([], steps=10, objects=100_000) == 0
