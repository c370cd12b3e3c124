//! Recognition of a vision transformer among the tensors of a file, with its sizes from their
//! shapes.

use networks::interpolation::Resampling;
use networks::{MlpKind, ModelConfig, Positions, QkvBias, VitConfig};

use super::names::{ALL, Names, ROTARY};
use crate::backbone::Recognized;
use crate::file::Array;
use crate::library::Library;
use crate::pretrained::Hints;
use crate::source::{BackboneTensors, Source, config};

/// Largest number of channels.
const MAX_CHANNELS: usize = 65_536;

/// Name of the periods of rotary positions in DINOv3's files: those of the recipe's base, rounded
/// to 16 bits.
const PERIODS: &str = "rope_embed.periods";

/// Base of the periods of all published networks.
const USUAL_BASE: f64 = 100.0;

/// Largest deviation of a base that is computed from rounded periods.
const BASE_ROUNDING: f64 = 0.02;

/// Epsilon of the norms of DINOv3's networks.
const ROTARY_EPSILON: f64 = 1e-5;

/// Sides of the squares on which DINO, DINOv2 and DINOv3 are evaluated.
const EVALUATED_PX: usize = 224;

/// Names of the convolution that embeds patches.
pub(super) const ANCHORS: [&str; 4] = [
    "patch_embed.proj.weight",
    "conv_proj.weight",
    "embeddings.patch_embeddings.projection.weight",
    "embeddings.patch_embeddings.weight",
];

/// Determines the transformer in `tensors`.
pub(super) fn recognize(
    tensors: &mut BackboneTensors,
    source: &Source,
    hints: &Hints,
    assumed: &mut Vec<String>,
) -> Result<Recognized, String> {
    let names = find_names(tensors, source)?;
    let library = library(tensors, source, &names, hints, assumed);
    reject_unsupported(tensors)?;
    let sizes = Sizes::from_tensors(tensors, &names, hints, source)?;
    if hints.heads.is_none() && stated_heads(source)?.is_none() {
        assumed.push(format!(
            "the file does not state its number of attention heads; assuming {}, as in published networks of \
             {} channels (override with --heads)",
            sizes.heads, sizes.width
        ));
    }
    let stated_epsilon = config::norm_epsilon(source)?;
    let mut model = sizes.model(library, tensors, &names, stated_epsilon);
    if let ModelConfig::Vit(config) = &mut model {
        if let Some(epsilon) = hints.norm_epsilon {
            config.norm_epsilon = epsilon;
        } else if sizes.is_rotary && stated_epsilon.is_none() {
            assumed.push(format!(
                "the file does not state the ε of its layer norms; assuming DINOv3's {:e} (override with \
                 --norm-epsilon)",
                config.norm_epsilon
            ));
        }
    }
    let size_px = match library {
        Library::Dinov2 => EVALUATED_PX,
        _ => model.image_px(),
    };
    let activation = if sizes.is_rotary && sizes.mlp == MlpKind::Swiglu { "silu" } else { "gelu" };
    let names = Box::new(move |name: &str| names.library_names(name));
    Ok(Recognized { model, library, names, size_px, activation })
}

/// Names of parameters that every transformer has, besides its tokens and positions.
const REQUIRED: [&str; 4] = [
    "blocks.0.attn.qkv.weight",
    "blocks.0.norm1.weight",
    "blocks.0.mlp.fc1.weight",
    "blocks.0.mlp.fc2.weight",
];

/// Returns true if `tensors` have the required parameters under `names`.
fn has_required(tensors: &BackboneTensors, names: &Names) -> bool {
    let mut required = Vec::new();
    // Rotary positions have no parameter.
    if !names.pos_embed.is_empty() {
        required.push(names.pos_embed.to_string());
    }
    if !names.class_token_is_optional {
        required.push(names.cls_token.to_string());
    }
    for name in REQUIRED {
        required.extend(names.library_names(name));
    }
    required.iter().all(|name| tensors.contains(name))
}

/// Returns the table whose names are in `tensors`.
fn find_names(tensors: &BackboneTensors, source: &Source) -> Result<Names, String> {
    let has_positions = ALL.iter().any(|names| tensors.contains(names.pos_embed));
    if !has_positions {
        // DINOv3's names and timm's differ in parameters that some networks lack. timm has networks
        // with the same names and different rotations; they have no registers.
        let is_dinov3 = tensors.contains("storage_tokens") || tensors.contains(PERIODS);
        let architecture = source.config.as_ref().and_then(|config| config["architecture"].as_str());
        let is_timm =
            tensors.contains("reg_token") || architecture.is_some_and(|name| name.contains("dinov3"));
        for names in ROTARY {
            let is_possible = match names.registers {
                "storage_tokens" => is_dinov3,
                "reg_token" => !is_dinov3 && is_timm,
                _ => true,
            };
            if is_possible && has_required(tensors, &names) {
                return Ok(names);
            }
        }
    }
    // DINOv2's names and timm's differ only in parameters that some networks lack.
    let is_dinov2 = tensors.contains("register_tokens") || tensors.contains("mask_token");
    let candidates: Vec<Names> = ALL.into_iter().filter(|names| has_required(tensors, names)).collect();
    let preferred = candidates.iter().find(|names| is_dinov2 || names.registers != "register_tokens");
    preferred.or(candidates.first()).copied().ok_or_else(|| {
        "it is a transformer, but not one with a class token, a position embedding and blocks of \
         attention and MLP as in DINO, DINOv2, DINOv3, timm, torchvision and transformers"
            .into()
    })
}

/// Returns how `library` resamples the position embedding of a network with or without registers.
pub(super) fn library_resampling(library: Library, has_registers: bool) -> Resampling {
    match library {
        Library::Dino => Resampling { offset: 0.1, antialias: false },
        Library::Dinov2 if has_registers => Resampling { offset: 0.0, antialias: true },
        Library::Dinov2 => Resampling { offset: 0.1, antialias: false },
        Library::Timm => Resampling { offset: 0.0, antialias: true },
        Library::Dinov3 => Resampling { offset: 0.0, antialias: false },
        Library::Transformers => Resampling { offset: 0.0, antialias: has_registers },
        Library::Torchvision => Resampling { offset: 0.0, antialias: false },
    }
}

/// Returns the library whose code made the network, which determines how its position embedding is
/// resampled.
fn library(
    tensors: &BackboneTensors,
    source: &Source,
    names: &Names,
    hints: &Hints,
    assumed: &mut Vec<String>,
) -> Library {
    if let Some(library) = hints.library {
        return library;
    }
    match (names.block, names.registers) {
        ("encoder.layers.encoder_layer_{}", _) => Library::Torchvision,
        ("encoder.layer.{}" | "layers.{}" | "layer.{}" | "model.layer.{}", _) => Library::Transformers,
        (_, "register_tokens") => Library::Dinov2,
        (_, "storage_tokens") => Library::Dinov3,
        _ if names.pos_embed.is_empty() => Library::Timm,
        // DINO's files have no classifier.
        _ if ["head.weight", "fc_norm.weight"].iter().any(|name| tensors.contains(name)) => Library::Timm,
        _ if source.config.is_some()
            || tensors.contains(names.registers)
            || tensors.contains("blocks.0.ls1.gamma") =>
        {
            Library::Timm
        }
        _ => {
            let library = if source.is_pickle { Library::Dino } else { Library::Timm };
            assumed.push(format!(
                "DINO and timm use the same tensor names; assuming this is {}'s (override with --source)",
                library.name()
            ));
            library
        }
    }
}

/// Rejects networks that have the same names and compute something else.
fn reject_unsupported(tensors: &BackboneTensors) -> Result<(), String> {
    let others = [
        ("fc_norm.weight", "it pools patch tokens and has a separate norm (fc_norm)"),
        ("norm_pre.weight", "it normalizes tokens before the first block (norm_pre)"),
        ("attn_pool.latent", "it pools by attention (attn_pool)"),
        ("dist_token", "it has a distillation token (dist_token)"),
    ];
    match others.into_iter().find(|(name, _)| tensors.contains(name)) {
        Some((_, reason)) => Err(format!("{reason}, which is not supported")),
        None => Ok(()),
    }
}

/// Sizes that the shapes determine.
struct Sizes {
    channels: usize,
    patch_px: usize,
    grid: usize,
    width: usize,
    depth: usize,
    heads: usize,
    hidden: usize,
    mlp: MlpKind,
    has_class_token: bool,
    registers: usize,
    has_layer_scale: bool,
    is_rotary: bool,
    rope_base: f64,
    qkv_bias: QkvBias,
}

impl Sizes {
    fn from_tensors(
        tensors: &mut BackboneTensors,
        names: &Names,
        hints: &Hints,
        source: &Source,
    ) -> Result<Self, String> {
        let patches = tensors.shape(tensors.anchor).unwrap_or_default().to_vec();
        let &[width, channels, patch_px, side] = patches.as_slice() else {
            return Err(format!("{} has shape {patches:?}, not [D, C, P, P]", tensors.anchor));
        };
        if width == 0 || patch_px == 0 || width > MAX_CHANNELS {
            return Err(format!("{} has shape {patches:?}", tensors.anchor));
        }
        if patch_px != side {
            return Err(format!(
                "its patches have {patch_px} × {side} px; only square patches are supported"
            ));
        }
        let mut depth = 0;
        while tensors.contains(&first_name(names, &format!("blocks.{depth}.norm1.weight"))) {
            depth += 1;
        }
        let mut rows = 0usize;
        for name in names.library_names("blocks.0.mlp.fc1.weight") {
            let n = tensors.shape(&name).and_then(|shape| shape.first()).copied().unwrap_or_default();
            rows = rows.saturating_add(n);
        }
        let output_shape = tensors.shape(&first_name(names, "blocks.0.mlp.fc2.weight"));
        let hidden = output_shape.and_then(|shape| shape.get(1)).copied().unwrap_or_default();
        let mlp = match rows {
            rows if rows == hidden => MlpKind::Gelu,
            rows if Some(rows) == hidden.checked_mul(2) => MlpKind::Swiglu,
            _ => return Err(format!("its MLP expands to {rows} channels, but projects back from {hidden}")),
        };
        let is_rotary = names.pos_embed.is_empty();
        let grid = if is_rotary {
            (rotary_px(source, patch_px) / patch_px).max(1)
        } else {
            square_positions(tensors, names, width)?
        };
        let rope_base = rope_base(tensors, source)?;
        let qkv_bias = qkv_bias(tensors, names, depth, width);
        let registers = tensors.shape(names.registers).and_then(|shape| shape.get(1)).copied();
        let has_layer_scale = tensors.contains(&first_name(names, "blocks.0.ls1.gamma"));
        let heads = heads(width, is_rotary, hints, source)?;
        let registers = registers.unwrap_or_default();
        if registers == 0 {
            // transformers has an empty tensor.
            tensors.remove(names.registers);
        }
        for name in unused_tensors(tensors, is_rotary) {
            tensors.remove(&name);
        }
        Ok(Self {
            channels,
            patch_px,
            grid,
            width,
            depth,
            heads,
            hidden,
            mlp,
            has_class_token: tensors.contains(names.cls_token),
            registers,
            has_layer_scale,
            is_rotary,
            rope_base,
            qkv_bias,
        })
    }

    fn model(
        &self,
        library: Library,
        tensors: &BackboneTensors,
        names: &Names,
        stated_epsilon: Option<f64>,
    ) -> ModelConfig {
        let has_registers = tensors.contains(names.registers);
        let resampling = library_resampling(library, has_registers);
        let norm_epsilon = stated_epsilon.unwrap_or(match (library, self.has_layer_scale) {
            _ if self.is_rotary => ROTARY_EPSILON,
            // The default of `ViTConfig`.
            (Library::Transformers, false) => 1e-12,
            _ => 1e-6,
        });
        let mut config = VitConfig {
            mlp_ratio: self.hidden as f64 / self.width as f64,
            mlp: self.mlp,
            mlp_multiple: if self.hidden.is_multiple_of(8) { 8 } else { 1 },
            rope_base: self.rope_base,
            qkv_bias: self.qkv_bias,
            class_token: self.has_class_token,
            registers: self.registers,
            layer_scale: self.has_layer_scale.then_some(1e-5),
            pos_offset: resampling.offset,
            pos_antialias: resampling.antialias,
            norm_epsilon,
            positions: if self.is_rotary { Positions::Rope } else { Positions::Learned },
            channels: self.channels,
            ..VitConfig::new(self.grid * self.patch_px, self.patch_px, self.width, self.depth, self.heads)
        };
        if self.mlp == MlpKind::Swiglu {
            // Two thirds of it, rounded down, are the hidden layer.
            config.mlp_ratio = (3 * self.hidden).div_ceil(2) as f64 / self.width as f64;
        }
        // Rounding may leave a quotient just below the exact ratio.
        for _ in 0..8 {
            if config.hidden() < self.hidden {
                config.mlp_ratio *= 1.0 + 1e-9;
            }
        }
        ModelConfig::Vit(config)
    }
}

/// Returns the first of the names in the library of Ocelli's `name`.
fn first_name(names: &Names, name: &str) -> String {
    names.library_names(name).swap_remove(0)
}

/// Returns the cells along a side of the position embedding. If it has no row for a class token
/// that the network has, a row of zeros is added.
fn square_positions(tensors: &mut BackboneTensors, names: &Names, width: usize) -> Result<usize, String> {
    let positions = tensors.remove(names.pos_embed).ok_or("it has no position embedding")?;
    let shape = positions.shape.clone();
    let n = match shape.as_slice() {
        &[1, n, d] if d == width => n,
        _ => return Err(format!("its position embedding has shape {shape:?}, not [1, 1 + N, {width}]")),
    };
    if !tensors.contains(names.cls_token) {
        let grid = exact_root(n).filter(|grid| *grid > 0);
        tensors.insert(names.pos_embed, positions);
        return grid.ok_or_else(|| {
            format!("it has no class token, and its position embedding has {n} rows, which is not n²")
        });
    }
    let (grid, values) = match (exact_root(n.saturating_sub(1)), exact_root(n)) {
        (Some(grid), _) if n > 1 => (grid, positions.values),
        (_, Some(grid)) => (grid, [vec![0.0; width], positions.values].concat()),
        _ => {
            return Err(format!("its position embedding has {n} rows, which is neither n² nor n² + 1"));
        }
    };
    tensors.insert(names.pos_embed, Array { shape: vec![1, 1 + grid * grid, width], values });
    Ok(grid)
}

/// Returns the square root of `n`, if it is an integer.
fn exact_root(n: usize) -> Option<usize> {
    let root = n.isqrt();
    (root * root == n).then_some(root)
}

/// Returns the side of the images that a network with rotary positions was made for, which no shape
/// determines.
fn rotary_px(source: &Source, patch_px: usize) -> usize {
    let mut stated = None;
    if let Some(config) = &source.config {
        let timm = config.get("pretrained_cfg").unwrap_or(config);
        stated = config["image_size"].as_u64().or(timm["input_size"][2].as_u64());
    }
    let side = stated.and_then(|side| usize::try_from(side).ok()).unwrap_or(EVALUATED_PX);
    side.next_multiple_of(patch_px)
}

/// Returns the base of the periods of rotary positions.
fn rope_base(tensors: &BackboneTensors, source: &Source) -> Result<f64, String> {
    let mut stated = None;
    if let Some(config) = &source.config {
        stated = config["rope_theta"].as_f64().or(config["model_args"]["rope_temperature"].as_f64());
    }
    let computed = match tensors.get(PERIODS) {
        Some(periods) => Some(base_from_periods(&periods.values)?),
        None => None,
    };
    Ok(match stated.or(computed) {
        Some(base) if (base / USUAL_BASE - 1.0).abs() > BASE_ROUNDING => base,
        _ => USUAL_BASE,
    })
}

/// Returns the base of `periods`, of which period `k` of `n` is `base^(k / n)`.
fn base_from_periods(periods: &[f32]) -> Result<f64, String> {
    let n = periods.len() as f64;
    let last = f64::from(periods.last().copied().unwrap_or(1.0));
    let base = if n > 1.0 { last.powf(n / (n - 1.0)) } else { USUAL_BASE };
    for (k, period) in periods.iter().enumerate() {
        let deviation = (f64::from(*period) / base.powf(k as f64 / n) - 1.0).abs();
        let is_power = deviation < BASE_ROUNDING;
        if !is_power {
            return Err("the periods of its rotary positions are not powers of one base".into());
        }
    }
    Ok(base)
}

/// Returns which of queries, keys and values have biases. If only keys have none, zeros are added
/// for them.
fn qkv_bias(tensors: &mut BackboneTensors, names: &Names, depth: usize, width: usize) -> QkvBias {
    let biases = bias_names(names, 0);
    let n_present = biases.iter().filter(|name| tensors.contains(name)).count();
    if tensors.contains("blocks.0.attn.qkv.bias_mask") {
        return QkvBias::WithoutKeys;
    }
    match (n_present, biases.len()) {
        (0, _) => QkvBias::None,
        (2, 3) => {
            let keys: Vec<String> = (0..depth).map(|i| bias_names(names, i).swap_remove(1)).collect();
            // A file with some of them lacks the others, and is refused where these are read.
            if keys.iter().any(|name| tensors.contains(name)) {
                return QkvBias::All;
            }
            for name in &keys {
                tensors.insert(name, Array { shape: vec![width], values: vec![0.0; width] });
            }
            QkvBias::WithoutKeys
        }
        _ => QkvBias::All,
    }
}

/// Returns the names of the biases of queries, keys and values of block `i`.
fn bias_names(names: &Names, i: usize) -> Vec<String> {
    names.library_names(&format!("blocks.{i}.attn.qkv.bias"))
}

/// Returns the names of tensors of DINOv3's files that are not parameters, or that only its
/// training uses.
fn unused_tensors(tensors: &BackboneTensors, is_rotary: bool) -> Vec<String> {
    let mut unused = Vec::new();
    for name in tensors.names() {
        let is_unused = name.ends_with(".bias_mask")
            || name.starts_with("rope_embed.")
            || name.starts_with("local_cls_norm.");
        if is_rotary && is_unused {
            unused.push(name.clone());
        }
    }
    unused
}

/// Returns the number of attention heads that the configuration states.
fn stated_heads(source: &Source) -> Result<Option<usize>, String> {
    let Some(config) = &source.config else { return Ok(None) };
    match config::count(config, &["num_attention_heads"])? {
        Some(heads) => Ok(Some(heads)),
        None => config::count(&config["model_args"], &["num_heads"]),
    }
}

/// Returns the number of attention heads, which no shape determines.
fn heads(width: usize, is_rotary: bool, hints: &Hints, source: &Source) -> Result<usize, String> {
    let stated = stated_heads(source)?;
    // Heads of all published networks but the largest have 64 channels.
    let usual = match width {
        1152 | 1280 | 1408 | 1664 if !is_rotary => Some(16),
        4096 if is_rotary => Some(32),
        _ if width.is_multiple_of(64) => Some(width / 64),
        _ => None,
    };
    hints.heads.or(stated).or(usual).ok_or_else(|| {
        format!(
            "it does not state the number of attention heads for its {width} channels; give it with --heads"
        )
    })
}
