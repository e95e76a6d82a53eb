"""Compares two steps of a small model under a layout with the same steps in one process, on the run's own ranks.

The small model is made from the model's own class and config, with fewer and narrower layers, random weights and no
dropout; it computes in fp32. Each case of `CASES` changes it in another way in which users change models. What it does
not show: dropout, recomputed activations, the load-balancing loss of experts, lower precision, and what depends on the
real sizes.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hfscale.core.spelling import spelled
from hfscale.core.versions import is_peft_model, sizes_of_layers
from hfscale.errors import UnsupportedModelError
from hfscale.parallel import gradients
from hfscale.parallel.losses import IGNORED_LABEL
from hfscale.parallel.mesh import ParallelMesh
from hfscale.parallel.model import ParallelModel, parallelize_model
from hfscale.parallel.pipeline import Pipeline
from hfscale.parallel.stages import StagePlan
from hfscale.trainer.attention import attention_implementation
from hfscale.trainer.small_model import WIDTHS, make_config_small, switch_dropout_off

if TYPE_CHECKING:
    from peft import PeftModel

TOLERANCE = 1e-5
"""Largest relative difference of a loss or gradient norm."""
_STEPS = 2
_ROWS = 2  # of a micro-batch
_LENGTH = 16
_VOCABULARY = 512
_MAX_WIDTH = 512  # of hidden states
_LEARNING_RATE = 1e-3
_MAX_PARAMETERS = 200_000_000

Batches = list[dict[str, torch.Tensor]]
"""The micro-batches of a step, of all ranks; each tensor is (rows, sequence)."""


@dataclass(frozen=True, kw_only=True)
class ParityStep:
    """The numbers of one step."""

    one: dict[str, float]
    """`loss` and `grad_norm` in one process."""
    asked: dict[str, float]
    """Those under the layout."""

    @property
    def difference(self) -> float:
        """The largest relative difference; infinity where a number is not finite."""
        largest = 0.0
        for name, value in self.one.items():
            relative = abs(self.asked[name] - value) / max(abs(value), 1e-12)
            largest = max(largest, relative if math.isfinite(relative) else math.inf)
        return largest


@dataclass(frozen=True, kw_only=True)
class CaseParity:
    """What the comparison of one case has found."""

    case: str
    """The name of the case."""
    steps: list[ParityStep]
    """The numbers of each step."""
    is_equal: bool
    """Whether they agree on every rank."""


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """A way in which users change a model."""

    name: str
    """Its name."""
    applies: "Callable[[PreTrainedModel | PeftModel], bool]"
    """Whether the run's model is changed in this way."""
    change: "Callable[[PreTrainedModel, PreTrainedModel | PeftModel], nn.Module]"
    """`change(small, model)` changes the small model as the run's model is, and returns it."""


def _with_adapters(small: PreTrainedModel, model: Any) -> nn.Module:
    """Give the small model the adapters of the run's model."""
    from peft import get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted: nn.Module = get_peft_model(small, copy.deepcopy(model.active_peft_config))
    return adapted


CASES = (
    ParityCase(name="family", applies=lambda model: True, change=lambda small, model: small),
    ParityCase(name="adapters", applies=is_peft_model, change=_with_adapters),
)
"""What is compared. `family` is the model as its config makes it."""


def check_parity(
    model: "PreTrainedModel | PeftModel",
    mesh: ParallelMesh,
    plan: StagePlan,
    *,
    sequence_parallel: bool = False,
    overlap_exchange: bool = True,
) -> list[CaseParity]:
    """Make sure that a layout computes what one process does, with small versions of a model. Call it on every rank.

    Args:
        model (`PreTrainedModel` or `PeftModel`): the unsplit model; it is not changed, and its weights are not read.
        mesh (`ParallelMesh`): all ranks.
        plan (`StagePlan`): the pipeline stages.
        sequence_parallel (`bool`): whether tensor parallel ranks split the sequence between blocks.
        overlap_exchange (`bool`): whether the exchange of tokens for experts overlaps with computation.

    Returns:
        What was compared.

    Raises:
        UnsupportedModelError: the numbers differ, or no small version of the model can be made.
    """
    found = []
    for case in CASES:
        if not case.applies(model):
            continue
        result = compare_case(
            case,
            model,
            mesh,
            plan,
            sequence_parallel=sequence_parallel,
            overlap_exchange=overlap_exchange,
        )
        if not result.is_equal:
            raise UnsupportedModelError(_sentence(result, model, mesh))
        found.append(result)
    return found


def compare_case(
    case: ParityCase,
    model: "PreTrainedModel | PeftModel",
    mesh: ParallelMesh,
    plan: StagePlan,
    *,
    sequence_parallel: bool,
    overlap_exchange: bool,
) -> CaseParity:
    """Run the steps of a case in both ways. Call it on every rank.

    Args:
        case (`ParityCase`): what is compared.
        model, mesh, plan, sequence_parallel, overlap_exchange: as for `check_parity`.

    Returns:
        The numbers.

    Raises:
        UnsupportedModelError: no small version of the model can be made, or it cannot be parallelized.
    """
    one, asked = (case.change(_small_model(model, mesh, plan), model) for _ in range(2))
    for made in (one, asked):
        switch_dropout_off(made)
        _draw(made)
    device = torch.device(mesh.device_mesh.device_type)
    micro_batches = plan.micro_batches_for(plan.stages)
    steps = [_batches(one, mesh, micro_batches, seed, device=device) for seed in range(_STEPS)]
    with _full_precision():
        expected = _run_in_one_process(one.to(device).train(), steps, mesh)
        runner = _LayoutRunner(
            asked,
            mesh,
            plan,
            micro_batches,
            sequence_parallel=sequence_parallel,
            overlap_exchange=overlap_exchange,
        )
        found = [runner.step(batches) for batches in steps]
    pairs = [ParityStep(one=a, asked=b) for a, b in zip(expected, found, strict=True)]
    largest = torch.tensor(max(pair.difference for pair in pairs), device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return CaseParity(case=case.name, steps=pairs, is_equal=largest.item() <= TOLERANCE)


def _sentence(result: CaseParity, model: Any, mesh: ParallelMesh) -> str:
    """Name the first step and number that differ most."""
    differing = [
        (number, step)
        for number, step in enumerate(result.steps, start=1)
        if step.difference > TOLERANCE
    ]
    # Another rank may have found what is within the tolerance here
    number, step = differing[0] if differing else (1, result.steps[0])
    name = max(step.one, key=lambda key: abs(step.asked[key] - step.one[key]))
    layout = mesh.layout
    sizes = {"pp": layout.pp, "tp": layout.tp, "cp": layout.cp, "ep": getattr(layout, "ep", 1)}
    split = {axis: size for axis, size in sizes.items() if size > 1}
    asked = " x ".join(f"{axis} {size}" for axis, size in split.items()) or "this layout"
    alone = "train it in one process"
    if split:
        alone = "set " + " ".join(spelled(f"{axis}_size", 1) for axis in split)
    expected = step.one[name]
    found = step.asked[name]
    return (
        f"{spelled('check_parity', True)}: step {number} of a small {model.config.model_type} model "
        f"({result.case}) has {name} {found:.7g} under {asked}, but {expected:.7g} in one process: "
        f"this model cannot be trained so; {alone}"
    )


def _unsplit(model: Any) -> Any:
    """Return the causal language model inside adapters."""
    if is_peft_model(model):
        return model.get_base_model()
    return model


# --- the small model and its batches ---------------------------------------------------------------------------------


def _small_model(model: Any, mesh: ParallelMesh, plan: StagePlan) -> PreTrainedModel:
    """Make a small model of the same class, without using the run's random numbers."""
    unsplit = _unsplit(model)
    try:
        config = small_config(unsplit.config, tp=mesh.layout.tp, stages=plan.stages)
        with torch.device("meta"):
            size = type(unsplit)(copy.deepcopy(config)).num_parameters()
        if size > _MAX_PARAMETERS:
            raise ValueError(f"it would still have {size} parameters")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(
                0
            )  # equal on all ranks: `_draw` keeps what is no matrix nearly as it is
            small: PreTrainedModel = type(unsplit)(config).float()
        # Other implementations do not compute in fp32, and are the same for every layout
        if attention_implementation(config) not in (None, "sdpa", "eager"):
            small.set_attn_implementation("sdpa")
    # Whatever the constructor of a model raises for sizes that do not fit together
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise UnsupportedModelError(
            f"{spelled('check_parity', True)}: no small {type(unsplit).__name__} can be made to compare "
            f"({type(error).__name__}: {first_line}): train it without tensor and pipeline parallelism"
        ) from error
    return small


def small_config(config: PreTrainedConfig, *, tp: int, stages: int) -> PreTrainedConfig:
    """Make a small version of a config that a layout can split as it can split the config itself.

    Args:
        config (`PreTrainedConfig`): a model's config; it is not changed.
        tp (`int`): ranks that share each matrix.
        stages (`int`): pipeline stages, of which each gets two layers where the model has as many.

    Returns:
        The small config.
    """
    small = copy.deepcopy(config)
    make_config_small(small, layers=2 * stages, heads_divide_by=tp)
    text = small.get_text_config()
    if not getattr(small, "sub_configs", {}):
        _narrow_heads(text)
    text.vocab_size = min(text.vocab_size, _VOCABULARY)
    for name, value in list(vars(text).items()):
        if name.endswith("_token_id") and isinstance(value, int) and value >= text.vocab_size:
            setattr(text, name, 0)
        if name.endswith("_token_id") and isinstance(value, list):
            setattr(text, name, [min(one, text.vocab_size - 1) for one in value])
    if getattr(text, "output_router_logits", False):
        text.output_router_logits = False
    return small


def _narrow_heads(text: Any) -> None:
    """Make each head narrower where all heads together stay wide, because a layout divides their number."""
    heads = getattr(text, "num_attention_heads", None)
    hidden = getattr(text, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(hidden, int) or hidden <= _MAX_WIDTH:
        return
    if hidden % heads:
        return
    of_head = max(8, _MAX_WIDTH // heads)
    if sizes_of_layers(text, "head_dim") == (hidden // heads,):
        text.head_dim = of_head
    text.hidden_size = heads * of_head
    for name in WIDTHS:
        width = getattr(text, name, None)
        if isinstance(width, int) and width > 2 * text.hidden_size:
            setattr(text, name, 2 * text.hidden_size)


@torch.no_grad()
def _draw(model: nn.Module) -> None:
    """Draw all parameters, norms and biases too: with the usual small values wrong positions hardly change a loss."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
        else:
            parameter.add_(noise * 0.1)


def _batches(
    model: Any, mesh: ParallelMesh, micro_batches: int, seed: int, *, device: torch.device
) -> Batches:
    """Make the micro-batches of a step for all data parallel ranks; every second row ends with padding."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config().vocab_size
    batches = []
    for _ in range(micro_batches * mesh.layout.data_parallel_size):
        rows = torch.randint(3, vocabulary, (_ROWS, _LENGTH), generator=generator)
        batch = {"input_ids": rows, "labels": rows.clone()}
        # The ranks of a sequence neither take a mask nor leave out padding
        if mesh.layout.cp == 1:
            mask = torch.ones_like(rows)
            mask[1::2, -_LENGTH // 4 :] = 0
            batch["attention_mask"] = mask
            batch["labels"][mask == 0] = IGNORED_LABEL
        batches.append({name: value.to(device) for name, value in batch.items()})
    return batches


@contextmanager
def _full_precision() -> Iterator[None]:
    """Inside this context, matrix products in fp32 are not rounded to TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# --- both ways to run a step -----------------------------------------------------------------------------------------


def _run_in_one_process(
    model: nn.Module, steps: list[Batches], mesh: ParallelMesh
) -> list[dict[str, float]]:
    """Run the steps in this process alone."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=_LEARNING_RATE)
    numbers = []
    for batches in steps:
        items = _items(batches, mesh)
        total = 0.0
        for batch in batches:
            loss = _loss(model, batch, items)
            if items is None:
                loss = loss / len(batches)
            loss.backward()
            total += loss.item()
        norm = torch.stack([p.grad.double().norm() for p in trained if p.grad is not None]).norm()
        numbers.append({"loss": total, "grad_norm": norm.item()})
        optimizer.step()
        optimizer.zero_grad()
    return numbers


def _items(batches: Batches, mesh: ParallelMesh) -> int | None:
    """Return the tokens by which a loss is divided where ranks share sequences; None for means of micro-batches, which
    the loss of every model has."""
    if mesh.layout.cp == 1:
        return None
    return sum(batch["labels"][:, 1:].numel() for batch in batches)


def _loss(model: Any, batch: dict[str, torch.Tensor], items: int | None) -> torch.Tensor:
    counted = {} if items is None else {"num_items_in_batch": items}
    loss: torch.Tensor = model(**batch, **counted, use_cache=False).loss
    return loss


class _LayoutRunner:
    """Runs steps of a small model under a layout.

    Args:
        model (`nn.Module`): the unsplit small model, which is changed in place.
        mesh, plan, sequence_parallel, overlap_exchange: as for `check_parity`.
        micro_batches (`int`): micro-batches of a step of each rank.
    """

    def __init__(
        self,
        model: Any,
        mesh: ParallelMesh,
        plan: StagePlan,
        micro_batches: int,
        *,
        sequence_parallel: bool,
        overlap_exchange: bool,
    ) -> None:
        self._mesh = mesh
        self._micro_batches = micro_batches
        self._items: int | None = None
        unsplit = _unsplit(model)
        self._parallelized = parallelize_model(
            unsplit,
            mesh,
            plan,
            self._loss_of_last_stage,
            sequence_parallel=sequence_parallel,
            overlap_exchange=overlap_exchange,
        )
        pipeline = Pipeline(
            self._parallelized.stages,
            plan,
            mesh.pp_group,
            torch.device(mesh.device_mesh.device_type),
            hidden_size=unsplit.config.get_text_config().hidden_size,
            dtype=torch.float32,
            sequence_parts=self._parallelized.sequence_parts,
            turns=self._parallelized.turns,
        )
        self._runner = ParallelModel(self._parallelized, pipeline).train()
        trained = [p for p in self._parallelized.model.parameters() if p.requires_grad]
        # A stage may have nothing that is trained, and foreach does not mix meshes
        self._optimizer = (
            torch.optim.SGD(trained, lr=_LEARNING_RATE, foreach=False) if trained else None
        )

    def _loss_of_last_stage(self, view: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
        inputs = {name: value for name, value in inputs.items() if name != "use_cache"}
        loss = _loss(view, inputs, self._items)
        if self._items is None:
            return loss / self._micro_batches
        return loss * self._mesh.layout.data_parallel_size * self._mesh.layout.cp

    def step(self, batches: Batches) -> dict[str, float]:
        """Run one step, and return its loss and gradient norm.

        Args:
            batches (`Batches`): the micro-batches of all ranks.
        """
        layout = self._mesh.layout
        self._items = _items(batches, self._mesh)
        first = self._mesh.data_rank * self._micro_batches
        own = batches[first : first + self._micro_batches]
        inputs = {name: torch.cat([batch[name] for batch in own]) for name in own[0]}
        loss = self._runner(micro_batches=self._micro_batches, **inputs).detach().clone()
        dist.all_reduce(loss)
        loss /= layout.tp * layout.cp * layout.data_parallel_size
        model = self._parallelized.model
        gradients.align_gradients(model.parameters())
        gradients.sum_partial_gradients(self._parallelized.partial_gradients, self._mesh)
        tied = self._parallelized.tied
        if tied is not None:
            tied.sum_gradients()
        duplicate = tied.duplicate if tied is not None else None
        counted = [p for p in model.parameters() if p is not duplicate]
        norm = gradients.gradient_norm(counted, self._mesh)
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()
        return {"loss": loss.item(), "grad_norm": norm.item()}
