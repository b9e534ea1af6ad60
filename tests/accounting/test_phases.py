"""Phases: a charge goes to a part only from inside of the block, whatever runs beside it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.events import ZERO_OUT, Gaussian, Pure
from torch_dpsco.errors import SequenceError

DELTA = 1e-5
STEP = Gaussian(2.0, {ZERO_OUT: 1.0})

Action = Callable[[], None]
Start = Callable[[Action], Awaitable[None]]


def places(accountant: Accountant) -> set[str]:
    """Returns the partitions, "" for all records, that were charged."""
    return {partition for partition, *_ in accountant.ledger.entries()}


def test_a_task_is_not_charged_to_the_phase_of_another_one() -> None:
    """Two releases on all records and two on part b compose; on parts a and b the larger of the two would count."""
    accountant = Accountant(adjacency=ZERO_OUT)

    async def in_part() -> None:
        with accountant.phase("a", partition="p"):
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def on_all() -> None:
        await asyncio.sleep(0)
        accountant.authorize(STEP, 2)

    async def main() -> None:
        await asyncio.gather(in_part(), on_all())
        with accountant.phase("b", partition="p"):
            accountant.authorize(STEP, 2)

    asyncio.run(main())
    honest = Accountant(adjacency=ZERO_OUT)
    honest.authorize(STEP, 4)
    assert accountant.get_epsilon(DELTA) == honest.get_epsilon(DELTA) > 4.3


async def _as_task(action: Action) -> None:
    async def task() -> None:
        action()

    await asyncio.create_task(task())


async def _as_callback(action: Action) -> None:
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    loop.call_soon(action)
    loop.call_soon(done.set)
    await done.wait()


async def _in_an_executor(action: Action) -> None:
    with ThreadPoolExecutor(1) as pool:
        await asyncio.get_running_loop().run_in_executor(pool, action)


async def _in_a_thread(action: Action) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


async def _in_a_copy(action: Action) -> None:
    contextvars.copy_context().run(action)


@pytest.mark.parametrize(
    "start",
    [_as_task, _as_callback, asyncio.to_thread, _in_an_executor, _in_a_thread, _in_a_copy],
)
def test_what_is_started_inside_of_a_phase_charges_to_all_records(start: Start) -> None:
    accountant = Accountant()

    async def main() -> None:
        with accountant.phase("a", partition="p"):
            await start(partial(accountant.authorize, Pure(0.5)))
            assert places(accountant) == {""}
            accountant.authorize(Pure(0.25))  # while the phase itself goes on

    asyncio.run(main())
    assert places(accountant) == {"", "p"}
    assert accountant.get_epsilon(0.0) == 0.75


def test_a_task_enters_a_phase_of_its_own() -> None:
    accountant = Accountant()

    async def train(part: str) -> None:
        with accountant.phase(part, partition="p"):
            await asyncio.sleep(0)
            accountant.authorize(Pure(0.5))

    async def main() -> None:
        with accountant.phase("a", partition="p"):
            await asyncio.gather(train("b"), train("c"))
            accountant.authorize(Pure(0.5))

    asyncio.run(main())
    assert {(partition, part) for partition, part, *_ in accountant.ledger.entries()} == {
        ("p", "a"),
        ("p", "b"),
        ("p", "c"),
    }


def test_a_phase_that_is_left_in_another_context_is_closed() -> None:
    accountant = Accountant()
    with contextlib.ExitStack() as stack:
        stack.enter_context(accountant.phase("a", partition="p"))
        contextvars.copy_context().run(stack.close)
        accountant.authorize(Pure(0.5))
    assert places(accountant) == {""}
    with accountant.phase("b", partition="p"):
        accountant.authorize(Pure(0.5))
    assert places(accountant) == {"", "p"}


def test_phases_of_two_ledgers_are_open_at_once() -> None:
    one, other = Accountant(), Accountant()
    with one.phase("a", partition="p"):
        with other.phase("a", partition="q"):
            one.authorize(Pure(0.5))
            other.authorize(Pure(0.5))
        other.authorize(Pure(0.5))
        one.authorize(Pure(0.5))
    assert (places(one), places(other)) == ({"p"}, {"q", ""})


def test_a_phase_ends_with_an_error_inside() -> None:
    accountant = Accountant()
    with contextlib.suppress(ZeroDivisionError), accountant.phase("a", partition="p"):
        raise ZeroDivisionError
    assert accountant.place == ""


def test_a_phase_is_not_opened_in_a_generator() -> None:
    """Its caller would be inside: a loop that it leaves early would leave the phase open for all that follows."""
    accountant = Accountant()

    def batches() -> Iterator[int]:
        with accountant.phase("a", partition="p"):
            yield from range(3)

    def stacked() -> Iterator[int]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(accountant.phase("a", partition="p"))
            yield from range(3)

    async def stream() -> AsyncIterator[int]:
        with accountant.phase("a", partition="p"):
            yield 1

    async def first() -> None:
        await anext(stream())

    helper = contextlib.contextmanager(batches)
    for attempt in (
        lambda: next(batches()),
        lambda: next(stacked()),
        helper().__enter__,
        lambda: asyncio.run(first()),
    ):
        with pytest.raises(SequenceError, match="must not be opened in a generator"):
            attempt()
        accountant.authorize(Pure(0.5))
    assert places(accountant) == {""}
