"""Waits until a Ray cluster has a number of live nodes: wait_for_nodes.py HOST:PORT COUNT [SECONDS=600]"""

from __future__ import annotations

import sys
import time

import ray


def main(address: str, count: str, seconds: str = "600") -> None:
    ray.init(address=address, logging_level="error", log_to_driver=False)
    deadline = time.monotonic() + float(seconds)
    while (alive := sum(node["Alive"] for node in ray.nodes())) < int(count):
        if time.monotonic() > deadline:
            sys.exit(f"the Ray cluster at {address} must have {count} nodes within {seconds} s, got {alive}")
        time.sleep(0.5)


if __name__ == "__main__":
    main(*sys.argv[1:])
