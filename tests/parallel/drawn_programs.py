"""Programs drawn from layouts, families, adapters, losses, optimizers, arguments and data, and how a rank runs one."""

import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from parallel_world import Tokens, tiny_causal_lm, tiny_config
from peft import PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils.peft_types import PeftType
from test_parallel_losses_of_users import Gathers, HeadNorm, LogitsLoss, MeanLoss, Metrics, Regulariser
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hfscale import ParallelArguments, ParallelTrainer
from hfscale.checkpoint.export import export
from hfscale.facts.expert_layout import ExpertLayout
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.support import Combination
from hfscale.optim.muon import Muon
from hfscale.parallel.descriptions import describe_split

STEPS = 4
SAVED = 2

LAYOUTS: list[dict[str, Any]] = [
    {"tp_size": 2},
    {"tp_size": 2},
    {"pp_size": 2},
    {"pp_size": 2},
    {"pp_size": 2, "pipeline_schedule": "GPipe"},
    {"pp_size": 2, "pipeline_schedule": "ZBV"},
    {},
    {"dp_replicate_size": 2},
    {"cp_size": 2},
    {"tp_size": 2, "sequence_parallel": True},
]
OF_EXPERTS: list[dict[str, Any]] = [{"ep_size": 2}, {"ep_size": 2}, {"ep_size": 2, "tp_size": 2}]
"""Further layouts, which are drawn for a mixture of experts."""
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True}),
    ("llama", {"vocab_size": 99}),
    ("qwen3", {}),
    ("gpt2", {"n_embd": 32, "n_layer": 4, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    ("gemma2", {"query_pre_attn_scalar": 8}),
    ("qwen3_moe", MIXTURE),
    ("qwen3_moe", MIXTURE),
]
QUERY = ["q_proj"]
SHARDED = ["q_proj", "v_proj", "o_proj", "down_proj"]
SQUARE = {"target_modules": ["q_proj", "o_proj"]}

ADAPTERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "LoRA": ("lora", {"target_modules": SHARDED}, "none"),
    "LoRA with weights of their own": ("lora", {"target_modules": SHARDED, "rank_pattern": {"o_proj": 2}}, "none"),
    "rsLoRA on all linear layers": ("lora", {"target_modules": "all-linear", "use_rslora": True}, "none"),
    "LoRA with biases": ("lora", {"target_modules": QUERY, "bias": "all"}, "bias"),
    "DoRA": ("lora", {"target_modules": QUERY, "use_dora": True}, "use_dora"),
    "LoRA and a saved head": ("lora", {"target_modules": QUERY, "modules_to_save": ["lm_head"]}, "modules_to_save"),
    "LoRA and a saved embedding": (
        "lora",
        {"target_modules": QUERY, "modules_to_save": ["embed_tokens"]},
        "modules_to_save",
    ),
    "LoRA on the embedding": ("lora", {"target_modules": ["q_proj", "embed_tokens"]}, "none"),
    "LoRA on the head": ("lora", {"target_modules": ["q_proj", "lm_head"]}, "none"),
    "LoRA and trained tokens": (
        "lora",
        {"target_modules": QUERY, "trainable_token_indices": [3, 5]},
        "trainable_token_indices",
    ),
    "LoRA on one layer": ("lora", {"target_modules": QUERY, "layers_to_transform": [3]}, "none"),
    "LoRA on experts": (
        "lora",
        {"target_modules": QUERY, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        "none",
    ),
    "IA3": (
        "ia3",
        {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
        "none",
    ),
    "LoHa": ("loha", SQUARE, "none"),
    "OFT": ("oft", SQUARE | {"oft_block_size": 4}, "none"),
    "prompt tuning": ("prompt_tuning", {"num_virtual_tokens": 4}, "none"),
}
"""Name -> PEFT's `peft_type` in lower case, options of its config, and the part as support.toml names it."""
LOSSES: list[type | str | None] = [
    None,
    None,
    None,
    "function",
    MeanLoss,
    LogitsLoss,
    HeadNorm,
    Metrics,
    Regulariser,
    Gathers,
]
OPTIMIZERS = [
    "adamw_torch",
    "adamw_torch",
    "sgd",
    "adagrad",
    "rmsprop",
    "adafactor",
    "groups",
    "momentum",
    "layers",
    "muP",
    "muon",
    "object",
]
OWN_OPTIMIZERS = ("groups", "momentum", "layers", "muP", "muon")
SCHEDULES = ["linear", "cosine", "constant_with_warmup", "inverse_sqrt"]
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {},
    {"max_grad_norm": 0.05},
    {"max_grad_norm": 0.0},
    {"label_smoothing_factor": 0.1},
    {"gradient_checkpointing": True},
    {"train_sampling_strategy": "group_by_length"},
    {"weight_decay": 0.0, "adam_beta2": 0.9},
    {"eval_strategy": "steps", "eval_steps": 1},
    {"neftune_noise_alpha": 5.0},
    {"auto_find_batch_size": True},
]


def draw(number: int) -> dict[str, Any]:
    """Draw a program from a seed."""
    choose = random.Random(number).choice
    family = choose(FAMILIES)
    has_experts = family[0] == "qwen3_moe"
    has_adapter = choose([True, True, False]) and family[0] != "gpt2"
    names = [name for name in ADAPTERS if has_experts or name != "LoRA on experts"]
    adapter = choose(names) if has_adapter else None
    loss = choose(LOSSES)
    arguments = choose(ARGUMENTS)
    # Rows of one length where the order of an evaluation is drawn, or replicas average a loss of the user's
    data: dict[str, Any] = {}
    if loss is None and "train_sampling_strategy" not in arguments:
        data = choose([{}, {"ragged": True}])
    layouts = LAYOUTS + (OF_EXPERTS * 2 if has_experts else [])
    if loss is not None:
        # Those that are refused with a loss of the user's have a test of their own
        layouts = [one for one in layouts if "cp_size" not in one and "sequence_parallel" not in one]
    if "neftune_noise_alpha" in arguments:
        # Ranks with other rows draw other noise, with stock Trainer too
        layouts = LAYOUTS[:4]
    return {
        "number": number,
        "first": choose(layouts),
        "second": choose(layouts),
        "family": family,
        "adapter": adapter,
        "loss": loss,
        "optimizer": choose(OPTIMIZERS),
        "schedule": choose(SCHEDULES),
        "arguments": arguments,
        "batch": choose([1, 2]),
        "data": data,
        "beyond": choose([False] * 11 + [True]),
        "predicts": choose([False, False, True]),
    }


def kinds_of(program: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what a program has: pairs of a kind and its value, for counts."""
    family, overrides = program["family"]
    loss = program["loss"]
    pairs = [
        ("adapter", program["adapter"] or "none"),
        ("family", family),
        ("loss", getattr(loss, "__name__", loss) or "none"),
        ("optimizer", program["optimizer"]),
        ("vocabulary", "ids beyond it" if program["beyond"] else str(overrides.get("vocab_size", 96))),
        ("argument", next(iter(program["arguments"]), "none")),
    ]
    if overrides.get("tie_word_embeddings"):
        pairs.append(("vocabulary", "tied head"))
    if program["predicts"]:
        pairs.append(("argument", "predictions and metrics"))
    return pairs


def axis_of(layout: dict[str, Any]) -> str:
    """Return the name of what a layout splits."""
    if layout.get("sequence_parallel"):
        return "sequence"
    for axis, name in (("ep_size", "experts"), ("tp_size", "tensor"), ("pp_size", "pipeline"), ("cp_size", "context")):
        if axis in layout:
            return name
    return "data"


def describe(program: dict[str, Any], layout: dict[str, Any]) -> list[Combination]:
    """Describe what support.toml can say about a program under a layout, without making its model."""
    model = tiny_config_of(program)
    sizes = {axis: layout.get(f"{axis}_size", 1) for axis in ("tp", "pp", "cp")}
    replicas = {"dp_shard": 2 // (sizes["tp"] * sizes["pp"] * sizes["cp"])}
    split = ParallelLayout(**sizes, **replicas)
    if "ep_size" in layout:
        split = ExpertLayout(ep=layout["ep_size"], **sizes, **replicas)
    sequence = bool(layout.get("sequence_parallel"))
    base = describe_split(model, split, sequence_parallel=sequence)
    asked = replace(
        base,
        check_parity=False,
        compute_loss=program["loss"] is not None,
        optimizers=program["optimizer"] == "object",
        auto_find_batch_size=bool(program["arguments"].get("auto_find_batch_size")),
        neftune=program["arguments"].get("neftune_noise_alpha", 0.0),
    )
    if program["adapter"] is None:
        return [asked]
    kind, options, part = ADAPTERS[program["adapter"]]
    ends = {*options.get("target_modules", ())} | {*options.get("modules_to_save", ())}
    ties = model.tie_word_embeddings and (
        "trainable_token_indices" in options or bool(ends & {"lm_head", "embed_tokens"})
    )
    asked = replace(asked, adapter=kind, adapter_init="true", on_meta=False, tied_adapters=ties)
    return [replace(asked, adapter_part="none"), replace(asked, adapter_part=part)]


def tiny_config_of(program: dict[str, Any]) -> Any:
    """Return the config of a program's model."""
    family, overrides = program["family"]
    return tiny_config(family, **overrides)


# --- one program -----------------------------------------------------------------------------------------------------


def model_of(program: dict[str, Any], *, adapted: bool = True) -> Any:
    """Make a program's model."""
    family, overrides = program["family"]
    model = tiny_causal_lm(family, seed=7, **overrides)
    if program["adapter"] is None or not adapted:
        return model
    kind, options, _ = ADAPTERS[program["adapter"]]
    if kind in ("lora", "loha"):
        options = {"r": 4} | options
    torch.manual_seed(3)
    make_config = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind.upper())]
    model = get_peft_model(model, make_config(task_type="CAUSAL_LM", **options))
    with torch.no_grad():  # as if trained for a while: with a B of zeros, A has no gradient
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "hada_w2_a" in name:
                parameter.normal_(std=0.02)
    return model


def _function(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].float().flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum", ignore_index=-100)
    return total / num_items_in_batch


class _OwnOptimizer:
    """Parameter groups as users make them: rates, decay and betas of their own for parts of the model."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        kind = self.program["optimizer"]
        if kind == "layers":
            groups = [
                {"params": [p], "lr": 1e-3 * 0.8 ** (len(name) % 7), "betas": (0.8 + 0.01 * p.ndim, 0.95)}
                for name, p in trained
            ]
        elif kind == "muP":  # of the unsplit model's widths, which every layout's rank knows by its config
            width = self.model.config.hidden_size
            hidden = [p for name, p in trained if ".layers." in name and p.ndim > 1]
            rest = [p for name, p in trained if not any(p is other for other in hidden)]
            groups = [
                {"params": hidden, "lr": 1e-1 / width, "weight_decay": 0.1 * width},
                {"params": rest, "lr": 1e-2},
            ]
        elif kind == "muon":
            self.optimizer = Muon([p for _, p in trained], module=self.model, lr=1e-3, dtype=torch.float32)
            return self.optimizer
        else:
            own = [p for name, p in trained if "norm" in name or "head" in name or "lora_B" in name]
            rest = [p for _, p in trained if not any(p is other for other in own)]
            groups = [{"params": rest, "lr": 1e-3}, {"params": own, "lr": 1e-2, "weight_decay": 0.0}]
        present = [group for group in groups if group["params"]]
        if kind == "momentum":
            self.optimizer = torch.optim.SGD(present, lr=1e-2, momentum=0.9)
        else:
            self.optimizer = torch.optim.AdamW(present, betas=(0.8, 0.95))
        return self.optimizer


class BeyondTokens(Tokens):
    """A row of the first step has an id that the model's embedding has not, as after added tokens."""

    def __init__(self, *args: Any, vocabulary: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vocabulary = vocabulary

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        row["input_ids"] = row["input_ids"].clone()
        row["input_ids"][1] = self.vocabulary + 1
        return row


def metrics_of(prediction: Any) -> dict[str, float]:
    """Return metrics of all predictions, which a few rounded logits do not change much."""
    return {"size": float(abs(prediction.predictions).mean()), "samples": float(len(prediction.label_ids))}


def _doubled(logits: Any, labels: Any) -> Any:
    return logits * 2


def _arguments(program: dict[str, Any], job: dict[str, Any]) -> TrainingArguments:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    replica = 1
    for axis in ("tp_size", "pp_size", "cp_size"):
        replica *= (job["layout"] or {}).get(axis, 1)
    is_own = program["optimizer"] in (*OWN_OPTIMIZERS, "object")
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
        "optim": "adamw_torch" if is_own else program["optimizer"],
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": SAVED,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 7,
        "weight_decay": 0.1,
    }
    return TrainingArguments(**settings | program["arguments"])


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train a program, in a layout or with stock Trainer; evaluate, predict and save."""
    program = draw(job["number"])
    layout = job["layout"]
    base = Trainer if layout is None else ParallelTrainer
    mixins = [kind for kind in (program["loss"],) if isinstance(kind, type)]
    if program["optimizer"] in OWN_OPTIMIZERS:
        mixins.append(_OwnOptimizer)
    kind = type("Own", (*mixins, base), {"program": program})
    options: dict[str, Any] = {} if layout is None else {"parallel": ParallelArguments(**layout)}
    if program["loss"] == "function":
        options["compute_loss_func"] = _function
    if program["predicts"]:
        options |= {"compute_metrics": metrics_of, "preprocess_logits_for_metrics": _doubled}
    model = model_of(program)
    if program["optimizer"] == "object":
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        options["optimizers"] = (torch.optim.AdamW(trained, lr=1e-3), None)
    rows: Any = Tokens(**program["data"])
    if program["beyond"]:
        rows = BeyondTokens(vocabulary=tiny_config_of(program).vocab_size, **program["data"])
    trainer = kind(
        model=model,
        args=_arguments(program, job),
        train_dataset=rows,
        eval_dataset=Tokens(16, **program["data"]),
        **options,
    )
    trainer.train(resume_from_checkpoint=job.get("resume"))
    evaluated = trainer.evaluate()
    trainer.save_model(job["folder"])
    history = trainer.state.log_history
    result = {
        key: [log[key] for log in history if key in log and (log["step"] > SAVED or not job.get("resume"))]
        for key in ("loss", "grad_norm")
    }
    result["eval"] = [evaluated[key] for key in ("eval_loss", "eval_size", "eval_samples") if key in evaluated]
    if program["predicts"]:
        output = trainer.predict(Tokens(16, **program["data"]))
        result["eval"] += [float(abs(output.predictions).sum()) / output.predictions.size, *output.predictions.shape]
    return result


def evaluations_of_exports(program: dict[str, Any], folder: str) -> dict[str, float]:
    """Return the evaluation loss of what libraries make of a run's folder and of an exported checkpoint.

    For adapters also that of the base model into which PEFT has merged them.
    """
    target = Path(tempfile.mkdtemp(), "exported")
    export(Path(folder) / f"checkpoint-{STEPS}", target, strategy="parallel")
    found = {}
    for name, source in (("folder", folder), ("exported checkpoint", str(target))):
        if program["adapter"] is None:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        else:
            model = PeftModel.from_pretrained(model_of(program, adapted=False), source)
        found[name] = _evaluation(program, model)
    if program["adapter"] is not None:
        found["merged adapters"] = _evaluation(program, model.merge_and_unload())
    return found


def _evaluation(program: dict[str, Any], model: Any) -> float:
    sampling = {key: value for key, value in program["arguments"].items() if key == "train_sampling_strategy"}
    args = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to="none", disable_tqdm=True, **sampling)
    loss: float = Trainer(model, args, eval_dataset=Tokens(16, **program["data"])).evaluate()["eval_loss"]
    return loss
