"""What each idea is worth on a CPU, measured: a table each, JSON, pictures."""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import engine  # its names are asked for at each call, so that a replaced engine.load_model is the one that runs
from budget import BUDGET, Budget, Part, Progress, say

if TYPE_CHECKING:
    from types import ModuleType

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {"no-cache": "no cache", "cached": "KV-cache (torch.cat)", "paged": "KV-cache (pages)"}
SENTENCE = "The meaning of life is"
SLOTS = 8  # of the scheduler, in the benchmarks of batching
ROUNDS = 3  # of each measurement, where --runs doesn't say

Table = list[dict[str, Any]]  # equal dicts, a line each: column -> text or number (lists go to the JSON alone)


# ---------------------------------------------------------------------------------------------------
# The frame: what is said, printed and written of any benchmark, on a CPU or a GPU

def require_match(what: str, matches: bool) -> None:
    """Says whether outputs match, before any time is printed. Ends the program (status 1) where they don't: the speed
    of wrong results is worth nothing."""
    say(f"Match: {'yes' if matches else 'NO'}  {what}")
    if not matches:
        raise SystemExit(1)


def _cell(value):
    """A value as the table shows it."""
    if isinstance(value, str):
        return value
    return f"{value:d}" if isinstance(value, int) else f"{value:.2f}"


def print_table(title: str, table: Table) -> None:
    """Prints a table in columns of fixed width: text to the left, numbers to the right; lists are left out."""
    table = [{name: value for name, value in row.items() if not isinstance(value, list)} for row in table]
    lines = [list(table[0])] + [[_cell(value) for value in row.values()] for row in table]
    widths = [max(map(len, column)) for column in zip(*lines)]       # zip(*...): columns of lines
    print(f"\n{title}")
    for line in lines:
        cells = zip(line, widths, table[0].values())                 # the first values say which columns are text
        print("  ".join(cell.ljust(width) if isinstance(value, str) else cell.rjust(width)
                        for cell, width, value in cells))


def check_outputs(args: argparse.Namespace, drawn: Sequence[str] = ("generation", "bytes", "batching")) -> None:
    """Raises UserError, before anything is measured, where --json or --plot can't be written, or nothing is drawn.

    drawn: the benchmarks of which --plot makes a picture.
    """
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        if path and (Path(path).is_dir() or not Path(path).parent.is_dir()):
            raise engine.UserError(f"{flag} {path} can't be written: it is a folder, or is in none")
    if args.plot and Path(args.plot).suffix not in (".png", ".svg", ".pdf"):
        raise engine.UserError(f"--plot must end in .png, .svg or .pdf, not {args.plot}")
    if args.plot and args.only not in (None, *drawn):
        raise engine.UserError(f"--plot draws the benchmarks {', '.join(drawn)}, not {args.only}")


def report(machine: dict[str, Any], benchmarks: dict[str, tuple[str, Callable[..., Table]]], args: argparse.Namespace,
           plot: Callable[[dict[str, Any], str], None], *inputs: Any, progress: Progress | None = None) -> None:
    """Runs --only one of the benchmarks, or all, and writes the files of --json and --plot.

    machine: what is printed and written of the place where they run. benchmarks: name -> (title of its table,
    function of the inputs). plot: draws the results, {"machine": machine, name: table}, to a file. progress: the bar,
    where the inputs draw it too. A benchmark whose table is empty is not reported.
    """
    progress = progress or Progress()
    say("  ".join(f"{key}: {value}" for key, value in machine.items()))
    results = {"machine": machine}
    names = [args.only] if args.only else list(benchmarks)
    for done, name in enumerate(names):
        progress.show(name, done, len(names))
        title, bench = benchmarks[name]
        table = bench(*inputs)
        progress.bar.clear()
        if table:                                                    # none where the time didn't reach for a row
            results[name] = table
            print_table(title, table)
    progress.bar.close()
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1), encoding="utf-8")
    if args.plot:
        plot(results, args.plot)


def pyplot() -> ModuleType:
    """matplotlib's pyplot, which draws to files: no window is opened, and none need be possible."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def save_figure(figure: Figure, results: dict[str, Any], hardware: str, path: str) -> None:
    """Writes a figure, with a line below it of the model, its dtype and the hardware, and frees it."""
    machine = results["machine"]
    figure.supxlabel(f"GPT-2 ({machine['model']}), {machine['dtype']}, {hardware}", fontsize=8, color="#5f6368")
    figure.savefig(path, dpi=160)
    pyplot().close(figure)                                           # or it would be kept until the program ends


# ---------------------------------------------------------------------------------------------------
# What several benchmarks need

def greedy(tokens: int) -> engine.SamplingParams:
    """Parameters for exactly so many tokens, the most likely ones."""
    return engine.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def random_prompt(length: int, vocab_size: int) -> list[int]:
    """Token ids, the same ones for the same length."""
    return np.random.default_rng(length).integers(min(vocab_size, 50000), size=length).tolist()


def sentence_prompt() -> list[int]:
    """The token ids of SENTENCE."""
    return engine.load_tokenizer().encode_ordinary(SENTENCE)


def median_seconds(function: Callable[[], object], runs: int = 15) -> float:
    """The median of some calls, after one that is not counted."""
    function()
    marks = [time.perf_counter()]
    for _ in range(runs):
        function()
        marks.append(time.perf_counter())
    return statistics.median(np.diff(marks))


class GenerationTimes(NamedTuple):
    """Seconds to the first token of a text, and for each token after it."""

    first: float
    rest: np.ndarray


def time_generation(model: engine.GPT2, prompt: list[int], tokens: int) -> GenerationTimes:
    """The times of so many tokens, greedily, one request alone."""
    marks = [time.perf_counter()]                                    # when the request began, and each token came
    for _ in engine.generate(model, prompt, greedy(tokens)):
        marks.append(time.perf_counter())
    gaps = np.diff(marks)
    return GenerationTimes(gaps[0], gaps[1:])


def weight_bytes(model: engine.GPT2) -> int:
    """Bytes of weights that a decode step reads: all but the embeddings, of which it needs a row each; a tied head
    counts."""
    return sum(linear.weight.nbytes for linear in model.linears())


def read_bandwidth() -> float:
    """Bytes a second at which this machine reads memory with torch's threads: the best of 10 sums of 512 MB."""
    data = torch.ones(2**27)                                         # far more than any cache holds
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - start)
    return data.nbytes / min(seconds)                                # what else runs can only make it slower


class StepCosts:
    """Seconds that steps take here, each measured when it is asked for first.

    models: no-cache and paged are run. progress: says that kernels are compiled.
    """

    def __init__(self, models: dict[str, engine.GPT2], progress: Progress):
        self.models = models
        self.progress = progress

    @functools.cached_property
    def plain(self) -> float:
        """Of each token of a prompt on the plain path."""
        model = engine.share_weights(self.models["no-cache"], engine.GPT2, backend=engine.PLAIN)
        ids = torch.tensor([random_prompt(64, model.config.vocab_size)])
        return median_seconds(lambda: model(ids, keep=slice(-1, None)), runs=1) / ids.numel()

    @functools.cached_property
    def step(self) -> float:
        """Of a step that makes one token."""
        model = self.models["paged"]
        with self.progress.compiling(str(model.wte.weight.dtype).removeprefix("torch.")):
            for variant in self.models.values():
                time_generation(variant, random_prompt(40, model.config.vocab_size), 3)
        return statistics.median(time_generation(model, sentence_prompt(), 5).rest)

    @functools.cached_property
    def token(self) -> float:
        """Of each token of a prompt, beside what a step takes."""
        step = self.step                                             # before it is timed: the kernels are compiled
        prompt = random_prompt(128, self.models["paged"].config.vocab_size)
        return max(time_generation(self.models["paged"], prompt, 1).first - step, 0.1 * step) / len(prompt)

    def prompt(self, tokens: int) -> float:
        """Of a pass over a prompt of so many tokens."""
        return self.step + tokens * self.token


# ---------------------------------------------------------------------------------------------------
# Generation: what a KV-cache saves

def _last_logits(model: engine.GPT2, prompt: list[int]) -> torch.Tensor:
    """The logits (1, 1, V) after a prompt, as a decode step makes them: from what is stored of all but the last."""
    ids = torch.tensor([prompt])
    kv = model.new_kv()
    if not isinstance(kv, engine.Recompute):
        model(ids[:, :-1], kv, keep=slice(-1, None))
    logits = model(ids[:, kv.length:], kv, keep=slice(-1, None))     # all of them where nothing is stored
    kv.release()
    return logits


def outputs_match(models: dict[str, engine.GPT2], prompt: list[int], tokens: int = 4) -> tuple[bool, float]:
    """Every variant against the plain GPT2, which shares no kernel with them: the largest difference of the logits
    after the prompt, relative to their size, and in float32 the greedy text. -> (whether they match, the difference)"""
    oracle = engine.share_weights(models["no-cache"], engine.GPT2, backend=engine.PLAIN)
    exact = oracle.wte.weight.dtype == torch.float32                 # in 16 bits a tie may be rounded otherwise
    expected = _last_logits(oracle, prompt)
    text = list(engine.generate(oracle, prompt, greedy(tokens)))
    same_text = True
    differences = []
    for model in models.values():
        same_text &= list(engine.generate(model, prompt, greedy(tokens))) == text
        differences.append((_last_logits(model, prompt) - expected).abs().max() / expected.abs().max())
    difference = torch.stack(differences).max()
    close = bool(difference < (1e-4 if exact else 3e-2))             # NaN is below nothing
    return close and (same_text or not exact), difference.item()


GENERATION_SECONDS = 1.5  # of each variant in each round; those of a slow variant take long


def _affordable_tokens(model, prompt):
    """How many tokens take some 1.5 seconds after this prompt, at least 4."""
    second = time_generation(model, prompt, 2).rest[0]               # the time of the second token; it warms up too
    return 1 + max(3, int(GENERATION_SECONDS / second))


def _generation_row(name, prompt, tokens, runs, base, compared):
    """A variant's line. base: seconds a token without a cache, a run each, the mean of `compared` tokens."""
    step = [statistics.mean(run.rest) for run in runs]
    # Run by run, since they were interleaved: what slowed the machine for a while slowed both.
    speed_ups = [without / statistics.mean(run.rest[:compared]) for without, run in zip(base, runs)]
    return {
        "prompt": len(prompt), "variant": LABELS[name], "new": tokens, "runs": len(runs),
        "first token ms": 1e3 * statistics.median(run.first for run in runs),
        "ms a token": 1e3 * statistics.median(step),
        "min": 1e3 * min(step), "max": 1e3 * max(step),
        "tokens/s": 1 / statistics.median(step),
        "speed-up": statistics.median(speed_ups),
    }


def parts_of_generation(costs: StepCosts, args: argparse.Namespace) -> list[Part]:
    """A part for each length of the prompt; the key is the length."""
    parts = []
    # After 16 tokens it is much as after 5; what a cache saves is seen after a long prompt.
    for n, worth in ((len(sentence_prompt()), 2), (16, 0.5), (512, 4), (900, 2)):
        whole = costs.prompt(n)
        decoding = max(3 * costs.step, min(GENERATION_SECONDS, args.tokens * costs.step))
        recomputing = max(3 * whole, min(GENERATION_SECONDS, args.tokens * whole))
        # The check reads the prompt 3 times on the plain path and 7 on the fast one, the warm-up 4 times.
        once = 3 * (costs.step + n * costs.plain) + 11 * whole + 10 * costs.step
        parts.append(Part(f"generation after {n} tokens", n, once, 3 * whole + 2 * decoding + recomputing,
                          args.runs or ROUNDS, args.runs or 1, worth))
    return parts


def bench_generation(models: dict[str, engine.GPT2], args: argparse.Namespace, budget: Budget) -> Table:
    """First token and decode of each variant after prompts of several lengths, in interleaved rounds."""
    table = []
    for length, rounds in budget.parts("generation"):
        is_sentence = length == len(sentence_prompt())
        prompt = sentence_prompt() if is_sentence else random_prompt(length, models["paged"].config.vocab_size)
        checked = 2 if budget.limited and not is_sentence else 4     # the oracle reads the whole prompt for each
        same, difference = outputs_match(models, prompt, checked)
        require_match(f"after {len(prompt)} tokens, "
                      f"logits of all variants within {difference:.1e} of the largest", same)
        tokens = dict.fromkeys(models, args.tokens)
        if budget.limited or not is_sentence:
            # A slow variant makes fewer tokens than asked for; the table says how many.
            tokens = {name: min(args.tokens, _affordable_tokens(model, prompt)) for name, model in models.items()}
        runs = {name: [] for name in models}
        for _ in range(rounds):
            for name, model in models.items():
                runs[name].append(time_generation(model, prompt, tokens[name]))
        # Without a cache a token takes longer the more stand before it: compare the same positions of all variants.
        compared = tokens["no-cache"] - 1
        base = [statistics.mean(run.rest) for run in runs["no-cache"]]
        table += [_generation_row(name, prompt, tokens[name], runs[name], base, compared) for name in models]
    return table


# ---------------------------------------------------------------------------------------------------
# Bytes: what torch.cat moves, and pages don't

class ByteCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes that operators allocate, and that those which store K and V read and write.

    While it is entered (`with counter:`) torch calls it in place of each operator.
    """

    MOVES = ("cat", "copy_", "index_copy_")

    def __init__(self):
        super().__init__()
        self.allocated = 0
        self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Runs one operator and counts: an output whose memory is none of the inputs' was allocated."""
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        known = {x.untyped_storage().data_ptr() for x in inputs}
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                self.allocated += x.nbytes
        name = func.overloadpacket.__name__
        if name in self.MOVES:  # each byte is read and written: all of a cat, the last input of a copy, its source
            self.moved += 2 * (out.nbytes if name == "cat" else inputs[-1].nbytes)
        return out


def count_bytes(model: engine.GPT2, stored: int) -> ByteCounter:
    """Bytes that one decode step moves and allocates to store and attend, with `stored` tokens before it.

    Counted on the plain path, which stores by operators that can be seen what the kernels store.
    """
    model = engine.share_weights(model, type(model), backend=engine.PLAIN)
    kv = model.new_kv()
    model(torch.tensor([random_prompt(stored, model.config.vocab_size)]), kv, keep=slice(-1, None))
    counter = ByteCounter()
    attend = kv.attend

    def counted(*args):
        with counter:
            return attend(*args)

    kv.attend = counted
    model(torch.tensor([[0]]), kv)
    kv.release()
    return counter


def parts_of_bytes(costs: StepCosts, args: argparse.Namespace) -> list[Part]:
    """A part for each number of stored tokens, the key; all on the plain path, which needs no kernels."""
    return [Part(f"bytes at {stored} tokens", stored, 2.4 * (stored + 20) * costs.plain)
            for stored in (16, 128, 512, 900)]


def bench_bytes(models: dict[str, engine.GPT2], args: argparse.Namespace, budget: Budget) -> Table:
    """What a decode step costs in memory: torch.cat against pages, counted operator by operator as it runs."""
    table = []
    for stored, _ in budget.parts("bytes"):
        for name in ("cached", "paged"):
            counter = count_bytes(models[name], stored)
            table.append({"stored": stored, "variant": LABELS[name], "moved KB a step": counter.moved / 1e3,
                          "allocated KB a step": counter.allocated / 1e3})
    return table


# ---------------------------------------------------------------------------------------------------
# A decode step: its parts, its floor, the dtype of the weights

def step_parts(model: engine.GPT2, prompt: list[int]) -> dict[str, float]:
    """ms of what a decode step does after a prompt, each part by itself."""
    c = model.config
    inputs = [(linear, torch.randn(1, linear.weight.shape[1])) for linear in model.linears()]
    kv = model.new_kv()
    request = engine.Request(prompt, greedy(1))
    q = torch.randn(1, c.n_head, 1, c.head_dim)                      # stands for the new key and value too
    logits = model(torch.tensor([prompt]), kv)[0, -1:]
    kv.reserve(1, 1, c.n_positions)                                  # never advanced: each call attends to as much
    parts = {"products": lambda: [linear(x) for linear, x in inputs],
             "attention": lambda: [kv.attend(layer, q, q, q, 1.0) for layer in range(c.n_layer)],
             "sampling": lambda: engine.sample(logits, [request])}
    milliseconds = {name: 1e3 * median_seconds(part) for name, part in parts.items()}
    kv.release()
    return milliseconds


def parts_of_bandwidth(costs: StepCosts, args: argparse.Namespace) -> list[Part]:
    """One part: it is cheap. Some 50 steps of two variants, and the reading of 5 GB."""
    return [Part("bandwidth", None, 100 * costs.step + 1, worth=2)]


def bench_bandwidth(models: dict[str, engine.GPT2], args: argparse.Namespace, budget: Budget) -> Table:
    """What a decode step costs and what on, against its floor: every weight is read once."""
    table = []
    for _ in budget.parts("bandwidth"):
        ceiling = read_bandwidth()
        table += [_bandwidth_row(name, models[name], ceiling) for name in ("cached", "paged")]
    return table


def _bandwidth_row(name, model, ceiling):
    """A variant's line. ceiling: bytes a second at which memory is read."""
    weights = weight_bytes(model)
    prompt = sentence_prompt()
    step = statistics.median(time_generation(model, prompt, 30).rest)
    parts = step_parts(model, prompt)
    return {"variant": LABELS[name], "weights MB": weights / 1e6, "memory GB/s": ceiling / 1e9,
            "floor ms": 1e3 * weights / ceiling, "ms a token": 1e3 * step,
            "share of memory": weights / step / ceiling, **parts,
            # The rest: LayerNorms, embeddings, what Python does between the calls.
            "rest": max(0.0, 1e3 * step - sum(parts.values()))}


def _decoded_logits(model, text):
    """Logits (T, V) of a text of T tokens that is fed token by token, as decoding does."""
    kv = model.new_kv()
    logits = torch.cat([model(torch.tensor([[token]]), kv)[0] for token in text])
    kv.release()
    return logits


DTYPE_SECONDS = 3.0  # of the text that is timed


def parts_of_dtypes(costs: StepCosts, args: argparse.Namespace) -> list[Part]:
    """A part for each dtype, the key. All are priced as float32: the first is compared with, and must be the first that
    is found room for."""
    tokens = min(args.tokens, 60, max(8, int(DTYPE_SECONDS / costs.step)))
    # A second to load; 125 tokens of tiny take as long as some 40 steps.
    return [Part(f"dtypes {dtype}", dtype, (40 + tokens) * costs.step + 1) for dtype in engine.CPU_DTYPES]


def bench_dtypes(models: dict[str, engine.GPT2], args: argparse.Namespace, budget: Budget) -> Table:
    """Each dtype of the weights: its speed, and on a text of `tiny` what it costs in accuracy."""
    prompt = sentence_prompt()
    text = None
    table = []
    for dtype, _ in budget.parts("dtypes"):
        with budget.progress.compiling(dtype):                       # and a warm-up
            tiny = engine.load_model("tiny", dtype=dtype)
            model = engine.load_model(models["paged"].name, engine.GPT2Paged, dtype=dtype)
            for warmed in tiny, model:
                time_generation(warmed, prompt, 3)
        if text is None:  # of float32, the first
            text = prompt + list(engine.generate(tiny, prompt, engine.SamplingParams(seed=0, max_tokens=120,
                                                                                     ignore_eos=True)))
            reference = _decoded_logits(tiny, text)
        logits = _decoded_logits(tiny, text)
        tokens = budget.tokens("dtypes", min(args.tokens, 60), DTYPE_SECONDS)
        step = statistics.median(time_generation(model, prompt, tokens).rest)
        table.append({"weights": dtype, "weights MB": weight_bytes(model) / 1e6, "new": tokens,
                      "ms a token": 1e3 * step, "tokens/s": 1 / step,
                      "logits error %": 100 * ((logits - reference).abs().max() / reference.abs().max()).item(),
                      "perplexity": F.cross_entropy(logits[:-1], torch.tensor(text[1:])).exp().item()})
    for row in table:
        row["speed-up"] = table[0]["ms a token"] / row["ms a token"]
    return table


# ---------------------------------------------------------------------------------------------------
# Many requests: batching and the prefix cache

def drain_steps(scheduler: engine.ContinuousBatchingScheduler, *requests: engine.Request) -> None:
    """Submits requests, and runs steps in this thread until nothing is left to do."""
    scheduler.submit(*requests)
    while scheduler.step():
        pass


class ServingJob(NamedTuple):
    """A prompt, and how many tokens are to follow it."""

    prompt: list[int]
    tokens: int


class ServingRun(NamedTuple):
    """Requests that were run, all of which had arrived at the start, and how long they took together."""

    requests: list[engine.Request]
    seconds: float


def bench_serving(model: engine.GPT2Paged, jobs: Sequence[ServingJob], mode: str,
                  args: argparse.Namespace) -> ServingRun:
    """Runs jobs that all arrive at once.

    mode: sequential: one after another. static: batches of SLOTS, each waits for its slowest. continuous: a free slot
    is given to the next at once.
    """
    # How many requests the scheduler is given before it is run until it is empty.
    at_once = {"sequential": 1, "static": SLOTS, "continuous": len(jobs)}[mode]
    # Without the prefix cache: the same prompts are run again and again, and must be computed each time.
    scheduler = engine.ContinuousBatchingScheduler(model, SLOTS, prefill_chunk=args.prefill_chunk, prefix_cache=False)
    requests = [engine.Request(job.prompt, greedy(job.tokens)) for job in jobs]
    start = time.monotonic()
    for first in range(0, len(requests), at_once):
        drain_steps(scheduler, *requests[first:first + at_once])
    for request in requests:  # they were submitted later, but waited from the start
        request.arrival_time = start
    return ServingRun(requests, time.monotonic() - start)


def latencies(requests: Sequence[engine.Request]) -> dict[str, float]:
    """ms, mean / median / 99th percentile, as serving benchmarks give them: time to first token, time per output
    token (after the first, a mean for each request), inter-token latency (each gap)."""
    gaps = [np.diff(request.token_times) for request in requests]    # empty for a request of one token
    times = {"TTFT": [request.token_times[0] - request.arrival_time for request in requests],
             "TPOT": [gap.mean() for gap in gaps if len(gap)], "ITL": np.concatenate(gaps)}
    measures = {"mean": np.mean, "median": np.median, "p99": lambda values: np.percentile(values, 99)}
    return {f"{name} {what}": 1e3 * float(measure(values))
            for name, values in times.items() for what, measure in measures.items()}


BATCHING_SECONDS = 1.0  # of the longest output, alone: all of them together are some tens of it


def _serving_jobs(most, vocab_size):
    """32 jobs: prompts of 5 to 200 tokens, outputs mostly short and a few of `most` tokens, as in practice."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(5, 201, size=32)
    tokens = draw.geometric(2.5 / most, size=32).clip(2, most)
    return [ServingJob(random_prompt(int(length), vocab_size), int(n)) for length, n in zip(lengths, tokens)]


def _serving_row(mode, runs):
    """A mode's line, from the run of median time. bars: [slot, admission, end] of each request, seconds."""
    median = statistics.median(run.seconds for run in runs)
    requests, seconds = min(runs, key=lambda run: abs(run.seconds - median))
    start = requests[0].arrival_time                                 # of all of them
    row = {"requests": len(requests), "mode": mode, "tokens/s": sum(len(r.output_ids) for r in requests) / seconds}
    row |= {"runs": len(runs)} | latencies(requests)
    row["bars"] = [[r.slot, r.scheduled_time - start, r.finish_time - start] for r in requests]
    return row


def parts_of_batching(costs: StepCosts, args: argparse.Namespace) -> list[Part]:
    """A part for each number of requests, the key; with --only alone in full, else one part, once."""
    in_full = args.only == "batching"
    most = args.tokens if in_full else max(4, args.tokens // 2)
    most = min(most, max(8, int(BATCHING_SECONDS / costs.step)))
    parts = []
    for count in (1, 2, 4, 8, 16, 32) if in_full else (16,):
        jobs = _serving_jobs(most, 50000)[:count]
        made = sum(job.tokens for job in jobs)
        read = sum(len(job.prompt) for job in jobs)
        # A mode after another; together steps are fewer, and each of them longer.
        seconds = (1.8 * made + count) * costs.step + 3 * read * costs.token
        warm_up = 8 * costs.prompt(100)
        rounds = (args.runs or ROUNDS, args.runs or 1) if in_full else (1, 1)
        parts.append(Part(f"batching of {count}", count, warm_up, seconds, *rounds, worth=2))
    return parts


def bench_batching(models: dict[str, engine.GPT2], args: argparse.Namespace, budget: Budget) -> Table:
    """The same requests one after another, in static batches, and continuously batched; in full with --only alone."""
    model = engine.share_weights(models["paged"], engine.GPT2Paged, max_pages=1024)   # enough for all slots
    most = args.tokens if args.only == "batching" else max(4, args.tokens // 2)
    table = []
    for count, rounds in budget.parts("batching"):
        tokens = budget.tokens("batching", most, BATCHING_SECONDS)
        jobs = _serving_jobs(tokens, model.config.vocab_size)
        if not table:
            warm_up = [ServingJob(job.prompt, 2) for job in jobs[:SLOTS]]
            bench_serving(model, warm_up, "continuous", args)
        runs = {mode: [] for mode in ("sequential", "static", "continuous")}
        for _ in range(rounds):
            for mode in runs:
                runs[mode].append(bench_serving(model, jobs[:count], mode, args))
        texts = [[request.output_ids for request in of_mode[0].requests] for of_mode in runs.values()]
        require_match(f"{count} requests, texts of all modes", texts[0] == texts[1] == texts[2])
        table += [_serving_row(mode, of_mode) for mode, of_mode in runs.items()]
    return table


def parts_of_prefix(costs: StepCosts, args: argparse.Namespace) -> list[Part]:
    """One part: five prompts are read, and of three more the end."""
    return [Part("prefix cache", None, 5 * costs.prompt(503) + 64 * costs.step, worth=2)]


def bench_prefix(models: dict[str, engine.GPT2], args: argparse.Namespace, budget: Budget) -> Table:
    """Requests that share their first 500 tokens, without and with the prefix cache."""
    return [_prefix_row(models["paged"], args, prefix_cache)
            for _ in budget.parts("prefix") for prefix_cache in (False, True)]


def _prefix_row(model, args, prefix_cache):
    """A line, with the cache or without."""
    shared = random_prompt(500, model.config.vocab_size)
    scheduler = engine.ContinuousBatchingScheduler(model, SLOTS, prefill_chunk=args.prefill_chunk,
                                                   prefix_cache=prefix_cache)
    requests = [engine.Request([*shared, n, n, n], greedy(8)) for n in range(4)]        # 3 tokens of its own each
    start = time.monotonic()
    for request in requests:
        drain_steps(scheduler, request)
    return {"prefix cache": "on" if prefix_cache else "off", "requests": len(requests),
            "prompt tokens": 503 * len(requests), "cached": sum(r.cached_tokens for r in requests),
            "first token ms": 1e3 * statistics.median(r.token_times[0] - r.arrival_time for r in requests),
            "seconds": time.monotonic() - start}


# ---------------------------------------------------------------------------------------------------
# Speculative decoding

class Replay(engine.Speculator):
    """Knows the text: guesses that cost nothing and are always right, the most that speculation can give.

    model: any with the target's vocabulary, but not the target; it is never run. A GPT2 stores nothing either.
    """

    def __init__(self, model: engine.GPT2, text: Sequence[int], tokens: int = 4):
        super().__init__(model, tokens)
        self.text = list(text)

    def guess(self, request: engine.Request, config: engine.GPT2Config) -> list[int]:
        """Up to `tokens` next tokens of the text, fewer where the request would end before."""
        made = len(request.output_ids)
        left = engine.output_limit(request, config) - made
        return self.text[made:made + min(self.tokens, left - 1)]


SPECULATION_SECONDS = 3.0  # of the text without guesses


def parts_of_speculation(costs: StepCosts, args: argparse.Namespace) -> list[Part]:
    """One part: what is compared are ratios. The text is made once, then without guesses, with free ones, with tiny's;
    all that takes as long as some 4 texts."""
    tokens = min(args.tokens, 60, max(8, int(SPECULATION_SECONDS / costs.step)))
    return [Part("speculation", None, 5 * tokens * costs.step)]


def bench_speculation(models: dict[str, engine.GPT2], args: argparse.Namespace, budget: Budget) -> Table:
    """One stream alone, with `tiny` guessing, and with guesses that are always right."""
    table = []
    for _ in budget.parts("speculation"):
        tokens = budget.tokens("speculation", min(args.tokens, 60), SPECULATION_SECONDS)
        table += _speculation_rows(models, tokens)
    return table


def _speculation_rows(models, tokens):
    """A line for each kind of guesses, on a text of so many tokens."""
    model = models["paged"]
    prompt = sentence_prompt()
    text = list(engine.generate(model, prompt, greedy(tokens)))
    drafts = {"off": None, "always right, at no cost": Replay(models["no-cache"], text)}
    # tiny has GPT-2's vocabulary; for a model with another one it can't guess.
    if model.config.vocab_size == engine.GPT2Config.vocab_size:
        drafts["tiny"] = engine.Speculator(engine.load_model("tiny", engine.GPT2Cached), 4)
    table = []
    for name, draft in drafts.items():
        start = time.perf_counter()
        same = list(engine.generate(model, prompt, greedy(tokens), draft=draft)) == text
        rate = tokens / (time.perf_counter() - start)
        table.append({"guesses": name, "new": tokens, "match": "yes" if same else "NO",
                      "acceptance": draft.acceptance if draft else 0.0, "tokens/s": rate})
        table[-1]["speed-up"] = rate / table[0]["tokens/s"]
    return table


# In the order in which they run: what needs no compiled kernels comes first, what compiles the most last.
BENCHMARKS = {
    "bytes": ("K/V of one decode step, all layers: bytes read and written to store it, bytes allocated", bench_bytes),
    "bandwidth": ("A decode step against the memory's speed, and its parts in ms", bench_bandwidth),
    "generation": ("Generation, batch 1, greedy; ms a token without the first, median of the runs", bench_generation),
    "prefix": ("Prefix cache: prompts that share 500 tokens, one after another", bench_prefix),
    "speculation": ("Speculative decoding, 4 guesses a step", bench_speculation),
    "batching": (f"Batching, {SLOTS} slots; all requests arrive at once; latencies in ms", bench_batching),
    "dtypes": ("Weights by dtype; largest logits error (of the largest logit) and perplexity on a text of tiny",
               bench_dtypes),
}
PARTS = {"bytes": parts_of_bytes, "bandwidth": parts_of_bandwidth, "generation": parts_of_generation,
         "prefix": parts_of_prefix, "speculation": parts_of_speculation, "batching": parts_of_batching,
         "dtypes": parts_of_dtypes}


# ---------------------------------------------------------------------------------------------------
# Pictures, and all of it together

class Curve(NamedTuple):
    """What is drawn of a benchmark by the number of tokens before: a column of its table."""

    tokens_before: Callable[[dict[str, Any]], float]
    column: str
    title: str
    unit: str


CURVES = {
    "generation": Curve(lambda row: row["prompt"] + row["new"] / 2, "ms a token", "Time of one new token", "ms"),
    "bytes": Curve(lambda row: row["stored"], "moved KB a step", "K/V bytes moved to store it", "KB"),
}


def plot_curves(axis: Axes, name: str, table: Table) -> None:
    """A line for each variant: time or bytes of a token by the number of tokens before it."""
    curve = CURVES[name]
    for label, colour in zip(LABELS.values(), ("#9aa0a6", "#e8710a", "#1a73e8")):
        points = sorted((curve.tokens_before(row), row[curve.column]) for row in table if row["variant"] == label)
        if points:
            axis.plot(*zip(*points), marker="o", color=colour, label=label)
    axis.set(title=curve.title, xlabel="tokens before it", ylabel=curve.unit, yscale="log")
    axis.yaxis.set_major_formatter("{x:,.0f}")                       # 1,000, where a log axis would say 10^3
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=9)


def plot_timelines(axes: dict[str, Axes], table: Table) -> None:
    """A bar for each request of the largest run, in its slot, from admission to its end."""
    most = max(row["requests"] for row in table)
    drawn = {row["mode"]: row for row in table if row["requests"] == most and row["mode"] in axes}
    longest = max(end for row in drawn.values() for _, _, end in row["bars"])
    for mode, row in drawn.items():
        axis = axes[mode]
        for n, (slot, start, end) in enumerate(row["bars"]):
            colour = ("#1a73e8", "#8ab4f8")[n // SLOTS % 2]          # by turns, a batch of the static mode each
            axis.barh(slot, end - start, left=start, height=0.8, color=colour, edgecolor="white")
        axis.set(title=f"{mode}: {most} requests in {SLOTS} slots, {row['tokens/s']:.0f} tokens/s", ylabel="slot",
                 xlim=(0, longest), yticks=range(0, SLOTS, 2), xlabel="seconds" if mode == "continuous" else None)
        axis.invert_yaxis()                                          # slot 0 on top
        axis.spines[["top", "right"]].set_visible(False)


def plot_results(results: dict[str, Any], path: str) -> None:
    """Time of a token and bytes moved a step by context; below, who held which slot when, static and continuous."""
    curves = [name for name in CURVES if name in results]
    mosaic = []                                                      # rows of panels by name, in two columns
    heights = []
    if curves:
        mosaic.append(curves if len(curves) == 2 else curves * 2)    # one alone takes both columns
        heights.append(2)
    if "batching" in results:
        mosaic += [["static", "static"], ["continuous", "continuous"]]
        heights += [1, 1]
    if not mosaic:
        say(f"{path} is not drawn: the time did not reach for what it shows.")
        return
    figure, axes = pyplot().subplot_mosaic(mosaic, figsize=(10, 1.8 * sum(heights)), layout="constrained",
                                           height_ratios=heights)
    for name in curves:
        plot_curves(axes[name], name, results[name])
    if "batching" in results:
        plot_timelines(axes, results["batching"])
    machine = results["machine"]
    save_figure(figure, results, f"{machine['threads']} threads, {machine['processor']}", path)


def make_budget(models: dict[str, engine.GPT2], args: argparse.Namespace, progress: Progress) -> Budget:
    """The budget of what --only, --full and --runs ask for."""
    costs = StepCosts(models, progress)
    names = [args.only] if args.only else list(BENCHMARKS)
    return Budget(names, lambda name: PARTS[name](costs, args), None if args.full else BUDGET, progress, costs)


def run_benchmarks(args: argparse.Namespace) -> None:
    """The benchmarks of --only (all without it): a table each, and the files of --json and --plot.

    Without --full they take BUDGET seconds, and a line says what was left out for that.
    """
    check_outputs(args)
    # Random weights where gpt2 can't be had: a speed does not depend on their values. All variants share them.
    model = engine.load_model(args.model, engine.GPT2, dtype=args.dtype, stand_in="random")
    models = {name: engine.share_weights(model, variant) for name, variant in engine.VARIANTS.items()}
    machine = {"model": model.name, "dtype": args.dtype, "threads": torch.get_num_threads(),
               "runs": args.runs or ROUNDS, "budget": "none" if args.full else f"{BUDGET} s",
               "processor": engine.processor_name(), "system": platform.platform(terse=True),
               "torch": torch.__version__}
    progress = Progress()
    budget = make_budget(models, args, progress)
    report(machine, BENCHMARKS, args, plot_results, models, args, budget, progress=progress)
    if budget.omissions():
        print(f"\n{budget.omissions()}")
