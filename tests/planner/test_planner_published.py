"""Published runs of fine-tuning and training, and what the planner says about them."""

import json
from dataclasses import replace

import pytest
from conftest import REPOSITORY

from benchmarks import planner_published
from hfscale import estimate
from hfscale.facts.hardware import accelerator
from hfscale.planner.estimate import with_slower_links
from hfscale.planner.memory import allocated_gib

COMMITTED = json.loads((REPOSITORY / "benchmarks" / "results" / "planner_published.json").read_text())


@pytest.fixture(scope="module")
def measured():
    return planner_published.measure()


def test_the_committed_figures_match_this_code(measured):
    assert measured["summary"] == COMMITTED["summary"], "python -m benchmarks planner_published"


def test_the_stated_ranges_hold_for_the_half_that_nothing_was_chosen_with(measured):
    """80% of the runs are promised to be in them."""
    check = measured["summary"]["half: check"]
    assert check["tokens_per_s"]["in_the_stated_range"] >= 0.8
    assert check["memory"]["in_the_stated_range"] >= 0.8


def test_whether_a_run_fits_is_right_in_19_of_20(measured):
    fits = measured["summary"]["all"]["fits"]
    assert fits["right"] / fits["rows"] >= 0.95


def test_the_page_gives_these_figures():
    page = (REPOSITORY / "docs" / "planner_trust.md").read_text(encoding="utf-8")
    names = {"full": "all parameters", "lora": "LoRA", "qlora": "QLoRA", "moe": "mixtures of experts"}
    for kind, name in names.items():
        found = COMMITTED["summary"][f"kind: {kind}"]
        cells = []
        for part in ("tokens_per_s", "memory"):
            low, high = found[part]["quartiles"]
            cells += [f"{found[part]['rows']}", f"{found[part]['median_error']:.0%}", f"{low:+.0%} to {high:+.0%}"]
        assert f"| {name} | {' | '.join(cells)} |" in page
    fits = COMMITTED["summary"]["all"]["fits"]
    assert f"{fits['right']} of {fits['rows']}" in page


def test_each_large_error_has_a_reason(measured):
    rows = [
        row
        for row in measured["rows"]
        if max(abs(row["tokens_error"] or 0), abs(row["memory_error"] or 0)) > planner_published.LARGE
    ]
    assert [row["id"] for row in rows if not row["unknown"]] == []


EAGER = {
    "gpu": "A100-80GB",
    "layout": {},
    "seq_len": 2048,
    "micro_batch": 2,
    "compile": False,
    "method": "lora",
}


def test_freed_blocks_are_kept_only_where_there_is_room():
    """nvidia-smi shows them; what is needed, and whether it fits, does not have them."""
    roomy = estimate("llama-3.1-8b", **EAGER).memory
    assert 0.2 * (roomy.activations + roomy.loss) < roomy.cached < roomy.total - roomy.needed + 1e-9
    card = accelerator("A100-80GB")
    tight = estimate("llama-3.1-8b", **{**EAGER, "gpu": replace(card, memory_gib=roomy.needed + 0.5)})
    assert tight.memory.cached == pytest.approx(0.5)
    assert (tight.fits, tight.memory.needed) == (True, pytest.approx(roomy.needed))
    assert estimate("llama-3.1-8b", **{**EAGER, "compile": True}).memory.cached == 0
    found = estimate("llama-3.1-8b", **EAGER).to_dict()
    assert found["memory_allocated_gib"] == pytest.approx(allocated_gib(roomy))
    assert found["memory_reserved_gib"] == pytest.approx(roomy.total - roomy.context)
    assert found["memory_allocated_gib"] < found["memory_needed_gib"] < found["memory_gib"]["total"]


def test_assumed_links_widen_the_range_upwards_alone():
    pair = {**EAGER, "gpu": "RTX4090", "layout": {"dp_shard": 2}, "zero": 3, "micro_batch": 1}
    assumed = estimate("llama-3.1-8b", **pair)
    known = estimate("llama-3.1-8b", **{**pair, "gpu": replace(accelerator("RTX4090"), achieved_link_gb_s=12.0)})
    ratios = [[end / found.time.total for end in found.time_range] for found in (assumed, known)]
    assert ratios[0][0] == pytest.approx(ratios[1][0])
    assert ratios[0][1] > 1.2 * ratios[1][1]
    assert with_slower_links(known.job) == known.job


def test_megatron_accumulates_gradients_in_fp32_unless_told_otherwise():
    run = {"gpu": "A100-80GB", "layout": {"tp": 4, "dp_replicate": 2}, "stack": "megatron", "zero": 1, "seq_len": 8192}
    found = estimate("qwen2.5-14b", **run)
    gib = found.job.shape.total_parameters / 4 / 2**30
    assert found.memory.gradients == pytest.approx(4 * gib, rel=1e-3)
