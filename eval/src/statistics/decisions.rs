//! F1 of decisions about every class, for images that may have several classes.
//!
//! ```text
//! F1 = 2 · right / (named + present)     classes named and present, summed over all images
//! ```
//!
//! This is the harmonic mean of precision, right / named, and recall, right / present, over all
//! pairs of an image and a class: scikit-learn's `f1_score` with `average="micro"`.

use super::bootstrap;

/// Decisions about the classes of the images of a test set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Decisions {
    images: Vec<ImageDecisions>,
}

/// Numbers of classes of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ImageDecisions {
    /// Classes that are named and present.
    n_right: u32,
    /// Classes that are named.
    n_named: u32,
    /// Classes that are present.
    n_present: u32,
}

impl Decisions {
    /// Adds an image that has the classes `present`, without duplicates, and is said to have those
    /// in `named`.
    pub(crate) fn add(&mut self, named: &[u32], present: &[u32]) {
        let n_right = named.iter().filter(|class| present.contains(class)).count();
        self.images.push(ImageDecisions {
            n_right: n_right as u32,
            n_named: named.len() as u32,
            n_present: present.len() as u32,
        });
    }

    /// Returns the F1 in percent: 100 if no class is named or present.
    pub fn f1(&self) -> f64 {
        self.f1_of(&vec![1; self.images.len()])
    }

    /// Returns the 95 % bootstrap interval of the F1 over test sets of this size, in percent, by
    /// resampling the images.
    pub fn interval(&self) -> [f64; 2] {
        bootstrap::interval(self.images.len(), |counts| self.f1_of(counts))
    }

    /// Returns the F1 in percent, counting image i `counts[i]` times.
    fn f1_of(&self, counts: &[u32]) -> f64 {
        let mut n_right = 0u64;
        let mut n_both = 0u64;
        for (image, count) in self.images.iter().zip(counts) {
            let count = u64::from(*count);
            n_right += count * u64::from(image.n_right);
            n_both += count * (u64::from(image.n_named) + u64::from(image.n_present));
        }
        if n_both == 0 { 100.0 } else { 100.0 * 2.0 * n_right as f64 / n_both as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two of four named classes are right, of five that are present: precision 1/2, recall 2/5,
    /// and F1 4/9, as scikit-learn's `f1_score` says of these five images and four classes.
    #[test]
    fn named_and_present_classes_are_counted_over_all_images() {
        let mut decisions = Decisions::default();
        let images: [(&[u32], &[u32]); 5] =
            [(&[0, 2], &[0, 1]), (&[], &[3]), (&[3], &[3]), (&[1], &[2]), (&[], &[])];
        for (named, present) in images {
            decisions.add(named, present);
        }
        assert!((decisions.f1() - 400.0 / 9.0).abs() < 1e-12, "{}", decisions.f1());
        let [low, high] = decisions.interval();
        assert!((0.0..400.0 / 9.0).contains(&low), "{low}");
        assert!(high > 400.0 / 9.0 && high <= 100.0, "{high}");
    }

    #[test]
    fn naming_nothing_is_right_where_nothing_is() {
        let mut decisions = Decisions::default();
        decisions.add(&[], &[]);
        assert_eq!((decisions.f1(), decisions.interval()), (100.0, [100.0, 100.0]));
    }
}
