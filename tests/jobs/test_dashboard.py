"""Ray's dashboard of a Ray that is started here: only where it is asked for, and not for other machines."""

from __future__ import annotations

from urllib.parse import urlsplit

import psutil
import pytest

from jobs.ray_session import ray_cluster
from pipeline.cluster_config import ClusterConfig


@pytest.mark.ray
def test_the_dashboard_listens_on_the_loopback_address_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with ray_cluster(ClusterConfig(dashboard=True), {}):
        shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Ray's dashboard: ")]
        address = urlsplit(shown[0].removeprefix("Ray's dashboard: "))
        sockets = psutil.net_connections("tcp")
        heard = {each.laddr.ip for each in sockets if each.status == "LISTEN" and each.laddr.port == address.port}
        assert heard == {address.hostname} == {"127.0.0.1"}
