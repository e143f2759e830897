"""Check that the time of a decision does not grow from a hundred GPUs to a million.

Runs the measurement of `slicewise bench` and prints two ratios, both within the same run: to our
time at a hundred GPUs, and to the paper's scan of all GPUs.
"""

from __future__ import annotations

from slicewise import TablePolicy, load_geometry, policy
from slicewise.lab.bench import SlotCounts, benchmark
from slicewise.lab.mix import parse_mix

SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)


def main() -> None:
    """Measure and print the ratios."""
    mfi = policy("mfi")
    assert isinstance(mfi, TablePolicy)
    mix = parse_mix("uniform", load_geometry("A100-80GB"))
    decisions, memory = benchmark(mix, [mfi], SIZES, 0.85, SlotCounts(), lambda units: None)
    time = {(row["path"], row["gpus"]): float(str(row["ns_per_decision"])) for row in decisions}
    print("mfi, 85% sustained load, a decision and a release")
    for path in ("engine", "compiled"):
        growth = time[path, 1_000_000] / time[path, 100]
        rate = 1e9 / time[path, 1_000_000]
        print(
            f"  {path:8} at 1,000,000 GPUs: {growth:5.2f} x its time at 100, {rate:,.0f} a second"
        )
    for path in ("scan-compiled", "scan-numpy"):
        for gpus in (10_000, 1_000_000):
            ratio = time[path, gpus] / time["compiled", gpus]
            print(f"  {path:13} at {gpus:9,} GPUs: {ratio:8,.0f} x the time of compiled")
    last = memory[-1]
    size = float(str(last["engine_bytes"]))
    first = float(str(memory[0]["engine_bytes"]))
    each = (size - first) / (1_000_000 - 100)
    print(f"  the engine's memory at 1,000,000 GPUs: {size / 1e6:.0f} MB, {each:.0f} bytes a GPU")


if __name__ == "__main__":
    main()
