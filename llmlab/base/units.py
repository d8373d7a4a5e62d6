"""Sizes as people read them. Every size in llmlab is an integer number of bytes; only printing divides."""

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
GB = 10**9  # what a data sheet and a disk mean; 7.4 % less than a GiB


def show_bytes(size: int | None, digits: int = 2) -> str:
    """Return `size` bytes as text in GiB, MiB, KiB or B (powers of two); None, not known, is a dash."""
    if size is None:
        return "–"
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if round(abs(size) / unit * KiB, digits) >= KiB:  # also if it rounds up to 1024 of the smaller unit
            return f"{size / unit:,.{digits}f} {name}"
    return f"{size} B"


def unit_of(largest: int) -> tuple[int, str]:
    """Return the unit in which sizes up to `largest` bytes read well on one axis, and its name."""
    return (GiB, "GiB") if largest >= GiB // 4 else (MiB, "MiB")


def show_count(count: int) -> str:
    """Return a count of parameters or tokens as the field writes it: 124M, 8.03B, 1T."""
    rounded = float(f"{count:.3g}")
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if rounded >= unit:
            return f"{show_digits(count / unit)}{name}"
    return str(count)


def show_digits(number: float, digits: int = 3) -> str:
    """Return `number` with so many digits, and with more only before the point."""
    rounded = f"{number:,.{digits}g}"
    return f"{number:,.0f}" if "e+" in rounded else rounded


def show_seconds(seconds: float | None) -> str:
    """Return a duration in the unit that reads best; None, not known, is a dash."""
    if seconds is None:
        return "–"
    for unit, name, most in ((1e-3, "ms", 1000), (1, "s", 120), (60, "min", 120), (3600, "h", 48)):
        if float(f"{seconds / unit:.3g}") < most:
            return f"{seconds / unit:.3g} {name}"
    return f"{show_digits(seconds / 86_400)} days"
