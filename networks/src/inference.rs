//! A backbone with weights, for inference.

use std::convert::Infallible;

use burn_tensor::{Device, Tensor, TensorData};
use kernels::device::host::{to_host, with_slice};
use kernels::device::workers::{Workers, n_or_all_cores};
use xxhash_rust::xxh3::Xxh3;

use crate::backbone::{Levels, ModelConfig, Readout};
use crate::draws::Draws;
use crate::error::NetworkError;
use crate::init::fill;
use crate::layout::UnitLayout;
use crate::leaves::Leaves;
use crate::patches::{PixelInput, Pixels};
use crate::tensor::{NamedTensor, by_name};
use crate::tokens::Tokens;
use crate::unit::{Context, GroupShape, StatSets, Types, Unit};

/// A backbone with its weights.
pub struct Network {
    /// Configuration of the backbone.
    pub model: ModelConfig,
    /// Pixels that it takes.
    pub pixels: Pixels,
    units: Vec<Box<dyn Unit>>,
    layouts: Vec<UnitLayout>,
    flats: Vec<Tensor<1>>,
    workers: Workers,
    device: Device,
}

impl Network {
    /// Creates a network on `device` with the values of `tensors`, which holds one tensor for each
    /// parameter of `model`.
    ///
    /// # Errors
    /// [`NetworkError::Weights`] for a parameter that is missing, has another shape or is not
    /// finite.
    pub fn new(
        model: &ModelConfig,
        pixels: impl Into<Pixels>,
        tensors: &[NamedTensor],
        n_workers: usize,
        device: &Device,
    ) -> Result<Self, NetworkError> {
        tensors.iter().try_for_each(NamedTensor::check_finite)?;
        let tensors = by_name(tensors);
        Self::with_flats(model, pixels.into(), n_workers, device, |layout: &UnitLayout| {
            layout.flat_values(&tensors)
        })
    }

    /// Creates a network with initial weights of `seed`.
    pub fn random(
        model: &ModelConfig,
        pixels: impl Into<Pixels>,
        seed: u64,
        n_workers: usize,
        device: &Device,
    ) -> Self {
        let Ok(network) = Self::with_flats(model, pixels.into(), n_workers, device, |layout: &UnitLayout| {
            let mut values = vec![0.0; layout.padded];
            for slot in &layout.params {
                fill(slot.spec.init, seed, &layout.full_name(slot), 0, &mut values[slot.range()]);
            }
            Ok::<_, Infallible>(values)
        });
        network
    }

    /// Returns a network of the same form with initial weights of `seed`, on the same device.
    pub fn with_random_weights(&self, seed: u64) -> Self {
        Self::random(&self.model, self.pixels.clone(), seed, self.workers.len(), &self.device)
    }

    /// Creates a network; `flat_values` returns the flat buffer of each unit.
    fn with_flats<E>(
        model: &ModelConfig,
        pixels: Pixels,
        n_workers: usize,
        device: &Device,
        flat_values: impl Fn(&UnitLayout) -> Result<Vec<f32>, E>,
    ) -> Result<Self, E> {
        let units = model.units(Readout::All);
        let layouts: Vec<UnitLayout> = units.iter().map(|unit| unit.layout(1)).collect();
        let mut flats = Vec::with_capacity(layouts.len());
        for layout in &layouts {
            let values = flat_values(layout)?;
            let len = values.len();
            flats.push(Tensor::from_data(TensorData::new(values, [len]), device));
        }
        // One thread keeps a GPU busy.
        let workers = Workers::for_device(device, n_or_all_cores(n_workers));
        let model = model.clone();
        let device = device.clone();
        Ok(Self { model, pixels, units, layouts, flats, workers, device })
    }

    /// Returns all parameters with their values.
    pub fn tensors(&self) -> Vec<NamedTensor> {
        let units = self.layouts.iter().zip(&self.flats);
        units.flat_map(|(layout, flat)| layout.tensors(&to_host(flat.clone()))).collect()
    }

    /// Returns one vector for each of `images`, `[C, size, size]` as stored values: `[B, D]`.
    pub fn embed(&self, images: &[&[u8]], size_px: usize) -> Tensor<2> {
        self.tokens(images, size_px).pooled().x
    }

    /// Returns all tokens of `images`, `[C, size, size]` as stored values: one sequence for each.
    pub fn tokens(&self, images: &[&[u8]], size_px: usize) -> Tokens {
        // One level is requested, and one is returned.
        self.forward_to(images, size_px, &[self.units.len() - 1], None).pop().expect("one level")
    }

    /// Returns the tokens of `images`, `[C, size, size]` as stored values, at each of the last `n`
    /// levels of the backbone, or at all levels if it has fewer. Levels are the blocks of a
    /// transformer, each read through the last norm, or the stages of a convolutional network.
    pub fn levels(&self, images: &[&[u8]], size_px: usize, n: usize) -> Vec<Tokens> {
        let Levels { units, readout } = self.model.levels();
        let first = units.len().saturating_sub(n.max(1));
        self.forward_to(images, size_px, &units[first..], readout)
    }

    /// Returns the bytes that one image of `size_px` needs in the forward pass; see
    /// [`inference_bytes`].
    pub fn image_bytes(&self, size_px: usize) -> f64 {
        inference_bytes(&self.model, size_px)
    }

    fn input(&self) -> PixelInput {
        PixelInput { cell_px: self.model.cell_px(), pixels: self.pixels.clone() }
    }

    /// Returns the device of the weights.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the number of levels that [`Network::levels`] can return.
    pub fn n_levels(&self) -> usize {
        self.model.levels().units.len()
    }

    /// Returns the attention of the class token of each of `images`, `[C, size, size]` as stored
    /// values, to each patch in the last unit with attention, per head, `[B, H, N]`, and the grid
    /// of the patches; `None` for a backbone without attention or class token. The sum of a row is
    /// 1 minus the attention to prefix tokens.
    pub fn class_attention(&self, images: &[&[u8]], size_px: usize) -> Option<(Tensor<3>, [usize; 2])> {
        let input = self.input();
        let mut streams = vec![input.tokens(images, size_px, &self.device)];
        let mut class_attention = None;
        for index in 0..self.units.len() {
            let leaves = Leaves::new(&self.layouts[index], &self.flats[index], false);
            let weights =
                with_evaluation_context(&leaves, 1, |cx| self.units[index].class_attention(&streams[0], cx));
            let group = streams[0].only_group();
            if let Some(weights) = weights
                && group.n_prefix > 0
            {
                let [b, heads, tokens] = weights.dims();
                let class_weights = weights.slice([0..b, 0..heads, group.n_prefix..tokens]);
                class_attention = Some((class_weights, group.grid));
            }
            streams = self.forward_unit(index, streams);
        }
        class_attention
    }

    /// Computes the tokens after each of the units `ends`, passed through the unit `readout`.
    fn forward_to(
        &self,
        images: &[&[u8]],
        size_px: usize,
        ends: &[usize],
        readout: Option<usize>,
    ) -> Vec<Tokens> {
        let input = self.input();
        let slices = self.workers.map(self.workers.slices(images.len()), |_, range| {
            let mut streams = vec![input.tokens(&images[range], size_px, &self.device)];
            let mut levels = Vec::with_capacity(ends.len());
            for index in 0..=ends.last().copied().unwrap_or_default() {
                streams = self.forward_unit(index, streams);
                if ends.contains(&index) {
                    let level = streams.clone();
                    levels.extend(match readout {
                        Some(readout) => self.forward_unit(readout, level),
                        None => level,
                    });
                }
            }
            levels
        });
        let mut levels = Vec::with_capacity(ends.len());
        for level in 0..ends.len() {
            let parts: Vec<Tokens> = slices.iter().map(|slice| slice[level].clone()).collect();
            levels.push(Tokens::concat(&parts));
        }
        levels
    }

    /// Passes `streams` through all stages of the unit `index` with running statistics, so that
    /// images do not depend on one another.
    fn forward_unit(&self, index: usize, mut streams: Vec<Tokens>) -> Vec<Tokens> {
        let unit = &self.units[index];
        let leaves = Leaves::new(&self.layouts[index], &self.flats[index], false);
        with_evaluation_context(&leaves, streams.len(), |cx| {
            for stage in 0..unit.n_stages() {
                streams = unit.forward(stage, streams, cx).streams;
            }
            streams
        })
    }

    /// Returns a hash of the weights, the configuration and the normalization: equal for equal
    /// networks from any file.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Xxh3::new();
        hash.update(format!("{:?} {:?}", self.model, self.pixels).as_bytes());
        for flat in &self.flats {
            with_slice(flat, |values| hash.update(bytemuck::cast_slice(values)));
        }
        hash.digest()
    }
}

/// Returns the bytes that one image of `size_px` needs in the forward pass of a backbone: those of
/// the most expensive unit, with its input.
pub fn inference_bytes(model: &ModelConfig, size_px: usize) -> f64 {
    let cell_px = model.cell_px();
    let pixels = GroupShape {
        drops: false,
        n_views: 1,
        n_prefix: 0,
        grid: [size_px / cell_px; 2],
        n_dropped: 0,
        width: model.n_channels() * cell_px * cell_px,
        n_masked: 0,
        n_mask_blocks: 1,
        is_map: false,
        intermediates: None,
    };
    let mut shapes = vec![pixels];
    let mut largest = 0.0_f64;
    for unit in model.units(Readout::All) {
        let input: usize = shapes.iter().map(|shape| shape.n_rows() * shape.width).sum();
        let (cost, outputs) = unit.cost(&shapes);
        largest = largest.max(input as f64 + cost.graph.total());
        shapes = outputs;
    }
    largest * size_of::<f32>() as f64
}

/// Calls `f` with the context of units in evaluation.
pub(crate) fn with_evaluation_context<R>(
    leaves: &Leaves<'_>,
    n_groups: usize,
    f: impl FnOnce(&Context<'_>) -> R,
) -> R {
    let draws = Draws::default();
    let sets = StatSets::per_size(n_groups);
    f(&Context { leaves, draws: &draws, totals: &[], sets: &sets, types: Types::F32 })
}
