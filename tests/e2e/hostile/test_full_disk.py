"""A start on a full disk fails with one line that states the cause."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.server import Server
from tests.e2e.small_disk import SmallDisk, fill


def test_a_start_on_a_full_disk_states_the_cause(tmp_path: Path, small_disk: SmallDisk) -> None:
    server = Server(tmp_path / "server")
    small_disk.put(server)
    server.start()
    try:
        assert server.ask("POST", "/v1/tenants", {"name": "acme"})[0] == 201
        server.kill()
        fill(small_disk)
        server.launch()
        assert server.wait_until_exit() == 2
        last = server.last_lines().splitlines()[-1]
        assert last.startswith("slicewise: error: the disk is full, "), last
        assert last.endswith("cannot grow: free some space"), last
        (small_disk.view / "ballast").unlink()
        server.start()
        assert server.ask("GET", "/v1/tenants/acme")[0] == 200
    finally:
        server.kill()
