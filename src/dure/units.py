"""Formats for numbers with a unit."""


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes with a binary prefix: `1536` becomes `1.5 KiB`."""
    for prefix in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if prefix == "B" else f"{num_bytes:.1f} {prefix}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_count(number: float) -> str:
    """Format a large number with a decimal prefix: `25557032` becomes `25.6 M`."""
    for prefix in ("", " k", " M", " G"):
        if abs(number) < 1000:
            return f"{number:.0f}" if prefix == "" else f"{number:.3g}{prefix}"
        number /= 1000
    return f"{number:.3g} T"


def format_seconds(seconds: float) -> str:
    """Format a duration: `0.4 s`, `59 s`, `3:07`, `2:03:00`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
