"""The dashboard and what provisions it: names that must agree do.

The metrics of the reference are those of a real server (`test_docs.py`). `make container-test` asks
every query of a Prometheus that scrapes one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "observability"
PROVISIONING = FOLDER / "grafana" / "provisioning"
# Prometheus adds them: the target's address, and a histogram's buckets.
ADDED = {"instance", "le"}


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((FOLDER / "grafana" / "dashboards" / "juice.json").read_text())
    found: list[dict[str, Any]] = dashboard["panels"]
    return found


def labels_of_metrics() -> dict[str, set[str]]:
    """Return the labels of each metric, as the reference lists them."""
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    rows = re.findall(r"(?m)^\| `(juice_\w+)` \| \w+ \| (.*?) \|", text)
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_reads_metrics_and_labels_that_exist(panel: dict[str, Any]) -> None:
    known = labels_of_metrics()
    for target in panel["targets"]:
        query = target["expr"]
        names = {name.removesuffix("_bucket") for name in re.findall(r"juice_\w+", query)}
        assert names
        assert names <= set(known), query
        labels = set(re.findall(r"(\w+)(?:=~|!=|=)\"", query))
        for group in re.findall(r"by \(([^)]*)\)", query):
            labels |= set(group.split(", "))
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        for name in names:
            assert labels | shown <= known[name] | ADDED, query


def test_no_panel_covers_another() -> None:
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels())
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24, "Grafana's columns"


def test_grafana_is_provisioned_with_what_compose_mounts_and_runs() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    services = compose["services"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert all((ROOT / host).is_dir() for host in mounts)
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "juice.yaml").read_text())[
        "providers"
    ]
    assert mounts["./deploy/observability/grafana/dashboards"] == provider["options"]["path"]
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services
    scraping = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = scraping["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["juice:9000"]}]
    assert scraping["global"]["scrape_interval"] == source["jsonData"]["timeInterval"]
    assert "JUICE_ADMIN_PORT=9000" in (ROOT / "Dockerfile").read_text()
    for name in ("juice", "cpu"):
        assert services[name]["networks"]["default"]["aliases"] == ["juice"]
