use crate::support::{World, metrics, ok};

/// Device of the tests: wgpu, or that in `OCELLI_TEST_DEVICE`, such as `cuda`.
fn device() -> String {
    std::env::var("OCELLI_TEST_DEVICE").unwrap_or_else(|_| "wgpu".into())
}

fn losses(world: &World, workdir: &str) -> Vec<f64> {
    metrics(&world.path(workdir)).iter().map(|row| row["train/loss"].as_f64().unwrap()).collect()
}

#[test]
fn a_network_is_the_same_beside_the_cpu() {
    let world = World::new(1);
    let recipe = world.text("tiny.toml");
    ok(&world.ocelli(&["bench", "device", "--recipe", &recipe, "--device", &device(), "--steps", "3"]));
}

/// A run that is killed and continued, and one with its shards on the host, have the losses of an
/// unbroken run on the CPU.
#[test]
fn a_run_is_the_same_beside_the_cpu() {
    let world = World::new(60);
    let device = device();
    let run = |workdir: &str, more: &[&str]| {
        world.pretrain(workdir, &[&["--set", "run.workers=1"][..], more].concat())
    };
    ok(&run("cpu", &["--device", "cpu"]));
    let broken = run("gpu", &["--device", &device, "--inject-fault", "kill:rank=0,step=6,phase=backward"]);
    assert!(!broken.status.success());
    ok(&run("gpu", &["--device", &device]));
    ok(&run("offload", &["--device", &device, "--set", "run.offload=true"]));
    let cpu = losses(&world, "cpu");
    for workdir in ["gpu", "offload"] {
        let there = losses(&world, workdir);
        assert_eq!(there.len(), cpu.len());
        for (a, b) in cpu.iter().zip(&there) {
            assert!((a - b).abs() < 2e-3 * a.abs(), "{workdir}: {cpu:?}\n{there:?}");
        }
    }
}
