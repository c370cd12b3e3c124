use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use trainer::checkpoint::Checkpoint;

use crate::mpirun::{DEADLINE_S, Ranks, mpirun};
use crate::support::World;

/// Two nodes, as two network namespaces joined by a virtual cable that is cut. Requires root.
#[test]
fn a_cut_cable_ends_both_nodes_within_the_deadline() {
    let Some(nodes) = Nodes::new() else {
        use std::io::Write;
        writeln!(std::io::stderr(), "left out: two nodes; network namespaces need root").unwrap();
        return;
    };
    let world = World::new(60);
    let ranks = Ranks::new(&world, &[DEADLINE_S, "optim.length={steps=100000}"]);
    let agent = world.path("agent.sh");
    std::fs::write(&agent, "#!/bin/bash\nshift\nexec ip netns exec ocelli-b sh -c \"$*\"\n").unwrap();
    Command::new("chmod").args(["+x", &agent.display().to_string()]).status().unwrap();
    let folder = world.folder.path();
    let inner = mpirun(2, folder, &ranks.args("run", &[]));
    let mut child = Command::new("ip")
        .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")])
        .args(["netns", "exec", "ocelli-a", "mpirun", "--host", "10.77.0.1,10.77.0.2", "--mca"])
        .args(["plm_rsh_agent", &agent.display().to_string(), "--mca", "btl", "tcp,self", "--mca"])
        .args(["btl_tcp_if_include", "10.77.0.0/24", "--mca", "oob_tcp_if_include", "10.77.0.0/24"])
        .args(inner.get_args())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let metrics_path = world.path("run/metrics.jsonl");
    let start = Instant::now();
    while std::fs::read_to_string(&metrics_path).map_or(0, |text| text.lines().count()) < 5 {
        assert!(start.elapsed() < Duration::from_secs(60), "the run does not get on");
        std::thread::sleep(Duration::from_millis(20));
    }
    nodes.cut();
    let cut = Instant::now();
    while !(world.path("code-0").exists() && world.path("code-1").exists()) {
        assert!(cut.elapsed() < Duration::from_secs(60), "a node hangs");
        std::thread::sleep(Duration::from_millis(50));
    }
    for rank in 0..2 {
        let stderr = ranks.stderr(rank);
        assert_eq!(ranks.code(rank), 134, "{stderr}");
        assert!(stderr.contains("has not ended within"), "{stderr}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(Checkpoint::open(&world.path("run")).is_ok());
}

/// Two network namespaces, joined.
struct Nodes;

impl Nodes {
    fn new() -> Option<Self> {
        let nodes = Self;
        nodes.remove();
        let steps = [
            "netns add ocelli-a",
            "netns add ocelli-b",
            "link add ocelli-va netns ocelli-a type veth peer name ocelli-vb netns ocelli-b",
            "-n ocelli-a addr add 10.77.0.1/24 dev ocelli-va",
            "-n ocelli-b addr add 10.77.0.2/24 dev ocelli-vb",
            "-n ocelli-a link set ocelli-va up",
            "-n ocelli-b link set ocelli-vb up",
            "-n ocelli-a link set lo up",
            "-n ocelli-b link set lo up",
        ];
        steps.iter().all(|step| Self::ip(step)).then_some(nodes)
    }

    fn ip(arguments: &str) -> bool {
        let mut command = Command::new("ip");
        command.args(arguments.split(' ')).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }

    fn cut(&self) {
        assert!(Self::ip("-n ocelli-b link set ocelli-vb down"));
    }

    fn remove(&self) {
        Self::ip("netns del ocelli-a");
        Self::ip("netns del ocelli-b");
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        self.remove();
    }
}
