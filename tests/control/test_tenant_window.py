"""The window of counted instances: no tenant has more than its part, and none is kept out."""

from __future__ import annotations

import random
from collections import Counter, deque
from fractions import Fraction

import pytest

from slicewise.control.tenant_window import AGE, FREE, SIZE, TenantWindow


def _held(window: TenantWindow) -> Counter[str]:
    held: Counter[str] = Counter()
    for _, tenant, count in window.entries:
        held[tenant] += count
    return held


def test_a_single_tenant_counts_in_full() -> None:
    window = TenantWindow()
    assert [window.take(0, "a", n, 0, 0) for n in (1, 700, 5000, 3)] == [1, 700, SIZE, 3]
    assert _held(window) == {"a": SIZE}


def test_a_flood_counts_as_much_as_what_the_other_tenant_asks_for() -> None:
    window = TenantWindow()
    counted: Counter[str] = Counter()
    for step in range(30_000):
        counted["a"] += window.take(step, "a", 1, 0, 0)
        if step % 100 == 0:
            counted["b"] += window.take(step, "b", 1, 0, 0)
    assert counted["b"] == 300
    assert counted["a"] <= 300 + FREE
    assert counted["a"] > 250


def test_a_flood_that_came_first_has_its_part_once_others_ask() -> None:
    window = TenantWindow()
    window.take(0, "a", SIZE, 0, 0)
    for step in range(2 * SIZE):
        window.take(step, "a", 100, 0, 0)
        window.take(step, "b", 1, 0, 0)
    held = _held(window)
    assert held["a"] <= held["b"] + FREE


def test_a_tenant_with_most_of_the_instances_has_as_large_a_part() -> None:
    window = TenantWindow()
    rng = random.Random(1)
    for step in range(20_000):
        window.take(step, "small" if rng.random() < 0.1 else "large", 1, 0, 0)
    assert _held(window)["large"] < 0.55 * SIZE
    for step in range(20_000):
        large = rng.random() > 0.1
        window.take(step, "large" if large else "small", 1, 9 if large else 1, 10)
    assert 0.85 * SIZE < _held(window)["large"] <= 0.9 * SIZE + 1


def test_what_is_a_day_old_keeps_no_other_tenant_out() -> None:
    window = TenantWindow()
    window.take(0, "b", 30, 0, 0)
    for _ in range(10):
        window.take(1, "a", 100, 0, 0)
    assert window.take(AGE, "a", 5, 0, 0) == 0
    assert window.take(AGE + 0.5, "a", 5, 0, 0) == 5
    assert "b" not in _held(window)


@pytest.mark.parametrize("seed", range(20))
def test_it_holds_what_a_plain_list_of_instances_would(seed: int) -> None:
    rng = random.Random(seed)
    window, plain = TenantWindow(), deque[tuple[float, str]]()
    at = 0.0
    for _ in range(200):
        at += rng.choice([0, 1, AGE / 50])
        tenant, count = rng.choice("abbbcccc"), rng.choice([1, 1, 2, 30, 1500])
        have = rng.choice([0, 20, 50, 99, 100])
        while plain and plain[0][0] < at - AGE:
            plain.popleft()
        sizes = Counter(who for _, who in plain)
        bound = max(Fraction(have, 100), Fraction(1, len(sizes.keys() | {tenant})))
        allowed = [
            n
            for n in range(min(count, SIZE) + 1)
            if n == 0
            or sizes[tenant] + n <= FREE
            or sizes[tenant] + n - 1 <= bound * (len(plain) + n - 1)
        ]
        taken = window.take(at, tenant, count, have, 100)
        assert taken == max(allowed, default=0)
        plain.extend([(at, tenant)] * taken)
        while len(plain) > SIZE:
            plain.popleft()
        assert [(t, who) for t, who, n in window.entries for _ in range(n)] == list(plain)
        window = TenantWindow(window.entries)
