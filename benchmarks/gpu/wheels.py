"""`make gpu-wheels`: collects the packages that an image for GPUs lacks; the runner installs them without a network.

    python -m benchmarks.gpu.wheels --python 3.12 --cuda 130

downloads wheels for another Python than the one that runs it. A package that cannot be had is named in one line and
left out: the parts that need it say so.
"""

import argparse
import base64
import csv
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.settings import REPOSITORY

FOLDER = "gpu-wheels"
CONSTRAINTS = REPOSITORY / "constraints.txt"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_CUDA_LIBRARY = re.compile(r"libbitsandbytes_(cuda|rocm|xpu)(\d*)\w*\.so$")


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package to carry."""

    name: str
    version: str = ""
    """Its version; by default the one of `constraints.txt`, else the newest."""
    built: bool = False
    """Whether it is built here, because there is no wheel of it."""


PACKAGES = (
    Package(name="transformers"),
    Package(name="datasets"),
    Package(name="multiprocess"),
    Package(name="dill"),
    Package(name="liger-kernel"),
    Package(name="torchao", version="0.18.0"),
    Package(name="trl"),
    Package(name="deepspeed", built=True),
    Package(name="hjson"),
    Package(name="pydantic"),
    Package(name="pydantic-core"),
    Package(name="annotated-types"),
    Package(name="typing-inspection"),
    Package(name="bitsandbytes", version="0.50.2"),
)


def constraint_versions() -> dict[str, str]:
    """Return the versions that `constraints.txt` pins."""
    found = re.findall(r"^([\w.-]+)==(\S+)", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


def requirement(package: Package) -> str:
    """Return what pip is asked for.

    Args:
        package (`Package`): The package.
    """
    version = package.version or constraint_versions().get(package.name)
    if not version:
        return package.name
    return f"{package.name}=={version}"


def pip_command(package: Package, folder: Path, python: str) -> list[str]:
    """Return the command that brings one package into a folder.

    Args:
        package (`Package`): The package.
        folder (`Path`): The folder.
        python (`str`): The version of Python that will use it, such as `3.12`.
    """
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if package.built:
        # The build finds torch, which it asks for its version, in this environment only.
        return [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), requirement(package)]
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    options = ["--no-deps", "--only-binary", ":all:", "--python-version", python, *platforms]
    return [*pip, "download", *options, "--dest", str(folder), requirement(package)]


def collect(folder: Path, *, python: str, cuda: str) -> list[str]:
    """Bring all packages into a folder.

    Args:
        folder (`Path`): The folder.
        python (`str`): The version of Python that will use them.
        cuda (`str`): The CUDA version of the one library of bitsandbytes that is kept, such as `130`.

    Returns:
        `list[str]`: A line for each package that could not be had.
    """
    folder.mkdir(parents=True, exist_ok=True)
    left_out = []
    for package in PACKAGES:
        command = pip_command(package, folder, python)
        environment = os.environ | {"DS_BUILD_OPS": "0"}  # DeepSpeed compiles its operators where they are used
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            left_out.append(f"{requirement(package)}: left out: {last}")
    for path in folder.glob("bitsandbytes-*.whl"):
        keep_one_cuda_library(path, cuda)
    return left_out


def keep_one_cuda_library(path: Path, cuda: str) -> None:
    """Remove the libraries for other accelerators and CUDA versions from a wheel of bitsandbytes.

    Args:
        path (`Path`): The wheel, which is replaced.
        cuda (`str`): The CUDA version that is kept.

    Raises:
        ValueError: The wheel has no library for this version.
    """
    with zipfile.ZipFile(path) as wheel:
        contents = {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/")}
    libraries = {name: match for name in contents if (match := _CUDA_LIBRARY.search(name))}
    others = [name for name, match in libraries.items() if match[1] != "cuda" or match[2] != cuda]
    if len(others) == len(libraries):
        raise ValueError(f"{path.name} has no library for CUDA {cuda}: --cuda takes one of {sorted(libraries)}")
    for name in others:
        del contents[name]
    (record,) = [name for name in contents if name.endswith(".dist-info/RECORD")]
    contents[record] = _record(contents, record)
    smaller = path.with_suffix(".part")
    with zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in contents.items():
            wheel.writestr(name, data)
    smaller.replace(path)


def _record(contents: dict[str, bytes], record: str) -> bytes:
    """Return the list of a wheel's files with their hashes, which pip compares."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name, data in contents.items():
        if name != record:
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.writerow([name, f"sha256={digest}", len(data)])
    rows.writerow([record, "", ""])
    return text.getvalue().encode()


def use(folder: Path, site: Path) -> None:
    """Install the wheels of a folder, if there are any, for this process and those that it starts.

    Args:
        folder (`Path`): The wheels.
        site (`Path`): Where they are installed; what an earlier call has installed there is used again.
    """
    found = sorted(folder.glob("*.whl"))
    if not found:
        return
    names = "\n".join(path.name for path in found)
    marker = site / "installed.txt"
    if not marker.is_file() or marker.read_text() != names:
        shutil.rmtree(site, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        done = subprocess.run([*pip, "--target", str(site), *map(str, found)], check=False, timeout=300)
        if done.returncode:
            print(f"the wheels of {folder} are not used: pip could not install them (above)", file=sys.stderr)
            return
        # Otherwise each of the first processes compiles what it imports, on the time of the GPU.
        subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "0", str(site)], check=False, timeout=300)
        marker.write_text(names)
    sys.path.insert(0, str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))


def main() -> None:
    """Collect the wheels and name what is missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.wheels")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / FOLDER)
    parser.add_argument("--python", default="3.12", help="the version of Python of the image")
    parser.add_argument("--cuda", default="130", help="the CUDA version of the image, without its dot")
    asked = parser.parse_args()
    for line in collect(asked.folder, python=asked.python, cuda=asked.cuda):
        print(line)
    wheels = sorted(asked.folder.glob("*.whl"))
    size = sum(path.stat().st_size for path in wheels) / 2**20
    print(f"{len(wheels)} wheels, {size:.0f} MiB, in {asked.folder}")


if __name__ == "__main__":
    main()
