"""Every metric of the sidecar: the one table from which HELP and TYPE lines and the documentation are made.

Names are a contract. Units are base units, ratios run from 0 to 1, and a value that the driver does not
know is an absent series, never a made-up number.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family: `name` as it is exposed (counters end in `_total`), `type` (gauge or counter)."""

    name: str
    type: str
    unit: str
    labels: tuple[str, ...]
    help: str


METRICS: tuple[Metric, ...] = (
    Metric(
        "tunewatch_gpu_info",
        "gauge",
        "",
        ("uuid", "index", "name", "driver_version", "pci_bus_id", "parent_uuid", "mig_profile", "simulated"),
        "Identity of a GPU or MIG slice, always 1; join on uuid. A lost GPU keeps its last known identity.",
    ),
    Metric(
        "tunewatch_gpu_up",
        "gauge",
        "",
        ("uuid",),
        "Whether the driver answered for this GPU in the last good collection (1) or it is lost (0).",
    ),
    Metric(
        "tunewatch_gpu_expected",
        "gauge",
        "",
        (),
        "GPUs this machine should have: --expect-gpus, else the most the driver has counted since start.",
    ),
    Metric("tunewatch_gpu_seen", "gauge", "", (), "GPUs (not slices) that answered in the last collection."),
    Metric(
        "tunewatch_gpu_utilization_ratio",
        "gauge",
        "ratio",
        ("uuid",),
        "Share of the driver's last sample period in which a kernel ran; not available under MIG.",
    ),
    Metric(
        "tunewatch_gpu_memory_used_bytes",
        "gauge",
        "bytes",
        ("uuid",),
        "Device memory in use without the driver's reserve (where only NVML memory v1 works, with it).",
    ),
    Metric(
        "tunewatch_gpu_memory_reserved_bytes",
        "gauge",
        "bytes",
        ("uuid",),
        "Device memory the driver and firmware keep for themselves.",
    ),
    Metric(
        "tunewatch_gpu_memory_total_bytes",
        "gauge",
        "bytes",
        ("uuid",),
        "Device memory in all; absent where the GPU shares the memory of the host.",
    ),
    Metric(
        "tunewatch_gpu_run_memory_bytes",
        "gauge",
        "bytes",
        ("uuid", "run_id"),
        "Device memory of the GPU's processes by the run in their environment (TUNEWATCH_RUN_ID, an ancestor's "
        'too); run_id="" is everybody else, or whoever can not be looked into. Absent where nothing is known to be '
        "held: the processes are not listed (containers), or their memory is not told (WSL2).",
    ),
    Metric(
        "tunewatch_gpu_power_watts",
        "gauge",
        "watts",
        ("uuid",),
        "Power draw of the board as the driver reports it (a mean over 1 s on Ampere and newer).",
    ),
    Metric("tunewatch_gpu_power_limit_watts", "gauge", "watts", ("uuid",), "Power limit in force."),
    Metric(
        "tunewatch_gpu_energy_joules_total",
        "counter",
        "joules",
        ("uuid", "source"),
        "Energy used: the GPU's own counter (source=counter, since driver load) or, where it has none, "
        "power integrated since the sidecar started (source=integrated).",
    ),
    Metric("tunewatch_gpu_temperature_celsius", "gauge", "celsius", ("uuid", "sensor"), "Temperature."),
    Metric(
        "tunewatch_gpu_temperature_limit_celsius",
        "gauge",
        "celsius",
        ("uuid", "limit"),
        "Temperature at which the GPU slows down, shuts down, leaves its operating range, or its memory does; "
        "absent on GPUs that only tell the distance to it (Hopper and newer).",
    ),
    Metric(
        "tunewatch_gpu_fan_ratio",
        "gauge",
        "ratio",
        ("uuid",),
        "Intended fan speed as a share of the maximum; the driver may ask for more than 1.",
    ),
    Metric("tunewatch_gpu_clock_hertz", "gauge", "hertz", ("uuid", "domain"), "Current clock by domain."),
    Metric(
        "tunewatch_gpu_performance_state",
        "gauge",
        "",
        ("uuid",),
        "Performance state: 0 is the fastest (P0), 15 the slowest (P15).",
    ),
    Metric(
        "tunewatch_gpu_throttle_active",
        "gauge",
        "",
        ("uuid", "reason"),
        "Whether the clocks are held down for this reason right now (gpu_idle is no fault).",
    ),
    Metric(
        "tunewatch_gpu_throttle_seconds_total",
        "counter",
        "seconds",
        ("uuid", "reason"),
        "Time the clocks were held down for this reason: the driver's own counter (since it was loaded) or, for "
        "reasons without one, throttle_active summed over the collections since the sidecar started. Reasons overlap; "
        "idle time is not counted.",
    ),
    Metric(
        "tunewatch_gpu_recovery_action",
        "gauge",
        "",
        ("uuid", "action"),
        "What the driver asks for to mend this GPU: 1 for one action, 0 for the others (none: all is well).",
    ),
    Metric(
        "tunewatch_gpu_xid_errors_total",
        "counter",
        "",
        ("uuid", "xid"),
        "Xid errors since the sidecar started, from NVML's events and the kernel log; a code appears with its first "
        "error, so alert on tunewatch_gpu_xid_last_timestamp_seconds.",
    ),
    Metric(
        "tunewatch_gpu_xid_last_timestamp_seconds",
        "gauge",
        "seconds",
        ("uuid", "xid"),
        "When this Xid error was last seen, Unix time.",
    ),
    Metric(
        "tunewatch_gpu_ecc_errors_total",
        "counter",
        "",
        ("uuid", "kind"),
        "Memory errors since the driver was loaded, by kind; absent where ECC is off or unknown to the GPU.",
    ),
    Metric(
        "tunewatch_gpu_remapped_rows",
        "gauge",
        "",
        ("uuid", "kind"),
        "Memory rows replaced by spare ones for correctable and for uncorrectable errors; pending is 1 while a "
        "replacement waits for a reset, failed is 1 if one did not work.",
    ),
    Metric(
        "tunewatch_gpu_collector_success",
        "gauge",
        "",
        (),
        "Whether the last collection worked and its readings are fresh.",
    ),
    Metric(
        "tunewatch_gpu_collector_duration_seconds",
        "gauge",
        "seconds",
        (),
        "Time the last collection took, failed or not.",
    ),
    Metric(
        "tunewatch_gpu_collector_last_success_timestamp_seconds",
        "gauge",
        "seconds",
        (),
        "When a collection last worked; absent until the first one does.",
    ),
    Metric(
        "tunewatch_gpu_collector_source_info",
        "gauge",
        "",
        ("source",),
        "Where the last good collection came from (nvml, nvidia-smi, simulated), always 1.",
    ),
    Metric(
        "tunewatch_gpu_collector_failures_total",
        "counter",
        "",
        ("reason",),
        "Collections that failed, by reason.",
    ),
    Metric(
        "tunewatch_gpu_reader_restarts_total",
        "counter",
        "",
        (),
        "Times the reader process was started again.",
    ),
    Metric(
        "tunewatch_gpu_readings_rejected_total",
        "counter",
        "",
        ("field", "reason"),
        "Readings left out rather than guessed: why a series is absent.",
    ),
    Metric("tunewatch_gpu_build_info", "gauge", "", ("version",), "Version of the sidecar, always 1."),
    Metric("tunewatch_gpu_time_seconds", "gauge", "seconds", (), "The clock of this host at the scrape."),
)

METRIC = {metric.name: metric for metric in METRICS}
