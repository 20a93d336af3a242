"""Continuous batching: whatever else runs, each text is that of a solo run, and every page comes back."""

import collections
import gc
import json
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import fill_with_nan, make_oracle, run_to_end
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import engine
from engine import ContinuousBatchingScheduler, OutputToken, Request, SamplingParams, StepRow, UserError, generate

TEXT = ("The old lighthouse keeper counted the ships each evening. Today I went to the market with my "
        "sister and we bought apples. In my opinion the new library is a gift to the town, because ") * 12
IDS = engine.load_tokenizer().encode_ordinary(TEXT)
PROMPTS = [IDS[i:i + n] for i, n in enumerate([1, 5, 15, 16, 17, 64, 101, 200])]
STYLES = {"greedy": dict(temperature=0), "seeded": dict(temperature=1.0, seed=3),
          "mixed": dict(temperature=0.8, seed=5, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.1)}


def params(**options):
    return SamplingParams(**(dict(max_tokens=28, ignore_eos=True) | options))


@pytest.fixture(scope="module")
def solo(tiny):
    """The text of each prompt alone, by style."""
    return {name: [list(generate(tiny, prompt, params(**style))) for prompt in PROMPTS]
            for name, style in STYLES.items()}


def with_pool(model, **options):
    return fill_with_nan(engine.share_weights(model, engine.GPT2Paged, **options))


def check_pages(scheduler):
    """free + used + cached = total; every reference counted; no page with two owners unless it is shared."""
    cache = scheduler.cache
    held = collections.Counter(page for request in scheduler.running for page in request.table.pages)
    assert cache.free_pages + cache.used_pages + cache.cached_pages == cache.max_pages
    assert cache.used_pages == len(held)
    assert {p: int(n) for p, n in enumerate(cache.references) if n} == dict(held)
    assert not set(held) & set(cache.unused) and not any(cache.is_free[p] for p in [*held, *cache.unused])
    assert {page for page, _ in cache.prefixes.known.values()} == set(cache.prefixes.key_of)
    for request in scheduler.running:
        size, table = cache.page_size, request.table
        assert len(set(table.pages)) == len(table.pages)
        for n, page in enumerate(table.pages):  # shared pages are full, stored, and hold what this request begins with
            if held[page] > 1:
                assert (n + 1) * size <= table.length
        for n in range(min(table.known_pages, table.length // size)):
            if table.pages[n] in cache.prefixes.key_of:
                assert list(cache.prefixes.key_of[table.pages[n]][1]) == request.ids[n * size:(n + 1) * size]


def run(scheduler, at_most=5000):
    steps = 0
    while scheduler.step():
        check_pages(scheduler)
        steps += 1
        assert steps < at_most
    assert not scheduler.running and not scheduler.waiting and scheduler.cache.used_pages == 0
    return steps


def drain(request):
    """The tokens that came out of the queue, up to the None at its end."""
    out = list(iter(request.output_queue.get_nowait, None))
    assert request.output_queue.empty()
    return out


# --- each text equals the solo run

@pytest.mark.parametrize("style", ["greedy", "seeded"])
@pytest.mark.parametrize("options", [
    dict(), dict(prefill_chunk=1), dict(prefill_chunk=7), dict(prefill_chunk=64), dict(prefix_cache=False),
    dict(max_batch_size=3), dict(pages=17, max_batch_size=8), dict(pages=20, prefill_chunk=7),
    dict(pages=17, prefix_cache=False), dict(page_size=4, pages=70), dict(page_size=1, pages=400, prefill_chunk=64),
], ids=str)
def test_together(tiny, solo, style, options):
    options = dict(options)
    model = with_pool(tiny, page_size=options.pop("page_size", 16), max_pages=options.pop("pages", 64))
    scheduler = ContinuousBatchingScheduler(model, **options)
    for _ in range(2):  # the second time the prefix cache, if any, is warm
        requests = [Request(prompt, params(**STYLES[style])) for prompt in PROMPTS]
        scheduler.submit(*requests)
        run(scheduler)
        assert [drain(r) for r in requests] == [r.output_ids for r in requests] == solo[style]
        assert {r.finish_reason for r in requests} == {"length"}
    if model.max_pages == 17:
        assert scheduler.stats()["preemptions"] > 0
    if options.get("prefix_cache", True) and model.max_pages * model.page_size > 500:
        assert sum(r.cached_tokens for r in requests) > 100


def test_staggered(tiny, solo):
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=64), max_batch_size=3, prefill_chunk=7)
    requests = [Request(prompt, params(temperature=0)) for prompt in PROMPTS]
    for request in requests:
        scheduler.submit(request)
        for _ in range(11):
            scheduler.step()
            check_pages(scheduler)
    run(scheduler)
    assert [r.output_ids for r in requests] == solo["greedy"]


def test_preempted_requests_go_on_as_if_nothing_had_happened(tiny, solo):
    """A pool for one long request and a half: the youngest gives way again and again, nothing is emitted twice."""
    model = with_pool(tiny, page_size=4, max_pages=62)
    for style in STYLES:
        scheduler = ContinuousBatchingScheduler(model, prefix_cache=False)
        requests = [Request(prompt, params(**STYLES[style])) for prompt in PROMPTS[::-1]]
        scheduler.submit(*requests)
        run(scheduler)
        assert sum(r.preemptions for r in requests) >= 2
        assert [drain(r) for r in requests[::-1]] == solo[style]


def test_preempted_requests_wait_at_the_front(tiny):
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, page_size=4, max_pages=12), 2, prefix_cache=False)
    old, young, late = (Request([n] * 14, params(max_tokens=20)) for n in (1, 2, 3))
    scheduler.submit(old, young, late)
    while not young.preemptions:
        assert scheduler.step()
    assert list(scheduler.waiting) == [young, late] and scheduler.running == [old]
    run(scheduler)
    assert old.finish_time < young.finish_time and young.scheduled_time < late.scheduled_time


# --- steps

def test_one_pass_a_step_and_long_prompts_in_chunks(tiny, monkeypatch):
    """Streams go on by a token in each step while a 900-token prompt comes in pieces of at most a chunk."""
    model = with_pool(tiny, max_pages=128)
    scheduler = ContinuousBatchingScheduler(model, prefill_chunk=64)
    streams = [Request([i + 1] * 5, params(max_tokens=60)) for i in range(3)]
    scheduler.submit(*streams)
    scheduler.step()
    scheduler.submit(Request(IDS[:900] if len(IDS) >= 900 else (IDS * 9)[:900], params(max_tokens=2)))
    passes, forward = [], engine.GPT2.forward
    monkeypatch.setattr(engine.GPT2Paged, "forward", lambda m, ids, *a, **k: passes.append(ids.shape) or
                        forward(m, ids, *a, **k))
    for step in range(1, 15):
        before = [len(r.output_ids) for r in streams]
        assert scheduler.step() and len(passes) == step
        assert [len(r.output_ids) for r in streams] == [n + 1 for n in before]
        assert passes[-1] == (1, 3 + 64) or (step == 15 and passes[-1][1] < 67)
    run(scheduler)


def test_first_come_first_served_and_no_starvation(tiny):
    """A long request behind others, with 100 short ones behind it, starts before any of those."""
    model = with_pool(tiny, max_pages=24)
    scheduler = ContinuousBatchingScheduler(model, max_batch_size=4, prefix_cache=False)
    first = [Request([1] * 60, params(max_tokens=30)) for _ in range(4)]
    long = Request([2] * 300, params(max_tokens=20))
    short = [Request([3] * 4, params(max_tokens=2)) for _ in range(100)]
    scheduler.submit(*first, long, *short)
    run(scheduler)
    started = [r.scheduled_time for r in [*first, long, *short]]
    assert started == sorted(started)
    assert all(r.finish_reason == "length" for r in [*first, long, *short])


def test_timings_and_stats(tiny):
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=64), max_batch_size=1)
    one, two = Request([5] * 20, params(max_tokens=3)), Request([6], params(max_tokens=2))
    scheduler.submit(one, two)
    run(scheduler)
    for r in (one, two):
        times = [r.arrival_time, r.scheduled_time, *r.token_times]
        assert times == sorted(times) and len(r.token_times) == len(r.output_ids)
        assert r.finish_time >= r.token_times[-1]
    assert two.scheduled_time >= one.token_times[-1]
    stats = scheduler.stats()
    assert stats == dict(running=0, waiting=0, pages_free=63, pages_used=0, pages_cached=1, requests=2, finished=2,
                         steps=5, preemptions=0, prompt_tokens=21, cached_tokens=0, output_tokens=5)


# --- admission

def test_refused_at_submit(tiny):
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=4), max_waiting=2)
    with pytest.raises(UserError, match=r"need room for 65 tokens; the pool has room for 64 \(4 pages of 16\)"):
        scheduler.submit(Request([1] * 60, params(max_tokens=6)))
    with pytest.raises(UserError, match="the prompt has 1025 tokens"):
        scheduler.submit(Request([1] * 1025, params()))
    fits = Request([1] * 60, params(max_tokens=5))
    scheduler.submit(fits)
    with pytest.raises(UserError, match="was submitted or run before"):
        scheduler.submit(fits)
    with pytest.raises(engine.QueueFull, match="1 requests are waiting; the queue holds 2"):
        scheduler.submit(Request([1], params()), Request([1], params()))        # all or none
    assert len(scheduler.waiting) == 1
    none = Request([1], params(max_tokens=0))
    scheduler.submit(none)
    assert drain(none) == [] and none.finish_reason == "length"
    run(scheduler)
    assert len(fits.output_ids) == 5
    for wrong in (dict(max_batch_size=0), dict(max_waiting=0), dict(prefill_chunk=True)):
        with pytest.raises(UserError, match=f"{next(iter(wrong))} must be a whole number from 1"):
            ContinuousBatchingScheduler(tiny, **wrong)


def test_submit_takes_all_or_none(tiny):
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=16))
    new, used = Request([1], params(max_tokens=2)), Request([1], params(max_tokens=2))
    list(generate(tiny, used))
    for requests in ((new, used), (new, new)):
        with pytest.raises(UserError, match="was submitted or run before"):
            scheduler.submit(*requests)
        assert not scheduler.waiting and new.arrival_time is None
    scheduler.submit(new)
    run(scheduler)
    assert len(new.output_ids) == 2


def test_cancelled_in_the_step_that_preempts(tiny, monkeypatch):
    """The flag is set after the step looked for it, and the request is back in the queue: it ends all the same."""
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=16))
    request = Request([1, 2], params())
    scheduler.submit(request)
    scheduler.step()
    request.cancelled = True
    scheduler._leave(request)
    scheduler.waiting.appendleft(request)
    scheduler.step()
    assert request.finish_reason == "abort" and not scheduler.waiting


def test_samples_of_another_schedulers_leader_share_no_pages(tiny, solo):
    one, two = (ContinuousBatchingScheduler(with_pool(tiny, max_pages=32)) for _ in range(2))
    first, second = Request.samples(PROMPTS[6], params(temperature=0), 2)
    one.submit(first)
    two.submit(second)
    one.step()
    run(two)
    assert second.output_ids == solo["greedy"][6]


def test_cancel_waiting_running_and_finished(tiny, solo):
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=64), max_batch_size=2)
    requests = [Request(prompt, params(temperature=0)) for prompt in PROMPTS[:4]]
    scheduler.submit(*requests)
    for _ in range(5):
        scheduler.step()
    scheduler.cancel(requests[3])                                              # it waits
    assert requests[3].finish_reason == "abort" and drain(requests[3]) == []
    scheduler.cancel(requests[0])                                              # it runs
    run(scheduler)
    assert requests[0].finish_reason == "abort"
    assert drain(requests[0]) == solo["greedy"][0][:len(requests[0].output_ids)]
    scheduler.cancel(requests[1])                                              # it has ended
    assert [r.output_ids for r in requests[1:3]] == solo["greedy"][1:3]
    assert [r.finish_reason for r in requests[1:3]] == ["length"] * 2


# --- prefix cache

def test_prefix_cache_hits_full_pages_and_computes_at_least_one_token(tiny):
    model = with_pool(tiny, max_pages=64)
    scheduler = ContinuousBatchingScheduler(model)

    def cached(prompt, **options):
        request = Request(prompt, params(max_tokens=3, **options))
        scheduler.submit(request)
        run(scheduler)
        return request.cached_tokens

    assert cached(IDS[:40]) == 0
    assert cached(IDS[:40]) == 32
    assert cached(IDS[:32]) == 16                                              # one token must be computed
    assert cached(IDS[:33]) == 32
    assert cached(IDS[:16] + [7] * 24) == 16
    assert cached([7, *IDS[1:40]]) == 0                                        # the same later pages, another beginning
    assert cached([7, *IDS[1:40]]) == 32
    assert scheduler.stats()["cached_tokens"] == 32 + 16 + 32 + 16 + 32


def test_output_is_found_as_a_prompt(tiny):
    """A conversation goes on: prompt and answer come again as the next prompt."""
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=64))
    first = Request(IDS[:10], params(max_tokens=30))
    scheduler.submit(first)
    run(scheduler)
    second = Request([*first.ids, 5], params(max_tokens=2))
    scheduler.submit(second)
    run(scheduler)
    assert second.cached_tokens == 32                                          # 39 were stored: two full pages


def test_least_recently_used_pages_go_first(tiny):
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=8))

    def cached(token):
        request = Request([token] * 33, params(max_tokens=1))
        scheduler.submit(request)
        run(scheduler)
        return request.cached_tokens

    assert [cached(t) for t in (1, 2, 3)] == [0, 0, 0]                         # 6 pages known
    assert cached(1) == 32                                                     # used again: now 2 is the oldest
    assert cached(4) == 0 and cached(5) == 0
    assert cached(1) == 32
    assert cached(2) == 0


def test_samples_of_one_prompt_share_its_pages(tiny):
    for prefix_cache in (True, False):
        model = with_pool(tiny, max_pages=40)
        scheduler = ContinuousBatchingScheduler(model, prefill_chunk=50, prefix_cache=prefix_cache)
        prompt = IDS[:100]
        requests = Request.samples(prompt, params(temperature=1.0, seed=11, max_tokens=10), 4)
        scheduler.submit(*requests)
        most = 0
        while scheduler.step():
            check_pages(scheduler)
            most = max(most, model.cache.used_pages)
        assert most == 6 + 4                                                   # 6 full pages once, a last one each
        expected = [list(generate(tiny, prompt, params(temperature=1.0, seed=11 + i, max_tokens=10))) for i in range(4)]
        assert [r.output_ids for r in requests] == expected


# --- failures

def test_a_forward_that_raises_fails_its_requests_and_no_others(tiny, solo, monkeypatch):
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=64), max_batch_size=2)
    requests = [Request(prompt, params(temperature=0)) for prompt in PROMPTS[:3]]
    scheduler.submit(*requests)
    scheduler.step()
    with monkeypatch.context() as broken:
        broken.setattr(engine.GPT2Paged, "forward", lambda *a, **k: 1 / 0)
        scheduler.step()
    check_pages(scheduler)
    for request in requests[:2]:
        assert request.finish_reason == "error" and isinstance(request.error, ZeroDivisionError)
        assert drain(request) == request.output_ids
    run(scheduler)
    assert requests[2].output_ids == solo["greedy"][2]


def test_a_poisoned_request_fails_alone(tiny, solo, monkeypatch):
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=64))
    requests = [Request(prompt, params(temperature=1.0, seed=3)) for prompt in PROMPTS]
    monkeypatch.setattr(requests[4], "noise_key", lambda: 1 / 0)
    scheduler.submit(*requests)
    run(scheduler)
    assert requests[4].finish_reason == "error" and isinstance(requests[4].error, ZeroDivisionError)
    for i in set(range(8)) - {4}:
        assert requests[i].output_ids == solo["seeded"][i]


def test_the_thread_outlives_a_fault_in_the_step(tiny, monkeypatch):
    """Whatever raises where nobody expects it: those who run or are first in the queue are told, the next is served."""
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=64))
    for place in ("_admit", "_plan", "_hand_out"):
        broken = Request([1, 2, 3], params(max_tokens=3))
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, place, lambda *a: 1 / 0)
            scheduler.submit(broken)
            scheduler.start()
            assert list(iter(lambda r=broken: r.output_queue.get(timeout=10), None)) == []
        assert broken.finish_reason == "error" and isinstance(broken.error, ZeroDivisionError)
        fine = Request([1, 2, 3], params(max_tokens=3))
        scheduler.submit(fine)
        assert len(list(iter(lambda r=fine: r.output_queue.get(timeout=10), None))) == 3
    scheduler.stop()
    assert scheduler.cache.used_pages == 0


def test_a_draft_that_raises_fails_its_request_alone(tiny, monkeypatch):
    draft = engine.Speculator(engine.share_weights(tiny, engine.GPT2Cached))
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=64), draft=draft)
    one, two = Request([1, 2], params(max_tokens=5)), Request([1, 2], params(max_tokens=5, temperature=0))
    scheduler.submit(one)
    scheduler.step()
    with monkeypatch.context() as patch:
        patch.setattr(draft, "guess", lambda *a: 1 / 0)
        scheduler.step()
    assert one.finish_reason == "error" and len(drain(one)) == 1
    scheduler.submit(two)
    run(scheduler)
    assert two.output_ids == list(generate(tiny, [1, 2], params(max_tokens=5, temperature=0)))


def test_a_draft_without_pages_is_no_end(tiny):
    """Its pool holds 16 tokens; the target goes on alone. And it gives its pages back when the request ends."""
    small = engine.share_weights(tiny, engine.GPT2Paged, max_pages=1)
    expected = list(generate(tiny, [1, 2], params(temperature=0)))
    assert list(generate(tiny, [1, 2], params(temperature=0), draft=small)) == expected
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=64), draft=engine.Speculator(small))
    request = Request([1, 2], params(temperature=0))
    scheduler.submit(request)
    run(scheduler)
    assert request.output_ids == expected and small.cache.used_pages == 0
    with pytest.raises(UserError, match="the draft model can't be the target itself"):
        generate(tiny, [1], draft=tiny)


def test_a_draft_forgets_wrong_guesses(tiny, solo):
    """What it stores after a pause is what a draft that saw the text only would store."""
    noisy = drafts(tiny)["noisy"]
    draft = engine.Speculator(noisy, tokens=3)
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=64), draft=draft)
    first, other = Request(PROMPTS[4], params(temperature=0)), Request(PROMPTS[1], params(temperature=0, max_tokens=6))
    scheduler.submit(first)
    for _ in range(4):
        scheduler.step()
    scheduler.submit(other)
    while not other.finish_reason:
        scheduler.step()
    assert draft.request is first and 0 < draft.kv.length < len(first.ids)
    stored = draft.kv.length
    got = noisy(torch.tensor([first.ids[stored:]]), draft.kv)[0, -1]
    torch.testing.assert_close(got, noisy(torch.tensor([first.ids]))[0, -1], atol=1e-3, rtol=0)
    assert first.output_ids == solo["greedy"][4][:len(first.output_ids)]


def test_others_arrive_while_one_speculates(tiny, solo):
    """Alone, together, alone again; one of them cancelled in between."""
    draft = engine.Speculator(drafts(tiny)["noisy"], tokens=3)
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=64), draft=draft)
    requests = [Request(prompt, params(temperature=0)) for prompt in PROMPTS[4:]]
    for request in requests:
        scheduler.submit(request)
        for _ in range(4):
            scheduler.step()
            check_pages(scheduler)
    scheduler.cancel(requests[1])
    run(scheduler)
    assert [r.output_ids for r in requests[::2]] == solo["greedy"][4::2] and draft.proposed > 0
    assert drain(requests[1]) == solo["greedy"][5][:len(requests[1].output_ids)]


def test_samples_whose_leader_goes(tiny):
    """The first of several samples is cancelled before or while its prompt is computed: the others don't wait."""
    for steps in (0, 1, 2, 4):
        scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=40), prefill_chunk=40, prefix_cache=False)
        requests = Request.samples(IDS[:100], params(temperature=1.0, seed=11, max_tokens=5), 3)
        scheduler.submit(*requests)
        for _ in range(steps):
            scheduler.step()
        scheduler.cancel(requests[0])
        run(scheduler)
        assert [r.finish_reason for r in requests] == ["abort", "length", "length"]
    late = Request([1], params())
    scheduler.cancel(late)                                                     # before it was submitted
    scheduler.submit(late)
    assert drain(late) == [] and late.finish_reason == "abort"


def test_two_schedulers_and_a_generator_share_a_pool(tiny, solo):
    model = with_pool(tiny, max_pages=40)
    schedulers = [ContinuousBatchingScheduler(model, max_batch_size=4) for _ in range(2)]
    requests = [[Request(prompt, params(temperature=0)) for prompt in PROMPTS] for _ in schedulers]
    for scheduler, mine in zip(schedulers, requests):
        scheduler.submit(*mine)
        scheduler.start()
    aside = list(generate(model, PROMPTS[3], params(temperature=0)))
    for mine in requests:
        for request, expected in zip(mine, solo["greedy"]):
            assert list(iter(lambda r=request: r.output_queue.get(timeout=30), None)) == expected
    assert aside == solo["greedy"][3]
    for scheduler in schedulers:
        scheduler.stop()
        scheduler.stop()                                                       # once more is no harm
    assert model.cache.used_pages == 0


def test_stop_ends_everything_within_two_seconds(tiny):
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=128), max_batch_size=2)
    requests = [Request([i + 1] * 50, params(max_tokens=900)) for i in range(5)]
    scheduler.submit(*requests)
    scheduler.start()
    requests[0].output_queue.get(timeout=30)
    start = time.monotonic()
    scheduler.stop()
    assert time.monotonic() - start < 2
    assert all(r.finish_reason == "abort" for r in requests)
    assert all(drain(r) is not None for r in requests)
    assert not [t for t in threading.enumerate() if t.name == "scheduler"]
    assert scheduler.cache.used_pages == 0
    with pytest.raises(UserError, match="was stopped"):
        scheduler.submit(Request([1], params()))
    scheduler.start()                                                          # and it may run again
    again = Request([1], params(max_tokens=2))
    scheduler.submit(again)
    assert len(list(iter(lambda: again.output_queue.get(timeout=30), None))) == 2
    scheduler.stop()


# --- at random

def micro(**options):
    """A model of a few thousand parameters, for tests of bookkeeping."""
    oracle = make_oracle(vocab_size=31, n_positions=48, n_embd=8, n_layer=1, n_head=2)
    model = engine.GPT2Paged(engine.GPT2Config(vocab_size=31, n_positions=48, n_embd=8, n_layer=1, n_head=2), **options)
    state = {k.removeprefix("transformer."): v for k, v in oracle.state_dict().items()}
    model.load_state_dict({k: v.t() if engine.CONV1D.fullmatch(k) else v for k, v in state.items()})
    return fill_with_nan(model.requires_grad_(False))


ACTIONS = st.lists(st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 20), st.integers(0, 2), st.integers(1, 25)),
    st.tuples(st.just("samples"), st.integers(1, 20), st.integers(0, 2), st.integers(1, 10)),
    st.tuples(st.just("cancel"), st.integers(0, 10**6)),
    st.tuples(st.just("step"), st.integers(1, 12)),
), min_size=20, max_size=60)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(actions=ACTIONS, chunk=st.sampled_from([1, 3, 8]), pages=st.integers(11, 24), slots=st.integers(1, 5),
       prefix_cache=st.booleans(), style=st.sampled_from([dict(temperature=0), dict(temperature=1.0, seed=2)]))
def test_anything_in_any_order(actions, chunk, pages, slots, prefix_cache, style):
    """Submit, cancel, step in a pool that is too small: no page is lost, and every text is the solo one."""
    model = micro(page_size=4, max_pages=pages)
    scheduler = ContinuousBatchingScheduler(model, slots, prefill_chunk=chunk, prefix_cache=prefix_cache)
    requests = []
    for action, *values in actions:
        if action == "submit":
            length, start, tokens = values
            prompt = [(start + i) % 31 for i in range(length)]
            requests.append(Request(prompt, params(max_tokens=tokens, **style)))
            scheduler.submit(requests[-1])
        elif action == "samples":
            length, start, tokens = values
            made = Request.samples([(start + i) % 31 for i in range(length)], params(max_tokens=tokens, **style), 3)
            scheduler.submit(*made)
            requests += made
        elif action == "cancel" and requests:
            scheduler.cancel(requests[values[0] % len(requests)])
        elif action == "step":
            for _ in range(values[0]):
                scheduler.step()
                check_pages(scheduler)
    run(scheduler)
    assert model.cache.free_pages + model.cache.cached_pages == pages
    other = engine.share_weights(model, engine.GPT2Paged)
    for request in requests:
        assert request.finish_reason in ("length", "abort")
        expected = list(generate(other, request.prompt_ids, request.params))
        assert drain(request) == expected[:len(request.output_ids)]
        assert request.cancelled or len(request.output_ids) == len(expected)


def test_64_threads_submit_and_cancel(tiny):
    """2,000 short requests, a third cancelled at random moments: every other text is the solo one."""
    prompts = [IDS[i:i + 1 + 3 * i] for i in range(12)]
    expected = [list(generate(tiny, prompt, params(temperature=0, max_tokens=4))) for prompt in prompts]
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=128), max_batch_size=32, max_waiting=5000)
    scheduler.start()
    wrong, ended = [], collections.Counter()

    def client(seed):
        draw = random.Random(seed)
        for _ in range(2000 // 64 + 1):
            which = draw.randrange(len(prompts))
            request = Request(prompts[which], params(temperature=0, max_tokens=4))
            scheduler.submit(request)
            if draw.random() < 1 / 3:
                time.sleep(draw.random() * 0.05)
                scheduler.cancel(request)
            got = list(iter(lambda r=request: r.output_queue.get(timeout=60), None))
            ended[request.finish_reason] += 1
            if got != expected[which][:len(got)] or (not request.cancelled and got != expected[which]):
                wrong.append((which, got, request.finish_reason, request.error))

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads) and not wrong
    assert sum(ended.values()) == 64 * 32 and ended["abort"] > 100 and set(ended) == {"abort", "length"}
    scheduler.stop()
    assert scheduler.cache.used_pages == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the process's memory from /proc")
def test_memory_is_flat_over_5000_requests():
    scheduler = ContinuousBatchingScheduler(micro(page_size=4, max_pages=64))

    def serve(count):
        for n in range(0, count, 50):
            scheduler.submit(*(Request([(n + i) % 31, n % 31, i % 31, 7], params(max_tokens=2)) for i in range(50)))
            while scheduler.step():
                pass
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    serve(1000)
    before = serve(500)
    assert serve(5000) - before < 4e6
    assert len(scheduler.cache.prefixes.known) == len(scheduler.cache.prefixes.key_of) <= 64


# --- stop strings and text

def cut(text, stop):
    """The definition: the text before the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[:min(starts)]
    return text


PIECES = [*engine.load_tokenizer().encode_ordinary("ababc aab bca é 🙂 日本\n"), 50256, 60000]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(tokens=st.lists(st.sampled_from(PIECES), max_size=30),
       stop=st.lists(st.text("abc é🙂", min_size=1, max_size=4), max_size=3))
def test_stop_strings(tokens, stop):
    encoding = engine.load_tokenizer()
    data = b"".join(b"" if t == 50256 else "\ufffd".encode() if t == 60000 else
                    encoding.decode_single_token_bytes(t) for t in tokens)
    whole = data.decode("utf-8", errors="replace")
    pieces = list(engine.stream_text(tokens, stop))
    assert "".join(pieces) == cut(whole, stop)
    assert "".join(engine.stream_text(tokens)) == whole


def test_text_is_held_only_while_it_may_become_a_stop_string():
    stream = engine.TextStream(("day off",))
    words = [engine.load_tokenizer().encode_ordinary(w)[0] for w in ("A", " day", " on", " day", " off")]
    assert [stream.feed(word) for word in words] == ["A", " ", "day on", " ", ""]
    assert stream.stopped and stream.finish() == ""
    stream = engine.TextStream(("day off",))
    assert [stream.feed(word) for word in words[:2]] == ["A", " "] and stream.finish() == "day"


def test_random_bytes_in_pieces_are_the_text_at_once():
    """Random ids break characters all the time."""
    draw, encoding = random.Random(0), engine.load_tokenizer()
    for _ in range(300):
        tokens = [draw.randrange(50256) for _ in range(40)]
        pieces = list(engine.stream_text(tokens))
        assert "".join(pieces) == encoding.decode_bytes(tokens).decode("utf-8", errors="replace")


@pytest.mark.parametrize("by_scheduler", [True, False])
def test_requests_end_at_a_stop_string(tiny, by_scheduler):
    prompt = engine.load_tokenizer().encode_ordinary("The meaning of life is")

    def text(**options):
        request = Request(prompt, params(temperature=0, **options))
        if by_scheduler:
            scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=64))
            scheduler.submit(request)
            run(scheduler)
            drain(request)
        else:
            list(generate(tiny, request))
        stop, least = request.params.stop, request.params.min_tokens
        return "".join(engine.stream_text(request.output_ids, stop, least)), request.finish_reason

    whole, reason = text()
    assert whole.startswith(" a mystery that has been debated by philosophers") and reason == "length"
    assert text(stop="been deb") == (" a mystery that has ", "stop")
    assert text(stop=["nowhere", "debated", "been"]) == (" a mystery that has ", "stop")
    assert text(stop="mystery", min_tokens=5) == (whole, "length")
    for wrong in ("", [""], [1], 5, ["a", None]):
        with pytest.raises(UserError, match="stop must be a string or strings of at least 1 character"):
            SamplingParams(stop=wrong)


# --- speculative decoding

def drafts(model):
    """A draft that is often right (the model with noise), one that never is, and the model itself."""
    draft = engine.share_weights(model, engine.GPT2Cached)
    noisy = engine.share_weights(model, engine.GPT2Paged)
    torch.manual_seed(0)
    noisy.load_state_dict({k: v * (1 + 0.1 * torch.randn_like(v)) for k, v in model.state_dict().items()}, assign=True)
    return {"same": draft, "noisy": noisy}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("by_scheduler", [True, False])
def test_speculation_changes_no_text(tiny, solo, style, by_scheduler):
    for name, draft in drafts(tiny).items():
        speculator = engine.Speculator(draft, tokens=4)
        model = with_pool(tiny, max_pages=64)
        scheduler = ContinuousBatchingScheduler(model, draft=speculator)
        for prompt, expected in zip(PROMPTS[1::2], solo[style][1::2]):
            request = Request(prompt, params(**STYLES[style]))
            if by_scheduler:
                scheduler.submit(request)
                run(scheduler)
                assert drain(request) == expected
            else:
                assert run_to_end(generate(model, request, draft=speculator)) == (expected, "length")
        assert speculator.acceptance > 0.99 if name == "same" else 0.02 < speculator.acceptance < 0.95


def test_speculation_ends_where_the_text_ends(tiny):
    """Guesses beyond the end of text, the limit, or the context are made by nobody."""
    prompt = engine.load_tokenizer().encode_ordinary("The meaning of life is")
    draft = engine.share_weights(tiny, engine.GPT2Cached)
    for options in (dict(ignore_eos=False, max_tokens=120), dict(max_tokens=1), dict(max_tokens=2), dict(max_tokens=6)):
        expected = run_to_end(generate(tiny, prompt, params(temperature=0, **options)))
        assert run_to_end(generate(tiny, prompt, params(temperature=0, **options), draft=draft)) == expected
    full = [5] * 1020
    assert run_to_end(generate(tiny, full, params(temperature=0, max_tokens=50), draft=draft)) == \
        run_to_end(generate(tiny, full, params(temperature=0, max_tokens=50)))
    with pytest.raises(UserError, match="the draft model has a vocabulary of 31 tokens, the target of 50257"):
        generate(tiny, prompt, draft=micro())


def test_sampled_speculation_has_the_targets_distribution():
    """Chi-square over pairs of tokens against the exact probabilities of the target."""
    target, draft = micro(), micro()
    torch.manual_seed(1)
    draft.load_state_dict({k: v + 0.1 * torch.randn_like(v) for k, v in target.state_dict().items()})
    prompt, draws = [3, 1, 4], 3000
    p = torch.softmax(target(torch.tensor([prompt]))[0, -1], -1)
    pairs = torch.stack([torch.softmax(target(torch.tensor([[*prompt, t]]))[0, -1], -1) for t in range(31)])
    expected = (p[:, None] * pairs).double().numpy().ravel() * draws
    speculator, observed = engine.Speculator(draft, tokens=2), np.zeros(31 * 31)
    for seed in range(draws):
        a, b = generate(target, prompt, params(max_tokens=2, seed=seed), draft=speculator)
        observed[a * 31 + b] += 1
    often = expected >= 5
    groups = [(observed[often], expected[often]), (observed[~often].sum(), expected[~often].sum())]
    chi = sum(((o - e) ** 2 / e).sum() for o, e in groups)
    freedom = often.sum()
    assert 0.1 < speculator.acceptance < 0.95
    assert chi < freedom + 4 * (2 * freedom) ** 0.5                            # mean and deviation of chi-square


# --- scores of prompts

@pytest.fixture(scope="module")
def scores(tiny_models):
    """Natural log probabilities of PROMPTS[6] by the oracle, (position, V): the row before a token scores it."""
    return torch.log_softmax(tiny_models[engine.GPT2](torch.tensor([PROMPTS[6]]))[0], dim=-1)


def check_scores(request, scores):
    found = request.prompt_logprobs
    assert [t.token for t in found] == request.prompt_ids[1:]
    expected = scores[range(len(found)), [t.token for t in found]]
    close = dict(atol=1e-3, rtol=0)  # logits reach 19, and 101 tokens at once are summed in another order than one
    torch.testing.assert_close(torch.tensor([t.logprob for t in found]), expected, **close)
    for row, scored in zip(scores, found):
        assert len(scored.top) == request.params.prompt_logprobs
        values = torch.tensor(list(scored.top.values()))
        torch.testing.assert_close(values, row.topk(len(values)).values, **close)


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("variant", [engine.GPT2, engine.GPT2Cached, engine.GPT2Paged])
def test_generate_scores_the_prompt(tiny_models, scores, variant, max_tokens):
    request = Request(PROMPTS[6], params(temperature=0, max_tokens=max_tokens, prompt_logprobs=2))
    tokens, reason = run_to_end(generate(tiny_models[variant], request))
    assert (len(tokens), reason) == (max_tokens, "length")
    check_scores(request, scores)


@pytest.mark.parametrize("chunk", [1, 7, 16, 128])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_scheduler_scores_prompts_in_chunks_and_behind_the_prefix_cache(tiny, scores, solo, chunk, max_tokens):
    scheduler = ContinuousBatchingScheduler(with_pool(tiny), max_batch_size=2, prefill_chunk=chunk)
    plain, scoring = params(temperature=0), params(temperature=0, max_tokens=max_tokens, prompt_logprobs=3)
    requests = [Request(PROMPTS[6], plain), *Request.samples(PROMPTS[6], scoring, 2), Request(PROMPTS[5], plain)]
    scheduler.submit(requests[0])
    while not requests[0].output_ids:
        scheduler.step()
    scheduler.submit(*requests[1:])                                  # the whole prompt is known by now
    while scheduler.step():
        check_pages(scheduler)
    check_scores(requests[1], scores)
    if max_tokens:
        assert not requests[2].prompt_logprobs
    else:  # it has nothing to do but to score
        check_scores(requests[2], scores)
    assert [r.finish_reason for r in requests] == ["length"] * 4
    assert requests[1].output_ids == requests[2].output_ids == solo["greedy"][6][:max_tokens]
    assert requests[0].output_ids == solo["greedy"][6] and requests[3].output_ids == solo["greedy"][5]


def test_scores_outlive_preemption(tiny, scores):
    """A request that is thrown out half way is computed again, and each of its tokens is scored once."""
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=16), max_batch_size=2, prefill_chunk=16)
    first = Request(PROMPTS[5], params(temperature=0, max_tokens=150))
    second = Request(PROMPTS[6], params(temperature=0, max_tokens=40, prompt_logprobs=1))
    scheduler.submit(first, second)
    while second.unscored != 36:  # in the middle of its prompt
        scheduler.step()
    scheduler._leave(second)
    scheduler.waiting.appendleft(second)
    while scheduler.step():
        check_pages(scheduler)
    check_scores(second, scores)
    assert len(second.output_ids) == 40


def test_one_request_whose_scores_are_nan_fails_alone(tiny, solo, monkeypatch):
    scheduler = ContinuousBatchingScheduler(with_pool(tiny), max_batch_size=2, prefill_chunk=200)
    bad, good = Request(PROMPTS[4], params(prompt_logprobs=0)), Request(PROMPTS[5], params(temperature=0))
    forward = scheduler.runner._forward

    def poisoned(rows, wanted):
        logits = forward(rows, wanted)
        if rows[0].request is bad:
            logits[2] = float("nan")
        return logits

    monkeypatch.setattr(scheduler.runner, "_forward", poisoned)
    scheduler.submit(bad, good)
    while scheduler.step():
        check_pages(scheduler)
    assert bad.finish_reason == "error" and "NaN" in str(bad.error)
    assert good.output_ids == solo["greedy"][5]


def test_what_a_queue_hands_over_carries_what_belongs_to_it(tiny):
    """Log probability, text, offset and time come with the token; who asks for none of these gets plain ids."""
    scheduler = ContinuousBatchingScheduler(with_pool(tiny))
    word = engine.load_tokenizer().decode(list(generate(tiny, PROMPTS[5], params(temperature=0)))[9:11])
    asks, stops, plain = (Request(PROMPTS[5], params(temperature=0, max_tokens=14, **more), with_text=bool(more))
                          for more in (dict(logprobs=2), dict(stop=word), {}))
    scheduler.submit(asks, stops, plain)
    run(scheduler)
    tokens = drain(asks)
    assert json.loads(json.dumps(tokens)) == tokens == asks.output_ids and {type(t) for t in tokens} == {OutputToken}
    assert [t.logprobs for t in tokens] == asks.logprobs and [t.time for t in tokens] == asks.token_times
    whole = engine.load_tokenizer().decode(tokens)
    assert "".join(t.text for t in tokens) + asks.text.finish() == whole
    assert [t.offset for t in tokens] == [len(engine.load_tokenizer().decode(tokens[:n])) for n in range(len(tokens))]
    pieces = [t.text for t in drain(stops)]
    assert stops.text.stopped and "".join(pieces) == whole[:whole.index(word)] and pieces[-1] == ""
    assert {type(t) for t in drain(plain)} == {int} and plain.text is None


def test_a_plan_changes_nothing(tiny):
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=30), max_batch_size=3, prefill_chunk=40)
    requests = [Request(prompt, params()) for prompt in PROMPTS[4:]]
    scheduler.submit(*requests)
    for _ in range(12):
        before = scheduler.snapshot(), [vars(r).copy() for r in requests], dict(scheduler.counts)
        plan = scheduler._plan([])
        assert plan == scheduler._plan([]) and all(isinstance(row, StepRow) for row in plan)
        after = scheduler.snapshot(), [vars(r).copy() for r in requests], dict(scheduler.counts)
        for shown in before[0], after[0]:
            for view in filter(None, (*shown["slots"], *shown["waiting"])):
                del view["seconds"]
        assert before == after
        scheduler.step()
    assert any(scheduler.running)


def test_a_snapshot_says_whose_each_page_is(tiny):
    scheduler = ContinuousBatchingScheduler(with_pool(tiny, max_pages=40), max_batch_size=3, prefill_chunk=500)
    first, second = Request.samples(PROMPTS[6], params(), 2)
    scheduler.submit(first, second, *[Request([n], params()) for n in range(3)])
    for _ in range(3):
        scheduler.step()
    shown, cache = scheduler.snapshot(), scheduler.cache
    assert [view and view["state"] for view in shown["slots"]] == ["decoding"] * 3
    assert [view["state"] for view in shown["waiting"]] == ["queued"] * 2
    pages = shown["pages"]
    assert pages["shared"] == sorted(set(first.table.pages) & set(second.table.pages)) != []
    owners = collections.Counter(pages["owner"])
    assert (owners[-1], owners[-2]) == (pages["free"], pages["cached"]) == (cache.free_pages, cache.cached_pages)
    assert owners[first.slot] + len(pages["shared"]) == len(first.table.pages)
    assert json.loads(json.dumps(shown)) == shown


def test_whoever_listens_hears_of_each_request_once(tiny):
    ended = []
    scheduler = ContinuousBatchingScheduler(with_pool(tiny), max_batch_size=1, on_finish=ended.append)
    requests = [Request(PROMPTS[1], params(max_tokens=n)) for n in (0, 3, 4)]
    scheduler.submit(*requests)
    scheduler.cancel(requests[2])
    while scheduler.step():
        pass
    assert sorted(map(requests.index, ended)) == [0, 1, 2]
    assert [r.finish_reason for r in requests] == ["length", "length", "abort"]
