//! Upload of views to the device.
//!
//! The CPU reads a batch in place. For another device, a separate thread uploads the next batch as
//! soon as all kernels of the current one are queued, so that host copies and the transfer overlap
//! with computation. CubeCL has one stream per thread, so the transfer does not queue up behind
//! those kernels.
//!
//! ```text
//! step's thread   … backward(k) queued · batch k+1 handed over · norms, update(k) · waits for k+1 · targets(k+1) …
//! upload's thread                        concatenates views, sends them
//! ```
//!
//! Sizes of views may differ from batch to batch (`augment::ViewMix`): they are read from the
//! lengths of the views.

use std::thread::JoinHandle;

use augment::{Batch, Depth, PixelFormat, SoftLabel, ViewMasks};
use burn_tensor::{DType, Device, Int, Tensor, TensorData};
use crossbeam::channel::{Receiver, Sender, bounded};
use kernels::device::readback::failure;
use kernels::device::workers::Workers;
use networks::patches::{PixelInput, copy_to_device};
use ranks::EngineError;

use super::batch::{MicroBatch, SlicedImages, Streams};

/// Views of one size, on the device.
#[derive(Debug, Clone)]
enum DeviceViews {
    /// Bytes, `[n, C, size, size]`.
    Bytes(Box<Tensor<4, Int>>),
    /// Normalized vectors, `[n, N, C·p·p]` in f32, for each pixel input of the networks: on a
    /// device that does not support bytes, and for other depths than 8 bits.
    Vectors(Vec<Tensor<3>>),
}

/// A rank's share of a batch on the device: groups of views by micro-batch.
#[derive(Debug)]
pub struct DeviceBatch {
    /// Number of images.
    pub(crate) n_images: usize,
    /// Labels of the images, in host memory; empty if the batch has none.
    pub(crate) labels: Vec<SoftLabel>,
    /// Classes of the pixels of the images' views, in host memory; empty unless the method reads
    /// them.
    pub(crate) masks: Vec<ViewMasks>,
    /// Side lengths of the groups' views in pixels.
    sizes_px: Vec<usize>,
    /// Views by micro-batch and group.
    batches: Vec<Vec<DeviceViews>>,
}

/// Settings of an upload: the views to send, and the device.
#[derive(Debug, Clone)]
pub struct BatchUploader {
    /// Number of views of an image, by group.
    pub(crate) n_views: Vec<usize>,
    /// Distinct pixel inputs of the networks.
    pub(crate) inputs: Vec<PixelInput>,
    /// Number of micro-batches in this rank's share.
    pub(crate) n_micro_batches: usize,
    /// Whether the method reads the classes of the views' pixels.
    pub(crate) reads_masks: bool,
    pub(crate) device: Device,
}

impl BatchUploader {
    /// Sends this rank's share of a batch.
    pub fn send(&self, batch: &Batch) -> DeviceBatch {
        let sizes_px = self.sizes_px(batch);
        let mut batches = Vec::with_capacity(self.n_micro_batches);
        for index in 0..self.n_micro_batches {
            let images = batch.samples.iter().skip(index).step_by(self.n_micro_batches);
            let mut groups = Vec::with_capacity(sizes_px.len());
            for (group, size_px) in sizes_px.iter().enumerate() {
                let views: Vec<&[u8]> =
                    images.clone().map(|sample| sample.groups[group].as_slice()).collect();
                groups.push(self.send_views(&views, *size_px));
            }
            batches.push(groups);
        }
        let masks = view_masks(batch, self.reads_masks);
        let n_images = batch.samples.len();
        DeviceBatch { n_images, labels: batch.labels.clone(), masks, batches, sizes_px }
    }

    /// Converts a batch in host memory into micro-batches, by pixel input of the networks. `slices`
    /// lists the images of each micro-batch, by slice.
    pub(crate) fn micro_batches_from_host(
        &self,
        batch: &Batch,
        slices: &[SlicedImages],
        workers: &Workers,
    ) -> Vec<Vec<MicroBatch>> {
        let sizes_px = self.sizes_px(batch);
        let mut by_input = Vec::with_capacity(self.inputs.len());
        for input in &self.inputs {
            let mut batches = Vec::with_capacity(slices.len());
            for slices in slices {
                let slices = workers
                    .map(slices.clone(), |_, images| self.slice_tokens(input, batch, &images, &sizes_px));
                batches.push(MicroBatch { slices });
            }
            by_input.push(batches);
        }
        by_input
    }

    /// Converts the views of `images` in host memory into tokens, one stream for each size.
    fn slice_tokens(
        &self,
        input: &PixelInput,
        batch: &Batch,
        images: &[usize],
        sizes_px: &[usize],
    ) -> Streams {
        let mut streams = Streams::with_capacity(sizes_px.len());
        for (group, size_px) in sizes_px.iter().enumerate() {
            let views: Vec<&[u8]> =
                images.iter().map(|image| batch.samples[*image].groups[group].as_slice()).collect();
            streams.push(input.tokens(&views, *size_px, &self.device));
        }
        streams
    }

    /// Returns the format of the views, which is the same for all networks.
    fn format(&self) -> PixelFormat {
        self.inputs.first().map_or(PixelFormat::RGB8, |input| input.pixels.format())
    }

    /// Returns the side lengths of the groups' views, which may differ from batch to batch.
    fn sizes_px(&self, batch: &Batch) -> Vec<usize> {
        let bytes_per_pixel = self.format().bytes_per_pixel();
        let groups = batch.samples.first().map_or(&[][..], |sample| &sample.groups);
        groups
            .iter()
            .zip(&self.n_views)
            .map(|(group, n_views)| (group.len() / (bytes_per_pixel * n_views)).isqrt())
            .collect()
    }

    /// Sends views of 8 bits as bytes, a quarter of the size of vectors, if the device supports
    /// that type.
    fn send_views(&self, views: &[&[u8]], size_px: usize) -> DeviceViews {
        let format = self.format();
        let are_bytes = format.depth == Depth::Eight && self.device.supports_dtype(DType::U8);
        if self.device != Device::flex() && are_bytes {
            let bytes = copy_to_device(&self.device, views, format.n_channels, size_px);
            DeviceViews::Bytes(Box::new(bytes))
        } else {
            let mut vectors = Vec::with_capacity(self.inputs.len());
            for input in &self.inputs {
                let (values, shape) = input.vectors(views, size_px);
                vectors.push(Tensor::from_data(TensorData::new(values, shape), &self.device));
            }
            DeviceViews::Vectors(vectors)
        }
    }

    /// Converts a batch on the device into micro-batches of one slice each, by pixel input of the
    /// networks.
    pub(crate) fn micro_batches_from_device(&self, batch: DeviceBatch) -> Vec<Vec<MicroBatch>> {
        let mut by_input = Vec::with_capacity(self.inputs.len());
        for (index, input) in self.inputs.iter().enumerate() {
            let mut batches = Vec::with_capacity(batch.batches.len());
            for groups in &batch.batches {
                let mut slice = Streams::with_capacity(groups.len());
                for (views, size_px) in groups.iter().zip(&batch.sizes_px) {
                    let x = match views {
                        DeviceViews::Bytes(bytes) => input.vectors_on_device(bytes.as_ref().clone()),
                        DeviceViews::Vectors(vectors) => vectors[index].clone(),
                    };
                    slice.push(input.on_grid(x, *size_px));
                }
                batches.push(MicroBatch { slices: vec![slice] });
            }
            by_input.push(batches);
        }
        by_input
    }
}

/// Returns the classes of the pixels of the views of each image of `batch`; none unless the method
/// reads them, `reads_masks`.
pub(super) fn view_masks(batch: &Batch, reads_masks: bool) -> Vec<ViewMasks> {
    let mut masks = Vec::new();
    if reads_masks {
        for views in &batch.samples {
            masks.push(views.masks.clone());
        }
    }
    masks
}

/// A batch to send, and the channel for its delivery.
type Order = (Batch, Sender<Delivery>);

/// A batch whose host memory may be reused, and its copy on the device.
type Delivery = Result<(Batch, DeviceBatch), EngineError>;

/// Thread that sends batches. Dropping it waits for the batches that were queued.
pub struct Uploads {
    batches: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

/// A batch on its way to the device.
pub struct Upload(Receiver<Delivery>);

impl Uploads {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`EngineError::Unavailable`] when the process is out of threads.
    pub fn start(uploader: BatchUploader) -> Result<Self, EngineError> {
        let (batches, orders) = bounded::<Order>(1);
        let thread = std::thread::Builder::new().name("upload".into()).spawn(move || {
            for (batch, delivery) in orders {
                let on_device = uploader.send(&batch);
                // CubeCL collects operations before it sends them; without a synchronization
                // nothing would be sent before the step's own thread waits for the device.
                let result = uploader.device.sync().map_err(|error| failure(&error).into());
                // Batches that were queued before a rollback have no receiver.
                let _ = delivery.send(result.map(|()| (batch, on_device)));
            }
        });
        let thread = thread.map_err(|error| EngineError::Unavailable {
            engine: "device",
            reason: format!("cannot start the thread that sends batches: {error}"),
        })?;
        Ok(Self { batches: Some(batches), thread: Some(thread) })
    }

    /// Queues a batch for upload.
    pub fn push(&self, batch: Batch) -> Upload {
        let (sender, receiver) = bounded(1);
        if let Some(batches) = &self.batches {
            // `Upload::wait` reports a failure of the thread.
            let _ = batches.send((batch, sender));
        }
        Upload(receiver)
    }
}

impl Upload {
    /// Waits until the batch is on the device. Also returns the batch in host memory.
    ///
    /// # Errors
    /// [`EngineError::Failed`] when it could not be sent.
    pub fn wait(self) -> Result<(Batch, DeviceBatch), EngineError> {
        let Ok(delivery) = self.0.recv() else {
            return Err(EngineError::Failed {
                engine: "device",
                operation: "sending a batch",
                reason: "the thread that sends has failed".into(),
            });
        };
        delivery
    }
}

impl Drop for Uploads {
    fn drop(&mut self) {
        drop(self.batches.take());
        if let Some(thread) = self.thread.take() {
            // `Upload::wait` has reported a panic of the thread.
            let _ = thread.join();
        }
    }
}
