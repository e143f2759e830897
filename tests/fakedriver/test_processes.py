"""Concurrent processes and threads, and killed processes: the state stays consistent."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from threading import Thread
from typing import Any

from tests.fakedriver.driver import Direct, code, run, start

from slicewise.catalog import load_geometry
from slicewise.core.cluster import Cluster
from slicewise.fakedriver import Machine, SimulatedInstance

KILLS = 60
PROCESSES = 4
ROUNDS = 150
STEPS = 1500

CHURN = """
import ctypes, random
chance = random.Random(int(sys.argv[1]))
gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(2)]
sizes = {19: (1, 0), 15: (2, 0), 14: (2, 1), 9: (4, 2), 5: (4, 3), 0: (8, 4)}
made = 0
for _ in range(int(sys.argv[2])):
    gpu = chance.choice(gpus)
    profile = chance.choice(list(sizes))
    size, compute = sizes[profile]
    try:
        if chance.random() < 0.5:
            place = ctypes.byref(nvml.c_nvmlGpuInstancePlacement_t(chance.randrange(8), size))
            instance = nvml.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, profile, place)
        else:
            instance = nvml.nvmlDeviceCreateGpuInstance(gpu, profile)
        made += 1
        nvml.nvmlGpuInstanceCreateComputeInstance(instance, compute)
        made += 1
    except (nvml.NVMLError_InsufficientResources, nvml.NVMLError_InvalidArgument):
        pass
    count = ctypes.c_uint()
    room = (nvml.c_nvmlGpuInstance_t * 16)()
    nvml.nvmlDeviceGetGpuInstances(gpu, profile, room, ctypes.byref(count))
    if count.value:
        victim = chance.choice(room[: count.value])
        try:
            computed = nvml.nvmlGpuInstanceGetComputeInstanceById(victim, 0)
            nvml.nvmlComputeInstanceDestroy(computed)
            nvml.nvmlGpuInstanceDestroy(victim)
        except nvml.NVMLError:
            pass  # another process was faster, or is between its two steps
print(made)
"""
"""Creates and destroys instances at random, on the same GPUs as other processes."""


def check(machine: Machine) -> int:
    """Check that the scheduler would allow all instances; return their number."""
    views: tuple[SimulatedInstance, ...] = machine.instances()
    cluster = Cluster.of(load_geometry("H200"), len(machine.gpus))
    for view in views:
        cluster.place(view.gpu, view.profile, view.start)  # raises if it overlaps
        assert len(view.computes) <= 1
        for compute in view.computes:
            assert (compute.id, compute.start) == (0, 0)
            assert compute.profile == view.profile
    image = machine._snapshot()
    serials = Counter(
        thing.serial
        for gpu in image.gpus
        for thing in (*gpu.instances, *gpu.computes)
        if thing.serial
    )
    assert all(number == 1 for number in serials.values())
    assert max(serials, default=0) < image.next_serial
    for gpu in image.gpus:
        parents = {instance.serial for instance in gpu.instances if instance.serial}
        assert all(c.parent in parents for c in gpu.computes if c.serial)
    uuids = [compute.uuid for view in views for compute in view.computes]
    assert len(set(uuids)) == len(uuids)
    return len(views)


def test_concurrent_processes_lose_no_change(machine: Machine, library: Path) -> None:
    running = [
        start(machine, library, CHURN, str(seed), str(ROUNDS), stdout=subprocess.PIPE)
        for seed in range(PROCESSES)
    ]
    made = 0
    for process in running:
        output, _ = process.communicate()
        assert process.returncode == 0
        made += int(output)
    check(machine)
    # Every success takes a serial; a lost change would leave a gap.
    assert machine._snapshot().next_serial == made + 1
    assert made > PROCESSES


def test_killed_processes_leave_a_consistent_state(machine: Machine, library: Path) -> None:
    chance = random.Random(0)
    running = [_start_churn(machine, library, seed) for seed in range(2)]
    seen = 0
    for number in range(KILLS):
        before = sum(machine.calls().values())
        while sum(machine.calls().values()) == before:
            time.sleep(0.0005)
        time.sleep(chance.random() * 0.002)
        victim = running.pop(0)
        victim.send_signal(signal.SIGKILL)
        assert victim.wait() == -signal.SIGKILL
        seen = max(seen, check(machine))
        running.append(_start_churn(machine, library, 2 + number))
    for process in running:
        process.kill()
        process.wait()
    check(machine)
    assert seen > 0
    print(f"{KILLS} processes killed at random moments; the state was whole after each")


def _start_churn(machine: Machine, library: Path, seed: int) -> subprocess.Popen[str]:
    return start(machine, library, CHURN, str(seed), "1000000", stdout=subprocess.DEVNULL)


def test_killed_in_every_call(machine: Machine, library: Path) -> None:
    """Kill the process in each call of a run in turn, at each moment of the call."""
    program = "sys.argv[1:] = ['7', '6']" + CHURN
    assert run(machine, library, program) == 0
    calls = sum(machine.calls().values())
    for moment in ("before", "during", "after"):
        for number in range(0, calls, 1 if moment == "during" else 4):
            _clear(machine)
            machine.kill("*", moment, after=number)
            ended = run(machine, library, program)
            assert ended == -signal.SIGKILL or moment == "during"
            check(machine)
            machine.clear_faults()
    assert calls > 30
    print(f"killed at {calls} calls; the state was whole after each")


def _clear(machine: Machine) -> None:
    for gpu in range(len(machine.gpus)):
        machine.reset(gpu)


def test_concurrent_threads_lose_no_change(machine: Machine, library: Path) -> None:
    outcomes: Counter[int] = Counter()
    with Direct(machine, library) as driver:

        def churn(start: int) -> None:
            for _ in range(STEPS):
                code, handle = driver.create(start % 2, 19, start // 2, 1)
                outcomes[code] += 1
                outcomes[driver.destroy(handle)] += 1

        threads = [Thread(target=churn, args=(start,)) for start in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert outcomes == {0: 8 * STEPS * 2}
    assert machine.instances() == ()
    assert machine._snapshot().next_serial == 8 * STEPS + 1


def test_forked_child_locks_the_file_itself(machine: Machine, library: Path) -> None:
    program = """
import ctypes
gpu = nvml.nvmlDeviceGetHandleByIndex(0)
children = []
gate, opened = os.pipe()
for child in range(3):
    pid = os.fork()
    if pid == 0:
        os.close(opened)
        os.read(gate, 1)  # until all children are ready
        for _ in range(1000):
            instance = nvml.nvmlDeviceCreateGpuInstanceWithPlacement(
                gpu, 19, ctypes.byref(nvml.c_nvmlGpuInstancePlacement_t(child, 1)))
            nvml.nvmlGpuInstanceDestroy(instance)
        os._exit(0)
    children.append(pid)
os.close(opened)
for pid in children:
    assert os.waitpid(pid, 0)[1] == 0
"""
    assert run(machine, library, program) == 0
    assert machine.instances() == ()
    assert machine._snapshot().next_serial == 3 * 1000 + 1


def test_forked_child_opens_its_own_descriptor(machine: Machine, library: Path) -> None:
    """A descriptor inherited by a fork shares its lock, and would exclude no one."""
    program = """
def descriptor():
    (found,) = (int(name) for name in os.listdir("/proc/self/fd")
                if os.path.realpath(f"/proc/self/fd/{name}") == sys.argv[1])
    return found
nvml.nvmlDeviceGetCount()
pid = os.fork()
if pid == 0:
    nvml.nvmlDeviceGetCount()
    os.lseek(descriptor(), 7, os.SEEK_SET)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert os.lseek(descriptor(), 0, os.SEEK_CUR) == 0
"""
    assert run(machine, library, program, str(machine.path.resolve())) == 0


def test_machine_and_driver_exclude_each_other(machine: Machine, gpu: Any, nvml: Any) -> None:
    def heat() -> None:
        for degrees in range(300):
            machine.set_temperature(1, degrees)

    thread = Thread(target=heat)
    thread.start()
    made = 0
    while thread.is_alive():
        made += not code(nvml.nvmlDeviceCreateGpuInstance, gpu, 19)
        if machine.instances(0):
            machine.destroy_instance(0, machine.instances(0)[0].start)
    thread.join()
    assert machine.gpus[1].temperature == 299
    assert machine._snapshot().next_serial == made + 1
    assert os.environ["SLICEWISE_FAKE_NVML"] == str(machine.path)
