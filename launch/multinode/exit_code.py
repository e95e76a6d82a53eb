r"""Run `accelerate launch` or `torchrun` and end with the exit code of the training, which both turn into 1.

    python launch/multinode/exit_code.py accelerate launch --config_file accelerate_configs/ddp.yaml \
        recipes/ddp/train.py
    python launch/multinode/exit_code.py torchrun --nproc-per-node 8 recipes/ddp/train.py

When: wherever something decides by the exit code whether to start the job again (Slurm, Kubernetes, SkyPilot).
`accelerate.sh` and `torchrun.sh` beside this file use it. Edit: nothing.

    0    trained to the end                       75   preempted or stopped by a signal: the same command continues
    2    a flag, file or config is wrong,         130  Ctrl-C
         or a package is missing
    any other: what the first process that failed ended with (128 + n: killed by signal n)

The launcher runs inside this process, so a signal sent to it reaches the launcher, which passes it to the workers and
waits TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds (30 by default) before it kills them. SIGUSR1, which Slurm can send ahead
of a time limit and which would kill a launcher, is taken for SIGTERM.
"""

import os
import signal
import sys

PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: "try again later"


def main() -> int:
    launcher, arguments = sys.argv[1:2], sys.argv[2:]
    if launcher == ["accelerate"] and arguments[:1] == ["launch"]:
        start, arguments = accelerate_launch, arguments[1:]
    elif launcher == ["torchrun"]:
        start = torchrun
    else:
        sys.stderr.write("exit_code.py: error: give a launcher: accelerate launch … or torchrun …\n")
        return 2
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        start(arguments)
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except (SignalException, UnboundLocalError) as error:
        # A signal landing on the first line of torch's timing of a call leaves its `start` unset: UnboundLocalError.
        stopped = error if isinstance(error, SignalException) else error.__context__
        if not isinstance(stopped, SignalException):
            raise
        return 130 if stopped.sigval == signal.SIGINT else PREEMPTED
    return 0


def accelerate_launch(arguments: list[str]) -> None:
    from accelerate.commands.launch import launch_command, launch_command_parser

    launch_command(launch_command_parser().parse_args(arguments))


def torchrun(arguments: list[str]) -> None:
    from torch.distributed.run import main as run

    run(arguments)


if __name__ == "__main__":
    sys.exit(main())
