"""The HTTP calls of the Hugging Face hub that a push makes, on loopback: repositories, uploads, commits.

It answers as the hub does: small text goes into the commit, other files through the LFS batch call first.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FakeHub:
    """What the hub holds: files of repositories by branch, LFS objects, and the commits and tokens that it got."""

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    commits: list[list[str]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    is_broken: bool = False

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if self.is_broken:
            return 403, {"error": "not today"}
        for pattern, action in ROUTES.items():
            expected, regex = pattern.split(" ")
            match = re.fullmatch(regex, path)
            if match and method == expected:
                return action(self, body, *match.groups())
        return 404, {"error": f"{method} {path} is not known here"}

    def create(self, body: bytes) -> tuple[int, Any]:
        asked = json.loads(body)
        repo = f"{asked['organization']}/{asked['name']}"
        if repo in self.private:
            return 409, {"error": "You already created this dataset repo", "url": f"{self.url}/datasets/{repo}"}
        self.private[repo] = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.files[repo, "main"] = {".gitattributes": b""}
        return 200, {"url": f"{self.url}/datasets/{repo}", "name": repo}

    def branch(self, body: bytes, repo: str, name: str) -> tuple[int, Any]:
        self.files.setdefault((repo, name), dict(self.files[repo, "main"]))
        return 200, {}

    def tree(self, body: bytes, repo: str, revision: str) -> tuple[int, Any]:
        files = self.files[repo, revision]
        return 200, [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in files.items()]

    def preupload(self, body: bytes, repo: str, revision: str) -> tuple[int, Any]:
        held = self.files[repo, revision]
        answers = []
        for file in json.loads(body)["files"]:
            name = file["path"]
            mode = "regular" if name.endswith((".md", ".json")) else "lfs"
            oid = {"oid": git_oid(held[name]) if mode == "regular" else sha256(held[name])} if name in held else {}
            answers.append({"path": name, "uploadMode": mode, "shouldIgnore": False, **oid})
        return 200, {"files": answers}

    def batch(self, body: bytes, repo: str) -> tuple[int, Any]:
        objects = []
        for item in json.loads(body)["objects"]:
            upload = {"upload": {"href": f"{self.url}/objects/{item['oid']}"}}
            objects.append({**item, **({} if item["oid"] in self.objects else {"actions": upload})})
        return 200, {"transfer": "basic", "objects": objects}

    def put(self, body: bytes, oid: str) -> tuple[int, Any]:
        self.objects[oid] = body
        return 200, {}

    def commit(self, body: bytes, repo: str, revision: str) -> tuple[int, Any]:
        changed, held = [], self.files[repo, revision]
        for line in map(json.loads, body.splitlines()):
            key, value = line["key"], line["value"]
            if key == "file":
                held[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                held[value["path"]] = self.objects[value["oid"]]
            elif key == "deletedFile":
                del held[value["path"]]
            if key != "header":
                changed.append(value["path"])
        self.commits.append(changed)
        oid = f"{len(self.commits):040x}"
        return 200, {"commitUrl": f"{self.url}/datasets/{repo}/commit/{oid}", "commitOid": oid}

    def info(self, body: bytes, repo: str, revision: str) -> tuple[int, Any]:
        return 200, {"id": repo, "sha": f"{len(self.commits):040x}", "private": self.private[repo]}


REPO = r"([\w.-]+/[\w.-]+)"
ROUTES: dict[str, Any] = {
    "POST /api/repos/create": FakeHub.create,
    "POST /api/validate-yaml": lambda hub, body: (200, {"errors": [], "warnings": []}),
    rf"POST /api/datasets/{REPO}/branch/(\w+)": FakeHub.branch,
    rf"GET /api/datasets/{REPO}/tree/(\w+)": FakeHub.tree,
    rf"POST /api/datasets/{REPO}/preupload/(\w+)": FakeHub.preupload,
    rf"POST /datasets/{REPO}\.git/info/lfs/objects/batch": FakeHub.batch,
    r"PUT /objects/(\w+)": FakeHub.put,
    rf"POST /api/datasets/{REPO}/commit/(\w+)": FakeHub.commit,
    rf"GET /api/datasets/{REPO}/revision/(\w+)": FakeHub.info,
}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub on a free port of loopback."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.tokens.add(self.headers.get("Authorization") or "")
            status, answer = hub.answer(self.command, self.path.partition("?")[0], body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = handle_any

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
