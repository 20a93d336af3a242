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
import json
import logging
import math
import queue
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import weakref
from dataclasses import fields
from numbers import Integral
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from flask import Flask, Response, request, send_file
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from werkzeug.exceptions import HTTPException
from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

import engine
from engine import QueueFull, Request, SamplingParams, TextStream, UserError, check_number, shown

log = logging.getLogger("demo")

MAX_BODY = 2 * 1024**2          # bytes
WATCH_SECONDS = 0.25            # how often a socket is looked at while nothing happens
HEARTBEAT_SECONDS = 5           # an SSE comment, so that proxies keep a silent stream open
STALLED_SECONDS = 30            # a client that sends or takes nothing for so long is dropped
MAX_CONNECTIONS = 2000
HISTORY_SECONDS = 60


# ---------------------------------------------------------------------------------------------------
# Errors, in the shape that OpenAI's clients know

class ApiError(Exception):
    """An answer to the client: {"error": {message, type, param, code, and `more` fields}}."""

    def __init__(self, status, message, param=None, code=None, headers=None, **more):
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            status, "server_error" if status >= 500 else "invalid_request_error")
        self.status, self.headers = status, headers or {}
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code} | more}

    @classmethod
    def of(cls, error):
        """A UserError, which begins with the parameter's name where it is about one."""
        message = str(error)
        first = message.split()[0]
        return cls(400, message, param=first if first in COMPLETION_FIELDS else None)

    def response(self):
        return json_response(self.body, self.status, self.headers)


def json_response(body, status=200, headers=None):
    return Response(json.dumps(body, allow_nan=False), status, headers, mimetype="application/json")


# ---------------------------------------------------------------------------------------------------
# From JSON to engine.Request

SAMPLING = [field.name for field in fields(SamplingParams) if "logprobs" not in field.name]
STREAM_FIELDS = ["prompt", *SAMPLING]
COMPLETION_FIELDS = ["model", "prompt", *SAMPLING, "logprobs", "n", "stream", "stream_options", "echo", "user"]
UNSUPPORTED = ["best_of", "suffix"]
MAX_N, MAX_STOPS = 128, 4


def read_body(known):
    """The request's JSON object without its nulls, which mean the default. Raises ApiError for what is none."""
    if request.mimetype != "application/json":
        raise ApiError(415, f"Content-Type must be application/json, not {shown(request.mimetype)}")
    try:
        body = json.loads(request.get_data(cache=False))
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {STALLED_SECONDS} s") from None
    except OSError as err:  # a body in chunks that breaks off or isn't any
        raise ApiError(400, f"the body can't be read: {engine.first_line(err)}") from None
    except (ValueError, RecursionError) as err:
        raise ApiError(400, f"the body is not JSON: {engine.first_line(err)}") from None
    return known_fields(body, known)


def known_fields(body, known):
    """A JSON object's fields that are not null. Raises ApiError by the name of one that is not known."""
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, not {shown(body)}")
    body = {name: value for name, value in body.items() if value is not None}
    for name in body:
        if name in UNSUPPORTED and name not in known:
            raise ApiError(400, f"{name} is not supported", param=name, code="unsupported_parameter")
        if name not in known:
            raise ApiError(400, f"there is no field {shown(name)}; known are {', '.join(known)}", param=name[:100],
                           code="unknown_parameter")
    return body


def typed(body, name, kind, default=None):
    value = body.get(name, default)
    if name in body and not isinstance(value, kind):
        expected = {bool: "true or false", str: "a string", dict: "an object", list: "a list"}[kind]
        raise ApiError(400, f"{name} must be {expected}, not {shown(value)}", param=name)
    return value


def plain(text):
    """Without halves of surrogate pairs, which JSON can spell and UTF-8 can't."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def sampling_params(body, **more):
    """SamplingParams from a body's fields of the same names; OpenAI's defaults are theirs."""
    values = {name: body[name] for name in SAMPLING if name in body}
    stop = values.get("stop", ())
    if isinstance(stop, list) and len(stop) > MAX_STOPS:
        raise ApiError(400, f"stop has {len(stop)} strings, at most {MAX_STOPS} are allowed", param="stop")
    if isinstance(stop, str | list):
        stop = [stop] if isinstance(stop, str) else stop
        values["stop"] = [plain(s) if isinstance(s, str) else s for s in stop]
    if isinstance(values.get("logit_bias"), dict):                   # in JSON the keys are strings
        with contextlib.suppress(ValueError):                        # else refused by name below
            values["logit_bias"] = {int(key): bias for key, bias in values["logit_bias"].items()}
    return SamplingParams(**values, **more)


class Prompts:
    """Makes token ids of what a client gives as a prompt: a string, ids, or a list of either."""

    def __init__(self, encoding, config):
        self.encoding, self.config = encoding, config
        self.longest_token = max(map(len, encoding.token_byte_values()))   # bytes

    def parse(self, prompt):
        """-> a list of id lists. A missing prompt is the start of a document, as it is to OpenAI."""
        if isinstance(prompt, str):
            return [self.encode(prompt)]
        if not isinstance(prompt, list) or not prompt:
            raise ApiError(400, f"prompt must be a string, token ids, or a list of these, not {shown(prompt)}",
                           "prompt")
        if not isinstance(prompt[0], str | list):
            return [self.check_ids(prompt)]
        return [self.encode(p) if isinstance(p, str) else self.check_ids(p) for p in prompt]

    def encode(self, text):
        """Text to ids. What can't fit is refused by its bytes, before it is tokenized."""
        if not text:
            return [self.config.eos_token_id or 0]
        text = plain(text)
        self.check_length(math.ceil(len(text.encode()) / self.longest_token), "at least ")
        ids = self.encoding.encode_ordinary(text)
        self.check_length(len(ids))
        return ids

    def check_ids(self, ids):
        if not isinstance(ids, list) or not ids:
            raise ApiError(400, f"a prompt must be a string or at least 1 token id, not {shown(ids)}", "prompt")
        self.check_length(len(ids))
        for token in ids:
            check_number("prompt token id", token, Integral, 0, self.config.vocab_size - 1)
        return ids

    def check_length(self, tokens, about=""):
        limit = self.config.n_positions
        if tokens > limit:
            raise ApiError(400, f"the prompt has {about}{tokens} tokens, the model's context is {limit}", "prompt",
                           "context_length_exceeded", prompt_tokens=tokens, max_prompt_tokens=limit)


# ---------------------------------------------------------------------------------------------------
# From token ids to text and log probabilities

def token_name(token):
    """A token as text; one that is no whole character as OpenAI writes it: bytes:\\xe2\\x80."""
    encoding = engine.load_tokenizer()
    if token >= encoding.n_vocab:
        return f"<|{token}|>"
    data = encoding.decode_single_token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Choice:
    """One text of an answer as it grows, in the pieces that a stream sends. Put together they are the whole,
    which is how an answer in one piece is made: both say the same."""

    def __init__(self, engine_request, index, echo=False, scores=None):
        """scores: the request that scored the prompt, where its log probabilities are wanted."""
        self.request, self.index, self.echo, self.scores = engine_request, index, echo, scores
        self.stream = TextStream(engine_request.params.stop, engine_request.params.min_tokens)
        self.sent = self.fed = 0                                     # characters, tokens
        self.pending = []                                            # tokens of which nothing was sent yet

    def feed(self, token):
        """The piece that one more token makes certain, or None."""
        text = self._prompt_text()
        offset = self.sent + len(text) + len(self.stream.held)
        if self.request.params.logprobs is not None:
            self.pending.append((offset, self.request.logprobs[self.fed]))
        self.fed += 1
        text += self.stream.feed(token)
        return self._piece(text) if text else None

    def finish(self):
        """The last piece, with the finish reason."""
        text = self._prompt_text()
        return self._piece(text + self.stream.finish(), self.request.finish_reason)

    def _prompt_text(self):
        """The prompt, once, before anything else; its tokens are pending then."""
        if not self.echo:
            return ""
        self.echo, text, stream = False, "", TextStream()
        for n, token in enumerate(self.request.prompt_ids):
            if self.scores:
                self.pending.append((len(text), self.scores.prompt_logprobs[n - 1] if n else token))
            text += stream.feed(token)
        return text + stream.finish()

    def _piece(self, text, finish_reason=None):
        self.sent += len(text)
        # A stop string ends the text: what comes after it is no token of the answer.
        tokens = [p for p in self.pending if not self.stream.stopped or p[0] < self.sent]
        self.pending = []
        wanted = self.scores or self.request.params.logprobs is not None
        return {"index": self.index, "text": text, "logprobs": logprobs_object(tokens) if wanted else None,
                "finish_reason": finish_reason}


def logprobs_object(tokens):
    """OpenAI's: (offset in the choice's text, TokenLogprobs) of each token; a bare id has no score, being the first."""
    out = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for offset, scored in tokens:
        first = isinstance(scored, int)
        out["tokens"].append(token_name(scored if first else scored.token))
        out["token_logprobs"].append(None if first else scored.logprob)
        top = None if first else scored.top | {scored.token: scored.logprob}
        out["top_logprobs"].append(top and {token_name(token): logprob for token, logprob in top.items()})
        out["text_offset"].append(offset)
    return out


def join_pieces(pieces):
    """The pieces of one choice as one."""
    whole = dict(pieces[-1], text="".join(piece["text"] for piece in pieces))
    if whole["logprobs"]:
        whole["logprobs"] = {key: [value for piece in pieces for value in piece["logprobs"][key]]
                             for key in whole["logprobs"]}
    return whole


# ---------------------------------------------------------------------------------------------------
# One HTTP request, and its requests in the engine

class ClientGone(Exception):
    """Nobody reads the answer any more."""


class Inbox:
    """An output_queue that passes all on to one queue, with the name of where it came from."""

    def __init__(self, shared, index):
        self.shared, self.index = shared, index

    def put(self, token):
        self.shared.put((self.index, token))


class Job:
    """Requests that are submitted together, read from one queue and cancelled together.

    The queue holds token ids and no more than the context has room for, so what a slow reader leaves is bounded.
    """

    def __init__(self, scheduler, requests):
        """Submits them. Raises ApiError: the queue is full, the pool too small, the engine not alive."""
        self.scheduler, self.requests, self.queue = scheduler, requests, queue.SimpleQueue()
        self.id, self.socket = "cmpl-" + secrets.token_hex(12), request.environ.get("werkzeug.socket")
        for n, r in enumerate(requests):
            r.output_queue, r.id = Inbox(self.queue, n), f"{self.id}-{n}"
        try:
            if not scheduler.alive:
                raise ApiError(503, "the engine is not running")
            scheduler.submit(*requests)
        except QueueFull as err:
            raise ApiError(429, str(err), code="queue_full", headers={"Retry-After": "1"}) from None
        # Whatever becomes of the answer, the requests end with it: the server calls this when all else has failed.
        request.environ.setdefault("demo.at_end", []).append(self.cancel)

    def cancel(self):
        for r in self.requests:
            if not r.finish_reason:
                self.scheduler.cancel(r)

    def events(self):
        """Yields (index, token id), (index, None) at each request's end, and None after a while without any.

        Raises ClientGone soon after the client closed its end, whether it was streamed to or not.
        """
        left, quiet = len(self.requests), time.monotonic()
        try:
            with watch(self.socket) as gone:
                while left:
                    try:
                        event = self.queue.get(timeout=WATCH_SECONDS)
                    except queue.Empty:
                        event = None
                    if gone():
                        raise ClientGone
                    if event or time.monotonic() - quiet > HEARTBEAT_SECONDS:
                        quiet = time.monotonic()
                        left -= event is not None and event[1] is None
                        yield event
        finally:
            self.cancel()

    def failure(self, index):
        """The ApiError for a request that did not end well, else None."""
        r = self.requests[index]
        if r.finish_reason == "abort":
            return ApiError(503, "the server is shutting down")
        if r.finish_reason == "error":
            return ApiError(500, f"the engine failed on this request: {engine.first_line(r.error)}")
        return None


@contextlib.contextmanager
def watch(connection):
    """A function that tells whether the peer of a socket has closed it; of no socket it tells nothing."""
    if connection is None:
        yield lambda: False
        return
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)

        def gone():
            try:
                return bool(selector.select(0)) and not connection.recv(1, socket.MSG_PEEK)
            except OSError:
                return True

        yield gone


def event_stream(events):
    """An answer of server-sent events, each of which leaves at once, through proxies too."""
    headers = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
    return Response(until_gone(events), mimetype="text/event-stream", headers=headers)


def until_gone(events):
    yield ": accepted\n\n"                                           # so the headers leave while it is queued
    with contextlib.suppress(ClientGone):
        yield from events


def sse(data, event=None):
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {data if isinstance(data, str) else json.dumps(data, allow_nan=False)}\n\n"


# ---------------------------------------------------------------------------------------------------
# POST /v1/completions, POST /stream

class Completion:
    """OpenAI's completions API over a Job. Reference: https://platform.openai.com/docs/api-reference/completions"""

    def __init__(self, server):
        body = read_body(COMPLETION_FIELDS)
        self.model, self.stream = server.name, typed(body, "stream", bool, False)
        if typed(body, "model", str, self.model) != self.model:
            raise ApiError(404, f"the model is {self.model}, there is no {shown(body['model'])}", "model",
                           "model_not_found")
        typed(body, "user", str)
        self.include_usage = self._include_usage(body)
        echo, n = typed(body, "echo", bool, False), body.get("n", 1)
        check_number("n", n, Integral, 1, MAX_N)
        self._check_count(body.get("prompt"), n, server.scheduler.max_waiting)
        wanted = body.get("logprobs")
        params = sampling_params(body, logprobs=wanted, prompt_logprobs=wanted if echo else None)
        groups = [Request.samples(ids, params, n) for ids in server.prompts.parse(body.get("prompt", ""))]
        self.choices, scored = [], echo and wanted is not None
        for group in groups:
            for r in group:
                self.choices.append(Choice(r, len(self.choices), echo, group[0] if scored else None))
        self.prompts = [group[0] for group in groups]
        self.job = Job(server.scheduler, [choice.request for choice in self.choices])
        self.created = int(time.time())

    def _include_usage(self, body):
        options = typed(body, "stream_options", dict, {})
        if options and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", "stream_options")
        for name in options:
            if name != "include_usage":
                raise ApiError(400, f"stream_options.{name[:100]} is not supported", "stream_options")
        return typed(options, "include_usage", bool, False)

    def _check_count(self, prompt, n, limit):
        """Before thousands of prompts are tokenized in vain."""
        many = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
        if many * n > limit:
            raise ApiError(400, f"{many} prompts times n={n} are {many * n} requests; the queue holds {limit}",
                           "prompt")

    def answer(self):
        return event_stream(self.events()) if self.stream else self.whole()

    def body(self, choices, **more):
        return {"id": self.job.id, "object": "text_completion", "created": self.created, "model": self.model,
                "choices": choices} | more

    def usage(self):
        prompt = sum(len(r.prompt_ids) for r in self.prompts)
        output = sum(len(r.output_ids) for r in self.job.requests)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
                "prompt_tokens_details": {"cached_tokens": sum(r.cached_tokens for r in self.prompts)}}

    def pieces(self):
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

    def events(self):
        usage = {"usage": None} if self.include_usage else {}
        try:
            for piece in self.pieces():
                yield ": waiting\n\n" if piece is None else sse(self.body([piece], **usage))
            if self.include_usage:
                yield sse(self.body([], usage=self.usage()))
        except ApiError as err:
            yield sse(err.body)
        yield sse("[DONE]")

    def whole(self):
        found = collections.defaultdict(list)
        for piece in self.pieces():
            if piece:
                found[piece["index"]].append(piece)
        return json_response(self.body([join_pieces(found[n]) for n in sorted(found)], usage=self.usage()))


def page_stream(server):
    """What the page reads: for each request an event `start`, its `token`s (with the five likeliest alternatives),
    then `done` or `error`. One connection carries them all, since browsers open no more than six to a server."""
    body = read_body([*STREAM_FIELDS, "requests"])
    bodies = typed(body, "requests", list, [body])
    if not bodies or ("requests" in body and len(body) > 1):
        raise ApiError(400, "requests must be at least 1 object, without other fields beside it", "requests")
    asked = []
    for one in bodies:
        one = known_fields(one, STREAM_FIELDS)
        params = sampling_params(one, logprobs=5)
        asked.append(Request(server.prompts.encode(typed(one, "prompt", str, "")), params))
    job = Job(server.scheduler, asked)
    return event_stream(page_events(job, [Choice(r, n) for n, r in enumerate(asked)], server.scheduler.model.config))


def page_events(job, choices, config):
    for n, r in enumerate(job.requests):
        limit = engine.output_limit(r, config)
        yield sse({"index": n, "id": r.id, "prompt_tokens": len(r.prompt_ids), "max_tokens": limit}, "start")
    for event in job.events():
        if event is None:
            yield ": waiting\n\n"
            continue
        index, token = event
        choice, r = choices[index], job.requests[index]
        if token is not None:
            yield sse({"index": index} | token_event(r, choice.fed, choice.feed(token)), "token")
        elif failure := job.failure(index):
            yield sse({"index": index} | failure.body, "error")
        else:
            yield sse({"index": index, "text": choice.finish()["text"]} | summary(r), "done")


def token_event(r, n, piece):
    """The n-th output token; times in seconds since the request arrived."""
    scored = r.logprobs[n]
    return {"text": piece["text"] if piece else "", "id": scored.token, "token": token_name(scored.token),
            "logprob": scored.logprob, "top": [[token_name(t), logprob] for t, logprob in scored.top.items()],
            "seconds": r.token_times[n] - r.arrival_time, "cached_tokens": r.cached_tokens}


def summary(r):
    """Counts and times (seconds) of a request that has ended."""
    times = r.token_times
    return {"finish_reason": r.finish_reason, "prompt_tokens": len(r.prompt_ids), "cached_tokens": r.cached_tokens,
            "output_tokens": len(r.output_ids), "preemptions": r.preemptions,
            "queued": (r.scheduled_time or r.finish_time) - r.arrival_time,
            "first_token": times[0] - r.arrival_time if times else None,
            "total": r.finish_time - r.arrival_time,
            "tokens_per_second": (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None}


# ---------------------------------------------------------------------------------------------------
# Metrics and the view of the engine

class Metrics:
    """Prometheus metrics under vLLM's names and with its meanings: times count from a request's arrival."""

    SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160)
    TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)

    def __init__(self, scheduler, name):
        self.scheduler, self.labels, self.registry = scheduler, {"model_name": name, "engine": "0"}, CollectorRegistry()
        self.success = Counter("vllm:request_success", "Requests by how they ended.", [*self.labels, "finished_reason"],
                               registry=self.registry)
        for attribute, name, text, buckets in (
                ("ttft", "time_to_first_token_seconds", "Arrival to first token.", self.SECONDS),
                ("itl", "inter_token_latency_seconds", "Each gap between two tokens.", self.SECONDS),
                ("tpot", "request_time_per_output_token_seconds", "Mean of a request's gaps.", self.SECONDS),
                ("e2e", "e2e_request_latency_seconds", "Arrival to end.", self.SECONDS),
                ("queued", "request_queue_time_seconds", "Arrival to admission.", self.SECONDS),
                ("prefill", "request_prefill_time_seconds", "Admission to first token.", self.SECONDS),
                ("decode", "request_decode_time_seconds", "First token to last.", self.SECONDS),
                ("inference", "request_inference_time_seconds", "Admission to last token.", self.SECONDS),
                ("prompt", "request_prompt_tokens", "Prompt tokens of a request.", self.TOKENS),
                ("output", "request_generation_tokens", "Tokens that a request made.", self.TOKENS),
                ("max_tokens", "request_params_max_tokens", "max_tokens of a request.", self.TOKENS)):
            histogram = Histogram("vllm:" + name, text, self.labels, buckets=buckets, registry=self.registry)
            setattr(self, attribute, histogram.labels(**self.labels))
        self.registry.register(self)

    def observe(self, r):
        """A request has ended."""
        self.success.labels(**self.labels, finished_reason=r.finish_reason).inc()
        self.e2e.observe(r.finish_time - r.arrival_time)
        self.prompt.observe(len(r.prompt_ids))
        self.output.observe(len(r.output_ids))
        self.max_tokens.observe(engine.output_limit(r, self.scheduler.model.config))
        if r.scheduled_time is not None:
            self.queued.observe(r.scheduled_time - r.arrival_time)
        if times := r.token_times:
            self.ttft.observe(times[0] - r.arrival_time)
            self.prefill.observe(times[0] - r.scheduled_time)
            self.decode.observe(times[-1] - times[0])
            self.inference.observe(times[-1] - r.scheduled_time)
            for gap in np.diff(times):
                self.itl.observe(gap)
            if len(times) > 1:
                self.tpot.observe((times[-1] - times[0]) / (len(times) - 1))

    def collect(self):
        """What the scheduler counts itself, read when Prometheus asks."""
        stats, labels = self.scheduler.stats(), list(self.labels)
        pages = self.scheduler.cache.max_pages
        for kind, name, text, value in (
                (GaugeMetricFamily, "num_requests_running", "Requests in slots.", stats["running"]),
                (GaugeMetricFamily, "num_requests_waiting", "Requests in the queue.", stats["waiting"]),
                (GaugeMetricFamily, "kv_cache_usage_perc", "Share of pages in use, 1 is all.",
                 stats["pages_used"] / pages),
                (CounterMetricFamily, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
                 stats["prompt_tokens"] if self.scheduler.prefix_cache else 0),
                (CounterMetricFamily, "prefix_cache_hits", "Prompt tokens found there.", stats["cached_tokens"]),
                (CounterMetricFamily, "num_preemptions", "Requests that gave up their pages.", stats["preemptions"]),
                (CounterMetricFamily, "prompt_tokens", "Prompt tokens of admitted requests.", stats["prompt_tokens"]),
                (CounterMetricFamily, "generation_tokens", "Tokens generated.", stats["output_tokens"])):
            family = kind("vllm:" + name, text, labels=labels)
            family.add_metric(list(self.labels.values()), value)
            yield family


class Monitor:
    """A line a request, a line every 10 seconds while busy, and the last minute second by second."""

    LINE_SECONDS = 10

    def __init__(self, scheduler):
        self.scheduler, self.before, self.line_due, self.line_stats = scheduler, scheduler.stats(), 0, None
        self.history = collections.deque(maxlen=HISTORY_SECONDS)
        # The thread ends with the scheduler: it holds no reference to either.
        threading.Thread(target=self._run, args=(weakref.ref(self),), name="monitor", daemon=True).start()

    @staticmethod
    def _run(reference):
        while True:
            time.sleep(1)
            if (monitor := reference()) is None:
                return
            monitor.tick()
            del monitor

    def tick(self):
        """Called every second."""
        now = self.scheduler.stats()
        self.history.append({"tokens": now["output_tokens"] - self.before["output_tokens"],
                             "running": now["running"], "waiting": now["waiting"]})
        self.before, busy = now, now["running"] + now["waiting"]
        if busy and self.line_stats is None:
            self.line_stats, self.line_due = now, time.monotonic() + self.LINE_SECONDS
        elif self.line_stats and time.monotonic() >= self.line_due:
            seconds = time.monotonic() - self.line_due + self.LINE_SECONDS
            rate = (now["output_tokens"] - self.line_stats["output_tokens"]) / seconds
            log.info("%d running, %d waiting, %.1f tokens/s, pages: %d used, %d cached, %d free", now["running"],
                     now["waiting"], rate, now["pages_used"], now["pages_cached"], now["pages_free"])
            self.line_stats, self.line_due = (now if busy else None), time.monotonic() + self.LINE_SECONDS

    def request_line(self, r):
        s = summary(r)
        first = "" if s["first_token"] is None else f"first token {s['first_token']:.3f} s, "
        rate = "" if s["tokens_per_second"] is None else f"{s['tokens_per_second']:.1f} tokens/s, "
        log.info("%s: %d prompt tokens (%d cached), %d new, queued %.3f s, %s%stotal %.3f s, %s", r.id,
                 s["prompt_tokens"], s["cached_tokens"], s["output_tokens"], s["queued"], first, rate, s["total"],
                 s["finish_reason"])


def request_view(scheduler, r, state, now):
    return {"id": r.id, "state": state, "prompt_tokens": len(r.prompt_ids), "cached_tokens": r.cached_tokens,
            "stored_tokens": r.table.length if r.table else 0, "output_tokens": len(r.output_ids),
            "max_tokens": engine.output_limit(r, scheduler.model.config), "preemptions": r.preemptions,
            "seconds": now - r.arrival_time}


def engine_view(scheduler):
    """What the page draws: slots, queue, and of each page who holds it (a slot, -1 nobody, -2 the prefix cache)."""
    cache, now = scheduler.cache, time.monotonic()
    with scheduler.changed, cache.lock:
        owner = np.where(cache.is_free, -1, -2)
        slots = []
        for n, r in enumerate(scheduler.slots):
            if r is not None:
                owner[r.table.pages] = n
            state = r and ("decoding" if r.table.length >= len(r.ids) - 1 else "prefilling")
            slots.append(request_view(scheduler, r, state, now) if r else None)
        waiting = [request_view(scheduler, r, "preempted" if r.preemptions else "queued", now)
                   for r in scheduler.waiting]
        shared = np.flatnonzero(cache.references > 1)
        return {"slots": slots, "waiting": waiting, "max_waiting": scheduler.max_waiting,
                "pages": {"size": cache.page_size, "owner": owner.tolist(), "shared": shared.tolist(),
                          "free": cache.free_pages, "used": cache.used_pages, "cached": cache.cached_pages}}


# ---------------------------------------------------------------------------------------------------
# The app

class ModelServer:
    """What the routes share: a scheduler, a tokenizer, and how the model is called outside."""

    def __init__(self, scheduler, encoding, note):
        self.scheduler, self.encoding, self.note, self.created = scheduler, encoding, note, int(time.time())
        model = scheduler.model
        self.prompts, weight = Prompts(encoding, model.config), model.wte.weight
        self.name = Path(model.name).resolve().name if Path(model.name).is_dir() else model.name or "gpt2"
        self.device, self.dtype = weight.device.type, str(weight.dtype).removeprefix("torch.")
        self.metrics, self.monitor = Metrics(scheduler, self.name), Monitor(scheduler)
        scheduler.on_finish = self.ended

    def ended(self, r):
        self.metrics.observe(r)
        self.monitor.request_line(r)

    def models(self):
        return {"object": "list", "data": [self.model_object()]}

    def model_object(self):
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "local",
                "max_model_len": self.scheduler.model.config.n_positions}

    def slots(self):
        return {"model": self.name, "device": self.device, "dtype": self.dtype, "note": self.note,
                "context": self.scheduler.model.config.n_positions, "history": list(self.monitor.history)
                } | engine_view(self.scheduler)

    def tokenize(self):
        body = read_body(["model", "prompt", "add_special_tokens", "return_token_strs"])
        text = typed(body, "prompt", str)
        if text is None:
            raise ApiError(400, "prompt is missing", "prompt")
        ids = self.encoding.encode_ordinary(plain(text))
        strings = {"token_strs": [token_name(t) for t in ids]} if typed(body, "return_token_strs", bool) else {}
        return {"count": len(ids), "max_model_len": self.scheduler.model.config.n_positions, "tokens": ids} | strings

    def detokenize(self):
        body = read_body(["model", "tokens"])
        if "tokens" not in body:
            raise ApiError(400, "tokens is missing", "tokens")
        for token in typed(body, "tokens", list):
            check_number("a token id of tokens", token, Integral, 0, self.scheduler.model.config.vocab_size - 1)
        return {"prompt": "".join(engine.stream_text(body["tokens"]))}

    def health(self):
        if not self.scheduler.alive:
            raise ApiError(503, "the engine is not running")
        return {"status": "ok"}


def create_app(scheduler, encoding, api_key=None, cors_origins=(), note=""):
    """The Flask app over a scheduler that was started. note: a line for the page's header."""
    app, server = Flask(__name__, static_folder=None), ModelServer(scheduler, encoding, note)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY
    handle_errors(app)
    open_routes = "page", "health"

    @app.before_request
    def check_key():
        given = request.headers.get("Authorization", "")
        if api_key and request.method != "OPTIONS" and request.endpoint not in open_routes and not hmac.compare_digest(
                given.encode("latin-1", "replace"), f"Bearer {api_key}".encode()):
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")

    @app.after_request
    def allow_origin(response):
        origin = request.headers.get("Origin")
        if origin and (origin in cors_origins or "*" in cors_origins):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Allow-Headers"] = "Authorization, Content-Type"
            response.headers["Access-Control-Allow-Methods"] = "GET, POST"
            response.vary.add("Origin")
        return response

    @app.get("/")
    def page():
        response = send_file(engine.ASSETS / "index.html", max_age=0)
        response.headers["Content-Security-Policy"] = (
            "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; "
            "script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
        return response

    app.post("/v1/completions")(lambda: Completion(server).answer())
    app.post("/stream", endpoint="stream")(lambda: page_stream(server))

    @app.get("/v1/models/<path:name>")
    def model(name):
        if name != server.name:
            raise ApiError(404, f"the model is {server.name}, there is no {shown(name)}", "model", "model_not_found")
        return json_response(server.model_object())

    for rule, view, method in (("/v1/models", server.models, "GET"), ("/health", server.health, "GET"),
                               ("/slots", server.slots, "GET"), ("/tokenize", server.tokenize, "POST"),
                               ("/detokenize", server.detokenize, "POST")):
        app.add_url_rule(rule, view.__name__, lambda view=view: json_response(view()), methods=[method])

    @app.get("/metrics")
    def metrics():
        return Response(generate_latest(server.metrics.registry), content_type=CONTENT_TYPE_LATEST)

    return app


def handle_errors(app):
    @app.errorhandler(ApiError)
    def api_error(err):
        return err.response()

    @app.errorhandler(UserError)
    def user_error(err):
        return ApiError.of(err).response()

    @app.errorhandler(ClientGone)
    def client_gone(err):
        return ApiError(499, "the client closed the connection").response()

    @app.errorhandler(HTTPException)
    def http_error(err):
        message = {404: f"there is no {shown(request.path)}", 405: f"{request.path} does not take {request.method}",
                   413: f"the body has more than {MAX_BODY} bytes"}.get(err.code, err.description)
        headers = {name: value for name, value in err.get_headers() if name in ("Allow", "Location")}
        return ApiError(err.code, message, headers=headers).response()

    @app.errorhandler(Exception)
    def fault(err):
        log.exception("a fault of the server's, not of the request")
        return ApiError(500, "a fault of the server's").response()


# ---------------------------------------------------------------------------------------------------
# The WSGI server: werkzeug's, a thread a connection. A stream lasts as long as its text, so a pool of threads
# (waitress, gunicorn) would be used up by as many streams; a thread that waits costs little. It also hands out
# the socket, which is watched for clients that go away, and comes with Flask.

class Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"                                    # streams in chunks: a broken one is noticed
    timeout = STALLED_SECONDS
    wbufsize = 2**16                                                 # an event is one packet ...
    disable_nagle_algorithm = True                                   # ... which leaves at once
    error_content_type = "application/json"
    error_message_format = ('{"error": {"message": "%(message)s", "type": "invalid_request_error", "param": null, '
                            '"code": null}}')

    def run_wsgi(self):
        self.environ = {}
        try:
            urlsplit(self.path)
        except ValueError:
            return self.send_error(400, "Bad request target")
        try:
            super().run_wsgi()
        finally:
            for end in self.environ.get("demo.at_end", ()):
                end()

    def finish(self):
        with contextlib.suppress(OSError):                           # the client has gone
            super().finish()

    def log_request(self, code="-", size="-"):
        """The engine's requests are logged instead."""

    def log_error(self, format, *args):
        """What is wrong with a request is told to its client."""


class Server(ThreadedWSGIServer):
    """Listens on a socket that is bound already. Knows its open connections, to bound and to await them."""

    daemon_threads = True

    def __init__(self, listener, app):
        host, port = listener.getsockname()[:2]
        super().__init__(host, port, app, handler=Handler, fd=listener.fileno())
        listener.close()                                             # the server has a copy of its own
        self.open, self.closed = 0, threading.Condition()

    def process_request(self, connection, address):
        with self.closed:
            if self.open >= MAX_CONNECTIONS:
                return self.shutdown_request(connection)
            self.open += 1
        try:
            super().process_request(connection, address)
        except RuntimeError:  # no more threads
            self._count_closed()
            raise

    def process_request_thread(self, connection, address):
        try:
            super().process_request_thread(connection, address)
        finally:
            self._count_closed()

    def _count_closed(self):
        with self.closed:
            self.open -= 1
            self.closed.notify_all()

    def wait_closed(self, seconds):
        with self.closed:
            return self.closed.wait_for(lambda: self.open == 0, seconds)


def listen(host, port):
    """A listening socket. Raises UserError where the address can't be had."""
    check_number("--port", port, Integral, 0, 65535)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                                    backlog=256)
    except OSError as err:
        raise UserError(f"{host} port {port} can't be listened on: {err.strerror or err}") from None


def run(server, scheduler):
    """Serves until SIGINT or SIGTERM. Then open streams are told, and have 3 seconds to read it."""
    stop = threading.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: stop.set())
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

def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="GPT-2 in the browser and behind OpenAI's completions API.")
    add = parser.add_argument
    add("--model", default="auto", help="gpt2 or another Hugging Face name, a folder, tiny, random, "
                                        "auto (gpt2, or tiny where it can't be had)")
    add("--device", default="cpu", help="cpu (default), cuda")
    add("--dtype", default="float32", choices=engine.DTYPES)
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


def main(argv=None):
    args = parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO, stream=sys.stderr)
    try:
        listener = listen(args.host, args.port)
        model = engine.load_model(args.model, engine.GPT2Paged, args.dtype, args.device, max_pages=args.pages)
        scheduler = engine.ContinuousBatchingScheduler(model, args.max_batch_size, args.max_waiting,
                                                       prefix_cache=not args.no_prefix_cache)
        stood_in = args.model == "auto" and model.name != "gpt2"
        note = f"gpt2 could not be had; the sample model {model.name} stands in." if stood_in else ""
        for _ in engine.generate(model, [0, 0], SamplingParams(max_tokens=2)):  # what is compiled or packed is, now
            pass
        scheduler.start()
        server = Server(listener, create_app(scheduler, engine.load_tokenizer(), args.api_key, args.cors_origin, note))
    except UserError as err:
        raise SystemExit(f"demo.py: {err}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    host = "localhost" if args.host in ("127.0.0.1", "0.0.0.0", "::", "::1") else args.host
    print(f"GPT-2 ({model.name}) on http://{host}:{server.port}  Ctrl-C ends it", flush=True)
    run(server, scheduler)


if __name__ == "__main__":
    main()
