"""Draws small models of every family, on which `benchmarks/activations.py` measures what layers keep."""

import random
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from transformers import CONFIG_MAPPING

from hfscale.facts.activations import Regime, end_widths, layer_widths
from hfscale.facts.config_reader import ALIASES
from hfscale.facts.families import FAMILIES
from hfscale.facts.model_shape import ModelShape

TRIES = 80
"""Small models that are drawn per family, of which those are measured whose widths are new."""
CHECKS = 3
LAYER_COUNTS = {"gemma2": (2, 3, 4), "gemma4_text": (2, 3, 4), "gpt_oss": (2, 4), "nemotron_h": (2, 3, 4)}
"""Numbers of layers, where they are not 1 to 3: Gemma 2 has layers of two kinds, and gpt-oss an odd number of matrix
products per layer, of which selective recomputation keeps every second."""
RECURRENT = ("nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Families with layers that carry a state along the sequence."""
DELTA = RECURRENT[1:]
"""Those with the gated delta rule, which transformers computes in chunks of 64 tokens."""
MEASURED = tuple(FAMILIES)


def sample(family: str, random_: random.Random) -> dict[str, Any]:
    """Draws a small config of a family, under the names of hfscale's keys."""
    # CodeGen splits queries in four parts, and copies them where a part has several heads.
    heads = random_.choice((8, 16) if family == "codegen" else (2, 4, 6, 8))
    head_dim = random_.choice((8, 16, 24, 32))
    known = {field.name for field in fields(CONFIG_MAPPING[family])}
    if family in ("qwen3_moe", "glm4_moe", "dots1"):  # their classes read the key without declaring it
        known.add("head_dim")
    if family == "gemma4_text":  # its class reads them into a table
        known |= {"global_head_dim", "num_global_key_value_heads"}
    is_free = ("head_dim" in known or "kv_lora_rank" in known) and family != "helium"
    # Some copy keys and values, but not those of one head.
    copies = family in ("gemma2", "gpt_oss", "gemma4_text", *RECURRENT)
    layers = random_.choice(LAYER_COUNTS.get(family, (1, 2, 3)))
    experts = random_.choice((4, 6, 8))
    dense = random_.randint(0, layers - 1)
    wanted: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 24 * random_.randint(2, 6) if is_free else heads * head_dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": random_.choice([n for n in (1, 2, 3, 4, 6, 8) if heads % n == 0 and n > copies]),
        "head_dim": head_dim,
        "intermediate_size": 8 * random_.randint(5, 20),
        "n_inner": 8 * random_.randint(5, 20),
        "ffn_dim": 8 * random_.randint(5, 20),
        "ffn_hidden_size": 8 * random_.randint(5, 20),
        "moe_intermediate_size": 8 * random_.randint(3, 12),
        "shared_intermediate_size": 8 * random_.randint(3, 12),
        "shared_expert_intermediate_size": 8 * random_.randint(3, 12),
        "num_experts": experts,
        "num_experts_per_tok": 2 if family == "phimoe" else random_.randint(1, 4),
        "n_shared_experts": random_.randint(1, 2),
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": dense,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(random_.randint(0, layers - 1))),
        "sliding_window": random_.choice((8, 64)),
        "use_sliding_window": True,
        "max_window_layers": random_.randint(0, layers),
        "layer_types": None,
        "sliding_window_pattern": random_.choice((2, 3)),
        "window_size": 8,
        "attention_types": [[["global"], layers]],
        "rotary_dim": 8,
        "max_position_embeddings": 128,
        "q_lora_rank": 4 * random_.randint(4, 10),
        "kv_lora_rank": 4 * random_.randint(4, 10),
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": 8,
        "v_head_dim": random_.choice((8, 16, 24)),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_parallel_residual": random_.choice((True, False)),
        "use_qk_norm": random_.choice((True, False)),
        "qk_layernorm": random_.choice((True, False)),
    }
    if family in RECURRENT or family == "gemma4_text":
        wanted |= _newest(family, random_, layers)
    if "kv_lora_rank" in known:
        wanted["num_key_value_heads"] = heads
        wanted.pop("head_dim")
    config = {}
    for key, value in wanted.items():
        for name in ALIASES.get(key, (key,)):
            if name in known and value is not None:
                config[name] = value
                break
    return config


def _newest(family: str, random_: random.Random, layers: int) -> dict[str, Any]:
    """Draws what the other families do not have: layers of several kinds, linear attention, Mamba-2, wide heads.

    The first layer is of the kind that it has in published models: before its adapters nothing is kept.
    """
    if family == "gemma4_text":
        return {
            "layer_types": [
                "sliding_attention",
                *random_.choices(("sliding_attention", "full_attention"), k=layers - 2),
                "full_attention",
            ],
            "hidden_size_per_layer_input": 0,
            "global_head_dim": random_.choice((40, 48)),
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": random_.choice((True, False)),
            "enable_moe_block": random_.choice((True, False)),
        }
    if family == "nemotron_h":
        return {
            "layers_block_type": [
                "linear_attention",
                *random_.choices(("linear_attention", "full_attention", "moe", "mlp"), k=layers - 1),
            ],
            "mamba_num_heads": 4 * random_.randint(2, 4),
            "mamba_head_dim": random_.choice((8, 16, 24)),
            "n_groups": random_.choice((1, 2, 4)),
            "ssm_state_size": random_.choice((8, 16, 24)),
            "chunk_size": random_.choice((8, 16)),
            "moe_shared_expert_intermediate_size": 8 * random_.randint(3, 12),
        }
    key_heads = random_.randint(2, 4)
    return {
        "layer_types": ["linear_attention", *random_.choices(("linear_attention", "full_attention"), k=layers - 1)],
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * random_.randint(2, 3),
        "linear_key_head_dim": random_.choice((8, 16, 24)),
        "linear_value_head_dim": random_.choice((8, 16, 24)),
    }


@dataclass
class Sample:
    """A small model."""

    config: Any
    shape: ModelShape
    seq_len: int
    rank: int

    def widths(self, regime: Regime) -> dict[str, float]:
        """Widths that the bytes of the complete model are proportional to."""
        once = self._widths_at(self.seq_len, regime)
        if self.shape.model_type not in RECURRENT:
            return once
        twice = self._widths_at(2 * self.seq_len, regime)
        return {name: 2 * width - once[name] for name, width in twice.items()}

    def _widths_at(self, seq_len: int, regime: Regime) -> dict[str, float]:
        rank = self.rank if regime.startswith("lora") else 0
        layer = layer_widths(self.shape, seq_len, rank=rank)
        ends = end_widths(self.shape, seq_len)
        return {f"layer {name}": self.shape.layers * width for name, width in layer.items()} | {
            f"ends {name}": width for name, width in ends.items()
        }


def lengths_of(family: str) -> tuple[int, ...]:
    """Tokens per sequence of the small models of a family; where it computes in chunks, at least two of them."""
    if family in DELTA:
        return (128, 192, 256)
    return (32, 64) if family in RECURRENT else (16, 32)


def samples_of(family: str) -> list[Sample]:
    """Draws as many small models as the widths need, and `CHECKS` more, which test the fit."""
    random_ = random.Random(0)  # noqa: S311
    chosen: list[Sample] = []
    rows: list[list[float]] = []
    checks = 0
    for _ in range(TRIES):
        config = CONFIG_MAPPING[family](**sample(family, random_))
        shape = ModelShape.from_config(config.to_dict())
        drawn = Sample(config, shape, random_.choice(lengths_of(family)), random_.choice((2, 4, 8)))
        row = list(drawn.widths("lora").values())
        is_new = np.linalg.matrix_rank(np.array([*rows, row])) > len(rows) - checks
        if is_new or checks < CHECKS:
            checks += not is_new
            rows.append(row)
            chosen.append(drawn)
    return chosen
