"""The dashboard in a real browser: every page, live, searched, sorted, with names that are markup."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from neffcache_client.graph_summary import GraphSummary, Op, encode
from playwright.sync_api import Browser, Page, expect, sync_playwright
from support.cache_state import lease_id, neff
from support.dashboard_data import HOSTILE, fill, key_of
from support.server import ServerProcess, running_server

ADMIN = "an-admin-token-for-the-dashboard"
JOB = "mixtral-8x7b-sft-4711"
PAGES = {
    "now": "/",
    "savings": "/savings",
    "savings of a year": "/savings?range=1y&price=20",
    "graphs": "/graphs",
    "graph": f"/graphs/default/{key_of(3)}",
    "jobs": "/jobs",
    "job": f"/jobs/show?namespace=default&job={JOB}",
    "storage": "/storage",
    "health": "/health",
}
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=_ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    fill(folder / "data", days=60)
    with running_server(folder) as running:
        yield running


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One that lets nobody in without a token."""
    folder = tmp_path_factory.mktemp("locked")
    fill(folder / "data", graphs=8, many_jobs=1, days=2)
    env = {"NEFFCACHE_SERVER_ADMIN_TOKEN": ADMIN}
    with running_server(folder, env=env) as running:
        yield running


class Watched:
    """A page, and what it did that it must not do."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.wrong: list[str] = []
        page.on(
            "console", lambda m: self.wrong.append(f"console: {m.text}") if m.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda e: self.wrong.append(f"error: {e}"))
        page.on("request", self._request)

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:")):
            self.wrong.append(f"asked another host: {request.url}")

    def open(self, path: str) -> Page:
        response = self.page.goto(self.url + path)
        assert response is not None
        assert response.status == 200, self.page.locator("main").inner_text()
        return self.page


@pytest.fixture
def watched(browser: Browser, server: ServerProcess) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    found = Watched(context.new_page(), server.url)
    yield found
    context.close()
    assert found.wrong == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_by_itself_and_fits(name: str, watched: Watched) -> None:
    """No error, no request to another host, nothing wider than a telephone, headings and labels in place."""
    page = watched.open(PAGES[name])
    expect(page.locator("h1")).to_have_count(1)
    expect(page.locator('nav[aria-label="Views"] a[aria-current="page"]')).to_have_count(1)
    assert (
        page.locator("img:not([alt]), input:not([type=hidden]):not([id]), svg:not([role]):not([aria-hidden])").count()
        == 0
    )
    assert page.evaluate("window.hacked") is None
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]  # a literal to mypy
        assert page.evaluate(_LEAST_CONTRAST) >= 4.5


_LEAST_CONTRAST = """() => {
  const parse = (c) => {
    const n = c.match(/[\\d.]+/g).map(Number);
    return n.length < 4 ? [...n, 1] : n;
  };
  const channel = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = (c) => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
  const speaks = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  let least = 21;
  for (const e of document.querySelectorAll("main *, header *, footer *")) {
    if (e.closest("svg") || !e.checkVisibility() || !speaks(e)) continue;
    let below = e;
    while (below && parse(getComputedStyle(below).backgroundColor)[3] === 0) below = below.parentElement;
    const ground = light(parse(getComputedStyle(below || document.body).backgroundColor));
    const ink = light(parse(getComputedStyle(e).color));
    least = Math.min(least, (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05));
  }
  return least;
}"""


def test_a_compile_shows_up_while_one_looks(watched: Watched) -> None:
    """Within 2 s of a lease's start, without a reload."""
    page = watched.open("/?namespace=live")
    expect(page.get_by_role("status")).to_have_text("live")
    expect(page.get_by_text("Nothing is being compiled.")).to_be_visible()
    key = key_of(123)
    holder = {"host": "trn2-live", "boot": "b", "pid": 1, "rank": 5, "job": HOSTILE}
    asked = {"lease_id": lease_id(77), "holder": holder}
    httpx.post(f"{watched.url}/v1/ns/live/keys/{key}/acquire", json=asked).raise_for_status()
    row = page.get_by_role("row").filter(has_text=key[:12])
    expect(row).to_be_visible(timeout=2000)
    expect(row).to_contain_text("rank 5 · trn2-live")
    expect(row).to_contain_text(HOSTILE)
    httpx.delete(f"{watched.url}/v1/ns/live/leases/{lease_id(77)}").raise_for_status()
    expect(row).to_have_count(0, timeout=3000)
    assert page.evaluate("window.hacked") is None


def test_a_lost_server_is_said_and_its_return_too(browser: Browser, tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        page = browser.new_page()
        page.goto(server.url)
        expect(page.get_by_role("status")).to_have_text("live")
        server.kill()
        expect(page.get_by_role("status")).to_contain_text("trying again", timeout=10_000)
        server.start()
        expect(page.get_by_role("status")).to_have_text("live", timeout=15_000)
        page.close()


def test_the_figures_are_those_of_stats(watched: Watched) -> None:
    stats = httpx.get(f"{watched.url}/v1/stats?namespace=default&job={JOB}").json()
    page = watched.open(PAGES["job"])
    hours = f"{stats['compile_seconds_saved'] / 3600:,.1f} h"
    expect(page.locator(".figure", has_text="Compile time saved").locator("dd").first).to_have_text(hours)
    expect(page.locator(".figure", has_text="Compiles").locator("dd").first).to_have_text(
        str(stats["verdicts"]["compiled"])
    )
    expect(page.locator(".legend").first).to_contain_text(f"{stats['verdicts']['waited']} waited")
    assert page.locator(".timeline .series.of-compiled path").count() >= 1


def test_money_is_the_price_times_the_hours(watched: Watched) -> None:
    page = watched.open("/savings?range=30d")
    expect(page.locator(".figure", has_text="Money saved")).to_have_count(0)
    page.get_by_label("Price of a host-hour").fill("10")
    page.get_by_role("button", name="Calculate").click()
    saved = page.locator(".figure", has_text="Compile time saved").locator("dd").first.inner_text()
    money = page.locator(".figure", has_text="Money saved").locator("dd").first.inner_text()
    hours = float(re.sub(r"[^\d.]", "", saved))
    assert float(money.replace(",", "")) == pytest.approx(hours * 10, rel=0.01)


def test_graphs_are_sorted_and_searched(watched: Watched) -> None:
    page = watched.open("/graphs?namespace=default")
    page.get_by_role("link", name="Hits", exact=True).click()
    expect(page.locator('th[aria-sort="descending"]')).to_contain_text("Hits")
    hits = [int(t.replace(",", "")) for t in page.locator("tbody tr td:nth-child(5)").all_inner_texts()]
    assert hits == sorted(hits, reverse=True)
    page.get_by_role("link", name="Hits").click()
    expect(page.locator('th[aria-sort="ascending"]')).to_contain_text("Hits")
    page.get_by_label("Search").fill(key_of(3)[:10])
    page.get_by_role("button", name="Search").click()
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_role("link", name=key_of(3)[:12]).click()
    expect(page.locator("h1")).to_have_text(key_of(3))
    expect(page.get_by_role("region", name="Factors")).to_contain_text(HOSTILE)
    page.goto(f"{watched.url}/graphs?q=%25_nothing")
    expect(page.get_by_text("Nothing matches")).to_be_visible()


def asked_for(url: str, number: int, factors: dict[str, Any], summary: str) -> str:
    """A rank misses a key of these factors and describes its graph; returns the key."""
    key = key_of(9000 + number)
    holder = {"host": HOSTILE, "boot": "b", "pid": number, "rank": 3, "job": HOSTILE}
    body = {"lease_id": lease_id(number), "holder": holder, "factors": factors}
    with httpx.Client(base_url=f"{url}/v1/ns/explained", timeout=60) as api:
        assert api.post(f"/keys/{key}/acquire", json=body).raise_for_status().json()["state"] == "leased"
        api.post(f"/leases/{lease_id(number)}/heartbeat", json={}).raise_for_status()
        api.post(f"/keys/{key}/summary", json={"summary": summary}).raise_for_status()
    return key


def publish(url: str, number: int) -> None:
    data = neff("one")
    digest = hashlib.sha256(data).hexdigest()
    with httpx.Client(base_url=f"{url}/v1/ns/explained", timeout=60) as api:
        lease = {"neffcache-lease": lease_id(number)}
        api.put(f"/blobs/{digest}", content=data, headers=lease).raise_for_status()
        body = {"sha256": digest, "size": len(data), "compile_seconds": 3.0}
        api.post(f"/leases/{lease_id(number)}/publish", json=body).raise_for_status()


def described(constant: str, adds: int) -> str:
    body = [("func.func", "f"), ("stablehlo.constant", constant), *[("stablehlo.add", "a")] * adds]
    counts = {name: sum(n == name for n, _ in body) for name, _ in body}
    ops = [Op(n, d, "", f"{HOSTILE}.py", 30 + i, f"{n} {d} {HOSTILE}") for i, (n, d) in enumerate(body)]
    return encode(GraphSummary("mlir", counts, ops))


def test_an_entry_says_in_words_what_differs_from_the_nearest(watched: Watched) -> None:
    """UC-07: compiler, option, environment, file and operations; whatever they are called, they are text."""
    other = "2.23.6484.0+3b612583"

    def factors(graph: str, version: str, level: str, flag: str) -> dict[str, Any]:
        return {
            "recipe": 1,
            "ir": {"kind": "mlir", "canonicaliser": "mlir-text-1", "digest": graph * 64},
            "compiler": {"version": version, "digest": version[-1] * 64, "kind": "wheel"},
            "target": "trn2",
            "options": {"known": [["optlevel", level], ["model-type", flag]], "unknown": [], "environment": []},
            "env": {"XLA_FLAGS": flag},
        }

    first = asked_for(watched.url, 901, factors("1", other, "1", "plain"), described("c0", 80))
    publish(watched.url, 901)
    key = asked_for(watched.url, 902, factors("2", "2.26.6360.0+6f180f47", "2", HOSTILE), described("c1", 83))
    page = watched.open(f"/graphs/explained/{key}")
    expect(page.locator(".notice")).to_contain_text(f"Rank 3 on {HOSTILE} compiles it")
    why = page.locator("section", has=page.get_by_role("heading", name="Why it was not in the cache"))
    expect(why).to_contain_text("compiler 2.26.6360.0+6f180f47 here, 2.23.6484.0+3b612583 there")
    expect(why.get_by_role("link", name=first[:12])).to_be_visible()
    differ = page.get_by_role("region", name="Differences").get_by_role("row")
    expect(differ.filter(has_text="compiler")).to_contain_text("2.23.6484.0+3b612583")
    expect(differ.filter(has_text="option -O")).to_contain_text("-O2 here, -O1 there")
    expect(differ.filter(has_text="env XLA_FLAGS").get_by_role("cell")).to_have_text([json.dumps(HOSTILE), '"plain"'])
    expect(why).to_contain_text(f'{json.dumps(HOSTILE)} here, "plain" there')
    counts = page.get_by_role("region", name="Operations").get_by_role("row")
    expect(counts.filter(has_text="stablehlo.add").get_by_role("cell")).to_have_text(["83", "80"])
    expect(why).to_contain_text("85 operations here, 82 there: 83 stablehlo.add here and 80 there")
    expect(why.get_by_role("heading", name="First operation that differs")).to_be_visible()
    expect(why).to_contain_text(f"number 2, stablehlo.constant, {HOSTILE}.py:31")
    expect(why).to_contain_text(f"stablehlo.constant c0 {HOSTILE}")
    assert page.locator("main img").count() == 0
    assert page.evaluate("window.hacked") is None
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_key_that_failed_says_so_on_its_own_page(watched: Watched) -> None:
    key = key_of(9100)
    holder = {"host": "trn2-001", "boot": "b", "pid": 1, "rank": 0}
    with httpx.Client(base_url=f"{watched.url}/v1/ns/explained", timeout=60) as api:
        api.post(f"/keys/{key}/acquire", json={"lease_id": lease_id(911), "holder": holder}).raise_for_status()
        failed = {"kind": "deterministic", "exit_code": 70, "code": "NCC_EOOM001", "log_tail": "no"}
        api.post(f"/leases/{lease_id(911)}/fail", json=failed).raise_for_status()
    page = watched.open(f"/graphs/explained/{key}")
    expect(page.locator(".notice")).to_contain_text("Every rank that asks is answered with NCC_EOOM001")


def test_everything_works_from_the_keyboard(watched: Watched) -> None:
    page = watched.open("/graphs?namespace=default")
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.get_by_label("Search").focus()
    page.keyboard.type("trn1")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=trn1*")
    assert page.locator("tbody tr").count() > 0


def test_the_theme_can_be_switched_and_stays(watched: Watched) -> None:
    page = watched.open("/")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Switch between light and dark").click()
    after = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert before != after
    page.goto(f"{watched.url}/jobs")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == after


def test_an_administrator_pins_quarantines_and_deletes(browser: Browser, locked: ServerProcess) -> None:
    page = browser.new_page()
    key = key_of(1)
    page.goto(f"{locked.url}/graphs/default/{key}")
    expect(page.get_by_role("heading", name="Token required")).to_be_visible()
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_text("This token is unknown")).to_be_visible()
    page.goto(f"{locked.url}/graphs/default/{key}")
    page.get_by_label("Token").fill(ADMIN)
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("h1")).to_have_text(key)
    page.get_by_role("button", name="Pin").click()
    expect(page.get_by_role("button", name="Unpin")).to_be_visible()
    page.get_by_text("Quarantine…").click()
    page.get_by_role("button", name="Quarantine this artifact").click()
    expect(page.get_by_text("This artifact is quarantined")).to_be_visible()
    page.get_by_text("Delete…").click()
    page.get_by_role("button", name="Delete this artifact").click()
    page.wait_for_url("**/graphs?namespace=default")
    assert key[:12] not in page.locator("main").inner_text()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Token required")).to_be_visible()
    page.close()


def test_who_may_only_read_sees_no_way_to_change_anything(browser: Browser, locked: ServerProcess) -> None:
    bearer = {"authorization": f"Bearer {ADMIN}"}
    made = httpx.post(
        f"{locked.url}/v1/tokens", json={"name": "reader", "role": "read", "namespace": "default"}, headers=bearer
    )
    token = made.json()["token"]
    context = browser.new_context(extra_http_headers={"authorization": f"Bearer {token}"})
    page = context.new_page()
    page.goto(f"{locked.url}/graphs/default/{key_of(2)}")
    expect(page.locator("h1")).to_have_text(key_of(2))
    assert page.locator("main form").count() == 0
    assert page.goto(f"{locked.url}/graphs/research/{key_of(4)}").status == 403  # type: ignore[union-attr]
    expect(page.get_by_role("heading", name="Not allowed")).to_be_visible()
    page.goto(f"{locked.url}/graphs")
    assert "research" not in page.locator("main").inner_text()
    refused = httpx.post(
        f"{locked.url}/graphs/default/{key_of(2)}/delete", headers={"authorization": f"Bearer {token}"}
    )
    assert refused.status_code == 403
    context.close()


def test_a_session_of_another_server_shuts_nobody_out(browser: Browser, server: ServerProcess) -> None:
    """Cookies know no ports; and where no token is needed, nobody has one to sign in with."""
    context = browser.new_context()
    context.add_cookies([{"name": "neffcache_session", "value": "of-another", "url": server.url}])
    page = context.new_page()
    page.goto(server.url)
    expect(page.get_by_text("The session has ended")).to_be_visible()
    page.reload()
    expect(page.get_by_role("heading", name="Now", exact=True)).to_be_visible()
    context.close()


def test_an_empty_server_says_what_to_do(browser: Browser, tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        page = browser.new_page()
        watched = Watched(page, server.url)
        for path in ("/", "/savings", "/graphs", "/jobs", "/storage"):
            watched.open(path)
            expect(page.locator(".empty")).to_be_visible()
        watched.open("/health")
        expect(page.locator(".checks li.bad")).to_have_count(0)
        assert watched.wrong == []
        page.close()


def test_no_page_allows_a_script_of_others(server: ServerProcess) -> None:
    for path in PAGES.values():
        answer = httpx.get(server.url + path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert not re.search(
            r"<script(?! src)|\son\w+=|style=|<style", re.sub(re.escape(_escaped(HOSTILE)), "", answer.text)
        )


def _escaped(text: str) -> str:
    from markupsafe import escape

    return str(escape(text))


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/graphs/default/nokey", 422),
        (f"/graphs/default/{'0' * 64}", 404),
        ("/jobs/show?namespace=default&job=none", 404),
        ("/savings?range=9y", 422),
        ("/graphs?page=0", 422),
        ("/static/secrets.py", 404),
    ],
)
def test_a_wrong_address_is_answered_in_words(path: str, status: int, server: ServerProcess) -> None:
    answer = httpx.get(server.url + path)
    assert answer.status_code == status
    assert "<h1>" in answer.text
    assert "Traceback" not in answer.text


def test_signing_in_leads_to_this_server_and_nowhere_else(locked: ServerProcess) -> None:
    for back in ("https://evil.example/", "//evil.example", "/\\evil.example"):
        answer = httpx.post(
            f"{locked.url}/sign-in",
            content=f"token={ADMIN}&back={back}",
            headers={"origin": locked.url, "content-type": "application/x-www-form-urlencoded"},
        )
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cross = httpx.post(f"{locked.url}/sign-in", content=f"token={ADMIN}", headers={"origin": "https://evil.example"})
    assert cross.status_code == 403
