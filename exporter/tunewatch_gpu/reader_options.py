"""What a reader process is started with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """The backend and what each needs: nvidia-smi's path; how many GPUs to simulate, and after which scenario.

    `scenario` is a path or ""; `began` is the Unix time at which the sidecar was started.
    """

    backend: str
    nvidia_smi: str = "nvidia-smi"
    simulated_gpus: int = 1
    scenario: str = ""
    began: float = 0.0
