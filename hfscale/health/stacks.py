"""What the threads of this process are doing, read from outside them."""

import sys
import threading
import traceback
from types import FrameType

COMPILING = ("torch/_dynamo/", "torch/_inductor/", "torch/utils/cpp_extension", "/triton/compiler/")
"""Files on the stack of a thread that compiles: rare, and rightly slow."""
_TRAINER = "transformers/trainer"
SAVING = ("_save_checkpoint", "save_model", "on_save", "_save_optimizer_and_scheduler")
EVALUATING = ("evaluate", "predict", "evaluation_loop", "on_evaluate")
"""Functions of Trainer and events of its callbacks, by name: nothing is called."""


def frames_of(thread_id: int) -> list[FrameType]:
    """The frames of a thread, innermost first; empty where it has ended."""
    frame, frames = sys._current_frames().get(thread_id), []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def occupation(frames: list[FrameType]) -> str | None:
    """What keeps a thread busy that may take long: `compiling`, `saving`, `evaluating`; None: nothing of the kind."""
    for frame in frames:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if any(part in file for part in COMPILING):
            return "compiling"
        if _TRAINER in file or name.startswith("on_"):
            if name in SAVING:
                return "saving"
            if name in EVALUATING:
                return "evaluating"
    return None


def place(frames: list[FrameType]) -> str:
    """Where a thread is, in a few words: the innermost frame outside torch and the standard library's waiting."""
    for frame in frames:
        file = frame.f_code.co_filename
        if "/torch/" not in file and not file.endswith(("threading.py", "selectors.py", "contextlib.py", "queue.py")):
            return f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
    return "unknown"


def all_stacks() -> str:
    """The stacks of all threads of this process, as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for thread_id, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(thread_id, thread_id)}\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(parts)
