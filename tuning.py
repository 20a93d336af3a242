"""Kernels fit themselves to the machine: what is fastest is measured, on the model's own weights, and kept.

A prefetch that helps one processor costs another a third of its speed. So each Choice of engine_cpu.py is measured the
first time that a dtype and shape is loaded on a processor, in SECONDS at most, and kept beside the compiled kernels.
No result depends on it: sums are added up in the same order whatever is chosen.
"""

import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import engine
from engine_cpu import Choice, TiledLinear, cpu_kernels, kernels_apply, pack
from instructions import processor_features, processor_name

SECONDS = 3.0                    # that measuring may take, for all parameters
SMALLEST = 64 * 2 ** 20          # bytes of weights below which a cache may hold them, and nothing is measured
KEPT = Path(__file__).parent / "__pycache__" / "tuning.json"
# What is measured: parameter -> (rows of a step, values to choose from).
PARAMETERS = {"ahead": (1, (0, 512, 2048, 4096)), "shares": (8, (False, True))}


def linears_of(model: engine.GPT2) -> list[TiledLinear]:
    """The projections that the kernels multiply, in the order in which a pass reads them."""
    return [module for module in model.modules() if isinstance(module, TiledLinear) and module.product is not None]


def key_of(model: engine.GPT2, linears: list[TiledLinear]) -> str:
    """What a choice holds for: the processor and what of it is used, the threads, the dtype and the shape."""
    features = sorted(processor_features() & {"avx2", "avx512f", "avx512bf16", "avx512vnni", "avxvnni", "neon"})
    config = model.config
    return " ".join(map(str, (processor_name(), *features, torch.get_num_threads(), "threads", linears[0].weight.dtype,
                              config.n_layer, config.n_embd, config.vocab_size)))


def read_kept() -> dict[str, dict[str, Any]]:
    """All that was measured here before; nothing where the file is missing or broken."""
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(KEPT.read_text())
        if isinstance(kept, dict):
            return kept
    return {}


def choice_of(record: Any) -> Choice | None:
    """The Choice that a record names; None where it is not one of those that are offered."""
    if not isinstance(record, dict):
        return None
    for name, (_, values) in PARAMETERS.items():
        found = record.get(name)
        if not isinstance(found, int) or found not in values or type(found) is not type(values[-1]):
            return None
    return Choice(**{name: record[name] for name in PARAMETERS})


def keep(key: str, choice: Choice) -> None:
    """Note a choice for the next time. Where nothing can be written, the next time measures again."""
    kept = read_kept() | {key: choice._asdict()}
    own = KEPT.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        KEPT.parent.mkdir(exist_ok=True)
        own.write_text(json.dumps(kept, indent=1))
        os.replace(own, KEPT)                                        # whole, also beside another process


def time_pass(linears: list[TiledLinear], rows: int, choice: Choice, most: float) -> float:
    """Seconds that `rows` rows take through the projections, one after another, until `most` have gone by; by byte of
    weights, so that passes of different lengths compare."""
    done = 0
    start = time.perf_counter()
    for linear in linears:
        n_out, n_in = linear.weight.shape
        product = (*linear.product[:-1], tuple(choice))
        cpu_kernels().project(torch.ones(rows, n_in), product, torch.empty(rows, n_out), False, False)
        done += n_out * n_in
        if time.perf_counter() - start > most:
            break
    return (time.perf_counter() - start) / done


def measure(linears: list[TiledLinear], seconds: float) -> Iterator[tuple[str, dict[Any, float]]]:
    """For each parameter its name, and what each value of it costs: seconds a byte of weights, the median of rounds in
    which all values take turns. All in `seconds` at most, but for one round of each and for compiling."""
    chosen = Choice()
    time_pass(linears[:1], 1, chosen, seconds)                       # compiled now, if it was not
    for left, (name, (rows, values)) in zip(range(len(PARAMETERS), 0, -1), PARAMETERS.items()):
        share = seconds / left
        begin = time.perf_counter()
        times = {value: [] for value in values}
        while not times[values[-1]] or time.perf_counter() - begin < share:
            for value in values:
                times[value].append(time_pass(linears, rows, chosen._replace(**{name: value}), share / len(values)))
        costs = {value: statistics.median(found) for value, found in times.items()}
        chosen = chosen._replace(**{name: min(costs, key=costs.get)})
        seconds -= time.perf_counter() - begin
        yield name, costs


def tune(model: engine.GPT2, seconds: float = SECONDS) -> None:
    """Choose for all projections of a model that was loaded: what is kept for its kind, or what is measured now."""
    linears = linears_of(model)
    size = sum(linear.weight.nbytes for linear in linears)
    if size < SMALLEST or not kernels_apply(torch.empty(0), 1):
        return
    key = key_of(model, linears)
    choice = choice_of(read_kept().get(key))
    if choice is None:
        choice = Choice(**{name: min(costs, key=costs.get) for name, costs in measure(linears, seconds)})
        keep(key, choice)
    for linear in linears:
        linear.choice = choice
    pack(model)


def show_tuning(model: engine.GPT2) -> None:
    """Measure anew, longer, print what each choice costs, and keep the best. Raises UserError without kernels."""
    linears = linears_of(model)
    if not linears:
        raise engine.UserError("--tune needs the CPU kernels, and numba is missing or told not to compile")
    print(key_of(model, linears))
    print(f"{'parameter':12}{'rows':>6}{'value':>8}{'GB/s of weights':>18}{'cost':>7}")
    found = {}
    for name, costs in measure(linears, 4 * SECONDS):
        found[name] = min(costs, key=costs.get)
        for value, cost in costs.items():
            rate = linears[0].weight.itemsize / cost / 1e9
            more = 100 * (cost / costs[found[name]] - 1)
            print(f"{name:12}{PARAMETERS[name][0]:>6}{value!s:>8}{rate:>18.1f}{more:>6.0f}%"
                  + "  chosen" * (value == found[name]))
    keep(key_of(model, linears), Choice(**found))
