"""Past runs into Prometheus, so that they stand beside new ones: `tunewatch import`.

The histories that `tunewatch replay` reads become samples with the names and labels of a live run, at the times of the
run: as OpenMetrics text, and of that Prometheus' blocks.
"""

from tunewatch.backfill.command import ImportRefused, Outcome, Target, import_runs
from tunewatch.backfill.terminal import run_import
from tunewatch.backfill.timeline import Span

__all__ = ["ImportRefused", "Outcome", "Span", "Target", "import_runs", "run_import"]
