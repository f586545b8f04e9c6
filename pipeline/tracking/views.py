"""The comparison as a page of MLflow that opens ready: its runs, grouped by variant, in the charts that matter."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

from pipeline.tracking.comparisons import COMPARISON, RUN, Wanted
from pipeline.tracking.metrics import COMPARED

TAG = "mlflow.sharedViewState."
"""Tag of an experiment, ending in a view's key: what MLflow's button "Share" writes."""

LOCAL = "http://127.0.0.1:5000"
"""Where `make ui` shows the embedded store."""

BARS = ("test_accuracy", *COMPARED)
LINES = ("history/train_loss", "history/test_accuracy")


def state(wanted: Wanted) -> str:
    """The view, in the form of MLflow's page. What it does not understand, the page ignores."""
    variants = dict.fromkeys(child.variant for child in wanted.children.values())
    others = (
        "Model metrics",
        "bench",
        "median",
        "history",
        *variants,
        "System metrics",
    )  # sections that the page makes, folded up
    charts = [_chart("BAR", metric) for metric in BARS] + [_chart("LINE", metric) for metric in LINES]
    return json.dumps(
        {
            "searchFilter": f"tags.`{COMPARISON}` = '{wanted.key}' AND tags.`{RUN}` != ''",
            "orderByKey": "attributes.start_time",
            "orderByAsc": True,
            "groupBy": {
                "aggregateFunction": "average",
                "groupByKeys": [{"mode": "tag", "groupByData": "variant"}],
            },
            "groupsExpanded": {},
            "compareRunCharts": charts,
            "compareRunSections": [_section("Variants", shown=True), *(_section(name, shown=False) for name in others)],
            "isAccordionReordered": True,
            "selectedColumns": ["tags.`verdict`", *(f"metrics.`{metric}`" for metric in BARS)],
            "hideEmptyCharts": True,
        }
    )


def link(uri: str, experiment_id: str, wanted: Wanted) -> str:
    """Opens the view, once its tag is set; in the server's page, or in that of `make ui` for an embedded store."""
    return f"{page(uri)}/#/experiments/{experiment_id}/runs?compareRunsMode=CHART&viewStateShareKey={wanted.name}"


def page(uri: str) -> str:
    """The address of the store's page, without a name or password."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return LOCAL
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"


def _section(name: str, *, shown: bool) -> dict[str, Any]:
    return {"uuid": name, "name": name, "display": shown, "isReordered": True}


def _chart(kind: str, metric: str) -> dict[str, Any]:
    chart = {"uuid": metric, "type": kind, "metricKey": metric, "metricSectionId": "Variants", "deleted": False,
             "isGenerated": False, "runsCountToCompare": 20}  # fmt: skip
    if kind == "LINE":
        chart |= {"selectedMetricKeys": [metric], "xAxisKey": "step", "useGlobalXaxisKey": True, "lineSmoothness": 0,
                  "scaleType": "linear", "xAxisScaleType": "linear", "useGlobalLineSmoothing": True}  # fmt: skip
    return chart
