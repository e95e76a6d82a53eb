"""Compares loss and gradient of one step of any family, split over a mesh, with those of the unsplit model."""

import re
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from parallel_world import VOCAB
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hfscale.parallel import gradients
from hfscale.parallel.arguments import decide_layout
from hfscale.parallel.mesh import make_mesh
from hfscale.parallel.model import ParallelModel, parallelize_model
from hfscale.parallel.parity import CASES, compare_case
from hfscale.parallel.pipeline import Pipeline
from hfscale.parallel.stages import StagePlan
from hfscale.parallel.weights import build_model

MICRO_BATCHES, LENGTH = 4, 12
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 8,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "ffn_dim": 64,
    "dropout": 0.0,
    "use_cache": False,
    "expert_ffn_hidden_size": 32,
    "moe_num_experts": 4,
    "moe_k": 2,
    "num_dense_layers": 1,
    "decoder_sparse_step": 1,
    "query_pre_attn_scalar": 8,
    "hidden_size_per_layer_input": 8,
    "swa_head_dim": 8,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "residual_dropout": 0.0,
    "n_layers": 4,
    "n_heads": 4,
    "d_model": 32,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "rotary_dim": 4,
    "max_seq_len": 64,
    "window_size": 8,
    "attention_types": [[["global", "local"], 2]],
    "word_embed_proj_dim": 32,
    "embedding_size": 32,
    "d_ff": 64,
    "is_decoder": True,
    "decoder_layers": 4,
    "decoder_ffn_dim": 64,
    "decoder_attention_heads": 4,
    "encoder_layers": 4,
    "encoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "attn_dropout": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "activation_dropout": 0.0,
    "embedding_dropout": 0.0,
    "layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "lru_width": 32,
    "attention_window_size": 8,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "init_std": 0.1,
    # With the usual 0.02 attention is nearly uniform at these sizes, and wrong positions hardly change the loss.
    "initializer_range": 0.1,
}
"""Sizes by every name that families have for them; each config takes the names that it has."""


def families_with_plan() -> list[str]:
    """All families of causal language models in transformers whose config has a tensor-parallel plan."""
    return sorted(
        config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING if getattr(config, "base_model_tp_plan", None)
    )


def small_config(family: str, **overrides: Any) -> Any:
    """A config for a model of a few thousand parameters: the family's own fields with the values of `SMALL`."""
    default = AutoConfig.for_model(family)
    fields = default.to_dict()
    known = {name: value for name, value in SMALL.items() if name in fields}
    if "kv_lora_rank" in fields:  # multi-head latent attention: every head has its own keys and values
        known["num_key_value_heads"] = known["num_attention_heads"]
    return AutoConfig.for_model(family, **(known | overrides))


def compare(job: dict[str, Any]) -> dict[str, float]:
    """Differences of loss, gradient norm and evaluation loss between `family` on `tp` x `pp` x `cp` x data parallel
    ranks, of which `ep` share experts, and the unsplit model; and the shapes of all tensors of the step.

    With `gradients` the largest difference of an element of any gradient is computed too.
    With `one_choice` the router of every layer chooses the first experts for all tokens.
    """
    world = dist.get_world_size()
    config = small_config(job["family"], **job.get("config", {}))
    layout = decide_layout(world, **{axis: job.get(axis) for axis in ("tp", "pp", "cp", "ep", "dp_replicate")})
    plan = StagePlan(schedule=job.get("schedule", "1F1B"), pp=layout.pp)
    shares = layout.data_parallel_size
    size = (MICRO_BATCHES * shares * 2, job.get("length", LENGTH))
    rows = torch.randint(3, VOCAB, size, generator=torch.Generator().manual_seed(1))
    items = rows[:, 1:].numel()

    unsplit = _build(config, job).train()
    reference = _unsplit_loss(unsplit, rows, items, parts=MICRO_BATCHES * shares)
    reference.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in unsplit.parameters() if p.grad is not None])

    def loss_of(view: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return view(**inputs, num_items_in_batch=items, use_cache=False).loss * shares * layout.cp

    mesh = make_mesh(layout, "cpu")
    model = _build(config, job)
    parallelized = parallelize_model(
        model,
        mesh,
        plan,
        loss_of,
        sequence_parallel=job.get("sequence", False),
        shard_logits=job.get("shard_logits", True),
        overlap_exchange=job.get("overlap", True),
    )
    pipeline = Pipeline(
        parallelized.stages,
        plan,
        mesh.pp_group,
        torch.device("cpu"),
        hidden_size=config.get_text_config().hidden_size,
        dtype=torch.float32,
        sequence_parts=parallelized.sequence_parts,
        turns=parallelized.turns,
    )
    parallel = ParallelModel(parallelized, pipeline).train()
    local_rows = rows.chunk(shares)[mesh.data_rank]
    if parallelized.balance is not None:
        parallelized.balance.micro_batches = MICRO_BATCHES
    with nullcontext(Shapes()) if layout.cp > 1 else Shapes() as shapes:
        loss = parallel(micro_batches=MICRO_BATCHES, input_ids=local_rows, labels=local_rows).clone()
    dist.all_reduce(loss)
    loss /= layout.tp * shares * layout.cp
    gradients.align_gradients(model.parameters())
    gradients.sum_partial_gradients(parallelized.partial_gradients, mesh)
    if parallelized.tied is not None:
        parallelized.tied.sum_gradients()
    duplicate = parallelized.tied.duplicate if parallelized.tied is not None else None
    found = gradients.gradient_norm([p for p in model.parameters() if p is not duplicate], mesh)
    largest = _largest_difference(model, unsplit) if job.get("gradients") else 0.0
    parallel.eval()
    evaluated = parallel(micro_batches=MICRO_BATCHES, input_ids=local_rows, labels=local_rows).clone()
    dist.all_reduce(evaluated)
    evaluated /= layout.tp * shares * layout.cp
    return {
        "loss": abs(loss.item() - reference.item()),
        "norm": abs(found.item() - norm.item()) / norm.item(),
        "evaluation": abs(evaluated.item() - reference.item()),
        "gradient": largest,
        "shapes": sorted(shapes.seen),
    }


def parity(job: dict[str, Any]) -> list[float]:
    """The differences of each step of a small `family` on `tp` x `pp` x `cp` ranks, as `--check_parity` finds them."""
    layout = decide_layout(dist.get_world_size(), **{axis: job.get(axis) for axis in ("tp", "pp", "cp")})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_config(job["family"], **job.get("config", {})))
    if job.get("adapters"):
        model = get_peft_model(model, LoraConfig(**job["adapters"]))
    found = compare_case(
        next(case for case in CASES if case.name == job.get("case", "family")),
        model,
        make_mesh(layout, "cpu"),
        StagePlan(pp=layout.pp),
        sequence_parallel=job.get("sequence", False),
        overlap_exchange=True,
    )
    return [step.difference for step in found.steps]


def _largest_difference(model: Any, unsplit: Any) -> float:
    """The largest difference of an element of the gradients of a parallelized model, on any rank."""
    whole = dict(unsplit.named_parameters())
    largest = torch.zeros(())
    for name, parameter in model.named_parameters():
        expected = whole[name].grad
        found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        if expected is not None:
            largest = torch.maximum(largest, (found - expected).abs().max())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def _build(config: Any, job: dict[str, Any]) -> Any:
    model = build_model(config, seed=5, dtype=torch.float32)
    if job.get("one_choice"):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if re.search(r"\.(gate|router)\.weight$", name):
                    parameter.zero_()  # equal scores: torch.topk takes the first ones on a CPU
    return model


class Shapes(TorchDispatchMode):
    """Records the shape of every matrix of numbers with a fraction that any operation makes on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            # Masks do not count: torch 2.15 makes one of (rows, sequence, 1) for a vocabulary that is split.
            if isinstance(local, torch.Tensor) and local.ndim > 1 and local.is_floating_point():
                self.seen.add(tuple(local.shape))
        return result


def _unsplit_loss(model: Any, rows: torch.Tensor, items: int, *, parts: int) -> torch.Tensor:
    """The loss of an unsplit model; for a mixture of experts with the load balancing of each layer and micro-batch."""
    loss = model(
        input_ids=rows,
        labels=rows,
        num_items_in_batch=items,
        use_cache=False,
        **({"output_router_logits": False} if getattr(model.config, "output_router_logits", False) else {}),
    ).loss
    if not getattr(model.config, "output_router_logits", False):
        return loss
    balances = [
        load_balancing_loss_func((logits,), SMALL["num_experts"], SMALL["num_experts_per_tok"])
        for part in rows.chunk(parts)
        for logits in model(input_ids=part, use_cache=False, output_router_logits=True).router_logits
    ]
    return loss + model.config.router_aux_loss_coef * torch.stack(balances).mean()
