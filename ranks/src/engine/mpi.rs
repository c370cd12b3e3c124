//! MPI, through the `mpi` crate: between processes and nodes, over any fabric that the library
//! supports.
//!
//! The library is started in the thread that makes the engine and is called by no other, so that it
//! needs no more than `MPI_THREAD_FUNNELED`. Counts are C ints: longer buffers are sent in pieces.

use std::rc::Rc;

use mpi::Threading;
use mpi::collective::{CommunicatorCollectives, Root, SystemOperation};
use mpi::environment::Universe;
use mpi::topology::{Color, Communicator, SimpleCommunicator};

use super::connector::{Connector, Site};
use super::{Engine, Reduction, check_parts};
use crate::error::EngineError;

/// A rank of an MPI communicator.
pub(super) struct Mpi {
    // Declared, and so dropped, before the universe, which finalizes MPI and with it all
    // communicators.
    communicator: SimpleCommunicator,
    universe: Rc<Universe>,
    /// Elements that one call may move, over all ranks.
    max_count: usize,
}

/// MPI, before it is started.
pub(super) struct MpiConnector;

impl Connector for MpiConnector {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn library(&self) -> Result<String, String> {
        // Fails only if the library's description is not valid text.
        let version = mpi::environment::library_version().unwrap_or_else(|error| error.to_string());
        Ok(version.split(',').next().unwrap_or_default().to_string())
    }

    fn check(&self, site: &Site) -> Result<(), String> {
        if site.is_started_by_mpi {
            Ok(())
        } else {
            Err("the ranks were not started by MPI; start them with mpirun or srun --mpi=pmix".into())
        }
    }

    fn meets_by_itself(&self) -> bool {
        true
    }

    fn start(&self, site: &Site, _: Option<&mut dyn Engine>) -> Result<Box<dyn Engine>, EngineError> {
        let mut engine = Mpi::start()?;
        if let Some(max_count) = site.max_count {
            engine = engine.with_max_count(max_count);
        }
        let rank = engine.rank();
        let world_size = engine.world_size();
        if (rank, world_size) != (site.rank, site.world_size) {
            let reason = format!(
                "{} says rank {} of {}, MPI says {rank} of {world_size}: was ocelli built for the MPI that \
                 starts it? With srun, use --mpi=pmix",
                site.launcher, site.rank, site.world_size
            );
            return Err(EngineError::Unavailable { engine: "mpi", reason });
        }
        Ok(Box::new(engine))
    }
}

impl Mpi {
    /// Starts MPI in this thread; possible once per process.
    ///
    /// # Errors
    /// [`EngineError::Unavailable`].
    fn start() -> Result<Self, EngineError> {
        let (universe, threading) = mpi::initialize_with_threading(Threading::Funneled)
            .ok_or_else(|| unavailable("it was already started in this process"))?;
        if threading < Threading::Funneled {
            return Err(unavailable("the library was built without support for threads"));
        }
        let communicator = universe.world();
        Ok(Self { communicator, universe: Rc::new(universe), max_count: i32::MAX as usize })
    }

    /// Limits calls to `max_count` elements, for tests of buffers that would otherwise take
    /// gigabytes.
    fn with_max_count(mut self, max_count: usize) -> Self {
        self.max_count = max_count.max(self.world_size());
        self
    }

    /// Returns the ranges of a part of `n` elements that one call may move.
    fn pieces(&self, n: usize) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
        let step = (self.max_count / self.world_size()).max(1);
        (0..n).step_by(step).map(move |start| start..(start + step).min(n))
    }

    /// Returns true if one call moves parts of `n` elements.
    fn fits_one_call(&self, n: usize) -> bool {
        // Empty buffers have no address of their own, and MPI rejects two buffers at one address:
        // they are sent in pieces, of which they have none.
        n > 0 && n * self.world_size() <= self.max_count
    }
}

fn unavailable(reason: &str) -> EngineError {
    EngineError::Unavailable { engine: "mpi", reason: reason.into() }
}

/// Copies `range` of each of the parts of `n` elements of `whole`, one after another.
fn gather_pieces<T: Copy>(whole: &[T], n: usize, range: &std::ops::Range<usize>) -> Vec<T> {
    whole.chunks_exact(n.max(1)).flat_map(|part| part[range.clone()].iter().copied()).collect()
}

/// Copies `pieces` to `range` of each of the parts of `n` elements of `whole`: the inverse of
/// [`gather_pieces`].
fn scatter_pieces(whole: &mut [u8], n: usize, range: &std::ops::Range<usize>, pieces: &[u8]) {
    for (part, piece) in whole.chunks_exact_mut(n).zip(pieces.chunks_exact(range.len())) {
        part[range.clone()].copy_from_slice(piece);
    }
}

impl Engine for Mpi {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn rank(&self) -> usize {
        // MPI numbers ranks from zero.
        self.communicator.rank() as usize
    }

    fn world_size(&self) -> usize {
        self.communicator.size() as usize
    }

    fn all_gather(&mut self, mine: &[u8], all: &mut [u8]) -> Result<(), EngineError> {
        check_parts("all_gather", mine.len(), all.len(), self.world_size())?;
        if self.fits_one_call(mine.len()) {
            self.communicator.all_gather_into(mine, all);
            return Ok(());
        }
        for range in self.pieces(mine.len()) {
            let mut pieces = vec![0; range.len() * self.world_size()];
            self.communicator.all_gather_into(&mine[range.clone()], &mut pieces[..]);
            scatter_pieces(all, mine.len(), &range, &pieces);
        }
        Ok(())
    }

    fn all_to_all(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), EngineError> {
        let n = send.len() / self.world_size();
        check_parts("all_to_all", n, receive.len(), self.world_size())?;
        if self.fits_one_call(n) {
            self.communicator.all_to_all_into(send, receive);
            return Ok(());
        }
        for range in self.pieces(n) {
            let out = gather_pieces(send, n, &range);
            let mut pieces = vec![0; out.len()];
            self.communicator.all_to_all_into(&out[..], &mut pieces[..]);
            scatter_pieces(receive, n, &range, &pieces);
        }
        Ok(())
    }

    fn reduce_scatter(&mut self, full: &[f32], mine: &mut [f32]) -> Result<(), EngineError> {
        check_parts("reduce_scatter", mine.len(), full.len(), self.world_size())?;
        let sum = SystemOperation::sum();
        if self.fits_one_call(mine.len()) {
            self.communicator.reduce_scatter_block_into(full, mine, sum);
            return Ok(());
        }
        let n = mine.len();
        for range in self.pieces(n) {
            let out = gather_pieces(full, n, &range);
            self.communicator.reduce_scatter_block_into(&out[..], &mut mine[range], sum);
        }
        Ok(())
    }

    fn all_reduce(&mut self, values: &mut [f64], reduction: Reduction) -> Result<(), EngineError> {
        let operation = match reduction {
            Reduction::Sum => SystemOperation::sum(),
            Reduction::Max => SystemOperation::max(),
        };
        for values in values.chunks_mut(self.max_count) {
            let mine = values.to_vec();
            self.communicator.all_reduce_into(&mine[..], values, operation);
        }
        Ok(())
    }

    fn broadcast(&mut self, bytes: &mut [u8], root: usize) -> Result<(), EngineError> {
        let root = self.communicator.process_at_rank(root as i32);
        bytes.chunks_mut(self.max_count).for_each(|piece| root.broadcast_into(piece));
        Ok(())
    }

    fn split(&mut self, color: usize, key: usize) -> Result<Box<dyn Engine>, EngineError> {
        let color = Color::with_value(color as i32);
        let communicator = self.communicator.split_by_color_with_key(color, key as i32);
        let communicator = communicator.ok_or_else(|| unavailable("splitting the communicator gave none"))?;
        Ok(Box::new(Self { communicator, universe: Rc::clone(&self.universe), max_count: self.max_count }))
    }
}
