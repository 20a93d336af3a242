"""What each idea is worth on a CPU, measured: a table each, JSON, pictures."""

import contextlib
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import engine
from engine import (
    CPU_DTYPES,
    VARIANTS,
    ContinuousBatchingScheduler,
    GPT2Cached,
    GPT2Config,
    GPT2Paged,
    Recompute,
    Request,
    SamplingParams,
    Speculator,
    UserError,
    generate,
    load_model,
    load_tokenizer,
    output_limit,
    sample,
    share_weights,
)

LABELS = {"no-cache": "no cache", "cached": "KV-cache (torch.cat)", "paged": "KV-cache (pages)"}
SENTENCE = "The meaning of life is"


def greedy(tokens):
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def random_prompt(length, vocab_size):
    return np.random.default_rng(length).integers(min(vocab_size, 50000), size=length).tolist()


def outputs_match(models, prompt, tokens=4):
    """Every variant against the plain GPT2, which shares no kernel with them: the largest difference of the logits
    after the prompt, relative to their size, and in float32 the greedy text. -> (whether they match, the difference)"""
    oracle = engine.share_weights(models["no-cache"], engine.GPT2, backend=engine.PLAIN)
    ids = torch.tensor([prompt])
    exact = oracle.wte.weight.dtype == torch.float32
    expected = oracle(ids, keep=slice(-1, None))
    text = list(engine.generate(oracle, prompt, greedy(tokens)))
    same_text, differences = True, []
    for name, model in models.items():
        same_text &= list(engine.generate(model, prompt, greedy(tokens))) == text
        kv = model.new_kv()
        model(ids[:, :-1], kv, keep=slice(-1, None))
        logits = model(ids if name == "no-cache" else ids[:, -1:], kv, keep=slice(-1, None))
        kv.release()
        differences.append((logits - expected).abs().max() / expected.abs().max())
    difference = torch.stack(differences).max()
    close = bool(difference < (1e-4 if exact else 3e-2))             # NaN is below nothing
    return close and (same_text or not exact), difference.item()     # 16 bits may round a tie otherwise


def time_generation(model, prompt, tokens):
    """Seconds to the first token, and of each token after it."""
    marks = [time.perf_counter()]
    for _ in generate(model, prompt, greedy(tokens)):
        marks.append(time.perf_counter())
    gaps = np.diff(marks)
    return gaps[0], gaps[1:]


def bench_generation(models, args):
    """First token and decode of each variant after prompts of several lengths, in interleaved rounds."""
    sentence = load_tokenizer().encode_ordinary(SENTENCE)
    prompts = [sentence] + [random_prompt(n, models["paged"].config.vocab_size) for n in (16, 512, 900)]
    rows = []
    for prompt in prompts:
        same, difference = outputs_match(models, prompt)
        print(f"Match: {'yes' if same else 'NO'}  after {len(prompt)} tokens, "
              f"logits of all variants within {difference:.1e} of the largest")
        if not same:
            raise SystemExit(1)
        tokens = dict.fromkeys(models, args.tokens)
        if prompt is not sentence:  # a slow variant makes fewer tokens than asked for; the table says how many
            for name, model in models.items():
                tokens[name] = min(args.tokens, 1 + max(3, int(1.5 / time_generation(model, prompt, 2)[1][0])))
        runs = {name: [] for name in models}
        for _ in range(args.runs):
            for name, model in models.items():
                runs[name].append(time_generation(model, prompt, tokens[name]))
        alike = tokens["no-cache"] - 1                                # speed-up compares the same positions
        base = [statistics.mean(rest) for _, rest in runs["no-cache"]]
        for name in models:
            step = [statistics.mean(rest) for _, rest in runs[name]]
            rows.append({
                "prompt": len(prompt), "variant": LABELS[name], "new": tokens[name],
                "first token ms": 1e3 * statistics.median(first for first, _ in runs[name]),
                "ms a token": 1e3 * statistics.median(step),
                "min": 1e3 * min(step), "max": 1e3 * max(step),
                "tokens/s": 1 / statistics.median(step),
                "speed-up": statistics.median(
                    b / statistics.mean(rest[:alike]) for b, (_, rest) in zip(base, runs[name])),
            })
    return rows


class ByteCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes that operators allocate, and that those which store K and V read and write."""

    MOVES = ("cat", "copy_", "index_copy_")

    def __init__(self):
        super().__init__()
        self.allocated = self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        flat = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = {t.untyped_storage().data_ptr() for t in flat}
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known:
                self.allocated += t.nbytes
        name = func.overloadpacket.__name__
        if name in self.MOVES:
            self.moved += 2 * (out.nbytes if name == "cat" else flat[-1].nbytes)
        return out


def count_bytes(model, stored):
    """Bytes that one decode step moves and allocates to store and attend, with `stored` tokens before it.

    Counted on the plain path, which stores by operators that can be seen what the kernels store.
    """
    model = engine.share_weights(model, type(model), backend=engine.PLAIN)
    kv = model.new_kv()
    model(torch.tensor([random_prompt(stored, model.config.vocab_size)]), kv, keep=slice(-1, None))
    counter, attend = ByteCounter(), kv.attend

    def counted(*args):
        with counter:
            return attend(*args)

    kv.attend = counted
    model(torch.tensor([[0]]), kv)
    kv.release()
    return counter


def bench_bytes(models, args):
    """What a decode step costs in memory: torch.cat against pages, counted operator by operator as it runs."""
    rows = []
    for stored in (16, 128, 512, 900):
        for name in ("cached", "paged"):
            counter = count_bytes(models[name], stored)
            rows.append({"stored": stored, "variant": LABELS[name], "moved KB a step": counter.moved / 1e3,
                         "allocated KB a step": counter.allocated / 1e3})
    return rows


def read_bandwidth():
    """Bytes a second at which this machine reads memory with torch's threads: the best of 10 sums of 512 MB."""
    data = torch.ones(2**27)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - start)
    return data.nbytes / min(seconds)


def median_seconds(function, runs=15):
    """The median of some calls, after one that is not counted."""
    function()
    marks = [time.perf_counter()]
    for _ in range(runs):
        function()
        marks.append(time.perf_counter())
    return statistics.median(np.diff(marks))


def step_parts(model, prompt):
    """ms of what a decode step does after a prompt, each part by itself."""
    inputs = [(linear, torch.randn(1, linear.weight.shape[1])) for linear in model.linears()]
    c, kv, request = model.config, model.new_kv(), Request(prompt, greedy(1))
    q, logits = torch.randn(1, c.n_head, 1, c.head_dim), model(torch.tensor([prompt]), kv)[0, -1:]
    kv.reserve(1, 1, c.n_positions)
    parts = {"products": lambda: [linear(x) for linear, x in inputs],
             "attention": lambda: [kv.attend(layer, q, q, q, 1.0) for layer in range(c.n_layer)],
             "sampling": lambda: sample(logits, [request])}
    parts = {name: 1e3 * median_seconds(part) for name, part in parts.items()}
    kv.release()
    return parts


def bench_bandwidth(models, args):
    """What a decode step costs and what on, against its floor: every weight is read once."""
    weights, ceiling, rows = weight_bytes(models["paged"]), read_bandwidth(), []
    prompt = load_tokenizer().encode_ordinary(SENTENCE)
    for name in ("cached", "paged"):
        step = statistics.median(time_generation(models[name], prompt, 30)[1])
        parts = step_parts(models[name], prompt)
        rows.append({"variant": LABELS[name], "weights MB": weights / 1e6, "memory GB/s": ceiling / 1e9,
                     "floor ms": 1e3 * weights / ceiling, "ms a token": 1e3 * step,
                     "share of memory": weights / step / ceiling, **parts,
                     "rest": max(0.0, 1e3 * step - sum(parts.values()))})
    return rows


def weight_bytes(model):
    """What a step reads: all but the embeddings, of which it needs a row each; a tied head counts."""
    return sum(linear.weight.nbytes for linear in model.linears())


def bench_dtypes(models, args):
    """Each dtype of the weights: its speed, and on a text of `tiny` what it costs in accuracy."""
    prompt, rows = load_tokenizer().encode_ordinary(SENTENCE), []
    params = SamplingParams(seed=0, max_tokens=120, ignore_eos=True)
    text = prompt + list(generate(load_model("tiny"), prompt, params))
    for dtype in CPU_DTYPES:
        tiny = load_model("tiny", dtype=dtype)
        kv, ids = tiny.new_kv(), torch.tensor([text])
        logits = torch.cat([tiny(ids[:, n:n + 1], kv)[0] for n in range(len(text))])   # token by token, as it decodes
        kv.release()
        if not rows:
            reference = logits
        model = load_model(models["paged"].name, GPT2Paged, dtype=dtype)
        time_generation(model, prompt, 3)
        step = statistics.median(time_generation(model, prompt, min(args.tokens, 60))[1])
        rows.append({"weights": dtype, "weights MB": weight_bytes(model) / 1e6, "ms a token": 1e3 * step,
                     "tokens/s": 1 / step,
                     "logits error %": 100 * ((logits - reference).abs().max() / reference.abs().max()).item(),
                     "perplexity": F.cross_entropy(logits[:-1], ids[0, 1:]).exp().item()})
    for row in rows:
        row["speed-up"] = rows[0]["ms a token"] / row["ms a token"]
    return rows


SLOTS = 8


def drain_steps(scheduler, *requests):
    scheduler.submit(*requests)
    while scheduler.step():
        pass


def serve(model, jobs, mode, args):
    """Runs jobs, (prompt, new tokens) each, that all arrive at once -> (requests, seconds).

    sequential: one after another. static: batches of SLOTS, each waits for its slowest. continuous: a free slot is
    given to the next at once.
    """
    size = {"sequential": 1, "static": SLOTS, "continuous": len(jobs)}[mode]
    scheduler = ContinuousBatchingScheduler(model, SLOTS, prefill_chunk=args.prefill_chunk, prefix_cache=False)
    requests, start = [Request(prompt, greedy(new)) for prompt, new in jobs], time.monotonic()
    for at in range(0, len(requests), size):
        drain_steps(scheduler, *requests[at:at + size])
    for request in requests:
        request.arrival_time = start
    return requests, time.monotonic() - start


def latencies(requests):
    """ms, mean / median / 99th percentile, as serving benchmarks give them: time to first token, time per output
    token (after the first, a mean for each request), inter-token latency (each gap)."""
    gaps = [np.diff(r.token_times) for r in requests]
    times = {"TTFT": [r.token_times[0] - r.arrival_time for r in requests],
             "TPOT": [gap.mean() for gap in gaps if len(gap)], "ITL": np.concatenate(gaps)}
    measures = {"mean": np.mean, "median": np.median, "p99": lambda values: np.percentile(values, 99)}
    return {f"{name} {what}": 1e3 * float(measure(values))
            for name, values in times.items() for what, measure in measures.items()}


def bench_batching(models, args):
    """The same requests one after another, in static batches, and continuously batched."""
    model, rows = share_weights(models["paged"], GPT2Paged, max_pages=1024), []
    full, draw = args.only == "batching", np.random.default_rng(0)
    most = args.tokens if full else max(4, args.tokens // 2)
    jobs = [(random_prompt(int(length), model.config.vocab_size), int(new)) for length, new in
            zip(draw.integers(5, 201, size=32), draw.geometric(2.5 / most, size=32).clip(2, most))]
    serve(model, [(prompt, 2) for prompt, _ in jobs[:SLOTS]], "continuous", args)     # warm-up
    for count in (1, 2, 4, 8, 16, 32) if full else (16,):
        runs = {mode: [] for mode in ("sequential", "static", "continuous")}
        for _ in range(args.runs if full else 1):
            for mode, found in runs.items():
                found.append(serve(model, jobs[:count], mode, args))
        texts = [[r.output_ids for r in found[0][0]] for found in runs.values()]
        print(f"Match: {'yes' if texts[0] == texts[1] == texts[2] else 'NO'}  {count} requests, texts of all modes")
        if not texts[0] == texts[1] == texts[2]:
            raise SystemExit(1)
        for mode, found in runs.items():
            requests, seconds = min(found, key=lambda run: abs(run[1] - statistics.median(s for _, s in found)))
            rows.append({"requests": count, "mode": mode,
                         "tokens/s": sum(len(r.output_ids) for r in requests) / seconds} | latencies(requests) |
                        {"bars": [[r.slot, r.scheduled_time - requests[0].arrival_time,
                                   r.finish_time - requests[0].arrival_time] for r in requests]})
    return rows


def bench_prefix(models, args):
    """Requests that share their first 500 tokens, without and with the prefix cache."""
    model, shared, rows = models["paged"], random_prompt(500, models["paged"].config.vocab_size), []
    for prefix_cache in (False, True):
        scheduler = ContinuousBatchingScheduler(model, SLOTS, prefill_chunk=args.prefill_chunk,
                                                prefix_cache=prefix_cache)
        requests = [Request([*shared, n, n, n], greedy(8)) for n in range(4)]
        start = time.monotonic()
        for request in requests:
            drain_steps(scheduler, request)
        rows.append({"prefix cache": "on" if prefix_cache else "off", "requests": len(requests),
                     "prompt tokens": 503 * len(requests), "cached": sum(r.cached_tokens for r in requests),
                     "first token ms": 1e3 * statistics.median(r.token_times[0] - r.arrival_time for r in requests),
                     "seconds": time.monotonic() - start})
    return rows


class Replay(Speculator):
    """Knows the text: guesses that cost nothing and are always right, the most that speculation can give."""

    def __init__(self, text, tokens):
        self.text, self.tokens, self.kv, self.proposed, self.accepted = text, tokens, Recompute(), 0, 0

    def check(self, target):
        pass

    def guess(self, request, config):
        made, left = len(request.output_ids), output_limit(request, config) - len(request.output_ids)
        return self.text[made:made + min(self.tokens, left - 1)]


def bench_speculation(models, args):
    """One stream alone, with `tiny` guessing, and with guesses that are always right."""
    model, prompt, new = models["paged"], load_tokenizer().encode_ordinary(SENTENCE), min(args.tokens, 60)
    text = list(generate(model, prompt, greedy(new)))
    drafts, rows = {"off": None, "always right, at no cost": Replay(text, 4)}, []
    if model.config.vocab_size == GPT2Config.vocab_size:
        drafts["tiny"] = Speculator(load_model("tiny", GPT2Cached), 4)
    for name, draft in drafts.items():
        start = time.perf_counter()
        same = list(generate(model, prompt, greedy(new), draft=draft)) == text
        rows.append({"guesses": name, "match": "yes" if same else "NO",
                     "acceptance": draft.acceptance if draft else 0.0, "tokens/s": new / (time.perf_counter() - start)})
        rows[-1]["speed-up"] = rows[-1]["tokens/s"] / rows[0]["tokens/s"]
    return rows


BENCHMARKS = {
    "generation": ("Generation, batch 1, greedy; ms a token without the first, median of the runs", bench_generation),
    "bytes": ("K/V of one decode step, all layers: bytes read and written to store it, bytes allocated", bench_bytes),
    "bandwidth": ("A decode step against the memory's speed, and its parts in ms", bench_bandwidth),
    "dtypes": ("Weights by dtype; largest logits error (of the largest logit) and perplexity on a text of tiny",
               bench_dtypes),
    "batching": (f"Batching, {SLOTS} slots; all requests arrive at once; latencies in ms", bench_batching),
    "prefix": ("Prefix cache: prompts that share 500 tokens, one after another", bench_prefix),
    "speculation": ("Speculative decoding, 4 guesses a step", bench_speculation),
}


def print_table(title, rows):
    """One fixed-width table of equal dicts."""
    def text(value):
        return value if isinstance(value, str) else f"{value:d}" if isinstance(value, int) else f"{value:.2f}"

    rows = [{name: value for name, value in row.items() if not isinstance(value, list)} for row in rows]
    table = [list(rows[0])] + [[text(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    print(f"\n{title}")
    for line in table:
        cells = zip(line, widths, rows[0].values())
        print("  ".join(cell.ljust(width) if isinstance(v, str) else cell.rjust(width) for cell, width, v in cells))


def check_outputs(args, drawn=("generation", "bytes", "batching")):
    """Raises UserError, before anything is measured, where --json or --plot can't be written, or nothing is drawn."""
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        if path and (Path(path).is_dir() or not Path(path).parent.is_dir()):
            raise UserError(f"{flag} {path} can't be written: it is a folder, or is in none")
    if args.plot and Path(args.plot).suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot must end in .png, .svg or .pdf, not {args.plot}")
    if args.plot and args.only not in (None, *drawn):
        raise UserError(f"--plot draws the benchmarks {', '.join(drawn)}, not {args.only}")


def run_benchmarks(args):
    """The benchmarks of --only (all without it): a table each, and the files of --json and --plot."""
    check_outputs(args)
    model = load_model(args.model, engine.GPT2, dtype=args.dtype, stand_in="random")
    models = {name: share_weights(model, variant) for name, variant in VARIANTS.items()}
    machine = {"model": model.name, "dtype": args.dtype, "threads": torch.get_num_threads(), "runs": args.runs,
               "processor": processor_name(), "system": platform.platform(terse=True), "torch": torch.__version__}
    report(machine, BENCHMARKS, args, plot_results, models, args)


def report(machine, benchmarks, args, plot, *inputs):
    """Runs benchmarks, {name: (title, function of the inputs -> rows)}, on a machine that a dict describes."""
    from tqdm import tqdm

    print("  ".join(f"{key}: {value}" for key, value in machine.items()), flush=True)
    results = {"machine": machine}
    progress = tqdm([args.only] if args.only else list(benchmarks), disable=None, leave=False)
    for name in progress:
        progress.set_description(name)
        title, bench = benchmarks[name]
        results[name] = bench(*inputs)
        progress.clear()
        print_table(title, results[name])
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1), encoding="utf-8")
    if args.plot:
        plot(results, args.plot)


def processor_name():
    """The processor as its maker names it; what `platform` knows where /proc is missing."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def plot_results(results, path):
    """Time of a token and bytes moved a step by context; below, who held which slot when, static and continuous."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    curves, timeline = [name for name in ("generation", "bytes") if name in results], "batching" in results
    rows = [[name for name in curves for _ in range(2 // len(curves))]] * bool(curves)
    rows += [["static"] * 2, ["continuous"] * 2] * timeline
    figure, axes = pyplot.subplot_mosaic(rows, figsize=(10, 3.6 * bool(curves) + 3.6 * timeline), layout="constrained",
                                         height_ratios=[2] * bool(curves) + [1, 1] * timeline)
    for name in curves:
        plot_curves(axes[name], name, results[name])
    if timeline:
        plot_timelines(axes, results["batching"])
    machine = results["machine"]
    figure.supxlabel(f"GPT-2 ({machine['model']}), {machine['dtype']}, {machine['threads']} threads, "
                     f"{machine['processor']}", fontsize=8, color="#5f6368")
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def plot_curves(axis, name, rows):
    x, y, title, unit = {
        "generation": (lambda row: row["prompt"] + row["new"] / 2, "ms a token", "Time of one new token", "ms"),
        "bytes": (lambda row: row["stored"], "moved KB a step", "K/V bytes moved to store it", "KB")}[name]
    for label, colour in zip(LABELS.values(), ("#9aa0a6", "#e8710a", "#1a73e8")):
        points = sorted((x(row), row[y]) for row in rows if row["variant"] == label)
        if points:
            axis.plot(*zip(*points), marker="o", color=colour, label=label)
    axis.set(title=title, xlabel="tokens before it", ylabel=unit, yscale="log")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=9)


def plot_timelines(axes, rows):
    """A bar for each request of the largest run, in its slot, from admission to its end."""
    most = max(row["requests"] for row in rows)
    shown_rows = {row["mode"]: row for row in rows if row["requests"] == most and row["mode"] in axes}
    longest = max(end for row in shown_rows.values() for _, _, end in row["bars"])
    for mode, row in shown_rows.items():
        axis = axes[mode]
        for n, (slot, start, end) in enumerate(row["bars"]):
            axis.barh(slot, end - start, left=start, height=0.8, color=("#1a73e8", "#8ab4f8")[n // SLOTS % 2],
                      edgecolor="white")
        axis.set(title=f"{mode}: {most} requests in {SLOTS} slots, {row['tokens/s']:.0f} tokens/s", ylabel="slot",
                 xlim=(0, longest), yticks=range(0, SLOTS, 2), xlabel="seconds" if mode == "continuous" else None)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
