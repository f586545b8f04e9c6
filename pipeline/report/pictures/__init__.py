"""The page's pictures, as positions: percentages of a plot's width from its left edge, or of its height from its top.

The template draws the positions as SVG in the page's own colours and fonts. So the same picture works at every width,
in dark mode and on paper. Whatever a colour means is also shown by a shape, a dash pattern, a number or a name.
"""

from __future__ import annotations

from pipeline.report.pictures.curves import Histories, charts
from pipeline.report.pictures.intervals import forests, share_forests
from pipeline.report.pictures.ledgers import bars
from pipeline.report.pictures.pareto import front
from pipeline.report.pictures.samples import strips
from pipeline.report.pictures.scales import Scale

__all__ = ["Histories", "Scale", "bars", "charts", "forests", "front", "share_forests", "strips"]
