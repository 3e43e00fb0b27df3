"""``/api/v1``: the same facts as data, and the document (OpenAPI) that describes them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from streams.errors import BrokerUnavailable, ConfigError, NotCaughtUp, NotOwned, StreamsError
from streams.sak.harmless import harmless
from streams.web.actions import ActionRefused
from streams.web.doors import refused
from streams.web.letters import LetterFilter
from streams.web.look_up import QuestionRefused, looked_up
from streams.web.rows import plain_status
from streams.web.site import Site
from streams.web.tokens import Scope

PREFIX: Final = "/api/v1"
Answer = Callable[[Site, Request], Awaitable[Any]]


class Endpoint(NamedTuple):
    """One address of the interface. ``right``: the scope that a token needs. ``body``: the fields of its JSON."""

    method: str
    path: str
    about: str
    right: Scope
    answer: Answer
    parameters: Mapping[str, str] = MappingProxyType({})
    body: dict[str, Any] | None = None


class RequestRefused(Exception):
    """A request that cannot be answered: status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


async def _group(site: Site, request: Request) -> Any:
    return plain_status(await site.board.status(), site.is_source)


async def _topology(site: Site, request: Request) -> Any:
    if site.source is None:
        raise RequestRefused(404, "no source is named")
    return msgspec.to_builtins(site.source.topology)


async def _settings(site: Site, request: Request) -> Any:
    return [line._asdict() for line in site.settings()]


async def _views(site: Site, request: Request) -> Any:
    return msgspec.to_builtins([view.statistics() for view in site.views])


async def _view_key(site: Site, request: Request) -> Any:
    view = site.view_of(request.path_params["topic"])
    if view is None:
        raise RequestRefused(404, "no view of that topic")
    text, is_base64 = _key_in(request)
    try:
        return looked_up(view, text, is_base64=is_base64)
    except StreamsError as error:
        raise _refusal_of(error) from error


async def _state_key(site: Site, request: Request) -> Any:
    if site.owners is None:
        raise RequestRefused(404, "no source is named")
    text, is_base64 = _key_in(request)
    try:
        return await site.owners.ask(text, request.query_params, is_base64=is_base64)
    except StreamsError as error:
        raise _refusal_of(error) from error


def _refusal_of(error: StreamsError) -> RequestRefused:
    """Return the answer to a look-up that failed: 400, the question; 504, no answer in time; 500, all else."""
    late = (NotOwned, NotCaughtUp, BrokerUnavailable)
    status = 400 if isinstance(error, QuestionRefused) else 504 if isinstance(error, late) else 500
    return RequestRefused(status, harmless(str(error)))


def _key_in(request: Request) -> tuple[str, bool]:
    """Return the key in the address, and whether it is base64."""
    text, base64 = request.query_params.get("key"), request.query_params.get("key64")
    if (text is None) == (base64 is None):
        raise RequestRefused(400, "give key or key64")
    return (text, False) if text is not None else (base64 or "", True)


async def _letters(site: Site, request: Request) -> Any:
    if site.letters is None:
        raise RequestRefused(404, "no source is named")
    try:
        return await site.letters.read(LetterFilter.of(request.query_params))
    except StreamsError as error:
        raise _refusal_of(error) from error


def _waiting(page: str) -> Callable[[Site, Request], Awaitable[Any]]:
    async def answer(site: Site, request: Request) -> Any:
        if page not in site.waiting:
            raise RequestRefused(404, "no source is named")
        try:
            return await site.waiting[page].read(**chosen_jobs(page, request))
        except ConfigError as error:  # no secret is named here
            raise RequestRefused(404, harmless(str(error))) from error
        except StreamsError as error:
            raise _refusal_of(error) from error

    return answer


def chosen_jobs(page: str, request: Request) -> dict[str, bool]:
    """Return which entries the address of a page of what waits asks for."""
    return {"only_parked": request.query_params.get("parked") == "true"} if page == "jobs" else {}


async def _actions(site: Site, request: Request) -> Any:
    return [
        {
            "name": action.name,
            "about": action.about,
            "fields": msgspec.to_builtins(action.fields),
            "runs": [run.facts() for run in action.runs],
        }
        for action in site.actions.values()
    ]


async def _start(site: Site, request: Request) -> Any:
    action = site.actions.get(request.path_params["name"])
    if action is None:
        raise RequestRefused(404, "no action of that name")
    try:
        given = msgspec.json.decode(request.state.body or b"{}", type=dict[str, Any])
        return action.start(given, site.who(request)).facts()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise RequestRefused(400, "the body must be a JSON object") from None
    except ActionRefused as error:
        raise RequestRefused(409 if action.running else 400, str(error)) from None


async def _cancel(site: Site, request: Request) -> Any:
    action = site.actions.get(request.path_params["name"])
    if action is None:
        raise RequestRefused(404, "no action of that name")
    return {"cancelled": action.cancel(site.who(request))}


_NAME: Final = {"name": "The action's name."}
_KEY: Final = {"key": "The key, as text or JSON.", "key64": "The key's bytes, in base64."}
_KEYS: Final = {"topic": "The view's topic.", **_KEY}
_STATE_KEYS: Final = {
    **_KEY,
    "table": "The structure, where the source has several.",
    "partition": "The partition, where records have another key.",
    "confirm": "true: the owner confirms by a commit.",
    "max_staleness": "Seconds: a copy may answer that lacks nothing older.",
}
_LETTERS: Final = {
    "partition": "Only letters of this partition.",
    "key": "Only letters with this key, as text.",
    "type": "Only letters with this event type.",
    "after": "The letters behind this place, PARTITION@OFFSET: next of the page before.",
}
_JOBS: Final = {"parked": "true: only those that wait for an operator."}
ENDPOINTS: Final = (
    Endpoint("GET", "/group", "The group: members, partitions, lag, rebalances.", Scope.LOOK, _group),
    Endpoint("GET", "/topology", "What the source reads, handles, keeps and sends.", Scope.LOOK, _topology),
    Endpoint("GET", "/settings", "The settings in effect, secrets masked.", Scope.LOOK, _settings),
    Endpoint("GET", "/views", "The views, and how far they are.", Scope.LOOK, _views),
    Endpoint("GET", "/views/{topic}", "The value of one key of a view.", Scope.QUERY, _view_key, _KEYS),
    Endpoint("GET", "/state", "The committed value of a key, from its owner.", Scope.QUERY, _state_key, _STATE_KEYS),
    Endpoint("GET", "/dead-letters", "Open dead letters, page by page.", Scope.QUERY, _letters, _LETTERS),
    Endpoint(
        "GET",
        "/parked-keys",
        "The oldest parked keys, from their owners.",
        Scope.QUERY,
        _waiting("parked keys"),
    ),
    Endpoint("GET", "/jobs", "The oldest durable jobs, from their owners.", Scope.QUERY, _waiting("jobs"), _JOBS),
    Endpoint("GET", "/actions", "Actions, with their last runs.", Scope.LOOK, _actions),
    Endpoint(
        "POST", "/actions/{name}/start", "Start a run of an action.", Scope.ACT, _start, _NAME, {"type": "object"}
    ),
    Endpoint("POST", "/actions/{name}/cancel", "Cancel the run that is under way.", Scope.ACT, _cancel, _NAME),
)


def openapi() -> dict[str, Any]:
    """Return the document that describes the interface."""
    paths: dict[str, Any] = {}
    for each in ENDPOINTS:
        inside = [name for name in each.parameters if f"{{{name}}}" in each.path]
        operation: dict[str, Any] = {
            "summary": each.about,
            "description": f"Needs a token that may {each.right.name.lower()}.",
            "operationId": f"{each.method.lower()}{each.path.replace('/', '-').replace('{', '').replace('}', '')}",
            "parameters": [
                {
                    "name": name,
                    "in": "path" if name in inside else "query",
                    "required": name in inside,
                    "description": about,
                    "schema": {"type": "string"},
                }
                for name, about in each.parameters.items()
            ],
            "responses": {
                "200": {"description": "The answer.", "content": {"application/json": {"schema": {}}}},
                "default": {
                    "description": "A refusal, with its reason.",
                    "content": {
                        "application/json": {"schema": {"type": "object", "properties": {"error": {"type": "string"}}}}
                    },
                },
            },
        }
        if each.body is not None:
            operation["requestBody"] = {"content": {"application/json": {"schema": each.body}}}
        paths.setdefault(PREFIX + each.path, {})[each.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "kafka-event-source monitor", "version": "1"},
        "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}],
    }


def routes(site: Site) -> list[Route]:
    """Return the routes of the interface."""
    document = openapi()

    async def describe(request: Request) -> Response:
        return JSONResponse(document)

    made = [Route(f"{PREFIX}/openapi.json", describe)]
    return made + [Route(PREFIX + each.path, _endpoint(site, each), methods=[each.method]) for each in ENDPOINTS]


def _endpoint(site: Site, each: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        if request.state.session.scope < each.right:
            return refused(403, f"this token may not {each.right.name.lower()}")
        if unknown := sorted(request.query_params.keys() - each.parameters.keys()):  # a misspelt one asks for more
            known = ", ".join(each.parameters) or "none"
            return refused(400, f"there is no parameter {harmless(unknown[0])[:80]!r}; there are: {known}")
        try:
            found = await each.answer(site, request)
        except RequestRefused as refusal:
            return refused(refusal.status, refusal.text)
        return Response(msgspec.json.encode(found, enc_hook=str), media_type="application/json")

    return answer
