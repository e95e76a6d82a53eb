"""Stragglers: judged from generated step times, and with four real ranks of which one is slow."""

import math
import random
import time

import numpy as np
import pytest
import torch
from strategy_kinds import named
from tiny import tiny_trainer
from torch import nn
from transformers import TrainerCallback
from workers.health_stragglers import run

from hfscale import CommHealthCallback, ScalingCallback
from hfscale.core.clocks import CudaClock, HostClock
from hfscale.core.findings import Finding
from hfscale.health.local_time import KEPT_STEPS, LocalTimer, StepSpans
from hfscale.health.stragglers import DataWaitJudge, StragglerJudge, z_scores
from hfscale.report.run_data import load_run

HOSTS = [f"node-{rank // 4}" for rank in range(8)]


def findings(ratio, guilty, spread, seed, steps=50, ranks=8):
    """The findings for steps of 30 ms with a spread, exchanged ten at a time."""
    chance, judge, found = random.Random(seed), StragglerJudge(HOSTS[:ranks]), []

    def slow(step):
        return step % ranks if guilty is None else guilty

    def steps_of(start):
        return range(start, start + 10)

    for start in range(0, steps, 10):
        rows = [
            [
                0.03 * chance.lognormvariate(0, spread) * (ratio if rank == slow(step) else 1.0)
                for step in steps_of(start)
            ]
            for rank in range(ranks)
        ]
        found += judge.add(rows).findings
    return found


@pytest.mark.parametrize("ratio", [1.5, 3.0])
@pytest.mark.parametrize("guilty", [0, 3, 7])
def test_a_slow_rank_is_named_once_within_50_steps(ratio, guilty):
    for seed in range(20):
        (finding,) = findings(ratio, guilty, 0.05, seed)
        assert finding.ranks == (guilty,)
        assert finding.host == HOSTS[guilty]
        assert "straggler" in finding.message


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("spread", [0.01, 0.05, 0.15])
def test_a_rank_slower_by_up_to_a_tenth_is_not_reported(ranks, spread):
    alarms = [findings(ratio, 1, spread, seed, 200, ranks) for ratio in (1.0, 1.1) for seed in range(25)]
    assert not any(alarms)


def test_a_slowness_that_changes_ranks_is_no_single_ranks_fault():
    (finding,) = findings(1.5, None, 0.03, 0)
    assert finding.ranks == ()
    assert "another at each step" in finding.message


def test_a_straggler_is_reported_again_only_after_it_has_recovered():
    judge = StragglerJudge(["a", "b", "c"])
    slow, healthy = [[0.03] * 50, [0.06] * 50, [0.03] * 50], [[0.03] * 50] * 3
    counts = [len(judge.add(rows).findings) for rows in (slow, slow, healthy, slow)]
    assert counts == [1, 0, 0, 1]


def test_a_straggler_that_is_only_a_little_faster_is_not_withdrawn():
    judge = StragglerJudge(["a", "b", "c"])
    rows = {ratio: [[0.03] * 50, [0.03 * ratio] * 50, [0.03] * 50] for ratio in (1.3, 1.2, 1.1)}
    judgements = [judge.add(rows[ratio]) for ratio in (1.3, 1.2, 1.2, 1.2, 1.2, 1.1)]
    assert [len(judgement.withdrawn) for judgement in judgements] == [0, 0, 0, 0, 0, 1]


def sharing(seed, ranks, mean_steps, steps=200):
    """Seconds of equal ranks on one core, where another one is slowed each time, for `mean_steps` steps on average."""
    chance, slowed = np.random.default_rng(seed), 0
    seconds = 0.03 * np.exp(0.05 * chance.standard_normal((ranks, steps)))
    for step in range(steps):
        if chance.random() < 1 / mean_steps:
            slowed = chance.integers(ranks)
        seconds[slowed, step] *= 1.5
    return seconds


@pytest.mark.parametrize(("mean_steps", "most"), [(3, 2), (10, 9)])
def test_ranks_that_share_a_core_are_rarely_accused_for_noise_that_lasts_some_steps(mean_steps, most):
    """One that is slow in all of the first 40 steps cannot be told from a straggler; it is withdrawn later."""
    accused = [first_accused(sharing(seed, 2, mean_steps)) for seed in range(20)]
    assert sum(map(bool, accused)) <= most


def test_a_rank_that_becomes_slow_is_found_while_the_steps_before_are_remembered():
    seconds = 0.03 * np.exp(0.1 * np.random.default_rng(0).standard_normal((4, 200)))
    seconds[2, 100:] *= 1.4
    assert list(first_accused(seconds)) == [2]
    assert first_accused(seconds)[2] <= 160


def uneven(ranks, seed, slow=1.0, steps=200):
    """Seconds and sizes of steps on log-normal lengths, (ranks, steps); the last rank is slower by `slow`."""
    chance = np.random.default_rng(seed)
    sizes = np.minimum(np.exp(6 + 0.8 * chance.standard_normal((ranks, steps))), 4096)
    seconds = (0.02 + 1e-4 * sizes) * np.exp(0.03 * chance.standard_normal(sizes.shape))
    seconds[-1] *= slow
    return seconds, sizes


def first_accused(seconds, sizes=None):
    """The ranks that are accused, each with the step at which it is."""
    judge, accused = StragglerJudge(HOSTS[: len(seconds)]), {}
    for end in range(10, seconds.shape[1] + 1, 10):
        new = slice(end - 10, end)
        judgement = judge.add(seconds[:, new], None if sizes is None else sizes[:, new])
        accused |= {rank: end for finding in judgement.findings for rank in finding.ranks}
    return accused


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_equal_ranks_with_uneven_batches_are_not_accused(ranks):
    """The sizes of the batches may be known or not; docs/health.md has the shares of more simulated runs."""
    runs = [uneven(ranks, seed) for seed in range(20)]
    assert [first_accused(seconds) for seconds, _ in runs] == [{}] * len(runs)
    assert [first_accused(*run) for run in runs] == [{}] * len(runs)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_slower_by_1_3_on_uneven_batches_is_found_for_equal_sizes(ranks):
    for seed in range(10):
        (accused,) = first_accused(*uneven(ranks, seed, 1.3)).items()
        assert accused[0] == ranks - 1
        assert accused[1] <= 100


def test_a_rank_with_larger_batches_of_fixed_sizes_is_not_accused():
    sizes = np.repeat([[512.0], [512.0], [1024.0]], 50, axis=1)
    assert first_accused(sizes * 1e-4, sizes) == {}
    assert first_accused(sizes * 1e-4) == {2: 40}


def test_an_accusation_that_does_not_hold_any_more_is_withdrawn():
    judge = StragglerJudge(["a", "b", "c"])
    slow, healthy = [[0.03] * 50, [0.06] * 50, [0.03] * 50], [[0.03] * 50] * 3
    judgements = [judge.add(rows) for rows in (healthy, slow, healthy, healthy)]
    assert [judgement.slow_ratio for judgement in judgements] == [1.0, pytest.approx(2.0), 1.0, 1.0]
    assert [[finding.ranks for finding in one.withdrawn] for one in judgements] == [[], [], [(1,)], []]
    assert StragglerJudge(["a", "b"]).add([[0.03] * 10, [0.06] * 10]).slow_ratio is None  # too few steps to tell


def test_a_straggler_near_the_limit_is_reported_once():
    judge = StragglerJudge(["a", "b", "c"])
    counts = []
    for ratio in (1.35, 1.25, 1.35, 1.2, 1.35):
        rows = [[0.03] * 50, [0.03 * ratio] * 50, [0.03] * 50]
        counts.append(len(judge.add(rows).findings))
    assert counts == [1, 0, 0, 0, 0]


def test_a_slowness_that_changes_ranks_is_reported_once_until_it_is_over():
    judge, counts = StragglerJudge(["a", "b", "c"]), []
    for ratio in (1.5, 1.3, 1.5, 1.0, 1.5):
        rows = [[0.03 * (ratio if step % 3 == rank else 1.0) for step in range(50)] for rank in range(3)]
        counts.append(len(judge.add(rows).findings))
    assert counts == [1, 0, 0, 0, 1]


def test_a_rank_that_is_always_the_slowest_of_uneven_ranks_is_no_slowness_that_moves():
    rows = [[0.03 * ratio] * 50 for ratio in (1, 2, 3, 4.5)]
    assert StragglerJudge(["a", "b", "c", "d"]).add(rows).findings == ()


def test_16384_ranks_are_judged_in_50_ms_of_cpu():
    """Every rank judges all ranks at each log."""
    ranks, chance = 16_384, np.random.default_rng(0)
    judge = StragglerJudge(["node"] * ranks)
    rows = chance.uniform(1.0, 1.02, (ranks, 50))
    rows[1234] *= 1.5
    (finding,) = judge.add(rows).findings
    assert finding.ranks == (1234,)

    def cpu_s():
        began_s = time.process_time()
        judge.add(rows[:, :10])
        return time.process_time() - began_s

    assert any(cpu_s() <= 0.05 for _ in range(50)), "on a busy machine some calls take longer"


def test_skew_is_the_slowest_rank_over_the_median_rank():
    assert StragglerJudge(["a"] * 3).add([[1.0], [2.0], [3.0]]).skew == 1.5
    assert StragglerJudge(["a"] * 2).add([[1.0, 1.0], [1.5, 1.5]]).skew == 1.5
    assert StragglerJudge(["a"]).add([[1.0]]).skew is None
    assert StragglerJudge(["a"] * 2).add([[math.nan], [1.0]]).skew is None


def test_z_scores_assume_a_least_spread():
    assert z_scores([1.0, 1.0, 1.02, 1.0])[2] < 1
    assert z_scores([1.0, 1.0, 1.5, 1.0])[2] > 10


def test_a_rank_that_alone_waits_for_data_is_named():
    judge = DataWaitJudge(["a", "b", "c"])
    found = [judge.add([0.01, 0.4, 0.02], [1.0, 1.0, 1.0]) for _ in range(4)]
    assert [len(new) for new in found] == [0, 0, 1, 0]
    assert found[2][0].ranks == (1,)
    judge = DataWaitJudge(["a", "b", "c"])
    counts = [len(judge.add([0.01, wait, 0.01], [1.0] * 3)) for wait in (0.11, 0.11, 0.11, 0.08, 0.11, 0.11, 0.11)]
    assert sum(counts) == 1  # near the limit
    judge = DataWaitJudge(["a", "b", "c"])  # when all wait, no single rank is at fault
    assert not [found for _ in range(4) for found in judge.add([0.4, 0.4, 0.4], [1.0, 1.0, 1.0])]


class TestLocalTimer:
    @pytest.mark.timing
    def test_own_work_is_the_forward_and_backward_of_all_micro_steps(self):
        class SlowModel(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x):
                time.sleep(0.02)
                return self.layer(x)

        model = SlowModel()
        timer = LocalTimer(model, named("single"), torch.device("cpu"))
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            time.sleep(0.05)  # as a wait for peers would
        timer.span.next_step()
        model.eval()
        model(torch.ones(1, 4))
        timer.span.next_step()
        first, second = timer.span.read()
        assert 0.04 <= first < 0.09
        assert math.isnan(second)
        timer.detach()
        model.train()(torch.ones(1, 4)).sum().backward()
        timer.span.next_step()
        assert math.isnan(timer.span.read()[0])

    def test_a_span_keeps_its_last_steps(self):
        span = StepSpans(HostClock())
        for _ in range(KEPT_STEPS + 5):
            span.open()
            span.close()
            span.next_step()
        assert len(span.read()) == KEPT_STEPS
        assert span.read() == []

    def test_nothing_is_timed_where_every_matrix_product_waits(self):
        assert not LocalTimer(nn.Linear(2, 2), named("zero3"), torch.device("cpu")).measures
        assert LocalTimer(nn.Linear(2, 2), named("ddp"), torch.device("cpu")).measures


def test_a_withdrawn_accusation_is_in_no_report(tmp_path):
    """The alarm is raised and withdrawn during a real training; that of another rank stands."""

    class Accuse(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            of_ranks = [
                Finding(check="straggler", problem="is a straggler", ranks=(rank,), host="node-a") for rank in (0, 1)
            ]
            if state.global_step == 1:
                health._alarmed_at.clear()
                health._raise_alarms(of_ranks[:1], 1)
            if state.global_step == 2:
                health._withdraw(of_ranks[:1], 2)
                health._raise_alarms(of_ranks[1:], 2)

    health = CommHealthCallback()
    tiny_trainer(tmp_path, ScalingCallback(comm_health=health), Accuse(), max_steps=2).train()
    texts = [alarm["text"] for alarm in load_run(tmp_path).alarms if "straggler" in alarm["text"]]
    assert texts == ["rank 1 (node-a): is a straggler"]


@pytest.mark.gpu
def test_on_a_gpu_events_are_read_when_they_have_completed():
    span = StepSpans(CudaClock())
    span.open()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    span.close()
    span.next_step()
    assert math.isnan(span.read()[0])
    span.open()
    torch.cuda._sleep(100_000_000)
    span.close()
    span.next_step()
    torch.cuda.synchronize()
    assert 0.01 < span.read()[0] < 1.0


@pytest.mark.world(4)
def test_a_rank_1_5_times_slower_under_ddp_and_one_whose_weights_differ_are_named(tmp_path):
    for result in run(4, 1.5, 2, steps=50, drift=35).results.values():
        stragglers = [found for found in result["found"] if found[1] == "straggler"]
        assert [(ranks, step <= 50) for step, _, ranks, _ in stragglers] == [((2,), True)]
        assert [ranks for _, check, ranks, _ in result["found"] if check == "replicas"] == [(2,)]
        assert all(skew > 1.2 for skew in result["skews"])
