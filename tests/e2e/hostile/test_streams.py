"""Event streams: tenants cannot use up the streams of the operators."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from tests.server.harness import Harness
from tests.tenants import ref

from slicewise.control.answers import RefusedError
from slicewise.server.limits import Streams


def test_tenants_leave_streams_for_admins(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"streams": 16, "streams_per_tenant": 4})
    try:
        tokens = [harness.tenant(f"t{number}") for number in range(5)]

        async def crowd() -> list[int]:
            seen = []
            async with AsyncExitStack() as stack:
                for token in [*(token for token in tokens for _ in range(4)), "", ""]:
                    reader = await stack.enter_async_context(harness.stream("/v1/events", token))
                    await reader.block_or_end()
                    seen.append(reader.status)
            return seen

        seen = harness.run(crowd())
        assert seen == [200] * 14 + [503] * 6 + [200] * 2
        assert harness.service.context.streams.open == 0
    finally:
        harness.close()


@pytest.mark.parametrize("most", [1, 7, 8, 512])
def test_some_streams_are_always_reserved(most: int) -> None:
    streams = Streams(most, most)
    for _ in range(most):
        with suppress(RefusedError):
            streams.add(ref("acme"))
    assert streams.open < most
    for _ in range(most - streams.open):
        streams.add(None)
    with pytest.raises(RefusedError):
        streams.add(None)
