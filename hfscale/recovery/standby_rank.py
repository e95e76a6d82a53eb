"""Runs a training script in a process that a standby launcher has forked, as `python -u SCRIPT` would.

`standby_rank.py SCRIPT …` or `standby_rank.py -m MODULE …`: the launcher runs this file with `runpy`.
"""

import atexit
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

from hfscale.core.progress_locks import own_progress_locks
from hfscale.recovery.rank_start import FOLDER, IN_RANK


def main() -> None:
    """Undo what the launcher has set, run the script, and do what the interpreter does at its end."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
    for name in ("PET_RUN_PATH", "PET_START_METHOD"):  # the launcher's own flags
        os.environ.pop(name, None)
    os.environ[IN_RANK] = "1"
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    paths = [
        path
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if path and path not in (*sys.path, FOLDER)
    ]
    sys.path[1:1] = paths  # that the launcher has added
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # torch and the standard library do that by themselves
    own_progress_locks()
    code: object = 0
    is_module = sys.argv[1] == "-m"
    del sys.argv[: 2 if is_module else 1]
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        sys.last_type = type(error)
        sys.last_value = error
        sys.last_traceback = error.__traceback__
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as ended:  # as Python does it
            code = ended.code
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()  # multiprocessing ends its processes without these
    if code:
        sys.exit(code)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
