//! Loss and gauges of a step, which stay on the device that computed them until the host waits for
//! it anyway: reading a number at once would keep the host from launching the next operations.

use burn_tensor::Tensor;
use kernels::device::readback::read_back_while;
use ranks::EngineError;
use ranks::fixed::FixedPoint;

/// Gauges as fixed-point sums, which do not depend on the order of the addends.
pub(crate) type FixedGauges = Vec<(&'static str, FixedPoint)>;

/// Loss and gauges of a rank's micro-batches.
#[derive(Debug, Clone)]
pub(crate) struct Scalars {
    /// Number of micro-batches in the global batch.
    n_micro_batches: usize,
    /// Loss and gauges of each micro-batch, in this order.
    values: Vec<Tensor<1>>,
    /// Names of the gauges.
    names: Vec<&'static str>,
}

impl Scalars {
    /// Creates an empty list for the scalars of a batch of `n_micro_batches`.
    pub(crate) fn new(n_micro_batches: usize) -> Self {
        Self { n_micro_batches, values: Vec::new(), names: Vec::new() }
    }

    /// Adds the loss and the gauges of a micro-batch, `[1]` each.
    ///
    /// # Panics
    /// If the gauges differ from those of the previous micro-batch, since gauges are summed over
    /// ranks by position.
    pub(crate) fn add(&mut self, loss: Tensor<1>, gauges: Vec<(&'static str, Tensor<1>)>) {
        let (names, values): (Vec<_>, Vec<_>) = gauges.into_iter().unzip();
        assert!(self.values.is_empty() || self.names == names, "gauges differ: {:?}, {names:?}", self.names);
        self.names = names;
        self.values.push(loss);
        self.values.extend(values);
    }

    /// Reads this rank's share of the mean loss over all micro-batches: the sum of all lists.
    ///
    /// # Errors
    /// [`EngineError::Device`] when the device has failed.
    pub(crate) fn read_loss(lists: &[Self]) -> Result<FixedPoint, EngineError> {
        let tensors: Vec<Tensor<1>> = lists.iter().flat_map(|list| list.values.clone()).collect();
        let (values, ()) = read_back_while(&tensors, || ());
        let mut values = values?.into_iter();
        Ok(Self::sums_of_all(lists, &mut values).0)
    }

    /// Returns the sum of the losses of all lists, and the gauges of one list after another, given
    /// the values of their [`Scalars::tensors`].
    pub(crate) fn sums_of_all(
        lists: &[Self],
        values: &mut impl Iterator<Item = Vec<f32>>,
    ) -> (FixedPoint, FixedGauges) {
        let mut loss = FixedPoint::default();
        let mut gauges = FixedGauges::new();
        for list in lists {
            let (list_loss, list_gauges) = list.sums(values);
            loss = loss.plus(list_loss);
            gauges.extend(list_gauges);
        }
        (loss, gauges)
    }

    /// Returns loss and gauges of each micro-batch, `[1]` each, in the order in which
    /// [`Scalars::sums_of_all`] takes their values.
    pub(crate) fn tensors(&self) -> &[Tensor<1>] {
        &self.values
    }

    /// Returns the losses of the micro-batches, `[1]` each.
    pub(crate) fn losses(&self) -> impl Iterator<Item = Tensor<1>> {
        self.values.iter().step_by(1 + self.names.len()).cloned()
    }

    /// Returns this rank's shares of the means over all micro-batches, of loss and gauges, given
    /// the values of [`Scalars::tensors`].
    fn sums(&self, values: &mut impl Iterator<Item = Vec<f32>>) -> (FixedPoint, FixedGauges) {
        let mut sums = vec![FixedPoint::default(); 1 + self.names.len()];
        let n_sums = sums.len();
        for (index, value) in values.by_ref().take(self.values.len()).enumerate() {
            sums[index % n_sums].add(f64::from(value[0]) / self.n_micro_batches as f64);
        }
        let gauges = self.names.iter().copied().zip(sums[1..].iter().copied()).collect();
        (sums[0], gauges)
    }
}
