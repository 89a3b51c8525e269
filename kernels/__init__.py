"""How: devices, copy streams, events and host memory behind one seam, and the arithmetic of experts over slots.

- `runtime`: the seam; `cpu`, `cuda`, `scripted`: its three sides
- `cuda_events`, `cuda_modules`, `pinning`: points on streams, device code, page-locked host memory
- `experts`, `slot_experts`, `gates`: experts over slots, on any device and by kernels of our own
- `linear`, `gated_delta`: products and recurrent layers on the CPU
"""

from .runtime import CopyError, Event, Runtime

__all__ = ["CopyError", "Event", "Runtime"]
