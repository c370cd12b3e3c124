use crate::support::{World, metrics, ok};

/// Returns the device of the tests: wgpu, or that in `OCELLI_TEST_DEVICE`, such as `cuda`.
fn device() -> String {
    std::env::var("OCELLI_TEST_DEVICE").unwrap_or_else(|_| "wgpu".into())
}

fn losses(world: &World, workdir: &str) -> Vec<f64> {
    metrics(&world.path(workdir)).iter().map(|row| row["train/loss"].as_f64().unwrap()).collect()
}

#[test]
fn a_network_computes_the_same_as_on_the_cpu() {
    let world = World::new(1);
    let recipe = world.text("tiny.toml");
    ok(&world.ocelli(&["bench", "device", "--recipe", &recipe, "--device", &device(), "--steps", "3"]));
}

/// A run that is killed and resumed, and one with its shards on the host, have the losses of an
/// uninterrupted run on the CPU.
#[test]
fn runs_have_the_losses_of_the_cpu() {
    let world = World::new(60);
    let device = device();
    ok(&world.pretrain("cpu", &["--set", "run.workers=1", "--device", "cpu"]));
    let on_device = ["--set", "run.workers=1", "--device", &device];
    let fault = ["--inject-fault", "kill:rank=0,step=6,phase=backward"];
    let killed = world.pretrain("gpu", &[&on_device[..], &fault].concat());
    assert!(!killed.status.success());
    ok(&world.pretrain("gpu", &on_device));
    let offload = ["--set", "run.offload=true"];
    ok(&world.pretrain("offload", &[&on_device[..], &offload].concat()));
    let expected = losses(&world, "cpu");
    for workdir in ["gpu", "offload"] {
        let losses = losses(&world, workdir);
        assert_eq!(losses.len(), expected.len());
        for (a, b) in expected.iter().zip(&losses) {
            assert!((a - b).abs() < 2e-3 * a.abs(), "{workdir}: {expected:?}\n{losses:?}");
        }
    }
}
