//! Reused buffers for gathered units that are not kept: fresh memory would cost page faults.

use std::sync::{Arc, Mutex, PoisonError};

use burn_tensor::{AllocationProperty, Bytes, DType, Device, Tensor, TensorData};

/// Number of unused buffers that are kept: for the units of a head, a unit in transfer and a unit just released.
const MAX_SPARE: usize = 4;

/// Ratio of capacity to need above which a spare buffer is left for a unit of its own size.
const MAX_CAPACITY_RATIO: usize = 3;

/// A pool of buffers.
#[derive(Debug, Default)]
pub struct BufferPool {
    spare: Mutex<Vec<Vec<f32>>>,
}

/// A buffer of a pool, to which it returns when dropped.
pub struct PooledBuffer {
    values: Vec<f32>,
    pool: Arc<BufferPool>,
}

impl BufferPool {
    /// Takes a buffer of `len` elements with unspecified content.
    pub fn take(self: &Arc<Self>, len: usize) -> PooledBuffer {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        // Takes the smallest that is large enough, but not so large that a unit of its size would lack it, so that the
        // peak of a step does not depend on which buffer happens to be free. Growing one would copy unused content.
        spare.sort_by_key(Vec::capacity);
        let fits =
            spare.iter().position(|values| (len..=MAX_CAPACITY_RATIO * len).contains(&values.capacity()));
        let mut values = fits.map_or_else(|| Vec::with_capacity(len), |index| spare.swap_remove(index));
        drop(spare);
        values.resize(len, 0.0);
        PooledBuffer { values, pool: Arc::clone(self) }
    }
}

impl BufferPool {
    /// Frees the unused buffers.
    pub fn clear(&self) {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

impl PooledBuffer {
    /// Returns the elements of the buffer.
    pub fn values(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Converts the buffer into a tensor that views it, without a copy.
    pub fn into_tensor(self, device: &Device) -> Tensor<1> {
        let len = self.values.len();
        let bytes = Bytes::from_shared(bytes::Bytes::from_owner(self), AllocationProperty::Other);
        Tensor::from_data(TensorData::from_bytes(bytes, [len], DType::F32), device)
    }
}

impl AsRef<[u8]> for PooledBuffer {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.values)
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let mut spare = self.pool.spare.lock().unwrap_or_else(PoisonError::into_inner);
        spare.push(std::mem::take(&mut self.values));
        if spare.len() > MAX_SPARE {
            spare.sort_by_key(Vec::capacity);
            spare.remove(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_comes_back_when_the_last_tensor_goes() {
        let pool = Arc::new(BufferPool::default());
        let mut buffer = pool.take(100);
        buffer.values().iter_mut().enumerate().for_each(|(i, value)| *value = i as f32);
        let address = buffer.values().as_ptr();
        let tensor = buffer.into_tensor(&Device::flex());
        let part = tensor.clone().narrow(0, 10, 10);
        drop(tensor);
        assert!(pool.spare.lock().unwrap().is_empty(), "a slice still looks at it");
        assert_eq!(part.into_data().try_to_vec::<f32>().unwrap()[0], 10.0);
        let mut again = pool.take(50);
        assert_eq!(again.values().as_ptr(), address, "it is used again");
        assert_eq!(again.values().len(), 50);
    }
}
