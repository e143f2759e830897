"""Whether a pod can run on a node: each rule by hand, the accounting against a recount."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from slicewise.kubernetes.api import Node, NodeSelector, Pod
from slicewise.kubernetes.node_resources import NodeResources, requests
from slicewise.kubernetes.node_rules import matches

ROOM = {"cpu": "8", "memory": "64Gi", "pods": "110"}


def node(name: str = "n1", labels: dict[str, str] | None = None, **more: Any) -> Node:
    """A node with capacity for everything, and these additional fields."""
    spec = {key: more.pop(key) for key in ("unschedulable", "taints") if key in more}
    return msgspec.convert(
        {
            "metadata": {"name": name, "labels": labels or {}},
            "spec": spec,
            "status": {"allocatable": {**ROOM, **more.pop("has", {})}},
        },
        Node,
    )


def container(cpu: str | None = None, **amounts: str) -> dict[str, Any]:
    wanted = {name.replace("_", "-"): text for name, text in amounts.items()}
    if cpu is not None:
        wanted["cpu"] = cpu
    return {"resources": {"requests": wanted}}


def sidecar(cpu: str) -> dict[str, Any]:
    return {**container(cpu), "restartPolicy": "Always"}


def pod(
    name: str = "p", cpu: str | None = None, phase: str = "Pending", uid: str = "", **spec: Any
) -> Pod:
    """A pod with one container."""
    spec.setdefault("containers", [container(cpu)])
    return msgspec.convert(
        {
            "metadata": {"namespace": "ns", "name": name, "uid": uid or f"uid-{name}"},
            "spec": spec,
            "status": {"phase": phase},
        },
        Pod,
    )


def node_resources(*nodes: Node) -> NodeResources:
    made = NodeResources()
    for one in nodes:
        made.node_changed(one)
    return made


def affinity(*terms: dict[str, Any]) -> dict[str, Any]:
    required = {"nodeSelectorTerms": list(terms)}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


# The node itself


def test_an_unknown_node_or_not_the_node_of_the_pod() -> None:
    known = node_resources(node(), node("n2"))
    assert known.misfit(pod(), "n3") == "is unknown"
    assert known.misfit(pod(nodeName="n2"), "n1") == "is not the pod's node, n2"
    assert known.misfit(pod(nodeName="n2"), "n2") is None
    known.node_deleted("n2")
    known.node_deleted("n2")
    assert known.misfit(pod(), "n2") == "is unknown"


def test_a_cordoned_node_needs_a_toleration() -> None:
    known = node_resources(node(unschedulable=True))
    assert known.misfit(pod(), "n1") == "is cordoned"
    daemon = [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]
    assert known.misfit(pod(tolerations=daemon), "n1") is None


@pytest.mark.parametrize(
    ("toleration", "fits"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "team", "operator": "Exists"}, True),
        ({"key": "team", "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": "team", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"key": "team", "operator": "Equal", "value": "7"}, True),
        ({"key": "team", "value": "7"}, True),
        ({"key": "team", "operator": "", "value": "7"}, True),
        ({"key": "team", "value": "8"}, False),
        ({"key": "team", "operator": "Gt", "value": "6"}, True),
        ({"key": "team", "operator": "Gt", "value": "7"}, False),
        ({"key": "team", "operator": "Lt", "value": "8"}, True),
        ({"key": "team", "operator": "Lt", "value": "many"}, False),
        ({"key": "team", "operator": "Like", "value": "7"}, False),
    ],
)
def test_taints_and_tolerations(toleration: dict[str, str], fits: bool) -> None:
    known = node_resources(node(taints=[{"key": "team", "value": "7", "effect": "NoSchedule"}]))
    why = "has taint team=7:NoSchedule, which is not tolerated"
    assert known.misfit(pod(tolerations=[toleration]), "n1") == (None if fits else why)


def test_every_excluding_taint_must_be_tolerated() -> None:
    taints = [
        {"key": "soft", "effect": "PreferNoSchedule"},
        {"key": "a", "effect": "NoSchedule"},
        {"key": "b", "effect": "NoExecute"},
    ]
    known = node_resources(node(taints=taints))
    only_a = [{"key": "a", "operator": "Exists"}]
    assert known.misfit(pod(), "n1") == "has taint a:NoSchedule, which is not tolerated"
    assert known.misfit(pod(tolerations=only_a), "n1") == (
        "has taint b:NoExecute, which is not tolerated"
    )
    both = [*only_a, {"key": "b", "operator": "Exists"}]
    assert known.misfit(pod(tolerations=both), "n1") is None


# Selectors and affinity


def test_node_selectors() -> None:
    known = node_resources(node(labels={"zone": "a", "disk": "ssd"}))
    assert known.misfit(pod(nodeSelector={"zone": "a", "disk": "ssd"}), "n1") is None
    for wrong in ({"zone": "b"}, {"zone": "a", "rack": "1"}):
        assert known.misfit(pod(nodeSelector=wrong), "n1") == (
            "does not match the pod's node selector"
        )


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": operator, "values": list(values)}


@pytest.mark.parametrize(
    ("wanted", "met"),
    [
        (expression("zone", "In", "b", "a"), True),
        (expression("zone", "In", "b"), False),
        (expression("zone", "In"), False),
        (expression("rack", "In", "a"), False),
        (expression("zone", "NotIn", "b"), True),
        (expression("zone", "NotIn", "a", "b"), False),
        (expression("zone", "NotIn"), False),
        (expression("rack", "NotIn", "a"), True),
        (expression("zone", "Exists"), True),
        (expression("zone", "Exists", "a"), False),
        (expression("rack", "Exists"), False),
        (expression("rack", "DoesNotExist"), True),
        (expression("rack", "DoesNotExist", "a"), False),
        (expression("zone", "DoesNotExist"), False),
        (expression("size", "Gt", "3"), True),
        (expression("size", "Gt", "4"), False),
        (expression("size", "Lt", "5"), True),
        (expression("size", "Lt", "4"), False),
        (expression("size", "Lt", "4", "5"), False),
        (expression("size", "Gt", "few"), False),
        (expression("size", "Gt", "-1"), True),
        (expression("size", "Lt", "1_000"), False),
        (expression("zone", "Gt", "3"), False),
        (expression("rack", "Gt", "3"), False),
        (expression("zone", "Like", "a"), False),
    ],
)
def test_every_operator_of_node_affinity(wanted: dict[str, Any], met: bool) -> None:
    known = node_resources(node(labels={"zone": "a", "size": "4"}))
    waiting = pod(affinity=affinity({"matchExpressions": [wanted]}))
    why = "does not match the pod's node affinity"
    assert known.misfit(waiting, "n1") == (None if met else why)


def selector(*terms: dict[str, Any]) -> NodeSelector:
    return msgspec.convert({"nodeSelectorTerms": list(terms)}, NodeSelector)


def test_terms_are_alternatives_and_expressions_are_not() -> None:
    there = node(labels={"zone": "a", "disk": "ssd"})
    zone, disk = expression("zone", "In", "a"), expression("disk", "In", "hdd")
    assert not matches(selector({"matchExpressions": [zone, disk]}), there)
    assert matches(selector({"matchExpressions": [disk]}, {"matchExpressions": [zone]}), there)
    assert not matches(selector({}), there)
    assert matches(selector({}, {"matchExpressions": [zone]}), there)
    assert not matches(selector(), there)


@pytest.mark.parametrize(
    ("field", "met"),
    [
        (expression("metadata.name", "In", "n1"), True),
        (expression("metadata.name", "In", "n2"), False),
        (expression("metadata.name", "In", "n1", "n2"), False),
        (expression("metadata.name", "NotIn", "n2"), True),
        (expression("metadata.name", "NotIn", "n1"), False),
        (expression("metadata.name", "Exists"), False),
        (expression("metadata.uid", "In", "n1"), False),
    ],
)
def test_fields_of_the_node(field: dict[str, Any], met: bool) -> None:
    there = node(labels={"zone": "a"})
    zone = expression("zone", "In", "a")
    assert matches(selector({"matchFields": [field]}), there) == met
    assert matches(selector({"matchFields": [field], "matchExpressions": [zone]}), there) == met


def test_a_pod_may_have_other_affinities_only() -> None:
    known = node_resources(node())
    assert known.misfit(pod(affinity={"podAffinity": {}}), "n1") is None
    assert known.misfit(pod(affinity={"nodeAffinity": {}}), "n1") is None


# Requests of a pod


def test_containers_are_added_and_init_containers_run_before_them() -> None:
    made = pod(
        containers=[container("1", memory="1Gi"), container("500m", memory="1Gi")],
        initContainers=[container("2", memory="1Gi"), container("1", ephemeral_storage="1Mi")],
    )
    assert requests(made) == {"cpu": 2000, "memory": 2 << 30, "ephemeral-storage": 1 << 20}


def test_sidecars_run_beside_all_later_containers() -> None:
    made = pod(
        containers=[container("1")],
        initContainers=[
            container("4"),
            sidecar("1"),
            container("3500m"),
            sidecar("1"),
        ],
    )
    # Before the sidecars 4; then 3.5 with one; finally 1 with both: the maximum is 4.5.
    assert requests(made) == {"cpu": 4500}
    later = pod(containers=[container("3")], initContainers=[sidecar("2")] * 2)
    assert requests(later) == {"cpu": 7000}


def test_overhead_and_resources_of_the_pod() -> None:
    whole = {"requests": {"cpu": "3", "memory": "1Gi", "hugepages-2Mi": "2Mi", "nvidia.com/x": "4"}}
    made = pod(
        containers=[container("9", memory="2Gi", ephemeral_storage="1Ki")],
        resources=whole,
        overhead={"cpu": "250m"},
    )
    assert requests(made) == {
        "cpu": 3250,
        "memory": 1 << 30,
        "hugepages-2Mi": 2 << 20,
        "ephemeral-storage": 1024,
    }


def test_amounts_are_added_before_they_are_rounded() -> None:
    assert requests(pod(containers=[container("500u"), container("500u")])) == {"cpu": 1}
    assert requests(pod(containers=[container("100u", memory="0")])) == {"cpu": 1}


# Free resources


def test_a_shortage_is_described() -> None:
    known = node_resources(node(has={"nvidia.com/x": "2", "ephemeral-storage": "10Gi"}))
    known.pod_changed(pod("there", "7700m", nodeName="n1"))
    assert known.misfit(pod(cpu="300m"), "n1") is None
    assert known.misfit(pod(cpu="2"), "n1") == "has 0.3 of 8 CPUs free, 2 are asked for"
    for amounts, why in (
        ({"memory": "96Gi"}, "has 64Gi of 64Gi memory free, 96Gi are asked for"),
        ({"memory": "2Ti"}, "has 64Gi of 64Gi memory free, 2Ti are asked for"),
        (
            {"ephemeral_storage": "10752Mi"},
            "has 10Gi of 10Gi ephemeral-storage free, 10.5Gi are asked for",
        ),
        ({"hugepages_2Mi": "4Mi"}, "has 0 of 0 hugepages-2Mi free, 4Mi are asked for"),
        ({"nvidia.com/x": "3"}, "has 2 of 2 nvidia.com/x free, 3 are asked for"),
        ({"nvidia.com/y": "1"}, "has 0 of 0 nvidia.com/y free, 1 are asked for"),
    ):
        assert known.misfit(pod(containers=[container(**amounts)]), "n1") == why


def test_a_node_has_a_limit_of_pods() -> None:
    known = node_resources(node(has={"pods": "1"}), node("n2", has={"pods": "0"}))
    assert known.misfit(pod(), "n1") is None
    known.pod_changed(pod("there", nodeName="n1"))
    assert known.misfit(pod(), "n1") == "has no room for another pod"
    assert known.misfit(pod(), "n2") == "has no room for another pod"


def test_a_pod_does_not_compete_with_itself() -> None:
    known = node_resources(node(has={"pods": "1"}))
    waiting = pod(cpu="8")
    known.assume(waiting, "n1")
    assert known.misfit(waiting, "n1") is None
    assert known.misfit(pod("other", "1"), "n1") == "has no room for another pod"


def test_extended_resources_that_are_devices_exclude_no_node() -> None:
    known = node_resources(
        node(has={"nvidia.com/gpu": "0"}), node("n2", has={"nvidia.com/gpu": "1"})
    )
    by_name = pod(containers=[container(**{"nvidia.com/gpu": "2"})])
    assert known.misfit(by_name, "n1") == "has 0 of 0 nvidia.com/gpu free, 2 are asked for"
    known.set_by_devices(frozenset({"nvidia.com/gpu"}))
    assert known.misfit(by_name, "n1") is None
    assert known.misfit(by_name, "n2") == "has 1 of 1 nvidia.com/gpu free, 2 are asked for"
    by_class = pod("c", containers=[container(**{"deviceclass.resource.kubernetes.io/mig": "2"})])
    assert known.misfit(by_class, "n1") is None


def test_invalid_requests_do_not_fit_and_count_as_nothing() -> None:
    known = node_resources(node(has={"memory": "plenty"}))
    assert known.misfit(pod(containers=[container(memory="1")]), "n1") == (
        "has 0 of 0 memory free, 1 are asked for"
    )
    strange = pod(cpu="lots")
    assert "'lots' is not a quantity" in str(known.misfit(strange, "n1"))
    known.pod_changed(pod(cpu="lots", nodeName="n1"))
    assert known.misfit(pod("other", cpu="8"), "n1") is None


# The life of a pod


def free_cpus(known: NodeResources, name: str) -> int:
    """The largest whole number of CPUs that another pod could still have."""
    sizes = range(8, 0, -1)
    return next((n for n in sizes if known.misfit(pod("probe", str(n)), name) is None), 0)


def test_an_assumed_pod_is_counted() -> None:
    known = node_resources(node(), node("n2"))
    waiting = pod(cpu="3")
    known.pod_changed(waiting)
    assert free_cpus(known, "n1") == 8
    known.assume(waiting, "n1")
    known.assume(waiting, "n1")
    known.pod_changed(waiting)
    assert free_cpus(known, "n1") == 5
    version = known.version
    known.pod_changed(pod(cpu="3", nodeName="n1"))
    assert free_cpus(known, "n1") == 5
    assert known.version == version
    known.forget("uid-p")
    known.assume(waiting, "n2")
    assert (free_cpus(known, "n1"), free_cpus(known, "n2")) == (5, 8)
    known.pod_changed(pod(cpu="3", nodeName="n1", phase="Succeeded"))
    assert free_cpus(known, "n1") == 8
    assert known.version == version + 1


def test_a_pod_bound_to_another_node_is_counted_there() -> None:
    known = node_resources(node(), node("n2"))
    known.assume(pod(cpu="3"), "n1")
    version = known.version
    known.pod_changed(pod(cpu="3", nodeName="n2"))
    assert (free_cpus(known, "n1"), free_cpus(known, "n2")) == (8, 5)
    assert known.version == version + 1


def test_a_forgotten_or_deleted_pod_is_not_counted() -> None:
    known = node_resources(node())
    known.assume(pod(cpu="3"), "n1")
    known.forget("uid-p")
    known.forget("uid-p")
    assert free_cpus(known, "n1") == 8
    known.assume(pod(cpu="3"), "n1")
    known.pod_deleted("ns/p")
    known.pod_deleted("ns/p")
    assert free_cpus(known, "n1") == 8
    known.assume(pod(cpu="3", phase="Failed"), "n1")
    assert free_cpus(known, "n1") == 8


def test_pods_on_one_node_are_counted_separately() -> None:
    known = node_resources(node())
    known.pod_changed(pod("a", "3", nodeName="n1"))
    known.pod_changed(pod("b", "2", nodeName="n1"))
    assert free_cpus(known, "n1") == 3
    known.pod_deleted("ns/a")
    assert free_cpus(known, "n1") == 6


def test_another_pod_of_the_same_name() -> None:
    known = node_resources(node())
    known.pod_changed(pod(cpu="3", nodeName="n1", uid="first"))
    known.pod_changed(pod(cpu="1", uid="second"))
    assert free_cpus(known, "n1") == 8
    assert known.pods == {"ns/p": "second"}


def test_requests_are_cached_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Pod] = []

    def counted(one: Pod) -> dict[str, int]:
        made.append(one)
        return requests(one)

    monkeypatch.setattr("slicewise.kubernetes.node_resources.requests", counted)
    monkeypatch.setattr("slicewise.kubernetes.node_resources._MAX_DEMANDS", 2)
    known = node_resources(node(), node("n2"))
    waiting = pod(cpu="1")
    for name in ("n1", "n2", "n1"):
        assert known.misfit(waiting, name) is None
    assert len(made) == 1
    told_again = msgspec.structs.replace(
        waiting, metadata=msgspec.structs.replace(waiting.metadata, resource_version="5")
    )
    same = msgspec.convert(msgspec.to_builtins(told_again), Pod)
    assert known.misfit(told_again, "n1") is known.misfit(same, "n1") is None
    assert len(made) == 2
    for name in ("a", "b", "c"):
        assert known.misfit(pod(name), "n1") is None
    assert len(made) == 5


# Versions


def test_the_version_grows_when_a_node_may_fit_more_pods() -> None:
    known = NodeResources()

    def grows(changed: Node) -> bool:
        before = known.version
        known.node_changed(changed)
        return known.version > before

    taint = {"key": "a", "effect": "NoSchedule"}
    assert grows(node())
    assert not grows(node())
    assert not grows(node(has={"cpu": "4"}))
    assert grows(node(has={"cpu": "5"}))
    assert grows(node(has={"cpu": "5", "nvidia.com/x": "1"}))
    assert not grows(node(taints=[taint], has={"cpu": "5"}))
    soft = {"key": "soft", "effect": "PreferNoSchedule"}
    assert not grows(node(taints=[taint, soft], has={"cpu": "5"}))
    assert not grows(node(taints=[taint], has={"cpu": "5"}))
    assert grows(node(has={"cpu": "5"}))
    assert grows(node(has={"cpu": "5"}, labels={"zone": "a"}))
    assert not grows(node(has={"cpu": "5"}, labels={"zone": "a"}, unschedulable=True))
    assert grows(node(has={"cpu": "5"}, labels={"zone": "a"}))
    known.node_deleted("n1")
    assert grows(node(has={"cpu": "1"}))


def test_the_version_grows_when_a_pod_needs_less() -> None:
    known = node_resources(node())
    known.pod_changed(pod(cpu="3", nodeName="n1"))
    version = known.version
    known.pod_changed(pod(cpu="4", nodeName="n1"))
    assert known.version == version
    known.pod_changed(pod(cpu="2", nodeName="n1"))
    assert known.version == version + 1
    assert free_cpus(known, "n1") == 6


# Cached results for nodes, compared with an instance that caches nothing

NODES = st.sampled_from(["n1", "n2", "n3"])
TAINTS = st.sampled_from([[], [{"key": "a", "effect": "NoSchedule"}]])
KINDS = [
    pod("plain"),
    pod("tolerant", tolerations=[{"operator": "Exists"}]),
    pod("picky", nodeSelector={"zone": "a"}),
    pod("choosy", affinity=affinity({"matchExpressions": [expression("zone", "NotIn", "a")]})),
    pod("alike", nodeSelector={"zone": "a"}),
    pod("large", cpu="8"),
]


LOOKS = st.fixed_dictionaries(
    {
        "labels": st.sampled_from([{}, {"zone": "a"}]),
        "taints": TAINTS,
        "unschedulable": st.booleans(),
        "has": st.sampled_from([{}, {"cpu": "7"}]),
    }
)


@given(st.lists(st.tuples(NODES, st.none() | LOOKS), max_size=12), st.integers(1, 4))
def test_cached_verdicts_equal_computed_ones(
    changes: list[tuple[str, dict[str, Any] | None]], kinds: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slicewise.kubernetes.node_resources._MAX_KINDS", kinds)
        known, there = NodeResources(), dict[str, Node]()
        for name, what in changes:
            if what is None:
                there.pop(name, None)
                known.node_deleted(name)
            else:
                there[name] = node(name, **what)
                known.node_changed(there[name])
            rebuilt = node_resources(*there.values())
            for one in KINDS:
                for where in ("n1", "n2", "n3"):
                    assert known.misfit(one, where) == rebuilt.misfit(one, where)


# The accounting, against a recount from the events alone

NAMES = st.sampled_from(["a", "b", "c", "d"])
CPUS = st.sampled_from(["1", "1500m", "2"])


class Accounting(RuleBasedStateMachine):
    """Pods are created, assigned, bound, ended and deleted; the free resources match a recount."""

    def __init__(self) -> None:
        super().__init__()
        self.known = node_resources(node("n1"), node("n2"))
        self.pods: dict[str, Pod] = {}
        self.chosen: dict[str, str] = {}
        self.born = 0
        self.seen = (self.known.version, {"n1": 8000, "n2": 8000})

    @rule(name=NAMES, cpu=CPUS)
    def comes(self, name: str, cpu: str) -> None:
        """A new pod; the end of an older one of that name was not seen."""
        self.born += 1
        self._drop(name)
        self.pods[name] = pod(name, cpu, uid=f"{name}-{self.born}")
        self.known.pod_changed(self.pods[name])

    @rule(name=NAMES, where=NODES)
    def chosen_for(self, name: str, where: str) -> None:
        if name in self.pods:
            self.known.assume(self.pods[name], where)
            if not self.pods[name].spec.node_name and not self.pods[name].over:
                self.chosen[self.pods[name].metadata.uid] = where

    @rule(name=NAMES)
    def forgotten(self, name: str) -> None:
        if name in self.pods:
            self.known.forget(self.pods[name].metadata.uid)
            self.chosen.pop(self.pods[name].metadata.uid, None)

    @rule(name=NAMES, where=NODES)
    def bound(self, name: str, where: str) -> None:
        if name in self.pods and not self.pods[name].spec.node_name:
            self._become(name, node_name=where)
            if not self.pods[name].over:
                self.chosen.pop(self.pods[name].metadata.uid, None)

    @rule(name=NAMES, cpu=CPUS)
    def resized(self, name: str, cpu: str) -> None:
        if name in self.pods:
            self._become(name, containers=pod(cpu=cpu).spec.containers)

    @rule(name=NAMES, phase=st.sampled_from(["Succeeded", "Failed"]))
    def ends(self, name: str, phase: str) -> None:
        if name in self.pods:
            status = msgspec.structs.replace(self.pods[name].status, phase=phase)
            self.pods[name] = msgspec.structs.replace(self.pods[name], status=status)
            self.chosen.pop(self.pods[name].metadata.uid, None)
            self.known.pod_changed(self.pods[name])

    @rule(name=NAMES)
    def goes(self, name: str) -> None:
        self._drop(name)
        self.known.pod_deleted(f"ns/{name}")

    @rule(there=st.booleans())
    def third_node(self, there: bool) -> None:
        """Pods may be on a node that is not known yet, or no longer."""
        if there:
            self.known.node_changed(node("n3"))
        else:
            self.known.node_deleted("n3")

    @invariant()
    def what_is_free_is_what_a_recount_says(self) -> None:
        free = dict.fromkeys(self.known.nodes, 8000)
        for one in self.pods.values():
            home = one.spec.node_name or self.chosen.get(one.metadata.uid)
            if home in free and not one.over:
                free[home] -= requests(one)["cpu"]
        for name, cpus in free.items():
            probe = pod("probe", f"{max(cpus, 1)}m")
            assert (self.known.misfit(probe, name) is None) == (cpus > 0)
            more = self.known.misfit(pod("probe", f"{max(cpus, 0) + 1}m"), name)
            assert more is not None
            assert more.startswith(f"has {max(cpus, 0) / 1000:g} of 8 CPUs free")
        if any(cpus > self.seen[1].get(name, -(10**9)) for name, cpus in free.items()):
            assert self.known.version > self.seen[0]
        self.seen = self.known.version, free

    def _become(self, name: str, **spec: Any) -> None:
        changed = msgspec.structs.replace(self.pods[name].spec, **spec)
        self.pods[name] = msgspec.structs.replace(self.pods[name], spec=changed)
        self.known.pod_changed(self.pods[name])

    def _drop(self, name: str) -> None:
        gone = self.pods.pop(name, None)
        if gone is not None:
            self.chosen.pop(gone.metadata.uid, None)


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
