"""A campaign of flipped bits, each of which must be found or be harmless, and of clean replays without a false alarm.

HFSCALE_RESULTS=benchmarks/results/bit_flips.json keeps the counts; HFSCALE_FLIPS is the number of flips of a layout,
and HFSCALE_REPLAYS that of the clean replays of each.

A flip is `found` if a finding names its rank; `detected` if a finding says that replicas differ and not
which one is wrong; `harmless` if loss and gradient norm of all steps are those of the training without it, bit by bit
or within rounding (1e-6, relative); else `missed`. Bits flip in the step that is replayed, in the first micro-batch.
Those of weights and of the optimizer's state flip in memory, without a write, at a moment drawn at random: at the
beginning of the step, while the module is computed in the replay, or in the forward or backward pass of the training.
"""

import os
import random
import statistics
import time

import pytest
import torch
from replay_runs import Flip, make_trainer, run
from results import keep_result
from transformers import TrainerCallback

from hfscale import CommHealthCallback, ScalingCallback
from hfscale.replays.state_hashes import StateHashes

pytestmark = [pytest.mark.faults, pytest.mark.timeout(0)]
FLIPS = int(os.environ.get("HFSCALE_FLIPS", "12"))
REPLAYS = int(os.environ.get("HFSCALE_REPLAYS", "60"))
STEPS = 8  # four after the flip, which show what a wrong state of the optimizer does
ROUNDING = 1e-6
COMPUTED = ("output", "gradient", "wgrad")
STORED = ("weight", "state")
MOMENTS = ("begin", "replay", "forward", "backward")
KINDS = {
    "single": COMPUTED + STORED,
    "ddp": COMPUTED + STORED,
    "fsdp2": ("output", "gradient", "weight", "state"),
    "hsdp": ("output", "gradient", "weight", "state"),
    "zero2": COMPUTED + STORED,
    "zero3": ("output", *STORED),  # the forward pass alone is computed twice: wrong gradients are not covered
    "native-tp": ("output", "gradient", *STORED),
    "tp": ("output", "gradient", *STORED),
    "pp": ("output", "gradient", *STORED),
}
DENSE = [f"layers.1.{name}" for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "input_layernorm")]
SPARSE = [f"layers.1.{name}" for name in ("self_attn.o_proj", "self_attn.q_proj", "input_layernorm")]
OWN_LOSS = {"loss", "grad_norm"}


def random_flips(layout, number):
    chance = random.Random(f"{layout}-{os.environ.get('HFSCALE_SEED', '0')}")
    flips = []
    for index in range(number):
        kind = KINDS[layout][index % len(KINDS[layout])]
        module = chance.choice(SPARSE if layout.startswith("native") else DENSE)
        rank = 0 if layout in ("single", "pp") else 1
        place = {"bit": chance.randrange(32), "element": chance.randrange(4096)}
        moment = chance.choice(MOMENTS)
        flips.append(Flip(module=module + ".weight" * (kind in STORED), rank=rank, kind=kind, moment=moment, **place))
    return flips


def outcome(flip, results, plain):
    """What became of a flip: `found`, `detected`, `harmless`, `not applied` or `missed`."""
    if sum(result["flipped"] for result in results) != 1:
        return "not applied"
    found = results[0]["found"]
    module = flip.module.removesuffix(".weight")
    for finding in found:  # the first one that is about the flip ends a run
        if finding["check"] in ("replay", "state") and finding["ranks"] == [flip.rank]:
            return "found"
        if finding["check"] == "replicas" and module in finding["problem"]:
            return "found" if finding["ranks"] == [flip.rank] else "detected"
    same = all(
        abs(a - b) <= ROUNDING * abs(b)
        for key in OWN_LOSS
        for a, b in zip(results[0][key], plain[0][key], strict=True)
    )
    return "harmless" if same and not found else "missed"


@pytest.mark.parametrize("layout", list(KINDS))
def test_a_flipped_bit_is_found_or_harmless(tmp_path, layout):
    flips = random_flips(layout, FLIPS)
    jobs = [(None, None), *((2, flip) for flip in flips)]
    plain, *flipped = run(layout, tmp_path, jobs, timeout_s=1200, max_steps=STEPS)
    counts = {}
    for flip, results in zip(flips, flipped, strict=True):
        of_kind = counts.setdefault(flip.kind, {})
        name = outcome(flip, results, plain)
        of_kind[name] = of_kind.get(name, 0) + 1
    keep_result(f"flips: {layout}", counts)
    for kind, of_kind in counts.items():
        assert "not applied" not in of_kind, (kind, of_kind)
        assert "missed" not in of_kind, (kind, of_kind)


@pytest.mark.parametrize("layout", list(KINDS))
def test_clean_replays_find_nothing(tmp_path, layout):
    began = time.perf_counter()
    (results,) = run(layout, tmp_path, [(1, None)], timeout_s=1200, max_steps=REPLAYS, logging_steps=REPLAYS)
    seconds = time.perf_counter() - began
    alarms = sum(bool(result["found"]) for result in results)
    replays = REPLAYS - 1  # the first one only learns what is not deterministic
    keep_result(f"clean: {layout}", {"replays": replays, "false_alarms": alarms, "seconds": round(seconds, 1)})
    assert not alarms, results[0]["found"]
    assert results[0]["mismatches"][-1] == 0


@pytest.mark.parametrize("layout", ["single", "ddp"])
def test_what_a_replay_costs(tmp_path, layout):
    sizes = {"hidden": 384, "per_device_train_batch_size": 32, "logging_steps": 100}  # 512 tokens
    ((result, *_),) = run(layout, tmp_path, [(2, None)], timeout_s=600, max_steps=64, **sizes)
    seconds = result["step_s"][4:]  # the first replay computes more
    plain, replayed = (statistics.median(seconds[first::2]) for first in (0, 1))  # every second step is replayed
    counts = {"step_s": round(plain, 4), "replayed_step_s": round(replayed, 4)}
    further = replayed / plain - 1
    keep_result(f"cost: {layout}", counts | {"further_steps_per_replay": round(further, 2)})
    assert further < 1.7  # one step and its hashes; it was 2.7 where each element was multiplied by a weight


def test_what_the_hashes_of_weights_and_states_cost(tmp_path, monkeypatch):
    seconds = {"remember": [], "compare": [], "step": []}  # of the processor, so that other work does not count

    def timed(name):
        function = getattr(StateHashes, name)

        def call(*args, **kwargs):
            began = time.thread_time()
            result = function(*args, **kwargs)
            seconds[name].append(time.thread_time() - began)
            return result

        return call

    class TimesSteps(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.began = time.thread_time()

        def on_step_end(self, args, state, control, **kwargs):
            seconds["step"].append(time.thread_time() - self.began)

    torch.set_num_threads(1)
    for name in ("remember", "compare"):
        monkeypatch.setattr(StateHashes, name, timed(name))
    health = CommHealthCallback(replay_every_steps=2, preflight=False, hang_after_s=None)
    sizes = {"max_steps": 64, "per_device_train_batch_size": 32, "logging_steps": 100}  # 512 tokens
    callbacks = [ScalingCallback(comm_health=health), TimesSteps()]
    make_trainer("single", tmp_path, callbacks, hidden=384, **sizes).train()
    step_s = statistics.median(seconds["step"][4::2])
    remember_s, compare_s = (statistics.median(seconds[name][4:]) for name in ("remember", "compare"))
    further = (remember_s + 2 * compare_s) / step_s
    counts = {"step_s": round(step_s, 4), "hash_s": round(remember_s, 4), "compare_s": round(compare_s, 4)}
    keep_result("cost of hashes: single, processor time", counts | {"further_steps_per_replay": round(further, 3)})
    assert further < 0.4
