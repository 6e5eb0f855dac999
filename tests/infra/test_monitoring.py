"""Prometheus's configuration and Grafana's dashboard: their form, and that every metric is one that exists."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "infra" / "monitoring"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Relabel(Strict):
    source_labels: list[str]
    regex: str
    action: str


class FileDiscovery(Strict):
    files: list[str]
    refresh_interval: str


class Scrape(Strict):
    job_name: str
    file_sd_configs: list[FileDiscovery]
    metric_relabel_configs: list[Relabel]


class Global(Strict):
    scrape_interval: str
    scrape_timeout: str


class Prometheus(Strict):
    scrape_configs: list[Scrape]
    everywhere: Global = Field(alias="global")


def documented() -> dict[str, tuple[str, set[str]]]:
    """Metric -> (kind, labels) of the table in docs/metrics.md."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(ray_sevenleague_\w+)` \| (\w+) \| [^|]* \| ([^|]*) \|", page, re.MULTILINE)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def board() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((MONITORING / "grafana.json").read_text())
    return data


def expressions() -> list[str]:
    return [target["expr"] for panel in board()["panels"] for target in panel.get("targets", [])]


def test_prometheus_scrapes_what_ray_lists() -> None:
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    data = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    (scrape,) = Prometheus.model_validate(data).scrape_configs
    assert scrape.file_sd_configs[0].files == [f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"]
    (relabel,) = scrape.metric_relabel_configs
    assert all(re.fullmatch(relabel.regex, name) for name in documented())


def test_panels_are_well_formed() -> None:
    panels = board()["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids)) > 10
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["type"] in ("row", "timeseries")
        if panel["type"] == "timeseries":
            references = [target["refId"] for target in panel["targets"]]
            assert references == [chr(65 + i) for i in range(len(references))] != []
            assert {"fieldConfig", "options", "datasource", "title"} <= panel.keys()
            assert panel["datasource"]["uid"] == "${datasource}"


def test_panels_lie_side_by_side() -> None:
    places = [panel["gridPos"] for panel in board()["panels"]]
    cells = [
        (x, y)
        for place in places
        for x, y in itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        )
    ]
    assert max(x for x, _ in cells) < 24
    assert len(cells) == len(set(cells))


def test_every_metric_of_the_board_exists_and_every_one_that_exists_is_shown() -> None:
    known = documented()
    histograms = {name for name, (kind, _) in known.items() if kind == "histogram"}
    shown = set()
    for name in re.findall(r"ray_sevenleague_\w+", " ".join(expressions())):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        shown.add(base if base in histograms else name)
    assert shown == set(known)


def test_labels_are_those_of_the_metric_and_counters_are_rates() -> None:
    known = documented()
    for expression in expressions():
        used = {name for name in known if re.search(rf"\b{name}(?:_bucket|_sum|_count)?\b", expression)}
        grouped = set(re.findall(r"\bby \((\w+)\)", expression)) - {"le"}
        assert grouped <= set().union(*(known[name][1] for name in used)), expression
        for name in used:
            assert known[name][0] == "gauge" or re.search(rf"(rate|increase)\({name}", expression), expression


def test_the_variables_of_the_board_are_declared() -> None:
    declared = {variable["name"] for variable in board()["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board()["panels"]))) - {"__rate_interval"}
    assert used == declared == {"datasource", "output"}
