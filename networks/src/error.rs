//! Errors of weights that do not fit a network.

/// Weights that a network cannot take.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// A parameter of a network is not among its weights, or cannot be used.
    #[error("parameter {name} {reason}")]
    Weights {
        /// Name of the parameter.
        name: String,
        /// Reason why the network cannot use it.
        reason: String,
    },
}
