"""Errors that a user can mend, the checks of values that raise them, and the folder of the files that the repository
ships with."""

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from numbers import Integral, Number
from pathlib import Path

ASSETS = Path(__file__).resolve().parent / "assets"
ABOVE_0 = math.ulp(0.0)  # the smallest float above 0: as a lower bound it says "above 0"


class UserError(ValueError):
    """Something the user can mend. The message is one line that names the value and the limit."""


class OutOfPages(UserError):
    """The page pool has fewer free pages than a step needs. Nothing was changed."""


class QueueFull(UserError):
    """Too many requests are waiting; this one was not taken, and may be sent again later."""


def shown(value: object) -> str:
    """A value as an error message shows it: one line of at most 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def first_line(err: BaseException) -> str:
    """The first line of an exception's message, at most 200 characters; the exception's class where it has none."""
    message = str(err).strip() or type(err).__name__
    return message.splitlines()[0][:200]


@contextlib.contextmanager
def ends_with_one_line(program: str) -> Iterator[None]:
    """Around a command line: what the user can mend ends it with one line on stderr, Ctrl-C and a reader who has enough
    without one."""
    try:
        yield
    except UserError as err:
        raise SystemExit(f"{program}: {err}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # without this the exit would complain once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None


def check_number(name: str, value: object, kind: type[Number], low: float, high: float = math.inf,
                 optional: bool = False) -> None:
    """Raises UserError unless value is a finite number of that kind from low to high (or None where optional).

    kind: numbers.Integral or numbers.Real, so that numpy's numbers count too; True and False don't. low: ABOVE_0 for
    a number above 0.
    """
    if value is None and optional:
        return
    try:
        # A bool is an Integral in Python; whoever sends one meant something else.
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        allowed = is_number and low <= value <= high and math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        allowed = False
    if not allowed:
        what = "a whole number" if kind is Integral else "a finite number"
        lower = "above 0" if low == ABOVE_0 else f"from {low}"
        upper = "" if high == math.inf else f" to {high}"
        raise UserError(f"{name} must be {what} {lower}{upper}, not {shown(value)}")
