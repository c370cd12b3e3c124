//! A backbone with weights, for inference: what evaluation and export see of a run.

pub mod probe;

use std::collections::HashMap;
use std::path::Path;

use ::safetensors::tensor::SafeTensors;
use burn_tensor::{DType, Device, Tensor, TensorData};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::safetensors::{to_safetensors, values_of};
use crate::comm::wire::Wire;
use crate::device::host::to_host;
use crate::device::workers::Workers;
use crate::device::workers::or_cores;
use crate::error::TrainError;
use crate::model::backbone::{ModelConfig, Readout};
use crate::model::features::Tokens;
use crate::model::init::fill;
use crate::model::layout::UnitLayout;
use crate::model::unit::{Draws, Unit};
use crate::recipe::plan::Plan;
use crate::step::Trainer;
use crate::step::batch::{join, tokens_of};
use crate::step::tape::Gathered;

/// Key of the backbone's description in an exported file.
const MODEL_KEY: &str = "ocelli.model";

/// A backbone with its weights.
pub struct Network {
    /// What it is.
    pub model: ModelConfig,
    units: Vec<Box<dyn Unit>>,
    layouts: Vec<UnitLayout>,
    flats: Vec<Tensor<1>>,
    workers: Workers,
    device: Device,
}

impl Network {
    /// A network on `device` whose units have the flat buffers that `flat` gives.
    ///
    /// # Errors
    /// Those of `flat`.
    pub fn new(
        model: &ModelConfig,
        n_workers: usize,
        device: &Device,
        mut flat: impl FnMut(&UnitLayout) -> Result<Vec<f32>, TrainError>,
    ) -> Result<Self, TrainError> {
        let units = model.units(Readout::All);
        let layouts: Vec<UnitLayout> = units.iter().map(|unit| UnitLayout::of(unit.as_ref(), 1)).collect();
        let flats: Result<Vec<_>, _> = layouts
            .iter()
            .map(|layout| {
                flat(layout).map(|values| {
                    let len = values.len();
                    Tensor::from_data(TensorData::new(values, [len]), device)
                })
            })
            .collect();
        // A GPU is kept busy by one thread.
        let workers = Workers::on(device, or_cores(n_workers));
        Ok(Self { model: model.clone(), units, layouts, flats: flats?, workers, device: device.clone() })
    }

    /// The network as `seed` initialises it.
    ///
    /// # Errors
    /// None in practice; the signature is that of [`Network::new`].
    pub fn random(
        model: &ModelConfig,
        seed: u64,
        n_workers: usize,
        device: &Device,
    ) -> Result<Self, TrainError> {
        Self::new(model, n_workers, device, |layout| {
            let mut values = vec![0.0; layout.padded];
            for slot in &layout.params {
                fill(slot.spec.init, seed, &layout.full_name(slot), 0, &mut values[slot.range()]);
            }
            Ok(values)
        })
    }

    /// The teacher or the student (`which`) of a checkpoint folder, or the network of an exported
    /// safetensors file.
    ///
    /// # Errors
    /// [`TrainError::CheckpointRead`].
    pub fn open(path: &Path, which: &str, n_workers: usize, device: &Device) -> Result<Self, TrainError> {
        if path.is_file() && path.file_name().is_none_or(|name| name != "latest") {
            if which != "teacher" {
                let reason = format!("an exported file holds one network; it cannot give the {which}");
                return Err(TrainError::CheckpointRead { path: path.to_path_buf(), reason });
            }
            return Self::open_export(path, n_workers, device);
        }
        let checkpoint = Checkpoint::open(path)?;
        let model = &checkpoint.manifest.plan.recipe.model;
        Self::new(model, n_workers, device, |layout| checkpoint.buffer(which, &layout.name))
    }

    fn open_export(path: &Path, n_workers: usize, device: &Device) -> Result<Self, TrainError> {
        let bad = |reason: String| TrainError::CheckpointRead { path: path.to_path_buf(), reason };
        let bytes = std::fs::read(path).map_err(|error| bad(error.to_string()))?;
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|error| bad(error.to_string()))?;
        let text = header.metadata().as_ref().and_then(|m| m.get(MODEL_KEY)).ok_or_else(|| {
            bad(format!("it has no {MODEL_KEY} entry: only files of `ocelli export` can be read"))
        })?;
        let model: ModelConfig = serde_json::from_str(text).map_err(|error| bad(error.to_string()))?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|error| bad(error.to_string()))?;
        Self::new(&model, n_workers, device, |layout| {
            let mut values = vec![0.0; layout.padded];
            for slot in &layout.params {
                let name = layout.full_name(slot);
                let found = values_of(&tensors, &name).map_err(bad)?;
                if found.len() != slot.spec.numel() {
                    return Err(bad(format!(
                        "{name} has {} elements, not {}",
                        found.len(),
                        slot.spec.numel()
                    )));
                }
                values[slot.range()].copy_from_slice(&found);
            }
            Ok(values)
        })
    }

    /// The weights as a safetensors file with timm's parameter names.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn export(&self, path: &Path) -> Result<(), TrainError> {
        let mut tensors = Vec::new();
        for (layout, flat) in self.layouts.iter().zip(&self.flats) {
            let values = crate::device::host::to_host(flat.clone());
            for slot in &layout.params {
                let data = TensorData::new(values[slot.range()].to_vec(), slot.spec.shape.clone());
                tensors.push((layout.full_name(slot), data));
            }
        }
        let io = |error| TrainError::io("write", path, error);
        let model = serde_json::to_string(&self.model).map_err(|error| io(error.into()))?;
        let metadata = HashMap::from([(MODEL_KEY.to_string(), model), ("format".into(), "pt".into())]);
        let bytes = to_safetensors(&tensors, metadata).map_err(io)?;
        std::fs::write(path, bytes).map_err(io)
    }

    /// Normalised tokens of images `[3, size, size]` as bytes: `[B, 1 + N, D]`, class token first.
    pub fn tokens(&self, images: &[&[u8]], size_px: usize) -> Tensor<3> {
        let slices: Vec<Vec<Tokens>> = self.workers.map(self.workers.slices(images.len()), |_, range| {
            let (patch_px, device) = (self.model.patch_px(), &self.device);
            let mut groups = vec![tokens_of(&images[range], size_px, patch_px, device, DType::F32)];
            for ((unit, layout), flat) in self.units.iter().zip(&self.layouts).zip(&self.flats) {
                groups = Gathered { unit: unit.as_ref(), layout, flat }.infer(groups, &Draws::default());
            }
            groups
        });
        join(slices).remove(0).x
    }
}

/// The teacher's backbone, as evaluation sees it, on rank 0. All ranks call it.
///
/// # Errors
/// [`TrainError::Ranks`].
pub fn teacher_of(trainer: &Trainer, plan: &Plan) -> Result<Option<Network>, TrainError> {
    let mut flats = HashMap::new();
    for shard in &trainer.state.shards[..trainer.backbone.len()] {
        let mine = shard.teacher.clone().to_device(&trainer.device);
        let pending = trainer.comm.gather(&shard.layout.name, &mine, Wire::F32, false)?;
        let flat = trainer.comm.wait(pending)?;
        if trainer.place().rank == 0 {
            flats.insert(shard.layout.name.clone(), to_host(flat));
        }
    }
    if trainer.place().rank != 0 {
        return Ok(None);
    }
    let network = Network::new(&plan.recipe.model, plan.n_workers, &trainer.device, |layout| {
        flats.remove(&layout.name).ok_or_else(|| TrainError::NoUnit { unit: layout.name.clone() })
    });
    network.map(Some)
}
