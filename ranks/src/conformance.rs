//! Requirements on every engine. Tests of each implementation call [`check`] on every rank, and so
//! does `ocelli doctor` on the machine that it runs on.

use burn_tensor::{DType, Device, Tensor, TensorData};
use kernels::device::host::to_host;

use crate::engine::{Engine, Reduction, Transfer};
use crate::error::EngineError;
use crate::ordered;
use crate::wire;
use crate::wire::Wire;

/// Elements per rank that the operations are tried with: none, fewer than ranks, odd, and more than
/// a page.
const LENGTHS: [usize; 6] = [0, 1, 3, 63, 64, 5001];

/// An operation that does not conform.
#[derive(Debug, thiserror::Error)]
pub enum ConformanceError {
    /// The operation failed.
    #[error(transparent)]
    Failed(#[from] EngineError),
    /// The operation returned wrong numbers.
    #[error("{engine}, rank {rank} of {world_size}: {operation} of {n} elements gives wrong numbers")]
    Wrong {
        /// Name of the engine.
        engine: &'static str,
        /// Index of the rank.
        rank: usize,
        /// Number of ranks.
        world_size: usize,
        /// The operation.
        operation: &'static str,
        /// Elements per rank.
        n: usize,
    },
}

/// Device and progress callback of a check.
pub struct CheckContext<'a> {
    /// Device of the tensors.
    pub device: &'a Device,
    /// Callback for every operation that passed, with its elements per rank. An operation that
    /// hangs is the one after the last call.
    pub passed: &'a mut dyn FnMut(&'static str, usize),
}

/// Tests every operation with several lengths: over all ranks, over the even and over the odd
/// ranks, and on each rank alone.
///
/// # Errors
/// The first operation that does not conform.
pub fn check(engine: &mut dyn Engine, context: &mut CheckContext<'_>) -> Result<(), ConformanceError> {
    check_group(engine, context)?;
    // Even and odd ranks, in reverse order: their groups must not affect one another or the group
    // of all ranks.
    let rank = engine.rank();
    let world_size = engine.world_size();
    let mut half = engine.split(rank % 2, world_size - rank)?;
    let expected = (world_size - rank % 2).div_ceil(2);
    expect(half.as_ref(), context, "split", rank, half.world_size() == expected)?;
    expect(half.as_ref(), context, "split", rank, half.rank() == expected - 1 - rank / 2)?;
    check_group(half.as_mut(), context)?;
    let mut single = engine.split(rank, 0)?;
    check_group(single.as_mut(), context)?;
    check_group(engine, context)
}

/// Buffers for timing the fabric: a gather and an exchange of one buffer, in host memory or, for an
/// engine that takes tensors, on the device.
pub enum TimingBuffers {
    /// Buffers in host memory.
    Host {
        /// Part that a rank contributes to a gather.
        mine: Vec<u8>,
        /// Gathered buffer, which an exchange sends.
        all: Vec<u8>,
    },
    /// Transfers of tensors.
    Tensors {
        /// Transfer of a gather.
        gather: Box<Transfer>,
        /// Transfer of an exchange.
        exchange: Box<Transfer>,
    },
}

impl TimingBuffers {
    /// Creates buffers for a gather of `bytes` bytes over all ranks.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn new(engine: &dyn Engine, device: &Device, bytes: usize) -> Result<Self, EngineError> {
        let world_size = engine.world_size();
        let n = (bytes / 4 / world_size).max(1);
        if !engine.supports_device_tensors() {
            return Ok(Self::Host { mine: vec![1; 4 * n], all: vec![0; 4 * n * world_size] });
        }
        let mine = Tensor::<1>::ones([n], device);
        let gather = Transfer::new(mine, n * world_size, Wire::F32, true)?;
        let all = Tensor::<1>::ones([n * world_size], device);
        let exchange = Transfer::new(all, n * world_size, Wire::F32, true)?;
        Ok(Self::Tensors { gather: Box::new(gather), exchange: Box::new(exchange) })
    }

    /// Runs the gather.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn gather(&mut self, engine: &mut dyn Engine) -> Result<(), EngineError> {
        match self {
            Self::Host { mine, all } => engine.all_gather(mine, all),
            Self::Tensors { gather, .. } => engine.all_gather_tensor(gather),
        }
    }

    /// Runs the exchange.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn exchange(&mut self, engine: &mut dyn Engine) -> Result<(), EngineError> {
        match self {
            Self::Host { all, .. } => {
                let mut received = vec![0; all.len()];
                engine.all_to_all(all, &mut received)
            }
            Self::Tensors { exchange, .. } => engine.all_to_all_tensor(exchange),
        }
    }
}

fn check_group(engine: &mut dyn Engine, context: &mut CheckContext<'_>) -> Result<(), ConformanceError> {
    for n in LENGTHS {
        check_moves(engine, n, context)?;
        check_sums(engine, n, context)?;
        check_ordered_sums(engine, n, context)?;
        if n > 0 {
            check_tensors(engine, n, context)?;
        }
    }
    check_all_reduce(engine, context)
}

fn expect(
    engine: &dyn Engine,
    context: &mut CheckContext<'_>,
    operation: &'static str,
    n: usize,
    holds: bool,
) -> Result<(), ConformanceError> {
    if holds {
        (context.passed)(operation, n);
        return Ok(());
    }
    Err(ConformanceError::Wrong {
        engine: engine.name(),
        rank: engine.rank(),
        world_size: engine.world_size(),
        operation,
        n,
    })
}

/// Returns a value that depends on sender, receiver and index; small enough to be exact in bf16.
fn value(from: usize, to: usize, i: usize) -> f32 {
    ((from * 31 + to * 17 + i) % 256) as f32
}

/// Runs [`check`] on host tensors, without a callback.
#[cfg(test)]
pub(crate) fn check_on_host(engine: &mut dyn Engine) -> Result<(), ConformanceError> {
    check(engine, &mut CheckContext { device: &Device::flex(), passed: &mut |_, _| {} })
}

/// Returns the `n` values that rank `from` sends to rank `to`.
fn values(from: usize, to: usize, n: usize) -> impl Iterator<Item = f32> {
    (0..n).map(move |i| value(from, to, i))
}

/// Returns the values that rank `from` sends to all ranks, `[W·n]`.
fn sent_by(from: usize, world_size: usize, n: usize) -> Vec<f32> {
    (0..world_size).flat_map(|to| values(from, to, n)).collect()
}

/// Returns the values that all ranks send to rank `to`, `[W·n]`.
fn sent_to(to: usize, world_size: usize, n: usize) -> Vec<f32> {
    (0..world_size).flat_map(|from| values(from, to, n)).collect()
}

/// Returns the sum over ranks of the values that they send to rank `to`, `[n]`: small integers,
/// whose sum is exact in any order.
fn sum_to(to: usize, world_size: usize, n: usize) -> Vec<f32> {
    (0..n).map(|i| (0..world_size).map(|from| value(from, to, i)).sum()).collect()
}

fn encode(values: &[f32], wire: Wire) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * wire.bytes()];
    wire::encode(values, wire, &mut bytes);
    bytes
}

/// Checks the operations that move bytes.
fn check_moves(
    engine: &mut dyn Engine,
    n: usize,
    context: &mut CheckContext<'_>,
) -> Result<(), ConformanceError> {
    let rank = engine.rank();
    let world_size = engine.world_size();
    for wire in [Wire::F32, Wire::Bf16] {
        let mine = encode(&values(rank, 0, n).collect::<Vec<_>>(), wire);
        let mut all = vec![0; mine.len() * world_size];
        engine.all_gather(&mine, &mut all)?;
        let expected = encode(&sent_to(0, world_size, n), wire);
        expect(engine, context, "all_gather", n, all == expected)?;

        let send = encode(&sent_by(rank, world_size, n), wire);
        let mut receive = vec![0; send.len()];
        engine.all_to_all(&send, &mut receive)?;
        let expected = encode(&sent_to(rank, world_size, n), wire);
        expect(engine, context, "all_to_all", n, receive == expected)?;

        let root = world_size - 1;
        let expected = encode(&values(root, 1, n).collect::<Vec<_>>(), wire);
        let mut bytes = if rank == root { expected.clone() } else { vec![7; mine.len()] };
        engine.broadcast(&mut bytes, root)?;
        expect(engine, context, "broadcast", n, bytes == expected)?;
    }
    Ok(())
}

/// Checks sums of small integers, which are exact in any order.
fn check_sums(
    engine: &mut dyn Engine,
    n: usize,
    context: &mut CheckContext<'_>,
) -> Result<(), ConformanceError> {
    let rank = engine.rank();
    let world_size = engine.world_size();
    let full = sent_by(rank, world_size, n);
    let mut mine = vec![0.0; n];
    engine.reduce_scatter(&full, &mut mine)?;
    expect(engine, context, "reduce_scatter", n, mine == sum_to(rank, world_size, n))
}

/// Creates a transfer that sends `values` and receives `n_receive` elements; with `device_memory`,
/// from and to the memory of `device`.
fn new_transfer(
    values: Vec<f32>,
    n_receive: usize,
    wire: Wire,
    device: &Device,
    device_memory: bool,
) -> Result<Transfer, EngineError> {
    let len = values.len();
    let send = Tensor::<1>::from_data(TensorData::new(values, [len]), device);
    Transfer::new(send, n_receive, wire, device_memory)
}

/// Checks the operations on tensors, which are never empty because units are not.
fn check_tensors(
    engine: &mut dyn Engine,
    n: usize,
    context: &mut CheckContext<'_>,
) -> Result<(), ConformanceError> {
    let rank = engine.rank();
    let world_size = engine.world_size();
    let device_memory = engine.supports_device_tensors();
    let device = context.device;
    for wire in [Wire::F32, Wire::Bf16] {
        if !device.supports_dtype(wire.dtype()) {
            continue;
        }
        let mine = values(rank, 0, n).collect();
        let mut gather = new_transfer(mine, n * world_size, wire, device, device_memory)?;
        engine.all_gather_tensor(&mut gather)?;
        let all = to_host(gather.received().cast(DType::F32));
        expect(engine, context, "all_gather of a tensor", n, all == sent_to(0, world_size, n))?;

        let full = sent_by(rank, world_size, n);
        let mut exchange = new_transfer(full.clone(), n * world_size, wire, device, device_memory)?;
        engine.all_to_all_tensor(&mut exchange)?;
        let received = exchange.received();
        let order: Vec<usize> = (0..world_size).collect();
        let sum = to_host(ordered::sum_of_parts(received.clone(), &order));
        expect(engine, context, "sum of tensors in order", n, sum == sum_to(rank, world_size, n))?;
        let received = to_host(received.cast(DType::F32));
        expect(engine, context, "all_to_all of a tensor", n, received == sent_to(rank, world_size, n))?;
        if wire == Wire::F32 {
            let mut reduction = new_transfer(full, n, wire, device, device_memory)?;
            engine.reduce_scatter_tensor(&mut reduction)?;
            let sum = to_host(reduction.received());
            expect(engine, context, "reduce_scatter of a tensor", n, sum == sum_to(rank, world_size, n))?;
        }
    }
    Ok(())
}

/// Returns a value of rank `from` that is rounded in a sum.
fn inexact_value(from: usize, i: usize) -> f32 {
    ((from * 7919 + i * 104_729) as f32).sin() * 10f32.powi(from as i32 % 5)
}

/// Checks sums whose last bits depend on the order, in the order of [`ordered`].
fn check_ordered_sums(
    engine: &mut dyn Engine,
    n: usize,
    context: &mut CheckContext<'_>,
) -> Result<(), ConformanceError> {
    let rank = engine.rank();
    let world_size = engine.world_size();
    let mine: Vec<f32> = (0..n).map(|i| inexact_value(rank, i)).collect();
    let order: Vec<usize> = (0..world_size).rev().collect();
    let sum = ordered::all_sum(engine, &mine, &order)?;
    let mut expected = Vec::with_capacity(n);
    for i in 0..n {
        expected.push(ordered::fold(world_size, &mut |part| inexact_value(order[part], i), &|a, b| a + b));
    }
    expect(engine, context, "sum in order", n, sum == expected)
}

/// Checks reductions of a few numbers.
fn check_all_reduce(engine: &mut dyn Engine, context: &mut CheckContext<'_>) -> Result<(), ConformanceError> {
    let rank = engine.rank();
    let world_size = engine.world_size();
    let mut values = [rank as f64, 1.0, -(rank as f64)];
    engine.all_reduce(&mut values, Reduction::Sum)?;
    let total = (0..world_size).sum::<usize>() as f64;
    expect(engine, context, "all_reduce sum", 3, values == [total, world_size as f64, -total])?;
    let mut values = [rank as f64, -(rank as f64)];
    engine.all_reduce(&mut values, Reduction::Max)?;
    expect(engine, context, "all_reduce max", 2, values == [world_size as f64 - 1.0, 0.0])?;
    let mut nan = [if rank == 0 { f64::NAN } else { 1.0 }];
    engine.all_reduce(&mut nan, Reduction::Sum)?;
    expect(engine, context, "all_reduce of a NaN", 1, nan[0].is_nan())
}
