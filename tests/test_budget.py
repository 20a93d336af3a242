"""How the time of the benchmarks is shared, by made-up costs and a made-up clock, and what is said of it."""

import io
import re
import sys
from types import SimpleNamespace

import pytest

import benchmarks
import budget
import engine
from budget import Budget, Part, Progress, share


class Clock:
    """In the place of Progress: stands still until it is told."""

    def __init__(self):
        self.now = 0.0
        self.shown = []

    def seconds(self):
        return self.now

    def show(self, what, done, total):
        self.shown.append((what, done, total))


def costs(step):
    """A machine where a decode step takes so many seconds, in the proportions of a real one."""
    return SimpleNamespace(step=step, token=step / 16, plain=step / 8,
                           prompt=lambda tokens: step + tokens * step / 16)


def run_through(whole, clock, slower=1.0):
    """Asks for all parts in turn, as the benchmarks do. slower: what they really take, of what was estimated."""
    done = {}
    for name in list(whole.waiting):
        parts = {part.key: part for part in whole.parts_of(name)}
        for key, rounds in whole.parts(name):
            done[name, key] = rounds
            clock.now += slower * parts[key].seconds(rounds)
    return done


def budget_for(step, *flags):
    """The budget of a command line on a machine of such steps, and its clock."""
    args = engine.parse_args(list(flags))
    clock = Clock()
    made_up = costs(step)
    names = [args.only] if args.only else list(benchmarks.BENCHMARKS)
    whole = Budget(names, lambda name: benchmarks.PARTS[name](made_up, args), None if args.full else budget.BUDGET,
                   clock, made_up)
    return whole, clock


def test_all_rounds_where_there_is_time():
    parts = [Part("a", 1, once=1, round=2, rounds=3), Part("b", 2, once=5)]
    assert share(parts, 12) == [3, 1]
    assert share(parts, float("inf")) == [3, 1]
    assert share([], 12) == []


def test_rounds_are_lost_before_parts_and_the_most_expensive_part_first():
    parts = [Part("a", 1, once=1, round=2, rounds=3), Part("b", 2, once=20, round=4, rounds=3), Part("c", 3, once=2)]
    assert share(parts, 29) == [1, 1, 1]
    assert share(parts, 31) == [2, 1, 1]
    assert share(parts, 28) == [3, 0, 1]                             # what the part would have taken buys rounds
    assert share(parts, 2) == [0, 0, 1]
    assert share(parts, 0) == share(parts, -1) == [0, 0, 0]


def test_what_is_worth_more_is_kept_at_a_higher_price():
    parts = [Part("a", 1, once=9), Part("b", 2, once=9), Part("c", 3, once=20, worth=4)]
    assert share(parts, 30) == [1, 0, 1]
    assert share(parts, 19) == [1, 1, 0]


def test_never_more_than_there_is():
    parts = [Part(str(n), n, once=n % 5, round=1 + n % 3, rounds=3) for n in range(20)]
    for seconds in range(0, 200, 7):
        assert sum(part.seconds(n) for part, n in zip(parts, share(parts, seconds))) <= seconds


def test_runs_asked_for_are_made_or_the_part_is_left_out():
    part = Part("a", 1, once=1, round=2, rounds=5, least=5)
    assert share([part], 10.9) == [0] and share([part], 11) == [5]


@pytest.mark.parametrize("step", [0.002, 0.01, 0.04, 0.1, 0.3, 1.0, 10.0])
def test_the_budget_is_kept_and_what_it_costs_is_said(step):
    whole, clock = budget_for(step)
    done = run_through(whole, clock)
    assert clock.now <= budget.BUDGET
    every = [part for name in benchmarks.BENCHMARKS for part in whole.parts_of(name)]
    assert len(done) + len(whole.left_out) == len(every)
    assert {part.name for part in every if part.key not in [key for _, key in done]} <= set(whole.left_out)
    line = whole.omissions()
    assert "\n" not in line and all(name in line for name in whole.left_out + whole.shortened)
    assert ("--full" in line) == bool(whole.left_out or whole.shortened)


def test_a_fast_machine_measures_everything_and_says_nothing():
    whole, clock = budget_for(0.002)
    done = run_through(whole, clock)
    assert [rounds for (name, _), rounds in done.items() if name == "generation"] == [3] * 4
    assert whole.tokens("dtypes", 60, seconds=3) == 60
    assert whole.omissions() == ""


def test_a_slow_machine_still_shows_something_of_most_benchmarks():
    whole, clock = budget_for(0.1)
    done = run_through(whole, clock)
    assert {"bytes", "bandwidth", "generation", "prefix", "speculation"} <= {name for name, _ in done}
    assert ("generation", 900) not in done and "generation after 900 tokens" in whole.omissions()


def test_the_first_table_comes_soon_on_any_machine():
    for step in (0.01, 0.1, 1.0):
        whole, clock = budget_for(step)
        for key, _ in whole.parts("bytes"):
            clock.now += next(part for part in whole.parts_of("bytes") if part.key == key).once
        assert clock.now <= budget.FIRST_TABLE


def test_the_first_table_asks_for_no_costs_of_compiled_kernels():
    made_up = SimpleNamespace(plain=0.001)
    whole = Budget(list(benchmarks.BENCHMARKS), lambda name: benchmarks.PARTS[name](made_up, None), 120, Clock())
    assert [key for key, _ in whole.parts("bytes")] == [16, 128, 512, 900]


def test_a_wrong_estimate_costs_later_parts_and_not_the_budget():
    parts = {name: [Part(f"{name} {n}", n, once=8) for n in range(3)] for name in "abcd"}
    clock = Clock()
    whole = Budget(list("abcd"), parts.get, 100, clock)
    done = run_through(whole, clock, slower=2)
    assert clock.now <= 100 + 8                                      # the last one began in time
    assert 5 <= len(done) < 12 and len(whole.left_out) == 12 - len(done)


def test_full_leaves_nothing_out_and_shortens_nothing():
    whole, clock = budget_for(10.0, "--full")
    done = run_through(whole, clock)
    assert len(done) == sum(len(whole.parts_of(name)) for name in benchmarks.BENCHMARKS)
    assert [rounds for (name, _), rounds in done.items() if name == "generation"] == [3] * 4
    assert whole.tokens("speculation", 60, seconds=3) == 60
    assert (whole.left_out, whole.shortened, whole.omissions()) == ([], [], "")


def test_only_one_benchmark_has_the_whole_budget():
    whole, clock = budget_for(0.02, "--only", "batching")
    done = run_through(whole, clock)
    assert budget.FIRST_TABLE < clock.now <= budget.BUDGET
    assert set(done) <= {("batching", n) for n in (1, 2, 4, 8, 16, 32)} and len(done) >= 4


def test_runs_given_are_obeyed():
    for flags in (["--runs", "2"], ["--runs", "5"], ["--runs", "2", "--full"]):
        whole, clock = budget_for(0.01, *flags, "--only", "generation")
        assert set(run_through(whole, clock).values()) == {int(flags[1])}


def test_fewer_tokens_where_steps_are_slow():
    whole, _ = budget_for(0.1)
    assert whole.tokens("dtypes", 60, seconds=3) == 30
    assert whole.tokens("dtypes", 60, seconds=0.01) == 8
    assert whole.tokens("dtypes", 4, seconds=0.01) == 4
    assert "Fewer rounds or tokens: dtypes." in whole.omissions()


def test_the_bar_says_what_is_measured_and_how_long_it_takes():
    clock = Clock()
    whole = Budget(["a", "b"], {"a": [Part("a of 5", 5, once=4)], "b": [Part("b", 1, once=30)]}.get, 120, clock)
    run_through(whole, clock)
    assert clock.shown == [("a of 5, some 4 s; 0 of some 4 s", 0, 4), ("b, some 30 s; 4 of some 34 s", 4, 34)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stderr, drawn", [(io.StringIO, False), (Terminal, True)])
def test_the_bar_is_silent_off_a_terminal(stderr, drawn, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", stderr())
    progress = Progress()
    progress.show("generation after 5 tokens", 10, 40)
    progress.show("later than planned", 50, 40)
    budget.say("a line")
    progress.bar.close()
    assert ("generation after 5 tokens |" in sys.stderr.getvalue()) == drawn
    assert drawn or sys.stderr.getvalue() == ""
    assert capsys.readouterr().out == "a line\n"


def test_compiling_is_said_once_and_is_no_measuring(monkeypatch, capsys):
    numba = pytest.importorskip("numba")
    if numba.config.DISABLE_JIT:
        pytest.skip("nothing is compiled")
    progress = Progress()
    double = numba.njit(lambda x: 2 * x)
    for _ in range(2):
        with progress.compiling("float32"):
            assert double(3) == 6
    out = capsys.readouterr().out
    assert re.fullmatch(r"Compiling kernels for float32, once on this machine \.\.\. \d+ s\n", out)
    compiling = progress.compiling_seconds
    assert compiling > 0
    monkeypatch.setattr(budget.time, "perf_counter", lambda: progress.start + compiling + 7)
    assert progress.seconds() == pytest.approx(7)


def test_a_benchmark_that_was_left_out_has_no_table(tmp_path, capsys):
    args = SimpleNamespace(only=None, json=str(tmp_path / "r.json"), plot=str(tmp_path / "r.png"))
    named = {"none": ("Nothing", lambda: []), "one": ("Something", lambda: [{"a": 1}])}
    benchmarks.report({"model": "m"}, named, args, benchmarks.plot_results)
    out = capsys.readouterr().out
    assert "Something" in out and "Nothing" not in out and f"{args.plot} is not drawn" in out
    assert (tmp_path / "r.json").read_text().count("one") == 1 and not (tmp_path / "r.png").exists()
