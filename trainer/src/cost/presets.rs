//! Presets: published models of several sizes, whose costs come from their units.
//!
//! Heads and views are those of the published runs: DINO's for ViT-S and B; DINOv2's two for ViT-L,
//! H and g; DINOv3's two for its 7B (40 blocks of 4096, gated MLP of 8192; Siméoni et al. 2025);
//! SwAV's for ResNet-50 and for SEER.

use augment::MultiCrop;
use networks::backbone::ModelConfig;

use super::model::{ModelCost, Sizes, method_cost};
use crate::error::TrainError;
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

/// Returns the costs of the preset `name`, with the views of its method; `None` if there is no such
/// preset. Backbone units of more than `max_unit_numel` elements of parameters are divided, if that
/// is given.
pub fn preset(name: &str, max_unit_numel: Option<usize>) -> Option<ModelCost> {
    let max = max_unit_numel;
    Some(match name {
        "vit-s" => dino(name, 384, 6, max),
        "vit-b" => dino(name, 768, 12, max),
        "vit-l" => dinov2(name, "width = 1024\ndepth = 24\nheads = 16", max),
        "vit-h" => dinov2(name, "width = 1280\ndepth = 32\nheads = 20", max),
        "vit-g" => dinov2(
            name,
            "width = 1536\ndepth = 40\nheads = 24\nmlp = 'swiglu'\ndrop_path = 0.4\ndrop_path_depth = \
             'uniform'\ndrop_path_count = 'exact'",
            max,
        ),
        "vit-7b" => dinov3(name, max),
        "resnet50" => resnet(name, 50, max),
        "seer-rg32gf" => seer(name, "32gf", 4096, true, 224, max),
        "seer-rg64gf" => seer(name, "64gf", 8192, false, 224, max),
        "seer-rg128gf" => seer(name, "128gf", 8192, false, 224, max),
        "seer-rg256gf" => seer(name, "256gf", 8192, false, 224, max),
        "seer-rg10b" => seer(name, "10b", 8192, false, 160, max),
        _ => return None,
    })
}

/// Returns the costs of the preset `name` as [`preset`], with units divided as far as requested.
///
/// # Errors
/// [`TrainError::UnknownPreset`], [`TrainError::PresetUnits`].
pub fn checked_preset(name: &str, max_unit_numel: Option<usize>) -> Result<ModelCost, TrainError> {
    let Some(model) = preset(name, max_unit_numel) else {
        return Err(TrainError::UnknownPreset { preset: name.into(), known: PRESETS.join(", ") });
    };
    let largest = model.largest_unit();
    match max_unit_numel {
        Some(most) if largest > most => Err(TrainError::PresetUnits { most, largest }),
        _ => Ok(model),
    }
}

/// Returns the costs of a model from its units; `model` and `method` are TOML sections, as in a
/// recipe.
fn section_cost(name: &str, model: &str, method: &str, views: MultiCrop, sizes: Sizes) -> ModelCost {
    // Models and methods are constants of this file, and the test below builds every preset.
    let model: ModelConfig = toml::from_str(model).expect("a model of this file");
    let method: MethodConfig = toml::from_str(method).expect("a method of this file");
    let length = RunLength { n_samples: 1 << 20, batch_size: 1024, total_steps: 1 << 10 };
    let cx = MethodContext { views, model: model.clone(), length, seed: 0 };
    let method = method.build(&cx).expect("a method of this file");
    method_cost(name, &model, method.as_ref(), sizes)
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
    section_cost(name, &model, &method, swav_views(global_px, 4), Sizes { n_moments: 1, max_unit_numel })
}

/// Returns the costs of a ResNet under SwAV.
fn resnet(name: &str, depth: usize, max_unit_numel: Option<usize>) -> ModelCost {
    let model = format!("arch = 'resnet'\nimage_px = 224\ndepth = {depth}");
    let method =
        "name = 'swav'\nprototypes = 3000\nfreeze_prototypes = { steps = 0 }\nqueue_start = { steps = 0 }";
    section_cost(name, &model, method, swav_views(224, 6), Sizes { n_moments: 1, max_unit_numel })
}

/// Returns the costs of a ViT under DINOv2, with heads of their own for views and masked patches.
/// `sizes` are keys of the model.
fn dinov2(name: &str, sizes: &str, max_unit_numel: Option<usize>) -> ModelCost {
    let model = format!("arch = 'vit'\nimage_px = 224\npatch_px = 14\nlayer_scale = 1e-5\n{sizes}");
    let method = "name = 'dinov2'\nprototypes = 131072\nhead_hidden = 2048\nhead_bottleneck = 384\n\
                  patch_head = { prototypes = 131072, hidden = 2048, bottleneck = 256 }\ncentering = 'sinkhorn'\n\
                  freeze_last_layer = { steps = 0 }\nteacher_temp = [0.04, 0.04]\nteacher_temp_warmup = { steps = 0 }";
    section_cost(name, &model, method, MultiCrop::dino(224, 98, 8), Sizes { n_moments: 2, max_unit_numel })
}

/// Returns the costs of DINOv3's ViT-7B/16.
fn dinov3(name: &str, max_unit_numel: Option<usize>) -> ModelCost {
    let model = "arch = 'vit'\nimage_px = 256\npatch_px = 16\nwidth = 4096\ndepth = 40\nheads = 32\nmlp = 'swiglu'\n\
                 mlp_ratio = 3.0\nmlp_multiple = 64\nqkv_bias = 'none'\nregisters = 4\nlayer_scale = 1e-5\ndrop_path = 0.4\n\
                 drop_path_depth = 'uniform'\ndrop_path_count = 'exact'\npositions = 'rope'\nlocal_class_norm = true";
    let method = "name = 'dinov3'\nprototypes = 262144\nhead_hidden = 8192\nhead_bottleneck = 512\n\
                  patch_head = { prototypes = 98304, hidden = 4096, bottleneck = 384 }\nfreeze_last_layer = { steps = 0 }\n\
                  teacher_temp = [0.04, 0.04]\nteacher_temp_warmup = { steps = 0 }";
    section_cost(name, model, method, MultiCrop::dino(256, 112, 8), Sizes { n_moments: 2, max_unit_numel })
}

/// Returns the costs of a ViT under DINO with its usual head.
fn dino(name: &str, width: usize, heads: usize, max_unit_numel: Option<usize>) -> ModelCost {
    let model =
        format!("arch = 'vit'\nimage_px = 224\npatch_px = 16\nwidth = {width}\ndepth = 12\nheads = {heads}");
    let method = "name = 'dino'\nprototypes = 65536\nfreeze_last_layer = { steps = 0 }\n\
                  teacher_temp = [0.04, 0.04]\nteacher_temp_warmup = { steps = 0 }";
    section_cost(name, &model, method, MultiCrop::dino(224, 96, 8), Sizes { n_moments: 2, max_unit_numel })
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
            for (units, expected) in [(&model.trained.backbone, millions), (&model.trained.head, heads)] {
                let counted = units.iter().map(|unit| unit.numel).sum::<usize>() as f64 / 1e6;
                assert!((counted - expected).abs() / expected < 0.02, "{name}: {counted} against {expected}");
            }
        }
        assert!(PRESETS.iter().all(|name| preset(name, None).is_some()));
    }
}
