"""Types of flags."""

import argparse
import math
import re
from collections.abc import Iterable


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)


def with_values(args: Iterable[str]) -> list[str]:
    """Numbers with a minus in front joined to the flag before them: argparse takes -1,2 for a flag."""
    joined: list[str] = []
    for arg in args:
        if re.match(r"-\.?\d", arg) and joined and re.fullmatch(r"--[^=]+", joined[-1]):
            joined[-1] += f"={arg}"
        else:
            joined.append(arg)
    return joined


def at_least_one(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no number") from None
    if not 1 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 up")
    return number
