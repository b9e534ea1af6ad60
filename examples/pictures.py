"""The figures that an example prints, drawn as bars: in the gallery of the site and in notebooks, not by a script."""

from __future__ import annotations

import sys
from collections.abc import Mapping

PUBLIC = ("not private", "public", "constant", "median", "linear", "exact")  # words of names of what is not private


def bars(unit: str, figures: Mapping[str, float], ending: str = "") -> None:
    """Draws a bar for each figure whose name has this ending, if pyplot is loaded: then there is somebody to see it."""
    plt = sys.modules.get("matplotlib.pyplot")
    if plt is None:
        return
    shown = {
        name.removesuffix(ending).replace("_", " ").replace("baseline", "not private"): value
        for name, value in figures.items()
        if name.endswith(ending)
    }
    _, axes = plt.subplots(num="bars", clear=True, figsize=(5.5, 0.9 + 0.3 * len(shown)), layout="constrained")
    colors = ["tab:gray" if any(word in name for word in PUBLIC) else "tab:blue" for name in shown]
    axes.bar_label(axes.barh(list(shown), list(shown.values()), color=colors), fmt="%.4g", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"{unit} (gray: not private)")
    axes.spines[["top", "right"]].set_visible(False)
