"""What docs/security.md promises across the packages: no pickles, no credentials in what is left behind, no paths from
data, nothing that listens beyond this machine.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.s3_server import s3_server

ROOT = Path(__file__).parent.parent
SOURCES = [path for package in ("pipeline", "workers", "jobs") for path in sorted((ROOT / package).rglob("*.py"))]

KEY, SECRET, TOKEN = "AKIAFAKE7FAKE7FAKE77", "fakeSecret/0123456789+abcdefghijklmnopqr", "fakeToken0123456789"
PASSWORD, SIGNATURE = "fakePassw0rd", "fakeSignature0123456789"
SECRETS = (KEY, SECRET, TOKEN, PASSWORD, SIGNATURE)


ALLOWED = {
    "workers/model_loading.py": {"pickle"},  # the name of an error
    "workers/replica_group.py": {"pickle"},  # between processes of one replica, over loopback, behind a shared secret
}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """(dotted name, call) of all calls in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_pickle_is_loaded(source: Path) -> None:
    tree = ast.parse(source.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
    allowed = ALLOWED.get(str(source.relative_to(ROOT)), set())
    assert (modules & {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}) <= allowed
    for name, call in calls(tree):
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert name != "torch.load" or options.get("weights_only") == "True", source
        assert options.get("weights_only", "True") == "True", source
        assert name not in (
            "pickle.load",
            "pickle.loads",
            "pickle.Unpickler",
            "np.load",
            "numpy.load",
            "yaml.load",
            "eval",
            "exec",
            "pd.read_pickle",
        ), source
        assert options.get("allow_pickle") in (None, "False"), source
        if name.endswith("AutoModelForCausalLM.from_pretrained") and "gguf_file" not in ast.unparse(call):
            assert "use_safetensors" in options or "**source" in ast.unparse(call), source


def test_nothing_listens_beyond_this_machine() -> None:
    """Dashboards bind to loopback; in Kubernetes KubeRay needs the pod's address, and a policy shuts others out."""
    open_to_all = [
        str(path.relative_to(ROOT))
        for folder in ("pipeline", "workers", "jobs", "infra", "configs")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".py", ".sh", ".yaml", ".yml", ".json"} and "0.0.0.0" in path.read_text()
    ]
    assert open_to_all == ["infra/kuberay/raycluster.yaml", "infra/kuberay/rayjob.yaml"]


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    with s3_server() as url:
        yield url


class Files(SimpleHTTPRequestHandler):
    """Serves a folder whatever the query says."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """(host:port, the folder behind it)."""
    folder = tmp_path_factory.mktemp("web")
    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: Files(*args, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()


def everything(client: Any, bucket: str) -> str:
    """All objects of a bucket as text, Parquet and gzip decoded."""
    text = []
    for entry in client.list_objects_v2(Bucket=bucket).get("Contents", []):
        data = client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()
        text.append(entry["Key"])
        if entry["Key"].endswith(".parquet"):
            table = pq.read_table(pa.BufferReader(data))
            text += [str(table.to_pylist()), str(table.schema.metadata)]
        else:
            text.append((gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data).decode())
    return "\n".join(text)


@pytest.mark.ray
def test_credentials_are_left_nowhere(
    store: str, web: tuple[str, Path], tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Keys in the environment, in settings of the store and in addresses: a job that runs and jobs that fail."""
    address, folder = web
    rows = {"name": ["../../x", "/etc/passwd", "a\\..\\b", "s3://bucket/c"], "prompt": ["one", "two", None, "four"]}
    pq.write_table(pa.table(rows), folder / "prompts.parquet")
    keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "aws_session_token": TOKEN}
    client = boto3.client("s3", endpoint_url=store, region_name="us-east-1", **keys)
    client.create_bucket(Bucket="bucket")
    settings = {"key": KEY, "secret": SECRET, "token": TOKEN, "endpoint_url": store}
    environment = {
        **os.environ,
        "FSSPEC_S3": json.dumps(settings),
        "HF_TOKEN": TOKEN,
        "TMPDIR": "/tmp",  # Ray's sockets need short paths
        "COLUMNS": "200",
    }
    source = f"http://user:{PASSWORD}@{address}/prompts.parquet?X-Amz-Signature={SIGNATURE}"
    job = {
        "model": {"id": str(tiny_model_dir("llama")), "dtype": "float32", "device": "cpu"},
        "input": {"path": source, "format": "parquet", "prompt_column": "prompt"},
        "output": {"path": "s3://bucket/out", "columns": ["name"], "rows_per_shard": 2},
        "sampling": {"max_tokens": 4},
        "cluster": {"log_format": "json"},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from jobs.cli import entry; entry()", "run", tmp_path / "job.yaml"]
        return subprocess.run(
            [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180
        )

    done = run()
    assert done.returncode == 3, done.stderr
    shown = [done.stdout + done.stderr]
    model = f"http://user:{PASSWORD}@{address}/no-model?token={TOKEN}"
    failed = run("--set", f"model.id={model}", "--set", "output.path=s3://bucket/failed")
    assert failed.returncode == 2, failed.stderr
    shown.append(failed.stdout + failed.stderr)
    stored = everything(client, "bucket")
    assert "prompts.parquet:3" in stored
    assert "../../x" in stored
    for secret in SECRETS:
        assert secret not in stored
        for text in shown:
            assert secret not in text
    folders = {key["Key"].split("/")[0] for key in client.list_objects_v2(Bucket="bucket")["Contents"]}
    assert folders <= {"out", "failed"}  # no id became a path


@pytest.mark.parametrize(
    ("override", "exit_code"),
    [
        ("input.limit=1", 0),
        (f"input.path=http://user:{PASSWORD}@ADDRESS/missing.parquet?X-Amz-Signature={SIGNATURE}", 2),
    ],
)
def test_what_is_shown_of_a_job_holds_no_credentials(
    override: str, exit_code: int, web: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from jobs.cli import main

    address, folder = web
    pq.write_table(pa.table({"prompt": ["one"]}), folder / "shown.parquet")
    source = f"http://user:{PASSWORD}@{address}/shown.parquet?X-Amz-Signature={SIGNATURE}"
    job = {"model": "m", "input": source, "output": f"s3://{KEY}:{PASSWORD}@bucket/out"}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    with pytest.raises(SystemExit) as ending:
        main(["run", str(tmp_path / "job.yaml"), "--dry-run", "--set", override.replace("ADDRESS", address)])
    assert ending.value.code == exit_code
    shown = "".join(capsys.readouterr())
    assert "***" in shown
    assert not any(secret in shown for secret in SECRETS)


def test_a_store_that_refuses_is_quoted_without_credentials(
    web: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client takes user and password for the bucket's name, and says so."""
    from jobs.cli import main

    _, folder = web
    pq.write_table(pa.table({"prompt": ["one"]}), folder / "shown.parquet")
    job = {"model": "m", "input": str(folder / "shown.parquet"), "output": f"s3://{KEY}:{PASSWORD}@bucket/out"}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    with pytest.raises(SystemExit) as ending:
        main(["run", str(tmp_path / "job.yaml")])
    assert ending.value.code == 2
    shown = capsys.readouterr().err
    assert "Invalid bucket name" in shown
    assert not any(secret in shown for secret in SECRETS)
