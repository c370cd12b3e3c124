//! Disturbances of a run over ranks, and the processes of its ranks.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::wait_for;

/// Size of the disk that fills up.
const DISK_BYTES: u64 = 64 << 20;

/// A disturbance of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Disturbance {
    KillRank,
    TerminateRank,
    PauseRank,
    StopRank,
    CutCable,
    CutCableForTwoSeconds,
    FillDisk,
    DamageShard,
    ShortenShard,
    DamageCheckpoint,
    ShortenCheckpoint,
}

use Disturbance::*;

pub(crate) const ALL: [Disturbance; 11] = [
    KillRank,
    TerminateRank,
    PauseRank,
    StopRank,
    CutCable,
    CutCableForTwoSeconds,
    FillDisk,
    DamageShard,
    ShortenShard,
    DamageCheckpoint,
    ShortenCheckpoint,
];

impl Disturbance {
    /// Returns the exit codes that a rank may have after the disturbance; 0 if the run was complete
    /// before.
    pub(crate) fn codes(self) -> &'static [i32] {
        match self {
            // 1 comes from mpirun, which ends ranks that are still connecting. A damaged checkpoint
            // is skipped.
            KillRank | PauseRank | CutCableForTwoSeconds | DamageCheckpoint | ShortenCheckpoint => {
                &[0, 1, 134, 137, 143]
            }
            TerminateRank => &[0, 1, 134, 143],
            StopRank => &[0, 1, 134, 137],
            CutCable => &[0, 1, 134],
            FillDisk | DamageShard => &[0, 3, 134],
            ShortenShard => &[2, 3],
        }
    }
}

/// A folder on a separate small disk.
pub(crate) struct Disk(PathBuf);

impl Disk {
    /// Mounts a disk at `folder`; returns `None` if this process may not mount disks.
    pub(crate) fn new(folder: PathBuf) -> Option<Self> {
        fs::create_dir_all(&folder).unwrap();
        let size = format!("size={DISK_BYTES}");
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(&folder).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success()).then_some(Self(folder))
    }

    pub(crate) fn fill(&self) {
        let mut file = fs::File::create(self.0.join("filler")).unwrap();
        for block_bytes in [1 << 20, 1 << 12, 1] {
            while file.write_all(&vec![0; block_bytes]).is_ok() {}
        }
    }

    pub(crate) fn empty(&self) {
        fs::remove_file(self.0.join("filler")).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        drop(Command::new("umount").arg(&self.0).status());
    }
}

/// Ranks that are running.
pub(crate) struct Attempt {
    pub(crate) child: Child,
    pub(crate) folder: PathBuf,
    pub(crate) n_ranks: usize,
}

impl Attempt {
    /// Returns the file with the exit code of a rank.
    fn code_path(&self, rank: usize) -> PathBuf {
        self.folder.join(format!("code-{rank}"))
    }

    pub(crate) fn has_ended(&self) -> bool {
        (0..self.n_ranks).all(|rank| self.code_path(rank).exists())
    }

    /// Waits until all ranks have ended, at most for `limit`; returns whether they have.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let start = Instant::now();
        while !self.has_ended() && start.elapsed() < limit {
            std::thread::sleep(Duration::from_millis(20));
        }
        self.has_ended()
    }

    /// Waits for the program of `rank` to start, and sends a signal to it, unless it has ended.
    pub(crate) fn signal(&self, rank: usize, signal: &str) {
        wait_for(&format!("the start of rank {rank}"), Duration::from_secs(60), || {
            self.try_signal(rank, signal) || self.code_path(rank).exists()
        });
    }

    /// Sends a signal to the program of `rank`; returns whether it is running.
    pub(crate) fn try_signal(&self, rank: usize, signal: &str) -> bool {
        let rank_variable = format!("OMPI_COMM_WORLD_RANK={rank}");
        let folder = self.folder.display().to_string();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
            let is_program = command.starts_with(env!("CARGO_BIN_EXE_ocelli-under-test").as_bytes());
            let is_attempt = String::from_utf8_lossy(&command).contains(&folder);
            let is_rank = environment.split(|byte| *byte == 0).any(|var| var == rank_variable.as_bytes());
            if is_program && is_attempt && is_rank {
                let pid = entry.file_name().into_string().unwrap();
                return Command::new("kill").args([signal, &pid]).stderr(Stdio::null()).status().is_ok();
            }
        }
        false
    }

    /// Ends the remaining processes, and returns the ranks' exit codes.
    pub(crate) fn end(mut self) -> Vec<i32> {
        // Open MPI's mpirun sometimes keeps running after all of its ranks have ended with errors.
        std::thread::sleep(Duration::from_millis(200));
        let _ = self.child.kill();
        let _ = self.child.wait();
        let mut codes = Vec::new();
        for rank in 0..self.n_ranks {
            let code = fs::read_to_string(self.code_path(rank)).unwrap();
            codes.push(code.trim().parse().unwrap());
        }
        codes
    }
}
