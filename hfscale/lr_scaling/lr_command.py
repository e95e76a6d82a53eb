"""`hfscale lr`: finds the learning rate on narrow copies of a model, and the flags for its full width."""

import json
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfscale.core.logging import print_line
from hfscale.core.text_files import read_text
from hfscale.core.vocabulary import knows_no_text
from hfscale.errors import DataError, ParameterError, UsageError

if TYPE_CHECKING:
    import torch

    from hfscale.lr_scaling.coordinate_check import Coordinate
    from hfscale.lr_scaling.lr_sweep import RateTrial

_WIDTHS_OF_CHECK = 4
_BYTES = 256

EXAMPLES = (
    "hfscale lr runs/model/config.json --data corpus.txt --width 256",
    "hfscale lr runs/model/config.json --data corpus.txt --width 64 --check",
)


def run(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A config.json, its folder or a hub id.")
    ],
    data: Annotated[Path, typer.Option(help="Training text.")],
    width: Annotated[
        int, typer.Option(help="hidden_size of the narrow copy, with as many layers as the model.")
    ],
    rates: Annotated[
        str, typer.Option(help="Learning rates: a range, in which they double, or a list.")
    ] = "1e-4..1e-1",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each training.")] = 200,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 16,
    block_size: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 128,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Check instead that activations are as large at several widths."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Find the learning rate on a narrow copy, or check that the rules hold for the family."""
    from hfscale.lr_scaling.lr_sweep import parse_rates

    asked = parse_rates(rates)
    kind, model_config = _load(config)
    rows = _rows(config, data, model_config.vocab_size, block_size)
    if len(rows) < batch:
        found = f"{len(rows)} sequences of {block_size} tokens"
        raise DataError(f"{data} has {found}: give a longer text, or a smaller --batch")
    if check:
        return _check(kind, model_config, rows[:batch], width, as_json)
    return _sweep(kind, model_config, rows, width, asked, steps, batch, as_json)


def _load(name: str) -> tuple[Any, Any]:
    """Return the class of the causal language model of a config, and the config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hfscale.lr_scaling.width_rules import check_family, plain_config

    if torch.cuda.device_count() > 1:
        raise UsageError(
            "hfscale lr trains on one GPU: set CUDA_VISIBLE_DEVICES to one, such as CUDA_VISIBLE_DEVICES=0"
        )
    try:
        config = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"CONFIG {name} is not the config of a causal language model: {reason}"
        ) from error
    check_family(model)
    return type(model), plain_config(model)


def _rows(name: str, data: Path, vocabulary: int, block_size: int) -> "torch.Tensor":
    """Return the text as token ids (sequences, tokens), by the tokenizer of the model or else by bytes."""
    import torch
    from transformers import AutoTokenizer

    text = read_training_text(data)
    folder = Path(name).parent if Path(name).is_file() else name
    tokenizer: Any = None
    with suppress(OSError, ValueError):
        tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer is not None and not knows_no_text(tokenizer):
        tokens = tokenizer(text)["input_ids"]
    else:
        if vocabulary < _BYTES:
            raise UsageError(
                f"{name} has no tokenizer, and its {vocabulary} tokens are fewer than bytes have: add its tokenizer"
            )
        print(f"hfscale: {name} has no tokenizer: each byte is a token", file=sys.stderr)
        tokens = list(text.encode())
    if tokens and max(tokens) >= vocabulary:
        raise UsageError(f"the tokenizer of {name} has more tokens than the model: {max(tokens)}")
    usable = len(tokens) // block_size * block_size
    return torch.tensor(tokens[:usable], dtype=torch.long).view(-1, block_size)


def read_training_text(data: Path) -> str:
    """Return the text of a file.

    Args:
        data (`Path`): the file.

    Raises:
        DataError: it cannot be read, is larger than other text files may be, or is not UTF-8.
    """
    try:
        return read_text(data)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{data} is not text in UTF-8: convert it, or give another --data"
        ) from error
    except OSError as error:
        raise DataError(f"{data} cannot be read ({error.strerror}): give another --data") from error


# ---- the sweep


def _sweep(
    kind: Any,
    config: Any,
    rows: "torch.Tensor",
    width: int,
    rates: Sequence[float],
    steps: int,
    batch: int,
    as_json: bool,
) -> int:
    from hfscale.lr_scaling.lr_sweep import SweepSettings, best_trial, sweep_rates

    settings = SweepSettings(steps=steps, batch=batch, base_width=width)
    trials = sweep_rates(
        kind, config, rows, width=width, rates=rates, settings=settings, log=_report
    )
    best = best_trial(trials)
    flags = f"--base_width {width} --learning_rate {best.rate:g}"
    is_edge = best in (trials[0], trials[-1])
    if as_json:
        print(json.dumps(_answer(trials, best.rate, width, is_edge)))
    else:
        _show_trials(trials, best)
        print(f"at any width from {width}: {flags}")
    if is_edge:
        print_line(
            f"hfscale: the best rate, {best.rate:g}, is at the edge of the sweep: give --rates that go further"
        )
    return int(is_edge)


def _report(trial: "RateTrial") -> None:
    print(f"hfscale: learning rate {trial.rate:g}: loss {trial.loss:.4f}", file=sys.stderr)


def _answer(
    trials: Sequence["RateTrial"], best: float, width: int, is_edge: bool
) -> dict[str, Any]:
    rows = [
        {"learning_rate": trial.rate, "loss": None if math.isinf(trial.loss) else trial.loss}
        for trial in trials
    ]
    return {"base_width": width, "learning_rate": best, "is_at_edge": is_edge, "trials": rows}


def _show_trials(trials: Sequence["RateTrial"], best: "RateTrial") -> None:
    from hfscale.core.terminal import make_console, make_table

    table = make_table("learning rate", "loss", "", right=("learning rate", "loss"))
    for trial in trials:
        loss = "diverged" if math.isinf(trial.loss) else f"{trial.loss:.4f}"
        table.add_row(f"{trial.rate:g}", loss, "best" if trial is best else "")
    make_console().print(table)


# ---- the coordinate check


def _check(kind: Any, config: Any, rows: "torch.Tensor", width: int, as_json: bool) -> int:
    from hfscale.lr_scaling.coordinate_check import coordinate_check

    widths = [width * 2**power for power in range(_WIDTHS_OF_CHECK)]
    widths = [one for one in widths if one <= config.hidden_size]
    if len(widths) < 3:
        rule = (
            f"the check needs three widths, each twice the one before, up to {config.hidden_size}"
        )
        raise ParameterError("width", width, rule)
    found = coordinate_check(kind, config, rows, widths=widths)
    bad = [one for one in found if not one.is_flat]
    if as_json:
        rows_of_table = [asdict(one) | {"is_flat": one.is_flat} for one in found]
        print(json.dumps({"widths": widths, "modules": rows_of_table}))
    else:
        _show_coordinates(found, widths)
    if bad:
        print_line(
            f"hfscale: the activations of {bad[0].module} follow the width (slope {bad[0].slope:+.2f}): a learning "
            "rate of a narrow copy does not hold"
        )
    return int(bool(bad))


def _show_coordinates(found: Sequence["Coordinate"], widths: Sequence[int]) -> None:
    from hfscale.core.terminal import make_console, make_table

    columns = [*map(str, widths), "slope"]
    table = make_table("module", *columns, "", right=columns)
    for one in found:
        sizes = [f"{size:.3g}" for size in one.sizes]
        kind = "output: must not grow" if one.may_shrink else "must be flat"
        verdict = kind if one.is_flat else f"NOT as it must be ({kind})"
        table.add_row(one.module, *sizes, f"{one.slope:+.2f}", verdict)
    make_console().print(table)


COMMAND = run
