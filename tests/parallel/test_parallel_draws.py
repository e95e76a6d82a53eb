"""Programs drawn from layouts, adapters, losses and optimizers: ParallelTrainer trains, resumes in another layout and
exports what one process does, or refuses the program before the first step."""

import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_world import Tokens, in_world, tiny_causal_lm
from peft import PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils.peft_types import PeftType
from test_parallel_losses_of_users import HeadNorm, LogitsLoss, MeanLoss, Metrics
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hfscale import ParallelArguments, ParallelTrainer
from hfscale.errors import UsageError

STEPS = 4
SAVED = 2
PROGRAMS = 200
TOLERANCE = {"loss": 2e-5, "grad_norm": 3e-4, "eval": 2e-5}
"""Of the size of a value, which is about 4: fp32 adds in another order, and the norm's relative error is larger."""

LAYOUTS: list[dict[str, Any]] = [
    {"tp_size": 2},
    {"pp_size": 2},
    {"pp_size": 2, "pipeline_schedule": "GPipe"},
    {"pp_size": 2, "pipeline_schedule": "ZBV"},
    {},
    {"dp_replicate_size": 2},
    {"cp_size": 2},
    {"tp_size": 2, "sequence_parallel": True},
]
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True}),
    ("qwen3", {}),
    ("gpt2", {"n_embd": 32, "n_layer": 4, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    ("gemma2", {"query_pre_attn_scalar": 8}),
]
SHARDED = ["q_proj", "v_proj", "o_proj", "down_proj"]
ADAPTERS: list[tuple[str, dict[str, Any]] | None] = [
    None,
    None,
    None,
    None,
    ("lora", {"r": 4, "target_modules": SHARDED}),
    ("lora", {"r": 4, "target_modules": "all-linear", "use_rslora": True}),
    ("lora", {"r": 4, "target_modules": ["q_proj"], "bias": "all"}),
    ("lora", {"r": 4, "target_modules": ["q_proj"], "use_dora": True}),
    ("lora", {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    ("lora", {"r": 4, "target_modules": ["q_proj", "embed_tokens"]}),
    ("lora", {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}),
    ("lora", {"r": 4, "target_modules": ["q_proj"], "layers_to_transform": [3]}),
    ("ia3", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    ("loha", {"r": 4, "target_modules": ["q_proj", "o_proj"]}),
]
LOSSES: list[type | str | None] = [None, None, None, "function", MeanLoss, LogitsLoss, HeadNorm, Metrics]
OPTIMIZERS = ["adamw_torch", "adamw_torch", "sgd", "adagrad", "rmsprop", "adafactor", "groups", "momentum"]
SCHEDULES = ["linear", "cosine", "constant_with_warmup", "inverse_sqrt"]
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"max_grad_norm": 0.05},
    {"max_grad_norm": 0.0},
    {"label_smoothing_factor": 0.1},
    {"gradient_checkpointing": True},
    {"train_sampling_strategy": "group_by_length"},
    {"weight_decay": 0.0, "adam_beta2": 0.9},
    {"eval_strategy": "steps", "eval_steps": 1},
]


def draw(number: int) -> dict[str, Any]:
    """Draw a program from a seed."""
    choose = random.Random(number).choice
    family = choose(FAMILIES)
    adapter = choose(ADAPTERS)
    loss = choose(LOSSES)
    arguments = choose(ARGUMENTS)
    # Rows of one length where the order of an evaluation is drawn, or replicas average a loss of the user's
    data = {} if loss is not None or "train_sampling_strategy" in arguments else choose([{}, {"ragged": True}])
    # Those that are refused with a loss of the user's have a test of their own
    layouts = LAYOUTS if loss is None else LAYOUTS[:-2]
    return {
        "number": number,
        "first": choose(layouts),
        "second": choose(layouts),
        "family": family,
        "adapter": None if family[0] == "gpt2" else adapter,
        "loss": loss,
        "optimizer": choose(OPTIMIZERS),
        "schedule": choose(SCHEDULES),
        "arguments": arguments,
        "batch": choose([1, 2]),
        "data": data,
    }


# --- one program -----------------------------------------------------------------------------------------------------


def _model(program: dict[str, Any], *, adapted: bool = True) -> Any:
    family, overrides = program["family"]
    model = tiny_causal_lm(family, seed=7, **overrides)
    if program["adapter"] is None or not adapted:
        return model
    kind, options = program["adapter"]
    torch.manual_seed(3)
    model = get_peft_model(
        model, PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind.upper())](task_type="CAUSAL_LM", **options)
    )
    with torch.no_grad():  # as if trained for a while: with a B of zeros, A has no gradient
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "hada_w2_a" in name:
                parameter.normal_(std=0.02)
    return model


def _function(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].float().flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum", ignore_index=-100)
    return total / num_items_in_batch


class _Groups:
    """A rate of the norms and the head that is not that of the rest."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        own = [p for name, p in trained if "norm" in name or "head" in name or "lora_B" in name]
        rest = [p for _, p in trained if not any(p is other for other in own)]
        groups = [{"params": rest, "lr": 1e-3}, {"params": own, "lr": 1e-2, "weight_decay": 0.0}]
        present = [group for group in groups if group["params"]]
        if self.program["optimizer"] == "momentum":
            self.optimizer = torch.optim.SGD(present, lr=1e-2, momentum=0.9)
        else:
            self.optimizer = torch.optim.AdamW(present, betas=(0.8, 0.95))
        return self.optimizer


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train a program in a layout; a refusal is returned as its text."""
    import os

    program = draw(job["number"])
    layout = job["layout"]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    replica = 1
    for axis in ("tp_size", "pp_size", "cp_size"):
        replica *= (layout or {}).get(axis, 1)
    own = program["optimizer"] in ("groups", "momentum")
    settings = {
        "output_dir": job["folder"],
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": program["batch"],
        "gradient_accumulation_steps": 8 // (program["batch"] * (world // replica)),
        "per_device_eval_batch_size": 8 * replica // world,
        "learning_rate": 1e-3,
        "lr_scheduler_type": program["schedule"],
        "warmup_steps": 1,
        "optim": "adamw_torch" if own else program["optimizer"],
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": SAVED,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 7,
        "weight_decay": 0.1,
    }
    args = TrainingArguments(**settings | program["arguments"])
    base = Trainer if layout is None else ParallelTrainer
    mixins = [kind for kind in (program["loss"],) if isinstance(kind, type)] + ([_Groups] if own else [])
    kind = type("Own", (*mixins, base), {"program": program})
    options: dict[str, Any] = {} if layout is None else {"parallel": ParallelArguments(**layout)}
    if program["loss"] == "function":
        options["compute_loss_func"] = _function
    try:
        trainer = kind(
            model=_model(program),
            args=args,
            train_dataset=Tokens(**program["data"]),
            eval_dataset=Tokens(16, **program["data"]),
            **options,
        )
        trainer.train(resume_from_checkpoint=job.get("resume"))
    except UsageError as error:
        if job["alone"]:  # the other ranks end with this process
            Path(job["folder"], "refused").write_text(str(error))
        raise
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(job["folder"])
    history = trainer.state.log_history
    result = {
        key: [log[key] for log in history if key in log and (log["step"] > SAVED or not job.get("resume"))]
        for key in ("loss", "grad_norm")
    }
    return result | {"eval": [evaluated]}


def reloaded(program: dict[str, Any], folder: str) -> float:
    """The evaluation loss of what `from_pretrained` makes of the folder, as Trainer computes it."""
    if program["adapter"] is None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        model = PeftModel.from_pretrained(_model(program, adapted=False), folder)
    sampling = {key: value for key, value in program["arguments"].items() if key == "train_sampling_strategy"}
    args = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to="none", disable_tqdm=True, **sampling)
    return Trainer(model, args, eval_dataset=Tokens(16, **program["data"])).evaluate()["eval_loss"]


# --- many of them ----------------------------------------------------------------------------------------------------


def outcome(number: int) -> str:
    """Return `equal`, `refused: …`, `not in one process: …` or what differs."""
    program = draw(number)
    folders = [tempfile.mkdtemp() for _ in range(3)]
    job = {"number": number, "alone": True}
    try:
        (want,) = in_world(1, run, [job | {"layout": None, "folder": folders[0]}])
    except AssertionError as error:
        return f"not in one process: {str(error).strip().splitlines()[-1]}"
    try:
        (whole,) = in_world(2, run, [job | {"layout": program["first"], "folder": folders[1]}])
        resume = f"{folders[1]}/checkpoint-{SAVED}"
        (again,) = in_world(2, run, [job | {"layout": program["second"], "folder": folders[2], "resume": resume}])
    except AssertionError as error:
        refusals = [path.read_text() for folder in folders for path in Path(folder).glob("refused")]
        return f"refused: {refusals[0]}" if refusals else f"failed: {error}"
    for name, got, start in (("whole", whole, 0), ("resumed", again, SAVED)):
        for key, tolerance in TOLERANCE.items():
            wanted = want[key] if key == "eval" else want[key][start:]
            limit = [tolerance * max(1.0, abs(value)) for value in wanted]
            if len(got[key]) != len(wanted) or any(
                not abs(a - b) <= most for a, b, most in zip(got[key], wanted, limit, strict=True)
            ):
                return f"{name} differs: {key} {got[key]} instead of {wanted}"
    is_plain = program["loss"] is None and "label_smoothing_factor" not in program["arguments"]
    loaded = reloaded(program, folders[1])
    if is_plain and abs(loaded - whole["eval"][0]) > 1e-4:
        return f"export differs: {loaded} instead of {whole['eval'][0]}"
    return "equal"


def check(numbers: range) -> Counter[str]:
    """Run programs; return how many ended in which way.

    Raises:
        AssertionError: a program differs or fails.
    """
    counts: Counter[str] = Counter()
    faults = []
    for number in numbers:
        found = outcome(number)
        kind = found.partition(":")[0]
        counts[kind] += 1
        if kind not in ("equal", "refused", "not in one process"):
            faults.append(f"{json.dumps(draw(number), default=str)}\n  {found}")
    assert not faults, f"{dict(counts)}\n" + "\n".join(faults)
    return counts


@pytest.mark.long
def test_a_few_programs():
    counts = check(range(3))
    assert counts["equal"]


@pytest.mark.recipes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", range(0, PROGRAMS, 20))
def test_many_programs(start):
    counts = check(range(start, start + 20))
    assert counts["equal"] >= 5
