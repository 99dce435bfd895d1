"""A file system of the tests' own, which does what it is told to do wrong.

``FaultFs`` mounts a directory through FUSE, whose protocol a process of its own speaks (``server``); ``Rule``
says what goes wrong, and when. ``DiskLog`` is all that was asked of the file system, for power-loss emulation.
"""

from faultfs.mount import FaultFs, unavailable
from faultfs.rules import Action, Rule

__all__ = ["Action", "FaultFs", "Rule", "unavailable"]
