"""A bar that names the steps of something long, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar_of(progress: bool | None, steps: int) -> Iterator[Callable[[str], None]]:
    """Gives what is told the name of each step as it begins.

    Args:
        progress: whether there is a bar; None where standard error is a terminal.
        steps: their number.
    """
    from tqdm.auto import tqdm

    with tqdm(total=steps, disable=None if progress is None else not progress) as bar:
        begun: list[str] = []

        def begin(step: str) -> None:
            bar.update(len(begun) - bar.n)
            begun.append(step)
            bar.set_description(step)

        yield begin
        bar.update(len(begun) - bar.n)
