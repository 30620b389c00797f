"""GPU clocks: whether a busy GPU runs as fast as it may, and what holds it back."""

from __future__ import annotations

from argus.health.check import Look, Result
from argus.health.checks._nvml import devices
from argus.health.limit import Limit
from argus.model.units import seconds

LIMITS: dict[str, Limit] = {
    "busy": Limit(50, "utilization, percent, from which on clocks are looked at", "an idle GPU lowers its clocks"),
    "low": Limit(
        0.7,
        "share of the allowed SM clock: warning below",
        "power capping alone leaves an H100 above it with dense work",
    ),
    "hardware_s": Limit(1.0, "seconds slowed down for heat in an hour: warning", "DCGM calls any a thermal violation"),
}

# Bits of nvmlClocksEventReasons in nvml.h.
_SERIOUS = {
    0x40: "the hardware slows it down for heat",
    0x80: "the power brake is on: the supply is overloaded or a part of it is gone",
    0x08: "the hardware slows it down (heat or power)",
}
_MILD = {0x20: "software slows it down for heat", 0x200: "a limit of the board", 0x400: "reliability voltage"}
_THERMAL = 1  # nvmlPerfPolicyType_t


def check(look: Look) -> Result:
    """Compares SM clocks with the lower of application and maximal clock; reads why and how long it slowed down."""
    found, slowest, count = look.found(), 1.0, 0
    for device in devices(look):
        with found.part():
            count += 1
            name, nvml = device.name, device.nvml
            clock = device.ask("GetClockInfo", nvml.NVML_CLOCK_SM)
            allowed = device.ask("GetMaxClockInfo", nvml.NVML_CLOCK_SM)
            application = device.ask("GetApplicationsClock", nvml.NVML_CLOCK_SM)
            use = device.ask("GetUtilizationRates")
            reasons = device.ask("GetCurrentClocksEventReasons")
            if reasons is None:
                reasons = device.ask("GetCurrentClocksThrottleReasons") or 0
            hint = f"nvidia-smi -q -i {name[3:]} -d PERFORMANCE,TEMPERATURE,POWER"
            if serious := [text for bit, text in _SERIOUS.items() if reasons & bit]:
                found.critical(f"{name}: {serious[0]}", f"Look at cooling and power supply: {hint}")
            for text in (text for bit, text in _MILD.items() if reasons & bit):
                found.warning(f"{name}: {text}", hint)
            violations = device.ask("GetViolationStatus", _THERMAL)
            if violations is not None:
                key = f"slowed_s_total/{name}"
                found.figures[key] = violations.violationTime / 1e9
                rise = look.moved(found.figures, key) or 0.0
                if rise >= look.limits["hardware_s"]:
                    found.warning(f"{name}: slowed down for heat for {seconds(rise)} {look.since()}", hint)
            limit = min(value for value in (allowed, application, 1 << 30) if value)
            if clock is None or use is None or limit == 1 << 30 or use.gpu < look.limits["busy"]:
                continue
            # Only while busy: nodes and times are compared by it.
            found.figures[f"busy_clock_mhz/{name}"] = float(clock)
            share = found.figures[f"busy_clock_share/{name}"] = clock / limit
            slowest = min(slowest, share)
            if share < look.limits["low"]:
                found.warning(f"{name}: busy at {clock} MHz of {limit}", hint)
    return found.result(f"{count} GPUs, slowest busy one at {slowest:.0%} of its clock")
