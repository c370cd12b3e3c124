//! Evaluation of trained backbones.
//!
//! [`images`] loads images through one transform, [`features`](mod@features) computes and caches
//! their features, each [`protocol`](mod@protocol) scores features on labels, each [`measure`]
//! without labels, and [`probe`] combines these. [`classify`] scores a network with a head that was
//! trained with it, [`segment`] with a decoder of pixels. [`image_sets`] opens images by the names
//! of their shards, [`embed`] writes files of features, [`scores`] turns scores into [`row`]s of
//! the file of a run.
//!
//! Folders use only those before them in this order: images, features, statistics, protocol,
//! measure.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod bench;
mod classifier;
pub mod embed;
pub(crate) mod error;
pub mod features;
pub mod image_sets;
pub(crate) mod images;
mod masks;
pub(crate) mod measure;
pub(crate) mod parallel;
pub mod probe;
pub(crate) mod protocol;
pub mod row;
pub mod scores;
mod segmenter;
pub(crate) mod statistics;

pub use classifier::{
    CLASSIFIER_METRICS, Classified, ClassifiedImage, F1, MEAN_AVERAGE_PRECISION, TOP_1, class_names, classify,
};
pub use error::EvalError;
pub use features::cache::{FeatureCache, features};
pub use features::columns::{Columns, FeatureKind};
pub use features::extract::{
    Attention, check_image_size, class_attention, extract, extraction_bytes, pixels,
};
pub use features::set::FeatureSet;
pub use features::table::Table;
pub use images::ImageSet;
pub use images::check::Check;
pub use images::source::{ImageFile, Source};
pub use masks::{MaskFlaw, MaskSurvey, PixelClass, masked_images, survey_masks, usable_masked_images};
pub use measure::retrieval::{RANDOM_NETWORK, RETRIEVAL, Retrieval, retrieval};
pub use measure::{Measures, SampleSizes, label_free};
pub use probe::Split;
pub use protocol::knn::neighbors;
pub use protocol::task::{Scored, Sets, Task};
pub use protocol::views::Views;
pub use protocol::{Needs, Protocol};
pub use scores::{MAIN_METRICS, OWN_METRICS};
pub use segmenter::{
    MEAN_IOU, MaskPicture, PIXEL_ACCURACY, Segmented, SegmentedImage, mask_pictures, segment,
};
pub use statistics::Predictions;
pub use statistics::calibration::{Calibration, CalibrationBin};
pub use statistics::decisions::Decisions;
pub use statistics::outcome::Outcome;
pub use statistics::ranked::Ranked;
pub use statistics::segmented::PixelCounts;
