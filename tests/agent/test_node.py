"""CDI files, exclusivity, health, the node's state, MIG mode, and command errors."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.agent.simulated import World

from slicewise.agent.cdi import Cdi
from slicewise.agent.driver import (
    RESET_REQUIRED,
    ComputeReading,
    DriverError,
    GpuReading,
    GpuUsage,
    InstanceReading,
)
from slicewise.agent.exclusivity import NodeLock, other_managers
from slicewise.agent.health import Health
from slicewise.agent.mig_mode import MigModeSwitch
from slicewise.agent.node_state import DriverChangedError, GpuIndex, NodeState
from slicewise.agent.reports import hello
from slicewise.core.errors import SlicewiseError

INSTANCE = InstanceReading(3, 19, "1g.18gb", 4, 1, (ComputeReading(0, "MIG-1"),))


def test_cdi_file_names_the_devices_of_one_instance(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in (
        "usr/lib/x86_64-linux-gnu/libcuda.so.580.1", "usr/lib/x86_64-linux-gnu/libcuda.so.570.9",
        "usr/bin/nvidia-smi", "dev/nvidia-uvm",
    ):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    caps = root / "proc/driver/nvidia-caps/mig-minors"
    caps.parent.mkdir(parents=True)
    caps.write_text("config 1\nmonitor 2\ngpu7/gi3/access 30\ngpu7/gi3/ci0/access 31\n"
                    "gpu0/gi3/access 40\ngpu7/gi4/access 50\n")  # fmt: skip
    cdi = Cdi(tmp_path / "cdi", "580.1", root)
    gpu = GpuReading("GPU-0", 0, "H200", 1, minor=7)
    cdi.write(gpu, INSTANCE, "MIG-1")
    (file,) = (tmp_path / "cdi").iterdir()
    spec = json.loads(file.read_text())
    assert spec["kind"] == "slicewise.dev/mig"
    (device,) = spec["devices"]
    assert device["name"] == "MIG-1"
    edits = device["containerEdits"]
    assert [node["path"] for node in edits["deviceNodes"]] == [
        "/dev/nvidiactl", "/dev/nvidia7", "/dev/nvidia-caps/nvidia-cap30",
        "/dev/nvidia-caps/nvidia-cap31", "/dev/nvidia-uvm",
    ]  # fmt: skip
    assert {(m["hostPath"], m["containerPath"]) for m in edits["mounts"]} == {
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.580.1", "/usr/lib/x86_64-linux-gnu/libcuda.so.1"),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.580.1", "/usr/lib64/libcuda.so.1"),
        ("/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi"),
    }
    assert file.stat().st_mode & 0o777 == 0o644
    written = file.stat().st_mtime_ns
    cdi.write(gpu, INSTANCE, "MIG-1")
    assert file.stat().st_mtime_ns == written, "an unchanged file is not rewritten"


def test_only_own_cdi_files_are_removed(tmp_path: Path) -> None:
    cdi = Cdi(tmp_path, "580.1", tmp_path)
    gpu = GpuReading("GPU-0", 0, "H200", 1)
    (tmp_path / "nvidia.json").touch()
    for uuid in ("MIG-1", "MIG-2", "MIG-3"):
        cdi.write(gpu, INSTANCE, uuid)
    cdi.remove("MIG-2")
    cdi.remove_all_except(["MIG-3"])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"nvidia.json", "slicewise.dev-mig-MIG-3.json"}


def test_instance_is_active_without_a_cdi_file(tmp_path: Path) -> None:
    world = World(tmp_path)
    (tmp_path / "cdi").touch()
    world.service.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.step()
    reported = world.service.phases["a", 0]
    assert reported["phase"] == "active"
    assert "but not by containers" in str(reported["detail"])
    (tmp_path / "cdi").unlink()
    world.step()
    assert world.service.phases["a", 0]["detail"] == ""
    world.check()


def test_instance_is_not_destroyed_while_its_cdi_file_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    world.service.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.settle()
    world.service.release("a")

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", read_only)
        world.step()
        reported = world.service.phases["a", 0]
        assert reported["phase"] == "releasing"
        assert "cannot be removed: Read-only file system" in str(reported["detail"])
        assert world.hardware.everything[0][1].compute
        assert world.cdi is not None
        world.cdi.remove("MIG-unknown")
    world.settle()
    world.check()
    assert ("a", 0) in world.service.released


def test_managers_are_found_by_their_processes(tmp_path: Path) -> None:
    for number, comm, cmdline in (
        (1, "systemd", "/sbin/init"),
        (20, "nvidia-mig-mana", "nvidia-mig-manager\0-x"),
        (30, "bash", "/bin/bash\0/usr/bin/nvidia-mig-parted\0apply"),
        (40, "gpu-kubelet-plu", "/usr/bin/gpu-kubelet-plugin"),
        (41, "vim", "vim\0/root/nvidia-device-plugin.yml"),
    ):
        folder = tmp_path / "proc" / str(number)
        folder.mkdir(parents=True)
        (folder / "comm").write_text(f"{comm}\n")
        (folder / "cmdline").write_text(cmdline)
    (tmp_path / "proc" / "50").mkdir()
    (tmp_path / "proc" / "meminfo").touch()
    found = other_managers(root=tmp_path)
    assert [name.split()[0] for name in found] == [
        "nvidia-mig-manager", "nvidia-mig-parted", "gpu-kubelet-plugin",
    ]  # fmt: skip
    assert "process 20" in found[0]
    assert len(other_managers(["nvidia-mig-parted", "gpu-kubelet-plugin"], tmp_path)) == 1


def test_managers_are_found_by_sockets_and_units(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # Socket paths must be short.
    root = Path()
    path = root / "var/lib/kubelet/device-plugins/nvidia-gpu.sock"
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert [n.split()[0] for n in other_managers(root=root)] == ["nvidia-device-plugin"]
    assert other_managers(root=root) == [], "a leftover socket file does not count"
    unit = root / "etc/systemd/system/multi-user.target.wants/nvidia-mig-manager.service"
    unit.parent.mkdir(parents=True)
    unit.symlink_to("/nowhere")
    assert "its unit is enabled" in other_managers(root=root)[0]
    unit.unlink()

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", forbidden)
    assert other_managers(root=root) == [], "without access, sockets do not count"


def test_one_agent_per_node(tmp_path: Path) -> None:
    folder, node = tmp_path / "state", tmp_path / "boot-id"
    node.touch()
    lock = NodeLock(folder, node)
    me = f"already running on this node: process {os.getpid()}"
    with pytest.raises(SlicewiseError, match=f"{me} holds '.*agent.lock'"):
        NodeLock(folder, tmp_path / "another")
    with pytest.raises(SlicewiseError, match=f"{me} holds '.*boot-id'"):
        NodeLock(tmp_path / "another", node)
    lock.release()
    NodeLock(tmp_path / "another", node).release()
    with pytest.raises(SlicewiseError, match="none' cannot be locked: No such file"):
        NodeLock(folder, tmp_path / "none")
    NodeLock(folder, node).release()
    (tmp_path / "file").touch()
    with pytest.raises(SlicewiseError, match="choose another folder with --state"):
        NodeLock(tmp_path / "file", node)


def test_lock_of_another_user_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = tmp_path / "boot-id"
    node.touch()
    idler = NodeLock(tmp_path / "a", node)
    monkeypatch.setattr("slicewise.agent.exclusivity._process_owner", lambda pid: os.geteuid() + 1)
    NodeLock(tmp_path / "b", node).release()
    monkeypatch.setattr("slicewise.agent.exclusivity._lock_holders", lambda file: [])
    with pytest.raises(SlicewiseError, match="another process holds"):  # unknown process
        NodeLock(tmp_path / "b", node)
    idler.release()


def test_files_in_proc_can_be_locked(tmp_path: Path) -> None:
    """The boot id file is in /proc; another agent on this host may hold its lock."""
    node = Path(f"/proc/{os.getpid()}/status")
    lock = NodeLock(tmp_path / "a", node)
    with pytest.raises(SlicewiseError, match=f"process {os.getpid()} holds '{node}'"):
        NodeLock(tmp_path / "b", node)
    lock.release()


def test_unhealthy_gpu_stays_so_until_a_reboot(tmp_path: Path) -> None:
    health = Health(tmp_path, "boot")
    for number in (13, 31, 43, 45):
        assert not health.xid("GPU-0", number)
    assert health.problem("GPU-0") == ""
    assert health.xid("GPU-0", 79)
    assert health.xid("GPU-0", 79)
    assert not health.uncorrected("GPU-1", 3)
    assert not health.uncorrected("GPU-1", 3)
    assert health.uncorrected("GPU-1", 4)
    again = Health(tmp_path, "boot")
    assert again.problem("GPU-0") == "XID 79: the GPU has fallen off the bus"
    assert "uncorrected memory errors" in again.problem("GPU-1")
    assert Health(tmp_path, "another").problem("GPU-0") == ""
    (tmp_path / "problems.json").write_text("[]")
    assert Health(tmp_path, "boot").problem("GPU-0") == ""


def node_of(world: World) -> NodeState:
    world.reconciler.node.refresh()
    return world.reconciler.node


def test_problems_of_a_gpu(tmp_path: Path) -> None:
    world = World(tmp_path, gpus=3)
    world.driver.names["GPU-1"] = "A30"
    world.hardware.mig["GPU-2"] = None
    node = node_of(world)
    assert node.problem("GPU-0") == ""
    assert node.problem("GPU-2") == "A30 does not support MIG"
    world.driver.xids = [("GPU-0", 48), ("GPU-1", 13), ("", 79)]
    world.hardware.missing = {"GPU-1"}
    node.refresh()
    assert node.problem("GPU-0").startswith("XID 48")
    assert node.problem("GPU-1") == "the driver no longer lists it"
    assert node.gpus == ["GPU-0", "GPU-1", "GPU-2"], "indexes stay"
    world.hardware.missing = set()
    node.refresh()
    assert node.problem("GPU-1") == ""
    world.driver.readings = GpuUsage(90, 0)
    node.read_usage()
    world.driver.readings = GpuUsage(90, 2)
    node.read_usage()
    assert "ECC" in node.problem("GPU-1")
    world.driver.pending["GPU-1"] = False
    node.refresh()
    assert "MIG mode will be off after a reset" in node.problem("GPU-1")
    body = hello(node, "b", "1")
    assert body is not None
    assert body["model"] == "A30-24GB"
    assert [gpu["mig"] for gpu in body["gpus"]] == [True, True, False]  # type: ignore[attr-defined]


def test_driver_unavailable_and_back(tmp_path: Path) -> None:
    world = World(tmp_path)
    node = node_of(world)
    world.steps.fail_at = {world.steps.count + 1: (9, False)}
    node.refresh()
    assert "the NVIDIA driver is not loaded" in node.problem("GPU-0")
    node.refresh()
    assert node.problem("GPU-0") == ""
    world.steps.fail_at = {world.steps.count + 1: (18, False)}
    with pytest.raises(DriverChangedError, match="different versions"):
        node.refresh()
    fresh = NodeState(world.driver, GpuIndex(tmp_path / "new"), Health(tmp_path, "b"))
    world.steps.fail_at = {world.steps.count + 1: (9, False)}
    with pytest.raises(DriverError):
        fresh.refresh()
    assert hello(fresh, "b", "1") is None


def test_mig_mode_is_enabled_only_on_idle_gpus(tmp_path: Path) -> None:
    world = World(tmp_path, gpus=2)
    world.hardware.mig = {"GPU-0": False, "GPU-1": False}
    node = node_of(world)
    with pytest.raises(SlicewiseError, match="this node has no such GPU"):
        MigModeSwitch(["GPU-9"]).check(node)
    switch = MigModeSwitch(["GPU-1"])
    switch.check(node)
    world.driver.running = [77]
    switch.attempt(node)
    assert "processes use the GPU: 77" in node.problem("GPU-1")
    world.driver.running = []
    node.conflict = "another MIG manager is running"
    switch.attempt(node)
    assert world.hardware.mig["GPU-1"] is False
    node.conflict = ""
    world.driver.mig_status = RESET_REQUIRED
    switch.attempt(node)
    assert "MIG mode could not be enabled" in node.problem("GPU-1")
    node.refresh()
    switch.attempt(node)
    assert "takes effect only after a reset" in node.problem("GPU-1")
    world.driver.mig_status, world.driver.pending = 0, {}
    node.refresh()
    switch.attempt(node)
    assert world.hardware.mig == {"GPU-0": False, "GPU-1": True}
    assert node.problem("GPU-1") == ""
    # MIG mode is enabled once: if an operator disables it, it stays off.
    world.hardware.mig["GPU-1"] = False
    node.refresh()
    switch.attempt(node)
    assert world.hardware.mig["GPU-1"] is False
    world.hardware.mig["GPU-1"] = None
    node.refresh()
    with pytest.raises(SlicewiseError, match="does not support MIG"):
        MigModeSwitch(["GPU-1"]).check(node)


@pytest.mark.parametrize("program", [["-m", "slicewise.agent"], ["-m", "slicewise.cli", "agent"]])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--server URL is required"),
        (["--server", "http://x"], "--token-file FILE is required"),
        (["--json"], "--json requires --discover"),
        (["--server", "http://x", "--token-file", "/nowhere"], "cannot be read"),
    ],
)
def test_errors_are_one_line(program: list[str], words: list[str], message: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLICEWISE_")}
    done = subprocess.run(
        [sys.executable, *program, *words], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("slicewise: error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
