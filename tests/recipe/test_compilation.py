"""Whether layers are compiled where no flag says so, and that compiled layers compute what the others do."""

import copy
import re
from collections.abc import Iterator
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
from torch.nn.attention import flex_attention
from transformers import Trainer, TrainingArguments, masking_utils

from hfscale import DiLoCoCallback, ScalingCallback
from hfscale.facts.support import LISTS
from hfscale.islands.client import TOKEN_VARIABLE
from hfscale.parallel.descriptions import compiles_full_model
from hfscale.parallel.weights import build_model
from hfscale.recipe import compilation
from hfscale.recipe.arguments import DataArguments
from hfscale.recipe.compilation import CompilationProgress, compile_layers
from hfscale.recipe.kernels import Kernels, choose_loss
from hfscale.recipe.models import cut_document_attention

pytestmark = pytest.mark.recipes

REGIONAL = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
GPU = replace(kernels("liger_kernel"), can_compile=True)
NO_GPU = Kernels(capability=None, half_precision=False, installed=frozenset(), can_compile=True)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable that a test sets outlives it."""
    monkeypatch.setenv(REGIONAL, "false")
    monkeypatch.setenv(TOKEN_VARIABLE, "0" * 32)
    with torch._dynamo.config.patch(optimize_ddp=True):
        yield


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
        (NO_GPU, {}),
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


def test_the_first_step_of_a_launch_says_that_it_compiles(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    flags = {"torch_compile_regional": True, "torch_compile_backend": "aot_eager", "max_steps": 3}
    trainer = make_trainer(tmp_path, model=tiny_model(use_cache=False), **flags)
    compile_layers(trainer, GPU)
    trainer.train()
    before, after = (line for line in log.messages if "the first step" in line)
    assert before == "layers: the first step compiles them, which takes longer than a step"
    assert re.fullmatch(r"layers: the first step took \d+\.\d s", after)


def test_a_cache_is_named_where_there_is_one(log: pytest.LogCaptureFixture) -> None:
    progress = CompilationProgress(is_kept=True)
    progress.on_step_begin(None, None, None)
    progress.on_step_end(None, None, None)
    assert "Inductor's cache (TORCHINDUCTOR_CACHE_DIR" in log.messages[-1]


DYNAMIC = "ACCELERATE_DYNAMO_USE_DYNAMIC"


@pytest.mark.parametrize(("by_launcher", "expected"), [("False", None), ("True", True)])
def test_what_the_launcher_says_where_nothing_is_asked_does_not_compile_each_length(
    by_launcher: str, expected: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate launch` says False; then torch compiles eight lengths, and runs the others uncompiled."""
    monkeypatch.setenv(DYNAMIC, by_launcher)
    monkeypatch.setenv(REGIONAL, "true")
    trainer = make_trainer(tmp_path, torch_compile_regional=True, torch_compile_backend="aot_eager")
    compile_layers(trainer, GPU)
    plugin = trainer.accelerator.state.dynamo_plugin
    assert plugin.dynamic is expected
    torch._dynamo.reset()
    counters.clear()
    model = compile_regions(tiny_model(use_cache=False), **plugin.to_kwargs())
    graphs = []
    for length in (16, 24, 20, 28, 12):
        rows = torch.randint(3, 60, (2, length))
        model(input_ids=rows, labels=rows).loss.backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert len(set(graphs[1:])) == 1


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


@pytest.mark.parametrize(
    ("attention", "compiled"), [("flex_attention", True), ("sdpa", True), ("flash_attention_2", False)]
)
def test_layers_are_compiled_where_documents_are_cut_by_a_mask(
    attention: str, compiled: bool, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """FlashAttention gets lengths instead, which differ from batch to batch."""
    args = recipe_arguments(tmp_path)
    model = tiny_model()
    model.config._attn_implementation = attention  # as if the package were installed
    cut_document_attention(model, DataArguments(packing="bestfit", document_attention=True), args)
    trainer = make_trainer(tmp_path, model=model, args=args)
    compile_layers(trainer, GPU)
    assert is_compiled(trainer) == compiled
    (line,) = lines_of(log)
    assert ("FlashAttention gets other lengths" in line) != compiled


def test_flex_attention_is_compiled_with_the_versions_that_were_tried(
    tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "is_at_least", lambda package, minimum: (package, minimum) != ("torch", "2.13"))
    args = recipe_arguments(tmp_path)
    model = tiny_model()
    model.config._attn_implementation = "flex_attention"
    cut_document_attention(model, DataArguments(packing="bestfit", document_attention=True), args)
    compile_layers(make_trainer(tmp_path, model=model, args=args), GPU)
    assert "torch before 2.13" in lines_of(log)[0]


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


RARELY = ("mixtral", "deepseek_v3", "gpt_oss", "glm4_moe")
MIXTURES = ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.faults) for name in RARELY)]


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_compile_once_though_their_tokens_change_with_each_batch(family: str, implementation: str) -> None:
    model = build_model(small_config(family), seed=5, dtype=torch.float32).train()
    model.set_experts_implementation(implementation)
    torch._dynamo.reset()
    counters.clear()
    compiled = compile_regions(copy.deepcopy(model), backend="aot_eager")
    graphs = []
    for seed in range(3):
        rows = torch.randint(3, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(seed))
        batch = {"input_ids": rows, "labels": rows}
        assert loss_and_norm(compiled, batch) == pytest.approx(loss_and_norm(model, batch), rel=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert len(set(graphs)) == 1
    assert not counters["graph_break"]


def packed_rows(seed: int, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Return rows of random documents, of which the positions tell the boundaries."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    positions = torch.zeros(rows, length, dtype=torch.long)
    for row in positions:
        cut = 0
        while cut < length:
            end = cut + int(torch.randint(5, 30, (), generator=generator))
            row[cut:end] = torch.arange(len(row[cut:end]))
            cut = end
    return {"input_ids": tokens, "labels": tokens, "position_ids": positions}


def loss_and_norm(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Return the loss of a batch and the norm of all gradients, which are removed again."""
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return loss.item(), norm.item()


@pytest.mark.parametrize("family", in_either_suite(LISTS["compiled_families"]))
def test_documents_of_each_batch_reach_compiled_layers_without_another_compilation(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One mask per batch and kind of layer, no graph break, and the losses of dense attention."""
    # torch has no kernel for the backward pass on a CPU; the operator itself computes it there
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    masks = []

    def count(*args: Any, **keywords: Any) -> Any:
        masks.append(flex_attention.create_block_mask(*args, **(keywords | {"_compile": False})))
        return masks[-1]

    monkeypatch.setattr(masking_utils, "create_block_mask", count)
    dense = build_model(small_config(family), seed=5, dtype=torch.float32).train()
    flexible = copy.deepcopy(dense)
    flexible.set_attn_implementation("flex_attention")
    torch._dynamo.reset()
    counters.clear()
    compiled = compile_regions(flexible, backend="aot_eager")
    graphs = []
    for seed in range(3):
        batch = packed_rows(seed, rows=2, length=64)
        assert loss_and_norm(compiled, batch) == pytest.approx(loss_and_norm(dense, batch), rel=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert len(set(graphs)) == 1
    kinds = len(set(getattr(dense.config, "layer_types", None) or ["full_attention"]))
    per_batch, rest = divmod(len(masks), 3)
    assert rest == 0
    assert kinds <= per_batch <= 2  # Gemma 3 makes those of sliding and of full attention, whatever its layers are
    assert not counters["graph_break"]


def test_under_ddp_layers_larger_than_a_bucket_take_another_number_of_rows(tmp_path: Path) -> None:
    """torch cuts graphs at buckets of DDP unless it is told otherwise, and then fails at the last batch."""
    arguments = recipe_arguments(tmp_path, torch_compile_regional=True, torch_compile_backend="aot_eager")
    compile_layers(make_trainer(tmp_path, args=arguments), NO_GPU)
    torch._dynamo.reset()
    model = build_model(small_config("llama", hidden_size=512, intermediate_size=1024), seed=5, dtype=torch.float32)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        ranks = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model).train(), bucket_cap_mb=2)
        compiled = compile_regions(ranks, backend="aot_eager")
        for rows in (2, 1):
            batch = packed_rows(rows, rows=rows, length=32)
            assert loss_and_norm(compiled, batch) == pytest.approx(loss_and_norm(model, batch), rel=1e-5)
    finally:
        torch.distributed.destroy_process_group()
