"""An S3 server on loopback, moto's, for all tests that need one.

Servers of one process share their buckets, so tests that make one by a name of their own stay out of each other's way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a server that runs meanwhile."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@contextmanager
def s3_for_clients() -> Iterator[str]:
    """A server that clients find as users make them: by AWS_* variables."""
    import s3fs

    with s3_server() as url, pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()  # a test before may have made one with other credentials, or none
        yield url
        s3fs.S3FileSystem.clear_instance_cache()
