"""Command line: `python -m hops demo` and `python -m hops doctor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that `arguments` name; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hops", description="torch-hops command line")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "demo", add_help=False, help="capture, compare, save, reload and train a real model"
    )
    commands.add_parser("doctor", help="tell what this torch has and which sites hops patches")
    options, rest = parser.parse_known_args(arguments)
    if options.command == "demo":
        return _demo(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return _doctor()


def _demo(arguments: Sequence[str]) -> int:
    from hops import demo

    return demo.main(arguments)


def _doctor() -> int:
    import torch

    from hops import _unusable

    if _unusable.missing:
        print(f"torch   {torch.__version__}\nhops    not installed: {_unusable.missing}")
        return 1
    from hops import _doctor

    print(_doctor.report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
