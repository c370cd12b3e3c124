//! Labels of the images of a data set, by sample.

use augment::SoftLabel;
use xxhash_rust::xxh3::Xxh3;

use super::data::SAMPLE_BITS;

/// Classes of the images of a data set: none, one or several for each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Labels {
    /// Number of classes of all images before each image, and of all.
    starts: Vec<usize>,
    /// Classes of all images, one after another.
    classes: Vec<u32>,
}

impl Labels {
    /// Creates the labels of images whose classes are `by_sample`, in the order of the data set.
    pub fn new(by_sample: impl Iterator<Item = Vec<u32>>) -> Self {
        let mut starts = vec![0];
        let mut classes = Vec::new();
        for sample_classes in by_sample {
            classes.extend(sample_classes);
            starts.push(classes.len());
        }
        Self { starts, classes }
    }

    /// Returns the number of images, with a class or without.
    pub fn len(&self) -> usize {
        self.starts.len() - 1
    }

    /// Returns whether there are no images.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the classes of the image `index` of the data set.
    ///
    /// # Panics
    /// If there is no such image.
    pub fn classes(&self, index: usize) -> &[u32] {
        &self.classes[self.starts[index]..self.starts[index + 1]]
    }

    /// Returns the largest class of all images; `None` if no image has one.
    pub(super) fn largest_class(&self) -> Option<u32> {
        self.classes.iter().copied().max()
    }

    /// Returns the number of images that have a class.
    pub fn n_labeled(&self) -> u64 {
        (0..self.len()).filter(|index| !self.classes(*index).is_empty()).count() as u64
    }

    /// Returns a hash of the classes of all images, by number.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Xxh3::new();
        for index in 0..self.len() {
            let classes = self.classes(index);
            hash.update(&(classes.len() as u64).to_le_bytes());
            for class in classes {
                hash.update(&class.to_le_bytes());
            }
        }
        hash.digest()
    }

    /// Returns the labels of the samples at `sample_ids`, addresses as in
    /// [`Batch::sample_ids`](augment::Batch::sample_ids), with equal shares of their classes.
    ///
    /// # Panics
    /// If there is no such sample.
    pub(super) fn for_samples(&self, sample_ids: &[u64]) -> Vec<SoftLabel> {
        let mut labels = Vec::with_capacity(sample_ids.len());
        for sample_id in sample_ids {
            // The bits above count how often the image has been shown before in its epoch.
            let index = sample_id & ((1 << SAMPLE_BITS) - 1);
            let classes = self.classes(index as usize);
            let share = 1.0 / classes.len().max(1) as f32;
            labels.push(classes.iter().map(|class| (*class, share)).collect());
        }
        labels
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(by_sample: &[&[u32]]) -> Labels {
        Labels::new(by_sample.iter().map(|classes| classes.to_vec()))
    }

    /// A repeat of an image within an epoch has its label.
    #[test]
    fn samples_have_the_labels_of_their_images() {
        let labels = labels(&[&[2], &[], &[0, 3]]);
        assert_eq!((labels.len(), labels.n_labeled(), labels.largest_class()), (3, 2, Some(3)));
        let expected: Vec<SoftLabel> = vec![vec![(0, 0.5), (3, 0.5)], vec![(2, 1.0)], vec![], vec![(2, 1.0)]];
        assert_eq!(labels.for_samples(&[2, 0, 1, 3 << SAMPLE_BITS]), expected);
    }

    #[test]
    fn fingerprints_differ_for_other_labels() {
        let all = [labels(&[&[0], &[1]]), labels(&[&[1], &[0]]), labels(&[&[0, 1], &[]]), labels(&[&[0]])];
        let mut fingerprints: Vec<u64> = all.iter().map(Labels::fingerprint).collect();
        fingerprints.sort_unstable();
        fingerprints.dedup();
        assert_eq!(fingerprints.len(), all.len());
        assert_eq!(labels(&[&[0], &[1]]).fingerprint(), all[0].fingerprint());
    }
}
