//! Python code that loads an exported file in the library that it is for.

use std::path::Path;

use networks::{ClassHead, PixelHead, Pixels};
use serde_json::Value;

use super::format::Format;
use crate::backbone::{PythonNetwork, TimmModel, exchange_of, timm_model};
use crate::export::Export;
use crate::library::Library;
use crate::metadata::{CLASSES, PIXEL_CLASSES};
use crate::preprocessing::Preprocessing;

/// Names of the classes by number, of a timm model in Python.
pub(super) const TIMM_CLASSES: &str = "model.pretrained_cfg[\"label_names\"]";

/// Names of the classes by number, of a transformers model in Python.
pub(super) const TRANSFORMERS_CLASSES: &str = "model.config.id2label";

/// Python code that loads a network as `model`.
pub(super) struct Loaded {
    /// Import statements other than that of torch.
    pub imports: String,
    /// Statements.
    pub lines: String,
}

/// Returns the code that makes the network of a file of parameters and loads them; `None` if the
/// library has no constructor of it.
pub(super) fn loaded(path: &Path, name: &str, format: Format, export: &Export<'_>) -> Option<Loaded> {
    let exchange = exchange_of(export.model);
    let mut renames = String::new();
    let network = match format {
        Format::Safetensors => {
            renames = without_decoder(export);
            match exchange.own_python() {
                Some(network) => {
                    renames += &classifier_renames(export, Library::Torchvision);
                    network
                }
                None => {
                    renames += &exchange.python_renames();
                    renames += &classifier_renames(export, Library::Timm);
                    timm_network(export)?
                }
            }
        }
        Format::Timm => timm_network(export)?,
        Format::Torchvision => exchange.python(Library::Torchvision)?,
        Format::Dinov2 => exchange.python(Library::Dinov2)?,
        _ => exchange.python(Library::Dinov3)?,
    };
    let PythonNetwork { imports, expression, mut changes, classifier } = network;
    match (classifier, &export.classifier) {
        (Some(made), Some(ours)) => changes.push_str(&format!(
            "model.{} = torch.nn.Linear({}, {})\n",
            made.layer,
            export.model.width(),
            ours.head.classes.len()
        )),
        (Some(made), None) => changes.push_str(&format!("model.{} = torch.nn.Identity()\n", made.module)),
        (None, _) => {}
    }
    let (import, mut weights) = load(path, name);
    let mut renamed = String::new();
    if !renames.is_empty() {
        renamed = format!("weights = {weights}\n{renames}");
        weights = "weights".into();
    }
    Some(Loaded {
        imports: format!("{imports}{import}"),
        lines: format!(
            "{renamed}model = {expression}\n{changes}model.load_state_dict({weights})\nmodel.eval()\n"
        ),
    })
}

/// Returns Python statements that give the classifier among `weights`, the parameters by Ocelli's
/// names, the name of `library`; empty without one, or if the names are the same.
fn classifier_renames(export: &Export<'_>, library: Library) -> String {
    match exchange_of(export.model).classifier(library) {
        Some(layer) if export.classifier.is_some() && layer != ClassHead::UNIT => format!(
            "for kind in [\"weight\", \"bias\"]:
    weights[f\"{layer}.{{kind}}\"] = weights.pop(f\"{}.{{kind}}\")
",
            ClassHead::UNIT
        ),
        _ => String::new(),
    }
}

/// Returns Python statements that leave the decoder out of `weights`; empty without one.
fn without_decoder(export: &Export<'_>) -> String {
    if export.decoder.is_none() {
        return String::new();
    }
    format!(
        "# The decoder, which reads the patches, is not part of the library's network.
weights = {{name: weights[name] for name in weights if not name.startswith(\"{}\")}}
",
        PixelHead::PREFIX
    )
}

/// Returns further arguments of a call of the model in transformers, each after a comma.
pub(super) fn transformers_arguments(export: &Export<'_>) -> &'static str {
    let px = export.preprocessing.transform.size_px as usize;
    exchange_of(export.model).transformers_arguments(px)
}

/// Returns the name of what the network computes for an image, in programs.
pub(super) fn output_name(export: &Export<'_>) -> &'static str {
    if export.classifier.is_some() { "scores" } else { "feature" }
}

/// Returns the statements that print the shape of the tensor `feature`, or the class with the
/// largest of `scores`, or, where an image may have several, all classes that are more likely than
/// not. The expression `names` has the name of a class by its number.
pub(super) fn print_output(export: &Export<'_>, names: &str) -> String {
    match &export.classifier {
        Some(classifier) if classifier.head.is_multi_label => {
            print_likely("scores[0].sigmoid().tolist()", names)
        }
        Some(_) => format!("print({names}[int(scores[0].argmax())])\n"),
        None => "print(feature.shape)\n".into(),
    }
}

/// Returns the statements that print the classes whose probability, in the expression
/// `probabilities`, is above 0.5.
fn print_likely(probabilities: &str, names: &str) -> String {
    format!(
        "for number, probability in enumerate({probabilities}):
    if probability > 0.5:
        print({names}[number], f\"{{probability:.3f}}\")
"
    )
}

/// Returns the same with the names of the classes, which parameters alone do not have.
pub(super) fn print_with_names(export: &Export<'_>) -> String {
    match &export.classifier {
        Some(classifier) => {
            let mut names = String::new();
            for class in &classifier.head.classes {
                names.push_str(&format!("    {},\n", python_text(class)));
            }
            format!("classes = [\n{names}]\n{}", print_output(export, "classes"))
        }
        None => print_output(export, ""),
    }
}

/// Returns `text` as Python writes it, without a backtick, which could end the program in a page.
fn python_text(text: &str) -> String {
    // Text in JSON is text in Python.
    Value::from(text).to_string().replace('`', "\\u0060")
}

/// Returns the import and the expression that read the parameters of a file.
fn load(path: &Path, name: &str) -> (&'static str, String) {
    if path.extension().is_some_and(|extension| extension == "safetensors") {
        ("from safetensors.torch import load_file\n", format!("load_file(\"{name}\")"))
    } else {
        ("", format!("torch.load(\"{name}\", weights_only=True)"))
    }
}

/// Returns a program that prints the parameters of a file, for a network of which the library has
/// no constructor.
pub(super) fn parameters(path: &Path, name: &str, format: Format) -> String {
    let (import, load) = load(path, name);
    let library = match format {
        Format::Safetensors => Library::Timm.name(),
        _ => format.name(),
    };
    format!(
        "import torch
{import}
# {library} has no constructor of this network; the parameters have the names of its networks.
for name, tensor in {load}.items():
    print(name, tuple(tensor.shape))
"
    )
}

/// Returns Python code that builds the network of `export` with timm; `None` if timm does not have
/// it.
fn timm_network(export: &Export<'_>) -> Option<PythonNetwork> {
    exchange_of(export.model).arrays(Library::Timm, &export.without_values()).ok()?;
    let TimmModel { architecture, arguments, pool, .. } = timm_model(export).ok()?;
    let n_classes = export.classifier.map_or(0, |classifier| classifier.head.classes.len());
    let mut words = vec![format!("\"{architecture}\""), format!("num_classes={n_classes}")];
    if arguments.get("global_pool").is_none() {
        words.push(format!("global_pool=\"{pool}\""));
    }
    for (name, value) in arguments.as_object().into_iter().flatten() {
        words.push(format!("{name}={}", literal(value)));
    }
    Some(PythonNetwork {
        imports: "import timm\n",
        expression: format!("timm.create_model({})", words.join(", ")),
        changes: String::new(),
        classifier: None,
    })
}

/// Returns `value` as Python writes it.
fn literal(value: &Value) -> String {
    match value {
        Value::Null => "None".into(),
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        value => value.to_string(),
    }
}

/// Returns the size of the short side, the side of the crop, and means and deviations of the
/// channels.
pub(super) fn preprocessing(export: &Export<'_>) -> (u32, u32, String, String) {
    let Preprocessing { transform, pixels: Pixels { normalization: colors, .. }, .. } = &export.preprocessing;
    (transform.resize_px, transform.size_px, python_list(&colors.mean), python_list(&colors.std))
}

fn python_list(values: &[f32]) -> String {
    let numbers: Vec<String> = values.iter().map(f32::to_string).collect();
    format!("[{}]", numbers.join(", "))
}

/// Returns the statements that run the graph `session` on the array that the expression `pixels`
/// is, and print the result.
pub(super) fn run_graph(export: &Export<'_>, pixels: &str) -> String {
    if let Some(classifier) = &export.classifier {
        // The graph returns arrays of numpy.
        let print = if !classifier.head.is_multi_label {
            print_output(export, "classes")
        } else if classifier.returns_probabilities {
            print_likely("scores[0]", "classes")
        } else {
            print_likely("1 / (1 + numpy.exp(-scores[0]))", "classes")
        };
        return format!(
            "(scores,) = session.run(None, {{\"pixels\": {pixels}}})
classes = json.loads(session.get_modelmeta().custom_metadata_map[\"{CLASSES}\"])
{print}"
        );
    }
    if export.decoder.is_some() {
        return format!(
            "(scores,) = session.run(None, {{\"pixels\": {pixels}}})
classes = json.loads(session.get_modelmeta().custom_metadata_map[\"{PIXEL_CLASSES}\"])
mask = scores[0].argmax(0)
print(mask.shape, [classes[number] for number in numpy.unique(mask)])
"
        );
    }
    format!("feature, patches = session.run(None, {{\"pixels\": {pixels}}})\n")
}

/// Returns the import that [`run_graph`] needs, with its newline.
pub(super) fn graph_imports(export: &Export<'_>) -> &'static str {
    if export.classifier.is_some() || export.decoder.is_some() { "import json\n" } else { "" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_in_python_is_on_one_line() {
        assert_eq!(python_text("cat, kitten"), r#""cat, kitten""#);
        assert_eq!(python_text("a \"b\" 'c' \\n"), r#""a \"b\" 'c' \\n""#);
        assert_eq!(python_text("two\r\nlines\u{0}`größe`"), r#""two\r\nlines\u0000\u0060größe\u0060""#);
    }
}
