"""The names that are promises, what importing them costs, and which layer may import which."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module

import pytest
from conftest import REPOSITORY

import hfscale
from benchmarks import __main__ as benchmarks
from hfscale import errors
from hfscale._moved import MOVED

PACKAGE = REPOSITORY / "hfscale"
HEAVY = ("torch", "transformers", "accelerate", "datasets", "peft", "deepspeed", "wandb")
# Lowest first: a module imports from its own layer and from those before it in this list, never from a later one.
LAYERS = (
    "errors",
    "utils",
    "facts",
    "recovery",
    "preemption",
    "checkpoint",
    "islands",
    "metrics",
    "health",
    "planner",
    "report",
    "integrations",
    "parallel",
    "callbacks",
    "recipe",
    "cli",
)
OUTSIDE = ("_moved", "__main__")  # old import paths, and `python -m hfscale`


def imported_by(code):
    """Which of the heavy packages a fresh interpreter has loaded after `code`."""
    probe = f"import sys; {code}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()[-1].split()


@cache
def modules():
    """Every module of the package: (whole module path, file)."""
    paths = sorted(PACKAGE.rglob("*.py"))
    names = [".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return list(zip(names, paths, strict=True))


def layer(name):
    """The position in LAYERS of a module, given by its whole path."""
    top = name.split(".")[1]
    assert top in LAYERS, f"{name} is in no layer: add {top} to LAYERS"
    return LAYERS.index(top)


def upward_imports(imports):
    """Of (importer, imported) pairs of whole module paths, those that go from a lower to a higher layer."""
    inside = [
        pair for pair in imports if all(name != "hfscale" and name.split(".")[1] not in OUTSIDE for name in pair)
    ]
    return [f"{name} imports {wanted}" for name, wanted in inside if layer(wanted) > layer(name)]


def hfscale_imports(path):
    known = {name for name, _ in modules()}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
        "estimate",
        "latest_checkpoint",
        "plan",
        "ParallelLayout",
        "ModelShape",
        "errors",
        "ParallelTrainer",
        "ParallelArguments",
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
        "import hfscale.cli; hfscale.cli.main(['sweep', '--', '/nowhere'])",
    ],
)
def test_modules_without_torch_load_none_of_it(code):
    assert imported_by(code) == []


def test_the_probe_itself_can_fail():
    assert "torch" in imported_by("import hfscale.utils.collectives")


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


def test_imports_go_downward_only():
    assert upward_imports(all_imports()) == []


def test_an_upward_import_is_found_by_its_whole_path():
    assert upward_imports([("hfscale.parallel.mesh", "hfscale.callbacks.scaling")])
    assert upward_imports([("hfscale.health.monitor", "hfscale.integrations.trainer")])
    assert not upward_imports([("hfscale.callbacks.scaling", "hfscale.health.monitor")])


def test_every_layer_exists_and_nothing_else_is_at_the_top():
    entries = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert entries == {*LAYERS, *OUTSIDE, "__init__"}


def test_no_imports_go_round_in_a_circle():
    """Not on one floor either, nor for the sake of types alone."""
    graph = {name: {wanted for wanted in hfscale_imports(path) if wanted != name} for name, path in modules()}
    graph["hfscale"] = set()  # its names load when they are used
    TopologicalSorter(graph).prepare()


def crossing_imports(imports):
    """Imports of `hfscale.parallel` by a callback: the callbacks serve any Trainer."""
    return [
        pair for pair in imports if pair[0].startswith("hfscale.callbacks.") and pair[1].startswith("hfscale.parallel")
    ]


def test_callbacks_import_nothing_of_parallel():
    assert crossing_imports(all_imports()) == []
    assert crossing_imports([("hfscale.callbacks.scaling", "hfscale.parallel.mesh")])


def test_no_module_or_function_is_too_long():
    for _, path in modules():
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 600, f"{path.name} has {len(lines)} lines: does it hold two ideas?"
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef):
                first = node.body[1:2] or node.body
                length = (node.end_lineno or 0) - first[0].lineno + 1
                assert length <= 80, f"{path.name}: {node.name} has {length} lines"


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
            assert cls.exit_code == (75 if in_use else 2 if is_usage else 1)


def test_every_module_opens_with_what_it_is_for():
    for name, path in modules():
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{name} has no docstring"


# It replaces a list of names by placeholders and rejects all others; tests/test_reshape.py attacks it.
RESTRICTED_UNPICKLER = "hfscale.checkpoint.pickles"


def test_old_import_paths_of_recipes_give_the_moved_modules():
    for old, new in MOVED.items():
        with pytest.warns(DeprecationWarning, match=new):
            module = import_module(old)
        assert module is import_module(new)
        assert module.__spec__.name == new


RECIPES_IMPORTED = {
    "hfscale.arguments": ("ParallelArguments", "blaming", "check_evaluation"),
    "hfscale.compatibility": ("check_pairs",),
    "hfscale.compression": ("compress_gradients",),
    "hfscale.continuation": ("readable_checkpoint",),
    "hfscale.data": ("load_packed_datasets",),
    "hfscale.dry_run": ("dry_run", "print_dry_run"),
    "hfscale.entrypoint": ("check_output_dir", "end_if_preempted", "run"),
    "hfscale.export": ("save_final_model",),
    "hfscale.models": ("add_lora", "load_config", "load_empty_model", "load_model", "load_tokenizer"),
    "hfscale.parallelism": ("check_model", "finish_on_cpu", "set_up_parallelism"),
    "hfscale.parsing": ("parse_arguments",),
    "hfscale.resume": ("is_finished", "keep_global_batch", "resume_point"),
    "hfscale.sequence_parallel": ("collate_with_positions", "mend_sequence_parallel"),
    "hfscale.stage_flags": ("plan_stages",),
    "hfscale.strategy": ("check_launch",),
    "hfscale.summary": ("print_summary",),
}
"""The names that recipes of earlier versions imported from the old paths."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_import_paths_of_recipes_give_the_names_that_recipes_imported():
    assert RECIPES_IMPORTED.keys() == MOVED.keys()
    for old, names in RECIPES_IMPORTED.items():
        assert [name for name in names if not callable(getattr(import_module(old), name, None))] == [], old


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
