//! Scores of weights as they are stored, which rounding may have changed.

use eval::{Protocol, Split};
use kernels::device::Opened;
use networks::{NamedTensor, Network};
use pipeline::NoProgress;
use weights::{Precision, Score, rounded};

use crate::error::SessionError;
use crate::network::Backbone;

impl Backbone {
    /// Scores the weights by `protocols` on `split`, as trained and, if it is another precision, as
    /// they are stored in `precision`.
    ///
    /// # Errors
    /// [`SessionError::Network`] and [`SessionError::Eval`].
    pub fn score_as_stored(
        &self,
        split: &Split,
        protocols: &[Protocol],
        precision: Precision,
    ) -> Result<Vec<Score>, SessionError> {
        let device = Opened::cpu().device;
        let mut precisions = vec![Precision::F32];
        if precision != Precision::F32 {
            precisions.push(precision);
        }
        let mut scores = Vec::new();
        for precision in precisions {
            let mut tensors: Vec<NamedTensor> = Vec::new();
            for tensor in &self.tensors {
                let values = rounded(&tensor.values, &tensor.shape, precision);
                tensors.push(NamedTensor { values, ..tensor.clone() });
            }
            let pixels = self.preprocessing.pixels.clone();
            let network = Network::new(&self.model, pixels, &tensors, 0, &device)?;
            for (_, scored) in split.score(&network, protocols, None, &NoProgress)?.numbers() {
                let name = format!("{} on {}, {}", scored.metric, split.test.name, split.test.transform);
                let interval = Some(scored.outcome.interval());
                scores.push(Score::new(name, scored.outcome.value(), interval, precision));
            }
        }
        Ok(scores)
    }
}
