"""Plans of recipes/vision: what tower and projector add to memory, time and parameters."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import yaml
from planner_jobs import job
from test_tower_shape import SIDE, config_of, model_of
from transformers import AutoModelForImageTextToText

from benchmarks.activations import LiveBytes, gpu_kernels, recompute
from hfscale import estimate, plan
from hfscale.cli import main
from hfscale.errors import LayoutError, UnsupportedModelError, UsageError
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.models import find_model, find_tower
from hfscale.facts.tower_shape import TowerShape
from hfscale.planner.activations import end_activations, kept_and_working
from hfscale.planner.emit import emit
from hfscale.planner.estimate import estimate_job
from hfscale.planner.frameworks import find_framework
from hfscale.planner.images import PIXEL_BYTES, image_bytes, image_root_parameters
from hfscale.planner.launchable import recipe_of
from hfscale.planner.memory import GIB
from hfscale.planner.search import search
from hfscale.recipe.parsing import parse_arguments

STRATEGIES = {
    "ddp": {"dp_replicate": 8, "zero": 0},
    "zero1": {"dp_replicate": 8, "zero": 1},
    "zero2": {"dp_replicate": 8, "zero": 2},
    "fsdp2": {"dp_shard": 8, "zero": 3},
}
REGIMES = {"ddp": "autocast", "zero2": "bf16"}
PLAN = {"gpu": "H100-80GB", "gpus": 8, "seq_len": 2048, "task": "vision"}
ROWS = 128


def gemma(strategy="fsdp2", **changes):
    """A run of Gemma 3 4B with images on eight GPUs."""
    return job(
        **{
            "shape": find_model("gemma-3-4b"),
            "tower": find_tower("gemma-3-4b"),
            "task": "vision",
            "seq_len": 2048,
            "global_batch": 32,
            "activation_checkpointing": "full",
            **STRATEGIES[strategy],
            **changes,
        }
    )


def text(run):
    """The same run on text alone."""
    return replace(run, task="sft", tower=None)


@pytest.mark.parametrize(
    ("strategy", "frozen", "trained"),
    # bytes per parameter: fp32 weights, gradients and two moments; DeepSpeed keeps bf16 weights and an fp32 copy
    [
        ("ddp", 4, (4, 4, 8)),
        ("zero1", 2, (2, 4, 12 / 8)),
        ("zero2", 2, (2, 4 / 8, 12 / 8)),
        ("fsdp2", 4 / 8, (4 / 8, 4 / 8, 8 / 8)),
    ],
)
def test_states_of_tower_and_projector(strategy, frozen, trained):
    run = gemma(strategy)
    tower, projector = run.tower.tower_parameters, run.tower.projector_parameters
    without = estimate_job(text(run)).memory
    for trains_tower in (False, True):
        found = estimate_job(replace(run, train_vision_tower=trains_tower)).memory
        count = projector + trains_tower * tower
        added = [getattr(found, name) - getattr(without, name) for name in ("parameters", "gradients", "optimizer")]
        expected = [each * count for each in trained]
        expected[0] += frozen * (tower + projector - count)
        assert [size * GIB for size in added] == pytest.approx(expected)


def test_adapters_leave_tower_and_projector_frozen_in_bf16():
    run = gemma(method="lora")
    found, without = (estimate_job(one).memory for one in (run, text(run)))
    assert (found.parameters - without.parameters) * GIB == pytest.approx(2 * run.tower.total_parameters / 8)
    assert (found.gradients, found.optimizer) == (without.gradients, without.optimizer)


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("strategy", list(REGIMES))
@pytest.mark.parametrize("family", ["clip", "gemma3", "idefics3"])
def test_a_forward_pass_with_images_keeps_the_planned_bytes(family, strategy, policy):
    """In complete models, with the language model and its tokens of images; differences of three rows and one."""
    for trains_tower in (False, True):
        kept = kept_by_rows(family, REGIMES[strategy], policy, trains_tower)
        config = config_of(family, hidden_size=96, intermediate_size=384, num_hidden_layers=4).to_dict()
        run = job(
            shape=ModelShape.from_config(config),
            tower=TowerShape.from_config(config),
            task="vision",
            train_vision_tower=trains_tower,
            seq_len=ROWS,
            micro_batch=2,
            activation_checkpointing=policy,
            **STRATEGIES[strategy],
        )
        framework = find_framework("hf")
        layer, _ = kept_and_working(run, framework)
        images = image_bytes(run).kept - 2 * PIXEL_BYTES * run.tower.pixels
        planned = run.shape.layers * layer + end_activations(run, framework) + images
        error = 0.06 if policy == "none" else 0.2  # of what little is left, masks and the merged embeddings are a part
        assert planned == pytest.approx(kept, rel=error), (trains_tower, planned / kept)


def kept_by_rows(family, regime, policy, trains_tower):
    """Bytes that two further rows, each with an image, keep after a forward pass without the head."""
    wide = {"hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 4}
    model = model_of(family, regime, trains_tower=trains_tower, **wide)
    if policy != "none":
        recompute(model, policy, has_adapters=False)
    one, three = (kept_after_forward(model, regime, rows) for rows in (1, 3))
    return three - one


def kept_after_forward(model, regime, rows):
    family = model.config.model_type
    token = 98
    for name in ("image_token_id", "image_token_index"):
        setattr(model.config, name, token)
    tokens = TowerShape.from_config(model.config.to_dict()).tokens
    ids = torch.randint(3, 90, (rows, ROWS))
    ids[:, 4 : 4 + tokens] = token
    pixels = torch.ones(rows, 3, SIDE, SIDE, dtype=model.dtype)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    if family == "gemma3":
        batch["token_type_ids"] = (ids == token).long()
    if family == "idefics3":
        batch["pixel_values"] = pixels[:, None]
    with gpu_kernels(), LiveBytes() as live:
        with torch.autocast("cpu", torch.bfloat16) if regime == "autocast" else nullcontext():
            output = model.model(**batch, use_cache=False)
        size = live.now
    del output
    return size


def test_a_frozen_tower_keeps_nothing_and_a_trained_one_what_its_recomputation_leaves():
    frozen, *trained = (
        image_bytes(gemma(activation_checkpointing=policy, train_vision_tower=trains)).kept
        for trains, policy in ((False, "none"), (True, "full"), (True, "selective"), (True, "none"))
    )
    tower = gemma().tower
    assert frozen < 0.1 * GIB
    assert [frozen, *trained] == sorted([frozen, *trained])
    assert trained[0] - frozen == pytest.approx(27 * 2 * 4096 * 1152, rel=0.2)  # the inputs of the layers
    assert trained[2] > 8 * trained[0]
    assert tower.layers == 27


def test_images_are_counted_by_sequence():
    one, four = (image_bytes(gemma(images=images, train_vision_tower=True)) for images in (1, 4))
    assert four.kept == 4 * one.kept
    assert estimate_job(gemma(images=4)).time.compute > estimate_job(gemma()).time.compute


def test_a_trained_tower_costs_three_times_the_passes_of_a_frozen_one():
    plain, frozen, trained = (  # with images enough for the time not to be that of launching kernels
        estimate_job(one).time.compute
        for one in (
            text(gemma(activation_checkpointing="none")),
            gemma(activation_checkpointing="none", images=4),  # one alone takes the time of launching its kernels
            gemma(activation_checkpointing="none", images=4, train_vision_tower=True),
        )
    )
    assert trained - plain == pytest.approx(3 * (frozen - plain), rel=0.01)


def test_fsdp2_gathers_with_the_root_what_is_in_no_unit():
    """Of Idefics3 only the attention of the tower's layers is a unit (its `_no_split_modules`)."""
    for family in ("clip", "gemma3", "idefics3"):
        config = config_of(family)
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
        units = model._no_split_modules
        inside = {
            weight for module in model.modules() if type(module).__name__ in units for weight in module.parameters()
        }
        reading = [
            weight
            for name, weight in model.named_parameters()
            if "language_model" not in name and "text_model" not in name and "lm_head" not in name
        ]
        outside = sum(weight.numel() for weight in reading if weight not in inside)
        shape = TowerShape.from_config(config.to_dict())
        # The embedding of the patches is a unit too, of which nothing is gathered for long
        embedded = shape.other_parameters if family != "idefics3" else 0
        found = image_root_parameters(gemma(tower=shape))
        assert outside <= found <= outside + embedded


def test_the_planned_recipe_is_emitted_with_its_flags(tmp_path):
    found = plan("gemma-3-4b", **PLAN, global_batch=32, train_vision_tower=True)
    files = {path.name: path for path in emit(found, tmp_path)}
    flags = yaml.safe_load(files["recipe.yaml"].read_text(encoding="utf-8"))
    assert "recipes/vision/train.py" in files["train.py"].read_text(encoding="utf-8")
    assert (flags["max_length"], flags["train_vision_tower"]) == (2048, True)
    assert flags.keys().isdisjoint(("block_size", "torch_compile_regional", "packing"))
    training = parse_arguments(["--config", str(files["recipe.yaml"])], task="vision")[3]
    assert training.train_vision_tower
    assert training.per_device_train_batch_size == found.choices[0].estimate.job.micro_batch


def test_every_choice_can_be_launched_by_the_recipe():
    estimates, rejected = search(plan("gemma-3-4b", **PLAN, global_batch=32).request, 8)
    assert {recipe_of(one.job) for one in estimates} == {"recipes/vision/train.py"}
    assert any("tp 8" in row.summary for row in rejected)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"images": 8}, LayoutError, "images"),
        ({"method": "qlora"}, UsageError, "method"),
        ({"method": "lora", "train_vision_tower": True}, UsageError, "train_vision_tower"),
        ({"optimizer": "muon"}, UsageError, "Muon"),
        ({"compile": True}, UsageError, "compile"),
        ({"task": "text", "images": 2}, UsageError, "vision"),
        ({"teacher": "qwen3-8b"}, UsageError, "distillation"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, error, named):
    with pytest.raises(error, match=named):
        plan("gemma-3-4b", **{**PLAN, **changes})


@pytest.mark.parametrize("model", ["qwen3-8b", find_model("gemma-3-4b")])
def test_a_model_without_a_tower_is_refused(model):
    with pytest.raises((UnsupportedModelError, UsageError), match=r"config\.json"):
        plan(model, **PLAN)


def test_a_plan_with_images_says_what_it_counts(capsys, log):
    assert main(["plan", "gemma-3-4b", "--task", "vision", "--gpu", "H100-80GB", "--gpus", "8", "--details"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 image(s) of 896 x 896 pixels per sequence, each 4,096 positions of the tower and 256 tokens" in printed
    assert "tower frozen, projector trained (417M" in printed
    assert "language model alone" not in log.text


def test_estimates_from_python_take_images_too():
    found = estimate(
        "gemma-3-4b", gpu="H100-80GB", layout={"dp_shard": 8}, zero=3, seq_len=2048, task="vision", images=2
    )
    assert found.job.tower == find_tower("gemma-3-4b")
    assert 0 < found.mfu < 1
