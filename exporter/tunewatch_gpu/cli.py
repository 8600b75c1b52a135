"""The `tunewatch-gpu` command."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from pathlib import Path

from tunewatch_gpu.kernel_log import KERNEL_LOG
from tunewatch_gpu.process import adopt_orphans
from tunewatch_gpu.reader_options import ReaderOptions
from tunewatch_gpu.server import MetricsServer
from tunewatch_gpu.sidecar import Settings, Sidecar

log = logging.getLogger("tunewatch-gpu")

BACKENDS = ("auto", "nvml", "nvidia-smi", "simulated")
SIMULATE_VARIABLE = "TUNEWATCH_GPU_SIMULATE"
_SIMULATED_GPUS = 2
_MOST_SIMULATED_GPUS = 64
_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<four>[^:\[\]]*)):(?P<port>\d{1,5})")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sidecar until SIGTERM or SIGINT; exit code 1 where it can not listen or gives up."""
    sys.exit(_serve(_parse(arguments)))


def _serve(options: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # the byte on the wake-up descriptor is the message
    adopt_orphans()
    settings = Settings(
        interval=options.interval,
        timeout=options.timeout,
        reader=ReaderOptions(
            options.backend, options.nvidia_smi, options.simulated_gpus, options.scenario, time.time()
        ),
        kernel_log=options.kernel_log,
        expect_gpus=options.expect_gpus,
        exit_after_failures=options.exit_after_failures,
        version=_version(),
    )
    sidecar = Sidecar(settings, wake)
    host, port = options.listen
    try:
        server = MetricsServer(host, port, sidecar.metrics, sidecar.healthy)
    except OSError as error:
        log.error("can not listen on %s port %d: %s", host or "all addresses", port, error.strerror)
        return 1
    server.start()
    shown = f"[{host}]" if ":" in host else host or "0.0.0.0"
    log.info("listening on http://%s:%d/metrics", shown, server.server_port)
    log.info(
        "backend %s, every %g s; readings are dropped at the age of %g s",
        options.backend,
        settings.interval,
        settings.stale_after,
    )
    return sidecar.run()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tunewatch-gpu",
        description="GPU metrics for Prometheus, read from NVML or nvidia-smi.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--web.listen-address",
        dest="listen",
        type=_address,
        default=("127.0.0.1", 9460),
        metavar="HOST:PORT",
        help="where to serve /metrics (default 127.0.0.1:9460; an empty host means all addresses)",
    )
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="time between collections (default 5)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="a collection that takes longer is ended (default 10)",
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help=f"auto: NVML, then nvidia-smi; N simulated GPUs with {SIMULATE_VARIABLE}=N in the environment",
    )
    parser.add_argument(
        "--scenario",
        default="",
        metavar="FILE",
        help="what befalls the simulated GPUs and when, in YAML, such as "
        "'events: [{at: 60, card: 0, xid: 79, lost: true}]' (docs/simulation.md); read again when it changes",
    )
    parser.add_argument(
        "--expect-gpus",
        type=_count,
        default=None,
        metavar="N",
        help="how many GPUs this machine should have (default: the most that were seen)",
    )
    parser.add_argument(
        "--nvidia-smi",
        default="nvidia-smi",
        metavar="PATH",
        help="the nvidia-smi program (default: the one on PATH)",
    )
    parser.add_argument(
        "--exit-after-failures",
        type=_count,
        default=0,
        metavar="N",
        help="end with code 1 after N failed collections in a row (default 0: never)",
    )
    # For tests, which have no kernel log of their own.
    parser.add_argument("--kernel-log", type=Path, default=KERNEL_LOG, help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=_version())
    options = parser.parse_args(arguments)
    simulate = os.environ.get(SIMULATE_VARIABLE, "")
    options.simulated_gpus = _SIMULATED_GPUS
    if simulate:
        if not simulate.isdecimal() or not 1 <= int(simulate) <= _MOST_SIMULATED_GPUS:
            parser.error(
                f"{SIMULATE_VARIABLE} is {simulate!r}; a number from 1 to {_MOST_SIMULATED_GPUS} is allowed"
            )
        options.simulated_gpus = int(simulate)
        if options.backend == "auto":
            options.backend = "simulated"
    if options.scenario:
        _check_scenario(parser, options)
    return options


def _check_scenario(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.backend != "simulated":
        parser.error(f"--scenario is for simulated GPUs only; the backend is {options.backend}")
    from tunewatch_gpu.scenario import ScenarioError, read_scenario  # needs YAML, which nothing else does

    try:
        read_scenario(Path(options.scenario), options.simulated_gpus)
    except ScenarioError as error:
        parser.error(f"--scenario {options.scenario}: {error}")


def _address(text: str) -> tuple[str, int]:
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no HOST:PORT, such as 127.0.0.1:9460 or [::1]:9460")
    return match["six"] or match["four"] or "", int(match["port"])


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.05 to 3600")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 up")
    return int(text)


def _version() -> str:
    try:
        return distribution_version("tunewatch")
    except PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    main()
