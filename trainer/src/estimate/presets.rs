//! Models of the literature by size, whether this program trains them yet or not.
//!
//! ViT-7B is DINOv3's (40 blocks of 4096, gated MLP of 8192; Siméoni et al. 2025), SEER's RegNetY-10B that
//! of Goyal et al. 2022 (widths 2020, 4040, 11110, 28280; depths 2, 7, 17, 1; groups of 1010).

use super::model::{ViewCounts, head_units, vit_units};
use super::{ModelCost, UnitCost};
use crate::model::backbone::VitConfig;
use crate::model::head::{HeadSizes, units as dino_head};

/// Names of the presets.
pub const PRESETS: [&str; 7] = ["vit-s", "vit-b", "vit-l", "vit-h", "vit-g", "vit-7b", "seer-rg10b"];

/// The costs of `name`, with two global and eight local views of an image, as DINOv2 and SEER do (SEER: four
/// local ones).
pub fn preset(name: &str) -> Option<ModelCost> {
    // Width, depth, heads, hidden channels, matrices of the MLP, patch, prototypes.
    let vit = |width, depth, heads, hidden, products, patch_px| {
        Some(vit(name, width, depth, heads, hidden, products, patch_px))
    };
    match name {
        "vit-s" => vit(384, 12, 6, 1536, 2, 16),
        "vit-b" => vit(768, 12, 12, 3072, 2, 16),
        "vit-l" => vit(1024, 24, 16, 4096, 2, 14),
        "vit-h" => vit(1280, 32, 20, 5120, 2, 14),
        "vit-g" => vit(1536, 40, 24, 4096, 3, 14),
        "vit-7b" => vit(4096, 40, 32, 8192, 3, 16),
        "seer-rg10b" => Some(regnet(name)),
        _ => None,
    }
}

fn vit(
    name: &str,
    width: usize,
    depth: usize,
    heads: usize,
    hidden: usize,
    products: usize,
    patch_px: usize,
) -> ModelCost {
    let (global_px, local_px) = (patch_px * (224 / patch_px), patch_px * (96 / patch_px));
    let tokens = |px: usize| (px / patch_px).pow(2);
    let views = ViewCounts { groups: vec![(tokens(global_px), 2), (tokens(local_px), 8)] };
    let block = 4 * width * width + 4 * width + products * width * hidden + 4 * width + hidden + width;
    let patch = 3 * patch_px * patch_px;
    let mut numels = vec![(".embed".to_string(), (patch + 1) * width + (tokens(global_px) + 2) * width)];
    numels.extend((0..depth).map(|i| (format!("blocks.{i}"), block)));
    numels.push(("norm".into(), 2 * width));
    let config = VitConfig {
        image_px: global_px,
        patch_px,
        width,
        depth,
        heads,
        mlp_ratio: hidden as f64 / width as f64,
        layer_scale: None,
        drop_path: 0.0,
        init_std: 0.02,
    };
    let head = dino_head(HeadSizes {
        input: width,
        hidden: 2048,
        bottleneck: 256,
        prototypes: 65_536,
        init_std: 0.02,
    });
    ModelCost {
        name: name.into(),
        backbone: vit_units(&config, numels, hidden as f64, products as f64, &views),
        head: head_units(&head, 10.0, 2.0),
        pixels: (2 * 3 * global_px * global_px + 8 * 3 * local_px * local_px) as f64,
    }
}

/// A convolution's parameters: kernel, channels in and out, groups.
fn conv(kernel: usize, input: usize, output: usize, groups: usize) -> usize {
    kernel * kernel * input / groups * output
}

fn regnet(name: &str) -> ModelCost {
    const WIDTHS: [usize; 4] = [2020, 4040, 11_110, 28_280];
    const DEPTHS: [usize; 4] = [2, 7, 17, 1];
    const GROUP_WIDTH: usize = 1010;
    // SwAV's views: two of 160 px and four of 96 px.
    let areas = |stride: usize| -> (f64, f64) {
        let area = |px: usize| ((px / stride) * (px / stride)) as f64;
        (2.0 * area(160) + 4.0 * area(96), 0.0)
    };
    let mut backbone = vec![UnitCost {
        name: "stem".into(),
        numel: conv(3, 3, 32, 1) + 64,
        student_flops: 2.0 * areas(2).0 * conv(3, 3, 32, 1) as f64,
        teacher_flops: 0.0,
        input: 0.0,
        graph: 2.0 * 32.0 * areas(2).0,
    }];
    let mut input = 32;
    for (stage, (width, depth)) in WIDTHS.into_iter().zip(DEPTHS).enumerate() {
        let (all, _) = areas(4 << stage);
        for block in 0..depth {
            let squeeze = input / 4;
            let shortcut = if block == 0 { conv(1, input, width, 1) + 2 * width } else { 0 };
            let convolutions = conv(1, input, width, 1)
                + conv(3, width, width, width / GROUP_WIDTH)
                + conv(1, width, width, 1);
            let excitation = 2 * width * squeeze + width + squeeze;
            backbone.push(UnitCost {
                name: format!("stage{}.{block}", stage + 1),
                numel: convolutions + excitation + shortcut + 6 * width,
                student_flops: 2.0 * all * (convolutions + shortcut) as f64,
                teacher_flops: 0.0,
                input: if block == 0 { 4.0 * all * input as f64 } else { all * input as f64 },
                graph: 7.0 * all * width as f64,
            });
            input = width;
        }
    }
    let fc = |name: &str, input: usize, output: usize| UnitCost {
        name: name.into(),
        numel: input * output + output,
        student_flops: 2.0 * 6.0 * (input * output) as f64,
        teacher_flops: 0.0,
        input: 0.0,
        graph: 6.0 * 3.0 * output as f64,
    };
    ModelCost {
        name: name.into(),
        backbone,
        head: vec![fc("head.mlp", 28_280, 1024), fc("head.prototypes", 1024, 16_000)],
        pixels: (2 * 3 * 160 * 160 + 4 * 3 * 96 * 96) as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameters of the backbones, in millions, as their papers count them.
    #[test]
    fn sizes_are_those_of_the_papers() {
        for (name, millions, tolerance) in [
            ("vit-s", 21.7, 0.02),
            ("vit-b", 86.0, 0.02),
            ("vit-l", 303.0, 0.02),
            ("vit-h", 631.0, 0.02),
            ("vit-g", 1135.0, 0.02),
            ("vit-7b", 6716.0, 0.02),
            // Ten by name; its widths and depths give 9.3.
            ("seer-rg10b", 10_000.0, 0.08),
        ] {
            let model = preset(name).unwrap();
            let numel: usize = model.backbone.iter().map(|unit| unit.numel).sum();
            let off = (numel as f64 / 1e6 - millions).abs() / millions;
            assert!(off < tolerance, "{name}: {} against {millions}", numel as f64 / 1e6);
        }
        assert!(PRESETS.iter().all(|name| preset(name).is_some()));
    }
}
