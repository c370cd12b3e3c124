//! Views whose sizes differ from batch to batch, as in the last stage of DINOv3 (Siméoni et al.
//! 2025).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{AugmentError, MultiCrop, ViewRng};

/// Domain that separates the draws of sizes from all other random streams.
const DOMAIN: u64 = 0x7369_7a65_7300_0000;

/// Largest share of a choice of sizes.
const MAX_SHARE: f64 = 1e6;

/// Sizes that the views of some batches have, in the form in which a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SizeChoice {
    /// Share of the batches with these sizes, in proportion to the shares of the other choices.
    pub share: f64,
    /// Side of the views of each group in pixels, in the order of the groups: global, local, and
    /// those of a Gram teacher.
    pub sizes_px: Vec<u32>,
}

/// Views of every batch: always the same, or drawn from several choices for each batch.
#[derive(Debug, Clone, PartialEq)]
pub struct ViewMix {
    /// Upper end of the interval of each choice within 0..1, with its views.
    choices: Vec<(f64, MultiCrop)>,
}

impl From<MultiCrop> for ViewMix {
    fn from(multicrop: MultiCrop) -> Self {
        Self { choices: vec![(1.0, multicrop)] }
    }
}

impl ViewMix {
    /// Creates the mix of `multicrop` in the sizes of `choices`, or as it is if there are none.
    ///
    /// # Errors
    /// [`AugmentError::Recipe`], which names the value.
    pub fn new(multicrop: MultiCrop, choices: &[SizeChoice]) -> Result<Self, AugmentError> {
        multicrop.validate()?;
        if choices.is_empty() {
            return Ok(multicrop.into());
        }
        let total_share = choices.iter().map(|choice| choice.share).sum::<f64>();
        let mut end = 0.0;
        let mut intervals = Vec::with_capacity(choices.len());
        for (i, SizeChoice { share, sizes_px }) in choices.iter().enumerate() {
            if !(*share > 0.0 && *share <= MAX_SHARE) {
                return Err(invalid(i, "share", format!("{share} must be above 0 and at most {MAX_SHARE}")));
            }
            let n_groups = multicrop.groups().len();
            if sizes_px.len() != n_groups {
                let n_sizes = sizes_px.len();
                let reason = format!("expected one size for each group of views ({n_groups}), not {n_sizes}");
                return Err(invalid(i, "sizes_px", reason));
            }
            let resized = multicrop.resized(sizes_px);
            resized.validate().map_err(|error| invalid(i, "sizes_px", error.to_string()))?;
            if group_lens(&resized) != group_lens(&multicrop) {
                let reason = "gives the same size to views that must differ in size".to_string();
                return Err(invalid(i, "sizes_px", reason));
            }
            end += share / total_share;
            intervals.push((end, resized));
        }
        Ok(Self { choices: intervals })
    }

    /// Returns the views of the global batch `batch` of a run with `seed`.
    pub fn multicrop(&self, seed: u64, batch: u64) -> &MultiCrop {
        let uniform = if self.choices.len() == 1 {
            0.0
        } else {
            ViewRng::from_words([seed, DOMAIN, batch, 0]).uniform()
        };
        let index = self.choices.partition_point(|(end, _)| *end <= f64::from(uniform));
        // Ends are sums of rounded shares: the last may lie below 1.
        &self.choices[index.min(self.choices.len() - 1)].1
    }

    /// Returns the views of the first choice.
    pub fn first(&self) -> &MultiCrop {
        &self.choices[0].1
    }

    /// Returns all choices, with their shares of the batches.
    pub fn choices(&self) -> impl Iterator<Item = (f64, &MultiCrop)> {
        let starts = std::iter::once(0.0).chain(self.choices.iter().map(|(end, _)| *end));
        starts.zip(&self.choices).map(|(start, (end, views))| (end - start, views))
    }
}

/// Returns the number of views of each group.
fn group_lens(multicrop: &MultiCrop) -> Vec<usize> {
    multicrop.groups().iter().map(|group| group.n_views).collect()
}

/// Returns the error for an invalid value of choice `index`.
fn invalid(index: usize, field: &str, reason: String) -> AugmentError {
    AugmentError::Recipe { field: format!("mix[{index}].{field}"), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(share: f64, sizes_px: &[u32]) -> SizeChoice {
        SizeChoice { share, sizes_px: sizes_px.to_vec() }
    }

    /// Returns the size of each group in batch `batch`.
    fn group_sizes(mix: &ViewMix, batch: u64) -> Vec<u32> {
        mix.multicrop(7, batch).groups().iter().map(|group| group.size_px).collect()
    }

    #[test]
    fn sizes_occur_in_proportion_to_their_shares() {
        let choices = [choice(3.0, &[512, 112]), choice(6.0, &[768, 112]), choice(1.0, &[768, 224])];
        let mix = ViewMix::new(MultiCrop::dino(256, 112, 8), &choices).expect("choices that fit");
        assert_eq!(group_sizes(&mix, 5), group_sizes(&mix, 5));
        for (i, share) in [0.3, 0.6, 0.1].into_iter().enumerate() {
            let batches = (0..10_000).filter(|batch| group_sizes(&mix, *batch) == choices[i].sizes_px);
            let n = batches.count() as f64;
            // Four standard deviations.
            assert!((n - 1e4 * share).abs() < 4.0 * (1e4f64 * share * (1.0 - share)).sqrt(), "{i}: {n}");
        }
        let shares: Vec<f64> = mix.choices().map(|(share, _)| share).collect();
        assert!(shares.iter().zip([0.3, 0.6, 0.1]).all(|(a, b)| (a - b).abs() < 1e-12), "{shares:?}");
        assert_eq!(mix.first().groups()[0].n_views, 2);
    }

    /// Returns the value that is invalid, and the reason.
    fn error(choices: &[SizeChoice]) -> (String, String) {
        match ViewMix::new(MultiCrop::dino(256, 112, 8), choices) {
            Err(AugmentError::Recipe { field, reason }) => (field, reason),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn errors_name_the_invalid_choice() {
        assert_eq!(error(&[choice(0.0, &[512, 112])]).0, "mix[0].share");
        assert_eq!(error(&[choice(f64::NAN, &[512, 112])]).0, "mix[0].share");
        let (field, reason) = error(&[choice(1.0, &[512])]);
        assert_eq!(field, "mix[0].sizes_px");
        assert!(reason.contains("one size for each group of views (2), not 1"), "{reason}");
        let (field, reason) = error(&[choice(1.0, &[512, 112]), choice(1.0, &[96, 96])]);
        assert_eq!(field, "mix[1].sizes_px");
        assert!(reason.contains("must differ in size"), "{reason}");
        let (field, reason) = error(&[choice(1.0, &[5000, 96])]);
        assert_eq!(field, "mix[0].sizes_px");
        assert!(reason.contains("4096"), "{reason}");
    }
}
