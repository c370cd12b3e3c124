//! Upload of views to the device.
//!
//! The CPU reads a batch in place. For another device, a separate thread uploads the next batch as
//! soon as all kernels of the current one are queued, so that host copies and the transfer overlap
//! with computation. CubeCL has one stream per thread, so the transfer does not queue up behind
//! those kernels.
//!
//! ```text
//! step's thread   … backward(k) queued · batch k+1 handed over · norms, update(k) · waits for k+1 · targets(k+1) …
//! upload's thread                        joins views, sends them
//! ```

use std::thread::JoinHandle;

use augment::{Batch, Depth, PixelFormat};
use burn_tensor::{DType, Device, Int, Tensor};
use crossbeam::channel::{Receiver, Sender, bounded};
use kernels::device::readback::failure;
use kernels::device::workers::Workers;
use networks::patches::{PixelInput, copy_to_device};
use ranks::EngineError;

use super::batch::{MicroBatch, SlicedImages};

/// Views of one size, on the device.
#[derive(Debug, Clone)]
enum SentViews {
    /// Bytes, `[n, C, size, size]`.
    Bytes(Box<Tensor<4, Int>>),
    /// Normalized vectors, `[n, N, C·p·p]` in f32, for each pixel input of the networks: for a
    /// device that does not support bytes, and for other depths.
    Vectors(Vec<Tensor<3>>),
}

/// A rank's share of a batch on the device: groups of views by micro-batch.
#[derive(Debug)]
pub struct Sent {
    pub(crate) n_images: usize,
    /// Sides of the groups' views in pixels.
    sizes_px: Vec<usize>,
    batches: Vec<Vec<SentViews>>,
}

/// Settings of an upload: the views to send, and the device.
#[derive(Debug, Clone)]
pub struct BatchUploader {
    /// Number of views of an image, by group.
    pub(crate) n_views: Vec<usize>,
    /// Pixel inputs of the networks, each different one once.
    pub(crate) inputs: Vec<PixelInput>,
    /// Number of micro-batches in this rank's share.
    pub(crate) n_micro_batches: usize,
    pub(crate) device: Device,
}

impl BatchUploader {
    /// Sends this rank's share of a batch.
    pub fn send(&self, batch: &Batch) -> Sent {
        let sizes_px = self.sizes_px(batch);
        let batches = (0..self.n_micro_batches)
            .map(|number: usize| {
                let images = batch.samples.iter().skip(number).step_by(self.n_micro_batches);
                sizes_px
                    .iter()
                    .enumerate()
                    .map(|(group, size_px)| {
                        let views: Vec<&[u8]> =
                            images.clone().map(|sample| sample.groups[group].as_slice()).collect();
                        self.send_views(&views, *size_px)
                    })
                    .collect()
            })
            .collect();
        Sent { n_images: batch.samples.len(), batches, sizes_px }
    }

    /// Converts a batch in host memory into micro-batches, with the images of their slices, for
    /// each pixel input of the networks.
    pub(crate) fn here(
        &self,
        batch: &Batch,
        slices: Vec<SlicedImages>,
        workers: &Workers,
    ) -> Vec<Vec<MicroBatch>> {
        let sizes_px = self.sizes_px(batch);
        let of_slice = |input: &PixelInput, images: Vec<usize>| {
            sizes_px
                .iter()
                .enumerate()
                .map(|(group, size_px)| {
                    let views: Vec<&[u8]> =
                        images.iter().map(|image| batch.samples[*image].groups[group].as_slice()).collect();
                    input.features(&views, *size_px, &self.device)
                })
                .collect()
        };
        let of_batch = |input, slices: &SlicedImages| MicroBatch {
            slices: workers.map(slices.clone(), |_, images| of_slice(input, images)),
        };
        self.inputs
            .iter()
            .map(|input| slices.iter().map(|slices| of_batch(input, slices)).collect())
            .collect()
    }

    /// Returns the format of the views, which is the same for all networks.
    fn format(&self) -> PixelFormat {
        self.inputs.first().map_or(PixelFormat::RGB8, |input| input.pixels.format())
    }

    /// Returns the sides of the groups' views, which may differ from batch to batch.
    fn sizes_px(&self, batch: &Batch) -> Vec<usize> {
        let bytes_per_pixel = self.format().bytes_per_pixel();
        let groups = batch.samples.first().map_or(&[][..], |views| &views.groups);
        groups
            .iter()
            .zip(&self.n_views)
            .map(|(group, n_views)| (group.len() / (bytes_per_pixel * n_views)).isqrt())
            .collect()
    }

    /// Sends views of 8 bits as bytes, a quarter of the size of vectors, if the device supports
    /// that type.
    fn send_views(&self, views: &[&[u8]], size_px: usize) -> SentViews {
        let format = self.format();
        let are_bytes = format.depth == Depth::Eight && self.device.supports_dtype(DType::U8);
        if self.device != Device::flex() && are_bytes {
            let bytes = copy_to_device(&self.device, views, format.n_channels, size_px);
            SentViews::Bytes(Box::new(bytes))
        } else {
            let vectors = |input: &PixelInput| input.features(views, size_px, &self.device).x;
            SentViews::Vectors(self.inputs.iter().map(vectors).collect())
        }
    }

    /// Converts what was sent into micro-batches of one slice each, for each pixel input of the
    /// networks.
    pub(crate) fn micro_batches(&self, sent: Sent) -> Vec<Vec<MicroBatch>> {
        self.inputs
            .iter()
            .enumerate()
            .map(|(number, input)| {
                let features = |(views, size_px): (&SentViews, &usize)| {
                    let x = match views {
                        SentViews::Bytes(bytes) => input.vectors_on_device(bytes.as_ref().clone()),
                        SentViews::Vectors(vectors) => vectors[number].clone(),
                    };
                    input.on_grid(x, *size_px)
                };
                sent.batches
                    .iter()
                    .map(|groups| MicroBatch {
                        slices: vec![groups.iter().zip(&sent.sizes_px).map(features).collect()],
                    })
                    .collect()
            })
            .collect()
    }
}

/// A batch to send, and the channel for its delivery.
type Order = (Batch, Sender<Delivery>);

/// A batch whose memory on the host is free again, and its copy on the device.
type Delivery = Result<(Batch, Sent), EngineError>;

/// The thread that sends batches. Dropping it waits for the batches that it was given.
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
        let (batches, taken) = bounded::<Order>(1);
        let thread = std::thread::Builder::new().name("upload".into()).spawn(move || {
            for (batch, done) in taken {
                let sent = uploader.send(&batch);
                // CubeCL collects operations before it sends them; without this nothing would leave
                // before the step's own thread waits for the device.
                let arrived = uploader.device.sync().map_err(|error| failure(&error).into());
                // Nobody waits for batches that were sent before a rollback.
                let _ = done.send(arrived.map(|()| (batch, sent)));
            }
        });
        let thread = thread.map_err(|error| EngineError::Unavailable {
            engine: "device",
            reason: format!("no thread to send batches: {error}"),
        })?;
        Ok(Self { batches: Some(batches), thread: Some(thread) })
    }

    /// Queues a batch for upload.
    pub fn push(&self, batch: Batch) -> Upload {
        let (done, sent) = bounded(1);
        if let Some(batches) = &self.batches {
            // A failure of the thread is noticed by the caller that waits.
            let _ = batches.send((batch, done));
        }
        Upload(sent)
    }
}

impl Upload {
    /// Waits until the batch is on the device; returns its memory on the host as well.
    ///
    /// # Errors
    /// [`EngineError::Failed`] when it could not be sent.
    pub fn wait(self) -> Result<(Batch, Sent), EngineError> {
        let panicked = || EngineError::Failed {
            engine: "device",
            operation: "sending a batch",
            reason: "the thread that sends has failed".into(),
        };
        self.0.recv().unwrap_or_else(|_| Err(panicked()))
    }
}

impl Drop for Uploads {
    fn drop(&mut self) {
        drop(self.batches.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported to the caller that waited.
            let _ = thread.join();
        }
    }
}
