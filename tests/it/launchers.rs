use std::process::{Command, Output, Stdio};

use crate::support::World;

/// Prepares the launch script, with `program` in place of ocelli.
fn node(world: &World, program: &str, environment: &[(&str, &str)]) -> Command {
    use std::os::unix::fs::PermissionsExt;
    let path = world.path("program.sh");
    std::fs::write(&path, format!("#!/bin/bash\n{program}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let script = format!("{}/../scripts/nccl/node.sh", env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new("bash");
    command.args([&script, "pretrain", "--workdir", "a b"]).env("OCELLI", path).env("GPUS", "3");
    command.envs(environment.iter().copied());
    command
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

/// Ranks are numbered over all machines, and each gets its GPU and the address of the rendezvous.
#[test]
fn every_gpu_gets_a_rank() {
    let world = World::new(1);
    let say = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT \
               ${JOB_COMPLETION_INDEX-none} $# \"$3\"";
    let pod = [("JOB_COMPLETION_INDEX", "1"), ("N_NODES", "2"), ("MASTER_ADDR", "node0")];
    let output = node(&world, say, &pod).output().unwrap();
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
fn the_worst_exit_code_is_that_of_the_machine() {
    let world = World::new(1);
    for (codes, wanted) in [("0 0 0", 0), ("0 134 0", 134), ("134 3 143", 3), ("143 143 143", 143)] {
        let program = format!("codes=({codes}); exit ${{codes[$RANK]}}");
        assert_eq!(code(&node(&world, &program, &[]).output().unwrap()), wanted, "{codes}");
    }
}

#[test]
fn a_signal_reaches_every_rank() {
    let world = World::new(1);
    // Slower to end than a signal is to arrive: the machine waits for all of its ranks.
    let folder = world.text(".");
    let program = format!(
        "trap 'sleep 0.3; touch {folder}/down-$RANK; exit 17' USR2; touch {folder}/up-$RANK; \
         while :; do sleep 0.05; done"
    );
    let mut child = node(&world, &program, &[]).stderr(Stdio::null()).spawn().unwrap();
    let start = std::time::Instant::now();
    while !(0..3).all(|rank| world.path(&format!("up-{rank}")).exists()) {
        assert!(start.elapsed().as_secs() < 20, "the ranks do not start");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(17));
    assert!((0..3).all(|rank| world.path(&format!("down-{rank}")).exists()), "a rank was left behind");
}

/// The script for Slurm starts one rank for each GPU of each node, which all meet at the first
/// node.
#[test]
fn slurm_starts_a_rank_for_each_gpu() {
    use std::os::unix::fs::PermissionsExt;
    let world = World::new(1);
    let write = |name: &str, text: &str| {
        std::fs::write(world.path(name), text).unwrap();
        std::fs::set_permissions(world.path(name), std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    write("scontrol", "#!/bin/bash\nprintf 'node7\\nnode8\\n'\n");
    // Both nodes, one after the other.
    write(
        "srun",
        "#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nfor n in 0 1; do SLURM_NODEID=$n \"$@\" || exit; done\n",
    );
    // All GPUs of a node, of which Slurm gives two.
    write("nvidia-smi", "#!/bin/bash\nprintf 'GPU 0\\nGPU 1\\nGPU 2\\n'\n");
    write("program.sh", "#!/bin/bash\necho $RANK $WORLD_SIZE $MASTER_ADDR:$MASTER_PORT \"$@\"\n");
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
