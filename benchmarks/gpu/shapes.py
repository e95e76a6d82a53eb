"""Models and data of the measurements: named shapes with random weights, and random tokens. Nothing is downloaded."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.settings import TINY, work_folder

LORA_RANK = 16
FIRST_TOKEN, LAST_TOKEN = 5, 4000
TINY_MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and the batches it is trained on."""

    config: dict[str, Any]
    """The keys of its `config.json`."""
    length: int = 2048
    """Tokens per sequence."""
    micro_batch: int = 2
    """Sequences per micro-batch."""
    accumulation: int = 4
    """Micro-batches per step."""
    lora: bool = False
    """Whether LoRA adapters of rank 16 on all linear layers are trained, instead of all weights."""
    recompute: bool = False
    """Whether activations are computed again in the backward pass."""
    steps: int = 25
    """Steps of a run: the first ten compile and warm up."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step on one GPU."""
        return self.length * self.micro_batch * self.accumulation

    @property
    def method(self) -> str:
        """What is trained, as results and tables name it."""
        if self.lora:
            return f"lora r={LORA_RANK}"
        return "full"


def _llama(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    key_value_heads: int,
    vocabulary: int,
    *,
    tied: bool = True,
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "vocab_size": vocabulary,
        "head_dim": hidden // heads,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }


_TWO_LAYERS_OF_QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 2,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_SHAPES = {
    "smollm2-135m": Shape(config=_llama(576, 1536, 30, 9, 3, 49152), micro_batch=4),
    "llama-1b": Shape(config=_llama(2048, 8192, 16, 32, 8, 128256)),
    "llama-3b": Shape(config=_llama(3072, 8192, 28, 24, 8, 128256), micro_batch=1, accumulation=8, recompute=True),
    "llama-8b": Shape(config=_llama(4096, 14336, 32, 32, 8, 128256, tied=False), lora=True, steps=16),
    "8-layers-of-8b": Shape(
        config=_llama(4096, 14336, 8, 32, 8, 128256, tied=False), length=8192, micro_batch=1, steps=16
    ),
    "qwen3-30b-2-layers": Shape(config=_TWO_LAYERS_OF_QWEN3_30B, length=4096, micro_batch=1),
}
NAMES = tuple(_SHAPES)


def shape_named(name: str) -> Shape:
    """Return a shape; with KIT_TINY=1 a tiny model of the same family.

    Args:
        name (`str`): One of `NAMES`.
    """
    shape = _SHAPES[name]
    if not TINY:
        return shape
    config = shape.config | TINY_MODEL
    if "num_experts" in config:
        config |= TINY_EXPERTS
    return replace(shape, config=config, length=64, micro_batch=2, accumulation=2, steps=4)


def config_folder(name: str) -> Path:
    """Return a folder with the config of a shape and the recipes' own small tokenizer.

    Args:
        name (`str`): One of `NAMES`.
    """
    from hfscale.recipe import corpus

    folder = work_folder() / f"config-{name}"
    if not folder.is_dir():
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(shape_named(name).config))
        corpus.default_tokenizer().save_pretrained(folder)
    return folder


def random_tokens(rows: int, length: int) -> np.ndarray:
    """Return random tokens, the same at each call.

    Args:
        rows (`int`): Number of sequences.
        length (`int`): Tokens per sequence.

    Returns:
        `np.ndarray`: [rows, length], int64.
    """
    return np.random.default_rng(0).integers(FIRST_TOKEN, LAST_TOKEN, (rows, length))


def tokens_file(length: int, *, documents: bool = False, rows: int = 512) -> Path:
    """Write random tokens as a file of documents, and return its path.

    Args:
        length (`int`): Tokens per row.
        documents (`bool`): Whether rows have random lengths of a sixteenth to the whole, to be packed.
        rows (`int`): Number of rows.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    kind = "rows"
    lengths = np.full(rows, length)
    if documents:
        kind = "documents"
        lengths = np.random.default_rng(1).integers(length // 16, length, rows)
    path = work_folder() / f"{kind}-{length}.parquet"
    if not path.is_file():
        tokens = random_tokens(rows, length)
        cut = [row[:end].tolist() for row, end in zip(tokens, lengths, strict=True)]
        parquet.write_table(pa.table({"input_ids": pa.array(cut, pa.list_(pa.int32()))}), path)
    return path
