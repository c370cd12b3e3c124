//! Intersection over union of pixel classes, and accuracy of pixels.
//!
//! ```text
//! IoU_c    = correct pixels of c / (true pixels of c + predicted pixels of c - correct pixels of c)
//! mIoU     = mean of IoU_c over the classes with at least one true pixel
//! accuracy = correct pixels / true pixels, of all classes
//! ```

use super::bootstrap;

/// Predicted classes of pixels.
#[derive(Debug, Clone, PartialEq)]
pub struct PixelCounts {
    n_classes: usize,
    /// Number of pixels by true and predicted class, `[classes, classes]`.
    confusion: Vec<u64>,
    /// For each image, the classes in its truth or prediction: the class, and its correct, true and
    /// predicted pixels.
    images: Vec<Vec<(u32, [u64; 3])>>,
}

impl PixelCounts {
    /// Returns a result without images.
    pub(crate) fn new(n_classes: usize) -> Self {
        Self { n_classes, confusion: vec![0; n_classes * n_classes], images: Vec::new() }
    }

    /// Adds an image whose pixels are counted by true and predicted class, `[classes, classes]`.
    pub(crate) fn add(&mut self, confusion: &[u64]) {
        let c = self.n_classes;
        self.confusion.iter_mut().zip(confusion).for_each(|(sum, n)| *sum += n);
        let mut classes = Vec::new();
        for class in 0..c {
            let correct = confusion[class * c + class];
            let truth: u64 = confusion[class * c..(class + 1) * c].iter().sum();
            let predicted: u64 = confusion.iter().skip(class).step_by(c).sum();
            if truth + predicted > 0 {
                classes.push((class as u32, [correct, truth, predicted]));
            }
        }
        self.images.push(classes);
    }

    /// Returns the number of classes.
    pub fn n_classes(&self) -> usize {
        self.n_classes
    }

    /// Returns the mean over classes, in percent.
    pub fn mean_iou(&self) -> f64 {
        self.mean(&vec![1; self.images.len()])
    }

    /// Returns the 95 % bootstrap interval of the mean, in percent, by resampling the images.
    pub fn interval(&self) -> [f64; 2] {
        bootstrap::interval(self.images.len(), |counts| self.mean(counts))
    }

    /// Returns the share of pixels whose predicted class is right, in percent.
    pub fn accuracy(&self) -> f64 {
        self.share_right(&vec![1; self.images.len()])
    }

    /// Returns the 95 % bootstrap interval of the accuracy, in percent, by resampling the images.
    pub fn accuracy_interval(&self) -> [f64; 2] {
        bootstrap::interval(self.images.len(), |counts| self.share_right(counts))
    }

    /// Returns the intersection over union of each class in percent; `None` for a class without
    /// true pixels.
    pub fn by_class(&self) -> Vec<Option<f64>> {
        self.ious(&vec![1; self.images.len()])
    }

    /// Returns the number of pixels by true class (rows) and predicted class (columns), `[classes,
    /// classes]`.
    pub fn confusion(&self) -> &[u64] {
        &self.confusion
    }

    /// Returns the intersection over union of each class in percent, counting image i `counts[i]`
    /// times; `None` for a class without true pixels.
    fn ious(&self, counts: &[u32]) -> Vec<Option<f64>> {
        let mut sums = vec![[0u64; 3]; self.n_classes];
        for (classes, count) in self.images.iter().zip(counts) {
            for (class, pixels) in classes {
                let sum = &mut sums[*class as usize];
                sum.iter_mut().zip(pixels).for_each(|(sum, pixels)| *sum += pixels * u64::from(*count));
            }
        }
        sums.into_iter()
            .map(|[correct, truth, predicted]| {
                (truth > 0).then(|| 100.0 * correct as f64 / (truth + predicted - correct) as f64)
            })
            .collect()
    }

    fn mean(&self, counts: &[u32]) -> f64 {
        let ious: Vec<f64> = self.ious(counts).into_iter().flatten().collect();
        ious.iter().sum::<f64>() / ious.len().max(1) as f64
    }

    /// Returns the share of right pixels in percent, counting image i `counts[i]` times.
    fn share_right(&self, counts: &[u32]) -> f64 {
        let mut n_right = 0;
        let mut n_pixels = 0;
        for (classes, count) in self.images.iter().zip(counts) {
            for (_, [correct, truth, _]) in classes {
                n_right += correct * u64::from(*count);
                n_pixels += truth * u64::from(*count);
            }
        }
        100.0 * n_right as f64 / n_pixels.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intersections_and_unions_are_summed_over_images() {
        let mut counts = PixelCounts::new(3);
        // Four pixels: three of class 0, one of which is predicted as class 1; one of class 1.
        counts.add(&[2, 1, 0, 0, 1, 0, 0, 0, 0]);
        counts.add(&[4, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(counts.by_class(), [Some(100.0 * 6.0 / 7.0), Some(50.0), None]);
        assert!((counts.mean_iou() - (100.0 * 6.0 / 7.0 + 50.0) / 2.0).abs() < 1e-9);
        assert_eq!(counts.confusion()[..5], [6, 1, 0, 0, 1]);
        let [low, high] = counts.interval();
        assert!(low <= counts.mean_iou() && counts.mean_iou() <= high, "{low} {high}");
        assert_eq!(counts.accuracy(), 100.0 * 7.0 / 8.0);
        assert_eq!(counts.accuracy_interval(), [75.0, 100.0], "those of either image alone");
    }
}
