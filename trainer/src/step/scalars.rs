//! Loss and gauges of a step, which stay where they were computed until the device is waited for anyway: a number
//! that is read at once keeps the host from launching the next operations.

use burn_tensor::Tensor;
use kernels::device::readback::read_back;
use ranks::EngineError;
use ranks::fixed::FixedPoint;

/// Gauges as fixed-point sums, which do not depend on the order.
pub(crate) type FixedGauges = Vec<(&'static str, FixedPoint)>;

/// Loss and gauges of a rank's micro-batches.
#[derive(Debug, Clone)]
pub(crate) struct Scalars {
    /// Number of micro-batches in the global batch.
    n_micro_batches: usize,
    /// Loss and gauges of each micro-batch, in this order.
    values: Vec<Tensor<1>>,
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
    /// If the gauges are not those of the micro-batch before, since gauges are summed over ranks by position.
    pub(crate) fn add(&mut self, loss: Tensor<1>, gauges: Vec<(&'static str, Tensor<1>)>) {
        let (names, values): (Vec<_>, Vec<_>) = gauges.into_iter().unzip();
        assert!(self.values.is_empty() || self.names == names, "gauges differ: {:?}, {names:?}", self.names);
        self.names = names;
        self.values.push(loss);
        self.values.extend(values);
    }

    /// Reads this rank's shares of the means over all micro-batches: the sum of the losses of all lists, and the gauges of one list
    /// after another.
    ///
    /// # Errors
    /// [`EngineError::Device`] when the device has failed.
    pub(crate) fn read_all(lists: &[Self]) -> Result<(FixedPoint, FixedGauges), EngineError> {
        let (mut loss, mut gauges) = (FixedPoint::default(), FixedGauges::new());
        for list in lists {
            let (share, more) = list.read()?;
            loss = loss.plus(share);
            gauges.extend(more);
        }
        Ok((loss, gauges))
    }

    /// Reads this rank's share of the means over all micro-batches, of loss and gauges, in one transfer from the device.
    ///
    /// # Errors
    /// [`EngineError::Device`] when the device has failed.
    fn read(&self) -> Result<(FixedPoint, FixedGauges), EngineError> {
        let mut sums = vec![FixedPoint::default(); 1 + self.names.len()];
        let values = read_back(Tensor::cat(self.values.clone(), 0))?;
        for of_batch in values.chunks_exact(sums.len()) {
            for (sum, value) in sums.iter_mut().zip(of_batch) {
                sum.add(f64::from(*value) / self.n_micro_batches as f64);
            }
        }
        Ok((sums[0], self.names.iter().copied().zip(sums[1..].iter().copied()).collect()))
    }
}

/// Reads tensors from a device in one transfer.
pub(super) fn read_by_name(
    tensors: Vec<(&'static str, Tensor<1>)>,
) -> Result<Vec<(&'static str, Vec<f32>)>, EngineError> {
    if tensors.is_empty() {
        return Ok(Vec::new());
    }
    let lengths: Vec<(&'static str, usize)> =
        tensors.iter().map(|(name, values)| (*name, values.dims()[0])).collect();
    let mut all = read_back(Tensor::cat(tensors.into_iter().map(|(_, values)| values).collect(), 0))?;
    let mut cut = |(name, len): (&'static str, usize)| {
        let rest = all.split_off(len);
        (name, std::mem::replace(&mut all, rest))
    };
    Ok(lengths.into_iter().map(&mut cut).collect())
}
