//! Histograms.

use std::path::Path;

use plotters::prelude::*;

use super::canvas::{Cell, SCALE, draw_charts};
use crate::ReportError;

/// Number of bars of a histogram.
const N_BINS: usize = 40;

/// Name of a distribution, and its values.
pub type Histogram = (String, Vec<f64>);

/// Draws histograms of the distributions, two per row.
///
/// # Errors
/// [`ReportError::Picture`].
pub fn draw_histograms(path: &Path, histograms: &[Histogram]) -> Result<(), ReportError> {
    draw_charts(path, histograms, draw)
}

fn draw(cell: &Cell<'_>, (name, values): &Histogram) -> Result<(), String> {
    let (low, high) = values.iter().fold((f64::MAX, f64::MIN), |(l, h), v| (l.min(*v), h.max(*v)));
    // Equal values, or none, still need a range of nonzero width.
    let (low, high) = if low < high { (low, high) } else { (low.min(1e9) - 0.5, low.min(1e9) + 0.5) };
    let width = (high - low) / N_BINS as f64;
    let mut counts = [0u32; N_BINS];
    for value in values {
        counts[(((value - low) / width) as usize).min(N_BINS - 1)] += 1;
    }
    let top = counts.iter().max().copied().unwrap_or(0).max(1);
    let mut chart = ChartBuilder::on(cell)
        .caption(name, ("sans-serif", 18 * SCALE))
        .margin(10 * SCALE)
        .x_label_area_size(28 * SCALE)
        .y_label_area_size(56 * SCALE)
        .build_cartesian_2d(low..high, 0..top + top / 20 + 1)
        .map_err(|error| error.to_string())?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .label_style(("sans-serif", 12 * SCALE))
        .x_labels(6)
        .y_labels(5)
        .draw()
        .map_err(|error| error.to_string())?;
    let bars = counts.iter().enumerate().map(|(i, count)| {
        let left = low + i as f64 * width;
        Rectangle::new([(left, 0), (left + 0.9 * width, *count)], RGBColor(30, 90, 180).filled())
    });
    chart.draw_series(bars).map_err(|error| error.to_string())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_and_constant_values_are_drawn() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("h.png");
        let values = [vec![], vec![3.0; 5], (0..100).map(f64::from).collect()];
        let histograms: Vec<Histogram> = values.map(|v| ("widths".to_string(), v)).into();
        draw_histograms(&path, &histograms).expect("drawn");
        let picture = image::open(&path).expect("a picture").to_rgb8();
        assert!(picture.pixels().any(|p| p.0 == [30, 90, 180]), "there are bars");
    }
}
