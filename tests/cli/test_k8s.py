"""`slicewise k8s` when it cannot start: one line gives the reason, and nothing is done."""

from __future__ import annotations

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tests.cli.test_refusals import outcome

from slicewise.cli.k8s import _seconds


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    """A kubeconfig for a cluster that does not exist."""
    return kubeconfig(tmp_path, "https://127.0.0.1:1")


def kubeconfig(folder: Path, server: str) -> Path:
    path = folder / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": server, "insecure-skip-tls-verify": True}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [cluster],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [context],
                "current-context": "c",
            }
        )
    )
    return path


def refused(*arguments: str) -> str:
    """The line with the error."""
    status, out, err = outcome(["k8s", *arguments])
    assert status == 2, err
    assert out == ""
    assert err.startswith("slicewise: error: ")
    assert err.count("\n") == 1
    return err


def test_no_cluster_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert "cannot connect to a Kubernetes cluster" in refused("--kubeconfig", "no-such-file")
    broken = tmp_path / "broken"
    for content in (b"{]", b"", b"7", b"[1, 2]", b"\xff\xfe", b'{"contexts": 3}', b"{}"):
        broken.write_bytes(content)
        assert "cannot connect to a Kubernetes cluster" in refused("--kubeconfig", str(broken)), (
            content
        )


def test_no_cluster_answers(nowhere: Path) -> None:
    assert "https://127.0.0.1:1 does not answer" in refused("--kubeconfig", str(nowhere))
    listening = ("--listen", "127.0.0.1:0")
    assert "does not answer" in refused("--kubeconfig", str(nowhere), *listening)


def test_a_cluster_that_is_too_old(tmp_path: Path) -> None:
    class Old(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"major": "1", "minor": "33+", "gitVersion": "v1.33.7-x.1"}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Old) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        path = kubeconfig(tmp_path, f"http://127.0.0.1:{server.server_port}")
        said = refused("--kubeconfig", str(path))
        server.shutdown()
    assert "is Kubernetes v1.33.7-x.1" in said
    assert "1.36 or later" in said


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--policy", "fifo"], "unknown policy 'fifo'"),
        (["--policy", "peer-hami"], "policy 'peer-hami' looks at GPUs one by one"),
        (["--listen", "nowhere"], "listen"),
        (["--listen", "0.0.0.0:8080"], "TLS"),
        (["--lease-seconds", "0"], "lease-seconds"),
        (["--reserve-after", "soon"], "write a time such as 30s, 5m or 1h, or never"),
        (["--reserve-after", "-1"], "write a time such as 30s, 5m or 1h, or never"),
        (["--reserve-share", "1.5"], "reserve-share"),
        (["--reserve-share", "nan"], "must be 0 to 1, not nan"),
        (["--context", "other"], "cannot connect to a Kubernetes cluster"),
        (["--listen", "127.0.0.1:0", "--tls-cert", "c.pem"], "tls"),
    ],
)
def test_what_is_asked_for_is_not_possible(
    nowhere: Path, arguments: list[str], problem: str
) -> None:
    assert problem in refused("--kubeconfig", str(nowhere), *arguments)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0.0), ("90", 90.0), ("1.5s", 1.5), ("5m", 300.0), ("1h", 3600.0), ("2d", 172_800.0)],
)
def test_times(text: str, seconds: float) -> None:
    assert _seconds("--reserve-after", text) == seconds
    assert _seconds("--reserve-after", "never") == float("inf")


def test_without_the_client_it_says_what_to_install(nowhere: Path) -> None:
    code = (
        "import sys; sys.modules['kubernetes'] = None\n"
        "from slicewise.cli.main import run\n"
        f"run(['k8s', '--kubeconfig', {str(nowhere)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "slicewise[k8s]" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_priority_class_that_cannot_exist_is_refused(nowhere: Path) -> None:
    line = refused("--kubeconfig", str(nowhere), "--preempt-for", "urgent,critical")
    assert "--preempt-for 'urgent,critical' is no name of a priority class" in line
