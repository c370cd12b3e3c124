//! Whether a run learns, by its search of views, which needs no labels.

use eval::{RANDOM_NETWORK, RETRIEVAL};
use pipeline::words::thousands;
use serde::Serialize;

use super::scores::{Evaluations, Kind, Scored, course};

/// What the search of views says about a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Learning {
    /// Number of images whose views are searched.
    pub n_images: usize,
    /// Percent of the views that random weights find.
    pub random_percent: f64,
    /// Percent that the run found first, and the number of steps taken until then.
    pub first: FoundAt,
    /// The most that the run has found.
    pub best: FoundAt,
    /// The last that the run has found.
    pub last: FoundAt,
    /// The first, the highest and the last percentage: `12.5 → 61.2 → 61.2`.
    pub course: String,
    /// The answer in words, after "the run is": `learning: it finds 61 % of the other views of 512
    /// images; random weights find 12 %`.
    pub words: String,
}

/// A percentage of views that were found after a number of steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct FoundAt {
    /// Number of steps taken.
    pub step: u64,
    /// Percentage of the views.
    pub percent: f64,
}

impl Learning {
    /// Reads the newest search of views of a run from its `evaluations`; `None` if there is none.
    /// `has_initial_weights` says whether it began with weights that were trained before.
    pub(crate) fn from_evaluations(evaluations: &Evaluations, has_initial_weights: bool) -> Option<Self> {
        // A measurement of a checkpoint on other images has no number of them.
        let mut searches =
            evaluations.scores.iter().filter(|(kind, _)| is_search(kind, "") && kind.test_images.is_some());
        // Where the number of images has changed, the numbers that were continued last count.
        let mut newest = searches.next()?;
        for search in searches {
            if last_step(search.1) > last_step(newest.1) {
                newest = search;
            }
        }
        let (kind, points) = newest;
        let mut random = evaluations
            .scores
            .iter()
            .filter(|(other, _)| is_search(other, RANDOM_NETWORK) && other.test_images == kind.test_images);
        let (_, random_points) = random.next()?;
        Self::new(kind.test_images?, random_points.last()?.value, points, has_initial_weights)
    }

    /// Creates the answer for `points`, the percentages of a run on `n_images` images in the order
    /// of the steps.
    fn new(
        n_images: usize,
        random_percent: f64,
        points: &[Scored],
        has_initial_weights: bool,
    ) -> Option<Self> {
        let first = found_at(points.first()?);
        let last = found_at(points.last()?);
        let mut best = first;
        for point in points {
            if point.value > best.percent {
                best = found_at(point);
            }
        }
        let course = course(points.len(), first.percent, best.percent, last.percent);
        let found = Found { n_images, random_percent, first, best, last, has_initial_weights };
        let words = found.in_words();
        Some(Self { n_images, random_percent, first, best, last, course, words })
    }
}

/// Returns whether scores of `kind` are searches of views with the features of `network`, as
/// [`Kind`] names it.
fn is_search(kind: &Kind, network: &str) -> bool {
    kind.metric == RETRIEVAL && kind.network == network
}

fn last_step(points: &[Scored]) -> Option<u64> {
    points.last().map(|point| point.step)
}

fn found_at(point: &Scored) -> FoundAt {
    FoundAt { step: point.step, percent: point.value }
}

/// Percentages of a run, for a sentence.
struct Found {
    n_images: usize,
    random_percent: f64,
    first: FoundAt,
    best: FoundAt,
    last: FoundAt,
    has_initial_weights: bool,
}

impl Found {
    /// Says whether the run learns, as in "the run is …". Differences within twice their standard
    /// error count as none.
    fn in_words(&self) -> String {
        let Self { n_images, random_percent, first, best, last, has_initial_weights } = *self;
        let mut found = format!("it finds {:.0} % of the other views of {n_images} images", last.percent);
        let has_start = has_initial_weights && first.step == 0 && last.step > 0;
        if has_start {
            found += &format!(", the weights it began with find {:.0} %", first.percent);
        }
        let answer = if !self.is_above(last.percent, random_percent) {
            "no better than random weights"
        } else if has_start && self.is_above(first.percent, last.percent) {
            "worse than it began"
        } else if self.is_above(best.percent, last.percent) {
            found += &format!(", and found {:.0} % at step {}", best.percent, thousands(best.step));
            "getting worse"
        } else if has_start && !self.is_above(last.percent, first.percent) {
            "no better than it began"
        } else {
            "learning"
        };
        format!("{answer}: {found}; random weights find {random_percent:.0} %")
    }

    /// Returns whether percentage `a` is larger than `b` by more than twice the standard error of
    /// the difference of two shares of the images. A share is taken as if two more images had been
    /// searched, one of them found, so that it is never without an error.
    fn is_above(&self, a: f64, b: f64) -> bool {
        let n = self.n_images as f64;
        let mut variance = 0.0;
        for percent in [a, b] {
            let share = (n * percent / 100.0 + 1.0) / (n + 2.0);
            variance += share * (1.0 - share) / n;
        }
        a - b > 200.0 * variance.sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(random_percent: f64, points: &[(u64, f64)]) -> String {
        let mut scored = Vec::new();
        for (step, value) in points {
            scored.push(Scored { step: *step, value: *value, interval: None });
        }
        Learning::new(400, random_percent, &scored, true).unwrap().words
    }

    #[test]
    fn a_run_learns_if_it_finds_more_than_random_weights() {
        assert_eq!(
            words(12.0, &[(100, 13.0), (200, 61.2)]),
            "learning: it finds 61 % of the other views of 400 images; random weights find 12 %"
        );
        // The standard error of this difference is 2.4 %.
        assert_eq!(
            words(12.0, &[(100, 16.0)]),
            "no better than random weights: it finds 16 % of the other views of 400 images; random weights \
             find 12 %"
        );
        // A collapse.
        let collapsed = words(12.0, &[(100, 40.0), (200, 0.0)]);
        assert!(collapsed.starts_with("no better than random weights: it finds 0 %"), "{collapsed}");
    }

    #[test]
    fn a_run_is_compared_with_what_it_began_with_and_with_its_best() {
        assert_eq!(
            words(12.0, &[(0, 50.0), (200, 61.0)]),
            "learning: it finds 61 % of the other views of 400 images, the weights it began with find 50 %; \
             random weights find 12 %"
        );
        assert!(words(12.0, &[(0, 60.0), (200, 61.0)]).starts_with("no better than it began: it finds 61 %"));
        assert!(words(12.0, &[(0, 60.0), (200, 41.0)]).starts_with("worse than it began: it finds 41 %"));
        assert_eq!(
            words(12.0, &[(1000, 60.0), (2000, 41.0)]),
            "getting worse: it finds 41 % of the other views of 400 images, and found 60 % at step 1,000; \
             random weights find 12 %"
        );
        // One view of 800 is no difference, also where the share has no variance.
        assert!(words(12.0, &[(100, 100.0), (200, 99.9)]).starts_with("learning: it finds 100 %"));
        assert!(Learning::new(400, 12.0, &[], true).is_none());
    }
}
