"""The endpoint's routes."""

from __future__ import annotations

import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import jinja2
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from heavywater.aio import Client
from heavywater.errors import HeavywaterError
from heavywater.http.answer import Answer, Background
from heavywater.http.asked import Asked, Prompt, asked_chat, asked_completion
from heavywater.http.asked_responses import asked_responses
from heavywater.http.body import read_body
from heavywater.http.errors import ApiError, of_server
from heavywater.http.fields import parse_object
from heavywater.http.options import HttpOptions
from heavywater.http.respond import AnswerResponse, Running
from heavywater.http.response_shapes import ResponseShape
from heavywater.http.shapes import Shape
from heavywater.http.turns import Turns
from heavywater.model import Model

# The servers take messages of 4 MiB; the request's other fields have the rest.
_MAX_PROMPT_BYTES = (4 << 20) - (64 << 10)
_TOKEN_BYTES = 5  # of an id, at most
_PATHS = ("/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/health")


def create_app(options: HttpOptions, model: Model) -> Starlette:
    """The ASGI application; `model` as the worker serves it."""
    endpoint = Endpoint(options, model)
    return Starlette(
        routes=[
            Route("/v1/models", endpoint.models),
            Route("/v1/models/{name:path}", endpoint.model),
            Route("/v1/completions", endpoint.completions, methods=["POST"]),
            Route("/v1/chat/completions", endpoint.chat, methods=["POST"]),
            Route("/v1/responses", endpoint.responses, methods=["POST"]),
            Route("/health", endpoint.health),
        ],
        exception_handlers={ApiError: _refused, HTTPException: _no_route, Exception: _failed},
        lifespan=endpoint.running,
    )


class Endpoint:
    """What the routes share. The client lives as long as the application runs."""

    def __init__(self, options: HttpOptions, model: Model) -> None:
        self._options = options
        self._model = model
        self._names = options.model_names or (model.info.name,)
        self._running = Running(options.max_running)
        self._background = Background()
        self._started_s = int(time.time())

    @contextlib.asynccontextmanager
    async def running(self, app: Starlette) -> AsyncIterator[None]:
        worker, cache, security = self._options.worker, self._options.cache or None, self._options.security
        async with Client(worker=worker, cache=cache, security=security) as client:
            self._client = client
            self._turns = Turns(client, self._model.encode, self._options.max_turns, self._options.keep_turns_s)
            yield
            await self._background.finish()
            await self._turns.finish()

    async def models(self, request: Request) -> Response:
        self._authorize(request)
        return JSONResponse({"object": "list", "data": [self._model_object(name) for name in self._names]})

    async def model(self, request: Request) -> Response:
        self._authorize(request)
        return JSONResponse(self._model_object(self._served(request.path_params["name"])))

    async def completions(self, request: Request) -> Response:
        asked, name = await self._asked(request, asked_completion)
        assert asked.max_tokens is not None
        return self._answer(asked, list(asked.prompts), asked.max_tokens, Shape(asked, self._model, name))

    async def chat(self, request: Request) -> Response:
        return await self._chat(request, asked_chat, Shape)

    async def responses(self, request: Request) -> Response:
        return await self._chat(request, asked_responses, ResponseShape)

    async def _chat(
        self, request: Request, read: Callable[[dict[str, Any], HttpOptions], Asked], shape: type[Shape]
    ) -> Response:
        asked, name = await self._asked(request, read)
        try:
            prompt = self._model.chat(asked.messages)
        except (jinja2.TemplateError, ValueError) as error:
            raise ApiError(
                400, f"messages: the model's chat template refuses them: {error}", param="messages"
            ) from None
        max_tokens = min(self._options.default_max_tokens, self._model.info.context_tokens)
        return self._answer(asked, [prompt], asked.max_tokens or max_tokens, shape(asked, self._model, name))

    async def health(self, request: Request) -> Response:
        """Whether the worker takes requests."""
        try:
            ready, reason = await self._client.is_ready(), "the worker is not ready"
        except HeavywaterError as error:
            ready, reason = False, f"the worker does not answer: {error.message}"
        if ready:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)

    async def _asked(self, request: Request, read: Callable[[dict[str, Any], HttpOptions], Asked]) -> tuple[Asked, str]:
        self._authorize(request)
        values = parse_object(await read_body(request, self._options))
        asked = read(values, self._options)
        return asked, self._served(asked.model)

    def _answer(self, asked: Asked, prompts: list[Prompt], max_tokens: int, shape: Shape) -> Response:
        for prompt in prompts:
            size = len(prompt.encode()) if isinstance(prompt, str) else _TOKEN_BYTES * len(prompt)
            if size > _MAX_PROMPT_BYTES:
                message = f"the prompt has {size} bytes as it is sent to the worker, want at most {_MAX_PROMPT_BYTES}"
                raise ApiError(413, message, param="messages" if asked.is_chat else "prompt", code="request_too_large")
        context_tokens = self._model.info.context_tokens
        turns = self._turns if self._options.max_turns else None
        answer = Answer(self._client, asked, prompts, max_tokens, context_tokens, self._background, turns)
        return AnswerResponse(answer, shape, self._options, self._running)

    def _authorize(self, request: Request) -> None:
        """Raises ApiError unless the request has the key, where one is wanted."""
        if not self._options.api_key:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._options.api_key.encode()):
            raise ApiError(
                401, "the API key is missing or wrong, want Authorization: Bearer KEY", code="invalid_api_key"
            )

    def _served(self, name: str) -> str:
        """The model's name, where it is one that is served; the first for a request that names none."""
        if name and name not in self._names:
            message = f"model {name!r} is not served, want {' or '.join(repr(one) for one in self._names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name or self._names[0]

    def _model_object(self, name: str) -> dict[str, object]:
        info = self._model.info
        figures = {
            "architecture": info.architecture,
            "tensor_parallel": info.tensor_parallel,
            "default_policy": info.default_policy,
        }
        return {
            "id": name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "heavywater",
            "max_model_len": info.context_tokens,
            "heavywater": figures,
        }


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == 404:
        message += f", want one of: {', '.join(_PATHS)}"
    response = ApiError(error.status_code, message).response()
    response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> Response:
    """This program is wrong; what is the matter is in its log."""
    if isinstance(error, HeavywaterError):
        return of_server(error).response()
    return ApiError(500, "an error inside the endpoint; its log says which", "server_error").response()
