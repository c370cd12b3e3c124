//! Checks of a pair of sets for problems that make scores misleading.

use std::collections::{HashMap, HashSet};

use pipeline::words::{counted, thousands};
use xxhash_rust::xxh3::xxh3_128;

use super::ImageSet;
use crate::EvalError;

/// Maximum number of classes listed by name in a warning.
const NAMED: usize = 5;

/// Statistics of a training set and a test set.
#[derive(Debug, Clone, PartialEq)]
pub struct Check {
    /// Number of test images that are also in train, byte for byte.
    pub n_shared: usize,
    /// Number of test images.
    pub n_test: usize,
    /// Number of images of each class in train.
    pub train: Vec<usize>,
    /// Number of images of each class in test.
    pub test: Vec<usize>,
    /// Names of the classes.
    pub classes: Vec<String>,
    /// Set if some image has several classes.
    pub is_multi_label: bool,
}

impl Check {
    /// Compares two sets, whose classes must be numbered alike. Only images with equal lengths and
    /// short checks are read.
    ///
    /// # Errors
    /// [`EvalError::Data`] if an image cannot be read.
    pub fn new(train: &ImageSet, test: &ImageSet) -> Result<Self, EvalError> {
        Ok(Self {
            n_shared: n_shared(train, test)?,
            n_test: test.len(),
            train: class_counts(train),
            test: class_counts(test),
            classes: test.classes().to_vec(),
            is_multi_label: train.is_multi_label() || test.is_multi_label(),
        })
    }

    /// Compares two sets whose classes do not count, such as sets with masks, by their images
    /// alone.
    ///
    /// # Errors
    /// [`EvalError::Data`] if an image cannot be read.
    pub fn without_classes(train: &ImageSet, test: &ImageSet) -> Result<Self, EvalError> {
        Ok(Self {
            n_shared: n_shared(train, test)?,
            n_test: test.len(),
            train: Vec::new(),
            test: Vec::new(),
            classes: Vec::new(),
            is_multi_label: false,
        })
    }

    /// Returns the accuracy, in percent, of always predicting the most frequent class of test.
    pub fn chance(&self) -> f64 {
        100.0 * self.test.iter().copied().max().unwrap_or(0) as f64 / self.n_test.max(1) as f64
    }

    /// Returns a sentence for each problem found.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.n_shared > 0 {
            warnings.push(format!(
                "{} of the {} test images are among the training images, byte for byte: accuracies will be \
                 inflated",
                thousands(self.n_shared as u64),
                thousands(self.n_test as u64)
            ));
        }
        for (name, counts) in [("training", &self.train), ("test", &self.test)] {
            if !self.is_multi_label && counts.iter().filter(|n| **n > 0).count() == 1 {
                warnings.push(format!("all {name} images are of one class: accuracies are meaningless"));
            }
        }
        let unseen = self.unseen_classes();
        if !unseen.is_empty() {
            warnings
                .push(format!("there are no training images of {unseen}: their test images count as errors"));
        }
        warnings
    }

    /// Returns the names of the classes with test images but without training images; an empty
    /// string if there are none.
    fn unseen_classes(&self) -> String {
        let mut missing = Vec::new();
        for (class, name) in self.classes.iter().enumerate() {
            if self.train[class] == 0 && self.test[class] > 0 {
                missing.push(format!("{name:?}"));
            }
        }
        let named = missing[..missing.len().min(NAMED)].join(", ");
        match missing.len() {
            0 => String::new(),
            1 => format!("the class {named}"),
            n if n > NAMED => format!("the classes {named} and {} more", n - NAMED),
            _ => format!("the classes {named}"),
        }
    }
}

/// Formats the counts, as in `train: 10 classes of 900 to 1100; test: 10 classes of 100; chance
/// 10.0`.
impl std::fmt::Display for Check {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "train: {}; test: {}", describe_counts(&self.train), describe_counts(&self.test))?;
        if self.is_multi_label {
            write!(f, "; several classes an image")
        } else {
            write!(f, "; chance {:.1}", self.chance())
        }
    }
}

/// Counts the images of each class.
fn class_counts(set: &ImageSet) -> Vec<usize> {
    let mut counts = vec![0; set.classes().len()];
    for i in 0..set.len() {
        for label in set.labels(i) {
            counts[label as usize] += 1;
        }
    }
    counts
}

/// Formats the number of classes with images and the range of their numbers of images.
fn describe_counts(counts: &[usize]) -> String {
    let present: Vec<usize> = counts.iter().copied().filter(|n| *n > 0).collect();
    let classes = counted(present.len() as u64, "class");
    let low = present.iter().copied().min().unwrap_or(0);
    let high = present.iter().copied().max().unwrap_or(0);
    let highest = thousands(high as u64);
    if low == high {
        format!("{classes} of {highest}")
    } else {
        format!("{classes} of {} to {highest}", thousands(low as u64))
    }
}

/// Counts the images of `test` that are also in `train`, byte for byte.
fn n_shared(train: &ImageSet, test: &ImageSet) -> Result<usize, EvalError> {
    let mut by_len: HashMap<u64, Vec<(usize, Option<u16>)>> = HashMap::new();
    for i in 0..train.len() {
        if let Some((len, check)) = train.len_and_check(i) {
            by_len.entry(len).or_default().push((i, check));
        }
    }
    let mut hashes: HashMap<usize, Option<u128>> = HashMap::new();
    let mut n = 0;
    for i in 0..test.len() {
        let Some((len, check)) = test.len_and_check(i) else { continue };
        let mut candidates = Vec::new();
        for (j, other) in by_len.get(&len).into_iter().flatten() {
            // If either set was indexed without checks, equal lengths alone make a candidate.
            if check.is_none() || other.is_none() || check == *other {
                candidates.push(*j);
            }
        }
        if candidates.is_empty() {
            continue;
        }
        let Some(image) = test.encoded(i)? else { continue };
        let hash = xxh3_128(image.bytes());
        let mut candidate_hashes = HashSet::new();
        for j in candidates {
            let candidate_hash = match hashes.get(&j) {
                Some(hash) => *hash,
                None => {
                    let hash = train.encoded(j)?.map(|image| xxh3_128(image.bytes()));
                    hashes.insert(j, hash);
                    hash
                }
            };
            candidate_hashes.extend(candidate_hash);
        }
        n += usize::from(candidate_hashes.contains(&hash));
    }
    Ok(n)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(train: &[usize], test: &[usize], n_shared: usize) -> Check {
        let classes = (0..train.len()).map(|class| format!("c{class}")).collect();
        let n_test = test.iter().sum();
        Check { n_shared, n_test, train: train.to_vec(), test: test.to_vec(), classes, is_multi_label: false }
    }

    fn warnings(train: &[usize], test: &[usize], n_shared: usize) -> String {
        check(train, test, n_shared).warnings().join("; ")
    }

    #[test]
    fn problems_are_reported_as_warnings() {
        assert_eq!(warnings(&[5, 5], &[2, 2], 0), "");
        assert!(warnings(&[5, 5], &[2, 2], 3).contains("3 of the 4 test images"));
        assert!(warnings(&[5, 0], &[2, 2], 0).contains("no training images of the class \"c1\""));
        assert!(warnings(&[5, 0], &[2, 0], 0).contains("all test images are of one class"));
        assert!(warnings(&[5, 0, 0, 0, 0, 0, 0], &[1; 7], 0).contains("\"c5\" and 1 more"));
    }

    #[test]
    fn chance_is_the_share_of_the_most_frequent_class() {
        let check = check(&[9, 9], &[3, 1], 0);
        assert_eq!(check.chance(), 75.0);
        assert_eq!(check.to_string(), "train: 2 classes of 9; test: 2 classes of 1 to 3; chance 75.0");
    }
}
