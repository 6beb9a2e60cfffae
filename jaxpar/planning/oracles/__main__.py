"""`python -m jaxpar.planning.oracles CASES.json > RESULTS.json`: published figures, computed anew."""

import argparse
import json
from pathlib import Path

from jaxpar.planning.oracles import answer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxpar.planning.oracles", description=__doc__)
    parser.add_argument("cases", type=Path, metavar="CASES.json", help="[{id, topic, inputs, answer_form}, ...]")
    try:
        cases = json.loads(parser.parse_args().cases.read_text())
    except (OSError, ValueError) as error:
        parser.error(str(error))
    answers = {case["id"]: answer(case) for case in cases}
    print(json.dumps({name: value for name, value in answers.items() if value is not None}, indent=1))


if __name__ == "__main__":
    main()
