//! Locations of parameter gradients in the flat gradient of a unit on a GPU: see
//! [`FlatGradient`](crate::ops::FlatGradient).

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_dispatch::backends::autodiff::NodeId;
use burn_tensor::{DType, Device, Tensor};

/// Gradient places of leaves, by their nodes in autodiff's graph, whose nodes cannot store them. An
/// entry is removed when its [`Entry`] is dropped.
static PLACES: LazyLock<Mutex<HashMap<NodeId, GradientPlace>>> = LazyLock::new(Mutex::default);

fn places() -> MutexGuard<'static, HashMap<NodeId, GradientPlace>> {
    // Every change is a single insertion or removal, so the map is valid even if a holder panicked.
    PLACES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The memory of a flat gradient.
#[derive(Debug)]
pub(crate) struct Buffer {
    device: Device,
    len: usize,
    contents: Mutex<Contents>,
}

#[derive(Debug, Default)]
struct Contents {
    /// Sums of gradients, zero where none was added; `None` before the first gradient.
    values: Option<CubeTensor>,
    /// Starts of the ranges that hold a gradient.
    written: HashSet<usize>,
}

impl Buffer {
    /// Creates the memory for the gradient of `flat`.
    pub(crate) fn new(flat: &Tensor<1>) -> Arc<Self> {
        Arc::new(Self { device: flat.device(), len: flat.dims()[0], contents: Mutex::default() })
    }

    /// Marks the range that starts at `start` as written; returns the values, and whether it was
    /// written before.
    fn claim(&self, start: usize) -> (CubeTensor, bool) {
        let mut contents = self.contents.lock().unwrap_or_else(PoisonError::into_inner);
        let holds_gradient = !contents.written.insert(start);
        let values = contents.values.get_or_insert_with(|| self.zeros()).clone();
        (values, holds_gradient)
    }

    fn zeros(&self) -> CubeTensor {
        let zeros = Tensor::<1>::zeros([self.len], (&self.device, DType::F32));
        // The device is that of a tensor for which `is_cube` was true.
        zeros.try_into_primitive::<CubeBackend>().expect("a tensor on a GPU")
    }

    /// Takes the values, which are zeros if no gradient was added.
    pub(crate) fn take(&self) -> Tensor<1> {
        let mut contents = self.contents.lock().unwrap_or_else(PoisonError::into_inner);
        let values = contents.values.take().unwrap_or_else(|| self.zeros());
        Tensor::from_primitive::<CubeBackend>(values)
    }
}

/// Location of a parameter's gradient in the flat gradient of its unit.
#[derive(Debug, Clone)]
pub(crate) struct GradientPlace {
    buffer: Arc<Buffer>,
    range: Range<usize>,
}

/// Memory that a gradient is about to be written to.
pub(crate) struct Claimed {
    /// The flat gradient.
    pub(crate) buffer: CubeTensor,
    /// Elements of the parameter.
    pub(crate) range: Range<usize>,
    /// Whether the range holds a gradient to add to; otherwise it is zero.
    pub(crate) holds_gradient: bool,
}

/// Registration of a leaf, which ends when this is dropped.
pub(crate) struct Entry(NodeId);

impl Drop for Entry {
    fn drop(&mut self) {
        places().remove(&self.0);
    }
}

impl GradientPlace {
    pub(crate) fn new(buffer: &Arc<Buffer>, range: Range<usize>) -> Self {
        Self { buffer: Arc::clone(buffer), range }
    }

    /// Registers this as the place of the gradient of `leaf`.
    pub(crate) fn attach(&self, leaf: NodeId) -> Entry {
        places().insert(leaf, self.clone());
        Entry(leaf)
    }

    /// Returns the place of the gradient of a node, if it is a leaf that was attached to one.
    pub(crate) fn find(node: &NodeId) -> Option<Self> {
        places().get(node).cloned()
    }

    /// Returns the memory to write a gradient to, and marks it as written.
    pub(crate) fn claim(&self) -> Claimed {
        let (buffer, holds_gradient) = self.buffer.claim(self.range.start);
        Claimed { buffer, range: self.range.clone(), holds_gradient }
    }
}
