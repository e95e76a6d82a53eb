"""SIGKILL at random moments of models loaded with `distributed_config`, each time resumed under another layout.

A run that saves at every step is killed at a random moment of one rank, and launched again under a random layout of
two to four ranks, until it ends. Every step that any launch has logged must have the loss and the gradient norm of the
uninterrupted run. The same with one layout throughout must have them bit by bit. HFSCALE_KILLS is the number of kills
of all chains together, 100 by default; HFSCALE_SEED changes the moments and the layouts.
"""

import json
import os
import random
import signal
import sys
import threading
import time

import pytest
from native_runs import Layout, Run, attempt, launch, make_model, output
from results import keep_result
from transformers import TrainerCallback

from hfscale import latest_checkpoint
from hfscale.checkpoint.store import verify

pytestmark = [pytest.mark.faults, pytest.mark.world(4), pytest.mark.timeout(0)]
KILLS = int(os.environ.get("HFSCALE_KILLS", "100"))
SEED = os.environ.get("HFSCALE_SEED", "0")
STEPS = 12
LAYOUTS = [
    Layout(fsdp=2, ep=2),
    Layout(fsdp=2),
    Layout(rep=2),
    Layout(tp=2, ep=2),
    Layout(fsdp=4, ep=2),
    Layout(fsdp=4, ep=4),
    Layout(fsdp=2, rep=2, ep=2),
    Layout(fsdp=2, tp=2),
    Layout(fsdp=2, tp=2, ep=4),
]


class KillAt(TrainerCallback):
    """Kills this process a random time after the beginning of a step, if it is the rank."""

    def __init__(self, rank, steps, delay_s):
        self.rank, self.steps, self.delay_s = rank, steps, delay_s

    def on_train_begin(self, args, state, control, **kwargs):
        self.at = state.global_step + self.steps

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.at and args.process_index == self.rank:
            threading.Thread(target=self.kill, daemon=True).start()

    def kill(self):
        time.sleep(self.delay_s)
        os.kill(os.getpid(), signal.SIGKILL)


def logged(folder):
    """Step, loss and gradient norm of every log line of all launches."""
    path = folder / "out" / "scaling.jsonl"
    if not path.exists():
        return []
    lines = map(json.loads, path.read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def settings(layout, *callbacks):
    arguments = {"save_total_limit": 2}
    return Run(layout=layout, steps=STEPS, every=1, arguments=arguments, callbacks=callbacks)


@pytest.mark.parametrize(("layouts", "tolerance"), [(LAYOUTS, 1e-5), (LAYOUTS[:1], 0.0)], ids=["other", "same"])
def test_killed_runs_have_the_losses_of_an_uninterrupted_one(model, tmp_path, layouts, tolerance):
    chooser = random.Random(f"{SEED} {len(layouts)}")
    launch(settings(LAYOUTS[0]), model, tmp_path / "reference")
    expected = {step: values for step, *values in logged(tmp_path / "reference")}
    kills = KILLS * 3 // 4 if len(layouts) > 1 else KILLS // 4
    killed = launches = chains = 0
    worst = 0.0
    while killed < kills:
        chains += 1
        folder = tmp_path / f"chain-{chains}"
        codes = [-9]
        while any(codes):
            launches += 1
            layout = chooser.choice(layouts)
            rank = chooser.randrange(layout.ranks)
            kill = KillAt(rank, chooser.randint(0, 3), chooser.uniform(0.0, 0.15))
            codes = attempt(settings(layout, kill), model, folder)
            assert not any(codes) or -9 in codes, output(folder)[-6000:]
            killed += any(codes)
            newest = latest_checkpoint(folder / "out")
            assert newest is None or verify(newest).strategy == "native"
            for step, *values in logged(folder):
                worst = max(worst, *(abs(a - b) for a, b in zip(values, expected[step], strict=True)))
                assert values == pytest.approx(expected[step], abs=tolerance), (step, layout)
        assert verify(latest_checkpoint(folder / "out")).step == STEPS
        assert {step for step, *_ in logged(folder)} == set(range(1, STEPS + 1))
        summary = {"seed": SEED, "kills": killed, "launches": launches, "chains": chains, "largest_difference": worst}
        keep_result(f"native, {'other' if len(layouts) > 1 else 'same'} layouts", summary)
    sys.stdout.write(f"{json.dumps(summary)}\n")
