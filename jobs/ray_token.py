"""The token of a Ray cluster: whether a cluster asks for one, and the sentence for whoever has not got it.

Asked by itself, for Ray would try for twenty seconds, print a warning each second, and then say only that it failed.
"""

from __future__ import annotations

import os

from pipeline.errors import ConfigError

REMEDY = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or ~/.ray/auth_token to the token of the cluster"

_QUESTION = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""The first thing that Ray itself asks a head for. A head of another version at worst does not know it."""
_ANSWER_S = 10.0


def refusal(key: str, address: str) -> ConfigError:
    return ConfigError(f"{key} must be of a Ray cluster whose token is set here, got {address!r}: {REMEDY}")


def check_token_mode(address: str) -> None:
    """Raises ConfigError where the cluster at host:port asks for a token and Ray is not told to show one."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() in ("", "disabled") and asks_for_token(address):
        raise refusal("cluster.address", address)


def asks_for_token(address: str) -> bool:
    """Whether the head at host:port turns away who shows no token. False where anything else is wrong."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(_QUESTION)(b"", timeout=_ANSWER_S)
        except grpc.RpcError as error:
            return isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAUTHENTICATED
    return False
