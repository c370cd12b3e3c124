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
    spare: Mutex<Vec<Vec<u32>>>,
}

/// A buffer of a pool, to which it returns when dropped.
pub struct PooledBuffer {
    /// Memory of the elements, aligned for either type.
    words: Vec<u32>,
    len: usize,
    dtype: DType,
    pool: Arc<BufferPool>,
}

impl BufferPool {
    /// Takes a buffer of `len` elements of `dtype`, f32 or bf16, with unspecified content.
    pub fn take(self: &Arc<Self>, len: usize, dtype: DType) -> PooledBuffer {
        let n_words = (len * dtype.size()).div_ceil(size_of::<u32>());
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        // Takes the smallest that is large enough, but not so large that a unit of its size would lack it, so that the
        // peak of a step does not depend on which buffer happens to be free. Growing one would copy unused content.
        spare.sort_by_key(Vec::capacity);
        let fits = spare
            .iter()
            .position(|words| (n_words..=MAX_CAPACITY_RATIO * n_words).contains(&words.capacity()));
        let mut words = fits.map_or_else(|| Vec::with_capacity(n_words), |index| spare.swap_remove(index));
        drop(spare);
        words.resize(n_words, 0);
        PooledBuffer { words, len, dtype, pool: Arc::clone(self) }
    }
}

impl BufferPool {
    /// Frees the unused buffers.
    pub fn clear(&self) {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

impl PooledBuffer {
    /// Returns the bytes of the elements.
    pub fn bytes(&mut self) -> &mut [u8] {
        let n_bytes = self.len * self.dtype.size();
        &mut bytemuck::cast_slice_mut(&mut self.words)[..n_bytes]
    }

    /// Converts the buffer into a tensor that views it, without a copy.
    pub fn into_tensor(self, device: &Device) -> Tensor<1> {
        let (len, dtype) = (self.len, self.dtype);
        let bytes = Bytes::from_shared(bytes::Bytes::from_owner(self), AllocationProperty::Other);
        Tensor::from_data(TensorData::from_bytes(bytes, [len], dtype), (device, dtype))
    }
}

impl AsRef<[u8]> for PooledBuffer {
    fn as_ref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len * self.dtype.size()]
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let mut spare = self.pool.spare.lock().unwrap_or_else(PoisonError::into_inner);
        spare.push(std::mem::take(&mut self.words));
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
        let mut buffer = pool.take(100, DType::F32);
        let values: Vec<f32> = (0..100).map(|i| i as f32).collect();
        buffer.bytes().copy_from_slice(bytemuck::cast_slice(&values));
        let address = buffer.bytes().as_ptr();
        let tensor = buffer.into_tensor(&Device::flex());
        let part = tensor.clone().narrow(0, 10, 10);
        drop(tensor);
        assert!(pool.spare.lock().unwrap().is_empty(), "a slice still looks at it");
        assert_eq!(part.into_data().try_to_vec::<f32>().unwrap()[0], 10.0);
        // Of the same number of bytes.
        let mut again = pool.take(199, DType::BF16);
        assert_eq!(again.bytes().as_ptr(), address, "it is used again");
        assert_eq!(again.bytes().len(), 398);
        assert_eq!(again.into_tensor(&Device::flex()).dtype(), DType::BF16);
    }
}
