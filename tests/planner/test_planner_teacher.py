"""Plans of recipes/distillation: what a teacher and the loss of two models' predictions add."""

from dataclasses import replace

import pytest
import torch
import yaml
from planner_jobs import job

from benchmarks.activations import LiveBytes
from hfscale import plan
from hfscale.cli import main
from hfscale.errors import LayoutError, UsageError
from hfscale.facts.models import find_model
from hfscale.planner.emit import emit
from hfscale.planner.estimate import estimate_job
from hfscale.planner.memory import GIB
from hfscale.planner.teacher import divergence_bytes, teacher_bytes, teacher_forward_bytes
from hfscale.recipe.parsing import parse_arguments

STRATEGIES = {
    "ddp": {"dp_replicate": 8, "zero": 0},
    "zero1": {"dp_replicate": 8, "zero": 1},
    "zero2": {"dp_replicate": 8, "zero": 2},
    "fsdp2": {"dp_shard": 8, "zero": 3},
}
PLAN = {
    "gpu": "A100-40GB",
    "gpus": 8,
    "seq_len": 1024,
    "global_batch": 128,
    "task": "distillation",
    "teacher": "qwen3-8b",
}


def distilled(strategy="fsdp2", **changes):
    """A run that distils Qwen3 8B into Qwen3 0.6B on eight GPUs."""
    return job(
        **{
            "shape": find_model("qwen3-0.6b"),
            "teacher": "qwen3-8b",
            "teacher_shape": find_model("qwen3-8b"),
            "task": "distillation",
            "seq_len": 1024,
            "global_batch": 128,
            "micro_batch": 4,
            "activation_checkpointing": "full",
            **STRATEGIES[strategy],
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("strategy", "changes", "each"),
    [
        ("ddp", {}, 2),
        ("ddp", {"teacher_dtype": "float32"}, 4),
        ("zero1", {}, 2),
        ("zero2", {"teacher_dtype": "float32"}, 2),  # DeepSpeed casts it to the format of the training
        ("fsdp2", {}, 2 / 8),
        ("fsdp2", {"teacher_dtype": "float32"}, 4 / 8),
        ("fsdp2", {"whole_teacher": True}, 2),
    ],
)
def test_the_teacher_is_kept_as_the_recipe_places_it(strategy, changes, each):
    run = distilled(strategy, **changes)
    assert teacher_bytes(run) == each * run.teacher_shape.total_parameters
    found = estimate_job(run)
    assert found.memory.teacher * GIB == pytest.approx(teacher_bytes(run))
    assert found.memory.states > found.memory.teacher


def test_only_a_shared_teacher_is_gathered():
    shared, whole = (teacher_forward_bytes(distilled(whole_teacher=is_whole)) for is_whole in (False, True))
    teacher = distilled().teacher_shape
    ends = teacher.embedding_parameters + teacher.head_parameters
    assert shared - whole == 2 * (ends + 2 * teacher.mean_layer_parameters)


@pytest.mark.parametrize("tokens", [200, 600])
def test_the_loss_needs_the_bytes_that_trl_allocates(tokens):
    """At the peak of its backward pass, in fp32. On a CPU torch makes further tiles of the vocabulary, which
    TRL's kernel for GPUs computes in place."""
    chunked = pytest.importorskip("trl.kernels.chunked_divergence")
    vocab, student, teacher = 1000, 64, 96
    with LiveBytes() as live:
        h_s = torch.randn(tokens, student, requires_grad=True)
        w_s = torch.randn(vocab, student, requires_grad=True)
        h_t, w_t = torch.randn(tokens, teacher), torch.randn(vocab, teacher)
        before = live.now
        loss, _ = chunked.ChunkedDivergenceFunction.apply(h_s, w_s, None, h_t, w_t, None, 1.0)
        live.peak = live.now
        loss.sum().backward()
        measured = live.peak - before
    shapes = [
        replace(find_model("qwen3-0.6b"), hidden=width, embedding_width=width, vocab=vocab)
        for width in (student, teacher)
    ]
    run = distilled(
        "ddp",
        shape=shapes[0],
        teacher_shape=shapes[1],
        precision="fp32",
        micro_batch=1,
        seq_len=tokens + 1,
        max_completion_length=tokens,
    )
    hidden = 4 * (tokens + 1) * teacher  # the teacher's hidden states were there before
    tile = 4 * tokens * vocab
    assert 0 <= measured - (divergence_bytes(run) - hidden) <= 9 * tile


def test_a_step_has_the_time_of_teacher_and_generation():
    small, large = (
        estimate_job(distilled("ddp", teacher_shape=find_model(name))).time for name in ("qwen3-1.7b", "qwen3-8b")
    )
    assert large.teacher > 3 * small.teacher
    assert large.generation == small.generation > 0
    assert large.total == pytest.approx(
        large.compute + large.communication + large.optimizer + large.teacher + large.generation
    )


def test_the_plan_of_the_shipped_recipe_fits_as_its_header_says():
    """recipes/distillation/qwen3-0.6b-full.yaml: about 10 GB in the teacher's forward pass."""
    found = estimate_job(distilled(micro_batch=8))
    assert found.memory.needed == pytest.approx(10, rel=0.35)


def test_the_planned_recipe_is_emitted_with_its_flags(tmp_path):
    found = plan("qwen3-0.6b", **PLAN, max_completion_length=256)
    files = {path.name: path for path in emit(found, tmp_path)}
    flags = yaml.safe_load(files["recipe.yaml"].read_text(encoding="utf-8"))
    assert "recipes/distillation/train.py" in files["train.py"].read_text(encoding="utf-8")
    assert flags["teacher_model_name_or_path"] == "Qwen/Qwen3-8B"
    assert flags.keys().isdisjoint(("block_size", "num_generations", "max_length"))
    training = parse_arguments(["--config", str(files["recipe.yaml"])], task="distillation")[3]
    assert training.max_completion_length == 256


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"teacher": None}, UsageError, "teacher"),
        ({"teacher": "llama-3.1-8b"}, UsageError, "vocabulary"),
        ({"max_completion_length": 1024}, LayoutError, "max_completion_length is 1024"),
        ({"stack": "titan"}, UsageError, "titan"),
        ({"num_generations": 4}, UsageError, "grpo"),
        ({"task": "grpo"}, UsageError, "distillation"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, error, named):
    with pytest.raises(error, match=named):
        plan("qwen3-0.6b", **{**PLAN, **changes})


def test_a_plan_with_a_teacher_says_what_it_counts(capsys):
    argv = ["plan", "qwen3-0.6b", "--task", "distillation", "--gpu", "A100-40GB", "--gpus", "8", "--seq-len", "1024"]
    assert main([*argv, "--teacher", "qwen3-8b", "--details"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "a teacher of 8.19B parameters, 2 bytes each" in printed
    assert "teacher" in printed.split("GiB per GPU at the peak")[1][:200]
    assert main(argv) == 2
