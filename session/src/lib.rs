//! A run from its recipe to its weights, in the stages of the program `ocelli pretrain`, and the
//! scores of its networks.
//!
//! ```
//! use pipeline::{Storage, StorageConfig};
//! use session::Session;
//! use trainer::Recipe;
//! use trainer::run::{Outcome, Quiet};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let photos = folder.path().join("photos");
//! # let runs = folder.path().join("runs");
//! # std::fs::create_dir(&photos)?;
//! # for number in 0..8u8 {
//! #     let draw = |x, y| image::Rgb([x as u8, y as u8, number * 30]);
//! #     image::RgbImage::from_fn(40, 40, draw).save(photos.join(format!("{number}.png")))?;
//! # }
//! let text = include_str!("../../scripts/recipes/lejepa_cifar.toml");
//! let sets = ["optim.batch_size=4", "optim.length={steps=2}"].map(String::from);
//! let mut recipe = Recipe::parse(text, "lejepa_cifar", &sets)?;
//! recipe.data.shards = vec![photos.display().to_string()];
//! let storage = Storage::new(StorageConfig::new(folder.path().join("cache")));
//! let session = Session::new(recipe, runs.join("mine"))?;
//! let fitted = session.open(&storage)?.resolve()?.fit()?;
//! let outcome = fitted.train(&mut [], &mut Quiet)?;
//! assert_eq!(outcome, Outcome::Finished);
//! # assert!(runs.join("mine/checkpoints/latest").exists());
//! # Ok(())
//! # }
//! ```
//!
//! Each stage consumes the one before, so that the order of
//!
//! | stage | contents |
//! |---|---|
//! | [`Session`] | recipe, work directory, ranks, device, initial state |
//! | [`Connected`] | ranks connected; initial weights, frozen networks and images opened |
//! | [`Resolved`] | a plan: every length in steps, every default filled in |
//! | [`Fitted`] | the plan divided over ranks, within the memory of each, and its kernels; a length in minutes becomes steps by [`Fitted::timed`] and [`Fitted::rehearsed`] |
//! | [`Outcome`](trainer::run::Outcome) | weights in the work directory |
//!
//! is the order of the types. All ranks of a launch execute each stage together: a stage fails on
//! all of them if it fails on one.
//!
//! [`advise`] chooses a recipe for a number of hours.
//!
//! [`EvaluatedNetwork`] opens the network of a run, or of a weights file, to be scored by `eval`; a
//! [`ScoringProbe`] scores within a run, and [`Evaluation::watch`] scores the checkpoints of a run
//! that another process trains. [`Classifier`] opens the network of a run that has learned from
//! labels, with its head, a [`Segmenter`] one that has learned from masks, and a
//! [`ValidationProbe`] scores either within the run; [`InitialNetwork`] is the network that a run
//! began with.
//!
//! Notes and warnings are events of `tracing`.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod advice;
mod classifier;
pub mod connect;
mod data;
pub mod doctor;
mod error;
mod evaluated_network;
pub mod fabric;
mod frozen;
mod head;
mod initial;
mod labels;
mod ledger;
pub mod machine;
mod masks;
mod network;
mod pixels;
mod probe;
mod provenance;
mod rehearsal;
mod resident;
mod retrieval;
mod segmenter;
mod stages;
mod stored;
mod validation;
mod validation_probe;
mod watch;

pub use advice::{Advice, Wish, advise, few_images_warning};
pub use classifier::Classifier;
pub use data::{open_local, open_sampled};
pub use error::SessionError;
pub use evaluated_network::{EvaluatedNetwork, NetworkSettings, check_pixel_values};
pub use frozen::open as open_frozen;
pub use head::trained_head;
pub use initial::{
    Initial, InitialNetwork, check_weights as check_initial_weights, model as initial_model,
    preprocessing as initial_preprocessing,
};
pub use labels::classified_images;
pub use masks::{held_out_segmented_images, segmented_images};
pub use network::{Backbone, model_of};
pub use probe::ScoringProbe;
pub use provenance::{Provenance, find_workdir};
pub use resident::{Resident, resident};
pub use retrieval::RetrievalProbe;
pub use segmenter::Segmenter;
pub use stages::{Connected, Fitted, Resolved, Session, check_types, plan_alone, plan_on_ranks};
pub use stored::{ExportSettings, check_export};
pub use validation_probe::{ValidationProbe, validation_interval};
pub use watch::{Evaluation, WatchEvent, Watched};
