"""Errors that a user can mend, and the checks that raise them."""

import math
from numbers import Integral
from pathlib import Path

ASSETS = Path(__file__).resolve().parent / "assets"

class UserError(ValueError):
    """Something the user can mend. The message is one line that names the value and the limit."""


class OutOfPages(UserError):
    """The page pool has fewer free pages than a step needs. Nothing was changed."""


class QueueFull(UserError):
    """Too many requests are waiting; this one was not taken, and may be sent again later."""


ABOVE_0 = math.ulp(0.0)


def check_number(name, value, kind, low, high=math.inf, optional=False):
    """Raises UserError unless value is a finite number of that kind from low to high (or None where optional)."""
    if value is None and optional:
        return
    try:
        good = isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high and math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        good = False
    if not good:
        what = "a whole number" if kind is Integral else "a finite number"
        bounds = ("above 0" if low == ABOVE_0 else f"from {low}") + ("" if high == math.inf else f" to {high}")
        raise UserError(f"{name} must be {what} {bounds}, not {shown(value)}")


def first_line(err):
    return (str(err).strip() or type(err).__name__).splitlines()[0][:200]


def shown(value):
    """A value as an error message shows it: one line, not too long."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
