"""The bucket's lifecycle rule: S3's client and moto's server take it, and it ends orphan uploads alone."""

from __future__ import annotations

import json
from pathlib import Path

import boto3

from tests.s3_server import s3_server

RULES = Path(__file__).parents[2] / "infra" / "s3" / "lifecycle.json"


def test_a_store_takes_the_rule() -> None:
    configuration = json.loads(RULES.read_text())
    with s3_server() as url:
        client = boto3.client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        client.create_bucket(Bucket="bucket")
        client.put_bucket_lifecycle_configuration(Bucket="bucket", LifecycleConfiguration=configuration)
        (rule,) = client.get_bucket_lifecycle_configuration(Bucket="bucket")["Rules"]
    assert rule["Status"] == "Enabled"
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 2}
    assert set(rule) == {"ID", "Status", "Filter", "AbortIncompleteMultipartUpload"}  # no object ever expires
