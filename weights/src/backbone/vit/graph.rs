//! The graph of a vision transformer.

use networks::{MlpKind, ModelConfig, Positions, QkvBias, VitConfig};

use crate::backbone::GraphOutputs;
use crate::backbone::layers::{gelu, linear, norm};
use crate::file::{Array, Arrays};
use crate::onnx::{Graph, PIXELS, Setting, Value};

/// Adds a transformer for images of `px` pixels to `graph`.
pub(super) fn draw(graph: &mut Graph<'_>, config: &VitConfig, px: usize) -> Result<GraphOutputs, String> {
    let mut x = embed(graph, config, px)?;
    let rotation = rotation(graph, config, px);
    for number in 0..config.depth {
        let block = format!("blocks.{number}");
        let h = norm(graph, &format!("{block}.norm1"), &x, config.norm_epsilon)?;
        let h = attention(graph, &block, &h, config, rotation.as_ref())?;
        x = residual(graph, &format!("{block}.ls1"), &x, &h, config)?;
        let h = norm(graph, &format!("{block}.norm2"), &x, config.norm_epsilon)?;
        let h = mlp(graph, &block, &h, config)?;
        x = residual(graph, &format!("{block}.ls2"), &x, &h, config)?;
    }
    let x = norm(graph, "norm", &x, config.norm_epsilon)?;
    let first = graph.index(0);
    let embedding = graph.node("Gather", &[&x, &first], &[Setting::Int("axis", 1)]);
    let [start, end, axis] = [1 + config.registers as i64, i64::MAX, 1].map(|at| graph.integers(&[at]));
    let patches = graph.node("Slice", &[&x, &start, &end, &axis], &[]);
    // Positions are stored for each patch.
    Ok(GraphOutputs { embedding, patches, has_fixed_size: true })
}

/// Tokens, `[B, 1 + R + N, D]`.
fn embed(graph: &mut Graph<'_>, config: &VitConfig, px: usize) -> Result<Value, String> {
    let d = config.width;
    let p = config.patch_px;
    let weight = graph.weight("patch_embed.proj.weight")?;
    let bias = graph.weight("patch_embed.proj.bias")?;
    let settings = [Setting::Ints("kernel_shape", &[p, p]), Setting::Ints("strides", &[p, p])];
    let maps = graph.node("Conv", &[&PIXELS.to_string(), &weight, &bias], &settings);
    let flat = graph.integers(&[0, d as i64, -1]);
    let maps = graph.node("Reshape", &[&maps, &flat], &[]);
    let patches = graph.node("Transpose", &[&maps], &[Setting::Ints("perm", &[0, 2, 1])]);
    let class = graph.tensor("cls_token")?;
    let (patches, mut prefix) = match config.positions {
        Positions::Rope => (patches, class.values.clone()),
        Positions::Learned | Positions::SinCos => {
            let positions = config.positions_for(&graph.tensor("pos_embed")?.values, px);
            let n = positions.len() / d - 1;
            let of_patches = graph.float_tensor("pos_embed.patches", &[1, n, d], &positions[d..]);
            let patches = graph.node("Add", &[&patches, &of_patches], &[]);
            (
                patches,
                class
                    .values
                    .iter()
                    .zip(&positions)
                    .map(|(token, position)| token + position)
                    .collect::<Vec<f32>>(),
            )
        }
    };
    if config.registers > 0 {
        prefix.extend(&graph.tensor("reg_token")?.values);
    }
    let n_prefix = 1 + config.registers;
    let prefix = graph.float_tensor("prefix", &[1, n_prefix, d], &prefix);
    // One prefix for each image.
    let shape = graph.node("Shape", &[&patches], &[Setting::Int("start", 0), Setting::Int("end", 1)]);
    let rest = graph.integers(&[n_prefix as i64, d as i64]);
    let shape = graph.node("Concat", &[&shape, &rest], &[Setting::Int("axis", 0)]);
    let prefix = graph.node("Expand", &[&prefix, &shape], &[]);
    Ok(graph.node("Concat", &[&prefix, &patches], &[Setting::Int("axis", 1)]))
}

/// Restores class token, registers and position embedding of a graph that [`draw`] has made, among
/// its constants `arrays`; returns the configuration for the size of its images. The position of
/// the class token is zero: it is in the token.
///
/// # Errors
/// A message, if a constant is missing or has another shape.
pub(super) fn separated(arrays: &mut Arrays, config: &VitConfig) -> Result<ModelConfig, String> {
    let d = config.width;
    let n_prefix = 1 + config.registers;
    let prefix = arrays.remove("prefix").filter(|prefix| prefix.shape == [1, n_prefix, d]);
    let mut class = prefix.ok_or_else(|| format!("its prefix is not of shape [1, {n_prefix}, {d}]"))?.values;
    let registers = class.split_off(d);
    arrays.insert("cls_token".into(), Array { shape: vec![1, 1, d], values: class });
    if config.registers > 0 {
        arrays.insert("reg_token".into(), Array { shape: vec![1, config.registers, d], values: registers });
    }
    if config.positions == Positions::Rope {
        return Ok(ModelConfig::Vit(config.clone()));
    }
    let positions = arrays.remove("pos_embed.patches").ok_or("it has no positions of patches")?;
    let n = positions.shape.get(1).copied().unwrap_or(0);
    let side = n.isqrt();
    if positions.shape != [1, n, d] || side == 0 || side * side != n {
        return Err(format!("its positions of patches have shape {:?}, not [1, n², {d}]", positions.shape));
    }
    let values = [vec![0.0; d], positions.values].concat();
    arrays.insert("pos_embed".into(), Array { shape: vec![1, 1 + n, d], values });
    Ok(ModelConfig::Vit(VitConfig { image_px: side * config.patch_px, ..config.clone() }))
}

/// Cosines and sines of all tokens, `[1, 1, 1 + R + N, D_h]` each; a prefix token is not rotated.
fn rotation(graph: &mut Graph<'_>, config: &VitConfig, px: usize) -> Option<[Value; 2]> {
    let tables = config.rotations_for(px)?;
    let d_head = config.width / config.heads;
    let n_prefix = 1 + config.registers;
    let mut number = 0;
    Some(tables.map(|table| {
        let (name, of_prefix) = [("rope.cos", 1.0), ("rope.sin", 0.0)][number];
        number += 1;
        let mut values = vec![of_prefix; n_prefix * d_head];
        // Both halves of a head are rotated by the same angles.
        values.extend(table.chunks_exact(d_head / 2).flat_map(|row| [row, row].concat()));
        graph.float_tensor(name, &[1, 1, values.len() / d_head, d_head], &values)
    }))
}

/// `x cos θ + [-x₂; x₁] sin θ` for queries or keys of `[B, H, N, D_h]`.
fn rotated(graph: &mut Graph<'_>, x: &Value, [cos, sin]: &[Value; 2], d_head: usize) -> Value {
    let half = d_head as i64 / 2;
    let [first, second] = [0, 1].map(|number| {
        let [start, end, axis] = [number * half, (number + 1) * half, 3].map(|at| graph.integers(&[at]));
        graph.node("Slice", &[x, &start, &end, &axis], &[])
    });
    let negative = graph.node("Neg", &[&second], &[]);
    let turned = graph.node("Concat", &[&negative, &first], &[Setting::Int("axis", 3)]);
    let kept = graph.node("Mul", &[x, cos], &[]);
    let turned = graph.node("Mul", &[&turned, sin], &[]);
    graph.node("Add", &[&kept, &turned], &[])
}

/// Queries, keys and values, `[B, N, 3·D]`.
fn qkv(graph: &mut Graph<'_>, layer: &str, x: &Value, config: &VitConfig) -> Result<Value, String> {
    let weight = graph.transposed_weight(&format!("{layer}.weight"))?;
    let d = config.width;
    let product = graph.node("MatMul", &[x, &weight], &[]);
    let bias = match config.qkv_bias {
        QkvBias::None => return Ok(product),
        QkvBias::All => graph.weight(&format!("{layer}.bias"))?,
        QkvBias::WithoutKeys => {
            let mut values = graph.tensor(&format!("{layer}.bias"))?.values.clone();
            values[d..2 * d].fill(0.0);
            graph.float_tensor(&format!("{layer}.bias"), &[3 * d], &values)
        }
    };
    Ok(graph.node("Add", &[&product, &bias], &[]))
}

fn attention(
    graph: &mut Graph<'_>,
    block: &str,
    x: &Value,
    config: &VitConfig,
    rotation: Option<&[Value; 2]>,
) -> Result<Value, String> {
    let d = config.width;
    let heads = config.heads;
    let qkv = qkv(graph, &format!("{block}.attn.qkv"), x, config)?;
    let apart = graph.integers(&[0, 0, 3, heads as i64, (d / heads) as i64]);
    let qkv = graph.node("Reshape", &[&qkv, &apart], &[]);
    // [3, B, H, N, d]
    let qkv = graph.node("Transpose", &[&qkv], &[Setting::Ints("perm", &[2, 0, 3, 1, 4])]);
    let [q, k, v] = [0, 1, 2].map(|number| {
        let place = graph.index(number);
        graph.node("Gather", &[&qkv, &place], &[Setting::Int("axis", 0)])
    });
    let [q, k] = match rotation {
        Some(rotation) => [q, k].map(|x| rotated(graph, &x, rotation, d / heads)),
        None => [q, k],
    };
    let scale = graph.scalar("attention.scale", (1.0 / ((d / heads) as f64).sqrt()) as f32);
    let q = graph.node("Mul", &[&q, &scale], &[]);
    let k = graph.node("Transpose", &[&k], &[Setting::Ints("perm", &[0, 1, 3, 2])]);
    let scores = graph.node("MatMul", &[&q, &k], &[]);
    let weights = graph.node("Softmax", &[&scores], &[Setting::Int("axis", -1)]);
    let mixed = graph.node("MatMul", &[&weights, &v], &[]);
    let mixed = graph.node("Transpose", &[&mixed], &[Setting::Ints("perm", &[0, 2, 1, 3])]);
    let together = graph.integers(&[0, 0, d as i64]);
    let mixed = graph.node("Reshape", &[&mixed, &together], &[]);
    linear(graph, &format!("{block}.attn.proj"), &mixed)
}

fn mlp(graph: &mut Graph<'_>, block: &str, x: &Value, config: &VitConfig) -> Result<Value, String> {
    let h = linear(graph, &format!("{block}.mlp.fc1"), x)?;
    let h = match config.mlp {
        MlpKind::Gelu => gelu(graph, &h),
        MlpKind::Swiglu => {
            let hidden = config.hidden() as i64;
            let [first, second] = [0, 1].map(|half| {
                let [start, end, axis] =
                    [half * hidden, (half + 1) * hidden, 2].map(|at| graph.integers(&[at]));
                graph.node("Slice", &[&h, &start, &end, &axis], &[])
            });
            let gate = graph.node("Sigmoid", &[&first], &[]);
            let gate = graph.node("Mul", &[&first, &gate], &[]);
            graph.node("Mul", &[&gate, &second], &[])
        }
    };
    linear(graph, &format!("{block}.mlp.fc2"), &h)
}

/// `x + ls · h`.
fn residual(
    graph: &mut Graph<'_>,
    scale: &str,
    x: &Value,
    h: &Value,
    config: &VitConfig,
) -> Result<Value, String> {
    let h = match config.layer_scale {
        Some(_) => {
            let gamma = graph.weight(&format!("{scale}.gamma"))?;
            graph.node("Mul", &[h, &gamma], &[])
        }
        None => h.clone(),
    };
    Ok(graph.node("Add", &[x, &h], &[]))
}
