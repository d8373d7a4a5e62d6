"""Pictures: what a peak consists of, how it arises over the step, one quantity against another.

Figures are made without pyplot, so nothing is left open and no display is needed. They look the same on a light and on
a dark page: an opaque light panel, dark text (contrast >= 4.5:1, WCAG 2.1 SC 1.4.3), Okabe and Ito's colour-blind-safe
palette (https://jfly.uni-koeln.de/color/), and one colour per part, everywhere. Each figure says in words what it shows
(`alt`); that text is its repr, so a notebook's stored output keeps the numbers of the picture.

`schematic` has the pieces of drawings: blocks, tensors, ranks, links.
`roofline.plot_roofline` draws simulated operators, which need torch, so it is imported from its own file. A picture
that one chapter alone draws is in that chapter: a few lines of matplotlib and `canvas`, which holds the looks.
"""

from ..base.errors import NotAvailable

try:
    import matplotlib  # noqa: F401  (an extra, so that the command line is light)
except ModuleNotFoundError:
    raise NotAvailable("plots need matplotlib, which is not installed: pip install 'llmlab[plot]'") from None

from .curve import plot_curve
from .parts import plot_parts
from .segments import plot_segments
from .time import plot_time
from .timeline import plot_live_bytes, plot_timeline

__all__ = ["plot_curve", "plot_live_bytes", "plot_parts", "plot_segments", "plot_time", "plot_timeline"]
