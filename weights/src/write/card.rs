//! The model card of exported weights: description, origin, code that loads them, and scores.

use std::fmt::Write;
use std::path::Path;

use augment::{Decoding, Depth, Fill, FillRule};
use networks::Origin;
use pipeline::words::counted;

use super::format::Format;
use super::program::{embed_command, program};
use crate::backbone::exchange_of;
use crate::export::{Export, ExportedClassifier};
use crate::preprocessing::Preprocessing;

/// Largest number of classes that a card names.
const MAX_CLASSES: usize = 100;

/// Returns the text of the card for `export` in `format` at `path`.
pub(super) fn text(path: &Path, format: Format, export: &Export<'_>) -> String {
    let card = export.card;
    let mut out = format!("# {}\n\n", card.name);
    let model = serde_json::to_value(export.model).unwrap_or_default();
    let arch = model["arch"].as_str().unwrap_or("network").to_string();
    let mut n_params: usize = export.tensors.iter().map(|tensor| tensor.values.len()).sum();
    let mut kind = "backbone".to_string();
    if let Some(classifier) = &export.classifier {
        n_params += classifier.head.weight.len() + classifier.head.bias.len();
        kind = format!("classifier of {}", counted(classifier.head.classes.len() as u64, "class"));
    }
    // Writing into a string cannot fail.
    let _ = writeln!(
        out,
        "A {kind} ({arch}, {:.1} M parameters, {} features) of Ocelli \
         {}: the {} in {}.\n",
        n_params as f64 / 1e6,
        export.model.width(),
        card.version,
        export.network_name,
        export.precision.name(),
    );
    if let Some(classifier) = &export.classifier {
        let _ = writeln!(out, "{}\n", classes_text(format, classifier));
    }
    if let Some(data) = &card.data {
        let _ = writeln!(out, "{data}\n");
    }
    if card.origins.is_empty() && card.plan.is_some() {
        out.push_str("Origin: random weights.\n\n");
    }
    out.push_str(&origins_text(&card.origins));
    let _ = writeln!(out, "## Use\n\n```python\n{}```\n", program(path, format, export));
    if format == Format::Safetensors {
        let what = if export.classifier.is_some() { "The features" } else { "The same" };
        let _ = writeln!(out, "{what} by Ocelli:\n\n```sh\n{}\n```\n", embed_command(path));
    }
    let Preprocessing { pixels, transform, decoding } = &export.preprocessing;
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
    for sentence in decoding_in_words(*decoding) {
        let _ = writeln!(out, "{sentence}\n");
    }
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

/// Returns a sentence about what a classifier returns in `format`, with the names of the classes.
fn classes_text(format: Format, classifier: &ExportedClassifier<'_>) -> String {
    let classes = &classifier.head.classes;
    let is_softmax = format == Format::Onnx && classifier.applies_softmax;
    let what = if is_softmax { "probability" } else { "score before the softmax" };
    let shown: Vec<String> = classes.iter().take(MAX_CLASSES).map(|class| cell(class)).collect();
    let more = match classes.len().saturating_sub(MAX_CLASSES) {
        0 => String::new(),
        n_more => format!(" and {n_more} more"),
    };
    format!("It returns one {what} per class, in this order: {}{more}.", shown.join(", "))
}

/// Returns a table of the weights that a network began with; empty for random weights.
fn origins_text(origins: &[Origin]) -> String {
    if origins.is_empty() {
        return String::new();
    }
    let mut out = String::from(
        "Origin: the weights below, the latest first. Their licenses apply to this file, too.\n\n\
         | weights | made by | fingerprint | license |\n|---|---|---|---|\n",
    );
    for origin in origins {
        let step = origin.step.map_or(String::new(), |step| format!(", step {step}"));
        let library = if origin.library.is_empty() { "unknown" } else { &origin.library };
        let _ = writeln!(
            out,
            "| {}{step} | {} | {} | {} |",
            cell(&origin.name),
            cell(library),
            cell(&origin.fingerprint),
            cell(origin.license_in_words()),
        );
    }
    out.push('\n');
    out
}

/// Returns `text` for a cell of a table: names in files are not trusted.
fn cell(text: &str) -> String {
    let mut cell = String::new();
    for c in text.chars() {
        match c {
            '|' | '<' | '`' | '[' | '\\' => cell.extend(['\\', c]),
            c if c.is_control() => cell.push(' '),
            c => cell.push(c),
        }
    }
    cell
}

/// Describes the unusual steps of decoding, which other programs must repeat.
fn decoding_in_words(decoding: Decoding) -> Vec<String> {
    let mut sentences = Vec::new();
    if decoding.apply_exif {
        sentences.push("Images are turned as their EXIF orientation says.".to_string());
    }
    if let Some(background) = decoding.background {
        sentences.push(format!("Behind transparent pixels lies the color {background:?}."));
    }
    if let Some(bits) = decoding.bits_used {
        let largest = u16::MAX >> (16 - bits);
        sentences.push(format!(
            "Values of 16 bits use {bits} of them: {largest} becomes 65535, and others in proportion."
        ));
    }
    if let Some(no_data) = decoding.no_data {
        let value = no_data.value.map_or(String::new(), |value| format!(" and {value}"));
        let fill = match no_data.fill {
            Fill::Number(number) => format!("get the value {number}"),
            Fill::Rule(FillRule::Mean) | Fill::Missing => {
                "get the mean of the other pixels of their image and channel".to_string()
            }
        };
        sentences.push(format!("Pixels that are NaN{value} hold no data: they {fill}."));
    }
    sentences
}
