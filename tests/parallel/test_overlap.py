"""Two passes that a schedule pairs take turns while tokens are sent to experts, and compute what they would alone."""

import itertools
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from parallel_families import compare
from parallel_world import in_world, train
from test_parallel import BALANCED, FIRST, plain, same
from test_parallel_experts import ADAPTED_JOB, EXPERTS, RECOMPUTED, TOLERANCE, wrong
from torch.distributed.pipelining import ScheduleDualPipeV

from hfscale.core.torch_internals import TorchDispatchMode
from hfscale.facts.schedules import paired_share
from hfscale.parallel import overlap
from hfscale.parallel.overlap import PairFailedError, Turns

CPU = torch.device("cpu")
PAIRED = {"ep": 2, "pp": 2, "schedule": "DualPipeV", "gradients": True}
PAIRED_RUN = {"ep_size": 2, "pp_size": 2, "pipeline_schedule": "DualPipeV"}


def passes(turns, log, *, forward, backward):
    """A forward and a backward pass with so many exchanges, which log the parts between them."""

    def run(name, exchanges):
        for number in range(exchanges + 1):
            if number:
                turns.pass_on_from(name)
            log.append(f"{name[0]}{number}")
        return f"{name} is done"

    return (lambda: run("forward", forward)), (lambda: run("backward", backward))


@pytest.mark.parametrize(
    ("forward", "backward", "order"),
    [
        (2, 2, "b0 f0 b1 f1 b2 f2"),
        (1, 3, "b0 f0 b1 f1 b2 b3"),
        (3, 1, "b0 f0 b1 f1 f2 f3"),
        (0, 2, "b0 f0 b1 b2"),
        (2, 0, "b0 f0 f1 f2"),
        (0, 0, "b0 f0"),
    ],
)
def test_passes_take_turns_at_their_exchanges_until_one_ends(forward, backward, order):
    turns, log = Turns(), []
    for _ in range(2):
        log.clear()
        assert turns.run(*passes(turns, log, forward=forward, backward=backward), CPU) == "forward is done"
        assert " ".join(log) == order


def test_an_exchange_outside_of_a_pair_does_not_wait():
    turns = Turns()
    turns.pass_on_from("forward")
    turns.pass_on_from("backward")


def test_an_exchange_that_is_recomputed_does_not_pass_the_turn_on():
    """The forward pass would draw from the random numbers that the recomputation has set."""
    turns, log = Turns(), []

    def backward():
        turns.pass_on_from("forward")
        log.append("recomputed")
        turns.pass_on_from("backward")
        log.append("backward")

    turns.run(lambda: log.append("forward"), backward, CPU)
    assert log == ["recomputed", "forward", "backward"]


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_the_error_of_either_pass_ends_both(fails):
    turns, ended = Turns(), []

    def run(name):
        try:
            turns.pass_on_from(name)
            if name == fails:
                raise ValueError(f"{name} failed")
            turns.pass_on_from(name)
            turns.pass_on_from(name)
        except PairFailedError:
            ended.append(name)
            raise

    before = threading.active_count()
    with pytest.raises(ValueError, match=f"{fails} failed"):
        turns.run(lambda: run("forward"), lambda: run("backward"), CPU)
    assert len(ended) == 1
    assert threading.active_count() == before
    assert turns.run(lambda: 1, lambda: None, CPU) == 1


def test_an_interrupt_ends_both_passes():
    """Ctrl-C reaches the main thread while it waits for its turn; the backward pass does not go on alone."""
    turns, ended = Turns(), []

    def backward():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        while turns._error is None:
            time.sleep(0.001)
        try:
            turns.pass_on_from("backward")
        except PairFailedError:
            ended.append("backward")
            raise

    with pytest.raises(KeyboardInterrupt):
        turns.run(lambda: ended.append("forward"), backward, CPU)
    assert ended == ["backward"]
    turns.pass_on_from("forward")  # an evaluation after it exchanges as usual


def test_both_passes_are_seen_by_what_counts_operations():
    class Counter(TorchDispatchMode):
        counted = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.counted += function is torch.ops.aten.mm.default
            return function(*args, **(kwargs or {}))

    matrix = torch.ones(2, 2, requires_grad=True)
    product = (matrix @ matrix).sum()
    with Counter() as counter:
        Turns().run(lambda: matrix @ matrix, product.backward, CPU)
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert counter.counted == 1 + 2 + 1


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (2, 8), (4, 8), (4, 20), (8, 16)])
def test_the_planner_knows_how_many_passes_torch_pairs(pp, micro_batches):
    schedule = SimpleNamespace(pp_group_size=pp, _n_microbatches=micro_batches)
    actions = [ScheduleDualPipeV._calculate_single_rank_operations(schedule, rank) for rank in range(pp)]
    pairs = [sum(bool(action and action.sub_actions) for action in of_rank) for of_rank in actions]
    assert min(pairs) == pairs[0]
    expected = paired_share("DualPipeV", pp=pp, micro_batches=micro_batches)
    assert pairs[0] / (2 * micro_batches) == pytest.approx(expected)
    assert paired_share("ZBV", pp=pp, micro_batches=micro_batches) == 0


def logged_exchanges(job):
    """Run `compare`; return the differences, and for each rank the exchanges in order: `+forward` where one starts,
    `-forward` where the pass goes on."""
    log = []
    pass_on = Turns.pass_on_from

    def logged(self, current):
        log.append(f"+{current}")
        pass_on(self, current)
        log.append(f"-{current}")

    overlap.Turns.pass_on_from = logged
    try:
        result = compare(job)
    finally:
        overlap.Turns.pass_on_from = pass_on
    logs = [None] * dist.get_world_size()
    dist.all_gather_object(logs, log)
    return result | {"logs": logs}


def number_of_overlapped(log):
    """The number of exchanges between whose start and end the other pass has logged something."""
    pairs = itertools.pairwise(log)
    return sum(one.startswith("+") and following != one.replace("+", "-") for one, following in pairs)


@pytest.mark.long
def test_a_pass_computes_while_the_other_exchanges_tokens():
    families = ("qwen3_moe", "deepseek_v3")  # the first stage of the second has only a dense layer
    jobs = [PAIRED | {"family": family} for family in families]
    results = in_world(4, logged_exchanges, [*jobs, jobs[0] | {"overlap": False}])
    assert wrong([*families, "one after the other"], results) == {}
    overlapped = {}
    for family, result in zip(families, results, strict=False):
        logs = result["logs"]
        assert (logs[0], logs[2]) == (logs[1], logs[3]), "the ranks of a stage start exchanges in another order"
        overlapped[family] = [number_of_overlapped(log) for log in logs]
    # Three pairs on each rank, and in each stage one layer with two exchanges per pass.
    assert overlapped == {"qwen3_moe": [12, 12, 12, 12], "deepseek_v3": [0, 0, 12, 12]}
    assert not any(results[-1]["logs"])


@pytest.mark.faults
@pytest.mark.parametrize("job", [{}, {"args": RECOMPUTED}], ids=["kept", "recomputed"])
def test_a_run_with_paired_passes_has_the_losses_of_one_process(job):
    base = {"family": "qwen3_moe", "model": EXPERTS | {"num_hidden_layers": 4}} | job
    (expected,) = in_world(1, train, [plain(base)])
    (found,) = in_world(4, train, [base | {"parallel": PAIRED_RUN, "batch": 1}])
    same(found, expected, first=FIRST, later=5 * TOLERANCE)


@pytest.mark.long
def test_routers_count_each_token_once_where_activations_are_recomputed():
    """The second layer of a stage is recomputed while the other pass records the outputs of its own routers."""
    base = {"family": "qwen3_moe", "model": EXPERTS | {"num_hidden_layers": 8} | BALANCED, "args": RECOMPUTED}
    jobs = [base | {"parallel": PAIRED_RUN | {"overlap_exchange": overlap}, "batch": 1} for overlap in (True, False)]
    same(*in_world(4, train, jobs), first=FIRST, later=5 * TOLERANCE)


@pytest.mark.faults
def test_adapters_of_experts_and_muon_with_paired_passes():
    base = {"family": "qwen3_moe", "model": EXPERTS | {"num_hidden_layers": 4}, "batch": 1}
    kinds = (ADAPTED_JOB | base, base | {"muon": True}, base | {"args": {"bf16": True}})
    apart = PAIRED_RUN | {"overlap_exchange": False}
    jobs = [kind | {"parallel": parallel} for kind in kinds for parallel in (PAIRED_RUN, apart)]
    results = in_world(4, train, jobs)
    for found, expected in zip(results[::2], results[1::2], strict=True):
        same(found, expected, first=FIRST, later=5 * TOLERANCE)
