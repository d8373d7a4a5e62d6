"""The roofline picture: which operators of a step are bound by FLOP, which by bytes (Williams et al., 2009)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..base.errors import SpecError
from ..base.units import show_seconds
from .canvas import MUTED, PALETTE, Picture, new_picture, styled


class Operators(Protocol):
    """The operators of a step on a GPU: a `llmlab.simulation.profile.operator_log.Operators`."""

    @property
    def gpu(self) -> Any: ...
    @property
    def rates(self) -> Any: ...
    def by_operator(self) -> dict[tuple[str, str], tuple[float, float, float]]: ...


KINDS = {  # of kernels: what they are called here, and their colour
    "matmul": ("matrix products", PALETTE[0]),
    "attention": ("attention", PALETTE[3]),
    "memory": ("everything else", PALETTE[2]),
}


@styled()
def plot_roofline(steps: Sequence[Operators], dtype: Mapping[str, str]) -> Picture:
    """Return one roofline per GPU, with a step's operators as dots, each as large as its share of the time.

    The roofline of the data sheet is dashed, and that of the rates that records reach is solid. `dtype` names, by GPU,
    the dtype whose peak is drawn. Raises NotAvailable for a GPU whose rates were never measured, SpecError for a dtype
    without a rate on its GPU.
    """
    picture, axes = new_picture(3.6, 1, len(steps), sharey=True)
    words = []
    for ax, operators in zip(axes, steps, strict=True):
        gpu, rates = operators.gpu, operators.rates
        points = operators.by_operator()
        total = sum(seconds for _, _, seconds in points.values())
        which = dtype.get(gpu.name, "no dtype")
        if which not in rates.matmul or (peak := gpu.peak(which)) is None:
            raise SpecError(f"{which} for {gpu.name}; give dtype={{{gpu.name!r}: one of {', '.join(rates.matmul)}}}")
        x = [10 ** (i / 20) for i in range(-40, 91)]
        ax.plot(x, [min(peak, i * gpu.bandwidth) for i in x], "--", color=MUTED, lw=1, label="data sheet")
        ax.plot(x, [min(rates.matmul[which], i * rates.bandwidth) for i in x], color="black", lw=1.4, label="reached")
        by_kind = dict.fromkeys(KINDS, 0.0)
        for kind, (_, color) in KINDS.items():
            rows = [value for (of, _), value in points.items() if of == kind]
            by_kind[kind] = sum(row[2] for row in rows)
            if rows:
                ax.scatter(
                    [flop / moved for flop, moved, _ in rows], [flop / spent for flop, _, spent in rows],
                    [6 + 500 * spent / total for *_, spent in rows], color=color, alpha=0.6, lw=0.5, edgecolor="black",
                )  # fmt: skip
        ax.set(xscale="log", yscale="log", xlim=(1e-2, 3e4), ylim=(1e9, 2e15), xlabel="FLOP per byte")
        separator = ": " if len(steps) < 3 else "\n"  # one line of each title would touch the next
        ax.set_title(f"{gpu.name}, {which}{separator}{show_seconds(total)} of kernels")
        ridge = rates.matmul[which] / rates.bandwidth
        shares = ", ".join(f"{KINDS[kind][0]} {spent / total:.0%}" for kind, spent in by_kind.items())
        words.append(f"{gpu.name}: ridge at {ridge:.0f} FLOP per byte; of the time {shares}")
    axes[0].set_ylabel("FLOP/s")
    handles = [axes[0].scatter([], [], 40, color=color, label=name) for name, color in KINDS.values()]
    picture.legend(handles=[*axes[0].lines, *handles], loc="outside lower center", ncols=3, columnspacing=1.2)
    picture.alt = "Rooflines. " + ". ".join(words) + "."
    return picture
