//! Runs on several ranks that are disturbed repeatedly, each compared with an undisturbed one.
//!
//! `RUN_SOAK_MINUTES=120 cargo test -p tests --features mpi --test it -- soak_ranks --ignored
//! --nocapture` takes two hours. Every round trains one recipe twice: undisturbed on one rank, and
//! in attempts on one, two or four ranks, on one node or two, each of which is disturbed at a
//! random moment, until the run is complete. All values in the metrics except times, and the last
//! weights, must be equal. `RUN_SOAK_SEED` chooses other moments. Without root there is one node,
//! and disks do not fill up.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use augment::ViewRng;
use trainer::checkpoint::{self, Checkpoint};

use crate::disturbances::Disturbance::{self, *};
use crate::disturbances::{ALL, Attempt, Disk};
use crate::methods::{self, LEJEPA, RESNET, SIMCLR, SWAV, VIT};
use crate::mpirun::{Ranks, mpirun, n_rows};
use crate::nodes::Nodes;
use crate::stages::FIRST;
use crate::support::{TINY, World, metrics, ok, wait_for};

/// Steps of a run.
const STEPS: usize = 200;

/// Settings of every run. A bad sample ends it: a replacement would change the losses.
const SETTINGS: [&str; 6] = [
    "optim.length={steps=200}",
    "run.deadline_s=10",
    "run.checkpoint_every_steps=5",
    "run.keep_checkpoints=3",
    "run.log_every_steps=1",
    "data.max_bad_rate=0",
];

/// State of the test between rounds.
struct Soak {
    // Before the folder that contains it: fields are dropped in this order.
    disk: Option<Disk>,
    world: World,
    nodes: Option<Nodes>,
    rng: ViewRng,
    counts: BTreeMap<Disturbance, usize>,
    n_attempts: usize,
}

impl Soak {
    fn new(seed: u64) -> Self {
        let world = World::new(60);
        let disk = Disk::new(world.path("disk"));
        let rng = ViewRng::from_words([seed, 0, 0, 0]);
        Self { disk, world, nodes: Nodes::new(), rng, counts: BTreeMap::new(), n_attempts: 0 }
    }

    /// Trains `recipe` undisturbed, then in attempts until the run is complete, and compares both
    /// runs.
    fn round(&mut self, recipe: &str) {
        fs::write(self.world.path("tiny.toml"), recipe).unwrap();
        let args = Ranks::new(&self.world, &SETTINGS).args("disk/whole", &[]);
        ok(&crate::support::program().args(&args).output().unwrap());
        let args = Ranks::new(&self.world, &SETTINGS).args("disk/broken", &[]);
        let undisturbed = self.world.path("disk/whole");
        let disturbed = self.world.path("disk/broken");
        while !self.attempt(&args, &disturbed) {}
        let expected = rows(&undisturbed);
        let actual = rows(&disturbed);
        assert_eq!(expected.len(), STEPS);
        for (expected, actual) in expected.iter().zip(&actual) {
            assert_eq!(actual, expected);
        }
        assert_eq!(actual.len(), STEPS);
        assert!(weights(&disturbed) == weights(&undisturbed), "weights differ");
        fs::remove_dir_all(undisturbed).unwrap();
        fs::remove_dir_all(disturbed).unwrap();
    }

    /// Draws a number below `n`.
    fn below(&mut self, n: usize) -> usize {
        self.rng.below(n as u32) as usize
    }

    /// Runs ranks until a disturbance has ended them; returns `true` if the run is complete.
    fn attempt(&mut self, args: &[String], workdir: &Path) -> bool {
        self.n_attempts += 1;
        let n_ranks = [1, 2, 4][self.below(3)];
        let over_nodes = self.nodes.is_some() && n_ranks > 1 && self.below(2) == 0;
        let disturbance = loop {
            let choice = ALL[self.below(ALL.len())];
            let is_possible = match choice {
                CutCable | CutCableForTwoSeconds => over_nodes,
                StopRank => n_ranks > 1,
                FillDisk => self.disk.is_some(),
                DamageCheckpoint | ShortenCheckpoint => checkpoint::steps_of_run(workdir).len() > 1,
                _ => true,
            };
            if is_possible {
                break choice;
            }
        };
        *self.counts.entry(disturbance).or_default() += 1;
        let shard = fs::read(self.world.shard()).unwrap();
        self.prepare(disturbance, workdir, &shard);
        let attempt = self.start(n_ranks, over_nodes, args);
        let undisturbed_time = Duration::from_millis(self.below(5000) as u64);
        let has_ended_before = attempt.wait(undisturbed_time);
        if !has_ended_before {
            self.disturb(disturbance, &attempt, workdir);
        }
        // Ranks that do not find each other give up after 120 s.
        let has_ended = attempt.wait(Duration::from_secs(180));
        if !has_ended {
            for rank in 0..n_ranks {
                attempt.try_signal(rank, "-KILL");
            }
            attempt.wait(Duration::from_secs(20));
        }
        let codes = attempt.end();
        let attempt_name = format!("{disturbance:?} on {n_ranks} ranks (two nodes: {over_nodes}): {codes:?}");
        let logs = self.logs(n_ranks);
        assert!(has_ended, "{attempt_name}: ranks hang\n{logs}");
        let are_expected = codes.iter().all(|code| disturbance.codes().contains(code));
        assert!(are_expected, "{attempt_name}\n{logs}");
        self.mend(disturbance, &shard);
        codes.iter().all(|code| *code == 0)
    }

    /// Standard error of all ranks and of mpirun.
    fn logs(&self, n_ranks: usize) -> String {
        let mut logs = Vec::new();
        for rank in 0..n_ranks {
            let path = self.world.path(&format!("stderr-{rank}"));
            logs.push(fs::read_to_string(path).unwrap_or_default());
        }
        logs.push(fs::read_to_string(self.world.path("mpirun-stderr")).unwrap_or_default());
        logs.join("\n--\n")
    }

    fn start(&self, n_ranks: usize, over_nodes: bool, args: &[String]) -> Attempt {
        let folder = self.world.folder.path().to_path_buf();
        for rank in 0..4 {
            let _ = fs::remove_file(folder.join(format!("code-{rank}")));
        }
        let mut command = match &self.nodes {
            Some(nodes) if over_nodes => nodes.mpirun(n_ranks / 2, &folder, args),
            _ => mpirun(n_ranks, &folder, args),
        };
        // All ranks share this machine's cores.
        let stderr = fs::File::create(folder.join("mpirun-stderr")).unwrap();
        command.env("OMPI_MCA_mpi_yield_when_idle", "1").stdout(Stdio::null()).stderr(stderr);
        Attempt { child: command.spawn().unwrap(), folder, n_ranks }
    }

    /// Applies disturbances that precede the start of the ranks.
    fn prepare(&mut self, disturbance: Disturbance, workdir: &Path, shard: &[u8]) {
        match disturbance {
            DamageShard => {
                let mut bytes = shard.to_vec();
                // In every image, so that the first batch has a damaged one. Headers, which are
                // read before, are unchanged.
                for offset in (0..shard.len() - 1024).step_by(512) {
                    let name = String::from_utf8_lossy(&shard[offset..offset + 100]);
                    let is_image = name.trim_end_matches('\0').ends_with(".jpg");
                    if &shard[offset + 257..offset + 262] == b"ustar" && is_image {
                        bytes[offset + 512 + 100] ^= 0x55;
                    }
                }
                fs::write(self.world.shard(), bytes).unwrap();
            }
            ShortenShard => fs::write(self.world.shard(), &shard[..self.below(shard.len())]).unwrap(),
            DamageCheckpoint | ShortenCheckpoint => {
                let newest = checkpoint::steps_of_run(workdir).pop().unwrap().1;
                let files = fs::read_dir(newest).unwrap().map(|entry| entry.unwrap().path());
                let mut files: Vec<PathBuf> = files.filter(|path| path.is_file()).collect();
                files.sort();
                let file = &files[self.below(files.len())];
                let mut bytes = fs::read(file).unwrap();
                let offset = self.below(bytes.len());
                match disturbance {
                    DamageCheckpoint => bytes[offset] ^= 1 << self.below(8),
                    _ => bytes.truncate(offset),
                }
                fs::write(file, bytes).unwrap();
            }
            _ => {}
        }
    }

    /// Applies disturbances of running ranks.
    fn disturb(&mut self, disturbance: Disturbance, attempt: &Attempt, workdir: &Path) {
        let rank = self.below(attempt.n_ranks);
        match disturbance {
            KillRank | DamageCheckpoint | ShortenCheckpoint => attempt.signal(rank, "-KILL"),
            TerminateRank => attempt.signal(rank, "-TERM"),
            PauseRank => {
                attempt.signal(rank, "-STOP");
                attempt.wait(Duration::from_secs(3));
                attempt.signal(rank, "-CONT");
                wait_for_two_steps(attempt, workdir);
                attempt.signal(rank, "-KILL");
            }
            StopRank => {
                attempt.signal(rank, "-STOP");
                let start = Instant::now();
                while !others_have_ended(attempt, rank) && start.elapsed() < Duration::from_secs(60) {
                    std::thread::sleep(Duration::from_millis(50));
                }
                attempt.signal(rank, "-KILL");
            }
            CutCable => self.nodes.as_ref().unwrap().cut(),
            CutCableForTwoSeconds => {
                self.nodes.as_ref().unwrap().cut();
                attempt.wait(Duration::from_secs(2));
                self.nodes.as_ref().unwrap().mend();
                wait_for_two_steps(attempt, workdir);
                attempt.signal(rank, "-KILL");
            }
            FillDisk => self.disk.as_ref().unwrap().fill(),
            DamageShard | ShortenShard => {}
        }
    }

    /// Undoes the disturbance, as a user would before the next attempt.
    fn mend(&self, disturbance: Disturbance, shard: &[u8]) {
        match disturbance {
            DamageShard | ShortenShard => fs::write(self.world.shard(), shard).unwrap(),
            CutCable => self.nodes.as_ref().unwrap().mend(),
            FillDisk if self.world.path("disk/filler").exists() => self.disk.as_ref().unwrap().empty(),
            _ => {}
        }
    }
}

/// Returns `true` if all ranks except `rank` have written their exit codes.
fn others_have_ended(attempt: &Attempt, rank: usize) -> bool {
    let mut others = (0..attempt.n_ranks).filter(|other| *other != rank);
    others.all(|other| attempt.folder.join(format!("code-{other}")).exists())
}

/// Waits until the run has taken two more steps or has ended.
fn wait_for_two_steps(attempt: &Attempt, workdir: &Path) {
    let before = n_rows(workdir);
    wait_for("two more steps", Duration::from_secs(40), || {
        n_rows(workdir) >= before + 2 || attempt.has_ended()
    });
}

/// Returns the metrics without times and without the columns of single ranks.
fn rows(workdir: &Path) -> Vec<serde_json::Value> {
    let mut rows = metrics(workdir);
    for row in &mut rows {
        row.as_object_mut().unwrap().retain(|key, _| !key.starts_with("rank/"));
    }
    rows
}

/// Returns all values of the newest checkpoint.
fn weights(workdir: &Path) -> Vec<Vec<f32>> {
    let checkpoint = Checkpoint::open(workdir).unwrap();
    let units = checkpoint.manifest.units.iter();
    units.map(|unit| checkpoint.buffer(&unit.network, &unit.name).unwrap()).collect()
}

/// Parses the number in an environment variable, if it is set.
fn env_number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

#[test]
#[ignore = "as long as RUN_SOAK_MINUTES says, 10 without it"]
fn disturbed_runs_have_the_losses_of_undisturbed_ones() {
    let mut stderr = std::io::stderr();
    let minutes = env_number("RUN_SOAK_MINUTES").unwrap_or(10);
    let seed = env_number("RUN_SOAK_SEED").unwrap_or(1);
    let recipes = [
        TINY.to_string(),
        methods::recipe(RESNET, &SWAV.replace("queue = 12", "queue = 24"), 2, "algorithm = 'larc'"),
        FIRST.to_string(),
        methods::recipe(RESNET, SIMCLR, 0, "algorithm = 'lars'"),
        methods::recipe(VIT, LEJEPA, 2, ""),
    ];
    let mut soak = Soak::new(seed);
    let start = Instant::now();
    let mut n_rounds = 0;
    while start.elapsed() < Duration::from_secs(60 * minutes) {
        soak.round(&recipes[(seed as usize + n_rounds) % recipes.len()]);
        n_rounds += 1;
        let minutes = start.elapsed().as_secs_f64() / 60.0;
        writeln!(
            stderr,
            "{minutes:.1} min: {n_rounds} runs of {STEPS} steps, all equal, in {} attempts: {:?}",
            soak.n_attempts, soak.counts
        )
        .unwrap();
    }
}
