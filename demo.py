"""A page on which one sees the engine at work, and an OpenAI-compatible server for GPT-2.

    python demo.py                       http://localhost:5004
    curl localhost:5004/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once upon a time"}'

Every HTTP request becomes one or more `engine.Request`s in the queue of one scheduler. Its thread computes; the
threads of the server only read token ids from a queue and write text to a socket, so a slow reader slows nobody.
What can be wrong with a request is found before it is queued.
"""

import argparse
import collections
import contextlib
import hmac
import io
import itertools
import json
import logging
import math
import queue
import re
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from numbers import Integral
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flask import Flask, Response, request, send_file
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from tiktoken import Encoding
from werkzeug.exceptions import HTTPException
from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

import engine
from errors import ASSETS, QueueFull, UserError, check_number, ends_with_one_line, first_line, shown
from sampling import SamplingParams, TokenLogprobs
from scheduler import ContinuousBatchingScheduler, OutputToken, Request, generate, output_limit
from tokenizer import TextStream, load_tokenizer, token_name

log = logging.getLogger("demo")

MAX_BODY = 2 * 1024**2          # bytes
MAX_TEXT = 500_000              # characters
WATCH_SECONDS = 0.25            # how often a socket is looked at while nothing happens
HEARTBEAT_SECONDS = 5           # an SSE comment, so that proxies keep a silent stream open
STALLED_SECONDS = 30            # a client that sends or takes nothing for so long is dropped
MAX_CONNECTIONS = 2000
HISTORY_SECONDS = 60


# ---------------------------------------------------------------------------------------------------
# Errors, in the shape that OpenAI's clients know

class ApiError(Exception):
    """An answer to the client: {"error": {message, type, param, code, and `more` fields}}."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None,
                 headers: dict | None = None, **more):
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            status, "server_error" if status >= 500 else "invalid_request_error")
        self.status, self.headers = status, headers or {}
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code} | more}


class ClientGone(ApiError):
    """Nobody reads the answer any more."""

    def __init__(self):
        super().__init__(499, "the client closed the connection")


def answer_error(err: Exception) -> tuple[dict, int, dict]:
    """What a route raised, as a Flask answer."""
    if isinstance(err, UserError):
        words = str(err).replace(":", " ").split()
        err = ApiError(400, str(err), next((word for word in words if word in COMPLETION_FIELDS), None))
    elif isinstance(err, HTTPException):
        message = {404: f"there is no {shown(request.path)}", 405: f"{request.path} does not take {request.method}",
                   413: f"the body has more than {MAX_BODY} bytes"}.get(err.code, err.description)
        err = ApiError(err.code, message, headers={k: v for k, v in err.get_headers() if k in ("Allow", "Location")})
    elif not isinstance(err, ApiError):
        log.exception("a fault of the server's, not of the request")
        err = ApiError(500, "a fault of the server's")
    return err.body, err.status, err.headers


# ---------------------------------------------------------------------------------------------------
# From JSON to engine.Request

SAMPLING = [field.name for field in fields(SamplingParams) if "logprobs" not in field.name]
STREAM_FIELDS = ["prompt", *SAMPLING]
COMPLETION_FIELDS = ["model", "prompt", *SAMPLING, "logprobs", "n", "stream", "stream_options", "echo", "user"]
UNSUPPORTED = ["best_of", "suffix"]
MAX_N, MAX_STOPS, MAX_BIASES = 128, 4, 1024


def read_body(known: Sequence[str]) -> dict:
    """The request's JSON object without its nulls, which mean the default. Raises ApiError for what is none."""
    if request.mimetype != "application/json":
        raise ApiError(415, f"Content-Type must be application/json, not {shown(request.mimetype)}")
    if "Transfer-Encoding" in request.headers:                       # werkzeug would read beyond what came
        raise ApiError(411, "a body in chunks is not taken: Content-Length is needed")
    try:
        body = json.loads(request.get_data(cache=False))
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {STALLED_SECONDS} s") from None
    except (ValueError, RecursionError) as err:
        raise ApiError(400, f"the body is not JSON: {first_line(err)}") from None
    return known_fields(body, known)


def known_fields(body: Any, known: Sequence[str]) -> dict:
    """A JSON object's fields that are not null. Raises ApiError by the name of one that is not known."""
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, not {shown(body)}")
    body = {name: value for name, value in body.items() if value is not None}
    for name in body.keys() - set(known):
        if name in UNSUPPORTED:
            raise ApiError(400, f"{name} is not supported", name, "unsupported_parameter")
        raise ApiError(400, f"there is no field {shown(name)}; known are {', '.join(known)}", name[:100],
                       "unknown_parameter")
    return body


def typed(body: dict, name: str, kind: type, default: Any = None) -> Any:
    """A field's value. Raises ApiError where it is of another kind."""
    value = body.get(name, default)
    if name in body and not isinstance(value, kind):
        expected = {bool: "true or false", str: "a string", dict: "an object", list: "a list"}[kind]
        raise ApiError(400, f"{name} must be {expected}, not {shown(value)}", param=name)
    return value


def check_count(count: int, limit: int) -> None:
    """So many requests are to be queued at once. Before their prompts are tokenized in vain."""
    if count > limit:
        raise ApiError(400, f"these are {count} requests at once; the queue holds {limit}", "prompt")


def sampling_params(body: dict, **more) -> SamplingParams:
    """SamplingParams from a body's fields of the same names; OpenAI's defaults are theirs."""
    values = {name: body[name] for name in SAMPLING if name in body}
    for name, kind, limit in ("stop", list, MAX_STOPS), ("logit_bias", dict, MAX_BIASES):
        if isinstance(values.get(name), kind) and len(values[name]) > limit:
            raise ApiError(400, f"{name} has {len(values[name])} entries, at most {limit} are allowed", name)
    if isinstance(values.get("logit_bias"), dict):                   # in JSON the keys are strings
        values["logit_bias"] = {int(key) if re.fullmatch("[0-9]{1,9}", key) else key: bias
                                for key, bias in values["logit_bias"].items()}
    return SamplingParams(**values, **more)


class Prompts:
    """Makes token ids of what a client gives as a prompt: a string, ids, or a list of either."""

    def __init__(self, encoding: Encoding, config: engine.GPT2Config):
        self.encoding, self.config = encoding, config
        self.longest_token = max(map(len, encoding.token_byte_values()))   # bytes

    def parse(self, prompt: Any) -> list[list[int]]:
        """-> a list of id lists, one for each prompt."""
        if isinstance(prompt, str):
            return [self.encode(prompt)]
        if not isinstance(prompt, list) or not prompt:
            raise ApiError(400, f"prompt must be a string, token ids, or a list of these, not {shown(prompt)}",
                           "prompt")
        if not isinstance(prompt[0], str | list):
            return [self.check_ids(prompt)]
        return [self.encode(p) if isinstance(p, str) else self.check_ids(p) for p in prompt]

    def encode(self, text: str) -> list[int]:
        """Text to ids; no text is the start of a document. What can't fit is refused before it is tokenized."""
        if not text:
            return [self.config.eos_token_id or 0]
        self.check_length(math.ceil(len(text.encode("utf-8", "surrogatepass")) / self.longest_token), "at least ")
        ids = self.tokenize(text)
        self.check_length(len(ids))
        return ids

    def tokenize(self, text: str) -> list[int]:
        """Any text to ids, within what the tokenizer's regular expressions have stack for."""
        if len(text) > MAX_TEXT:
            raise ApiError(400, f"the text has {len(text)} characters, at most {MAX_TEXT} are tokenized", "prompt")
        return self.encoding.encode_ordinary(text)

    def check_ids(self, ids: Any) -> list[int]:
        """Their values are checked when they are submitted."""
        if not isinstance(ids, list) or not ids:
            raise ApiError(400, f"a prompt must be a string or at least 1 token id, not {shown(ids)}", "prompt")
        self.check_length(len(ids))
        return ids

    def check_length(self, tokens: int, about: str = "") -> None:
        """Raises ApiError for a prompt that the context does not hold."""
        limit = self.config.n_positions
        if tokens > limit:
            raise ApiError(400, f"the prompt has {about}{tokens} tokens, the model's context is {limit}", "prompt",
                           "context_length_exceeded", prompt_tokens=tokens, max_prompt_tokens=limit)


# ---------------------------------------------------------------------------------------------------
# From token ids to text and log probabilities

class Choice:
    """One text of an answer as it grows, in the pieces that a stream sends. Put together they are the whole,
    which is how an answer in one piece is made: both say the same."""

    def __init__(self, engine_request: Request, index: int, echo: bool = False, scores: Request | None = None):
        """scores: the request that scored the prompt, where its log probabilities are wanted."""
        self.request = engine_request
        self.index = index
        self.echo = echo                                             # whether the prompt is still to be sent
        self.scores = scores
        self.sent = 0                                                # characters
        self.begin = 0                                               # where the output begins, behind an echoed prompt
        self.pending = []                                            # (offset, TokenLogprobs) that nothing was sent of

    def feed(self, token: OutputToken) -> dict | None:
        """The piece that one more token makes certain, or None."""
        text = self._prompt_text()
        if token.logprobs:
            self.pending.append((self.begin + token.offset, token.logprobs))
        text += token.text
        return self._piece(text) if text else None

    def finish(self) -> dict:
        """The last piece, with the finish reason. An end-of-text token has no text, but a log probability."""
        text, r = self._prompt_text(), self.request
        self.pending += [(self.begin + r.text.decoded, end) for end in r.logprobs[len(r.output_ids):]]
        text += r.text.finish()
        return self._piece(text, "stop" if r.text.stopped else r.finish_reason)

    def _prompt_text(self) -> str:
        """The prompt, once, before anything else; its tokens are pending then."""
        if not self.echo:
            return ""
        self.echo = False
        stream = TextStream()
        text = ""
        for n, token in enumerate(self.request.prompt_ids):
            if self.scores:
                first = TokenLogprobs(token, None, None)             # has no score
                self.pending.append((len(text), self.scores.prompt_logprobs[n - 1] if n else first))
            text += stream.feed(token)
        text += stream.finish()
        self.begin = len(text)
        return text

    def _piece(self, text: str, finish_reason: str | None = None) -> dict:
        self.sent += len(text)
        # A token goes with the text that passes it: what is held back may turn out to be behind a stop string.
        last = finish_reason and not self.request.text.stopped
        tokens = [p for p in self.pending if last or p[0] < self.sent]
        self.pending = self.pending[len(tokens):]
        wanted = self.scores or self.request.params.logprobs is not None
        return {"index": self.index, "text": text, "logprobs": logprobs_object(tokens) if wanted else None,
                "finish_reason": finish_reason}


def logprobs_object(tokens: Sequence[tuple[int, TokenLogprobs]]) -> dict:
    """OpenAI's, of (offset in the choice's text, TokenLogprobs) for each token."""
    out = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for offset, scored in tokens:
        top = None if scored.top is None else scored.top | {scored.token: scored.logprob}
        out["tokens"].append(token_name(scored.token))
        out["token_logprobs"].append(scored.logprob)
        out["top_logprobs"].append(top and {token_name(token): logprob for token, logprob in top.items()})
        out["text_offset"].append(offset)
    return out


def join_pieces(pieces: Sequence[dict]) -> dict:
    """The pieces of one choice as one."""
    whole = dict(pieces[-1], text="".join(piece["text"] for piece in pieces))
    if whole["logprobs"]:
        whole["logprobs"] = {key: [value for piece in pieces for value in piece["logprobs"][key]]
                             for key in whole["logprobs"]}
    return whole


# ---------------------------------------------------------------------------------------------------
# One HTTP request, and its requests in the engine

class Inbox:
    """An output_queue that passes all on to one queue, with the name of where it came from."""

    def __init__(self, shared: queue.SimpleQueue, index: int):
        self.shared = shared
        self.index = index

    def put(self, token: int | None) -> None:
        """What the scheduler calls with each token, and with None at the end."""
        self.shared.put((self.index, token))


class Job:
    """Requests that are submitted together, read from one queue and cancelled together.

    The queue holds token ids and no more than the context has room for, so what a slow reader leaves is bounded.
    """

    def __init__(self, scheduler: ContinuousBatchingScheduler, requests: Sequence[Request]):
        """Submits them. Raises ApiError: the queue is full, the pool too small, the engine not alive."""
        self.scheduler = scheduler
        self.requests = requests
        self.queue = queue.SimpleQueue()
        self.id = "cmpl-" + secrets.token_hex(12)
        self.socket = request.environ.get("werkzeug.socket")
        for n, r in enumerate(requests):
            r.id = f"{self.id}-{n}"
            r.output_queue = Inbox(self.queue, n)
        try:
            if not scheduler.alive:
                raise ApiError(503, "the engine is not running")
            scheduler.submit(*requests)
        except QueueFull as err:
            raise ApiError(429, str(err), code="queue_full", headers={"Retry-After": "1"}) from None

    def cancel(self) -> None:
        """End all that have not ended."""
        for r in self.requests:
            if not r.finish_reason:
                self.scheduler.cancel(r)

    def events(self) -> Iterator[tuple[int, OutputToken | None] | None]:
        """Yields (index, token id), (index, None) at each request's end, and None after a while without any.

        Raises ClientGone soon after the client closed its end, whether it was streamed to or not.
        """
        left = len(self.requests)
        quiet = time.monotonic()                                     # since when nothing was yielded
        try:
            while left:
                try:
                    event = self.queue.get(timeout=WATCH_SECONDS)
                except queue.Empty:
                    event = None
                if self.socket and gone(self.socket):
                    raise ClientGone
                if event or time.monotonic() - quiet > HEARTBEAT_SECONDS:
                    quiet = time.monotonic()
                    left -= event is not None and event[1] is None
                    yield event
        finally:
            self.cancel()

    def failure(self, index: int) -> ApiError | None:
        """The ApiError for a request that did not end well, else None."""
        r = self.requests[index]
        if r.finish_reason == "abort":
            return ApiError(503, "the server is shutting down")
        if r.finish_reason == "error":
            return ApiError(500, f"the engine failed on this request: {first_line(r.error)}")
        return None


def gone(connection: socket.socket) -> bool:
    """Whether the peer of a socket has closed it, or its sending half. What it sends meanwhile is read away."""
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            return bool(selector.select(0)) and not connection.recv(65536)
    except OSError:
        return True


def event_stream(job: Job, events: Iterator[str]) -> Response:
    """An answer of server-sent events, each of which leaves at once, through proxies too."""
    headers = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
    response = Response(until_gone(events), mimetype="text/event-stream", headers=headers)
    response.call_on_close(job.cancel)                               # even if its events were never asked for
    return response


def until_gone(events: Iterator[str]) -> Iterator[str]:
    """The events, and no complaint where the client leaves."""
    yield ": accepted\n\n"                                           # so the headers leave while it is queued
    with contextlib.suppress(ClientGone):
        yield from events


def sse(data: Any, event: str | None = None) -> str:
    """A server-sent event."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {data if isinstance(data, str) else json.dumps(data, allow_nan=False)}\n\n"


# ---------------------------------------------------------------------------------------------------
# POST /v1/completions, POST /stream

class Completion:
    """OpenAI's completions API over a Job. Reference: https://platform.openai.com/docs/api-reference/completions"""

    def __init__(self, server: "ModelServer"):
        """Takes the request that is being served, and queues its prompts. Raises ApiError, UserError."""
        body = read_body(COMPLETION_FIELDS)
        self.model = server.name
        self.stream = typed(body, "stream", bool, False)
        if typed(body, "model", str, self.model) != self.model:
            raise ApiError(404, f"the model is {self.model}, there is no {shown(body['model'])}", "model",
                           "model_not_found")
        typed(body, "user", str)
        options = known_fields(typed(body, "stream_options", dict, {}), ["include_usage"])
        self.include_usage = typed(options, "include_usage", bool, False)
        if options and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", "stream_options")
        echo = typed(body, "echo", bool, False)
        n = body.get("n", 1)
        prompt = body.get("prompt", "")
        check_number("n", n, Integral, 1, MAX_N)
        many = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
        check_count(n * (len(prompt) if many else 1), server.scheduler.max_waiting)
        wanted = body.get("logprobs")
        params = sampling_params(body, logprobs=wanted, prompt_logprobs=wanted if echo else None)
        groups = [Request.samples(ids, params, n, with_text=True) for ids in server.prompts.parse(prompt)]
        self.choices = []
        scored = echo and wanted is not None                         # one request of a group scores its prompt
        for group in groups:
            for r in group:
                scores = (group[0] if r.params.prompt_logprobs is None else r) if scored else None
                self.choices.append(Choice(r, len(self.choices), echo, scores))
        self.prompts = [group[0] for group in groups]
        self.job = Job(server.scheduler, [choice.request for choice in self.choices])
        self.created = int(time.time())

    def answer(self) -> Response | dict:
        """A stream of events, or one object."""
        return event_stream(self.job, self.events()) if self.stream else self.whole()

    def body(self, choices: list[dict], **more) -> dict:
        """An answer with some choices' pieces."""
        return {"id": self.job.id, "object": "text_completion", "created": self.created, "model": self.model,
                "choices": choices} | more

    def usage(self) -> dict:
        """Tokens of the prompts, each counted once, and of the outputs so far."""
        prompt = sum(len(r.prompt_ids) for r in self.prompts)
        output = sum(len(r.output_ids) for r in self.job.requests)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
                "prompt_tokens_details": {"cached_tokens": sum(r.cached_tokens for r in self.prompts)}}

    def pieces(self) -> Iterator[dict | None]:
        """Yields the pieces of all choices as they come, None for a heartbeat. Raises ApiError where one fails."""
        for event in self.job.events():
            if event is None:
                yield None
                continue
            index, token = event
            if token is None and (failure := self.job.failure(index)):
                raise failure
            choice = self.choices[index]
            if piece := choice.finish() if token is None else choice.feed(token):
                yield piece

    def events(self) -> Iterator[str]:
        """The answer as server-sent events; an error is one of them."""
        usage = {"usage": None} if self.include_usage else {}
        try:
            for piece in self.pieces():
                yield ": waiting\n\n" if piece is None else sse(self.body([piece], **usage))
            if self.include_usage:
                yield sse(self.body([], usage=self.usage()))
        except ClientGone:
            raise
        except ApiError as err:
            yield sse(err.body)
        yield sse("[DONE]")

    def whole(self) -> dict:
        """The answer in one piece, once all have ended."""
        found = [[] for _ in self.choices]
        for piece in self.pieces():
            if piece:
                found[piece["index"]].append(piece)
        return self.body([join_pieces(pieces) for pieces in found], usage=self.usage())


def page_stream(server: "ModelServer") -> Response:
    """What the page reads: for each request an event `start`, its `token`s (with the five likeliest alternatives),
    then `done` or `error`. One connection carries them all, since browsers open no more than six to a server."""
    body = read_body([*STREAM_FIELDS, "requests"])
    bodies = typed(body, "requests", list, [body])
    if not bodies or ("requests" in body and len(body) > 1):
        raise ApiError(400, "requests must be at least 1 object, without other fields beside it", "requests")
    check_count(len(bodies), server.scheduler.max_waiting)
    asked = []
    for one in bodies:
        one = known_fields(one, STREAM_FIELDS)
        params = sampling_params(one, logprobs=5)
        asked.append(Request(server.prompts.encode(typed(one, "prompt", str, "")), params, with_text=True))
    job = Job(server.scheduler, asked)
    return event_stream(job, page_events(job, server.scheduler.model.config))


def page_events(job: Job, config: engine.GPT2Config) -> Iterator[str]:
    """The events of page_stream."""
    for n, r in enumerate(job.requests):
        limit = output_limit(r, config)
        yield sse({"index": n, "id": r.id, "prompt_tokens": len(r.prompt_ids), "max_tokens": limit}, "start")
    for event in job.events():
        if event is None:
            yield ": waiting\n\n"
            continue
        index, token = event
        r = job.requests[index]
        if token is not None:
            yield sse({"index": index, "text": token.text} | token_view(r, token), "token")
        elif failure := job.failure(index):
            yield sse({"index": index} | failure.body, "error")
        else:
            yield sse({"index": index, "text": r.text.finish()} | summary(r), "done")


def token_view(r: Request, token: OutputToken) -> dict:
    """An output token with its five likeliest alternatives; times in seconds since the request arrived."""
    scored = token.logprobs
    return {"id": scored.token, "token": token_name(scored.token), "logprob": scored.logprob,
            "top": [[token_name(other), logprob] for other, logprob in scored.top.items()],
            "seconds": token.time - r.arrival_time, "cached_tokens": r.cached_tokens}


def summary(r: Request) -> dict[str, Any]:
    """Counts and times (seconds) of a request that has ended; None is what it never came to."""
    first, last = (r.token_times[0], r.token_times[-1]) if r.token_times else (None, None)
    gaps = len(r.token_times) - 1

    def between(start, end):
        return None if start is None or end is None else end - start

    return {"finish_reason": r.finish_reason, "prompt_tokens": len(r.prompt_ids), "cached_tokens": r.cached_tokens,
            "output_tokens": len(r.output_ids), "preemptions": r.preemptions,
            "queued": between(r.arrival_time, r.scheduled_time), "prefill": between(r.scheduled_time, first),
            "first_token": between(r.arrival_time, first), "decode": between(first, last),
            "inference": between(r.scheduled_time, last), "total": between(r.arrival_time, r.finish_time),
            "per_token": (last - first) / gaps if gaps > 0 else None}


# ---------------------------------------------------------------------------------------------------
# Metrics and the view of the engine

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
OF_REQUESTS = {                                                      # what of a summary goes where, when it has ended
    "total": ("e2e_request_latency_seconds", "Arrival to end.", SECONDS),
    "queued": ("request_queue_time_seconds", "Arrival to admission.", SECONDS),
    "prefill": ("request_prefill_time_seconds", "Admission to first token.", SECONDS),
    "decode": ("request_decode_time_seconds", "First token to last.", SECONDS),
    "inference": ("request_inference_time_seconds", "Admission to last token.", SECONDS),
    "per_token": ("request_time_per_output_token_seconds", "Mean gap between the tokens of a request.", SECONDS),
    "prompt_tokens": ("request_prompt_tokens", "Prompt tokens of a request.", TOKENS),
    "output_tokens": ("request_generation_tokens", "Tokens that a request made.", TOKENS)}


class Metrics:
    """Prometheus metrics under vLLM's names and with its meanings: times count from a request's arrival.

    They are brought up to date when they are asked for, and every second, so the engine does nothing for them.
    """

    def __init__(self, scheduler: ContinuousBatchingScheduler, name: str):
        self.scheduler = scheduler
        self.labels = {"model_name": name, "engine": "0"}
        self.registry = CollectorRegistry()
        self.ended = collections.deque()                             # requests that were not observed yet
        self.seen = {}                                               # request -> how many of its tokens were observed
        self.lock = threading.Lock()                                 # one update at a time; before the scheduler's
        self.success = Counter("vllm:request_success", "Requests by how they ended.", [*self.labels, "finished_reason"],
                               registry=self.registry)
        self.first = self._histogram("time_to_first_token_seconds", "Arrival to first token.", SECONDS)
        self.gap = self._histogram("inter_token_latency_seconds", "Each gap between two tokens.", SECONDS)
        self.of_requests = {key: self._histogram(*what) for key, what in OF_REQUESTS.items()}
        self.registry.register(self)

    def _histogram(self, name, text, buckets):
        histogram = Histogram("vllm:" + name, text, self.labels, buckets=buckets, registry=self.registry)
        return histogram.labels(**self.labels)

    def update(self) -> None:
        """Observe what has happened since the last time."""
        with self.lock:
            running = self.scheduler.running
            ended = [self.ended.popleft() for _ in range(len(self.ended))]
            for r in {*running, *self.seen, *ended}:
                self._observe_tokens(r, list(r.token_times))
            for r in ended:
                del self.seen[r]
                self.success.labels(**self.labels, finished_reason=r.finish_reason).inc()
                for key, value in summary(r).items():
                    if key in self.of_requests and value is not None:
                        self.of_requests[key].observe(value)

    def _observe_tokens(self, r, times):
        seen = self.seen.get(r, 0)
        if times and not seen:
            self.first.observe(times[0] - r.arrival_time)
        for before, after in itertools.pairwise(times[max(0, seen - 1):]):
            self.gap.observe(after - before)
        self.seen[r] = len(times)

    def collect(self) -> Iterator[Metric]:
        """What the scheduler counts itself, read when Prometheus asks."""
        stats = self.scheduler.stats()
        labels = list(self.labels)
        cache = self.scheduler.cache
        for kind, name, text, value in (
                (GaugeMetricFamily, "num_requests_running", "Requests in slots.", stats["running"]),
                (GaugeMetricFamily, "num_requests_waiting", "Requests in the queue.", stats["waiting"]),
                (GaugeMetricFamily, "kv_cache_usage_perc", "Share of pages in use, 1 is all.",
                 stats["pages_used"] / cache.max_pages),
                (CounterMetricFamily, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
                 stats["prompt_tokens"] if self.scheduler.prefix_cache else 0),
                (CounterMetricFamily, "prefix_cache_hits", "Prompt tokens found there.", stats["cached_tokens"]),
                (CounterMetricFamily, "num_preemptions", "Requests that gave up their pages.", stats["preemptions"]),
                (CounterMetricFamily, "prompt_tokens", "Prompt tokens of admitted requests.", stats["prompt_tokens"]),
                (CounterMetricFamily, "generation_tokens", "Tokens generated.", stats["output_tokens"])):
            family = kind("vllm:" + name, text, labels=labels)
            family.add_metric(list(self.labels.values()), value)
            yield family
        sizes = {"block_size": str(cache.page_size), "num_gpu_blocks": str(cache.max_pages)} | self.labels
        info = GaugeMetricFamily("vllm:cache_config_info", "Size and number of the pages.", labels=list(sizes))
        info.add_metric(list(sizes.values()), 1)
        yield info


class Monitor:
    """A line a request, a line every 10 seconds while busy, and the last minute second by second."""

    LINE_SECONDS = 10

    def __init__(self, scheduler: ContinuousBatchingScheduler, metrics: Metrics):
        self.scheduler = scheduler
        self.metrics = metrics
        self.before = scheduler.stats()
        self.ticks = 0                                               # seconds since the start
        self.history = collections.deque(maxlen=HISTORY_SECONDS)
        threading.Thread(target=self._run, name="monitor", daemon=True).start()

    def _run(self):
        while not self.scheduler.stopping:
            time.sleep(1)
            self.tick()

    def tick(self) -> None:
        """Called every second."""
        now = self.scheduler.stats()
        self.ticks += 1
        self.history.append({"tokens": now["output_tokens"] - self.before["output_tokens"],
                             "running": now["running"], "waiting": now["waiting"]})
        self.before = now
        self.metrics.update()
        tokens = sum(second["tokens"] for second in list(self.history)[-self.LINE_SECONDS:])
        if self.ticks % self.LINE_SECONDS == 0 and (tokens or now["running"] or now["waiting"]):
            log.info("%d running, %d waiting, %.1f tokens/s, pages: %d used, %d cached, %d free", now["running"],
                     now["waiting"], tokens / self.LINE_SECONDS, now["pages_used"], now["pages_cached"],
                     now["pages_free"])

    def ended(self, r: Request) -> None:
        """The scheduler's `on_finish`."""
        self.metrics.ended.append(r)
        times = summary(r)
        parts = [f"{words} {times[key]:.3f} s" for key, words in (("queued", "queued"), ("first_token", "first token"),
                 ("total", "total")) if times[key] is not None]
        rate = [f"{1 / times['per_token']:.1f} tokens/s"] if times["per_token"] else []
        log.info("%s: %d prompt tokens (%d cached), %d new, %s, %s", r.id, len(r.prompt_ids), r.cached_tokens,
                 len(r.output_ids), ", ".join(parts + rate), r.finish_reason)


# ---------------------------------------------------------------------------------------------------
# The app

class ModelServer:
    """What the routes share: a scheduler, a tokenizer, and how the model is called outside."""

    def __init__(self, scheduler: ContinuousBatchingScheduler, encoding: Encoding, note: str):
        self.scheduler = scheduler
        self.encoding = encoding
        self.note = note
        self.created = int(time.time())
        model = scheduler.model
        weight = model.wte.weight
        self.prompts = Prompts(encoding, model.config)
        self.name = Path(model.name).resolve().name if Path(model.name).is_dir() else model.name or "gpt2"
        self.device = weight.device.type
        self.dtype = str(weight.dtype).removeprefix("torch.")
        self.metrics = Metrics(scheduler, self.name)
        self.monitor = Monitor(scheduler, self.metrics)
        scheduler.on_finish = self.monitor.ended

    def models(self) -> dict:
        """GET /v1/models: the one that is served."""
        return {"object": "list", "data": [self.model_object()]}

    def model_object(self) -> dict:
        """The model as OpenAI describes one, with vLLM's `max_model_len`."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "local",
                "max_model_len": self.scheduler.model.config.n_positions}

    def slots(self) -> dict:
        """GET /slots: what the page draws."""
        return {"model": self.name, "device": self.device, "dtype": self.dtype, "note": self.note,
                "context": self.scheduler.model.config.n_positions, "history": list(self.monitor.history)
                } | self.scheduler.snapshot()

    def tokenize(self) -> dict:
        """POST /tokenize: text to ids."""
        body = read_body(["model", "prompt", "add_special_tokens", "return_token_strs"])
        text = typed(body, "prompt", str)
        if text is None:
            raise ApiError(400, "prompt is missing", "prompt")
        ids = self.prompts.tokenize(text)
        strings = {"token_strs": [token_name(t) for t in ids]} if typed(body, "return_token_strs", bool) else {}
        return {"count": len(ids), "max_model_len": self.scheduler.model.config.n_positions, "tokens": ids} | strings

    def detokenize(self) -> dict:
        """POST /detokenize: ids to text."""
        body = read_body(["model", "tokens"])
        if "tokens" not in body:
            raise ApiError(400, "tokens is missing", "tokens")
        limit = self.encoding.n_vocab - 1
        for token in typed(body, "tokens", list):
            if type(token) is not int or not 0 <= token <= limit:
                raise ApiError(400, f"tokens must be ids from 0 to {limit}, not {shown(token)}", "tokens")
        return {"prompt": self.encoding.decode(body["tokens"])}

    def health(self) -> dict:
        """GET /health. Raises ApiError (503) where the engine does not run."""
        if not self.scheduler.alive:
            raise ApiError(503, "the engine is not running")
        return {"status": "ok"}


def create_app(scheduler: ContinuousBatchingScheduler, encoding: Encoding, api_key: str | None = None,
               cors_origins: Sequence[str] = (), note: str = "") -> Flask:
    """The Flask app over a scheduler that was started. note: a line for the page's header."""
    app = Flask(__name__, static_folder=None)
    server = ModelServer(scheduler, encoding, note)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY
    app.json.sort_keys = False
    app.register_error_handler(Exception, answer_error)
    app.url_map.merge_slashes = False                                # a wrong path is unknown, not moved
    open_routes = "page", "health"

    @app.before_request
    def check_key():
        given = request.headers.get("Authorization", "").encode("latin-1", "replace")
        if api_key is not None and request.method != "OPTIONS" and request.endpoint not in open_routes \
                and not hmac.compare_digest(given, f"Bearer {api_key}".encode()):
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key",
                           headers={"WWW-Authenticate": "Bearer"})

    @app.after_request
    def allow_origin(response):
        origin = request.headers.get("Origin")
        if origin and (origin in cors_origins or "*" in cors_origins):
            asked = request.headers.get("Access-Control-Request-Headers", "Authorization, Content-Type")
            response.headers.update({
                "Access-Control-Allow-Origin": origin if origin in cors_origins else "*",
                "Access-Control-Allow-Headers": " ".join(asked.split()),
                "Access-Control-Allow-Methods": "GET, POST", "Access-Control-Expose-Headers": "Retry-After",
                "Access-Control-Max-Age": "600"})
            response.vary.add("Origin")
        return response

    @app.get("/")
    def page():
        response = send_file(ASSETS / "index.html", max_age=0)
        response.headers["Content-Security-Policy"] = (
            "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; "
            "script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
        return response

    @app.get("/v1/models/<path:name>")
    def model(name):
        if name != server.name:
            raise ApiError(404, f"the model is {server.name}, there is no {shown(name)}", "model", "model_not_found")
        return server.model_object()

    @app.get("/metrics")
    def metrics():
        server.metrics.update()
        return Response(generate_latest(server.metrics.registry), content_type=CONTENT_TYPE_LATEST)

    app.post("/v1/completions", endpoint="completions")(lambda: Completion(server).answer())
    app.post("/stream", endpoint="stream")(lambda: page_stream(server))
    app.get("/v1/models")(server.models)
    app.get("/health")(server.health)
    app.get("/slots")(server.slots)
    app.post("/tokenize")(server.tokenize)
    app.post("/detokenize")(server.detokenize)
    return app


# ---------------------------------------------------------------------------------------------------
# The WSGI server: werkzeug's, a thread a connection. A stream lasts as long as its text, so a pool of threads
# (waitress, gunicorn) would be used up by as many streams; a thread that waits costs little. It also hands out
# the socket, which is watched for clients that go away, and comes with Flask.

class Arrived(io.BufferedReader):
    """Reads what has arrived instead of waiting for all that was asked for."""

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes."""
        return self.read1(size)


class Handler(WSGIRequestHandler):
    """One connection: HTTP/1.1, whose requests are answered one after another."""

    protocol_version = "HTTP/1.1"                                    # streams in chunks: a broken one is noticed
    timeout = STALLED_SECONDS
    wbufsize = 2**16                                                 # an event is one packet ...
    disable_nagle_algorithm = True                                   # ... which leaves at once
    default_request_version = "HTTP/1.1"                             # to garbage, too, goes an answer with a status

    def setup(self) -> None:
        """Before the first request."""
        super().setup()
        self.rfile = Arrived(self.connection.makefile("rb", buffering=0))

    def handle_expect_100(self) -> bool:
        """Answered at once, and once: werkzeug would do it again, and not send it."""
        super().handle_expect_100()
        self.wfile.flush()
        del self.headers["Expect"]
        return True

    def run_wsgi(self) -> None:
        """Each request: to the app, but for one whose target is no URL."""
        if self.request_version < "HTTP/1.1":                        # knows no chunks
            self.protocol_version = "HTTP/1.0"
        try:
            urlsplit(self.path)
        except ValueError:
            return self.send_error(400, "bad request target")
        super().run_wsgi()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What is no HTTP is answered in JSON too."""
        body = json.dumps(ApiError(int(code), message or self.responses[code][0]).body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def finish(self) -> None:
        """After the last request."""
        with contextlib.suppress(OSError):                           # the client has gone
            super().finish()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """The engine's requests are logged instead."""

    def log_error(self, format: str, *args) -> None:
        """What is wrong with a request is told to its client."""


class Server(ThreadedWSGIServer):
    """Listens on a socket that is bound already. Knows the threads of its open connections."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, app: Flask):
        host, port = listener.getsockname()[:2]
        super().__init__(host, port, app, handler=Handler, fd=listener.fileno())
        listener.close()                                             # the server has a copy of its own
        self.handlers = set()                                        # threads
        self.most = most_connections()

    def process_request(self, connection: socket.socket, address: tuple) -> None:
        """A thread for a connection, or 503 where there are too many."""
        if len(self.handlers) < self.most:
            return super().process_request(connection, address)
        with contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n"
                               b"Connection: close\r\n\r\n")
        self.shutdown_request(connection)

    def process_request_thread(self, connection: socket.socket, address: tuple) -> None:
        """What runs in that thread."""
        self.handlers.add(threading.current_thread())
        try:
            super().process_request_thread(connection, address)
        finally:
            self.handlers.discard(threading.current_thread())

    def wait_closed(self, seconds: float) -> None:
        """Wait until all connections are closed, at most so long."""
        end = time.monotonic() + seconds
        for thread in list(self.handlers):
            thread.join(max(0, end - time.monotonic()))


def most_connections() -> int:
    """A third of the files that the process may open: with none left, it could accept nobody to tell."""
    try:
        import resource
    except ImportError:  # Windows
        return MAX_CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 3)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UserError where the address can't be had."""
    check_number("--port", port, Integral, 0, 65535)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                                    backlog=256)
    except OSError as err:
        raise UserError(f"{host} port {port} can't be listened on: {err.strerror or err}") from None


def stop_signals() -> threading.Event:
    """An event that SIGINT and SIGTERM set."""
    stop = threading.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: stop.set())
    return stop


def run(server: Server, scheduler: ContinuousBatchingScheduler, stop: threading.Event) -> None:
    """Serves until `stop` is set. Then open streams are told, and have 3 seconds to read it."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    while not stop.wait(0.5):                                        # with a time limit, or Windows would not wake it
        pass
    server.shutdown()
    thread.join()
    scheduler.stop()
    server.wait_closed(3)


# ---------------------------------------------------------------------------------------------------
# Command line

def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of `python demo.py`."""
    parser = argparse.ArgumentParser(description="GPT-2 in the browser and behind OpenAI's completions API.")
    add = parser.add_argument
    add("--model", default="auto", help="gpt2 or another Hugging Face name, a folder, tiny, random, "
                                        "auto (gpt2, or tiny where it can't be had)")
    add("--device", default="cpu", help="cpu (default), cuda")
    add("--dtype", default="float32", choices=engine.CPU_DTYPES)
    add("--threads", type=int, help="of the engine on a CPU (default: the physical cores)")
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)")
    add("--port", type=int, default=5004, help="default 5004; 0 takes a free one")
    add("--max-batch-size", type=int, default=4, help="slots: requests that run at once (default 4)")
    add("--pages", type=int, default=256, help="pages of 16 tokens for keys and values (default 256)")
    add("--max-waiting", type=int, default=1024, help="requests that may wait (default 1024); more are answered 429")
    add("--no-prefix-cache", action="store_true", help="compute every prompt in full")
    add("--api-key", help="ask for `Authorization: Bearer KEY`")
    add("--cors-origin", action="append", default=[], metavar="ORIGIN",
        help="let pages of this origin call the API (several times; * is all)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """`python demo.py`: serves until it is stopped. What a user can mend is one line on stderr."""
    args = parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO, stream=sys.stderr)
    with ends_with_one_line("demo.py"):
        if args.api_key == "":
            raise UserError("--api-key is empty; leave it out to ask for none")
        check_number("--threads", args.threads, Integral, 1, 1024, optional=True)
        engine.use_threads(args.threads)
        listener = listen(args.host, args.port)
        model = engine.load_model(args.model, engine.GPT2Paged, args.dtype, args.device, max_pages=args.pages)
        scheduler = ContinuousBatchingScheduler(model, args.max_batch_size, args.max_waiting,
                                                prefix_cache=not args.no_prefix_cache)
        stood_in = args.model == "auto" and model.name != "gpt2"
        note = f"gpt2 could not be had; the sample model {model.name} stands in." if stood_in else ""
        for _ in generate(model, [0, 0], SamplingParams(max_tokens=2)):  # what is to be compiled is, now
            pass
        scheduler.start()
        server = Server(listener, create_app(scheduler, load_tokenizer(), args.api_key, args.cors_origin, note))
    host = "localhost" if args.host in ("127.0.0.1", "0.0.0.0", "::", "::1") else args.host
    host = f"[{host}]" if ":" in host else host
    stop = stop_signals()
    print(f"GPT-2 ({model.name}) on http://{host}:{server.port}  Ctrl-C ends it", flush=True)
    run(server, scheduler, stop)


if __name__ == "__main__":
    main()
