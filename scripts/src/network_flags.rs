//! Flags for the choice of a network, for its weights and for the preprocessing of its images.

use augment::{Depth, Fill, NoData};
use networks::Normalization;
use report::shell_quote;
use session::NetworkSettings;
use weights::{Hints, Library};

/// Flags for the choice of the network and for its preprocessing.
#[derive(Default, clap::Args)]
pub(crate) struct NetworkFlags {
    /// Input image size in pixels, instead of the model's.
    #[arg(long, value_name = "PX", hide_short_help = true)]
    image_px: Option<u32>,
    /// Short side after resizing, before the center crop. Set it to the model's size to leave
    /// thumbnails unresized [default: from the configuration of the weights, else 256/224 of the
    /// crop; for logreg, the crop].
    #[arg(long, value_name = "PX")]
    resize_px: Option<u32>,
    #[command(flatten)]
    weights: WeightFlags,
}

impl NetworkFlags {
    /// Returns the settings that the flags state.
    pub(crate) fn settings(&self) -> NetworkSettings {
        NetworkSettings { image_px: self.image_px, resize_px: self.resize_px, ..self.weights.settings() }
    }
}

/// Flags for facts that a weights file may not state.
#[derive(Clone, Default, clap::Args)]
#[command(
    mut_arg("bits_used", |arg| arg.hide_short_help(true)),
    mut_arg("no_data", |arg| arg.hide_short_help(true))
)]
pub(crate) struct WeightFlags {
    /// Network of a run, or of a file with several, by name, such as student [default: the one that
    /// the method of the run evaluates].
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    network: Option<String>,
    /// Library that a weights file comes from, if its tensor names are ambiguous: dino, dinov2,
    /// dinov3, timm, torchvision or transformers.
    #[arg(long, value_name = "LIBRARY", hide_short_help = true)]
    source: Option<Library>,
    /// Number of attention heads, for a weights file [default: from its config.json, else one per
    /// 64 channels].
    #[arg(long, value_name = "N", hide_short_help = true)]
    heads: Option<usize>,
    /// Normalization, for a weights file: imagenet, half (0.5, as in many timm models), or
    /// `R,G,B/R,G,B`, the mean and standard deviation per channel [default: from the file, else
    /// imagenet].
    #[arg(long, value_name = "COLORS", value_parser = normalization, hide_short_help = true)]
    normalization: Option<Normalization>,
    /// Epsilon of the layer norms, for a weights file [default: from the file, else that of the
    /// published networks].
    #[arg(long, value_name = "EPSILON", value_parser = epsilon, hide_short_help = true)]
    norm_epsilon: Option<f64>,
    /// Bits per channel, for a weights file: 8, 16 or 32 (floating point) [default: from the file,
    /// else 8].
    #[arg(long = "bits", value_name = "BITS", value_parser = depth, hide_short_help = true)]
    depth: Option<Depth>,
    #[command(flatten)]
    pub(crate) values: ValueFlags,
}

/// Flags for the values of pixels of other formats than 8 bits.
#[derive(Clone, Default, clap::Args)]
pub(crate) struct ValueFlags {
    /// Number of bits that 16-bit images use, like the recipe's data.bits_used [default: all].
    #[arg(long, value_name = "BITS", value_parser = clap::value_parser!(u8).range(1..16))]
    pub(crate) bits_used: Option<u8>,
    /// No-data value of pixels, like the recipe's data.no_data; nan if only NaN marks missing data.
    /// Such pixels are filled with the mean of the others.
    #[arg(long, value_name = "VALUE", allow_hyphen_values = true)]
    pub(crate) no_data: Option<f32>,
}

impl ValueFlags {
    /// Returns the value of pixels without data, if a flag states it.
    pub(crate) fn no_data(&self, fill: Fill) -> Option<NoData> {
        let value = self.no_data?;
        Some(NoData { value: value.is_finite().then_some(value), fill })
    }

    /// Returns whether a flag is given.
    pub(crate) fn is_given(&self) -> bool {
        self.bits_used.is_some() || self.no_data.is_some()
    }
}

fn epsilon(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "expected a number such as 1e-6".to_string())?;
    if value > 0.0 && value < 1.0 { Ok(value) } else { Err("expected a number between 0 and 1".into()) }
}

impl WeightFlags {
    /// Returns the flags that are given, with their values, as words of a command.
    pub(crate) fn words(&self) -> Vec<String> {
        let Self { network, source, heads, normalization, norm_epsilon, depth, values } = self;
        let mut words = Vec::new();
        if let Some(network) = network {
            words.push(format!("--network {}", shell_quote(network)));
        }
        if let Some(library) = source {
            words.push(format!("--source {}", library.name()));
        }
        if let Some(heads) = heads {
            words.push(format!("--heads {heads}"));
        }
        if let Some(Normalization { mean, std }) = normalization {
            words.push(format!("--normalization {}/{}", join_numbers(mean), join_numbers(std)));
        }
        if let Some(epsilon) = norm_epsilon {
            words.push(format!("--norm-epsilon {epsilon:e}"));
        }
        if let Some(depth) = depth {
            words.push(format!("--bits {}", depth.bits()));
        }
        if let Some(bits_used) = values.bits_used {
            words.push(format!("--bits-used {bits_used}"));
        }
        if let Some(no_data) = values.no_data {
            words.push(format!("--no-data {no_data}"));
        }
        words
    }

    /// Returns the settings that the flags state.
    pub(crate) fn settings(&self) -> NetworkSettings {
        let hints = Hints {
            library: self.source,
            heads: self.heads,
            normalization: self.normalization.clone(),
            depth: self.depth,
            norm_epsilon: self.norm_epsilon,
            network: self.network.clone(),
        };
        NetworkSettings {
            hints,
            bits_used: self.values.bits_used,
            no_data: self.values.no_data(Fill::default()),
            ..NetworkSettings::default()
        }
    }
}

/// Parses the number of bits of a value.
pub(crate) fn depth(text: &str) -> Result<Depth, String> {
    text.parse::<u8>().map_err(|error| error.to_string())?.try_into()
}

/// Parses `imagenet`, `half`, or `R,G,B/R,G,B`: means and deviations, of three channels or of
/// others.
fn normalization(text: &str) -> Result<Normalization, String> {
    match text {
        "imagenet" => return Ok(Normalization::default()),
        "half" => return Ok(Normalization::half(3)),
        _ => {}
    }
    if let Some((mean, std)) = text.split_once('/')
        && let Some(mean) = parse_numbers(mean)
        && let Some(std) = parse_numbers(std)
    {
        let normalization = Normalization { mean, std };
        return normalization.validate().map(|()| normalization);
    }
    Err("expected imagenet, half, or means and standard deviations, such as \
        0.485,0.456,0.406/0.229,0.224,0.225"
        .into())
}

/// Formats numbers with commas.
fn join_numbers(numbers: &[f32]) -> String {
    let words: Vec<String> = numbers.iter().map(ToString::to_string).collect();
    words.join(",")
}

/// Parses numbers with commas.
fn parse_numbers(text: &str) -> Option<Vec<f32>> {
    text.split(',').map(|number| number.trim().parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        flags: WeightFlags,
    }

    /// Reads the flags of a command.
    fn parse(text: &str) -> WeightFlags {
        let words = std::iter::once("ocelli").chain(text.split_whitespace());
        Command::try_parse_from(words).unwrap().flags
    }

    #[test]
    fn words_of_flags_mean_the_same() {
        let all = "--network student --source timm --heads 6 --normalization 0.5,0.5/0.25,0.25 --norm-epsilon \
                   1e-6 --bits 16 --bits-used 12 --no-data -9999";
        assert_eq!(parse(all).words().join(" "), all);
        assert!(parse("").words().is_empty());
        let half = parse("--normalization half").words();
        assert_eq!(half, ["--normalization 0.5,0.5,0.5/0.5,0.5,0.5"]);
    }
}
