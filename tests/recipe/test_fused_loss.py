"""The loss without all logits: equal to the ordinary one, for what a Trainer does with it, and where it cannot be."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from synchronizations import Synchronizations
from test_fast_defaults import LOGGED_EVERY_4, kernels, recipe_arguments
from tiny import VOCAB, RandomTokens, logged, tiny_model
from torch._inductor import compile_fx, metrics
from torch._inductor import config as inductor_config
from torch.distributed._tools.mem_tracker import MemTracker  # no public name
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    MixtralConfig,
    PhiConfig,
    Qwen3Config,
    Trainer,
    TrainerCallback,
    default_data_collator,
    set_seed,
)

from hfscale import ScalingCallback, ScalingMetricsCallback
from hfscale.core.records import read_events
from hfscale.errors import MissingDependencyError, UsageError
from hfscale.metrics.job_facts import job_facts
from hfscale.recipe import fused_loss
from hfscale.recipe.arguments import RecipeTrainingArguments
from hfscale.recipe.fused_loss import ChunkedLossHead, compute_loss_in_chunks, reason_not_to_chunk
from hfscale.recipe.kernels import Kernels, choose_loss

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LIGER = "liger_kernel"


def make(config_class: Any, **overrides: Any) -> Any:
    """Return a small model, always with the same weights, and not tied unless that is asked for."""
    set_seed(0)
    config = config_class(**(SIZES | {"tie_word_embeddings": False, "pad_token_id": 0} | overrides))
    return AutoModelForCausalLM.from_config(config).train()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five chunks of 7 tokens, and the rest of the 32 in a smaller one."""
    monkeypatch.setattr(fused_loss, "CHUNK_TOKENS", 7)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.stack([RandomTokens()[row]["input_ids"] for row in (0, 1)])
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# The loss and its gradients are those of the ordinary loss.

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "qwen3-tied": (Qwen3Config, {"head_dim": 8, "tie_word_embeddings": True}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "output_router_logits": True}),
    "mixtral-tied": (MixtralConfig, {"num_local_experts": 4, "tie_word_embeddings": True}),
    "phi": (PhiConfig, {}),  # its head has a bias
}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("items", [None, 50, torch.tensor(50)], ids=["mean", "number", "tensor"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_those_from_all_logits(name: str, items: Any) -> None:
    config_class, overrides = MODELS[name]
    plain = make(config_class, **overrides)
    chunked = make(config_class, **overrides)
    assert reason_not_to_chunk(chunked) is None
    compute_loss_in_chunks(chunked)
    outputs = [model(**batch(), num_items_in_batch=items) for model in (plain, chunked)]
    for output in outputs:
        (3 * output.loss).backward()
    assert outputs[1].loss.item() == pytest.approx(outputs[0].loss.item(), rel=1e-5)
    expected, found = gradients(plain), gradients(chunked)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
    assert outputs[0].logits.shape == (2, 16, VOCAB)
    assert outputs[1].logits is None


@pytest.mark.usefixtures("small_chunks")
def test_labels_that_are_shifted_already_are_used_as_they_are() -> None:
    plain, chunked = make(LlamaConfig), make(LlamaConfig)
    compute_loss_in_chunks(chunked)
    inputs = batch()
    inputs["shift_labels"] = inputs["labels"].roll(2, dims=1)
    assert chunked(**inputs).loss.item() == pytest.approx(plain(**inputs).loss.item(), rel=1e-6)


@pytest.mark.usefixtures("small_chunks")
def test_under_autocast_products_are_in_bf16_and_the_loss_in_fp32() -> None:
    plain, chunked = make(LlamaConfig), make(LlamaConfig)
    compute_loss_in_chunks(chunked)
    dtypes = []
    hidden_gradients = []
    for model in (plain, chunked):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch()).loss
        loss.backward()
        dtypes.append(loss.dtype)
        hidden_gradients.append(gradients(model))
    assert dtypes == [torch.float32] * 2
    expected, found = (g["lm_head.weight"] for g in hidden_gradients)
    assert found.dtype == torch.float32
    assert torch.equal(found, found.bfloat16().float())  # as the product gives it
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_a_loss_in_bf16_is_as_exact_as_from_all_logits() -> None:
    """With inputs in bf16 torch's own function returns a loss in bf16, which is off by 1e-3 or more."""
    set_seed(0)
    hidden, weight = torch.randn(2, 2048, 64).bfloat16(), torch.randn(1000, 64).bfloat16() / 8
    labels = torch.randint(0, 1000, (2, 2048))
    exact = torch.nn.functional.cross_entropy((hidden.double() @ weight.double().T).view(-1, 1000), labels.view(-1))
    found = fused_loss.chunked_cross_entropy(hidden, weight, None, labels)
    assert found.item() == pytest.approx(exact.item(), rel=1e-4)


@pytest.mark.recipes
@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_compiled_kernels_read_the_logits_twice_and_write_them_once(
    dtype: torch.dtype, exact: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor counts the bytes; eager operations read and write at least 28 per logit in bf16."""
    monkeypatch.setattr(fused_loss, "CHUNK_TOKENS", 256)
    set_seed(0)
    tokens, vocabulary = 600, 2000  # two chunks, and a rest that is not compiled
    labels = torch.randint(0, vocabulary, (1, tokens))
    labels[0, 250:300] = -100
    hidden, weight = torch.randn(1, tokens, 32), torch.randn(vocabulary, 32)
    losses, found = [], []
    metrics.reset()
    fused_loss._differentiation.cache_clear()
    torch._dynamo.reset()
    # Inductor counts where it logs the count, and not where it finds what it has compiled before
    monkeypatch.setattr(compile_fx.inductor_metrics_log, "isEnabledFor", lambda level: True)
    for is_compiled in (False, True):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)]
        with inductor_config.patch(force_disable_caches=True):
            loss = fused_loss.chunked_cross_entropy(*leaves, None, labels, is_compiled=is_compiled)
        loss.backward()
        losses.append(loss.item())
        found.append([leaf.grad.float() for leaf in leaves])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for plain, compiled in zip(*found, strict=True):
        assert (compiled - plain).norm() < exact * plain.norm()
    per_logit = metrics.num_bytes_accessed / (256 * vocabulary)
    assert 3 * dtype.itemsize <= per_logit < 3.1 * dtype.itemsize


def test_the_loss_is_compiled_where_layers_may_be(tmp_path: Path) -> None:
    gpu = replace(kernels(), can_compile=True)
    for found, flags, expected in (
        (gpu, {}, True),
        (gpu, {"torch_compile_regional": False}, False),
        (replace(gpu, capability=(6, 1)), {}, False),
        (kernels(), {}, False),
    ):
        trainer = Trainer(model=tiny_model(), args=recipe_arguments(tmp_path, **flags), train_dataset=RandomTokens())
        choose_loss(trainer, found)
        assert trainer.model.lm_head.is_compiled == expected


def test_a_frozen_head_passes_the_gradient_on() -> None:
    plain, chunked = make(LlamaConfig), make(LlamaConfig)
    compute_loss_in_chunks(chunked)
    for model in (plain, chunked):
        model.lm_head.requires_grad_(False)
        model(**batch()).loss.backward()
    assert chunked.lm_head.weight.grad is None
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(chunked)[name], gradient, rtol=1e-5, atol=1e-6)


def test_a_second_backward_pass_is_an_error() -> None:
    model = make(LlamaConfig)
    compute_loss_in_chunks(model)
    loss = model(**batch()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        loss.backward()


def test_logits_are_given_where_no_loss_is_asked_for() -> None:
    plain, chunked = make(LlamaConfig).eval(), make(LlamaConfig).eval()
    compute_loss_in_chunks(chunked)
    ids = batch()["input_ids"]
    torch.testing.assert_close(chunked(input_ids=ids).logits, plain(input_ids=ids).logits)
    torch.testing.assert_close(chunked(**batch()).logits, plain(**batch()).logits)  # an evaluation that wants both
    assert torch.equal(chunked.generate(ids, max_new_tokens=4), plain.generate(ids, max_new_tokens=4))


def test_a_copy_of_the_model_has_a_head_of_its_own() -> None:
    model = make(LlamaConfig)
    head = compute_loss_in_chunks(model)
    other = copy.deepcopy(model)
    assert other(**batch()).loss.item() == pytest.approx(model(**batch()).loss.item())
    assert head.targets is None
    head.loss_is_enough = True
    assert not other.lm_head.loss_is_enough


def peak_bytes(*, chunked: bool, tokens: int, vocabulary: int, width: int = 256) -> int:
    """Return the peak of the bytes of all tensors in the forward and backward pass of a head and its loss."""
    set_seed(0)
    hidden = torch.randn(1, tokens, width, requires_grad=True)
    head = torch.nn.Linear(width, vocabulary, bias=False)
    labels = torch.randint(0, vocabulary, (1, tokens))
    tracker = MemTracker()
    tracker.track_external(hidden, head, labels)
    with tracker:
        if chunked:
            loss = fused_loss.chunked_cross_entropy(hidden, head.weight, None, labels)
        else:
            loss = torch.nn.functional.cross_entropy(head(hidden).float().view(-1, vocabulary), labels.view(-1))
        loss.backward()
        del loss
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def test_memory_does_not_grow_with_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_loss, "CHUNK_TOKENS", 64)
    tokens, vocabulary = 512, 2000
    parameters = 2 * 4 * 256 * (tokens + vocabulary)  # hidden states and head, each with its gradient
    logits = 4 * tokens * vocabulary
    assert peak_bytes(chunked=False, tokens=tokens, vocabulary=vocabulary) > 2.9 * logits
    found = peak_bytes(chunked=True, tokens=tokens, vocabulary=vocabulary)
    assert found < parameters + 2.2 * logits / 8  # those of one of eight chunks, and their log-probabilities


# What cannot be computed in chunks.


def adapted(**options: Any) -> Any:
    return get_peft_model(make(LlamaConfig), LoraConfig(r=2, task_type="CAUSAL_LM", **options))


@pytest.mark.parametrize(
    ("make_model", "reason"),
    [
        (lambda: make(Gemma2Config, head_dim=8), "changes logits"),
        (lambda: make(GraniteConfig, logits_scaling=2.0), "changes logits"),
        (lambda: make(Cohere2Config), "changes logits"),
        (lambda: adapted(target_modules=["q_proj", "lm_head"]), "no plain linear layer"),
        (lambda: adapted(target_modules=["q_proj"], modules_to_save=["lm_head"]), "no plain linear layer"),
        (lambda: LlamaForSequenceClassification(LlamaConfig(**SIZES)), "no plain linear layer"),
        (lambda: torch.nn.Linear(2, 2), "not a model of transformers"),
    ],
    ids=["capped", "scaled", "multiplied", "adapted head", "trained head", "classifier", "module"],
)
def test_a_model_that_needs_its_logits_says_why(make_model: Any, reason: str) -> None:
    assert reason in str(reason_not_to_chunk(make_model()))


@pytest.mark.parametrize("make_model", [tiny_model, lambda: adapted(target_modules="all-linear")])
def test_examining_a_model_leaves_it_as_it_was(make_model: Any) -> None:
    model = make_model()
    before = [model(**batch()).loss.item(), sorted(vars(model.get_output_embeddings()))]
    assert reason_not_to_chunk(model) is None
    assert before == [model(**batch()).loss.item(), sorted(vars(model.get_output_embeddings()))]


# What is chosen for a Trainer, and that it trains as before.


def make_trainer(
    folder: Path, *, model: Any = None, kind: Any = Trainer, callbacks: Any = (), options: Any = None, **flags: Any
) -> Any:
    return kind(
        model=model if model is not None else tiny_model(),
        args=recipe_arguments(folder, **flags),
        train_dataset=RandomTokens(),
        eval_dataset=RandomTokens(8),
        data_collator=default_data_collator,
        callbacks=list(callbacks) or [ScalingCallback()],
        **(options or {}),
    )


class EachStep(TrainerCallback):
    """Has the noise scale sampled in each logged step."""

    def __init__(self, metrics: ScalingMetricsCallback) -> None:
        self.metrics = metrics

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        meter: Any = self.metrics._noise
        meter.min_steps_between = 1


class OwnLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


GPU = kernels(LIGER)
LLAMA: dict[str, Any] = {}
GEMMA: dict[str, Any] = {"model": lambda: make(Gemma2Config, head_dim=8)}
CPU = Kernels(capability=None, half_precision=False, installed=frozenset([LIGER]))


@pytest.mark.parametrize(
    ("found", "trainer", "flags", "loss", "layers"),
    [
        (CPU, LLAMA, {}, "none", False),
        (GPU, LLAMA, {}, "chunked", True),
        (kernels(), LLAMA, {}, "chunked", False),
        (GPU, LLAMA, {"use_liger_kernel": False}, "chunked", False),
        (GPU, LLAMA, {"use_liger_kernel": True}, "liger", True),
        (GPU, LLAMA, {"fused_loss": "liger"}, "liger", True),
        (GPU, LLAMA, {"fused_loss": "none"}, "none", True),
        (GPU, LLAMA, {"fused_loss": "none", "use_liger_kernel": True}, "none", True),
        (CPU, LLAMA, {"fused_loss": "chunked"}, "chunked", False),
        (GPU, GEMMA, {}, "liger", True),
        (GPU, GEMMA, {"use_liger_kernel": False}, "none", False),
        (kernels(), GEMMA, {}, "none", False),
        (GPU, {"model": lambda: make(GraniteConfig)}, {}, "none", False),
        (GPU, {"model": lambda: make(PhiConfig)}, {}, "chunked", False),  # Liger has no kernels for it
        (kernels(), LLAMA, {"label_smoothing_factor": 0.1}, "none", False),
        (kernels(), {"kind": OwnLoss}, {}, "none", False),
        (kernels(), {"options": {"compute_loss_func": lambda *args, **kwargs: 0}}, {}, "none", False),
        (GPU, LLAMA, {"torch_compile": True, "torch_compile_backend": "eager"}, "none", False),
    ],
)
def test_the_loss_follows_the_device_the_model_and_the_flags(
    found: Kernels,
    trainer: dict[str, Any],
    flags: dict[str, Any],
    loss: str,
    layers: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("hfscale.core.versions.installed", lambda package: "99")
    for name in ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"):
        monkeypatch.setenv(name, "no")  # TrainingArguments sets them, and monkeypatch restores them
    options = {**trainer, "model": trainer["model"]() if "model" in trainer else None}
    made = make_trainer(tmp_path, **options, **flags)
    choose_loss(made, found)
    assert (made.args.fused_loss, made.args.use_liger_kernel) == (loss, layers)
    assert isinstance(made.model.get_output_embeddings(), ChunkedLossHead) == (loss == "chunked")
    if layers:
        fuses = (made.args.liger_kernel_config or {}).get("fused_linear_cross_entropy", True)
        assert fuses == (loss == "liger")
    lines = [line for line in log.messages if line.startswith("loss: ")]
    is_silent = loss == "none" and (found is CPU or "fused_loss" in flags)
    assert len(lines) == (not is_silent)
    if lines and loss == "none":
        assert "because" in lines[0]


def test_a_key_of_the_user_stays_in_the_configuration_of_liger(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, liger_kernel_config={"rope": False})
    choose_loss(trainer, GPU)
    assert trainer.args.liger_kernel_config == {
        "rope": False,
        "cross_entropy": False,
        "fused_linear_cross_entropy": False,
    }


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"fused_loss": "chunked", "label_smoothing_factor": 0.1}, ["--fused_loss chunked", "label smoothing"]),
        ({"fused_loss": "liger"}, ["--fused_loss liger", "liger-kernel"]),
    ],
)
def test_a_loss_that_was_asked_for_and_cannot_be_is_an_error(
    flags: dict[str, Any], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hfscale.core.versions.installed", lambda package: None)
    trainer = make_trainer(tmp_path, **flags)
    with pytest.raises((UsageError, MissingDependencyError)) as caught:
        choose_loss(trainer, GPU)
    assert all(part in str(caught.value) for part in parts)


def test_flags_that_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--use_liger_kernel false"):
        RecipeTrainingArguments(output_dir=str(tmp_path), fused_loss="liger", use_liger_kernel=False)


ACCUMULATED: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


def trained(folder: Path, loss: str, **options: Any) -> Any:
    trainer = make_trainer(folder, fused_loss=loss, **options)
    choose_loss(trainer, CPU)
    trainer.train()
    return trainer


@pytest.mark.usefixtures("small_chunks")
def test_a_trainer_trains_and_evaluates_as_with_all_logits(tmp_path: Path) -> None:
    """Losses, gradient norms, tokens, FLOPs, the noise scale, evaluations and predictions are the same."""
    runs = []
    eager = {"attn_implementation": "eager"}  # torch's counter has no formula for fused attention on CPUs
    for loss in ("none", "chunked"):
        metrics = ScalingMetricsCallback(peak_tflops=0.01, noise_scale=True)
        flags = {**ACCUMULATED, "max_steps": 12, "eval_strategy": "steps", "eval_steps": 6, "optim": "sgd"}
        callbacks = [metrics, EachStep(metrics)]
        runs.append(trained(tmp_path / loss, loss, model=tiny_model(**eager), callbacks=callbacks, **flags))
    plain, chunked = runs
    assert isinstance(chunked.model.lm_head, ChunkedLossHead)
    for key in ("loss", "grad_norm", "eval_loss", "scaling/noise_scale"):
        assert logged(plain, key), key
        assert logged(chunked, key) == pytest.approx(logged(plain, key), rel=1e-4), key
    assert logged(chunked, "scaling/tokens_seen") == logged(plain, "scaling/tokens_seen")
    for name in ("none", "chunked"):  # the FLOPs that were counted are those of the formula
        workload = next(event for event in read_events(tmp_path / name) if event["event"] == "workload")
        assert workload["flops_source"] == "formula"
    predictions = [run.predict(RandomTokens(8)) for run in runs]
    assert predictions[1].predictions.shape == (8, 16, VOCAB)
    assert predictions[1].metrics["test_loss"] == pytest.approx(predictions[0].metrics["test_loss"], rel=1e-5)
    assert abs(predictions[1].predictions - predictions[0].predictions).max() < 1e-4
    assert (job_facts(plain)["fused_loss"], job_facts(chunked)["fused_loss"]) == (False, True)


def test_an_evaluation_that_needs_the_loss_alone_computes_no_logits(tmp_path: Path) -> None:
    shapes: list[int] = []
    trainer = trained(tmp_path, "chunked")
    trainer.model.lm_head.register_forward_hook(lambda module, args, output: shapes.append(output.ndim))
    trainer.evaluate()
    assert set(shapes) == {0}
    shapes.clear()
    trainer.predict(RandomTokens(8))
    assert set(shapes) == {3}


def test_compute_metrics_gets_logits(tmp_path: Path) -> None:
    seen: list[Any] = []

    def compute_metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions.shape)
        return {}

    trainer = trained(tmp_path, "chunked", options={"compute_metrics": compute_metrics})
    assert "eval_loss" in trainer.evaluate()
    assert seen == [(8, 16, VOCAB)]


def test_no_step_waits_for_the_gpu(tmp_path: Path) -> None:
    """As in test_fast_defaults.py, with the loss in chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        arguments = recipe_arguments(tmp_path, **LOGGED_EVERY_4, use_cpu=False)
    counter = Synchronizations(first=5, last=8)
    trainer = Trainer(
        model=tiny_model(),
        args=arguments,
        train_dataset=RandomTokens(),
        data_collator=default_data_collator,
        callbacks=[ScalingCallback(), counter],
    )
    choose_loss(trainer, GPU)
    trainer.args.use_liger_kernel = False  # it is not installed
    assert trainer.args.fused_loss == "chunked"
    with counter.installed():
        trainer.train()
    assert counter.counted_steps == 3
    assert {line.partition(":")[0] for line in counter.lines} <= {"transformers.masking_utils"}


@pytest.mark.parametrize(
    ("flags", "swiglu"),
    [
        ({}, False),
        ({"use_liger_kernel": True}, False),
        ({"liger_kernel_config": {"swiglu": True}}, True),
    ],
)
def test_liger_leaves_the_experts_to_transformers(
    flags: dict[str, Any],
    swiglu: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("hfscale.core.versions.installed", lambda package: "99")
    trainer = make_trainer(tmp_path, model=make(MixtralConfig), **flags)
    choose_loss(trainer, GPU)
    assert trainer.args.use_liger_kernel
    assert trainer.args.liger_kernel_config["swiglu"] == swiglu
    lines = [line for line in log.messages if line.startswith("experts: ")]
    assert len(lines) == (not swiglu)
    assert swiglu or "grouped_mm" in lines[0]
