"""The view of MLflow's runs that answers which strategy is best for which workload: columns, order, charts.

MLflow keeps a view as a tag of the experiment, and an address names it. Its two kinds: a list of runs, and a list that
is grouped by workload.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

LIST, BY_WORKLOAD = "optexp", "optexp_by_workload"  # names of views
COLUMNS = (
    "tags.`optexp.verdict`", "metrics.`speedup/low`", "metrics.`time/candidate_us`",
    "metrics.`memory/candidate_peak_mib`", "params.`workload`", "params.`strategy`",
)  # fmt: skip
WIDTHS = {"params.`strategy`": 220}
SECTION = "optexp"
CHARTS: tuple[Mapping[str, Any], ...] = (
    {"type": "BAR", "metricKey": "speedup/low"},
    {"type": "PARALLEL", "selectedParams": ["workload", "strategy"], "selectedMetrics": ["speedup/low"]},
    {"type": "BAR", "metricKey": "time/candidate_us"},
    {"type": "BAR", "metricKey": "memory/candidate_peak_mib"},
)
MAX_RUNS = 100  # in a chart


def _view(grouped: bool) -> str:
    charts = [
        {"uuid": f"{SECTION}-{n}", "metricSectionId": SECTION, "isGenerated": False, "deleted": False,
         "runsCountToCompare": MAX_RUNS, **chart}
        for n, chart in enumerate(CHARTS)
    ]  # fmt: skip
    section = {"uuid": SECTION, "name": "which strategy for which workload", "display": True, "isReordered": False}
    group = {"aggregateFunction": "max", "groupByKeys": [{"mode": "param", "groupByData": "workload"}]}
    return json.dumps({
        "selectedColumns": COLUMNS,
        "columnOrder": COLUMNS,
        "columnWidths": dict.fromkeys(COLUMNS, 150) | WIDTHS,
        "compareRunCharts": charts,
        "compareRunSections": [{**section, "deleted": False, "isGenerated": False}],
        "runsHiddenMode": "SHOW_ALL",
        "groupBy": group if grouped else None,
        "useGroupedValuesInCharts": False,
    })  # fmt: skip


EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",
    f"mlflow.sharedViewState.{LIST}": _view(grouped=False),
    f"mlflow.sharedViewState.{BY_WORKLOAD}": _view(grouped=True),
}


def address(server: str, experiment_id: str, view: str = LIST) -> str:
    """The page of an experiment in a view, the best speedup first."""
    query = {
        "workflowType": "machine_learning",  # without it the page is about language models
        "viewStateShareKey": view,
        "orderByKey": "metrics.`speedup/low`",
        "orderByAsc": "false",
    }
    return f"{server.rstrip('/')}/#/experiments/{experiment_id}/runs?{urlencode(query)}"


def run_address(server: str, experiment_id: str, run_id: str) -> str:
    """The page of one run."""
    return f"{server.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"
