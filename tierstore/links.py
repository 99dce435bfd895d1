"""Links with emulated limits, to study overlap on machines whose real links are too fast or missing.

These links can be given a bandwidth and a latency: ``copy`` (host <-> device), ``gather`` (collectives between ranks;
only the bytes that this rank sends count) and ``disk`` (reads and writes of extents). Collectives that computation
blocks on (all-to-alls, agreements) use ``gather`` too, after the gathers issued before them, unless ``exchange`` is
limited. Messages to ranks of other nodes use ``node`` instead, if it is limited; there each message to a rank pays the
latency. Off by default; a run with limits prints them first.

There is one emulation, outside the code that it slows: ``tierstore.tiers.LimitedTier`` wraps a device tier,
``tierstore.parallel.LimitedGroup`` is a group whose messages take turns. A link serves one transfer at a time, in the
order of requests::

    start = max(now, free_at)
    free_at = start + latency + nbytes / bandwidth

and a transfer is complete when the real one is and ``free_at`` has passed. So limits change times, but neither bits
nor decisions. For operations of the ticket engine ``Engine.hold`` waits for the link in parallel to the real operation
(``limited`` joins the two); for collectives ``Link.reserve`` gives the deadline, which waiting for them includes
(``wait_until``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from tierstore._native import Activity, Engine, Link, Priority
from tierstore.config import check_least, key
from tierstore.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """The limits of one link; default: unlimited."""

    bandwidth: int = key(0, "bytes a second (0: no limit)", size=True)
    latency: float = key(0.0, "seconds added to each transfer")

    def __post_init__(self) -> None:
        check_least(self, 0, "bandwidth", "latency")

    @property
    def on(self) -> bool:
        return self.bandwidth > 0 or self.latency > 0

    def describe(self) -> str:
        speed = f"{format_bytes(self.bandwidth)}/s" if self.bandwidth else "any speed"
        return f"{speed} after {format_seconds(self.latency)}" if self.latency else speed


@dataclass(frozen=True, kw_only=True)
class LinksConfig:
    """The links of one rank."""

    copy: LinkConfig = field(default_factory=LinkConfig)
    gather: LinkConfig = field(default_factory=LinkConfig)
    exchange: LinkConfig = field(default_factory=LinkConfig)
    node: LinkConfig = field(default_factory=LinkConfig)
    disk: LinkConfig = field(default_factory=LinkConfig)

    @property
    def rows(self) -> LinkConfig:
        """The link that rows take to their experts within a node."""
        return self.exchange if self.exchange.on else self.gather

    def describe(self) -> str | None:
        """One line for the head of a run; None when nothing is limited."""
        links = [(link.name, getattr(self, link.name)) for link in fields(self)]
        limits = [f"{name} {config.describe()}" for name, config in links if config.on]
        return f"links limited: {', '.join(limits)}" if limits else None


def open_link(config: LinkConfig) -> Link | None:
    """A link with the limits of ``config``, free from now on; None if it is unlimited."""
    return Link(config.bandwidth or math.inf, config.latency) if config.on else None


def limited(
    engine: Engine,
    link: Link | None,
    ticket: int,
    nbytes: int,
    *,
    activity: Activity,
    after: Sequence[int] = (),
    priority: Priority = Priority.DEMAND,
) -> int:
    """A ticket that is done when the operation ``ticket`` and its turn on ``link`` are. ``after``: tickets that the
    operation itself follows. Without a link: ``ticket`` itself.
    """
    if link is None:
        return ticket
    turn = engine.hold(link, nbytes, activity, after=after, priority=priority)
    return engine.barrier([ticket, turn], priority=priority)


class CollectiveLink:
    """The link of a group's collectives: unlimited if None, replaceable later; remembers its last turn for a timeline."""

    def __init__(self, link: Link | None) -> None:
        self.link = link
        #: When a message issued now may be sent (ns of CLOCK_MONOTONIC): at once, or when a device has computed it.
        self.clock_ns: Callable[[], int] = time.monotonic_ns
        #: Begin and end (ns of CLOCK_MONOTONIC) of the last message's turn.
        self.last_turn = (0, 0)
        #: Messages so far, and their bytes.
        self.messages = 0
        self.sent_bytes = 0

    def reserve(self, nbytes: int) -> int:
        """Reserve a turn for a message of ``nbytes`` issued now; returns its end (ns of CLOCK_MONOTONIC)."""
        now = self.clock_ns()
        self.messages += 1
        self.sent_bytes += nbytes
        if self.link is None:
            self.last_turn = (now, now)
            return now
        end = self.link.reserve(nbytes, now)
        self.last_turn = (min(max(now, self.last_turn[1]), end), end)
        return end


def wait_until(deadline_ns: int) -> None:
    """Sleep until CLOCK_MONOTONIC shows at least ``deadline_ns``."""
    while (left := deadline_ns - time.monotonic_ns()) > 0:
        time.sleep(left / 1e9)
