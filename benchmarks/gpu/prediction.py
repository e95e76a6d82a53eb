"""What `hfscale estimate` says of a run that is measured."""

import json
import os
import subprocess
import sys

from benchmarks.gpu.settings import CARD, OFFLINE, ON_GPU, TIMES_SLOWER
from benchmarks.gpu.shapes import LORA_RANK, config_folder, shape_named

STAND_IN = "H100-80GB"
"""The card of which a CPU asks, to show that the command runs; what it answers is not reported."""


def predict(
    shape: str, *, compiled: bool | None = None, fused_loss: bool, processes: int = 1, zero: int = 0
) -> dict[str, float]:
    """Ask the planner for the speed and memory of a run on this card.

    Args:
        shape (`str`): The name of a shape.
        compiled (`bool`, *optional*): Whether layers are compiled; by default as recipes do.
        fused_loss (`bool`): Whether the loss is computed without all logits.
        processes (`int`): Number of GPUs.
        zero (`int`): What they shard: nothing (0) to parameters (3).

    Returns:
        `dict[str, float]`: `predicted_tokens_s` per GPU and `predicted_gib`; empty on a CPU, on a card that is not in
        hardware.toml, and where the planner does not know the model.
    """
    if ON_GPU and CARD is None:
        return {}
    of_shape = shape_named(shape)
    sequences = of_shape.micro_batch * of_shape.accumulation * processes
    options = {
        "--gpu": CARD or STAND_IN,
        "--gpus": processes,
        "--zero": zero,
        "--seq-len": of_shape.length,
        "--micro-batch": of_shape.micro_batch,
        "--global-batch": sequences,
    }
    if of_shape.lora:
        options |= {"--method": "lora", "--lora-rank": LORA_RANK}
    if of_shape.recompute:
        options["--activation-checkpointing"] = "full"
    words = [str(word) for option in options.items() for word in option]
    if fused_loss:
        words.append("--liger")
    if compiled is not None:
        words.append({True: "--compile", False: "--no-compile"}[compiled])
    config = config_folder(shape) / "config.json"
    command = [sys.executable, "-m", "hfscale", "estimate", str(config), *words, "--json"]
    environment = os.environ | OFFLINE
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60 * TIMES_SLOWER, check=False
    )
    if done.returncode:
        raise RuntimeError(f"hfscale estimate: {done.stderr.strip()}")
    if not ON_GPU:
        return {}
    found = json.loads(done.stdout)
    return {
        "predicted_tokens_s": round(found["tokens_per_s_per_gpu"]),
        "predicted_gib": round(found["memory_needed_gib"], 1),
    }
