"""A dashboard as the text of the file that Grafana is given."""

from __future__ import annotations

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard


def to_json(dashboard: Dashboard) -> str:
    """The bare dashboard (not the HTTP API's envelope), with sorted keys so that a diff shows what changed."""
    return JSONEncoder(sort_keys=True, indent=2).encode(dashboard) + "\n"
