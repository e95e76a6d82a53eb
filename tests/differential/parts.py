"""Builds what a program consists of besides its data: models, optimizers, schedules, arguments and Trainers."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from callbacks import KINDS, MakesHarder
from drawing import OWN_MODELS
from kinds_sentence_transformers import KINDS as SENTENCE_KINDS
from kinds_transformers import LLAMA, VISION, bert, t5
from kinds_trl import asked, builder, completed, count_words, labelled, preferred
from overrides import loss_function, trainer_class
from peft import LoraConfig, get_peft_model
from program import RATE, Program
from rows import Rows, collator_of, data_of, rows_of
from torch.nn.utils import parametrizations
from transformers import Trainer, TrainerCallback

from hfscale import initialize_at_width

BASE_WIDTH = 16
"""Half of the width of the Llama."""
EVAL_ROWS = 8


class OwnModel(torch.nn.Module):
    """A user's module on images.

    Args:
        kind (`str`): `batch_norm`; `running_mean`, whose forward pass replaces a buffer; `counter`, which counts its
            passes in a buffer; `plain_counter`, which counts them in an attribute; `noise_in_place`, which changes its
            input; `spectral`, whose weights are normalized in each pass; `own_noise`, which draws from generators of
            its own; `lstm`.
        dropout (`float`): probability of dropout.
    """

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind = kind
        self.first = torch.nn.Linear(3 * 16 * 16, 16)
        self.norm = torch.nn.BatchNorm1d(16) if kind == "batch_norm" else torch.nn.LayerNorm(16)
        self.middle: Any = torch.nn.Identity()
        if kind == "spectral":
            older = torch.nn.utils.spectral_norm(torch.nn.Linear(16, 16))
            newer = parametrizations.spectral_norm(torch.nn.Linear(16, 16))
            self.middle = torch.nn.Sequential(older, newer, parametrizations.weight_norm(torch.nn.Linear(16, 16)))
        if kind == "lstm":
            self.middle = torch.nn.LSTM(16, 16)
        self.dropout = torch.nn.Dropout(dropout)
        self.last = torch.nn.Linear(16, 3)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("passes", torch.zeros(()))
        self.calls = 0
        self.numpy_generator = np.random.default_rng(4)
        self.generator = torch.Generator().manual_seed(9)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return loss and logits."""
        if self.kind == "noise_in_place" and self.training:
            pixel_values.mul_(0.7)
        hidden = self.middle(self.norm(self.first(pixel_values.flatten(1))))
        if self.kind == "lstm":
            hidden, _ = hidden
        if self.kind == "own_noise" and self.training:
            noise = torch.randn(hidden.shape, generator=self.generator)
            hidden = hidden + 0.1 * noise + 0.1 * self.numpy_generator.random()
        if self.kind == "running_mean":
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
            hidden = hidden - self.mean
        if self.kind == "counter":
            if self.training:
                self.passes += 1
            hidden = hidden / (1 + 0.1 * self.passes)
        if self.kind == "plain_counter":
            self.calls += self.training
            hidden = hidden / (1 + 0.1 * self.calls)
        logits = self.last(self.dropout(hidden.relu()))
        loss = torch.nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def model_of(program: Program) -> torch.nn.Module:
    """Return the model, always with the same weights."""
    model = float_model_of(program)
    return model.bfloat16() if program.extra == "bf16_model" else model


def float_model_of(program: Program) -> torch.nn.Module:
    """Return the model with float32 weights."""
    transformers.set_seed(0)
    dropout = program.dropout
    if program.model in OWN_MODELS:
        return OwnModel(program.model, dropout)
    if program.model == "bert":
        return bert("BertForMaskedLM", hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    if program.model == "vit":
        config = transformers.ViTConfig(**VISION, hidden_dropout_prob=dropout, num_labels=3)
        return transformers.ViTForImageClassification(config)
    if program.model == "t5":
        model = t5()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = dropout
        return model
    tied = {"tie_word_embeddings": program.model == "tied"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(LLAMA | tied), attention_dropout=dropout))
    if program.learning == "base_width":
        initialize_at_width(model, base_width=BASE_WIDTH)
    if program.model != "lora":
        return model
    targets = ["q_proj", "v_proj", "embed_tokens"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, lora_dropout=dropout, task_type="CAUSAL_LM"))


class CountingSGD(torch.optim.SGD):
    """An optimizer that counts in a dictionary."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("counts", defaultdict(int))["steps"] += 1
        return super().step(closure)


class InsideOptimizer(torch.optim.Optimizer):
    """An optimizer that steps with another one inside, whose states its `state_dict` leaves out, as many SAMs do."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": RATE})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, lr=RATE)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base_optimizer.step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


def optimizer_of(program: Program, model: torch.nn.Module) -> torch.optim.Optimizer | None:
    """Return a user's optimizer; None if Trainer makes it."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if program.optimizer == "groups":
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        others = [parameter for parameter in parameters if parameter.ndim <= 1]
        return torch.optim.AdamW(
            [{"params": matrices}, {"params": others, "lr": RATE / 4, "weight_decay": 0}], lr=RATE
        )
    if program.optimizer == "numpy_rate":
        return torch.optim.AdamW(parameters, lr=np.geomspace(1e-3, 1e-1, 3)[1])
    if program.optimizer == "numpy_betas":
        return torch.optim.AdamW(parameters, lr=RATE, betas=(np.float64(0.9), np.float64(0.99)))
    if program.optimizer == "counting":
        return CountingSGD(parameters, lr=RATE)
    if program.optimizer == "inside":
        return InsideOptimizer(parameters)
    if program.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)
    if program.optimizer == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=RATE)
    return torch.optim.AdamW(parameters, lr=RATE) if program.schedule.endswith("LR") else None


def scheduler_of(program: Program, optimizer: torch.optim.Optimizer) -> Any:
    """Return a user's scheduler; None if Trainer makes it."""
    schedulers = torch.optim.lr_scheduler
    if program.schedule == "MultiStepLR":
        return schedulers.MultiStepLR(optimizer, [3, 7, 12], gamma=0.5)
    if program.schedule == "OneCycleLR":
        return schedulers.OneCycleLR(optimizer, max_lr=RATE, total_steps=200)
    if program.schedule == "SequentialLR":
        warmup = schedulers.LinearLR(optimizer, 0.1, total_iters=4)
        restarts = schedulers.CosineAnnealingWarmRestarts(optimizer, 5)
        return schedulers.SequentialLR(optimizer, [warmup, restarts], [4])
    if program.schedule == "CyclicLR":
        return schedulers.CyclicLR(optimizer, RATE / 10, RATE, step_size_up=4, cycle_momentum=False)
    if program.schedule == "ChainedLR":
        parts = [schedulers.ConstantLR(optimizer, 0.1, total_iters=2), schedulers.ExponentialLR(optimizer, 0.9)]
        return schedulers.ChainedScheduler(parts)
    if program.schedule == "OwnPlateauLR":
        return schedulers.ReduceLROnPlateau(optimizer, patience=0, mode="max")
    if program.schedule == "AveragedLR":
        return torch.optim.swa_utils.SWALR(optimizer, swa_lr=RATE / 5, anneal_epochs=6)
    if program.schedule == "LambdaLR":
        return schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return None


def total_steps(program: Program) -> int:
    """Return the number of optimizer steps of a program whose data has no length."""
    batches = -(-program.rows // (program.batch * program.processes))
    return program.epochs * -(-batches // program.accumulation)


SCHEDULES: dict[str, dict[str, Any]] = {
    "warmup": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 6},
    "cosine_restarts": {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    "wsd": {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 3}},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "mode": "max"}},
}


EXTRA: dict[str, dict[str, Any]] = {
    "drop_last": {"dataloader_drop_last": True},
    "local_tokens": {"average_tokens_across_devices": False},
    "neftune": {"neftune_noise_alpha": 5.0},
    "eval_on_start": {"eval_on_start": True},
    "persistent_workers": {"dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "dispatch_batches": {"accelerator_config": {"dispatch_batches": True}},
    "split_batches": {"accelerator_config": {"split_batches": True}},
    "unseeded_sampler": {"accelerator_config": {"use_seedable_sampler": False}},
    "log_by_epoch": {"logging_strategy": "epoch"},
    "log_every_3": {"logging_steps": 3},
    "count_tokens": {"include_num_input_tokens_seen": "all"},
    "seeds": {"seed": 7, "data_seed": 11},
    "eval_delay": {"eval_delay": 2},
    "accuracy": {"metric_for_best_model": "eval_accuracy", "greater_is_better": True},
    "batch_metrics": {"batch_eval_metrics": True},
    "callback_states": {"restore_callback_states_from_checkpoint": True},
    "find_batch_size": {"auto_find_batch_size": True},
    "find_smaller_batch": {"auto_find_batch_size": True},
    "find_smaller_batch_later": {"auto_find_batch_size": True},
    "unused_columns": {"remove_unused_columns": False},
    "jit_checkpoint": {"enable_jit_checkpoint": True},
    "ignore_data_skip": {"ignore_data_skip": True},
    "no_nan_filter": {"logging_nan_inf_filter": False},
    "sync_each_batch": {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
    "uneven_batches": {"accelerator_config": {"even_batches": False}},
    "first_step": {"logging_first_step": True, "logging_steps": 4},
}
"""Training arguments that a program has beside its fields."""


def arguments_of(program: Program, folder: str, *, other_batch: bool = False, processes: int = 1) -> dict[str, Any]:
    """Return the training arguments.

    Args:
        program (`Program`): the program.
        folder (`str`): the output directory.
        other_batch (`bool`): whether another batch per device makes the same global batch.
        processes (`int`): how many processes train; where it is not the number of the program, the batch per device
            makes the same global batch.
    """
    batch, accumulation = program.batch, program.accumulation
    if processes != program.processes:
        batch = batch * program.processes // processes
    if other_batch:
        batch, accumulation = (batch // 2, accumulation * 2) if accumulation == 1 else (batch * 2, accumulation // 2)
    arguments = {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": program.epochs,
        "logging_steps": 1,
        "learning_rate": RATE,
        "max_grad_norm": program.clipping,
        "label_smoothing_factor": program.smoothing,
        "save_strategy": program.save_strategy,
        "save_steps": program.save_steps,
        "save_total_limit": program.limit,
        "save_only_model": program.only_model,
        "eval_strategy": program.eval_strategy,
        "eval_steps": program.eval_steps,
        "dataloader_num_workers": program.workers,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "lr_scheduler_type": program.schedule,
    }
    if program.schedule.endswith("LR"):
        arguments["lr_scheduler_type"] = "constant"
    arguments |= SCHEDULES.get(program.schedule, {})
    if program.schedule == "inverse_sqrt":
        arguments["warmup_steps"] = 3
    if program.optimizer == "adafactor":
        arguments["optim"] = "adafactor"
    if program.best != "none":
        arguments |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
        arguments["greater_is_better"] = program.best == "highest"
    if program.data.endswith("stream"):
        arguments["max_steps"] = total_steps(program)
    if program.sampler in ("group_by_length", "sequential"):
        arguments["train_sampling_strategy"] = program.sampler
    arguments |= EXTRA.get(program.extra, {})
    if program.extra == "max_steps":
        arguments["max_steps"] = total_steps(program) * 2 // 3
    if program.schedule == "OwnPlateauLR" and program.best == "none":
        arguments |= {"metric_for_best_model": "eval_loss", "greater_is_better": False}
    if program.extra == "eval_sets" and program.best != "none":
        arguments["metric_for_best_model"] = "eval_later_loss"
    if program.extra == "accuracy" and program.best == "none":
        arguments.pop("metric_for_best_model")
        arguments.pop("greater_is_better")
    return arguments


def eval_data_of(program: Program) -> Any:
    """Return the evaluation data: two sets where the program has them."""
    rows = rows_of(program, EVAL_ROWS)
    if program.extra != "eval_sets":
        return Rows(rows)
    half = EVAL_ROWS // 2
    return {"early": Rows(rows[:half]), "later": Rows(rows[half:])}


def accuracy(prediction: Any, compute_result: bool = True) -> dict[str, float]:
    """Return the share of labels that the largest logit names."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    best, labels = torch.as_tensor(logits).argmax(-1), torch.as_tensor(prediction.label_ids)
    known = labels != -100
    return {"accuracy": float((best == labels)[known].float().mean())}


def trainer_of(program: Program, arguments: dict[str, Any], callbacks: list[TrainerCallback]) -> Trainer:
    """Return the Trainer of a program."""
    if program.extra in KINDS:
        asking = KINDS[program.extra](program.extra, total_steps(program))
        callbacks = [*callbacks, asking]
    if program.early_stopping:
        callbacks = [*callbacks, transformers.EarlyStoppingCallback(program.early_stopping)]
    if program.trainer == "SentenceTransformerTrainer":
        return SENTENCE_KINDS[0].build(Path(arguments["output_dir"]), callbacks, **arguments)
    if program.trainer == "CrossEncoderTrainer":
        kind = next(kind for kind in SENTENCE_KINDS if "Cross" in kind.trainer)
        return kind.build(Path(arguments["output_dir"]), callbacks, **arguments)
    if program.trainer in TRL:
        return TRL[program.trainer](Path(arguments["output_dir"]), callbacks, **arguments)
    model = model_of(program)
    optimizer = optimizer_of(program, model)
    scheduler = scheduler_of(program, optimizer) if optimizer is not None else None
    is_seq2seq = program.trainer == "Seq2SeqTrainer"
    kind = transformers.Seq2SeqTrainingArguments if is_seq2seq else transformers.TrainingArguments
    made = trainer_class(program)(
        model=model,
        args=kind(**arguments),
        train_dataset=data_of(program),
        eval_dataset=eval_data_of(program),
        data_collator=collator_of(program.collator),
        callbacks=callbacks,
        optimizers=(optimizer, scheduler),
        compute_loss_func=loss_function if program.trainer == "loss_function" else None,
        compute_metrics=accuracy if program.extra in ("accuracy", "batch_metrics") else None,
    )
    made.remove_callback(transformers.PrinterCallback)
    if program.extra in KINDS:
        asking.trainer = made
    if program.augmentation == "harder":
        made.add_callback(MakesHarder(made.train_dataset))
    if program.extra.startswith("find_smaller_batch"):
        passes = 4 if program.extra.endswith("later") else 0
        model.register_forward_pre_hook(LimitedMemory(program.batch, passes), with_kwargs=True)
    return made


class LimitedMemory:
    """Runs out of memory in training on as many rows as the arguments have.

    Args:
        batch (`int`): that number of rows.
        passes (`int`): how many passes fit before.
    """

    def __init__(self, batch: int, passes: int) -> None:
        self.batch = batch
        self.passes = passes

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a pass, before it is made."""
        first = next(iter(kwargs.values()))
        if not model.training or len(first) < self.batch:
            return
        self.passes -= 1
        if self.passes < 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more")


GENERATION = {"num_generations": 2, "max_completion_length": 4, "beta": 0.0, "gradient_checkpointing": False}
TRL = {
    "SFTTrainer": builder("SFT", completed, gradient_checkpointing=False),
    "DPOTrainer": builder("DPO", preferred, gradient_checkpointing=False),
    "GRPOTrainer": builder("GRPO", asked, options=lambda: {"reward_funcs": count_words}, **GENERATION),
    "RewardTrainer": builder(
        "Reward", preferred, model="LlamaForSequenceClassification", gradient_checkpointing=False
    ),
    "KTOTrainer": builder("KTO", labelled, gradient_checkpointing=False),
    "RLOOTrainer": builder("RLOO", asked, options=lambda: {"reward_funcs": count_words}, **GENERATION),
}
