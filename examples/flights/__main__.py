"""A year of real flights through Spark, Kafka and exactly-once handlers, checked to the last flight.

    make demo
    python -m examples.flights --events 20000

Starts a Kafka of its own (fetched the first time, then offline), turns the data set into events with Spark, folds them
in worker processes of which one is killed half way, and compares every number with what Spark computes from the file.

Exit codes: 0 every number is right; 1 a number is off (the differences are shown), or a problem to be solved first;
130 interrupted; 143 terminated.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from streams.errors import ConfigError, StreamsError

NEEDED = ("pyspark", "pyarrow", "pandas", "matplotlib")


def main() -> int:
    """Run the demo by the options of the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.flights", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="folder for the plot and the logs; default: out/flights, or the next free"
    )
    parser.add_argument("--events", type=_count, metavar="N", help="only the first N flights; default: the whole year")
    parser.add_argument("--no-kill", dest="kill", action="store_false", help="do not kill a worker half way")
    parser.add_argument("--json", action="store_true", help="print the summary as one line of JSON")
    given = parser.parse_args()
    try:
        if missing := [name for name in NEEDED if find_spec(name) is None]:
            raise ConfigError(f"the demo needs {', '.join(missing)}: pip install 'kafka-event-source[demo]'")
        from examples.flights.main import Options, run  # takes a second, and needs those packages

        return run(Options(out=given.out, events=given.events, kill=given.kill, json=given.json))
    except KeyboardInterrupt:  # while modules are imported; ``run`` has the rest
        return 130
    except (StreamsError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of flights; give 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
