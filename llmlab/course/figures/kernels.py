"""Drawings of the chapters on fused kernels and on writing kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...base.units import show_bytes
from ...plots.canvas import FAINT, INK, MUTED, PALETTE, SMALL, WHITE, Picture, name_rows, new_picture, styled
from ...plots.schematic import box, finished, grid, label, link, sketch

LEFT, WIDTH = 12, 376  # pixels
READ, WRITTEN = MUTED, INK  # arrows
MEMORY, KERNEL, FUSED, PYTHON = PALETTE[2], PALETTE[1], PALETTE[5], PALETTE[3]


def draw_kernels(names: Sequence[str], formula: str = "RMSNorm") -> Picture:
    """Return a drawing of a formula as one kernel per operator in `names`, and as a single kernel.

    Gray arrows are reads from the memory of the GPU, black arrows are writes to it.
    """
    picture, ax = sketch(236)
    label(ax, LEFT, 12, f"one kernel per operator: {len(names)} kernels", weight="bold")
    pitch = WIDTH / len(names)
    for number, name in enumerate(names):
        left = LEFT + pitch * number
        middle = left + pitch / 2
        label(ax, middle, 30 + 14 * (number % 2), name, "center")
        box(ax, left + 3, 54, pitch - 6, 22, "", KERNEL)
        link(ax, (middle - 8, 104), (middle - 8, 76), color=READ)
        link(ax, (middle + 8, 76), (middle + 8, 104), color=WRITTEN)
    box(ax, LEFT, 104, WIDTH, 24, "memory of the GPU", MEMORY)
    label(ax, LEFT, 146, "one fused kernel", weight="bold")
    box(ax, LEFT, 158, WIDTH, 22, formula, FUSED)
    link(ax, (30, 206), (30, 180), color=READ)
    link(ax, (370, 180), (370, 206), color=WRITTEN)
    box(ax, LEFT, 206, WIDTH, 24, "memory of the GPU", MEMORY)
    listed = ", ".join(names)
    return finished(
        picture,
        f"{formula} as {len(names)} kernels ({listed}): each reads from the memory of the GPU and writes to it. "
        "As one fused kernel it reads once and writes once.",
    )


def draw_programs(rows: int = 4) -> Picture:
    """Return a drawing of a Triton kernel for RMSNorm: one program per row, each loads its row once and stores it."""
    picture, ax = sketch(64 + 44 * rows)
    for x, name, align in ((LEFT, "x: memory", "left"), (210, "registers", "center"), (388, "y: memory", "right")):
        label(ax, x, 12, name, align, weight="bold")
    for row in range(rows):
        y = 30 + 44 * row
        box(ax, LEFT, y, 80, 26, f"row {row}", MEMORY)
        box(ax, 150, y, 120, 26, f"program {row}", FUSED)
        box(ax, 308, y, 80, 26, f"row {row}", MEMORY)
        link(ax, (92, y + 13), (150, y + 13), "load", color=READ)
        link(ax, (270, y + 13), (308, y + 13), color=WRITTEN)
    label(ax, 210, 44 + 44 * rows, "square, mean, root, divide, multiply by the weight", "center", color=MUTED)
    return finished(picture, f"{rows} programs. Each loads one row of x into registers, normalizes it there, and "
                             "stores one row of y.")  # fmt: skip


def draw_graph_break() -> Picture:
    """Return a drawing of a compiled function with a graph break in it, and of the same function without one."""
    picture, ax = sketch(300)
    label(ax, LEFT, 14, "logged.append(y[0, 0].item()): a graph break", weight="bold")
    box(ax, LEFT, 30, 136, 40, "graph 1: norm", KERNEL)
    box(ax, 172, 30, 84, 40, ".item()", PYTHON)
    box(ax, 280, 30, 108, 40, "graph 2: × 2", KERNEL)
    link(ax, (148, 50), (172, 50))
    link(ax, (256, 50), (280, 50))
    label(ax, 214, 84, "waits for the GPU", "center", color=MUTED)
    box(ax, LEFT, 116, WIDTH, 24, "memory of the GPU", MEMORY)
    for x, name in ((30, "x"), (300, "y")):
        link(ax, (x, 116), (x, 70), name, color=READ)
    for x, name in ((110, "y"), (364, "2y")):
        link(ax, (x, 70), (x, 116), name, color=WRITTEN)
    label(ax, LEFT, 168, "logged.append(y[0, 0]): one graph", weight="bold")
    box(ax, LEFT, 184, WIDTH, 40, "one graph: norm, × 2", FUSED)
    box(ax, LEFT, 268, WIDTH, 24, "memory of the GPU", MEMORY)
    link(ax, (30, 268), (30, 224), "x", color=READ)
    for x, name in ((300, "y"), (364, "2y")):
        link(ax, (x, 224), (x, 268), name, color=WRITTEN)
    return finished(
        picture,
        "Above: the first graph computes the norm and writes y to memory. Python waits for a number of it, and the "
        "second graph reads y again. Below: without .item() there is a single graph. It writes y, because the list "
        "holds a view of it, and 2y. Nothing reads y again.",
    )


def draw_chunks() -> Picture:
    """Return a drawing of the fused loss: a chunk of rows goes through head, loss and both gradients."""
    picture, ax = sketch(214)
    label(ax, LEFT, 12, "hidden: T rows", weight="bold")
    grid(ax, LEFT, 26, [[("", KERNEL if row == 2 else WHITE)] for row in range(6)], 70, 22)
    label(ax, 140, 12, "logits: never complete", weight="bold")
    box(ax, 140, 26, 248, 132, "", WHITE, hatch="////")
    box(ax, 140, 70, 248, 22, "a chunk: loss, then its gradient", FUSED)
    link(ax, (82, 81), (140, 81), "·Wᵀ")
    box(ax, LEFT, 176, 160, 30, "gradient of hidden", MEMORY)
    box(ax, 228, 176, 160, 30, "gradient of W: a sum", MEMORY)
    link(ax, (200, 92), (92, 176), "·W")
    link(ax, (308, 92), (308, 176), "hiddenᵀ·")
    return finished(
        picture,
        "The rows of the hidden states go through the head a chunk at a time. The logits of a chunk give the loss of "
        "its rows, and their gradient overwrites them. It gives the gradient of the hidden states of these rows, and "
        "adds to the gradient of the weight W. The whole matrix of logits never exists.",
    )


def draw_loss_memory(ways: Mapping[str, Sequence[tuple[str, int]]]) -> Picture:
    """Return bars of the tensors around the loss, a bar for each way: (name, bytes) of its tensors."""
    largest = max(sum(size for _, size in tensors) for tensors in ways.values())
    picture, ax = sketch(14 + 74 * len(ways))
    words = []
    for row, (way, tensors) in enumerate(ways.items()):
        y, x = 14 + 74 * row, float(LEFT)
        total = sum(size for _, size in tensors)
        label(ax, LEFT, y, way, weight="bold")
        label(ax, LEFT + WIDTH, y, show_bytes(total), "right")
        for number, (name, size) in enumerate(tensors):
            width = size * WIDTH / largest
            box(ax, x, y + 12, width, 22, name if 8 * len(name) < width else "", PALETTE[(number + 1) % len(PALETTE)])
            x += width
        label(ax, LEFT, y + 46, ", ".join(name for name, _ in tensors), color=MUTED)
        words.append(f"{way}: {', '.join(f'{name} {show_bytes(size)}' for name, size in tensors)}")
    return finished(picture, f"Tensors around the loss. {'; '.join(words)}.")


def draw_rungs(moved: Mapping[str, Sequence[float]], ways: Sequence[str]) -> Picture:
    """Return a chart of the bytes that each way to write a kernel moves, a row per kernel.

    `moved` has a number per way, in readings of the kernel's input, forward and backward together.
    """
    rows, colors = range(len(moved)), [PALETTE[i] for i in (3, 1, 4, 2, 0)]
    with styled():
        picture, (ax,) = new_picture(1.3 + 0.42 * len(moved))
        lowest, highest = ([choose(values) for values in moved.values()] for choose in (min, max))
        ax.hlines(rows, lowest, highest, color=MUTED, linewidth=1)
        for number, way in enumerate(ways):
            x = [values[number] for values in moved.values()]
            ax.plot(x, rows, "osD^v"[number], label=way, color=colors[number], ms=8, mec=INK, mew=0.6)
        for row, values in enumerate(moved.values()):
            for value in (values[0], values[-1]):
                ax.annotate(f"{value:.3g}", (value, row), xytext=(0, 7), textcoords="offset points", ha="center",
                            size=SMALL)  # fmt: skip
        name_rows(ax, list(moved))
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set(ylim=(len(moved) - 0.5, -0.7), axisbelow=True)
        ax.set_xlabel("bytes moved, forward and backward (readings of the input)")
        ax.grid(axis="x", color=FAINT, linewidth=0.6)
        picture.legend(loc="outside lower center", ncols=3, handletextpad=0.3)
    numbers = []
    for kernel, values in moved.items():
        pairs = (f"{way} {value:.3g}" for way, value in zip(ways, values, strict=False))
        numbers.append(f"{kernel}: {', '.join(pairs)}.")
    picture.alt = f"{ax.get_xlabel()}. {' '.join(numbers)}"
    return picture
