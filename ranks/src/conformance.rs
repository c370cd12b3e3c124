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
        /// Number of the rank.
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

/// Tries every operation with every length, over all ranks and over halves of them.
///
/// # Errors
/// The first operation that does not conform.
pub fn check(engine: &mut dyn Engine, trial: &mut CheckContext<'_>) -> Result<(), ConformanceError> {
    check_group(engine, trial)?;
    // Even and odd ranks, in reverse order: their groups work apart from one another and from the
    // whole.
    let rank = engine.rank();
    let world_size = engine.world_size();
    let mut half = engine.split(rank % 2, world_size - rank)?;
    let expected = (world_size - rank % 2).div_ceil(2);
    expect(half.as_ref(), trial, "split", rank, half.world_size() == expected)?;
    expect(half.as_ref(), trial, "split", rank, half.rank() == expected - 1 - rank / 2)?;
    check_group(half.as_mut(), trial)?;
    let mut alone = engine.split(rank, 0)?;
    check_group(alone.as_mut(), trial)?;
    check_group(engine, trial)
}

/// Buffers for timing the fabric: a gather and an exchange of one buffer, in host memory or, for an
/// engine that takes tensors, on the device.
pub enum TimingBuffers {
    /// Part that a rank contributes to a gather, and the gathered buffer, which an exchange sends.
    Host(Vec<u8>, Vec<u8>),
    /// Transfers of a gather and of an exchange.
    Tensors(Box<[Transfer; 2]>),
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
            return Ok(Self::Host(vec![1; 4 * n], vec![0; 4 * n * world_size]));
        }
        let send = |n: usize| Tensor::<1>::ones([n], device);
        let gather = Transfer::new(send(n), n * world_size, Wire::F32, true)?;
        let exchange = Transfer::new(send(n * world_size), n * world_size, Wire::F32, true)?;
        Ok(Self::Tensors(Box::new([gather, exchange])))
    }

    /// Runs the gather.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn gather(&mut self, engine: &mut dyn Engine) -> Result<(), EngineError> {
        match self {
            Self::Host(mine, all) => engine.all_gather(mine, all),
            Self::Tensors(transfers) => engine.all_gather_tensor(&mut transfers[0]),
        }
    }

    /// Runs the exchange.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn exchange(&mut self, engine: &mut dyn Engine) -> Result<(), EngineError> {
        match self {
            Self::Host(_, all) => {
                let mut received = vec![0; all.len()];
                engine.all_to_all(all, &mut received)
            }
            Self::Tensors(transfers) => engine.all_to_all_tensor(&mut transfers[1]),
        }
    }
}

fn check_group(engine: &mut dyn Engine, trial: &mut CheckContext<'_>) -> Result<(), ConformanceError> {
    for n in LENGTHS {
        movement(engine, n, trial)?;
        sums(engine, n, trial)?;
        ordered_sums(engine, n, trial)?;
        if n > 0 {
            on_tensors(engine, n, trial)?;
        }
    }
    small(engine, trial)
}

fn expect(
    engine: &dyn Engine,
    trial: &mut CheckContext<'_>,
    operation: &'static str,
    n: usize,
    holds: bool,
) -> Result<(), ConformanceError> {
    if holds {
        (trial.passed)(operation, n);
        return Ok(());
    }
    let (engine, rank, world_size) = (engine.name(), engine.rank(), engine.world_size());
    Err(ConformanceError::Wrong { engine, rank, world_size, operation, n })
}

/// Returns a value that depends on sender, receiver and index; small enough to be exact in bf16.
fn value(from: usize, to: usize, i: usize) -> f32 {
    ((from * 31 + to * 17 + i) % 256) as f32
}

/// Runs [`check`] on host tensors, without a callback.
#[cfg(test)]
pub(super) fn check_on_host(engine: &mut dyn Engine) -> Result<(), ConformanceError> {
    check(engine, &mut CheckContext { device: &Device::flex(), passed: &mut |_, _| {} })
}

fn movement(engine: &mut dyn Engine, n: usize, trial: &mut CheckContext<'_>) -> Result<(), ConformanceError> {
    let rank = engine.rank();
    let world_size = engine.world_size();
    for wire in [Wire::F32, Wire::Bf16] {
        let of = |from: usize, to: usize| (0..n).map(move |i| value(from, to, i));
        let encode = |values: Vec<f32>| {
            let mut bytes = vec![0; values.len() * wire.bytes()];
            wire::encode(&values, wire, &mut bytes);
            bytes
        };
        let mine = encode(of(rank, 0).collect());
        let mut all = vec![0; mine.len() * world_size];
        engine.all_gather(&mine, &mut all)?;
        let expected = encode((0..world_size).flat_map(|from| of(from, 0)).collect());
        expect(engine, trial, "all_gather", n, all == expected)?;

        let send = encode((0..world_size).flat_map(|to| of(rank, to)).collect());
        let mut receive = vec![0; send.len()];
        engine.all_to_all(&send, &mut receive)?;
        let expected = encode((0..world_size).flat_map(|from| of(from, rank)).collect());
        expect(engine, trial, "all_to_all", n, receive == expected)?;

        let root = world_size - 1;
        let mut bytes = if rank == root { encode(of(root, 1).collect()) } else { vec![7; mine.len()] };
        engine.broadcast(&mut bytes, root)?;
        expect(engine, trial, "broadcast", n, bytes == encode(of(root, 1).collect()))?;
    }
    Ok(())
}

/// Checks sums of small integers, which are exact in any order.
fn sums(engine: &mut dyn Engine, n: usize, trial: &mut CheckContext<'_>) -> Result<(), ConformanceError> {
    let rank = engine.rank();
    let world_size = engine.world_size();
    let full: Vec<f32> = (0..world_size).flat_map(|to| (0..n).map(move |i| value(rank, to, i))).collect();
    let expected: Vec<f32> = (0..n).map(|i| (0..world_size).map(|from| value(from, rank, i)).sum()).collect();
    let mut mine = vec![0.0; n];
    engine.reduce_scatter(&full, &mut mine)?;
    expect(engine, trial, "reduce_scatter", n, mine == expected)?;
    Ok(())
}

/// Checks the operations on tensors, which are never empty because units are not.
fn on_tensors(
    engine: &mut dyn Engine,
    n: usize,
    trial: &mut CheckContext<'_>,
) -> Result<(), ConformanceError> {
    let rank = engine.rank();
    let world_size = engine.world_size();
    let supports_device_tensors = engine.supports_device_tensors();
    let device = trial.device.clone();
    let transfer = |values: Vec<f32>, n_receive: usize, wire: Wire| {
        let len = values.len();
        let send = Tensor::<1>::from_data(TensorData::new(values, [len]), &device);
        Transfer::new(send, n_receive, wire, supports_device_tensors)
    };
    for wire in [Wire::F32, Wire::Bf16].into_iter().filter(|wire| device.supports_dtype(wire.dtype())) {
        let mut gather = transfer((0..n).map(|i| value(rank, 0, i)).collect(), n * world_size, wire)?;
        engine.all_gather_tensor(&mut gather)?;
        let all = to_host(gather.received().cast(DType::F32));
        let expected = (0..world_size).flat_map(|from| (0..n).map(move |i| value(from, 0, i)));
        expect(engine, trial, "all_gather of a tensor", n, all.into_iter().eq(expected))?;

        let to_each = || (0..world_size).flat_map(|to| (0..n).map(move |i| value(rank, to, i))).collect();
        let mut exchange = transfer(to_each(), n * world_size, wire)?;
        engine.all_to_all_tensor(&mut exchange)?;
        let received = exchange.received();
        let order: Vec<usize> = (0..world_size).collect();
        let mine = to_host(ordered::sum_of_parts(received.clone(), &order));
        let expected = (0..n).map(|i| (0..world_size).map(|from| value(from, rank, i)).sum::<f32>());
        expect(engine, trial, "sum of tensors in order", n, mine.into_iter().eq(expected))?;
        let received = to_host(received.cast(DType::F32));
        let expected = (0..world_size).flat_map(|from| (0..n).map(move |i| value(from, rank, i)));
        expect(engine, trial, "all_to_all of a tensor", n, received.into_iter().eq(expected))?;
        if wire == Wire::F32 {
            let mut reduction = transfer(to_each(), n, wire)?;
            engine.reduce_scatter_tensor(&mut reduction)?;
            let mine = to_host(reduction.received());
            let expected = (0..n).map(|i| (0..world_size).map(|from| value(from, rank, i)).sum::<f32>());
            expect(engine, trial, "reduce_scatter of a tensor", n, mine.into_iter().eq(expected))?;
        }
    }
    Ok(())
}

/// Checks sums whose last bits depend on the order, in the order of [`ordered`].
fn ordered_sums(
    engine: &mut dyn Engine,
    n: usize,
    trial: &mut CheckContext<'_>,
) -> Result<(), ConformanceError> {
    let rank = engine.rank();
    let world_size = engine.world_size();
    let real =
        |from: usize, i: usize| ((from * 7919 + i * 104_729) as f32).sin() * 10f32.powi(from as i32 % 5);
    let mine: Vec<f32> = (0..n).map(|i| real(rank, i)).collect();
    let order: Vec<usize> = (0..world_size).rev().collect();
    let sum = ordered::all_sum(engine, &mine, &order)?;
    let expected: Vec<f32> = (0..n)
        .map(|i: usize| ordered::fold(world_size, &mut |part| real(order[part], i), &|a, b| a + b))
        .collect();
    expect(engine, trial, "sum in order", n, sum == expected)
}

fn small(engine: &mut dyn Engine, trial: &mut CheckContext<'_>) -> Result<(), ConformanceError> {
    let rank = engine.rank();
    let world_size = engine.world_size();
    let mut values = [rank as f64, 1.0, -(rank as f64)];
    engine.all_reduce(&mut values, Reduction::Sum)?;
    let total = (0..world_size).sum::<usize>() as f64;
    expect(engine, trial, "all_reduce sum", 3, values == [total, world_size as f64, -total])?;
    let mut values = [rank as f64, -(rank as f64)];
    engine.all_reduce(&mut values, Reduction::Max)?;
    expect(engine, trial, "all_reduce max", 2, values == [world_size as f64 - 1.0, 0.0])?;
    let mut nan = [if rank == 0 { f64::NAN } else { 1.0 }];
    engine.all_reduce(&mut nan, Reduction::Sum)?;
    expect(engine, trial, "all_reduce of a NaN", 1, nan[0].is_nan())
}
