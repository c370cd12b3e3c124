//! Presets: published models of several sizes, whose costs come from their units.
//!
//! Heads and views are those of the published runs: DINO's for ViT-S and B; DINOv2's two for ViT-L,
//! H and g; DINOv3's two for its 7B (40 blocks of 4096, gated MLP of 8192; Siméoni et al. 2025);
//! SwAV's for ResNet-50 and for SEER.

use augment::MultiCrop;
use networks::backbone::ModelConfig;

use super::model::{ModelCost, views_cost};
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

/// A published run: sections of its recipe as TOML, its views and its optimizer.
struct Run {
    model: String,
    method: String,
    views: MultiCrop,
    /// Number of moments that the optimizer keeps for each parameter.
    n_moments: usize,
}

/// Returns the costs of the preset `name`, with the views of its method; `None` if there is no such
/// preset. Backbone units of more than `max_numel` elements of parameters are divided, if that is
/// given.
pub fn preset(name: &str, max_numel: Option<usize>) -> Option<ModelCost> {
    let run = match name {
        "vit-s" => dino(384, 6),
        "vit-b" => dino(768, 12),
        "vit-l" => dinov2("width = 1024\ndepth = 24\nheads = 16"),
        "vit-h" => dinov2("width = 1280\ndepth = 32\nheads = 20"),
        "vit-g" => dinov2(
            "width = 1536\ndepth = 40\nheads = 24\nmlp = 'swiglu'\ndrop_path = 0.4\ndrop_path_depth = \
             'uniform'\ndrop_path_count = 'exact'",
        ),
        "vit-7b" => dinov3(),
        "resnet50" => resnet50(),
        "seer-rg32gf" => seer("32gf", 4096, true, 224),
        "seer-rg64gf" => seer("64gf", 8192, false, 224),
        "seer-rg128gf" => seer("128gf", 8192, false, 224),
        "seer-rg256gf" => seer("256gf", 8192, false, 224),
        "seer-rg10b" => seer("10b", 8192, false, 160),
        _ => return None,
    };
    // Models and methods are constants of this file, and the test below builds every preset.
    let model: ModelConfig = toml::from_str(&run.model).expect("a model of this file");
    let method: MethodConfig = toml::from_str(&run.method).expect("a method of this file");
    let length = RunLength { n_samples: 1 << 20, batch_size: 1024, total_steps: 1 << 10 };
    let cx = MethodContext { views: run.views, model: model.clone(), length, seed: 0 };
    let method = method.build(&cx).expect("a method of this file");
    let views = method.views().groups();
    Some(views_cost(name, &model, method.as_ref(), &views, run.n_moments, max_numel, None))
}

/// Returns the costs of the preset `name` as [`preset`], with units divided as far as requested.
///
/// # Errors
/// [`TrainError::UnknownPreset`], [`TrainError::PresetUnits`].
pub fn checked_preset(name: &str, max_numel: Option<usize>) -> Result<ModelCost, TrainError> {
    let Some(model) = preset(name, max_numel) else {
        return Err(TrainError::UnknownPreset { preset: name.into(), known: PRESETS.join(", ") });
    };
    let largest = model.largest_unit();
    match max_numel {
        Some(most) if largest > most => Err(TrainError::PresetUnits { most, largest }),
        _ => Ok(model),
    }
}

/// Returns a run of SEER's RegNetY under SwAV, with stochastic gradient descent.
fn seer(size: &str, hidden: usize, batch_norm: bool, global_px: u32) -> Run {
    let model = format!("arch = 'regnet_y'\nimage_px = 224\nsize = '{size}'");
    let method = format!(
        "name = 'swav'\nprototypes = 16000\nhead_hidden = [{hidden}, {hidden}]\nhead_output = 256\n\
         head_batch_norm = {batch_norm}\nfreeze_prototypes = {{ steps = 0 }}\nqueue_start = {{ steps = 0 }}"
    );
    Run { model, method, views: MultiCrop::dino(global_px, 96, 4), n_moments: 1 }
}

/// Returns a run of a ResNet-50 under SwAV.
fn resnet50() -> Run {
    let model = "arch = 'resnet'\nimage_px = 224\ndepth = 50".to_string();
    let method =
        "name = 'swav'\nprototypes = 3000\nfreeze_prototypes = { steps = 0 }\nqueue_start = { steps = 0 }";
    Run { model, method: method.to_string(), views: MultiCrop::dino(224, 96, 6), n_moments: 1 }
}

/// Returns a run of a ViT under DINOv2, with heads of their own for views and masked patches.
/// `sizes` are keys of the model.
fn dinov2(sizes: &str) -> Run {
    let model = format!("arch = 'vit'\nimage_px = 224\npatch_px = 14\nlayer_scale = 1e-5\n{sizes}");
    let method = "name = 'dinov2'\nprototypes = 131072\nhead_hidden = 2048\nhead_bottleneck = 384\n\
                  patch_head = { prototypes = 131072, hidden = 2048, bottleneck = 256 }\ncentering = 'sinkhorn'\n\
                  freeze_last_layer = { steps = 0 }\nteacher_temp = [0.04, 0.04]\nteacher_temp_warmup = { steps = 0 }";
    Run { model, method: method.to_string(), views: MultiCrop::dino(224, 98, 8), n_moments: 2 }
}

/// Returns the run of DINOv3's ViT-7B/16.
fn dinov3() -> Run {
    let model = "arch = 'vit'\nimage_px = 256\npatch_px = 16\nwidth = 4096\ndepth = 40\nheads = 32\nmlp = 'swiglu'\n\
                 mlp_ratio = 3.0\nmlp_multiple = 64\nqkv_bias = 'none'\nregisters = 4\nlayer_scale = 1e-5\ndrop_path = 0.4\n\
                 drop_path_depth = 'uniform'\ndrop_path_count = 'exact'\npositions = 'rope'\nlocal_class_norm = true";
    let method = "name = 'dinov3'\nprototypes = 262144\nhead_hidden = 8192\nhead_bottleneck = 512\n\
                  patch_head = { prototypes = 98304, hidden = 4096, bottleneck = 384 }\nfreeze_last_layer = { steps = 0 }\n\
                  teacher_temp = [0.04, 0.04]\nteacher_temp_warmup = { steps = 0 }";
    let views = MultiCrop::dino(256, 112, 8);
    Run { model: model.to_string(), method: method.to_string(), views, n_moments: 2 }
}

/// Returns a run of a ViT under DINO with its usual head.
fn dino(width: usize, heads: usize) -> Run {
    let model =
        format!("arch = 'vit'\nimage_px = 224\npatch_px = 16\nwidth = {width}\ndepth = 12\nheads = {heads}");
    let method = "name = 'dino'\nprototypes = 65536\nfreeze_last_layer = { steps = 0 }\n\
                  teacher_temp = [0.04, 0.04]\nteacher_temp_warmup = { steps = 0 }";
    Run { model, method: method.to_string(), views: MultiCrop::dino(224, 96, 8), n_moments: 2 }
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
