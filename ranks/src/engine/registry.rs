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
    /// Returns whether the choice admits the engine `name`.
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
                Err(format!("{text:?} names no engine: say auto, {}", names.join(" or ")))
            }
        }
    }
}

/// All engines between processes, the preferred one first; those that this build lacks say so.
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
    let check = |connector: &dyn Connector| {
        if choice.admits(connector.name()) {
            connector.check(site)
        } else {
            Err("this rank was started with another --engine".into())
        }
    };
    let checked: Vec<Checked<'_>> =
        connectors.iter().map(|&connector| Checked { connector, result: check(connector) }).collect();
    if let Some(meeting) =
        connectors.iter().find(|connector| connector.meets_by_itself() && connector.check(site).is_ok())
    {
        return agree(site, *meeting, &checked);
    }
    match checked.iter().find(|each| each.result.is_ok()) {
        Some(usable) => usable.connector.start(site, None),
        None => {
            let admitted = checked.into_iter().filter(|each| choice.admits(each.connector.name()));
            let refused: Vec<_> =
                admitted.filter_map(|each| Some((each.connector.name(), each.result.err()?))).collect();
            Err(no_engine(site, &refused))
        }
    }
}

/// An engine, and whether it can serve this rank.
struct Checked<'a> {
    connector: &'a dyn Connector,
    result: Result<(), String>,
}

/// Starts the first engine that all ranks can use, on which they agree through `meeting`.
fn agree(
    site: &Site,
    meeting: &dyn Connector,
    checked: &[Checked<'_>],
) -> Result<Box<dyn Engine>, EngineError> {
    let mut engine = meeting.start(site, None)?;
    let kind = match site.device.kind {
        DeviceKind::Cpu => 0,
        DeviceKind::Cuda(_) => 1,
        DeviceKind::Wgpu => 2,
    };
    // A byte for every engine, whatever this rank's flags: messages have one length on all ranks.
    let mut mine = vec![kind];
    mine.extend(checked.iter().map(|each| u8::from(each.result.is_ok())));
    mine.extend(site.device.id);
    let mut gathered = vec![0; mine.len() * site.world_size];
    engine.all_gather(&mine, &mut gathered)?;
    let ranks: Vec<&[u8]> = gathered.chunks_exact(mine.len()).collect();
    check_kinds(&ranks)?;
    let ids = 1 + checked.len();
    let have_own_devices =
        ranks.iter().map(|rank| &rank[ids..]).collect::<BTreeSet<_>>().len() == ranks.len();
    let mut refused = Vec::new();
    for (number, Checked { connector, result }) in checked.iter().enumerate() {
        if let Some(rank) = ranks.iter().position(|rank| rank[1 + number] == 0) {
            // The reason why this rank cannot use the engine is more precise than that another one
            // cannot.
            let other = format!("rank {rank} cannot use it; see its message");
            refused.push((connector.name(), result.clone().err().unwrap_or(other)));
        } else if connector.needs_own_device() && !have_own_devices {
            let reason = format!(
                "two ranks have the same device, which it does not support; say --engine {}",
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

/// Checks that all ranks compute on one kind of device, the first byte of their messages.
fn check_kinds(ranks: &[&[u8]]) -> Result<(), EngineError> {
    let Some(other) = ranks.iter().position(|rank| rank[0] != ranks[0][0]) else { return Ok(()) };
    let names = ["the CPU", "an NVIDIA GPU", "another GPU"];
    let name = |rank: usize| names[usize::from(ranks[rank][0]).min(2)];
    let reason = format!("rank 0 computes on {}, rank {other} on {}; say --device", name(0), name(other));
    Err(EngineError::Unavailable { engine: "ranks", reason })
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
        "{launcher} says rank {rank} of {world_size}, and no engine can connect the ranks: {}",
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

    /// An engine in threads under a name, which some ranks cannot use.
    struct Threads {
        name: &'static str,
        ranks: Mutex<Vec<Option<Local>>>,
        meets_by_itself: bool,
        needs_own_device: bool,
        cannot: Vec<usize>,
        /// Ranks on which the engine fails to start.
        fails: Vec<usize>,
    }

    impl Threads {
        fn new(name: &'static str, n_ranks: usize) -> Self {
            let ranks = Mutex::new(LocalGroup::ranks(n_ranks).into_iter().map(Some).collect());
            Self {
                name,
                ranks,
                meets_by_itself: false,
                needs_own_device: false,
                cannot: Vec::new(),
                fails: Vec::new(),
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
            if self.cannot.contains(&site.rank) { Err(format!("no {} at hand", self.name)) } else { Ok(()) }
        }

        fn meets_by_itself(&self) -> bool {
            self.meets_by_itself
        }

        fn needs_own_device(&self) -> bool {
            self.needs_own_device
        }

        fn start(&self, site: &Site, _: Option<&mut dyn Engine>) -> Result<Box<dyn Engine>, EngineError> {
            if self.fails.contains(&site.rank) {
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

    /// The engine that each of two ranks starts at its site with its choice, or its error.
    fn started(connectors: [&dyn Connector; 2], sites: [Site; 2], choices: [EngineChoice; 2]) -> [String; 2] {
        std::thread::scope(|scope| {
            [0, 1]
                .map(|rank: usize| {
                    let site = sites[rank].clone();
                    let choice = choices[rank];
                    scope.spawn(move || match start_among(&connectors, &site, choice) {
                        Ok(engine) => engine.name().to_string(),
                        Err(error) => error.to_string(),
                    })
                })
                .map(|thread| thread.join().unwrap())
        })
    }

    const AUTO: EngineChoice = EngineChoice::Auto;
    const FAST: EngineChoice = EngineChoice::Named("fast");
    const SLOW: EngineChoice = EngineChoice::Named("slow");

    fn fast() -> Threads {
        Threads { needs_own_device: true, ..Threads::new("fast", 2) }
    }

    fn slow() -> Threads {
        Threads { meets_by_itself: true, ..Threads::new("slow", 2) }
    }

    #[test]
    fn ranks_agree_on_the_first_engine_that_all_can_use() {
        let apart = || [site(0, 1), site(1, 2)];
        let together = || [site(0, 1), site(1, 1)];
        let lacking = || Threads { cannot: vec![1], ..fast() };
        assert_eq!(started([&fast(), &slow()], apart(), [AUTO; 2]), ["fast", "fast"]);
        assert_eq!(
            started([&fast(), &slow()], together(), [AUTO; 2]),
            ["slow", "slow"],
            "one device for both"
        );
        assert_eq!(started([&lacking(), &slow()], apart(), [AUTO; 2]), ["slow", "slow"]);
        let [other, own] = started([&lacking(), &slow()], apart(), [FAST; 2]);
        assert!(other.contains("fast: rank 1 cannot use it; see its message"), "{other}");
        assert!(own.contains("fast: no fast at hand"), "{own}");
        let [shared, _] = started([&fast(), &slow()], together(), [FAST; 2]);
        assert!(shared.contains("the same device") && shared.contains("--engine slow"), "{shared}");
    }

    /// Ranks that were started with different flags agree where they can, and are told where they
    /// cannot.
    #[test]
    fn ranks_with_different_flags_do_not_hang() {
        let apart = || [site(0, 1), site(1, 2)];
        assert_eq!(started([&fast(), &slow()], apart(), [AUTO, SLOW]), ["slow", "slow"]);
        assert_eq!(started([&fast(), &slow()], apart(), [AUTO, FAST]), ["fast", "fast"]);
        for error in started([&fast(), &slow()], apart(), [SLOW, FAST]) {
            assert!(error.contains("another --engine"), "{error}");
        }
        let [cpu, mut gpu] = apart();
        gpu.device.kind = DeviceKind::Cuda(0);
        for error in started([&fast(), &slow()], [cpu, gpu], [AUTO; 2]) {
            assert!(error.contains("rank 0 computes on the CPU, rank 1 on an NVIDIA GPU"), "{error}");
        }
    }

    #[test]
    fn an_engine_that_fails_to_start_leaves_its_own_error() {
        let failing = Threads { fails: vec![0, 1], ..fast() };
        let errors = started([&failing, &slow()], [site(0, 1), site(1, 2)], [AUTO; 2]);
        assert_eq!(errors, ["fast: it fails", "fast: it fails"]);
    }

    #[test]
    fn a_rank_that_no_engine_serves_names_every_reason() {
        let none = |name| Threads { cannot: vec![0, 1], ..Threads::new(name, 2) };
        let [error, _] = started([&none("a"), &none("b")], [site(0, 1), site(1, 2)], [AUTO; 2]);
        assert_eq!(
            error,
            "ranks: test says rank 0 of 2, and no engine can connect the ranks: a: no a at hand; b: no b at hand"
        );
        assert_eq!("mpi".parse(), Ok(EngineChoice::Named("mpi")));
        assert!("ucx".parse::<EngineChoice>().unwrap_err().contains("auto, nccl or mpi"));
    }
}
