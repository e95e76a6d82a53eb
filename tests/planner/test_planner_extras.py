"""What a planned run does beside its steps: layouts that are left out, flags, and the time to read the weights."""

import json

import pytest
import yaml

import hfscale
from hfscale.errors import UsageError
from hfscale.planner.emit import recipe_yaml
from hfscale.planner.job import strategy_of

RUN = {"gpu": "H100-80GB", "gpus": 64, "top": 50}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


@pytest.fixture
def config(tmp_path):
    """Return the folder of a model that is trained from scratch."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path / "model")


def flags_of(found, tmp_path):
    return yaml.safe_load(recipe_yaml(found, found.choices[0], tmp_path))


def test_flags_are_written_for_the_recipe(config, tmp_path):
    asked = {"base_width": 512, "skip_bad_batches": 10, "gc_every_steps": 50, "load_once": "$TMPDIR/hfscale"}
    found = hfscale.plan(config, **RUN, **asked)
    written = flags_of(found, tmp_path)
    assert {name: written[name] for name in asked} == asked
    for name in ("base_width", "skip_bad_batches", "gc_every_steps"):
        assert any(name in line for line in found.assumptions)
    without = hfscale.plan(config, **RUN)
    assert not asked.keys() & flags_of(without, tmp_path).keys()
    assert found.choices[0].estimate.time == without.choices[0].estimate.time


@pytest.mark.parametrize("asked", [{"base_width": 512}, {"skip_bad_batches": 10}])
def test_layouts_that_do_not_run_with_it_are_left_out(config, asked):
    (name,) = asked
    found = hfscale.plan(config, **RUN, **asked)
    for choice in found.choices:
        job = choice.estimate.job
        assert job.layout.cp == 1
        assert job.offload == "none"
        assert name == "skip_bad_batches" or strategy_of(job) not in ("parallel", "native")
    assert any(name in rejected.reason for rejected in found.rejected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_width": 8192}, "at most the hidden size"),
        ({"base_width": 512, "task": "dpo"}, "from scratch, not for task"),
        ({"base_width": 512, "stack": "titan"}, "is hfscale's"),
        ({"load_once": "/local", "stack": "megatron"}, "is hfscale's"),
        ({"storage_gb_s": -1.0}, "storage_gb_s"),
    ],
)
def test_what_cannot_be_planned_is_refused(config, changes, message):
    with pytest.raises(UsageError, match=message):
        hfscale.plan(config, **RUN | changes)


def test_a_width_of_a_model_with_weights_is_refused():
    with pytest.raises(UsageError, match="is for models that are trained from scratch"):
        hfscale.plan("llama-3.1-8b", **RUN, base_width=512)


def test_bad_batches_of_a_growing_batch_leave_no_layout():
    grows = {"batch_schedule": "256@0,512@1B", "tokens": 10e9, "usd_per_gpu_hour": 2.0}
    found = hfscale.plan("llama-3.1-8b", **RUN, **grows, skip_bad_batches=10)
    assert found.choices == ()
    assert any("skip_bad_batches" in rejected.reason for rejected in found.rejected)


def test_the_weights_are_read_by_each_node_or_once():
    found = hfscale.plan("llama-3.1-8b", **RUN, storage_gb_s=2.0)
    size = 2 * found.request.shape.total_parameters
    by_strategy = {
        strategy_of(choice.estimate.job): found.extras.start(choice.estimate.job) for choice in found.choices
    }
    for strategy, start in by_strategy.items():
        readers = 1 if strategy == "fsdp2" else 8
        assert start.bytes == size
        if strategy == "parallel":
            assert start.read_s is None
        else:
            assert start.read_s == pytest.approx(readers * size / 2e9)
        assert start.read_once_s == pytest.approx(size / 2e9)
    assert {"fsdp2", "zero2", "parallel"} <= by_strategy.keys()
    assert found.to_dict()["start"]["read_s"] == found.start.read_s


def test_no_node_receives_faster_than_its_network():
    found = hfscale.plan("llama-3.1-8b", **RUN, storage_gb_s=1000.0, network_gb_s=0.125)
    of_node_s = found.start.bytes / (8 * 0.125e9)
    starts = [found.extras.start(choice.estimate.job) for choice in found.choices]
    known = [start.read_s for start in starts if start.read_s is not None]
    assert known == pytest.approx([of_node_s] * len(known))
    assert found.start.read_once_s == pytest.approx(of_node_s)


def test_an_unknown_start_is_absent(config):
    assert "start" not in hfscale.plan("llama-3.1-8b", **RUN, load_once="/local").to_dict()
    assert "start" not in hfscale.plan(config, **RUN, storage_gb_s=2.0).to_dict()
