use std::time::Duration;

use trainer::checkpoint::Checkpoint;

use crate::mpirun::{DEADLINE_S, Ranks, wait_for_steps};
use crate::nodes::Nodes;
use crate::support::{World, wait_for};

#[test]
fn a_cut_cable_ends_both_nodes_within_the_deadline() {
    let Some(nodes) = Nodes::new() else { return };
    let world = World::new(60);
    let ranks = Ranks::new(&world, &[DEADLINE_S, "optim.length={steps=100000}"]);
    let mut child = nodes.mpirun(1, world.folder.path(), &ranks.args("run", &[])).spawn().unwrap();
    wait_for_steps(&world.path("run"), 5);
    nodes.cut();
    wait_for("the end of both nodes", Duration::from_secs(60), || {
        world.path("code-0").exists() && world.path("code-1").exists()
    });
    for rank in 0..2 {
        let stderr = ranks.stderr(rank);
        assert_eq!(ranks.code(rank), 134, "{stderr}");
        assert!(stderr.contains("has not finished within"), "{stderr}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(Checkpoint::open(&world.path("run")).is_ok());
}

/// Returns the number of connections between two nodes with a rank each, if nodes can be simulated
/// here.
fn count_connections(requested: Option<&str>) -> Option<usize> {
    let nodes = Nodes::new()?;
    let world = World::new(60);
    let ranks = Ranks::new(&world, &["optim.length={steps=100000}"]);
    let mut command = nodes.mpirun(1, world.folder.path(), &ranks.args("run", &[]));
    if let Some(n) = requested {
        command.env("OMPI_MCA_btl_tcp_links", n);
    }
    let mut child = command.spawn().unwrap();
    wait_for_steps(&world.path("run"), 2);
    let n = nodes.n_connections();
    child.kill().unwrap();
    child.wait().unwrap();
    Some(n)
}

/// Open MPI uses two connections between two ranks, so that their messages do not wait for one
/// another, or the number in the environment.
#[test]
fn two_ranks_have_two_connections_by_default() {
    let Some(default) = count_connections(None) else { return };
    let Some(one) = count_connections(Some("1")) else { return };
    // One more connection is that of mpirun.
    assert_eq!([default, one], [3, 2]);
}
