"""The child process of `tunewatch train`: `python -m tunewatch.finetune CONFIG.yaml`."""

from __future__ import annotations

import sys

from tunewatch.finetune.errors import require_train_extra
from tunewatch.probe.hook import install_excepthook
from tunewatch.probe.writer import RunWriter


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m tunewatch.finetune CONFIG.yaml", file=sys.stderr)
        return 2
    install_excepthook()
    writer = RunWriter.from_environment()
    writer.phase("prepare", detail="starting")
    require_train_extra()
    from tunewatch.finetune.config import load_config
    from tunewatch.finetune.job import run_job

    run_job(load_config(arguments[0]), writer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
