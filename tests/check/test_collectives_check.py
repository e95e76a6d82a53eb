"""`hfscale check --collectives` and `--parity`: plain scripts under real launchers, right ones and wrong ones."""

import json
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from ports import free_port
from results import keep_result

from hfscale.cli import main

SCRIPTS = REPOSITORY / "tests" / "workers" / "collectives"


def torchrun(*argv):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    return [*launcher, str(free_port()), *map(str, argv)]


@pytest.fixture
def check(capsys, tmp_path, monkeypatch):
    """Return a function that checks a command in an empty folder, and returns the report."""
    monkeypatch.chdir(tmp_path)
    Path(tmp_path, "ds_configs").symlink_to(REPOSITORY / "ds_configs")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))

    def run(*command, code, flags=()):
        found = main(["check", "--collectives", "--json", *flags, "--", *map(str, command)])
        report = json.loads(capsys.readouterr().out)
        assert found == code, report
        return report

    return run


def accelerate(config, *argv):
    """Return `accelerate launch` with a shipped config."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--config_file"]
    return [*launcher, str(REPOSITORY / "accelerate_configs" / f"{config}.yaml"), "--mixed_precision", "no", *argv]


def shown(side):
    """What a rank did, in one line without paths."""
    entry = side["entry"]
    how = side["ended"].partition(chr(10))[0]
    return f"rank {side['rank']}: {entry['name']} {entry['sizes']}, {entry['phase']}, {entry['module']}; {how}"


def keep(layout, case, report):
    """Keep what was found in the result file, if one is asked for."""
    found = report["difference"]
    entry = found and {side: shown(found[side]) for side in ("a", "b")}
    kind = found and found["kind"]
    keep_result(f"{layout}: {case}", {"found": kind, "sides": entry, "collectives": sum(report["phases"].values())})


@pytest.mark.recipes
@pytest.mark.world(2)
def test_a_plain_script_passes_and_leaves_nothing_behind(check, tmp_path):
    report = check(*torchrun(SCRIPTS / "trainer_script.py"), code=0)
    assert report["ok"] is True
    assert report["world_size"] == 2
    assert report["events"] == {"step": 6, "log": 8, "evaluation": 1, "save": 1, "end of data": 1}
    assert {"forward", "backward", "evaluation"} <= report["phases"].keys()
    assert [path.name for path in tmp_path.iterdir()] == ["ds_configs"]


@pytest.mark.recipes
@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("fault", "kind", "entered", "phase"),
    [
        ("barrier", "entry", "barrier", "script"),
        ("save", "entry", "allreduce", "save"),
        ("error", "missing", "allgather", "data"),
        ("group", "entry", "new_group", "evaluation"),
    ],
)
def test_a_collective_of_one_rank_is_found_with_both_stacks(check, fault, kind, entered, phase):
    report = check(*torchrun(SCRIPTS / "trainer_script.py", "--fault", fault), code=1)
    keep("ddp", f"rank 0 only: {fault}", report)
    found = report["difference"]
    assert (found["kind"], found["a"]["rank"], found["b"]["rank"]) == (kind, 0, 1)
    first = found["a"]["entry"]
    assert (first["name"], first["phase"]) == (entered, phase)
    assert any("trainer_script.py" in frame for frame in first["stack"])


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--collectives"], "give the launch command after --"),
        (["--collectives", "--", "/no/such/program"], "'/no/such/program' is not a program"),
        (["--collectives", "--steps", "0", "--", "true"], "--steps is 0"),
        (["--collectives", "--parity", "--", "true"], "--collectives and --parity are two checks"),
        (["--parity", "--", "true"], "true has started no rank"),
        (["--collectives", "--", "true"], "true has started no rank"),
        (["--", "true"], "'true' is not an option"),
    ],
)
def test_wrong_usage_is_one_line(capsys, argv, part):
    assert main(["check", *argv]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert len(error.splitlines()) == 1


def test_a_command_that_fails_by_itself_is_not_called_a_wait(capsys, tmp_path):
    script = Path(tmp_path, "fails.py")
    script.write_text("raise SystemExit('no data')\n")
    assert main(["check", "--collectives", "--", sys.executable, str(script)]) == 1
    assert "The command failed by itself:\n\nno data" in capsys.readouterr().out


@pytest.mark.recipes
@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("layout", "case"),
    [
        ("fsdp2", "text-only"),
        ("fsdp2", "generation"),  # DeepSpeed #8262, under FSDP2
        ("zero3", "text-only"),  # DeepSpeed #7170, ms-swift #9639
        ("zero3", "unused"),
        ("fsdp2", "clipping"),
    ],
)
def test_what_depends_on_the_batch_of_a_rank_is_found(check, layout, case):
    script = SCRIPTS / "layouts_script.py"
    report = check(*accelerate(layout, script, "--case", case), code=1)
    keep(layout, case, report)
    assert report["difference"]["kind"] in ("entry", "size", "missing")


@pytest.mark.recipes
@pytest.mark.world(2)
@pytest.mark.parametrize("layout", ["fsdp2", "zero3"])
def test_experts_of_which_each_rank_uses_another_one_are_found(check, layout):
    """Their sizes are equal, so that nothing waits, and each rank computes with a mixture of both."""
    script = SCRIPTS / "layouts_script.py"
    report = check(*accelerate(layout, script, "--case", "expert"), code=1)
    keep(layout, "expert", report)
    found = report["difference"]
    assert found["kind"] == "module"
    modules = [found[side]["entry"]["module"] for side in "ab"]
    assert [module.partition(".up")[0] for module in modules] == ["experts.0", "experts.1"]


@pytest.mark.recipes
@pytest.mark.world(2)
def test_ddp_itself_names_a_parameter_that_a_batch_does_not_use(check):
    report = check(*accelerate("ddp", SCRIPTS / "layouts_script.py", "--case", "unused"), code=1)
    assert report["difference"] is None  # it ends on all ranks, and none waits for another
    assert "parameters that were not used in producing loss" in report["failure"]


@pytest.mark.recipes
@pytest.mark.world(2)
@pytest.mark.parametrize(("layout", "recipe"), [("ddp", "ddp"), ("fsdp2", "sharded")])
def test_a_recipe_passes(check, layout, recipe):
    script = REPOSITORY / "recipes" / recipe / "train.py"
    report = check(*accelerate(layout, script, "--max_steps", "6", "--report_to", "none"), code=0)
    keep(layout, f"recipes/{recipe}", report)
    assert report["events"]["step"] == 6
    assert {"evaluation", "save", "end of data"} <= report["events"].keys()


@pytest.mark.recipes
@pytest.mark.world(2)
@pytest.mark.parametrize(("layout", "case"), [("fsdp2", "text-only"), ("ddp", "unused"), ("zero3", "expert")])
def test_scripts_that_do_what_the_threads_recommend_pass(check, layout, case):
    script = SCRIPTS / "layouts_script.py"
    report = check(*accelerate(layout, script, "--case", case, "--fixed"), code=0)
    keep(layout, f"{case}, fixed", report)
    assert report["events"]["step"] == 6


@pytest.mark.recipes
@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("uneven", "size"),  # rank 0 averages gradients, rank 1 sums its scores
        ("size", "size"),
    ],
)
def test_a_loop_without_trainer(check, case, kind):
    report = check(*torchrun(SCRIPTS / "loop_script.py", "--case", case), code=1)
    keep("loop", case, report)
    assert report["difference"]["kind"] == kind


@pytest.fixture
def parity(capsys, tmp_path, monkeypatch):
    """Return a function that compares a command with one process, and returns the report."""
    monkeypatch.chdir(tmp_path)
    Path(tmp_path, "ds_configs").symlink_to(REPOSITORY / "ds_configs")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))

    def run(*command, code):
        found = main(["check", "--parity", "--json", "--steps", "3", "--", *map(str, command)])
        printed = capsys.readouterr()
        assert printed.out, printed.err
        report = json.loads(printed.out)
        assert found == code, report
        return report

    return run


@pytest.mark.recipes
@pytest.mark.world(2)
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "zero3"])
def test_a_layout_computes_what_one_process_computes(parity, layout):
    """With the config as it is shipped, whose bf16 one process does not have."""
    config = REPOSITORY / "accelerate_configs" / f"{layout}.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--config_file", config]
    report = parity(*launcher, SCRIPTS / "layouts_script.py", code=0)
    assert report["ok"] is True
    assert [step["step"] for step in report["steps"]] == [1, 2, 3]
    assert all({"loss", "grad_norm"} <= step["asked"].keys() & step["one"].keys() for step in report["steps"])


@pytest.mark.recipes
@pytest.mark.world(2)
def test_the_first_module_that_computes_something_else_is_named(parity):
    report = parity(*accelerate("fsdp2", SCRIPTS / "layouts_script.py", "--case", "scaled"), code=1)
    assert [step["differs"] for step in report["steps"]] == [True] * 3
    found = report["first_difference"]
    assert (found["step"], found["kind"], found["module"]) == (1, "forward", "layer")


@pytest.mark.recipes
@pytest.mark.world(2)
def test_a_script_with_parallel_trainer_is_compared_with_its_cases(parity):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    flags = ["--pp_size", "2", "--gradient_accumulation_steps", "2", "--report_to", "none", "--max_steps", "3"]
    report = parity(*launcher, REPOSITORY / "recipes" / "tp_pp" / "train.py", *flags, code=0)
    assert [step["step"] for step in report["steps"]] == [1, 2, 3]
    assert [case["case"] for case in report["cases"]] == ["family"]
    assert all(case["is_equal"] for case in report["cases"])
    assert {one["what"] for one in report["results"]} == {
        "evaluation",
        "exported model",
        "resumed at step 2",
        "resumed at step 3",
        "resumed",
    }
    assert report["differing"] == []


@pytest.mark.recipes
@pytest.mark.world(2)
@pytest.mark.parametrize("fault", ["none", "evaluation", "export", "resume", "gradient"])
def test_what_differs_from_one_process_is_named(parity, fault):
    """A program with LoRA on the embedding, a loss of its own, groups of rates, and a fault under the layout."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    command = [*launcher, str(free_port()), SCRIPTS / "parallel_script.py", "--fault", fault]
    report = parity(*command, code=int(fault != "none"))
    named = {
        "none": [],
        "evaluation": ["evaluation"],
        "export": ["exported model"],
        "resume": ["resumed"],
        "gradient": ["grad_norm"],
    }
    assert report["differing"] == named[fault]
