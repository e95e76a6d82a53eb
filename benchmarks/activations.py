"""Measures the bytes that layers of Hugging Face's models keep for their backward pass.

`python -m benchmarks.activations --write [FAMILY …]` fits the factors of `hfscale/facts/activations.csv`: it runs
small models of every family in every regime, with and without recomputation, and solves for the bytes per unit of each
width; the bytes are a sum of whole multiples of widths, so that the fit has no error. `python -m benchmarks
activations` compares the table with models of the catalogue at their full width on fake tensors.
"""

import csv
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from peft import get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker  # no public name
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore  # no public way to make a world that is not there
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, masking_utils

from benchmarks.small_models import MEASURED, RECURRENT, Sample, samples_of
from hfscale.facts.activations import REGIMES, Regime, kept_bytes
from hfscale.facts.config_reader import ALIASES
from hfscale.facts.hardware import accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.models import catalogue, catalogue_names, catalogue_shape
from hfscale.planner.frameworks import find_framework
from hfscale.planner.job import Job
from hfscale.planner.memory import GIB, allocated_gib, memory_of
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.recipe.recompute import checkpointing_kwargs

TABLE = Path(__file__).parent.parent / "hfscale" / "facts" / "activations.csv"
RECOMPUTE = ("none", "selective", "full")
SEQ_LEN = 32
LORA_RANK = 16
EXACT = 1e-6
"""Relative error of a sample below which a fit is exact."""
EXPLAINED = 0.001
"""Relative error of a sample that needs no further width to be explained."""
ZERO = 0.02
"""Bytes per unit of a width below which a factor is an effect of rounding."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations made and that are still referenced, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()

        def forget(_: Any) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


# -- kernels of a GPU -------------------------------------------------------------------------------------------------

# Flash and memory-efficient attention on CUDA keep queries, keys, values, the output, one fp32 number per query and
# head, and the mask in the format of the queries. A CPU does so only without dropout and with equal widths of keys and
# values; CUDA's dropout keeps a mask of one byte per number, a CPU's a factor.


# Selective recomputation knows it by its name.
@torch.library.custom_op("hfscale_benchmarks::scaled_dot_product_attention", mutates_args=())
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return _attention_outputs(query, value)


@attention.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return _attention_outputs(query, value)


def _attention_outputs(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, tokens, _ = query.shape
    output = query.new_zeros(rows, tokens, heads, value.shape[-1]).transpose(1, 2)
    return output, query.new_zeros(rows, heads, tokens, dtype=torch.float32)


@torch.library.custom_op("hfscale_benchmarks::attention_backward", mutates_args=())
def attention_backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


@attention_backward.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, *gradients: Any) -> Any:
    query, key, value, *_ = ctx.saved_tensors
    return (*attention_backward(query, key, value), None)


attention.register_autograd(_backward, setup_context=_keep)


def _attention_of_a_gpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, *_: Any, **__: Any
) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
    if attn_mask is not None:
        attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype)
    return attention(query, key, value, attn_mask)[0]


def _dropout_of_a_gpu(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    return torch.native_dropout(input, p, training)[0] if training and p else input


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Replaces attention and dropout by operations that keep what CUDA's kernels keep."""
    with (
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _attention_of_a_gpu),
        mock.patch.object(torch.nn.functional, "dropout", _dropout_of_a_gpu),
        # Of fake tensors transformers cannot know that a row is one document, and would make a mask.
        mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None),
    ):
        yield


# -- one model --------------------------------------------------------------------------------------------------------


def build(config: Any, regime: Regime, recomputed: str, *, rank: int = LORA_RANK) -> PreTrainedModel:
    """Builds the model of a config as the recipes do in a regime."""
    dtype = torch.float32 if regime in ("fp32", "autocast") else torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if regime.startswith("lora"):
        lora = ModelArguments(use_peft=True, lora_r=rank).lora_config(model)
        adapted = get_peft_model(model, lora, autocast_adapter_dtype=regime == "lora")
        model = adapted.get_base_model()
        if regime == "lora_bf16":
            model.to(torch.bfloat16)
    if recomputed != "none":
        recompute(model, recomputed, has_adapters=regime.startswith("lora"))
    return model.train()


def recompute(model: PreTrainedModel, policy: str, *, has_adapters: bool) -> None:
    """Turns on recomputation as Trainer and the recipes do."""
    model.activation_checkpointing_enable({"use_reentrant": False} | checkpointing_kwargs(policy))
    if has_adapters:
        model.enable_input_require_grads()


def forward(model: PreTrainedModel, regime: Regime, rows: int, seq_len: int, *, base: bool = True) -> Any:
    """Runs the forward pass of the layers, or of the complete model with its loss."""
    has_autocast = regime in ("autocast", "mixed", "lora")
    ids = torch.zeros(rows, seq_len, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16) if has_autocast else nullcontext():
        if base:
            return model.base_model(input_ids=ids, use_cache=False)
        return model(input_ids=ids, labels=ids, use_cache=False).loss


def live_bytes(model: PreTrainedModel, regime: Regime, rows: int, seq_len: int) -> int:
    """Bytes that are in use after a forward pass of the layers."""
    with LiveBytes() as live:
        output = forward(model, regime, rows, seq_len)
        size = live.now
    del output
    return size


def bytes_per_token(model: PreTrainedModel, regime: Regime, seq_len: int) -> float:
    """Bytes that each further token keeps; what does not grow with tokens, such as copies of weights, is left out.

    What carries a state along the sequence is computed in chunks, and keeps more or less of the first and the last.
    There the bytes are those of the tokens by which a sequence of twice the length is longer.
    """
    if model.config.model_type in RECURRENT:
        return (live_bytes(model, regime, 1, 2 * seq_len) - live_bytes(model, regime, 1, seq_len)) / seq_len
    return (live_bytes(model, regime, 2, seq_len) - live_bytes(model, regime, 1, seq_len)) / seq_len


# -- the table --------------------------------------------------------------------------------------------------------


def measure_sample(drawn: Sample) -> dict[tuple[Regime, str], float]:
    """Bytes per token that a small model keeps in each regime, with and without selective recomputation."""
    found: dict[tuple[Regime, str], float] = {}
    for regimes in (("fp32", "autocast"), ("bf16", "mixed"), ("lora", "lora_bf16")):
        model = build(drawn.config, regimes[0], "none", rank=drawn.rank)
        for regime in regimes:
            if regime == "lora_bf16":
                model.to(torch.bfloat16)
            with gpu_kernels():
                found[regime, "none"] = bytes_per_token(model, regime, drawn.seq_len)
        recompute(model, "selective", has_adapters=regimes[0] == "lora")
        for regime in reversed(regimes):
            if regime == "lora":
                found[regime, "selective"] = found["lora_bf16", "selective"]
                continue
            with gpu_kernels():
                found[regime, "selective"] = bytes_per_token(model, regime, drawn.seq_len)
    return found


def fit(family: str) -> Iterator[tuple[Regime, str, dict[str, float], float]]:
    """Solves for the bytes per unit of each width, of a family in each regime, with and without recomputation.

    Yields:
        `tuple`: The regime, `none` or `selective`, the factors, and the largest relative error of a sample.
    """
    samples = samples_of(family)
    found = [measure_sample(drawn) for drawn in samples]
    for regime, kind in product(REGIMES, ("none", "selective")):
        rows = [drawn.widths(regime) for drawn in samples]
        target = np.array([bytes_[regime, kind] for bytes_ in found])
        factors, error = solve(rows, independent(rows), target)
        # Of widths that the small models hardly tell apart, those are left out that explain nothing.
        for name in sorted(factors, key=lambda name: abs(factors[name]) * np.mean([row[name] for row in rows])):
            fewer, larger = solve(rows, [other for other in factors if other != name], target)
            if larger <= (EXPLAINED if error > EXACT else EXACT):
                factors, error = fewer, larger
        factors = {name: round(value, 3) for name, value in factors.items() if abs(value) > ZERO}
        fitted = np.array([sum(row[name] * value for name, value in factors.items()) for row in rows])
        yield regime, kind, factors, float(np.abs(fitted / target - 1).max())


def solve(
    rows: list[dict[str, float]], names: list[str], target: np.ndarray[Any, np.dtype[np.float64]]
) -> tuple[dict[str, float], float]:
    """Solves for the bytes per unit of some widths, and returns them with the largest relative error of a sample."""
    matrix = np.array([[row[name] for name in names] for row in rows])
    scale = np.abs(matrix).max(axis=0)
    solution = np.linalg.lstsq(matrix / scale, target, rcond=None)[0] / scale
    return dict(zip(names, map(float, solution), strict=True)), float(np.abs(matrix @ solution / target - 1).max())


def independent(rows: list[dict[str, float]]) -> list[str]:
    """Chooses widths of which none is a combination of those before it in all samples."""
    chosen: list[str] = []
    for name in rows[0]:
        matrix = np.array([[row[other] for other in (*chosen, name)] for row in rows])
        scale = np.abs(matrix).max(axis=0)
        if scale[-1] and np.linalg.matrix_rank(matrix / np.maximum(scale, 1e-12), tol=1e-6) == len(chosen) + 1:
            chosen.append(name)
    return chosen


Row = tuple[Regime, str, dict[str, float]]
"""A regime, `none` or `selective`, and the factors."""


def measured(family: str) -> list[Row]:
    """Fits the factors of a family in all regimes."""
    rows: list[Row] = []
    for regime, kind, factors, error in fit(family):
        print(f"{family} {regime} {kind}: largest error {error:.2%}", flush=True)
        rows.append((regime, kind, factors))
    return rows


def write(rows: dict[str, list[Row]]) -> None:
    """Writes the table, in which families with the same factors share a line; families not in `rows` are kept."""
    lines: dict[tuple[str, str, str, str], list[str]] = {}
    if TABLE.exists():
        with TABLE.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                key = (row["regime"], row["recompute"], row["layer"], row["ends"])
                lines[key] = [family for family in row["families"].split() if family not in rows]
    for family, found in rows.items():
        for regime, recompute, factors in found:
            layer, ends = (
                " ".join(f"{name.split()[1]}={value:g}" for name, value in factors.items() if name.startswith(part))
                for part in ("layer", "ends")
            )
            lines.setdefault((regime, recompute, layer, ends), []).append(family)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("families", "regime", "recompute", "layer", "ends"))
        for key, names in sorted(lines.items()):
            if names:
                writer.writerow((" ".join(sorted(names)), *key))


# -- full size --------------------------------------------------------------------------------------------------------

LAYERS = 6
"""Layers of a catalogue model that are run at full width: a period of the pattern of sliding windows. The table's
bytes are per layer, so that the depth does not change their error."""
RANKS = 8
"""Ranks of the counted steps."""
PEAKS = (
    ("qwen3-1.7b", 2, 4096),
    ("olmo-2-1b", 2, 4096),
    ("smollm2-360m", 8, 2048),
    ("gemma-3-1b", 1, 4096),
)
"""Models, sequences and tokens per sequence of complete steps under DDP, without recomputation."""


def catalogue_config(name: str, layers: int | None = None) -> Any:
    """The transformers config of a catalogue model, with at most this many layers."""
    values = {key: value for key, value in catalogue()[name].items() if key != "hub"}
    family = values.pop("model_type")
    if layers is not None:
        key = next(key for key in ALIASES["num_hidden_layers"] if key in values)
        values[key] = min(layers, values[key])
        if "hybrid_override_pattern" in values:
            values["hybrid_override_pattern"] = values["hybrid_override_pattern"][:layers]
    if not any(catalogue_shape(name).windows) and "sliding_window" in {f.name for f in fields(CONFIG_MAPPING[family])}:
        values["sliding_window"] = None
    return CONFIG_MAPPING[family](**values)


def build_fake(config: Any, regime: Regime, recomputed: str, mode: FakeTensorMode) -> PreTrainedModel:
    """Builds a model on fake tensors. PEFT cannot convert fake weights, so it is built on the meta device first."""
    with torch.device("meta"):
        model = build(config, regime, recomputed)
    made: dict[int, Any] = {}
    with mode:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                        is_weight = isinstance(tensor, torch.nn.Parameter)
                        made[id(tensor)] = torch.nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
                    tensors[key] = made[id(tensor)]
    return model


def planned_per_token(shape: ModelShape, regime: Regime, recomputed: str, seq_len: int, rank: int) -> float:
    """The table's bytes for what `bytes_per_token` measures."""

    def kept_at(tokens: int) -> float:
        kept = kept_bytes(shape, regime, recomputed, tokens, rank if regime.startswith("lora") else 0)
        return shape.layers * (kept.unsplit + kept.split) + kept.ends

    if shape.model_type in RECURRENT:
        return 2 * kept_at(2 * seq_len) - kept_at(seq_len)
    return kept_at(seq_len)


def errors_of(name: str, seq_len: int = 4096) -> dict[str, float]:
    """Relative errors of the table for a catalogue model at its full width, by regime and recomputation."""
    config = catalogue_config(name, LAYERS)
    shape = ModelShape.from_config(config.to_dict())
    errors = {}
    # transformers' experts need bf16 weights on fake tensors.
    regimes = [regime for regime in REGIMES if shape.moe is None or regime not in ("fp32", "autocast")]
    for regime, kind in product(regimes, RECOMPUTE):
        planned = planned_per_token(shape, regime, kind, seq_len, LORA_RANK)
        mode = FakeTensorMode()
        model = build_fake(config, regime, kind, mode)
        with mode, gpu_kernels():
            errors[f"{regime} {kind}"] = planned / bytes_per_token(model, regime, seq_len) - 1
    return errors


def peak_bytes(name: str, rows: int, seq_len: int) -> int:
    """Peak of the bytes in use in a step of a catalogue model under DDP and autocast, with AdamW, counted by torch's
    `MemTracker` on fake tensors. DDP's buckets hold the gradients, as in recipes/ddp."""
    mode = FakeTensorMode()
    model = build_fake(catalogue_config(name), "autocast", "none", mode)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        with mode, gpu_kernels():
            optimizer = torch.optim.AdamW(model.parameters())
            forward(model, "autocast", 1, 8, base=False).backward()
            optimizer.step()  # makes its states
            optimizer.zero_grad()
            tracker = MemTracker()
            tracker.track_external(model, optimizer)
            with tracker:
                replica = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
                replica.register_comm_hook(None, _without_exchange)
                ids = torch.zeros(rows, seq_len, dtype=torch.long)
                with torch.autocast("cpu", torch.bfloat16):
                    loss = replica(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                optimizer.step()
    finally:
        dist.destroy_process_group()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return int(peak["Total"])


def _without_exchange(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DDP for a process group without other processes."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def planned_peak_bytes(shape: ModelShape, rows: int, seq_len: int, **changes: Any) -> float:
    """The planner's peak of the bytes in use under DDP, without memory that is only reserved.

    Reserved is also the block of the bf16 logits, which are gone at the loss's peak.
    """
    job = Job(
        shape=shape,
        gpu=accelerator("H100-80GB"),
        layout=ParallelLayout(dp_replicate=RANKS),
        seq_len=seq_len,
        micro_batch=rows,
        global_batch=rows * RANKS,
        **changes,
    )
    memory = memory_of(job, find_framework("hf"))
    logits = 2 * rows * seq_len * shape.vocab if memory.loss else 0
    return allocated_gib(memory) * GIB - logits


def measure() -> dict[str, Any]:
    """Compares the table with every catalogue model, and the planner's peaks with counted ones."""
    models = {}
    for name in catalogue_names():
        models[name] = {key: round(error, 4) for key, error in errors_of(name).items()}
        print(name, models[name], flush=True)
    peaks = {}
    for name, rows, seq_len in PEAKS:
        counted = peak_bytes(name, rows, seq_len)
        planned = planned_peak_bytes(catalogue_shape(name), rows, seq_len)
        peaks[name] = {
            "sequences": rows,
            "seq_len": seq_len,
            "counted_gib": round(counted / GIB, 2),
            "planned_gib": round(planned / GIB, 2),
        }
        print(name, peaks[name], flush=True)
    largest = max(abs(error) for errors in models.values() for error in errors.values())
    peak_error = max(abs(row["planned_gib"] / row["counted_gib"] - 1) for row in peaks.values())
    return {
        "summary": {"models": len(models), "largest_error": largest, "largest_peak_error": round(peak_error, 4)},
        "kept": models,
        "peaks": peaks,
    }


if __name__ == "__main__" and "--write" in sys.argv:
    names = [name for name in sys.argv[1:] if name != "--write"]
    write({family: measured(family) for family in names or MEASURED})
