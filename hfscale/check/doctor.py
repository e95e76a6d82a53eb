"""What is installed here, whether it fits together, and which parts of hfscale work with it.

`hfscale check` looks at the health of the machine; this module looks at the software. It imports neither torch nor
transformers: one that is missing, too old or broken is what it has to report. What must be imported to be known is
imported in another process (`_PROBE`), which may fail or crash.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

import hfscale
from hfscale.core.findings import Finding, Level, has_errors
from hfscale.core.nvidia_driver import nvidia_driver, why_torch_sees_none
from hfscale.core.text_files import parse_json
from hfscale.core.versions import FEATURES, installed, what_is_missing

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "deepspeed",
    "trl",
    "sentence-transformers",
    "wandb",
    "tokenizers",
    "huggingface_hub",
    "safetensors",
    "numpy",
    "flash-attn",
    "liger-kernel",
    "bitsandbytes",
    "torchvision",
    "torchao",
    "nvidia-ml-py",
)
"""The packages whose versions decide what works; those whose declared requirements are compared with what is there."""
# The modules that a feature needs beyond those of the callbacks. They are imported in this order.
_MODULES = {
    "ScalingCallback": ("hfscale.scaling",),
    "FSDP2 checkpoints": ("torch.distributed.fsdp",),
    "recipes": (
        "hfscale.recipe.models",
        "hfscale.recipe.parsing",
        "hfscale.recipe.layout",
        "hfscale.recipe.data",
    ),
    "tensor parallelism of transformers": ("transformers.distributed.tensor_parallel",),
    "transformers' own sharding": ("transformers.distributed.fsdp",),
    "expert parallelism and replicas of transformers": (
        "transformers.distributed.expert_parallel",
    ),
    "adapters of experts that ranks share": ("hfscale.trainer.expert_adapters",),
    "ParallelTrainer": ("hfscale.parallel.trainer", "hfscale.parallel.dry_run"),
    "DeepSpeed": ("deepspeed",),
    "sequence parallelism of DeepSpeed": ("deepspeed",),
    "LoRA": ("peft",),
    "QLoRA": ("bitsandbytes",),
    "W&B": ("wandb",),
    "TRL": ("trl",),
    "TRL recipes": ("hfscale.recipe.trl",),
    "vision recipes": ("hfscale.recipe.vision", "hfscale.recipe.images"),
    "GPU telemetry": ("pynvml",),
    "Liger kernels": ("liger_kernel",),
    "hfscale plan --plot": ("matplotlib",),
    "s3:// remote checkpoints": ("s3fs",),
    "gs:// remote checkpoints": ("gcsfs",),
    "hf:// remote checkpoints": ("huggingface_hub", "hf_xet"),
}
_PROBE = """
import importlib, json, sys, warnings

def report(**fields):
    print("\\n" + json.dumps(fields), flush=True)

warnings.simplefilter("ignore")
for module in sys.argv[1:]:
    report(importing=module)
    try:
        importlib.import_module(module)
    except BaseException as error:
        report(failed=module, error=" ".join(f"{type(error).__name__}: {error}".split()))
import torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    usable = torch.cuda.is_available()
    indices = range(torch.cuda.device_count()) if usable else ()
    gpus = [torch.cuda.get_device_properties(index) for index in indices]
report(torch={
    "cuda": torch.version.cuda,
    "hip": torch.version.hip,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda and hasattr(torch._C, "_nccl_version")
        else None,
    "architectures": torch.cuda.get_arch_list() if usable else [],
    "gpus": [
        {"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1), "capability": [gpu.major, gpu.minor]}
        for gpu in gpus
    ],
    "why_no_gpu": " ".join(" ".join(str(warning.message) for warning in caught).split()) or None,
})
"""
_PROBE_TIMEOUT_S = 240.0


@dataclass(frozen=True, kw_only=True)
class KnownProblem:
    """A combination of versions that is known to fail."""

    versions: Mapping[str, str]
    """Version specifiers by package; also `nccl` and `linux`. All of them must hold."""
    problem: str
    """What happens."""
    fix: str
    """What to do."""
    source: str
    """Where it is described."""
    level: Level = "warning"
    """As in `Finding`."""


KNOWN_PROBLEMS = (
    KnownProblem(
        versions={"peft": "<0.18", "transformers": ">=5"},
        problem="PEFT before 0.18 cannot be imported beside transformers 5",
        fix='pip install --upgrade "peft>=0.18"',
        source="huggingface/transformers#41889",
        level="error",
    ),
    KnownProblem(
        versions={"accelerate": ">=1.14,<1.15", "torch": ">=2.13"},
        problem="FSDP2 cannot train models with tied embeddings",
        fix='pip install --upgrade "accelerate>=1.15"',
        source="huggingface/accelerate#4171",
    ),
    KnownProblem(
        versions={"nccl": "==2.29.2"},
        problem="NCCL 2.29.2 can hang",
        fix="use a torch with NCCL 2.29.3 or another version",
        source="pytorch/pytorch#174338",
    ),
    KnownProblem(
        versions={"linux": "<5.5"},
        problem="processes can hang on a Linux kernel before 5.5",
        fix="use a newer kernel",
        source="check_os_kernel of Accelerate",
    ),
)


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """Holds what is installed and what works."""

    packages: Mapping[str, str | None]
    """Versions by package; None: not installed."""
    torch: Mapping[str, Any] | None
    """What torch was built for and the GPUs that it sees; None: it cannot be imported."""
    driver: str | None
    """Version of the NVIDIA driver; None: there is none."""
    driver_gpus: tuple[str, ...]
    """Names of the GPUs that the driver lists."""
    features: Mapping[str, str | None]
    """Why each feature does not work here, in one line; None: it works."""
    findings: tuple[Finding, ...]
    """What does not fit together."""

    @property
    def ok(self) -> bool:
        """Whether the callbacks work here and nothing must be fixed."""
        return self.features["ScalingCallback"] is None and not has_errors(self.findings)

    @property
    def extras(self) -> dict[str, bool]:
        """Whether all packages of each extra are installed."""
        found: dict[str, bool] = {}
        for needs in FEATURES.values():
            for need in needs:
                if need.extra is not None:
                    found[need.extra] = (
                        found.get(need.extra, True) and installed(need.package) is not None
                    )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the report as the object that `--json` prints."""
        return {
            "ok": self.ok,
            "hfscale": hfscale.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": dict(self.packages),
            "torch": self.torch,
            "driver": self.driver,
            "driver_gpus": list(self.driver_gpus),
            "extras": self.extras,
            "features": {
                name: {"works": problem is None, "problem": problem}
                for name, problem in self.features.items()
            },
            "findings": [finding.to_dict() for finding in self.findings],
        }


def examine() -> DoctorReport:
    """Return what is installed here, whether it fits together, and what works. It takes several seconds."""
    packages = {name: installed(name) for name in PACKAGES}
    features = {name: what_is_missing(name) for name in FEATURES}
    modules = [module for name in FEATURES if features[name] is None for module in _MODULES[name]]
    modules += ["flash_attn"] if packages["flash-attn"] else []
    failed, torch = _probe(modules) if packages["torch"] else ({}, None)
    for name, missing in features.items():
        broken = next((module for module in _MODULES[name] if module in failed), None)
        if missing is None and broken is not None:
            features[name] = (
                f"{name} is installed, but cannot be used: importing {broken} failed: {failed[broken]}"
            )
    driver, driver_gpus = nvidia_driver()
    findings = _unmet_declarations() + _known_problems(torch)
    findings += _gpu_problems(torch, driver, driver_gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    findings += _build_problems(packages) + _bytecode_problems("torch")
    if "flash_attn" in failed:
        fix = "pip uninstall flash-attn, or build it for this torch"
        findings.append(
            _finding(
                "error", "import", f"flash-attn cannot be imported: {failed['flash_attn']}", fix
            )
        )
    return DoctorReport(
        packages=packages,
        torch=torch,
        driver=driver,
        driver_gpus=driver_gpus,
        features=features,
        findings=tuple(findings),
    )


def _finding(level: Level, check: str, problem: str, fix: str) -> Finding:
    return Finding(level=level, check=check, problem=problem, fix=fix)


def _probe(modules: list[str]) -> tuple[dict[str, str], dict[str, Any] | None]:
    """Import modules in another process.

    Returns:
        The errors by module, and what torch says about itself and its GPUs, or None if it cannot be imported.
    """
    command = [sys.executable, "-c", _PROBE, *modules]
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
        out = done.stdout
        code = done.returncode
    except subprocess.TimeoutExpired as error:
        out = (error.stdout or b"").decode(errors="replace")
        code = None
    failed: dict[str, str] = {}
    last = "torch"
    for line in out.splitlines():
        try:
            fields = parse_json(line)
        except ValueError:  # something that a library printed
            continue
        if not isinstance(fields, dict):
            continue
        if "torch" in fields:
            return failed, fields["torch"]
        last = fields.get("importing", last)
        if "failed" in fields:
            failed[fields["failed"]] = fields["error"]
    if code is None:
        failed[last] = f"it did not end within {_PROBE_TIMEOUT_S:g} s"
    elif code < 0:
        failed[last] = f"it ended the interpreter with {signal.Signals(-code).name}"
    return failed, None


def _unmet_declarations() -> list[Finding]:
    """Compare what the packages declare to need with what is installed, as `pip check` does for all packages."""
    findings = []
    for package in ("hfscale", *PACKAGES):
        found = installed(package)
        for text in (importlib.metadata.requires(package) or []) if found else []:
            try:
                need = Requirement(text)
            except InvalidRequirement:
                continue
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            there = installed(need.name)
            if not _satisfies(there, need.specifier):
                problem = f"{package} {found} needs {need.name}{need.specifier}, and {there or 'none'} is installed"
                findings.append(
                    _finding(
                        "warning",
                        "requirements",
                        problem,
                        f'pip install "{need.name}{need.specifier}"',
                    )
                )
    return findings


def _satisfies(version: str | None, specifier: SpecifierSet) -> bool:
    """Return whether a version is in a range; a pre-release, as of a vendor's build, counts as its release."""
    if version is None:
        return False
    try:
        release = Version(version).base_version
    except InvalidVersion:
        return True
    return specifier.contains(version, prereleases=True) or specifier.contains(
        release, prereleases=True
    )


def _known_problems(torch: Mapping[str, Any] | None) -> list[Finding]:
    kernel = re.match(r"\d+(\.\d+)+", platform.release())
    others = {
        "nccl": torch["nccl"] if torch else None,
        "linux": kernel[0] if kernel and platform.system() == "Linux" else None,
    }
    findings = []
    for known in KNOWN_PROBLEMS:
        versions = {
            name: others[name] if name in others else installed(name) for name in known.versions
        }
        if all(
            versions[name] and _satisfies(versions[name], SpecifierSet(s))
            for name, s in known.versions.items()
        ):
            found = ", ".join(f"{name} {version}" for name, version in versions.items())
            problem = f"{known.problem} ({known.source}); found {found}"
            findings.append(_finding(known.level, "known problem", problem, known.fix))
    return findings


def _gpu_problems(
    torch: Mapping[str, Any] | None,
    driver: str | None,
    driver_gpus: tuple[str, ...],
    visible: str | None,
) -> list[Finding]:
    """Find why torch cannot use the GPUs that the driver lists."""
    if torch is None:
        return []
    findings = []
    if driver_gpus and not torch["gpus"]:
        findings.append(
            why_torch_sees_none(
                driver, driver_gpus, cuda=torch["cuda"], reason=torch["why_no_gpu"], visible=visible
            )
        )
    for gpu in torch["gpus"]:
        capability = tuple(gpu["capability"])
        if (
            torch["cuda"]
            and torch["architectures"]
            and not _runs_on(torch["architectures"], capability)
        ):
            problem = (
                f"torch has no kernels for {gpu['name']} (sm_{capability[0]}{capability[1]}), only for "
                + ", ".join(torch["architectures"])
            )
            findings.append(
                _finding("error", "gpu", problem, "install a torch that is built for this GPU")
            )
    return findings


def _runs_on(architectures: list[str], capability: tuple[int, int]) -> bool:
    """Return whether an architecture of torch runs on a GPU: a binary within a major version, PTX on later GPUs."""
    for name in architectures:
        kind, _, digits = name.rstrip("af").partition("_")
        built = (int(digits[:-1]), int(digits[-1]))
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


def _build_problems(packages: Mapping[str, str | None]) -> list[Finding]:
    """Return what prevents DeepSpeed from compiling its operators when they are first used."""
    if packages["deepspeed"] is None:
        return []
    missing = [name for name in ("ninja", "c++") if shutil.which(name) is None]
    if installed("ninja") is not None and "ninja" in missing:
        missing.remove("ninja")
    if not missing:
        return []
    problem = f"DeepSpeed compiles its operators, and {' and '.join(missing)} cannot be found"
    fix = "pip install ninja, and install g++ with the package manager of the system"
    return [_finding("warning", "build", problem, fix)]


def _bytecode_problems(package: str) -> list[Finding]:
    """Return why each process compiles the package anew, which is not imported for this.

    Images often set `PYTHONDONTWRITEBYTECODE` and install with `pip install --no-compile`. Measured on one CPU core
    with torch 2.13.0 and transformers 5.23.0: importing both takes 24 s without bytecode and 9 s with it.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or spec.cached is None or Path(spec.cached).exists():
        return []
    folder = Path(spec.origin).parent
    if sys.dont_write_bytecode:
        is_by_variable = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
        why = "PYTHONDONTWRITEBYTECODE is set" if is_by_variable else "Python runs with -B"
    elif not os.access(folder, os.W_OK):
        why = f"{folder} cannot be written"
    else:
        return []  # the first import keeps it
    problem = (
        f"no bytecode of {package} is kept, because {why}: each rank compiles all that it imports at every start, "
        "which takes some 15 s"
    )
    fix = f"once, as the owner of the environment: python -m compileall -q {folder.parent}"
    return [_finding("warning", "start", problem, fix)]
