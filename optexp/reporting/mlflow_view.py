"""The view of MLflow's runs that answers which strategy is best for which workload: columns, order, groups, charts.

MLflow keeps a view as a tag of the experiment. Its menu *Views* lists it, and an address names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

BY_WORKLOAD, ALL = "optexp", "optexp_all"  # of the views
COLUMNS = {  # with their widths
    "tags.`optexp.verdict`": 120,
    "metrics.`speedup/low`": 100,
    "metrics.`time/candidate_us`": 125,
    "metrics.`memory/candidate_peak_mib`": 120,
    "params.`strategy`": 150,
    "params.`workload`": 110,  # of which groups tell, too: what a narrow window cuts off
}
SECTION = "optexp"
CHARTS: tuple[Mapping[str, Any], ...] = (
    {"type": "SCATTER", "xaxis": {"key": "strategy", "type": "PARAM"},
     "yaxis": {"key": "speedup/low", "type": "METRIC"}},
    {"type": "BAR", "metricKey": "speedup/low"},
    {"type": "PARALLEL", "selectedParams": ["workload", "strategy"], "selectedMetrics": ["speedup/low"]},
    {"type": "BAR", "metricKey": "time/candidate_us"},
    {"type": "BAR", "metricKey": "memory/candidate_peak_mib"},
)  # fmt: skip
CHARTS_ABREAST = 2  # three have no room for the names of their runs
MAX_RUNS = 100  # in a chart
MADE_MS = 1_750_000_000_000  # when a view was made, which MLflow wants to know


def _view(name: str, grouped: bool) -> str:
    charts = [
        {"uuid": f"{SECTION}-{n}", "metricSectionId": SECTION, "isGenerated": False, "deleted": False,
         "runsCountToCompare": MAX_RUNS, **chart}
        for n, chart in enumerate(CHARTS)
    ]  # fmt: skip
    section = {"uuid": SECTION, "name": "which strategy for which workload", "display": True, "isReordered": False}
    group = {"aggregateFunction": "max", "groupByKeys": [{"mode": "tag", "groupByData": "optexp.case"}]}
    state = {
        "orderByKey": "metrics.`speedup/low`",  # an address that names an order makes MLflow ignore the view
        "orderByAsc": False,
        "selectedColumns": list(COLUMNS),
        "columnOrder": list(COLUMNS),
        "columnWidths": COLUMNS,
        "compareRunCharts": charts,
        "compareRunSections": [{**section, "deleted": False, "isGenerated": False, "columns": CHARTS_ABREAST}],
        "isAccordionReordered": True,  # else MLflow sorts its own sections before this one
        "runsHiddenMode": "SHOW_ALL",
        "groupBy": group if grouped else None,
        "useGroupedValuesInCharts": False,
    }
    return json.dumps({"name": name, "createdAt": MADE_MS, "updatedAt": MADE_MS, "state": json.dumps(state)})


EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",
    f"mlflow.sharedViewState.{BY_WORKLOAD}": _view("strategies by workload", grouped=True),
    f"mlflow.sharedViewState.{ALL}": _view("all comparisons, best first", grouped=False),
}
DESCRIPTION = "mlflow.note.content"


def description(experiment_id: str) -> str:
    """Of the experiment: the way to the view, as MLflow's own address opens a page about language models."""
    link = address("", experiment_id).lstrip("/")  # relative, as a server may have a prefix
    stay = "Click *Model training* on the left once to stay there."
    return f"Comparisons of optexp: [strategies by workload]({link}). {stay}"


def address(server: str, experiment_id: str, view: str = BY_WORKLOAD) -> str:
    """The page of an experiment in a view."""
    query = {
        "workflowType": "machine_learning",  # without it the page is about language models
        "viewStateShareKey": view,
    }
    return f"{server.rstrip('/')}/#/experiments/{experiment_id}/runs?{urlencode(query)}"


def run_address(server: str, experiment_id: str, run_id: str) -> str:
    """The page of one run."""
    return f"{server.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"
