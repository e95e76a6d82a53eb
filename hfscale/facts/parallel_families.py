"""Which model families were tested under which kind of parallelism in `ParallelTrainer`, and which do not work.

The keys are transformers' `model_type`. The tests named below compare losses and gradients with those of the model in
one piece.
"""

PIPELINE_TESTED = frozenset(
    (
        "afmoe",
        "apertus",
        "arcee",
        "aria_text",
        "axk1",
        "axk2",
        "beam",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cwm",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "doge",
        "dots1",
        "dots3_note_text",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "exaone_moe",
        "flex_olmo",
        "flint",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma4_unified_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_neox",
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_moe",
        "hy_v3",
        "hyperclovax",
        "inkling_text",
        "internlm3",
        "iquestcoder",
        "jais2",
        "jamba",
        "kolibri1",
        "laguna",
        "llama",
        "llama4_text",
        "mellum",
        "mimo_v2_flash",
        "minicpm3",
        "minimax",
        "minimax_m2",
        "minimax_m3_vl_text",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "nemotron",
        "nemotron_h",
        "olmo",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "olmoe",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "seed_oss",
        "smollm3",
        "solar_open",
        "starcoder2",
        "vaultgemma",
        "youtu",
    )
)
"""Families whose pipeline stages compute the same as the model in one piece (tests/test_parallel_families.py)."""

PIPELINE_UNSUPPORTED = {
    "deepseek_v4": "its layers pass on several streams of hidden states",
    "gemma3n_text": "each of its layers embeds the tokens again",
    "gemma4_text": "each of its layers embeds the tokens again",
    "glm_moe_dsa": "its layers pass on more than hidden states",
    "hrm_text": "it is not a sequence of layers",
    "hy_v4": "its layers pass on several streams of hidden states",
    "inkling2_text": "its decoder reads attributes of every layer",
    "longcat_flash": "it is not a sequence of layers",
    "nanochat": "it also applies its last norm before the layers",
}
"""Families with a tensor-parallel plan whose stages would not compute the same as the model in one piece -> the
reason."""

TENSOR_PARALLEL_UNSUPPORTED = {
    "apertus": "its activation has parameters, and each rank would have only a part of their gradient",
    "doge": "transformers' plan splits dt_proj, but not what its output is combined with",
    "dots3_note_text": "transformers' plan reads a single value of a size that differs between its layers",
    "inkling_text": "an assertion of DTensor fails in its forward pass",
    "llama4_text": "it adds in place to an output that transformers' plan turns into a view",
}
"""Families whose tensor-parallel plan in transformers 5.23 fails or computes something else than the model in one
piece -> the reason."""

SEQUENCE_PARALLEL_TESTED = PIPELINE_TESTED - TENSOR_PARALLEL_UNSUPPORTED.keys()
"""Families that compute the same with sequence parallelism (tests/test_parallel_sequence.py)."""

CONTEXT_PARALLEL_UNSUPPORTED = {
    "doge": "it builds an attention mask from its values",
    "inkling_text": "its attention has a bias by distance",
    **dict.fromkeys(
        ("axk2", "deepseek_v32", "dots3_note_text", "minimax_m3_vl_text"), "it selects keys with an indexer"
    ),
    **dict.fromkeys(
        ("jamba", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
        "it has layers that carry a state along the sequence",
    ),
}
"""Families that do not compute the same when each rank has a part of every sequence -> the reason."""

CONTEXT_PARALLEL_TESTED = (PIPELINE_TESTED | {"gpt2", "gpt_bigcode"}) - CONTEXT_PARALLEL_UNSUPPORTED.keys()
"""Families that compute the same with context parallelism (tests/test_parallel_context.py)."""

TENSOR_PARALLEL_PLAN_MISSING = frozenset(
    (
        "bloom",
        "codegen",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_oss",
        "gptj",
        "hunyuan_v1_dense",
        "mpt",
        "opt",
        "persimmon",
        "stablelm",
    )
)
"""Families of `hfscale.facts.families` whose config class in transformers 5.23 has no `base_model_tp_plan`."""
