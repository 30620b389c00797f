"""InfiniBand and RoCE: ports, their rate, and their error counters."""

from __future__ import annotations

from argus.health.check import Absent, Blind, Look, Result
from argus.health.limit import Limit

LIMITS: dict[str, Limit] = {
    "skip": Limit([], "ports to leave out, such as mlx5_4/1", "those that have no cable"),
    "rate_gbit": Limit(
        0.0,
        "rate that each port must have, Gbit/s; 0: as the fastest",
        "a cable that trains at half its width works, and slows every collective",
    ),
    "errors": Limit(
        10,
        "rise of an error counter in an hour: warning",
        "ibqueryerrors' own threshold; the specification allows a bit error in 10^12, some 10 symbol errors an hour",
    ),
    "congestion": Limit(
        1000000, "rise of a congestion counter in an hour: warning", "they describe the network more than the port"
    ),
}

_ERRORS = (
    *("symbol_error", "link_error_recovery", "port_rcv_errors", "port_rcv_remote_physical_errors"),
    *("local_link_integrity_errors", "excessive_buffer_overrun_errors", "port_xmit_discards"),
    *("port_rcv_switch_relay_errors", "VL15_dropped"),
)
_ROCE = ("out_of_sequence", "local_ack_timeout_err", "packet_seq_err", "rnr_nak_retry_err", "roce_adp_retrans_to")
_CONGESTION = ("np_cnp_sent", "rp_cnp_handled", "port_xmit_wait")


def check(look: Look) -> Result:
    """Reads /sys/class/infiniband: Documentation/ABI/stable/sysfs-class-infiniband."""
    found = look.found()
    rates: dict[str, float] = {}
    ports = look.folders("sys/class/infiniband/*/ports/*")
    if not ports:
        raise Absent("no InfiniBand or RoCE device")
    for folder in ports:
        where, name = str(folder.relative_to(look.root)), f"{folder.parent.parent.name}/{folder.name}"
        if name in look.limits["skip"]:
            continue
        device = name.replace("/", ":")
        try:
            state, physical = (look.read(f"{where}/{file}").partition(": ")[2] for file in ("state", "phys_state"))
            rate = float(look.read(f"{where}/rate").split()[0]) if state == "ACTIVE" else 0.0
        except (Absent, Blind) as reason:
            found.unknown(f"{name}: {reason}")
            continue
        downed = float(look.optional(f"{where}/counters/link_downed") or 0)
        found.figures[f"link_downed_total/{device}"] = downed
        if state != "ACTIVE":
            found.critical(f"{name} is {state}, {physical}", "See cable, transceiver and switch: ibstat, mlxlink -d.")
        else:
            found.figures[f"rate_gbit/{device}"] = rates[name] = rate
        if lost := look.moved(found.figures, f"link_downed_total/{device}"):
            found.warning(
                f"{name}: the link was lost {lost:.0f} times {look.since()}", "See cable and transceiver: mlxlink -d."
            )
        for names, place, limit in (
            (_ERRORS, "counters", "errors"),
            (_ROCE, "hw_counters", "errors"),
            (_CONGESTION, "*", "congestion"),
        ):
            for counter in names:
                value = next(
                    (
                        v
                        for p in (place, "counters", "hw_counters")
                        if (v := look.optional(f"{where}/{p}/{counter}")) is not None
                    ),
                    None,
                )
                if value is None:
                    continue
                key = f"{counter}_total/{device}"
                found.figures[key] = float(value)
                rise = look.moved(found.figures, key) or 0.0
                if rise >= look.limits[limit]:
                    found.warning(
                        f"{name}: {counter} rose by {rise:.0f} {look.since()}",
                        "mlxlink -d; clean or replace the cable.",
                    )
    best = look.limits["rate_gbit"] or max(rates.values(), default=0.0)
    for name, rate in rates.items():
        if rate < best:
            found.warning(f"{name}: {rate:g} Gbit/s of {best:g}", "It trained lower: replug, mlxlink -d, switch port.")
    return found.result(f"{len(rates)} ports at {'/'.join(f'{rate:g}' for rate in sorted(set(rates.values())))} Gbit/s")
