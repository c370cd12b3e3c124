//! Comparison with PyTorch and with the official code of methods on the same numbers, in f64
//! (`scripts/golden`).

mod convolution;
mod names;
mod network;
mod objectives;
mod official;
mod optimizer;
mod runs;

use burn_tensor::{Device, Tensor, TensorData};
use kernels::device::host::to_host;
use safetensors::{Dtype, SafeTensors};

use crate::bench::compare::difference;
use crate::optim::state::UnitShard;

/// File of golden tensors.
struct Golden(Vec<u8>);

impl Golden {
    fn open(name: &str) -> Self {
        Self::open_in("training", name)
    }

    fn open_in(folder: &str, name: &str) -> Self {
        let goldens = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");
        Self(std::fs::read(format!("{goldens}/{folder}/{name}.safetensors")).unwrap())
    }

    fn names(&self) -> Vec<String> {
        let all = SafeTensors::deserialize(&self.0).unwrap();
        all.names().into_iter().map(ToString::to_string).collect()
    }

    fn view<R>(&self, name: &str, f: impl FnOnce(Dtype, &[usize], &[u8]) -> R) -> R {
        let all = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = all.tensor(name).unwrap_or_else(|_| panic!("no golden {name}"));
        f(tensor.dtype(), tensor.shape(), tensor.data())
    }

    fn values(&self, name: &str) -> Vec<f32> {
        self.view(name, |dtype, _, bytes| {
            assert_eq!(dtype, Dtype::F32, "{name}");
            bytes.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect()
        })
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        self.view(name, |dtype, _, bytes| {
            assert_eq!(dtype, Dtype::U8, "{name}");
            bytes.to_vec()
        })
    }

    fn tensor<const D: usize>(&self, name: &str) -> Tensor<D> {
        let shape: [usize; D] = self.view(name, |_, shape, _| shape.try_into().unwrap());
        Tensor::from_data(TensorData::new(self.values(name), shape), &Device::flex())
    }

    /// Returns the buffer of a shard of one rank, filled with the tensors that are named by
    /// `prefix` and the names of its parameters.
    fn flat(&self, prefix: &str, shard: &UnitShard) -> Tensor<1> {
        let mut flat = vec![0.0; shard.layout.padded];
        for slot in &shard.layout.params {
            let values = self.values(&format!("{prefix}.{}", shard.layout.full_name(slot)));
            flat[slot.range()].copy_from_slice(&values);
        }
        Tensor::from_floats(flat.as_slice(), &Device::flex())
    }

    /// Asserts that each parameter in `flat`, the buffer of a unit, equals the golden one within
    /// `tolerance`, relative to its largest value.
    fn assert_params(&self, prefix: &str, shard: &UnitShard, flat: &Tensor<1>, tolerance: f32) {
        let flat = to_host(flat.clone());
        for slot in &shard.layout.params {
            let name = format!("{prefix}.{}", shard.layout.full_name(slot));
            assert_near(&name, &flat[slot.range()], &self.values(&name), tolerance);
        }
    }

    /// Asserts as `assert_tensor`, without a comparison of shapes.
    fn assert_values(&self, name: &str, ours: Tensor<1>, tolerance: f32) {
        assert_near(name, &to_host(ours), &self.values(name), tolerance);
    }

    fn assert_tensor<const D: usize>(&self, name: &str, ours: Tensor<D>, tolerance: f32) {
        assert_eq!(ours.dims().to_vec(), self.view(name, |_, shape, _| shape.to_vec()), "{name}");
        assert_near(name, &to_host(ours.reshape([-1])), &self.values(name), tolerance);
    }
}

fn assert_near(name: &str, ours: &[f32], golden: &[f32], tolerance: f32) {
    assert!(golden.iter().any(|value| *value != 0.0), "{name} is zero");
    let worst = difference(golden, ours);
    assert!(worst <= f64::from(tolerance), "{name}: {worst} of the largest");
}
