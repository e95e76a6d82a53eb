"""Trains under a launcher; at step 8 one rank is killed or stopped, and the others wait in C for ever, as in NCCL.

accelerate launch … tests/workers/blocked.py RANK SIGNAL [cuda]

With `cuda` they wait in NCCL itself.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401


def block_in_c():
    """Never return, and run no Python code meanwhile: the thread waits for a mutex that it holds."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


if __name__ == "__main__":
    from tiny import tiny_trainer
    from transformers import TrainerCallback

    from hfscale import CommHealthCallback, SpotCheckpointCallback

    is_killed, on_gpu = sys.argv[2] == "SIGKILL", "cuda" in sys.argv

    class LoseRank(TrainerCallback):
        """Sends a signal to one rank, and blocks the others."""

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 8:
                if args.process_index == int(sys.argv[1]):
                    os.kill(os.getpid(), signal.Signals[sys.argv[2]])
                if not on_gpu:
                    block_in_c()

    health = CommHealthCallback(hang_after_s=None if is_killed else 2.0, on_hang="abort")
    tiny_trainer(
        "out", SpotCheckpointCallback(cloud=None), health, LoseRank(), max_steps=10, use_cpu=not on_gpu
    ).train()
