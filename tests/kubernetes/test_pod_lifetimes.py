"""When pods end, as deadlines, Jobs and annotations tell, and what the placements make of it."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from tests.control.test_policy_choices import choice
from tests.kubernetes.objects import claim, device_class, pod, wants
from tests.kubernetes.test_controller import SEAT, controller, lead, tell, with_node
from tests.kubernetes.test_cycle import Scene, device
from tests.kubernetes.test_rehearsals import rehearsed as rehearsed_is_default
from tests.kubernetes.test_rehearsals import won

from slicewise.control.commands import ChoosePolicy
from slicewise.control.pods import EXPECTED, read_expected
from slicewise.control.policy_choices import PolicyChoices
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.kubernetes.api import Job, Pod
from slicewise.kubernetes.cache import ClusterCache
from slicewise.kubernetes.event_recorder import EventRecorder
from slicewise.kubernetes.informer import (
    CLAIMS,
    CLASSES,
    JOBS,
    PODS,
    Changed,
    Deleted,
    Listed,
    WatchError,
)
from slicewise.kubernetes.job_deadlines import JobDeadlines
from slicewise.kubernetes.pending_claims import PendingClaims
from slicewise.kubernetes.pod_lifetimes import (
    START_SECONDS,
    PodLifetimes,
)

rehearsed = pytest.fixture(rehearsed_is_default.__wrapped__)  # type: ignore[attr-defined]
NOW = 1_000_000.0
GRACE = 30


def text_of(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def job(name: str, deadline: int | None, started: float | None = NOW, uid: str = "") -> Job:
    """A Job, which has started at a time."""
    status = {} if started is None else {"startTime": text_of(started)}
    made = {
        "metadata": {"name": name, "namespace": "team", "uid": uid or f"uid-{name}"},
        "spec": {"activeDeadlineSeconds": deadline},
        "status": status,
    }
    return msgspec.convert(made, Job)


def changed(made: Pod, *, expected: str = "", of: str = "", started: float | None = None) -> Pod:
    """A pod with an annotation, of a Job, or started."""
    owner = {"kind": "Job", "name": of, "uid": f"uid-{of}", "controller": True}
    more = {
        "annotations": {EXPECTED: expected} if expected else {},
        "ownerReferences": [owner] if of else [],
    }
    meta = msgspec.convert({**msgspec.to_builtins(made.metadata), **more}, type(made.metadata))
    status = made.status
    if started is not None:
        status = msgspec.structs.replace(status, start_time=text_of(started))
    return msgspec.structs.replace(made, metadata=meta, status=status)


def ask(
    scene: Scene, name: str, profile: str, expected: str = "", of: str = "", **spec: Any
) -> Pod:
    """A pod in a scene, with an annotation or of a Job."""
    made = changed(scene.ask(name, profile, **spec), expected=expected, of=of)
    show(scene, made)
    return made


def show(scene: Scene, made: Pod) -> None:
    """The watch of pods delivers a version of a pod."""
    scene.pending.set_pod(made)
    scene.cycle.jobs.pod_changed(made)
    scene.cycle.lifetime_changed(made)
    scene.cycle.requeue(made.metadata.key)


def tell_job(scene: Scene, one: Job) -> None:
    """The watch of Jobs delivers a version of a Job."""
    for key in scene.cycle.jobs.put(one):
        scene.cycle.lifetime_changed(scene.pending.pods[key])
        scene.cycle.requeue(key)


def ends(scene: Scene) -> list[float]:
    """When the cluster's instances end, in the order of their ids."""
    cluster = scene.cache.state.cluster
    return [cluster.end_of(one) for one in sorted(cluster.instances(), key=lambda one: one.id)]


def at(scene: Scene) -> Scene:
    scene.now = NOW
    return scene


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30.0), ("0.5", 0.5), ("86400", 86400.0)]
    + [(bad, None) for bad in ("", "0", "0.0", "-5", "1e3", "an hour", "1234567890", "\u0661")],
)
def test_the_annotation_is_a_positive_number(text: str, seconds: float | None) -> None:
    found, problem = read_expected({EXPECTED: text})
    assert found == seconds
    assert bool(problem) == (seconds is None)
    assert read_expected({}) == (None, "")


def test_what_is_wrong_with_an_annotation_is_said_briefly() -> None:
    _, problem = read_expected({EXPECTED: "x" * 500})
    assert problem.startswith(f"annotation {EXPECTED}: 'xxx")
    assert problem.endswith("...' is not a positive number: it is ignored")
    assert len(problem) < 150


def test_instances_enter_the_cluster_with_the_known_ends_of_their_pods() -> None:
    scene = at(Scene("n1", gpus=2))
    ask(scene, "plain", "1g.10gb")
    ask(scene, "bounded", "1g.10gb", activeDeadlineSeconds=600, terminationGracePeriodSeconds=5)
    ask(scene, "hinted", "1g.10gb", expected="100.5")
    ask(scene, "both", "1g.10gb", expected="900", activeDeadlineSeconds=600)
    assert len(scene.decide()) == 4
    bounded = NOW + START_SECONDS + 600
    assert ends(scene) == [math.inf, bounded + 5, NOW + 100.5, bounded + GRACE]
    records = scene.cache.state.allocations.values()
    assert [one.expected_seconds for one in records] == [None, 665, 100.5, 690]


def test_the_end_of_a_pod_is_known_better_once_it_has_started() -> None:
    scene = at(Scene("n1", gpus=2))
    bounded = ask(scene, "bounded", "1g.10gb", activeDeadlineSeconds=600)
    hinted = ask(scene, "hinted", "1g.10gb", expected="100")
    scene.decide()
    show(scene, changed(bounded, started=NOW + 5))
    show(scene, changed(hinted, expected="100", started=NOW + 7))
    assert ends(scene) == [NOW + 5 + 600 + GRACE, NOW + 107]
    show(scene, changed(hinted, expected="200", started=NOW + 7))
    assert ends(scene)[1] == NOW + 207


def test_a_job_ends_its_pods_by_its_own_deadline() -> None:
    """The time that the Job has run already counts; the sooner of both deadlines does."""
    scene = at(Scene("n1", gpus=2))
    tell_job(scene, job("train", 3600, NOW - 1000))
    tell_job(scene, job("endless", None, NOW - 1000))
    ask(scene, "a", "1g.10gb", of="train")
    ask(scene, "b", "1g.10gb", of="train", activeDeadlineSeconds=100)
    ask(scene, "c", "1g.10gb", of="endless")
    scene.decide()
    by_job = NOW + 2600 + START_SECONDS + GRACE
    assert ends(scene) == [by_job, NOW + 100 + START_SECONDS + GRACE, math.inf]
    first = next(scene.cache.state.cluster.instances())
    assert scene.cycle.ends(first) == by_job
    # Suspended, given a new deadline, given none, and deleted.
    tell_job(scene, job("train", 3600, None))
    assert ends(scene)[0] == math.inf
    tell_job(scene, job("train", 7200, NOW))
    assert ends(scene)[0] == NOW + 7200 + START_SECONDS + GRACE
    tell_job(scene, job("train", None, NOW))
    assert ends(scene)[0] == math.inf


def test_a_pod_of_a_job_that_waits_has_less_time_left() -> None:
    scene = at(Scene("n1"))
    old = scene.ask("old", "7g.80gb")
    scene.decide()
    tell_job(scene, job("train", 3600, NOW))
    made = ask(scene, "a", "1g.10gb", of="train", expected="5000")
    scene.decide()
    pending_pod = scene.pending.pending_pod(made.metadata.key)
    assert pending_pod is not None
    lifetimes = scene.cycle._lifetimes
    assert lifetimes.lease(pending_pod) == lifetimes.expected(pending_pod) == 3690
    waiting = next(iter(scene.cycle._queue))
    assert waiting.ends_by(NOW) == NOW + 3690
    scene.now = NOW + 1000
    scene.end(old.metadata.name)
    scene.decide()
    assert ends(scene) == [NOW + 3690]


def test_a_hint_promises_nothing() -> None:
    """A reservation counts on deadlines only: no window opens at an expected end."""
    scene = at(Scene("n1", rules=ReservationRules(300.0, 1.0)))
    made = ask(scene, "a", "1g.10gb", expected="10")
    scene.decide()
    (instance,) = scene.cache.state.cluster.instances()
    assert ends(scene) == [NOW + 10]
    assert scene.cycle.ends(instance) is None
    scene.now = NOW + 1000  # longer than expected: nothing is freed
    show(scene, changed(made, expected="10", started=NOW))
    scene.decide()
    assert list(scene.cache.state.cluster.instances()) == [instance]
    waiting = ask(scene, "b", "7g.80gb", expected="10")
    scene.decide()
    pending_pod = scene.pending.pending_pod(waiting.metadata.key)
    assert pending_pod is not None
    assert scene.cycle._lifetimes.lease(pending_pod) is None
    ticket = next(iter(scene.cycle._queue))
    assert (ticket.lease, ticket.expected, ticket.until) == (None, 10.0, None)
    tickets = [scene.cache.state.allocations[uid] for uid in scene.cache.state.tickets]
    assert [one.expected_seconds for one in tickets] == [10.0]


def test_a_claim_that_other_pods_may_use_has_no_known_end() -> None:
    scene = at(Scene("n1"))
    ask(scene, "a", "1g.10gb", expected="10", activeDeadlineSeconds=100)
    free = scene.pending.claims["team/a-0"]
    meta = msgspec.structs.replace(free.metadata, owner_references=())
    scene.pending.claims["team/a-0"] = msgspec.structs.replace(free, metadata=meta)
    pending_pod = scene.pending.pending_pod("team/a")
    assert pending_pod is not None
    lifetimes = scene.cycle._lifetimes
    assert lifetimes.hint(pending_pod) is lifetimes.until(pending_pod) is None
    scene.decide()
    assert ends(scene) == [math.inf]


def test_a_replica_that_starts_knows_the_ends_of_what_is_there() -> None:
    """Whether the watch of pods or that of claims is the first to deliver."""
    before = at(Scene("n1"))
    made = ask(before, "a", "1g.10gb", activeDeadlineSeconds=600)
    before.decide()
    made = changed(made, started=NOW + 3)
    placed = before.pending.claims["team/a-0"]
    for pods_first in (True, False):
        after = at(Scene("n1"))
        for step in (0, 1):
            if pods_first == (step == 0):
                show(after, made)
            else:
                after.change(placed)
        show(after, made)
        assert ends(after) == [NOW + 3 + 600 + GRACE]


@pytest.mark.parametrize("known", [True, False])
def test_knowing_when_pods_end_changes_where_a_pod_goes(rehearsed: None, known: bool) -> None:
    """It goes beside the pod that leaves when it does: the other GPU is free again soon."""
    scene = at(Scene("n1", gpus=2))
    table = replace(choice("3g.40gb", "7g.80gb"), leases=True, mean_lifetime=3600.0)
    for name, expected in (("short", "60"), ("filler", ""), ("late", "7200")):
        ask(scene, name, "3g.40gb", expected=expected if known else "")
        scene.decide()
    scene.end("filler")
    PolicyChoices(scene.cache).choose(ChoosePolicy(won(scene.cache.state, table)))
    ask(scene, "new", "3g.40gb", expected="7200" if known else "")
    assert scene.decide() == {"new": [device("3g.40gb", 0, gpu=1 if known else 0)]}


def test_what_pods_say_of_their_lifetimes_is_known_to_rehearsals() -> None:
    scene = at(Scene("n1"))
    ask(scene, "a", "1g.10gb", expected="100")
    ask(scene, "b", "1g.10gb")
    scene.decide()
    scene.now += 50
    scene.end("a")
    scene.end("b")
    stays = scene.cache.state.demand.estimate.stays
    assert [(stay.lifetime, stay.stated) for stay in stays] == [(50, 100), (50, None)]


# Jobs


def test_jobs_and_their_pods() -> None:
    jobs = JobDeadlines()
    made = changed(pod("p"), of="train")
    assert jobs.of(pod("alone")) is None
    jobs.pod_changed(pod("alone"))
    jobs.pod_deleted(pod("alone"))
    jobs.pod_changed(made)
    assert jobs.of(made) is None
    assert jobs.put(job("train", 60)) == ("team/p",)
    assert jobs.put(job("train", 60)) == ()
    assert jobs.of(made) == (60.0, NOW + 60)
    assert jobs.put(job("other", 60)) == ()
    # Deleted and created again, and the pods of the first are still there.
    jobs.put(job("train", 90, uid="again"))
    assert jobs.of(made) is None
    assert set(jobs.known) == {"team/train", "team/other"}
    assert jobs.drop("team/train") == ()
    assert jobs.drop("team/train") == ()
    assert jobs.put(job("train", 60)) == ("team/p",)
    jobs.pod_deleted(made)
    jobs.pod_deleted(made)
    assert jobs.drop("team/train") == ()
    owner = msgspec.structs.replace(made.metadata.owner_references[0], kind="ReplicaSet")
    meta = msgspec.structs.replace(made.metadata, owner_references=(owner,))
    jobs.put(job("train", 60))
    assert jobs.of(msgspec.structs.replace(made, metadata=meta)) is None


def test_the_controller_follows_jobs_and_serves_without_them() -> None:
    one = controller()
    with_node(one)
    owner = {"kind": "Pod", "name": "p", "uid": "uid-p", "controller": True}
    placed = claim("a", seats=[SEAT], reserved=["uid-p"], ownerReferences=[owner])
    made = changed(pod("p", ["a"]), of="train")
    tell(one, Changed(CLASSES, device_class()), Changed(JOBS, job("train", 60)))
    tell(one, Changed(CLAIMS, placed), Changed(PODS, made))
    cluster = one.cache.state.cluster
    (instance,) = cluster.instances()
    assert cluster.end_of(instance) == NOW + 60 + START_SECONDS + GRACE
    tell(one, Changed(JOBS, job("train", 100)))
    assert cluster.end_of(instance) == NOW + 100 + START_SECONDS + GRACE
    tell(one, Listed(JOBS, [], True, True, "9"))
    assert cluster.end_of(instance) == math.inf
    tell(one, Changed(JOBS, job("train", 100)), Deleted(JOBS, job("train", 100)))
    assert cluster.end_of(instance) == math.inf
    tell(one, WatchError(JOBS, "forbidden"))
    assert one.ready
    assert one.warnings == ("Jobs are not known: forbidden",)
    tell(one, Changed(JOBS, job("train", 100)), Changed(PODS, changed(made, of="train")))
    over = msgspec.structs.replace(
        made, status=msgspec.structs.replace(made.status, phase="Succeeded")
    )
    tell(one, Changed(PODS, over))
    assert one._cycle.jobs.put(job("train", 50)) == ()
    tell(one, Changed(PODS, made), Deleted(PODS, made))
    assert one._cycle.jobs.put(job("train", 70)) == ()


def test_a_pod_is_told_once_that_its_annotation_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        EventRecorder,
        "report_event",
        lambda self, about, reason, action, text: told.append(
            f"{about.kind} {about.namespace}/{about.name} {reason} {text}"
        ),
    )
    one = controller()
    with_node(one)
    made = changed(pod("p", ["a"]), expected="soon")
    asked = claim("a", config=[wants(profile="1g.10gb")])
    tell(one, Changed(CLASSES, device_class()), Changed(CLAIMS, asked), Changed(PODS, made))
    assert told == [], "only the leader tells it"
    lead(one)
    one._fenced = one.elector.term
    for _ in range(2):
        tell(one, Changed(PODS, made))
    [said] = told
    assert said.startswith(f"Pod team/p AnnotationUnreadable annotation {EXPECTED}: 'soon' is not")
    assert one.stats.decided == 1, "and it is placed nevertheless"


def test_a_pod_that_mends_its_annotation_is_not_told() -> None:
    scene = at(Scene("n1"))
    scene.ask("old", "7g.80gb")
    scene.decide()
    ask(scene, "a", "1g.10gb", expected="soon")
    scene.cycle.update_queue()
    assert set(scene.cycle.unreadable.take()) == {"team/a"}
    for expected in ("60", "later"):
        ask(scene, "a", "1g.10gb", expected=expected)
        scene.cycle.update_queue()
    assert set(scene.cycle.unreadable.take()) == {"team/a"}
    scene.end("a")
    scene.cycle.update_queue()
    assert scene.cycle.unreadable.take() == {}


def test_without_an_allocation_a_claim_ends_as_if_it_were_placed_now() -> None:
    cache = ClusterCache("default", lambda: NOW, lambda: "")
    pending = PendingClaims()
    lifetimes = PodLifetimes(cache, pending, JobDeadlines())
    owner = {"kind": "Pod", "name": "p", "uid": "uid-p", "controller": True}
    asked = claim("a", ownerReferences=[owner])
    pending.set_pod(changed(pod("p", ["a"]), expected="60"))
    assert lifetimes.ends(asked) == cache.ends_of(asked) == NOW + 60
    assert lifetimes.ends(claim("b")) == math.inf
