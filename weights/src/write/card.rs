//! The model card of exported weights: description, origin, code that loads them, and scores.

use std::fmt::Write;
use std::path::Path;

use augment::{Decoding, Depth, Fill, FillRule, Transform};
use networks::head::pixels::{EPSILON, PixelDecoder};
use networks::{ClassHead, Origin, PixelHead};
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
    let mut out = format!("# {}\n\n", escaped(&card.name));
    let model = serde_json::to_value(export.model).unwrap_or_default();
    let arch = model["arch"].as_str().unwrap_or("network").to_string();
    let mut n_params: usize = export.tensors.iter().map(|tensor| tensor.values.len()).sum();
    let mut kind = "backbone".to_string();
    if let Some(classifier) = &export.classifier {
        n_params += classifier.head.weight.len() + classifier.head.bias.len();
        kind = format!("classifier of {}", counted(classifier.head.classes.len() as u64, "class"));
    }
    if let Some(head) = export.decoder {
        n_params += head.tensors.iter().map(|tensor| tensor.values.len()).sum::<usize>();
        let classes = counted(head.classes.len() as u64, "class");
        kind = format!("backbone with a decoder of pixels of {classes}");
    }
    // Writing into a string cannot fail.
    let _ = writeln!(
        out,
        "A {kind} ({arch}, {:.1} M parameters, {} features) of Ocelli \
         {}: the {} in {}.\n",
        n_params as f64 / 1e6,
        export.model.width(),
        card.version,
        escaped(export.network_name),
        export.precision.name(),
    );
    if let Some(classifier) = &export.classifier {
        out.push_str(&classes_text(format, classifier));
    }
    if let Some(head) = export.decoder {
        out.push_str(&decoder_text(format, head));
    }
    if let Some(data) = &card.data {
        let _ = writeln!(out, "{}\n", escaped(data));
    }
    if card.origins.is_empty() && card.plan.is_some() {
        out.push_str("Origin: random weights.\n\n");
    }
    out.push_str(&origins_text(&card.origins));
    let _ = writeln!(out, "## Use\n\n```python\n{}```\n", program(path, format, export));
    if format == Format::Safetensors {
        let is_same = export.classifier.is_none() && export.decoder.is_none();
        let what = if is_same { "The same" } else { "The features" };
        let _ = writeln!(out, "{what} by Ocelli:\n\n```sh\n{}\n```\n", embed_command(path));
    }
    // A graph with a decoder returns scores of pixels alone.
    let mut vector = String::new();
    if format != Format::Onnx || export.decoder.is_none() {
        vector = format!(" One vector an image: {}.", exchange_of(export.model).pooling());
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
        "Images: {}, {}, {values} minus {:?} over {:?}.{vector}\n",
        if format.is_rgb8() { "RGB".into() } else { format.to_string() },
        resize_in_words(*transform, export.decoder.is_some()),
        pixels.normalization.mean,
        pixels.normalization.std,
    );
    for sentence in decoding_in_words(*decoding) {
        let _ = writeln!(out, "{sentence}\n");
    }
    if !card.scores.is_empty() {
        out.push_str("## Scores\n\n| | weights in | |\n|---|---|---|\n");
        for score in &card.scores {
            let name = escaped(&score.name);
            let _ = writeln!(out, "| {name} | {} | {} |", score.precision.name(), score.value);
        }
        out.push('\n');
    }
    if let Some(plan) = &card.plan {
        let fence = fence(plan);
        let _ = writeln!(out, "## Plan\n\n{fence}toml\n{}\n{fence}", plan.trim_end());
    }
    out
}

/// Returns a fence for a block of code that is `text`: more backticks than it has in a row.
fn fence(text: &str) -> String {
    let mut longest = 2;
    let mut n = 0;
    for c in text.chars() {
        n = if c == '`' { n + 1 } else { 0 };
        longest = longest.max(n);
    }
    "`".repeat(longest + 1)
}

/// Describes how images are resized, of which a decoder that labels pixels sees the whole.
fn resize_in_words(transform: Transform, is_whole: bool) -> String {
    let Transform { resize_px, size_px } = transform;
    if is_whole {
        return format!("resized to {size_px} × {size_px} px whatever their shape (bicubic, antialiased)");
    }
    format!(
        "short side resized to {resize_px} px (bicubic, antialiased), the middle {size_px} × {size_px} px"
    )
}

/// Returns a sentence about what a classifier returns in `format`, and a table of the names of the
/// classes.
fn classes_text(format: Format, classifier: &ExportedClassifier<'_>) -> String {
    let ClassHead { classes, is_multi_label, .. } = classifier.head;
    let function = if *is_multi_label { "sigmoid" } else { "softmax" };
    let what = if format == Format::Onnx && classifier.returns_probabilities {
        "probability".to_string()
    } else {
        format!("score before the {function}")
    };
    let mut out = format!("It returns one {what} per class:\n\n{}", class_table(classes));
    if *is_multi_label {
        out.push_str("\nAn image may have several of them, or none.\n");
    }
    out.push('\n');
    out
}

/// Returns sentences about the decoder in a file of `format`, and a table of the names of the
/// classes.
fn decoder_text(format: Format, head: &PixelHead) -> String {
    let table = class_table(&head.classes);
    if format == Format::Onnx {
        return format!("It returns one score before the softmax per class and pixel:\n\n{table}\n");
    }
    let mut names: Vec<String> = Vec::new();
    for tensor in &head.tensors {
        names.push(format!("`{}` {:?}", tensor.name, tensor.shape));
    }
    let layers = match head.decoder {
        PixelDecoder::Linear => "a linear layer".to_string(),
        PixelDecoder::Conv { .. } => format!(
            "a 3 × 3 convolution of the grid of patches with padding 1 and without bias, a layer norm of the \
             channels of each patch (epsilon {EPSILON:e}), GELU, and a linear layer"
        ),
    };
    format!(
        "The decoder scores the classes of every patch: {layers}. Scores of patches are interpolated \
         bilinearly to those of pixels, corners not aligned. Its parameters are {}. `ocelli export` writes \
         the whole network as ONNX. The classes:\n\n{table}\n",
        names.join(", ")
    )
}

/// Returns a table of the names of `classes`, or of the first if there are many.
fn class_table(classes: &[String]) -> String {
    let mut out = String::from("| number | class |\n|---|---|\n");
    for (number, class) in classes.iter().take(MAX_CLASSES).enumerate() {
        let _ = writeln!(out, "| {number} | {} |", escaped(class));
    }
    let n_more = classes.len().saturating_sub(MAX_CLASSES);
    if n_more > 0 {
        let _ = writeln!(out, "\nThe names of {n_more} more are not listed.");
    }
    out
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
            escaped(&origin.name),
            escaped(library),
            escaped(&origin.fingerprint),
            escaped(origin.license_in_words()),
        );
    }
    out.push('\n');
    out
}

/// Characters that have a meaning in Markdown within a line.
const SPECIAL: [char; 11] = ['\\', '`', '*', '_', '~', '&', '<', '[', ']', '|', '$'];

/// Returns `text` as one line of Markdown that shows it as it is, also in a cell of a table: names
/// in files are not trusted.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        if SPECIAL.contains(&c) {
            escaped.push('\\');
        }
        escaped.push(if c.is_control() { ' ' } else { c });
    }
    escaped
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Names that mean something in Markdown, in HTML or in a table.
    const HOSTILE: [&str; 12] = [
        "cat, kitten",
        "*bold* and __strong__",
        "~~gone~~ $x^2$",
        "`rm -rf` ``` x",
        "<img src=x onerror=alert(1)>",
        "a | b || c",
        "[link](http://example.com) ![image](x.png)",
        "&lt;b&gt; &amp;",
        "back\\slash\\",
        "two\nlines\r\n# title",
        "\ttab\u{0}zero",
        "größe 猫",
    ];

    /// Returns the text that a line of Markdown shows, by cells of a table: what backslashes
    /// precede is shown as it is.
    ///
    /// # Panics
    /// If it has a character with another meaning.
    fn cells(line: &str) -> Vec<String> {
        let mut cells = vec![String::new()];
        let mut chars = line.chars();
        while let Some(c) = chars.next() {
            let last = cells.len() - 1;
            match c {
                '\\' => cells[last].extend(chars.next()),
                '|' => cells.push(String::new()),
                '`' | '*' | '_' | '~' | '&' | '<' | '[' | '$' => panic!("{c} has a meaning in {line}"),
                c => cells[last].push(c),
            }
        }
        cells
    }

    /// Returns `name` in one line.
    fn in_a_line(name: &str) -> String {
        name.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
    }

    fn head(classes: Vec<String>) -> ClassHead {
        let bias = vec![0.0; classes.len()];
        ClassHead { classes, weight: bias.clone(), bias, is_multi_label: false }
    }

    #[test]
    fn names_of_classes_are_shown_as_they_are() {
        let classes = HOSTILE.map(String::from).to_vec();
        let decoder =
            PixelHead { classes: classes.clone(), decoder: PixelDecoder::Linear, tensors: Vec::new() };
        let head = head(classes);
        let classifier = ExportedClassifier { head: &head, returns_probabilities: false };
        for text in [
            classes_text(Format::Timm, &classifier),
            decoder_text(Format::Onnx, &decoder),
            decoder_text(Format::Safetensors, &decoder),
        ] {
            let rows: Vec<&str> = text.lines().filter(|line| line.starts_with('|')).collect();
            assert_eq!(rows.len(), 2 + HOSTILE.len(), "{text}");
            for (number, (row, name)) in rows[2..].iter().zip(HOSTILE).enumerate() {
                let expected =
                    ["".into(), format!(" {number} "), format!(" {} ", in_a_line(name)), "".into()];
                assert_eq!(cells(row), expected, "{row}");
            }
        }
    }

    #[test]
    fn a_card_names_a_hundred_classes() {
        let classes = (0..103).map(|class| class.to_string()).collect();
        let head = head(classes);
        let text =
            classes_text(Format::Onnx, &ExportedClassifier { head: &head, returns_probabilities: true });
        assert!(text.contains("one probability per class"), "{text}");
        assert!(text.contains("| 99 | 99 |\n\nThe names of 3 more are not listed.\n\n"), "{text}");
        assert!(!text.contains("100"), "{text}");
    }

    /// A name in the plan does not end the block that shows the plan.
    #[test]
    fn a_fence_is_longer_than_those_in_its_text() {
        assert_eq!(fence("x = 1"), "```");
        assert_eq!(fence("``` and ````"), "`````");
    }
}
