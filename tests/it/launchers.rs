use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::support::{World, wait_for, wait_for_end};

/// Writes an executable bash script.
fn write_script(path: &Path, commands: &str) {
    std::fs::write(path, format!("#!/bin/bash\n{commands}\n")).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Prepares the launch script for a node, with `program` in place of ocelli.
fn node(world: &World, program: &str, environment: &[(&str, &str)]) -> Command {
    let path = world.path("program.sh");
    write_script(&path, program);
    let script = format!("{}/../scripts/nccl/node.sh", env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new("bash");
    command.args([&script, "pretrain", "--workdir", "a b"]).env("OCELLI", path).env("GPUS", "3");
    command.envs(environment.iter().copied());
    command
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

/// Ranks are numbered over all machines, and each has its GPU and the address of the rendezvous.
#[test]
fn every_gpu_gets_a_rank() {
    let world = World::new(1);
    let program = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT \
               ${JOB_COMPLETION_INDEX-none} $# \"$3\"";
    let pod = [("JOB_COMPLETION_INDEX", "1"), ("N_NODES", "2"), ("MASTER_ADDR", "node0")];
    let output = node(&world, program, &pod).output().unwrap();
    assert_eq!(code(&output), 0);
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    assert_eq!(
        lines,
        [
            "3 6 0 3 node0:29500 none 3 a b",
            "4 6 1 3 node0:29500 none 3 a b",
            "5 6 2 3 node0:29500 none 3 a b"
        ]
    );
}

/// Errors that need attention take precedence over those that may be retried.
#[test]
fn a_machine_exits_with_the_worst_code_of_its_ranks() {
    let world = World::new(1);
    for (codes, expected) in [("0 0 0", 0), ("0 134 0", 134), ("134 3 143", 3), ("143 143 143", 143)] {
        let program = format!("codes=({codes}); exit ${{codes[$RANK]}}");
        assert_eq!(code(&node(&world, &program, &[]).output().unwrap()), expected, "{codes}");
    }
}

#[test]
fn a_signal_reaches_every_rank() {
    let world = World::new(1);
    // Ranks take longer to end than a signal takes to arrive: the machine waits for all of them.
    let folder = world.text(".");
    let program = format!(
        "trap 'sleep 0.3; touch {folder}/down-$RANK; exit 17' USR2; touch {folder}/up-$RANK; \
         while :; do sleep 0.05; done"
    );
    let mut child = node(&world, &program, &[]).stderr(Stdio::null()).spawn().unwrap();
    wait_for("the start of all ranks", Duration::from_secs(20), || {
        (0..3).all(|rank| world.path(&format!("up-{rank}")).exists())
    });
    Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert_eq!(wait_for_end(&mut child).code(), Some(17));
    assert!((0..3).all(|rank| world.path(&format!("down-{rank}")).exists()), "a rank was left behind");
}

/// The script for Slurm starts one rank for each GPU of each node, all with the first node as the
/// rendezvous.
#[test]
fn slurm_starts_a_rank_for_each_gpu() {
    let world = World::new(1);
    write_script(&world.path("scontrol"), "printf 'node7\\nnode8\\n'");
    // Both nodes, one after the other.
    write_script(
        &world.path("srun"),
        "while [[ $1 == --* ]]; do shift; done\nfor n in 0 1; do SLURM_NODEID=$n \"$@\" || exit; done",
    );
    // All GPUs of a node, of which Slurm allocates two.
    write_script(&world.path("nvidia-smi"), "printf 'GPU 0\\nGPU 1\\nGPU 2\\n'");
    write_script(&world.path("program.sh"), "echo $RANK $WORLD_SIZE $MASTER_ADDR:$MASTER_PORT \"$@\"");
    let scripts = format!("{}/../scripts", env!("CARGO_MANIFEST_DIR"));
    let path = format!("{}:{}", world.text("."), std::env::var("PATH").unwrap());
    let output = Command::new("bash")
        .arg(format!("{scripts}/slurm/pretrain_gpu.sbatch"))
        .env("PATH", path)
        .env("OCELLI", world.path("program.sh"))
        .env_remove("GPUS")
        .envs([
            ("SCRIPTS", scripts.as_str()),
            ("SLURM_GPUS_ON_NODE", "2"),
            ("RECIPE", "r"),
            ("SHARDS", "a b"),
            ("WORKDIR", "w"),
        ])
        .envs([("SLURM_JOB_NUM_NODES", "2"), ("SLURM_JOB_NODELIST", "node[7-8]"), ("SLURM_JOB_ID", "20123")])
        .output()
        .unwrap();
    assert_eq!(code(&output), 0, "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    let expected: Vec<String> = (0..4)
        .map(|rank| format!("{rank} 4 node7:20123 pretrain --recipe r --shards a b --workdir w"))
        .collect();
    assert_eq!(lines, expected);
}
