"""Define MLflow's view of the comparison: a table of verdicts."""

from __future__ import annotations

import json
from urllib.parse import urlsplit

from pipeline.tracking.comparisons import COMPARISON, Wanted
from pipeline.tracking.labels import COLUMNS
from pipeline.tracking.metrics import run_times

TAG = "mlflow.sharedViewState.verdicts"
"""Tag of the experiment. In it, MLflow keeps the view ``verdicts`` of its menu "Views", with one row per variant of the
comparison that was published last. `make ui` opens this view."""

LOCAL = "http://127.0.0.1:5000"
"""Address at which `make ui` shows the embedded store."""


def verdicts(wanted: Wanted) -> str:
    """Return the table of verdicts, in the format of MLflow's page. By default MLflow's table shows only the columns
    source, models and data set."""
    widths = dict(zip((f"tags.`{name}`" for name in COLUMNS), (110, 260, 230, 140), strict=True))
    seed = next(iter(wanted.children.values())).run.seed
    table = {
        "searchFilter": f"tags.`{COMPARISON}` = '{wanted.key}' AND tags.`seed` = '{seed}'",
        # If runs were sorted by start time, MLflow would fold them under their parent.
        "orderByKey": "metrics.`bench/samples_per_second`",
        "orderByAsc": False,
        "selectedColumns": list(widths),
        "columnOrder": list(widths),
        "columnWidths": widths,  # pixels; they apply only to columns in columnOrder
    }
    ended = round(max(run_times(child)[1] for child in wanted.children.values()) * 1000)
    named = {"name": "Verdicts", "createdAt": ended, "updatedAt": ended, "state": json.dumps(table)}
    return json.dumps(named)


def link(uri: str, experiment_id: str) -> str:
    """Return the address of the view, which works once its tag is set. `make ui` serves an embedded store."""
    return f"{page(uri)}/#/experiments/{experiment_id}/runs?workflowType=machine_learning&viewStateShareKey=verdicts"


def page(uri: str) -> str:
    """Return the address of the store's page, without a name or password."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return LOCAL
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
