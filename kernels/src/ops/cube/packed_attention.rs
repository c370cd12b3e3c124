//! Attention of packed sequences by [`crate::native::attention`]. Each size is checked when it is
//! first used.

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use burn_cubecl::tensor::CubeTensor;
use burn_tensor::DType;
use cubecl_runtime::server::Handle;

use super::check::RunError;
use super::check::attention::{Outputs, Subject, check_backward, check_forward};
use super::library::is_aligned;
use super::sizes::{Size, Sizes};
use super::{Rows, empty};
use crate::native::attention::{
    AttentionKernels, Backward, EqualSequences, Forward, Matrix, Packed, STRIDE_UNIT, TOTALS_BYTES,
};
use crate::native::stream::is_cuda;
use crate::ops::lengths::Lengths;
use crate::product_kernels::{self, ProductReport};

/// Smallest length that is told apart from others: one block has as many queries.
const SHORTEST_CLASS: usize = 64;

static SIZES: LazyLock<Sizes<AttentionSize, Arc<AttentionKernels>>> = LazyLock::new(|| Sizes::new("Ocelli"));

/// A pass over the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Pass {
    Forward,
    Backward,
}

/// What distinguishes launches that are checked separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct AttentionSize {
    pass: Pass,
    n_heads: usize,
    d_head: usize,
    /// Length of the longest sequence, rounded up to a power of two.
    longest: usize,
}

/// Results of the forward pass, and the input, for the backward pass.
#[derive(Debug, Clone)]
pub(in crate::ops) struct Attended {
    /// Queries, keys and values, `[T, 3·H·D]`.
    pub(super) qkv: Rows,
    /// The output, `[T, H·D]`.
    pub(super) y: CubeTensor,
    /// Logarithms of the sums of exponentials of scores, `[H, T]` of f32.
    logs: CubeTensor,
}

impl Size for AttentionSize {
    fn describe(&self) -> String {
        let Self { pass, n_heads, d_head, longest } = self;
        let pass = match pass {
            Pass::Forward => "attention",
            Pass::Backward => "gradient of attention",
        };
        format!("{pass}, {n_heads} heads of {d_head}, up to {longest} tokens, bf16")
    }
}

/// Computes the attention of `n_heads` heads within each sequence of `qkv` of `[T, 3·H·D]`; `None`
/// if there are no kernels for it.
pub(super) fn forward(qkv: &CubeTensor, n_heads: usize, lengths: &Lengths) -> Option<Attended> {
    let client = &qkv.client;
    let width = qkv.meta.shape()[1] / 3;
    let is_supported = qkv.dtype == DType::BF16 && AttentionKernels::supports(width / n_heads);
    if !is_supported || !product_kernels::library_is_chosen() || !is_cuda(client) {
        return None;
    }
    assert_eq!(qkv.meta.shape()[0], lengths.n_tokens(), "a row for each token");
    let qkv = readable(qkv)?;
    let packed = packed(n_heads, lengths);
    let size = size(Pass::Forward, &qkv, n_heads, lengths);
    let kernels = SIZES.plan(client, &size, || AttentionKernels::for_client(client, size.d_head))?;
    SIZES.check_if_due(client, &size, || {
        let sequences: Vec<Range<usize>> = lengths.ranges().collect();
        let seed = product_kernels::check_number();
        let subject = Subject { qkv: &qkv, sequences: &sequences, n_heads, seed };
        check_forward(&subject, &|outputs: &Outputs| {
            let accepted =
                kernels.try_forward(client, &packed, forward_buffers(&qkv, &outputs.y, &outputs.logs));
            accepted.map_err(|_| RunError::Device)?.map_err(RunError::Library)
        })
    })?;
    let y = empty(&qkv.tensor, [qkv.n_rows, width], DType::BF16);
    let logs = empty(&qkv.tensor, [n_heads, qkv.n_rows], DType::F32);
    kernels.queue_forward(client, &packed, forward_buffers(&qkv, &y, &logs));
    Some(Attended { qkv, y, logs })
}

/// Computes the gradient of the input, `[T, 3·H·D]`, given that of the output, `[T, H·D]`; `None`
/// if the kernels do not compute it.
pub(super) fn backward(
    attended: &Attended,
    grad: &CubeTensor,
    n_heads: usize,
    lengths: &Lengths,
) -> Option<CubeTensor> {
    let Attended { qkv, .. } = attended;
    let client = &qkv.tensor.client;
    if grad.dtype != DType::BF16 {
        return None;
    }
    let grad = readable(grad)?;
    assert_eq!(grad.n_rows, qkv.n_rows, "a row for each token");
    let packed = packed(n_heads, lengths);
    let size = size(Pass::Backward, qkv, n_heads, lengths);
    let kernels = SIZES.plan(client, &size, || AttentionKernels::for_client(client, size.d_head))?;
    let totals_bytes = n_heads * qkv.n_rows * TOTALS_BYTES;
    SIZES.check_if_due(client, &size, || {
        let sequences: Vec<Range<usize>> = lengths.ranges().collect();
        let seed = product_kernels::check_number();
        let subject = Subject { qkv, sequences: &sequences, n_heads, seed };
        check_backward(&subject, &attended.y, &grad, &|out: &CubeTensor| {
            let totals = client.empty(totals_bytes);
            let buffers = backward_buffers(attended, &grad, out, totals);
            let accepted = kernels.try_backward(client, &packed, buffers);
            accepted.map_err(|_| RunError::Device)?.map_err(RunError::Library)
        })
    })?;
    let out = empty(&qkv.tensor, [qkv.n_rows, qkv.d], DType::BF16);
    let totals = client.empty(totals_bytes);
    kernels.queue_backward(client, &packed, backward_buffers(attended, &grad, &out, totals));
    Some(out)
}

/// Returns the reports of all sizes, sorted by their descriptions.
pub(crate) fn reports() -> Vec<ProductReport> {
    SIZES.reports(describe_kernels)
}

fn describe_kernels(_: &Arc<AttentionKernels>) -> String {
    "own".into()
}

/// Returns the rows of a matrix, if the kernels can read them.
fn readable(matrix: &CubeTensor) -> Option<Rows> {
    let rows = Rows::new(matrix);
    if is_aligned(&rows.tensor) && rows.stride.is_multiple_of(STRIDE_UNIT) { Some(rows) } else { None }
}

fn size(pass: Pass, qkv: &Rows, n_heads: usize, lengths: &Lengths) -> AttentionSize {
    let longest = lengths.runs().iter().map(|run| run.length).max().unwrap_or(0);
    let longest = longest.next_power_of_two().max(SHORTEST_CLASS);
    AttentionSize { pass, n_heads, d_head: qkv.d / 3 / n_heads, longest }
}

fn packed(n_heads: usize, lengths: &Lengths) -> Packed {
    let mut sequences = Vec::with_capacity(lengths.runs().len());
    for run in lengths.runs() {
        sequences.push(EqualSequences { n: run.n_sequences, length: run.length });
    }
    Packed { sequences, n_heads }
}

fn forward_buffers(qkv: &Rows, y: &CubeTensor, logs: &CubeTensor) -> Forward {
    Forward { qkv: matrix(qkv), y: contiguous(y), logs: logs.handle.clone() }
}

fn backward_buffers(attended: &Attended, grad: &Rows, out: &CubeTensor, totals: Handle) -> Backward {
    let Attended { qkv, y, logs } = attended;
    Backward { forward: forward_buffers(qkv, y, logs), grad: matrix(grad), qkv_grad: contiguous(out), totals }
}

fn matrix(rows: &Rows) -> Matrix {
    Matrix { handle: rows.tensor.handle.clone(), stride: rows.stride }
}

/// Returns a matrix without space between its rows.
fn contiguous(tensor: &CubeTensor) -> Matrix {
    Matrix { handle: tensor.handle.clone(), stride: tensor.meta.shape()[1] }
}
