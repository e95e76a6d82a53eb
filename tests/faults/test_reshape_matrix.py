"""Every strategy and number of processes resumes from every other's checkpoint with the same losses.

This belongs to the long suite, `make test-faults`. A run has six steps in two epochs; its checkpoint is in the middle
of the second epoch.
"""

import re
import shutil

import pytest
from recipe_runs import STRATEGIES, logged, output, run_recipe

pytestmark = [pytest.mark.faults, pytest.mark.world(4), pytest.mark.timeout(3600)]
RANKS = (1, 2, 3, 4)
TOLERANCE = 4e-6  # fp32, due to another order of summation; the largest difference seen is 9.6e-7
PIPELINE_TOLERANCE = 2e-5  # with matrices sharded over ranks and micro-batches summed one by one
SOURCES = [(strategy, ranks) for strategy in STRATEGIES for ranks in RANKS if (strategy, ranks) != ("fsdp2", 1)]


def targets(source, shift):
    """Yield every target strategy with one number of ranks; over all four shifts, with every number of ranks."""
    for number, strategy in enumerate(STRATEGIES):
        ranks = RANKS[(SOURCES.index(source) + number + shift) % 4]
        if (strategy, ranks) != ("fsdp2", 1):  # accelerate runs no FSDP in one process on a CPU
            yield strategy, ranks


def test_four_shifts_cover_the_matrix():
    for source in SOURCES:
        assert sorted(target for shift in range(4) for target in targets(source, shift)) == sorted(SOURCES)


@pytest.fixture(scope="module")
def control(workplace, tmp_path_factory):
    folder = shutil.copytree(workplace, tmp_path_factory.mktemp("control"), dirs_exist_ok=True)
    run_recipe(folder, "ddp", 2)
    return folder


@pytest.fixture(scope="module")
def interrupted(workplace, tmp_path_factory):
    """Return a function: `interrupted("zero3", 2)` is the folder of a run that stopped after its checkpoint at step 4.

    The folder is shared by the tests, so it must not be changed.
    """
    folders = {}

    def run(strategy, ranks, *flags, **layout):
        key = (strategy, ranks, *flags, *layout.items())
        if key not in folders:
            folder = shutil.copytree(workplace, tmp_path_factory.mktemp(f"{strategy}-{ranks}"), dirs_exist_ok=True)
            run_recipe(folder, strategy, ranks, "--save_steps", "4", *flags, **layout)
            shutil.rmtree(folder / "out" / "checkpoint-6")
            folders[key] = folder
        return folders[key]

    return run


@pytest.mark.parametrize("shift", range(4))
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: "-".join(map(str, source)))
def test_the_matrix(interrupted, control, tmp_path, source, shift):
    expected = logged(control, "loss")
    for target in targets(source, shift):
        folder = shutil.copytree(interrupted(*source), tmp_path / "-".join(map(str, target)))
        run_recipe(folder, *target)
        losses = logged(folder, "loss")
        assert max(abs(losses[step] - loss) for step, loss in expected.items()) < TOLERANCE, target
        assert logged(folder, "learning_rate") == logged(control, "learning_rate"), target


def losses_after_resume(workplace, tmp_path, first, then, *flags):
    """Return the losses of steps 5 and 6 of an uninterrupted run, and of a run that resumes as `then` after step 4.

    `first` and `then` are a strategy, a number of ranks and optionally the layout arguments of `run_recipe`.
    """
    first_layout, then_layout = (setup[2] if len(setup) > 2 else {} for setup in (first, then))
    uninterrupted, resumed = (shutil.copytree(workplace, tmp_path / name) for name in ("uninterrupted", "resumed"))
    for folder in (uninterrupted, resumed):
        run_recipe(folder, *first[:2], "--save_steps", "4", *flags, **first_layout)
    shutil.rmtree(resumed / "out" / "checkpoint-6")
    run_recipe(resumed, *then[:2], *flags, **then_layout)
    return tuple([logged(folder, "loss")[step] for step in (5, 6)] for folder in (uninterrupted, resumed))


HYBRID = {"hsdp": True}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("fsdp2", 4, HYBRID), ("zero3", 2)),
        (("zero1", 2), ("fsdp2", 4, HYBRID)),
        (("fsdp2", 2), ("fsdp2", 4, HYBRID)),
    ],
)
def test_hybrid_sharding(workplace, tmp_path, first, then):
    uninterrupted, resumed = losses_after_resume(workplace, tmp_path, first, then)
    assert resumed == pytest.approx(uninterrupted, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("ddp", 2), ("fsdp2", 3)),
        (("fsdp2", 2), ("zero3", 3)),
        (("zero3", 2), ("ddp", 3)),
        (("zero1", 2), ("fsdp2", 3)),
        (("ddp", 2), ("parallel", 4, {"tp": 2})),
        (("parallel", 4, {"tp": 2}), ("zero3", 2)),
        (("parallel", 2), ("fsdp2", 2)),
    ],
)
def test_adapters(workplace, tmp_path, first, then):
    uninterrupted, resumed = losses_after_resume(
        workplace, tmp_path, first, then, "--use_peft", "true", "--lora_r", "4"
    )
    assert resumed == pytest.approx(uninterrupted, abs=TOLERANCE)


@pytest.mark.parametrize(("first", "then"), [(("zero2", 2), ("zero3", 3)), (("zero3", 2), ("zero1", 3))])
def test_bf16_runs_resume_from_the_fp32_master_weights(workplace, tmp_path, first, then):
    """Gradients are summed in bf16, in an order that depends on the number of ranks."""
    uninterrupted, resumed = losses_after_resume(workplace, tmp_path, first, then, "--bf16", "true")
    assert resumed == pytest.approx(uninterrupted, abs=2e-2)


@pytest.mark.parametrize(("first", "then"), [(("ddp", 2), ("ddp", 3)), (("zero2", 2), ("fsdp2", 2))])
def test_streaming_data_resumes_at_its_position(workplace, tmp_path, first, then):
    """One process reads the stream for all, so its position does not depend on the number of processes."""
    uninterrupted, resumed = losses_after_resume(workplace, tmp_path, first, then, "--streaming", "true")
    assert resumed == pytest.approx(uninterrupted, abs=TOLERANCE)
    assert re.search("stream.* 12 .* 2", output(tmp_path / "resumed"))


SQUARE = {"tp": 2, "pp": 2}


@pytest.mark.parametrize("model", ["deep", "experts"])
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("parallel", 4, SQUARE), ("ddp", 2)),
        (("parallel", 4, SQUARE), ("fsdp2", 3)),
        (("parallel", 4, SQUARE), ("zero2", 2)),
        (("parallel", 4, SQUARE), ("single", 1)),
        (("parallel", 4, SQUARE), ("parallel", 2, {"tp": 1, "pp": 2})),
        (("parallel", 4, {"tp": 2, "pp": 1}), ("parallel", 4, SQUARE)),
        (("ddp", 4), ("parallel", 4, SQUARE)),
        (("fsdp2", 2), ("parallel", 4, SQUARE)),
        (("zero2", 2), ("parallel", 4, SQUARE)),
        (("single", 1), ("parallel", 2, {"tp": 1, "pp": 2})),
        (("zero3", 2), ("parallel", 4, {"tp": 2, "pp": 1})),
    ],
    ids=lambda setup: "-".join(map(str, (*setup[:2], *(setup[2].values() if len(setup) > 2 else ())))),
)
def test_pipeline_stages_and_merged_experts(interrupted, tmp_path, first, then, model):
    """Experts are merged in memory and in distributed checkpoints, and separate in safetensors files."""
    flags = ("--config_name", model)
    first_layout, then_layout = (setup[2] if len(setup) > 2 else {} for setup in (first, then))
    expected = logged(interrupted("ddp", 4, *flags), "loss")  # its log also has the steps after step 4
    folder = shutil.copytree(interrupted(*first[:2], *flags, **first_layout), tmp_path / "resumed")
    run_recipe(folder, *then[:2], *flags, **then_layout)
    assert logged(folder, "loss") == pytest.approx(expected, abs=PIPELINE_TOLERANCE)
