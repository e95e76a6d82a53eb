"""Draws programs with hypothesis."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from program import CHOICES, HOW, WHERE, Interruption, Program

COMMON = ("sampler", "collator", "data", "model", "trainer", "rows", "epochs", "save_strategy", "save_steps", "limit")
COMMON += ("eval_strategy", "eval_steps", "best", "move", "callback", "dropout", "processes", "extra")
"""Fields of which every second program has another value than the simplest; of the others, every fourth."""
OWN_TRAINERS = ("Trainer", *(name for name in CHOICES["trainer"] if not name.endswith("Trainer")))
"""Trainer itself and subclasses of it, which take every model and every kind of data."""
OWN_LOADERS = ("dataloader", "own_batches", "epoch_batches")
"""Subclasses that make their data loader themselves."""
OWN_MODELS = ("batch_norm", "running_mean", "counter", "plain_counter", "noise_in_place")
OWN_MODELS += ("spectral", "own_noise", "lstm")
"""Modules of a user's own, on images."""
IMAGE_MODELS = ("vit", *OWN_MODELS)
COUNTS_PASSES = {"counter", "plain_counter", "running_mean", "batch_norm", "annealed_loss", "counting_mask"}
COUNTS_PASSES |= {"spectral", "own_noise", "own_batches", "epoch_batches", "mixup", "adversarial"}
"""What depends on how many rows a pass has, so that another batch per device is another program."""
TEXT_MODELS = ("llama", "tied", "bert", "lora")


def weighted(name: str) -> st.SearchStrategy[Any]:
    """Return the strategy of a field: its simplest value comes first."""
    values = CHOICES[name]
    others = len(values) - 1
    return st.sampled_from(values[:1] * (others if name in COMMON else 3 * others) + values[1:])


interruptions = st.lists(
    st.builds(
        Interruption,
        how=st.sampled_from(HOW[:1] * 2 + HOW),
        where=st.sampled_from(WHERE[:1] * 2 + WHERE),
        percent=st.sampled_from((85, 60, 40, 20)),
        rank=st.sampled_from((None, 0, 1)),
    ),
    min_size=1,
    max_size=3,
).map(tuple)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draw a program that plain Trainer can run."""
    drawn = {name: draw(weighted(name)) for name in CHOICES}
    return possible(Program(**drawn, interruptions=draw(interruptions)))


def possible(program: Program) -> Program:
    """Return the program without choices that exclude each other or have no effect."""
    changes: dict[str, Any] = {}
    if program.trainer == "Seq2SeqTrainer":
        changes["model"] = "t5"
    elif program.trainer not in OWN_TRAINERS:
        changes |= {"model": "llama", "data": "sized", "sampler": "default", "collator": "default"}
        changes |= {"augmentation": "none", "smoothing": 0.0, "rows": 16, "dropout": 0.0, "schedule": "cosine"}
        changes["optimizer"] = "adafactor" if program.optimizer == "adafactor" else "default"
        if not program.schedule.endswith("LR"):
            changes["schedule"] = program.schedule
        if program.trainer in ("GRPOTrainer", "RLOOTrainer"):
            changes |= {"batch": 4, "workers": 0}
    program = replace(program, **changes)
    changes = {}
    if program.model in IMAGE_MODELS:
        changes |= {"collator": "default", "sampler": "default" if program.sampler == "group_by_length" else None}
        changes |= {"data": "sized" if program.data in ("padded", "packed") else None, "smoothing": 0.0}
    if program.data.endswith("stream"):
        changes |= {"sampler": "default", "augmentation": "none"}
    if program.data != "stream" and program.workers == 2:
        changes["workers"] = 1
    if program.trainer == "create_optimizer":
        changes |= {"optimizer": "default", "schedule": "cosine" if program.schedule.endswith("LR") else None}
    if program.trainer == "create_scheduler":
        # A schedule that the user has made for the larger batch stays when a smaller one is found
        changes |= {"schedule": "constant", "extra": "none" if program.extra.startswith("find_") else None}
    if program.trainer == "loss_function":
        changes |= {"smoothing": 0.0, "model": "llama" if program.model == "t5" else None}
    if program.schedule == "OwnPlateauLR" and program.eval_strategy == "no":
        changes["schedule"] = "constant"
    if program.trainer in OWN_LOADERS:
        changes |= {"sampler": "default", "data": "sized", "workers": 0}
    if program.augmentation in ("own_numpy", "own_python", "harder") and program.data == "datasets":
        changes["data"] = "sized"  # the dataset itself has the generator, or the level
    if program.model == "t5":  # which makes its inputs from the labels, that smoothing takes away
        changes["smoothing"] = 0.0
    if program.trainer == "CrossEncoderTrainer":  # its model cannot be recomputed under DDP
        changes |= {"processes": 1, "move": "none" if program.move == "processes" else None}
    if program.eval_strategy == "no":
        changes |= {"best": "none", "early_stopping": 0}
        changes |= {"schedule": "constant" if program.schedule == "plateau" else None}
        changes |= {"save_strategy": "steps" if program.save_strategy == "best" else None}
    if program.early_stopping and program.best == "none":
        changes["best"] = "lowest"
    if program.optimizer in ("numpy_rate", "numpy_betas") and program.schedule in ("OneCycleLR", "CyclicLR"):
        changes["schedule"] = "constant"
    program = replace(program, **{name: value for name, value in changes.items() if value is not None})
    changes = {}
    if program.best != "none" and program.save_strategy != "best":
        changes["save_strategy"] = program.eval_strategy
        if program.eval_strategy == "steps":
            changes["save_steps"] = program.eval_steps
    if program.save_strategy == "best" and program.best == "none":
        changes["best"] = "lowest"
    if program.move == "batch" and program.batch * program.accumulation not in (4, 8):
        changes["move"] = "none"
    if program.move in ("batch", "processes") and COUNTS_PASSES & {program.model, program.trainer, program.collator}:
        changes["move"] = "none"
    if program.trainer == "SentenceTransformerTrainer" and program.best != "none" and program.move == "processes":
        changes["move"] = "none"  # its evaluations on two processes have no eval_loss
    has_one_row = program.move == "processes" and (program.batch, program.processes) == (2, 1)
    if has_one_row and (program.accumulation == 2 or program.trainer == "KTOTrainer"):
        changes["move"] = "none"
    if not has_effect(program):
        changes["extra"] = "none"
    if not can_learn(program):
        changes["learning"] = "constant_batch"
    elif program.learning == "growing_batch":
        changes |= {"accumulation": 1, "skips": False}  # the schedule accumulates
    interruptions = program.interruptions
    if program.optimizer == "inside" or (program.extra == "find_smaller_batch_later" and has_effect(program)):
        # What such an optimizer keeps is named in the second step of a launch. The smaller batch has been found by
        # then: in a launch that resumes, Trainer finds it from the checkpoint on
        changes |= {"rows": 64, "epochs": max(program.epochs, 2)}
        interruptions = tuple(replace(each, percent=max(each.percent, 40)) for each in interruptions)
    if program.optimizer == "counting":  # that its state cannot be read is said once the first save is complete
        interruptions = tuple(replace(each, where="step") for each in interruptions)
    if program.extra == "removes_a_file":  # a launch that ends meanwhile leaves a checkpoint that is not verified
        interruptions = tuple(
            replace(each, where="step" if each.where == "save" else each.where) for each in interruptions
        )
    if program.extra == "log_by_epoch":  # after the save of the last step nothing logs, as in plain Trainer
        interruptions = tuple(replace(each, where="step") for each in interruptions)
    if program.eval_strategy == "no":
        interruptions = tuple(
            replace(each, where="step" if each.where == "evaluation" else each.where) for each in interruptions
        )
    if program.processes == 1:
        interruptions = tuple(replace(each, rank=None) for each in interruptions)
    return replace(program, **changes, interruptions=interruptions)


def can_learn(program: Program) -> bool:
    """Whether a batch that grows, or a rate that follows the width, goes with the other choices of a program."""
    if program.learning == "growing_batch":
        is_free = program.extra not in ("split_batches", "max_steps", "unseeded_sampler")
        is_free = is_free and not program.extra.startswith("find_")
        generates = program.trainer in ("GRPOTrainer", "RLOOTrainer")
        has_length = not program.data.endswith("stream") and program.sampler != "group_by_length"
        return is_free and has_length and not generates
    is_new = program.model in ("llama", "tied") and program.optimizer == "default"
    is_new = is_new and not program.schedule.endswith("LR")  # a scheduler that the user makes
    return is_new and program.trainer in OWN_TRAINERS and program.trainer != "create_optimizer"


def has_effect(program: Program) -> bool:
    """Whether the additional choice of a program can be made beside its other choices."""
    is_own = program.trainer in OWN_TRAINERS
    evaluates = program.eval_strategy != "no"
    moves_rows = program.move in ("batch", "processes")
    has_own_loader = program.trainer in OWN_LOADERS
    finds = is_own and not moves_rows and not program.skips
    needs = {
        "neftune": is_own and program.model in TEXT_MODELS,
        "eval_on_start": evaluates,
        "eval_delay": evaluates and program.best == "none" and not program.early_stopping,
        "persistent_workers": program.workers > 0,
        "gradient_checkpointing": is_own and program.model in TEXT_MODELS,
        "accuracy": is_own and evaluates and program.model != "t5",
        "batch_metrics": is_own and evaluates and program.model != "t5",
        "evaluates_when_asked": program.best == "none" and not program.early_stopping,
        "saves_when_asked": program.best == "none",
        "dispatch_batches": is_own and program.data == "stream",
        "split_batches": is_own and not has_own_loader and not moves_rows,
        "frozen_at_first": is_own and program.processes == 1 and program.trainer != "create_optimizer",
        "changes_settings": is_own and program.processes == 1 and program.trainer != "create_optimizer",
        "eval_sets": is_own and evaluates,
        "stops_by_log": evaluates and program.best == "none" and not program.early_stopping,
        "predicts_itself": is_own,
        "evaluates_itself": is_own and program.schedule != "OwnPlateauLR",
        "changes_cadence": program.best == "none" and not program.early_stopping,
        "sync_each_batch": is_own,
        "uneven_batches": is_own and not moves_rows,
        "max_steps": not program.data.endswith("stream"),
        "find_smaller_batch": finds,
        "find_smaller_batch_later": finds,
        "unseeded_sampler": is_own,
        # With another batch per device bfloat16 rounds otherwise
        "bf16_model": is_own and program.model in TEXT_MODELS and not moves_rows,
    }
    return needs.get(program.extra, True)
