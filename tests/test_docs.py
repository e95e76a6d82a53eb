"""README, CONTRIBUTING and docs/: every path, flag, command, link and Python block in them is real."""

import ast
import functools
import inspect
import io
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from accelerate.commands.to_fsdp2 import to_fsdp2_command, to_fsdp2_command_parser
from conftest import REPOSITORY
from test_recipe_yamls import FLAGS, command_problems, shell_commands
from tiny import RandomTokens, tiny_arguments, tiny_model, tiny_tokenizer, tiny_trainer
from transformers import Trainer

import hfscale
from benchmarks.__main__ import NAMES as BENCHMARKS
from hfscale import ParallelArguments, ScalingCallback, WeightAveragingCallback
from hfscale.cli import COMMANDS, main
from hfscale.planner.plot import labels_of
from hfscale.recipe.arguments import DataArguments, ScalingArguments
from hfscale.recipe.mix import SOURCE_FLAGS
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.report.html import STYLE

README = REPOSITORY / "README.md"
CONTRIBUTING = REPOSITORY / "CONTRIBUTING.md"
PAGES = sorted((REPOSITORY / "docs").glob("*.md"))
DOCUMENTS = [README, CONTRIBUTING, *PAGES, *sorted((REPOSITORY / "recipes").rglob("README.md"))]
DOCUMENTS += [REPOSITORY / "AGENTS.md", REPOSITORY / "SECURITY.md", REPOSITORY / "hfscale" / "SKILL.md"]
DOCUMENTS += [REPOSITORY / "CHANGELOG.md", REPOSITORY / "launch" / "README.md"]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


GROUPS_OF_COMMANDS = ("checkpoints", "configs")
NEEDS_MORE_THAN_ARITHMETIC = ("--calibrate", "--plot", "--table", "local-")
OF_OTHER_TOOLS = {"--shm-size", "--stop-timeout", "--signal", "--version", "--help", "--strict", "--save-dir"}
COMMANDS_IN_PROSE = ("hfscale ", "make ", "python -m benchmarks", "accelerate launch ")
PROGRAMS = ("accelerate", "docker", "hf", "hfscale", "ip", "kubectl", "make", "pip", "python", "sbatch", "torchrun")
PROMPTED = re.compile(r"^ *\$ (.+)$", re.MULTILINE)
FOLDERS = ("accelerate_configs", "benchmarks", "docs", "ds_configs", "hfscale", "launch", "recipes", "tests")

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^ *```", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: [^>]+ -->\s*\Z")
REPOSITORY_PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./*-]*[\w/*]")
LINK = re.compile(r"(?:\[([^]]*))?\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")
CALLBACK = re.compile(r"\w+Callback\(.*\)")


def named(path):
    return path.relative_to(REPOSITORY).as_posix()


def text_of(path):
    """The text of a file; of a notebook that of its prose, whose code is run as a whole."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return text


def code_spans(markdown):
    """The inline code of a document, outside of its fenced blocks."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", markdown))


def commands_in_prose(markdown, begins):
    """The inline code that begins with one of these words and is a complete command."""
    spans = [span for span in code_spans(markdown) if span.startswith(begins) and not set("…|") & set(span)]
    return [shlex.split(span) for span in spans]


@functools.cache
def flags_of(*command):
    """The flags that `hfscale COMMAND --help` prints."""
    shown = io.StringIO()
    with redirect_stdout(shown):
        main([*command, "--help"])
    return set(re.findall(r"--[a-z][\w-]*", shown.getvalue()))


def commands_of(group):
    """The commands of `hfscale checkpoints` and `hfscale configs`."""
    shown = io.StringIO()
    with redirect_stdout(shown):
        main([group, "--help"])
    return re.findall(r"^  ([a-z]+) ", shown.getvalue().split("Commands:")[1], re.MULTILINE)


def hfscale_problems(command):
    """What is wrong with the `hfscale …` part of a command: an unknown subcommand or flag."""
    starts = [i for i, word in enumerate(command) if word == "hfscale" and (i == 0 or command[i - 1] == "-m")]
    if not starts:
        return []
    words = command[starts[0] + 1 :]
    if not words or words[0].startswith("--") or words[0] == "COMMAND":
        return []
    path, rest = words[:1], words[1:]
    if path[0] not in COMMANDS:
        return [f"no command hfscale {path[0]}"]
    if path[0] in GROUPS_OF_COMMANDS and rest:
        if rest[0] not in commands_of(path[0]):
            return [f"no command hfscale {path[0]} {rest[0]}"]
        path, rest = [*path, rest[0]], rest[1:]
    own = rest[: rest.index("--")] if "--" in rest else rest
    given = [token.partition("=")[0] for token in own if token.startswith("--")]
    return [f"hfscale {' '.join(path)} has no {flag}" for flag in given if flag not in flags_of(*path)]


def make_problems(command):
    if command[0] != "make":
        return []
    targets = set(re.findall(r"^([\w-]+):", text_of(REPOSITORY / "Makefile"), re.MULTILINE))
    return [f"no target {word}" for word in command[1:2] if word not in targets]


def benchmark_problems(command):
    joined = " ".join(command)
    modules = re.findall(r"-m benchmarks\.(\w+)", joined)
    problems = [f"no module benchmarks.{name}" for name in modules if not find_spec(f"benchmarks.{name}")]
    found = re.search(r"-m benchmarks ([\w ]+)", joined)
    return problems + [
        f"no benchmark {name}" for name in (found[1].split() if found else ()) if name not in BENCHMARKS
    ]


def path_problems(words):
    paths = [match[0].rstrip("/") for word in words for match in [REPOSITORY_PATH.match(word)] if match]
    return [f"no path {path}" for path in paths if not any(REPOSITORY.glob(path))]


def shell_problems(markdown):
    """What is wrong with the shell blocks of a document, and with the commands in its inline code."""
    commands = [*shell_commands(markdown), *commands_in_prose(markdown, COMMANDS_IN_PROSE)]
    problems = []
    for command in commands:
        problems += command_problems(command) + hfscale_problems(command) + make_problems(command)
        problems += benchmark_problems(command) + path_problems(" ".join(command).replace("=", " ").split())
    return problems


@functools.cache
def all_flags():
    of_accelerate = set(launch_command_parser()._option_string_actions)
    of_hfscale = [flags_of(name) for name in COMMANDS if name not in GROUPS_OF_COMMANDS]
    of_hfscale += [flags_of(group, name) for group in GROUPS_OF_COMMANDS for name in commands_of(group)]
    of_recipes = {f"--{name}" for name in FLAGS} | {f"--no_{name}" for name in FLAGS}
    return of_accelerate.union(*of_hfscale, of_recipes, OF_OTHER_TOOLS)


def prose_problems(markdown):
    """Flags and repository paths in inline code that do not exist."""
    spans = code_spans(markdown)
    problems = path_problems(spans)
    for span in spans:
        flag = re.match(r"(?:… )?(--[a-z][\w-]*)", span)
        if flag and flag[1] not in all_flags():
            problems.append(f"no flag {flag[1]}")
    return problems


def slugs(path):
    """The anchors of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(path)), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    return {"#" + heading.replace(" ", "-") for heading in plain}


def link_problems(path):
    problems = []
    for text, target, anchor in LINK.findall(FENCE.sub("", text_of(path))):
        goal = (path.parent / target).resolve() if target else path
        if not goal.exists():
            problems.append(f"no file {target}")
        elif re.fullmatch(r"[\w./-]+\.md", text) and Path(text).name != goal.name:
            problems.append(f"{text} leads to {target}")
        elif anchor and goal.suffix == ".md" and anchor not in slugs(goal):
            problems.append(f"no heading {target}{anchor}")
    return problems


def python_blocks(markdown):
    """Of each Python block: its code, and whether the document says that it is not to be run."""
    for found in FENCE.finditer(markdown):
        if found["language"] == "python":
            yield inspect.cleandoc(found["code"]), bool(NOT_RUN.search(markdown[: found.start()]))


def scripts_of_diff(markdown):
    """Of each diff block the script before and after."""
    for found in FENCE.finditer(markdown):
        if found["language"] == "diff":
            lines = found["code"].splitlines()
            yield tuple("\n".join(line[1:] for line in lines if not line.startswith(mark)) for mark in "+-")


def names_for_blocks(tmp_path):
    """What the blocks take for granted: a model, arguments, a dataset."""
    arguments = tiny_arguments(tmp_path / "run", max_steps=2, save_strategy="steps", save_steps=1)
    return {"model": tiny_model(), "args": arguments, "dataset": RandomTokens(16)}


def public_names():
    return set(hfscale.__all__) - {"__version__"}


def test_the_readme_is_short():
    assert len(text_of(README).splitlines()) <= 200
    assert len(text_of(README).split()) <= 1500


def test_the_readme_shows_the_installation_before_any_code():
    first = next(FENCE.finditer(text_of(README)))
    assert "pip install" in first["code"]


def test_the_picture_of_a_plan_shows_the_choices_of_today():
    """`draw` writes their names into the file; the picture is the upper left panel of the drawing."""
    (words,) = [command for command in shell_commands(text_of(README)) if "--plot" in command]
    command = list(words)
    gpu, gpus = command[command.index("--gpu") + 1], int(command[command.index("--gpus") + 1])
    image = (REPOSITORY / "docs" / "images" / "plan.png").read_bytes()
    start = image.index(b"tEXtDescription")
    chunk = image[start + 4 : start + 4 + int.from_bytes(image[start - 4 : start])]
    shown = chunk.partition(b"\0")[2].decode().split("; ")
    assert labels_of(hfscale.plan(command[2], gpu=gpu, gpus=gpus)) == shown


def test_pictures_are_small():
    pictures = list((REPOSITORY / "docs" / "images").iterdir())
    names = {"plan.png", "report.png", "step.svg", "watch-1280.png", "watch-400.png"}
    assert {picture.name for picture in pictures} == names
    assert max(picture.stat().st_size for picture in pictures) < 150_000


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_commands_are_real(path):
    assert shell_problems(text_of(path)) == []


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("hfscale plan x --gpuss 8", "hfscale plan has no --gpuss"),
        ("accelerate launch -m hfscale check --deadlin 3", "hfscale check has no --deadlin"),
        ("hfscale checkpoints covert a b", "no command hfscale checkpoints covert"),
        ("hfscale checkpoints convert a b --to_ zero3", "hfscale checkpoints convert has no --to_"),
        ("hfscale sweep --gpus 1 -- recipes/ddp/train.py --block_sise 4", "no flag --block_sise"),
        ("NODE_RANK=0 launch/multinode/accelerat.sh", "no path launch/multinode/accelerat.sh"),
        ("python -m benchmarks callback_overhed", "no benchmark callback_overhed"),
        ("make trian", "no target trian"),
        ("accelerate launch --num_process_es 2 recipes/ddp/train.py", "accelerate rejects"),
    ],
)
def test_a_wrong_command_is_seen(block, problem):
    found = shell_problems(f"text\n```bash\n{block}\n```\n")
    assert [one for one in found if one.startswith(problem)]


def test_a_wrong_command_in_prose_is_seen():
    assert shell_problems("or `hfscale plan x --gpuss 8`, inline") == ["hfscale plan has no --gpuss"]


@pytest.mark.parametrize("path", [README, CONTRIBUTING, *PAGES], ids=named)
def test_flags_and_paths_in_prose_are_real(path):
    assert prose_problems(text_of(path)) == []


def test_a_wrong_flag_or_path_in_prose_is_seen():
    assert prose_problems("use `--block_sise 4` and `recipes/ddp/trian.py`") == [
        "no path recipes/ddp/trian.py",
        "no flag --block_sise",
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_links_lead_somewhere(path):
    assert link_problems(path) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_code_in_tables_has_no_bars(path):
    """GitHub shows an escaped bar as a bar, and the site with its backslash: what one copies from there fails."""
    rows = [line for line in text_of(path).splitlines() if line.startswith("|")]
    assert [span for row in rows for span in re.findall(r"`[^`]*`", row) if "\\|" in span] == []


def test_a_wrong_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One heading\n[a](page.md#one-heading) [b](page.md#two) [c](none.md) [docs/d.md](page.md)\n")
    assert link_problems(page) == ["no heading page.md#two", "no file none.md", "docs/d.md leads to page.md"]


def planning_commands():
    for path in (README, *PAGES):
        for command in shell_commands(text_of(path)):
            joined = shlex.join(command)
            is_plan = command[0] == "hfscale" and command[1] in ("plan", "estimate", "configs")
            if is_plan and not any(word in joined for word in NEEDS_MORE_THAN_ARITHMETIC):
                yield joined


@pytest.mark.parametrize("command", sorted(set(planning_commands())))
def test_planning_commands_run(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def commands_about_runs():
    for path in (README, *PAGES):
        for command in shell_commands(text_of(path)):
            if command[0] == "hfscale" and command[1] in ("checkpoints", "report", "why"):
                yield shlex.join(command)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The output directory of a training of four steps, with a checkpoint."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    callbacks = [ScalingCallback(), WeightAveragingCallback(ema_decay=0.9)]
    tiny_trainer(folder, *callbacks, save_strategy="steps", save_steps=4, tokenizer=tiny_tokenizer()).train()
    return folder


@pytest.mark.parametrize("command", sorted(set(commands_about_runs())))
def test_commands_about_runs_run(command, trained, tmp_path, monkeypatch, capsys):
    """Each folder that a command names is a run here; a checkpoint that it names has its own number."""
    monkeypatch.chdir(tmp_path)
    for run in re.findall(r"runs/[\w-]+", command):
        if run != "runs/zero3":  # what a conversion writes
            shutil.copytree(trained, run, dirs_exist_ok=True)
    argv = shlex.split(re.sub(r"(?<!zero3/)checkpoint-\d+", "checkpoint-4", command))[1:]
    assert main(argv) == 0
    assert capsys.readouterr().out


def rows_of_commands():
    """The commands that docs/how_tested.md says how it runs, or why not."""
    page = text_of(REPOSITORY / "docs" / "how_tested.md")
    section = page.split("## The commands of the documentation")[1].split("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| `")]
    return [words for row in rows for words in re.findall(r"`([^`]+)`", row.split("|")[1])]


def rows_used(markdown, known):
    """Of each command of a document the row that it is in, or the command itself if it is in none."""
    prompted = [words for line in PROMPTED.findall(markdown) for words in shell_commands(f"```bash\n{line}\n```\n")]
    in_prose = commands_in_prose(markdown, tuple(f"{program} " for program in PROGRAMS))
    for command in [*shell_commands(markdown), *prompted, *in_prose]:
        words = list(itertools.dropwhile(re.compile(r"\w+=").match, command))
        line = " ".join(words).removeprefix("sudo ")
        found = [start for start in known if (line + " ").startswith(f"{start} ")]
        yield from found or ([f"no row: {line}"] if words else [])


def test_every_command_of_the_documentation_is_run_or_the_page_says_why_not():
    known = rows_of_commands()
    used = {f"{named(path)}: {row}" for path in [*DOCUMENTS, *NOTEBOOKS] for row in rows_used(text_of(path), known)}
    assert sorted(row for row in used if ": no row: " in row) == []
    assert set(known) - {row.partition(": ")[2] for row in used} == set()


@pytest.mark.parametrize("text", ["```bash\nA=1 mpirun x\n```\n", "```text\n$ mpirun x\n```\n", "run `ip link`, then"])
def test_a_command_in_no_row_is_seen(text):
    (row,) = rows_used(text, ["ip -br address", "hfscale plan"])
    assert row in ("no row: mpirun x", "no row: ip link")


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_python_blocks_compile(path):
    for code, _ in python_blocks(text_of(path)):
        compile(code, named(path), "exec")


@pytest.mark.parametrize("path", [path for path in (README, *PAGES) if any(python_blocks(text_of(path)))], ids=named)
def test_python_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = names_for_blocks(tmp_path)
    for code, not_run in python_blocks(text_of(path)):
        if not not_run:
            exec(compile(code, named(path), "exec"), names)  # noqa: S102 - our own documentation
    if "scaling" in names:
        trainer = Trainer(
            model=names["model"], args=names["args"], train_dataset=names["dataset"], callbacks=[names["scaling"]]
        )
        assert trainer.train().global_step == 2


@pytest.mark.parametrize("path", [README, REPOSITORY / "docs" / "own_trainer.md"], ids=named)
def test_the_script_runs_before_and_after_its_diff(path, tmp_path):
    (before, after), *others = scripts_of_diff(text_of(path))
    assert not others
    for script, steps, checkpoint in ((before, 2, None), (after, 2, None), (after, 4, "checkpoint-2")):
        names = names_for_blocks(tmp_path / ("after" if script == after else "before"))
        names["args"].max_steps = steps
        if checkpoint:
            assert Path(hfscale.latest_checkpoint(names["args"].output_dir)).name == checkpoint
        exec(compile(script, named(path), "exec"), names)  # noqa: S102 - our own documentation
        assert names["trainer"].state.global_step == steps


@pytest.mark.parametrize("path", [README, *PAGES], ids=named)
def test_callbacks_in_prose_can_be_made(path):
    for span in code_spans(text_of(path)):
        if CALLBACK.fullmatch(span) and "…" not in span:
            call = ast.parse(span, mode="eval").body
            keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
            getattr(hfscale, call.func.id)(**keywords)


def data_problems(markdown):
    """YAML and JSON blocks that do not parse, and YAML keys that are no flag of a recipe, or of a source of a mix."""
    problems = []
    for found in FENCE.finditer(markdown):
        if found["language"] == "json":
            json.loads(found["code"])
        elif found["language"] == "yaml":
            content = yaml.safe_load(found["code"])
            if "distributed_type" in content:  # a config of Accelerate, which its own parser reads elsewhere
                continue
            known = {*SOURCE_FLAGS, "weight"} if isinstance(content, list) else FLAGS
            keys = itertools.chain(*content) if isinstance(content, list) else content
            problems += [f"no flag {key}" for key in keys if key not in known]
    return problems


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_yaml_and_json_blocks_are_real(path):
    assert data_problems(text_of(path)) == []


def test_a_wrong_key_in_a_yaml_block_is_seen():
    assert data_problems("```yaml\nblock_sise: 4\n```\n") == ["no flag block_sise"]


def test_the_index_for_programs_lists_every_page():
    listed = re.findall(r"^- \[([^]]+)\]\((\w+)\.html\): \S", text_of(REPOSITORY / "docs" / "llms.txt"), re.MULTILINE)
    assert sorted(page for _, page in listed) == [page.stem for page in PAGES]
    navigation = text_of(REPOSITORY / "mkdocs.yml")
    assert [title for title, page in listed if f"- {title}: {page}.md" not in navigation] == []


def test_every_page_is_linked_from_another_page():
    """The navigation and the index for programs are not enough: who reads one page should find the next."""
    linked = {
        REPOSITORY / "docs" / f"{page}.md"
        for path in (README, CONTRIBUTING, *PAGES)
        for page in re.findall(r"\]\((?:docs/)?(\w+)\.md", text_of(path))
        if page != path.stem
    }
    assert [path.stem for path in PAGES if path not in linked] == []


def test_the_api_page_lists_every_public_name():
    listed = re.findall(r"^::: hfscale\.(\w+)$", text_of(REPOSITORY / "docs" / "api.md"), re.MULTILINE)
    assert sorted(listed) == sorted(public_names())


def test_the_command_line_page_shows_every_command():
    shown = re.findall(r"^<!-- help: ([\w ]+) -->$", text_of(REPOSITORY / "docs" / "cli.md"), re.MULTILINE)
    plain = [name for name in COMMANDS if name not in GROUPS_OF_COMMANDS]
    grouped = [f"{group} {name}" for group in GROUPS_OF_COMMANDS for name in commands_of(group)]
    assert sorted(shown) == sorted(plain + grouped)


def test_every_flag_of_the_recipes_is_documented():
    own = (ModelArguments, DataArguments, ScalingArguments, ParallelArguments)
    documented = set(re.findall(r"`--(\w+)", "".join(map(text_of, PAGES))))
    assert [flag.name for group in own for flag in fields(group) if flag.name not in documented] == []


def test_every_config_and_launch_file_is_documented():
    strategies = set(code_spans(text_of(REPOSITORY / "docs" / "strategies.md")))
    configs = {path.stem for path in (REPOSITORY / "accelerate_configs").iterdir()}
    assert configs <= strategies
    multinode = set(code_spans(text_of(REPOSITORY / "docs" / "multinode.md")))
    started = [path for path in (REPOSITORY / "launch").rglob("*.*") if path.suffix not in (".md", ".dockerignore")]
    assert {named(path) for path in started if "__pycache__" not in path.parts} <= multinode


def test_the_planner_page_gives_the_measured_errors():
    """Each row of its table, recomputed from the result of the fit."""
    fit = json.loads(text_of(REPOSITORY / "benchmarks" / "results" / "planner_fit.json"))
    speed, memory, choice = (fit[f"{name}leave_one_source_out"] for name in ("", "memory_", "choice_"))
    page = text_of(REPOSITORY / "docs" / "planner_trust.md")
    table = page[page.index("| prediction | error |") :].split("\n\n")[0]
    shown = [row.split("|")[2].strip() for row in table.splitlines()[2:]]
    assert shown == [
        f"{speed['median_error']:.0%}",
        f"{speed['median_of_sources']:.0%}",
        f"{speed['within_20_percent']:.0%}",
        f"{max(source['median_error'] for source in speed['sources'].values()):.0%}",
        f"{memory['median_error']:.0%}",
        f"{choice['within_5_percent']} of {choice['groups']} groups",
    ]
    assert f"{speed['rows']} published runs" in page


def test_the_planner_page_gives_the_measured_errors_of_activations():
    found = json.loads(text_of(REPOSITORY / "benchmarks" / "results" / "activations.json"))
    page = text_of(REPOSITORY / "docs" / "planner_trust.md")
    for name, row in found["peaks"].items():
        numbers = f"{row['sequences']} x {row['seq_len']:,} | {row['counted_gib']} | {row['planned_gib']}"
        assert f"| {name} | {numbers} |" in page
    assert f"{found['summary']['models']} models of the catalogue" in page
    assert f"| {found['summary']['largest_error']:.1%} |" in page
    assert found["summary"]["largest_error"] < 0.03


def test_the_page_of_strategies_gives_the_measured_errors_of_gradients():
    found = json.loads(text_of(REPOSITORY / "benchmarks" / "results" / "gradient_accumulation.json"))
    page = text_of(REPOSITORY / "docs" / "strategies.md")
    shown = {"FSDP2": "fsdp2", "FSDP2 with `sync_each_batch`": "fsdp2, sync_each_batch", "ZeRO-1": "zero1"}
    for name, key in {**shown, "ZeRO-2, ZeRO-3": "zero3"}.items():
        errors = (found["summary"][key][variant] for variant in ("before", "after"))
        assert f"| {name} | {' | '.join(f'{one:.1e}' if one else 'below 1e-06' for one in errors)} |" in page
    assert found["summary"]["zero2"] == found["summary"]["zero3"]
    assert f"gradient of {found['micro_batches']} micro-batches on two processes" in page


def site_config():
    return yaml.safe_load(text_of(REPOSITORY / "mkdocs.yml"))


def test_the_site_lists_every_page():
    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)]

    assert sorted(pages(site_config()["nav"])) == sorted(path.name for path in PAGES)


@pytest.mark.long
def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="needs the extra docs: make docs")
    argv = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?https?:[^\s\">]+")
    for page in tmp_path.rglob("*.html"):
        assert not loaded.findall(text_of(page)), page.name
    for style in tmp_path.rglob("*.css"):
        assert not re.findall(r"url\([\"']?https?:", text_of(style)), style.name
    assert public_names() <= set(re.findall(r"[\w]+", text_of(tmp_path / "api.html")))


def test_every_cuda_path_names_a_test_that_exists():
    page = text_of(REPOSITORY / "docs" / "internals.md")
    of_paths, of_faults = page.split("## CUDA")[1].split("### What a CPU hides")
    named = set(re.findall(r"`(test_\w+)`", of_paths))
    defined = set(re.findall(r"^def (test_\w+)", text_of(REPOSITORY / "tests" / "test_gpu.py"), re.MULTILINE))
    assert len(named) > 15
    assert named <= defined

    defined = {
        name
        for path in (REPOSITORY / "tests").rglob("test_*.py")
        for name in re.findall(r"^ *def (test_\w+)", text_of(path), re.MULTILINE)
    }
    rows = [row.strip("|").split("|") for row in of_faults.splitlines() if row.startswith("| ")][1:]
    for _, _, known, test in rows:
        assert known.strip() in ("tested on CPU", "by reading", "measured on GPU")
        assert set(re.findall(r"`(test_\w+)`", test)) <= defined, test
        assert bool(test.strip()) == (known.strip() != "by reading")
    assert len(rows) > 25


def test_the_config_of_fsdp1_becomes_the_one_that_the_page_shows(tmp_path):
    page = text_of(REPOSITORY / "docs" / "migration.md")
    before, after = [found["code"] for found in FENCE.finditer(page) if found["language"] == "yaml"]
    (tmp_path / "fsdp1.yaml").write_text(before)
    paths = ["--config_file", str(tmp_path / "fsdp1.yaml"), "--output_file", str(tmp_path / "fsdp2.yaml")]
    to_fsdp2_command(to_fsdp2_command_parser().parse_args(paths))
    assert yaml.safe_load((tmp_path / "fsdp2.yaml").read_text()) == yaml.safe_load(after)


def words_of_prose(markdown):
    """The words of a page outside of code blocks, tables and comments."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", markdown), flags=re.DOTALL)
    return len(" ".join(line for line in text.splitlines() if not line.lstrip().startswith("|")).split())


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_a_page_is_read_in_one_sitting(path):
    """At most 1,500 words of prose; pages that people read from the beginning to the end count their tables too."""
    text = text_of(path)
    assert words_of_prose(text) <= 1500, "split the page by what its reader wants"
    if path.stem in ("choose", "faq", "glossary", "migration", "tokenized_data", "trl_spot", "beside_other_programs"):
        assert len(text.split()) <= 1500


def test_a_long_page_is_seen():
    block = "```bash\nmake test\n```\n| a | table |\n<!-- a\ncomment -->\n"
    assert words_of_prose(block * 1000 + "word " * 7) == 7


def test_the_glossary_is_in_order():
    terms = re.findall(r"^\| ([^|]+?) \|", text_of(REPOSITORY / "docs" / "glossary.md"), re.MULTILINE)[2:]
    assert terms == sorted(terms, key=str.lower)
    assert len(terms) > 30


def test_the_figure_of_a_step_is_made_from_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs"))
    import step_figure

    document = json.loads(text_of(step_figure.RECORDED))
    assert text_of(step_figure.PICTURE) == step_figure.picture(document), "run python docs/step_figure.py"
    parts = document["step_ms"]
    assert sum(parts[name] for name in step_figure.NAMES) == parts["busy"]
    saved_ms = parts["whole"] - step_figure.predicted(document)["whole"]
    casts = 18 * 1236e6  # bytes of all weights; the loss as tests/recipe/test_fused_loss.py counts it
    loss = (28 - 6) * step_figure.TOKENS * step_figure.VOCABULARY
    assert saved_ms == pytest.approx((casts + loss) / 2.899e12 * 1e3, abs=1)


@pytest.mark.parametrize("name", re.findall(r"gallery/(\w+\.html)", text_of(REPOSITORY / "docs" / "gallery.md")))
def test_reports_of_the_gallery_have_the_form_of_todays_reports(name):
    page = text_of(REPOSITORY / "docs" / "gallery" / name)
    assert f"<style>\n{STYLE}</style>" in page, "run python docs/gallery.py"
    assert "<script" not in page
    assert not re.search(r"(src|href)=.?https?:", page)
    assert "/tmp/" not in page
    assert not set(re.findall(r'"/[a-z]+/[^"<]*"', page))
    (row,) = [row for row in text_of(REPOSITORY / "docs" / "gallery.md").splitlines() if f"gallery/{name}" in row]
    assert [heading for heading in re.findall(r"\*([^*]+)\*", row) if f"<h2>{heading}</h2>" not in page] == []
