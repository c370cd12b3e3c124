//! Presets: published models of several sizes. Costs of the models that this program trains come from their units;
//! costs of the larger transformers, which no recipe here trains yet, are computed from their published sizes.
//!
//! Heads are those of the published runs: DINO's for ViT-S and B; DINOv2's two for L, H and g; DINOv3's two for its
//! 7B (40 blocks of 4096, gated MLP of 8192; Siméoni et al. 2025); SwAV's for ResNet-50 and for SEER.

use augment::MultiCrop;
use networks::backbone::ModelConfig;
use networks::divided::numel;
use networks::head::mlp::Mlp;
use networks::head::prototypes::{Lengths, Prototypes};
use networks::unit::{Elements, GroupShape, Unit};

use super::model::{Sizes, of_parts};
use super::{ModelCost, NetworkCost, UnitCost};
use crate::method::{MethodConfig, MethodContext};
use crate::schedule::RunLength;

/// Names of the presets.
pub const PRESETS: [&str; 12] = [
    "vit-s",
    "vit-b",
    "vit-l",
    "vit-h",
    "vit-g",
    "vit-7b",
    "resnet50",
    "seer-rg32gf",
    "seer-rg64gf",
    "seer-rg128gf",
    "seer-rg256gf",
    "seer-rg10b",
];

/// Sizes of a transformer.
#[derive(Clone, Copy)]
struct Transformer {
    width: usize,
    depth: usize,
    heads: usize,
    hidden: usize,
    /// Number of matrices of the MLP: two, or three with a gate.
    products: usize,
    patch_px: usize,
}

/// Sizes of a head, and its rows per image: in the trained network and in its moving average.
#[derive(Clone, Copy)]
struct HeadSizes {
    name: &'static str,
    hidden: usize,
    bottleneck: usize,
    prototypes: usize,
    rows: [usize; 2],
    /// Whether ranks may divide the prototypes: those of views without trained lengths.
    may_divide: bool,
}

/// Numbers of global and of local views of an image.
const N_VIEWS: [usize; 2] = [2, 8];

/// Mean number of masked patches per image that iBOT's head sees: half of the images are masked, about 30 % of 256
/// patches each, in two views.
const N_MASKED: usize = 77;

/// Returns the costs of the preset `name`, with the views of its method; `None` if there is no such preset. Backbone units of more than
/// `max_unit_numel` elements of parameters are divided, if that is given.
pub fn preset(name: &str, max_unit_numel: Option<usize>) -> Option<ModelCost> {
    let max = max_unit_numel;
    let sizes = |width, depth, heads, hidden, products, patch_px| Transformer {
        width,
        depth,
        heads,
        hidden,
        products,
        patch_px,
    };
    let dino = |hidden, bottleneck, prototypes, may_divide| HeadSizes {
        name: "dino_head",
        hidden,
        bottleneck,
        prototypes,
        rows: [N_VIEWS[0] + N_VIEWS[1], N_VIEWS[0]],
        may_divide,
    };
    let ibot = |hidden, bottleneck, prototypes| HeadSizes {
        name: "ibot_head",
        hidden,
        bottleneck,
        prototypes,
        rows: [N_MASKED, N_MASKED],
        may_divide: false,
    };
    let v2 = [dino(2048, 384, 131_072, false), ibot(2048, 256, 131_072)];
    let v3 = [dino(8192, 512, 262_144, true), ibot(4096, 384, 98_304)];
    Some(match name {
        "vit-s" => vit(name, 384, 6, max),
        "vit-b" => vit(name, 768, 12, max),
        "vit-l" => transformer(name, sizes(1024, 24, 16, 4096, 2, 14), &v2, max),
        "vit-h" => transformer(name, sizes(1280, 32, 20, 5120, 2, 14), &v2, max),
        "vit-g" => transformer(name, sizes(1536, 40, 24, 4096, 3, 14), &v2, max),
        "vit-7b" => transformer(name, sizes(4096, 40, 32, 8192, 3, 16), &v3, max),
        "resnet50" => resnet(name, 50, max),
        "seer-rg32gf" => seer(name, "32gf", 4096, true, 224, max),
        "seer-rg64gf" => seer(name, "64gf", 8192, false, 224, max),
        "seer-rg128gf" => seer(name, "128gf", 8192, false, 224, max),
        "seer-rg256gf" => seer(name, "256gf", 8192, false, 224, max),
        "seer-rg10b" => seer(name, "10b", 8192, false, 160, max),
        _ => return None,
    })
}

/// Returns the costs of a head (an MLP, then prototypes) on `width` channels, in network `i`: 0 for the trained
/// network, 1 for its moving average.
fn head(width: usize, sizes: HeadSizes, i: usize) -> Vec<UnitCost> {
    let HeadSizes { name, hidden, bottleneck, prototypes, rows, may_divide } = sizes;
    let mlp = Mlp { name: format!("{name}.mlp"), input: width, hidden, output: bottleneck, init_std: 0.0 };
    let last = Prototypes {
        name: format!("{name}.last_layer"),
        input: bottleneck,
        count: prototypes,
        lengths: Lengths::One,
        frozen_steps: 0,
        warms_moments: false,
    };
    let shape = |n_views, width| {
        [GroupShape {
            n_views,
            n_prefix: 1,
            grid: [0, 0],
            width,
            n_masked: 0,
            drops: false,
            is_map: false,
            beside: None,
        }]
    };
    let of_unit = |unit: &dyn Unit, width: usize| {
        let cost = unit.cost(&shape(rows[i], width)).0;
        UnitCost {
            name: unit.name().to_string(),
            numel: numel(unit),
            flops: cost.flops,
            input: Elements::default(),
            given: Elements::default(),
            graph: cost.graph,
            n_constrained: 0,
            n_sums: 0,
            n_parts: 1,
            n_columns: 0,
        }
    };
    let mut last = of_unit(&last, bottleneck);
    last.n_columns = if may_divide { prototypes } else { 0 };
    last.input = Elements::wide((rows[i] * bottleneck) as f64);
    last.given = last.input;
    vec![of_unit(&mlp, width), last]
}

/// Size and cost of a residual branch of a transformer, or of both, in the trained network and in its moving average.
struct Branches {
    numel: usize,
    flops: [f64; 2],
    /// Elements of the graph in f32.
    norms: [f64; 2],
    /// Elements of the graph in the type of products.
    products: [f64; 2],
}

impl Branches {
    fn plus(&self, other: &Self) -> Self {
        let sum = |a: [f64; 2], b: [f64; 2]| [a[0] + b[0], a[1] + b[1]];
        Self {
            numel: self.numel + other.numel,
            flops: sum(self.flops, other.flops),
            norms: sum(self.norms, other.norms),
            products: sum(self.products, other.products),
        }
    }
}

impl Transformer {
    /// Sides of the global and the local views, in pixels.
    fn sides_px(self) -> [usize; 2] {
        [224, 96].map(|px| self.patch_px * (px / self.patch_px))
    }

    /// Patches of a global and of a local view.
    fn patches(self) -> [usize; 2] {
        self.sides_px().map(|px| (px / self.patch_px) * (px / self.patch_px))
    }

    /// Sums a function of the tokens of a view over the views that the trained network sees, and its moving average.
    fn over_tokens(self, f: impl Fn(f64) -> f64) -> [f64; 2] {
        let of_size = |i: usize| N_VIEWS[i] as f64 * f((self.patches()[i] + 1) as f64);
        [of_size(0) + of_size(1), of_size(0)]
    }

    /// Attention and MLP, each after a norm.
    fn branches(self) -> [Branches; 2] {
        let Self { width, hidden, products, .. } = self;
        let (w, h, heads) = (width as f64, hidden as f64, self.heads as f64);
        [
            Branches {
                numel: 4 * width * width + 6 * width,
                flops: self.over_tokens(|n| n * (8.0 * w * w + 4.0 * n * w)),
                norms: self.over_tokens(|n| n * w),
                products: self.over_tokens(|n| n * (5.0 * w + heads * n)),
            },
            Branches {
                numel: products * width * hidden + hidden + 3 * width,
                flops: self.over_tokens(|n| n * 2.0 * products as f64 * w * h),
                norms: self.over_tokens(|n| n * w),
                products: self.over_tokens(|n| n * (2.0 * w + products as f64 * h)),
            },
        ]
    }
}

fn transformer(
    name: &str,
    sizes: Transformer,
    heads: &[HeadSizes],
    max_unit_numel: Option<usize>,
) -> ModelCost {
    let Transformer { width, depth, patch_px, .. } = sizes;
    let (sides_px, patches, w) = (sizes.sides_px(), sizes.patches(), width as f64);
    let sum = |f: &dyn Fn(f64) -> f64| sizes.over_tokens(f);
    let patch = 3 * patch_px * patch_px;
    let branches = sizes.branches();
    let whole = branches[0].plus(&branches[1]);
    let is_divided = max_unit_numel.is_some_and(|most| whole.numel > most);
    let parts: Vec<(&str, Branches)> = match is_divided {
        true => ["/0", "/1"].into_iter().zip(branches).collect(),
        false => vec![("", whole)],
    };
    let embed = (patch + 1) * width + (patches[0] + 2) * width;
    let embed_flops = sum(&|n| 2.0 * n * (patch * width) as f64);
    let network = |name: &str, i: usize| {
        let tokens = sum(&|n| n)[i];
        let unit = |name: String, numel: usize, flops: f64, input: f64, graph: Elements| UnitCost {
            name,
            numel,
            flops,
            input: Elements::wide(input),
            given: Elements::wide(input),
            graph,
            n_constrained: 0,
            n_sums: 0,
            n_parts: 1,
            n_columns: 0,
        };
        let mut backbone =
            vec![unit(".embed".into(), embed, embed_flops[i], 0.0, Elements::wide(2.0 * tokens * w))];
        for block in 0..depth {
            backbone.extend(parts.iter().map(|(suffix, part)| {
                let graph = Elements::wide(part.norms[i]) + Elements::products(part.products[i]);
                unit(format!("blocks.{block}{suffix}"), part.numel, part.flops[i], tokens * w, graph)
            }));
        }
        backbone.push(unit("norm".into(), 2 * width, 0.0, tokens * w, Elements::wide(tokens * w)));
        let head = heads.iter().flat_map(|sizes| head(width, *sizes, i)).collect();
        NetworkCost { name: name.into(), is_frozen: false, backbone, head }
    };
    ModelCost {
        name: name.into(),
        trained: network("student", 0),
        others: vec![network("teacher", 1)],
        n_moments: 2,
        pixels: (0..2).map(|i| (N_VIEWS[i] * 3 * sides_px[i] * sides_px[i]) as f64).sum(),
    }
}

/// Returns the costs of a model from its units; `model` and `method` are TOML sections, as in a recipe.
fn of_units(name: &str, model: &str, method: &str, views: MultiCrop, sizes: Sizes) -> ModelCost {
    // Models and methods are constants of this file, and the test below builds every preset.
    let model: ModelConfig = toml::from_str(model).expect("a model of this file");
    let method: MethodConfig = toml::from_str(method).expect("a method of this file");
    let length = RunLength { n_samples: 1 << 20, batch_size: 1024, total_steps: 1 << 10 };
    let cx = MethodContext { views, model: model.clone(), length, seed: 0 };
    let method = method.build(&cx).expect("a method of this file");
    of_parts(name, &model, method.as_ref(), sizes)
}

/// Returns SwAV's views: two of `global_px` and `n_local` of 96 px.
fn swav_views(global_px: u32, n_local: usize) -> MultiCrop {
    MultiCrop::dino(global_px, 96, n_local)
}

/// Returns the costs of SEER's RegNetY under SwAV, with stochastic gradient descent.
fn seer(
    name: &str,
    size: &str,
    hidden: usize,
    batch_norm: bool,
    global_px: u32,
    max_unit_numel: Option<usize>,
) -> ModelCost {
    let model = format!("arch = 'regnet_y'\nimage_px = 224\nsize = '{size}'");
    let method = format!(
        "name = 'swav'\nprototypes = 16000\nhead_hidden = [{hidden}, {hidden}]\nhead_output = 256\n\
         head_batch_norm = {batch_norm}\nfreeze_prototypes = {{ steps = 0 }}\nqueue_start = {{ steps = 0 }}"
    );
    of_units(name, &model, &method, swav_views(global_px, 4), Sizes { n_moments: 1, max_unit_numel })
}

/// Returns the costs of a ResNet under SwAV.
fn resnet(name: &str, depth: usize, max_unit_numel: Option<usize>) -> ModelCost {
    let model = format!("arch = 'resnet'\nimage_px = 224\ndepth = {depth}");
    let method =
        "name = 'swav'\nprototypes = 3000\nfreeze_prototypes = { steps = 0 }\nqueue_start = { steps = 0 }";
    of_units(name, &model, method, swav_views(224, 6), Sizes { n_moments: 1, max_unit_numel })
}

/// Returns the costs of a ViT under DINO with its usual head.
fn vit(name: &str, width: usize, heads: usize, max_unit_numel: Option<usize>) -> ModelCost {
    let model =
        format!("arch = 'vit'\nimage_px = 224\npatch_px = 16\nwidth = {width}\ndepth = 12\nheads = {heads}");
    let method = "name = 'dino'\nprototypes = 65536\nfreeze_last_layer = { steps = 0 }\n\
                  teacher_temp = [0.04, 0.04]\nteacher_temp_warmup = { steps = 0 }";
    of_units(name, &model, method, MultiCrop::dino(224, 96, 8), Sizes { n_moments: 2, max_unit_numel })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Millions of parameters: of backbones from their papers, of heads from their published code.
    #[test]
    fn sizes_are_those_of_the_papers() {
        for (name, millions, heads) in [
            ("vit-s", 21.7, 22.3),
            ("vit-b", 86.0, 23.1),
            ("vit-l", 303.0, 97.3),
            ("vit-h", 631.0, 98.4),
            ("vit-g", 1135.0, 99.4),
            ("vit-7b", 6716.0, 311.0),
            ("resnet50", 23.6, 4.8),
            ("seer-rg32gf", 141.4, 37.15),
            ("seer-rg256gf", 1_272.0, 158.9),
            // Called 10B; its widths and depths give 9.3 billion.
            ("seer-rg10b", 9_324.0, 305.0),
        ] {
            let model = preset(name, None).unwrap();
            let millions_of = |units: &[UnitCost]| units.iter().map(|u| u.numel).sum::<usize>() as f64 / 1e6;
            for (counted, expected) in
                [(millions_of(&model.trained.backbone), millions), (millions_of(&model.trained.head), heads)]
            {
                assert!((counted - expected).abs() / expected < 0.02, "{name}: {counted} against {expected}");
            }
        }
        assert!(PRESETS.iter().all(|name| preset(name, None).is_some()));
    }
}
