//! Programs for model cards: from an exported file and an image to a feature or a class, in the
//! library that the file is for.

use std::path::Path;

use super::band_program;
use super::format::Format;
use super::loading::{
    Loaded, TIMM_CLASSES, TRANSFORMERS_CLASSES, graph_imports, loaded, output_name, parameters,
    preprocessing, print_output, print_with_names, run_graph, transformers_arguments,
};
use crate::backbone::{exchange_of, resampling_note};
use crate::export::Export;
use crate::library::Library;

/// Returns the program in Python that computes the feature of `photo.jpg`, or its class, by the
/// file or folder `path`. A comment says where it computes another feature than Ocelli does.
pub(super) fn program(path: &Path, format: Format, export: &Export<'_>) -> String {
    let program = program_in_library(path, format, export);
    let px = export.preprocessing.transform.size_px as usize;
    // The program of this program's own files uses timm.
    let library = if format == Format::Safetensors { Some(Library::Timm) } else { format.library() };
    match library.and_then(|library| resampling_note(export.model, library, px)) {
        Some(note) => format!("# Other features than Ocelli's: {note}\n{program}"),
        None => program,
    }
}

fn program_in_library(path: &Path, format: Format, export: &Export<'_>) -> String {
    let name = quoted_name(path);
    if !export.preprocessing.pixels.format().is_rgb8() {
        return band_program::text(path, &name, format, export);
    }
    match format {
        Format::Timm if format.is_folder(path) => timm_folder(&name, export),
        Format::Transformers => transformers_folder(&name, export),
        Format::Onnx => onnx(&name, export),
        Format::Safetensors | Format::Timm | Format::Torchvision | Format::Dinov2 | Format::Dinov3 => {
            state_dict(path, &name, format, export)
        }
    }
}

/// Returns the command by which this program computes the features of a folder of images by the
/// file `path`.
pub(super) fn embed_command(path: &Path) -> String {
    format!("ocelli embed --checkpoint \"{}\" --images photos --out features.parquet", quoted_name(path))
}

/// Returns the name of the file or folder `path`, to be written between double quotes.
fn quoted_name(path: &Path) -> String {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    name.replace('\\', "\\\\").replace('"', "\\\"")
}

fn timm_folder(name: &str, export: &Export<'_>) -> String {
    let output = output_name(export);
    let print = print_output(export, TIMM_CLASSES);
    format!(
        "import timm
import torch
from PIL import Image

model = timm.create_model(\"local-dir:{name}\", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
image = transform(Image.open(\"photo.jpg\").convert(\"RGB\"))
with torch.no_grad():
    {output} = model(image[None])
{print}"
    )
}

fn transformers_folder(name: &str, export: &Export<'_>) -> String {
    if export.classifier.is_some() {
        return transformers_classifier(name, export);
    }
    let feature = exchange_of(export.model).transformers_feature();
    let arguments = transformers_arguments(export);
    format!(
        "import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel

processor = AutoImageProcessor.from_pretrained(\"{name}\")
model = AutoModel.from_pretrained(\"{name}\").eval()
inputs = processor(Image.open(\"photo.jpg\").convert(\"RGB\"), return_tensors=\"pt\")
with torch.no_grad():
    output = model(**inputs{arguments})
# Not output.pooler_output: a pooler is not part of this network, and transformers would draw one at random.
feature = output.{feature}
print(feature.shape)
"
    )
}

fn transformers_classifier(name: &str, export: &Export<'_>) -> String {
    let print = print_output(export, TRANSFORMERS_CLASSES);
    let arguments = transformers_arguments(export);
    format!(
        "import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

processor = AutoImageProcessor.from_pretrained(\"{name}\")
model = AutoModelForImageClassification.from_pretrained(\"{name}\").eval()
inputs = processor(Image.open(\"photo.jpg\").convert(\"RGB\"), return_tensors=\"pt\")
with torch.no_grad():
    scores = model(**inputs{arguments}).logits
{print}"
    )
}

fn onnx(name: &str, export: &Export<'_>) -> String {
    let (resize_px, px, mean, std) = preprocessing(export);
    let imports = graph_imports(export);
    let run = run_graph(export, "colors.transpose(2, 0, 1)[None]");
    // The features have two shapes.
    let has_features = export.classifier.is_none() && export.decoder.is_none();
    let print = if has_features { "print(feature.shape, patches.shape)\n" } else { "" };
    let resize = if export.decoder.is_some() {
        format!("image = image.resize(({px}, {px}), Image.Resampling.BICUBIC)\n")
    } else {
        format!(
            "scale = {resize_px} / min(image.size)
image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
left, top = (image.width - {px}) // 2, (image.height - {px}) // 2
image = image.crop((left, top, left + {px}, top + {px}))
"
        )
    };
    format!(
        "{imports}import numpy
import onnxruntime
from PIL import Image

image = Image.open(\"photo.jpg\").convert(\"RGB\")
{resize}colors = (numpy.asarray(image, \"float32\") / 255 - numpy.float32({mean})) / numpy.float32({std})
session = onnxruntime.InferenceSession(\"{name}\")
{run}{print}"
    )
}

/// Returns the program for a file of parameters, whose network the library's code makes.
fn state_dict(path: &Path, name: &str, format: Format, export: &Export<'_>) -> String {
    let Some(Loaded { imports, lines }) = loaded(path, name, format, export) else {
        return parameters(path, name, format);
    };
    let (resize_px, px, mean, std) = preprocessing(export);
    let output = output_name(export);
    let print = print_with_names(export);
    let bicubic = "interpolation=transforms.InterpolationMode.BICUBIC";
    let resize = if export.decoder.is_some() {
        format!("transforms.Resize(({px}, {px}), {bicubic})")
    } else {
        format!("transforms.Resize({resize_px}, {bicubic}),\n    transforms.CenterCrop({px})")
    };
    format!(
        "import torch
{imports}from PIL import Image
from torchvision import transforms

{lines}transform = transforms.Compose([
    {resize},
    transforms.ToTensor(),
    transforms.Normalize({mean}, {std}),
])
image = transform(Image.open(\"photo.jpg\").convert(\"RGB\"))
with torch.no_grad():
    {output} = model(image[None])
{print}"
    )
}
