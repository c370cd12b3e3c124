//! Ranks as threads of one process, so that sharding can be tested on any machine.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::{Engine, Reduction, check_parts, color_members};
use crate::error::EngineError;

/// Shared state of a group of ranks.
#[derive(Debug, Default)]
pub struct LocalGroup {
    world_size: usize,
    round: Mutex<Round>,
    changed: Condvar,
}

/// One operation: every rank posts a message, every rank reads all messages, and the state is
/// reset.
#[derive(Debug, Default)]
struct Round {
    number: u64,
    messages: BTreeMap<usize, Arc<Message>>,
    n_readers: usize,
    /// Ranks whose engine has been dropped.
    ended: Vec<usize>,
    /// Groups that the split of this round has opened, by color.
    groups: Groups,
}

type Groups = BTreeMap<usize, Arc<LocalGroup>>;

#[derive(Debug, Default)]
struct Message {
    bytes: Vec<u8>,
    /// Arguments of a split.
    color: usize,
    key: usize,
}

/// One rank of a [`LocalGroup`].
#[derive(Debug)]
pub struct Local {
    rank: usize,
    group: Arc<LocalGroup>,
    n_operations: u64,
    supports_device_tensors: bool,
}

impl LocalGroup {
    /// Creates one engine for each of `world_size` ranks.
    pub fn ranks(world_size: usize) -> Vec<Local> {
        let group = Arc::new(Self { world_size, ..Self::default() });
        (0..world_size)
            .map(|rank| Local {
                rank,
                group: Arc::clone(&group),
                n_operations: 0,
                supports_device_tensors: false,
            })
            .collect()
    }

    /// Locks the round. A rank that panics leaves no half-made change, because rounds change in
    /// single statements.
    fn lock(&self) -> MutexGuard<'_, Round> {
        self.round.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the round changes.
    fn wait<'a>(&self, round: MutexGuard<'a, Round>) -> MutexGuard<'a, Round> {
        self.changed.wait(round).unwrap_or_else(PoisonError::into_inner)
    }
}

impl Local {
    /// Makes the engine take tensors, as an engine on device memory does, for tests of the tensors
    /// that it gets.
    pub fn with_tensors(mut self) -> Self {
        self.supports_device_tensors = true;
        self
    }

    /// Posts `message` and returns the messages of all ranks, by rank, with the groups that a split
    /// opens.
    fn exchange(
        &mut self,
        operation: &'static str,
        message: Message,
    ) -> Result<(Vec<Arc<Message>>, Groups), EngineError> {
        let group = &*self.group;
        let mut round = group.lock();
        while round.number != self.n_operations {
            self.check_alive(&round, operation)?;
            round = group.wait(round);
        }
        round.messages.insert(self.rank, Arc::new(message));
        group.changed.notify_all();
        while round.messages.len() < group.world_size {
            self.check_alive(&round, operation)?;
            round = group.wait(round);
        }
        let all: Vec<_> = round.messages.values().cloned().collect();
        if round.groups.is_empty() {
            let mut sizes = BTreeMap::<usize, usize>::new();
            all.iter().for_each(|message| *sizes.entry(message.color).or_default() += 1);
            round.groups = sizes
                .into_iter()
                .map(|(color, world_size)| (color, Arc::new(LocalGroup { world_size, ..Default::default() })))
                .collect();
        }
        let groups = round.groups.clone();
        round.n_readers += 1;
        if round.n_readers == group.world_size {
            let ended = std::mem::take(&mut round.ended);
            *round = Round { number: round.number + 1, ended, ..Round::default() };
            group.changed.notify_all();
        }
        self.n_operations += 1;
        Ok((all, groups))
    }

    /// Returns an error if an engine was dropped before it posted its message, which never comes.
    fn check_alive(&self, round: &Round, operation: &'static str) -> Result<(), EngineError> {
        match round.ended.iter().find(|rank| !round.messages.contains_key(rank)) {
            Some(&rank) => Err(EngineError::PeerLost {
                rank,
                how: "its thread has ended".into(),
                collective: operation,
                unit: "the group".into(),
                number: self.n_operations,
            }),
            None => Ok(()),
        }
    }

    fn exchange_bytes(
        &mut self,
        operation: &'static str,
        bytes: &[u8],
    ) -> Result<Vec<Arc<Message>>, EngineError> {
        Ok(self.exchange(operation, Message { bytes: bytes.to_vec(), ..Message::default() })?.0)
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.group.lock().ended.push(self.rank);
        self.group.changed.notify_all();
    }
}

impl Engine for Local {
    fn name(&self) -> &'static str {
        "local"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.group.world_size
    }

    fn all_gather(&mut self, mine: &[u8], all: &mut [u8]) -> Result<(), EngineError> {
        check_parts("all_gather", mine.len(), all.len(), self.world_size())?;
        for (rank, message) in self.exchange_bytes("all_gather", mine)?.iter().enumerate() {
            all[rank * mine.len()..(rank + 1) * mine.len()].copy_from_slice(&message.bytes);
        }
        Ok(())
    }

    fn all_to_all(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), EngineError> {
        let n = send.len() / self.world_size();
        check_parts("all_to_all", n, receive.len(), self.world_size())?;
        for (rank, message) in self.exchange_bytes("all_to_all", send)?.iter().enumerate() {
            receive[rank * n..(rank + 1) * n]
                .copy_from_slice(&message.bytes[self.rank * n..(self.rank + 1) * n]);
        }
        Ok(())
    }

    fn reduce_scatter(&mut self, full: &[f32], mine: &mut [f32]) -> Result<(), EngineError> {
        check_parts("reduce_scatter", mine.len(), full.len(), self.world_size())?;
        let first = self.rank * mine.len();
        mine.fill(0.0);
        for message in self.exchange_bytes("reduce_scatter", bytemuck::cast_slice(full))? {
            let theirs = message.bytes[4 * first..4 * (first + mine.len())].chunks_exact(4);
            for (sum, value) in mine.iter_mut().zip(theirs) {
                *sum += f32::from_ne_bytes([value[0], value[1], value[2], value[3]]);
            }
        }
        Ok(())
    }

    fn all_reduce(&mut self, values: &mut [f64], reduction: Reduction) -> Result<(), EngineError> {
        let all = self.exchange_bytes("all_reduce", bytemuck::cast_slice(values))?;
        for (rank, message) in all.iter().enumerate() {
            for (joined, value) in values.iter_mut().zip(message.bytes.chunks_exact(8)) {
                // chunks_exact(8) gives eight bytes.
                let value = f64::from_ne_bytes(value.try_into().expect("eight bytes"));
                *joined = match (rank, reduction) {
                    (0, _) => value,
                    (_, Reduction::Sum) => *joined + value,
                    (_, Reduction::Max) => joined.max(value),
                };
            }
        }
        Ok(())
    }

    fn broadcast(&mut self, bytes: &mut [u8], root: usize) -> Result<(), EngineError> {
        let all = self.exchange_bytes("broadcast", bytes)?;
        check_parts("broadcast", all[root].bytes.len(), bytes.len(), 1)?;
        bytes.copy_from_slice(&all[root].bytes);
        Ok(())
    }

    fn supports_device_tensors(&self) -> bool {
        self.supports_device_tensors
    }

    fn split(&mut self, color: usize, key: usize) -> Result<Box<dyn Engine>, EngineError> {
        let (all, groups) = self.exchange("split", Message { bytes: Vec::new(), color, key })?;
        let colors_and_keys: Vec<[u64; 2]> =
            all.iter().map(|message| [message.color as u64, message.key as u64]).collect();
        // This rank is among those of its own color, and the round has opened a group for each
        // color.
        let members = color_members(&colors_and_keys, color as u64);
        let rank = members.iter().position(|member| *member == self.rank).unwrap_or_default();
        let group = Arc::clone(&groups[&color]);
        Ok(Box::new(Self {
            rank,
            group,
            n_operations: 0,
            supports_device_tensors: self.supports_device_tensors,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance;

    #[test]
    fn it_conforms() {
        for world_size in 1..=5 {
            std::thread::scope(|scope| {
                for mut engine in LocalGroup::ranks(world_size) {
                    scope.spawn(move || conformance::check_on_host(&mut engine).unwrap());
                }
            });
        }
    }

    #[test]
    fn the_error_names_a_rank_that_has_ended() {
        let mut ranks = LocalGroup::ranks(3);
        drop(ranks.remove(1));
        let errors: Vec<EngineError> = std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for mut engine in ranks {
                threads.push(scope.spawn(move || engine.all_reduce(&mut [1.0], Reduction::Sum).unwrap_err()));
            }
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(
            matches!(errors[0], EngineError::PeerLost { rank: 1, collective: "all_reduce", .. }),
            "{errors:?}"
        );
    }
}
