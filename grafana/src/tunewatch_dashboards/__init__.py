"""Builds the Grafana dashboards: `PYTHONPATH=grafana/src python -m tunewatch_dashboards` writes grafana/dashboards/.

The JSON files are committed and are what Grafana reads; this code needs grafana-foundation-sdk, a development
dependency, to write them anew.
"""
