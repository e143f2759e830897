"""Two tenants try to read and change each other's resources through every route."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.server.harness import Harness

from slicewise.server.routes.table import ROUTES

NAMES = ("tenant-of-the-left", "tenant-of-the-right")
PROFILES = st.sampled_from(["1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"])
WHO = st.sampled_from([0, 1])
BODIES = {"extendLease": b'{"lease_seconds": 60}'}
"""Legal bodies, for routes that read one before they look for what the path names."""


class Neighbours(RuleBasedStateMachine):
    """Both tenants act freely; neither may see data of the other."""

    @initialize()
    def move_in(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.harness = Harness(Path(self.folder.name), {"requests_per_second": 1e6})
        self.harness.node()
        self.tokens = [self.harness.tenant(name) for name in NAMES]
        self.lookers = [self.harness.token("read-only", tenant=name) for name in NAMES]
        self.ids: list[list[str]] = [[], []]
        self.living: list[set[str]] = [set(), set()]

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.close()
            self.folder.cleanup()

    def note(self, who: int, answer: Any) -> None:
        self.ids[who].append(answer["id"])
        self.living[who].add(answer["id"])

    @rule(who=WHO, profile=PROFILES, wait=st.booleans(), label=st.booleans())
    def create(self, who: int, profile: str, wait: bool, label: bool) -> None:
        body = {
            "profile": profile,
            "wait_seconds": 1000 if wait else 0,
            "labels": {"secret": NAMES[who]} if label else {},
        }
        answer = self.harness.post("/v1/allocations", body, token=self.tokens[who])
        if answer.status_code in (201, 202):
            self.note(who, answer.json())
        else:
            assert answer.status_code == 409

    @rule(who=WHO, key=st.sampled_from(["a", "b"]))
    def create_with_the_same_key(self, who: int, key: str) -> None:
        answer = self.harness.post(
            "/v1/allocations", {"profile": "1g.10gb"}, token=self.tokens[who], key=key
        )
        if answer.status_code == 201:
            assert answer.json()["tenant"] == NAMES[who]
            if answer.json()["id"] not in self.ids[who]:
                self.note(who, answer.json())

    @rule(who=WHO, data=st.data())
    def release(self, who: int, data: st.DataObject) -> None:
        if self.ids[who]:
            identity = data.draw(st.sampled_from(self.ids[who]))
            answer = self.harness.delete(f"/v1/allocations/{identity}", token=self.tokens[who])
            assert answer.status_code == 200
            self.living[who].discard(identity)

    @rule(who=WHO, data=st.data())
    def touch_the_other(self, who: int, data: st.DataObject) -> None:
        """Every route with a name in its path, with a name of the other tenant."""
        other = 1 - who
        names = [*self.ids[other], NAMES[other]]
        name = data.draw(st.sampled_from(names))
        for route in ROUTES:
            if not route.parameters or "nodes" in route.path:
                continue
            path = route.path.replace("{id}", name).replace("{name}", name)
            body = BODIES.get(route.name, b"{}")
            for token in (self.tokens[who], self.lookers[who]):
                answer = self.harness.call(route.method, path, content=body, token=token)
                assert answer.status_code in (403, 404), (route.name, answer.text)
                unknown = self.harness.call(
                    route.method, path.replace(name, "unknown"), content=body, token=token
                )
                assert unknown.status_code == answer.status_code
                assert unknown.text == answer.text.replace(name, "unknown")

    @rule(who=WHO)
    def pretend_to_be_the_other(self, who: int) -> None:
        body = {"profile": "1g.10gb", "tenant": NAMES[1 - who]}
        batch = {"allocations": [body]}
        for path, sent in (
            ("/v1/allocations", body),
            ("/v1/allocations/batch", batch),
            ("/v1/allocations/dry-run", body),
        ):
            assert self.harness.post(path, sent, token=self.tokens[who]).status_code == 403

    @rule(who=WHO)
    def look_around(self, who: int) -> None:
        """Every route without a name in its path: no answer has data of the other tenant."""
        other = 1 - who
        for token in (self.tokens[who], self.lookers[who]):
            for route in ROUTES:
                if route.method != "GET" or route.parameters or route.name == "followEvents":
                    continue
                for query in ("", f"?tenant={NAMES[other]}", "?gpus=true", "?state=released"):
                    answer = self.harness.get(route.path + query, token=token)
                    assert answer.status_code in (200, 400, 403), (route.name, answer.text)
                    if answer.status_code == 200:
                        asked = answer.text
                        assert NAMES[other] not in asked
                        assert not [i for i in self.ids[other] if i in asked]

    @rule(who=WHO)
    def follow(self, who: int) -> None:
        """The stream from the first entry contains all entries of the tenant, and no others."""
        rows = self.harness.service.runtime.replica.since(0, 10_000)
        assert rows is not None
        from slicewise.journal.entries import concerns

        me = self.harness.service.runtime.state.tenants_by_name[NAMES[who]].ref
        own = [row.seq for row in rows if concerns(row.entry)[0] == me]

        async def read() -> list[int]:
            async with self.harness.stream("/v1/events?after=0", token=self.tokens[who]) as reader:
                return [(await reader.event())["data"]["seq"] for _ in own]

        assert self.harness.run(read()) == own

    @invariant()
    def each_has_its_own(self) -> None:
        if not hasattr(self, "harness"):
            return
        for who in (0, 1):
            listed = self.harness.get("/v1/allocations?limit=1000", token=self.tokens[who]).json()
            assert {one["id"] for one in listed["allocations"]} == self.living[who]


TestNeighbours = Neighbours.TestCase
TestNeighbours.settings = settings(
    max_examples=10,
    stateful_step_count=20,
    suppress_health_check=list(HealthCheck),
)
