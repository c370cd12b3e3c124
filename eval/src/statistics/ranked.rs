//! Average precision of class scores, for images that may have several classes.
//!
//! ```text
//! AP_c  = Σ_t (R_t - R_{t-1}) · P_t     over the distinct scores t of class c, in descending order
//! mAP   = mean of AP_c over the classes with at least one image
//! ```
//!
//! P_t and R_t are precision and recall of "class c has a score of at least t", as in
//! scikit-learn's `average_precision_score`: images of equal scores share one threshold.

use rayon::prelude::*;

use super::bootstrap;

/// Class scores of the images of a test set.
#[derive(Debug, Clone, PartialEq)]
pub struct Ranked {
    /// For each class, the images by descending score: index of the image, its score, and whether
    /// it has the class.
    classes: Vec<Vec<(u32, f32, bool)>>,
    n_images: usize,
}

impl Ranked {
    /// Returns the ranking by `scores`, `[n, classes]`, given the classes of each image.
    pub(crate) fn new(scores: &[f32], n_classes: usize, truths: &[Vec<u32>]) -> Self {
        Self {
            classes: (0..n_classes)
                .into_par_iter()
                .map(|class: usize| {
                    let mut images: Vec<_> = (0..truths.len())
                        .map(|i: usize| {
                            (i as u32, scores[i * n_classes + class], truths[i].contains(&(class as u32)))
                        })
                        .collect();
                    images.sort_by(|a, b| b.1.total_cmp(&a.1));
                    images
                })
                .collect(),
            n_images: truths.len(),
        }
    }

    /// Returns the number of classes.
    pub fn n_classes(&self) -> usize {
        self.classes.len()
    }

    /// Returns the mean of the average precisions, in percent.
    pub fn mean_average_precision(&self) -> f64 {
        self.mean(&vec![1; self.n_images])
    }

    /// Returns the 95 % bootstrap interval of the mean, in percent, by resampling the images.
    pub fn interval(&self) -> [f64; 2] {
        bootstrap::interval(self.n_images, |counts| self.mean(counts))
    }

    /// Returns the average precision of each class in percent; `None` for a class without images.
    pub fn by_class(&self) -> Vec<Option<f64>> {
        let once = vec![1; self.n_images];
        self.classes.iter().map(|images| average_precision(images, &once)).collect()
    }

    fn mean(&self, counts: &[u32]) -> f64 {
        let mut sum = 0.0;
        let mut n = 0u32;
        for images in &self.classes {
            if let Some(precision) = average_precision(images, counts) {
                sum += precision;
                n += 1;
            }
        }
        sum / f64::from(n.max(1))
    }
}

/// Returns the average precision in percent, counting image i `counts[i]` times; `None` if no
/// counted image has the class.
fn average_precision(images: &[(u32, f32, bool)], counts: &[u32]) -> Option<f64> {
    let mut n_ranked = 0u64;
    let mut n_correct = 0u64;
    let mut n_correct_before = 0u64;
    let mut sum = 0.0;
    for (position, (image, score, has_class)) in images.iter().enumerate() {
        let count = u64::from(counts[*image as usize]);
        n_ranked += count;
        if *has_class {
            n_correct += count;
        }
        let is_last_of_score = images.get(position + 1).is_none_or(|next| next.1 != *score);
        if is_last_of_score && n_ranked > 0 {
            sum += (n_correct - n_correct_before) as f64 * n_correct as f64 / n_ranked as f64;
            n_correct_before = n_correct;
        }
    }
    if n_correct > 0 { Some(100.0 * sum / n_correct as f64) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Result of scikit-learn's `average_precision_score`.
    const SKLEARN: f64 = 75.555_555_555_555_56;

    #[test]
    fn average_precision_equals_scikit_learn() {
        let scores = [0.1, 0.4, 0.35, 0.8, 0.35, 0.4];
        let truths: Vec<Vec<u32>> =
            [false, false, true, true, false, true].map(|has| if has { vec![0] } else { vec![] }).into();
        let ranked = Ranked::new(&scores, 1, &truths);
        assert!(
            (ranked.mean_average_precision() - SKLEARN).abs() < 1e-9,
            "{}",
            ranked.mean_average_precision()
        );
        let [low, high] = ranked.interval();
        assert!(low < SKLEARN && SKLEARN < high, "{low} {high}");
    }

    #[test]
    fn classes_without_images_do_not_count() {
        let ranked = Ranked::new(&[0.9, 0.0, 0.1, 0.0], 2, &[vec![0], vec![]]);
        assert_eq!((ranked.by_class(), ranked.mean_average_precision()), (vec![Some(100.0), None], 100.0));
    }
}
