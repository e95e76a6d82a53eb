"""What works with what: `why_not` explains why a combination of options does not work.

The rules stand in `support.toml`, and nowhere else. To allow a combination that is refused, delete or narrow its rule
there, with its example in tests/facts/test_support.py, and run `python tests/facts/test_support_page.py`, which writes
docs/support.md.

The planner, the checks of the recipes and `ParallelTrainer` each describe what they are asked for as a `Combination`,
with the properties that they know; a property that they do not know is None, and no rule that depends on it applies.
They all refuse with the sentence of the first rule that applies, in which parameters are spelled as the caller writes
them (`hfscale.core.spelling`).
"""

import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from hfscale import errors
from hfscale.core.spelling import current_speaker, plain_value, spelled
from hfscale.core.tables import read_table
from hfscale.facts.deepspeed import REFUSED

_TABLE: Mapping[str, Any] = read_table("facts/support.toml")


@dataclass(frozen=True, kw_only=True)
class Combination:
    """Describes what is asked for. None means that the property is not known, or does not exist here."""

    planned: bool | None = None
    """Whether the planner asks: it offers less than what runs, such as nothing that no test has compared."""
    recipe: bool | None = None
    """Whether a recipe trains: it promises more than a script does, such as an exported model at the end."""
    engine: str | None = None
    """What trains: `trainer` (Trainer and Accelerate, TRL's Trainers included), `parallel_trainer`, or another stack
    that the planner estimates, `titan` or `megatron`."""
    trl: bool | None = None
    """Whether the Trainer is one of TRL."""
    task: str | None = None
    """What a step trains on: `text`, `sft`, `dpo`, `grpo` or `distillation`."""
    images: bool | None = None
    """Whether records have images, which a vision-language model reads."""
    precompute_ref_log_probs: bool | None = None
    """Whether the log-probabilities of DPO's reference are computed before the training."""
    strategy: str | None = None
    """What distributes the model: `single`, `ddp`, `fsdp1`, `fsdp2`, `zero0` … `zero3` (by Accelerate), `native`
    (transformers, by `distributed_config`), `parallel` (the same with tensor parallelism, or `ParallelTrainer`),
    `megatron_lm`; `fsdp` and `zero` where the version or stage is not known."""
    zero: int | None = None
    """What data-parallel ranks shard: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    tp: int | None = None
    """Ranks that share each matrix."""
    pp: int | None = None
    """Ranks that share the layers."""
    cp: int | None = None
    """Ranks that share each sequence."""
    expert_parallel: int | None = None
    """Ranks that share the experts of a layer."""
    experts_implementation: str | None = None
    """How transformers computes the experts of a layer: `grouped_mm`, `batched_mm` or `eager`."""
    averages: bool | None = None
    """Whether an average of the weights is kept."""
    dp_sizes: bool | None = None
    """Whether sizes of the data-parallel axes are given."""
    fsdp_size: int | None = None
    """Ranks that share the parameters of a replica where transformers shards the model itself, if it is given."""
    sequence_parallel: bool | None = None
    """Whether the ranks of tensor parallelism split sequences between the matrices."""
    loss_parallel: bool | None = None
    """Whether the loss is computed on logits that stay split over the ranks of tensor parallelism."""
    reshard: bool | None = None
    """Whether gathered parameters are freed after the forward pass."""
    dry_run: int | None = None
    """Ranks of a simulated run."""
    family: str | None = None
    """The model's family, transformers' `model_type`."""
    tp_plan: bool | None = None
    """Whether transformers has a tensor-parallel plan for the family."""
    ep_plan: bool | None = None
    """Whether transformers has a plan by which the family's experts are spread over ranks."""
    rope_type: str | None = None
    """How rotary angles are computed."""
    quantized: bool | None = None
    """Whether the checkpoint has quantised weights."""
    checkpoint_format: str | None = None
    """How the weights of the checkpoint are quantised, transformers' `quant_method`; `none` where they are not."""
    check_parity: bool | None = None
    """Whether the run compares a small model under its layout with one process before it trains."""
    attention: str | None = None
    """The attention implementation that is asked for."""
    launcher_attention: str | None = None
    """The attention implementation with which the launcher splits sequences."""
    precision: str | None = None
    """Format of the matrix products: `fp32` (`no` in a run, as Accelerate calls it), `bf16`, `fp16` or `fp8`."""
    pure: bool | None = None
    """Whether parameters, gradients and optimizer states are in that format too."""
    compile: bool | None = None
    """Whether the model runs under torch.compile."""
    compile_full: bool | None = None
    """Whether torch.compile compiles the full model, and not each layer by itself."""
    fused_loss: bool | None = None
    """Whether the loss never holds all logits at once (Liger Kernel)."""
    liger: bool | None = None
    """Whether Liger Kernel computes the matrices of the layers."""
    method: str | None = None
    """Which parameters train: `full`, `lora` or `qlora`."""
    adapter: str | None = None
    """The kind of the adapters, PEFT's `peft_type` in lower case, such as `lora`."""
    adapter_part: str | None = None
    """An option of the adapters that is asked about, as PEFT spells it, such as `use_dora`, or `none`."""
    adapter_init: str | None = None
    """How the matrices of LoRA begin, `init_lora_weights` in lower case."""
    tied_adapters: bool | None = None
    """Whether the embedding or the head is adapted, or copied, of a model that ties both weights."""
    on_meta: bool | None = None
    """Whether the model is on the meta device, so that its weights are drawn or read afterwards."""
    frozen_adapter: bool | None = None
    """Whether parameters of the adapters do not train, and begin at random."""
    saves: bool | None = None
    """Whether the training writes checkpoints."""
    recompute: str | None = None
    """What is computed again in the backward pass: `none`, `selective` or `full`."""
    activation_offload: bool | None = None
    """Whether what the backward pass needs of the layers waits in the CPU's memory."""
    expert_adapters: bool | None = None
    """Whether experts, or other parameters that PEFT wraps (`target_parameters`), have adapters."""
    lora_dropout: bool | None = None
    """Whether the inputs of the adapters pass a dropout."""
    merge_adapters: bool | None = None
    """Whether the adapters are merged into the model at the end."""
    optimizer: str | None = None
    """The name of the optimizer: the planner's in a plan, Trainer's in a run, its class where a script has made it."""
    deepspeed_setting: str | None = None
    """The first setting of the DeepSpeed config that no test has shown, `none` where there is none
    (`hfscale.facts.deepspeed`)."""
    deepspeed_optimizer: str | None = None
    """The type of the optimizer in the DeepSpeed config."""
    offload: str | None = None
    """What is kept in the CPU's memory: `none`, `optimizer` or `full`."""
    param_device: str | None = None
    """Where ZeRO-3 offloads parameters: `none`, `cpu` or `nvme`."""
    optimizer_device: str | None = None
    """Where DeepSpeed offloads the states of the optimizer: `none`, `cpu` or `nvme`."""
    fp32_accumulation: bool | None = None
    """Whether DeepSpeed accumulates gradients in fp32, whatever it computes them in."""
    round_robin: bool | None = None
    """Whether DeepSpeed orders the parameters of stages 1 and 2 anew (`round_robin_gradients`)."""
    gathers_weights: bool | None = None
    """Whether the DeepSpeed config gathers the weights of stage 3 for a save."""
    autotp: int | None = None
    """Ranks of DeepSpeed's AutoTP."""
    compression: str | None = None
    """How gradients are compressed: `none`, `fp16`, `bf16`, `powersgd`, `topk`, `onebit_adam` or `onebit_lamb`."""
    device: str | None = None
    """Where the run computes: `cpu`, or any other type of device."""
    has_cuda: bool | None = None
    """Whether the machine has a CUDA GPU."""
    packing: str | None = None
    """How documents become rows: `none`, `concat` or `bestfit`."""
    document_attention: bool | None = None
    """Whether attention is cut between the documents of a row."""
    sample_prompts: str | None = None
    """A file with prompts to generate from during the training."""
    router_bias: float | None = None
    """By how much the bias of routers moves towards an even load of their experts after each step."""
    islands: int | None = None
    """Number of islands that train together."""
    average: bool | None = None
    """Whether an average of the trained weights is kept."""
    evaluate_average: bool | None = None
    """Whether evaluations use that average."""
    batch_schedule: bool | None = None
    """Whether the global batch changes during the training."""
    base_width: int | None = None
    """The width at which the learning rate was tuned."""
    skip_bad_batches: int | None = None
    """How many bad batches the run may leave out."""
    compute_loss: bool | None = None
    """Whether code of the user's computes the loss: a subclass's `compute_loss`, or `compute_loss_func`."""
    model_init: bool | None = None
    """Whether the Trainer was given this function."""
    optimizers: bool | None = None
    """Whether the Trainer was given an optimizer."""
    average_tokens_across_devices: bool | None = None
    """The argument of the Trainer."""
    auto_find_batch_size: bool | None = None
    """The argument of the Trainer."""
    neftune: float | None = None
    """The noise that is added to embeddings, `neftune_noise_alpha`."""
    tokens_seen: str | None = None
    """Which input tokens the Trainer counts, `include_num_input_tokens_seen`."""
    lr_scheduler: str | None = None
    """The learning rate schedule."""

    @property
    def for_recipe(self) -> bool:
        """Whether a recipe trains or would train: plans are for recipes."""
        return bool(self.recipe or self.planned)

    @property
    def strategy_family(self) -> str | None:
        """The strategy without version and stage: `single`, `ddp`, `fsdp`, `zero` or `parallel`."""
        return None if self.strategy is None else self.strategy.rstrip("0123")

    @property
    def model_parallel(self) -> int:
        """Ranks that share the weights of a replica by tensor and pipeline parallelism."""
        return (self.tp or 1) * (self.pp or 1)

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that work on the same sequences."""
        return self.model_parallel * (self.cp or 1)

    @property
    def one_bit(self) -> bool | None:
        """Whether DeepSpeed's optimizer sends one bit per gradient element."""
        return (
            None
            if self.deepspeed_optimizer is None
            else self.deepspeed_optimizer.lower() in _ONE_BIT
        )


_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")

PROPERTIES = tuple(field.name for field in fields(Combination))
"""Names of the properties that a consumer gives."""
_DERIVED = ("for_recipe", "strategy_family", "model_parallel", "ranks_per_replica", "one_bit")
_TYPES = {field.name: str(field.type) for field in fields(Combination)}


# -- lists of families and optimizers ---------------------------------------------------------------------------------

_LISTS: Mapping[str, Any] = _TABLE["lists"]

PIPELINE_TESTED: frozenset[str] = frozenset(_LISTS["pipeline_tested"])
"""Families whose pipeline stages compute the same as the model in one piece (test_parallel_families.py)."""

PIPELINE_TESTED_ALONE: frozenset[str] = frozenset(_LISTS["pipeline_tested_alone"])
"""Further families of which the same holds, without a shape in `hfscale.facts.families`."""

STAGES_TESTED = PIPELINE_TESTED | PIPELINE_TESTED_ALONE
"""All families whose pipeline stages compute the same as the model in one piece."""

PIPELINE_UNSUPPORTED: Mapping[str, str] = _LISTS["pipeline_unsupported"]
"""Families with a tensor-parallel plan, or of `hfscale.facts.families`, whose stages would not compute the same as the
model in one piece -> the reason."""

TENSOR_PARALLEL_UNSUPPORTED: Mapping[str, str] = _LISTS["tensor_parallel_unsupported"]
"""Families whose tensor-parallel plan in transformers 5.23 fails or computes something else than the model in one
piece -> the reason."""

TENSOR_PARALLEL_PLAN_MISSING: frozenset[str] = frozenset(_LISTS["tensor_parallel_plan_missing"])
"""Families of `hfscale.facts.families` whose config class in transformers 5.23 has no `base_model_tp_plan`."""

TENSOR_PARALLEL_TESTED = (
    PIPELINE_TESTED - TENSOR_PARALLEL_UNSUPPORTED.keys() - TENSOR_PARALLEL_PLAN_MISSING
)
"""Families that compute the same with tensor parallelism (test_parallel.py)."""

SEQUENCE_PARALLEL_TESTED = TENSOR_PARALLEL_TESTED
"""Families that compute the same with sequence parallelism (test_parallel_sequence.py)."""

CONTEXT_PARALLEL_UNSUPPORTED: Mapping[str, str] = _LISTS["context_parallel_unsupported"]
"""Families that do not compute the same when each rank has a part of every sequence -> the reason."""

CONTEXT_PARALLEL_TESTED = PIPELINE_TESTED - CONTEXT_PARALLEL_UNSUPPORTED.keys()
"""Families that compute the same with context parallelism (test_parallel_context.py)."""

LISTS: Mapping[str, Collection[str]] = {
    **_LISTS,
    "deepspeed_refused": REFUSED,
    "stages_tested": sorted(STAGES_TESTED),
    "tensor_parallel_tested": sorted(TENSOR_PARALLEL_TESTED),
    "sequence_parallel_tested": sorted(SEQUENCE_PARALLEL_TESTED),
    "context_parallel_tested": sorted(CONTEXT_PARALLEL_TESTED),
}
"""The lists that conditions of rules name."""


TESTED: Mapping[str, Collection[str]] = {
    method: frozenset(names) for method, names in _TABLE["tested"].items()
}
"""Method -> the configs of accelerate_configs/ under which the recipes were tested with it, on CPUs."""

CONFIGS: Mapping[str, Combination] = {
    name: Combination(**row) for name, row in _TABLE["configs"].items()
}
"""What each config of accelerate_configs/ asks for."""


@dataclass(frozen=True, kw_only=True)
class Capability:
    """What a run can ask for under any config."""

    title: str
    """Its name for the documentation, with a link to its page."""
    asks: Mapping[str, Any]
    """Properties of a `Combination` that asks for it."""
    tested: Collection[str]
    """The configs of accelerate_configs/ under which it was compared with a reference, on CPUs."""


CAPABILITIES = tuple(Capability(**row) for row in _TABLE["capability"])
"""What docs/support.md says of each config."""


# -- rules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A row of the table: which combinations do not work, and why."""

    name: str
    """What does not work with what, for the documentation."""
    when: Mapping[str, Any]
    """Property -> condition; the rule applies where all hold."""
    why: str
    """The reason with how to fix it; `{tp}` stands for the parameter as its caller writes it (`_Parameter`)."""
    error: str = "UsageError"
    """The class of `hfscale.errors` with which it is refused."""

    def applies(self, combination: Combination) -> bool:
        """Return whether a combination fulfils all conditions.

        Args:
            combination (`Combination`): what is asked for.
        """
        return all(_holds(condition, name, combination) for name, condition in self.when.items())

    @property
    def properties(self) -> frozenset[str]:
        """Names of the properties in the conditions and in the sentence."""
        in_sentence = (name for _, name, _, _ in string.Formatter().parse(self.why))
        return frozenset({*self.when, *(name for name in in_sentence if name)})

    def text(self, combination: Combination) -> str:
        """Return the sentence for a combination, in which parameters are spelled as their caller writes them.

        Args:
            combination (`Combination`): what is asked for.
        """
        asked_by = "planner" if combination.planned else current_speaker()
        names = _SPELLING.get(asked_by, {})
        values: dict[str, Any] = {
            name: _Parameter(name, getattr(combination, name), names.get(name, name))
            for name in (*PROPERTIES, *_DERIVED)
        }
        for name, condition in self.when.items():
            if isinstance(condition, dict) and "listed" in condition:
                found = getattr(combination, name)
                values["reason"] = LISTS[condition["listed"]].get(found, "REASON")  # type: ignore[attr-defined]
        values |= {name: ", ".join(names) for name, names in LISTS.items()}
        return string.Formatter().vformat(self.why, (), values)


def _holds(condition: Any, name: str, combination: Combination) -> bool:
    """Whether a condition holds for a property: a value, a list of values, or one of the forms of `support.toml`."""
    value = getattr(combination, name)
    # What the caller does not know is no reason to refuse.
    if value is None:
        return False
    if isinstance(condition, list):
        return value in condition
    if not isinstance(condition, dict):
        return bool(value == condition)
    [(form, wanted)] = condition.items()
    if form == "above":
        return bool(value > wanted)
    if form == "not":
        return value not in (wanted if isinstance(wanted, list) else [wanted])
    if form == "listed":
        return value in LISTS[wanted]
    if form == "not_listed":
        return value not in LISTS[wanted]
    if form == "differs_from":
        other = getattr(combination, wanted)
        return other is not None and value != other
    raise AssertionError(f"support.toml: unknown condition {form}")


_SPELLING: Mapping[str, Mapping[str, Any]] = _TABLE["spelling"]
"""Caller -> property -> its parameter, or the parameters of its values."""


class _Parameter:
    """A property in a sentence: `{tp}` becomes `--tp_size 2`, `{tp:=1}` `--tp_size 1`, `{tp:name}` `--tp_size`,
    `{tp:value}` `2` and `{tp:upper}` the value in capital letters."""

    def __init__(self, name: str, value: Any, parameter: str | Mapping[str, str]) -> None:
        self._name = name
        self._value = value
        self._parameter = parameter

    def __format__(self, spec: str) -> str:
        if spec == "value":
            return plain_value(self._shown)
        if spec == "upper":
            return plain_value(self._shown).upper()
        value = _read(spec[1:]) if spec.startswith("=") else self._shown
        if not isinstance(self._parameter, str):
            key = "other" if spec == "name" else plain_value(value)
            return self._parameter.get(key, self._parameter.get("other", self._name))
        if spec == "name":
            return spelled(self._parameter)
        return spelled(self._parameter, value)

    @property
    def _shown(self) -> Any:
        """The value; a placeholder where it is not known, in the documentation."""
        if self._value is not None:
            return self._value
        return "N" if "int" in _TYPES.get(self._name, "str") else self._name.upper()


def _read(text: str) -> Any:
    """Return the value that a sentence names as text: `1` in `{tp:=1}`, `true` in `{compile:=true}`."""
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdecimal() else text


@cache
def rules() -> tuple[Rule, ...]:
    """Return the rules, in the order in which they are applied."""
    return tuple(Rule(**row) for row in _TABLE["rule"])


@cache
def _rules_about(about: tuple[str, ...]) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules() if not about or any(name in rule.when for name in about))


def find_rule(combination: Combination, *about: str) -> Rule | None:
    """Return the first rule that a combination breaks; None if it works as far as is known.

    Args:
        combination (`Combination`): what is asked for.
        about (`str`): only rules with a condition on one of these properties are applied; all where none is given.
    """
    return next((rule for rule in _rules_about(about) if rule.applies(combination)), None)


def why_not(combination: Combination, *about: str) -> str | None:
    """Explain why a combination does not work.

    Args:
        combination (`Combination`): what is asked for.
        about (`str`): only rules with a condition on one of these properties are applied; all where none is given.

    Returns:
        `str`, *optional*: the reason, one sentence; None if it works as far as is known.
    """
    rule = find_rule(combination, *about)
    return None if rule is None else rule.text(combination)


def check_support(combination: Combination, *about: str) -> None:
    """Refuse a combination that does not work.

    Args:
        combination (`Combination`): what is asked for.
        about (`str`): only rules with a condition on one of these properties are applied; all where none is given.

    Raises:
        HfScaleError: it does not work; the class is that of the rule, most often `UsageError`.
    """
    rule = find_rule(combination, *about)
    if rule is not None:
        kind: type[errors.HfScaleError] = getattr(errors, rule.error)
        raise kind(rule.text(combination))
