"""Formats numbers as readable text."""

_COUNT_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def count(value: float) -> str:
    """Format a count: 1.23M, 45.6k, 789."""
    for unit, letter in _COUNT_UNITS:
        if abs(value) >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}" if value != int(value) else f"{int(value)}"


def percent(value: float) -> str:
    """Format a ratio as a percentage (1 is 100%): 12%, 0.3%."""
    return f"{value:.1%}" if abs(value) < 0.0995 else f"{value:.0%}"


def duration(seconds: float) -> str:
    """Format a duration in seconds: 3.2 s, 4 min 5 s, 2 h 3 min, 5 d 6 h."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    for unit, name, part, part_name in units:
        if seconds >= unit:
            whole, rest = divmod(round(seconds / part) * part, unit)
            return f"{whole:.0f} {name}" + (f" {rest / part:.0f} {part_name}" if rest else "")
    return f"{seconds:.0f} s"


def usd(value: float) -> str:
    """Format a price in USD: $1,234, $12.34, $0.0012."""
    if value >= 1000:
        return f"${value:,.0f}"
    return f"${value:.2f}" if value >= 0.1 else f"${value:.2g}"


def size(value: float) -> str:
    """Format a number of bytes in binary units: 512 B, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
