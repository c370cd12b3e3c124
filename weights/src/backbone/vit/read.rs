//! Recognition of a vision transformer among the tensors of a file, with its sizes from their shapes.

use networks::{DropPathDepth, Initialization, MlpKind, ModelConfig, Positions, VitConfig};

use super::names::{ALL, Names};
use crate::backbone::Recognized;
use crate::file::Array;
use crate::library::Library;
use crate::pretrained::Hints;
use crate::source::{Found, Source, config};

/// Largest number of channels.
const MAX_CHANNELS: usize = 65_536;

/// Sides of the squares on which DINO and DINOv2 are evaluated.
const EVALUATED_PX: usize = 224;

/// Names of the convolution that embeds patches.
pub(super) const ANCHORS: [&str; 3] =
    ["patch_embed.proj.weight", "conv_proj.weight", "embeddings.patch_embeddings.projection.weight"];

/// Determines the transformer in `found`.
pub(super) fn recognized(
    found: &mut Found,
    source: &Source,
    hints: &Hints,
    assumed: &mut Vec<String>,
) -> Result<Recognized, String> {
    let names = names(found)?;
    let library = library(found, source, &names, hints, assumed);
    refuse_others(found)?;
    let sizes = Sizes::of(found, &names, hints, source)?;
    let model = sizes.model(library, found, &names, source);
    let size_px = match library {
        Library::Dinov2 => EVALUATED_PX,
        _ => model.image_px(),
    };
    let names = Box::new(move |name: &str| names.theirs(name));
    Ok(Recognized { model, library, names, size_px, activation: "gelu" })
}

/// Returns the table whose names are in `found`.
fn names(found: &Found) -> Result<Names, String> {
    let fits = |names: &Names| {
        [
            "blocks.0.attn.qkv.weight",
            "blocks.0.norm1.weight",
            "blocks.0.mlp.fc1.weight",
            "blocks.0.mlp.fc2.weight",
        ]
        .iter()
        .flat_map(|name| names.theirs(name))
        .chain([names.cls_token.to_string(), names.pos_embed.to_string()])
        .all(|name| found.holds(&name))
    };
    // DINOv2's names and timm's differ only in parameters that some networks lack.
    let is_dinov2 = found.holds("register_tokens") || found.holds("mask_token");
    let table =
        ALL.into_iter().find(|names| fits(names) && (is_dinov2 || names.registers != "register_tokens"));
    let gated = ALL.into_iter().find(|names| fits(names));
    table.or(gated).ok_or_else(|| {
        "it is a transformer, but not one with a class token, a position embedding and blocks of attention and MLP \
         as in DINO, DINOv2, timm, torchvision and transformers"
            .into()
    })
}

/// Returns the library whose code made the network, which determines how its position embedding is resampled.
fn library(
    found: &Found,
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
        ("encoder.layer.{}" | "layers.{}", _) => Library::Transformers,
        (_, "register_tokens") => Library::Dinov2,
        _ if source.config.is_some() || found.holds(names.registers) || found.holds("blocks.0.ls1.gamma") => {
            Library::Timm
        }
        _ => {
            let library = if source.is_pickle { Library::Dino } else { Library::Timm };
            assumed.push(format!(
                "DINO and timm have the same names: this is taken for {}'s (--source)",
                library.name()
            ));
            library
        }
    }
}

/// Rejects networks that have the same names and compute something else.
fn refuse_others(found: &Found) -> Result<(), String> {
    let others = [
        ("fc_norm.weight", "it pools patch tokens behind a norm of its own (fc_norm)"),
        ("norm_pre.weight", "it normalizes tokens before the first block (norm_pre)"),
        ("attn_pool.latent", "it pools by attention (attn_pool)"),
        ("dist_token", "it has a distillation token (dist_token)"),
    ];
    match others.into_iter().find(|(name, _)| found.holds(name)) {
        Some((_, reason)) => Err(format!("{reason}, which is not supported")),
        None => Ok(()),
    }
}

/// Sizes that the shapes determine.
struct Sizes {
    patch_px: usize,
    grid: usize,
    width: usize,
    depth: usize,
    heads: usize,
    hidden: usize,
    mlp: MlpKind,
    registers: usize,
    has_layer_scale: bool,
}

impl Sizes {
    fn of(found: &mut Found, names: &Names, hints: &Hints, source: &Source) -> Result<Self, String> {
        let patches = found.shape(found.anchor).unwrap_or_default().to_vec();
        let &[width, 3, patch_px, side] = patches.as_slice() else {
            return Err(format!("{} has shape {patches:?}, not [D, 3, P, P]", found.anchor));
        };
        if width == 0 || patch_px == 0 || width > MAX_CHANNELS {
            return Err(format!("{} has shape {patches:?}", found.anchor));
        }
        if patch_px != side {
            return Err(format!("its patches have {patch_px} × {side} px; only squares can be read"));
        }
        let first = |name: &str| names.theirs(name).swap_remove(0);
        let depth = (0..).take_while(|i| found.holds(&first(&format!("blocks.{i}.norm1.weight")))).count();
        let columns = |name: &str| found.shape(&first(name)).and_then(|shape| shape.get(1)).copied();
        let rows: usize = names
            .theirs("blocks.0.mlp.fc1.weight")
            .iter()
            .filter_map(|name| found.shape(name)?.first().copied())
            .fold(0, usize::saturating_add);
        let hidden = columns("blocks.0.mlp.fc2.weight").unwrap_or_default();
        let mlp = match rows {
            rows if rows == hidden => MlpKind::Gelu,
            rows if Some(rows) == hidden.checked_mul(2) => MlpKind::Swiglu,
            _ => return Err(format!("its MLP goes to {rows} channels and comes from {hidden}")),
        };
        let grid = square_positions(found, names, width)?;
        let registers = found.shape(names.registers).and_then(|shape| shape.get(1)).copied();
        let has_layer_scale = found.holds(&first("blocks.0.ls1.gamma"));
        let heads = heads(width, hints, source)?;
        let registers = registers.unwrap_or_default();
        Ok(Self { patch_px, grid, width, depth, heads, hidden, mlp, registers, has_layer_scale })
    }

    fn model(&self, library: Library, found: &Found, names: &Names, source: &Source) -> ModelConfig {
        let has_registers = found.holds(names.registers);
        let (pos_offset, pos_antialias) = match library {
            Library::Dino => (0.1, false),
            Library::Dinov2 if has_registers => (0.0, true),
            Library::Dinov2 => (0.1, false),
            Library::Timm => (0.0, true),
            Library::Transformers => (0.0, has_registers),
            Library::Torchvision => (0.0, false),
        };
        let said = source.config.as_ref().and_then(|config| config["layer_norm_eps"].as_f64());
        let norm_epsilon = said.unwrap_or(match (library, self.has_layer_scale) {
            // The default of `ViTConfig`.
            (Library::Transformers, false) => 1e-12,
            _ => 1e-6,
        });
        let mut config = VitConfig {
            image_px: self.grid * self.patch_px,
            patch_px: self.patch_px,
            width: self.width,
            depth: self.depth,
            heads: self.heads,
            mlp_ratio: self.hidden as f64 / self.width as f64,
            mlp: self.mlp,
            registers: self.registers,
            layer_scale: self.has_layer_scale.then_some(1e-5),
            drop_path: 0.0,
            pos_offset,
            pos_antialias,
            norm_epsilon,
            positions: Positions::Learned,
            freeze_patches: false,
            initialization: Initialization::TruncNormal,
            init_std: 0.02,
            token_std: None,
            drop_path_depth: DropPathDepth::default(),
        };
        if self.mlp == MlpKind::Swiglu {
            config.mlp_ratio *= 1.5;
        }
        // A quotient may lie just below what it stands for.
        for _ in 0..8 {
            if config.hidden() < self.hidden {
                config.mlp_ratio *= 1.0 + 1e-9;
            }
        }
        ModelConfig::Vit(config)
    }
}

/// Returns the cells along a side of the position embedding. If it has no row for the class token, a row of zeros is added.
fn square_positions(found: &mut Found, names: &Names, width: usize) -> Result<usize, String> {
    let positions = found.take(names.pos_embed).ok_or("it has no position embedding")?;
    let shape = positions.shape.clone();
    let n = match shape.as_slice() {
        &[1, n, d] if d == width => n,
        _ => return Err(format!("its position embedding has shape {shape:?}, not [1, 1 + N, {width}]")),
    };
    let root = |n: usize| Some(n.isqrt()).filter(|side| side * side == n);
    let (grid, values) = match (root(n.saturating_sub(1)), root(n)) {
        (Some(grid), _) if n > 1 => (grid, positions.values),
        (_, Some(grid)) => (grid, [vec![0.0; width], positions.values].concat()),
        _ => {
            return Err(format!("its position embedding has {n} rows, which is neither n² nor n² + 1"));
        }
    };
    found.put(names.pos_embed, Array { shape: vec![1, 1 + grid * grid, width], values });
    Ok(grid)
}

/// Returns the number of attention heads, which no shape determines.
fn heads(width: usize, hints: &Hints, source: &Source) -> Result<usize, String> {
    let said = match &source.config {
        Some(config) => match config::count(config, &["num_attention_heads"])? {
            Some(heads) => Some(heads),
            None => config::count(&config["model_args"], &["num_heads"])?,
        },
        None => None,
    };
    // Channels of a head are 64 in the published networks but the largest.
    let usual = match width {
        1152 | 1280 | 1408 | 1664 => Some(16),
        _ if width.is_multiple_of(64) => Some(width / 64),
        _ => None,
    };
    hints.heads.or(said).or(usual).ok_or_else(|| {
        format!("it does not say how many attention heads its {width} channels have: give --heads")
    })
}
