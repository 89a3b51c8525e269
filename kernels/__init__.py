"""How: devices, copy streams, events and host memory behind one seam, and the arithmetic of experts over slots."""

from .runtime import CopyError, Event, Runtime

__all__ = ["CopyError", "Event", "Runtime"]
