"""Pictures in the documents: panels side by side, in colours of their own, in a file.

The same content gives the same bytes. Needs matplotlib, as ``drawing`` does, which draws for pages.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from tierstore.outputs import OutputKind, write_output

SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "tierstore",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "font.size": 9,
    "legend.frameon": False,
}


@contextmanager
def picture(target: Path, panels: int, size: tuple[float, float], **layout: Any) -> Iterator[Any]:
    """Gives the axes of ``panels`` panels, to be drawn on in the block; at its end the SVG is written to ``target``.

    ``size``: inches. ``layout``: more for ``Figure.subplots``. Raises OSError; nothing is written if the block raises.
    """
    with rc_context(SETTINGS):
        figure = Figure(figsize=size, layout="constrained")
        yield figure.subplots(1, panels, **layout)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    # A path a line, not a point a line.
    write_output(target, OutputKind.PICTURE, drawn.getvalue().replace(" \n", " "))
