//! Reused buffers for gathered units that are not kept: fresh memory would cost page faults.

use std::sync::{Arc, Mutex, PoisonError};

use burn_tensor::{AllocationProperty, Bytes, DType, Device, Tensor, TensorData};

/// Number of unused buffers that are kept: for the units of a head, a unit in transfer and a unit
/// just released.
const MAX_SPARE: usize = 4;

/// Ratio of capacity to need above which a spare buffer is left for a unit of its own size.
const MAX_CAPACITY_RATIO: usize = 3;

/// Memory that can be used again: a buffer or, in an estimate, its number of words.
pub trait Reusable {
    /// Returns the number of 32-bit words that fit.
    fn capacity_words(&self) -> usize;
}

/// Unused buffers, and the rule by which they are used again.
#[derive(Debug, Default)]
pub struct SpareBuffers<B> {
    spare: Vec<B>,
}

/// A pool of buffers.
#[derive(Debug, Default)]
pub struct BufferPool {
    spare: Mutex<SpareBuffers<Vec<u32>>>,
}

/// A buffer of a pool, to which it returns when dropped.
pub struct PooledBuffer {
    /// Memory of the elements, aligned for either type.
    words: Vec<u32>,
    len: usize,
    dtype: DType,
    pool: Arc<BufferPool>,
}

impl Reusable for Vec<u32> {
    fn capacity_words(&self) -> usize {
        self.capacity()
    }
}

impl Reusable for usize {
    fn capacity_words(&self) -> usize {
        *self
    }
}

impl<B: Reusable> SpareBuffers<B> {
    /// Takes the smallest buffer with room for `n_words` that is at most three times as large:
    /// larger ones stay for larger units, so that the peak of a step does not depend on which
    /// buffer happens to be free. None is made larger, which would copy unused content.
    pub fn take(&mut self, n_words: usize) -> Option<B> {
        self.spare.sort_by_key(Reusable::capacity_words);
        let position = self
            .spare
            .iter()
            .position(|buffer| (n_words..=MAX_CAPACITY_RATIO * n_words).contains(&buffer.capacity_words()))?;
        Some(self.spare.swap_remove(position))
    }

    /// Adds a buffer; above a limit, the smallest of all is dropped.
    pub fn put(&mut self, buffer: B) {
        self.spare.push(buffer);
        if self.spare.len() > MAX_SPARE {
            self.spare.sort_by_key(Reusable::capacity_words);
            self.spare.remove(0);
        }
    }

    /// Returns the unused buffers.
    pub fn iter(&self) -> impl Iterator<Item = &B> {
        self.spare.iter()
    }
}

impl BufferPool {
    /// Takes a buffer of `len` elements of `dtype`, f32 or bf16, with unspecified content.
    pub fn take(self: &Arc<Self>, len: usize, dtype: DType) -> PooledBuffer {
        let n_words = word_count(len, dtype);
        let taken = self.spare.lock().unwrap_or_else(PoisonError::into_inner).take(n_words);
        let mut words = taken.unwrap_or_else(|| Vec::with_capacity(n_words));
        words.resize(n_words, 0);
        PooledBuffer { words, len, dtype, pool: Arc::clone(self) }
    }

    /// Frees the unused buffers.
    pub fn clear(&self) {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).spare.clear();
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
        let len = self.len;
        let dtype = self.dtype;
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
        let words = std::mem::take(&mut self.words);
        self.pool.spare.lock().unwrap_or_else(PoisonError::into_inner).put(words);
    }
}

/// Returns the number of 32-bit words that hold `len` elements of `dtype`.
pub fn word_count(len: usize, dtype: DType) -> usize {
    (len * dtype.size()).div_ceil(size_of::<u32>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_buffer_that_fits_is_taken_and_the_smallest_of_all_dropped() {
        let mut buffers = SpareBuffers::default();
        [100, 250, 40].into_iter().for_each(|words| buffers.put(words));
        assert_eq!(buffers.take(90), Some(100));
        assert_eq!(buffers.take(90), Some(250), "the next one with room");
        assert_eq!(buffers.take(41), None, "too small");
        assert_eq!(buffers.take(13), None, "more than three times as large");
        (1..=MAX_SPARE).for_each(|i| buffers.put(100 * i));
        assert_eq!(buffers.iter().count(), MAX_SPARE);
        assert_eq!(buffers.take(40), Some(100), "40 was dropped");
    }

    #[test]
    fn a_buffer_returns_to_the_pool_when_the_last_tensor_is_dropped() {
        let pool = Arc::new(BufferPool::default());
        let mut buffer = pool.take(100, DType::F32);
        let values: Vec<f32> = (0..100).map(|i| i as f32).collect();
        buffer.bytes().copy_from_slice(bytemuck::cast_slice(&values));
        let address = buffer.bytes().as_ptr();
        let tensor = buffer.into_tensor(&Device::flex());
        let part = tensor.clone().narrow(0, 10, 10);
        drop(tensor);
        assert_eq!(pool.spare.lock().unwrap().iter().count(), 0, "a slice still looks at it");
        assert_eq!(part.into_data().try_to_vec::<f32>().unwrap()[0], 10.0);
        // This buffer has the same number of words.
        let mut again = pool.take(199, DType::BF16);
        assert_eq!(again.bytes().as_ptr(), address, "it is used again");
        assert_eq!(again.bytes().len(), 398);
        assert_eq!(again.into_tensor(&Device::flex()).dtype(), DType::BF16);
    }
}
