"""Renders the shipped Prometheus and Alertmanager files for another site, and for time that runs faster.

The shipped files are the truth: what is rendered here is those files with other addresses and, for
demonstrations and end-to-end tests, with every duration divided by one factor. `python -m tunewatch.rules`
writes them to a folder; docker-compose.yml does so before Prometheus and Alertmanager start.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from tunewatch.share import share_path

# The addresses that the shipped files carry.
GRAFANA_URL = "http://127.0.0.1:3000"
RUNBOOK_URL = "https://github.com/tunewatch/tunewatch/blob/main/docs/runbooks"
WEBHOOK_URL = "http://127.0.0.1:9095"

_DURATION_KEYS = frozenset(
    {
        "interval",
        "for",
        "keep_firing_for",
        "scrape_interval",
        "scrape_timeout",
        "evaluation_interval",
        "refresh_interval",
        "timeout",
        "group_wait",
        "group_interval",
        "repeat_interval",
        "resolve_timeout",
    }
)
_TEMPLATE_KEYS = frozenset({"annotations", "labels"})

# Units as Prometheus defines them: a day is 24 h, a week 7 d, a year 365 d, and they come largest first.
_MILLISECONDS = {
    "y": 365 * 86_400_000,
    "w": 7 * 86_400_000,
    "d": 86_400_000,
    "h": 3_600_000,
    "m": 60_000,
    "s": 1000,
    "ms": 1,
}
_DURATION = r"(?:[0-9]+(?:ms|[ywdhms]))+"
_DURATION_PART = re.compile(r"([0-9]+)(ms|[ywdhms])")
_PROMQL_TOKEN = re.compile(
    rf"""
      (?P<untouched> "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' | `[^`]*` | \#[^\n]* )
    | \[ \s* {_DURATION} \s* (?: : \s* (?:{_DURATION})? \s* )? \]
    | \b offset \s+ -? \s* {_DURATION}
    """,
    re.VERBOSE | re.IGNORECASE,
)
_TEMPLATE_ACTION = re.compile(r'\{\{(?:"(?:[^"\\]|\\.)*"|`[^`]*`|(?!\}\}).)*\}\}', re.DOTALL)
_GO_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|`[^`]*`')


def write_configuration(
    folder: Path,
    *,
    targets_dir: Path,
    alertmanager: str,
    webhook_url: str,
    grafana_url: str | None = None,
    runbook_url: str | None = None,
    source: Path | None = None,
) -> None:
    """Writes prometheus.yml, rules/, alertmanager.yml, its variants (alertmanager.slack.yml) and templates/ to
    `folder`, readable by everybody.

    The arguments are those of `prometheus_config`, `alertmanager_config` and `render_rules`. Rules and templates
    that are no longer there leave `folder`, too. Raises ValueError for a wrong address, before anything is written.
    """
    texts = {
        "prometheus.yml": prometheus_config(
            rules_dir=folder.absolute() / "rules",
            targets_dir=targets_dir,
            alertmanager=alertmanager,
            source=source,
        ),
        **{
            file.name: alertmanager_config(webhook_url=webhook_url, file=file)
            for file in (source or share_path("prometheus")).glob("alertmanager*.yml")
        },
        **{
            f"rules/{name}": text
            for name, text in render_rules(grafana_url, runbook_url, source=source).items()
        },
        **{f"templates/{name}": text for name, text in notification_templates(source).items()},
    }
    for name in ("rules", "templates"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
        (folder / name).chmod(0o755)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o644)


def render_rules(
    grafana_url: str | None = None,
    runbook_url: str | None = None,
    time_scale: float = 1.0,
    *,
    source: Path | None = None,
) -> dict[str, str]:
    """The shipped rule files as YAML text, by file name.

    `grafana_url` is what users open in a browser (`https://grafana.example.org`, with a path if it has one);
    `runbook_url` is the page under which `<AlertName>.md` lies. None keeps the shipped address. Comments are
    kept unless `time_scale` is other than 1 (see `scale_durations`). `source` is a copy of the shipped
    `prometheus/` folder to render instead.

    Raises ValueError for an address that is not an http or https URL.
    """
    links = {GRAFANA_URL: GRAFANA_URL, RUNBOOK_URL: RUNBOOK_URL}
    if grafana_url is not None:
        links[GRAFANA_URL] = _base_url("grafana_url", grafana_url)
    if runbook_url is not None:
        links[RUNBOOK_URL] = _base_url("runbook_url", runbook_url)
    shipped = re.compile("|".join(re.escape(url) for url in links))

    rendered = {}
    for path in sorted(_source(source, "rules").glob("*.yml")):
        text = shipped.sub(lambda match: links[match[0]], path.read_text(encoding="utf-8"))
        if time_scale != 1:
            text = _dump(scale_durations(yaml.safe_load(text), time_scale))
        rendered[path.name] = text
    return rendered


def prometheus_config(
    *,
    rules_dir: Path,
    targets_dir: Path,
    alertmanager: str,
    prometheus: str = "127.0.0.1:9090",
    time_scale: float = 1.0,
    source: Path | None = None,
) -> str:
    """The shipped prometheus.yml as YAML text, for files and servers at other places.

    `rules_dir` holds what `render_rules` gives; `targets_dir` is `$TUNEWATCH_HOME/targets`, with `gpu/` and
    `serve/` below it. `alertmanager` and `prometheus` are `host:port`: it sends alerts to the first, and scrapes both.
    `source` is as in `render_rules`.
    """
    config = yaml.safe_load(_source(source, "prometheus.yml").read_text(encoding="utf-8"))
    config["rule_files"] = [str(rules_dir / Path(pattern).name) for pattern in config["rule_files"]]
    config["alerting"]["alertmanagers"] = [{"static_configs": [{"targets": [alertmanager]}]}]
    for job in config["scrape_configs"]:
        for discovery in job.get("file_sd_configs", ()):
            discovery["files"] = [
                str(targets_dir / Path(pattern).relative_to("targets")) for pattern in discovery["files"]
            ]
        if own := {"prometheus": prometheus, "alertmanager": alertmanager}.get(job["job_name"]):
            job["static_configs"] = [{"targets": [own]}]
    return _dump(scale_durations(config, time_scale))


def alertmanager_config(*, webhook_url: str, time_scale: float = 1.0, file: Path | None = None) -> str:
    """The shipped alertmanager.yml, or `file` instead, as YAML text that posts to another webhook.

    `webhook_url` is the address before the paths: alerts go to `<webhook_url>/alerts`, the heartbeat to
    `<webhook_url>/watchdog`. Receivers at other addresses, which somebody added, stay. The text names its
    templates (`notification_templates`) as templates/ beside it.
    Raises ValueError when `webhook_url` is not an http or https URL, or `file` no configuration of Alertmanager.
    """
    base = _base_url("webhook_url", webhook_url)
    path = share_path("prometheus", "alertmanager.yml") if file is None else file
    try:
        config = scale_durations(yaml.safe_load(path.read_text(encoding="utf-8")), time_scale)
        receivers = config["receivers"]
    except (OSError, yaml.YAMLError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a configuration of Alertmanager: {error}") from None
    for receiver in receivers:
        for webhook in receiver.get("webhook_configs", ()):
            if webhook.get("url", "").startswith(f"{WEBHOOK_URL}/"):
                webhook["url"] = base + webhook["url"].removeprefix(WEBHOOK_URL)
    return _dump(config)


def notification_templates(source: Path | None = None) -> dict[str, str]:
    """The texts of notifications as Alertmanager's templates, by file name. `source` is as in `render_rules`."""
    return {
        path.name: path.read_text(encoding="utf-8") for path in _source(source, "templates").glob("*.tmpl")
    }


def scale_durations(document: Any, factor: float) -> Any:
    """A copy of a parsed rule, Prometheus or Alertmanager file with every duration divided by `factor`.

    That is: intervals, timeouts, `for` and the like, ranges and offsets in `expr`, and those in PromQL that a
    template of an annotation or a label queries. A duration above zero stays at least 1 ms, the finest that
    Prometheus knows; zero stays zero. Plain numbers that a rule compares with, seconds included, stay.

    Raises ValueError for a factor that is not above zero, and for a duration that Prometheus would reject.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"the time scale must be a number above 0, not {factor}")
    return _scale_node("", document, factor)


def _scale_node(key: str, node: Any, factor: float) -> Any:
    match node:
        case dict() if key in _TEMPLATE_KEYS:
            return {name: _scale_template(str(text), factor) for name, text in node.items()}
        case dict():
            return {name: _scale_node(name, value, factor) for name, value in node.items()}
        case list():
            return [_scale_node(key, value, factor) for value in node]
        case str() if key in _DURATION_KEYS:
            if not re.fullmatch(_DURATION, node):
                raise ValueError(f"{key}: {node!r} is not a duration of Prometheus, such as 15s or 1h30m")
            return _scale_duration(node, factor)
        case str() if key == "expr":
            return _scale_promql(node, factor)
    return node


def _scale_duration(text: str, factor: float) -> str:
    before = sum(int(number) * _MILLISECONDS[unit] for number, unit in _DURATION_PART.findall(text))
    if before == 0:
        return text
    rest = max(1, round(before / factor))
    parts = []
    for unit in ("d", "h", "m", "s", "ms"):
        number, rest = divmod(rest, _MILLISECONDS[unit])
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts)


def _scale_promql(text: str, factor: float) -> str:
    def scale_token(token: re.Match[str]) -> str:
        if token["untouched"] is not None:
            return token[0]
        return re.sub(_DURATION, lambda duration: _scale_duration(duration[0], factor), token[0])

    return _PROMQL_TOKEN.sub(scale_token, text)


def _scale_template(text: str, factor: float) -> str:
    """PromQL stands in the string literals of template actions; the text around the actions is prose."""

    def scale_literal(literal: re.Match[str]) -> str:
        if literal[0].startswith("`"):
            return _scale_promql(literal[0][1:-1], factor).join("``")
        query = json.loads(literal[0])
        scaled = _scale_promql(query, factor)
        return literal[0] if scaled == query else json.dumps(scaled, ensure_ascii=False)

    return _TEMPLATE_ACTION.sub(lambda action: _GO_STRING.sub(scale_literal, action[0]), text)


def _base_url(name: str, url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or re.search(r"[\s{}\"'#?]", url):
        raise ValueError(f"{name}: {url!r} is not an address such as https://example.org/path")
    return url.rstrip("/")


def _source(source: Path | None, name: str) -> Path:
    return share_path("prometheus", name) if source is None else source / name


class _Dumper(yaml.SafeDumper):
    """Keeps expressions of several lines readable."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _dump(document: Any) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command `python -m tunewatch.rules`, for sites that do not use the shipped addresses."""
    parser = argparse.ArgumentParser(
        prog="python -m tunewatch.rules",
        description="Write prometheus.yml, alertmanager.yml and rules/ with the addresses of this site.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="where to write them")
    parser.add_argument(
        "--targets", type=Path, required=True, help="where Prometheus finds $TUNEWATCH_HOME/targets"
    )
    parser.add_argument("--alertmanager", required=True, metavar="HOST:PORT", help="as Prometheus reaches it")
    parser.add_argument("--webhook-url", required=True, help="as Alertmanager reaches it, without the paths")
    parser.add_argument("--grafana-url", help="as people reach it; for the links in alerts")
    parser.add_argument("--runbook-url", help="the page under which <AlertName>.md lies")
    parser.add_argument(
        "--source",
        type=Path,
        metavar="FOLDER",
        help="the prometheus/ folder to read (default: the shipped one)",
    )
    options = parser.parse_args(arguments)
    try:
        write_configuration(
            options.folder,
            targets_dir=options.targets,
            alertmanager=options.alertmanager,
            webhook_url=options.webhook_url,
            grafana_url=options.grafana_url,
            runbook_url=options.runbook_url,
            source=options.source,
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
