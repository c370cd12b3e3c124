//! The model card of exported weights: description, origin, code that loads them, and scores.

use std::fmt::Write;
use std::path::Path;

use super::format::Format;
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
    let _ = writeln!(out, "## Use\n\n```python\n{}```\n", usage(path, format, export));
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

/// Lines of Python that load the weights.
fn usage(path: &Path, format: Format, export: &Export<'_>) -> String {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let loads = match path.extension().is_some_and(|extension| extension == "safetensors") {
        true => format!("from safetensors.torch import load_file\nstate = load_file({name:?})\n"),
        false => format!("import torch\nstate = torch.load({name:?}, weights_only=True)\n"),
    };
    match format {
        Format::Timm if format.is_folder(path) => {
            format!("import timm\nmodel = timm.create_model(\"local-dir:{name}\", pretrained=True)\n")
        }
        Format::Transformers => format!(
            "from transformers import AutoImageProcessor, AutoModel\nprocessor = \
             AutoImageProcessor.from_pretrained({name:?})\nmodel = AutoModel.from_pretrained({name:?})\n"
        ),
        Format::Onnx => format!(
            "import onnxruntime\nsession = onnxruntime.InferenceSession({name:?})\n# pixels: float32, [batch, 3, {0}, {0}], \
             normalized as below\nembedding, patches = session.run(None, {{\"pixels\": pixels}})\n",
            export.preprocessing.transform.size_px
        ),
        Format::Dinov2 | Format::Dinov3 => {
            let whose = if format == Format::Dinov2 { "DINOv2" } else { "DINOv3" };
            format!(
                "{loads}# A network of {whose}'s code with the sizes below.\nmodel.load_state_dict(state)\n"
            )
        }
        _ => format!(
            "{loads}# A network of the library without its classifier, with the sizes below.\nmodel.load_state_dict(state)\n"
        ),
    }
}
