"""Every reader of files is listed here, and answers a hostile file with one line or with what it can use of it."""

import ast
import contextlib
import io
import json
import os
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from conftest import REPOSITORY
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from hfscale.checkpoint import lock
from hfscale.checkpoint.best import best_step_of
from hfscale.checkpoint.conversion import read_origin
from hfscale.checkpoint.formats.average import read_average_metadata
from hfscale.checkpoint.manifest import read_manifest
from hfscale.checkpoint.resume import latest_checkpoint
from hfscale.checkpoint.store import inspect, read_status
from hfscale.cli import main
from hfscale.core.flags import read_yaml_mapping
from hfscale.core.logging import on_one_line
from hfscale.core.records import begin_records, last_logged_step
from hfscale.core.run_memory import RunMemory, replicated_step, trusted_step
from hfscale.errors import HfScaleError
from hfscale.facts.config_reader import load_config
from hfscale.facts.own_hardware import read_hardware_file
from hfscale.facts.prices import all_egress, all_prices
from hfscale.health.node import _offload_device
from hfscale.lr_scaling.lr_command import read_training_text
from hfscale.metrics.baseline import read_baselines
from hfscale.metrics.prompts import read_prompts
from hfscale.plugins import llamafactory, section
from hfscale.plugins.axolotl_plan import words_of
from hfscale.recipe.arguments import _check_json
from hfscale.recipe.token_files import load_token_files
from hfscale.replays.skipped_batches import _later_batches
from hfscale.report.run_data import load_run
from hfscale.report.watch import live
from hfscale.report.watch.open_metrics import exposition
from hfscale.why.run_folder import read_run
from hfscale.why.trace_files import read_trace

OURS, MEMORY, SYSTEM, PROGRAM = (
    "a file of the package",
    "a file in the private folder of `hfscale run`",
    "a file of the kernel or of the machine",
    "what a process that hfscale has started prints or writes",
)
PICKLES = "tests/checkpoint/test_pickles.py and test_reshape.py: hostile archives"
VERIFIED = "read after the manifest has verified the checkpoint, of which each byte is hashed"
SEED, MANY = int(os.environ.get("SEED", "0")), int(os.environ.get("FUZZ", "400"))
LIMIT_S, LIMIT_BYTES = 30, 2**31
CALLER = "its caller gives the text, and catches its errors"
OTHER = "opens something that is no file, or writes only"
IMAGES = "tests/finetuning/test_vision_recipe.py: files that are no images, and damaged ones"


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One public reader, with the file that is replaced."""

    file: str
    """Its path in a folder that only the test has."""
    read: Callable[[Path], object]
    """Called with the folder."""
    sample: str
    """A content that it takes."""
    others: dict[str, str] = field(default_factory=dict)
    """Further files."""


EVENT = {"event": "launch", "step": 0, "time": 1.0e9, "world_size": 2, "max_steps": 9}
LOG = {"step": 1, "time": 1.0e9, "loss": 2.0, "scaling/mfu": 0.4}
STATE = {"global_step": 5, "best_model_checkpoint": None, "log_history": [{"step": 1, "loss": 2.0}]}
STATE |= {"stateful_callbacks": {"hfscale": {"goodput": {"seconds": {"training": 1.0}, "as_of": 1.0}}}}
RECORD = {"bytes": 1, "xxh3_128": "0" * 32}
MANIFEST = {
    "version": 1,
    "step": 5,
    "strategy": "ddp",
    "world_size": 1,
    "global_batch_size": 4,
    "files": {"a": RECORD},
}
AVERAGE = {"format": 1, "decay": 0.9, "every_steps": 1, "updates": 2, "snapshots": [], "evaluated": True}
ARGUMENTS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
CONFIG = {"model_type": "llama", "vocab_size": 256, **ARGUMENTS}
PRICES = '[[price]]\ngpu = "H100-80GB"\nprovider = "x"\nusd_per_gpu_hour = 2.0\nsource = "s"\ndate = 2026-01-01\n'
ACCELERATOR = '[[accelerator]]\nname = "x"\n'
BASELINE = {"format": 1, "baselines": []}
TRACE = f"{json.dumps({'format': 1, 'world_size': 1, 'setup': {}})}\n" + '["end", 0, "x", "y", 1]\n'


def lines(*rows):
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def page_of(folder):
    run = live.LiveRun(folder)
    json.dumps(live.describe(run.view()), allow_nan=False)
    exposition({"run": run})


def command(*words):
    """Return a reader that runs a command, whose error must be one line and exit code 1 or 2."""

    def run(folder):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([word.format(folder=folder) for word in words])
        errors = [line for line in err.getvalue().splitlines() if line.startswith("hfscale: error")]
        assert code in (0, 1, 2)
        assert len(errors) == (code == 2), err.getvalue()

    return run


def of_checkpoint(folder):
    best_step_of(folder / "checkpoint-5")
    inspect(folder)
    latest_checkpoint(folder)


RUN = {"scaling.jsonl": lines(LOG), "hfscale_timeline.jsonl": lines(EVENT)}
IN_CHECKPOINT = {
    "checkpoint-5/hfscale_manifest.json": json.dumps(MANIFEST),
    "checkpoint-5/trainer_state.json": json.dumps(STATE),
}


def of_memory(folder):
    memory = RunMemory(folder)
    for read in (memory.read_failure, memory.read_imports, lambda: memory.samples_of(1), memory.outliving):
        read()
    trusted_step(folder)
    replicated_step(folder)
    memory.furthest()


def section_of(folder):
    return section.callback_of(llamafactory._read([str(folder / "l.yaml")]).get("hfscale"))


FAILURE = {"failed_monotonic": 1.0, "ended_monotonic": 2.0, "completed_step": 3, "rank": 0, "reason": "x"}
READERS = {
    "failure in memory": Reader(file="failure.json", read=of_memory, sample=json.dumps(FAILURE)),
    "samples in memory": Reader(file="samples-0", read=of_memory, sample=json.dumps({"step": 1, "samples": [1]})),
    "trusted step in memory": Reader(file="trusted", read=of_memory, sample="12"),
    "process in memory": Reader(file=f"outlives-{os.getpid()}", read=of_memory, sample="1.5"),
    "progress in memory": Reader(file="progress-0", read=of_memory, sample="\1" * 32),
    "axolotl": Reader(
        file="a.yaml",
        read=lambda folder: words_of(folder / "a.yaml"),
        sample="base_model: x/llama\nsequence_len: 512\nadapter: lora\nlora_r: 8\n",
    ),
    "LLaMA-Factory": Reader(
        file="l.yaml", read=section_of, sample="a: 1\nhfscale:\n  every_minutes: 5\n  usd_per_gpu_hour: 2.5\n"
    ),
    "config of a model": Reader(
        file="config.json", read=lambda folder: load_config(folder / "config.json"), sample=json.dumps(CONFIG)
    ),
    "estimate": Reader(
        file="config.json",
        read=command("estimate", "{folder}/config.json", "--gpu", "H100-80GB", "--gpus", "8"),
        sample=json.dumps(CONFIG),
    ),
    "recipe": Reader(
        file="r.yaml",
        read=lambda folder: read_yaml_mapping(str(folder / "r.yaml"), None),
        sample="a: 1\nb: [x, no]\nc: 2024-01-01\nd: &k {e: !!int 1}\n",
    ),
    "prices": Reader(
        file="p.toml",
        read=lambda folder: (all_prices(folder / "p.toml"), all_egress(folder / "p.toml")),
        sample=PRICES,
    ),
    "hardware": Reader(
        file="h.toml",
        read=lambda folder: read_hardware_file(folder / "h.toml"),
        sample='[[accelerator]]\nname = "x"\n',
    ),
    "text of a sweep": Reader(
        file="t.txt", read=lambda folder: read_training_text(folder / "t.txt"), sample="some text"
    ),
    "prompts": Reader(
        file="p.jsonl", read=lambda folder: read_prompts(folder / "p.jsonl"), sample=lines({"prompt": "a"})
    ),
    "baselines": Reader(
        file="b.json", read=lambda folder: read_baselines(folder / "b.json"), sample=json.dumps(BASELINE)
    ),
    "table": Reader(
        file="t.csv",
        read=command("estimate", "--table", "{folder}/t.csv"),
        sample="model,gpu,gpus\nllama-3-8b,H100-80GB,8\n",
    ),
    "json flag": Reader(
        file="f.json",
        read=lambda folder: _check_json("--fsdp_config", str(folder / "f.json"), is_text=False),
        sample=json.dumps({"a": 1}),
    ),
    "deepspeed": Reader(
        file="d.json",
        read=lambda folder: _offload_device(folder / "d.json"),
        sample=json.dumps({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
    ),
    "measurements": Reader(file="scaling.jsonl", read=page_of, sample=lines(LOG), others=RUN),
    "timeline": Reader(file="hfscale_timeline.jsonl", read=page_of, sample=lines(EVENT), others=RUN),
    "ranks": Reader(
        file="hfscale_ranks.jsonl", read=page_of, sample=lines({"step": 1, "compute_s": [1.0, 2.0]}), others=RUN
    ),
    "status": Reader(
        file="hfscale_status.json",
        read=lambda folder: (read_status(folder), load_run(folder)),
        sample=json.dumps({"status": "running", "step": 4, "checkpoint": None}),
        others=RUN,
    ),
    "resumed measurements": Reader(
        file="scaling.jsonl",
        read=lambda folder: (last_logged_step(folder), begin_records(folder, 3)),
        sample=lines(LOG, {"step": 7}),
        others=RUN,
    ),
    "state of Trainer": Reader(
        file="checkpoint-5/trainer_state.json",
        read=lambda folder: (page_of(folder), of_checkpoint(folder)),
        sample=json.dumps(STATE),
        others=RUN | IN_CHECKPOINT,
    ),
    "manifest": Reader(
        file="checkpoint-5/hfscale_manifest.json",
        read=lambda folder: (page_of(folder), of_checkpoint(folder), read_manifest(folder / "checkpoint-5")),
        sample=json.dumps(MANIFEST),
        others=RUN | IN_CHECKPOINT,
    ),
    "verified manifest": Reader(
        file="checkpoint-5/hfscale_manifest.json",
        read=command("checkpoints", "verify", "{folder}"),
        sample=json.dumps(MANIFEST),
        others=IN_CHECKPOINT,
    ),
    "origin": Reader(
        file="checkpoint-5/hfscale_conversion.json",
        read=lambda folder: read_origin(folder / "checkpoint-5"),
        sample=json.dumps({"strategy": "ddp"}),
        others=IN_CHECKPOINT,
    ),
    "average": Reader(
        file="checkpoint-5/hfscale_average/average.json",
        read=lambda folder: read_average_metadata(folder / "checkpoint-5"),
        sample=json.dumps(AVERAGE),
        others=IN_CHECKPOINT,
    ),
    "skipped batches": Reader(
        file="hfscale_skipped_batches.json",
        read=lambda folder: _later_batches(folder / "hfscale_skipped_batches.json", 1),
        sample=json.dumps({"batches": [{"step": 2, "reason": "the loss is nan", "samples": [1, 2]}]}),
    ),
    "lock": Reader(
        file="lock",
        read=lambda folder: [part((folder / "lock").read_bytes()) for part in (lock._describe, lock._is_alive_here)],
        sample=json.dumps({"host": "h", "pid": 1, "since": "2026-01-01T00:00:00+00:00"}),
    ),
    "trace": Reader(file="rank-0.jsonl", read=read_trace, sample=TRACE),
    "compared run": Reader(file="scaling.jsonl", read=read_run, sample=lines(LOG), others=RUN | IN_CHECKPOINT),
    "compared setup": Reader(
        file="hfscale_timeline.jsonl", read=read_run, sample=lines(EVENT, {"event": "setup", "step": 0}), others=RUN
    ),
    "compared state": Reader(
        file="checkpoint-5/trainer_state.json", read=read_run, sample=json.dumps(STATE), others=IN_CHECKPOINT
    ),
    "token file": Reader(
        file="a.ds.metadata",
        read=lambda folder: load_token_files([folder / "a.ds"], streaming=False, source="--dataset x"),
        sample="gpt2|2\n",
        others={"a.ds": "ab", "a.ds.index": "\1\0\0\0\0\0\0\0"},
    ),
    "index of token file": Reader(
        file="a.ds.index",
        read=lambda folder: load_token_files([folder / "a.ds"], streaming=False, source="--dataset x"),
        sample="\1\0\0\0\0\0\0\0",
        others={"a.ds": "ab", "a.ds.metadata": "gpt2|2\n"},
    ),
}

ODD = [
    b"[" * 3000,
    b'{"a":' * 3000,
    b"9" * 5000,
    b"1e999",
    b"NaN",
    b"-1",
    b"no",
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'""',
    b'"\\ud800"',
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\r\n\x0b\x1b[2J",
    b'"a\\ntrust_remote_code: true"',
    b"../../x",
    b"!!int x",
    b"!!bool x",
    b"!!timestamp x",
    b"*k",
    b"99999999999999999999",
    b"2024-13-45",
    b"| >",
    b"\xe2\x80\xa8",
    b"Infinity",
    b"-.inf",
    b"1e400",
    b"-9999999999999999999999999999999999999999",
    b"9" * 400,
    b"&a [*a]",
    b"&a {x: *a}",
    b"%YAML 9.9\n--- 1\n--- 2\n",
    b"? [a]: b",
    b"x: &a [1]\ny: {<<: *a}\n",
    b"\tx: 1",
    b"a = 1\na = 2\n",
    b'"' + b"a" * 100_000 + b'"',
    b"a" * 100_000,
    b"\n" * 10_000,
    b'{"a": 1, "a": [2], "step": 1, "step": "x"}',
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    "".join(f"x{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'lol'] * 9)}]\n" for n in range(12)).encode(),
]
NAMES = [
    "no",
    "on",
    "null",
    "~",
    "1",
    "1.5",
    "",
    "a\nb: 1",
    "a\u2028b",
    "\ud800",
    "../../x",
    "a" * 5000,
    "\x00",
    "__class__",
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, 2**63, -1, 0])
    | st.floats()
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def replaced(value, path, by):
    if not path:
        return by
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = replaced(copied[path[0]], path[1:], by)
    return copied


def paths_of(value, path=()):
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from paths_of(one, (*path, key))


@st.composite
def contents(draw, sample):
    """Draw the content of a file: random bytes, an edited sample, or one with another value of any type."""
    how = draw(st.integers(0, 5))
    text = sample.encode()
    if how == 0:
        return draw(st.binary(max_size=60) | st.sampled_from(ODD))
    if how == 1:
        begin, end = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        return text[:begin] + draw(st.sampled_from(ODD)) + text[end:]
    rows = []
    for line in sample.splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            return draw(st.text(max_size=40)).encode(errors="surrogatepass")
    number = draw(st.integers(0, len(rows) - 1))
    path = draw(st.sampled_from(list(paths_of(rows[number]))))
    if how == 4 and path:
        return renamed(lines(*rows), path, draw(st.sampled_from(NAMES)))
    rows[number] = replaced(rows[number], path, draw(VALUES))
    if how == 5:  # pairs of a key and a value twice, with another value
        text = lines(*rows)
        key = draw(st.sampled_from(sorted({str(part) for part in path} | {"step"})))
        return text.replace("{", f"{{{json.dumps(key)}: {json.dumps(draw(VALUES))}, ", 1).encode()
    return lines(*rows).encode()


def renamed(text, path, name):
    """The text with another name for the last key of the path; it may be written as YAML too."""
    key = path[-1]
    if not isinstance(key, str):
        return text.encode()
    return text.replace(json.dumps(key), json.dumps(name)).encode(errors="surrogatepass")


@contextlib.contextmanager
def bounded():
    """Fail if a reader takes more than `LIMIT_S` seconds or `LIMIT_BYTES` bytes."""

    def late(*_):
        pytest.fail(f"a reader has not answered after {LIMIT_S} s")  # no OSError, which readers expect

    def begin():
        signal.alarm(LIMIT_S)

    used = psutil.Process().memory_info().vms
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, hard))
    try:
        yield begin
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def fuzz(name, folder, examples):
    reader = READERS[name]
    for other, text in reader.others.items():
        (folder / other).parent.mkdir(parents=True, exist_ok=True)
        (folder / other).write_text(text)
    path = folder / reader.file
    path.parent.mkdir(parents=True, exist_ok=True)

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],  # to explain a failure, each line is traced: too slow for the limit
    )
    @seed(SEED)
    @given(contents(reader.sample))
    def answers(content):
        path.write_bytes(content)
        begin()
        with contextlib.suppress(HfScaleError):
            reader.read(folder)
        for left in folder.glob("*-until-*"):  # files of an earlier run, which are set aside
            left.unlink()

    with bounded() as begin:
        answers()


@pytest.mark.parametrize("name", READERS)
def test_a_reader_answers_hostile_files_with_one_line(tmp_path, name):
    fuzz(name, tmp_path, 4)


@pytest.mark.faults
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", READERS)
def test_a_reader_answers_many_hostile_files_with_one_line(tmp_path, name):
    fuzz(name, tmp_path, MANY)


@pytest.mark.parametrize("name", [name for name in READERS if name not in ("resumed measurements", "lock")])
def test_a_reader_answers_what_is_no_file_with_one_line(tmp_path, name):
    reader = READERS[name]
    for other, text in reader.others.items():
        (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / other).write_text(text)
    path = tmp_path / reader.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    outside = tmp_path.with_name(f"{tmp_path.name}-outside")
    outside.write_text("secret")
    with bounded() as begin:
        for make in (
            path.mkdir,
            lambda: path.symlink_to(path),
            lambda: path.symlink_to("/nowhere"),
            lambda: path.symlink_to(outside),
            lambda: os.mkfifo(path),
            lambda: make_socket(path),
            lambda: make_huge(path),
        ):
            make()
            begin()
            with contextlib.suppress(HfScaleError):
                reader.read(tmp_path)
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    assert outside.read_text() == "secret"


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(path.parent):
        listener.bind(path.name)


def make_huge(path):
    """A file of a TiB, of which nothing is on the disk."""
    with path.open("wb") as file:
        file.truncate(2**40)


def test_a_device_without_an_end_is_one_line():
    with pytest.raises(HfScaleError, match="larger"):
        load_config(Path("/dev/zero"))


def test_a_message_with_line_ends_and_codes_of_a_terminal_is_one_line(capsys, tmp_path):
    assert on_one_line("a\nb\r\n\x1b[2Jc\ud800\u2028d") == r"a b \x1b[2Jc\ud800 d"
    assert main(["estimate", str(tmp_path / "a\nb\x1b")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


READS = (
    "read_text",
    "open_regular",
    "bounded_lines",
    "read_bytes",
    "load_file",
    "fromfile",
    "memmap",
    "DictReader",
    "safe_open",
    "from_file",
)
CALLS = (
    "read_text",
    "open_regular",
    "bounded_lines",
    "read_json",
    "read_plain_yaml",
    "parse_json",
    "safe_open",
    "load_archive",
)


def is_read(call):
    function = call.func
    if isinstance(function, ast.Name):
        return function.id in CALLS
    if not isinstance(function, ast.Attribute):
        return False
    whole = ast.unparse(function)
    if function.attr == "open":
        modes = [
            one.value for one in (*call.args, *(key.value for key in call.keywords)) if isinstance(one, ast.Constant)
        ]
        return not any(isinstance(mode, str) and mode[:1] in "wax" for mode in modes if mode)
    return function.attr in READS or whole in ("tomllib.loads", "torch.load")


def sites():
    """Every function of the package that reads files, as `module.py:function`."""
    found = set()

    def visit(node, module, name):
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, ast.FunctionDef | ast.ClassDef) else name
            if isinstance(child, ast.Call) and is_read(child):
                found.add(f"{module}:{inner}")
            visit(child, module, inner)

    root = REPOSITORY / "hfscale"
    for path in sorted(root.rglob("*.py")):
        visit(ast.parse(path.read_text()), path.relative_to(root).as_posix(), "")
    return found


SITES = {
    "check/doctor.py:_probe": PROGRAM,
    "check/parallel_run.py:read_cases": PROGRAM,
    "check/parallel_run.py:read_results": PROGRAM,
    "check/rehearsal/launch.py:messages": PROGRAM,
    "check/rehearsal/launch.py:run_watched": PROGRAM,
    "checkpoint/best.py:best_step_of": "state of Trainer",
    "checkpoint/best.py:name_best": PROGRAM,
    "checkpoint/contents.py:_contents": PROGRAM,
    "checkpoint/conversion.py:_fit_schedule": PICKLES,
    "checkpoint/inferred_manifest.py:infer_manifest": "state of Trainer",
    "checkpoint/conversion.py:read_origin": "origin",
    "checkpoint/export.py:_model_config": VERIFIED,
    "checkpoint/formats/average.py:read_average_metadata": "average",
    "checkpoint/formats/dcp.py:_read_value": PICKLES,
    "checkpoint/formats/parallel.py:read_parallel_metadata": PICKLES,
    "checkpoint/formats/parallel.py:restore_groups": PICKLES,
    "checkpoint/formats/parameter_names.py:read_parameter_names": PICKLES,
    "checkpoint/formats/safetensors_files.py:_tensors": PICKLES,
    "checkpoint/formats/safetensors_files.py:read_weights": PICKLES,
    "checkpoint/formats/unsharded.py:_memory_mapped": PICKLES,
    "checkpoint/node_copies.py:_boot": SYSTEM,
    "checkpoint/node_copies.py:_hold": OTHER,
    "checkpoint/node_copies.py:_is_complete": PROGRAM,
    "checkpoint/node_copies.py:_remove_abandoned": OTHER,
    "checkpoint/transfer.py:_write": OTHER,
    "checkpoint/transfer.py:read_chunk": CALLER,
    "checkpoint/formats/unsharded.py:read_unsharded": PICKLES,
    "checkpoint/formats/zero.py:_origin": PICKLES,
    "checkpoint/formats/zero.py:_read_tensor": PICKLES,
    "checkpoint/formats/zero.py:read_universal": PICKLES,
    "checkpoint/formats/zero.py:read_zero": PICKLES,
    "checkpoint/formats/zero.py:tag_folder": PICKLES,
    "checkpoint/followers.py:_read": VERIFIED,
    "checkpoint/generated_batches.py:read": VERIFIED,
    "checkpoint/rank_files.py:read_checked": VERIFIED,
    "checkpoint/state_formats.py:_has_saved_formats": VERIFIED,
    "checkpoint/loading.py:_check_adapters": PICKLES,
    "checkpoint/loading.py:_conversion_folder": VERIFIED,
    "checkpoint/loading.py:_warn_of_other_passes": "state of Trainer",
    "checkpoint/lock.py:_describe": "lock",
    "checkpoint/lock.py:_is_alive_here": "lock",
    "checkpoint/lock.py:_open": "lock",
    "checkpoint/manifest.py:of": VERIFIED,
    "checkpoint/manifest.py:read_manifest": "manifest",
    "checkpoint/pickles.py:_check_archive": PICKLES,
    "checkpoint/pickles.py:_check_latest": PICKLES,
    "checkpoint/pickles.py:_check_loadable": PICKLES,
    "checkpoint/pickles.py:load_archive": PICKLES,
    "checkpoint/pickles.py:read_dcp_metadata": PICKLES,
    "checkpoint/preemption/clouds.py:_read": SYSTEM,
    "checkpoint/preemption/clouds.py:poll": CALLER,
    "checkpoint/remote.py:upload": VERIFIED,
    "checkpoint/resumable.py:_check_state": "state of Trainer",
    "checkpoint/rng_states.py:_load": PICKLES,
    "checkpoint/store.py:name_last_checkpoint": "state of Trainer",
    "lr_scaling/lr_command.py:read_training_text": "text of a sweep",
    "checkpoint/writer.py:__init__": OTHER,
    "core/configs_command.py:_copy_launch_files": OURS,
    "core/configs_command.py:absolute": OURS,
    "core/configs_command.py:copy": OURS,
    "core/configs_command.py:show": OURS,
    "core/connections.py:receive": CALLER,
    "core/durable_files.py:flush": OTHER,
    "core/flags.py:read_yaml": "recipe",
    "core/host_memory.py:_lines": SYSTEM,
    "core/nvidia_driver.py:nvidia_driver": SYSTEM,
    "core/records.py:_is_up_to": "resumed measurements",
    "core/records.py:_read_part": "measurements",
    "core/records.py:_record": "measurements",
    "core/records.py:begin_lines": "resumed measurements",
    "core/run_memory.py:__init__": MEMORY,
    "core/run_memory.py:_lock": MEMORY,
    "core/run_memory.py:outliving": MEMORY,
    "core/run_memory.py:read": MEMORY,
    "core/run_memory.py:read_failure": MEMORY,
    "core/run_memory.py:read_imports": MEMORY,
    "recovery/abandoned.py:remove_abandoned": MEMORY,
    "core/run_memory.py:replicated_step": MEMORY,
    "core/run_memory.py:samples_of": MEMORY,
    "core/run_memory.py:trusted_step": MEMORY,
    "core/shipped.py:find_launch_files": OURS,
    "core/shipped.py:summary": OURS,
    "core/tables.py:read_table": OURS,
    "core/tables.py:read_user_tables": "prices",
    "core/records.py:read_status": "status",
    "core/written_files.py:_read_hashes": OURS,
    "core/written_files.py:check_unchanged": CALLER,
    "core/text_files.py:read_json": CALLER,
    "cli.py:_end_output": OTHER,
    "core/plain_yaml.py:read_plain_yaml": CALLER,
    "core/text_files.py:read_text": CALLER,
    "facts/activations.py:_table": OURS,
    "facts/config_reader.py:_parse": "config of a model",
    "health/gpu.py:_kernel_lines": SYSTEM,
    "health/jitter.py:_missing_clock": SYSTEM,
    "health/jitter.py:_waited_for_cpu_s": SYSTEM,
    "health/local_time.py:_begin": OTHER,
    "health/node.py:_ib_devices": SYSTEM,
    "health/node.py:_may_lock_all": SYSTEM,
    "health/node.py:_memory_bytes": SYSTEM,
    "health/node.py:_offload_device": "deepspeed",
    "islands/callback.py:_restore": VERIFIED,
    "metrics/baseline.py:read_baselines": "baselines",
    "metrics/meters/noise_scale.py:step_begin": OTHER,
    "metrics/prompts.py:_prompt_of": "prompts",
    "metrics/prompts.py:read_prompts": "prompts",
    "metrics/webhook.py:post": OTHER,
    "parallel/checkpoints.py:_load_optimizer_and_scheduler": PICKLES,
    "parallel/weights.py:read_weights": VERIFIED,
    "planner/emit.py:deepspeed_config": OURS,
    "planner/emit.py:emit": OURS,
    "planner/estimate_command.py:_run_table": "table",
    "planner/script.py:trace_script": PROGRAM,
    "recipe/arguments.py:_check_json": "json flag",
    "recipe/cache.py:_content": PROGRAM,
    "recipe/cache.py:_remove_abandoned": PROGRAM,
    "recipe/chat.py:_from_json": CALLER,
    "recipe/chat.py:use_chat_template": CALLER,
    "recipe/corpus.py:_documented_functions": OURS,
    "recipe/corpus.py:read_sources": OURS,
    "recipe/images.py:_with_files": IMAGES,
    "recipe/model_card.py:_sha256": PROGRAM,
    "recipe/model_card.py:write_model_card": CALLER,
    "recipe/resume.py:is_finished": VERIFIED,
    "recipe/sources.py:_utf8_fault": CALLER,
    "recipe/token_files.py:_documents": "token file",
    "recipe/trl.py:load_teacher": CALLER,
    "replays/bad_batches.py:__init__": OTHER,
    "replays/skipped_batches.py:_later_batches": "skipped batches",
    "recipe/token_files.py:_fingerprint": "token file",
    "recipe/token_files.py:_read_header": "token file",
    "plugins/axolotl_plan.py:words_of": CALLER,
    "plugins/llamafactory.py:_read": CALLER,
    "plugins/swift.py:read_options": CALLER,
    "recovery/children.py:catches": SYSTEM,
    "recovery/replicas.py:_link": MEMORY,
    "recovery/replicas.py:_send_file": MEMORY,
    "recovery/replicas.py:list_parts": MEMORY,
    "recovery/replicas.py:send_part": MEMORY,
    "recovery/standby.py:_import_silently": OTHER,
    "recovery/supervisor.py:_read": CALLER,
    "report/html.py:": OURS,
    "report/run_data.py:_saved_goodput": "state of Trainer",
    "report/sweep.py:_launch": PROGRAM,
    "report/sweep.py:failure_reason": PROGRAM,
    "report/watch/live.py:ask_for_save": OTHER,
    "report/watch/page.py:": OURS,
    "trainer/accumulation.py:_after_constant_batch": VERIFIED,
    "parallel/groups.py:why_not_loadable": OTHER,
    "tune/launch_command.py:read_command": CALLER,
    "tune/trial.py:_error": PROGRAM,
    "tune/trial.py:run_trial": PROGRAM,
    "tune/tune_command.py:_measure_machine": PROGRAM,
    "why/run_folder.py:_logs_of_trainer": "compared state",
    "core/records.py:_is_ended": "resumed measurements",
    "core/text_files.py:bounded_lines": CALLER,
    "core/text_files.py:open_regular": CALLER,
    "recovery/children.py:exit_code_of": SYSTEM,
    "why/run_folder.py:_setup_of_trace": "compared run",
    "why/trace_files.py:_read": "trace",
}
"""Each reader with its entry of `READERS`, or with why it has none."""


def test_every_reader_of_the_package_is_listed():
    assert sites() == set(SITES)
    assert {what for what in SITES.values() if what in READERS} <= set(READERS)
    for what in SITES.values():
        assert what in READERS or what in (OURS, MEMORY, SYSTEM, PROGRAM, PICKLES, VERIFIED, CALLER, OTHER, IMAGES), (
            what
        )
