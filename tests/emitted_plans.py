"""Emits random plans (`plan_requests`), has each file read by what reads it, and starts each with a small model.

A started run has the emitted files, of which only sizes change: an axis with several ranks has two, as long as four
ranks are enough, and batch, sequences and accumulation are short. What a CPU cannot run is in `NOT_ON_A_CPU`.
"""

import contextlib
import io
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import yaml
from accelerate.commands.config.config_args import load_config_from_file
from conftest import REPOSITORY, Finished, run_forked
from forked_accelerate import ForkedAccelerate
from launch_words import MACHINE, launched_words
from parallel_families import small_config
from plan_requests import Request, random_request
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from hfscale.cli import main
from hfscale.core.counts import counted
from hfscale.facts.schedules import supports
from hfscale.facts.support import LISTS
from hfscale.recipe import corpus

NOT_ON_A_CPU = {
    "qlora": "bitsandbytes, which the tests do not install, stores 4 bits on a GPU: trained as LoRA",
    "adamw_bnb_8bit": "so are its optimizer's states: trained with AdamW",
    "fp8": "torchao's products in 8 bits need an H100: trained in fp32",
    "fp16, bf16, tf32": "mixed precision of GPUs: trained in fp32",
    "use_liger_kernel": "Liger's kernels are written in Triton: trained without them",
    "cp of FSDP2": "torch has ring attention for GPUs only: the recipe says so, and starts without it",
    "activation_offloading": "TRL copies from a GPU: trained without it",
    "packing of families with a state": "the kernels that keep their documents apart need a GPU: trained unpacked",
    "torch.compile's C++": "minutes of a compiler for each plan: the captured graphs run uncompiled",
}
"""What of the plans a CPU cannot run, and what is started instead; files and flags are checked with it."""
ON_A_CPU: Mapping[str, Mapping[Any, tuple[str, ...]]] = {
    "load_in_4bit": {True: ("--load_in_4bit", "false")},
    "activation_offloading": {True: ("--activation_offloading", "false")},
    "optim": {"adamw_bnb_8bit": ("--optim", "adamw_torch")},
    "fp16": {True: ("--fp16", "false")},
    "tf32": {True: ("--tf32", "false")},
    "use_liger_kernel": {True: ("--use_liger_kernel", "false")},
    "torch_compile_regional": {True: ("--torch_compile_backend", "eager")},
}
"""Flag -> its value in an emitted recipe.yaml -> the flags with which a CPU runs it."""
ODD_FOLDERS = (
    "plan",
    "a b",
    "b c'd",
    'e "f"',
    "$(touch RAN)",
    "$HOME",
    "`id`",
    "-x",
    "ü\u2028é",
    "#m",
    "null",
    "a\nb: c",
)
"""Names of emitted folders, most of which a shell or YAML would read as something else."""
MAX_RANKS = 4
LENGTH = 32
"""Tokens of a started run's sequences."""
TRIES = 200
"""Requests that are drawn for one plan, of which many are refused or fit no GPU."""
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
"""The axes whose sizes multiply to the number of ranks; `ep` is a number of ranks among them."""
RECORDS = {"sft": corpus.chat_records, "dpo": corpus.preference_records, "grpo": corpus.prompt_records}
ERROR_LINE = re.compile(r"(\[rank\d+\]: )?(hfscale: error|[\w.]+(Error|Exception): )")
REWARDS = ("--reward_functions", "hfscale.recipe.rewards:similarity_to_answer")
"""What a user must add to a plan for GRPO."""
PROGRAMS = {"hfscale": "hfscale", "accelerate": "accelerate.commands.accelerate_cli"}
"""What launch.sh starts, by the module that this interpreter runs for it."""
SAVE_S = 180
"""Seconds in which a launched run takes its first steps, and those in which it saves after a signal."""
START_OF_PLAN = REPOSITORY / "tests" / "workers" / "start_of_plan.py"
PARALLELISM = "parallelism_config_{}_size"


@dataclass(frozen=True, kw_only=True)
class EmittedPlan:
    """A choice of a plan whose files were written."""

    request: Request
    """What was asked for."""
    choice: Mapping[str, Any]
    """The choice, as `--json` prints it."""
    folder: Path
    """The folder with the files."""

    @property
    def recipe(self) -> str:
        """The folder of the recipe: `ddp`, `sharded`, `tp_pp`, `sft`, `dpo` or `grpo`."""
        return Path(self.choice["recipe"]).parent.name

    @property
    def flags(self) -> dict[str, Any]:
        """The flags in recipe.yaml."""
        return yaml.safe_load((self.folder / "recipe.yaml").read_text(encoding="utf-8"))

    @property
    def title(self) -> str:
        """The request and the choice in a line, for the message of a failure."""
        axes = " ".join(f"{axis} {size}" for axis, size in self.choice["layout"].items() if size > 1)
        command = shlex.join(["hfscale", "plan", self.request.model, *self.request.flags])
        return f"{command}: {self.recipe}, {self.choice['strategy']}, {axes or 'one rank'} ({self.request.family})"


# -- emitting ---------------------------------------------------------------------------------------------------------


def emit_random_plan(seed: str, folder: Path) -> EmittedPlan:
    """Draw requests until one has a choice that a recipe runs, and emit it.

    Every request that is refused on the way, and every choice that cannot be launched, must be refused in one line.
    """
    for number in range(TRIES):
        request = random_request(f"{seed}.{number}", folder / f"request-{number}")
        random = Random(f"{seed}.{number}")  # no secret
        choices = choices_of(request)
        if not choices:
            continue
        index = random_choice(random, choices)
        named = folder / "plans" / random.choice(ODD_FOLDERS)
        if choices[index]["recipe"] is None:
            assert_not_emitted(request, index, named)
            launchable = [choice for choice in choices if choice["recipe"] is not None]
            if not launchable:
                continue
            index = choices.index(launchable[random_choice(random, launchable)])
        return emit_choice(request, choices, index, named)
    raise AssertionError(f"none of {TRIES} requests of seed {seed} can be launched")


def emit_choice(request: Request, choices: Sequence[Mapping[str, Any]], index: int, folder: Path) -> EmittedPlan:
    """Emit a choice that a recipe runs."""
    code, _, err = command("plan", request.model, *request.flags, "--emit", str(folder), "--choice", str(index + 1))
    assert code == 0, (request, err)
    return EmittedPlan(request=request, choice=choices[index], folder=folder)


def assert_not_emitted(request: Request, index: int, folder: Path) -> None:
    """Check that a choice without a recipe is refused in one line, and that nothing is written."""
    code, _, err = command("plan", request.model, *request.flags, "--emit", str(folder), "--choice", str(index + 1))
    assert code == 2, (request, err)
    assert_one_line(request, err)
    assert not folder.exists(), request


def command(*argv: str) -> tuple[int, str, str]:
    """Run `hfscale` in this process; return its exit code and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*argv])
    return code, out.getvalue(), err.getvalue()


def choices_of(request: Request) -> list[dict[str, Any]]:
    """Return the choices of a plan; none where nothing fits or the request is refused, which must take one line."""
    code, out, err = command("plan", request.model, *request.flags, "--json")
    assert code in (0, 1, 2), (request, code, err)
    if code == 2:
        assert_one_line(request, err)
        return []
    return json.loads(out)["choices"]


def assert_one_line(request: Request, err: str) -> None:
    """Check that a refusal is one line."""
    lines = [line for line in err.splitlines() if not line.startswith("[transformers]")]
    assert len(lines) == 1, (request, err)
    assert lines[0].startswith("hfscale: error: "), (request, err)


def random_choice(random: Random, choices: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of a choice: first a kind is drawn, so that layouts of which there are few are not rare."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for index, choice in enumerate(choices):
        axes = tuple(axis for axis, size in choice["layout"].items() if size > 1)
        kinds.setdefault((choice["recipe"], choice["strategy"], choice["offload"], axes), []).append(index)
    return random.choice(random.choice(list(kinds.values())))


# -- what reads the files, at their real sizes ------------------------------------------------------------------------


def launch_words(plan: EmittedPlan) -> list[str]:
    """Return the words of the command that launch.sh starts on the first machine."""
    with tempfile.TemporaryDirectory() as folder:
        return launched_words(plan.folder / "launch.sh", Path(folder))


def check_files(plan: EmittedPlan, folder: Path) -> None:
    """Let each file be read by what reads it, and the recipe check its flags as on the planned number of ranks.

    Args:
        plan (`EmittedPlan`): the plan.
        folder (`Path`): where the model's config is written.
    """
    assert load_config_from_file(str(plan.folder / "accelerate.yaml")).num_processes == plan.choice["gpus"]
    assert (plan.folder / "train.py").read_bytes() == (REPOSITORY / plan.choice["recipe"]).read_bytes()
    words = launch_words(plan)
    assert words[:2] == ["accelerate", "launch"], words
    plan.request.config.save_pretrained(folder / "real")
    if "mixed_precision: fp8" in (plan.folder / "accelerate.yaml").read_text(encoding="utf-8"):
        words[2:2] = ["--mixed_precision", "no"]
    argv = [str(START_OF_PLAN), str(folder / "real"), *words[2:], *cpu_flags(plan)]
    if plan.recipe == "grpo":
        argv += REWARDS
    expected = {axis: plan.choice["layout"][axis] for axis in AXES}
    if has_ring_attention(plan):
        refused = run_forked("script", argv, folder, {})
        assert refused.code == 2, plan.title
        assert "ring attention for GPUs only" in why_failed(refused.err), (plan.title, refused.err)
        argv += ["--cp_size", "1"]
        expected |= {"cp": 1, "dp_shard": expected["dp_shard"] * expected["cp"]}
    done = run_forked("script", argv, folder, {})
    assert done.code == 0, f"{plan.title}\nFILES: {why_failed(done.err)}"
    found = json.loads(done.out.splitlines()[-1])
    assert found["world_size"] == plan.choice["gpus"], (found, plan.title)
    batch = plan.choice["global_batch"] * (plan.choice["layout"]["cp"] // expected["cp"])
    assert found["batch"] == batch, (found, plan.title)
    if plan.choice["strategy"] == "native":
        expected["ep"] = plan.choice["layout"]["ep"]
    if plan.choice["strategy"] in ("parallel", "fsdp2", "native"):
        assert {axis: found["layout"][axis] for axis in expected} == expected, (found, plan.title)
    if plan.recipe != "tp_pp" and plan.choice["layout"]["tp"] == 1:  # else it is launched as DDP
        assert found["strategy"] == plan.choice["strategy"], (found, plan.title)


def has_ring_attention(plan: EmittedPlan) -> bool:
    """Return whether FSDP2 splits sequences, for which torch has kernels for GPUs only."""
    return plan.choice["layout"]["cp"] > 1 and plan.recipe != "tp_pp"


def cpu_flags(plan: EmittedPlan) -> list[str]:
    """Return the flags with which a CPU can start what it cannot run (`NOT_ON_A_CPU`)."""
    flags = plan.flags
    known = [of_value.get(flags.get(name), ()) for name, of_value in ON_A_CPU.items()]
    if flags.get("packing") is True and plan.request.family in LISTS["documents_need_kernel"]:
        known.append(("--packing", "false"))
    return [word for words in known for word in words]


# -- starting with a small model --------------------------------------------------------------------------------------


def small_layout(plan: EmittedPlan) -> dict[str, int]:
    """Return two ranks for each axis that has several, for as many axes as `MAX_RANKS` ranks have.

    Tensor, pipeline and context parallelism come first. What cannot run on a CPU is left out.
    """
    layout = plan.choice["layout"]
    leaves_out_cp = has_ring_attention(plan)
    small = dict.fromkeys(AXES, 1)
    ranks = 1
    for axis in ("pp", "tp", "cp", "dp_shard", "dp_replicate"):
        if layout[axis] > 1 and ranks < MAX_RANKS and not (axis == "cp" and leaves_out_cp):
            small[axis] = 2
            ranks *= 2
    return small


def small_launcher(plan: EmittedPlan, small: Mapping[str, int], folder: Path) -> Path:
    """Write accelerate.yaml with the sizes of a small layout, on one machine."""
    content = yaml.safe_load((plan.folder / "accelerate.yaml").read_text(encoding="utf-8"))
    content |= {"num_machines": 1, "num_processes": math.prod(small.values()), "main_process_port": 0}
    if content.pop("fp8_config", None) is not None:
        content["mixed_precision"] = "no"
    sizes = content.get("parallelism_config", {})
    for axis in AXES:
        if PARALLELISM.format(axis) in sizes:
            sizes[PARALLELISM.format(axis)] = small[axis]
    if small["cp"] == 1 and plan.choice["layout"]["cp"] > 1:
        sizes.pop("parallelism_config_cp_comm_strategy", None)
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def small_experts(plan: EmittedPlan, small: Mapping[str, int]) -> int:
    """Return the ranks of a small layout that share experts: those of a replica, or of several as in the plan."""
    layout = plan.choice["layout"]
    of_replica = ("dp_shard", "cp", "tp")
    is_inside = layout["ep"] <= math.prod(layout[axis] for axis in of_replica)
    return math.prod(small[axis] for axis in (of_replica if is_inside else ("dp_replicate", *of_replica)))


def small_flags(plan: EmittedPlan, small: Mapping[str, int], folder: Path) -> list[str]:
    """Return the flags that make the emitted recipe short, without changing what runs."""
    emitted = plan.flags
    micro_batch = min(emitted["per_device_train_batch_size"], 2)
    accumulation = min(emitted["gradient_accumulation_steps"], 2)
    values: dict[str, Any] = {
        "max_steps": 2,
        "validation_split_percentage": 0,
        "disable_tqdm": True,
        "logging_steps": 1,
        "dataloader_num_workers": 0,
        "output_dir": folder / "out",
    }
    if plan.choice["strategy"] == "native":
        values |= {"fsdp_size": small["dp_shard"], "dp_replicate_size": small["dp_replicate"], "ep_size": 2}
    if plan.recipe == "tp_pp":
        values |= {f"{axis}_size": small[axis] for axis in AXES if f"{axis}_size" in emitted}
        if "ep_size" in emitted:
            values["ep_size"] = small_experts(plan, small)
        accumulation = next(
            number
            for number in range(2, 65)
            if supports(
                emitted["pipeline_schedule"],
                pp=small["pp"],
                stages_per_rank=emitted.get("virtual_stages", 1),
                micro_batches=number,
            )
        )
    if "num_generations" in emitted:
        micro_batch = 2
        values |= {"num_generations": 2, "max_completion_length": 8, REWARDS[0].removeprefix("--"): REWARDS[1]}
        if "steps_per_generation" in emitted:
            values["steps_per_generation"] = 1
    elif plan.recipe in RECORDS:
        values["max_length"] = 4 * LENGTH
    else:
        values["block_size"] = LENGTH
    values |= {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": accumulation}
    by_name = "model_name_or_path" in emitted
    model = small_model(plan.request.family, stages(plan), folder / "models", with_weights=by_name)
    values["model_name_or_path" if by_name else "config_name"] = model
    values["train_file"] = data_for(plan.recipe, folder)
    flags = [
        word
        for name, value in values.items()
        for word in (f"--{name}", str(value).lower() if isinstance(value, bool) else str(value))
    ]
    return [*flags, *cpu_flags(plan)]


def start(plan: EmittedPlan, folder: Path) -> Finished:
    """Train two steps of an emitted plan with a small model of the family, and check that what was planned ran."""
    small = small_layout(plan)
    launcher = small_launcher(plan, small, folder)
    ranks = math.prod(small.values())
    argv = [
        "--config_file",
        str(launcher),
        str(plan.folder / "train.py"),
        "--config",
        str(plan.folder / "recipe.yaml"),
    ]
    done = run_forked("launch", [*argv, *small_flags(plan, small, folder)], folder, {})
    assert done.code == 0, f"{plan.title}\nSTART: {why_failed(done.err)}"
    strategy = plan.choice["strategy"]
    if strategy == "ddp" and ranks == 1:
        strategy = "single"
    if strategy == "parallel" and plan.recipe != "tp_pp":
        strategy = "native"  # what a run calls the tensor parallelism of transformers
    (line,) = done.lines("hfscale: strategy")
    started = counted(ranks, "process")
    assert line.split(": ")[1] == f"strategy {strategy} on {started} (cpu)", (plan.title, line)
    status = json.loads((folder / "out" / "hfscale_status.json").read_text(encoding="utf-8"))
    assert (status["status"], status["step"]) == ("completed", 2), (plan.title, status)
    return done


@dataclass(frozen=True, kw_only=True)
class LaunchedPlan:
    """The command that starts an emitted plan with a small model by its own launch.sh."""

    words: Sequence[str]
    """The words of the command, without the number of steps."""
    env: Mapping[str, str]
    """Its environment."""
    folder: Path
    """Where it runs."""
    output: Path
    """Its output folder."""
    accelerate: ForkedAccelerate | None
    """What forks its launcher and its ranks; None where they are started as users start them."""

    def attend(self) -> None:
        """Start what the program `accelerate` was asked for, where its processes are forks."""
        if self.accelerate is not None:
            self.accelerate.attend()

    def status(self) -> dict[str, Any]:
        """Return what hfscale_status.json says."""
        return json.loads((self.output / "hfscale_status.json").read_text(encoding="utf-8"))


def launched_plan(plan: EmittedPlan, folder: Path, *, is_forked: bool = False) -> LaunchedPlan:
    """Write the sizes of the small layout into the emitted files, as a user would, and return how to launch them.

    Args:
        plan (`EmittedPlan`): the plan.
        folder (`Path`): where the programs, the model and the output are written.
        is_forked (`bool`): whether the launcher and its ranks are forks that have imported everything.
    """
    folder.mkdir(exist_ok=True)
    small = small_layout(plan)
    flags = small_flags(plan, small, folder)
    small_launcher(plan, small, folder).replace(plan.folder / "accelerate.yaml")
    script = plan.folder / "launch.sh"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace("--main_process_port 29500", f"--main_process_port {port}"), encoding="utf-8")
    for name, module in PROGRAMS.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        program.chmod(0o755)
    accelerate = ForkedAccelerate(folder) if is_forked else None  # replaces the program of that name
    # With another ninja, torch builds DeepSpeed's operators anew in each of the tests
    path = f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin"
    return LaunchedPlan(
        words=["sh", str(script), *flags],
        env=os.environ | MACHINE | {"PATH": path, "PYTHONPATH": str(REPOSITORY)},
        folder=folder,
        output=folder / "out",
        accelerate=accelerate,
    )


def preempt(launched: LaunchedPlan, title: str) -> int:
    """Launch a plan, send SIGTERM after its first logs, check that it saves and ends with 75, and return its step."""
    logged = launched.output / "scaling.jsonl"
    printed = launched.folder / "printed.txt"
    with printed.open("w", encoding="utf-8") as file:
        started = subprocess.Popen(
            [*launched.words, "--max_steps", "100000"],
            cwd=launched.folder,
            env=launched.env,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            until = time.monotonic() + SAVE_S
            while not logged.exists() or logged.read_text(encoding="utf-8").count("\n") < 2:
                launched.attend()
                assert started.poll() is None, f"{title}\nLAUNCH: {why_failed(printed.read_text(encoding='utf-8'))}"
                assert time.monotonic() < until, f"{title}\nLAUNCH: no step within {SAVE_S} s"
                time.sleep(0.1)
            started.send_signal(signal.SIGTERM)
            until = time.monotonic() + SAVE_S
            while (code := started.poll()) is None:
                launched.attend()
                assert time.monotonic() < until, f"{title}\nSIGTERM: not ended within {SAVE_S} s"
                time.sleep(0.05)
        finally:
            started.kill()
            if launched.accelerate is not None:
                launched.accelerate.end()
    assert code == 75, f"{title}\nSIGTERM: code {code}: {why_failed(printed.read_text(encoding='utf-8'))}"
    stopped = launched.status()
    step = stopped["step"]
    expected = ("preempted", f"SIGTERM: checkpoint-{step} is committed")
    assert (stopped["status"], stopped["reason"]) == expected, (title, stopped)
    assert (launched.output / f"checkpoint-{step}").is_dir(), title
    return step


def assert_edits_are_kept(plan: EmittedPlan) -> None:
    """Change each emitted file, emit the same plan again, and check that it is refused and every change is there."""
    files = [path for path in plan.folder.iterdir() if path.is_file()]
    for path in files:
        path.write_text(path.read_text(encoding="utf-8") + "# mine\n", encoding="utf-8")
    edited = {path: path.read_bytes() for path in files}
    index = choices_of(plan.request).index(dict(plan.choice))
    words = ("--emit", str(plan.folder), "--choice", str(index + 1))
    code, _, err = command("plan", plan.request.model, *plan.request.flags, *words)
    assert code == 2, (plan.title, err)
    assert_one_line(plan.request, err)
    assert {path: path.read_bytes() for path in files} == edited, plan.title


def stages(plan: EmittedPlan) -> int:
    """Return the pipeline stages of the small run, over all ranks."""
    return 2 * plan.flags.get("virtual_stages", 1) if plan.choice["layout"]["pp"] > 1 else 1


def small_model(family: str, layers: int, folder: Path, *, with_weights: bool) -> Path:
    """Return a folder with a small model of a family and a tokenizer; without weights it has a config alone."""
    path = folder / f"{family}-{'weights' if with_weights else 'config'}"
    tokenizer = corpus.default_tokenizer()
    tokenizer.save_pretrained(path)
    config = small_config(family, **_sizes(family, len(tokenizer), max(4, layers)))
    if with_weights:
        set_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    else:
        config.save_pretrained(path)
    return path


def _sizes(family: str, vocab_size: int, layers: int) -> dict[str, Any]:
    """Sizes that differ from those of the tests of one step: the vocabulary of a tokenizer, and longer sequences."""
    sizes = {
        "vocab_size": vocab_size,
        "num_hidden_layers": layers,
        "n_layer": layers,
        "num_layers": layers,
        "n_layers": layers,
    }
    sizes |= dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 16 * LENGTH)
    known = AutoConfig.for_model(family).to_dict()
    chosen = {name: value for name, value in sizes.items() if name in known}
    if family == "gpt_neo":
        chosen["attention_types"] = [[["global", "local"], layers // 2]]
    return chosen


def data_for(recipe: str, folder: Path) -> Path:
    """Write the text or the records that a recipe trains on; return the file."""
    records = RECORDS.get(recipe)
    path = folder / ("text.txt" if records is None else "records.jsonl")
    if records is None:
        text = "".join(f"line {number} is not line {number * number % 89}\n" for number in range(400))
    else:
        text = "".join(json.dumps(row) + "\n" for row in islice(records("train"), 32))
    path.write_text(text, encoding="utf-8")
    return path


def why_failed(err: str) -> str:
    """Return the line that says why a run failed, and the end of what its ranks printed."""
    lines = [line for line in err.splitlines() if ERROR_LINE.match(line)]
    return f"{lines[0] if lines else 'no error line'}\n{err[-3000:]}"
