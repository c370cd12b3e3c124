//! Keys of a recipe, from the types of its sections and their documentation: the reference of the
//! keys, and the check of a recipe against them.

mod form;
mod keys;
mod mistakes;

pub(super) use form::Form;
pub use keys::{Key, distinct_paths};
pub(super) use keys::{keys, keys_named};
pub(super) use mistakes::mistakes;
