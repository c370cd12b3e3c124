//! The model card of exported weights: description, origin, code that loads them, and scores.

use std::fmt::Write;
use std::path::Path;

use augment::Depth;

use super::format::Format;
use super::program::{Program, program};
use crate::backbone::exchange_of;
use crate::export::Export;
use crate::preprocessing::Preprocessing;

/// Text of the card for `export` in `format` at `path`.
pub(super) fn text(path: &Path, format: Format, export: &Export<'_>) -> String {
    let card = export.card;
    let mut out = format!("# {}\n\n", card.name);
    let model = serde_json::to_value(export.model).unwrap_or_default();
    let arch = model["arch"].as_str().unwrap_or("network").to_string();
    let n_params: usize = export.tensors.iter().map(|tensor| tensor.values.len()).sum();
    // Writing into a string cannot fail.
    let _ = writeln!(
        out,
        "A backbone ({arch}, {:.1} M parameters, {} features) of Ocelli \
         {}: the {} in {}.\n",
        n_params as f64 / 1e6,
        export.model.width(),
        card.version,
        export.which,
        export.precision.name(),
    );
    if let Some(data) = &card.data {
        let _ = writeln!(out, "{data}\n");
    }
    let Program { language, text } = program(path, format, export);
    let _ = writeln!(out, "## Use\n\n```{language}\n{text}```\n");
    let Preprocessing { pixels, transform } = &export.preprocessing;
    let format = pixels.format();
    let values = match (format.is_rgb8(), format.depth) {
        (true, _) => "colors in 0..1".into(),
        (false, Depth::Float) => "values".into(),
        (false, depth) => format!("values over {}", depth.unit()),
    };
    let _ = writeln!(
        out,
        "Images: {}, short side resized to {} px (bicubic, antialiased), the middle {2} × {2} px, {values} minus {3:?} over {4:?}. \
         One vector an image: {5}.\n",
        if format.is_rgb8() { "RGB".into() } else { format.to_string() },
        transform.resize_px,
        transform.size_px,
        pixels.normalization.mean,
        pixels.normalization.std,
        exchange_of(export.model).pooling(),
    );
    if !card.scores.is_empty() {
        out.push_str("## Scores\n\n| | weights in | |\n|---|---|---|\n");
        for score in &card.scores {
            let _ = writeln!(out, "| {} | {} | {} |", score.name, score.precision.name(), score.value);
        }
        out.push('\n');
    }
    if let Some(plan) = &card.plan {
        let _ = writeln!(out, "## Plan\n\n```toml\n{}\n```", plan.trim_end());
    }
    out
}
