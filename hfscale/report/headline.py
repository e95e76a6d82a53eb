"""The numbers at the top: tokens, dollars, goodput, MFU, speed, time; and what the run is."""

from dataclasses import dataclass

from hfscale.report.formatting import count, duration, percent, usd
from hfscale.report.run_data import Run


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One number."""

    name: str
    """What it is."""
    value: str
    """In words."""
    note: str
    """What stands under it."""
    is_known: bool = True
    """False: the value says so, and the note how to have it."""


def _unknown(name: str, note: str) -> Tile:
    return Tile(name=name, value="not known", note=note, is_known=False)


def headline(run: Run) -> list[Tile]:
    """In the order in which they are shown."""
    return [_tokens(run), _dollars(run), _goodput(run), _mfu(run), _speed(run), _time(run)]


def subtitle(run: Run) -> str:
    """The run in one line."""
    facts = run.facts
    parts = []
    if facts.get("model_type") and facts.get("parameters"):
        parts.append(f"{facts['model_type']}, {count(facts['parameters'])} parameters")
    if facts.get("strategy") and facts.get("world_size"):
        number = int(facts["world_size"])
        parts.append(f"{facts['strategy']} on {number} process{'es' if number > 1 else ''}")
    parts += [str(facts[key]) for key in ("device", "precision") if facts.get(key)]
    if facts.get("sequence_length") and facts.get("global_batch_size"):
        parts.append(f"{count(facts['global_batch_size'])} x {count(facts['sequence_length'])} tokens per step")
    return " · ".join(parts) or "what it trains is not recorded"


def _tokens(run: Run) -> Tile:
    tokens = run.last("scaling/tokens_seen")
    steps = int(run.last("step") or 0)
    if tokens is None:
        return _unknown("Tokens", f"{steps:,} steps")
    return Tile(name="Tokens", value=count(tokens), note=f"{steps:,} steps")


def _dollars(run: Run) -> Tile:
    dollars, per_million = run.last("scaling/usd"), run.last("scaling/usd_per_million_tokens")
    if dollars is None:
        return _unknown("Cost", "give --usd_per_gpu_hour")
    price = run.facts.get("usd_per_gpu_hour")
    note = [f"{usd(per_million)} per million tokens"] if per_million is not None else []
    note += [f"at {usd(price)} per GPU-hour"] if price is not None else []
    return Tile(name="Cost", value=usd(dollars), note=", ".join(note))


def _goodput(run: Run) -> Tile:
    goodput = run.last("scaling/goodput")
    if goodput is None:
        return _unknown("Goodput", "no log yet")
    return Tile(name="Goodput", value=percent(goodput), note="of the time since the first launch")


def _mfu(run: Run) -> Tile:
    mfu, hfu = run.median("scaling/mfu"), run.median("scaling/hfu")
    if mfu is None:
        return _unknown("MFU", "give --peak_tflops")
    note = f"HFU {percent(hfu)}" if hfu is not None and hfu > mfu * 1.005 else "of the dense peak"
    return Tile(name="MFU", value=percent(mfu), note=note)


def _speed(run: Run) -> Tile:
    rate, per_gpu = run.median("scaling/tokens_per_s"), run.median("scaling/tokens_per_s_per_gpu")
    if rate is None or per_gpu is None:
        return _unknown("Tokens per second", "no log yet")
    efficiency = run.median("scaling/efficiency")
    note = f"{count(per_gpu)} per GPU"
    if efficiency is not None:
        note += f", scaling efficiency {percent(efficiency)}"
    return Tile(name="Tokens per second", value=count(rate), note=note)


def _time(run: Run) -> Tile:
    if run.wall_s is None:
        return _unknown("Time", "no launch is recorded")
    number = len(run.attempts)
    return Tile(name="Time", value=duration(run.wall_s), note=f"{number} launch{'es' if number > 1 else ''}")
