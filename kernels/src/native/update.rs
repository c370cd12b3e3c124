//! The optimizer update on an NVIDIA GPU: sums of squares, clip factors and AdamW, each in one
//! launch for up to 36 units of a network. The kernels are in `update.cu`.
//!
//! ```text
//! sums[b] = Σ_{i in b} g_i²                                     b a block of a range of a unit
//! factors[G] = min(1, n / (√Σ_{b in G} sums[b] + ε))            n the largest norm of clip group G
//! m ← β₁ m + (1 - β₁) c g       v ← β₂ v + (1 - β₂) c² g²       c = factors[G]
//! θ ← shrink · θ - rate · m / (root · √v + ε)                   θ_F ← d θ_F + (1 - d) θ
//! ```
//!
//! The device computes the clip factors, and skips a step that is not finite, so that the host does
//! not wait between the backward pass and the update.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use burn_cubecl::CubeBackend;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, Tensor};
use cubecl_common::device::DeviceId;
use cubecl_runtime::server::Handle;

use super::module::{CUDA_MACROS, Grid, Module};
use super::stream::{self, Stream, is_cuda};
use crate::product_kernels;

/// Source of the kernels, without the definitions of the macros in capitals.
const SOURCE: &str = include_str!("update.cu");

const NAMES: [&str; 3] = ["sum_squares", "clip_factors", "adam_w_units"];
const SUM_SQUARES: usize = 0;
const CLIP_FACTORS: usize = 1;
const ADAM_W: usize = 2;

// The constants of `update.cu`.
const SUM_THREADS: usize = 128;
const UPDATE_THREADS: usize = 256;
const ELEMENTS: usize = 2048;
const MOST_UNITS: usize = 36;

/// Number of 32-bit words of `struct Segment` of `update.cu`.
const SEGMENT_WORDS: usize = 7;

/// Largest number of elements that one launch of AdamW updates, unless one unit has more. Results
/// are written to new memory, 16 to 20 bytes per element, and the old memory is released after the
/// launch.
const MOST_ELEMENTS: usize = 64 << 20;

/// The kernels on one device.
#[derive(Debug, Clone)]
pub struct UpdateKernels {
    module: Arc<Module<3>>,
}

/// A block of a gradient, whose squares are summed separately.
#[derive(Debug, Clone, Copy)]
pub struct Block {
    /// Index of the gradient.
    pub tensor: usize,
    /// First element.
    pub start: usize,
    /// One past the last element.
    pub end: usize,
}

/// Clip factors on the device.
#[derive(Debug, Clone)]
pub struct ClipFactors {
    /// A factor for each group, followed by one for the losses; negative where a norm or a loss is
    /// not finite.
    values: CubeTensor,
}

/// A range of a unit's elements with equal constants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Segment {
    /// One past the last element.
    pub end: usize,
    /// Factor of weight decay.
    pub shrink: f32,
    /// Factor of the gradient, unless the device has computed the factors.
    pub clip: f32,
    /// Index of the clip group.
    pub group: usize,
    /// Learning rate, with bias correction.
    pub rate: f32,
    /// Bias correction of the root of the second moment.
    pub root: f32,
    /// Whether weights and moments remain unchanged.
    pub is_frozen: bool,
}

/// A unit's shards, `[n]` each in f32.
#[derive(Debug, Clone)]
pub struct Unit {
    /// Mean gradient.
    pub grad: Tensor<1>,
    /// Weights.
    pub weights: Tensor<1>,
    /// First moment.
    pub exp_avg: Tensor<1>,
    /// Second moment.
    pub exp_avg_sq: Tensor<1>,
    /// Whether the weights are written in bf16 as well.
    pub is_rounded: bool,
    /// A moving average of the weights.
    pub follower: Option<FollowingUnit>,
    /// Segments, in ascending order, up to the end of the shard.
    pub segments: Vec<Segment>,
}

/// A shard of a moving average of a unit's weights, `[n]` in f32.
#[derive(Debug, Clone)]
pub struct FollowingUnit {
    /// Weights.
    pub weights: Tensor<1>,
    /// Decay rate of the moving average.
    pub decay: f64,
    /// Whether they are written in bf16 as well.
    pub is_rounded: bool,
}

/// Weights after the update, in new memory.
#[derive(Debug, Clone)]
pub struct MovedWeights {
    /// The weights, `[n]` in f32.
    pub values: Tensor<1>,
    /// The same weights in bf16, if they were requested.
    pub in_bf16: Option<Tensor<1>>,
}

/// A unit's shards after the update, in new memory.
#[derive(Debug, Clone)]
pub struct MovedUnit {
    /// Weights.
    pub weights: MovedWeights,
    /// First moment.
    pub exp_avg: Tensor<1>,
    /// Second moment.
    pub exp_avg_sq: Tensor<1>,
    /// The moving average, if the unit has one.
    pub follower: Option<MovedWeights>,
}

/// Constants of AdamW that all elements share.
#[derive(Debug, Clone, Copy)]
pub struct AdamWConstants {
    /// Decay rate of the first moment.
    pub first: f32,
    /// Decay rate of the second moment.
    pub second: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
}

/// Error message for an update with fewer addresses than buffers.
const NO_ADDRESS: &str = "a buffer of the update has no address";

// `tests/cuda/emulator.h` asserts the same of the structures of `update.cu`.
const _: () = assert!(size_of::<GradientsJob>() == 312);
const _: () = assert!(size_of::<NormsJob>() == 64);
const _: () = assert!(size_of::<UnitJob>() == 112);
const _: () = assert!(size_of::<UpdateJob>() == 4080);

/// `struct Gradients` of `update.cu`.
#[repr(C)]
struct GradientsJob {
    grads: [u64; MOST_UNITS],
    blocks: u64,
    sums: u64,
    first: u32,
}

/// `struct Norms` of `update.cu`.
#[repr(C)]
struct NormsJob {
    sums: u64,
    starts: u64,
    numbers: u64,
    losses: u64,
    factors: u64,
    clip_norm: f64,
    epsilon: f64,
    n_groups: u32,
    n_losses: u32,
}

/// `struct Unit` of `update.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct UnitJob {
    grad: u64,
    weights: u64,
    exp_avg: u64,
    exp_avg_sq: u64,
    follower: u64,
    to_weights: u64,
    to_exp_avg: u64,
    to_exp_avg_sq: u64,
    to_follower: u64,
    to_rounded: u64,
    to_rounded_follower: u64,
    n: u32,
    first_block: u32,
    first_segment: u32,
    decay: f32,
    rest: f32,
    padding: u32,
}

/// `struct Update` of `update.cu`.
#[repr(C)]
struct UpdateJob {
    units: [UnitJob; MOST_UNITS],
    segments: u64,
    factors: u64,
    n_units: u32,
    n_factors: u32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    epsilon: f32,
}

impl UpdateKernels {
    /// Returns the kernels for the device of `tensor`, which are compiled once for each device.
    /// Returns `None` if the device is no NVIDIA GPU, or if the kernels cannot be compiled or have
    /// been found wrong; the last two add a [notice](product_kernels::notices).
    pub fn on_device_of(tensor: &Tensor<1>) -> Option<Self> {
        let tensor = primitive(tensor)?;
        if !is_cuda(&tensor.client) {
            return None;
        }
        let device = tensor.client.service_id().device;
        let mut kernels = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
        kernels.entry(device).or_insert_with(|| Self::load(&tensor)).clone()
    }

    fn load(tensor: &CubeTensor) -> Option<Self> {
        let source = format!("{CUDA_MACROS}{SOURCE}");
        match Module::load(&tensor.client, &source, NAMES) {
            Ok(module) => Some(Self { module: Arc::new(module) }),
            Err(reason) => {
                product_kernels::notice(format!("using CubeCL's kernels to update weights: {reason}"));
                None
            }
        }
    }

    /// Disables the kernels on the device of `tensor`, whose results were wrong as described by
    /// `fault`.
    pub fn discard(tensor: &Tensor<1>, fault: &str) {
        let Some(tensor) = primitive(tensor) else { return };
        let mut kernels = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
        kernels.insert(tensor.client.service_id().device, None);
        product_kernels::notice(format!(
            "using CubeCL's kernels to update weights: those for NVIDIA GPUs {fault}"
        ));
    }

    /// Returns the sums of squares of blocks of gradients, `[blocks]`.
    ///
    /// # Panics
    /// If a block is not within its gradient, or blocks are not in the order of their gradients.
    pub fn sum_squares(&self, grads: &[Tensor<1>], blocks: &[Block]) -> Tensor<1> {
        let grads: Vec<CubeTensor> = grads.iter().map(on_gpu).collect();
        let like = &grads[0];
        let sums = empty(like, blocks.len());
        // A launch has the addresses of MOST_UNITS gradients, which are numbered within the launch.
        let mut words = Vec::with_capacity(3 * blocks.len());
        for block in blocks {
            let n = grads[block.tensor].meta.shape()[0];
            assert!(block.start <= block.end && block.end <= n, "{block:?} of {n} elements");
            words.extend([word(block.tensor % MOST_UNITS), word(block.start), word(block.end)]);
        }
        let table = upload(like, &words);
        let mut first = 0;
        for (index, grads) in grads.chunks(MOST_UNITS).enumerate() {
            let launched = blocks[first..].iter().take_while(|block| block.tensor / MOST_UNITS == index);
            let n_blocks = launched.count();
            if n_blocks == 0 {
                continue;
            }
            let n_grads = grads.len();
            let mut read: Vec<Handle> = grads.iter().map(|grad| grad.handle.clone()).collect();
            read.push(table.clone());
            if index > 0 {
                // Declared as an input, so that a failure of an earlier launch, which has written
                // other sums, is kept.
                read.push(sums.handle.clone());
            }
            let module = Arc::clone(&self.module);
            // Launches of one stream write different sums.
            stream::queue(
                &like.client,
                NAMES[SUM_SQUARES],
                read,
                vec![sums.handle.clone()],
                move |stream: Stream<'_>| {
                    let addresses = stream.addresses;
                    let mut job = GradientsJob {
                        grads: [0; MOST_UNITS],
                        blocks: addresses[n_grads],
                        sums: addresses[addresses.len() - 1],
                        first: word(first),
                    };
                    job.grads[..n_grads].copy_from_slice(&addresses[..n_grads]);
                    let grid = Grid { n_blocks, n_threads: SUM_THREADS };
                    // SAFETY: `GradientsJob` is the kernel's argument; blocks lie within gradients,
                    // and there is a sum for each block.
                    unsafe { module.launch(SUM_SQUARES, grid, &stream, &job) }
                },
            );
            first += n_blocks;
        }
        assert_eq!(first, blocks.len(), "blocks are in the order of their gradients");
        Tensor::from_primitive::<CubeBackend>(sums)
    }

    /// Computes the clip factors of groups. `groups` has the indices of the sums of each group. The
    /// step is finite if all norms and all `losses`, `[n]`, are.
    pub fn clip_factors(
        &self,
        sums: &Tensor<1>,
        groups: &[Vec<usize>],
        losses: &Tensor<1>,
        clip_norm: f64,
        epsilon: f64,
    ) -> ClipFactors {
        let sums = on_gpu(sums);
        let losses = on_gpu(losses);
        let mut starts = Vec::with_capacity(groups.len() + 1);
        let mut numbers = Vec::new();
        for group in groups {
            starts.push(word(numbers.len()));
            numbers.extend(group.iter().map(|number| word(*number)));
        }
        starts.push(word(numbers.len()));
        let n_starts = starts.len();
        let table = upload(&sums, &[starts, numbers].concat());
        let values = empty(&sums, groups.len() + 1);
        let n_groups = groups.len();
        let n_losses = losses.meta.shape()[0];
        let module = Arc::clone(&self.module);
        let read = vec![sums.handle.clone(), losses.handle.clone(), table];
        stream::queue(
            &sums.client,
            NAMES[CLIP_FACTORS],
            read,
            vec![values.handle.clone()],
            move |stream: Stream<'_>| {
                let [sums, losses, table, factors] = *stream.addresses else {
                    return Err("clip factors have four buffers".into());
                };
                let job = NormsJob {
                    sums,
                    starts: table,
                    numbers: table + 4 * n_starts as u64,
                    losses,
                    factors,
                    clip_norm,
                    epsilon,
                    n_groups: word(n_groups),
                    n_losses: word(n_losses),
                };
                let grid = Grid { n_blocks: n_groups + 1, n_threads: SUM_THREADS };
                // SAFETY: `NormsJob` is the kernel's argument; numbers are within the sums, and
                // there is a factor for each block.
                unsafe { module.launch(CLIP_FACTORS, grid, &stream, &job) }
            },
        );
        ClipFactors { values }
    }

    /// Returns the number of units that the next launch of [`UpdateKernels::adam_w`] updates, given
    /// their numbers of elements: at least one, if there is one.
    pub fn n_units_of_launch(lengths: &[usize]) -> usize {
        let mut n_elements = 0;
        for (index, n) in lengths.iter().take(MOST_UNITS).enumerate() {
            n_elements += n;
            if index > 0 && n_elements > MOST_ELEMENTS {
                return index;
            }
        }
        lengths.len().min(MOST_UNITS)
    }

    /// Updates units by AdamW in one launch, with the clip factors of the segments, or with
    /// `factors`.
    ///
    /// # Panics
    /// If there is no unit, or more than a launch can update; if shards of a unit differ in length,
    /// or its segments do not end with it.
    pub fn adam_w(
        &self,
        units: Vec<Unit>,
        constants: AdamWConstants,
        factors: Option<&ClipFactors>,
    ) -> Vec<MovedUnit> {
        assert!((1..=MOST_UNITS).contains(&units.len()), "{} units", units.len());
        let n_factors = factors.map_or(0, |factors| factors.values.meta.shape()[0]);
        let like = on_gpu(&units[0].weights);
        let mut words = Vec::new();
        let mut jobs = Vec::with_capacity(units.len());
        let mut read = Vec::new();
        let mut written = Vec::new();
        let mut updated = Vec::with_capacity(units.len());
        let mut n_blocks = 0;
        for unit in units {
            let n = unit.weights.dims()[0];
            unit.check(n_factors);
            let decay = unit.follower.as_ref().map_or(0.0, |follower| follower.decay);
            let is_follower_rounded = unit.follower.as_ref().is_some_and(|follower| follower.is_rounded);
            jobs.push(UnitJob {
                n: word(n),
                first_block: word(n_blocks),
                first_segment: word(words.len() / SEGMENT_WORDS),
                decay: decay as f32,
                rest: (1.0 - decay) as f32,
                // 1 stands for an address that is set when the launch is queued.
                follower: u64::from(unit.follower.is_some()),
                to_rounded: u64::from(unit.is_rounded),
                to_rounded_follower: u64::from(is_follower_rounded),
                ..UnitJob::default()
            });
            n_blocks += n.div_ceil(ELEMENTS);
            for segment in &unit.segments {
                words.extend([word(segment.end), word(segment.group), u32::from(segment.is_frozen)]);
                words.extend([segment.shrink, segment.clip, segment.rate, segment.root].map(f32::to_bits));
            }
            for tensor in [&unit.grad, &unit.weights, &unit.exp_avg, &unit.exp_avg_sq] {
                read.push(on_gpu(tensor).handle);
            }
            read.extend(unit.follower.iter().map(|follower| on_gpu(&follower.weights).handle));
            // In the order in which the addresses are read below.
            let weights = allocate_output(&like, n, DType::F32, &mut written);
            let exp_avg = allocate_output(&like, n, DType::F32, &mut written);
            let exp_avg_sq = allocate_output(&like, n, DType::F32, &mut written);
            let in_bf16 = unit.is_rounded.then(|| allocate_output(&like, n, DType::BF16, &mut written));
            let weights = MovedWeights { values: weights, in_bf16 };
            let follower = unit.follower.map(|follower| {
                let values = allocate_output(&like, n, DType::F32, &mut written);
                let in_bf16 =
                    follower.is_rounded.then(|| allocate_output(&like, n, DType::BF16, &mut written));
                MovedWeights { values, in_bf16 }
            });
            updated.push(MovedUnit { weights, exp_avg, exp_avg_sq, follower });
        }
        let n_read = read.len();
        read.push(upload(&like, &words));
        read.extend(factors.map(|factors| factors.values.handle.clone()));
        let module = Arc::clone(&self.module);
        stream::queue(&like.client, NAMES[ADAM_W], read, written, move |stream: Stream<'_>| {
            let (inputs, addresses) = stream.addresses.split_at(n_read);
            let (tables, outputs) = addresses.split_at(1 + usize::from(n_factors > 0));
            let mut inputs = inputs.iter().copied();
            let mut outputs = outputs.iter().copied();
            let mut job = UpdateJob {
                units: [UnitJob::default(); MOST_UNITS],
                segments: tables[0],
                factors: tables.get(1).copied().unwrap_or(0),
                n_units: word(jobs.len()),
                n_factors: word(n_factors),
                beta1: constants.first,
                rest1: 1.0 - constants.first,
                beta2: constants.second,
                rest2: 1.0 - constants.second,
                epsilon: constants.epsilon,
            };
            for (slot, unit) in job.units.iter_mut().zip(jobs) {
                *slot = unit;
                slot.grad = inputs.next().ok_or(NO_ADDRESS)?;
                slot.weights = inputs.next().ok_or(NO_ADDRESS)?;
                slot.exp_avg = inputs.next().ok_or(NO_ADDRESS)?;
                slot.exp_avg_sq = inputs.next().ok_or(NO_ADDRESS)?;
                slot.to_weights = outputs.next().ok_or(NO_ADDRESS)?;
                slot.to_exp_avg = outputs.next().ok_or(NO_ADDRESS)?;
                slot.to_exp_avg_sq = outputs.next().ok_or(NO_ADDRESS)?;
                if unit.to_rounded != 0 {
                    slot.to_rounded = outputs.next().ok_or(NO_ADDRESS)?;
                }
                if unit.follower != 0 {
                    slot.follower = inputs.next().ok_or(NO_ADDRESS)?;
                    slot.to_follower = outputs.next().ok_or(NO_ADDRESS)?;
                }
                if unit.to_rounded_follower != 0 {
                    slot.to_rounded_follower = outputs.next().ok_or(NO_ADDRESS)?;
                }
            }
            let grid = Grid { n_blocks, n_threads: UPDATE_THREADS };
            // SAFETY: `UpdateJob` is the kernel's argument; each unit's buffers have its `n`
            // elements, and its segments end with the last of them.
            unsafe { module.launch(ADAM_W, grid, &stream, &job) }
        });
        updated
    }
}

impl Unit {
    /// Asserts the kernel's requirements: shards of equal lengths, segments that end with them, and
    /// a factor for each group if there are `n_factors`.
    fn check(&self, n_factors: usize) {
        let n = self.weights.dims()[0];
        for tensor in [&self.grad, &self.exp_avg, &self.exp_avg_sq] {
            assert_eq!(tensor.dims()[0], n, "shards of a unit have one length");
        }
        if let Some(follower) = &self.follower {
            assert_eq!(follower.weights.dims()[0], n, "a follower's shard has the length of the unit's");
        }
        assert!(self.segments.is_sorted_by_key(|segment| segment.end), "segments are in their order");
        assert_eq!(self.segments.last().map_or(0, |last| last.end), n, "the last segment ends with the unit");
        if n_factors > 0 {
            let have_factors = self.segments.iter().all(|segment| segment.group < n_factors);
            assert!(have_factors, "each group has a factor");
        }
    }
}

impl ClipFactors {
    /// Returns the factors, `[groups + 1]`, the last one for the losses: negative where a norm or a
    /// loss is not finite.
    pub fn values(&self) -> Tensor<1> {
        Tensor::from_primitive::<CubeBackend>(self.values.clone())
    }
}

/// The kernels of each device; `None` for those that cannot be compiled or have been found wrong.
static KERNELS: LazyLock<Mutex<HashMap<DeviceId, Option<UpdateKernels>>>> = LazyLock::new(Mutex::default);

/// Returns the contiguous CubeCL tensor of a tensor of f32; `None` for any other type or backend.
fn primitive(tensor: &Tensor<1>) -> Option<CubeTensor> {
    let tensor: CubeTensor = tensor.clone().try_into_primitive::<CubeBackend>().ok()?;
    if tensor.dtype != DType::F32 {
        return None;
    }
    Some(burn_cubecl::kernel::into_contiguous(tensor))
}

fn on_gpu(tensor: &Tensor<1>) -> CubeTensor {
    primitive(tensor).expect("whoever has the kernels has asked `on_device_of`")
}

/// Allocates `n` numbers of f32 on the device of `like`.
fn empty(like: &CubeTensor, n: usize) -> CubeTensor {
    empty_with_dtype(like, n, DType::F32)
}

/// Allocates `n` numbers of `dtype` on the device of `like`.
fn empty_with_dtype(like: &CubeTensor, n: usize, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), [n].into(), dtype)
}

/// Allocates `n` numbers of `dtype` on the device of `like`, and adds the buffer to `written`.
fn allocate_output(like: &CubeTensor, n: usize, dtype: DType, written: &mut Vec<Handle>) -> Tensor<1> {
    let tensor = empty_with_dtype(like, n, dtype);
    written.push(tensor.handle.clone());
    Tensor::from_primitive::<CubeBackend>(tensor)
}

/// Converts a number to the kernels' 32-bit words.
///
/// # Panics
/// If `n` is 2³² or more: a shard of 16 GiB.
fn word(n: usize) -> u32 {
    u32::try_from(n).expect("a shard has fewer than 2³² elements")
}

/// Copies a table to the device of `like`.
fn upload(like: &CubeTensor, words: &[u32]) -> Handle {
    like.client.create_from_slice(bytemuck::cast_slice(words))
}
