"""Drawings of the chapter on the KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...base.units import GiB
from ...plots.canvas import FAINT, MUTED, PALETTE, WHITE, Picture
from ...plots.schematic import box, finished, grid, keys, label, link, sketch, strip

HEADS, WIDE = 8, 33  # query heads drawn of each layer


def draw_budget(budgets: Mapping[str, Mapping[str, int]], request: int) -> Picture:
    """Draw the memory of each GPU as an engine divides it: a bar of `weights`, `other` and `cache` bytes.

    The cache is cut into requests of `request` bytes, and their number is written above the bar.
    """
    picture, ax = sketch(34 + 56 * len(budgets))
    scale = 376 / max(sum(parts.values()) for parts in budgets.values())
    keys(ax, {"weights": FAINT, "other": PALETTE[2], "requests": PALETTE[1]}, (12, 122, 232), 10, side=14)
    words = []
    for row, (name, parts) in enumerate(budgets.items()):
        y, count = 46 + 56 * row, max(0, parts["cache"]) // request
        words.append(f"{name}: {max(0, parts['cache']) / GiB:.1f} GiB for {count} requests")
        label(ax, 12, y, words[-1], weight="bold")
        pieces = [(parts["weights"], "", FAINT), (parts["other"], "", PALETTE[2])]
        strip(ax, 12, y + 10, [*pieces, *[(request, "", PALETTE[1])] * count], scale, 22)
    return finished(picture, f"Memory as an engine divides it, with room for the cache. {'; '.join(words)}.")


def draw_heads(models: Mapping[str, tuple[int, int, int]]) -> Picture:
    """Draw the keys and values of a layer below the query heads that share them.

    `models`: by name, the number of query heads, of key/value heads (0: one latent for all) and the bytes per token.
    """
    picture, ax = sketch(4 + 98 * len(models))
    label(ax, 388, 14, "per token and layer", "right", color=MUTED)
    for row, (name, (heads, kv_heads, size)) in enumerate(models.items()):
        y, shared = 14 + 98 * row, min(HEADS, heads // kv_heads) if kv_heads else HEADS
        label(ax, 12, y, name, weight="bold")
        grid(ax, 12, y + 14, [[(f"q{head}", PALETTE[5]) for head in range(HEADS)]], WIDE, 24)
        words = "latent" if not kv_heads else "k, v" if shared > 1 else "k v"
        grid(ax, 12, y + 42, [[(words, PALETTE[1])] * (HEADS // shared)], WIDE * shared, 24)
        label(ax, 284, y + 26, f"… {heads} heads", color=MUTED)
        label(ax, 284, y + 54, f"{size / 1024:.3g} KiB")
    sizes = "; ".join(f"{name}: {size / 1024:.3g} KiB" for name, (_, _, size) in models.items())
    return finished(picture, f"Query heads, and the keys and values that they share, per token and layer. {sizes}.")


def draw_block_tables(
    tables: Mapping[str, tuple[Sequence[int], Sequence[int]]], holders: Sequence[int], size: int, reserved: int
) -> Picture:
    """Draw block tables, the memory behind them, and the same requests in one piece of `reserved` places each.

    `tables`: blocks and tokens by request; `holders`: tables per block; `size`: tokens per block.
    """
    picture, ax = sketch(480)
    label(ax, 12, 14, "block tables", weight="bold")
    label(ax, 216, 14, f"memory, blocks of {size}", weight="bold")
    content: dict[int, Sequence[int]] = {}
    for row, (name, (blocks, tokens)) in enumerate(tables.items()):
        label(ax, 12, 44 + 92 * row, name)
        for place, block in enumerate(blocks):
            y = 44 + 92 * row + 25 * place
            box(ax, 66, y - 12, 34, 25, f"{block}", PALETTE[5])
            link(ax, (100, y), (206, 50 + 46 * block), color=MUTED)
            content[block] = tokens[size * place :][:size]
    used = max(content) + 1
    for block in range(used + 1):
        words = [str(token) for token in content.get(block, [])]
        color = PALETTE[1] if holders[block] > 1 else PALETTE[5]
        cells = [(word, color) for word in words] + [("", WHITE)] * (size - len(words))
        grid(ax, 208, 38 + 46 * block, [cells], 31, 24)
        label(ax, 202, 30 + 46 * block, f"{block}")
        count = holders[block]
        label(ax, 338, 50 + 46 * block, f"{count} table{'s' * (count > 1)}" if count else "free", color=MUTED)
    label(ax, 12, 340, f"or one piece per request, {reserved} places reserved:", weight="bold")
    for row, (name, (_, tokens)) in enumerate(tables.items()):
        label(ax, 12, 364 + 28 * row, name)
        row_cells = [("", PALETTE[5])] * len(tokens) + [("", WHITE)] * (reserved - len(tokens))
        grid(ax, 66, 354 + 28 * row, [row_cells], 20, 20)
    total = sum(len(tokens) for _, tokens in tables.values())
    places = f"{total} tokens: {used * size} places in blocks, {reserved * len(tables)} in pieces"
    label(ax, 12, 462, places)
    lists = "; ".join(f"{name}: blocks {', '.join(map(str, blocks))}" for name, (blocks, _) in tables.items())
    return finished(picture, f"Block tables of requests, and memory. {lists}. {places}.")
