//! Labels of the images of a data set, by sample.

use augment::SoftLabel;
use xxhash_rust::xxh3::Xxh3;

use super::data::SAMPLE_BITS;

/// Length that an image of no class has in the fingerprint, other than one whose classes are not
/// known, whose length is 0.
const NO_CLASS: u64 = u64::MAX;

/// Classes of the images of a data set: none, one or several for each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Labels {
    /// Number of classes of all images before each image, and of all.
    starts: Vec<usize>,
    /// Classes of all images, one after another.
    classes: Vec<u32>,
    /// Whether the classes of each image are known.
    is_labeled: Vec<bool>,
    /// Hash of the labels of the whole data set.
    fingerprint: u64,
}

impl Labels {
    /// Creates the labels of images whose classes are `by_sample`, in the order of the data set:
    /// none for an image of no class, and `None` for one whose classes are not known.
    pub fn new(by_sample: impl IntoIterator<Item = Option<Vec<u32>>>) -> Self {
        let mut starts = vec![0];
        let mut classes = Vec::new();
        let mut is_labeled = Vec::new();
        for sample_classes in by_sample {
            is_labeled.push(sample_classes.is_some());
            classes.extend(sample_classes.unwrap_or_default());
            starts.push(classes.len());
        }
        let mut labels = Self { starts, classes, is_labeled, fingerprint: 0 };
        labels.fingerprint = labels.hash();
        labels
    }

    /// Returns these labels without those of `images`, which are then as images whose classes are
    /// not known. The fingerprint remains that of the whole data set.
    pub fn without(&self, images: &[u64]) -> Self {
        let mut by_sample = Vec::with_capacity(self.len());
        for index in 0..self.len() {
            by_sample.push(self.is_labeled(index).then(|| self.classes(index).to_vec()));
        }
        for image in images {
            by_sample[*image as usize] = None;
        }
        Self { fingerprint: self.fingerprint, ..Self::new(by_sample) }
    }

    /// Returns the number of images, with a label or without.
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

    /// Returns whether the classes of the image `index` of the data set are known: it may have
    /// none.
    ///
    /// # Panics
    /// If there is no such image.
    pub fn is_labeled(&self, index: usize) -> bool {
        self.is_labeled[index]
    }

    /// Returns the number of images whose classes are known.
    pub fn n_labeled(&self) -> u64 {
        self.is_labeled.iter().filter(|is_labeled| **is_labeled).count() as u64
    }

    /// Returns a hash of the classes of all images of the data set, by number.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Hashes the classes of all images.
    fn hash(&self) -> u64 {
        let mut hash = Xxh3::new();
        for index in 0..self.len() {
            let classes = self.classes(index);
            let is_of_no_class = classes.is_empty() && self.is_labeled(index);
            let length = if is_of_no_class { NO_CLASS } else { classes.len() as u64 };
            hash.update(&length.to_le_bytes());
            for class in classes {
                hash.update(&class.to_le_bytes());
            }
        }
        hash.digest()
    }

    /// Returns the labels of the samples at `sample_ids`, addresses as in
    /// [`Batch::sample_ids`](augment::Batch::sample_ids): each of their classes has a share of 1.
    ///
    /// # Panics
    /// If there is no such sample.
    pub(super) fn for_samples(&self, sample_ids: &[u64]) -> Vec<SoftLabel> {
        let mut labels = Vec::with_capacity(sample_ids.len());
        for sample_id in sample_ids {
            // The bits above count how often the image has been shown before in its epoch.
            let index = sample_id & ((1 << SAMPLE_BITS) - 1);
            let classes = self.classes(index as usize);
            labels.push(classes.iter().map(|class| (*class, 1.0)).collect());
        }
        labels
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the labels of images of these classes; images without any have no label.
    fn labels(by_sample: &[&[u32]]) -> Labels {
        Labels::new(by_sample.iter().map(|classes| (!classes.is_empty()).then(|| classes.to_vec())))
    }

    /// A repeat of an image within an epoch has its label.
    #[test]
    fn samples_have_the_labels_of_their_images() {
        let labels = labels(&[&[2], &[], &[0, 3]]);
        assert_eq!((labels.len(), labels.n_labeled(), labels.largest_class()), (3, 2, Some(3)));
        let expected: Vec<SoftLabel> = vec![vec![(0, 1.0), (3, 1.0)], vec![(2, 1.0)], vec![], vec![(2, 1.0)]];
        assert_eq!(labels.for_samples(&[2, 0, 1, 3 << SAMPLE_BITS]), expected);
    }

    /// Images without their labels are still those of the same data set.
    #[test]
    fn labels_without_those_of_some_images_have_the_same_fingerprint() {
        let all = Labels::new([Some(vec![1]), Some(vec![]), None, Some(vec![0])]);
        let fewer = all.without(&[1, 3]);
        let known: Vec<bool> = (0..4).map(|index| fewer.is_labeled(index)).collect();
        assert_eq!(known, [true, false, false, false]);
        assert_eq!((fewer.classes(0), fewer.classes(3)), ([1].as_slice(), [].as_slice()));
        assert_eq!(fewer.fingerprint(), all.fingerprint());
    }

    /// An image of no class is one with a label.
    #[test]
    fn images_of_no_class_are_labeled() {
        let labels = Labels::new([Some(vec![1]), Some(vec![]), None]);
        assert_eq!((labels.len(), labels.n_labeled()), (3, 2));
        let known: Vec<bool> = (0..3).map(|index| labels.is_labeled(index)).collect();
        assert_eq!(known, [true, true, false]);
        assert!(labels.for_samples(&[1])[0].is_empty());
    }

    /// Plans of earlier releases have this fingerprint.
    #[test]
    fn the_fingerprint_of_single_classes_is_that_of_earlier_releases() {
        let all: [&[u32]; 3] = [&[3], &[], &[0]];
        let mut hash = Xxh3::new();
        for classes in all {
            hash.update(&(classes.len() as u64).to_le_bytes());
            for class in classes {
                hash.update(&class.to_le_bytes());
            }
        }
        assert_eq!(labels(&all).fingerprint(), hash.digest());
    }

    #[test]
    fn fingerprints_differ_for_other_labels() {
        let all = [
            labels(&[&[0], &[1]]),
            labels(&[&[1], &[0]]),
            labels(&[&[0, 1], &[]]),
            Labels::new([Some(vec![0, 1]), Some(vec![])]),
            labels(&[&[0]]),
        ];
        let mut fingerprints: Vec<u64> = all.iter().map(Labels::fingerprint).collect();
        fingerprints.sort_unstable();
        fingerprints.dedup();
        assert_eq!(fingerprints.len(), all.len());
        assert_eq!(labels(&[&[0], &[1]]).fingerprint(), all[0].fingerprint());
    }
}
