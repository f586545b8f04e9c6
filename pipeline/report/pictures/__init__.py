"""What the page's pictures show, as positions: percentages of a plot's width from its left, or height from its top.

The template draws them as SVG in the page's own colours and letters, so that one picture serves every width, a dark
screen and paper. Colour is never alone: shapes, dashes, numbers or names say the same.
"""

from __future__ import annotations

from pipeline.report.pictures.curves import Histories, charts
from pipeline.report.pictures.intervals import forests, share_forests
from pipeline.report.pictures.ledgers import bars
from pipeline.report.pictures.pareto import front
from pipeline.report.pictures.samples import strips
from pipeline.report.pictures.scales import Scale

__all__ = ["Histories", "Scale", "bars", "charts", "forests", "front", "share_forests", "strips"]
