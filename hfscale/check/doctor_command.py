"""`hfscale doctor`: what is installed here, whether it fits together, and what of hfscale works with it."""

import json
import platform
from typing import Annotated

import typer

from hfscale import __version__
from hfscale.check.doctor import DoctorReport, examine
from hfscale.core.counts import counted


def run(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> int:
    """Print versions, GPUs, known problems and what works; exit code 1 if something must be fixed."""
    report = examine()
    print(json.dumps(report.to_dict()) if as_json else _text(report))
    return 0 if report.ok else 1


def _text(report: DoctorReport) -> str:
    versions = [f"{name} {version}" for name, version in report.packages.items() if version]
    extras = report.extras
    lines = [
        f"hfscale {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"packages: {', '.join(versions)}",
        f"extras: {', '.join(name for name in extras if extras[name]) or 'none'}"
        f" (not installed: {', '.join(name for name in extras if not extras[name]) or 'none'})",
        *_hardware(report),
        "",
    ]
    for name, problem in report.features.items():
        lines.append(f"works: {name}" if problem is None else f"does not work: {problem}")
    lines += (
        ["", *(f"{finding.level}: {finding}" for finding in report.findings)]
        if report.findings
        else []
    )
    errors = sum(finding.level == "error" for finding in report.findings)
    if report.ok:
        verdict = "the callbacks work here"
    elif report.features["ScalingCallback"] is not None:
        verdict = f"the callbacks do not work here: {report.features['ScalingCallback']}"
    else:
        verdict = f"{counted(errors, 'error')} to fix"
    return "\n".join([*lines, "", verdict])


def _hardware(report: DoctorReport) -> list[str]:
    """Return lines about torch's build, the GPUs and the driver."""
    if report.torch is None:
        return [f"NVIDIA driver: {report.driver or 'none'}"]
    build = [f"CUDA {report.torch['cuda']}" if report.torch["cuda"] else ""]
    build += [f"ROCm {report.torch['hip']}" if report.torch["hip"] else ""]
    build += [f"NCCL {report.torch['nccl']}" if report.torch["nccl"] else ""]
    gpus = [f"{gpu['name']} ({gpu['memory_gib']:g} GiB)" for gpu in report.torch["gpus"]]
    counted = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    return [
        f"torch is built for: {', '.join(filter(None, build)) or 'CPU only'}",
        f"GPUs: {', '.join(counted) or 'none'}; NVIDIA driver: {report.driver or 'none'}",
    ]


COMMAND = run
