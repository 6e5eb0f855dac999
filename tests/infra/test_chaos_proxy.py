"""The fault-injecting proxy between a real S3 client and moto's server: what the client sees, what the store did."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionClosedError, ReadTimeoutError, ResponseStreamingError

from infra.chaos.proxy import FaultProxy, Kind
from tests.s3_server import s3_server

BODY = b"0123456789" * 100


def client_of(url: str) -> Any:
    """A client that tries once, so that each fault shows."""
    return boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, read_timeout=0.5),
    )


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    """A client of the server itself, past the proxy."""
    with s3_server() as url:
        client = client_of(url)
        client.create_bucket(Bucket="bucket")
        yield client


@pytest.fixture
def proxy(store: Any) -> Iterator[FaultProxy]:
    with FaultProxy(store.meta.endpoint_url, delay_s=0.2) as proxy:
        yield proxy


def keys(store: Any) -> list[str]:
    return [entry["Key"] for entry in store.list_objects_v2(Bucket="bucket").get("Contents", [])]


def test_without_faults_all_goes_through(proxy: FaultProxy, store: Any) -> None:
    client = client_of(proxy.url)
    client.put_object(Bucket="bucket", Key="calm/a b+ü", Body=BODY, IfNoneMatch="*")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket="bucket", Key="calm/a b+ü", Body=b"other", IfNoneMatch="*")
    assert client.get_object(Bucket="bucket", Key="calm/a b+ü")["Body"].read() == BODY
    assert client.get_object(Bucket="bucket", Key="calm/a b+ü", Range="bytes=3-5")["Body"].read() == b"345"
    assert client.head_object(Bucket="bucket", Key="calm/a b+ü")["ContentLength"] == len(BODY)
    assert keys(client) == keys(store)
    client.delete_object(Bucket="bucket", Key="calm/a b+ü")
    assert "calm/a b+ü" not in keys(store)
    assert not proxy.counts


@pytest.mark.parametrize(
    ("kind", "expected", "is_stored"),
    [
        ("internal_error", "InternalError", False),
        ("unavailable", "ServiceUnavailable", False),
        ("slow_down", "SlowDown", False),
        ("reset", None, False),
        ("lost_answer", None, True),
        ("late_error", "InternalError", True),
        ("truncated", None, True),
    ],
)
def test_what_a_put_meets(proxy: FaultProxy, store: Any, kind: Kind, expected: str | None, is_stored: bool) -> None:
    proxy.fail(kind, method="PUT", path=f"put/{kind}")
    client = client_of(proxy.url)
    client.put_object(Bucket="bucket", Key="put/other", Body=BODY)
    with pytest.raises((ClientError, ConnectionClosedError)) as caught:
        client.put_object(Bucket="bucket", Key=f"put/{kind}", Body=BODY)
    if expected is None:
        assert isinstance(caught.value, ConnectionClosedError)
    else:
        assert expected in str(caught.value)
    assert (f"put/{kind}" in keys(store)) == is_stored
    client.put_object(Bucket="bucket", Key=f"put/{kind}", Body=BODY)
    assert [(fault.kind, fault.method) for fault in proxy.injected] == [(kind, "PUT")]


def test_bodies_that_end_early_or_come_late(proxy: FaultProxy, store: Any) -> None:
    client = client_of(proxy.url)
    store.put_object(Bucket="bucket", Key="body", Body=BODY)
    proxy.fail("truncated", method="GET")
    with pytest.raises(ResponseStreamingError):
        client.get_object(Bucket="bucket", Key="body")["Body"].read()
    for kind in ("slow_body", "delay"):
        proxy.fail(kind)
        assert client.get_object(Bucket="bucket", Key="body")["Body"].read() == BODY
    assert proxy.counts == {"truncated": 1, "slow_body": 1, "delay": 1}


def test_a_request_that_hangs_ends_with_the_outage(proxy: FaultProxy, store: Any) -> None:
    proxy.set_rates({"hang": 1.0})
    with pytest.raises(ReadTimeoutError):
        client_of(proxy.url).put_object(Bucket="bucket", Key="hung", Body=BODY)
    proxy.set_rates({})
    assert "hung" not in keys(store)
    client_of(proxy.url).put_object(Bucket="bucket", Key="hung", Body=BODY)
    assert "hung" in keys(store)


def test_chance_follows_the_seed_and_the_rates() -> None:
    def kinds(seed: int) -> list[Kind | None]:
        proxy = FaultProxy("http://127.0.0.1:1", seed=seed, rates={"reset": 0.2, "slow_down": 0.1})
        return [proxy.draw("GET", "/bucket/key") for _ in range(1000)]

    drawn = kinds(1)
    assert drawn == kinds(1) != kinds(2)
    assert 150 < drawn.count("reset") < 250
    assert 60 < drawn.count("slow_down") < 140
    assert set(drawn) == {None, "reset", "slow_down"}
    with pytest.raises(ValueError, match="sum to at most 1"):
        FaultProxy("http://127.0.0.1:1", rates={"reset": 0.7, "hang": 0.4})
