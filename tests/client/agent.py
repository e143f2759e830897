"""An agent of a service that listens on a port."""

from __future__ import annotations

import time
from typing import Any

import httpx
import msgspec
from tests.client.running import Running

from slicewise import load_geometry
from slicewise.client import Client
from slicewise.control.geometries import record_of

GEOMETRY = msgspec.to_builtins(record_of(load_geometry("H200-141GB")))


class Agent:
    """The agent of a node with one GPU."""

    def __init__(self, service: Running, node: str = "gpu-07") -> None:
        with Client(service.url, service.token) as client:
            token = client.issue_token("agent", node=node).token
        self.http = httpx.Client(
            base_url=service.url, headers={"authorization": f"Bearer {token}"}, timeout=60
        )
        self.session = ""

    def hello(self, **changes: Any) -> None:
        body = {
            "boot": "b1",
            "agent": "0.1.0",
            "driver": "580.65.06",
            "model": "H200-141GB",
            "geometry": GEOMETRY,
            "gpus": [{"uuid": "GPU-0", "mig": True}],
        } | changes
        answer = self.http.post("/v1/agent/hello", json=body)
        assert answer.status_code == 200, answer.text
        self.session = answer.json()["session"]
        report = {"session": self.session, "gpus": body["gpus"]}
        assert self.http.post("/v1/agent/report", json=report).status_code == 200

    def report(self, *instances: dict[str, Any], foreign: tuple[Any, ...] = ()) -> None:
        body = {
            "session": self.session,
            "gpus": [{"uuid": "GPU-0", "mig": True, "temperature": 41}],
            "instances": instances,
            "foreign": foreign,
        }
        answer = self.http.post("/v1/agent/report", json=body)
        assert answer.status_code == 200, answer.text

    def desired(self, after: int = 0, wait: int = 30) -> Any:
        query: dict[str, str | int] = {"session": self.session, "after": after, "wait": wait}
        answer = self.http.get("/v1/agent/desired", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def tell(self, identity: str, phase: str, index: int = 0, **more: Any) -> None:
        self.report({"allocation": identity, "index": index, "phase": phase} | more)

    def close(self) -> None:
        self.http.close()


def when_followed(service: Running) -> None:
    """Wait until an event stream is open."""
    while not service.service.context.streams.open:
        time.sleep(0.01)
