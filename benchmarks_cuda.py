"""The GPU engine checked against float64 and measured."""

import argparse
import contextlib
import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

import engine
import engine_cuda
from benchmarks import (
    Table,
    check_outputs,
    drain_steps,
    greedy,
    latencies,
    pyplot,
    random_prompt,
    report,
    require_match,
    save_figure,
    weight_bytes,
)
from checkpoint import CONV1D, empty_weight
from engine_cuda import GPT2Flash, SamplerState, flash_attention
from errors import UserError, check_number, ends_with_one_line, first_line
from instructions import processor_name
from sampling import IN_PROMPT, RECORD, SamplingParams, sample_records
from scheduler import ContinuousBatchingScheduler, Request, generate, plan_rows

# ---------------------------------------------------------------------------------------------------
# Checks of each kernel against float64 or its plain twin. On a GPU `--check` runs them in full, the tests some of them
# by Triton's interpreter.

ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}   # relative; the interpreter truncates
LENGTHS = [(1, 1), (15, 15), (16, 16), (17, 17), (63, 63), (64, 64), (65, 65), (1, 17), (5, 64), (16, 80), (64, 65)]
HEAD_DIMS = (8, 16, 40, 64, 80, 128, 256)
PAGE = 16


class Case(NamedTuple):
    """What a check found: an error, and the most that is allowed."""

    name: str
    error: float
    limit: float


def relative_error(found: Tensor, exact: Tensor) -> float:
    """The distance to float64, relative to its size; NaN is far."""
    distance = (found.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30)
    return distance.nan_to_num(math.inf).item()


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention in float64; q (B, H, T, D) are the last of the S positions of k and v."""
    return engine.attention(q.double(), k.double(), v.double(), scale)


def limit_of(q: Tensor, k: Tensor, v: Tensor, exact: Tensor) -> float:
    """On a GPU in 16 bits twice the error of torch's own attention on the same input, else a fixed one."""
    if not q.is_cuda or q.dtype == torch.float32:
        return ROUNDING[q.dtype]
    T, S = q.shape[-2], k.shape[-2]
    seen = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return 2 * relative_error(torch.nn.functional.scaled_dot_product_attention(q, k, v, seen), exact)


def check_flash(device: str, dtype: torch.dtype, lengths: Sequence[tuple[int, int]] = LENGTHS,
                head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[Case]:
    """Lengths, offsets and head dims; views of a projection; NaN beyond the last key."""
    for (T, S), D in [(pair, 64) for pair in lengths] + [((17, 65), D) for D in head_dims]:
        q = torch.randn(2, T, 3, D, device=device, dtype=dtype).transpose(1, 2)
        k, v = torch.randn(2, S + 3, 2, 3, D, device=device, dtype=dtype).permute(2, 0, 3, 1, 4)
        k[:, :, S:] = math.nan
        v[:, :, S:] = math.nan
        seen = q, k[:, :, :S], v[:, :, :S]
        exact = exact_attention(*seen, D ** -0.5)
        found = flash_attention(q, k, v, start=S - T)
        yield Case(f"T {T} S {S} D {D}", relative_error(found, exact), limit_of(*seen, exact))


class RandomPages(NamedTuple):
    """Pools in which only the keys and values of some rows are stored, all else is NaN; and each row's page ids."""

    k: Tensor
    v: Tensor
    pages: list[list[int]]


def random_pages(device: str, dtype: torch.dtype, lengths: Sequence[int], H: int, D: int) -> RandomPages:
    """Pools (H, slots, D) with rows of these lengths, on pages in no order."""
    order = torch.randperm(sum(length // PAGE + 1 for length in lengths) + 3).tolist()
    pages = [[order.pop() for _ in range(length // PAGE + 1)] for length in lengths]
    k, v = torch.full((2, H, PAGE * 64, D), math.nan, device=device, dtype=dtype)
    for ids, length in zip(pages, lengths):
        slots = engine_cuda.row_slots(torch.tensor(ids, device=device), length, PAGE)
        k[:, slots] = torch.randn(H, length, D, device=device, dtype=dtype)
        v[:, slots] = torch.randn(H, length, D, device=device, dtype=dtype)
    return RandomPages(k, v, pages)


def check_paged(device: str, dtype: torch.dtype, head_dims: Sequence[int] = HEAD_DIMS,
                lengths: Sequence[int] = (0, 1, 15, 16, 17, 63, 64, 200)) -> Iterator[Case]:
    """One query a row, with and without a new key, keys split or not; a row that is not there is left alone."""
    for D, splits, has_new in [(D, splits, new) for D in head_dims for splits in (1, 8) for new in (False, True)]:
        pools = random_pages(device, dtype, lengths, 3, D)
        page_ids = plan_rows(lengths, [1] * len(lengths), pools.pages, PAGE).page_ids
        table, = engine_cuda.upload([page_ids], device)
        q, *new = torch.randn(3, len(lengths), 3, D, device=device, dtype=dtype)
        stored = torch.tensor(lengths, dtype=torch.int32, device=device)
        if has_new:
            stored[0] = -1
        out = engine_cuda.paged_attention(q, pools.k, pools.v, table, stored, PAGE, None, new if has_new else None,
                                          splits)
        worst = 0.0
        for row, length in enumerate(stored.tolist()):
            slots = engine_cuda.row_slots(table[row], length + has_new, PAGE)
            if has_new and length >= 0 and not torch.equal(pools.k[:, slots[-1]], new[0][row]):
                worst = math.inf                                     # not stored
            exact = torch.zeros_like(q[:1])
            if len(slots):
                exact = exact_attention(q[row][None, :, None], pools.k[None, :, slots], pools.v[None, :, slots],
                                        D ** -0.5)
            worst = max(worst, relative_error(out[row].flatten(), exact.flatten()))
        yield Case(f"D {D} splits {splits} new {has_new}", worst, ROUNDING[dtype])


def check_prompts(device: str, dtype: torch.dtype, head_dims: Sequence[int] = (64, 80)) -> Iterator[Case]:
    """Rows of unequal lengths, some behind stored keys: stored, then attended over their pages."""
    stored, counts = [0, 17, 33, 100], [65, 1, 20, 64]
    N = sum(counts) + 9                                              # some that are stored nowhere
    for D in head_dims:
        pools = random_pages(device, dtype, [a + b for a, b in zip(stored, counts)], 3, D)
        plan = plan_rows(stored, counts, pools.pages, PAGE).padded(N, 6, 12)
        block_m = engine_cuda.flash_config(D, dtype, 0)[0]
        arrays = engine_cuda.batch_arrays(plan, block_m, N // block_m + 6)
        batch = engine_cuda.Batch(*engine_cuda.upload(arrays, device))
        q, k, v = torch.randn(N, 3, 3, D, device=device, dtype=dtype).unbind(1)
        pools.k[:, batch.slots[:sum(counts)].long()] = math.nan
        engine_cuda.store(k, v, pools.k, pools.v, batch.slots)
        out = engine_cuda.paged_flash_attention(q, pools.k, pools.v, batch, D ** -0.5, PAGE)
        for (first, count, before), ids, _ in zip(batch.spans.tolist(), batch.table, counts):
            slots = engine_cuda.row_slots(ids, before + count, PAGE)
            row = slice(first, first + count)
            inputs = q[row].transpose(0, 1)[None], pools.k[None, :, slots], pools.v[None, :, slots]
            exact = exact_attention(*inputs, D ** -0.5)
            yield Case(f"D {D} {count} after {before}", relative_error(out[row].transpose(0, 1)[None], exact),
                       limit_of(*inputs, exact))


def check_linear(device: str, dtype: torch.dtype,
                 shapes: Sequence[tuple[int, int]] = ((768, 2304), (768, 768), (100, 33))) -> Iterator[Case]:
    """With and without what is fused, against float64; 16 bits may err as much as a product that is rounded once."""
    for (K, N), n_rows, activation in [(shape, n_rows, a) for shape in shapes for n_rows in (1, 3)
                                       for a in ("", *engine.ACTIVATIONS)]:
        linear, norm = engine.Linear(K, N), torch.nn.LayerNorm(K)
        for parameter in (*linear.parameters(), *norm.parameters()):
            parameter.requires_grad_(False).normal_().copy_(parameter.to(dtype))
        x = torch.randn(n_rows, K).to(dtype)
        residual = torch.randn(n_rows, N).to(dtype)
        exact = engine_cuda.linear_twin(x.double(), linear.double(), norm.double(), activation, residual.double())
        found = engine_cuda.fused_linear(x.to(device), linear.to(device, dtype), norm.to(device, dtype), activation,
                                         residual.to(device))
        yield Case(f"{K} to {N}, {n_rows} rows {activation}", relative_error(found.cpu(), exact), ROUNDING[dtype])


def random_records(n_rows: int, V: int) -> np.ndarray:
    """A record for each slot, with parameters and noise drawn at random."""
    draw = np.random.default_rng(0)
    records = np.zeros(n_rows, RECORD)
    for name, values in dict(temperature=[0, 0.5, 1, 3], top_k=[1, 5, 50, V], top_p=[0.1, 0.9, 1], min_p=[0, 0.1],
                             repetition=[1, 1.3], frequency=[0, 0.2], presence=[0, 0.1], flags=range(8)).items():
        records[name] = draw.choice(values, n_rows)
    records["slot"] = np.arange(n_rows)
    records["key"] = draw.integers(-2**31, 2**31, n_rows)
    records["key2"] = draw.integers(-2**31, 2**31, n_rows)
    return records


def check_sample(device: str, dtype: torch.dtype, V: int = 50257, n_rows: int = 64) -> Iterator[Case]:
    """Every parameter at once against the twin: the same tokens, the same counts; NaN fails its row alone."""
    records = torch.from_numpy(random_records(n_rows, V).view(np.int32).reshape(n_rows, -1))
    ours, plain = (SamplerState.new(n_rows, V, place) for place in (device, "cpu"))
    logits = (3 * torch.randn(n_rows, V)).to(dtype).float()          # 16 bits: many are equally likely
    logits[1, 3] = math.nan
    logits[2] = -math.inf
    counts = torch.randint(0, 3, (n_rows, V)) + IN_PROMPT * torch.randint(0, 2, (n_rows, V))
    bias = torch.randn(n_rows, V)
    for state in ours, plain:
        state.counts.copy_(counts)
        state.bias.copy_(bias)
    found = engine_cuda.sample(logits.to(device), records.to(device), ours, 5).cpu()
    same = found == sample_records(logits, records, plain, 5)        # where top_p ends a sum's rounding may decide
    yield Case("tokens", 1 - same.float().mean().item(), 0.02 if V > 1000 else 0)
    yield Case("counts", (ours.counts.cpu()[same] != plain.counts[same]).float().mean().item(), 0)


def random_model(**config) -> engine.GPT2:
    """A small plain GPT2 in float32 whose weights are large enough for a wrong activation or epsilon to show."""
    config = engine.GPT2Config(**(dict(vocab_size=97, n_positions=64, n_layer=2, eos_token_id=0) | config))
    model = engine.empty_model(engine.GPT2, config, "random", {})
    state = {name: torch.randn(value.shape) * 0.2 + ("ln_" in name and name.endswith("weight"))
             for name, value in model.state_dict().items()}
    state["lm_head.weight"] = state["wte.weight"]
    return engine.with_weights(model, state)


def copy_as(model: engine.GPT2, variant: type[engine.GPT2], dtype: torch.dtype, device: str,
            backend: engine.Backend | None = None) -> engine.GPT2:
    """The same weights as another class, in another dtype, on another device. Where no backend is given: on the plain
    path, but for GPT2Flash."""
    state = {name: empty_weight(value.shape, dtype, device).copy_(value) for name, value in model.state_dict().items()}
    if model.lm_head.weight is model.wte.weight:
        state["lm_head.weight"] = state["wte.weight"]
    return engine.with_weights(engine.empty_model(variant, model.config, model.name, {}, backend), state)


def check_model(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """GPT2Flash against GPT2 in float32: all at once, in chunks over pages, token by token.

    16 bits may err twice as much as the plain model does in them; float32 1e-3 of the largest logit.
    """
    for shape in (dict(n_embd=48, n_head=4), dict(n_embd=160, n_head=2, activation_function="gelu")):
        oracle, ids = random_model(**shape), torch.randint(0, 97, (3, 40))
        plain, model = (copy_as(oracle, variant, dtype, device) for variant in (engine.GPT2, GPT2Flash))
        exact, ids = oracle(ids), ids.to(device)
        limit = 1e-3 if dtype == torch.float32 else 2 * relative_error(plain(ids).cpu(), exact)
        yield Case(f"{shape} at once", relative_error(model(ids).cpu(), exact), limit)
        kv = model.new_kv()
        parts = [model(part, kv).cpu() for part in ids.split([17, 16] + [1] * 7, dim=1)]
        yield Case(f"{shape} in parts", relative_error(torch.cat(parts, 1), exact), limit)


def check_texts(device: str, dtype: torch.dtype, prompts: int = 20, tokens: int = 100) -> Iterator[Case]:
    """What the scheduler writes, greedily and sampled, against GPT2Cached, one prompt after another: `tiny`, and a
    small model in few slots, where prompts are always computed beside tokens, and texts end early."""
    tiny, small = engine.load_model("tiny", engine.GPT2Cached), random_model(n_embd=48, n_head=4)
    most = dict(temperature=0.8, top_p=0.95, top_k=50, repetition_penalty=1.15, frequency_penalty=0.1, min_tokens=3,
                logit_bias={13: 2.0}, min_p=0.01)
    jobs = [(tiny, 8, style) for style in (dict(temperature=0), dict(temperature=1.0), most)] + [(small, 3, most)]
    for oracle, slots, style in jobs if dtype == torch.float32 else ():
        flash, V = copy_as(oracle, GPT2Flash, dtype, device), oracle.config.vocab_size
        requests = [Request(random_prompt(1 + 7 * n % (V // 2), V),
                            SamplingParams(**style, max_tokens=min(tokens, V // 8), seed=n)) for n in range(prompts)]
        drain_steps(ContinuousBatchingScheduler(flash, slots, prefill_chunk=64), *requests)
        oracle = copy_as(oracle, engine.GPT2Cached, dtype, device)
        differ = sum(request.output_ids != list(generate(oracle, request.prompt_ids, request.params))
                     for request in requests)
        yield Case(f"{oracle.name} {style}", differ, 0 if style == jobs[0][2] else 1)   # a draw between all but equals


CHECKS = {"flash attention": check_flash, "paged attention": check_paged, "prompts over pages": check_prompts,
          "fused linear": check_linear, "sampling": check_sample, "model": check_model, "texts": check_texts}
SMALL = {check_sample: dict(V=97, n_rows=8), check_linear: dict(shapes=((48, 33),)),
         check_texts: dict(prompts=0)}  # for the interpreter


def run_checks(device: str) -> None:
    """Prints a line for each kernel and dtype, raises SystemExit(1) where one errs."""
    failed = False
    for name, check in CHECKS.items():
        for dtype in engine.DTYPES.values():
            torch.manual_seed(0)
            cases = list(check(device, dtype, **(SMALL.get(check, {}) if device == "cpu" else {})))
            if not cases:
                continue
            worst = max(cases, key=lambda case: case.error / max(case.limit, 1e-30))
            good = all(case.error <= case.limit for case in cases)
            print(f"{'ok' if good else 'FAILED':7}{name:19}{str(dtype).removeprefix('torch.'):9}{len(cases):3} cases, "
                  f"worst error {worst.error:.1e} of {worst.limit:.1e} allowed ({worst.name})", flush=True)
            failed |= not good
    if failed:
        raise SystemExit(1)


# ---------------------------------------------------------------------------------------------------
# Benchmarks

def microseconds(run: Callable[[], Any]) -> tuple[float, float, float]:
    """Median, least and most time of a call on the device, by graph replay."""
    torch.cuda.synchronize()                                         # the timer's stream does not wait for ours
    times = [1e3 * t for t in triton.testing.do_bench_cudagraph(run, rep=30, return_mode="all")]
    return statistics.median(times), min(times), max(times)


def ceilings() -> tuple[float, float]:
    """What this GPU reaches: bytes a second of a pass that reads and writes; operations a second of a bfloat16 product.

    A copy would not do: in a graph it goes to the copy engine, which is slower than the processors.
    """
    data = torch.empty(2**30, device="cuda")
    matrix = torch.randn(8192, 8192, device="cuda").bfloat16()
    target = torch.empty_like(data)
    return (2e6 * data.nbytes / microseconds(lambda: torch.neg(data, out=target))[0],
            2e6 * 8192**3 / microseconds(lambda: matrix @ matrix)[0])


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every score written out in the inputs' dtype, as it stands in textbooks: engine.attention is exact instead."""
    T, S = q.shape[2], k.shape[2]
    scores = (q @ k.transpose(2, 3)) * q.shape[3] ** -0.5
    scores.masked_fill_(torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1), -math.inf)
    return torch.softmax(scores, -1) @ v


def torch_attention(backend: str) -> Callable[..., Tensor]:
    """torch's own causal attention by one of its backends."""
    def attend(q, k, v):
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return attend


ATTENTIONS = {"standard": plain_attention, "flash (ours)": flash_attention,
              "flash (ours), tf32": functools.partial(flash_attention, precision="tf32"),
              "torch flash": torch_attention("FLASH_ATTENTION"), "torch cuDNN": torch_attention("CUDNN_ATTENTION"),
              "torch efficient": torch_attention("EFFICIENT_ATTENTION")}


def random_qkv(B: int, T: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """GPT-2's shape: 12 heads of 64, views of one projection."""
    return torch.randn(B, T, 3, 12, 64, device="cuda", dtype=dtype).permute(2, 0, 3, 1, 4)


def bench_attention(args: argparse.Namespace) -> Table:
    """Each kernel's error against float64 over the last queries, then its time; ours must err no more than torch's."""
    rows = []
    for B, T, dtype in [(1, 128, "bfloat16"), (1, 256, "bfloat16"), (1, 512, "bfloat16"), (1, 1024, "bfloat16"),
                        (8, 1024, "bfloat16"), (1, 4096, "bfloat16"), (1, 16384, "bfloat16"), (1, 1024, "float32")]:
        q, k, v = random_qkv(B, T, engine.DTYPES[dtype])
        last = slice(-min(T, 256), None)
        errors, calls = {}, {}
        exact = exact_attention(q[:, :, last], k, v, 64 ** -0.5)
        for name, attend in ATTENTIONS.items():
            with contextlib.suppress(RuntimeError), warnings.catch_warnings(action="ignore"):
                errors[name] = relative_error(attend(q, k, v)[:, :, last], exact)
                calls[name] = functools.partial(attend, q, k, v)  # not one that does not take this dtype or length
        if dtype == "bfloat16":
            del calls["flash (ours), tf32"]
        theirs = 2 * errors.get("torch flash", errors["flash (ours)"]) if dtype == "bfloat16" else 1e-5
        require_match(f"attention B{B} T{T} {dtype}", errors["flash (ours)"] < theirs)
        for name, call in calls.items():
            time_us, least, most = microseconds(call)
            rate = 2 * 12 * 64 * B * T * (T + 1) / time_us * 1e6     # two products over half of the scores
            rows.append({"B": B, "T": T, "dtype": dtype, "attention": name, "us": time_us, "min": least, "max": most,
                         "TFLOP/s": rate / 1e12, "share of peak": rate / args.ceilings[1],
                         "error": f"{errors[name]:.0e}"})
    return rows


def bench_memory(args: argparse.Namespace) -> Table:
    """The most memory that attention takes beside its inputs, by length, up to where standard attention has no room."""
    rows = []
    for T in (1024, 2048, 4096, 8192, 16384, 32768, 65536):
        q, k, v = random_qkv(1, T)
        for name in ("standard", "flash (ours)"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            try:
                ATTENTIONS[name](q, k, v)
                rows.append({"T": T, "attention": name, "peak MB": (torch.cuda.max_memory_allocated() - before) / 1e6})
            except torch.cuda.OutOfMemoryError:
                rows.append({"T": T, "attention": name, "peak MB": "no room"})
    return rows


def our_scheduler(model: GPT2Flash, batch: int) -> ContinuousBatchingScheduler:
    """A scheduler of so many slots, with pages for a whole context in each."""
    pages = batch * -(-model.config.n_positions // 16)
    return ContinuousBatchingScheduler(engine.share_weights(model, GPT2Flash, max_pages=pages), batch,
                                       prefix_cache=False)


def time_ours(scheduler: ContinuousBatchingScheduler, batch: int, prompt: list[int],
              new: int) -> tuple[float, float]:
    """Seconds to the first token of all rows, and of a step after it."""
    requests = [Request(prompt, greedy(new)) for _ in range(batch)]
    drain_steps(scheduler, *requests)
    first = max(request.token_times[0] - request.arrival_time for request in requests)
    return first, statistics.median(np.diff(requests[0].token_times))


def transformers_model(model: engine.GPT2) -> torch.nn.Module:
    """The same weights in transformers' GPT-2."""
    import transformers

    c = model.config
    oracle = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.n_positions, n_embd=c.n_embd, n_layer=c.n_layer, n_head=c.n_head))
    state = {(name if name.startswith("lm_head") else f"transformer.{name}"):
             (value.t() if CONV1D.fullmatch(name) else value) for name, value in model.state_dict().items()}
    oracle.load_state_dict(state)
    return oracle.to("cuda", model.wte.weight.dtype).eval()


def time_transformers(oracle: torch.nn.Module, batch: int, prompt: list[int], new: int,
                      **options) -> tuple[float, float]:
    """As time_ours, by transformers' generate."""
    ids = torch.tensor([prompt] * batch, device="cuda")
    seconds = {}
    for tokens in (1, 1, new, 1, new):  # the first of each warm up
        torch.cuda.synchronize()
        start = time.perf_counter()
        oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                        do_sample=False, pad_token_id=0, **options)
        torch.cuda.synchronize()
        seconds[tokens] = time.perf_counter() - start
    return seconds[1], (seconds[new] - seconds[1]) / (new - 1)


def time_compiled(oracle: torch.nn.Module, batch: int, prompt: list[int], new: int) -> tuple[float, float]:
    """As time_ours, by a loop over transformers' model with a static cache, compiled into CUDA graphs."""
    from transformers import StaticCache

    forward = torch.compile(oracle.forward, mode="reduce-overhead", fullgraph=True)
    cache = StaticCache(config=oracle.config, max_cache_len=len(prompt) + new)
    ids = torch.tensor([prompt] * batch, device="cuda")
    for _ in range(3):
        cache.reset()
        torch.cuda.synchronize()
        marks = [time.perf_counter()]
        logits = oracle(ids, past_key_values=cache, cache_position=torch.arange(ids.shape[1], device="cuda")).logits
        for position in range(ids.shape[1], ids.shape[1] + new):
            token = logits[:, -1:].argmax(-1)
            torch.cuda.synchronize()
            marks.append(time.perf_counter())
            torch.compiler.cudagraph_mark_step_begin()
            logits = forward(token, past_key_values=cache,
                             cache_position=torch.tensor([position], device="cuda")).logits.clone()
    gaps = np.diff(marks)
    return gaps[0], statistics.median(gaps[1:])


def bench_generation(args: argparse.Namespace) -> Table:
    """First token and decode after 16 tokens, all rows alike: the scheduler, and transformers in three ways."""
    model, new = args.model, args.tokens
    prompt = random_prompt(16, model.config.vocab_size)
    oracle = transformers_model(model)
    rows = []
    ways = {"transformers": functools.partial(time_transformers, oracle)}
    if not args.quick:
        ways |= {"transformers, static": functools.partial(time_transformers, oracle, cache_implementation="static"),
                 "torch.compile, static": functools.partial(time_compiled, oracle)}
    kv = model.new_kv()
    ids = torch.tensor([prompt], device="cuda")
    parts = torch.cat([model(ids[:, :9], kv), model(ids[:, 9:], kv)], 1)
    exact = copy_as(model, engine.GPT2, torch.float32, "cuda")(ids).double()
    ours, theirs = relative_error(parts, exact), relative_error(oracle(ids).logits, exact)
    require_match(f"logits err by {ours:.1e} against float32, transformers' by {theirs:.1e}",
                  ours <= max(2 * theirs, 1e-5))
    for batch in args.batches:
        scheduler = our_scheduler(model, batch)
        found = [time_ours(scheduler, batch, prompt, new) for _ in range(args.runs + 1)][1:]
        times = {"GPT2Flash": (statistics.median(f for f, _ in found), statistics.median(step for _, step in found))}
        for name, way in ways.items():
            try:
                times[name] = way(batch, prompt, new)
            except Exception as err:  # another version than this was written for, a compiler that is missing
                print(f"{name} at batch {batch} did not run: {first_line(err)}", flush=True)
        floor = decode_bytes(model, batch, len(prompt) + new / 2) / args.ceilings[0]
        for name, (first, step) in times.items():
            rows.append({"batch": batch, "engine": name, "first token ms": 1e3 * first, "ms a step": 1e3 * step,
                         "tokens/s": batch / step, "floor ms": 1e3 * floor, "times the floor": step / floor})
    return rows


def decode_bytes(model: engine.GPT2, batch: int, stored: float) -> float:
    """What a decode step must read: the weights once, and the keys and values of `stored` tokens a row."""
    c = model.config
    return weight_bytes(model) + batch * stored * 2 * c.n_layer * c.n_embd * model.wte.weight.element_size()


def bench_batching(args: argparse.Namespace) -> Table:
    """Requests of 5 to 200 prompt tokens that arrive at once, 100 new tokens each, through the scheduler."""
    lengths = np.random.default_rng(0).integers(5, 201, size=256)
    V = args.model.config.vocab_size
    scheduler = our_scheduler(args.model, 256)
    runs = []
    for _ in range(args.runs + 2):  # two to warm up
        requests = [Request(random_prompt(int(n), V), greedy(100)) for n in lengths]
        start = time.monotonic()
        drain_steps(scheduler, *requests)
        runs.append((time.monotonic() - start, requests))
    found = runs[2:]
    alone = Request(requests[7].prompt_ids, greedy(100))
    drain_steps(scheduler, alone)
    same = sum(a == b for a, b in zip(alone.output_ids, requests[7].output_ids))
    print(f"A text alone and among 255 others: {same} of 100 tokens are the same (16 bits may round a tie otherwise)")
    seconds = statistics.median(s for s, _ in found)
    # The least time: a hundred decode steps by their bytes, the prompts by their operations.
    prompts, parameters = int(lengths.sum()), sum(p.numel() for p in args.model.parameters())
    floor = (100 * decode_bytes(args.model, 256, lengths.mean() + 50) / args.ceilings[0]
             + 2 * prompts * parameters / args.ceilings[1])
    measures = {name: value for name, value in latencies(found[0][1]).items() if name.endswith("median")}
    return [{"requests": 256, "prompt tokens": prompts, "new": 25600, "seconds": seconds,
             "min": min(s for s, _ in found), "max": max(s for s, _ in found), "tokens/s": 25600 / seconds,
             "floor s": floor} | measures]


def bench_devices(args: argparse.Namespace) -> Table:
    """The same requests on the CPU, in float32 as it likes it best, and on the GPU."""
    rows = []
    models = {torch.cuda.get_device_name(): args.model,              # first: the CPU's threads stay busy a while
              processor_name(): copy_as(args.model, engine.GPT2Paged, torch.float32, "cpu", engine.best_backend("cpu"))}
    for batch in (1, 8):
        for device, model in models.items():
            scheduler = ContinuousBatchingScheduler(model, batch, prefix_cache=False)
            prompt = random_prompt(16, model.config.vocab_size)
            first, step = [time_ours(scheduler, batch, prompt, 50) for _ in range(3)][-1]
            rows.append({"batch": batch, "device": device, "dtype": str(model.wte.weight.dtype).removeprefix("torch."),
                         "first token ms": 1e3 * first, "ms a step": 1e3 * step, "tokens/s": batch / step})
    return rows


BENCHMARKS = {
    "attention": ("Attention, 12 heads of 64, causal; us by graph replay, median and range", bench_attention),
    "memory": ("The most memory that attention takes, bfloat16, batch 1", bench_memory),
    "generation": ("Generation after 16 tokens, greedy; the floor is the bytes of a step over the bandwidth",
                   bench_generation),
    "batching": ("256 requests through the scheduler; latencies in ms", bench_batching),
    "devices": ("CPU against GPU, through the scheduler", bench_devices),
}


def run_benchmarks(args: argparse.Namespace) -> None:
    """The benchmarks of --only (all without it): a table each, and the files of --json and --plot."""
    check_outputs(args, drawn=("attention", "memory", "generation"))
    args.model = engine.load_model(args.model, GPT2Flash, dtype=args.dtype, device="cuda", stand_in="random")
    args.ceilings = ceilings()
    machine = {"model": args.model.name, "dtype": args.dtype, "GPU": torch.cuda.get_device_name(), "runs": args.runs,
               "memory TB/s": f"{args.ceilings[0] / 1e12:.2f}", "product TFLOP/s": f"{args.ceilings[1] / 1e12:.0f}",
               "torch": torch.__version__, "triton": triton.__version__}
    report(machine, BENCHMARKS, args, plot_results, args)


COLOURS = {"standard": "#9aa0a6", "flash (ours)": "#1a73e8", "torch flash": "#e8710a", "torch cuDNN": "#188038",
           "GPT2Flash": "#1a73e8", "transformers": "#9aa0a6", "transformers, static": "#e8710a",
           "torch.compile, static": "#188038"}


class Panel(NamedTuple):
    """A panel of the picture: one column of a benchmark's table over another, a line for each `label`."""

    benchmark: str
    title: str
    x: str
    y: str
    label: str
    unit: str

    def lines(self, table: Table) -> dict[str, list[tuple[float, float]]]:
        """The points of each line; attention is drawn where it is bfloat16 at batch 1, and where it had room."""
        found = {}
        for row in table:
            if row.get("B", 1) == 1 and row.get("dtype", "bfloat16") == "bfloat16" and row[self.y] != "no room":
                found.setdefault(row[self.label], []).append((row[self.x], row[self.y]))
        return found


PANELS = [Panel("attention", "Attention, bfloat16, batch 1", "T", "us", "attention", "us"),
          Panel("memory", "Memory of attention", "T", "peak MB", "attention", "MB"),
          Panel("generation", "Generation", "batch", "tokens/s", "engine", "tokens/s")]


def plot_results(results: dict[str, Any], path: str) -> None:
    """Time and memory of attention by length, tokens a second by batch."""
    panels = [panel for panel in PANELS if panel.benchmark in results]
    figure, axes = pyplot().subplots(1, len(panels), figsize=(4.6 * len(panels), 4), layout="constrained",
                                     squeeze=False)
    for axis, panel in zip(axes[0], panels):
        lines = panel.lines(results[panel.benchmark])
        for name in (name for name in COLOURS if name in lines):
            axis.plot(*zip(*lines[name]), marker="o", label=name, color=COLOURS[name])
        axis.set(title=panel.title, ylabel=panel.unit, xlabel="batch" if panel.x == "batch" else "tokens")
        axis.loglog()
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8)
    save_figure(figure, results, results["machine"]["GPU"], path)


# ---------------------------------------------------------------------------------------------------
# The command line of engine_cuda.py

def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of `python engine_cuda.py`."""
    parser = argparse.ArgumentParser(description="GPT-2 on the GPU. Without --check: the GPU benchmarks.")
    add = parser.add_argument
    add("--check", action="store_true", help="every kernel against float64 (on a CPU with TRITON_INTERPRET=1)")
    add("--model", default="auto", help="as engine.py's (default auto: gpt2, or random weights in its shape)")
    add("--dtype", default="bfloat16", choices=engine.DTYPES)
    add("--tokens", type=int, default=100, help="new tokens (default 100)")
    add("--runs", type=int, default=3, help="rounds of generation and batching (default 3)")
    add("--batches", type=int, nargs="+", default=[1, 8, 64, 256], help="of generation (default 1 8 64 256)")
    add("--only", choices=BENCHMARKS, help="one benchmark")
    add("--quick", action="store_true", help="leave out what torch.compile takes minutes for")
    add("--json", metavar="FILE", help="write the results as JSON")
    add("--plot", metavar="FILE", help="draw the results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """`python engine_cuda.py`. What a user can mend is one line on stderr."""
    args = parse_args(argv)
    with ends_with_one_line("engine_cuda.py"):
        check_number("--tokens", args.tokens, Integral, 2, 1000)
        check_number("--runs", args.runs, Integral, 1, 1000)
        for batch in args.batches:
            check_number("--batches", batch, Integral, 1, 1024)
        interpreted = args.check and engine_cuda.INTERPRET
        if not torch.cuda.is_available() and not interpreted:
            raise UserError("there is no GPU here. TRITON_INTERPRET=1 python engine_cuda.py --check proves the kernels "
                            "on the CPU, python engine.py measures the engine on it")
        if args.check:
            run_checks("cpu" if interpreted else "cuda")
        else:
            run_benchmarks(args)
