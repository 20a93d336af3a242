"""How much is measured in so many seconds, on whatever machine, and what is said of it while it runs."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from benchmarks import StepCosts

BUDGET = 120  # seconds of measuring, without --full
FIRST_TABLE = 12  # seconds of them that the first of several tables may take: who waits should see something soon


# ---------------------------------------------------------------------------------------------------
# What is said

def say(line: str) -> None:
    """Prints a line at once, above the progress bar where there is one."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


class Progress:
    """A clock that stands still while kernels are compiled, and a bar on stderr that says what is being measured.

    There is no bar where stderr is not a terminal.
    """

    def __init__(self):
        from tqdm import tqdm

        # disable=None: silent off a terminal. leave=False: it is gone when all is done.
        self.bar = tqdm(disable=None, leave=False, bar_format="{desc} |{bar:30}| {percentage:.0f} %")
        self.start = time.perf_counter()
        self.compiling_seconds = 0.0

    def seconds(self) -> float:
        """Seconds since it was made, without those in which kernels were compiled."""
        return time.perf_counter() - self.start - self.compiling_seconds

    def show(self, what: str, done: float, total: float) -> None:
        """Draws the bar: what is being measured, and how much of all is done, in any unit."""
        self.bar.n = done
        self.bar.total = max(total, done)                            # tqdm draws no bar beyond its total
        self.bar.set_description_str(what)

    @contextlib.contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """Around a first use of kernels: says in one line that numba compiles them for `what`, and for how long."""
        try:
            from numba.core import event
        except ImportError:                                          # no kernels then
            yield
            return
        listener = compile_listener(lambda: self._print(f"Compiling kernels for {what}, once on this machine ..."))
        with event.install_listener("numba:compile", listener):      # an event that kernels kept on disk don't cause
            yield
        if listener.seconds:
            print(f" {listener.seconds:.0f} s", flush=True)
        self.compiling_seconds += listener.seconds

    def _print(self, text):
        self.bar.clear()
        print(text, end="", flush=True)                              # the line is ended when its time is known


def compile_listener(at_start: Callable[[], None]) -> Any:
    """A listener to numba's events that sums up the `seconds` of compiling. at_start is called when it begins first."""
    from numba.core import event

    class Listener(event.Listener):
        seconds = 0.0
        depth = 0                                                    # a kernel is compiled while its caller is
        begun: float | None = None

        def on_start(self, _):
            if self.begun is None:
                at_start()
            if self.depth == 0:
                self.begun = time.perf_counter()
            self.depth += 1

        def on_end(self, _):
            self.depth -= 1
            if self.depth == 0:
                self.seconds += time.perf_counter() - self.begun

    return Listener()


# ---------------------------------------------------------------------------------------------------
# What is measured

class Part(NamedTuple):
    """Rows of a benchmark's table that are measured, or left out, together."""

    name: str                                                        # as it is called where it is left out
    key: Any                                                         # what the benchmark knows it by
    once: float                                                      # seconds: loading, warming up, checking
    round: float = 0.0                                               # seconds of each round
    rounds: int = 1                                                  # as many are wanted
    least: int = 1                                                   # with fewer it is left out
    worth: float = 1.0                                               # beside other parts: what is lost without it

    def seconds(self, rounds: int) -> float:
        """What so many rounds take."""
        return self.once + rounds * self.round if rounds else 0.0


def share(parts: Sequence[Part], seconds: float) -> list[int]:
    """How many rounds of each part fit in so many seconds together; 0 leaves it out.

    First every part gets its fewest rounds, those that cost the least for their worth first, so that as little as can
    be is lost. What then remains buys a second round of each, the cheapest first, and so on.
    """
    rounds = [0] * len(parts)
    for n in sorted(range(len(parts)), key=lambda n: parts[n].seconds(parts[n].least) / parts[n].worth):
        price = parts[n].seconds(parts[n].least)
        if price <= seconds:
            rounds[n] = parts[n].least
            seconds -= price
    for wanted in range(2, max((part.rounds for part in parts), default=0) + 1):
        for n in sorted(range(len(parts)), key=lambda n: parts[n].round):
            if rounds[n] == wanted - 1 > 0 and wanted <= parts[n].rounds and parts[n].round <= seconds:
                rounds[n] = wanted
                seconds -= parts[n].round
    return rounds


class Budget:
    """Which parts of the benchmarks are measured, in how many rounds, and what was left out.

    names: the benchmarks in their order. parts_of: name -> its parts, asked for when the benchmark before it is done,
    since it may have to measure what a step costs. seconds: for all of them; None leaves nothing out.
    """

    def __init__(self, names: Sequence[str], parts_of: Callable[[str], list[Part]], seconds: float | None,
                 progress: Progress, costs: StepCosts | None = None):
        self.costs = costs                                           # what a step takes, for `tokens`
        self.first = names[0] if len(names) > 1 else None            # who waits should see a table soon
        self.waiting = list(names)
        self.parts_of = parts_of
        self.seconds = float("inf") if seconds is None else seconds
        self.limited = seconds is not None
        self.progress = progress
        self.left_out: list[str] = []
        self.shortened: list[str] = []                               # benchmarks of fewer rounds or tokens than wanted

    def parts(self, name: str) -> Iterator[tuple[Any, int]]:
        """The parts of a benchmark that fit: (key, rounds) of each, when the one before it is done.

        What is left is shared anew before each, so that a wrong estimate costs the later parts and not the budget.
        """
        self.waiting.remove(name)
        own = self.parts_of(name)
        later = [] if name == self.first else [part for other in self.waiting for part in self.parts_of(other)]
        begun = self.progress.seconds()
        while own:
            left = self.seconds - self.progress.seconds()
            if name == self.first and self.limited:
                left = min(left, FIRST_TABLE - (self.progress.seconds() - begun))
            rounds = share([*own, *later], left)
            part, *own = own
            if rounds[0]:
                self._announce([part, *own, *later], rounds)
                yield part.key, rounds[0]
            else:
                self.left_out.append(part.name)
            if 0 < rounds[0] < part.rounds:
                self._shorten(name)

    def _announce(self, parts, rounds):
        """Draws the bar when the first of these parts begins, the others being planned."""
        seconds = [part.seconds(n) for part, n in zip(parts, rounds)]
        done = self.progress.seconds()
        self.progress.show(f"{parts[0].name}, some {seconds[0]:.0f} s; {done:.0f} of some {done + sum(seconds):.0f} s",
                           done, done + sum(seconds))

    def _shorten(self, name):
        if name not in self.shortened:
            self.shortened.append(name)

    def tokens(self, name: str, most: int, seconds: float, least: int = 8) -> int:
        """How many tokens a benchmark makes in a round: those that so many seconds of decode steps give, `least` to
        `most`; without a limit `most`."""
        if not self.limited:
            return most
        tokens = min(most, max(least, int(seconds / self.costs.step)))
        if tokens < most:
            self._shorten(name)
        return tokens

    def omissions(self) -> str:
        """One line of what the time did not reach for; empty where it reached for all."""
        parts = []
        if self.left_out:
            parts.append(f"Left out: {', '.join(self.left_out)}.")
        if self.shortened:
            parts.append(f"Fewer rounds or tokens: {', '.join(self.shortened)}.")
        if not parts:
            return ""
        return " ".join([f"Measured for {self.seconds:.0f} s.", *parts, "--full measures everything."])
