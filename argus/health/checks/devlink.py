"""Network adapters as their drivers watch them (devlink): health reporters, and reloads that failed."""

from __future__ import annotations

import errno
from typing import Any

from argus.health.check import Absent, Blind, Look, Result
from argus.health.limit import Limit

PRELOAD = "pyroute2"
LIMITS: dict[str, Limit] = {
    "errors": Limit(
        1, "errors that a reporter counted in an hour, recovered from: warning", "each stops a queue, or the adapter"
    ),
    "skip": Limit([], "reporters to leave out, such as vnic or tx", "some drivers count what is no fault of theirs"),
}
_RESET = "See devlink health diagnose and dmesg; reload the driver or restart the node; then the adapter's firmware."


def check(look: Look) -> Result:
    """Asks the kernel by generic netlink (Documentation/networking/devlink/devlink-health.rst): devices, ports, and the
    state and count of errors of each health reporter (firmware, queues), of devices and of their ports."""
    from pyroute2 import DL
    from pyroute2.netlink import NLM_F_DUMP, NLM_F_REQUEST
    from pyroute2.netlink.devlink import DEVLINK_NAMES, devlinkcmd
    from pyroute2.netlink.exceptions import NetlinkError

    look.note("asking devlink over netlink")
    found = look.found()
    try:
        with DL() as netlink:
            devices = list(netlink.get_dump())
            ports = list(netlink.get_port_dump())
            asked = devlinkcmd()
            asked["cmd"] = DEVLINK_NAMES["DEVLINK_CMD_HEALTH_REPORTER_GET"]
            reporters = list(netlink.nlm_request(asked, netlink.prid, NLM_F_REQUEST | NLM_F_DUMP))
    except (NetlinkError, OSError) as failure:
        code = getattr(failure, "code", None) or getattr(failure, "errno", None)
        if code in (errno.ENOENT, errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT):
            raise Absent("the kernel has no devlink") from None
        raise Blind(f"devlink does not answer: {failure}") from None
    if not devices:
        raise Absent("no device with devlink")
    for device in devices:
        if device.get_attr("DEVLINK_ATTR_RELOAD_FAILED"):
            found.critical(f"{_name(device)}: its driver could not be reloaded, it does not work", _RESET)
    interfaces = {
        (_name(port), port.get_attr("DEVLINK_ATTR_PORT_INDEX")): port.get_attr("DEVLINK_ATTR_PORT_NETDEV_NAME")
        for port in ports
    }
    watched = 0
    for message in reporters:
        reporter = message.get_attr("DEVLINK_ATTR_HEALTH_REPORTER")
        name = reporter.get_attr("DEVLINK_ATTR_HEALTH_REPORTER_NAME")
        if name in look.limits["skip"]:
            continue
        watched += 1
        port = message.get_attr("DEVLINK_ATTR_PORT_INDEX")
        interface = interfaces.get((_name(message), port)) or (f"port {port}" if port is not None else "")
        who = f"{_name(message)}{f' ({interface})' if interface else ''}: {name}"
        key = f"errors_total/{':'.join(filter(None, (_name(message), interface, name)))}"
        found.figures[key] = float(reporter.get_attr("DEVLINK_ATTR_HEALTH_REPORTER_ERR_COUNT") or 0)
        if reporter.get_attr("DEVLINK_ATTR_HEALTH_REPORTER_STATE"):
            found.critical(f"{who} is in error, and was not recovered", _RESET)
        elif (rise := look.moved(found.figures, key) or 0.0) >= look.limits["errors"]:
            found.warning(f"{who} had {rise:.0f} errors {look.since()}, recovered", _RESET)
    found.figures["ports"] = float(len(ports))
    return found.result(f"{len(devices)} devices, {len(ports)} ports, {watched} reporters, all well")


def _name(message: Any) -> str:
    """Address of the device: ``0000:5e:00.0``, as the kernel log has it."""
    return str(message.get_attr("DEVLINK_ATTR_DEV_NAME"))
