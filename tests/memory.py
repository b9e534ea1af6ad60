"""How much memory a call takes at most."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak(run: Callable[[], object]) -> int:
    """Returns the most bytes of torch's allocator that were in use at once, above those in use before."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    in_use = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        in_use += event.nbytes()
        most = max(most, in_use)
    return most
