"""Writes grafana/dashboards/*.json."""

from __future__ import annotations

from pathlib import Path

from tunewatch_dashboards.document import to_json
from tunewatch_dashboards.run import run_dashboard

DASHBOARDS = Path(__file__).resolve().parents[2] / "dashboards"


def main() -> None:
    """Write every dashboard to the file named after its uid."""
    for dashboard in (run_dashboard(),):
        path = DASHBOARDS / f"{dashboard.uid}.json"
        path.write_text(to_json(dashboard), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
