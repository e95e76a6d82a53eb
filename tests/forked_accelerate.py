"""A program `accelerate` for a folder in PATH, whose launcher and ranks are forks of the fork server.

What starts it, a script or `hfscale run`, is as a user has it; the imports of the launcher and of every rank, most of
the time of a short run, are those of the fork server. The program writes what it was asked for into its folder and
ends with the code that `ForkedAccelerate.attend` writes there. It handles no signal: `hfscale run` then passes a
signal on to the ranks.
"""

import json
import sys
from pathlib import Path

from fork_client import Job, fork_server

PROGRAM = """#!{python} -IS
import json, os, pathlib, sys, time
folder = pathlib.Path(__file__).parent
request = {{"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "out": os.path.realpath("/dev/fd/1")}}
(folder / "request.part").write_text(json.dumps(request))
(folder / "request.part").rename(folder / "request")
while not (folder / "ended").exists():
    time.sleep(0.02)
sys.exit(int((folder / "ended").read_text()))
"""


class ForkedAccelerate:
    """The program, and what it has started.

    Args:
        folder (`Path`): where the program is written; it serves one launch.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._job: Job | None = None
        program = folder / "accelerate"
        program.write_text(PROGRAM.format(python=sys.executable), encoding="utf-8")
        program.chmod(0o755)

    def attend(self) -> None:
        """Start what the program was asked for, and let the program end when that has ended; waits for neither."""
        request, ended = self._folder / "request", self._folder / "ended"
        if self._job is None and request.exists():
            asked = json.loads(request.read_text(encoding="utf-8"))
            assert asked["argv"][0] == "launch", asked["argv"]
            out = Path(asked["out"])
            places = {"cwd": Path(asked["cwd"]), "env": asked["env"], "out": out, "err": out}
            self._job = fork_server().start("launch", asked["argv"][1:], **places)
        if self._job is not None and not ended.exists() and fork_server().has_ended(self._job):
            part = self._folder / "ended.part"
            part.write_text(str(self._job.codes[0]), encoding="utf-8")
            part.rename(ended)

    def end(self) -> None:
        """Kill what still runs."""
        if self._job is not None:
            fork_server().kill(self._job)
