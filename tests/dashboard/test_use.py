"""The dashboard in use: a real browser on a real service."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect
from tests.dashboard.browser import Visitor
from tests.dashboard.conftest import Visit, asked
from tests.e2e.server import Server

from slicewise import Cluster, Rejection, Scheduler, load_geometry
from slicewise.core.fragmentation import score
from slicewise.core.states import state_space
from slicewise.dashboard.comparison import stranded
from slicewise.lab.mix import parse_mix
from slicewise.lab.workload import draw_kinds, longest_lifetime, run_generator

SCRIPT = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@pytest.fixture(autouse=True)
def empty(server: Server) -> None:
    """Every test begins with empty nodes that take instances."""
    for one in asked(server, "GET", "/v1/allocations?limit=1000")["allocations"]:
        asked(server, "DELETE", f"/v1/allocations/{one['id']}")
    asked(server, "POST", "/v1/nodes/n1/uncordon")


def token_of(server: Server, role: str, **options: str) -> str:
    return str(asked(server, "POST", "/v1/tokens", {"role": role} | options)["token"])


def total(page: Page, name: str) -> Locator:
    return page.locator(".totals div", has_text=name).locator("dd")


def test_nothing_is_shown_without_a_token(visit: Visit, server: Server) -> None:
    visitor = visit()
    page = visitor.open("nodes")
    expect(page.get_by_label("Token")).to_be_focused()
    assert page.get_by_role("navigation").count() == 0
    page.get_by_label("Token").fill("sw_nobodys")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("unknown token")
    assert page.evaluate("sessionStorage.length") == 0
    page.get_by_label("Token").fill(server.admin_token)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Nodes")  # where they wanted to go
    expect(page.get_by_role("row", name=re.compile("n1"))).to_contain_text("A100-80GB")
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_have_text("Nodes")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Token")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


def test_ids_are_abbreviated_and_copied_completely(visit: Visit, server: Server) -> None:
    made = [
        asked(server, "POST", "/v1/allocations", {"profile": "1g.10gb"})["id"] for _ in range(2)
    ]
    page = visit().sign_in(server.admin_token, "allocations")
    shown = [page.locator(f'.id[title="{identity}"]') for identity in made]
    for identity, cell in zip(made, shown, strict=True):
        expect(cell).to_have_text(f"a…{identity[-8:]}")
        copied = cell.evaluate(
            """(element) => {
              const data = new DataTransfer();
              element.dispatchEvent(new ClipboardEvent("copy", { clipboardData: data }));
              return data.getData("text/plain");
            }"""
        )
        assert copied == identity
    for identity in made:
        asked(server, "DELETE", f"/v1/allocations/{identity}")


def test_a_revoked_token_signs_out(visit: Visit, server: Server) -> None:
    issued = asked(server, "POST", "/v1/tokens", {"role": "operator"})
    visitor = visit()
    page = visitor.sign_in(issued["token"])
    asked(server, "DELETE", f"/v1/tokens/{issued['id']}")
    page.get_by_role("navigation").get_by_text("Audit log").click()
    expect(page.get_by_role("alert")).to_contain_text("revoked")
    assert page.get_by_role("navigation").count() == 0


def test_tokens_of_agents_are_refused(visit: Visit, server: Server) -> None:
    page = visit().open()
    page.get_by_label("Token").fill(token_of(server, "agent", node="n1"))
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("an agent's token", ignore_case=True)


def test_allocations_appear_and_disappear_live(visit: Visit, server: Server) -> None:
    page = visit().sign_in(server.admin_token)
    expect(total(page, "instances")).to_have_text("0")
    page.evaluate("window.same = true")
    made = asked(server, "POST", "/v1/allocations", {"profile": "3g.40gb", "tenant": "acme"})
    activity = page.get_by_label("Recent events")
    start = made["start"]
    expect(activity).to_contain_text(f"acme got 3g.40gb on n1 GPU 0 slice {start}")
    expect(total(page, "instances")).to_have_text("1")
    page.get_by_role("application").focus()
    details = page.get_by_label("The chosen GPU")
    expect(details).to_contain_text("n1 · GPU 0")
    expect(details).to_contain_text(f"3g.40gb on slices {start}\u2013{start + 3}, acme")
    # With one half taken, only 7g.80gb is blocked in part, and it is too large to count.
    expect(details).to_contain_text("Fragmentation F = 0")
    page.keyboard.press("ArrowRight")
    expect(details).to_contain_text("n1 · GPU 1")
    expect(details).to_contain_text("Nothing runs here")
    page.keyboard.press("ArrowLeft")
    asked(server, "DELETE", f"/v1/allocations/{made['id']}")
    expect(details).to_contain_text("Nothing runs here")
    expect(total(page, "instances")).to_have_text("0")
    assert page.evaluate("window.same") is True


def test_ask_submit_and_release(visit: Visit, server: Server) -> None:
    visitor = visit()
    page = visitor.sign_in(token_of(server, "tenant", tenant="acme"), "ask")
    page.get_by_label("Profile", exact=True).select_option("2g.20gb")
    verdict = page.locator("#verdict")
    said = asked(
        server, "POST", "/v1/allocations/dry-run", {"profile": "2g.20gb", "tenant": "acme"}
    )
    expect(verdict).to_contain_text("It would be placed")
    expect(verdict).to_contain_text(said["detail"])
    expect(page.locator(".choices").nth(1)).to_contain_text("worst-fit")
    page.get_by_role("button", name="Submit").click()
    sent = page.locator("#sent li")
    expect(sent).to_contain_text("2g.20gb n1 GPU 0")
    (living,) = asked(server, "GET", "/v1/allocations?tenant=acme")["allocations"]
    assert living["profile"] == "2g.20gb"
    sent.get_by_role("button", name="Release").click()
    expect(sent).to_contain_text("released")
    assert asked(server, "GET", "/v1/allocations?tenant=acme")["allocations"] == []


def test_a_rejection_is_shown_with_its_reason(visit: Visit, server: Server) -> None:
    for _ in range(4):
        asked(server, "POST", "/v1/allocations", {"profile": "7g.80gb", "tenant": "zen"})
    page = visit().sign_in(server.admin_token, "ask")
    page.get_by_label("Profile", exact=True).select_option("4g.40gb")
    expect(page.locator("#verdict")).to_contain_text("It would be rejected: capacity")
    page.get_by_role("button", name="Submit").click()
    expect(page.locator("#sent")).to_contain_text("rejected: capacity")
    _, refusal = server.ask("POST", "/v1/allocations", {"profile": "4g.40gb"})
    expect(page.locator("#sent")).to_contain_text(refusal["detail"])
    page.get_by_role("navigation").get_by_text("Overview").click()
    row = page.get_by_role("row", name=re.compile("4g.40gb")).first
    expect(row).to_contain_text(refusal["detail"])
    rejected = page.locator("[data-figure=Rejected]")
    expect(rejected).to_have_text(re.compile(r"[1-9]"))


def test_release_from_the_table(visit: Visit, server: Server) -> None:
    asked(server, "POST", "/v1/allocations", {"profile": "1g.10gb", "labels": {"job": "keep"}})
    asked(server, "POST", "/v1/allocations", {"profile": "1g.10gb", "labels": {"job": "end"}})
    page = visit().sign_in(server.admin_token, "allocations")
    page.get_by_label("Search").fill("job=end")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_role("button", name=re.compile("^Release")).click()
    page.get_by_role("dialog").get_by_role("button", name="Release").click()
    expect(page.locator("tbody tr")).to_have_count(0)
    (left,) = asked(server, "GET", "/v1/allocations")["allocations"]
    assert left["labels"] == {"job": "keep"}


def test_the_newest_allocations_come_first_and_older_ones_on_demand(
    browser: Browser, tmp_path: Path
) -> None:
    server = Server(tmp_path, settings=("limits.page=2",))  # of which the page loads five at a time
    server.start()
    visitor = Visitor(browser, server)
    try:
        asked(server, "POST", "/v1/nodes", {"name": "n1", "model": "A100-80GB", "gpus": 2})
        ids = [
            asked(server, "POST", "/v1/allocations", {"profile": "1g.10gb"})["id"]
            for _ in range(12)
        ]
        page = visitor.sign_in(server.admin_token, "allocations")
        rows = page.locator("tbody tr")
        told = page.get_by_text("The newest 10 of 12 are loaded, and searched.")
        expect(told).to_be_visible()
        shown = rows.evaluate_all("rows => rows.map((row) => row.dataset.key)")
        assert shown == ids[:1:-1]
        page.get_by_role("button", name="Load older ones").click()
        expect(rows).to_have_count(12)
        expect(told).to_be_hidden()
        expect(page.get_by_role("button", name="Load older ones")).to_be_hidden()
        asked(server, "DELETE", f"/v1/allocations/{ids[0]}")
        expect(rows).to_have_count(11)
        for one in ids[1:]:
            asked(server, "DELETE", f"/v1/allocations/{one}")
        page.get_by_label("State").select_option("released")
        expect(page.get_by_text("The 10 that ended last are loaded, and searched.")).to_be_visible()
    finally:
        visitor.close()
        server.kill()


def test_drain_a_node(visit: Visit, server: Server) -> None:
    ids = [asked(server, "POST", "/v1/allocations", {"profile": "2g.20gb"})["id"] for _ in range(3)]
    page = visit().sign_in(server.admin_token, "nodes")
    row = page.locator("tr[data-key=n1]")
    expect(row).to_contain_text("ready")
    row.get_by_role("button", name="Drain").click()
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    expect(row).to_contain_text("draining: 3 instances to go")
    for left in (2, 1):
        asked(server, "DELETE", f"/v1/allocations/{ids.pop()}")
        expect(row).to_contain_text(f"draining: {left} instance")
    asked(server, "DELETE", f"/v1/allocations/{ids.pop()}")
    expect(row).to_contain_text("drained")
    row.get_by_role("button", name="Uncordon").click()
    expect(row).to_contain_text("ready")


def test_a_plan_is_drawn_and_approved(visit: Visit, server: Server) -> None:
    made = [
        asked(server, "POST", "/v1/allocations", {"profile": "1g.10gb", "count": 6})
        for _ in range(4)
    ]
    for one in made:
        asked(server, "DELETE", f"/v1/allocations/{one['id']}")
    for _ in range(4):
        asked(server, "POST", "/v1/allocations", {"profile": "3g.40gb", "tenant": "acme"})
    ones = [asked(server, "POST", "/v1/allocations", {"profile": "3g.40gb"}) for _ in range(4)]
    for one in (ones[0], ones[2]):
        asked(server, "DELETE", f"/v1/allocations/{one['id']}")
    plan = asked(server, "GET", "/v1/defrag/plan?profile=7g.80gb&budget=8")
    page = visit().sign_in(server.admin_token, "defrag?profile=7g.80gb")
    moves = page.locator(".moves > li")
    expect(moves).to_have_count(len(plan["moves"]))
    first = plan["moves"][0]
    expect(moves.first).to_contain_text(f"{first['to_node']} GPU {first['to_gpu']}")
    page.get_by_role("button", name=re.compile("^Approve")).click()
    page.get_by_role("dialog").get_by_role("button", name="Move them").click()
    expect(page.get_by_text("7g.80gb fits already")).to_be_visible()
    placed = asked(server, "POST", "/v1/allocations", {"profile": "7g.80gb"})
    assert placed["state"] == "placed"


def accepted(policy: str, steps: int, gpus: int, load: float, seed: int) -> int:
    """How many of the first arrivals a policy accepts, straight from engine and workload."""
    geometry = load_geometry("A100-80GB")
    mix = parse_mix("skew-small", geometry)
    rng = run_generator(seed, 0)
    longest = longest_lifetime(mix, gpus, load)
    kinds = draw_kinds(rng, mix, 4000)
    lifetimes = rng.integers(1, longest, size=4000, endpoint=True)
    scheduler = Scheduler(Cluster.of(geometry, gpus), policy)
    ends: dict[int, list[int]] = {}
    count = 0
    for slot in range(steps):
        for instance in ends.pop(slot, ()):
            scheduler.release(instance)
        got = scheduler.submit(mix.profiles[kinds[slot]].name)
        if not isinstance(got, Rejection):
            count += 1
            ends.setdefault(slot + int(lifetimes[slot]), []).append(got.id)
    return count


def test_the_comparison_shows_the_counts_of_the_engine(visit: Visit, server: Server) -> None:
    terms = "a=round-robin&b=mfi&mix=skew-small&gpus=8&load=100&seed=3&length=200&speed=600"
    page = visit().sign_in(token_of(server, "tenant", tenant="zen"), f"compare?{terms}")
    page.get_by_role("button", name="Play").click()
    expect(page.locator("#compare-place")).to_have_text("200 of 200")
    for side, policy in (("a", "round-robin"), ("b", "mfi")):
        expected = accepted(policy, 200, 8, 1.0, 3)
        counters = page.locator(f"dl[data-side={side}]")
        expect(counters.locator("[data-name=accepted] dd")).to_have_text(str(expected))
        expect(counters.locator("[data-name=rejected] dd")).to_have_text(str(200 - expected))
    page.get_by_role("button", name="Restart").click()
    expect(page.locator("#compare-place")).to_have_text("0 of 200")
    page.get_by_role("button", name="Step").click()
    expect(page.locator("#compare-place")).to_have_text("1 of 200")
    expect(page.locator(".fate").first).to_contain_text("Placed on GPU 0")


def test_the_page_reconnects_to_a_restarted_server(
    browser: Browser,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(tmp_path_factory.mktemp("lost"))
    server.start()
    # It returns at the same address, like a restarted service.
    monkeypatch.setattr("tests.e2e.server.free_port", lambda port=server.address[1]: port)
    asked(server, "POST", "/v1/nodes", {"name": "n1", "model": "A100-80GB", "gpus": 2})
    visitor = Visitor(browser, server)
    try:
        page = visitor.sign_in(server.admin_token)
        asked(server, "POST", "/v1/allocations", {"profile": "1g.10gb"})
        expect(total(page, "instances")).to_have_text("1")
        server.kill()
        expect(page.locator(".banner")).to_contain_text("Disconnected, retrying")
        expect(page.locator(".line")).to_have_text("disconnected")
        server.start()
        asked(server, "POST", "/v1/allocations", {"profile": "3g.40gb"})
        expect(page.locator(".line")).to_have_text("live")
        expect(page.locator(".banner")).to_be_hidden()
        expect(page.get_by_label("Recent events")).to_contain_text("default got 3g.40gb")
        expect(total(page, "instances")).to_have_text("2")
    finally:
        visitor.close()
        server.kill()


def test_labels_are_inserted_as_text(visit: Visit, server: Server) -> None:
    asked(
        server,
        "POST",
        "/v1/allocations",
        {"profile": "1g.10gb", "tenant": "acme", "labels": {"job": SCRIPT}},
    )
    visitor = visit()
    page = visitor.sign_in(server.admin_token, "allocations")
    expect(page.locator("tbody")).to_contain_text(SCRIPT)
    visitor.go("cluster")
    page.get_by_role("application").focus()
    expect(page.get_by_label("The chosen GPU")).to_contain_text(SCRIPT)
    visitor.go("audit")
    expect(page.locator("tbody")).to_contain_text("acme got 1g.10gb")
    assert page.locator("img").count() == 0
    assert "taken" not in page.title()
    assert visitor.complaints == []  # the policy had nothing to stop


def test_a_tenant_sees_nothing_of_another(visit: Visit, server: Server) -> None:
    made = asked(
        server,
        "POST",
        "/v1/allocations",
        {"profile": "3g.40gb", "tenant": "acme", "labels": {"job": "of-acme"}},
    )
    asked(server, "POST", "/v1/allocations", {"profile": "1g.10gb", "tenant": "zen"})
    visitor = visit()
    page = visitor.sign_in(token_of(server, "tenant", tenant="zen"))
    page.get_by_role("application").focus()
    details = page.get_by_label("The chosen GPU")
    expect(details).to_contain_text("another tenant's")
    seen = []
    for place in ("cluster", "overview", "ask", "allocations", "queue", "nodes", "tenants"):
        visitor.go(place)
        expect(page.locator(".stand-in.loading")).to_have_count(0)
        page.wait_for_timeout(300)
        seen.append(page.locator("body").inner_text())
        seen.append(page.content())
    text = "\n".join(seen)
    assert "zen" in text
    for secret in ("acme", "of-acme", made["id"]):
        assert secret not in text
    menu = page.get_by_role("navigation")
    assert menu.get_by_text("Audit log").count() == 0
    assert menu.get_by_text("Defragment").count() == 0
    # Instances of other tenants are shown, without their names.
    visitor.go("cluster")
    asked(server, "DELETE", f"/v1/allocations/{made['id']}")
    expect(total(page, "instances")).to_have_text("1")


def test_read_only_users_get_no_actions(visit: Visit, server: Server) -> None:
    asked(server, "POST", "/v1/allocations", {"profile": "1g.10gb"})
    visitor = visit()
    page = visitor.sign_in(token_of(server, "read-only"), "allocations")
    expect(page.locator("tbody tr")).to_have_count(1)
    assert page.get_by_role("button", name=re.compile("Release")).count() == 0
    visitor.go("nodes")
    expect(page.locator("tr[data-key=n1]")).to_be_visible()
    assert page.get_by_role("button", name=re.compile("Drain|Cordon|Remove|Register")).count() == 0
    assert page.get_by_role("navigation").get_by_text("Ask", exact=True).count() == 0


TWINS = """
async ([models, states]) => {
  const home = document.querySelector("script").src.replace("main.js", "");
  const { Geometry } = await import(`${home}look/geometry.js`);
  const known = new Map(models.map((model) => [model.name, new Geometry(model)]));
  return states.map(([model, mask, used]) => {
    const geometry = known.get(model);
    return [geometry.score(mask), geometry.stranded(mask, used)];
  });
}
"""


def test_the_browser_computes_the_same_as_the_engine(visit: Visit, server: Server) -> None:
    models = [one for one in asked(server, "GET", "/v1/models")["models"] if one["profiles"]]
    states, expected = [], []
    for model in models:
        geometry = load_geometry(model["name"])
        for state in state_space(geometry).states:
            states.append([geometry.model, state.mask, list(state.used)])
            expected.append([score(geometry, state.mask), stranded(state)])
    page = visit().sign_in(server.admin_token)
    assert len(states) > 1000
    assert page.evaluate(TWINS, [models, states]) == expected


OVERTAKEN = """async ([assets]) => {
  const { Live } = await import(`${assets}/shell/live.js`);
  const { get } = await import(`${assets}/shell/api.js`);
  const { loading } = await import(`${assets}/shell/notice.js`);
  const { fetch } = window;
  const told = {};

  const live = new Live({ role: "admin", tenant: null });
  await live._loadModels();
  await live.load();
  const begun = live.seq;
  let arrive;
  const answered = new Promise((resolve) => { arrive = resolve; });
  window.fetch = async (...given) => {
    const answer = await fetch(...given);
    await answered;
    return answer;
  };
  const again = live.load();
  const part = { node: "n1", gpu: 0, profile: "7g.80gb", start: 0, size: 8 };
  live._take([{ seq: begun + 1, at: new Date().toISOString(), kind: "allocated",
    entry: { allocation: { id: "a1", tenant: { id: "t:2", name: "acme" }, parts: [part] } } }]);
  arrive();
  await again;
  live.stop();
  told.placed = live.gpu("n1", 0).instances.map((one) => one.allocation);
  told.ahead = live.seq - begun;

  window.fetch = async (path) => (path.includes("limit")
    ? new Response('{"field": "limit", "detail": "too long"}', { status: 400 })
    : new Response('{"path": "' + path + '"}'));
  told.asked = (await get("/v1/queue", { limit: 1000, cursor: "c" })).path;
  window.fetch = fetch;

  const element = document.createElement("div");
  const ends = [];
  told.shown = [];
  const works = ["first", "second"].map((name) => loading(element, name,
    () => new Promise((resolve) => { ends.push(() => resolve(name)); }),
    (value) => told.shown.push(value)));
  ends[1]();
  ends[0]();
  await Promise.all(works);
  return told;
}"""


def test_entries_during_a_reload_are_not_lost(visit: Visit, server: Server) -> None:
    """Entries while the cluster is loaded, shorter pages than asked for, answers that come late."""
    page = visit().sign_in(server.admin_token)
    script = page.locator("script[type=module]").get_attribute("src")
    assert script is not None
    told = page.evaluate(OVERTAKEN, [script.rpartition("/")[0]])
    assert told == {
        "placed": ["a1"],
        "ahead": 1,
        "asked": "/v1/queue?cursor=c",
        "shown": ["second"],
    }


def test_older_entries_are_requested_once(visit: Visit, server: Server) -> None:
    def entry(seq: int) -> dict[str, object]:
        body = {"kind": "tenant-removed", "tenant": f"t{seq}"}
        said = {"seq": seq, "at": "2026-01-01T00:00:00.000Z", "actor": "t1", "kind": body["kind"]}
        return said | {"tenant": None, "subject": body["tenant"], "entry": body}

    def answer(route: Route) -> None:
        old = "cursor" in route.request.url
        events = [entry(seq) for seq in ((2, 1) if old else (4, 3))]
        route.fulfill(json={"events": events, "next": None if old else "c"})

    page = visit().sign_in(server.admin_token)
    page.route("**/v1/audit?*", answer)
    page.get_by_role("navigation").get_by_text("Audit log").click()
    more = page.get_by_role("button", name="Older entries")
    expect(more).to_be_visible()
    more.evaluate("one => { one.click(); one.click(); }")
    expect(more).to_be_hidden()
    expect(page.locator("tbody tr")).to_have_count(4)
