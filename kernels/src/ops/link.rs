//! A gradient that the backward pass of one operation stores for the backward pass of a later one,
//! which adds it in its own pass over memory.

use std::sync::{Arc, Mutex, PoisonError};

/// Holds a gradient between the backward passes of two operations.
#[derive(Debug)]
pub(super) struct Link<T>(Arc<Mutex<Option<T>>>);

impl<T> Link<T> {
    /// Stores a gradient for a later operation to take.
    pub(super) fn store(&self, grad: T) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(grad);
    }

    /// Takes the gradient that was stored, if any.
    pub(super) fn take(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<T> Clone for Link<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Default for Link<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}
