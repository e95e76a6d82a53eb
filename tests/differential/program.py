"""A program as a user writes it: everything that is drawn of it, and how it is printed."""

import dataclasses
from dataclasses import dataclass
from typing import Any

RATE = 1e-2
"""The learning rate of all programs."""
CHOICES: dict[str, tuple[Any, ...]] = {
    "trainer": (
        "Trainer",
        "compute_loss",
        "annealed_loss",
        "training_step",
        "evaluate",
        "dataloader",
        "Seq2SeqTrainer",
        "SFTTrainer",
        "DPOTrainer",
        "GRPOTrainer",
        "RLOOTrainer",
        "SentenceTransformerTrainer",
        "RewardTrainer",
        "KTOTrainer",
        "CrossEncoderTrainer",
        "create_optimizer",
        "log",
        "create_scheduler",
        "mixup",
        "adversarial",
        "own_batches",
        "epoch_batches",
        "loss_function",
        "saves_more",
    ),
    "model": (
        "llama",
        "bert",
        "t5",
        "vit",
        "batch_norm",
        "running_mean",
        "counter",
        "noise_in_place",
        "tied",
        "lora",
        "plain_counter",
        "spectral",
        "own_noise",
        "lstm",
    ),
    "dropout": (0.0, 0.1),
    "data": ("sized", "padded", "packed", "datasets", "stream", "shuffled_stream", "mixed_stream", "random_stream"),
    "rows": (16, 24, 34, 64),
    "epochs": (2, 3, 1, 4),
    "batch": (4, 2),
    "accumulation": (1, 2),
    "workers": (0, 1, 2),
    "sampler": (
        "default",
        "group_by_length",
        "sequential",
        "set_epoch",
        "weighted",
        "weighted_generator",
        "numpy_curriculum",
        "python_shuffle",
        "counts_passes",
    ),
    "collator": (
        "default",
        "torch_mask",
        "numpy_mask",
        "python_mask",
        "generator_mask",
        "counting_mask",
        "module_mask",
        "closure_mask",
    ),
    "augmentation": ("none", "torch", "numpy", "python", "own_numpy", "own_python", "harder"),
    "optimizer": (
        "default",
        "sgd",
        "adafactor",
        "groups",
        "numpy_rate",
        "numpy_betas",
        "counting",
        "rmsprop",
        "inside",
    ),
    "schedule": (
        "constant",
        "linear",
        "cosine",
        "warmup",
        "polynomial",
        "inverse_sqrt",
        "cosine_restarts",
        "wsd",
        "plateau",
        "MultiStepLR",
        "OneCycleLR",
        "SequentialLR",
        "CyclicLR",
        "LambdaLR",
        "ChainedLR",
        "OwnPlateauLR",
        "AveragedLR",
    ),
    "clipping": (1.0, 0.0, 0.1),
    "smoothing": (0.0, 0.1),
    "save_strategy": ("steps", "epoch", "best"),
    "save_steps": (3, 2, 5),
    "limit": (None, 1, 2),
    "only_model": (False, True),
    "eval_strategy": ("no", "steps", "epoch"),
    "eval_steps": (3, 2, 4),
    "best": ("none", "lowest", "highest"),
    "early_stopping": (0, 1, 2),
    "callback": ("spot", "scaling"),
    "replay": (0, 1, 2),
    "average": ("none", "ema", "last"),
    "skips": (False, True),
    "learning": ("constant_batch", "growing_batch", "base_width"),
    "collects": (0, 2),
    "load_once": (False, True),
    "move": ("none", "renamed", "relative", "link", "lost", "batch", "processes"),
    "processes": (1, 2),
    "resume": ("latest", "true", "again"),
    "extra": (
        "none",
        "drop_last",
        "local_tokens",
        "neftune",
        "eval_on_start",
        "persistent_workers",
        "gradient_checkpointing",
        "bf16",
        "dispatch_batches",
        "split_batches",
        "unseeded_sampler",
        "max_steps",
        "log_by_epoch",
        "log_every_3",
        "count_tokens",
        "seeds",
        "eval_delay",
        "accuracy",
        "batch_metrics",
        "callback_states",
        "find_batch_size",
        "find_smaller_batch",
        "find_smaller_batch_later",
        "unused_columns",
        "saves_when_asked",
        "stops_when_asked",
        "evaluates_when_asked",
        "rate_set_by_hand",
        "frozen_at_first",
        "changes_settings",
        "draws_between_steps",
        "jit_checkpoint",
        "bf16_model",
        "eval_sets",
        "evaluates_itself",
        "predicts_itself",
        "changes_cadence",
        "removes_a_file",
        "averaged_model",
        "seeds_each_epoch",
        "clamps_weights",
        "stops_by_log",
        "ignore_data_skip",
        "no_nan_filter",
        "sync_each_batch",
        "uneven_batches",
        "first_step",
    ),
}
"""Values of each field of a program, the simplest first."""
HOW = ("crash", "kill", "notice", "ctrl_c", "stop_file")
WHERE = ("step", "save", "evaluation")


@dataclass(frozen=True)
class Interruption:
    """How one launch ends.

    Args:
        how (`str`): one of `HOW`.
        where (`str`): one of `WHERE`.
        percent (`int`): the share of the whole training after which it happens.
        rank (`int` or `None`): the process that it meets; None stands for all.
    """

    how: str = "crash"
    where: str = "step"
    percent: int = 85
    rank: int | None = None


@dataclass(frozen=True)
class Program:
    """All choices of a program; the defaults are the simplest ones. `CHOICES` lists the values of each field."""

    trainer: str = "Trainer"
    model: str = "llama"
    dropout: float = 0.0
    data: str = "sized"
    rows: int = 16
    epochs: int = 2
    batch: int = 4
    accumulation: int = 1
    workers: int = 0
    sampler: str = "default"
    collator: str = "default"
    augmentation: str = "none"
    optimizer: str = "default"
    schedule: str = "constant"
    clipping: float = 1.0
    smoothing: float = 0.0
    save_strategy: str = "steps"
    save_steps: int = 3
    limit: int | None = None
    only_model: bool = False
    eval_strategy: str = "no"
    eval_steps: int = 3
    best: str = "none"
    early_stopping: int = 0
    callback: str = "spot"
    replay: int = 0
    average: str = "none"
    skips: bool = False
    learning: str = "constant_batch"
    collects: int = 0
    load_once: bool = False
    move: str = "none"
    processes: int = 1
    resume: str = "latest"
    extra: str = "none"
    interruptions: tuple[Interruption, ...] = ()

    def features(self) -> frozenset[str]:
        """Return what differs from the simplest program, without sizes: by it kinds of faults are told apart."""
        sizes = ("rows", "epochs", "batch", "save_steps", "eval_steps", "interruptions")
        words = {
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name not in sizes and getattr(self, field.name) != field.default
        }
        usual = Interruption()
        for interruption in self.interruptions:
            words |= {interruption.how} - {usual.how} | {interruption.where} - {usual.where}
        return frozenset(words)

    def __str__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"Program({', '.join(changed)})"

    def script(self, fault: str) -> str:
        """Return a script that runs the program and compares it, to be started in the root of the repository.

        Args:
            fault (`str`): what it shows, for the docstring.
        """
        return (
            f'"""{fault}"""\n'
            "import sys\n\n"
            'sys.path.insert(0, "tests/differential")\n\n'
            "from program import Interruption, Program\n"
            "from running import show\n\n"
            f"show({self})\n"
        )
