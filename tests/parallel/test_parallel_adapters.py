"""Adapters of every kind that PEFT has: `ParallelTrainer` trains, saves and draws them as one process does, or refuses
them before the first step."""

import dataclasses
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_world import Tokens, empty_causal_lm, in_world, tiny_causal_lm
from peft import LoraConfig, PeftModel, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import Trainer, TrainingArguments

from hfscale import ParallelArguments, ParallelTrainer
from hfscale.checkpoint.export import export
from hfscale.errors import UsageError
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.support import LISTS, Combination, find_rule
from hfscale.parallel.adapter_weights import check_written, draw_adapters, mark_memory
from hfscale.parallel.adapters import check_adapters, saved_names
from hfscale.parallel.weights import draw_weights, read_weights

SHARDED = ["q_proj", "v_proj", "o_proj", "down_proj"]
SQUARE = {"target_modules": ["q_proj", "o_proj"]}

LORA = {
    "plain": {},
    "rslora": {"use_rslora": True, "rank_pattern": {"q_proj": 2}},
    "bias of the adapter": {"lora_bias": True},
    "all biases": {"bias": "all"},
    "their biases": {"bias": "lora_only"},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "dora": {"use_dora": True},
    "saved norm": {"modules_to_save": ["input_layernorm"]},
    "saved head": {"modules_to_save": ["lm_head"]},
    "saved embedding": {"modules_to_save": ["embed_tokens"]},
    "saved block": {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]},
    "tokens": {"trainable_token_indices": [3, 5, 60]},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "both random": {"init_lora_weights": False},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
}
"""What a config of LoRA may ask for."""

KINDS: dict[str, dict[str, Any]] = {
    "adamss": SQUARE,
    "beft": SQUARE,
    "boft": SQUARE | {"boft_block_size": 4},
    "c3a": SQUARE | {"block_size": 8},
    "deft": SQUARE,
    "delora": SQUARE | {"r": 4},
    "fourierft": SQUARE | {"n_frequency": 50},
    "glora": SQUARE,
    "gralora": SQUARE | {"r": 4, "gralora_k": 2},
    "hira": SQUARE,
    "hra": SQUARE | {"r": 4},
    "ia3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "ln_tuning": {"target_modules": ["input_layernorm"]},
    "loha": SQUARE,
    "lokr": SQUARE,
    "miss": SQUARE | {"r": 4},
    "oft": SQUARE | {"oft_block_size": 4},
    "peanut": SQUARE,
    "psoft": SQUARE,
    "road": SQUARE | {"group_size": 8},
    "supertuning": SQUARE,
    "trainable_tokens": {"target_modules": ["embed_tokens"], "token_indices": [3, 5, 60]},
    "waveft": SQUARE | {"n_frequency": 50},
}
"""Kind of adapters, PEFT's `peft_type` -> a config of it."""

REFUSED = {
    "adalora",
    "adaption_prompt",
    "cartridge",
    "cpt",
    "frod",
    "lily",
    "multitask_prompt_tuning",
    "osf",
    "p_tuning",
    "poly",
    "prefix_tuning",
    "prompt_tuning",
    "pvera",
    "randlora",
    "shadow",
    "shira",
    "tinylora",
    "unilora",
    "vblora",
    "vera",
    "xlora",
}
"""Kinds that no list of hfscale/facts/support.toml has: their own forward of the whole model, tokens before the text,
tensors that several layers share, hooks that read full matrices, or tensors that PEFT computes for its file."""

NOT_SPLIT = {"dora", "tokens"}
"""What a config of LoRA may not ask for with tensor parallelism."""

BASE = {"attention_bias": True, "tie_word_embeddings": False}
LAYOUTS = {"tp": {"tp_size": 2}, "pp": {"pp_size": 2}, "dp": {}, "cp": {"cp_size": 2}}


def _case(kind: str, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"kind": kind, "options": options, "layout": None, "folder": tempfile.mkdtemp(), **more}


def _lora(name: str, **more: Any) -> dict[str, Any]:
    return _case("lora", {"r": 4, "target_modules": SHARDED} | LORA[name], **more)


def _config(case: dict[str, Any]) -> Any:
    make_config = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(case["kind"].upper())]
    return make_config(task_type="CAUSAL_LM", **case["options"])


def _base(case: dict[str, Any], *, seed: int = 7) -> Any:
    return tiny_causal_lm(seed=seed, **(BASE | case.get("model", {})))


def _model(case: dict[str, Any]) -> Any:
    if case.get("meta"):
        with torch.device("meta"):
            return get_peft_model(empty_causal_lm(**(BASE | case.get("model", {}))), _config(case))
    model = _base(case)
    torch.manual_seed(3)
    return get_peft_model(model, _config(case))


def _arguments(case: dict[str, Any]) -> TrainingArguments:
    ranks = math.prod((case["layout"] or {}).values())
    replicas = int(os.environ.get("WORLD_SIZE", "1")) // ranks
    return TrainingArguments(
        output_dir=case["folder"],
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4 // replicas,
        per_device_eval_batch_size=8 // replicas,
        logging_steps=1,
        learning_rate=3e-2,
        lr_scheduler_type="constant",
        save_strategy="steps" if case.get("saves") else "no",
        save_steps=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=7,
    )


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train, evaluate and save. A refusal is returned as its text."""
    common = {"train_dataset": Tokens(), "eval_dataset": Tokens(16), "args": _arguments(case)}
    try:
        if case["layout"] is None:
            trainer: Any = Trainer(model=_model(case), **common)
        else:
            trainer = ParallelTrainer(model=_model(case), parallel=ParallelArguments(**case["layout"]), **common)
    except UsageError as error:
        return {"refused": str(error)}
    trainer.train(resume_from_checkpoint=case.get("resume"))
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(case["folder"])
    history = trainer.state.log_history
    return {key: [log[key] for log in history if key in log] for key in ("loss", "grad_norm")} | {"eval": [evaluated]}


def reloaded(case: dict[str, Any], folder: Path | None = None) -> float:
    """The evaluation loss of what `PeftModel.from_pretrained` makes of the folder and the base model."""
    model = PeftModel.from_pretrained(_base(case), str(folder or case["folder"])).eval()
    rows = torch.stack([row["input_ids"] for row in Tokens(16)])
    with torch.no_grad():
        return model(input_ids=rows, labels=rows).loss.item()


def compare(cases: list[dict[str, Any]], layout: dict[str, int]) -> None:
    """Train each case in one process and in a layout: losses, norms, and what is loaded again are the same."""
    # Each adapter of a pair is saved in a folder of its own
    parts = [case | {"layout": layout, "folder": tempfile.mkdtemp()} for case in cases]
    expected = in_world(1, train, cases)
    trained = in_world(2, train, parts)
    for case, part, want, got in zip(cases, parts, expected, trained, strict=True):
        named = (case["kind"], case["options"], layout)
        assert "refused" not in got, (named, got)
        for key in ("loss", "grad_norm", "eval"):
            assert got[key] == pytest.approx(want[key], abs=2e-5), (named, key)
        assert reloaded(part) == pytest.approx(got["eval"][0], abs=1e-5), named


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("tp", ["all biases", "embedding", "head", "saved head", "saved embedding"]),
        ("pp", ["all biases", "embedding", "dora", "tokens", "saved norm"]),
    ],
)
def test_options_of_lora_train_and_load_as_in_one_process(layout: str, names: list[str]) -> None:
    compare([_lora(name) for name in names], LAYOUTS[layout])


@pytest.mark.recipes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_options_of_lora_train_and_load_as_in_one_process(layout: str) -> None:
    names = [name for name in LORA if layout != "tp" or name not in NOT_SPLIT]
    compare([_lora(name) for name in names], LAYOUTS[layout])


@pytest.mark.recipes
@pytest.mark.parametrize("layout", ["pp", "dp", "cp"])
def test_all_kinds_train_and_load_as_in_one_process(layout: str) -> None:
    kinds = [kind for kind in LISTS["parallel_adapters"] if kind != "lora"]
    compare([_case(kind, KINDS[kind]) for kind in kinds], LAYOUTS[layout])


@pytest.mark.long
def test_checkpoints_of_adapters_resume_in_another_layout_and_are_exported(tmp_path: Path) -> None:
    names = ("all biases", "embedding", "dora", "saved head", "tokens")
    cases = [_lora(name, layout=LAYOUTS["pp"], saves=True) for name in names]
    whole = in_world(2, train, cases)
    second = [Path(case["folder"]) / "checkpoint-2" for case in cases]
    again = [_lora(name, layout=LAYOUTS["dp"], resume=str(folder)) for name, folder in zip(names, second, strict=True)]
    for case, want, got in zip(cases, whole, in_world(2, train, again), strict=True):
        assert got["loss"] == pytest.approx(want["loss"], abs=2e-5), case["options"]
        assert got["eval"] == pytest.approx(want["eval"], abs=2e-5), case["options"]
        target = tmp_path / Path(case["folder"]).name
        export(Path(case["folder"]) / "checkpoint-3", target, strategy="parallel")
        assert reloaded(case, target) == pytest.approx(want["eval"][0], abs=1e-5), case["options"]


# --- on the meta device ----------------------------------------------------------------------------------------------


def drawn(case: dict[str, Any]) -> Any:
    """The base model with adapters that were drawn in one process."""
    model = _model(case | {"meta": True}).get_base_model()
    model.to_empty(device="cpu")
    mark_memory(model)
    draw_weights(model, seed=7)
    draw_adapters(model, seed=7)
    check_written(model)
    return model


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


DRAWN = [_lora(name) for name in LORA] + [
    _case(kind, KINDS[kind]) for kind in LISTS["drawn_adapters"] if kind != "lora"
]


@pytest.mark.parametrize(
    "case",
    [case if number % 4 == 0 else pytest.param(case, marks=pytest.mark.long) for number, case in enumerate(DRAWN)],
    ids=lambda case: f"{case['kind']} {case['options']}",
)
def test_adapters_on_the_meta_device_begin_as_those_of_peft(case: dict[str, Any]) -> None:
    """What does not depend on chance is equal; what does has the same scale."""
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made.append(_tensors(get_peft_model(_base(case), _config(case)).get_base_model()))
    ours = _tensors(drawn(case))
    assert ours.keys() == made[0].keys()
    for name, tensor in ours.items():
        first, second = made[0][name], made[1][name]
        assert (tensor.dtype, tensor.shape) == (first.dtype, first.shape), name
        if torch.equal(first, second):
            assert torch.equal(tensor, first), name
        elif tensor.numel() > 1:
            assert 0.5 < tensor.std() / first.std() < 2, name


@pytest.mark.long
def test_layouts_draw_the_same_adapters() -> None:
    cases = [
        _lora(name, meta=True, layout={}) for name in ("embedding", "dora", "saved head", "tokens", "both random")
    ]
    expected = in_world(1, train, cases)
    for layout in ("dp", "pp"):
        again = [case | {"layout": LAYOUTS[layout], "folder": tempfile.mkdtemp()} for case in cases]
        for case, want, got in zip(cases, expected, in_world(2, train, again), strict=True):
            assert got["loss"] == pytest.approx(want["loss"], abs=2e-5), (case["options"], layout)


def test_adapters_of_weights_that_are_read(tmp_path: Path) -> None:
    """Copies of modules, trained rows and DoRA's magnitude follow from the checkpoint, and not from drawn weights."""
    _base({}, seed=11).save_pretrained(tmp_path)
    for name in ("dora", "tokens", "saved head", "embedding"):
        case = _lora(name)
        model = _model(case | {"meta": True}).get_base_model()
        model.to_empty(device="cpu")
        mark_memory(model)
        draw_weights(model, seed=7, parameters=False)
        read_weights(model, str(tmp_path))
        draw_adapters(model, seed=7)
        check_written(model)
        rows = Tokens(2)[0]["input_ids"][None]
        with torch.no_grad():
            want = _base({}, seed=11)(input_ids=rows, labels=rows).loss
            got = model(input_ids=rows, labels=rows).loss
        torch.testing.assert_close(got, want)


def test_a_tensor_that_nobody_wrote_is_named() -> None:
    model = _base({})
    mark_memory(model)
    draw_weights(model, seed=7)
    check_written(model)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(UsageError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        check_written(model)


# --- what is refused -------------------------------------------------------------------------------------------------

TP = ParallelLayout(tp=2)
PP = ParallelLayout(pp=2)


@pytest.mark.parametrize(
    ("case", "layout", "named"),
    [
        (_lora("dora"), TP, "use_dora"),
        (_lora("tokens"), TP, "trainable_token_indices"),
        (_case("ia3", KINDS["ia3"]), TP, "ia3"),
        (_case("vblora", SQUARE | {"vector_length": 8, "num_vectors": 16, "topk": 2}), PP, "vblora"),
        (_case("prompt_tuning", {"num_virtual_tokens": 4}), PP, "prompt_tuning"),
        (_case("lora", SQUARE | {"alora_invocation_tokens": [5, 6]}), PP, "alora_invocation_tokens"),
        (_lora("saved embedding", model={"tie_word_embeddings": True}), PP, "ties both weights"),
    ],
)
def test_other_adapters_are_refused(case: dict[str, Any], layout: ParallelLayout, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        check_adapters(_model(case), layout)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"expert_parallel": 2, "adapter": "ia3"}, "adapters other than LoRA with expert parallelism"),
        ({"expert_parallel": 2, "adapter_part": "use_dora"}, "options of LoRA with expert parallelism"),
        (
            {"tp": 2, "sequence_parallel": True, "adapter_part": "modules_to_save"},
            "options of LoRA with sequence parallelism",
        ),
    ],
)
def test_what_sequence_and_expert_parallelism_do_not_allow(asked: dict[str, Any], named: str) -> None:
    both = Combination(**({"engine": "parallel_trainer", "adapter": "lora", "adapter_part": "none"} | asked))
    rule = find_rule(both)
    assert rule is not None
    assert rule.name == named


def test_adapters_that_cannot_be_drawn_are_refused_on_the_meta_device() -> None:
    model = _model(_lora("plain", meta=True))
    check_adapters(model, PP)
    model.peft_config["default"].init_lora_weights = "loftq"
    with pytest.raises(UsageError, match="loftq"):
        check_adapters(model, PP)
    model.peft_config["default"].peft_type = PeftType.VERA
    with pytest.raises(UsageError, match="vera"):
        check_adapters(model, PP)


def test_several_adapters_and_what_peft_does_not_save_are_refused() -> None:
    case = _lora("plain")
    model = _model(case)
    model.get_base_model().lm_head.weight.requires_grad_(True)
    with pytest.raises(UsageError, match=r"lm_head\.weight"):
        saved_names(model)
    model.add_adapter("second", _config(case))
    with pytest.raises(UsageError, match="second"):
        check_adapters(model, PP)
    with pytest.raises(UsageError, match="get_peft_model"):
        check_adapters(model.get_base_model(), PP)


def test_every_kind_of_peft_is_compared_or_refused() -> None:
    """A new kind of PEFT is refused until it is listed; this test fails so that somebody looks at it."""
    kinds = {kind.value.lower() for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
    compared = set(LISTS["parallel_adapters"])
    assert compared == {"lora", *KINDS}
    assert set(LISTS["drawn_adapters"]) <= compared
    assert kinds - compared == REFUSED


def test_what_peft_calls_a_variant_of_lora_is_compared_or_refused() -> None:
    """`check_adapters` asks PEFT's config which of its options are variants."""
    marked = {field.name for field in dataclasses.fields(LoraConfig) if field.metadata.get("is_lora_variant")}
    compared = marked & set(LISTS["parallel_adapter_parts"])
    assert compared == {"use_dora"}
