//! `ocelli bench layers`: compares layers of a transformer with sums in f64, and the operations
//! between them with the CPU's, and times the layers.

use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use kernels::ops::choose_kernels;
use kernels::product_kernels::Kernels;
use serde_json::json;
use trainer::bench::layers::{Layer, measure};
use trainer::bench::operations::OPERATIONS;
use trainer::step::precision::Arithmetic;

use crate::cluster::compute::{self, DeviceFlag};
use crate::console::say;
use crate::exit::CHECK_FAILED;

/// Flags of `bench layers`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Width of the transformer: 384 for ViT-S, 768 for ViT-B, 1024 for ViT-L.
    #[arg(long, default_value_t = 384, value_parser = clap::value_parser!(u32).range(8..=16384))]
    width: u32,
    /// Number of tokens. Can be repeated.
    #[arg(long, default_values_t = [25216], value_parser = clap::value_parser!(u32).range(1..))]
    tokens: Vec<u32>,
    /// Number type of matrix products.
    #[arg(long, default_value = "bf16", value_parser = PossibleValuesParser::new(["f32", "bf16"]))]
    compute: String,
    /// Number of measurements to take the median of; each is the mean of ten passes.
    #[arg(long, default_value_t = 5)]
    repeats: usize,
    #[command(flatten)]
    device: DeviceFlag,
    /// Print a line of JSON at the end.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let device = args.device.open()?;
    let kernels = choose_kernels(Kernels::Auto, &device.device)?;
    let arithmetic = if args.compute == "f32" { Arithmetic::F32 } else { Arithmetic::Bf16 };
    out!("layers of width {} in {} on {}, products by {kernels}", args.width, args.compute, device.name);
    out!(
        "largest errors of results and of gradients at inputs, weights and biases, versus f64 sums, in \
         root mean squares"
    );
    out!("layer  tokens           weight    forward  TFLOP/s   and back  TFLOP/s  errors");
    let mut rows = Vec::new();
    let mut n_wrong = 0;
    for tokens in &args.tokens {
        let n_tokens = *tokens as usize;
        for layer in Layer::in_transformer_block(args.width as usize) {
            let measured = measure(layer, n_tokens, arithmetic, args.repeats, &device.device)?;
            let is_right = measured.is_right(arithmetic);
            n_wrong += usize::from(!is_right);
            let errors = measured.errors.to_array();
            let flops = layer.flops(n_tokens);
            let forward_ms = measured.forward.median_ms;
            let both_ms = measured.both.median_ms;
            out!(
                "{:<5} {n_tokens:>7} {:>16}  {forward_ms:>6.3} ms {:>8.1}  {both_ms:>6.3} ms {:>8.1}  \
                 {:.0e} {:.0e} {:.0e} {:.0e}  {}",
                layer.name,
                format!("[{}, {}]", layer.output, layer.input),
                flops / forward_ms / 1e9,
                3.0 * flops / both_ms / 1e9,
                errors[0],
                errors[1],
                errors[2],
                errors[3],
                verdict(is_right, measured.is_repeatable)
            );
            rows.push(measured.to_json(layer, n_tokens, arithmetic));
        }
    }
    out!(
        "\nlargest differences from the CPU's f32 of results and of gradients, relative to the largest number"
    );
    let mut operations = Vec::new();
    for operation in OPERATIONS {
        let differences = operation.compare(arithmetic, &device.device)?;
        let is_right = operation.accepts(&differences, arithmetic);
        n_wrong += usize::from(!is_right);
        out!(
            "{:<18} {:<16} {:.0e} {:.0e}  {}",
            operation.name,
            format!("{:?}", operation.shapes[0]),
            differences.result,
            differences.gradients,
            verdict(is_right, differences.is_repeatable)
        );
        operations.push(operation.to_json(&differences, arithmetic));
    }
    compute::print_notices();
    if args.json {
        let figures = json!({
            "device": device.name,
            "kernels": kernels,
            "compute": args.compute,
            "layers": rows,
            "operations": operations,
        });
        out!("{figures}");
    }
    if n_wrong > 0 {
        say(format!("error: {n_wrong} results of {} are wrong", device.name));
        return Ok(ExitCode::from(CHECK_FAILED));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the verdict as text.
fn verdict(is_right: bool, is_repeatable: bool) -> &'static str {
    if is_right {
        "right"
    } else if is_repeatable {
        "WRONG"
    } else {
        "WRONG: three passes differ"
    }
}
