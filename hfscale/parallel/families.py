"""Checks whether a model family supports the parallelism that was asked for (`hfscale.facts.parallel_families`)."""

from transformers import PreTrainedConfig

from hfscale.errors import UsageError
from hfscale.facts.parallel_families import (
    CONTEXT_PARALLEL_TESTED,
    CONTEXT_PARALLEL_UNSUPPORTED,
    PIPELINE_TESTED,
    PIPELINE_UNSUPPORTED,
    SEQUENCE_PARALLEL_TESTED,
    TENSOR_PARALLEL_UNSUPPORTED,
)
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)


def check_matrices(model_type: str, tp: int) -> None:
    """Make sure that a family's matrices can be cut over `tp` ranks.

    Raises:
        UsageError: its plan is known to go wrong.
    """
    if tp > 1 and model_type in TENSOR_PARALLEL_UNSUPPORTED:
        raise UsageError(
            f"--tp_size is {tp}: tensor parallelism does not work with {model_type} "
            f"({TENSOR_PARALLEL_UNSUPPORTED[model_type]}); set --tp_size 1"
        )


def check_sequences(model_type: str, tp: int) -> None:
    """Make sure that sequence parallelism can be carried out.

    Raises:
        UsageError: there are no ranks to share a sequence, or the family was not proven to compute the same so.
    """
    if tp == 1:
        raise UsageError("--sequence_parallel shares sequences among the ranks of --tp_size, which is 1: leave it out")
    if model_type not in SEQUENCE_PARALLEL_TESTED:
        raise UsageError(
            f"--sequence_parallel was not shown to compute the same with {model_type}: leave it out (it is for "
            f"{', '.join(sorted(SEQUENCE_PARALLEL_TESTED)[:12])} ...: hfscale/facts/parallel_families.py)"
        )


def check_contexts(config: PreTrainedConfig, cp: int) -> None:
    """Make sure that a model computes the same when each rank has a part of every sequence.

    Raises:
        UsageError: its family was not proven to, or its angles depend on the longest position that a rank sees.
    """
    if config.model_type in CONTEXT_PARALLEL_UNSUPPORTED:
        reason = CONTEXT_PARALLEL_UNSUPPORTED[config.model_type]
        raise UsageError(f"cp_size {cp}: sequences of {config.model_type} cannot be cut: {reason}; set --cp_size 1")
    if config.model_type not in CONTEXT_PARALLEL_TESTED:
        raise UsageError(
            f"cp_size {cp} was not shown to compute the same with {config.model_type}: set --cp_size 1 (it is for "
            f"{', '.join(sorted(CONTEXT_PARALLEL_TESTED)[:12])} ...: hfscale/facts/parallel_families.py)"
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
    if model_type in PIPELINE_UNSUPPORTED:
        raise UsageError(
            f"{model_type} cannot be cut into pipeline stages ({PIPELINE_UNSUPPORTED[model_type]}): set --pp_size 1"
        )
    if model_type not in PIPELINE_TESTED:
        logger.warning(
            "%s was never compared, cut into stages, with the model in one piece: hold the first losses against a run "
            "with --pp_size 1",
            model_type,
        )
