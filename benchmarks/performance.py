"""Prints the tables of docs/performance.md: runs at default settings, other modes, memory, loading, accounting, noise.

    python benchmarks/performance.py                                   # all suites, about ten minutes
    python benchmarks/performance.py --update docs/performance.md      # ... and puts the tables into the document
    python benchmarks/performance.py --suite default --rounds 15
    python benchmarks/performance.py --smoke                           # everything tiny, in seconds

Peers in environments of their own: see peers.py. Suites that need the process to be young (they fork) run first.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import accountant
import default_time
import equality
import loaders
import memory
import noise
import step_time
import torch
import user_level
from blocks import BLOCK, replaced
from peers import Peer, add_options, started
from timing import machine

USER_SIZES = "1000x100,5000x100,1000x1000,5000x1000"

Suite = Callable[[argparse.Namespace, Sequence[Peer]], dict[str, str]]
SUITES: dict[str, Suite] = {
    "memory": lambda args, peers: memory.tables(smoke=args.smoke),
    "users": lambda args, peers: user_level.tables(
        sizes=user_level.SMALL_SIZES if args.smoke else USER_SIZES
    ),
    "equality": lambda args, peers: equality.tables(smoke=args.smoke, peers=peers),
    "default": lambda args, peers: default_time.tables(smoke=args.smoke, rounds=args.rounds),
    "step": lambda args, peers: step_time.tables(
        smoke=args.smoke, rounds=args.rounds, peers=peers
    ),
    "loaders": lambda args, peers: loaders.tables(smoke=args.smoke, rounds=args.rounds),
    "accountant": lambda args, peers: accountant.tables(smoke=args.smoke),
    "noise": lambda args, peers: noise.tables(smoke=args.smoke, rounds=args.rounds),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--suite", choices=[*SUITES], action="append", help="only this one; may be repeated"
    )
    parser.add_argument(
        "--rounds", type=int, default=0, help="of what takes turns; default 7, 2 with --smoke"
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="everything tiny: shows that it runs, measures nothing",
    )
    parser.add_argument(
        "--update", type=Path, help="document whose tables are to be exchanged for these"
    )
    add_options(parser)
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (2 if args.smoke else 7)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start = time.monotonic()
    with started(args) as peers:
        facts = machine(args.rounds) + "".join(f"; {peer.versions}" for peer in peers)
        found = {"machine": facts}
        print(facts, flush=True)
        for name in args.suite or SUITES:
            for title, text in SUITES[name](args, peers).items():
                found[title] = text
                print(f"\n{title} ({time.monotonic() - start:.0f} s)\n\n{text}", flush=True)
    if args.update is not None:
        text = args.update.read_text(encoding="utf-8")
        for title, table in found.items():
            if BLOCK.format(title, "").split("\n")[0] in text:
                text = replaced(text, title, table)
        args.update.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
