"""Define MLflow's views of the comparison: a table of verdicts, and charts of its runs."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

from pipeline.tracking.comparisons import COMPARISON, RUN, Wanted
from pipeline.tracking.labels import COLUMNS
from pipeline.tracking.metrics import COMPARED, run_times

TAG = "mlflow.sharedViewState."
"""Prefix of the tag in which MLflow's menu "Views" stores a view of an experiment. The view's key follows it."""
VERDICTS = "verdicts"
"""Key of the view that `make ui` opens: one row per variant of the comparison that was published last."""

LOCAL = "http://127.0.0.1:5000"
"""Address at which `make ui` shows the embedded store."""

BARS = ("test_accuracy", *COMPARED)
LINES = ("history/train_loss", "history/test_accuracy")


def tags(wanted: Wanted) -> dict[str, str]:
    """Return the experiment's tags that define the views: the comparison's charts, and the table of verdicts, which the
    menu lists by name. By default MLflow's table shows only the columns source, models and data set."""
    widths = dict(zip((f"tags.`{name}`" for name in COLUMNS), (110, 260, 230, 140), strict=True))
    seed = next(iter(wanted.children.values())).run.seed
    table = {
        "searchFilter": f"tags.`{COMPARISON}` = '{wanted.key}' AND tags.`seed` = '{seed}'",
        "orderByKey": "metrics.`bench/samples_per_second`",  # by start time, MLflow would fold runs under their parent
        "orderByAsc": False,
        "selectedColumns": list(widths),
        "columnOrder": list(widths),
        "columnWidths": widths,  # pixels; they apply only to columns in columnOrder
    }
    ended = round(max(run_times(child)[1] for child in wanted.children.values()) * 1000)
    named = {"name": "Verdicts", "createdAt": ended, "updatedAt": ended, "state": json.dumps(table)}
    return {TAG + wanted.name: state(wanted), TAG + VERDICTS: json.dumps(named)}


def state(wanted: Wanted) -> str:
    """Return the view of the charts, in the format of MLflow's page. The page ignores unknown keys."""
    variants = dict.fromkeys(child.variant for child in wanted.children.values())
    others = (
        "Model metrics",
        "bench",
        "median",
        "history",
        *variants,
        "System metrics",
    )  # sections that the page creates; folded here
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
    """Return the address of the view, which works once its tag is set. `make ui` serves an embedded store."""
    return f"{page(uri)}/#/experiments/{experiment_id}/runs?compareRunsMode=CHART&viewStateShareKey={wanted.name}"


def page(uri: str) -> str:
    """Return the address of the store's page, without a name or password."""
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
