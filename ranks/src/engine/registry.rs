//! Engines between processes: which of them can serve a launch, and the start of the first one that
//! all ranks can use.
//!
//! | engine | serves | ranks meet |
//! |---|---|---|
//! | nccl | ranks with an NVIDIA GPU each | over MPI, where it has started them and is built in; else at an address |
//! | mpi | ranks that MPI has started | as MPI has arranged |
//!
//! A new engine is one file with a [`Connector`] and one line in `CONNECTORS`.

use std::collections::BTreeSet;
use std::str::FromStr;

use kernels::device::DeviceKind;

use super::Engine;
use super::connector::{Connector, Site};
#[cfg(feature = "mpi")]
use super::mpi::MpiConnector;
#[cfg(feature = "cuda")]
use super::nccl::NcclConnector;
use crate::error::EngineError;

/// All engines between processes, the preferred one first.
static CONNECTORS: &[&dyn Connector] = &[
    #[cfg(feature = "cuda")]
    &NcclConnector,
    #[cfg(not(feature = "cuda"))]
    &NotBuilt { name: "nccl", feature: "cuda" },
    #[cfg(feature = "mpi")]
    &MpiConnector,
    #[cfg(not(feature = "mpi"))]
    &NotBuilt { name: "mpi", feature: "mpi" },
];

/// Engine that a user requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineChoice {
    /// The first engine that all ranks can use.
    #[default]
    Auto,
    /// The engine of this name.
    Named(&'static str),
}

impl EngineChoice {
    /// Returns true if the choice admits the engine `name`.
    fn admits(self, name: &str) -> bool {
        match self {
            Self::Auto => true,
            Self::Named(chosen) => chosen == name,
        }
    }
}

impl FromStr for EngineChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut names = CONNECTORS.iter().map(|connector| connector.name());
        match names.clone().find(|name| *name == text) {
            Some(name) => Ok(Self::Named(name)),
            None if text == "auto" => Ok(Self::Auto),
            None => {
                let names: Vec<&str> = names.by_ref().collect();
                Err(format!("unknown engine {text:?}: expected auto, {}", names.join(" or ")))
            }
        }
    }
}

/// Returns all engines between processes, the preferred one first. Checks of those that are not
/// built in return an error.
pub fn connectors() -> &'static [&'static dyn Connector] {
    CONNECTORS
}

/// Starts an engine of `choice` in this thread: the first that all ranks can use, if MPI has
/// started them, and otherwise the first that this rank can use. All ranks call it.
///
/// # Errors
/// [`EngineError::Unavailable`] with the reason against every engine; errors of the engine that
/// starts.
pub fn start(site: &Site, choice: EngineChoice) -> Result<Box<dyn Engine>, EngineError> {
    start_among(CONNECTORS, site, choice)
}

fn start_among(
    connectors: &[&dyn Connector],
    site: &Site,
    choice: EngineChoice,
) -> Result<Box<dyn Engine>, EngineError> {
    // Checked before ranks connect: the others must not wait for a rank that lacks a library.
    let mut checked: Vec<Checked<'_>> = Vec::new();
    for &connector in connectors {
        let result = if choice.admits(connector.name()) {
            connector.check(site)
        } else {
            Err("this rank was started with another --engine".into())
        };
        checked.push(Checked { connector, result });
    }
    let meeting =
        connectors.iter().find(|connector| connector.meets_by_itself() && connector.check(site).is_ok());
    if let Some(meeting) = meeting {
        return agree(site, *meeting, &checked);
    }
    if let Some(usable) = checked.iter().find(|engine| engine.result.is_ok()) {
        return usable.connector.start(site, None);
    }
    let mut refused = Vec::new();
    for Checked { connector, result } in checked {
        if choice.admits(connector.name())
            && let Err(reason) = result
        {
            refused.push((connector.name(), reason));
        }
    }
    Err(no_engine(site, &refused))
}

/// An engine, and whether it can serve this rank.
struct Checked<'a> {
    connector: &'a dyn Connector,
    result: Result<(), String>,
}

/// What a rank tells the others before they agree on an engine: a message of bytes, which has one
/// length on all ranks.
#[derive(Clone, Copy)]
struct RankMessage<'a> {
    /// Kind of the rank's device, as [`kind_byte`] encodes it.
    kind: u8,
    /// A byte for every engine, whatever the rank's flags; 0 if it cannot serve the rank.
    usable: &'a [u8],
    /// Identifier of the rank's device.
    device_id: &'a [u8],
}

impl<'a> RankMessage<'a> {
    /// Returns the message of the rank at `site`.
    fn encode(site: &Site, checked: &[Checked<'_>]) -> Vec<u8> {
        let mut bytes = vec![kind_byte(site.device.kind)];
        bytes.extend(checked.iter().map(|engine| u8::from(engine.result.is_ok())));
        bytes.extend(site.device.id);
        bytes
    }

    /// Reads a message about `n_engines` engines.
    fn decode(bytes: &'a [u8], n_engines: usize) -> Self {
        let (usable, device_id) = bytes[1..].split_at(n_engines);
        Self { kind: bytes[0], usable, device_id }
    }
}

/// Starts the first engine that all ranks can use; ranks exchange what they can use through the
/// engine of `meeting`.
fn agree(
    site: &Site,
    meeting: &dyn Connector,
    checked: &[Checked<'_>],
) -> Result<Box<dyn Engine>, EngineError> {
    let mut engine = meeting.start(site, None)?;
    let mine = RankMessage::encode(site, checked);
    let mut gathered = vec![0; mine.len() * site.world_size];
    engine.all_gather(&mine, &mut gathered)?;
    let mut ranks = Vec::with_capacity(site.world_size);
    for bytes in gathered.chunks_exact(mine.len()) {
        ranks.push(RankMessage::decode(bytes, checked.len()));
    }
    check_kinds(&ranks)?;
    let device_ids: BTreeSet<&[u8]> = ranks.iter().map(|rank| rank.device_id).collect();
    let have_own_devices = device_ids.len() == ranks.len();
    let mut refused = Vec::new();
    for (index, Checked { connector, result }) in checked.iter().enumerate() {
        if let Some(rank) = ranks.iter().position(|rank| rank.usable[index] == 0) {
            // The reason why this rank cannot use the engine is more precise than that another one
            // cannot.
            let other = format!("rank {rank} cannot use it; see its message");
            refused.push((connector.name(), result.clone().err().unwrap_or(other)));
        } else if connector.needs_own_device() && !have_own_devices {
            let reason = format!(
                "two ranks have the same device, which it does not support; use --engine {}",
                meeting.name()
            );
            refused.push((connector.name(), reason));
        } else if connector.name() == meeting.name() {
            return Ok(engine);
        } else {
            let started = connector.start(site, Some(engine.as_mut()));
            if started.is_err() {
                // Finalizing MPI would wait for the other ranks, which wait for this one.
                std::mem::forget(engine);
            }
            return started;
        }
    }
    Err(no_engine(site, &refused))
}

/// Checks that all ranks compute on one kind of device.
fn check_kinds(ranks: &[RankMessage<'_>]) -> Result<(), EngineError> {
    let Some(other) = ranks.iter().position(|rank| rank.kind != ranks[0].kind) else { return Ok(()) };
    let first_kind = kind_name(ranks[0].kind);
    let other_kind = kind_name(ranks[other].kind);
    let reason = format!("rank 0 computes on {first_kind}, rank {other} on {other_kind}; give --device");
    Err(EngineError::Unavailable { engine: "ranks", reason })
}

/// Returns the byte of a kind of device in a rank's message.
fn kind_byte(kind: DeviceKind) -> u8 {
    match kind {
        DeviceKind::Cpu => 0,
        DeviceKind::Cuda(_) => 1,
        DeviceKind::Wgpu => 2,
    }
}

/// Returns the name of a kind of device, from its byte in a rank's message.
fn kind_name(kind: u8) -> &'static str {
    match kind {
        0 => "the CPU",
        1 => "an NVIDIA GPU",
        _ => "another GPU",
    }
}

/// Returns the error of a rank that no engine can serve, with the name of each and the reason
/// against it.
fn no_engine(site: &Site, refused: &[(&'static str, String)]) -> EngineError {
    if let [(engine, reason)] = refused {
        return EngineError::Unavailable { engine, reason: reason.clone() };
    }
    let reasons: Vec<String> = refused.iter().map(|(engine, reason)| format!("{engine}: {reason}")).collect();
    let Site { launcher, rank, world_size, .. } = site;
    let reason = format!(
        "{launcher} says rank {rank} of {world_size}, but no engine can connect the ranks: {}",
        reasons.join("; ")
    );
    EngineError::Unavailable { engine: "ranks", reason }
}

/// An engine that this build lacks.
#[cfg(any(not(feature = "cuda"), not(feature = "mpi")))]
struct NotBuilt {
    name: &'static str,
    /// Feature of the program that adds it.
    feature: &'static str,
}

#[cfg(any(not(feature = "cuda"), not(feature = "mpi")))]
impl Connector for NotBuilt {
    fn name(&self) -> &'static str {
        self.name
    }

    fn library(&self) -> Result<String, String> {
        Err(format!("not built in (cargo build --release --features {})", self.feature))
    }

    fn check(&self, _: &Site) -> Result<(), String> {
        self.library().map(drop)
    }

    fn start(&self, site: &Site, _: Option<&mut dyn Engine>) -> Result<Box<dyn Engine>, EngineError> {
        let reason = self.check(site).err().unwrap_or_default();
        Err(EngineError::Unavailable { engine: self.name, reason })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use burn_tensor::Device;
    use kernels::device::Opened;

    use super::*;
    use crate::engine::{Local, LocalGroup};

    /// An engine in threads with a name of its own, which some ranks cannot use.
    struct Threads {
        name: &'static str,
        ranks: Mutex<Vec<Option<Local>>>,
        meets_by_itself: bool,
        needs_own_device: bool,
        /// Ranks on which the check fails.
        unable_ranks: Vec<usize>,
        /// Ranks on which the engine fails to start.
        failing_ranks: Vec<usize>,
    }

    impl Threads {
        fn new(name: &'static str, n_ranks: usize) -> Self {
            let ranks = Mutex::new(LocalGroup::ranks(n_ranks).into_iter().map(Some).collect());
            Self {
                name,
                ranks,
                meets_by_itself: false,
                needs_own_device: false,
                unable_ranks: Vec::new(),
                failing_ranks: Vec::new(),
            }
        }
    }

    impl Connector for Threads {
        fn name(&self) -> &'static str {
            self.name
        }

        fn library(&self) -> Result<String, String> {
            Ok("threads".into())
        }

        fn check(&self, site: &Site) -> Result<(), String> {
            if self.unable_ranks.contains(&site.rank) {
                return Err(format!("no {} at hand", self.name));
            }
            Ok(())
        }

        fn meets_by_itself(&self) -> bool {
            self.meets_by_itself
        }

        fn needs_own_device(&self) -> bool {
            self.needs_own_device
        }

        fn start(&self, site: &Site, _: Option<&mut dyn Engine>) -> Result<Box<dyn Engine>, EngineError> {
            if self.failing_ranks.contains(&site.rank) {
                return Err(EngineError::Unavailable { engine: self.name, reason: "it fails".into() });
            }
            let engine = self.ranks.lock().unwrap()[site.rank].take().unwrap();
            Ok(Box::new(Named(self.name, engine)))
        }
    }

    /// An engine under another name.
    struct Named(&'static str, Local);

    impl Engine for Named {
        fn name(&self) -> &'static str {
            self.0
        }

        fn rank(&self) -> usize {
            self.1.rank()
        }

        fn world_size(&self) -> usize {
            self.1.world_size()
        }

        fn all_gather(&mut self, mine: &[u8], all: &mut [u8]) -> Result<(), EngineError> {
            self.1.all_gather(mine, all)
        }

        fn all_to_all(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), EngineError> {
            self.1.all_to_all(send, receive)
        }

        fn reduce_scatter(&mut self, full: &[f32], mine: &mut [f32]) -> Result<(), EngineError> {
            self.1.reduce_scatter(full, mine)
        }

        fn all_reduce(
            &mut self,
            values: &mut [f64],
            reduction: crate::engine::Reduction,
        ) -> Result<(), EngineError> {
            self.1.all_reduce(values, reduction)
        }

        fn broadcast(&mut self, bytes: &mut [u8], root: usize) -> Result<(), EngineError> {
            self.1.broadcast(bytes, root)
        }

        fn split(&mut self, color: usize, key: usize) -> Result<Box<dyn Engine>, EngineError> {
            self.1.split(color, key)
        }
    }

    fn site(rank: usize, id: u8) -> Site {
        let device = Opened {
            device: Device::flex(),
            kind: DeviceKind::Cpu,
            name: "cpu".into(),
            free_bytes: None,
            id: [id; 16],
            fallback_error: None,
        };
        Site {
            launcher: "test",
            rank,
            world_size: 2,
            is_started_by_mpi: false,
            address: Err("none".into()),
            device,
            deadline: Duration::from_secs(5),
            max_count: None,
        }
    }

    /// Returns the name of the engine that each of two ranks starts, or the error; sites and
    /// choices are by rank.
    fn start_on_ranks(
        connectors: [&dyn Connector; 2],
        sites: [Site; 2],
        choices: [EngineChoice; 2],
    ) -> [Result<&'static str, EngineError>; 2] {
        std::thread::scope(|scope| {
            [0, 1]
                .map(|rank| {
                    let site = sites[rank].clone();
                    let choice = choices[rank];
                    scope.spawn(move || start_among(&connectors, &site, choice).map(|engine| engine.name()))
                })
                .map(|thread| thread.join().unwrap())
        })
    }

    /// Returns the name of the engine that each of two ranks starts.
    fn started_engines(
        connectors: [&dyn Connector; 2],
        sites: [Site; 2],
        choices: [EngineChoice; 2],
    ) -> [&'static str; 2] {
        start_on_ranks(connectors, sites, choices).map(Result::unwrap)
    }

    /// Returns the engine and the reason in the error of each of two ranks.
    fn refusals(
        connectors: [&dyn Connector; 2],
        sites: [Site; 2],
        choices: [EngineChoice; 2],
    ) -> [(&'static str, String); 2] {
        start_on_ranks(connectors, sites, choices).map(|result| match result {
            Err(EngineError::Unavailable { engine, reason }) => (engine, reason),
            other => panic!("{other:?}"),
        })
    }

    const AUTO: EngineChoice = EngineChoice::Auto;
    const FAST: EngineChoice = EngineChoice::Named("fast");
    const SLOW: EngineChoice = EngineChoice::Named("slow");

    fn fast() -> Threads {
        Threads { needs_own_device: true, ..Threads::new("fast", 2) }
    }

    fn fast_on_rank_0() -> Threads {
        Threads { unable_ranks: vec![1], ..fast() }
    }

    fn unusable(name: &'static str) -> Threads {
        Threads { unable_ranks: vec![0, 1], ..Threads::new(name, 2) }
    }

    fn two_devices() -> [Site; 2] {
        [site(0, 1), site(1, 2)]
    }

    fn one_device() -> [Site; 2] {
        [site(0, 1), site(1, 1)]
    }

    fn slow() -> Threads {
        Threads { meets_by_itself: true, ..Threads::new("slow", 2) }
    }

    #[test]
    fn ranks_agree_on_the_first_engine_that_all_can_use() {
        assert_eq!(started_engines([&fast(), &slow()], two_devices(), [AUTO; 2]), ["fast", "fast"]);
        assert_eq!(
            started_engines([&fast(), &slow()], one_device(), [AUTO; 2]),
            ["slow", "slow"],
            "one device for both"
        );
        assert_eq!(started_engines([&fast_on_rank_0(), &slow()], two_devices(), [AUTO; 2]), ["slow", "slow"]);
        let [(_, other), (_, own)] = refusals([&fast_on_rank_0(), &slow()], two_devices(), [FAST; 2]);
        assert!(other.contains("fast: rank 1 cannot use it"), "{other}");
        assert!(own.contains("fast: no fast at hand"), "{own}");
        let [(_, shared), _] = refusals([&fast(), &slow()], one_device(), [FAST; 2]);
        assert!(shared.contains("the same device") && shared.contains("--engine slow"), "{shared}");
    }

    /// Ranks that were started with different flags agree on an engine where they can; otherwise
    /// all return an error.
    #[test]
    fn ranks_with_different_flags_do_not_hang() {
        assert_eq!(started_engines([&fast(), &slow()], two_devices(), [AUTO, SLOW]), ["slow", "slow"]);
        assert_eq!(started_engines([&fast(), &slow()], two_devices(), [AUTO, FAST]), ["fast", "fast"]);
        for (_, reason) in refusals([&fast(), &slow()], two_devices(), [SLOW, FAST]) {
            assert!(reason.contains("another --engine"), "{reason}");
        }
        let [cpu, mut gpu] = two_devices();
        gpu.device.kind = DeviceKind::Cuda(0);
        for (engine, reason) in refusals([&fast(), &slow()], [cpu, gpu], [AUTO; 2]) {
            assert_eq!(engine, "ranks");
            assert!(reason.contains("rank 0 computes on the CPU, rank 1 on an NVIDIA GPU"), "{reason}");
        }
    }

    #[test]
    fn the_error_of_an_engine_that_fails_to_start_is_returned() {
        let failing = Threads { failing_ranks: vec![0, 1], ..fast() };
        let errors = refusals([&failing, &slow()], two_devices(), [AUTO; 2]);
        assert_eq!(errors, [("fast", "it fails".to_string()), ("fast", "it fails".to_string())]);
    }

    #[test]
    fn the_error_without_a_usable_engine_has_every_reason() {
        let [(engine, reason), _] = refusals([&unusable("a"), &unusable("b")], two_devices(), [AUTO; 2]);
        assert_eq!(engine, "ranks");
        for value in ["test says rank 0 of 2, but no engine", "a: no a at hand", "b: no b at hand"] {
            assert!(reason.contains(value), "{reason}");
        }
        assert_eq!("mpi".parse(), Ok(EngineChoice::Named("mpi")));
        let error = "ucx".parse::<EngineChoice>().unwrap_err();
        for name in ["ucx", "auto", "nccl", "mpi"] {
            assert!(error.contains(name), "{error}");
        }
    }
}
