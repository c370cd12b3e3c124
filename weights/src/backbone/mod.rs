//! Exchange of backbones with other libraries.
//!
//! Each kind of backbone is one file or folder here, with an [`Exchange`] for its configuration,
//! and one line in `registry`: its names in every library, how it is recognized among the tensors
//! of a file, its configuration for timm and transformers, and its ONNX graph.

mod convnext;
mod convolutional;
mod decoder;
mod layers;
mod registry;
mod regnet;
mod renamed;
mod resnet;
#[cfg(feature = "testing")]
mod toy;
mod vit;

use networks::{ClassHead, ModelConfig, NamedTensor, RGB_CHANNELS};
use serde_json::{Map, Value};

use crate::export::Export;
use crate::file::Arrays;
use crate::library::Library;
use crate::onnx;
use crate::pretrained::Hints;
use crate::source::{BackboneTensors, Source};

pub(crate) use decoder::add_decoder;
pub(crate) use registry::{exchange_of, readers};
pub(crate) use renamed::ocelli_arrays;

/// Exchange of one kind of backbone with other libraries. The default methods return errors, or
/// change nothing.
pub(crate) trait Exchange {
    /// Returns the name of the kind in messages.
    fn kind() -> &'static str
    where
        Self: Sized;

    /// Returns the names of the first layer's weight in all libraries, by which the kind is found
    /// among the tensors of a file.
    fn anchors() -> &'static [&'static str]
    where
        Self: Sized;

    /// Returns `true` if `tensors` belong to this kind rather than to another one with the same
    /// anchor.
    fn matches(tensors: &BackboneTensors) -> bool
    where
        Self: Sized,
    {
        let _ = tensors;
        true
    }

    /// Determines the configuration from the shapes of `tensors` and from the statements of
    /// `source` and `hints`; adds a sentence to `assumed` for each assumption.
    ///
    /// # Errors
    /// A message that says which part of the network cannot be built here.
    fn recognize(
        tensors: &mut BackboneTensors,
        source: &Source,
        hints: &Hints,
        assumed: &mut Vec<String>,
    ) -> Result<Recognized, String>
    where
        Self: Sized;

    /// Returns the parameters of `export` under the names of `library`.
    ///
    /// # Errors
    /// A message, if `library` has no such network.
    fn arrays(&self, library: Library, export: &Export<'_>) -> Result<Arrays, String> {
        let _ = export;
        Err(no_such_network(library))
    }

    /// Returns timm's constructor of the network.
    ///
    /// # Errors
    /// A message, if timm has no such network.
    fn timm(&self, export: &Export<'_>) -> Result<TimmModel, String> {
        let _ = export;
        Err(no_such_network(Library::Timm))
    }

    /// Returns a note if `library` computes other features of images of `size_px` than Ocelli does,
    /// because it resamples positions in another way, or cannot compute any, because it does not
    /// resample them.
    fn resampling_note(&self, library: Library, size_px: usize) -> Option<String> {
        let _ = (library, size_px);
        None
    }

    /// Returns the contents of `config.json` for transformers.
    ///
    /// # Errors
    /// A message, if transformers has no such network.
    fn transformers(&self) -> Result<Value, String> {
        Err(no_such_network(Library::Transformers))
    }

    /// Returns the name of the classifier in the networks of `library`, timm or torchvision; `None`
    /// if they have none.
    fn classifier(&self, library: Library) -> Option<&'static str> {
        let _ = library;
        None
    }

    /// Returns the model with a classifier in transformers; `None` if transformers has none for
    /// the network of [`Exchange::transformers`].
    fn transformers_classifier(&self) -> Option<TransformersClassifier> {
        None
    }

    /// Returns the part of a model's output in transformers that is an image's feature, as Python
    /// code.
    fn transformers_feature(&self) -> &'static str {
        "last_hidden_state.mean((2, 3))"
    }

    /// Returns further arguments of a model in transformers for images of `px` pixels, as Python
    /// code, each after a comma.
    fn transformers_arguments(&self, px: usize) -> &'static str {
        let _ = px;
        ""
    }

    /// Returns Python code that builds the network with the code of `library`; `None` if that is
    /// not possible, or if `library` is timm, whose constructor [`Exchange::timm`] returns.
    fn python(&self, library: Library) -> Option<PythonNetwork> {
        let _ = library;
        None
    }

    /// Returns Python code that builds a network whose parameters have Ocelli's names; `None` if
    /// that is not possible, or if timm's constructor builds it, with [`Exchange::python_renames`].
    fn own_python(&self) -> Option<PythonNetwork> {
        None
    }

    /// Returns Python statements that give `weights`, the parameters by Ocelli's names, the names
    /// of timm, each with its newline; empty if these are the same.
    fn python_renames(&self) -> String {
        String::new()
    }

    /// Adds the network's nodes for images of `px` pixels to `graph`.
    ///
    /// # Errors
    /// A message, if a parameter is missing or ONNX export is not implemented.
    fn build_graph(&self, graph: &mut onnx::Graph<'_>, px: usize) -> Result<GraphOutputs, String> {
        let _ = (graph, px);
        Err("ONNX export is not implemented for it".into())
    }

    /// Restores the parameters that the network's graph merges, in `arrays`, the constants of that
    /// graph; returns the configuration for the size of images that the graph takes, if it takes
    /// only one size.
    ///
    /// # Errors
    /// A message, if a constant is missing or has another shape.
    fn restore_merged(&self, arrays: &mut Arrays) -> Result<Option<ModelConfig>, String> {
        let _ = arrays;
        Ok(None)
    }

    /// Adapts `tensors` to images of `px` pixels, so that the network computes the same features
    /// for them as before; returns its new configuration. `None` if the network takes images of any
    /// size without a change.
    fn resize(&self, tensors: &mut [NamedTensor], px: usize) -> Option<ModelConfig> {
        let _ = (tensors, px);
        None
    }

    /// Removes the keys of its configuration that do not change the features which given weights
    /// compute, and replaces equivalent values by one of them.
    fn canonicalize_keys(&self, keys: &mut Map<String, Value>) {
        let _ = keys;
    }

    /// Describes the pooling of an image's features to one vector.
    fn pooling(&self) -> &'static str {
        "mean over the last feature map"
    }
}

/// Function from Ocelli's name of a parameter to its names in a library. Tensors of several names
/// are concatenated along their first dimension.
type Names = Box<dyn Fn(&str) -> Vec<String>>;

/// Configuration of a recognized network, and the names of its parameters.
pub(crate) struct Recognized {
    /// Configuration of the network.
    pub model: ModelConfig,
    /// Library whose code made the file.
    pub library: Library,
    /// Names of the parameters in the file.
    pub names: Names,
    /// Side of the images on which the network is evaluated, unless the file states another.
    pub size_px: usize,
    /// Name of the activation of such networks in configurations.
    pub activation: &'static str,
}

/// A call of `timm.create_model`.
pub(crate) struct TimmModel {
    /// Name of the architecture.
    pub architecture: &'static str,
    /// Arguments that differ from the architecture's defaults.
    pub arguments: Value,
    /// Name of the first convolution, whose kernels timm may convert from three channels to another
    /// number.
    pub first_conv: Option<&'static str>,
    /// Pooling: `token` or `avg`.
    pub pool: &'static str,
}

/// A model with a classifier in transformers.
pub(crate) struct TransformersClassifier {
    /// Class of the model.
    pub architecture: &'static str,
    /// Name of the backbone in it.
    pub backbone: &'static str,
    /// Name of its last layer.
    pub layer: &'static str,
    /// Whether the last layer reads the mean of the patches after the feature.
    pub reads_patches: bool,
}

/// Python code that builds a network.
pub(crate) struct PythonNetwork {
    /// Import statements, each with its newline.
    pub imports: &'static str,
    /// Expression whose value is the network.
    pub expression: String,
    /// Statements that change `model`, the network, each with its newline.
    pub changes: String,
    /// Classifier that the expression makes, to be removed or replaced.
    pub classifier: Option<PythonClassifier>,
}

/// The classifier of a network that Python code has built.
pub(crate) struct PythonClassifier {
    /// Path in the model of the module that a network without a classifier lacks.
    pub module: &'static str,
    /// Path in the model of the linear layer.
    pub layer: &'static str,
}

impl PythonClassifier {
    /// The classifier of torchvision's ResNets and RegNets.
    const FC: Self = Self { module: "fc", layer: "fc" };
}

/// Outputs of a graph.
pub(crate) struct GraphOutputs {
    /// One vector per image, `[B, D]`.
    pub embedding: onnx::Value,
    /// Features of each cell, `[B, N, D]`.
    pub patches: onnx::Value,
    /// Whether the graph takes images of one size only.
    pub has_fixed_size: bool,
}

/// Reader of one kind of backbone.
pub(crate) struct Reader {
    pub kind: &'static str,
    pub anchors: &'static [&'static str],
    pub matches: fn(&BackboneTensors) -> bool,
    pub recognize: fn(&mut BackboneTensors, &Source, &Hints, &mut Vec<String>) -> Result<Recognized, String>,
}

impl Reader {
    fn new<E: Exchange>() -> Self {
        Self { kind: E::kind(), anchors: E::anchors(), matches: E::matches, recognize: E::recognize }
    }
}

/// Returns a note if `library` computes other features of images of `size_px` by `model` than
/// Ocelli does, or cannot compute any.
pub fn resampling_note(model: &ModelConfig, library: Library, size_px: usize) -> Option<String> {
    exchange_of(model).resampling_note(library, size_px)
}

/// Returns timm's constructor of the network in `export`, with the channels of its images.
///
/// # Errors
/// A message, if timm has no such network.
pub(crate) fn timm_model(export: &Export<'_>) -> Result<TimmModel, String> {
    let mut model = exchange_of(export.model).timm(export)?;
    let channels = export.model.n_channels();
    if channels != RGB_CHANNELS {
        if let Value::Object(arguments) = &mut model.arguments {
            arguments.insert("in_chans".into(), channels.into());
        }
        // timm would repeat the kernels of the first convolution, as if they were for three
        // channels.
        model.first_conv = None;
    }
    Ok(model)
}

/// Adds a classifier to `graph`, whose parameters have the names of [`ClassHead::tensors`]; returns
/// the scores, `[B, C]`, of the features `embedding`, `[B, D]`.
///
/// # Errors
/// A message, if a parameter is missing.
pub(crate) fn add_classifier(
    graph: &mut onnx::Graph<'_>,
    embedding: &onnx::Value,
) -> Result<onnx::Value, String> {
    layers::linear(graph, ClassHead::UNIT, embedding)
}

/// Returns the constructor argument for images with this number of channels, followed by a comma;
/// empty for three, the default of all libraries.
fn in_chans(channels: usize) -> String {
    if channels == RGB_CHANNELS { String::new() } else { format!("in_chans={channels}, ") }
}

fn no_such_network(library: Library) -> String {
    format!("{} has no such network", library.name())
}
