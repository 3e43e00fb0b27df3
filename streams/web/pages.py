"""The pages, rendered on the server; each live part is rendered once for a status, for all viewers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route, Router

from streams.errors import ConfigError, StreamsError
from streams.looks.figures import duration
from streams.looks.records import one_line
from streams.observability.health import Verdict
from streams.sak.harmless import harmless
from streams.web import api, rows
from streams.web.actions import ActionRefused, form_argument
from streams.web.board import STATUS_SECONDS, GroupStatus
from streams.web.doors import FORM_FIELD, METRICS_PATH, STREAM_PATH, Doors, fields_of, refused
from streams.web.drawing import rates_svg, topology_svg
from streams.web.letters import LetterFilter
from streams.web.look_up import AskedProof, QuestionRefused, looked_up, problem_with
from streams.web.site import Site
from streams.web.tokens import Scope

_HERE: Final = Path(__file__).parent
_PAGES: Final = {
    "overview": "/",
    "source": "/source",
    "views": "/views",
    "state": "/state",
    "dead letters": "/dead-letters",
    "parked keys": "/parked-keys",
    "jobs": "/jobs",
    "actions": "/actions",
    "settings": "/settings",
}
_LIVE: Final = ("overview", "source", "views", "actions")
_ASKING: Final = ("views", "state")
"""Pages on which a key is looked up."""
_KEEP_ALIVE_TICKS: Final = 10
_NEAR_SECONDS: Final = 12 * 3600
REPLAY: Final = "replay-dead-letters"
"""The built-in action that sends dead letters again."""
DROP: Final = "drop-dead-letters"
"""The built-in action that settles dead letters without sending them."""
_WAITING: Final = ("parked keys", "jobs")
"""Pages of what waits."""


class Pages:
    """The application behind the doors."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._closed = asyncio.Event()
        self._rendered: tuple[GroupStatus | None, dict[tuple[str, int], str]] = (None, {})
        self._templates = Environment(
            loader=FileSystemLoader(_HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_shown,
        )
        self._templates.filters.update(
            number=_number,
            clock=_clock,
            moment=_moment,
            duration=duration,
            one_line=one_line,
            seconds=_seconds,
        )
        self._static = {
            name: ((_HERE / "static" / name).read_bytes(), kind)
            for name, kind in (
                ("icon.svg", "image/svg+xml"),
                ("monitor.css", "text/css"),
                ("monitor.js", "text/javascript"),
            )
        }
        self.doors = Doors(None, self.refuse)
        self.doors.pages = Router(self._routes(), redirect_slashes=False, default=self._missing)

    def close(self) -> None:
        """End the streams. On the loop."""
        self._closed.set()
        self._site.board.close()

    def refuse(self, request: Request, status: int, text: str) -> Response:
        """Return a refusal: a page for a browser, JSON for a program."""
        if "text/html" not in request.headers.get("accept", ""):
            return refused(status, text)
        return HTMLResponse(self._templates.get_template("refused.html").render(text=text, group=""), status)

    def _routes(self) -> list[Route]:
        made = [Route(path, self._page(name)) for name, path in _PAGES.items()]
        made += [
            Route("/login", self._login, methods=["GET", "POST"]),
            Route("/logout", self._logout, methods=["POST"]),
            Route("/actions/start", self._start, methods=["POST"]),
            Route("/actions/cancel", self._cancel, methods=["POST"]),
            Route("/dead-letters/replay", self._settle(REPLAY), methods=["POST"]),
            Route("/dead-letters/drop", self._settle(DROP), methods=["POST"]),
            *(Route(f"{_PAGES[name]}/act", self._act_on(name), methods=["POST"]) for name in _WAITING),
            Route(STREAM_PATH, self._events),
            Route("/static/{name}", self._file),
            Route("/live", self._live),
            Route("/ready", self._ready),
            Route(METRICS_PATH, self._metrics),
        ]
        return made + api.routes(self._site)

    async def _missing(self, scope: Any, receive: Any, send: Any) -> None:
        await self.refuse(Request(scope), 404, "there is no such page")(scope, receive, send)

    # -- pages ---------------------------------------------------------------------------------------------------------

    def _page(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            is_query = name in _ASKING and "key" in request.query_params
            if is_query and request.state.session.scope < Scope.QUERY:
                return self.refuse(request, 403, "this token may not query")
            return await self._render(request, name)

        return answer

    async def _render(self, request: Request, name: str, status: int = 200, problem: str = "") -> Response:
        site, session = self._site, request.state.session
        given: dict[str, Any] = {
            "name": name,
            "pages": _PAGES,
            "group": site.group,
            "who": session.name,
            "form": session.form,
            "form_field": FORM_FIELD,
            "may_act": session.scope >= Scope.ACT,
            "may_query": session.scope >= Scope.QUERY,
            "problem": problem,
            "stream": "",
            "live": "",
        }
        if name in _LIVE:
            first = _first_of(request)
            given["stream"] = f"{STREAM_PATH}?page={name}&first={first}"
            given["live"] = Markup(self._part(name, first, await site.board.status()))
        if name == "source":
            given["topology"] = topology_svg(site.source.topology) if site.source else None
        elif name == "views":
            given["found"] = self._found(request)
            given["topics"] = [view.topic for view in site.views]
        elif name == "state":
            asked = request.query_params
            given["asked"] = {
                each: asked.get(each, "") for each in ("key", "form", "table", *AskedProof.__struct_fields__)
            }
            given["has_source"], given["found"] = site.owners is not None, None
            if site.owners is not None and "key" in asked:
                try:
                    given["found"] = await site.owners.ask(asked["key"], asked, is_base64=asked.get("form") == "base64")
                except StreamsError as error:
                    given["found"] = problem_with(error)
        elif name == "dead letters":
            given.update(await self._letters(request) if site.letters and given["may_query"] else {"letters": None})
        elif name in _WAITING:
            given["waiting"] = await self._waiting(name, request) if site.waiting and given["may_query"] else None
        elif name == "actions":
            built_in = {REPLAY, DROP, *(table.action for table in site.waiting.values())}
            given["actions"] = [action for action in site.actions.values() if action.name not in built_in]
            given["running"] = [action.name for action in site.actions.values() if action.running]
        elif name == "settings":
            try:
                given["lines"] = await asyncio.to_thread(site.settings)
            except ConfigError as error:
                given["lines"], given["problem"] = [], str(error)
        return HTMLResponse(self._templates.get_template(f"{name.replace(' ', '_')}.html").render(given), status)

    def _part(self, name: str, first: int, status: GroupStatus) -> str:
        """Return the live part of a page, rendered once for a status; runs of actions change in between."""
        if name == "actions":
            return self._made_part(name, first, status)
        if self._rendered[0] is not status:
            self._rendered = status, {}
        parts = self._rendered[1]
        if (name, first) not in parts:
            parts[name, first] = self._made_part(name, first, status)
        return parts[name, first]

    def _made_part(self, name: str, first: int, status: GroupStatus) -> str:
        site = self._site
        given: dict[str, Any] = {"status": status}
        if name in ("overview", "source"):
            lines, members = rows.partition_lines(status, site.is_source), rows.member_lines(status)
            given.update(
                lines=lines[first : first + rows.MOST_ROWS],
                members=members,
                totals=rows.totals(status, lines, members),
                rebalances=rows.last_rebalances(status),
                rates=rates_svg(status.rates),
                most_rate=max(status.rates, default=None),
                work=rows.work_lines(status),
                views=status.views,
                others=[place for place in range(0, len(lines), rows.MOST_ROWS) if place != first],
                most=rows.MOST_ROWS,
            )
        elif name == "views":
            given["views"] = status.views
        else:
            runs = [run for action in site.actions.values() for run in action.runs]
            given["runs"] = sorted(runs, key=lambda run: run.began_ms, reverse=True)
        return self._templates.get_template(f"part_{name}.html").render(given)

    async def _letters(self, request: Request) -> dict[str, Any]:
        """Return what the page of dead letters shows: those of the filter in its address."""
        page, asked = self._site.letters, LetterFilter()
        assert page is not None
        try:
            asked = LetterFilter.of(request.query_params)
            letters = await page.read(asked)
        except StreamsError as error:
            letters = page.nothing(str(error))
        shown = {name: getattr(asked, name) for name in ("partition", "key", "type")}
        given = {name: str(value) for name, value in shown.items() if value is not None}
        return {
            "letters": letters,
            "asked": {name: given.get(name, "") for name in shown},
            "filter": f"?{urlencode(given)}" if given else "",
            "first": f"/dead-letters?{urlencode(given)}" if asked.after else "",
            "next": f"/dead-letters?{urlencode({**given, 'after': letters['next']})}" if letters["next"] else "",
        }

    async def _waiting(self, name: str, request: Request) -> dict[str, Any]:
        table = self._site.waiting[name]
        try:
            return await table.read(**api.chosen_jobs(name, request))
        except StreamsError as error:
            return table.nothing(str(error))

    def _found(self, request: Request) -> dict[str, Any] | None:
        topic, text = request.query_params.get("topic"), request.query_params.get("key")
        if topic is None or text is None:
            return None
        view = self._site.view_of(topic)
        if view is None:
            return {"topic": topic, "key": text, "found": False, "value": "", "problem": "no view of that topic"}
        try:
            found = looked_up(view, text, is_base64=request.query_params.get("form") == "base64")
        except StreamsError as error:
            found = problem_with(error)
        return {"topic": topic, "key": text, **found}

    # -- live ----------------------------------------------------------------------------------------------------------

    async def _events(self, request: Request) -> Response:
        name = request.query_params.get("page", "")
        if name not in _LIVE:
            return self.refuse(request, 404, "there is no such page")
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return StreamingResponse(self._changes(request, name, _first_of(request)), media_type="text/event-stream")

    async def _changes(self, request: Request, name: str, first: int) -> AsyncIterator[str]:
        last, quiet = "", 0
        while not self._closed.is_set() and self._may_go_on(request):
            part = self._part(name, first, await self._site.board.status())
            quiet = 0 if part != last else quiet + 1
            if part != last:
                yield f"data: {json.dumps(part)}\n\n"
            elif quiet % _KEEP_ALIVE_TICKS == 0:
                yield ": no news\n\n"
            last = part
            try:
                await asyncio.wait_for(self._closed.wait(), STATUS_SECONDS)
            except TimeoutError:
                continue

    def _may_go_on(self, request: Request) -> bool:
        session = request.state.session
        if session.is_browser:
            return self.doors.sessions.find(request.cookies.get(self.doors.address.cookie, "")) is not None
        return bool(session.expires > time.time())

    # -- what changes something ----------------------------------------------------------------------------------------

    async def _login(self, request: Request) -> Response:
        if request.method != "POST":
            return HTMLResponse(self._templates.get_template("login.html").render(group="", problem=""))
        token = self.doors.token_of(request, fields_of(request.state.body).get("token", [""])[-1].strip())
        if isinstance(token, Response):
            page = self._templates.get_template("login.html").render(group="", problem="That token is not accepted.")
            return HTMLResponse(page, token.status_code)
        answer = RedirectResponse("/", 303)
        address = self.doors.address
        answer.set_cookie(
            address.cookie,
            self.doors.sessions.begin(token),
            httponly=True,
            samesite="strict",
            secure=address.is_tls,
        )
        return answer

    async def _logout(self, request: Request) -> Response:
        cookie = self.doors.address.cookie
        self.doors.sessions.end(request.cookies.get(cookie, ""))
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(cookie, httponly=True, samesite="strict", secure=self.doors.address.is_tls)
        return answer

    async def _start(self, request: Request) -> Response:
        form = fields_of(request.state.body)
        action = self._site.actions.get(form.get("action", [""])[-1])
        if action is None:
            return self.refuse(request, 404, "no action of that name")
        try:
            action.start(form_argument(action.fields, form), self._site.who(request))
        except ActionRefused as error:
            return await self._render(request, "actions", 409 if action.running else 400, str(error))
        return RedirectResponse("/actions", 303)

    async def _cancel(self, request: Request) -> Response:
        action = self._site.actions.get(fields_of(request.state.body).get("action", [""])[-1])
        if action is None:
            return self.refuse(request, 404, "no action of that name")
        action.cancel(self._site.who(request))
        return RedirectResponse("/actions", 303)

    def _settle(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        async def start(request: Request) -> Response:
            action, form = self._site.actions.get(name), fields_of(request.state.body)
            if action is None:
                return self.refuse(request, 404, "no source is named")
            order: dict[str, Any] = {"places": form.get("place", [])}
            if form.get("all"):  # as far as the filter in the address chooses
                try:
                    asked = LetterFilter.of(request.query_params)
                except QuestionRefused as error:
                    return await self._render(request, "dead letters", 400, str(error))
                order = {"all": True, "partition": asked.partition, "key": asked.key, "type": asked.type}
            elif not order["places"]:
                return await self._render(request, "dead letters", 400, "Choose letters first.")
            if name == DROP and not form.get("sure"):
                return await self._render(request, "dead letters", 400, "To drop letters, say that you are sure.")
            try:
                action.start(order, self._site.who(request))
            except ActionRefused as error:
                return await self._render(request, "dead letters", 409, str(error))
            return RedirectResponse("/actions", 303)

        return start

    def _act_on(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        async def start(request: Request) -> Response:
            table, form = self._site.waiting.get(name), fields_of(request.state.body)
            if table is None:
                return self.refuse(request, 404, "no source is named")
            deed, places = form.get("deed", [""])[-1], form.get("place", [])
            if not places:
                return await self._render(request, name, 400, f"Choose {name.rpartition(' ')[2]} first.")
            if deed != "retry" and not form.get("sure"):
                return await self._render(request, name, 400, table.doubt)
            order: dict[str, Any] = {"action": deed, "places": places}
            if deed != "retry" and form.get("letters"):
                order["as_letters"] = True
            action = self._site.actions[table.action]
            try:
                action.start(order, self._site.who(request))
            except ActionRefused as error:
                return await self._render(request, name, 409 if action.running else 400, str(error))
            return RedirectResponse("/actions", 303)

        return start

    # -- files, probes, metrics ----------------------------------------------------------------------------------------

    async def _file(self, request: Request) -> Response:
        found = self._static.get(request.path_params["name"])
        if found is None:
            return self.refuse(request, 404, "there is no such file")
        return Response(found[0], media_type=found[1], headers={"Cache-Control": "public, max-age=300"})

    async def _live(self, request: Request) -> Response:
        probes = self._site.probes
        verdict = Verdict(True, "live") if probes is None else await asyncio.to_thread(probes.live, {})
        # This one answers without a token, so it says no names.
        return PlainTextResponse("live\n" if verdict.is_good else "not live\n", 200 if verdict.is_good else 503)

    async def _ready(self, request: Request) -> Response:
        probes = self._site.probes
        if probes is None:
            return PlainTextResponse("this monitor has no members of its own\n", 404)
        try:
            verdict = await asyncio.to_thread(probes.ready, dict(request.query_params))
        except ValueError:
            return PlainTextResponse("max_lag must be a whole number\n", 400)
        return PlainTextResponse(f"{verdict.text}\n", 200 if verdict.is_good else 503)

    async def _metrics(self, request: Request) -> Response:
        probes = self._site.probes
        if probes is None:
            return PlainTextResponse("this monitor has no members of its own\n", 404)
        text = await asyncio.to_thread(generate_latest, probes.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)


def _first_of(request: Request) -> int:
    text = request.query_params.get("first", "0")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 8 else 0


def _shown(value: Any) -> Any:
    """Make every text of a page harmless; Jinja escapes it after that."""
    return harmless(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 10 else f"{value:,.1f}"


def _seconds(value: float) -> str:
    return f"{value * 1000:,.1f} ms" if value < 1 else f"{value:,.2f} s"


def _clock(milliseconds: int | None) -> str:
    try:
        return "" if milliseconds is None else f"{datetime.fromtimestamp(milliseconds / 1000):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return "?"


def _moment(milliseconds: int) -> str:
    """The time of day alone, if it is near."""
    text = _clock(milliseconds)
    return text.rpartition(" ")[2] if abs(milliseconds / 1000 - time.time()) < _NEAR_SECONDS else text
