"""Types of flags."""

import argparse
import math


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)


def at_least_one(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no number") from None
    if not 1 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 up")
    return number
