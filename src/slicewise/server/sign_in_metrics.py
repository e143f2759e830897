"""The metrics of the identity provider's keys."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slicewise.server.sign_in import SignIn


class SignInCollector(Collector):
    """Computes them for a scrape; without a provider they have no samples."""

    def __init__(self, sign_in: SignIn) -> None:
        self._sign_in = sign_in

    def collect(self) -> Iterator[Metric]:
        """The keys, the time since they were fetched, and how often that succeeded."""
        keys = self._sign_in.keys
        known = GaugeMetricFamily("slicewise_provider_keys", "Keys of the identity provider")
        age = GaugeMetricFamily(
            "slicewise_provider_keys_age_seconds", "Time since they were fetched"
        )
        refreshes = CounterMetricFamily(
            "slicewise_provider_refreshes", "Attempts to fetch them", labels=("result",)
        )
        if keys is not None:
            known.add_metric((), len(keys.keys))
            if keys.age is not None:
                age.add_metric((), keys.age)
            for result, number in keys.refreshes.items():
                refreshes.add_metric((result,), number)
        yield from (known, age, refreshes)
