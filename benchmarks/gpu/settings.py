"""What the runner tells the process of a part, through its environment."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = os.environ.get("KIT_TINY") == "1"
"""Whether every part runs on a CPU in tiny shapes, which shows that it runs at all."""

TIMES_SLOWER = 1
"""Factor of all limits: a CPU of two busy cores takes longer to import and to start."""
if TINY:
    TIMES_SLOWER = 4

FOLDER_VARIABLE = "GPU_DAY_FOLDER"
GPUS_VARIABLE = "GPU_DAY_GPUS"
CARD_VARIABLE = "GPU_DAY_CARD"
NODE_VARIABLE = "GPU_DAY_NODE"
"""Rank of this node, address and port of the first one: `0,10.0.0.1,29500`."""

GPUS = int(os.environ.get(GPUS_VARIABLE, "0"))
"""GPUs of this machine; 0 with tiny shapes."""
ON_GPU = GPUS > 0
CARD = os.environ.get(CARD_VARIABLE) or None
"""The card's name in hardware.toml; `None` for a card that is not in it, and on a CPU."""

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "HFSCALE_CLOUD": "none",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    # Asked through NVML, torch opens no CUDA context to learn whether there is a GPU.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


def work_folder() -> Path:
    """Return the folder of the part's files, which the runner has made."""
    return Path(os.environ[FOLDER_VARIABLE])
