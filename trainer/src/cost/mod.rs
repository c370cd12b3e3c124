//! Costs of the networks of a run, unit by unit, as stated by the units themselves: parameters,
//! operations, and what their inputs and graphs hold for one image.

mod head_rows;
mod model;
mod parameters;
mod presets;

pub use head_rows::OutputPart;
pub use model::{ModelCost, NetworkCost, UnitCost, model_cost};
pub use presets::{PRESETS, checked_preset, preset};
