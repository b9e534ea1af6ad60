"""Draws what the figures and tables of the four papers are about: bounds as printed, ours, and what is measured.

    python benchmarks/papers.py s1                          # losses with kinks; within two minutes each
    python benchmarks/papers.py s2 s3 s4                    # heavy tails, users, output perturbation
    python benchmarks/papers.py --update docs               # all; puts pictures, sentences and tables into docs/papers
    python benchmarks/papers.py s4 --png FOLDER             # pictures to look at
    python benchmarks/papers.py --smoke                     # tiny numbers: shows that it runs

What each exhibit measures is said in paper_hoelder.py (s1), paper_heavy.py (s2), paper_users.py (s3), paper_output.py
and paper_adult.py (s4). Everything private is run or planned through the library, but for two rivals in s1; published
formulas are those of tests/reference.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from blocks import replaced

sys.path.insert(
    0, str(Path(__file__).parents[1])
)  # for published formulas, which the tests have
import paper_heavy
import paper_hoelder
import paper_output
import paper_users
from paper_drawing import Exhibit, png, svg

EXHIBITS = {
    "s1": ("hoelder", paper_hoelder.exhibits),
    "s2": ("heavy_tails", paper_heavy.exhibits),
    "s3": ("users", paper_users.exhibits),
    "s4": ("output", paper_output.exhibits),
}


def block(exhibit: Exhibit) -> str:
    """Returns what stands in a page: the picture, its sentence, how it was made, the table."""
    picture = f"![{exhibit.says}](../images/papers/{exhibit.name}.svg)"
    return "\n\n".join(
        part for part in (picture, f"**{exhibit.says}**", exhibit.note, exhibit.table) if part
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("papers", nargs="*", help=f"of {', '.join(EXHIBITS)}; default: all")
    parser.add_argument(
        "--update",
        type=Path,
        metavar="DOCS",
        help="folder docs: its pages and pictures are rewritten",
    )
    parser.add_argument(
        "--png", type=Path, metavar="FOLDER", help="draw pictures into this folder"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny numbers")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.papers if name not in EXHIBITS]:
        parser.error(f"papers must be of {', '.join(EXHIBITS)} (got {', '.join(unknown)})")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for paper in args.papers or EXHIBITS:
        page, exhibits = EXHIBITS[paper]
        start = time.monotonic()
        for exhibit in exhibits(args.smoke):
            print(
                f"\n{paper}, {exhibit.name} ({time.monotonic() - start:.0f} s): "
                f"{exhibit.says}\n\n{exhibit.note}\n\n{exhibit.table}",
                flush=True,
            )
            if args.png is not None:
                args.png.mkdir(parents=True, exist_ok=True)
                (args.png / f"{exhibit.name}.png").write_bytes(png(exhibit))
            if args.update is not None:
                pictures, path = (
                    args.update / "images" / "papers",
                    args.update / "papers" / f"{page}.md",
                )
                pictures.mkdir(parents=True, exist_ok=True)
                (pictures / f"{exhibit.name}.svg").write_bytes(svg(exhibit))
                text = replaced(path.read_text(encoding="utf-8"), exhibit.name, block(exhibit))
                path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
