"""The page over HTTP: what it is told, that browsers share one reader, and who is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from keylane import groups
from keylane.errors import InvalidInput
from keylane.web import serve_page
from keylane.web.account_watch import AccountWatch
from tests.integration.groups.rig import Ground
from tests.integration.web.rig import Site, Views, served
from tests.waiter import until


async def follow_until(site: Site, group: str, good: Any) -> Views:
    views = Views()
    async with asyncio.timeout(30), site.events(group) as events:
        async for name, data in events:
            views.take(name, data)
            if good(views):
                return views
    raise AssertionError("the events have ended")


async def test_a_group_and_its_changes_reach_the_page(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    await ground.join("a")
    name = f"elastic/{ground.stream}/g"
    async with served(ground.connection) as site:
        views = Views()
        async with asyncio.timeout(30), site.events(name) as events:
            async for kind, data in events:
                views.take(kind, data)
                shown = views.of.get(name, {})
                if shown.get("members", {}).get("a", {}).get("is_active") and "b" not in shown["members"]:
                    await groups.add_members(ground.connection, ground.stream, "g", ["b"])
                if "b" in shown.get("members", {}) and shown["timeline"]:
                    break
        assert views.patches > 0
        assert views.of["account"]["groups"][name]["summary"].startswith("g ")
        assert [one["cause"] for one in shown["timeline"] if one["cause"] == "members"] == ["members"]
        fresh = await follow_until(site, name, lambda known: name in known.of)
        assert fresh.of[name]["members"].keys() == {"a", "b"}


async def test_ten_browsers_cost_as_much_as_one_and_none_costs_nothing(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    reads = 0

    class Counted(AccountWatch):
        async def _look(self, *given: Any) -> None:
            nonlocal reads
            reads += 1
            await super()._look(*given)

    async with served(ground.connection, watch=Counted(ground.connection, interval_s=0.3)) as site:
        assert not site.watch.is_reading

        async def look(name: str) -> int:
            async with asyncio.timeout(30), site.events(name) as events:
                async for _ in events:
                    if reads >= 3:
                        break
                    await ground.publish(["k"])
            return reads

        told = await asyncio.gather(*(look(f"elastic/{ground.stream}/g") for _ in range(10)))
        assert max(told) <= 5
        await until(lambda: site.watch.is_reading, lambda reading: not reading)
        before = reads
        await asyncio.sleep(1)
        assert reads == before


async def test_a_page_that_cannot_read_says_so_and_goes_on(ground: Ground) -> None:
    is_down = True

    class Unlucky(AccountWatch):
        async def _look(self, *given: Any) -> None:
            if is_down:
                raise InvalidInput("the server is on fire")
            await super()._look(*given)

    async with served(ground.connection, watch=Unlucky(ground.connection, interval_s=0.1)) as site:
        views = await follow_until(site, "", lambda known: known.of.get("account", {}).get("trouble"))
        assert views.of["account"]["trouble"] == "the server is on fire"
        is_down = False
        await follow_until(site, "", lambda known: "account" in known.of and "trouble" not in known.of["account"])


async def test_the_files_of_the_page_and_nothing_else(ground: Ground) -> None:
    async with served(ground.connection) as site, aiohttp.ClientSession() as session:
        async with session.get(site.url) as page:
            assert page.status == 200
            policy = page.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            text = await page.text()
        assert "<script>" not in text
        assert "http" not in text.replace("http-equiv", "")
        async with session.get(f"{site.url}/static/main.js") as script:
            assert script.content_type == "text/javascript"
        for path in ("/static/..%2F__init__.py", "/static/none.js", "/keylane"):
            async with session.get(f"{site.url}{path}") as other:
                assert other.status == 404


async def test_a_name_of_somebody_else_that_points_here_is_refused(ground: Ground) -> None:
    async with served(ground.connection, names=["ops.example.com"]) as site, aiohttp.ClientSession() as session:
        for host, expected in (
            ("evil.example", 403),
            ("127.0.0.1.evil.example:80", 403),
            ("10.0.0.1", 403),
            ("", 403),
            ("localhost:1234", 200),
            ("[::1]:80", 200),
            ("ops.example.com", 200),
        ):
            for path in ("/", "/static/main.js"):
                async with session.get(f"{site.url}{path}", headers={"Host": host}) as answer:
                    assert answer.status == expected, (host, path)
        async with session.get(f"{site.url}/events", headers={"Host": "evil.example"}) as answer:
            assert answer.status == 403
        async with session.get(f"{site.url}/events", headers={"Sec-Fetch-Site": "cross-site"}) as answer:
            assert answer.status == 403


ADD: dict[str, Any] = {"action": "add", "group": "g", "arguments": {"members": ["b"]}}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"X_Keylane_Token": None}, 401),
        ({"X_Keylane_Token": "wrong"}, 401),
        ({"X_Keylane_Token": ""}, 401),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": None}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Content_Type": "text/plain"}, 415),
    ],
)
async def test_an_action_that_the_page_did_not_send_is_refused(
    ground: Ground, changed: dict[str, str | None], expected: int
) -> None:
    await ground.elastic(members=["a"])
    async with served(ground.connection) as site:
        request = ADD | {"stream": ground.stream}
        _, preview = await site.post("/actions/preview", request)
        for path in ("/actions/preview", "/actions/perform"):
            status, answer = await site.post(path, request | {"confirmed": preview}, **changed)
            assert (status, list(answer)) == (expected, ["error"])
    assert (await groups.get_config(ground.connection, ground.stream, "g")).members == ("a",)


async def test_a_page_without_a_token_is_read_only(ground: Ground) -> None:
    await ground.elastic(members=["a"])
    async with served(ground.connection, token=None) as site:
        status, answer = await site.post("/actions/preview", ADD | {"stream": ground.stream}, X_Keylane_Token="")
        assert (status, answer) == (403, {"error": "this page is read-only: start it with --allow-actions"})


async def test_a_port_that_is_taken_is_an_error_that_names_it(ground: Ground) -> None:
    async with served(ground.connection) as site:
        port = int(site.url.rpartition(":")[2])
        with pytest.raises(InvalidInput, match=f"port {port} of 127.0.0.1"):
            async with serve_page(ground.connection, port=port):
                pass
