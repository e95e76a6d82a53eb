"""Makes the figure of docs/performance.md: where the milliseconds of a step go, measured and predicted.

    python docs/step_figure.py

The first bar is `step_ms` of benchmarks/results/gpu_h100.json. The second one is computed from it: what is not done
any more is counted in bytes, which the card moves at its measured bandwidth. Nothing of the second bar was measured.
"""

import json
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "benchmarks" / "results" / "gpu_h100.json"
PICTURE = Path(__file__).parent / "images" / "step.svg"
MICRO_BATCHES = 4
BYTES_OF_A_CAST = 6
"""4 of an fp32 weight are read, 2 of its bf16 copy are written."""
TOKENS, VOCABULARY = 4 * 2 * 2048, 128256
"""Tokens of a step, and the logits of each."""
BYTES_OF_A_LOSS = {"loss": 16, "element-wise operations and copies whose kernels are made from a lambda": 12}
"""What the loss moved per logit when it was measured, at least (`tests/recipe/test_fused_loss.py`): torch's kernel of
the softmax reads and writes fp32 twice, and the operations around it were kernels of their own."""
BYTES_OF_A_COMPILED_LOSS = 6
"""Since then Inductor writes one kernel that reads the logits twice and writes them once, in bf16."""
NAMES = {
    "matrix products": "matrix products",
    "element-wise operations and copies whose kernels are made from a lambda": "element-wise and copies (lambda)",
    "other copies and casts": "other copies and casts",
    "attention": "attention",
    "other element-wise operations": "other element-wise",
    "optimizer and clipping": "optimizer and clipping",
    "Triton kernels": "Triton kernels",
    "loss": "loss",
}
COLOURS = ("#3b6fb6", "#7aa6d8", "#d9822b", "#5a9e6f", "#a3c9a8", "#8a6fb0", "#c4b3da", "#b0b0b0")
SCALE = 2.2
"""Pixels per millisecond."""


def cast_weights() -> int:
    """Return the number of weights of Llama 3.2 1B that autocast casts: those of linear layers, the head included."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


def predicted(document: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the parts of a step in ms with one cast of the weights per step, and with the compiled loss.

    Args:
        document (`dict`): a result file with `step_ms` and the measured bandwidth.
    """
    bytes_per_ms = document["measured"]["memory_tb_s"] * 1e12 / 1e3
    casts = (MICRO_BATCHES - 1) * BYTES_OF_A_CAST * cast_weights()
    logits = TOKENS * VOCABULARY
    less = {name: moved * logits for name, moved in BYTES_OF_A_LOSS.items()}
    less["other copies and casts"] = casts
    less["Triton kernels"] = -BYTES_OF_A_COMPILED_LOSS * logits
    parts = dict(document["step_ms"])
    for name, moved in less.items():
        # The softmax was measured to take a little less than its bytes, at the measured bandwidth
        saved_ms = min(moved / bytes_per_ms, parts[name])
        for changed in (name, "whole", "busy"):
            parts[changed] -= saved_ms
    return parts


def bar(parts: dict[str, float], title: str, top: int) -> list[str]:
    """Return the elements of one bar, with its title above it.

    Args:
        parts (`dict[str, float]`): milliseconds by part, with `whole` and `busy`.
        title (`str`): what it shows.
        top (`int`): pixels from the top of the picture.
    """
    lines = [f'<text x="10" y="{top}" font-weight="bold">{title}: {parts["whole"]:.0f} ms</text>']
    left = 10.0
    for (name, _), colour in zip(NAMES.items(), COLOURS, strict=True):
        width = SCALE * parts[name]
        if not width:
            continue
        lines.append(f'<rect x="{left:.1f}" y="{top + 8}" width="{width:.1f}" height="34" fill="{colour}"/>')
        lines.append(f'<text x="{left + 3:.1f}" y="{top + 30}" fill="white">{parts[name]:.0f}</text>')
        left += width
    idle = parts["whole"] - parts["busy"]
    width = SCALE * idle
    lines.append(f'<rect x="{left:.1f}" y="{top + 8}" width="{width:.1f}" height="34" fill="none" stroke="#888888"/>')
    lines.append(f'<text x="{left + 3:.1f}" y="{top + 30}">{idle:.0f}</text>')
    return lines


def picture(document: dict[str, dict[str, float]]) -> str:
    """Return the figure as SVG.

    Args:
        document (`dict`): a result file with `step_ms` and the measured bandwidth.
    """
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="780" height="240" font-family="sans-serif" font-size="12">',
        "<title>Where the milliseconds of a step of Llama 3.2 1B go on one H100</title>",
        '<rect width="780" height="240" fill="white"/>',
        *bar(document["step_ms"], "Measured on one H100, 27 November 2026", 20),
        *bar(predicted(document), "Predicted for this version from counted bytes, not measured", 90),
    ]
    for number, (name, colour) in enumerate(zip(NAMES.values(), COLOURS, strict=True)):
        x, y = 10 + 255 * (number % 3), 165 + 22 * (number // 3)
        lines.append(f'<rect x="{x}" y="{y - 11}" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 18}" y="{y}">{name}</text>')
    lines.append('<rect x="520" y="198" width="12" height="12" fill="none" stroke="#888888"/>')
    lines.append('<text x="538" y="209">the GPU waits</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(json.loads(RECORDED.read_text(encoding="utf-8"))), encoding="utf-8")
