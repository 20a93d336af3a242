"""The GPU engine checked against float64 and measured."""

import contextlib
import functools
import math
import statistics
import time
import warnings

import numpy as np
import torch
import triton

import engine
from engine_cuda import (
    RECORD,
    GPT2Flash,
    Rows,
    SamplerState,
    flash_attention,
    flash_config,
    fused_linear,
    linear_twin,
    paged_attention,
    paged_flash_attention,
    plan_rows,
    sample,
    sample_twin,
    slots_of,
    store,
    upload,
)

# ---------------------------------------------------------------------------------------------------
# Checks: each yields (case, error, limit). On a GPU `--check` runs them in full, the tests some by interpreter.

ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}   # relative; the interpreter cuts off
LENGTHS = [(1, 1), (15, 15), (16, 16), (17, 17), (63, 63), (64, 64), (65, 65), (1, 17), (5, 64), (16, 80), (64, 65)]
HEAD_DIMS = (8, 16, 40, 64, 80, 128, 256)


def error(found, exact):
    """The distance to float64, relative to its size; NaN is far."""
    distance = (found.double() - exact).norm() / exact.norm().clamp(min=1e-30)
    return distance.nan_to_num(math.inf).item()


def exact_attention(q, k, v, scale):
    """Attention in float64; the queries are the last positions."""
    T, S = q.shape[-2], k.shape[-2]
    scores = q.double() @ k.double().transpose(-2, -1) * scale
    scores.masked_fill_(torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1), -math.inf)
    return torch.softmax(scores, -1) @ v.double()


def limit_of(q, k, v, exact):
    """On a GPU in 16 bits twice the error of torch's own attention on the same input, else a fixed one."""
    if not q.is_cuda or q.dtype == torch.float32:
        return ROUNDING[q.dtype]
    T, S = q.shape[-2], k.shape[-2]
    seen = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return 2 * error(torch.nn.functional.scaled_dot_product_attention(q, k, v, seen), exact)


def check_flash(device, dtype, lengths=LENGTHS, head_dims=HEAD_DIMS):
    """Lengths, offsets and head dims; views of a projection; NaN beyond the last key."""
    for (T, S), D in [(pair, 64) for pair in lengths] + [((17, 65), D) for D in head_dims]:
        q = torch.randn(2, T, 3, D, device=device, dtype=dtype).transpose(1, 2)
        k, v = torch.randn(2, S + 3, 2, 3, D, device=device, dtype=dtype).permute(2, 0, 3, 1, 4)
        k[:, :, S:], v[:, :, S:] = math.nan, math.nan
        exact = exact_attention(q, k[:, :, :S], v[:, :, :S], D ** -0.5)
        yield (f"T {T} S {S} D {D}", error(flash_attention(q, k, v, start=S - T), exact),
               limit_of(q, k[:, :, :S], v[:, :, :S], exact))


def random_pages(device, dtype, lengths, H, D, page_size=16):
    """Pools in which only the keys of rows of these lengths are stored, all else is NaN -> pools, page ids a row."""
    order = torch.randperm(sum(length // page_size + 1 for length in lengths) + 3).tolist()
    pages = [[order.pop() for _ in range(length // page_size + 1)] for length in lengths]
    k, v = torch.full((2, H, page_size * 64, D), math.nan, device=device, dtype=dtype)
    for ids, length in zip(pages, lengths):
        slots = slots_of(torch.tensor(ids, device=device), length, page_size)
        k[:, slots], v[:, slots] = torch.randn(2, H, length, D, device=device, dtype=dtype)
    return k, v, pages


def check_paged(device, dtype, head_dims=HEAD_DIMS, lengths=(0, 1, 15, 16, 17, 63, 64, 200)):
    """One query a row, with and without a new key, keys split or not; a row that is not there is left alone."""
    for D, splits, has_new in [(D, splits, new) for D in head_dims for splits in (1, 8) for new in (False, True)]:
        k_pool, v_pool, pages = random_pages(device, dtype, lengths, 3, D)
        rows = Rows(*upload(plan_rows(lengths, [1] * len(lengths), pages, 16, 16), device), 16)
        q, *new = torch.randn(3, len(lengths), 3, D, device=device, dtype=dtype)
        stored = torch.tensor(lengths, dtype=torch.int32, device=device)
        if has_new:
            stored[0] = -1
        out = paged_attention(q, k_pool, v_pool, rows.table, stored, 16, None, new if has_new else None, splits)
        worst, limit = 0.0, ROUNDING[dtype]
        for row, length in enumerate(stored.tolist()):
            slots = slots_of(rows.table[row], length + has_new, 16)
            if has_new and length >= 0 and not torch.equal(k_pool[:, slots[-1]], new[0][row]):
                worst = math.inf                                     # not stored
            k, v = k_pool[None, :, slots], v_pool[None, :, slots]
            exact = exact_attention(q[row][None, :, None], k, v, D ** -0.5) if len(slots) else torch.zeros_like(q[:1])
            worst = max(worst, error(out[row].flatten(), exact.double().flatten()))
        yield f"D {D} splits {splits} new {has_new}", worst, limit


def check_prompts(device, dtype, head_dims=(64, 80)):
    """Rows of unequal lengths, some behind stored keys: stored, then attended over their pages."""
    for D in head_dims:
        stored, counts = [0, 17, 33, 100], [65, 1, 20, 64]
        k_pool, v_pool, pages = random_pages(device, dtype, [a + b for a, b in zip(stored, counts)], 3, D)
        plan = plan_rows(stored, counts, pages, 16, flash_config(D, dtype, 0)[0], (sum(counts) + 9, 6, 12))
        rows = Rows(*upload(plan, device), 16)
        q, k, v = torch.randn(sum(counts) + 9, 3, 3, D, device=device, dtype=dtype).unbind(1)
        k_pool[:, rows.slots[:sum(counts)].long()] = math.nan
        store(k, v, k_pool, v_pool, rows.slots)
        out = paged_flash_attention(q, k_pool, v_pool, rows, D ** -0.5)
        for (first, count, before), ids, _ in zip(rows.spans.tolist(), rows.table, counts):
            slots, new = slots_of(ids, before + count, 16), slice(first, first + count)
            q_row, k_row, v_row = (x[None] for x in (q[new].transpose(0, 1), k_pool[:, slots], v_pool[:, slots]))
            exact = exact_attention(q_row, k_row, v_row, D ** -0.5)
            yield (f"D {D} {count} after {before}", error(out[new].transpose(0, 1)[None], exact),
                   limit_of(q_row, k_row, v_row, exact))


def check_linear(device, dtype, shapes=((768, 2304), (768, 768), (100, 33))):
    """With and without what is fused, against float64; 16 bits may err as much as a product that is rounded once."""
    for (K, N), rows, activation in [(shape, rows, a) for shape in shapes for rows in (1, 3)
                                     for a in ("", *engine.ACTIVATIONS)]:
        linear, norm = engine.Linear(K, N), torch.nn.LayerNorm(K)
        for parameter in (*linear.parameters(), *norm.parameters()):
            parameter.requires_grad_(False).normal_().copy_(parameter.to(dtype))
        x, residual = torch.randn(rows, K).to(dtype), torch.randn(rows, N).to(dtype)
        exact = linear_twin(x.double(), linear.double(), norm.double(), activation, residual.double())
        found = fused_linear(x.to(device), linear.to(device, dtype), norm.to(device, dtype), activation,
                             residual.to(device))
        yield f"{K} to {N}, {rows} rows {activation}", error(found.cpu(), exact), ROUNDING[dtype]


def random_records(rows, V):
    draw = np.random.default_rng(0)
    records = np.zeros(rows, RECORD)
    for name, values in dict(temperature=[0, 0.5, 1, 3], top_k=[1, 5, 50, V], top_p=[0.1, 0.9, 1], min_p=[0, 0.1],
                             repetition=[1, 1.3], frequency=[0, 0.2], presence=[0, 0.1], flags=range(8)).items():
        records[name] = draw.choice(values, rows)
    records["slot"], records["key"] = np.arange(rows), draw.integers(-2**31, 2**31, rows)
    records["key2"] = draw.integers(-2**31, 2**31, rows)
    return records


def check_sample(device, dtype, V=50257, rows=64):
    """Every parameter at once against the twin: the same tokens, the same counts; NaN fails its row alone."""
    records, states = random_records(rows, V), [SamplerState.new(rows, V, place) for place in (device, "cpu")]
    logits = (3 * torch.randn(rows, V)).to(dtype).float()            # 16 bits: many are equally likely
    logits[1, 3], logits[2] = math.nan, -math.inf
    counts, bias = torch.randint(0, 3, (rows, V)) + 65536 * torch.randint(0, 2, (rows, V)), torch.randn(rows, V)
    for state in states:
        state.counts.copy_(counts)
        state.bias.copy_(bias)
    records = torch.from_numpy(records.view(np.int32).reshape(rows, -1))
    found = sample(logits.to(device), records.to(device), states[0], 5).cpu()
    same = found == sample_twin(logits, records, states[1], 5)       # where top_p ends a sum's rounding may decide
    yield "tokens", 1 - same.float().mean().item(), 0.02 if V > 1000 else 0
    yield "counts", (states[0].counts.cpu()[same] != states[1].counts[same]).float().mean().item(), 0


def random_model(**config):
    """A small GPT2 in float32 whose weights are large enough for a wrong activation or epsilon to show."""
    config = engine.GPT2Config(**(dict(vocab_size=97, n_positions=64, n_layer=2, eos_token_id=0) | config))
    model, state = engine.empty_model(engine.GPT2, config, "random", {}), {}
    for name, value in model.state_dict().items():
        state[name] = torch.randn(value.shape) * 0.2 + ("ln_" in name and name.endswith("weight"))
    state["lm_head.weight"] = state["wte.weight"]
    return engine.with_weights(model, state)


def copy_as(model, variant, dtype, device):
    """The same weights as another class, in another dtype, on another device."""
    state = {name: engine.empty_weight(value.shape, dtype, device).copy_(value) for name, value in model.state_dict().items()}
    if model.lm_head.weight is model.wte.weight:
        state["lm_head.weight"] = state["wte.weight"]
    return engine.with_weights(engine.empty_model(variant, model.config, model.name, {}), state)


def check_model(device, dtype):
    """GPT2Flash against GPT2 in float32: all at once, in chunks over pages, token by token.

    16 bits may err twice as much as the plain model does in them; float32 1e-3 of the largest logit.
    """
    for shape in (dict(n_embd=48, n_head=4), dict(n_embd=160, n_head=2, activation_function="gelu")):
        oracle, ids = random_model(**shape), torch.randint(0, 97, (3, 40))
        plain, model = (copy_as(oracle, variant, dtype, device) for variant in (engine.GPT2, GPT2Flash))
        exact, ids = oracle(ids).double(), ids.to(device)
        limit = 1e-3 if dtype == torch.float32 else 2 * error(plain(ids).cpu(), exact)
        yield f"{shape} at once", error(model(ids).cpu(), exact), limit
        kv = model.new_kv()
        parts = [model(part, kv).cpu() for part in ids.split([17, 16] + [1] * 7, dim=1)]
        yield f"{shape} in parts", error(torch.cat(parts, 1), exact), limit


def check_texts(device, dtype, prompts=20, tokens=100):
    """What the scheduler writes, greedily and sampled, against GPT2Cached, one prompt after another: `tiny`, and a
    small model in few slots, where prompts are always computed beside tokens, and texts end early."""
    tiny, small = engine.load_model("tiny", engine.GPT2Cached), random_model(n_embd=48, n_head=4)
    most = dict(temperature=0.8, top_p=0.95, top_k=50, repetition_penalty=1.15, frequency_penalty=0.1, min_tokens=3,
                logit_bias={13: 2.0}, min_p=0.01)
    jobs = [(tiny, 8, style) for style in (dict(temperature=0), dict(temperature=1.0), most)] + [(small, 3, most)]
    for oracle, slots, style in jobs if dtype == torch.float32 else ():
        flash, V = copy_as(oracle, GPT2Flash, dtype, device), oracle.config.vocab_size
        requests = [engine.Request(engine.random_prompt(1 + 7 * n % (V // 2), V),
                                   engine.SamplingParams(**style, max_tokens=min(tokens, V // 8), seed=n))
                    for n in range(prompts)]
        engine.drain_steps(engine.ContinuousBatchingScheduler(flash, slots, prefill_chunk=64), *requests)
        oracle = copy_as(oracle, engine.GPT2Cached, dtype, device)
        differ = sum(request.output_ids != list(engine.generate(oracle, request.prompt_ids, request.params))
                     for request in requests)
        yield f"{oracle.name} {style}", differ, 0 if style == jobs[0][2] else 1         # a draw between all but equals


CHECKS = {"flash attention": check_flash, "paged attention": check_paged, "prompts over pages": check_prompts,
          "fused linear": check_linear, "sampling": check_sample, "model": check_model, "texts": check_texts}
SMALL = {check_sample: dict(V=97, rows=8), check_linear: dict(shapes=((48, 33),)),
         check_texts: dict(prompts=0)}  # for the interpreter


def run_checks(device):
    """Prints a line for each kernel and dtype, raises SystemExit(1) where one errs."""
    failed = False
    for name, check in CHECKS.items():
        for dtype in engine.DTYPES.values():
            torch.manual_seed(0)
            cases = list(check(device, dtype, **(SMALL.get(check, {}) if device == "cpu" else {})))
            if not cases:
                continue
            case, worst, limit = max(cases, key=lambda case: case[1] / max(case[2], 1e-30))
            good = all(err <= most for _, err, most in cases)
            print(f"{'ok' if good else 'FAILED':7}{name:19}{str(dtype).removeprefix('torch.'):9}{len(cases):3} cases, "
                  f"worst error {worst:.1e} of {limit:.1e} allowed ({case})", flush=True)
            failed |= not good
    if failed:
        raise SystemExit(1)


# ---------------------------------------------------------------------------------------------------
# Benchmarks

def microseconds(run):
    """Median, least and most time of a call on the device, by graph replay."""
    torch.cuda.synchronize()                                         # the timer's stream does not wait for ours
    times = [1e3 * t for t in triton.testing.do_bench_cudagraph(run, rep=30, return_mode="all")]
    return statistics.median(times), min(times), max(times)


def ceilings():
    """What this GPU reaches: bytes a second of a pass that reads and writes; operations a second of a bfloat16 product.

    A copy would not do: in a graph it goes to the copy engine, which is slower than the processors.
    """
    data, matrix = torch.empty(2**30, device="cuda"), torch.randn(8192, 8192, device="cuda").bfloat16()
    target = torch.empty_like(data)
    return (2e6 * data.nbytes / microseconds(lambda: torch.neg(data, out=target))[0],
            2e6 * 8192**3 / microseconds(lambda: matrix @ matrix)[0])


def plain_attention(q, k, v):
    """Every score written out, in the inputs' dtype."""
    T, S = q.shape[2], k.shape[2]
    scores = (q @ k.transpose(2, 3)) * q.shape[3] ** -0.5
    scores.masked_fill_(torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1), -math.inf)
    return torch.softmax(scores, -1) @ v


def torch_attention(backend):
    def attend(q, k, v):
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return attend


ATTENTIONS = {"standard": plain_attention, "flash (ours)": flash_attention,
              "flash (ours), tf32": functools.partial(flash_attention, precision="tf32"),
              "torch flash": torch_attention("FLASH_ATTENTION"), "torch cuDNN": torch_attention("CUDNN_ATTENTION"),
              "torch efficient": torch_attention("EFFICIENT_ATTENTION")}


def random_qkv(B, T, dtype=torch.bfloat16):
    """GPT-2's shape: 12 heads of 64, views of one projection."""
    return torch.randn(B, T, 3, 12, 64, device="cuda", dtype=dtype).permute(2, 0, 3, 1, 4)


def bench_attention(args):
    """Each kernel's error against float64 over the last queries, then its time; ours must err no more than torch's."""
    rows = []
    for B, T, dtype in [(1, 128, "bfloat16"), (1, 256, "bfloat16"), (1, 512, "bfloat16"), (1, 1024, "bfloat16"),
                        (8, 1024, "bfloat16"), (1, 4096, "bfloat16"), (1, 16384, "bfloat16"), (1, 1024, "float32")]:
        q, k, v = random_qkv(B, T, engine.DTYPES[dtype])
        last, errors, calls = slice(-min(T, 256), None), {}, {}
        exact = exact_attention(q[:, :, last], k, v, 64 ** -0.5)
        for name, attend in ATTENTIONS.items():
            with contextlib.suppress(RuntimeError), warnings.catch_warnings(action="ignore"):
                errors[name] = error(attend(q, k, v)[:, :, last], exact)
                calls[name] = functools.partial(attend, q, k, v)  # not one that does not take this dtype or length
        if dtype == "bfloat16":
            del calls["flash (ours), tf32"]
        theirs = 2 * errors.get("torch flash", errors["flash (ours)"]) if dtype == "bfloat16" else 1e-5
        match(f"attention B{B} T{T} {dtype}", errors["flash (ours)"] < theirs)
        for name, call in calls.items():
            time_us, least, most = microseconds(call)
            rate = 2 * 12 * 64 * B * T * (T + 1) / time_us * 1e6     # two products over half of the scores
            rows.append({"B": B, "T": T, "dtype": dtype, "attention": name, "us": time_us, "min": least, "max": most,
                         "TFLOP/s": rate / 1e12, "share of peak": rate / args.ceilings[1],
                         "error": f"{errors[name]:.0e}"})
    return rows


def match(what, good):
    """Says whether outputs match, before any time is measured; a benchmark of wrong results ends here."""
    print(f"Match: {'yes' if good else 'NO'}  {what}", flush=True)
    if not good:
        raise SystemExit(1)


def bench_memory(args):
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


def our_scheduler(model, batch):
    pages = batch * -(-model.config.n_positions // 16)
    return engine.ContinuousBatchingScheduler(engine.share_weights(model, GPT2Flash, max_pages=pages), batch,
                                              prefix_cache=False)


def time_ours(scheduler, batch, prompt, new):
    """Seconds to the first token of all rows, and of a step after it."""
    requests = [engine.Request(prompt, engine.greedy(new)) for _ in range(batch)]
    engine.drain_steps(scheduler, *requests)
    first = max(request.token_times[0] - request.arrival_time for request in requests)
    return first, statistics.median(np.diff(requests[0].token_times))


def transformers_model(model):
    """The same weights in transformers' GPT-2."""
    import transformers

    c = model.config
    oracle = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.n_positions, n_embd=c.n_embd, n_layer=c.n_layer, n_head=c.n_head))
    state = {(name if name.startswith("lm_head") else f"transformer.{name}"):
             (value.t() if engine.CONV1D.fullmatch(name) else value) for name, value in model.state_dict().items()}
    oracle.load_state_dict(state)
    return oracle.to("cuda", model.wte.weight.dtype).eval()


def time_transformers(oracle, batch, prompt, new, **options):
    """As time_ours, by transformers' generate."""
    ids, seconds = torch.tensor([prompt] * batch, device="cuda"), {}
    for tokens in (1, 1, new, 1, new):  # the first of each warm up
        torch.cuda.synchronize()
        start = time.perf_counter()
        oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                        do_sample=False, pad_token_id=0, **options)
        torch.cuda.synchronize()
        seconds[tokens] = time.perf_counter() - start
    return seconds[1], (seconds[new] - seconds[1]) / (new - 1)


def time_compiled(oracle, batch, prompt, new):
    """As time_ours, by a loop over transformers' model with a static cache, compiled into CUDA graphs."""
    from transformers import StaticCache

    forward = torch.compile(oracle.forward, mode="reduce-overhead", fullgraph=True)
    cache = StaticCache(config=oracle.config, max_cache_len=len(prompt) + new)
    ids, marks = torch.tensor([prompt] * batch, device="cuda"), []
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


def bench_generation(args):
    """First token and decode after 16 tokens, all rows alike: the scheduler, and transformers in three ways."""
    model, prompt, rows = args.model, engine.random_prompt(16, args.model.config.vocab_size), []
    oracle, new = transformers_model(model), args.tokens
    ways = {"transformers": functools.partial(time_transformers, oracle)}
    if not args.quick:
        ways |= {"transformers, static": functools.partial(time_transformers, oracle, cache_implementation="static"),
                 "torch.compile, static": functools.partial(time_compiled, oracle)}
    kv = model.new_kv()
    ids = torch.tensor([prompt], device="cuda")
    parts = torch.cat([model(ids[:, :9], kv), model(ids[:, 9:], kv)], 1)
    exact = copy_as(model, engine.GPT2, torch.float32, "cuda")(ids).double()
    ours, theirs = error(parts, exact), error(oracle(ids).logits, exact)
    match(f"logits err by {ours:.1e} against float32, transformers' by {theirs:.1e}", ours <= max(2 * theirs, 1e-5))
    for batch in args.batches:
        scheduler = our_scheduler(model, batch)
        found = [time_ours(scheduler, batch, prompt, new) for _ in range(args.runs + 1)][1:]
        times = {"GPT2Flash": (statistics.median(f for f, _ in found), statistics.median(step for _, step in found))}
        for name, way in ways.items():
            try:
                times[name] = way(batch, prompt, new)
            except Exception as err:  # another version than this was written for, a compiler that is missing
                print(f"{name} at batch {batch} did not run: {engine.first_line(err)}", flush=True)
        floor = decode_bytes(model, batch, len(prompt) + new / 2) / args.ceilings[0]
        for name, (first, step) in times.items():
            rows.append({"batch": batch, "engine": name, "first token ms": 1e3 * first, "ms a step": 1e3 * step,
                         "tokens/s": batch / step, "floor ms": 1e3 * floor, "times the floor": step / floor})
    return rows


def decode_bytes(model, batch, stored):
    """What a decode step must read: the weights once, and the keys and values of `stored` tokens a row."""
    c = model.config
    return engine.weight_bytes(model) + batch * stored * 2 * c.n_layer * c.n_embd * model.wte.weight.element_size()


def bench_batching(args):
    """Requests of 5 to 200 prompt tokens that arrive at once, 100 new tokens each, through the scheduler."""
    lengths, V = np.random.default_rng(0).integers(5, 201, size=256), args.model.config.vocab_size
    scheduler, runs = our_scheduler(args.model, 256), []
    for _ in range(args.runs + 2):  # two to warm up
        requests = [engine.Request(engine.random_prompt(int(n), V), engine.greedy(100)) for n in lengths]
        start = time.monotonic()
        engine.drain_steps(scheduler, *requests)
        runs.append((time.monotonic() - start, requests))
    alone, found = engine.Request(requests[7].prompt_ids, engine.greedy(100)), runs[2:]
    engine.drain_steps(scheduler, alone)
    same = sum(a == b for a, b in zip(alone.output_ids, requests[7].output_ids))
    print(f"A text alone and among 255 others: {same} of 100 tokens are the same (16 bits may round a tie otherwise)")
    seconds = statistics.median(s for s, _ in found)
    # The least time: a hundred decode steps by their bytes, the prompts by their operations.
    prompts, parameters = int(lengths.sum()), sum(p.numel() for p in args.model.parameters())
    floor = (100 * decode_bytes(args.model, 256, lengths.mean() + 50) / args.ceilings[0]
             + 2 * prompts * parameters / args.ceilings[1])
    measures = {name: value for name, value in engine.latencies(found[0][1]).items() if name.endswith("median")}
    return [{"requests": 256, "prompt tokens": prompts, "new": 25600, "seconds": seconds,
             "min": min(s for s, _ in found), "max": max(s for s, _ in found), "tokens/s": 25600 / seconds,
             "floor s": floor} | measures]


def bench_devices(args):
    """The same requests on the CPU, in float32 as it likes it best, and on the GPU."""
    rows = []
    models = {torch.cuda.get_device_name(): args.model,              # first: the CPU's threads stay busy a while
              engine.processor_name(): copy_as(args.model, engine.GPT2Paged, torch.float32, "cpu")}
    for batch in (1, 8):
        for device, model in models.items():
            scheduler = engine.ContinuousBatchingScheduler(model, batch, prefix_cache=False)
            prompt = engine.random_prompt(16, model.config.vocab_size)
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


def run_benchmarks(args):
    """The benchmarks of --only (all without it): a table each, and the files of --json and --plot."""
    engine.check_outputs(args, drawn=("attention", "memory", "generation"))
    args.model = engine.load_model(args.model, GPT2Flash, dtype=args.dtype, device="cuda", stand_in="random")
    args.ceilings = ceilings()
    machine = {"model": args.model.name, "dtype": args.dtype, "GPU": torch.cuda.get_device_name(), "runs": args.runs,
               "memory TB/s": f"{args.ceilings[0] / 1e12:.2f}", "product TFLOP/s": f"{args.ceilings[1] / 1e12:.0f}",
               "torch": torch.__version__, "triton": triton.__version__}
    engine.report(machine, BENCHMARKS, args, plot_results, args)


COLOURS = {"standard": "#9aa0a6", "flash (ours)": "#1a73e8", "torch flash": "#e8710a", "torch cuDNN": "#188038",
           "GPT2Flash": "#1a73e8", "transformers": "#9aa0a6", "transformers, static": "#e8710a",
           "torch.compile, static": "#188038"}


def plot_results(results, path):
    """Time and memory of attention by length, tokens a second by batch."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = [(title, unit, [(row[label], row[x], row[y]) for row in results[name] if good(row)]) for
              name, title, unit, label, x, y, good in (
        ("attention", "Attention, bfloat16, batch 1", "us", "attention", "T", "us",
         lambda row: row["B"] == 1 and row["dtype"] == "bfloat16"),
        ("memory", "Memory of attention", "MB", "attention", "T", "peak MB", lambda row: row["peak MB"] != "no room"),
        ("generation", "Generation", "tokens/s", "engine", "batch", "tokens/s", lambda row: True)) if name in results]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 4), layout="constrained", squeeze=False)
    for axis, (title, unit, points) in zip(axes[0], panels):
        for name in [name for name in COLOURS if any(name == label for label, *_ in points)]:
            axis.plot(*zip(*((x, y) for label, x, y in points if label == name)), marker="o", label=name,
                      color=COLOURS[name])
        axis.set(title=title, ylabel=unit, xlabel="batch" if title == "Generation" else "tokens")
        axis.loglog()
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8)
    machine = results["machine"]
    figure.supxlabel(f"GPT-2 ({machine['model']}), {machine['dtype']}, {machine['GPU']}", fontsize=8, color="#5f6368")
    figure.savefig(path, dpi=160)
    pyplot.close(figure)
