"""`jaxpar`: the commands beside training. One file per group: `add` gives its flags, and says what runs them."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxpar import config as configs
from jaxpar.cli import attention, audit, checkpoint, estimates, models, pipeline, plan, verify
from jaxpar.cli.arguments import with_values


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def main(args: Sequence[str] | None = None) -> None:
    parser = _Parser(prog="jaxpar", description="The commands beside training.")
    commands = parser.add_subparsers(dest="command", required=True)
    for group in (verify, audit, models, attention, checkpoint, pipeline, plan, estimates):
        group.add(commands)
    try:
        given, rest = parser.parse_known_args(with_values(sys.argv[1:] if args is None else args))
        if given.command == "verify":
            verify.run(rest, given.json)
        elif given.command == "audit":
            audit.run(rest, given)
        elif rest:
            known = vars(given).keys() - {"command", "action", "path", "run"}
            flags = sorted(f"--{name.replace('_', '-')}" for name in known)
            raise ValueError(f"unknown flag {rest[0]}; known: {', '.join(flags)}")
        else:
            given.run(given)
    except ValueError as error:
        configs.exit_with(error)
