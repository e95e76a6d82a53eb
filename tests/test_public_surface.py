"""The names that are promises, what importing them costs, and which package may import which."""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module

import pytest
import strategy_sites
from conftest import REPOSITORY

import hfscale
from benchmarks import __main__ as benchmarks
from hfscale import errors

PACKAGE = REPOSITORY / "hfscale"
HEAVY = ("torch", "transformers", "accelerate", "datasets", "peft", "deepspeed", "wandb")
ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"
FOUNDATION = ("errors", "core", "facts", "trainer")
"""What every package may import."""
TOP = ("__init__", "__main__", "capabilities", "cli")
"""Modules beside the packages, which may import any of them."""
MAX_IMPORTS_BETWEEN_CAPABILITIES = 126
MAX_STRATEGY_PLACES, MAX_STRATEGY_FILES, MAX_STRATEGY_LISTS = 37, 16, 1
MAX_ERRORS_WITH_A_LITERAL_FLAG = 8
"""Flags of a command line that is read as text, whoever gives it: `--config`, and those of a launch command."""
TOOLS = ("report", "check", "planner", "tune")
"""Packages that read the files of a run, or work before one; no package that runs in a training imports them."""
MAX_SHARE_OF_SCALING_CALLBACK = 0.42
"""Of the lines of code of the package, those that `ScalingCallback` can load."""


def imported_by(code):
    """Which of the heavy packages a fresh interpreter has loaded after `code`."""
    probe = f"import sys; {code}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=240)
    return done.stdout.splitlines()[-1].split()


@cache
@cache
def modules():
    """Every module of the package: (whole module path, file)."""
    paths = sorted(PACKAGE.rglob("*.py"))
    names = [".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return list(zip(names, paths, strict=True))


def package_of(name):
    """The package of a module, given by its whole path; a module beside the packages is its own."""
    return "__init__" if name == "hfscale" else name.split(".")[1]


def packages():
    """The packages of hfscale: those folders that have an `__init__.py`."""
    return sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def allowed_imports():
    """The table of docs/architecture.md: package -> packages that it may import, in the order of the table."""
    rows = re.findall(
        r"^\| `(\w+)(?:/|\.py)` \| [^|]+ \| ([^|]*) \|$", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {package: re.findall(r"`(\w+)`", imports) for package, imports in rows}


def forbidden_imports(imports, allowed):
    """Of (importer, imported) pairs of whole module paths, those that the table does not allow."""
    found = []
    for name, wanted in imports:
        if "hfscale" in (name, wanted) or package_of(name) in TOP or package_of(wanted) == "errors":
            continue
        package = package_of(name)
        if package_of(wanted) not in (package, *allowed.get(package, ())):
            found.append(f"{name} imports {wanted}")
    return found


def nodes_that_run(tree):
    """The nodes of a module without those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node
            yield from nodes_that_run(node)


@cache
def hfscale_imports(path, nodes=ast.walk):
    return tuple(_hfscale_imports(path, nodes))


def _hfscale_imports(path, nodes):
    known = {name for name, _ in modules()}
    for node in nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hfscale":
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from [name for name in inside if name in known] or [node.module]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "hfscale")


def test_every_public_name_is_there_and_dir_lists_them():
    for name in hfscale.__all__:
        assert getattr(hfscale, name) is not None
    assert set(dir(hfscale)) == set(hfscale.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hfscale.nothing


def test_the_promised_names_of_this_version():
    promised = {
        "ScalingCallback",
        "LRScalingCallback",
        "SpotCheckpointCallback",
        "CommHealthCallback",
        "ScalingMetricsCallback",
        "SampleGenerationCallback",
        "TraceCallback",
        "WeightAveragingCallback",
        "estimate",
        "initialize_at_width",
        "latest_checkpoint",
        "load_once",
        "plan",
        "ParallelLayout",
        "ModelShape",
        "errors",
        "ParallelTrainer",
        "ParallelArguments",
        "Muon",
    }
    assert promised <= set(hfscale.__all__)
    assert issubclass(hfscale.errors.HfScaleError, Exception)


@pytest.mark.parametrize(
    "code",
    [
        "import hfscale",
        "from hfscale import ModelShape, ParallelLayout, errors",
        "import hfscale.facts.hardware, hfscale.facts.lr_rules",
        "import hfscale.checkpoint.store; hfscale.latest_checkpoint",
        "import hfscale.cli; hfscale.cli.main(['--help'])",
        "import hfscale.cli; hfscale.cli.main(['configs', 'list'])",
        "import hfscale.cli; hfscale.cli.main(['plan', 'llama-3.1-8b', '--gpu', 'H100', '--gpus', '8'])",
        "import hfscale; hfscale.estimate, hfscale.plan",
        "import hfscale.cli; hfscale.cli.main(['report', '/nowhere']), hfscale.cli.main(['autostop', '--', 'x'])",
        "import hfscale.cli; hfscale.cli.main(['sweep', '--', '/nowhere']), hfscale.cli.main(['watch', '/nowhere'])",
    ],
)
def test_modules_without_torch_load_none_of_it(code):
    assert imported_by(code) == []


def test_the_probe_itself_can_fail():
    assert "torch" in imported_by("import hfscale.core.collectives")


@pytest.mark.timing
def test_importing_hfscale_takes_under_50_ms_of_cpu_time():
    probe = "import time; begun = time.process_time(); import hfscale; print(time.process_time() - begun)"
    times = [
        float(subprocess.run([sys.executable, "-c", probe], capture_output=True, check=True, timeout=60).stdout)
        for _ in range(5)
    ]
    assert min(times) < 0.05


@cache
def all_imports():
    return [(name, wanted) for name, path in modules() for wanted in hfscale_imports(path)]


def test_packages_import_what_the_table_of_the_architecture_allows():
    assert sorted(allowed_imports()) == sorted([*packages(), "scaling"])
    allowed = allowed_imports() | {"errors": ["core"]}  # how an error names a parameter
    assert forbidden_imports(all_imports(), allowed) == []


def test_an_import_that_the_table_does_not_allow_is_found_by_its_whole_path():
    allowed = {"health": ["core", "checkpoint"], "core": []}
    assert forbidden_imports([("hfscale.health.monitor", "hfscale.metrics.tokens")], allowed)
    assert forbidden_imports([("hfscale.core.records", "hfscale.checkpoint.store")], allowed)
    assert not forbidden_imports([("hfscale.health.monitor", "hfscale.checkpoint.store")], allowed)


def test_the_table_of_the_architecture_has_no_import_too_many():
    real = {(package_of(name), package_of(wanted)) for name, wanted in all_imports() if wanted != "hfscale"}
    table = {(package, wanted) for package, imports in allowed_imports().items() for wanted in imports}
    assert sorted(pair for pair in table - real if pair[1] not in FOUNDATION) == []


def test_packages_do_not_import_each_other_in_a_circle():
    """The table lists a package after those that it imports."""
    seen = []
    for package, imports in allowed_imports().items():
        assert set(imports) <= set(seen), f"{package} imports {set(imports) - set(seen)}, which are listed later"
        seen.append(package)


def test_few_imports_cross_from_one_capability_to_another():
    crossing = [
        (name, wanted)
        for name, wanted in all_imports()
        if wanted != "hfscale"
        and package_of(name) not in (*FOUNDATION, *TOP)
        and package_of(wanted) not in (package_of(name), *FOUNDATION)
    ]
    assert len(crossing) <= MAX_IMPORTS_BETWEEN_CAPABILITIES


def test_few_places_ask_which_strategy_runs():
    """`Strategy` answers with facts: lower these numbers where fewer ask, and never raise them."""
    places, lists = strategy_sites.count()
    assert places.total() <= MAX_STRATEGY_PLACES
    assert len(places) <= MAX_STRATEGY_FILES
    assert len(lists) <= MAX_STRATEGY_LISTS


def errors_with_a_literal_flag(source):
    """The lines of a module that raise an error whose message begins with a literal flag."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            message = node.exc.args[0]
            first = message.values[0] if isinstance(message, ast.JoinedStr) else message
            if isinstance(first, ast.Constant) and str(first.value).startswith("--"):
                found.append(node.lineno)
    return found


def test_few_errors_begin_with_a_literal_flag():
    """`spelled` and `ParameterError` name an option as its caller wrote it: lower the number, and never raise it."""
    found = [
        f"{name}:{line}"
        for name, path in modules()
        for line in errors_with_a_literal_flag(path.read_text(encoding="utf-8"))
    ]
    assert len(found) <= MAX_ERRORS_WITH_A_LITERAL_FLAG, found


def test_an_error_that_begins_with_a_literal_flag_is_found():
    lines = (
        'raise UsageError("--to is missing")',
        'raise UsageError(f"--to is {to}") from None',
        "raise UsageError(f\"{spelled('to')} is missing\")",
        'raise ParameterError("to", to, "--from too")',
        "raise",
    )
    assert errors_with_a_literal_flag("\n".join(lines)) == [1, 2]


def imports_of_tools(imports):
    """The imports of tools by modules that run in a training: all that are neither tools nor at the top."""
    return {
        (name, wanted)
        for name, wanted in imports
        if package_of(name) not in (*TOOLS, *TOP) and package_of(wanted) in TOOLS
    }


def test_no_package_of_a_training_imports_a_tool():
    """The dry run of `parallel` compares its model with the planner's."""
    assert {name for name, _ in imports_of_tools(all_imports())} == {"hfscale.parallel.dry_run"}


def test_an_import_of_a_tool_is_found():
    lazy = ("hfscale.metrics.wandb_run", "hfscale.report.page")
    above = ("hfscale.report.page", "hfscale.metrics.goodput")
    assert imports_of_tools([lazy, above, ("hfscale.cli", "hfscale.planner.plan")]) == {lazy}


def lines_of_code(source):
    """The number of lines that hold code: no comments, and no strings that stand alone."""
    strings = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    strings = [node for node in strings if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)]
    prose = {number for node in strings for number in range(node.lineno, node.end_lineno + 1)}
    no_code = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in no_code:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - prose)


def closure_of(name):
    """What importing a module can load: its imports, also those in functions, the packages above it, and theirs."""
    files = dict(modules())
    found, waiting = set(), [name]
    while waiting:
        module = waiting.pop()
        if module in files and module not in found:
            found.add(module)
            parts = module.split(".")
            waiting += [".".join(parts[:length]) for length in range(1, len(parts))]
            waiting += hfscale_imports(files[module], nodes_that_run)
    return found


def test_scaling_callback_can_load_a_part_of_the_package_only():
    lines = {name: lines_of_code(path.read_text(encoding="utf-8")) for name, path in modules()}
    closure = closure_of("hfscale.scaling")
    assert {"hfscale.metrics.wandb_run", "hfscale.core.run_reader", "hfscale.metrics"} <= closure
    assert sum(lines[name] for name in closure) <= MAX_SHARE_OF_SCALING_CALLBACK * sum(lines.values())


def test_lines_of_code_are_those_without_docstrings_and_comments():
    assert lines_of_code('"""What it is\nfor."""\n\n# why\nx = [\n    1,\n]\n') == 3


@pytest.mark.long
def test_a_training_finds_its_report_without_loading_it_first():
    probe = (
        "import sys; import hfscale.scaling; before = 'hfscale.report' in sys.modules\n"
        "from hfscale.core.run_reader import RunReader, run_reader; reader = run_reader()\n"
        "asked = [name for name in vars(RunReader) if not name.startswith('_')]\n"
        "print(before, sorted(asked), all(callable(getattr(reader, name)) for name in asked))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.splitlines()[-1] == "False ['card_facts', 'write_report'] True"


def test_nothing_else_is_at_the_top():
    entries = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert entries == {*allowed_imports(), *TOP, "errors"}


def test_no_imports_go_round_in_a_circle():
    """Not inside of a package either, nor for the sake of types alone."""
    graph = {name: {wanted for wanted in hfscale_imports(path) if wanted != name} for name, path in modules()}
    graph["hfscale"] = set()  # its names load when they are used
    TopologicalSorter(graph).prepare()


def strings_of(source):
    """The string constants of a module's code, without those that stand alone in a line: docstrings are prose."""
    tree = ast.parse(source)
    prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in prose]
    return [node.value for node in constants if isinstance(node.value, str)]


def named_paths(source):
    """The paths of packages and modules of hfscale that the strings of a module contain."""
    found = [path.rstrip("./") for text in strings_of(source) for path in re.findall(r"hfscale/[\w/.]+", text)]
    return [path for path in found if (REPOSITORY / path).is_dir() or path.endswith(".py")]


def test_no_module_names_another_by_its_path():
    """A string such as "/hfscale/islands/callback.py" breaks silently when a file is renamed."""
    for name, path in modules():
        assert named_paths(path.read_text(encoding="utf-8")) == [], name


def test_a_path_of_a_module_is_found_in_code_and_not_in_docstrings():
    assert named_paths('FILES = ("/hfscale/checkpoint/", "a/hfscale/islands/callback.py")') == [
        "hfscale/checkpoint",
        "hfscale/islands/callback.py",
    ]
    assert (
        named_paths('def f():\n    """Read hfscale/checkpoint/store.py."""\n    return "hfscale/facts/a.toml"') == []
    )


def test_the_drawing_of_the_errors_is_the_tree():
    drawn, stack = {}, []
    for line in (errors.__doc__ or "").splitlines():
        names = [word for word in line.replace("│", " ").split() if word.endswith(("Error", "Error)"))]
        if names and ("──" in line or line.strip().startswith("HfScaleError")):
            depth = line.index(names[0]) // 4
            stack = [*stack[: depth - 1], names[0]]
            drawn[names[0]] = stack[-2] if len(stack) > 1 else "Exception"
    real = {
        name: cls.__mro__[1].__name__
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, errors.HfScaleError)
    }
    assert drawn == real


def test_wrong_usage_is_a_value_error_with_exit_code_2():
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, errors.HfScaleError):
            is_usage = issubclass(cls, errors.UsageError)
            assert issubclass(cls, ValueError) == is_usage
            in_use = cls is errors.OutputDirInUseError
            is_missing_package = cls is errors.MissingDependencyError
            assert cls.exit_code == (75 if in_use else 2 if is_usage or is_missing_package else 1)


def test_every_module_opens_with_what_it_is_for():
    for name, path in modules():
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{name} has no docstring"


def test_mypy_checks_the_package_strictly_and_ignores_no_more_errors():
    config = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    assert config["files"] == ["hfscale"]
    assert config["strict"]
    assert not any(section.get("ignore_errors") for section in config["overrides"])
    assert not config.get("ignore_errors")
    for name, path in modules():
        assert "# mypy:" not in path.read_text(encoding="utf-8"), f"{name} has a configuration of its own"


def test_each_type_error_that_is_ignored_has_its_code():
    for name, path in modules():
        assert not re.search(r"# type: ignore(?!\[[a-z-]+\])", path.read_text(encoding="utf-8")), name


# It replaces a list of names by placeholders and rejects all others; tests/checkpoint/test_reshape.py attacks it.
RESTRICTED_UNPICKLER = "hfscale.checkpoint.pickles"


def test_nothing_unpickles_or_calls_a_shell():
    banned = ("import pickle", "shell=True", "os.system", "weights_only=False", "yaml.load(", "eval(")
    for name, path in modules():
        text = path.read_text(encoding="utf-8").replace(".eval()", "").replace("model.eval(", "")
        if name == RESTRICTED_UNPICKLER:
            text = text.replace("import pickle\n", "")
        assert not [word for word in banned if word in text], name


@pytest.mark.parametrize("name", benchmarks.NAMES)
def test_every_benchmark_can_be_begun(name):
    assert callable(import_module(f"benchmarks.{name}").measure)
