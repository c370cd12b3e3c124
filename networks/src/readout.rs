//! What a backbone returns of its tokens.

/// Tokens that a backbone returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readout {
    /// One vector per view, `[B·V, D]`.
    Pooled,
    /// All tokens, `[B·V·(P + N), D]`.
    All,
}
