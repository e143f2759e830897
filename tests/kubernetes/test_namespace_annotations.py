"""The annotations of a namespace; a limit that cannot be read is never taken as no limit."""

from __future__ import annotations

import msgspec
import pytest
from tests.kubernetes.objects import claim, pod, wants
from tests.kubernetes.test_controller import controller, lead, tell, with_node

from slicewise.journal.entries import QuotaRecord
from slicewise.kubernetes.api import Namespace
from slicewise.kubernetes.event_recorder import EventRecorder
from slicewise.kubernetes.informer import CLAIMS, NAMESPACES, PODS, Changed, Deleted
from slicewise.kubernetes.namespace_annotations import QUOTA, Unreadable, read_annotations

ODD = ["9" * 5000, "\u0661\u0662", "-1", "1.5", "", "19 slices", "8Gi"]


def namespace(uid: str = "u", **annotations: str) -> Namespace:
    named = {f"slicewise.dev/{name.replace('_', '-')}": text for name, text in annotations.items()}
    meta = {"name": "team", "uid": uid, "annotations": named}
    return msgspec.convert({"metadata": meta}, Namespace)


def quota(made: Namespace) -> QuotaRecord:
    terms = read_annotations(made, {"memory_slices": 7, "instances": 7}, "last")
    assert terms.problems == ()
    return terms.quota


def test_the_terms_of_a_namespace_are_its_annotations() -> None:
    assert quota(namespace(memory_slices="8", instances="0")) == QuotaRecord(
        memory_slices=8, instances=0
    )
    assert quota(namespace(weight="2.5", guarantee="14", max_priority="1000")) == QuotaRecord(
        weight=2.5, guarantee=14, max_priority=1000
    )
    assert quota(namespace()) == QuotaRecord()  # it was removed


@pytest.mark.parametrize("text", ["9" * 5000, "-1", "inf", "nan", "1e3", "0", "", ".5", "2."])
def test_an_unreadable_weight_is_1_and_an_error(text: str) -> None:
    terms = read_annotations(namespace(weight=text), {}, "unlimited")
    assert terms.quota == QuotaRecord()
    [problem] = terms.problems
    assert problem.startswith("annotation slicewise.dev/weight: ")
    assert len(problem) < 200


@pytest.mark.parametrize("text", ODD)
@pytest.mark.parametrize("name", [name.removeprefix("slicewise.dev/") for name in QUOTA])
@pytest.mark.parametrize(
    ("unreadable", "known", "limit"),
    [
        ("last", None, 0),
        ("last", 8, 8),
        ("nothing", 8, 0),
        ("unlimited", 8, None),
        ("unlimited", None, None),
    ],
)
def test_an_unreadable_limit_is_an_error_and_no_silent_freedom(
    unreadable: Unreadable, known: int | None, limit: int | None, name: str, text: str
) -> None:
    field = QUOTA[f"slicewise.dev/{name}"]
    before = {} if known is None else {field: known}
    terms = read_annotations(namespace(**{name: text}), before, unreadable)
    assert getattr(terms.quota, field) == limit
    assert terms.known == before
    [problem] = terms.problems
    assert name in problem
    assert len(problem) < 200


def test_guarantee_and_priority_have_defaults() -> None:
    terms = read_annotations(namespace(guarantee="x", max_priority="-3"), {}, "last")
    assert terms.quota == QuotaRecord()
    assert len(terms.problems) == 2


def test_the_namespace_is_told_and_gets_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        EventRecorder,
        "report_event",
        lambda self, about, reason, action, text: told.append(f"{about.name} {reason} {text}"),
    )
    one = controller()
    with_node(one)
    lead(one)
    one._fenced = one.elector.term
    for _ in range(2):
        tell(one, Changed(NAMESPACES, namespace(memory_slices="eight")))
    [said] = told
    assert said.startswith(
        "team AnnotationUnreadable annotation slicewise.dev/memory-slices: 'eight'"
    )
    assert one.stats.unreadable == 1
    tell(one, Changed(CLAIMS, claim("a", config=[wants(profile="1g.10gb")])))
    tell(one, Changed(PODS, pod("p", ["a"])))
    assert one.stats.decided == 0
    tell(one, Changed(NAMESPACES, namespace(memory_slices="1")))
    assert one.stats.decided == 1
    assert one.stats.unreadable == 0
    tell(one, Changed(NAMESPACES, namespace(memory_slices="one")))  # the last known limit
    assert one.cache.state.tenants_by_name["team"].quota.memory_slices == 1
    tell(one, Changed(NAMESPACES, namespace("another", memory_slices="one")))
    tell(one, Deleted(NAMESPACES, namespace("another")))
    assert one.stats.unreadable == 0
