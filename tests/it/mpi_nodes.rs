use std::time::{Duration, Instant};

use trainer::checkpoint::Checkpoint;

use crate::mpirun::{DEADLINE_S, Ranks, wait_for_steps};
use crate::nodes::Nodes;
use crate::support::World;

#[test]
fn a_cut_cable_ends_both_nodes_within_the_deadline() {
    let Some(nodes) = Nodes::new() else { return };
    let world = World::new(60);
    let ranks = Ranks::new(&world, &[DEADLINE_S, "optim.length={steps=100000}"]);
    let mut child = nodes.mpirun(1, world.folder.path(), &ranks.args("run", &[])).spawn().unwrap();
    wait_for_steps(&world.path("run"), 5);
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

/// Open MPI's connections between two ranks are two, so that their messages do not wait for one
/// another, or as many as the environment says.
#[test]
fn two_connections_join_two_ranks() {
    let n_connections = |n_asked: Option<&str>| {
        let nodes = Nodes::new()?;
        let world = World::new(60);
        let ranks = Ranks::new(&world, &["optim.length={steps=100000}"]);
        let mut command = nodes.mpirun(1, world.folder.path(), &ranks.args("run", &[]));
        if let Some(n) = n_asked {
            command.env("OMPI_MCA_btl_tcp_links", n);
        }
        let mut child = command.spawn().unwrap();
        wait_for_steps(&world.path("run"), 2);
        let n = nodes.n_connections();
        child.kill().unwrap();
        child.wait().unwrap();
        Some(n)
    };
    let (Some(usual), Some(one)) = (n_connections(None), n_connections(Some("1"))) else { return };
    // One more is mpirun's own.
    assert_eq!([usual, one], [3, 2]);
}
