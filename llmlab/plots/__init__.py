"""Pictures of reports: what the peak consists of, how it comes about over the step, and what fits where.

Figures are made without pyplot, so nothing is left open and no display is needed. They look the same on a light and on
a dark page: an opaque light panel, dark text (contrast >= 4.5:1, WCAG 2.1 SC 1.4.3), Okabe and Ito's colour-blind-safe
palette (https://jfly.uni-koeln.de/color/), and one colour a part, everywhere. Each figure says in words what it shows
(`alt`); that text is its repr, so a notebook's stored output keeps the numbers of the picture.
"""

from .curve import plot_curve
from .fit import plot_fit
from .influence import plot_influence
from .parts import plot_parts
from .segments import plot_segments
from .timeline import plot_live_bytes, plot_timeline

__all__ = [
    "plot_curve",
    "plot_fit",
    "plot_influence",
    "plot_live_bytes",
    "plot_parts",
    "plot_segments",
    "plot_timeline",
]
