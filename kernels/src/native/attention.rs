//! Attention of packed sequences on an NVIDIA GPU, forward and backward, for heads of 64 and 128
//! channels in bf16. The kernels are in `attention.cu`.
//!
//! ```text
//! Q, K, V = qkv               [T, 3·H·D] bf16: for each sequence and head [n, D]
//! S = Q · Kᵀ / √D             L = log₂ Σ_j exp S_ij     [H, T] f32
//! P = softmax(S)              y = P · V                 [T, H·D] bf16
//! δ = rowsum(g ∘ y)           gP = g · Vᵀ               gS = P ∘ (gP - δ)
//! gQ = gS · K / √D            gK = gSᵀ · Q / √D         gV = Pᵀ · g
//! ```
//!
//! S and P exist only in registers, 16 rows at a time: the forward pass computes the softmax with a
//! running maximum (Milakov and Gimelshein 2018, arXiv:1805.02867), and the backward pass computes P
//! again from L, as in FlashAttention-2 (Dao 2023, arXiv:2307.08691). Unlike there, gQ is a pass of
//! its own instead of an atomic sum, so that results are bit-identical between runs.
//!
//! Sequences of all lengths share a launch: runs of sequences of one length are in the kernel's
//! argument.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::f32::consts::LOG2_E;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use cubecl::client::Client;
use cubecl_common::device::DeviceId;
use cubecl_runtime::server::Handle;

use super::cublaslt::{check_capability, first_line};
use super::module::{CUDA_MACROS, Grid, Module};
use super::stream::{self, Stream};

/// Source of the kernels, and of the functions that they use.
const SOURCE: &str = include_str!("attention.cu");
const INSTRUCTIONS: &str = include_str!("instructions.cu");

const NAMES: [&str; 3] = ["attention_forward", "attention_query_gradient", "attention_key_gradient"];
const FORWARD: usize = 0;
const QUERY_GRADIENT: usize = 1;
const KEY_GRADIENT: usize = 2;

// The constants of `attention.cu`.
const THREADS: usize = 128;
const ROWS: usize = 64;
const MOST_RUNS: usize = 256;

/// Numbers of channels of a head for which there are kernels.
const HEADS: [usize; 2] = [64, 128];

/// Elements of which row strides are multiples: 16 bytes, which are copied at a time. Buffers begin
/// at a multiple of 16 bytes.
pub(crate) const STRIDE_UNIT: usize = 8;

/// Number of bytes per query and head of the buffer [`Backward::totals`].
pub(crate) const TOTALS_BYTES: usize = 8;

/// Error message for a launch with fewer addresses than buffers.
const NO_ADDRESS: &str = "a buffer of attention has no address";

/// The kernels for heads of one size, on one device.
#[derive(Debug)]
pub(crate) struct AttentionKernels {
    module: Module<3>,
    d_head: usize,
}

/// Sequences of one length, one after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EqualSequences {
    /// Number of sequences.
    pub(crate) n: usize,
    /// Number of tokens of each of them.
    pub(crate) length: usize,
}

/// The sequences and heads of a matrix of tokens.
#[derive(Debug, Clone)]
pub(crate) struct Packed {
    /// Sequences, in the order of their rows.
    pub(crate) sequences: Vec<EqualSequences>,
    /// Number of heads.
    pub(crate) n_heads: usize,
}

/// A matrix with a row for each token.
pub(crate) struct Matrix {
    /// Buffer that begins with the first row.
    pub(crate) handle: Handle,
    /// Elements from the start of one row to the start of the next.
    pub(crate) stride: usize,
}

/// Buffers of the forward pass.
pub(crate) struct Forward {
    /// Queries, keys and values, `[T, 3·H·D]`.
    pub(crate) qkv: Matrix,
    /// The output, `[T, H·D]`.
    pub(crate) y: Matrix,
    /// L, `[H, T]`.
    pub(crate) logs: Handle,
}

/// Buffers of the backward pass.
pub(crate) struct Backward {
    /// Buffers of the forward pass, which are read.
    pub(crate) forward: Forward,
    /// Gradient of the output, `[T, H·D]`.
    pub(crate) grad: Matrix,
    /// Gradient of `qkv`, `[T, 3·H·D]`, which is written.
    pub(crate) qkv_grad: Matrix,
    /// [`TOTALS_BYTES`] for each query and head, `[H, T]`, which are written and read again.
    pub(crate) totals: Handle,
}

// `tests/cuda/attention.c` asserts the same of the structures of `attention.cu`.
const _: () = assert!(size_of::<RunJob>() == 12);
const _: () = assert!(size_of::<Job>() == 3160);

/// `struct Run` of `attention.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct RunJob {
    first_tile: u32,
    first_token: u32,
    length: u32,
}

/// `struct Attention` of `attention.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Job {
    qkv: u64,
    y: u64,
    grad: u64,
    qkv_grad: u64,
    logs: u64,
    totals: u64,
    qkv_stride: u32,
    y_stride: u32,
    grad_stride: u32,
    qkv_grad_stride: u32,
    n_tokens: u32,
    n_heads: u32,
    n_runs: u32,
    scale: f32,
    log_scale: f32,
    runs: [RunJob; MOST_RUNS],
}

/// A launch of each kernel of a pass, whose addresses are set when it is queued.
#[derive(Clone, Copy)]
struct Launch {
    job: Job,
    n_blocks: usize,
}

/// A pass that is ready to be queued.
struct Prepared {
    read: Vec<Handle>,
    written: Vec<Handle>,
    launches: Vec<Launch>,
}

impl Packed {
    /// Returns the number of tokens of all sequences.
    pub(crate) fn n_tokens(&self) -> usize {
        self.sequences.iter().map(|run| run.n * run.length).sum()
    }

    /// Returns the launches of a pass: one, unless there are more than [`MOST_RUNS`] runs. Strides
    /// are zero.
    fn launches(&self, d_head: usize) -> Vec<Launch> {
        let scale = (d_head as f32).powf(-0.5);
        let n_tokens = word(self.n_tokens());
        let sequences: Vec<EqualSequences> =
            self.sequences.iter().copied().filter(|run| run.n * run.length > 0).collect();
        let mut launches = Vec::new();
        let mut first_token = 0;
        for runs in sequences.chunks(MOST_RUNS) {
            let mut job = Job {
                qkv: 0,
                y: 0,
                grad: 0,
                qkv_grad: 0,
                logs: 0,
                totals: 0,
                qkv_stride: 0,
                y_stride: 0,
                grad_stride: 0,
                qkv_grad_stride: 0,
                n_tokens,
                n_heads: word(self.n_heads),
                n_runs: word(runs.len()),
                scale,
                log_scale: scale * LOG2_E,
                runs: [RunJob::default(); MOST_RUNS],
            };
            let mut n_tiles = 0;
            for (slot, run) in job.runs.iter_mut().zip(runs) {
                *slot = RunJob {
                    first_tile: word(n_tiles),
                    first_token: word(first_token),
                    length: word(run.length),
                };
                n_tiles += run.n * run.length.div_ceil(ROWS);
                first_token += run.n * run.length;
            }
            launches.push(Launch { job, n_blocks: n_tiles * self.n_heads });
        }
        launches
    }
}

impl AttentionKernels {
    /// Returns the kernels for heads of `d_head` channels on the device of `client`, which are
    /// compiled once for each device.
    ///
    /// # Errors
    /// The reason why they cannot be used.
    pub(crate) fn for_client(client: &Client, d_head: usize) -> Result<Arc<Self>, String> {
        type All = HashMap<(DeviceId, usize), Result<Arc<AttentionKernels>, String>>;
        static KERNELS: LazyLock<Mutex<All>> = LazyLock::new(Mutex::default);
        let key = (client.service_id().device, d_head);
        // Entries are inserted atomically: the map remains valid if a thread panics with the lock.
        let mut kernels = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
        kernels.entry(key).or_insert_with(|| Self::load(client, d_head)).clone()
    }

    /// Returns whether there are kernels for heads of `d_head` channels.
    pub(crate) fn supports(d_head: usize) -> bool {
        HEADS.contains(&d_head)
    }

    fn load(client: &Client, d_head: usize) -> Result<Arc<Self>, String> {
        assert!(Self::supports(d_head), "heads of {d_head} channels");
        check_capability(client)?;
        let source = format!("{CUDA_MACROS}#define HEAD {d_head}\n{INSTRUCTIONS}{SOURCE}");
        let module = Module::load(client, &source, NAMES)?;
        Ok(Arc::new(Self { module, d_head }))
    }

    /// Queues the forward pass behind everything that the calling thread has launched before.
    /// Errors are reported when its results are read.
    pub(crate) fn queue_forward(self: &Arc<Self>, client: &Client, packed: &Packed, buffers: Forward) {
        let Prepared { read, written, launches } = self.prepare_forward(packed, buffers);
        let kernels = Arc::clone(self);
        stream::queue(client, NAMES[FORWARD], read, written, move |stream: Stream<'_>| {
            kernels.run_forward(&launches, &stream)
        });
    }

    /// Queues the forward pass like [`AttentionKernels::queue_forward`], and waits until the driver
    /// has accepted it. The inner result is the driver's message if it refuses.
    ///
    /// # Errors
    /// The device's message, if a buffer has no memory.
    pub(crate) fn try_forward(
        &self,
        client: &Client,
        packed: &Packed,
        buffers: Forward,
    ) -> Result<Result<(), String>, String> {
        let Prepared { mut read, written, launches } = self.prepare_forward(packed, buffers);
        read.extend(written);
        let accepted = stream::wait_for(client, read, |stream| self.run_forward(&launches, &stream));
        accepted.map_err(|error| first_line(&error))
    }

    /// Queues the backward pass behind everything that the calling thread has launched before.
    /// Errors are reported when its results are read.
    pub(crate) fn queue_backward(self: &Arc<Self>, client: &Client, packed: &Packed, buffers: Backward) {
        let Prepared { read, written, launches } = self.prepare_backward(packed, buffers);
        let kernels = Arc::clone(self);
        stream::queue(client, NAMES[QUERY_GRADIENT], read, written, move |stream: Stream<'_>| {
            kernels.run_backward(&launches, &stream)
        });
    }

    /// Queues the backward pass, and waits, like [`AttentionKernels::try_forward`].
    ///
    /// # Errors
    /// The device's message, if a buffer has no memory.
    pub(crate) fn try_backward(
        &self,
        client: &Client,
        packed: &Packed,
        buffers: Backward,
    ) -> Result<Result<(), String>, String> {
        let Prepared { mut read, written, launches } = self.prepare_backward(packed, buffers);
        read.extend(written);
        let accepted = stream::wait_for(client, read, |stream| self.run_backward(&launches, &stream));
        accepted.map_err(|error| first_line(&error))
    }

    fn prepare_forward(&self, packed: &Packed, buffers: Forward) -> Prepared {
        let Forward { qkv, y, logs } = buffers;
        let mut launches = packed.launches(self.d_head);
        for Launch { job, .. } in &mut launches {
            job.qkv_stride = stride(&qkv);
            job.y_stride = stride(&y);
        }
        Prepared { read: vec![qkv.handle], written: vec![y.handle, logs], launches }
    }

    fn prepare_backward(&self, packed: &Packed, buffers: Backward) -> Prepared {
        let Backward { forward: Forward { qkv, y, logs }, grad, qkv_grad, totals } = buffers;
        let mut launches = packed.launches(self.d_head);
        for Launch { job, .. } in &mut launches {
            job.qkv_stride = stride(&qkv);
            job.y_stride = stride(&y);
            job.grad_stride = stride(&grad);
            job.qkv_grad_stride = stride(&qkv_grad);
        }
        let read = vec![qkv.handle, y.handle, logs, grad.handle];
        Prepared { read, written: vec![qkv_grad.handle, totals], launches }
    }

    /// Submits the forward pass, on the device's thread. Addresses are in the order of
    /// `prepare_forward`.
    fn run_forward(&self, launches: &[Launch], stream: &Stream<'_>) -> Result<(), String> {
        let [qkv, y, logs] = *stream.addresses else { return Err(NO_ADDRESS.into()) };
        for Launch { job, n_blocks } in launches {
            let job = Job { qkv, y, logs, ..*job };
            self.launch(FORWARD, *n_blocks, stream, &job)?;
        }
        Ok(())
    }

    /// Submits the backward pass, on the device's thread. Addresses are in the order of
    /// `prepare_backward`.
    fn run_backward(&self, launches: &[Launch], stream: &Stream<'_>) -> Result<(), String> {
        let [qkv, y, logs, grad, qkv_grad, totals] = *stream.addresses else {
            return Err(NO_ADDRESS.into());
        };
        for Launch { job, n_blocks } in launches {
            let job = Job { qkv, y, logs, grad, qkv_grad, totals, ..*job };
            // The second kernel reads the totals that the first one writes.
            self.launch(QUERY_GRADIENT, *n_blocks, stream, &job)?;
            self.launch(KEY_GRADIENT, *n_blocks, stream, &job)?;
        }
        Ok(())
    }

    fn launch(&self, index: usize, n_blocks: usize, stream: &Stream<'_>, job: &Job) -> Result<(), String> {
        let grid = Grid { n_blocks, n_threads: THREADS };
        // SAFETY: `Job` is the kernel's argument. The buffers have a row for each token of the
        // runs, at the job's strides, and there is a block for each head of each tile of the runs.
        let launched = unsafe { self.module.launch(index, grid, stream, job) };
        launched.map_err(|reason| format!("{}: {reason}", NAMES[index]))
    }
}

/// Returns the row stride of a matrix.
///
/// # Panics
/// If it is not a multiple of [`STRIDE_UNIT`].
fn stride(matrix: &Matrix) -> u32 {
    assert!(matrix.stride.is_multiple_of(STRIDE_UNIT), "rows {} elements apart", matrix.stride);
    word(matrix.stride)
}

/// Converts a number to the kernels' 32-bit words.
///
/// # Panics
/// If `n` is 2³² or more.
fn word(n: usize) -> u32 {
    u32::try_from(n).expect("a batch has fewer than 2³² tokens")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(sequences: &[(usize, usize)], n_heads: usize) -> Packed {
        let sequences = sequences.iter().map(|(n, length)| EqualSequences { n: *n, length: *length });
        Packed { sequences: sequences.collect(), n_heads }
    }

    /// Runs follow one another in tokens and in tiles; empty ones are left out.
    #[test]
    fn sequences_of_all_lengths_are_in_one_launch() {
        let packed = packed(&[(2, 197), (0, 50), (8, 37), (3, 0), (1, 64)], 6);
        assert_eq!(packed.n_tokens(), 2 * 197 + 8 * 37 + 64);
        let launches = packed.launches(64);
        assert_eq!(launches.len(), 1);
        let Launch { job, n_blocks } = launches[0];
        assert_eq!(n_blocks, (2 * 4 + 8 + 1) * 6);
        let expected = [(0, 0, 197), (8, 394, 37), (16, 690, 64)];
        let expected =
            expected.map(|(first_tile, first_token, length)| RunJob { first_tile, first_token, length });
        assert_eq!(job.runs[..3], expected);
        assert_eq!(job.n_runs, 3);
        assert_eq!(job.n_tokens, 754);
        assert_eq!(job.scale, 0.125);
    }

    #[test]
    fn many_lengths_need_several_launches() {
        let lengths: Vec<(usize, usize)> = (1..=300).map(|length| (1, length)).collect();
        let launches = packed(&lengths, 2).launches(128);
        assert_eq!(launches.len(), 2);
        let first_tokens: usize = (1..=256).sum();
        let second = &launches[1].job;
        assert_eq!(second.n_runs, 44);
        assert_eq!(second.runs[0], RunJob { first_tile: 0, first_token: first_tokens as u32, length: 257 });
        let n_tiles: usize = (257usize..=300).map(|length| length.div_ceil(64)).sum();
        assert_eq!(launches[1].n_blocks, 2 * n_tiles);
    }
}
