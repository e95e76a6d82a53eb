"""Whether layers are compiled where no flag says so, and that compiled layers compute what the others do."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DynamoBackend
from accelerate.utils.other import compile_regions
from parallel_families import small_config
from parallel_world import VOCAB as VOCABULARY
from test_fast_defaults import kernels, recipe_arguments
from tiny import RandomTokens, tiny_model
from torch._dynamo.utils import counters
from transformers import Trainer, TrainingArguments

from hfscale import DiLoCoCallback, ScalingCallback
from hfscale.facts.support import LISTS
from hfscale.islands.client import TOKEN_VARIABLE
from hfscale.parallel.descriptions import compiles_full_model
from hfscale.parallel.weights import build_model
from hfscale.recipe.arguments import DataArguments
from hfscale.recipe.compilation import compile_layers
from hfscale.recipe.kernels import Kernels, choose_loss
from hfscale.recipe.models import cut_document_attention

pytestmark = pytest.mark.recipes

REGIONAL = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
GPU = replace(kernels("liger_kernel"), can_compile=True)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable that a test sets outlives it."""
    monkeypatch.setenv(REGIONAL, "false")
    monkeypatch.setenv(TOKEN_VARIABLE, "0" * 32)


def make_trainer(folder: Path, *, model: Any = None, args: Any = None, callbacks: Any = (), **flags: Any) -> Trainer:
    AcceleratorState._reset_state()  # an earlier test's choice is in it
    GradientState._reset_state()
    return Trainer(
        model=model or tiny_model(),
        args=args or recipe_arguments(folder, **flags),
        train_dataset=RandomTokens(),
        callbacks=[ScalingCallback(), *callbacks],
    )


def lines_of(log: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in log.messages if line.startswith("layers: ") and "ompiled" in line]


def is_compiled(trainer: Trainer) -> bool:
    """Whether Accelerate will compile; the arguments must say the same."""
    plugin = trainer.accelerator.state.dynamo_plugin
    found = plugin.backend != DynamoBackend.NO
    assert found == bool(trainer.args.torch_compile)
    return found


def test_layers_are_compiled_on_a_gpu(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path)
    compile_layers(trainer, GPU)
    plugin = trainer.accelerator.state.dynamo_plugin
    assert is_compiled(trainer)
    assert (plugin.backend, plugin.use_regional_compilation) == (DynamoBackend.INDUCTOR, True)
    assert not compiles_full_model(trainer.args)
    assert lines_of(log) == [
        "layers: compiled by torch.compile, one for all (--torch_compile_regional false: not compiled)"
    ]
    choose_loss(trainer, GPU)
    assert (trainer.args.fused_loss, trainer.args.use_liger_kernel) == ("chunked", False)


@pytest.mark.parametrize(
    ("found", "options"),
    [
        (Kernels(capability=None, half_precision=False, installed=frozenset(), can_compile=True), {}),
        (GPU, {"torch_compile_regional": False}),
    ],
    ids=["CPU", "switched off"],
)
def test_nothing_is_compiled_and_nothing_logged(
    found: Kernels, options: dict[str, Any], tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path, **options)
    compile_layers(trainer, found)
    assert not is_compiled(trainer)
    assert lines_of(log) == []


def test_plain_arguments_are_left_alone(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]))
    compile_layers(trainer, GPU)
    assert not is_compiled(trainer)


@pytest.mark.parametrize("flags", [{"torch_compile": True}, {"torch_compile_regional": True}])
def test_what_the_user_asked_for_stays(flags: dict[str, Any], tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path, torch_compile_backend="eager", **flags)
    compile_layers(trainer, GPU)
    plugin = trainer.accelerator.state.dynamo_plugin
    assert (plugin.backend, plugin.use_regional_compilation) == (DynamoBackend.EAGER, "torch_compile" not in flags)
    assert lines_of(log) == []


def test_what_the_launcher_asked_for_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")  # dynamo_config of the Accelerate config
    trainer = make_trainer(tmp_path)
    compile_layers(trainer, GPU)
    assert trainer.accelerator.state.dynamo_plugin.backend == DynamoBackend.AOT_EAGER


ISLANDS = DiLoCoCallback(islands=2, island_rank=0, rendezvous="localhost:1", every_steps=4)


@pytest.mark.parametrize(
    ("found", "options", "reason"),
    [
        (replace(GPU, capability=(6, 1)), {}, "a C compiler"),
        (replace(GPU, can_compile=False), {}, "a C compiler"),
        (GPU, {"model": "mixtral"}, "family mixtral"),
        (GPU, {"use_liger_kernel": True}, "Liger's kernels were asked for"),
        (GPU, {"gradient_compression": "onebit_adam"}, "gradients are compressed"),
        (GPU, {"neftune_noise_alpha": 5.0}, "noise is added"),
        (GPU, {"callbacks": [ISLANDS]}, "islands exchange parameters"),
    ],
)
def test_it_is_logged_why_layers_are_not_compiled(
    found: Kernels, options: dict[str, Any], reason: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    chosen = dict(options)
    if "model" in chosen:
        chosen["model"] = build_model(small_config(chosen["model"]), seed=0, dtype=torch.float32)
    trainer = make_trainer(tmp_path, **chosen)
    compile_layers(trainer, found)
    assert not is_compiled(trainer)
    (line,) = lines_of(log)
    assert line.startswith("layers: not compiled, because ")
    assert reason in line


def test_layers_are_not_compiled_where_documents_are_cut(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """FlashAttention then gets lengths, and flex attention masks, that differ from batch to batch."""
    args = recipe_arguments(tmp_path)
    model = tiny_model()
    cut_document_attention(model, DataArguments(packing="bestfit", document_attention=True), args)
    compile_layers(make_trainer(tmp_path, model=model, args=args), GPU)
    assert "attention is cut" in lines_of(log)[0]


def in_either_suite(families: list[str]) -> list[Any]:
    """Llama in the ordinary suite, the others in the long one."""
    return [pytest.param(name, marks=[] if name == "llama" else [pytest.mark.faults]) for name in families]


@pytest.mark.parametrize("family", in_either_suite(LISTS["compiled_families"]))
def test_a_compiled_layer_has_no_graph_break_and_the_same_gradients(family: str) -> None:
    model = build_model(small_config(family), seed=5, dtype=torch.float32).train()
    rows = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))

    def step(module: Any, length: int) -> tuple[float, float]:
        tokens = rows[:, :length]
        loss = module(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        module.zero_grad()
        return loss.item(), norm.item()

    torch._dynamo.reset()
    counters.clear()
    compiled = compile_regions(copy.deepcopy(model), backend="aot_eager")
    for length in (12, 10):  # the last batch of an evaluation is shorter
        assert step(compiled, length) == pytest.approx(step(model, length), rel=1e-5)
    assert not counters["graph_break"]
