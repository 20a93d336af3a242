"""The server as clients see it: the openai package, Prometheus' parser, plain sockets, and clients that misbehave."""

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai
import pytest
import torch
from conftest import ENC, IDS, PROMPT, Running, make_oracle, wait_until, with_pages
from prometheus_client.parser import text_string_to_metric_families

import demo
import engine

LONG = ENC.encode_ordinary("Today I went to the market with my sister and we bought apples. " * 12)


@pytest.fixture(scope="module")
def server(tiny):
    with Running(with_pages(tiny)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def noisy_model():
    """Random weights over GPT-2's whole vocabulary: at temperature 2 every text is full of broken UTF-8."""
    oracle = make_oracle(vocab_size=50257, n_embd=16, n_layer=1, n_head=2, n_positions=128, eos_token_id=50256)
    model = engine.GPT2Paged(engine.GPT2Config(vocab_size=50257, n_embd=16, n_layer=1, n_head=2, n_positions=128))
    state = {name.removeprefix("transformer."): tensor for name, tensor in oracle.state_dict().items()}
    return engine.with_weights(model, {name: tensor.t().contiguous() if engine.CONV1D.fullmatch(name) else tensor
                                       for name, tensor in state.items() if not engine.BUFFERS.fullmatch(name)})


# --- the openai package

def test_openai_client_completes(client, tiny):
    answer = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=12, user="somebody")
    expected = list(engine.generate(tiny, IDS, engine.SamplingParams(temperature=0, max_tokens=12)))
    assert answer.choices[0].text == ENC.decode(expected)
    assert (answer.object, answer.model, answer.choices[0].finish_reason) == ("text_completion", "tiny", "length")
    assert answer.id.startswith("cmpl-") and abs(answer.created - time.time()) < 60
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(IDS), 12, len(IDS) + 12)


def test_openai_client_streams(client):
    whole = client.completions.create(model="tiny", prompt=PROMPT, temperature=1, seed=3, max_tokens=30)
    chunks = list(client.completions.create(model="tiny", prompt=PROMPT, temperature=1, seed=3, max_tokens=30,
                                            stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert len({c.id for c in chunks}) == 1 and len(chunks) > 20
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 30
    assert all(c.usage is None for c in chunks[:-1])


def test_openai_client_gets_n_texts_of_several_prompts(client):
    ask = dict(model="tiny", prompt=[PROMPT, "Once upon a time"], temperature=1, seed=7, max_tokens=8, n=3)
    answer = client.completions.create(**ask)
    assert [c.index for c in answer.choices] == list(range(6))
    assert len({c.text for c in answer.choices}) == 6
    assert answer.usage.prompt_tokens == len(IDS) + 4 and answer.usage.completion_tokens == 48
    texts = [""] * 6
    for chunk in client.completions.create(**ask, stream=True):
        assert len(chunk.choices) == 1 and chunk.usage is None
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in answer.choices]
    alone = client.completions.create(model="tiny", prompt="Once upon a time", temperature=1, seed=9, max_tokens=8)
    assert alone.choices[0].text == texts[5]                         # seed, seed + 1, seed + 2 for each prompt


def test_openai_client_scores_a_prompt(client, tiny_models):
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=0, echo=True, logprobs=2)
    choice, scores = answer.choices[0], torch.log_softmax(tiny_models[engine.GPT2](torch.tensor([IDS]))[0], dim=-1)
    logprobs = choice.logprobs
    assert choice.text == PROMPT and answer.usage.completion_tokens == 0 and choice.finish_reason == "length"
    assert logprobs.tokens == [ENC.decode([token]) for token in IDS]
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(scores[range(len(IDS) - 1), IDS[1:]].tolist(), abs=1e-3)
    for row, token, top in zip(scores, logprobs.tokens[1:], logprobs.top_logprobs[1:]):
        best = [ENC.decode([t]) for t in row.topk(2).indices]
        assert list(top)[:2] == best and set(top) == {*best, token}
    assert all(PROMPT[at:].startswith(token) for at, token in zip(logprobs.text_offset, logprobs.tokens))


def test_an_end_of_text_is_scored_too(server):
    """lm-eval asks for one token more than it scores, and leaves the last out: there must always be one."""
    answer = server.complete(prompt=PROMPT, max_tokens=1, echo=True, logprobs=1, logit_bias={"50256": 100})
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "stop")
    assert choice["logprobs"]["tokens"] == [*map(ENC.decode, ([token] for token in IDS)), "<|endoftext|>"]
    assert choice["logprobs"]["text_offset"][-1] == len(PROMPT) and choice["logprobs"]["token_logprobs"][-1] < 0
    *events, _ = server.events(prompt=PROMPT, max_tokens=1, echo=True, logprobs=1, stream=True,
                               logit_bias={"50256": 100})
    assert same(demo.join_pieces([e["choices"][0] for e in events]), choice)


ERRORS = [
    (dict(prompt=PROMPT, temperature=-1), openai.BadRequestError, "temperature", "must be"),
    (dict(prompt=[50257]), openai.BadRequestError, "prompt", "0 to 50256"),
    (dict(prompt=PROMPT, extra_body={"best_of": 2}), openai.BadRequestError, "best_of", "not supported"),
    (dict(prompt=PROMPT, suffix="x"), openai.BadRequestError, "suffix", "not supported"),
    (dict(prompt=PROMPT, extra_body={"temprature": 2}), openai.BadRequestError, "temprature", "no field"),
    (dict(prompt=PROMPT, model="gpt-4"), openai.NotFoundError, "model", "gpt-4"),
]


@pytest.mark.parametrize("ask, kind, param, words", ERRORS)
def test_openai_client_maps_errors(client, ask, kind, param, words):
    with pytest.raises(kind) as caught:
        client.completions.create(**({"model": "tiny"} | ask))
    assert caught.value.param == param and words in caught.value.body["message"]
    assert set(caught.value.body) == {"message", "type", "param", "code"}


def test_openai_client_lists_models(client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


# --- shapes

def test_prompt_in_all_its_forms(server):
    def texts(prompt):
        return [c["text"] for c in server.complete(prompt=prompt, max_tokens=5)["choices"]]

    one = texts(PROMPT)
    assert texts([PROMPT]) == texts(IDS) == texts([IDS]) == one
    assert texts([PROMPT, "Once"]) == texts([IDS, ENC.encode_ordinary("Once")]) == one + texts("Once")
    assert texts(None) == texts("") == texts([50256])                # the start of a document
    assert texts("<|endoftext|>") != texts([50256])                  # what a user types is text


def test_extra_fields_reach_the_sampler(server):
    free = server.complete(max_tokens=30, temperature=1.5, seed=1)["choices"][0]["text"]
    for field in (dict(top_k=1), dict(min_p=1.0), dict(top_p=1e-6), dict(logit_bias={str(IDS[0]): 100})):
        assert server.complete(max_tokens=30, temperature=1.5, seed=1, **field)["choices"][0]["text"] != free
    plain = server.complete(max_tokens=40)["choices"][0]["text"]
    for field in (dict(repetition_penalty=1.5), dict(presence_penalty=2), dict(frequency_penalty=2)):
        assert server.complete(max_tokens=40, **field)["choices"][0]["text"] != plain
    eos = {"50256": 100}
    assert server.complete(max_tokens=9, logit_bias=eos)["usage"]["completion_tokens"] == 0
    assert server.complete(max_tokens=9, logit_bias=eos, min_tokens=4)["usage"]["completion_tokens"] == 4
    assert server.complete(max_tokens=9, logit_bias=eos, ignore_eos=True)["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("stop", [" the", ["zzz", " the"], ["e", "h"]])
def test_stop_strings(server, stop):
    free = server.complete(max_tokens=40)["choices"][0]["text"]
    end = min(free.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in free)
    choice = server.complete(max_tokens=40, stop=stop, logprobs=0)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (free[:end], "stop")
    assert all(at < end for at in choice["logprobs"]["text_offset"])
    streamed = [e["choices"][0] for e in server.events(prompt=IDS, temperature=0, max_tokens=40, stop=stop, logprobs=0,
                                                       stream=True)[:-1]]
    assert demo.join_pieces(streamed) == choice


@pytest.mark.parametrize("stream", [True, False])
def test_tokens_behind_a_stop_string_that_overlaps_itself(server, stream):
    """AAB in AAAB: the first A is text, the others were held back and belong to the stop string."""
    a, b = (str(ENC.encode_single_token(letter)) for letter in "AB")
    for seed in range(20):
        ask = dict(prompt="x", max_tokens=12, seed=seed, temperature=1.5, logit_bias={a: 100, b: 100}, stop="AAB",
                   logprobs=0)
        choice = (demo.join_pieces([e["choices"][0] for e in server.events(**ask, stream=True)[:-1]]) if stream
                  else server.complete(**ask)["choices"][0])
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert choice["logprobs"]["text_offset"] == list(range(len(choice["text"])))


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_several_texts_of_a_scored_prompt(server, max_tokens):
    ask = dict(prompt=[PROMPT, "Once upon"], echo=True, logprobs=1, n=3, max_tokens=max_tokens, temperature=1, seed=1)
    choices = server.complete(**ask)["choices"]
    for n, choice in enumerate(choices):
        prompt = IDS if n < 3 else ENC.encode_ordinary("Once upon")
        assert choice["logprobs"]["tokens"][:len(prompt)] == [ENC.decode([token]) for token in prompt]
        assert len(choice["logprobs"]["tokens"]) == len(prompt) + max_tokens
        assert choice["logprobs"]["token_logprobs"][1:len(prompt)] == pytest.approx(
            choices[n // 3 * 3]["logprobs"]["token_logprobs"][1:len(prompt)], abs=1e-3)
    streams = server.events(**ask, stream=True)[:-1]
    for n, choice in enumerate(choices):
        assert same(demo.join_pieces([e["choices"][0] for e in streams if e["choices"][0]["index"] == n]), choice)


def test_usage_says_what_was_cached(server):
    server.complete(prompt=LONG, max_tokens=1)
    usage = server.complete(prompt=LONG, max_tokens=1)["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == (len(LONG) - 1) // 16 * 16


def test_stream_of_the_page(server):
    start, *tokens, done = alone = server.events("/stream", prompt=PROMPT, max_tokens=6, seed=1)
    assert {e["index"] for e in alone} == {0}
    assert start["event"] == "start" and start["prompt_tokens"] == len(IDS) and start["max_tokens"] == 6
    assert [t["event"] for t in tokens] == ["token"] * 6 and all(len(t["top"]) == 5 for t in tokens)
    assert all(t["token"] == demo.token_name(t["id"]) and t["logprob"] <= t["top"][0][1] for t in tokens)
    assert sorted(t["seconds"] for t in tokens) == [t["seconds"] for t in tokens]
    assert "".join(t["text"] for t in tokens) + done["text"] == ENC.decode([t["id"] for t in tokens])
    assert (done["event"], done["finish_reason"], done["output_tokens"]) == ("done", "length", 6)
    assert done["first_token"] == tokens[0]["seconds"]


def test_stream_of_several_requests(server):
    bodies = [dict(prompt=PROMPT, max_tokens=n, seed=n) for n in (9, 3, 1)]
    events = server.events("/stream", requests=bodies)
    for n, body in enumerate(bodies):
        own, alone = [e for e in events if e["index"] == n], server.events("/stream", **body)
        assert [e["event"] for e in own] == ["start"] + ["token"] * body["max_tokens"] + ["done"]
        assert [e.get("id") for e in own[1:]] == [e.get("id") for e in alone[1:]]


def test_tokenize_and_back(server):
    text = "Grüße aus 東京 <|endoftext|> \U0001f600"
    _, _, answer = server.call("/tokenize", {"prompt": text, "return_token_strs": True})
    assert answer["tokens"] == ENC.encode_ordinary(text) and answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 1024 and answer["token_strs"][0] == "Gr"
    assert any(name.startswith("bytes:\\x") for name in answer["token_strs"])
    assert server.call("/detokenize", {"tokens": answer["tokens"]})[2] == {"prompt": text}
    assert server.call("/detokenize", {"tokens": [50256, 5]})[2] == {"prompt": "<|endoftext|>&"}
    assert [server.call("/detokenize", {"tokens": [token]})[0] for token in (50257, True, 1.0)] == [400] * 3


def test_slots_show_every_page_and_request(server):
    with contextlib.closing(server.open_socket({"prompt": LONG, "max_tokens": 400, "n": 6, "ignore_eos": True})):
        def busy():
            view = server.call("/slots")[2]
            return view if all(view["slots"]) and view["pages"]["shared"] else None

        assert wait_until(lambda: bool(busy()))
        view = busy()
        assert [r["state"] in ("prefilling", "decoding") for r in view["slots"]] == [True] * 4
        assert [r["state"] for r in view["waiting"]] == ["queued"] * 2
        assert {n for n in view["pages"]["owner"] if n >= 0} == {0, 1, 2, 3}
        pages = view["pages"]
        assert pages["free"] + pages["used"] + pages["cached"] == len(pages["owner"]) == 256
        assert pages["used"] == sum(n >= 0 for n in pages["owner"])
        assert pages["cached"] == pages["owner"].count(-2)
        assert len(pages["shared"]) == (len(LONG) - 1) // 16
    assert server.idle()


def test_metrics_know_the_tokens_of_a_running_stream(server):
    def count(name):
        text = server.call("/metrics")[2].decode()
        return sum(s.value for f in text_string_to_metric_families(text) for s in f.samples if s.name == name)

    firsts, gaps, ended = (f"vllm:{name}_seconds_count" for name in
                           ("time_to_first_token", "inter_token_latency", "e2e_request_latency"))
    before = count(firsts), count(gaps), count(ended)
    with contextlib.closing(server.open_socket(SLOW | {"stream": True})):
        assert wait_until(lambda: any(len(r.output_ids) > 20 for r in server.scheduler.running))
        assert count(firsts) == before[0] + 1 and count(gaps) >= before[1] + 20 and count(ended) == before[2]
    assert server.idle()
    assert count(firsts) == before[0] + 1 and count(ended) == before[2] + 1


def test_prometheus_reads_the_metrics(tiny):
    with Running(with_pages(tiny), max_batch_size=1) as server:
        server.complete(prompt=LONG, max_tokens=5)
        server.complete(prompt=LONG, max_tokens=3, n=2)
        text = server.call("/metrics")[2].decode()
        found = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples
                 if "le" not in s.labels}
        labels = {tuple(s.labels.get(k) for k in ("model_name", "engine")) for f in text_string_to_metric_families(text)
                  for s in f.samples}
        assert labels == {("tiny", "0")}
        assert found["vllm:prompt_tokens_total"] == 3 * len(LONG) == found["vllm:prefix_cache_queries_total"]
        assert found["vllm:prefix_cache_hits_total"] == 2 * ((len(LONG) - 1) // 16 * 16)
        assert found["vllm:generation_tokens_total"] == 11 and found["vllm:num_preemptions_total"] == 0
        assert found["vllm:request_success_total"] == 3
        assert found["vllm:inter_token_latency_seconds_count"] == 8
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time",
                     "request_decode_time", "request_inference_time", "request_time_per_output_token"):
            assert found[f"vllm:{name}_seconds_count"] == 3
        assert found["vllm:request_generation_tokens_sum"] == 11
        assert found["vllm:num_requests_running"] == found["vllm:kv_cache_usage_perc"] == 0
        # With one slot the third waits for the second: its first token is counted from its arrival.
        total = found["vllm:time_to_first_token_seconds_sum"]
        assert total == pytest.approx(found["vllm:request_queue_time_seconds_sum"]
                                      + found["vllm:request_prefill_time_seconds_sum"])
        assert found["vllm:request_queue_time_seconds_sum"] > 0


# --- pieces and the whole

def same(choice, other):
    """Up to the last digits of log probabilities, which depend on what else ran."""
    numbers = [], []
    parts = [json.loads(json.dumps(c), parse_float=lambda digits, found=found: found.append(float(digits)))
             for c, found in zip((choice, other), numbers)]
    return parts[0] == parts[1] and numbers[0] == pytest.approx(numbers[1], abs=1e-3)


def test_a_stream_says_what_the_whole_says(noisy_model):
    """Broken UTF-8 all the time: 200 seeds at temperature 2, with and without log probabilities and echo."""
    with Running(noisy_model, max_batch_size=16) as server:
        broken, asks = 0, []
        bytes_of_others = {str(ENC.encode_single_token(bytes([byte]))): 9 for byte in range(128, 256)}
        for seed in range(200):
            logprobs = dict(logprobs=seed % 4) if seed % 2 else {}
            asks.append(logprobs | dict(prompt=[seed % 50, 300 + seed, 50256 - seed], temperature=2, seed=seed,
                                        max_tokens=12, logit_bias=bytes_of_others, ignore_eos=True, echo=seed % 3 == 0))
        wholes, streams = {}, {}

        def ask(part):
            for seed in part:
                wholes[seed] = server.complete(**asks[seed])["choices"][0]
                streams[seed] = server.events(**asks[seed], stream=True)

        threads = [threading.Thread(target=ask, args=(range(n, 200, 8),)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for seed in range(200):
            *events, done = streams[seed]
            streamed = demo.join_pieces([e["choices"][0] for e in events])
            assert done == "[DONE]" and same(streamed, wholes[seed])
            broken += "\ufffd" in wholes[seed]["text"]
            if wholes[seed]["logprobs"]:
                tokens, *others = wholes[seed]["logprobs"].values()
                assert len(tokens) == 12 + 3 * asks[seed]["echo"] and all(len(o) == len(tokens) for o in others)
        assert broken > 150


# --- limits

def error_of(answer):
    status, _, body = answer
    assert set(body) == {"error"} and {"message", "type", "param", "code"} <= set(body["error"])
    assert "\n" not in body["error"]["message"] and len(body["error"]["message"]) < 500
    return status, body["error"]


def malformed():
    """(path, keywords of Running.call, status, words of the message)"""
    def ask(status, words, **body):
        return "/v1/completions", dict(body={"prompt": "x", "max_tokens": 1} | body), status, words

    def raw(status, words, data, path="/v1/completions", **headers):
        return path, dict(raw=data, headers={k.replace("_", "-"): v for k, v in headers.items()}), status, words

    yield ask(400, "1025 tokens", prompt=[1] * 1025)
    yield ask(400, "at least 1025 tokens", prompt="a" * (128 * 1024 + 1))
    yield ask(400, "1024", prompt=" word" * 1100)
    yield raw(413, "2097152", b'{"prompt": "' + b"x" * 2**21 + b'"}')
    yield raw(415, "text/plain", b'{"prompt": "x"}', Content_Type="text/plain")
    yield raw(415, "''", b'{"prompt": "x"}', Content_Type="")
    for data in (b"", b"{", b"[1]", b'"x"', b"null", b"\xff\xfe\x00", b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"):
        yield raw(400, "the body", data)
    yield raw(400, "temperature", b'{"prompt": "x", "temperature": NaN}')
    yield raw(400, "temperature", b'{"prompt": "x", "temperature": 1e999}')
    yield raw(400, "no field", b'{"prompt": "x", "\\ud800": 1}')
    for prompt in ([], [[]], {}, 5, True, [None], [True], [1.5], [-1], [2**70], ["x", 5], [[1], "x", None], [[[1]]]):
        yield ask(400, "prompt", prompt=prompt)
    for field, values in dict(
            temperature=[-1, "1", True, [1]], top_p=[0, 1.1, "x"], top_k=[-2, 1.5, "x"], min_p=[-0.1, 2],
            repetition_penalty=[0, -1], presence_penalty=[3], frequency_penalty=[-3], n=[0, 129, 1.5, "2"],
            max_tokens=[-1, 1.5, "5"], min_tokens=[-1, 5], seed=[2**63, 0.5], logprobs=[-1, 21, True],
            stop=[5, [5], [""], "", ["a"] * 5, {}],
            logit_bias=[[], {"x": 1}, {"1_0": 1}, {"-1": 1}, {"50257": 1}, {"5": 101}],
            ignore_eos=["yes"], echo=[1], stream=["true"], user=[5], model=[5],
            stream_options=[[], {"include_usage": True}],
    ).items():
        for value in values:
            yield ask(400, field, **{field: value})
    yield ask(400, "'foo'", stream=True, stream_options={"foo": 1})
    yield ask(400, "include_usage", stream=True, stream_options={"include_usage": 1})
    yield ask(400, "2560 requests", prompt=["x"] * 20, n=128)
    yield "/stream", dict(body={"requests": [{}] * 1025}), 400, "1025 requests"
    yield ask(400, "logit_bias has 1025", logit_bias={str(n): 1 for n in range(1025)})
    yield ask(404, "gpt-5", model="gpt-5")
    yield ask(400, "best_of", best_of=2)
    yield ask(400, "suffix", suffix="x")
    yield "/nope", {}, 404, "/nope"
    yield "/v1//models", {}, 404, "/v1//models"
    yield "/tokenize", dict(body={"prompt": " " * 1_000_000}), 400, "1000000 characters"
    yield "/tokenize", dict(raw=iter([b'{"prompt": "x"}'])), 411, "Content-Length"
    yield "/v1/completions", {}, 405, "GET"
    yield "/slots", dict(body={}), 405, "POST"
    yield "/stream", dict(body={"prompt": ["x"]}), 400, "prompt"
    yield "/stream", dict(body={"prompt": "x", "logprobs": 1}), 400, "logprobs"
    for requests in ([], {}, [5], [{"prompt": 5}], [{"prompt": "x", "n": 2}], [{"requests": []}]):
        yield "/stream", dict(body={"requests": requests}), 400, ""
    yield "/stream", dict(body={"requests": [{"prompt": "x"}], "prompt": "x"}), 400, "requests"
    yield "/tokenize", dict(body={}), 400, "prompt"
    yield "/tokenize", dict(body={"prompt": 5}), 400, "prompt"
    yield "/detokenize", dict(body={"tokens": [-1]}), 400, "tokens"
    yield "/detokenize", dict(body={"tokens": "x"}), 400, "tokens"


@pytest.mark.parametrize("path, how, status, words", malformed(), ids=lambda v: str(v)[:40])
def test_what_is_wrong_is_refused_in_plain_words(server, path, how, status, words):
    found, error = error_of(server.call(path, **how))
    assert found == status and words in error["message"], error


def test_context_limit_names_both_numbers_as_fields(server):
    _, error = error_of(server.call("/v1/completions", {"prompt": [1] * 1030}))
    assert (error["prompt_tokens"], error["max_prompt_tokens"]) == (1030, 1024)
    assert error["code"] == "context_length_exceeded"
    assert server.complete(prompt=[1] * 1024, max_tokens=50)["usage"]["completion_tokens"] == 1


def test_a_huge_prompt_is_not_tokenized(server, monkeypatch):
    monkeypatch.setattr(demo.Prompts, "encoding", None, raising=False)
    prompts = demo.Prompts(ENC, server.scheduler.model.config)
    prompts.encoding = None                                          # whoever tokenizes fails
    with pytest.raises(demo.ApiError):
        prompts.encode("x" * (128 * 1024 + 1))


def test_unusual_but_right(server):
    lone = json.loads('"half a pair: \\ud83d"')
    echoed = server.complete(prompt=lone, echo=True, max_tokens=1)["choices"][0]["text"]
    assert echoed.startswith("half a pair: \ufffd")
    assert server.call("/v1/completions", raw=b'{"prompt": "x", "max_tokens": null, "stop": null}')[0] == 200
    assert server.call("/v1/completions", raw='{"prompt": "x"}'.encode("utf-16"))[0] == 200
    assert server.call("/v1/completions", {"prompt": "x"}, headers={"Content-Type": "application/json; charset=utf-8"}
                       )[0] == 200


def test_requests_below_http(server, capfd):
    """What is no HTTP gets an answer where one is possible, and never a traceback."""
    for data in (b"GARBAGE\r\n\r\n", b'"x"\r\n\r\n', b'GET / HT"P\r\n\r\n',
                 b"GET //[ HTTP/1.1\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\n",
                 b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: x\r\n\r\n",
                 b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: -5\r\n\r\n",
                 b"POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\n"
                 b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
                 b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionError):
                while more := connection.recv(65536):
                    answer += more
        head, _, body = answer.partition(b"\r\n\r\n")
        assert re.match(rb"HTTP/1.1 (4\d\d|505) ", head), answer[:200]
        assert json.loads(body)["error"]["message"]
    assert server.call("/health")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def exchange(server, *parts):
    """Sends each part when an answer to the one before has come -> all that comes until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        answer = b""
        for part in parts:
            connection.sendall(part)
            answer += connection.recv(65536)
        while more := connection.recv(65536):
            answer += more
        return answer


def test_who_waits_for_a_continue_gets_one(server):
    head = b"POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 15\r\n"
    answer = exchange(server, head + b"Expect: 100-continue\r\n\r\n", b'{"prompt": "x"}')
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n") and answer.count(b"100 Con") == 1


def test_http_1_0_knows_no_chunks(server):
    body = json.dumps({"prompt": "x", "max_tokens": 2, "stream": True}).encode()
    answer = exchange(server, b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
                              b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    head, _, events = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head and events.startswith(b": accepted\n\n") and events.endswith(b"data: [DONE]\n\n")


def test_a_refused_body_is_read_to_its_end_and_no_further(server):
    start = time.monotonic()
    answer = exchange(server, b"POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 5000000"
                              b"\r\n\r\n" + b" " * 5_000_000)
    assert answer.startswith(b"HTTP/1.1 413 ") and time.monotonic() - start < 5


def test_more_connections_than_files_are_turned_away(tiny):
    with Running(with_pages(tiny)) as server, contextlib.ExitStack() as stack:
        server.server.most = 5
        for _ in range(5):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        assert wait_until(lambda: len(server.server.handlers) == 5)
        assert server.call("/health")[0] == 503
        stack.close()
        assert wait_until(lambda: server.call("/health")[0] == 200)


def test_full_queue_and_small_pool(tiny):
    with Running(with_pages(tiny, max_pages=8), max_batch_size=1, max_waiting=2) as server:
        status, error = error_of(server.call("/v1/completions", {"prompt": [1] * 100, "max_tokens": 100}))
        assert status == 400 and "199 tokens" in error["message"] and "8 pages" in error["message"]
        blockers, body = [], {"max_tokens": 120, "ignore_eos": True, "temperature": 0}
        for n in range(3):
            blockers.append(server.open_socket(body | {"prompt": [n]}))
            assert wait_until(lambda n=n: server.scheduler.counts["requests"] == n + 1)
            if not n:
                assert wait_until(lambda: server.scheduler.running)
        answer = server.call("/v1/completions", {"prompt": "x"})
        status, error = error_of(answer)
        if server.scheduler.counts["requests"] == 3:                 # else one has ended already
            assert (status, error["code"], error["type"]) == (429, "queue_full", "rate_limit_error")
            assert int(answer[1]["Retry-After"]) > 0
        for blocker in blockers:
            blocker.close()
        assert server.idle()


def test_api_key(tiny):
    with Running(with_pages(tiny), api_key="sésame") as server:
        for path in ("/slots", "/metrics", "/v1/models", "/nope"):
            status, error = error_of(server.call(path))
            assert (status, error["code"]) == (401, "invalid_api_key")
            assert server.call(path)[1]["WWW-Authenticate"] == "Bearer"
        assert error_of(server.call("/v1/completions", {"prompt": "x"}))[0] == 401
        assert server.call("/slots", headers={"Authorization": "Bearer wrong"})[0] == 401
        assert server.call("/slots", headers={"Authorization": "Bearer sésame".encode()})[0] == 200
        assert server.call("/")[0] == server.call("/health")[0] == 200
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_cors_only_when_asked(server, tiny):
    origin = {"Origin": "https://a.example"}
    assert "Access-Control-Allow-Origin" not in server.call("/health", headers=origin)[1]
    with Running(with_pages(tiny), cors_origins=["https://a.example"], api_key="k") as other:
        asked = {"Access-Control-Request-Headers": "authorization, content-type, x-stainless-os"}
        status, headers, _ = other.call("/v1/completions", method="OPTIONS", headers=origin | asked)
        assert status == 200 and headers["Access-Control-Allow-Origin"] == "https://a.example"
        assert "x-stainless-os" in headers["Access-Control-Allow-Headers"]
        refused = other.call("/slots", headers=origin)
        assert refused[0] == 401 and refused[1]["Access-Control-Allow-Origin"] == "https://a.example"
        assert "Access-Control-Allow-Origin" not in other.call("/health", headers={"Origin": "https://b.example"})[1]
    with Running(with_pages(tiny), cors_origins=["*"]) as other:
        answer = exchange(other, b"GET /health HTTP/1.1\r\nOrigin: a\n b\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200") and b"Access-Control-Allow-Origin: *" in answer


def test_health_tells_of_a_dead_engine(tiny):
    with Running(with_pages(tiny)) as server:
        assert server.call("/health") [0] == 200
        server.scheduler.stop()
        assert error_of(server.call("/health"))[0] == 503
        assert error_of(server.call("/v1/completions", {"prompt": "x"}))[0] == 503


def test_a_stop_string_is_looked_for_by_the_engine_alone(server, monkeypatch):
    """The server hands on what came with the tokens: it decodes nothing but an echoed prompt."""
    whole = server.complete(max_tokens=12)["choices"][0]["text"]
    stop = whole[10:14]
    monkeypatch.setattr(demo, "TextStream", lambda: engine.TextStream())       # takes no stop strings
    for echo in (False, True):
        choice = server.complete(max_tokens=12, stop=stop, echo=echo, logprobs=0)["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["text"].endswith(whole[:whole.index(stop)])
    monkeypatch.setattr(demo, "TextStream", None)
    assert server.complete(max_tokens=12, stop=stop)["choices"][0]["text"] == whole[:whole.index(stop)]


def test_a_fault_of_the_engine_is_told(server, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of luck\nin two lines")

    monkeypatch.setattr(server.scheduler.runner, "_forward", fail)
    status, error = error_of(server.call("/v1/completions", {"prompt": "x"}))
    assert (status, error["type"]) == (500, "server_error") and "out of luck" in error["message"]
    *_, failed, done = server.events(prompt="x", stream=True)
    assert "out of luck" in failed["error"]["message"] and done == "[DONE]"
    monkeypatch.undo()
    assert server.complete(max_tokens=1) and server.idle()


# --- clients that go away, clients that are slow

SLOW = {"prompt": IDS, "max_tokens": 900, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("body", [SLOW | {"stream": True}, SLOW, SLOW | {"n": 6}, SLOW | {"n": 6, "stream": True}],
                         ids=["stream", "whole", "whole and queued", "stream and queued"])
def test_a_client_that_goes_away_frees_its_place(server, body, how):
    connection = server.open_socket(body)
    assert wait_until(lambda: server.scheduler.stats()["pages_used"] > 0)
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    assert server.idle(2.0)


def test_a_client_that_sent_more_than_its_body_is_seen_leaving_too(server):
    with contextlib.closing(server.open_socket(SLOW)) as connection:
        assert wait_until(lambda: server.scheduler.stats()["pages_used"] > 0)
        connection.sendall(b"\r\nGET / HTTP/1.1\r\n\r\n")
        time.sleep(0.1)
        assert server.scheduler.running
    assert server.idle(2.0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_while_it_waits(tiny, stream):
    with Running(with_pages(tiny), max_batch_size=1) as server:
        with contextlib.closing(server.open_socket(SLOW | {"stream": True})):
            assert wait_until(lambda: server.scheduler.running)
            waiting = server.open_socket(SLOW | {"stream": stream})
            assert wait_until(lambda: server.scheduler.stats()["waiting"] == 1)
            waiting.close()
            assert wait_until(lambda: server.scheduler.stats()["waiting"] == 0, 2.0)
            assert server.scheduler.running
        assert server.idle()


def test_a_queued_stream_answers_at_once_and_keeps_alive(tiny, monkeypatch):
    monkeypatch.setattr(demo, "HEARTBEAT_SECONDS", 0.3)
    with Running(with_pages(tiny), max_batch_size=1) as server, contextlib.closing(server.open_socket(SLOW)):
        assert wait_until(lambda: server.scheduler.running)
        connection = server.connect()
        connection.request("POST", "/v1/completions", json.dumps(SLOW | {"stream": True}),
                           {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.headers["X-Accel-Buffering"] == "no" and "no-cache" in response.headers["Cache-Control"]
        assert response.readline() == b": accepted\n" and server.scheduler.stats()["waiting"] == 1
        assert wait_until(lambda: response.readline() == b": waiting\n", 3)
        connection.close()


def test_a_slow_reader_slows_nobody(server):
    """Clients that read nothing keep their requests running and everybody else's."""
    body = {"prompt": IDS, "max_tokens": 400, "ignore_eos": True, "logprobs": 20, "stream": True, "temperature": 0}
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(contextlib.closing(server.open_socket(body)))
        assert wait_until(lambda: len(server.scheduler.running) == 2)
        first = server.complete(max_tokens=5)
        assert first["usage"]["completion_tokens"] == 5              # while they fill their buffers, and after
        assert server.idle(30)                                       # the engine made all their tokens
        assert server.complete(max_tokens=5)["choices"] == first["choices"]


def test_each_event_leaves_at_once(server):
    """Tokens arrive one by one while the engine works, not in one piece at the end."""
    connection = server.open_socket(SLOW | {"max_tokens": 60, "stream": True})
    times = []
    with contextlib.closing(connection):
        while b"[DONE]" not in (data := connection.recv(65536)):
            times.append((time.monotonic(), data.count(b"data:")))
    assert len(times) > 30 and max(count for _, count in times) < 10


def test_300_random_rounds_leave_nothing_behind(tiny):
    """Finish, stop string, socket killed at some token or while queued, bad parameter, n=3, in any mixture."""
    with Running(with_pages(tiny, max_pages=64), max_batch_size=3) as server:
        rounds = iter(range(300))

        def client(seed):
            draw = random.Random(seed)
            for _ in rounds:
                kind = draw.choice(["finish", "stop", "kill", "kill queued", "bad", "n=3", "kill whole"])
                body = {"prompt": LONG[:draw.randint(1, 60)], "max_tokens": draw.randint(1, 12),
                        "seed": draw.randint(0, 9)}
                if kind == "bad":
                    assert server.call("/v1/completions", body | {"top_p": 5})[0] == 400
                elif kind.startswith("kill"):
                    body |= {"max_tokens": 200, "stream": kind != "kill whole", "n": 2}
                    with contextlib.closing(server.open_socket(body)) as s:
                        for _ in range(0 if kind == "kill queued" else draw.randint(1, 4)):
                            s.settimeout(0.05)
                            with contextlib.suppress(TimeoutError):
                                s.recv(300)
                else:
                    body |= {"stop": [" the", "a"]} if kind == "stop" else {"n": 3} if kind == "n=3" else {}
                    status, _, answer = server.call("/v1/completions", body | {"stream": draw.random() < 0.5})
                    assert status == 200 and b"error" not in (answer if isinstance(answer, bytes) else b"")

        failed = []
        threads = [threading.Thread(target=collect(client, failed), args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed
        assert server.idle(3)
        stats = server.scheduler.stats()
        assert stats["pages_free"] + stats["pages_cached"] == 64 and stats["finished"] == stats["requests"] > 300
        assert not server.scheduler.cache.references.any()
        assert wait_until(lambda: not server.server.handlers)


def collect(function, failed):
    def run(*args):
        try:
            function(*args)
        except BaseException as err:
            failed.append(repr(err))
    return run


def test_a_stream_goes_on_unchanged_while_others_fire_nonsense(server):
    alone = server.complete(prompt=LONG, max_tokens=40, ignore_eos=True)["choices"][0]["text"]
    over, failed, cases = threading.Event(), [], list(malformed())

    def fire(seed):
        draw = random.Random(seed)
        while not over.is_set():
            path, how, status, _ = draw.choice(cases)
            assert server.call(path, **how)[0] == status

    threads = [threading.Thread(target=collect(fire, failed), args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    events = server.events(prompt=LONG, max_tokens=40, ignore_eos=True, temperature=0, stream=True)
    over.set()
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == alone


# --- the program

@contextlib.contextmanager
def program(*flags):
    """demo.py as a process of its own -> (process, port)."""
    process = subprocess.Popen([sys.executable, Path(demo.__file__), "--model", "tiny", "--port", "0", *flags],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        yield process, int(re.search(r"http://\S+:(\d+)", line)[1])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to send")
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_program_and_tell_open_streams(sign):
    with program("--max-batch-size", "1") as (process, port):
        body = json.dumps(SLOW | {"stream": True, "max_tokens": 1000})
        streams = []
        for _ in range(2):                                           # one runs, one waits
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            streams.append(connection.getresponse())
        streams[0].read(200)
        start = time.monotonic()
        process.send_signal(sign)
        for stream in streams:
            *_, error, done = stream.read().decode().strip().split("\n\n")
            assert "shutting down" in json.loads(error.removeprefix("data: "))["error"]["message"]
            assert done == "data: [DONE]"
        _, log = process.communicate(timeout=10)
        assert time.monotonic() - start < 5 and process.returncode == 0
        assert "Traceback" not in log and "WARNING" not in log
        assert re.search(r"cmpl-\w+-0: 10 prompt tokens .* abort", log)
        demo.listen("127.0.0.1", port).close()                       # the port is free at once


@pytest.mark.parametrize("flags, words", [
    (["--port", "99999"], "--port"), (["--host", "256.1.1.1"], "256.1.1.1"), (["--pages", "0"], "max_pages"),
    (["--max-batch-size", "0"], "max_batch_size"), (["--api-key", ""], "--api-key"),
    (["--device", "abacus"], "abacus"), (["--model", "a b"], "a b")])
def test_mistakes_on_the_command_line_are_one_line(flags, words, capsys):
    with pytest.raises(SystemExit) as caught:
        demo.main(["--port", "0", "--model", "tiny", *flags])
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_busy_port_is_named():
    with contextlib.closing(demo.listen("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match=f"port {port}"):
            demo.main(["--port", str(port), "--model", "tiny"])


def test_a_line_every_ten_seconds_while_busy(tiny, caplog, monkeypatch):
    monkeypatch.setattr(demo.Monitor, "LINE_SECONDS", 1)
    caplog.set_level("INFO")
    body = SLOW | {"n": 12, "max_tokens": 1000}
    with Running(with_pages(tiny)) as server, contextlib.closing(server.open_socket(body)):
        line = re.compile(r"4 running, \d waiting, [\d.]+ tokens/s, pages: \d+ used")
        assert wait_until(lambda: line.search(caplog.text), 8)
