//! The model card of exported weights: description, origin, code that loads them, and scores.

use std::fmt::Write;
use std::path::Path;

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
    let Preprocessing { normalization, transform } = &export.preprocessing;
    let _ = writeln!(
        out,
        "Images: RGB, short side resized to {} px (bicubic, antialiased), the middle {1} × {1} px, colors in 0..1 minus \
         {2:?} over {3:?}. One vector an image: {4}.\n",
        transform.resize_px,
        transform.size_px,
        normalization.mean,
        normalization.std,
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
