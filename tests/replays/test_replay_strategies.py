"""Replays under every strategy: they change nothing, and name the rank and the module of a flipped bit."""

import pytest
from replay_runs import Flip, run

LAYOUTS = ["zero1", "zero2", "zero3", "hsdp", "native-fsdp", "native-hsdp", "native-tp", "native-ep"]
PARALLEL = ["tp", "tp-sp", "pp", "pp-interleaved", "dp", "cp", "ep", "tp-pp"]
REPLICATED = {
    "ddp": ["weight", "state"],
    "hsdp": ["weight", "state"],
    "native-hsdp": ["weight", "state"],
    "native-tp": ["weight"],
    "tp": ["weight"],
    "zero1": ["weight"],
}
UP, DOWN, NORM = "layers.1.mlp.up_proj", "layers.1.mlp.down_proj", "layers.1.post_attention_layernorm"


@pytest.mark.long
def test_a_replay_names_the_rank_of_a_flipped_bit_in_a_pipeline(tmp_path):
    check("pp", tmp_path, kinds=("output",), modules=1)


@pytest.mark.faults
@pytest.mark.parametrize("layout", LAYOUTS + PARALLEL)
def test_a_replay_changes_nothing_and_names_the_rank_under_every_strategy(tmp_path, layout):
    check(layout, tmp_path, kinds=("output",) if layout == "zero3" else ("output", "gradient"), modules=2)


def check(layout, folder, *, kinds, modules):
    has_experts = layout.startswith("native") or layout == "ep"
    names = [NORM, "layers.1.self_attn.o_proj"] if has_experts else [UP, DOWN]
    rank = 0 if layout in ("pp", "tp-pp") else 1  # the one with layer 1
    flips = [Flip(module=name, rank=rank, kind=kind) for kind in kinds for name in names[:modules]]
    plain, replayed, *flipped = run(layout, folder, [(None, None), (2, None), *((2, flip) for flip in flips)])
    for before, after in zip(plain, replayed, strict=True):
        assert after["loss"] == before["loss"]
        assert after["grad_norm"] == before["grad_norm"]
        assert after["mismatches"] == [0, 0, 0, 0]
    for flip, results in zip(flips, flipped, strict=True):
        assert [result["flipped"] for result in results] == [int(n == rank) for n in range(len(results))], flip
        for result in results:
            assert [finding["ranks"] for finding in result["found"]] == [[rank]], (flip, result["found"])
            assert "step 4 gave two different results" in result["found"][0]["problem"]
            assert flip.module.rpartition(".")[0] in result["found"][0]["problem"]


@pytest.mark.faults
@pytest.mark.parametrize(("layout", "kinds"), [*REPLICATED.items()])
def test_replicas_that_differ_are_found(tmp_path, layout, kinds):
    name = f"{NORM}.weight"
    flips = [Flip(module=name, kind=kind, is_written=True) for kind in kinds]
    results = run(layout, tmp_path, [(2, None), *((2, flip) for flip in flips)])
    assert [result["found"] for result in results[0]] == [[]] * len(results[0])
    for kind, of_kind in zip(kinds, results[1:], strict=True):
        assert sum(result["flipped"] for result in of_kind) == 1
        for result in of_kind:
            found = result["found"][0]
            assert len(found["ranks"]) == 2
            assert 1 in found["ranks"]
            assert found["host"] is None  # two replicas: either may be wrong
            expected = "the weight" if kind == "weight" else "the optimizer's exp_avg"
            assert found["problem"].startswith(f"{expected} of model.{name} is not the same before step 4")


@pytest.mark.faults
@pytest.mark.parametrize("layout", ["fsdp2", "native-fsdp", "native-hsdp", "zero2"])
def test_the_first_of_several_micro_batches_is_replayed(tmp_path, layout):
    jobs = [(None, None), (2, None), (2, Flip(module="layers.1.self_attn.o_proj"))]
    plain, replayed, flipped = run(layout, tmp_path, jobs, gradient_accumulation_steps=2)
    for before, after, faulty in zip(plain, replayed, flipped, strict=True):
        assert after["loss"] == before["loss"]
        assert after["grad_norm"] == before["grad_norm"]
        assert [finding["ranks"] for finding in faulty["found"]] == [[1]]
