"""Pictures: what a peak consists of, how it arises over the step, what fits where, and the chapters' own.

Figures are made without pyplot, so nothing is left open and no display is needed. They look the same on a light and on
a dark page: an opaque light panel, dark text (contrast >= 4.5:1, WCAG 2.1 SC 1.4.3), Okabe and Ito's colour-blind-safe
palette (https://jfly.uni-koeln.de/color/), and one colour per part, everywhere. Each figure says in words what it shows
(`alt`); that text is its repr, so a notebook's stored output keeps the numbers of the picture.

`roofline.plot_roofline` draws simulated operators, which need torch, so it is imported from its own file.
"""

from ..base.errors import NotAvailable

try:
    import matplotlib  # noqa: F401  (an extra, so that the command line is light)
except ModuleNotFoundError:
    raise NotAvailable("plots need matplotlib, which is not installed: pip install 'llmlab[plot]'") from None

from .attention import plot_influence, plot_online_softmax, plot_score_tiles
from .curve import plot_curve, plot_tradeoff
from .fit import plot_fit
from .gantt import plot_gantt, plot_lanes
from .grids import plot_grids
from .ladder import plot_ladder
from .parts import plot_parts
from .ranks import plot_collectives, plot_mesh
from .segments import plot_segments
from .timeline import plot_live_bytes, plot_timeline

__all__ = [
    "plot_collectives",
    "plot_curve",
    "plot_fit",
    "plot_gantt",
    "plot_grids",
    "plot_influence",
    "plot_ladder",
    "plot_lanes",
    "plot_live_bytes",
    "plot_mesh",
    "plot_online_softmax",
    "plot_parts",
    "plot_score_tiles",
    "plot_segments",
    "plot_timeline",
    "plot_tradeoff",
]
