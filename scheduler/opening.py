"""Opens an engine's parts in order, says so on the log, and closes them in the reverse order."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TextIO

from ..steps.at_exit import halt_at_exit
from ..steps.clock import StepClock, StepRecord
from ..steps.process import StoreLedger, next_store_serial, not_built, register_store, streaming_requested
from ..steps.sink import LogSink
from ..steps.statistics import Counters
from .loop import Scheduler
from .settings import Resolved, Settings, reconfigure
from .step_runner import StepRunner
from .step_thread import StepThread, wait_undisturbed
from .switches import throttle_bytes_per_s

__all__ = ["Opened", "open_parts"]


@dataclass(slots=True)
class Opened:
    """Everything an engine owns.

    Attributes:
        loaded: Model, experts, pools.
        facts: What `store.built` said.
    """

    settings: Settings
    sink: LogSink
    thread: StepThread
    clock: StepClock
    counters: Counters
    ledger: StoreLedger
    loaded: Any
    facts: Mapping[str, object]
    on_step: list[Callable[[StepRecord], None]]
    forget_halt: Callable[[], None]

    def make_scheduler(self) -> Scheduler:
        """Return the scheduler of this engine; it learns of every ended step."""
        steps = StepRunner(self.clock, self.thread, self.loaded.store, self.loaded.forwards.stop)
        scheduler = Scheduler(
            self.loaded,
            steps,
            self.sink,
            prefill_chunk=self.settings.prefill_chunk,
            num_drafts=self.settings.speculate,
        )
        self.on_step.append(scheduler.step_ended)
        return scheduler

    def reconfigure(self, later: Mapping[str, object]) -> None:
        """Apply later values of settings that do not latch. Raises what `settings.reconfigure` raises."""
        self.settings = reconfigure(self.settings, later)
        self.ledger.set_periodic(self.settings.stats_every, self.settings.stats_min_s)

    async def aclose(self) -> None:
        """Close every part; the first error is raised after all."""
        errors: list[BaseException] = []
        self.forget_halt()
        closing = self.thread.submit(self.loaded.close)
        try:
            await wait_undisturbed(closing)
            closing.result()
        except (Exception, asyncio.CancelledError) as exc:  # the other parts are closed all the same
            errors.append(exc)
        for close in (self.thread.close, self.ledger.close):
            try:
                close()
            except Exception as exc:
                errors.append(exc)
        if errors:
            raise errors[0]


async def open_parts(
    path: str | os.PathLike[str],
    resolved: Resolved,
    *,
    progress: Callable[[int, int], None] | None,
    routing: Callable[[int, list[list[int]]], None] | None,
    log_stream: TextIO | None,
) -> Opened:
    """Open a checkpoint on a new step thread. Raises what `load` raises; nothing is left behind then."""
    _check_loop()
    settings = resolved.settings
    sink = LogSink(
        log_file=settings.log_file,
        host=log_stream is None,
        stream=log_stream,
        log_format=settings.log_format,  # type: ignore[arg-type]
        level=settings.log_level,  # type: ignore[arg-type]
    )
    streaming_requested(sink, model=os.fspath(path))
    if throttle := throttle_bytes_per_s():
        text = f"A test switch is on: copies are throttled to {throttle:g} bytes per second."
        sink.entry("warning", "warning", code="test_switch.throttle_copy", message=text)
    for text in resolved.warnings:
        sink.entry("warning", "warning", code="settings.unknown_variable", message=text)
    thread = StepThread("expertstream-step")
    loaded = None
    try:
        loaded = await _load(thread, path, settings, sink, progress, routing)
        return _opened(path, resolved, sink, thread, loaded)
    except BaseException as exc:
        not_built(_reason(exc))
        if loaded is not None:
            loaded.close()
        thread.close()
        raise


def _opened(path: str | os.PathLike[str], resolved: Resolved, sink: LogSink, thread: StepThread, loaded: Any) -> Opened:
    """Register what was loaded as a store of this process, with a clock and counters of its own."""
    settings = resolved.settings
    counters = Counters()
    on_step: list[Callable[[StepRecord], None]] = []
    facts = _facts(path, resolved, loaded)
    ledger = register_store(
        sink,
        snapshot=counters.snapshot,
        stats_every=settings.stats_every,
        stats_min_s=settings.stats_min_s,
        built=facts,
        serial=next_store_serial(),
    )

    def ended(record: StepRecord) -> None:
        counters.commit(record)
        ledger.step_ended()
        for hook in on_step:
            hook(record)

    clock = StepClock(on_end=ended)
    facts = {**facts, "store": ledger.serial}
    forget = halt_at_exit(lambda: _halt(thread, loaded))
    return Opened(settings, sink, thread, clock, counters, ledger, loaded, facts, on_step, forget)


def _halt(thread: StepThread, loaded: Any) -> None:
    """Stop the threads of an engine that nobody closed, while the interpreter still can."""
    loaded.forwards.stop()
    thread.close()
    loaded.close()


async def _load(
    thread: StepThread,
    path: str | os.PathLike[str],
    settings: Settings,
    sink: LogSink,
    progress: Callable[[int, int], None] | None,
    routing: Callable[[int, list[list[int]]], None] | None,
) -> Any:
    is_cancelled = False

    def work() -> Any:
        from . import loading  # torch and transformers are imported here, on the step thread, not by the loop

        def check() -> None:
            if is_cancelled:
                raise loading.LoadCancelledError()

        def not_pinned(reason: str) -> None:
            sink.entry("warning", "warning", code="host_memory.not_pinned", message=reason)

        return loading.load(
            path,
            settings,
            check_cancelled=check,
            on_progress=None if progress is None else _told_once(progress, sink),
            on_not_pinned=not_pinned,
            on_routing=routing,
        )

    future = thread.submit(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        is_cancelled = True
        # Leave nothing behind, whether loading stops at its next check or had just finished.
        try:
            await wait_undisturbed(future)
        finally:
            if future.exception() is None:
                await wait_undisturbed(thread.submit(future.result().close))
        raise


def _told_once(progress: Callable[[int, int], None], sink: LogSink) -> Callable[[int, int], None]:
    """Return the caller's callback for the reader threads: if it raises it is called no more, and the log says so."""
    has_failed = False

    def report(done: int, total: int) -> None:
        nonlocal has_failed
        if has_failed:
            return
        try:
            progress(done, total)
        except Exception as exc:  # nobody awaits a reader thread; the engine needs it for more than telling
            has_failed = True
            message = f"The progress callback raised and is called no more: {type(exc).__name__}: {exc}"
            sink.entry("warning", "warning", code="progress.failed", message=message)

    return report


def _facts(path: str | os.PathLike[str], resolved: Resolved, loaded: Any) -> dict[str, object]:
    layers = loaded.built.layers
    settings = {field.name: getattr(resolved.settings, field.name) for field in fields(Settings)}
    return {
        "model": os.path.basename(os.path.abspath(path)),
        "path": os.fspath(path),
        "model_type": loaded.built.model.config.model_type,
        "dtype": str(loaded.built.dtype).removeprefix("torch."),
        "layers": len(layers),
        "experts": sum(layer.num_experts for layer in layers),
        "experts_per_layer": sorted({layer.num_experts for layer in layers}),
        "top_k": sorted({layer.top_k for layer in layers}),
        "record_bytes": sorted({layer.layout.num_bytes for layer in layers}),
        "slots": sum(loaded.num_slots.values()),
        "slots_per_layer": sorted(set(loaded.num_slots.values())),
        "device": str(loaded.runtime.device),
        "device_bytes": loaded.store.num_bytes,
        "host_bytes": loaded.arena.num_bytes,
        "dense_bytes": loaded.built.dense_bytes,
        "pinned": loaded.runtime.is_pinned,
        "pinning": loaded.runtime.device.type != "cpu" and not loaded.runtime.is_pinned,
        "policy": resolved.settings.policy,
        "decide": "host",
        "link_bytes_per_s": None,
        "row_exact": loaded.is_row_exact,
        "decoder_layers": loaded.forwards.num_layers,
        "vocabulary": loaded.vocabulary,
        "tokenizer": loaded.text.is_available,
        "mtp_available": loaded.has_mtp,
        "max_model_len": loaded.max_model_len,
        "tensors_ignored": loaded.built.num_ignored,
        "versions": _versions(),
        "settings": {name: {"value": str(value), "source": resolved.sources[name]} for name, value in settings.items()},
    }


def _versions() -> dict[str, str]:
    names = ("expertstream", "torch", "transformers", "safetensors", "structlog", "anyio")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _reason(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "open() was cancelled"
    return f"{type(error).__name__}: {error}"


def _check_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "expertstream runs under asyncio or uvloop; open it inside such an event loop (not trio)."
        ) from None
