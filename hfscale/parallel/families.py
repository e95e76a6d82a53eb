"""Which families have been compared, cut into stages, with the model in one piece, and which cannot be cut."""

from transformers import PreTrainedConfig

from hfscale.errors import UsageError
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

PROVEN = frozenset(
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
"""Families whose stages compute what the whole does: tests/test_parallel_families.py."""

UNCUTTABLE = {
    "deepseek_v4": "its layers hand on several streams of hidden states",
    "gemma3n_text": "each of its layers embeds the tokens anew",
    "gemma4_text": "each of its layers embeds the tokens anew",
    "glm_moe_dsa": "its layers hand on more than hidden states",
    "hrm_text": "it is no stack of layers",
    "hy_v4": "its layers hand on several streams of hidden states",
    "inkling2_text": "its decoder looks into every layer",
    "longcat_flash": "it is no stack of layers",
    "nanochat": "it uses its last norm in front of the layers too",
}
"""Families with a tensor-parallel plan whose stages would not compute what the whole does, with the reason."""


MATRICES_UNCUTTABLE = {
    "apertus": "its activation has parameters, of whose gradient each rank would have a part",
    "doge": "transformers' plan cuts dt_proj and leaves whole what meets its output",
    "dots3_note_text": "transformers' plan reads one size of its config that differs between its layers",
    "inkling_text": "an assertion of DTensor fails in its forward pass",
    "llama4_text": "it adds in place to an output that transformers' plan makes a view",
}
"""Families whose tensor-parallel plan in transformers 5.23 does not compute what the whole model does, or nothing."""

SEQUENCES_PROVEN = PROVEN - MATRICES_UNCUTTABLE.keys()
"""Families that compute the same with sequence parallelism: tests/test_parallel_sequence.py."""


CONTEXTS_UNCUTTABLE = {
    "doge": "it makes a mask of its own values",
    "inkling_text": "its attention has a bias by distance",
    **dict.fromkeys(
        ("axk2", "deepseek_v32", "dots3_note_text", "minimax_m3_vl_text"), "it chooses keys by an indexer"
    ),
    **dict.fromkeys(
        ("jamba", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
        "it has layers that carry a state along the sequence",
    ),
}
"""Families of which a rank with a part of the sequence would not compute what the whole does, with the reason."""

CONTEXTS_PROVEN = (PROVEN | {"gpt2", "gpt_bigcode"}) - CONTEXTS_UNCUTTABLE.keys()
"""Families that compute the same with each sequence cut over ranks: tests/test_parallel_context.py."""


def check_matrices(model_type: str, tp: int) -> None:
    """Make sure that a family's matrices can be cut over `tp` ranks.

    Raises:
        UsageError: its plan is known to go wrong.
    """
    if tp > 1 and model_type in MATRICES_UNCUTTABLE:
        raise UsageError(
            f"tp_size {tp}: the matrices of {model_type} cannot be cut: {MATRICES_UNCUTTABLE[model_type]}; set "
            "--tp_size 1"
        )


def check_sequences(model_type: str, tp: int) -> None:
    """Make sure that sequence parallelism can be carried out.

    Raises:
        UsageError: there are no ranks to share a sequence, or the family was not proven to compute the same so.
    """
    if tp == 1:
        raise UsageError("--sequence_parallel shares sequences among the ranks of --tp_size, which is 1: leave it out")
    if model_type not in SEQUENCES_PROVEN:
        raise UsageError(
            f"--sequence_parallel was not shown to compute the same with {model_type}: leave it out (it is for "
            f"{', '.join(sorted(SEQUENCES_PROVEN)[:12])} ...: hfscale/parallel/families.py)"
        )


def check_contexts(config: PreTrainedConfig, cp: int) -> None:
    """Make sure that a model computes the same when each rank has a part of every sequence.

    Raises:
        UsageError: its family was not proven to, or its angles depend on the longest position that a rank sees.
    """
    if config.model_type in CONTEXTS_UNCUTTABLE:
        reason = CONTEXTS_UNCUTTABLE[config.model_type]
        raise UsageError(f"cp_size {cp}: sequences of {config.model_type} cannot be cut: {reason}; set --cp_size 1")
    if config.model_type not in CONTEXTS_PROVEN:
        raise UsageError(
            f"cp_size {cp} was not shown to compute the same with {config.model_type}: set --cp_size 1 (it is for "
            f"{', '.join(sorted(CONTEXTS_PROVEN)[:12])} ...: hfscale/parallel/families.py)"
        )
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    for kind in sorted(kinds & {"dynamic", "longrope"}):
        raise UsageError(
            f"cp_size {cp}: rope_type {kind} depends on the longest position, which only one rank of a sequence has; "
            "set --cp_size 1"
        )


def check_family(model_type: str) -> None:
    """Say before a model is cut into stages what is known of its family.

    Raises:
        UsageError: it cannot be cut.
    """
    if model_type in UNCUTTABLE:
        raise UsageError(f"{model_type} cannot be cut into stages: {UNCUTTABLE[model_type]}; set --pp_size 1")
    if model_type not in PROVEN:
        logger.warning(
            "%s was never compared, cut into stages, with the model in one piece: hold the first losses against a run "
            "with --pp_size 1",
            model_type,
        )
