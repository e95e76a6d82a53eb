"""Fits the planner's time constants to published runs, and measures how well it predicts sources it has not seen.

    python -m benchmarks.planner_fit            # fit, leave one source out, results/planner_fit.json
    python -m benchmarks.planner_fit --write    # and write the constants to hfscale/planner/frameworks.toml

A few constants per framework are fitted, each of which describes a mechanism (`PARAMETERS`), by damped Gauss-Newton
on the logarithm of tokens/s/GPU, with Huber weights and a weak prior. Every source has the same weight, however many
rows it has. The runs are in `data/throughput.csv`; its column `doubt` gives the reason why a row is left out of the
fit. planner_memory.py fits constants to peaks of memory, and planner_choice.py measures whether the layout ranked
first is one of the fastest that were measured.
"""

import argparse
import csv
import json
import math
import re
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import planner_choice, planner_memory
from benchmarks.planner_runs import Constants, Run, load
from hfscale.planner.frameworks import Framework, SharedConstants, find_framework, framework_names, shared_constants
from hfscale.planner.plan import plan
from hfscale.planner.throughput import step_time

HERE = Path(__file__).parent
TOML = HERE.parent / "hfscale" / "planner" / "frameworks.toml"
PARAMETERS: dict[str, dict[str, float]] = {
    "shared": {
        "misaligned": 0.65,
        "power_exponent": 0.45,
        "network_rate": 0.75,
        "link_rate": 0.75,
        "node_drift": 0.004,
        "network_hop_s": 8e-6,
        "first_flash": 0.6,
        "attention_half": 500.0,
        "ring_attention": 0.8,
    },
    "hf+titan": {"attention_ampere": 0.52, "attention_hopper": 0.37, "fp8_gain": 1.8},
    "hf": {"matmul": 0.85, "passes_h": 30.0, "overlap_dp": 0.7, "loss_bytes": 30.0},
    "titan": {"matmul": 0.85, "fp8_rowwise_gain": 1.1, "passes_h": 30.0, "overlap_tp": 0.2, "overlap_dp": 0.7},
    "megatron": {
        "matmul": 0.85,
        "fp8_gain": 1.8,
        "attention_hopper": 0.62,
        "passes_h": 16.0,
        "overlap_dp": 0.7,
        "overlap_tp": 0.7,
        "pass_s": 1e-3,
    },
}
"""Fitted constants and their prior values; the others in frameworks.toml are not changed. `hf` and `titan` run the
same attention and fp8 kernels."""
FRACTIONS = (
    "overlap_dp",
    "overlap_tp",
    "link_rate",
    "network_rate",
    "matmul",
    "misaligned",
    "ring_attention",
    "first_flash",
)
"""Constants between 0 and 1, which are fitted as their logit; the others are fitted as their logarithm."""
MAX_VALUES = {"fp8_gain": 2.0, "fp8_rowwise_gain": 2.0, "attention_hopper": 0.93}
"""Limits of constants that are fitted as a fraction of them: the fp8 peak is twice that of bf16, and FlashAttention-3
reaches 740 TFLOP/s (Shah et al., arXiv 2407.08608), the best matrix product 794."""
PRIOR_SPREAD = 0.5
"""Standard deviation of a constant's prior, in logarithm or logit."""
HUBER = 0.05
"""Residual from which the absolute value, not the square, is minimised."""
PEAKS = [("shared", name) for name in planner_memory.FITTED]
"""Constants that planner_memory.py fits to peaks of memory."""


def current() -> dict[str, Framework | SharedConstants]:
    """The constants in frameworks.toml."""
    return {
        "shared": shared_constants(),
        **{name: find_framework(name) for name in framework_names()},
    }


def names() -> list[tuple[str, str]]:
    return [(group, name) for group, fitted in PARAMETERS.items() for name in fitted]


def to_vector(constants: Constants) -> np.ndarray:
    values = [getattr(constants[group.partition("+")[0]], name) for group, name in names()]
    return np.array([_to_real(name, value) for (_, name), value in zip(names(), values, strict=True)])


def _to_real(name: str, value: float) -> float:
    """The logit of a constant that has a limit, else the logarithm."""
    limit = 1.0 if name in FRACTIONS else MAX_VALUES.get(name)
    return math.log(value) if limit is None else math.log(value / (limit - value))


def _from_real(name: str, value: float) -> float:
    limit = 1.0 if name in FRACTIONS else MAX_VALUES.get(name)
    return math.exp(value) if limit is None else limit / (1 + math.exp(-value))


def to_constants(vector: np.ndarray, constants: Constants) -> dict[str, Framework | SharedConstants]:
    changed: dict[str, dict[str, float]] = defaultdict(dict)
    for (group, name), value in zip(names(), vector, strict=True):
        for member in group.split("+"):
            changed[member][name] = _from_real(name, value)
    return {group: replace(constants[group], **changed[group]) for group in constants}


def predicted(run: Run, constants: Constants) -> float:
    """Predicted tokens per second and GPU of a run."""
    job = run.job
    time = step_time(job, constants[job.stack], constants["shared"])
    return job.global_batch * job.seq_len / time.total / job.layout.world_size


def residuals(runs: list[Run], constants: Constants) -> np.ndarray:
    return np.array([math.log(predicted(run, constants) / run.tokens_per_s_per_gpu) for run in runs])


def priors(constants: Constants) -> dict[str, Framework | SharedConstants]:
    """The constants with the prior values of the fitted ones."""
    changed: dict[str, dict[str, float]] = defaultdict(dict)
    for group, values in PARAMETERS.items():
        for member in group.split("+"):
            changed[member].update(values)
    return {group: replace(constants[group], **changed[group]) for group in constants}


def fit(runs: list[Run], constants: Constants, *, rounds: int = 12) -> dict[str, Framework | SharedConstants]:
    """The constants that predict `runs` best, starting from `constants`."""
    counts: dict[str, int] = defaultdict(int)
    for run in runs:
        counts[run.source] += 1
    weight = np.array([counts[run.source] ** -0.5 for run in runs]) / HUBER
    vector = to_vector(constants)
    start = to_vector(priors(constants))
    best = _loss(runs, vector, constants, weight, start)
    damping = 0.1
    for _ in range(rounds):
        error = residuals(runs, to_constants(vector, constants))
        columns = []
        for index, (group, _) in enumerate(names()):
            moved = vector.copy()
            moved[index] += 0.02
            changed = to_constants(moved, constants)
            column = np.zeros(len(runs))
            # A constant of one framework changes no run of another
            concerned = [n for n, run in enumerate(runs) if group == "shared" or run.job.stack in group.split("+")]
            column[concerned] = (residuals([runs[n] for n in concerned], changed) - error[concerned]) / 0.02
            columns.append(column)
        slopes = np.array(columns).T
        robust = weight * np.sqrt(np.minimum(1.0, HUBER / np.maximum(np.abs(error), 1e-9)))
        left = (slopes * robust[:, None]).T @ (slopes * robust[:, None]) + np.eye(len(vector)) / PRIOR_SPREAD**2
        right = -(slopes * robust[:, None]).T @ (error * robust) - (vector - start) / PRIOR_SPREAD**2
        for _ in range(6):
            step = np.linalg.solve(left + damping * np.diag(np.diag(left)), right)
            trial = vector + np.clip(step, -0.5, 0.5)
            loss = _loss(runs, trial, constants, weight, start)
            if loss < best:
                vector, best, damping = trial, loss, damping / 4
                break
            damping *= 4
        else:
            break
    return to_constants(vector, constants)


def _loss(runs: list[Run], vector: np.ndarray, constants: Constants, weight: np.ndarray, start: np.ndarray) -> float:
    size = np.abs(residuals(runs, to_constants(vector, constants)))
    huber = np.where(size < HUBER, size**2, 2 * HUBER * size - HUBER**2)
    return float((weight**2 * huber).sum() + (((vector - start) / PRIOR_SPREAD) ** 2).sum())


# -- how well ---------------------------------------------------------------------------------------------------------


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation."""
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def figures(runs: list[Run], errors: np.ndarray) -> dict[str, object]:
    """Error figures over all rows and by source."""
    by_source = defaultdict(list)
    for run, error in zip(runs, errors, strict=True):
        by_source[run.source].append(math.expm1(error))
    sources = {
        name: {
            "rows": len(values),
            "median_error": round(statistics.median(map(abs, values)), 4),
            "bias": round(statistics.median(values), 4),
        }
        for name, values in by_source.items()
    }
    size = np.abs(np.expm1(errors))
    measured = np.array([run.tokens_per_s_per_gpu for run in runs])
    return {
        "rows": len(runs),
        "median_error": round(float(np.median(size)), 4),
        "median_of_sources": round(statistics.median(row["median_error"] for row in sources.values()), 4),
        "within_20_percent": round(float((size < 0.2).mean()), 4),
        "rank_correlation": round(rank_correlation(measured, measured * np.exp(errors)), 4),
        "sources": dict(sorted(sources.items(), key=lambda item: -item[1]["median_error"])),
    }


def leave_one_out(runs: list[Run], constants: Constants) -> np.ndarray:
    """Errors of each source's rows under constants fitted to the other sources."""
    errors = np.zeros(len(runs))
    for source in sorted({run.source for run in runs}):
        others = [run for run in runs if run.source != source]
        fitted = fit(others, constants, rounds=2)
        held = [index for index, run in enumerate(runs) if run.source == source]
        errors[held] = residuals([runs[index] for index in held], fitted)
        print(f"  without {source[-60:]:60} median {np.median(np.abs(np.expm1(errors[held]))):.3f}", flush=True)
    return errors


def uncertainties(
    runs: list[Run], errors: np.ndarray, peaks: list[tuple[Run, float]], constants: Constants
) -> dict[str, Framework | SharedConstants]:
    """The constants with the errors of held-out sources, each of which has the same weight: `time_error`, `time_range`
    and `memory_range`. A framework with fewer than three sources gets those of all."""
    times = [(run, abs(float(error))) for run, error in zip(runs, errors, strict=True)]
    memory = [(run, abs(math.log1p(error))) for run, error in peaks]
    return {
        name: constant
        if name == "shared"
        else replace(
            constant,
            time_error=_quantile(times, name, 0.5),
            time_range=_quantile(times, name, 0.8),
            memory_range=_quantile(memory, name, 0.8),
        )
        for name, constant in constants.items()
    }


def _quantile(errors: list[tuple[Run, float]], framework: str, part: float) -> float:
    """The error, in logarithm, that `part` of a framework's rows keep, where every source has the same weight."""
    own = [(run, size) for run, size in errors if run.job.stack == framework]
    chosen = own if len({run.source for run, _ in own}) >= 3 else errors
    rows: dict[str, int] = defaultdict(int)
    for run, _ in chosen:
        rows[run.source] += 1
    ordered = sorted((size, 1 / rows[run.source]) for run, size in chosen)
    left = part * len(rows)
    for size, weight in ordered:
        left -= weight
        if left <= 0:
            return round(size, 3)
    return round(ordered[-1][0], 3)


def hours() -> dict[str, object]:
    """GPU-hours of published trainings, predicted with the first choice of a plan and relative to those published."""
    found = {}
    with (HERE / "data" / "gpu_hours.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if not row["catalogue"]:
                continue
            sizes = {name: int(row[name]) for name in ("gpus", "seq_len", "global_batch")}
            first = plan(
                row["catalogue"], gpu=row["gpu_type"], stack="megatron", precision=row["precision"], **sizes
            ).choices[0]
            predicted_hours = float(row["tokens_b"]) * 1e9 / first.estimate.tokens_per_s_per_gpu / 3600
            found[row["model"]] = round(predicted_hours / float(row["gpu_hours"]) - 1, 4)
    return {"rows": len(found), "median_error": round(statistics.median(map(abs, found.values())), 4), "errors": found}


def write_toml(constants: Constants) -> None:
    """Writes the fitted constants to frameworks.toml without changing other lines."""
    section = ""
    lines = []
    fitted: dict[str, set[str]] = defaultdict(set)
    for group, name in (*names(), *PEAKS):
        for member in group.split("+"):
            fitted[member].add(name)
    for member in framework_names():
        fitted[member] |= {"time_error", "time_range", "memory_range"}
    for line in TOML.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"\[(\w+)\]", line):
            section = found[1]
        elif (found := re.match(r"(\w+) = ", line)) and found[1] in fitted.get(section, ()):
            line = f"{found[1]} = {getattr(constants[section], found[1]):.4g}"
        lines.append(line)
    TOML.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the constants to frameworks.toml")
    parser.add_argument("--quick", action="store_true", help="skip the cross-validation")
    arguments = parser.parse_args()
    runs, failed = load()
    usable = [run for run in runs if run.tokens_per_s_per_gpu and not run.is_doubted]
    fitted = fit(usable, priors(current()))
    result: dict[str, object] = {"fitted": figures(usable, residuals(usable, fitted))}
    plain = [
        run for run in load(hidden=("method", "virtual_stages", "interconnect", "loss"))[0] if run.tokens_per_s_per_gpu
    ]
    result["all_rows_published_columns_only"] = figures(plain, residuals(plain, fitted))
    result["choice"] = planner_choice.figures(usable, residuals(usable, fitted))
    peaks = planner_memory.stated(runs)
    ran = planner_memory.only_ran(runs)
    fitted = planner_memory.fit_peaks([*peaks, *ran], fitted)
    result["memory"] = planner_memory.figures([(run, planner_memory.error(run, fitted)) for run in peaks])
    result["memory_of_runs_without_peak"] = planner_memory.rejected(ran, fitted)
    unseen_peaks = planner_memory.leave_one_out([*peaks, *ran], fitted)
    result["memory_leave_one_source_out"] = planner_memory.figures(unseen_peaks)
    result["gpu_hours"] = hours()
    if not arguments.quick:
        unseen = leave_one_out(usable, fitted)
        fitted = uncertainties(usable, unseen, unseen_peaks, fitted)
        result["leave_one_source_out"] = figures(usable, unseen)
        result["choice_leave_one_source_out"] = planner_choice.figures(usable, unseen)
    result["constants"] = {
        f"{group}.{name}": float(f"{getattr(fitted[group.partition('+')[0]], name):.4g}")
        for group, name in (*names(), *PEAKS)
    }
    result["uncertainty"] = {
        name: {key: getattr(fitted[name], key) for key in ("time_error", "time_range", "memory_range")}
        for name in framework_names()
    }
    result["rows_not_read"] = failed
    if arguments.write:
        write_toml(fitted)
    if not arguments.quick:
        (HERE / "results" / "planner_fit.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
