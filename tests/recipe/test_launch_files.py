"""Launch files: checked with the schemas of their readers, run with stubs of the cluster, launched on loopback."""

import ast
import contextlib
import importlib.metadata
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import psutil
import pytest
import torch.distributed.elastic.metrics.api as elastic_metrics
import yaml
from accelerate.commands.launch import launch_command_parser
from conftest import RECIPE, REPOSITORY, Finished, run_forked
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_recipe_ddp import QUICK
from test_recipe_yamls import command_problems, shell_commands
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import get_args_parser as torchrun_parser

import hfscale.recipe
from hfscale import latest_checkpoint
from hfscale.checkpoint.contents import SHARE_OF_FREE_MEMORY
from hfscale.checkpoint.store import verify
from hfscale.facts.models import catalogue_shape

LAUNCH = REPOSITORY / "launch"
FILES = sorted(path for path in LAUNCH.rglob("*") if path.is_file() and path.suffix != ".pyc")
SCRIPTS = [path for path in FILES if path.suffix in (".sh", ".sbatch")]
YAMLS = [path for path in FILES if path.suffix in (".yaml", ".yml")]
DOCKERFILES = [path for path in FILES if path.name == "Dockerfile"]
ACCELERATE, TORCHRUN = LAUNCH / "multinode" / "accelerate.sh", LAUNCH / "multinode" / "torchrun.sh"
EXIT_CODE, SBATCH, RUNPOD = (
    LAUNCH / "multinode" / "exit_code.py",
    LAUNCH / "slurm/train.sbatch",
    LAUNCH / "runpod/train.sh",
)
JOBSET, PYTORCHJOB = LAUNCH / "kubernetes" / "jobset.yaml", LAUNCH / "kubernetes" / "pytorchjob.yaml"
TRAINJOB = LAUNCH / "kubeflow" / "trainjob.yaml"
IN_PODS = (JOBSET, PYTORCHJOB, TRAINJOB)
SKYPILOT, SAGEMAKER = LAUNCH / "skypilot" / "spot.yaml", LAUNCH / "sagemaker" / "start.py"
DOCKERFILE = LAUNCH / "docker" / "Dockerfile"
WORKER = REPOSITORY / "tests" / "workers" / "two_nodes.py"
DEFAULT = ["recipes/sharded/train.py", "--config", "recipes/sharded/llama-3.1-8b-full.yaml"]
NODE = {"MAIN_IP": "127.0.0.1", "MAIN_PORT": "29500", "NODE_RANK": "1", "NODES": "2", "GPUS_PER_NODE": "8"}
JOB = {  # the variables that sbatch sets on the first of two nodes
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "gpu[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "64",
}
POD = {"PRIMARY_ADDR": "10.65.0.2", "PRIMARY_PORT": "29400", "NODE_RANK": "1", "NUM_NODES": "2", "NUM_TRAINERS": "8"}
KUBERNETES = "1.37"
EXTRAS = ("recipes", "trl", "wandb", "gpu")  # what a launch file that installs hfscale must ask for
OF_IMAGES = "vision"
"""The extra that only `recipes/vision` needs: the launch files say that it is to be added."""
PREEMPTED, WRONG_USAGE = 75, 2


def named(path: Path) -> str:
    """Return a path as commands write it."""
    return path.relative_to(REPOSITORY).as_posix()


def label(value: object) -> str:
    """Return a parameter as a test's name shows it."""
    return named(value) if isinstance(value, Path) else str(value)


def environment(extra: dict[str, str]) -> dict[str, str]:
    """Return this process's environment plus `extra`, without the variables of a cluster or a launcher."""
    foreign = ("SLURM_", "PET_", "ACCELERATE_", "SKYPILOT_", "TORCH_ELASTIC_", "NCCL_", "GLOO_", "PRIMARY_", "MASTER_")
    names = {*NODE, *POD, "CONFIG_FILE", "PYTHON", "RANK", "WORLD_SIZE"}
    return {
        key: value for key, value in os.environ.items() if not key.startswith(foreign) and key not in names
    } | extra


def run(*argv: str | Path, env: dict[str, str], cwd: Path = REPOSITORY) -> Finished:
    done = subprocess.run(
        list(map(str, argv)), env=environment(env), cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def executable(path: Path, text: str) -> str:
    """Write a program and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def fake_python(tmp_path: Path) -> str:
    """Return an interpreter that only prints its environment and arguments and exits with $FAKE_EXIT."""
    text = '#!/bin/bash\nenv\necho "PARENT=$PPID"\nprintf "> %s\\n" "$@"\nexit ${FAKE_EXIT:-0}\n'
    return executable(tmp_path / "bin" / "fake-python", text)


def composed(done: Finished) -> tuple[list[str], dict[str, str]]:
    """Return what the fake interpreter received: the launcher's command line and its environment.

    It must stand where the process was that this test has started: what signals that one, signals the launcher.
    """
    assert done.code == 0, done.err
    lines, supervised = done.out.splitlines(), None
    argv = [line[2:] for line in lines if line.startswith("> ")]
    if argv[:3] == ["-m", "hfscale", "run"]:
        supervised = argv[3 : (end := argv.index("--"))]
        argv = argv[end + 2 :]  # without the interpreter
    env = dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))
    assert Path(argv[0]).resolve() == EXIT_CODE
    assert env["PARENT"] == env.get("SRUN", str(os.getpid()))
    has_token = env.get("HFSCALE_RUN_TOKEN") is not None
    assert (supervised is not None) == (has_token or env["NODES"] == "1")
    if supervised and env["NODES"] != "1":
        port = int(env.get("RUN_PORT", int(env["MAIN_PORT"]) + 1))
        rendezvous = ["--rendezvous", f"{env['MAIN_IP']}:{port}"]
        assert supervised == ["--nodes", env["NODES"], "--node-rank", env["NODE_RANK"], *rendezvous]
    return argv[1:], env


def accelerate_command(node: dict[str, str], *script: str, config: str = "accelerate_configs/fsdp2.yaml") -> list[str]:
    """Return the command that these variables must give, on every platform."""
    processes = int(node["NODES"]) * int(node["GPUS_PER_NODE"])
    return [
        "accelerate",
        "launch",
        "--config_file",
        config,
        "--num_machines",
        node["NODES"],
        "--machine_rank",
        node["NODE_RANK"],
        "--main_process_ip",
        node["MAIN_IP"],
        "--main_process_port",
        node["MAIN_PORT"],
        "--num_processes",
        str(processes),
        "--deepspeed_multinode_launcher",
        "standard",
        *(script or DEFAULT),
    ]


# --- every file ------------------------------------------------------------------------------------------------------


def header(path: Path) -> str:
    """Return the comment or docstring at the head of a file."""
    text = path.read_text(encoding="utf-8").removeprefix("#!/usr/bin/env bash\n")
    if path.suffix == ".py":
        return text.split('"""')[1]
    if path.suffix == ".json":
        return json.loads(text)["description"]
    return re.match(r"(#.*\n)*", text)[0]


def repository_paths(text: str) -> list[str]:
    """Return the words that look like a path of this repository or of its copy in the image."""
    folders = "launch|recipes|accelerate_configs|ds_configs"
    return re.findall(rf"(?<![\w./~-])(?:/workspace/)?((?:{folders})/[\w./-]*\w)", text)


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix != ".md"], ids=named)
def test_header_says_when_and_what_to_edit_and_gives_the_command(path):
    text = header(path)
    assert "When:" in text
    assert "Edit" in text
    assert named(path) in text or named(path.with_suffix("")) in text


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix not in (".md", ".dockerignore")], ids=named)
def test_a_file_that_has_not_run_where_it_belongs_says_so(path):
    rows = (LAUNCH / "README.md").read_text(encoding="utf-8").splitlines()
    (checked,) = [row.split("|")[-2] for row in rows if row.startswith(f"| [{path.relative_to(LAUNCH).as_posix()}]")]
    is_run = path.parent.name == "multinode"
    assert ("; not " in checked) != is_run
    if not is_run and path.suffix != ".json":  # whose head is shown by Grafana
        assert " has not " in header(path)


@pytest.mark.parametrize("path", FILES, ids=named)
def test_paths_named_exist(path):
    paths = repository_paths(path.read_text(encoding="utf-8"))
    assert [name for name in paths if not (REPOSITORY / name).exists()] == []


def test_a_wrong_path_is_found():
    text = 'x recipes/ddp/trian.py\n["/workspace/launch/a.sh"] launch/multinode.\n/opt/launch/x'
    assert repository_paths(text) == ["recipes/ddp/trian.py", "launch/a.sh", "launch/multinode"]


def test_readme_lists_every_file_and_its_commands_are_right():
    text = (LAUNCH / "README.md").read_text(encoding="utf-8")
    listed = {name for name in re.findall(r"\]\(([\w./-]+)\)", text) if not name.startswith("http")}
    files = {path.relative_to(LAUNCH).as_posix() for path in FILES if path.suffix not in (".md", ".dockerignore")}
    assert listed == files
    commands = list(shell_commands(text))
    assert commands
    assert [problem for command in commands for problem in command_problems(command)] == []


def test_a_scheduler_waits_longer_than_the_launcher():
    """The time that workers have to save must be shorter than the time until the launcher itself is killed."""
    timeouts = {re.search(r"SHUTDOWN_TIMEOUT:-(\d+)", path.read_text())[1] for path in (ACCELERATE, TORCHRUN)}
    timeouts.add(json.loads(sagemaker("--dry-run").out)["environment"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert len(timeouts) == 1
    sbatch = SBATCH.read_text()
    graces = [re.search(r"--signal=USR1@(\d+)", sbatch)[1], re.search(r"--wait=(\d+)", sbatch)[1]]
    graces += re.findall(r"--stop-timeout (\d+)", DOCKERFILE.read_text())
    graces += [pod["terminationGracePeriodSeconds"] for path in IN_PODS for pod in pods(path)]
    assert len(graces) == 7
    assert min(map(int, graces)) > int(timeouts.pop())


# --- shell -----------------------------------------------------------------------------------------------------------


def shell_texts() -> dict[str, str]:
    """Return every shell script, including those inside a YAML file."""
    texts = {named(path): path.read_text(encoding="utf-8") for path in SCRIPTS}
    for path in YAMLS:
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            for key in ("setup", "run"):
                if key in document:
                    texts[f"{named(path)}:{key}"] = f"#!/bin/bash\n{document[key]}"
    return texts


def shell_problems(text: str) -> str:
    """Return the findings of shellcheck and bash, except for files sourced on another machine (SC1090, SC1091)."""
    shellcheck = Path(sys.executable).parent / "shellcheck"
    found = [
        subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
        for command in ([shellcheck, "--format=gcc", "--exclude=SC1090,SC1091", "-"], ["bash", "-n"])
    ]
    return "".join(done.stdout + done.stderr for done in found)


@pytest.mark.parametrize("name", shell_texts())
def test_shell_is_clean(name):
    assert shell_problems(shell_texts()[name]) == ""


@pytest.mark.parametrize("line", ["echo $x", "if true; then", "cd x; ls"])
def test_bad_shell_is_found(line):
    assert shell_problems(f"#!/bin/bash\n{line}\n")


@pytest.mark.parametrize("script", SCRIPTS, ids=named)
def test_scripts_can_be_run(script):
    assert os.access(script, os.X_OK) or script.suffix == ".sbatch"


@pytest.mark.parametrize("script", [ACCELERATE, TORCHRUN], ids=named)
@pytest.mark.parametrize(
    ("change", "error"),
    [
        *(({name: ""}, f"{name} is not set") for name in NODE),
        ({"GPUS_PER_NODE": "eight"}, "GPUS_PER_NODE=eight is not a number"),
        ({"NODES": "0"}, "NODES=0"),
        ({"NODE_RANK": "2"}, "NODE_RANK=2: ranks of NODES=2 machines are 0 to 1"),
        ({"MAIN_PORT": "70000"}, "MAIN_PORT=70000 is not a port"),
    ],
    ids=label,
)
def test_bad_variables_are_named_in_one_line(script, change, error, fake_python):
    done = run(
        script, str(RECIPE), env=NODE | {"PYTHON": fake_python, "CONFIG_FILE": "accelerate_configs/ddp.yaml"} | change
    )
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith(f"{script.name}: error: {error}")


@pytest.mark.parametrize(
    ("script", "env", "error"),
    [
        *((RUNPOD, {name: ""}, f"train.sh: error: {name} is not set") for name in POD),
        *((SBATCH, {name: ""}, f"train.sbatch: error: {name} is not set") for name in JOB),
        (ACCELERATE, {"CONFIG_FILE": "no.yaml"}, "accelerate.sh: error: CONFIG_FILE=no.yaml does not exist"),
    ],
    ids=label,
)
def test_a_variable_that_a_platform_did_not_set_is_named_in_one_line(script, env, error, fake_python):
    given = {RUNPOD: POD, SBATCH: JOB, ACCELERATE: NODE}[script]
    done = run("bash", script, env=given | {"PYTHON": fake_python} | env)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith(error)


@pytest.mark.parametrize("script", [ACCELERATE, TORCHRUN], ids=named)
def test_a_flag_instead_of_the_script_is_refused(script, fake_python):
    config = {"PYTHON": fake_python, "CONFIG_FILE": "accelerate_configs/ddp.yaml"}
    done = run(script, "--max_steps", "2", env=NODE | config)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "the first argument, --max_steps, is no script" in done.err


def test_accelerate_sh_composes_the_command(fake_python):
    argv, env = composed(run(ACCELERATE, env=NODE | {"PYTHON": fake_python}))
    assert argv == accelerate_command(NODE)
    assert env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "100"
    parsed = launch_command_parser().parse_args(argv[2:])
    assert (parsed.num_processes, parsed.machine_rank, parsed.training_script) == (16, 1, DEFAULT[0])
    other = {
        "PYTHON": fake_python,
        "CONFIG_FILE": "accelerate_configs/ddp.yaml",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7",
    }
    argv, env = composed(run(ACCELERATE, "-m", "a.module", "--text", "two words", env=NODE | other))
    assert argv == accelerate_command(
        NODE, "-m", "a.module", "--text", "two words", config="accelerate_configs/ddp.yaml"
    )
    assert env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "7"


def test_torchrun_sh_composes_the_command(fake_python):
    argv, _ = composed(run(TORCHRUN, env=NODE | {"PYTHON": fake_python}))
    assert argv[0] == "torchrun"
    parsed = torchrun_parser().parse_args(argv[1:])
    node = (parsed.nnodes, parsed.node_rank, parsed.nproc_per_node, parsed.master_addr, parsed.master_port)
    assert node == ("2", 1, "8", "127.0.0.1", 29500)
    assert [parsed.training_script, *parsed.training_script_args] == [*DEFAULT, "--fsdp"]


def test_runpod_translates_its_variables(fake_python):
    node = {"MAIN_IP": "10.65.0.2", "MAIN_PORT": "29400", "NODE_RANK": "1", "NODES": "2", "GPUS_PER_NODE": "8"}
    argv, env = composed(run(RUNPOD, env=POD | {"PYTHON": fake_python}))
    assert argv == accelerate_command(node)
    assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == ("ens1", "ens1")
    old = {"MASTER_ADDR": "10.65.0.9", "MASTER_PORT": "1234", "PRIMARY_ADDR": "", "PRIMARY_PORT": ""}
    argv, _ = composed(run(RUNPOD, "recipes/ddp/train.py", env=POD | old | {"PYTHON": fake_python}))
    assert argv == accelerate_command(node | {"MAIN_IP": "10.65.0.9", "MAIN_PORT": "1234"}, "recipes/ddp/train.py")


# --- Slurm -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Return the environment of stubs of scontrol and srun, which run tasks locally and record their calls."""
    executable(
        tmp_path / "bin" / "scontrol",
        f"""#!/bin/bash
        echo "$*" >> {tmp_path}/scontrol
        if [[ $2 == hostnames ]]; then printf '127.0.0.1\\n127.0.0.2\\n'; fi
        if [[ $2 == job ]]; then echo "   JobState=${{FAKE_STATE:-RUNNING}} Reason=None"; fi""",
    )
    executable(
        tmp_path / "bin" / "srun",
        f"""#!/bin/bash
        echo "$*" > {tmp_path}/srun
        while [[ $1 == --* ]]; do shift; done
        export SRUN=$$
        for ((rank = 0; rank < SLURM_JOB_NUM_NODES; rank++)); do
          SLURM_PROCID=$rank "$@" > {tmp_path}/task-$rank 2>&1 & tasks[rank]=$!
        done
        highest=0
        for task in "${{tasks[@]}}"; do wait "$task"; code=$?; ((code > highest)) && highest=$code; done
        exit $highest""",
    )
    return JOB | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}


def test_slurm_starts_a_launcher_per_node(slurm, fake_python, tmp_path):
    config = {"PYTHON": fake_python, "CONFIG_FILE": "accelerate_configs/ddp.yaml"}
    done = run("bash", SBATCH, "recipes/ddp/train.py", "--text", "two words", env=slurm | config)
    assert done.code == 0, done.err
    assert "--ntasks-per-node=1 --cpus-per-task=64 --kill-on-bad-exit=0" in (tmp_path / "srun").read_text()
    for rank in (0, 1):
        argv, _ = composed(Finished(0, (tmp_path / f"task-{rank}").read_text(), ""))
        node = NODE | {"MAIN_PORT": "23456", "NODE_RANK": str(rank)}
        script = ("recipes/ddp/train.py", "--text", "two words")
        assert argv == accelerate_command(node, *script, config=config["CONFIG_FILE"])
    assert (tmp_path / "scontrol").read_text() == "show hostnames gpu[1-2]\n"


def test_slurm_starts_the_launchers_in_a_container(slurm, fake_python, tmp_path):
    config = {"PYTHON": fake_python, "CONFIG_FILE": "accelerate_configs/ddp.yaml"}
    container = {"CONTAINER_IMAGE": "/shared/a.sqsh", "CONTAINER_MOUNTS": "/data:/data,/runs:/runs"}
    done = run("bash", SBATCH, "recipes/ddp/train.py", env=slurm | config | container)
    assert done.code == 0, done.err
    here = REPOSITORY
    options = f"--container-image=/shared/a.sqsh --container-workdir={here} --no-container-entrypoint "
    assert f"{options}--container-mounts={here}:{here},/data:/data,/runs:/runs bash" in (tmp_path / "srun").read_text()
    alone = run("bash", SBATCH, "recipes/ddp/train.py", env=slurm | config | {"CONTAINER_MOUNTS": "/data:/data"})
    assert (alone.code, "CONTAINER_MOUNTS=/data:/data is given without" in alone.err) == (WRONG_USAGE, True)


# --- Hugging Face Jobs -----------------------------------------------------------------------------------------------


JOBS = LAUNCH / "huggingface" / "jobs.sh"
BUCKET = {"BUCKET": "me/runs", "IMAGE": "registry.example.com/hfscale:0.1.0", "DRY_RUN": "1", "HF_TOKEN": "planted"}


def test_hugging_face_jobs_reads_the_command():
    """Its own command line resolves the job, without a connection."""
    done = run(JOBS, env=BUCKET | {"HF": str(Path(sys.executable).parent / "hf")})
    assert done.code == 0, done.err
    job = dict(re.findall(r"^  (\w+) +(.+)$", done.out, re.MULTILINE))
    assert job["command"].split()[:2] == ["/workspace/launch/multinode/accelerate.sh", DEFAULT[0]]
    assert (job["flavor"], job["timeout"], job["attempts"]) == ("a100x8", "24h", "20")
    assert job["volumes"] == "hf://buckets/me/runs:/runs"
    assert "planted" not in done.out
    assert {"MAIN_IP=127.0.0.1", "NODES=1", "GPUS_PER_NODE=8"} <= set(re.findall(r"\w+=[\w./]+", done.out))


def test_islands_are_jobs_that_meet_in_a_network():
    several = {"ISLANDS": "2", "NETWORK_GROUP": "run-7", "HFSCALE_ISLAND_TOKEN": "planted"}
    done = run(JOBS, env=BUCKET | several | {"HF": str(Path(sys.executable).parent / "hf")})
    assert done.code == 0, done.err
    jobs = re.split(r"^(?=.*command)", done.out, flags=re.MULTILINE)[1:]
    assert len(jobs) == 2
    for island, job in enumerate(jobs):
        assert f"--islands 2 --island_rank {island} --output_dir /runs/llama-3.1-8b-full/island-{island}" in job
        assert '--island_rendezvous "${HF_NETWORK_GROUP_PREFIX}island-0:29600"' in job
        assert "run-7" in job
        assert re.search(rf"network_aliases +island-{island}$", job, re.MULTILINE)
    assert "planted" not in done.out


@pytest.mark.parametrize(
    ("change", "argv", "error"),
    [
        ({"ISLANDS": "0"}, [], "ISLANDS=0 is not a number from 1 to 99"),
        ({"ISLANDS": "2"}, [], "HFSCALE_ISLAND_TOKEN is not set"),
        ({"BUCKET": ""}, [], "BUCKET is not set"),
        ({"BUCKET": "runs"}, [], "BUCKET=runs is not OWNER/NAME"),
        ({"IMAGE": ""}, [], "IMAGE is not set"),
        ({}, ["recipes/ddp/train.py", "--output_dir", "runs/x"], "--output_dir does not lie in /runs"),
        ({}, ["recipes/ddp/train.py"], "--output_dir does not lie in /runs"),
    ],
)
def test_a_job_that_could_keep_nothing_is_refused(change, argv, error):
    done = run(JOBS, *argv, env=BUCKET | {"HF": "/nonexistent"} | change)
    assert done.code == WRONG_USAGE
    assert error in done.err


@pytest.mark.parametrize(
    ("code", "env", "requeues"),
    [
        (1, {}, 0),
        (1, {"MIN_RUN_S": "0"}, 1),
        (137, {"MIN_RUN_S": "0"}, 1),
        (1, {"MIN_RUN_S": "0", "MAX_RESTARTS": "7", "SLURM_RESTART_COUNT": "7"}, 0),
        (WRONG_USAGE, {"MIN_RUN_S": "0"}, 0),
        (PREEMPTED, {"SLURM_RESTART_COUNT": "500"}, 1),
        (PREEMPTED, {"FAKE_STATE": "CANCELLED"}, 0),
    ],
)
def test_slurm_requeues_a_job_after_a_preemption_and_after_a_late_failure(
    slurm, fake_python, tmp_path, code, env, requeues
):
    fakes = {"PYTHON": fake_python, "FAKE_EXIT": str(code)}
    env = slurm | fakes | env | {"CONFIG_FILE": "accelerate_configs/ddp.yaml"}
    assert run("bash", SBATCH, "recipes/ddp/train.py", env=env).code == code
    assert (tmp_path / "scontrol").read_text().count(f"requeue {JOB['SLURM_JOB_ID']}\n") == requeues


def test_slurm_options():
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SBATCH.read_text(), re.MULTILINE))
    assert len(options) == len(re.findall("^#SBATCH", SBATCH.read_text(), re.MULTILINE))
    wanted = {"requeue": "", "open-mode": "append", "signal": "USR1@120", "ntasks-per-node": "1"}
    assert {name: options.get(name) for name in wanted} == wanted


# --- YAML ------------------------------------------------------------------------------------------------------------

ANY_OBJECT, STRING, COUNT = {"type": "object"}, {"type": "string"}, {"type": "integer", "minimum": 0}
STRINGS = {"type": "array", "items": STRING, "minItems": 1}


def fields(required: str = "", /, **properties: Any) -> dict[str, Any]:
    """Return a schema of an object that has these fields and no others."""
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


# The parts of https://github.com/kubernetes-sigs/jobset/blob/main/api/jobset/v1alpha2/jobset_types.go in use here.
RULE = fields(
    "name action",
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    onJobFailureReasons={
        "type": "array",
        "items": {"enum": ["PodFailurePolicy", "BackoffLimitExceeded", "DeadlineExceeded"]},
    },
    onJobFailureMessagePatterns=STRINGS,
    targetReplicatedJobs=STRINGS,
)
JOBSET_SCHEMA = fields(
    "replicatedJobs",
    failurePolicy=fields(
        maxRestarts=COUNT,
        restartStrategy={"enum": ["Recreate", "BlockingRecreate"]},
        rules={"type": "array", "items": RULE},
    ),
    replicatedJobs={
        "type": "array",
        "items": fields("name template", name=STRING, replicas=COUNT, template=ANY_OBJECT),
    },
)
# https://www.kubeflow.org/docs/components/trainer/legacy-v1/reference/ and the models of kubeflow-training 1.9
REPLICAS = fields(
    "template",
    replicas=COUNT,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=ANY_OBJECT,
)
PYTORCHJOB_SCHEMA = fields(
    "pytorchReplicaSpecs",
    nprocPerNode={"type": "string", "pattern": "^([1-9][0-9]*|auto|cpu|gpu)$"},
    runPolicy=fields(
        backoffLimit=COUNT, cleanPodPolicy={"enum": ["Running", "All", "None"]}, ttlSecondsAfterFinished=COUNT
    ),
    pytorchReplicaSpecs=fields("Master", Master=REPLICAS, Worker=REPLICAS),
)
# The parts in use of the definitions of Kubeflow Trainer 2.3, trainer.kubeflow.org_trainjobs.yaml and
# trainer.kubeflow.org_trainingruntimes.yaml in charts/kubeflow-trainer/templates/crd/. It refuses these variables.
PET = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
TRAINJOB_SCHEMA = fields(
    "runtimeRef trainer",
    runtimeRef=fields(
        "name",
        name=STRING,
        apiGroup={"const": "trainer.kubeflow.org"},
        kind={"enum": ["TrainingRuntime", "ClusterTrainingRuntime"]},
    ),
    trainer=fields(
        image=STRING,
        command=STRINGS,
        args=STRINGS,
        numNodes={"type": "integer", "minimum": 0},
        numProcPerNode={"type": "integer", "minimum": 1},
    ),
)
RUNTIME_SCHEMA = fields(
    "mlPolicy template",
    mlPolicy=fields("torch", numNodes={"type": "integer", "minimum": 1}, torch=fields()),
    template=fields("spec", spec=JOBSET_SCHEMA),
)
# https://docs.skypilot.co/en/latest/reference/yaml-spec.html
EXIT_CODES = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 255}, "uniqueItems": True}
SKYPILOT_SCHEMA = fields(
    "name resources run",
    name=STRING,
    num_nodes={"type": "integer", "minimum": 1},
    workdir=STRING,
    secrets={"type": "object", "additionalProperties": {"type": "null"}},
    setup=STRING,
    run=STRING,
    resources=fields(
        "accelerators use_spot",
        accelerators={"type": "string", "pattern": r"^[\w-]+:\d+$"},
        use_spot={"const": True},
        disk_size={"type": "integer"},
        disk_tier={"enum": ["low", "medium", "high", "ultra", "best"]},
        job_recovery=fields(max_restarts_on_errors=COUNT, recover_on_exit_codes=EXIT_CODES),
    ),
    file_mounts={
        "type": "object",
        "additionalProperties": fields(
            name=STRING,
            source=STRING,
            store={"enum": ["s3", "gcs", "azure", "r2", "oci"]},
            mode={"enum": ["MOUNT", "COPY", "MOUNT_CACHED"]},
        ),
    },
)
ENVELOPE = fields(
    "apiVersion kind metadata spec", apiVersion=STRING, kind=STRING, metadata=ANY_OBJECT, spec=ANY_OBJECT
)


def validate(document: dict[str, Any]) -> None:
    """Check a YAML document with the schema of its reader; a document of an unknown kind is an error."""
    kind = (document.get("apiVersion"), document.get("kind"))
    if kind == (None, None):
        return jsonschema.validate(document, SKYPILOT_SCHEMA)
    if kind == ("jobset.x-k8s.io/v1alpha2", "JobSet"):
        jsonschema.validate(document, ENVELOPE)
        jsonschema.validate(document["spec"], JOBSET_SCHEMA)
        cores = [("batch/v1", "Job", job["template"]) for job in document["spec"]["replicatedJobs"]]
    elif kind == ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"):
        jsonschema.validate(document, ENVELOPE)
        jsonschema.validate(document["spec"], RUNTIME_SCHEMA)
        cores = [
            ("batch/v1", "Job", job["template"]) for job in document["spec"]["template"]["spec"]["replicatedJobs"]
        ]
    elif kind == ("trainer.kubeflow.org/v1alpha1", "TrainJob"):
        jsonschema.validate(document, ENVELOPE)
        jsonschema.validate(document["spec"], TRAINJOB_SCHEMA)
        cores = []
    elif kind == ("kubeflow.org/v1", "PyTorchJob"):
        jsonschema.validate(document, ENVELOPE)
        jsonschema.validate(document["spec"], PYTORCHJOB_SCHEMA)
        specs = document["spec"]["pytorchReplicaSpecs"].values()
        cores = [("v1", "PodTemplate", {"template": replicas["template"]}) for replicas in specs]
    else:
        cores = [(*kind, {key: value for key, value in document.items() if key not in ("apiVersion", "kind")})]
    for version, name, body in cores:
        whole = {"apiVersion": version, "kind": name, "metadata": {"name": "x"}} | body
        kubernetes_validate.validate(whole, KUBERNETES, strict=True)
    return None


def validate_all(text: str) -> None:
    for document in yaml.safe_load_all(text):
        validate(document)


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def spec(path: Path) -> dict[str, Any]:
    """Return the spec of the job, which is the last document of its file."""
    return documents(path)[-1]["spec"]


def jobset_of(path: Path) -> dict[str, Any]:
    """Return the JobSet's spec, which the controller of Kubeflow Trainer makes of the runtime and the TrainJob."""
    if path == JOBSET:
        return spec(path)
    jobset = documents(path)[-2]["spec"]["template"]["spec"]
    trainer = spec(path)["trainer"]
    (job,) = jobset["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    container["args"] = trainer["args"]
    job["template"]["spec"] |= {"parallelism": trainer["numNodes"], "completions": trainer["numNodes"]}
    return jobset


def pods(path: Path) -> list[dict[str, Any]]:
    if path == TRAINJOB:
        return [job["template"]["spec"]["template"]["spec"] for job in jobset_of(path)["replicatedJobs"]]
    if path == JOBSET:
        return [job["template"]["spec"]["template"]["spec"] for job in spec(path)["replicatedJobs"]]
    return [replicas["template"]["spec"] for replicas in spec(path)["pytorchReplicaSpecs"].values()]


@pytest.mark.parametrize("path", YAMLS, ids=named)
def test_yaml_fits_its_schema(path):
    assert documents(path)
    validate_all(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (JOBSET, "terminationGracePeriodSeconds: 120", "terminationGracePeriod: 120"),
        (JOBSET, "terminationGracePeriodSeconds: 120", "terminationGracePeriodSeconds: 2m"),
        (JOBSET, "action: FailJobSet", "action: FailJob"),
        (JOBSET, "restartStrategy:", "restartPolicy:"),
        (JOBSET, "podFailurePolicy:", "podFailurePolicies:"),
        (JOBSET, "accessModes: [", "accessMode: ["),
        (PYTORCHJOB, 'nprocPerNode: "8"', "nprocPerNode: 8"),
        (PYTORCHJOB, "restartPolicy: OnFailure", "restartPolicy: OnExit"),
        (PYTORCHJOB, "mountPath: /runs", "path: /runs"),
        (PYTORCHJOB, "apiVersion: kubeflow.org/v1", "apiVersion: kubeflow.org/v2"),
        (TRAINJOB, "numProcPerNode: 8", 'numProcPerNode: "8"'),
        (TRAINJOB, "numProcPerNode: 8", "nprocPerNode: 8"),
        (TRAINJOB, "torch: {}", "torch: {numProcPerNode: 8}"),  # in the runtime until 2.2
        (TRAINJOB, "action: FailJobSet", "action: FailJob"),
        (TRAINJOB, "kind: TrainingRuntime\n", "kind: Runtime\n"),
        (TRAINJOB, "mountPath: /runs", "path: /runs"),
        (TRAINJOB, "backoffLimit: 0", "backoffLimits: 0"),
        (SKYPILOT, "use_spot: true", "spot: true"),
        (SKYPILOT, "mode: MOUNT_CACHED", "mode: CACHED"),
        (SKYPILOT, "HF_TOKEN: null", "HF_TOKEN: hf_1234"),
        (SKYPILOT, "recover_on_exit_codes", "recover_on_exit_code"),
    ],
)
def test_a_wrong_yaml_is_found(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    errors = (jsonschema.ValidationError, kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError)
    with pytest.raises(errors):
        validate_all(text.replace(old, new))


def bytes_of_snapshots(config: Path) -> float:
    """Return the /dev/shm in which three snapshots of a recipe fit: its weights and AdamW's states in fp32."""
    shape = catalogue_shape(yaml.safe_load(config.read_text())["model_name_or_path"])
    return 3 * 12 * shape.total_parameters / SHARE_OF_FREE_MEMORY


def test_shared_memory_holds_the_snapshots_of_the_default_recipe():
    """By default the files start several nodes, which hold one snapshot more than a single one."""
    needed = bytes_of_snapshots(REPOSITORY / DEFAULT[2])
    for path in IN_PODS:
        for pod in pods(path):
            assert pod["containers"][0]["args"][:3] == DEFAULT
            (size,) = (v["emptyDir"]["sizeLimit"] for v in pod["volumes"] if "emptyDir" in v)
            assert size.endswith("Gi")
            assert needed < int(size[:-2]) * 2**30
            assert pod["containers"][0]["resources"]["limits"]["memory"] == "1000Gi"  # which shared memory counts in
    shm = re.search(r"--shm-size (\d+)g", DOCKERFILE.read_text())
    assert needed < int(shm[1]) * 2**30


@pytest.mark.parametrize("path", IN_PODS, ids=named)
def test_pods_have_shared_memory_a_shared_volume_and_a_signalled_launcher(path):
    claims = {
        document["metadata"]["name"] for document in documents(path) if document["kind"] == "PersistentVolumeClaim"
    }
    for pod in pods(path):
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        output_dir = Path(container["args"][container["args"].index("--output_dir") + 1])
        shared = volumes[mounts[f"/{output_dir.parts[1]}"]]
        assert shared["persistentVolumeClaim"]["claimName"] in claims
        assert re.search(r":(?!latest)[\w.-]+$", container["image"])
        uid = int(re.search(r"--uid (\d+)", DOCKERFILE.read_text())[1])
        of_pod = pod["securityContext"]
        assert (of_pod["fsGroup"], of_pod["runAsUser"], of_pod["runAsNonRoot"]) == (uid, uid, True)
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


def run_container(container: dict[str, Any], env: dict[str, str]) -> Finished:
    """Run a container's command here, with `$(NAME)` substituted as the kubelet does."""
    expanded = [
        re.sub(r"\$\((\w+)\)", lambda match: env[match[1]], word).replace("/workspace", str(REPOSITORY))
        for word in [*container["command"], *container["args"]]
    ]
    return run(*expanded, env=env)


def test_jobset_starts_a_launcher_per_pod(fake_python):
    name = documents(JOBSET)[-1]["metadata"]["name"]
    (job,) = spec(JOBSET)["replicatedJobs"]
    ((container,),) = [pod["containers"] for pod in pods(JOBSET)]
    env = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    env["NODE_RANK"] = "1"  # the second pod
    rank = next(item for item in container["env"] if item["name"] == "NODE_RANK")
    assert "job-completion-index" in rank["valueFrom"]["fieldRef"]["fieldPath"]
    assert env["MAIN_IP"] == f"{name}-{job['name']}-0-0.{name}"
    counts = {job["template"]["spec"][key] for key in ("parallelism", "completions")}
    assert (counts, container["resources"]["limits"]["nvidia.com/gpu"]) == (
        {int(env["NODES"])},
        int(env["GPUS_PER_NODE"]),
    )
    argv, _ = composed(run_container(container, env | {"PYTHON": fake_python}))
    assert argv == accelerate_command(env, *container["args"])
    assert container["args"][:3] == DEFAULT


def test_trainjob_starts_a_launcher_per_pod(fake_python):
    """The variables are those that the controller of Kubeflow Trainer sets (pkg/runtime/framework/plugins/torch)."""
    (*_, runtime, job) = documents(TRAINJOB)
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (replicated,) = jobset_of(TRAINJOB)["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert replicated["template"]["spec"]["completionMode"] == "Indexed"
    (container,) = pods(TRAINJOB)[0]["containers"]
    assert (replicated["name"], container["name"]) == ("node", "node")
    assert not {variable["name"] for variable in container["env"]} & set(PET)
    trainer = job["spec"]["trainer"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    counts = (str(trainer["numNodes"]), str(trainer["numProcPerNode"]))
    controller = dict(zip(PET, (*counts, "1", "hfscale-node-0-0.hfscale", "29500"), strict=True))
    argv, env = composed(run_container(container, controller | {"PYTHON": fake_python}))
    node = NODE | {"MAIN_IP": "hfscale-node-0-0.hfscale"}
    assert argv == accelerate_command(node, *container["args"])
    assert env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "100"
    with_token = controller | {"PYTHON": fake_python, "HFSCALE_RUN_TOKEN": "secret"}
    assert composed(run_container(container, with_token))[0] == argv  # under `hfscale run`, which `composed` checks


def jobset_action(path: Path, message: str, reason: str = "PodFailurePolicy") -> str:
    """Return the action of JobSet for a failure that the Job controller reports with this message."""
    for rule in jobset_of(path)["failurePolicy"]["rules"]:
        patterns = rule["onJobFailureMessagePatterns"]
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize("path", [JOBSET, TRAINJOB], ids=named)
def test_jobset_distinguishes_preemptions_from_failures(path):
    """The messages are Kubernetes' own: https://kubernetes.io/docs/tasks/job/pod-failure-policy/."""
    (job,) = jobset_of(path)["replicatedJobs"]
    ((container,),) = [pod["containers"] for pod in pods(path)]
    named_in_rules = {
        rule["onExitCodes"]["containerName"] for rule in job["template"]["spec"]["podFailurePolicy"]["rules"][1:]
    }
    assert named_in_rules == {container["name"]}
    rules = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["FailJob"] * 3
    assert [rule["onExitCodes"]["values"] for rule in rules[1:]] == [[PREEMPTED], [WRONG_USAGE]]
    exited = (
        "Container trainer for pod ns/hfscale-node-0-1-x2v9p failed with exit code {} matching FailJob rule at index 1"
    )
    assert jobset_action(path, exited.format(PREEMPTED)) == "RestartJobSetAndIgnoreMaxRestarts"
    evicted = "Pod default/hfscale-node-0-0-75abc has condition DisruptionTarget matching FailJob rule at index 0"
    assert jobset_action(path, evicted) == "RestartJobSetAndIgnoreMaxRestarts"
    assert jobset_action(path, exited.format(WRONG_USAGE)) == "FailJobSet"
    assert (
        jobset_action(path, "Job has reached the specified backoff limit", "BackoffLimitExceeded") == "RestartJobSet"
    )


def test_pytorchjob_starts_a_launcher_per_pod(fake_python):
    """The variables are those that the operator sets in the first worker of a job of two nodes."""
    job = spec(PYTORCHJOB)
    master, worker = job["pytorchReplicaSpecs"]["Master"], job["pytorchReplicaSpecs"]["Worker"]
    assert master["template"] == worker["template"]
    assert {master["restartPolicy"], worker["restartPolicy"]} == {"OnFailure"}
    (container,) = pods(PYTORCHJOB)[1]["containers"]
    assert container["name"] == "pytorch"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["nprocPerNode"])
    operator = {
        "MASTER_ADDR": "hfscale-master-0",
        "MASTER_PORT": "23456",
        "RANK": "1",
        "WORLD_SIZE": "16",
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": job["nprocPerNode"],
    }
    argv, _ = composed(run_container(container, operator | {"PYTHON": fake_python}))
    node = NODE | {"MAIN_IP": "hfscale-master-0", "MAIN_PORT": "23456"}
    assert argv == accelerate_command(node, *container["args"])


def test_skypilot_sets_up_and_starts_a_launcher_per_node(fake_python, tmp_path):
    (task,) = documents(SKYPILOT)
    env = {
        "HOME": str(tmp_path),
        "PYTHON": fake_python,
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    executable(tmp_path / ".local" / "bin" / "uv", '#!/bin/bash\necho "$@"\n')
    executable(tmp_path / "hfscale" / "bin" / "activate", "")
    assert run("bash", "-c", task["setup"], env=env).out == f"pip install -c constraints.txt .[{','.join(EXTRAS)}]\n"
    argv, _ = composed(run("bash", executable(tmp_path / "run", task["run"]), env=env))
    script = [*DEFAULT, "--output_dir", "/runs/llama-3.1-8b-full"]
    assert argv == accelerate_command(NODE | {"MAIN_IP": "10.0.0.7"}, *script)
    assert "/runs" in task["file_mounts"]
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [PREEMPTED]


# --- what launch files install ---------------------------------------------------------------------------------------


def own_extras(text: str) -> list[tuple[str, ...]]:
    """Return the extras of each installation of this repository in a launch file."""
    return [tuple(names.split(",")) for names in re.findall(r"pip install[^\n]*[ \"]\.\[([^\]]*)\]", text)]


def installed_with(extras: tuple[str, ...]) -> set[str]:
    """Return the packages, in their normal form, that an installation with these extras has."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    open_, found = [Requirement(text) for texts in lists for text in texts], set()
    while open_:
        need = open_.pop()
        keys = {(canonicalize_name(need.name), extra) for extra in ("", *need.extras)}
        if keys <= found or (need.marker is not None and not need.marker.evaluate({"extra": ""})):
            continue
        found |= keys
        try:
            texts = importlib.metadata.requires(need.name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # it is not installed here, so its own requirements are not known
        for child in map(Requirement, texts):
            environments = [{"extra": extra} for extra in ("", *need.extras)]
            if child.marker is None or any(child.marker.evaluate(environment) for environment in environments):
                child.marker = None
                open_.append(child)
    return {name for name, _ in found}


def imports_of(path: Path) -> tuple[set[str], set[str]]:
    """Return the modules that a file imports when it is itself imported, and all that it may import later."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    immediate, all_ = set(), set()

    def visit(node: ast.AST, *, at_once: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        all_.update(names)
        if at_once:
            immediate.update(names)
        inner = at_once and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, at_once=inner)

    visit(tree, at_once=True)
    return immediate, all_


def file_of(module: str) -> Path | None:
    """Return the file of a module of hfscale; None for other modules, and for names in a module."""
    path = REPOSITORY.joinpath(*module.split("."))
    candidates = [path.with_suffix(".py"), path / "__init__.py"] if module.partition(".")[0] == "hfscale" else []
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def third_party_imports(script: Path) -> set[str]:
    """Return the packages that a recipe, and every module of hfscale that it may load, import at import time."""
    home_of = hfscale._HOME_OF | {f"recipe.{name}": module for name, module in hfscale.recipe._HOME_OF.items()}
    found, seen, open_ = set(), set(), [script]
    while open_:
        path = open_.pop()
        if path in seen:
            continue
        seen.add(path)
        immediate, later = imports_of(path)
        found |= {name.partition(".")[0] for name in immediate}
        for name in later:
            home = file_of(home_of.get(name.removeprefix("hfscale."), name))
            if home is not None:
                open_.append(home)
    return found - {"hfscale"} - set(sys.stdlib_module_names)


def missing_packages(extras: tuple[str, ...], script: Path) -> set[str]:
    """Return the packages that a recipe imports and that an installation with these extras does not have."""
    packages = importlib.metadata.packages_distributions()
    there = installed_with(extras if script.parent.name == "vision" else (*extras, OF_IMAGES))
    return {name for name in third_party_imports(script) if not {*map(canonicalize_name, packages[name])} & there}


def test_launch_files_install_the_extras_of_the_recipes():
    texts = {named(path): path.read_text(encoding="utf-8") for path in FILES}
    found = {name: own_extras(text) for name, text in texts.items() if own_extras(text)}
    assert found == {named(DOCKERFILE): [EXTRAS], named(SKYPILOT): [EXTRAS]}


@pytest.mark.parametrize("script", sorted(REPOSITORY.glob("recipes/*/train.py")), ids=named)
def test_every_import_of_a_recipe_is_installed_by_the_launch_files(script):
    of_images = (OF_IMAGES,) if script.parent.name == "vision" else ()
    assert missing_packages((*EXTRAS, *of_images), script) == set()
    assert bool(missing_packages(EXTRAS, script)) == bool(of_images)


@pytest.mark.parametrize("path", [DOCKERFILE, SKYPILOT], ids=named)
def test_launch_files_that_install_hfscale_name_the_extra_for_images(path):
    assert f"`{OF_IMAGES}`" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("extras", "recipe", "missing"),
    [(("wandb", "gpu"), "sharded", {"datasets", "pyarrow", "trl"}), (("recipes", "wandb", "gpu"), "sft", {"trl"})],
    ids=["without datasets", "without trl"],
)
def test_a_package_that_no_extra_installs_is_found(extras, recipe, missing):
    assert missing_packages(extras, REPOSITORY / "recipes" / recipe / "train.py") == missing


@pytest.mark.recipes
@pytest.mark.parametrize(("package", "recipe"), [("datasets", "ddp"), ("trl", "sft")])
def test_a_recipe_without_one_of_its_packages_ends_with_the_code_of_wrong_usage(package, recipe):
    """So that no scheduler starts it again."""
    program = (
        "import importlib.metadata as metadata, runpy, sys\n"
        "version = metadata.version\n"
        "def without(name):\n"
        f"    if name == {package!r}: raise metadata.PackageNotFoundError(name)\n"
        "    return version(name)\n"
        "metadata.version = without\n"
        "sys.argv = ['train.py', '--help']\n"
        f"runpy.run_path({str(REPOSITORY / 'recipes' / recipe / 'train.py')!r}, run_name='__main__')"
    )
    done = run(sys.executable, "-c", program, env={})
    assert done.code == WRONG_USAGE, done.err[-2000:]
    lines = [line for line in done.err.splitlines() if line.startswith("hfscale: error: ")]
    assert len(lines) == 1
    assert f"{package} " in lines[0]
    assert "Traceback" not in done.err


# --- Docker ----------------------------------------------------------------------------------------------------------


def docker_problems(text: str) -> list[str]:
    """Return the problems of a Dockerfile: a base that is not pinned, root, shell form, open versions."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    steps = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    defaults = dict(value.split("=", 1) for name, value in steps if name == "ARG" and "=" in value)
    users = [
        re.sub(r"\$\{?(\w+)\}?", lambda match: defaults[match[1]], value) for name, value in steps if name == "USER"
    ]
    problems = []
    for name, value in steps:
        image = value.split(" ")[0]
        if name == "FROM" and not re.search(r":\d[\w.-]*$|@sha256:\w{64}$", image):
            problems.append(f"{image} is not pinned")
        if name in ("ENTRYPOINT", "CMD") and not value.startswith("["):
            problems.append(f"{name} is a shell line")
        if name == "RUN":
            installs = re.findall(r"pip install[^&]*", value)
            problems += [f"{one}: no hashes" for one in installs if not re.search("--require-hashes|--no-deps", one)]
            problems += [f"{one}: builds" for one in installs if "--no-deps" in one and "-isolation" not in one]
    if not users or users[-1] in ("root", "0"):
        problems.append("runs as root")
    if "ENTRYPOINT" not in [name for name, _ in steps]:
        problems.append("no ENTRYPOINT")
    return problems


@pytest.mark.parametrize("path", DOCKERFILES, ids=named)
def test_dockerfile(path):
    text = path.read_text(encoding="utf-8")
    assert docker_problems(text) == []
    (entrypoint,) = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[1])
    script = REPOSITORY / entrypoint.removeprefix("/workspace/")
    assert script.read_text(encoding="utf-8").startswith("#!")
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (":13.0.2-base-ubuntu24.04\n", "\n", "nvidia/cuda is not pinned"),
        (":13.0.2-base-ubuntu24.04\n", ":latest\n", "nvidia/cuda:latest is not pinned"),
        ("USER ${RUN_AS}", "", "runs as root"),
        ("RUN_AS=trainer", "RUN_AS=root", "runs as root"),
        ('ENTRYPOINT ["/workspace/launch/multinode/accelerate.sh"]', "ENTRYPOINT a.sh", "ENTRYPOINT is a shell line"),
        ("--require-hashes ", "", "pip install --no-cache-dir -r requirements.txt: no hashes"),
        (" --no-build-isolation", "", 'pip install --no-cache-dir --no-deps ".[recipes,trl,wandb,gpu]": builds'),
    ],
)
def test_a_bad_dockerfile_is_found(old, new, problem):
    text = DOCKERFILE.read_text(encoding="utf-8")
    assert old in text
    assert docker_problems(text.replace(old, new)) == [problem]


def test_dockerignore_admits_the_files_of_the_image():
    lines = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    assert [name for name in kept if not (REPOSITORY / name).exists()] == []
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {
        *wheel["packages"],
        *wheel["force-include"],
        project["project"]["readme"],
        *project["project"]["license-files"],
    }
    assert needed | {"constraints.txt", "pyproject.toml", "launch"} <= kept


# --- SageMaker -------------------------------------------------------------------------------------------------------

SAGEMAKER_ARGUMENTS = [
    "--role",
    "arn:aws:iam::1:role/r",
    "--image",
    "1.dkr.ecr/x:1",
    "--checkpoints",
    "s3://bucket/run",
]


def sagemaker(*flags: str, package: Path | None = None) -> Finished:
    """Run start.py with `package` in place of the sagemaker package."""
    env = {"PYTHONPATH": str(package)} if package else {}
    return run(sys.executable, SAGEMAKER, *SAGEMAKER_ARGUMENTS, *flags, env=env)


def test_sagemaker_dry_run_shows_a_spot_job_that_resumes():
    done = sagemaker("--dry-run")
    assert done.code == 0, done.err
    job = json.loads(done.out)
    assert job["compute"]["enable_managed_spot_training"] is True
    assert job["checkpoint_config"]["s3_uri"] == "s3://bucket/run"
    argv = job["source_code"]["args"]
    assert argv == [*DEFAULT, "--output_dir", job["checkpoint_config"]["local_path"]]
    command = job["source_code"]["command"].split()
    assert command[0] == "exec"
    assert command_problems([*command[1:], *argv]) == []
    limits = job["stopping_condition"]
    assert limits["max_wait_time_in_seconds"] >= limits["max_runtime_in_seconds"]


def test_sagemaker_without_its_package_fails_with_one_line(tmp_path):
    (tmp_path / "sagemaker.py").write_text("raise ImportError(\"No module named 'sagemaker'\")", encoding="utf-8")
    done = sagemaker(package=tmp_path)
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert 'pip install "sagemaker>=3"' in done.err
    assert sagemaker("--help", package=tmp_path).code == 0


def test_sagemaker_needs_a_bucket():
    done = sagemaker("--checkpoints", "/tmp/x", "--dry-run")
    assert (done.code, done.err.splitlines()[-1].startswith("start.py: error: --checkpoints /tmp/x")) == (2, True)


def test_sagemaker_starts_what_the_dry_run_shows(tmp_path):
    """The stub has the interface of the real package and records its arguments."""
    for name, text in {
        "sagemaker/__init__.py": "",
        "sagemaker/core/__init__.py": "",
        "sagemaker/core/shapes.py": "StoppingCondition = dict",
        "sagemaker/core/training/__init__.py": "",
        "sagemaker/core/training/configs.py": "CheckpointConfig = Compute = SourceCode = dict",
        "sagemaker/train.py": (
            "import json\nclass ModelTrainer(dict):\n"
            "    def train(self, wait): print(json.dumps({'job': self, 'wait': wait}))\n"
        ),
    }.items():
        executable(tmp_path / name, text)
    done = sagemaker(package=tmp_path)
    assert done.code == 0, done.err
    assert json.loads(done.out) == {"job": json.loads(sagemaker("--dry-run").out), "wait": False}


def test_sagemaker_signals_reach_the_launcher(tmp_path):
    """The SDK runs `bash -c 'chmod … && script'` and then `eval "$CMD"`; exec keeps it one process."""
    executable(tmp_path / "accelerate", "#!/bin/bash\necho $$ $1\n")
    command = json.loads(sagemaker("--dry-run").out)["source_code"]["command"]
    executable(tmp_path / "sm_train.sh", f'\n#!/bin/bash\nset -e\nCMD="{command}"\neval "$CMD"\n')
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = run("bash", "-c", f"echo $$ && {tmp_path}/sm_train.sh", env=path)
    shell, launcher = done.out.splitlines()
    assert launcher == f"{shell} launch"


# --- launched for real -----------------------------------------------------------------------------------------------


def free_port(start: int = 0, stop: int = 1) -> int:
    """Return a free port of the loopback interface, from a range or any."""
    for port in range(start, stop):
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            return server.getsockname()[1]
    raise RuntimeError("no free port")


@contextlib.contextmanager
def started(*argv: str | Path, env: dict[str, str], cwd: Path) -> Iterator[subprocess.Popen]:
    """Start a process in its own session; at the end kill it and its workers if they still run."""
    process = subprocess.Popen(
        list(map(str, argv)),
        env=environment(env),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            whole = psutil.Process(process.pid)
            for left in [*whole.children(recursive=True), whole]:  # each worker has a session of its own
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()
        process.wait(30)


def loopback_node(rank: int, port: int, nodes: int = 2) -> dict[str, str]:
    config = str(REPOSITORY / "accelerate_configs" / "ddp.yaml")
    here = {"MAIN_PORT": str(port), "NODE_RANK": str(rank), "NODES": str(nodes), "GPUS_PER_NODE": "1"}
    return NODE | here | {"PYTHON": sys.executable, "CONFIG_FILE": config}


@pytest.mark.faults  # half a minute; the test of Slurm shows in less that the launchers of two nodes start one world
@pytest.mark.world(2)
def test_two_nodes_train_together(tmp_path):
    """Two launchers with one rendezvous and one folder are one training of two processes."""
    flags = [RECIPE, *QUICK, "--max_steps", "2", "--output_dir", "out"]
    port = free_port()
    with (
        started(ACCELERATE, *flags, env=loopback_node(1, port), cwd=tmp_path) as second,
        started(ACCELERATE, *flags, env=loopback_node(0, port), cwd=tmp_path) as first,
    ):
        outputs = [process.communicate(timeout=280)[0] for process in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0), outputs
    assert outputs[0].count("hfscale: strategy ddp on 2 processes (cpu)") == 1
    assert "hfscale: strategy" not in outputs[1]
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]
    assert latest_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-2")
    assert verify(tmp_path / "out" / "checkpoint-2").world_size == 2


@pytest.mark.faults
@pytest.mark.world(2)
def test_two_nodes_under_torchrun_are_one_world(tmp_path):
    port = free_port()
    argv = (TORCHRUN, WORKER, tmp_path, 0)
    with (
        started(*argv, env=loopback_node(1, port), cwd=REPOSITORY) as second,
        started(*argv, env=loopback_node(0, port), cwd=REPOSITORY) as first,
    ):
        outputs = [process.communicate(timeout=280)[0] for process in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0), outputs
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert (seen["RANK"], seen["WORLD_SIZE"], seen["LOCAL_RANK"]) == (str(rank), "2", "0")


@pytest.mark.recipes
@pytest.mark.world(2)
def test_the_recipe_trains_in_the_environment_of_torchrun(tmp_path):
    """As above without Accelerate's variables; the ranks are forked, with the environment that torchrun sets."""
    done = run_forked(
        "script", [str(RECIPE), *QUICK, "--max_steps", "2", "--output_dir", "out"], tmp_path, {}, ranks=2
    )
    assert done.code == 0, done.err[-4000:]
    assert done.err.count("hfscale: strategy ddp on 2 processes (cpu)") == 1
    assert verify(tmp_path / "out" / "checkpoint-2").world_size == 2


@pytest.mark.faults
@pytest.mark.world(2)
def test_deepspeed_too_has_a_launcher_per_node(tmp_path):
    """By default accelerate starts DeepSpeed's own launcher for several nodes, which needs pdsh and ssh."""
    port, config = free_port(), {"CONFIG_FILE": "accelerate_configs/zero1.yaml"}
    argv = (ACCELERATE, WORKER, tmp_path, 0)
    with (
        started(*argv, env=loopback_node(1, port) | config, cwd=REPOSITORY) as second,
        started(*argv, env=loopback_node(0, port) | config, cwd=REPOSITORY) as first,
    ):
        outputs = [process.communicate(timeout=280)[0] for process in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0), outputs
    assert {path.name for path in tmp_path.glob("rank-*")} == {"rank-0.json", "rank-1.json"}


@pytest.mark.recipes
@pytest.mark.parametrize(("script", "number"), [(ACCELERATE, signal.SIGTERM), (TORCHRUN, signal.SIGUSR1)], ids=label)
def test_a_signal_reaches_the_workers_and_their_exit_code_comes_back(script, number, tmp_path):
    """The started process is the supervisor of the launcher; Slurm's USR1 reaches the workers as SIGTERM."""
    with started(
        script, WORKER, ".", PREEMPTED, "wait", env=loopback_node(0, free_port(), 1), cwd=tmp_path
    ) as process:
        deadline = time.monotonic() + 240
        while not (tmp_path / "rank-0.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        launcher = json.loads((tmp_path / "rank-0.json").read_text())["launcher"]
        assert psutil.Process(launcher).ppid() == process.pid
        process.send_signal(number)
        output, _ = process.communicate(timeout=280)
        assert process.returncode == PREEMPTED, output
    assert (tmp_path / "signalled-0").exists()


def test_a_signal_during_the_timing_of_a_call_is_still_a_preemption(monkeypatch):
    """torch's `prof` then reads its own unset variable; the test produces this moment with torch's own code."""
    wrapper = runpy.run_path(str(EXIT_CODE))

    class Clock:
        @staticmethod
        def time() -> float:
            raise SignalException("Process 1 got signal: 15", sigval=signal.SIGTERM)

    monkeypatch.setattr(elastic_metrics, "time", Clock)
    monkeypatch.setitem(wrapper["main"].__globals__, "torchrun", elastic_metrics.prof(lambda arguments: None))
    monkeypatch.setattr(sys, "argv", [str(EXIT_CODE), "torchrun"])
    kept = signal.getsignal(signal.SIGUSR1)
    try:
        assert wrapper["main"]() == PREEMPTED
    finally:
        signal.signal(signal.SIGUSR1, kept)


@pytest.mark.recipes
@pytest.mark.world(2)
def test_slurm_requeues_a_preempted_run_of_two_nodes(slurm, tmp_path):
    """The exit code of the workers passes through two launchers, srun and the batch script."""
    port = free_port(20_000, 30_000)
    config = str(REPOSITORY / "accelerate_configs" / "ddp.yaml")
    one_gpu = {"SLURM_JOB_ID": str(port - 20_000), "SLURM_GPUS_ON_NODE": "1", "CONFIG_FILE": config}
    env = slurm | one_gpu | {"PYTHON": sys.executable}
    with started("bash", SBATCH, WORKER, tmp_path, PREEMPTED, env=env, cwd=REPOSITORY) as process:
        output, _ = process.communicate(timeout=280)
        assert process.returncode == PREEMPTED, output
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert (seen["WORLD_SIZE"], seen["LOCAL_RANK"], seen["MASTER_PORT"]) == ("2", "0", str(port))
    assert (tmp_path / "scontrol").read_text().splitlines()[-1] == f"requeue {port - 20_000}"


@pytest.mark.recipes
def test_only_the_wrapper_passes_exit_codes_on(tmp_path):
    launcher = ["torchrun", "--nproc-per-node", "1", "--master-port", str(free_port())]
    assert run(sys.executable, EXIT_CODE, *launcher, WORKER, ".", "2", env={}, cwd=tmp_path).code == WRONG_USAGE
    bare = run(sys.executable, "-m", "torch.distributed.run", *launcher[1:], WORKER, ".", "2", env={}, cwd=tmp_path)
    assert bare.code == 1  # if this is ever 2, exit_code.py is no longer needed
    wrong = run(sys.executable, EXIT_CODE, "mpirun", "x.py", env={}, cwd=tmp_path)
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
