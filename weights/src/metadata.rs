//! Keys of the metadata that a file holds about its weights.

/// Key of the backbone's configuration, in a file with Ocelli's parameter names.
pub(crate) const MODEL: &str = "ocelli.model";

/// Key of the preprocessing.
pub(crate) const PREPROCESSING: &str = "ocelli.preprocessing";

/// Key of the color normalization, the only part of the preprocessing in older files.
pub(crate) const NORMALIZATION: &str = "ocelli.normalization";

/// Key of the network's name within its run.
pub(crate) const NETWORK: &str = "ocelli.network";

/// Key of the pooling of tokens or cells into one vector.
pub(crate) const POOLING: &str = "ocelli.pooling";

/// Key of the names of the classes, of a classifier.
pub(crate) const CLASSES: &str = "ocelli.classes";

/// Key of the function that makes probabilities of a classifier's scores: [`SIGMOID`], or absent
/// for the softmax.
pub(crate) const PROBABILITIES: &str = "ocelli.probabilities";

/// Function of each score by itself, where an image may have several classes.
pub(crate) const SIGMOID: &str = "sigmoid";

/// Key of the names of the classes of pixels, of a decoder.
pub(crate) const PIXEL_CLASSES: &str = "ocelli.pixel_classes";

/// Key of the layers of a decoder.
pub(crate) const DECODER: &str = "ocelli.decoder";

/// Key of the weights that the network began with, which other programs ignore.
pub(crate) const ORIGINS: &str = "ocelli.origins";

/// Key of the license, which other programs write, too.
pub(crate) const LICENSE: &str = "license";

/// Name of a network whose file does not name it.
pub(crate) const UNNAMED: &str = "weights";
