//! Models of the literature by size, whether this program trains them yet or not: their parameters are counted here
//! until there are units that say.
//!
//! Heads are those of the runs that made the models known: DINO's for ViT-S and B; DINOv2's two for L, H and g; two of
//! DINOv3 for its 7B (40 blocks of 4096, gated MLP of 8192; Siméoni et al. 2025); SwAV's for SEER's RegNetY-10B (Goyal
//! et al. 2022: widths 2020, 4040, 11110, 28280; depths 2, 7, 17, 1; groups of 1010).

use super::{ModelCost, UnitCost};
use crate::model::head::mlp::Mlp;
use crate::model::head::prototypes::Prototypes;
use crate::model::unit::{GroupShape, Unit};

/// Names of the presets.
pub const PRESETS: [&str; 7] = ["vit-s", "vit-b", "vit-l", "vit-h", "vit-g", "vit-7b", "seer-rg10b"];

/// A transformer's sizes.
#[derive(Clone, Copy)]
struct Transformer {
    width: usize,
    depth: usize,
    heads: usize,
    hidden: usize,
    /// Matrices of the MLP: two, or three with a gate.
    products: usize,
    patch_px: usize,
}

/// A head's sizes, and how many rows it sees of each image: of the student and of the teacher.
#[derive(Clone, Copy)]
struct HeadSizes {
    name: &'static str,
    hidden: usize,
    bottleneck: usize,
    prototypes: usize,
    rows: [usize; 2],
}

/// Two global and eight local views of an image.
const N_VIEWS: [usize; 2] = [2, 8];

/// Masked patches that iBOT's head sees of an image: half of the images are masked, a fifth to a third of 256 patches
/// each, in two views.
const N_MASKED: usize = 77;

/// The costs of `name`, with the views of DINOv2, or of SwAV for SEER.
pub fn preset(name: &str) -> Option<ModelCost> {
    let sizes = |width, depth, heads, hidden, products, patch_px| Transformer {
        width,
        depth,
        heads,
        hidden,
        products,
        patch_px,
    };
    let dino = |hidden, bottleneck, prototypes| HeadSizes {
        name: "dino_head",
        hidden,
        bottleneck,
        prototypes,
        rows: [N_VIEWS[0] + N_VIEWS[1], N_VIEWS[0]],
    };
    let ibot = |hidden, bottleneck, prototypes| HeadSizes {
        name: "ibot_head",
        hidden,
        bottleneck,
        prototypes,
        rows: [N_MASKED, N_MASKED],
    };
    let v2 = [dino(2048, 384, 131_072), ibot(2048, 256, 131_072)];
    let v3 = [dino(8192, 512, 262_144), ibot(4096, 384, 98_304)];
    Some(match name {
        "vit-s" => transformer(name, sizes(384, 12, 6, 1536, 2, 16), &[dino(2048, 256, 65_536)]),
        "vit-b" => transformer(name, sizes(768, 12, 12, 3072, 2, 16), &[dino(2048, 256, 65_536)]),
        "vit-l" => transformer(name, sizes(1024, 24, 16, 4096, 2, 14), &v2),
        "vit-h" => transformer(name, sizes(1280, 32, 20, 5120, 2, 14), &v2),
        "vit-g" => transformer(name, sizes(1536, 40, 24, 4096, 3, 14), &v2),
        "vit-7b" => transformer(name, sizes(4096, 40, 32, 8192, 3, 16), &v3),
        "seer-rg10b" => regnet(name),
        _ => return None,
    })
}

/// Costs of a head of an MLP and prototypes behind `width` channels.
fn head(width: usize, sizes: HeadSizes) -> Vec<UnitCost> {
    let HeadSizes { name, hidden, bottleneck, prototypes, rows } = sizes;
    let mlp = Mlp { name: format!("{name}.mlp"), input: width, hidden, output: bottleneck, init_std: 0.0 };
    let last = Prototypes {
        name: format!("{name}.last_layer"),
        input: bottleneck,
        count: prototypes,
        trains_gain: false,
        frozen_steps: 0,
    };
    let shape = |n_views, width| [GroupShape { n_views, n_prefix: 1, grid: [0, 0], width }];
    let of_unit = |unit: &dyn Unit, width: usize| {
        let cost = |rows: usize| unit.cost(&shape(rows, width)).0;
        UnitCost {
            name: unit.name().to_string(),
            numel: unit.params().iter().map(|spec| spec.numel()).sum(),
            student_flops: cost(rows[0]).flops,
            follower_flops: cost(rows[1]).flops,
            input: 0.0,
            graph: cost(rows[0]).graph,
        }
    };
    vec![of_unit(&mlp, width), of_unit(&last, bottleneck)]
}

fn transformer(name: &str, sizes: Transformer, heads: &[HeadSizes]) -> ModelCost {
    let Transformer { width, depth, heads: n_heads, hidden, products, patch_px } = sizes;
    let sides_px = [224, 96].map(|px| patch_px * (px / patch_px));
    let patches = sides_px.map(|px| (px / patch_px) * (px / patch_px));
    let (w, h) = (width as f64, hidden as f64);
    let sum = |f: &dyn Fn(f64) -> f64| -> [f64; 2] {
        let of_size = |i: usize| N_VIEWS[i] as f64 * f((patches[i] + 1) as f64);
        [of_size(0) + of_size(1), of_size(0)]
    };
    let unit = |name: String, numel: usize, flops: [f64; 2], input: f64, graph: f64| UnitCost {
        name,
        numel,
        student_flops: flops[0],
        follower_flops: flops[1],
        input,
        graph,
    };
    let tokens = sum(&|n| n)[0];
    let patch = 3 * patch_px * patch_px;
    let block = 4 * width * width + 4 * width + products * width * hidden + 4 * width + hidden + width;
    let block_flops = sum(&|n| n * (8.0 * w * w + 2.0 * products as f64 * w * h + 4.0 * n * w));
    let block_graph = sum(&|n| n * (9.0 * w + products as f64 * h + n_heads as f64 * n))[0];
    let embed = (patch + 1) * width + (patches[0] + 2) * width;
    let embed_flops = sum(&|n| 2.0 * n * (patch * width) as f64);
    let mut backbone = vec![unit(".embed".into(), embed, embed_flops, 0.0, 2.0 * tokens * w)];
    let blocks = (0..depth).map(|i| format!("blocks.{i}"));
    backbone.extend(blocks.map(|name| unit(name, block, block_flops, tokens * w, block_graph)));
    backbone.push(unit("norm".into(), 2 * width, [0.0; 2], tokens * w, tokens * w));
    ModelCost {
        name: name.into(),
        backbone,
        head: heads.iter().flat_map(|sizes| head(width, *sizes)).collect(),
        n_followers: 1,
        pixels: (0..2).map(|i| (N_VIEWS[i] * 3 * sides_px[i] * sides_px[i]) as f64).sum(),
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
    let area = |stride: usize| -> f64 {
        let of = |px: usize| ((px / stride) * (px / stride)) as f64;
        2.0 * of(160) + 4.0 * of(96)
    };
    let unit = |name: String, numel: usize, student_flops: f64, input: f64, graph: f64| UnitCost {
        name,
        numel,
        student_flops,
        follower_flops: 0.0,
        input,
        graph,
    };
    let stem = conv(3, 3, 32, 1);
    let mut backbone = vec![unit("stem".into(), stem + 64, 2.0 * area(2) * stem as f64, 0.0, 64.0 * area(2))];
    let mut input = 32;
    for (stage, (width, depth)) in WIDTHS.into_iter().zip(DEPTHS).enumerate() {
        let all = area(4 << stage);
        for block in 0..depth {
            let squeeze = input / 4;
            let shortcut = if block == 0 { conv(1, input, width, 1) + 2 * width } else { 0 };
            let convolutions = conv(1, input, width, 1)
                + conv(3, width, width, width / GROUP_WIDTH)
                + conv(1, width, width, 1);
            let excitation = 2 * width * squeeze + width + squeeze;
            let numel = convolutions + excitation + shortcut + 6 * width;
            let flops = 2.0 * all * (convolutions + shortcut) as f64;
            let cells = if block == 0 { 4.0 * all } else { all };
            let name = format!("stage{}.{block}", stage + 1);
            backbone.push(unit(name, numel, flops, cells * input as f64, 7.0 * all * width as f64));
            input = width;
        }
    }
    let sizes = HeadSizes { name: "head", hidden: 8192, bottleneck: 256, prototypes: 16_000, rows: [6, 0] };
    ModelCost {
        name: name.into(),
        backbone,
        head: head(28_280, sizes),
        n_followers: 0,
        pixels: (2 * 3 * 160 * 160 + 4 * 3 * 96 * 96) as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameters in millions, of backbones as their papers count them and of heads as their code has them.
    #[test]
    fn sizes_are_those_of_the_papers() {
        for (name, millions, heads) in [
            ("vit-s", 21.7, 22.3),
            ("vit-b", 86.0, 23.1),
            ("vit-l", 303.0, 97.3),
            ("vit-h", 631.0, 98.4),
            ("vit-g", 1135.0, 99.4),
            ("vit-7b", 6716.0, 311.0),
            // Ten thousand by name; its widths and depths give 9.3.
            ("seer-rg10b", 9_300.0, 305.0),
        ] {
            let model = preset(name).unwrap();
            let millions_of = |units: &[UnitCost]| units.iter().map(|u| u.numel).sum::<usize>() as f64 / 1e6;
            for (counted, expected) in
                [(millions_of(&model.backbone), millions), (millions_of(&model.head), heads)]
            {
                assert!((counted - expected).abs() / expected < 0.02, "{name}: {counted} against {expected}");
            }
        }
        assert!(PRESETS.iter().all(|name| preset(name).is_some()));
    }
}
