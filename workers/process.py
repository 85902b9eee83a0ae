"""The life of a worker process, from its inherited link to its exit code.

::

    worker → HELLO     broker → LOAD     worker → SIGNATURE     broker → BIND     worker → READY     RUN … DONE …
                                 └──────── LOAD_FAILED, exit 78 or 70 ───────┘

STOP or the end of the link is an exit with 0 at any point.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import MutableMapping
from typing import Any

from mxpool import messages
from mxpool.clock import now_us
from mxpool.errors import LoadFailed, MalformedMessage, ModelInvalid, NotServable, ProviderUnavailable
from mxpool.shm.layout import SlotLayout
from mxpool.shm.link import Link, LinkClosed, Packet
from mxpool.shm.segment import Segment
from mxpool.spec import ModelSpec
from mxpool.workers.backends.protocol import Backend, DeviceLost, Prepared
from mxpool.workers.backends.registry import create
from mxpool.workers.loop import IDLE_WAIT_S, Bound, serve

log = logging.getLogger(__name__)

EXIT_STOPPED = 0
EXIT_SICK = 70  # EX_SOFTWARE of sysexits.h: start another one, with back-off
_CANNOT_BOOT = (ModelInvalid, NotServable, ProviderUnavailable)
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "MACA_VISIBLE_DEVICES")


_kept: list[BaseException] = []  # with the frames that hold the session: its destructors would call the device


class _Stopped(Exception):
    """STOP came where the next step was due."""


def run_worker(link: Link, environment: MutableMapping[str, str]) -> int:
    """Serve one model over ``link`` until told to stop, and return the process's exit code.

    ``environment`` is the process's own: the device is set there before the first import of a runtime.
    """
    try:
        return _run_worker(link, environment)
    except (LinkClosed, _Stopped):
        return EXIT_STOPPED
    except DeviceLost as error:
        log.error("device is lost: %s", error)
        _kept.append(error)
        return messages.EXIT_DEVICE_LOST
    except Exception:
        log.exception("worker is sick")
        return EXIT_SICK


def _run_worker(link: Link, environment: MutableMapping[str, str]) -> int:
    link.send(messages.encode(messages.HELLO, role="worker", version=messages.LINK_VERSION, pid=os.getpid()))
    fields, fd = _expect(link, messages.LOAD)
    status = Segment(fd, os.fstat(fd).st_size)
    spec = ModelSpec.from_wire(fields["spec"])
    log.info("worker loads worker=%s model=%s path=%s", fields["worker"], spec.name, spec.path)
    try:
        backend, bound, segment = _prepare(link, spec, environment)
    except LoadFailed as error:
        return _give_up(link, error)
    log.info("worker is ready worker=%s model=%s", fields["worker"], spec.name)
    serve(link, backend, bound, memoryview(status.map).cast("B").cast("Q"))
    backend.unload()
    segment.close()  # after every view and binding, and before the process can serve something else
    return EXIT_STOPPED


def _prepare(link: Link, spec: ModelSpec, environment: MutableMapping[str, str]) -> tuple[Backend, Bound, Segment]:
    """Load, tell the signature, bind the slots that the broker then made; every failure is a LoadFailed."""
    try:
        set_device(spec, environment)
        backend = create(spec)
        loaded = backend.load(spec)
        record = messages.encode(messages.SIGNATURE, signature=loaded.signature.to_wire(), report=loaded.report)
        link.send(record)
        fields, fd = _expect(link, messages.BIND)
        begin_us = now_us()
        layout = SlotLayout(loaded.signature, fields["slots"])
        segment = Segment(fd, layout.size_bytes)
        prepared = _bind(backend, layout, segment)
        bound = Bound(layout.slots, prepared.sizes)
        report = {"graph": "off", "fixed_inputs": spec.fixed_input_buffers, **prepared.report}
        report["bind_us"] = now_us() - begin_us
        sizes = list(prepared.sizes)
        link.send(messages.encode(messages.READY, in_flight=backend.in_flight, sizes=sizes, report=report))
    except (LoadFailed, LinkClosed, DeviceLost, _Stopped):
        raise
    except Exception as error:
        raise LoadFailed(model=spec.name, reason=f"{type(error).__name__}: {error}") from error
    return backend, bound, segment


def _bind(backend: Backend, layout: SlotLayout, segment: Segment) -> Prepared:
    views = [layout.views(segment.map, slot) for slot in range(layout.slots)]
    return backend.bind(memoryview(segment.map), views)


def _give_up(link: Link, error: LoadFailed) -> int:
    cannot_boot = isinstance(error, _CANNOT_BOOT)
    record = messages.encode(messages.LOAD_FAILED, **messages.error_fields(error), cannot_boot=cannot_boot)
    log.error("worker cannot load: %s", error.message, exc_info=error.__cause__)
    with contextlib.suppress(LinkClosed):
        link.send(record)
    return messages.EXIT_CANNOT_BOOT if cannot_boot else EXIT_SICK


def _expect(link: Link, kind: int) -> tuple[dict[str, Any], int]:
    """Wait for a record of ``kind`` and its descriptor, which the caller then owns."""
    packet: Packet | None = None
    while packet is None:
        packet = link.receive(IDLE_WAIT_S)
    found, fields = messages.decode(packet.data)
    if found == messages.STOP:
        raise _Stopped
    if found != kind or len(packet.fds) != 1:
        raise MalformedMessage(
            reason=f"record of kind {found} with {len(packet.fds)} descriptors, expected kind {kind}"
        )
    return fields, packet.fds[0]


def set_device(spec: ModelSpec, environment: MutableMapping[str, str]) -> None:
    """Show the runtimes one device, or none to a CPU worker; call it before any of them is imported.

    Where the service itself sees only some devices, ``device_index`` counts among those. They are in the order of their
    PCI addresses, as NVML and nvidia-smi have them, and not the fastest first.

    Raises:
        ProviderUnavailable: if the service may not see that device.
    """
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    for variable in _VISIBLE:
        visible = environment.get(variable, "")
        listed = [device.strip() for device in visible.split(",") if device.strip()]
        if spec.device_kind == "cpu":
            environment[variable] = ""
        elif not listed:
            environment[variable] = str(spec.device_index)
        elif spec.device_index < len(listed):
            environment[variable] = listed[spec.device_index]
        else:
            device = f"{spec.device_kind} device {spec.device_index}"
            reason = f"{variable}={visible} hides it"
            raise ProviderUnavailable(provider=device, actual=f"{len(listed)} devices", reason=reason, package="none")
