"""A board as the JSON that Grafana loads.

Knows grafana-foundation-sdk; what is shown is decided elsewhere.
"""

from __future__ import annotations

import json

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from deploy.grafana.board import Board, Panel, Variable

_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_HEIGHT = 8


def grafana_json(board: Board) -> str:
    """The whole file, with an end of line."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["hotset"])
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .editable()
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .link(dashboard.DashboardLink("hotset").type(models.DashboardLinkType.DASHBOARDS).tags(["hotset"]))
    )
    for variable in board.variables:
        made = made.with_variable(_variable(variable))
    number = 0
    for section in board.sections:
        made = made.with_row(dashboard.Row(section.title))
        for panel in section.panels:
            number += 1
            made = made.with_panel(_panel(panel).id(number))
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _variable(variable: Variable) -> dashboard.QueryVariable | dashboard.TextBoxVariable:
    if variable.text:
        return (
            dashboard.TextBoxVariable(variable.name)
            .label(variable.label)
            .description(variable.description)
            .default_value(variable.text)
            .current(models.VariableOption(text=variable.text, value=variable.text, selected=True))
        )
    return (
        dashboard.QueryVariable(variable.name)
        .label(variable.label)
        .description(variable.description)
        .datasource(_SOURCE)
        .query(variable.query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NUMERICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".+")
        .current(models.VariableOption(text="All", value="$__all", selected=True))
    )


def _panel(panel: Panel) -> timeseries.Panel | heatmap.Panel:
    made = _heat(panel) if panel.heat else _graph(panel)
    for place, query in enumerate(panel.queries):
        made = made.with_target(
            prometheus.Dataquery()
            .ref_id(chr(ord("A") + place))
            .datasource(_SOURCE)
            .expr(query.expr)
            .legend_format(query.legend)
            .range()
            .format(prometheus_models.PromQueryFormat.TIME_SERIES)
        )
    return (
        made.title(panel.title)
        .description(panel.description)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .height(_HEIGHT)
        .span(panel.width)
    )


def _graph(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(40 if panel.stacked else 10)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
    )
    if panel.log:
        made = made.scale_distribution(
            common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(10)
        )
    else:
        made = made.min(0)
    if panel.top is not None:
        made = made.max(panel.top)
    if panel.stacked:
        made = made.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    return made


def _heat(panel: Panel) -> heatmap.Panel:
    """Each series is a row, coloured by its value; nothing is counted into buckets."""
    return (
        heatmap.Panel()
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_models.HeatmapColorMode.SCHEME)
            .scheme("Viridis")
            .steps(64)
        )
        .cell_values(heatmap.CellValues().unit(panel.unit))
        .rows_frame(heatmap.RowsHeatmapOptions().layout(common_models.HeatmapCellLayout.AUTO))
        .y_axis(heatmap.YAxisConfig().axis_label("layer"))
        .show_legend()
        .show_tooltip()
    )
