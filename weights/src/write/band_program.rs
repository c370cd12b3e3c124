//! Programs for model cards of networks whose images are not 8-bit RGB.

use std::path::Path;

use augment::Depth;

use super::format::Format;
use super::loading::{
    Loaded, TIMM_CLASSES, TRANSFORMERS_CLASSES, graph_imports, loaded, output_name, parameters,
    preprocessing, print_output, print_with_names, run_graph, transformers_arguments,
};
use crate::backbone::exchange_of;
use crate::export::Export;

/// Returns the program that computes the feature of `image.npy`, or its class, by the file or
/// folder `path`.
pub(super) fn text(path: &Path, name: &str, format: Format, export: &Export<'_>) -> String {
    let network = match format {
        Format::Timm if format.is_folder(path) => Some(Loaded {
            imports: "import timm\n".into(),
            lines: format!("model = timm.create_model(\"local-dir:{name}\", pretrained=True).eval()\n"),
        }),
        Format::Transformers => {
            let class =
                if export.classifier.is_some() { "AutoModelForImageClassification" } else { "AutoModel" };
            Some(Loaded {
                imports: format!("from transformers import {class}\n"),
                lines: format!("model = {class}.from_pretrained(\"{name}\").eval()\n"),
            })
        }
        Format::Onnx => Some(Loaded {
            imports: "import onnxruntime\n".into(),
            lines: format!("session = onnxruntime.InferenceSession(\"{name}\")\n"),
        }),
        _ => loaded(path, name, format, export),
    };
    let Some(Loaded { imports, lines }) = network else { return parameters(path, name, format) };
    let output = output_name(export);
    let result = match format {
        Format::Onnx => run_graph(export, "pixels.numpy()"),
        Format::Transformers => {
            let part = match export.classifier {
                Some(_) => "logits",
                None => exchange_of(export.model).transformers_feature(),
            };
            let arguments = transformers_arguments(export);
            format!(
                "with torch.no_grad():
    output = model(pixel_values=pixels{arguments})
{output} = output.{part}
"
            )
        }
        _ => format!("with torch.no_grad():\n    {output} = model(pixels)\n"),
    };
    let print = match format {
        // The class is printed with the graph's own names.
        Format::Onnx if export.classifier.is_some() || export.decoder.is_some() => String::new(),
        Format::Timm if format.is_folder(path) => print_output(export, TIMM_CLASSES),
        Format::Transformers => print_output(export, TRANSFORMERS_CLASSES),
        _ => print_with_names(export),
    };
    let json = if format == Format::Onnx { graph_imports(export) } else { "" };
    format!("{json}import numpy\nimport torch\n{imports}\n{}{lines}{result}{print}", image(export))
}

/// Returns the statements that make `pixels`, `[1, C, S, S]`, of an array.
fn image(export: &Export<'_>) -> String {
    let format = export.preprocessing.pixels.format();
    let (resize_px, px, mean, std) = preprocessing(export);
    // Stored values are whole numbers, except those of floating point.
    let rounded = match format.depth {
        Depth::Float => String::new(),
        depth => format!(".round().clamp(0, {})", depth.unit()),
    };
    let unit = format.depth.unit();
    let scaled = match export.preprocessing.decoding.bits_used {
        Some(bits) => {
            let largest = u16::MAX >> (16 - bits);
            format!("pixels = pixels * (65535 / {largest})  # {bits} of 16 bits are used\n")
        }
        None => String::new(),
    };
    let size = if export.decoder.is_some() {
        format!("size = [{px}, {px}]\n")
    } else {
        format!(
            "height, width = pixels.shape[2:]
size = [{resize_px} * height // min(height, width), {resize_px} * width // min(height, width)]
"
        )
    };
    format!(
        "# An array [C, H, W]: {format}.
pixels = torch.from_numpy(numpy.load(\"image.npy\").astype(\"float32\"))[None]
{scaled}{size}pixels = torch.nn.functional.interpolate(pixels, size=size, mode=\"bicubic\", antialias=True){rounded}
top, left = [round((side - {px}) / 2) for side in size]
mean, std = [torch.tensor(values)[:, None, None] for values in ({mean}, {std})]
pixels = (pixels[:, :, top:top + {px}, left:left + {px}] / {unit} - mean) / std
"
    )
}
