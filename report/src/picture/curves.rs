//! Curves of a run's metrics.

use std::path::Path;

use plotters::prelude::*;

use super::canvas::{Cell, SCALE, draw_charts};
use crate::ReportError;
use crate::run::metrics::{Metrics, Point};

/// Draws the metrics of the run in `workdir`, two per row, each with its own scale: first `names`,
/// then all whose names start with one of `prefixes`. Metrics with fewer than two values are left
/// out; returns `false` if no others remain.
///
/// # Errors
/// [`ReportError::Read`], [`ReportError::Picture`].
pub fn draw_curves(
    path: &Path,
    workdir: &Path,
    names: &[&str],
    prefixes: &[&str],
) -> Result<bool, ReportError> {
    let Metrics(columns) = Metrics::read(workdir)?;
    let with_prefix = columns
        .keys()
        .map(String::as_str)
        .filter(|name| prefixes.iter().any(|prefix| name.starts_with(prefix)));
    let names = names.iter().copied().chain(with_prefix);
    let curves: Vec<(&str, &[Point])> = names
        .filter_map(|name| Some((name, columns.get(name)?.as_slice())))
        .filter(|(_, points)| points.len() > 1)
        .collect();
    if curves.is_empty() {
        return Ok(false);
    }
    draw_charts(path, &curves, |cell, (name, points)| draw_curve(cell, name, points))?;
    Ok(true)
}

/// Formats a value without trailing zeros: `0.0015`, `250`.
fn format_tick(value: f64) -> String {
    let text = format!("{value:.6}");
    let short = text.trim_end_matches('0').trim_end_matches('.');
    if short == "-0" { "0".into() } else { short.into() }
}

/// Returns the lowest and the highest of `values`.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)))
}

fn draw_curve(cell: &Cell<'_>, name: &str, points: &[Point]) -> Result<(), String> {
    let points: Vec<(f64, f64)> = points.iter().map(|(step, value)| (*step as f64, *value)).collect();
    let (first, last) = range(points.iter().map(|(step, _)| *step));
    let (low, high) = range(points.iter().map(|(_, value)| *value));
    let margin = (0.05 * (high - low)).max(1e-9);
    let mut chart = ChartBuilder::on(cell)
        .caption(name, ("sans-serif", 18 * SCALE))
        .margin(10 * SCALE)
        .x_label_area_size(28 * SCALE)
        .y_label_area_size(56 * SCALE)
        .build_cartesian_2d(first..last, low - margin..high + margin)
        .map_err(|error| error.to_string())?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .label_style(("sans-serif", 12 * SCALE))
        .x_labels(6)
        .x_label_formatter(&|step| format!("{step:.0}"))
        .y_labels(5)
        .y_label_formatter(&|value| format_tick(*value))
        .x_desc("step")
        .draw()
        .map_err(|error| error.to_string())?;
    let style = ShapeStyle::from(&RGBColor(30, 90, 180)).stroke_width(2 * SCALE);
    chart.draw_series(LineSeries::new(points, style)).map_err(|error| error.to_string())?;
    Ok(())
}
