"""Client-side rate limits."""

from __future__ import annotations

import threading

import pytest

from slicewise.kubernetes.rate_limit import RateLimit, RequestLimits


def test_a_burst_is_sent_at_once_and_the_rest_at_the_rate() -> None:
    now, slept = [0.0], list[float]()
    limit = RateLimit(10.0, 5, lambda: now[0], slept.append)
    for _ in range(5):
        limit.wait()
    assert slept == []
    for _ in range(3):
        limit.wait()
    assert slept == pytest.approx([0.1, 0.2, 0.3])  # each has its own turn
    now[0] = 100.0
    for _ in range(6):
        limit.wait()
    assert slept[3:] == pytest.approx([0.1])


def test_threads_together_keep_the_limit() -> None:
    slept: list[float] = []
    limit = RateLimit(100.0, 10, lambda: 0.0, slept.append)

    def ask() -> None:
        for _ in range(10):
            limit.wait()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert max(slept) == pytest.approx(0.3)


def test_messages_do_not_take_the_turns_of_allocations_and_the_lease_never_waits() -> None:
    limits = RequestLimits(1.0, 4)
    slept: list[str] = []
    limits._all._sleep = lambda seconds: slept.append("all")
    limits._messages._sleep = lambda seconds: slept.append("messages")
    for _ in range(3):
        limits.wait("PATCH", "/api/v1/namespaces/n/pods/p/status")
        limits.wait("POST", "/apis/events.k8s.io/v1/namespaces/n/events")
    assert slept == ["messages"] * 5
    for _ in range(4):
        limits.wait("PATCH", "/apis/resource.k8s.io/v1/namespaces/n/resourceclaims/c/status")
    assert slept == ["messages"] * 5
    limits.wait("GET", "/api/v1/pods")
    for _ in range(100):
        limits.wait("PUT", "/apis/coordination.k8s.io/v1/namespaces/n/leases/slicewise")
    assert slept == ["messages"] * 5 + ["all"]
