"""Wheel and sdist: their contents, and the wheel installed in an empty environment and used from another folder."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from conftest import REPOSITORY, run_process
from launch_words import launched_words
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from recipe_runs import FLAGS, make_workplace
from test_launch_files import EXTRAS as IMAGE_EXTRAS

from hfscale import __version__
from hfscale.core.shipped import list_configs

SHIPPED = ("accelerate_configs", "ds_configs", "recipes", "launch")
USE_THE_CALLBACK = """
import hfscale
from hfscale import ScalingCallback, latest_checkpoint
from tiny import RandomTokens, tiny_arguments, tiny_model
from transformers import Trainer

arguments = tiny_arguments("run", max_steps=2, save_strategy="steps", save_steps=1)
trainer = Trainer(model=tiny_model(), args=arguments, train_dataset=RandomTokens(), callbacks=[ScalingCallback()])
trainer.train()
print(hfscale.__file__, latest_checkpoint("run"), sep="\\n")
"""


def project():
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def tracked_files(*folders):
    """The repository's files in these folders, without what running it leaves behind."""
    paths = [path for folder in folders for path in (REPOSITORY / folder).rglob("*") if path.is_file()]
    return {path.relative_to(REPOSITORY).as_posix() for path in paths if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The wheel and the sdist, built without a network from this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    argv = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--sdist", "--outdir", str(folder)]
    done = subprocess.run([*argv, str(REPOSITORY)], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def installed(distributions, tmp_path_factory):
    """The `bin` of an environment that has the wheel, and the dependencies of the tests but not this checkout."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=100)
    packages = next(folder.glob("lib/python*/site-packages"))
    # A folder that a .pth file names is searched, but its own .pth files (the editable install) are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", str(distributions[0])], check=True, timeout=100)
    return folder / "bin"


@pytest.fixture
def use(installed, tmp_path):
    """Run a program of that environment in a folder of its own; returns its standard output."""

    def run(program, *argv):
        done = run_process([str(installed / program), *argv], tmp_path, {"PYTHONPATH": ""})
        assert done.code == 0, done.out + done.err
        return done.out

    return run


def test_the_wheel_has_the_package_and_what_people_copy(distributions):
    names = zipfile.ZipFile(distributions[0]).namelist()
    files = {name for name in names if ".dist-info/" not in name}
    package = tracked_files("hfscale") - {"hfscale/ruff.toml"}
    expected = package | {f"hfscale/shipped/{name}" for name in tracked_files(*SHIPPED)}
    assert files == expected
    assert "hfscale/py.typed" in files  # without it type checkers ignore the annotations of an installed hfscale


def test_the_sdist_has_what_building_and_testing_need(distributions):
    with tarfile.open(distributions[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked_files("hfscale", *SHIPPED, "launch", "docs", "tests", "benchmarks") <= names
    assert {"pyproject.toml", "constraints.txt", "Makefile", "mkdocs.yml", "README.md", "LICENSE"} <= names


def test_the_metadata_is_complete(distributions):
    wheel = zipfile.ZipFile(distributions[0])
    metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("METADATA"))).decode()
    lines = metadata.splitlines()
    assert f"Version: {__version__}" in lines
    assert "License-Expression: Apache-2.0" in lines
    assert "Requires-Python: >=3.11" in lines
    extras = set(project()["optional-dependencies"])
    assert {line.removeprefix("Provides-Extra: ") for line in lines if line.startswith("Provides-Extra")} == extras
    assert "# hfscale" in lines  # the README is the long description


def pins_of(path):
    """The version of each package in a file of pip, and how many hashes it has."""
    text = (REPOSITORY / path).read_text(encoding="utf-8")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    found = [line.split() for line in lines]
    versions = {canonicalize_name(words[0].partition("==")[0]): words[0].partition("==")[2] for words in found}
    hashes = [len([w for w in words if re.fullmatch("--hash=sha256:[0-9a-f]{64}", w)]) for words in found]
    return versions, hashes


def names_of(requirements):
    return {canonicalize_name(Requirement(one).name) for one in requirements} - {"hfscale"}


def test_every_package_that_is_asked_for_is_pinned():
    about = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    asked = names_of([*about["build-system"]["requires"], *project()["dependencies"]])
    asked |= {name for extra in project()["optional-dependencies"].values() for name in names_of(extra)}
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    asked |= {word for line in re.findall(r"\$\(PIP\) (.*)", makefile) for word in line.split() if word.isalpha()}
    assert asked - pins_of("constraints.txt")[0].keys() == set()


def test_the_image_is_made_of_the_pinned_versions_with_hashes():
    pinned, (locked, hashes) = pins_of("constraints.txt")[0], pins_of("launch/docker/requirements.txt")
    assert min(hashes) > 0
    assert {name: version for name, version in locked.items() if pinned.get(name, version) != version} == {}
    extras = project()["optional-dependencies"]
    needed = [*project()["dependencies"], "hatchling", *(one for name in IMAGE_EXTRAS for one in extras[name])]
    assert names_of(needed) - locked.keys() == set()


def test_the_readme_names_every_extra():
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert [extra for extra in project()["optional-dependencies"] if f"`{extra}`" not in readme] == []


@pytest.mark.long
def test_the_callback_works_in_an_installed_package(use, installed, tmp_path):
    shutil.copy(REPOSITORY / "tests" / "tiny.py", tmp_path)
    (tmp_path / "train.py").write_text(USE_THE_CALLBACK)
    package, checkpoint = use("python", "train.py").splitlines()[-2:]
    assert Path(package).is_relative_to(installed.parent)
    assert Path(checkpoint).name == "checkpoint-2"


def test_the_configs_come_with_an_installed_package(use, tmp_path):
    listed = json.loads(use("hfscale", "configs", "list", "--json"))
    assert {row["name"] for row in listed} == {config.name for config in list_configs()}
    use("hfscale", "configs", "copy", "zero2")
    copied = tmp_path / "ds_configs" / "zero2.json"
    assert copied.read_bytes() == (REPOSITORY / "ds_configs" / "zero2.json").read_bytes()
    assert str(copied) in (tmp_path / "zero2.yaml").read_text()


@pytest.mark.recipes
def test_what_an_installed_package_emits_trains(use, tmp_path):
    """The command that is printed, on one CPU instead of a GPU."""
    use("hfscale", "configs", "copy", "ddp/train.py")
    make_workplace(tmp_path)
    use(
        "hfscale",
        "plan",
        "model/config.json",
        "--gpu",
        "A100-80GB",
        "--gpus",
        "1",
        "--seq-len",
        "64",
        "--emit",
        "planned",
    )
    words = launched_words(tmp_path / "planned" / "launch.sh", tmp_path)
    assert words[:2] == ["accelerate", "launch"]
    assert (tmp_path / "train.py").read_bytes() == (tmp_path / "planned" / "train.py").read_bytes()
    small = ["--max_steps", "2", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "1"]
    small += ["--activation_checkpointing", "false"]
    use("python", "-m", "accelerate.commands.launch", *words[2:], *FLAGS, *small)
    status = json.loads((tmp_path / "out" / "hfscale_status.json").read_text())
    assert (status["status"], status["step"]) == ("completed", 2)
