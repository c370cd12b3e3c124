use std::time::{Duration, Instant};

use trainer::checkpoint::Checkpoint;

use crate::mpirun::{DEADLINE_S, Ranks};
use crate::nodes::Nodes;
use crate::support::World;

#[test]
fn a_cut_cable_ends_both_nodes_within_the_deadline() {
    let Some(nodes) = Nodes::new() else { return };
    let world = World::new(60);
    let ranks = Ranks::new(&world, &[DEADLINE_S, "optim.length={steps=100000}"]);
    let mut child = nodes.mpirun(1, world.folder.path(), &ranks.args("run", &[])).spawn().unwrap();
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
