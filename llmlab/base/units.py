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
        if abs(size) >= unit:
            return f"{size / unit:,.{digits}f} {name}"
    return f"{size} B"


def unit_of(largest: int) -> tuple[int, str]:
    """Return the unit in which sizes up to `largest` bytes read well on one axis, and its name."""
    return (GiB, "GiB") if largest >= GiB // 4 else (MiB, "MiB")


def show_count(count: int) -> str:
    """Return a count of parameters or tokens as the field writes it: 124M, 8.03B, 1T."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return str(count)


def show_seconds(seconds: float | None) -> str:
    """Return a duration in the unit that reads best; None, not known, is a dash."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if seconds < 172_800 else f"{seconds / 86_400:.3g} days"
