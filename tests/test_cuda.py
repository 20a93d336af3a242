"""The GPU engine. Without a GPU the kernels run by Triton's interpreter, and the rest on their plain twins."""

import random

import numpy as np
import pytest
import torch
from conftest import IDS, run_to_end
from test_scheduler import PROMPTS, STYLES, check_pages, drain, params, run

import engine
import sampling
from engine import ContinuousBatchingScheduler, Request, SamplingParams, UserError, generate

pytest.importorskip("triton")
import benchmarks_cuda
import engine_cuda

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = list(engine.DTYPES.values())
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")     # numpy's, of infinities in the interpreter


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """What runs here is small; threads that wait for each other on a busy machine take longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def twins(monkeypatch):
    """The plain twins in the kernels' place, but on a GPU."""
    monkeypatch.setattr(engine_cuda, "uses_kernels", lambda x: x.is_cuda)


def assert_good(cases):
    assert [case for case in cases if not case[1] <= case[2]] == []


# --- kernels and twins against float64

KERNELS = {
    "flash": lambda dtype: benchmarks_cuda.check_flash(DEVICE, dtype, head_dims=(8, 40, 80, 256)),
    "paged": lambda dtype: benchmarks_cuda.check_paged(
        DEVICE, dtype, head_dims=(8, 256) if dtype.itemsize == 4 else (80,), lengths=(0, 9, 33)),
    "prompts": lambda dtype: benchmarks_cuda.check_prompts(DEVICE, dtype, (80,)),
    "linear": lambda dtype: benchmarks_cuda.check_linear(DEVICE, dtype, ((48, 33),)),
    "sample": lambda dtype: benchmarks_cuda.check_sample(DEVICE, dtype, V=97, n_rows=8),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=list(engine.DTYPES))
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels(kernel, dtype):
    torch.manual_seed(0)
    assert_good(KERNELS[kernel](dtype))


@pytest.mark.parametrize("kernel", KERNELS)
def test_twins(twins, kernel):
    torch.manual_seed(1)
    assert_good(KERNELS[kernel](torch.float32))


def test_flash_of_a_long_prompt():
    q, k, v = torch.randn(3, 1, 1, 1023, 16, device=DEVICE)
    exact = benchmarks_cuda.exact_attention(q, k, v, 0.3)
    for precision in ("tf32x3", "ieee"):
        found = engine_cuda.flash_attention(q, k, v, scale=0.3, precision=precision)
        assert benchmarks_cuda.relative_error(found, exact) < 1e-5


def test_flash_starts_in_the_middle():
    """Queries that stand before the last key do not see what follows them, NaN or not."""
    q, k, v = torch.randn(1, 2, 9, 24, device=DEVICE), *torch.randn(2, 1, 2, 40, 24, device=DEVICE)
    k[:, :, 26:], v[:, :, 26:] = float("nan"), float("nan")
    exact = benchmarks_cuda.exact_attention(q, k[:, :, :26], v[:, :, :26], 24 ** -0.5)
    assert benchmarks_cuda.relative_error(engine_cuda.flash_attention(q, k, v, start=17), exact) < 1e-5


def test_what_flash_refuses():
    good = torch.zeros(1, 2, 8, 16, device=DEVICE)
    for q, k, start in [(good, good[:, :1], None), (good, good[:, :, :7], None), (good, good[..., :8], None),
                        (good, good.half(), None), (good.double(), good.double(), None), (good, good, 1),
                        (good, good, -1), (*[torch.zeros(1, 1, 4, 257, device=DEVICE)] * 2, None),
                        (*[good.transpose(2, 3)] * 2, None)]:
        with pytest.raises(UserError):
            engine_cuda.flash_attention(q, k, k, start)
    assert engine_cuda.flash_attention(good[:0], good[:0], good[:0]).shape == (0, 2, 8, 16)


def test_splits_fill_the_chip():
    assert engine_cuda.splits_for(tasks=12, most_keys=1024) == 16
    assert engine_cuda.splits_for(tasks=12, most_keys=100) == 2
    assert engine_cuda.splits_for(tasks=3072, most_keys=1024) == 1


# --- sampling

def test_noise_keys_are_the_requests():
    request = Request([1], SamplingParams(seed=-5))
    for key in engine.noise_keys(request.key, 30).tolist():
        assert key == request.noise_key()
        request.output_ids.append(0)


# --- the model

@pytest.mark.parametrize("dtype", DTYPES, ids=list(engine.DTYPES))
def test_model(twins, dtype):
    torch.manual_seed(0)
    assert_good(benchmarks_cuda.check_model(DEVICE, dtype))


def test_model_through_the_kernels():
    torch.manual_seed(0)
    oracle = benchmarks_cuda.random_model(n_embd=21, n_head=3, n_layer=1, activation_function="relu", n_inner=10)
    model = benchmarks_cuda.copy_as(oracle, engine_cuda.GPT2Flash, torch.float32, DEVICE)
    for pool in (model.cache.k, model.cache.v):
        pool.fill_(float("nan"))
    ids, kv = torch.randint(0, 97, (2, 19)), model.new_kv()
    found = torch.cat([model(part.to(DEVICE), kv).cpu() for part in ids.split([17, 1, 1], 1)], 1)
    assert benchmarks_cuda.relative_error(found, oracle(ids).double()) < 1e-5
    assert benchmarks_cuda.relative_error(model(ids.to(DEVICE)).cpu(), oracle(ids).double()) < 1e-5
    kv.release()
    assert model.cache.used_pages == 0


def test_any_config_of_the_plain_model(twins):
    for config in (dict(n_embd=7, n_head=1), dict(n_embd=48, n_head=4, scale_attn_weights=False),
                   dict(n_embd=48, n_head=3, scale_attn_by_inverse_layer_idx=True, layer_norm_epsilon=0.1)):
        oracle, ids = benchmarks_cuda.random_model(**config), torch.randint(0, 97, (2, 9))
        found = benchmarks_cuda.copy_as(oracle, engine_cuda.GPT2Flash, torch.float32, DEVICE)(ids.to(DEVICE)).cpu()
        assert benchmarks_cuda.relative_error(found, oracle(ids).double()) < 1e-5


# --- the scheduler

@pytest.fixture(scope="module")
def solo(tiny):
    return {name: [run_to_end(generate(tiny, prompt, params(**style, max_tokens=12)))[0] for prompt in PROMPTS]
            for name, style in STYLES.items()}


def flash(model, **options):
    model = engine.share_weights(model.to(DEVICE), engine_cuda.GPT2Flash, **options)
    for pool in (model.cache.k, model.cache.v):
        pool.fill_(float("nan"))
    return model


@pytest.mark.parametrize("style, options", [
    *((style, dict()) for style in STYLES), ("mixed", dict(prefill_chunk=40)),
    ("seeded", dict(pages=16, max_batch_size=3)), ("mixed", dict(page_size=4, pages=65, prefix_cache=False))], ids=str)
def test_together(twins, tiny, solo, style, options):
    options = dict(options)
    model = flash(tiny, page_size=options.pop("page_size", 16), max_pages=options.pop("pages", 64))
    scheduler = ContinuousBatchingScheduler(model, **options)
    for _ in range(2):  # the second time the prefix cache, if any, is warm
        requests = [Request(prompt, params(**STYLES[style], max_tokens=12)) for prompt in PROMPTS]
        scheduler.submit(*requests)
        run(scheduler)
        assert [drain(r) for r in requests] == [r.output_ids for r in requests] == solo[style]
        assert not scheduler.in_flight and all(r.pending == 0 for r in requests)
    assert bool(scheduler.stats()["preemptions"]) == (model.max_pages == 65)


def test_the_next_step_is_launched_before_the_last_ones_tokens_are_known(twins, tiny):
    scheduler = ContinuousBatchingScheduler(flash(tiny), 2)
    request = Request(PROMPTS[2], params(temperature=0, max_tokens=3))
    scheduler.submit(request)
    seen = []
    while scheduler.step():
        check_pages(scheduler)
        seen.append((len(scheduler.in_flight), len(request.output_ids)))
    assert seen == [(1, 0), (1, 1), (1, 2), (0, 3)]


def test_every_parameter_at_once(twins, tiny):
    """Bias, minimum length, penalties, truncation, each request's own: as engine.sample chooses."""
    draw, jobs = random.Random(0), []
    for n in range(9):
        jobs.append(SamplingParams(
            max_tokens=10, seed=n, temperature=draw.choice([0, 0.7, 1.5]), top_k=draw.choice([0, 1, 7, 60000]),
            top_p=draw.choice([1, 0.9]), min_p=draw.choice([0, 0.05]), logprobs=draw.choice([None, 0, 3]),
            repetition_penalty=draw.choice([1, 1.3]), presence_penalty=draw.choice([0, 0.5]),
            frequency_penalty=draw.choice([0, -0.5]), min_tokens=draw.choice([0, 5]),
            logit_bias=draw.choice([None, {13: 5.0, 50256: 20.0}])))
    alone = [Request(PROMPTS[n % 7], p) for n, p in enumerate(jobs)]
    for request in alone:
        run_to_end(generate(tiny, request))
    together = [Request(PROMPTS[n % 7], p) for n, p in enumerate(jobs)]
    engine.drain_steps(ContinuousBatchingScheduler(flash(tiny), 4), *together)
    for a, b in zip(alone, together):
        assert (a.output_ids, a.finish_reason) == (b.output_ids, b.finish_reason)
        assert len(a.logprobs) == len(b.logprobs)
        for one, other in zip(a.logprobs, b.logprobs):
            assert one.token == other.token and list(one.top) == list(other.top)
            assert abs(one.logprob - other.logprob) < 1e-4
    assert any(a.finish_reason == "stop" for a in alone)


def test_cancelled_and_ended_while_a_step_is_in_flight(twins, tiny, solo):
    scheduler = ContinuousBatchingScheduler(flash(tiny, max_pages=64), 3)
    stop = engine.load_tokenizer().decode(solo["greedy"][6][3:5])
    ends, cancelled, *others = [Request(PROMPTS[n], params(temperature=0, max_tokens=12, **more)) for n, more in
                                [(6, dict(stop=stop)), (5, {}), (7, {}), (3, {}), (4, {})]]
    scheduler.submit(ends, cancelled, *others)
    for _ in range(4):
        scheduler.step()
    assert cancelled.pending
    scheduler.cancel(cancelled)
    run(scheduler)
    assert cancelled.finish_reason == "abort" and ends.finish_reason == "stop"
    assert ends.output_ids == solo["greedy"][6][:len(ends.output_ids)] and len(ends.output_ids) <= 5
    assert drain(cancelled) == cancelled.output_ids == solo["greedy"][5][:len(cancelled.output_ids)]
    assert [r.output_ids for r in others] == [solo["greedy"][n] for n in (7, 3, 4)]


def test_nan_fails_its_request_alone(twins, tiny, solo, monkeypatch):
    scheduler = ContinuousBatchingScheduler(flash(tiny), 2)
    bad, good = (Request(PROMPTS[n], params(temperature=0, max_tokens=12)) for n in (4, 5))
    sample = engine_cuda.sample

    def poisoned(logits, records, *args):
        logits[records[:, sampling.SLOT] == 0, 7] = float("nan")
        return sample(logits, records, *args)

    monkeypatch.setattr(engine_cuda, "sample", poisoned)
    scheduler.submit(bad, good)
    run(scheduler)
    assert bad.finish_reason == "error" and "NaN" in str(bad.error)
    assert good.output_ids == solo["greedy"][5]


def test_a_launch_that_raises_and_the_next_that_does_not(twins, tiny, solo, monkeypatch):
    scheduler = ContinuousBatchingScheduler(flash(tiny), 2)
    with monkeypatch.context() as broken:
        broken.setattr(engine_cuda.FlashRunner, "_decode", lambda *args: 1 / 0)
        failed = Request(PROMPTS[4], params(temperature=0, max_tokens=12))
        scheduler.submit(failed)
        run(scheduler)
    assert failed.finish_reason == "error"
    request = Request(PROMPTS[4], params(temperature=0, max_tokens=12))
    scheduler.submit(request)
    run(scheduler)
    assert request.output_ids == solo["greedy"][4]


def test_guesses_and_scores_among_others(twins, tiny, solo):
    """Steps that need every token on the host come and go between those that do not."""
    draft = engine.Speculator(engine.share_weights(tiny, engine.GPT2Cached), 3)
    for options in (dict(draft=draft), dict()):
        scheduler = ContinuousBatchingScheduler(flash(tiny), 2, **options)
        first = Request(PROMPTS[6], params(**STYLES["mixed"], max_tokens=12))
        scored = Request(PROMPTS[3], params(temperature=0, max_tokens=12, prompt_logprobs=1))
        scheduler.submit(first)
        for _ in range(3):
            scheduler.step()
        scheduler.submit(scored)
        run(scheduler)
        assert first.output_ids == solo["mixed"][6] and scored.output_ids == solo["greedy"][3]
        assert len(scored.prompt_logprobs) == len(PROMPTS[3]) - 1


class ReplayedCalls(engine_cuda.FlashRunner):
    """As on a GPU, with calls in the place of graphs: what a step reads and writes lies where it lay at first."""

    def __init__(self, model, max_batch_size):
        super().__init__(model, max_batch_size)
        self.prompts = [32, 64]
        for tokens in self.prompts:
            self._capture(self._prompt_step, tokens, self._prompt_arrays([], [], tokens))
        for rows in self.batches:
            self._capture(self._decode_step, rows, [self._lines([], rows)])

    def _capture(self, step, size, arrays):
        static = engine_cuda.pinned(arrays, self.device)
        results = step(*engine_cuda.split_like(static, arrays))

        class Graph:
            def replay(graph):
                for _, _, others in self.graphs.values():            # graphs share memory: what one left is lost
                    for place in others:
                        place.fill_(0 if place.dtype == torch.int32 else float("nan"))
                for place, value in zip(results, step(*engine_cuda.split_like(static, arrays))):
                    place.copy_(value)

        self.graphs[step.__name__, size] = Graph(), static, results


@pytest.mark.skipif(DEVICE == "cuda", reason="there the graphs themselves are tested")
def test_steps_as_graphs_of_fixed_sizes(twins, monkeypatch):
    torch.manual_seed(0)
    oracle = benchmarks_cuda.random_model(n_embd=48, n_head=4)
    model = flash(oracle, max_pages=24)
    monkeypatch.setattr(engine_cuda.GPT2Flash, "new_runner", lambda *args: ReplayedCalls(*args))
    scheduler = ContinuousBatchingScheduler(model, 3, prefill_chunk=64)
    for style in STYLES.values():
        requests = [Request([7 * i * j % 97 for j in range(1, 2 + 6 * i)], params(**style, max_tokens=9))
                    for i in range(8)]
        scheduler.submit(*requests)
        run(scheduler)
        for request in requests:
            assert request.output_ids == list(generate(oracle, request.prompt_ids, request.params))


def test_batch_sizes():
    for most in (1, 2, 3, 8, 33, 64, 256):
        sizes = engine_cuda.batch_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most


def test_plan_of_no_rows_and_of_many():
    plan = engine.plan_rows([], [], [], 16).padded(32, 5, 3)
    assert plan.spans().sum() == 0 and (plan.slots == -1).all() and plan.page_ids.shape == (5, 3)
    assert len(engine_cuda.batch_arrays(plan, 64, 7)[-1]) == 7
    plan = engine.plan_rows([0, 20], [70, 3], [[5, 1, 2, 3, 4], [9, 8]], 16)
    assert plan.spans().tolist() == [[0, 70, 0], [70, 3, 20]] and plan.positions[-3:].tolist() == [20, 21, 22]
    assert plan.slots[-3:].tolist() == [8 * 16 + 4, 8 * 16 + 5, 8 * 16 + 6] and plan.slots[0] == 80
    tiles = plan.tiles(64)
    assert sorted(map(tuple, tiles.tolist())) == [(0, 0), (0, 64), (1, 0)] and tiles[-1].tolist() == [0, 64]
    assert np.all(np.diff(plan.slots[:16]) == 1)


# --- the command line

@pytest.mark.skipif(DEVICE == "cuda", reason="says what to do without a GPU")
def test_without_a_gpu_one_line_says_so():
    with pytest.raises(SystemExit, match=r"no GPU.*--check"):
        engine_cuda.main([])


def test_pages_that_others_take_while_tokens_are_on_their_way(tiny, twins):
    """Between planning and growing somebody else takes the pool: whoever is preempted has no token in flight."""
    model = engine.share_weights(tiny, engine_cuda.GPT2Flash, page_size=1, max_pages=200)
    scheduler = engine.ContinuousBatchingScheduler(model, 2)
    params = engine.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    requests, other = [engine.Request([5] * 16, params) for _ in range(2)], engine.PageTable(model.cache)
    scheduler.submit(*requests)
    for _ in range(3):
        scheduler.step()
    assert any(request.pending for request in requests)
    other.grow(model.cache.free_pages + model.cache.cached_pages)
    for _ in range(5):
        scheduler.step()
    assert any(request.preemptions for request in requests)
    other.release()
    while scheduler.step():
        pass
    expected = list(engine.generate(tiny, [5] * 16, params))
    assert [request.output_ids for request in requests] == [expected] * 2
    assert model.cache.used_pages == 0


def test_the_host_runs_ahead_however_few_pages_are_free(tiny, twins):
    model = engine.share_weights(tiny, engine_cuda.GPT2Flash, max_pages=20)
    scheduler, pending = engine.ContinuousBatchingScheduler(model, 64), []
    request = engine.Request([5] * 4, engine.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    launch = scheduler.runner.launch
    scheduler.runner.launch = lambda rows: pending.append(request.pending) or launch(rows)
    scheduler.submit(request)
    while scheduler.step():
        pass
    assert pending == [0] + [1] * 29


@pytest.mark.parametrize("extreme", [dict(top_p=1e-46), dict(repetition_penalty=1e39),
                                     dict(temperature=1e39, top_k=1), dict(temperature=1e-46)])
def test_numbers_that_float32_does_not_hold(tiny, twins, extreme):
    params = engine.SamplingParams(**(dict(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True) | extreme))
    request, model = engine.Request(IDS, params), engine.share_weights(tiny, engine_cuda.GPT2Flash)
    engine.drain_steps(engine.ContinuousBatchingScheduler(model, 1), request)
    assert request.output_ids == list(engine.generate(tiny, IDS, params))


def test_what_the_paged_kernel_would_read_wrongly_is_refused():
    q, pool = torch.randn(2, 3, 16), torch.randn(3, 64, 16)
    table, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    k = torch.randn(2, 3, 16)
    for wrong in (dict(q=q.transpose(1, 2).contiguous().transpose(1, 2)), dict(table=table.long()), dict(splits=3),
                  dict(scale=0.0), dict(new=(k, torch.randn(3, 2, 16).transpose(0, 1)))):
        given = dict(q=q, table=table) | {name: value for name, value in wrong.items() if name in ("q", "table")}
        more = {name: value for name, value in wrong.items() if name not in given}
        with pytest.raises(engine.UserError):
            engine_cuda.paged_attention(given["q"], pool, pool, given["table"], lengths, **more)
