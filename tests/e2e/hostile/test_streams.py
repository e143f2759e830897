"""Event streams: tenants cannot take the ones that those who operate the service need."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from tests.service.house import House

from slicewise.control.answers import RefusedError
from slicewise.service.streams import Streams


def test_all_tenants_together_leave_streams_to_admins(tmp_path: Path) -> None:
    house = House(tmp_path, {"streams": 16, "streams_per_tenant": 4})
    try:
        tokens = [house.tenant(f"t{number}") for number in range(5)]

        async def crowd() -> list[int]:
            seen = []
            async with AsyncExitStack() as stack:
                for token in [*(token for token in tokens for _ in range(4)), "", ""]:
                    reader = await stack.enter_async_context(house.stream("/v1/events", token))
                    await reader.block_or_end()
                    seen.append(reader.status)
            return seen

        seen = house.run(crowd())
        assert seen == [200] * 14 + [503] * 6 + [200] * 2
        assert house.service.site.streams.open == 0
    finally:
        house.close()


@pytest.mark.parametrize("most", [1, 7, 8, 512])
def test_some_are_always_kept(most: int) -> None:
    streams = Streams(most, most)
    for _ in range(most):
        with suppress(RefusedError):
            streams.enter("acme")
    assert streams.open < most
    for _ in range(most - streams.open):
        streams.enter(None)
    with pytest.raises(RefusedError):
        streams.enter(None)
