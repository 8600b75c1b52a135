"""Past runs through the detectors that watch live ones: `tunewatch replay`.

One module for each form in which a training leaves its history; each is a generator of the run folder's events, or of
NEXT_RUN between two runs of one stream. All of them read in pieces: memory does not grow with the file.
"""

from tunewatch.replay.report import exit_code, json_list, summary, text_lines
from tunewatch.replay.runs import HEALTH, Raised, Report
from tunewatch.replay.sources import replay

__all__ = ["HEALTH", "Raised", "Report", "exit_code", "json_list", "replay", "summary", "text_lines"]
