"""The parts all dashboards are made of: queries, panels that start from good defaults, the grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, statetimeline, table
from grafana_foundation_sdk.builders import timeseries as timeseries_builder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heatmap_model
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from tunewatch_dashboards import palette

PROMETHEUS_UID = "tunewatch-prometheus"
DATASOURCE = common_model.DataSourceRef(type_val="prometheus", uid="${datasource}")
NO_DATA = "no data"
GRID_WIDTH = 24

Panel = stat.Panel | timeseries_builder.Panel | statetimeline.Panel | heatmap.Panel | table.Panel
P = TypeVar("P", stat.Panel, timeseries_builder.Panel, statetimeline.Panel, heatmap.Panel, table.Panel)


def series(expr: str, legend: str, ref: str = "A") -> prometheus.Dataquery:
    """A query over the dashboard's time range."""
    return prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(ref).range().datasource(DATASOURCE)


def instant(expr: str, legend: str = "", ref: str = "A") -> prometheus.Dataquery:
    """A query at the end of the dashboard's time range."""
    query = prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(ref).datasource(DATASOURCE)
    return query.instant()


def instant_table(expr: str, ref: str = "A") -> prometheus.Dataquery:
    """An instant query whose labels become the columns of a table."""
    return instant(expr, ref=ref).format(PromQueryFormat.TABLE)


def buckets(expr: str) -> prometheus.Dataquery:
    """A query of histogram buckets (label `le`), not cumulative as a heatmap wants them."""
    return series(expr, "{{le}}").format(PromQueryFormat.HEATMAP)


def _described(panel: P, title: str, description: str, no_value: str) -> P:
    return panel.title(title).description(description).datasource(DATASOURCE).no_value(no_value)


def number(
    title: str,
    description: str,
    *queries: prometheus.Dataquery,
    unit: str,
    decimals: int | None = None,
    no_value: str = NO_DATA,
) -> stat.Panel:
    """One number in a neutral colour."""
    panel = _described(stat.Panel(), title, description, no_value).unit(unit)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel = panel.graph_mode(common_model.BigValueGraphMode.NONE).color_scheme(_fixed(palette.NEUTRAL))
    panel = panel.color_mode(common_model.BigValueColorMode.NONE)
    panel = panel.justify_mode(common_model.BigValueJustifyMode.CENTER)
    if decimals is not None:
        panel = panel.decimals(decimals)
    for query in queries:
        panel = panel.with_target(query)
    return panel


def words(
    title: str,
    description: str,
    query: prometheus.Dataquery,
    colors: Mapping[str, str],
    *,
    no_value: str = NO_DATA,
) -> stat.Panel:
    """The legends of the series that `query` returns, as words on a coloured ground.

    `colors` maps a regular expression of a word to its colour; any other word has QUIET's.
    """
    panel = number(title, description, query, unit=units.NoUnit, no_value=no_value)
    panel = panel.text_mode(common_model.BigValueTextMode.NAME).color_scheme(_fixed(palette.QUIET))
    panel = panel.color_mode(common_model.BigValueColorMode.BACKGROUND_SOLID)
    panel = panel.orientation(common_model.VizOrientation.HORIZONTAL)  # several words one below the other
    for pattern, color in colors.items():
        panel = panel.override_by_regexp(f"/{pattern}/", [_color(color)])
    return panel


def lines(
    title: str,
    description: str,
    *queries: prometheus.Dataquery,
    unit: str,
    colors: Mapping[str, str] | None = None,
    log: bool = False,
    no_value: str = NO_DATA,
) -> timeseries_builder.Panel:
    """Lines over time. `colors` maps a regular expression of a legend to its colour; others are shades of blue.

    A gap stays a gap: values are never joined over missing ones.
    """
    panel = _described(timeseries_builder.Panel(), title, description, no_value).unit(unit)
    panel = panel.line_width(1).fill_opacity(0).show_points(common_model.VisibilityMode.AUTO)
    panel = panel.span_nulls(False).legend(plain_legend().calcs(["last"]))
    panel = panel.color_scheme(_shades(palette.FIRST)).mappings([_nan()])
    panel = panel.tooltip(common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI))
    if log:
        scale = common.ScaleDistributionConfig().type(common_model.ScaleDistribution.LOG).log(10)
        panel = panel.scale_distribution(scale)
    for query in queries:
        panel = panel.with_target(query)
    for pattern, color in (colors or {}).items():
        panel = panel.override_by_regexp(f"/{pattern}/", [_color(color)])
    return panel


def stacked(panel: timeseries_builder.Panel) -> timeseries_builder.Panel:
    """Fill the lines and put one upon the other."""
    stacking = common.StackingConfig().mode(common_model.StackingMode.NORMAL)
    return panel.stacking(stacking).fill_opacity(70).line_width(0)


def bars(panel: timeseries_builder.Panel) -> timeseries_builder.Panel:
    """Draw bars instead of lines, for counts."""
    return panel.draw_style(common_model.GraphDrawStyle.BARS).fill_opacity(80)


def timeline(
    title: str,
    description: str,
    *queries: prometheus.Dataquery,
    values: Mapping[float, tuple[str, str]],
    no_value: str = NO_DATA,
) -> statetimeline.Panel:
    """Rows of coloured bars over time; `values` maps a value to its text and colour."""
    panel = _described(statetimeline.Panel(), title, description, no_value)
    results = {
        f"{value:g}": model.ValueMappingResult(text=text, color=color, index=index)
        for index, (value, (text, color)) in enumerate(values.items())
    }
    panel = panel.mappings([model.ValueMap(options=results)]).color_scheme(_fixed(palette.QUIET))
    panel = panel.merge_values(True).row_height(0.85).fill_opacity(85).line_width(0)
    panel = panel.show_value(common_model.VisibilityMode.AUTO).span_nulls(False)
    panel = panel.legend(common.VizLegendOptions().show_legend(False))
    for query in queries:
        panel = panel.with_target(query)
    return panel


def histogram_over_time(
    title: str, description: str, query: prometheus.Dataquery, *, unit: str
) -> heatmap.Panel:
    """A heatmap of a histogram's buckets over time; `unit` is that of the buckets' bounds."""
    panel = _described(heatmap.Panel(), title, description, NO_DATA).with_target(query).calculate(False)
    panel = panel.y_axis(heatmap.YAxisConfig().unit(unit))
    colors = heatmap.HeatmapColorOptions().mode(heatmap_model.HeatmapColorMode.SCHEME).scheme("Blues")
    return panel.color(colors.steps(32)).hide_legend()


def label_table(
    title: str, description: str, expr: str, labels: Mapping[str, str], no_value: str
) -> table.Panel:
    """The labels of one series as rows of name and value; `labels` maps a label to what people call it."""
    panel = _described(table.Panel(), title, description, no_value).with_target(instant(expr))
    names = {label: model.ValueMappingResult(text=text) for label, text in labels.items()}
    panel = panel.with_transformation(
        model.DataTransformerConfig(id_val="labelsToFields", options={"mode": "rows"})
    )
    properties = [_property("mappings", [model.ValueMap(options=names)]), _property("custom.width", 180)]
    panel = panel.override_by_name("label", properties)
    return panel.show_header(False).cell_height(common_model.TableCellHeight.SM)


def columns_table(
    title: str, description: str, expr: str, columns: Mapping[str, str], no_value: str
) -> table.Panel:
    """One row for each series of an instant query; `columns` maps labels (and `Value`) to headings, in order."""
    panel = _described(table.Panel(), title, description, no_value).with_target(instant_table(expr))
    organize: dict[str, Any] = {
        "includeByName": dict.fromkeys(columns, True),
        "indexByName": {name: index for index, name in enumerate(columns)},
        "renameByName": dict(columns),
    }
    panel = panel.with_transformation(model.DataTransformerConfig(id_val="organize", options=organize))
    return panel.cell_height(common_model.TableCellHeight.SM)


def plain_legend() -> common.VizLegendOptions:
    """Names below the graph, without numbers."""
    legend = common.VizLegendOptions().display_mode(common_model.LegendDisplayMode.LIST)
    return legend.placement(common_model.LegendPlacement.BOTTOM).show_legend(True).calcs([])


class Grid:
    """Puts panels on a dashboard, line after line."""

    def __init__(self, board: dashboard.Dashboard) -> None:
        self._board = board
        self._y = 0

    def line(self, height: int, *panels: tuple[int, int, Panel]) -> None:
        """Place panels, each as (id, width, panel), side by side. An id is for ever: links name it."""
        x = 0
        for panel_id, width, panel in panels:
            place = model.GridPos(h=height, w=width, x=x, y=self._y)
            self._board.with_panel(panel.id(panel_id).grid_pos(place))
            x += width
        self._y += height

    def heading(self, panel_id: int, title: str) -> None:
        """Begin a row of the dashboard that people can fold."""
        place = model.GridPos(h=1, w=GRID_WIDTH, x=0, y=self._y)
        self._board.with_row(dashboard.Row(title).id(panel_id).grid_pos(place))
        self._y += 1


def _fixed(color: str) -> dashboard.FieldColor:
    return dashboard.FieldColor().mode(model.FieldColorModeId.FIXED).fixed_color(color)


def _shades(color: str) -> dashboard.FieldColor:
    return dashboard.FieldColor().mode(model.FieldColorModeId.SHADES).fixed_color(color)


def _color(color: str) -> model.DynamicConfigValue:
    return _property("color", {"mode": "fixed", "fixedColor": color})


def _property(name: str, value: object) -> model.DynamicConfigValue:
    return model.DynamicConfigValue(id_val=name, value=value)


def _nan() -> model.SpecialValueMap:
    result = model.ValueMappingResult(text="NaN", color=palette.FAILURE)
    options = model.DashboardSpecialValueMapOptions(match=model.SpecialValueMatch.NA_N, result=result)
    return model.SpecialValueMap(options=options)
