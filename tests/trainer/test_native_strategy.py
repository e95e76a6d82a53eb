"""The callbacks with models loaded with `distributed_config`: the strategy, and what each of them makes of it."""

import json

import pytest
from native_runs import STEPS, Layout, Run, launch, make_model, records
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from tiny import LENGTH, tiny_model

from hfscale.errors import UsageError
from hfscale.trainer.strategies import native

SINGLE = Layout()
LAYOUTS = [
    Layout(fsdp=2),
    Layout(rep=2),
    Layout(fsdp=2, ep=2),
    Layout(tp=2),
    Layout(tp=2, ep=2),
]
FOUR_RANKS = [
    Layout(fsdp=2, rep=2),
    Layout(fsdp=4, ep=2),
    Layout(fsdp=4, ep=4),
    Layout(fsdp=2, rep=2, ep=2),
    Layout(fsdp=2, tp=2),
    Layout(fsdp=2, tp=2, ep=2),
    Layout(fsdp=2, tp=2, ep=4),
    Layout(rep=2, tp=2, ep=2),
]
SETTINGS = {"lr_scaling": {"base_global_batch_size": 4}, "metrics": {"peak_tflops": 1.0}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """Return a function: the folder of a run with a layout, and its output."""
    known = {}

    def run(layout):
        if layout not in known:
            folder = tmp_path_factory.mktemp(str(layout))
            known[layout] = folder, launch(Run(layout=layout, every=None, parts=SETTINGS), model, folder)
        return known[layout]

    return run


def logs(folder):
    lines = (folder / "out" / "scaling.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.world(4)
@pytest.mark.parametrize(
    "layout",
    [
        *(one if one.ep > 1 else pytest.param(one, marks=pytest.mark.long) for one in LAYOUTS),
        *(pytest.param(one, marks=pytest.mark.faults) for one in FOUR_RANKS),
    ],
    ids=str,
)
def test_every_layout_trains_like_one_process(trained, layout):
    """Losses, gradient norms and scaled learning rates; and tokens and FLOPs, which count once per sequence."""
    (folder, printed), (control, _) = trained(layout), trained(SINGLE)
    for step, values in records(control).items():
        assert records(folder)[step] == pytest.approx(values, abs=1e-5), step
    assert f"strategy native on {layout.ranks} processes (cpu)" in printed
    found, expected = logs(folder)[-1], logs(control)[-1]
    assert found["scaling/tokens_seen"] == expected["scaling/tokens_seen"] == STEPS * 8 * LENGTH
    assert found["lr_scaling/factor"] == expected["lr_scaling/factor"] == pytest.approx(2**0.5)
    per_token = [log["scaling/mfu"] / log["scaling/tokens_per_s_per_gpu"] for log in (found, expected)]
    assert per_token[0] == pytest.approx(per_token[1], rel=1e-6)


@pytest.mark.world(2)
@pytest.mark.parametrize("layout", [Layout(fsdp=2), Layout(fsdp=2, ep=2), Layout(tp=2)], ids=str)
def test_stragglers_are_looked_for_where_a_rank_computes_alone(trained, layout):
    folder, printed = trained(layout)
    is_timed = layout.ep == layout.tp == 1
    assert ("stragglers are not looked for: under native" in printed) is not is_timed
    assert ("scaling/straggler_skew" in logs(folder)[-1]) is is_timed


def test_adapters_of_a_part_of_a_matrix_are_refused():
    """PEFT makes them where transformers shards a matrix over replicas (peft#3578)."""
    model = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"]))
    native._check_adapters(model)
    layer = next(module for module in model.modules() if isinstance(module, LoraLayer))
    layer.out_features //= 2
    with pytest.raises(UsageError, match=r"q_proj have \d+ outputs instead of \d+.*dp_replicate_size"):
        native._check_adapters(model)
