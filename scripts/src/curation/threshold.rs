//! Threshold of similarity above which two images are too much alike.

/// Lower bound of the product of two equal rows of unit length, which is 1 up to rounding.
const EQUAL: f32 = 1.0 - 1e-6;

/// Flag of the threshold.
#[derive(clap::Args)]
pub(crate) struct ThresholdFlag {
    /// Cosine similarity at or above which two images are too similar. The right value depends on
    /// the network and the images; if images are given (not only features), pairs.png shows pairs
    /// above and below it.
    #[arg(long, default_value_t = 0.95, value_name = "COSINE", value_parser = cosine)]
    pub(crate) threshold: f32,
}

impl ThresholdFlag {
    /// Returns the smallest product of rows that are too much alike.
    pub(crate) fn least_product(&self) -> f32 {
        self.threshold.min(EQUAL)
    }
}

fn cosine(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(value) if value > -1.0 && value <= 1.0 => Ok(value),
        _ => Err("expected a cosine similarity above -1 and at most 1".into()),
    }
}
