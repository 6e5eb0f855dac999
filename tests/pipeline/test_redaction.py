"""No credential survives redaction, whatever form it has; ordinary text does."""

from __future__ import annotations

import pytest

from pipeline.redaction import redacted, without_credentials

AWS_SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"


def test_a_path_keeps_its_name_only() -> None:
    assert without_credentials("https://me:key@host/a?token=x") == "https://***@host/a?***"
    assert without_credentials("s3://bucket/what?.parquet") == "s3://bucket/what?.parquet"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no access to s3://me:pa55word@bucket/x: denied", "no access to s3://***@bucket/x: denied"),
        (
            "GET https://b.example/part?X-Amz-Credential=A&X-Amz-Signature=ff01 failed",
            "GET https://b.example/part?*** failed",
        ),
        ("two: http://a:b@c/d?e and 's3://k:s@x'", "two: http://***@c/d?*** and 's3://***@x'"),
        ("{'Authorization': 'Bearer abc.def', 'x': 1}", "{'Authorization': 'Bearer ***', 'x': 1}"),
        ("x-amz-security-token: FwoGZXIvYXdzEJr", "x-amz-security-token: ***"),
        ('{"key": "a", "secret": "hunter2", "n": 3}', '{"key": "a", "secret": "***", "n": 3}'),
        ("aws_secret_access_key=abc, region=eu", "aws_secret_access_key=***, region=eu"),
        ("the key AKIAIOSFODNN7EXAMPLE is unknown", "the key *** is unknown"),
        ('invalid bucket name "me:pa55word@bucket": no', 'invalid bucket name "***@bucket": no'),
        ("hf_abcdefghijklmnopqrstuvwxyz was refused", "*** was refused"),
    ],
)
def test_credentials_go(text: str, shown: str) -> None:
    assert redacted(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "shard 3 will be tried again: storage fault at s3://bucket/out/_commits/00003.json: 503",
        "unexpected token: 'end of template'",
        "sampling.max_tokens must be at least 1, got 0",
        "prompt_tokens=12 completion_tokens=8 key=value",
        "what? s3://bucket/what?.parquet",
        "10:20@30 is no address",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redacted(text) == text


def test_values_of_secret_variables_go_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", AWS_SECRET)
    monkeypatch.setenv("HF_TOKEN", "not-of-a-known-form")
    monkeypatch.setenv("FSSPEC_S3", '{"client_kwargs": {"password": "deep-in-json"}, "key": "key-of-s3"}')
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "ordinary")
    monkeypatch.setenv("API_KEY", "1")
    shown = redacted(f"{AWS_SECRET} not-of-a-known-form deep-in-json key-of-s3 ordinary 1 wJalrXUtnFEMI%2FK7MDENG%2Bb")
    assert shown == "*** *** *** *** ordinary 1 wJalrXUtnFEMI%2FK7MDENG%2Bb"
    assert redacted("q=wJalrXUtnFEMI%2FK7MDENG%2BbPxRfiCYEXAMPLEKEY") == "q=***"
