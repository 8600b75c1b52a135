"""The GPU sidecar of tunewatch: NVML and nvidia-smi readings as Prometheus metrics."""
