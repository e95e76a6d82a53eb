"""A campaign of faults under one process, DDP and FSDP2, each of which `hfscale why` must name, and of clean pairs.

HFSCALE_RESULTS=benchmarks/results/why.json keeps the counts.
"""

import statistics
import time

import pytest
from results import keep_result
from tiny import tiny_model, tiny_trainer
from transformers import TrainerCallback
from why_faults import ALL, DROPOUT, FAULTS, PADDED, TWO_MICRO
from why_runs import LAYOUTS, Training, launch

from hfscale import TraceCallback
from hfscale.why.answer import compare_runs

pytestmark = [pytest.mark.faults, pytest.mark.timeout(0)]
LEAST_SHARE = 0.9
"""Of the faults that must be named rightly."""
CLEAN = {
    "default": Training(),
    "dropout": DROPOUT,
    "padding": PADDED,
    "accumulation": TWO_MICRO,
    "tied": Training(model={"tie_word_embeddings": True}),
    "clipped": Training(arguments={"max_grad_norm": 0.05}),
    "sgd": Training(arguments={"optim": "sgd"}),
    "bf16": Training(arguments={"bf16": True}),
    "deeper": Training(model={"num_hidden_layers": 6}),
    "large steps": Training(arguments={"learning_rate": 0.1}),
}
"""Trainings that are compared with themselves."""
SEEDS = (0, 1)


def problem(fault, found, before, layout):
    """What is wrong about an answer; None if it is right."""
    if found.kind not in fault.kinds:
        return f"kind {found.kind}"
    if found.step != fault.step:
        return f"step {found.step}"
    if not (found.module or "").startswith(fault.module):
        return f"module {found.module}"
    if fault.operation is not None and found.operation != fault.operation:
        return f"operation {found.operation}"
    if LAYOUTS[layout] > 1 and fault.rank is not None and found.rank != fault.rank:
        return f"rank {found.rank}"
    if not any(one.name.startswith(fault.before) for one in before) and fault.before:
        return f"{fault.before} is not among what differed before"
    return None


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Return the run of a training without a fault; each is launched once for a layout."""
    made = {}

    def get(training, layout):
        key = (id(training) if training != Training() else 0, layout)
        if key not in made:
            made[key] = launch(training, tmp_path_factory.mktemp("clean"), layout)
        return made[key]

    return get


def test_faults_are_named(clean, tmp_path):
    results, wrong = {}, []
    tried = {"same layout": 0, "against one process": 0}
    named = dict.fromkeys(tried, 0)
    for number, fault in enumerate(FAULTS):
        answers = {}
        for layout in fault.layouts:
            out = launch(fault.faulty, tmp_path / f"{number}-{layout}", layout)
            pairs = [("same layout", clean(fault.clean, layout))]
            if layout in fault.across:
                pairs.append(("against one process", clean(fault.clean, "single")))
            for how, reference in pairs:
                answer = compare_runs(reference, out)
                found = answer.first_difference
                if how == "same layout":
                    mistake = problem(fault, found, answer.before, layout)
                else:  # values are added up over ranks: neither rank nor operation is known
                    mistake = None if found.kind in fault.kinds and found.step == fault.step else f"kind {found.kind}"
                tried[how] += 1
                named[how] += mistake is None
                answers[f"{layout}, {how}"] = mistake or "right"
                if mistake is not None:
                    wrong.append(f"{fault.name}, {layout}, {how}: {mistake}: {found} {answer.before[:3]}")
                    print(wrong[-1], flush=True)
        results[fault.name] = answers
        keep_result("faults", {"tried": tried, "named": named, "kinds of faults": len(results), "answers": results})
    every = [name for name, answers in results.items() if all(v == "right" for k, v in answers.items() if "same" in k)]
    keep_result("faults named under every layout", {"named": len(every), "of": len(FAULTS)})
    assert len(every) >= LEAST_SHARE * len(FAULTS), "\n".join(wrong)
    assert named["against one process"] >= LEAST_SHARE * tried["against one process"], "\n".join(wrong)


def test_clean_pairs_are_never_blamed(tmp_path):
    pairs, blamed = 0, []
    for name, training in CLEAN.items():
        for seed in SEEDS:
            changed = Training(**{**vars(training), "seed": seed})
            runs = {layout: launch(changed, tmp_path / f"{name}-{seed}-{layout}", layout) for layout in ALL}
            again = {"ddp": launch(changed, tmp_path / f"{name}-{seed}-again", "ddp")}
            compared = [(runs["ddp"], again["ddp"], "ddp twice")]
            if name != "dropout":  # ranks draw other random numbers than one process
                compared += [(runs["single"], runs["ddp"], "single and ddp"), (runs["single"], runs["fsdp2"], "fsdp2")]
            compared.append(
                (runs["fsdp2"], runs["fsdp2"], "itself")
                if name == "dropout"
                else (runs["ddp"], runs["fsdp2"], "sharded")
            )
            for first, second, what in compared:
                answer = compare_runs(first, second)
                pairs += 1
                if answer.first_difference.is_one:
                    blamed.append(f"{name}, seed {seed}, {what}: {answer.first_difference}")
                    print(blamed[-1], flush=True)
        keep_result("clean pairs", {"pairs": pairs, "blamed": len(blamed)})
    assert pairs >= 50
    assert blamed == []


class StepTimes(TrainerCallback):
    """Notes when each step begins and ends for this callback."""

    def __init__(self):
        self.begun, self.ended = [], []

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun.append(time.perf_counter())

    def on_step_end(self, args, state, control, **kwargs):
        self.ended.append(time.perf_counter())


@pytest.mark.parametrize("size", [32, 256])
def test_a_traced_step_takes_at_most_twenty_times_as_long(tmp_path, size):
    sizes = {"hidden_size": size, "intermediate_size": 2 * size, "num_hidden_layers": 4}
    medians = {}
    for name, trace in (("plain", None), ("modules", {"operations": False}), ("operations", {})):
        first, last = StepTimes(), StepTimes()  # around what the trace does at both ends of a step
        traced = [] if trace is None else [TraceCallback(range(3, 11), **trace)]
        trainer = tiny_trainer(tmp_path / name, model=tiny_model(**sizes), max_steps=10, per_device_train_batch_size=8)
        trainer.callback_handler.callbacks = [first, *trainer.callback_handler.callbacks, *traced, last]
        trainer.train()
        seconds = [end - begin for begin, end in zip(first.begun, last.ended, strict=True)]
        medians[name] = statistics.median(seconds[2:])
    slower = {name: medians[name] / medians["plain"] for name in ("modules", "operations")}
    keep_result(f"traced step, hidden size {size}", {"step_s": medians, "times_as_long": slower})
    assert max(slower.values()) <= 20
