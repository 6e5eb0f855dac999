"""The cluster files of Ray's launcher, by Ray's own validator, and what it does not ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CLOUDS = ("aws", "gcp")


def cluster(cloud: str) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((ROOT / "infra" / "ray" / f"{cloud}.yaml").read_text())
    return data


@pytest.mark.parametrize("cloud", CLOUDS)
def test_ray_takes_it(cloud: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(cluster(cloud))
    validate_config(prepared)
    gpu = prepared["available_node_types"]["gpu"]
    assert (gpu["min_workers"], gpu["max_workers"], prepared["max_workers"]) == (1, 8, 8)
    with pytest.raises(Exception, match="Additional properties are not allowed"):
        validate_config({**prepared, "spot": True})


def test_workers_are_spot_machines_and_the_head_is_none() -> None:
    aws, gcp = (cluster(cloud)["available_node_types"] for cloud in CLOUDS)
    assert aws["gpu"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert "InstanceMarketOptions" not in aws["head"]["node_config"]
    assert gcp["gpu"]["node_config"]["scheduling"]["provisioningModel"] == "SPOT"
    assert "scheduling" not in gcp["head"]["node_config"]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_machines_install_this_tree_watch_for_the_end_and_show_nothing(cloud: str) -> None:
    data = cluster(cloud)
    assert data["file_mounts"] == {"~/sevenleague": "."}
    (install,) = [command for command in data["setup_commands"] if "uv pip install" in command]
    assert "--constraint ~/sevenleague/infra/constraints.txt" in install
    assert '"$HOME/sevenleague[' in install
    head = " ".join(data["head_start_ray_commands"])
    assert "--dashboard-host=127.0.0.1" in head
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in head
    assert f"~/sevenleague/infra/ray/spot_watch.sh {cloud} " in data["worker_start_ray_commands"][-1]
    assert data["available_node_types"]["head"]["resources"] == {"CPU": 0}


def test_the_drain_fits_into_the_notice() -> None:
    """AWS tells 120 s ahead, Google 30; draining takes WAIT_S, a second and at most 7 s of `ray stop`."""
    for cloud, notice_s in (("aws", 120), ("gcp", 30)):
        watch = cluster(cloud)["worker_start_ray_commands"][-1].split()
        wait_s = int(watch[watch.index(cloud) + 1])
        assert wait_s + 8 < notice_s
