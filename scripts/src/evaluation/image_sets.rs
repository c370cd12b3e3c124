//! Sets of labeled images, with the names of their classes.

use std::sync::Arc;

use augment::{DecodeRules, Transform};
use eval::ImageSet;
use pipeline::Storage;
use prep::bits::{BitsUsed, N_INSPECTED};
use prep::classes::read_class_names;
use prep::open::{is_folder_of_images, open_dataset};

use super::scores::set_name;

/// Names the classes of `images`, which are those of the shards `specs`, by the list beside the
/// first shard.
pub(crate) fn with_names(images: ImageSet, specs: &[String], storage: &Storage) -> anyhow::Result<ImageSet> {
    // The classes of a folder of images are names.
    match specs.iter().find(|spec| !is_folder_of_images(spec).unwrap_or(false)) {
        Some(first) => Ok(images.named(&read_class_names(&storage.sources(std::slice::from_ref(first))?))),
        None => Ok(images),
    }
}

/// Opens the images of the shards `specs`, with the names of their classes.
pub(crate) fn open_images(
    specs: &[String],
    transform: Transform,
    rules: DecodeRules,
    storage: &Storage,
) -> anyhow::Result<ImageSet> {
    let source = eval::Source::Shards(Arc::new(open_dataset(specs, storage)?));
    with_names(ImageSet::open(source, transform, rules, set_name(specs))?, specs, storage)
}

/// Reports if some images of `images`, which are inspected, use a part of 16 bits.
pub(crate) fn report_image_set_bits(images: &ImageSet) -> anyhow::Result<()> {
    let (n_images, largest) = images.largest_of_16_bits(N_INSPECTED as usize)?;
    let bits = BitsUsed { n_images, largest };
    let remedy = "scale them with --bits-used BITS for external weights, or with data.bits_used in the \
        recipe of a run";
    bits.report(images.rules(), remedy);
    Ok(())
}
