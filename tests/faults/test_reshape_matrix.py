"""Every strategy and number of processes goes on from every other's checkpoint as if nothing had changed.

The long suite, `make test-faults`. A run takes six steps of two epochs, its checkpoint is in the middle of the second.
"""

import shutil

import pytest
from recipe_runs import STRATEGIES, logged, make_workplace, output, run_recipe, warm_up

pytestmark = [pytest.mark.faults, pytest.mark.world(4), pytest.mark.timeout(3600)]
RANKS = (1, 2, 3, 4)
TOLERANCE = 4e-6  # fp32: what another order of summation does; seen at most 9.6e-7
STAGED = 2e-5  # with matrices cut over ranks and micro-batches summed one by one
SOURCES = [(strategy, ranks) for strategy in STRATEGIES for ranks in RANKS if (strategy, ranks) != ("fsdp2", 1)]


def targets(source, shift):
    """Every target strategy, on a number of ranks that goes round; with all four shifts on every number."""
    for number, strategy in enumerate(STRATEGIES):
        ranks = RANKS[(SOURCES.index(source) + number + shift) % 4]
        if (strategy, ranks) != ("fsdp2", 1):  # accelerate runs no FSDP in one process on a CPU
            yield strategy, ranks


def test_four_shifts_are_the_whole_matrix():
    for source in SOURCES:
        assert sorted(target for shift in range(4) for target in targets(source, shift)) == sorted(SOURCES)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    warm_up()
    return make_workplace(tmp_path_factory.mktemp("workplace"))


@pytest.fixture(scope="module")
def control(workplace, tmp_path_factory):
    folder = shutil.copytree(workplace, tmp_path_factory.mktemp("control"), dirs_exist_ok=True)
    run_recipe(folder, "ddp", 2)
    return folder


@pytest.fixture(scope="module")
def interrupted(workplace, tmp_path_factory):
    """`interrupted("zero3", 2)`: the folder of a run that stopped after its checkpoint at step 4; do not change it."""
    made = {}

    def run(strategy, ranks, *flags, **place):
        key = (strategy, ranks, *flags, *place.items())
        if key not in made:
            folder = shutil.copytree(workplace, tmp_path_factory.mktemp(f"{strategy}-{ranks}"), dirs_exist_ok=True)
            run_recipe(folder, strategy, ranks, "--save_steps", "4", *flags, **place)
            shutil.rmtree(folder / "out" / "checkpoint-6")
            made[key] = folder
        return made[key]

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


def goes_on(workplace, tmp_path, first, then, *flags):
    """Losses of steps 5 and 6: of an uninterrupted run, and of one that goes on as `then` after step 4.

    `first` and `then` are strategy, ranks and, where the ranks stand otherwise than in one row, how: `run_recipe`'s.
    """
    begun, moved_on = (place[2] if len(place) > 2 else {} for place in (first, then))
    whole, moved = (shutil.copytree(workplace, tmp_path / name) for name in ("whole", "moved"))
    for folder in (whole, moved):
        run_recipe(folder, *first[:2], "--save_steps", "4", *flags, **begun)
    shutil.rmtree(moved / "out" / "checkpoint-6")
    run_recipe(moved, *then[:2], *flags, **moved_on)
    return tuple([logged(folder, "loss")[step] for step in (5, 6)] for folder in (whole, moved))


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
    whole, moved = goes_on(workplace, tmp_path, first, then)
    assert moved == pytest.approx(whole, abs=TOLERANCE)


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
    whole, moved = goes_on(workplace, tmp_path, first, then, "--use_peft", "true", "--lora_r", "4")
    assert moved == pytest.approx(whole, abs=TOLERANCE)


@pytest.mark.parametrize(("first", "then"), [(("zero2", 2), ("zero3", 3)), (("zero3", 2), ("zero1", 3))])
def test_masters_of_bf16_are_the_weights(workplace, tmp_path, first, then):
    """Gradients are summed in bf16, in another order on other ranks."""
    whole, moved = goes_on(workplace, tmp_path, first, then, "--bf16", "true")
    assert moved == pytest.approx(whole, abs=2e-2)


@pytest.mark.parametrize(("first", "then"), [(("ddp", 2), ("ddp", 3)), (("zero2", 2), ("fsdp2", 2))])
def test_a_stream_goes_on_where_it_was(workplace, tmp_path, first, then):
    """One process reads it for all, and its place is the same for any number of them."""
    whole, moved = goes_on(workplace, tmp_path, first, then, "--streaming", "true")
    assert moved == pytest.approx(whole, abs=TOLERANCE)
    assert "the stream goes on after 12 sequences of its pass 2" in output(tmp_path / "moved")


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
    ids=lambda place: "-".join(map(str, (*place[:2], *(place[2].values() if len(place) > 2 else ())))),
)
def test_stages_and_merged_experts(interrupted, tmp_path, first, then, model):
    """Experts are merged in memory, parts of a distributed checkpoint, and apart in safetensors files."""
    flags = ("--config_name", model)
    begun, moved_on = (place[2] if len(place) > 2 else {} for place in (first, then))
    expected = logged(interrupted("ddp", 4, *flags), "loss")  # its folder says what it logged after step 4 too
    folder = shutil.copytree(interrupted(*first[:2], *flags, **begun), tmp_path / "moved")
    run_recipe(folder, *then[:2], *flags, **moved_on)
    assert logged(folder, "loss") == pytest.approx(expected, abs=STAGED)
