//! The graph of a vision transformer.

use networks::{MlpKind, ModelConfig, Positions, QkvBias, VitConfig};

use crate::backbone::GraphOutputs;
use crate::backbone::layers::{gelu, linear, norm};
use crate::file::{Array, Arrays};
use crate::onnx::{Graph, PIXELS, Setting, Value};

/// Adds a transformer for images of `px` pixels to `graph`.
pub(super) fn build(graph: &mut Graph<'_>, config: &VitConfig, px: usize) -> Result<GraphOutputs, String> {
    let mut x = embed(graph, config, px)?;
    let rotation = rotation(graph, config, px);
    for index in 0..config.depth {
        let block = format!("blocks.{index}");
        let h = norm(graph, &format!("{block}.norm1"), &x, config.norm_epsilon)?;
        let h = attention(graph, &block, &h, config, rotation.as_ref())?;
        x = residual(graph, &format!("{block}.ls1"), &x, &h, config)?;
        let h = norm(graph, &format!("{block}.norm2"), &x, config.norm_epsilon)?;
        let h = mlp(graph, &block, &h, config)?;
        x = residual(graph, &format!("{block}.ls2"), &x, &h, config)?;
    }
    let x = norm(graph, "norm", &x, config.norm_epsilon)?;
    if !config.class_token {
        let maps = graph.node("Transpose", &[&x], &[Setting::Ints("perm", &[0, 2, 1])]);
        let mean = graph.node("GlobalAveragePool", &[&maps], &[]);
        let flat = graph.integers(&[0, config.width as i64]);
        let embedding = graph.node("Reshape", &[&mean, &flat], &[]);
        return Ok(GraphOutputs { embedding, patches: x, has_fixed_size: true });
    }
    let first = graph.index(0);
    let embedding = graph.node("Gather", &[&x, &first], &[Setting::Int("axis", 1)]);
    let patches = slice(graph, &x, n_prefix(config) as i64, i64::MAX, 1);
    // Positions are stored for each patch.
    Ok(GraphOutputs { embedding, patches, has_fixed_size: true })
}

/// Returns the number of prefix tokens.
fn n_prefix(config: &VitConfig) -> usize {
    usize::from(config.class_token) + config.registers
}

/// Adds the slice `start..end` of `x` along `axis`.
fn slice(graph: &mut Graph<'_>, x: &Value, start: i64, end: i64, axis: i64) -> Value {
    let start = graph.integers(&[start]);
    let end = graph.integers(&[end]);
    let axis = graph.integers(&[axis]);
    graph.node("Slice", &[x, &start, &end, &axis], &[])
}

/// Adds the tokens, `[B, 1 + R + N, D]`.
fn embed(graph: &mut Graph<'_>, config: &VitConfig, px: usize) -> Result<Value, String> {
    let d = config.width;
    let p = config.patch_px;
    let weight = graph.weight("patch_embed.proj.weight")?;
    let bias = graph.weight("patch_embed.proj.bias")?;
    let settings = [Setting::Ints("kernel_shape", &[p, p]), Setting::Ints("strides", &[p, p])];
    let maps = graph.node("Conv", &[&PIXELS.to_string(), &weight, &bias], &settings);
    let flat = graph.integers(&[0, d as i64, -1]);
    let maps = graph.node("Reshape", &[&maps, &flat], &[]);
    let mut patches = graph.node("Transpose", &[&maps], &[Setting::Ints("perm", &[0, 2, 1])]);
    if !config.class_token {
        if config.positions == Positions::Rope {
            return Ok(patches);
        }
        let positions = config.positions_for(&graph.tensor("pos_embed")?.values, px);
        let shape = [1, positions.len() / d, d];
        let positions = graph.float_tensor("pos_embed.patches", &shape, &positions);
        return Ok(graph.node("Add", &[&patches, &positions], &[]));
    }
    let mut prefix = graph.tensor("cls_token")?.values.clone();
    match config.positions {
        Positions::Rope => {}
        Positions::Learned | Positions::SinCos => {
            let positions = config.positions_for(&graph.tensor("pos_embed")?.values, px);
            let n = positions.len() / d - 1;
            let patch_positions = graph.float_tensor("pos_embed.patches", &[1, n, d], &positions[d..]);
            patches = graph.node("Add", &[&patches, &patch_positions], &[]);
            for (token, position) in prefix.iter_mut().zip(&positions) {
                *token += position;
            }
        }
    }
    if config.registers > 0 {
        prefix.extend(&graph.tensor("reg_token")?.values);
    }
    let n_prefix = n_prefix(config);
    let prefix = graph.float_tensor("prefix", &[1, n_prefix, d], &prefix);
    // One prefix for each image.
    let shape = graph.node("Shape", &[&patches], &[Setting::Int("start", 0), Setting::Int("end", 1)]);
    let rest = graph.integers(&[n_prefix as i64, d as i64]);
    let shape = graph.node("Concat", &[&shape, &rest], &[Setting::Int("axis", 0)]);
    let prefix = graph.node("Expand", &[&prefix, &shape], &[]);
    Ok(graph.node("Concat", &[&prefix, &patches], &[Setting::Int("axis", 1)]))
}

/// Restores class token, registers and position embedding of a graph that [`build`] has made, among
/// its constants `arrays`; returns the configuration for the size of its images. The position of
/// the class token is zero, because the graph's class token contains it.
///
/// # Errors
/// A message, if a constant is missing or has another shape.
pub(super) fn restore_merged(arrays: &mut Arrays, config: &VitConfig) -> Result<ModelConfig, String> {
    let d = config.width;
    let n_prefix = n_prefix(config);
    if config.class_token {
        let prefix = arrays.remove("prefix").filter(|prefix| prefix.shape == [1, n_prefix, d]);
        let mut class =
            prefix.ok_or_else(|| format!("its prefix does not have shape [1, {n_prefix}, {d}]"))?.values;
        let registers = class.split_off(d);
        arrays.insert("cls_token".into(), Array { shape: vec![1, 1, d], values: class });
        if config.registers > 0 {
            let shape = vec![1, config.registers, d];
            arrays.insert("reg_token".into(), Array { shape, values: registers });
        }
    }
    if config.positions == Positions::Rope {
        return Ok(ModelConfig::Vit(config.clone()));
    }
    let positions = arrays.remove("pos_embed.patches").ok_or("it has no patch positions")?;
    let n = positions.shape.get(1).copied().unwrap_or(0);
    let side = n.isqrt();
    if positions.shape != [1, n, d] || side == 0 || side * side != n {
        return Err(format!("its patch positions have shape {:?}, not [1, n², {d}]", positions.shape));
    }
    let n_before = usize::from(config.class_token);
    let values = [vec![0.0; n_before * d], positions.values].concat();
    arrays.insert("pos_embed".into(), Array { shape: vec![1, n_before + n, d], values });
    Ok(ModelConfig::Vit(VitConfig { image_px: side * config.patch_px, ..config.clone() }))
}

/// Adds the cosines and sines of all tokens, `[1, 1, 1 + R + N, D_h]` each; a prefix token is not
/// rotated.
fn rotation(graph: &mut Graph<'_>, config: &VitConfig, px: usize) -> Option<[Value; 2]> {
    let [cos, sin] = config.rotations_for(px)?;
    let cos = rotation_table(graph, config, "rope.cos", &cos, 1.0);
    let sin = rotation_table(graph, config, "rope.sin", &sin, 0.0);
    Some([cos, sin])
}

/// Adds the constant `name` with the rows of `table`, `[N, D_h / 2]`, for patches, and
/// `prefix_value` for prefix tokens.
fn rotation_table(
    graph: &mut Graph<'_>,
    config: &VitConfig,
    name: &str,
    table: &[f32],
    prefix_value: f32,
) -> Value {
    let d_head = config.width / config.heads;
    let mut values = vec![prefix_value; n_prefix(config) * d_head];
    for row in table.chunks_exact(d_head / 2) {
        // Both halves of a head are rotated by the same angles.
        values.extend_from_slice(row);
        values.extend_from_slice(row);
    }
    graph.exact_tensor(name, &[1, 1, values.len() / d_head, d_head], &values)
}

/// Adds `x cos θ + [-x₂; x₁] sin θ` for queries or keys `x`, `[B, H, N, D_h]`.
fn rotate(graph: &mut Graph<'_>, x: &Value, [cos, sin]: &[Value; 2], d_head: usize) -> Value {
    let half = d_head as i64 / 2;
    let first = slice(graph, x, 0, half, 3);
    let second = slice(graph, x, half, 2 * half, 3);
    let negative = graph.node("Neg", &[&second], &[]);
    let rotated = graph.node("Concat", &[&negative, &first], &[Setting::Int("axis", 3)]);
    let cos_term = graph.node("Mul", &[x, cos], &[]);
    let sin_term = graph.node("Mul", &[&rotated, sin], &[]);
    graph.node("Add", &[&cos_term, &sin_term], &[])
}

/// Adds queries, keys and values, `[B, N, 3·D]`.
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
    let split_shape = graph.integers(&[0, 0, 3, heads as i64, (d / heads) as i64]);
    let qkv = graph.node("Reshape", &[&qkv, &split_shape], &[]);
    // [3, B, H, N, d]
    let qkv = graph.node("Transpose", &[&qkv], &[Setting::Ints("perm", &[2, 0, 3, 1, 4])]);
    let [mut q, mut k, v] = [0, 1, 2].map(|part| {
        let index = graph.index(part);
        graph.node("Gather", &[&qkv, &index], &[Setting::Int("axis", 0)])
    });
    if let Some(rotation) = rotation {
        q = rotate(graph, &q, rotation, d / heads);
        k = rotate(graph, &k, rotation, d / heads);
    }
    let scale = graph.scalar("attention.scale", (1.0 / ((d / heads) as f64).sqrt()) as f32);
    let q = graph.node("Mul", &[&q, &scale], &[]);
    let k = graph.node("Transpose", &[&k], &[Setting::Ints("perm", &[0, 1, 3, 2])]);
    let scores = graph.node("MatMul", &[&q, &k], &[]);
    let weights = graph.node("Softmax", &[&scores], &[Setting::Int("axis", -1)]);
    let mixed = graph.node("MatMul", &[&weights, &v], &[]);
    let mixed = graph.node("Transpose", &[&mixed], &[Setting::Ints("perm", &[0, 2, 1, 3])]);
    let merged_shape = graph.integers(&[0, 0, d as i64]);
    let mixed = graph.node("Reshape", &[&mixed, &merged_shape], &[]);
    linear(graph, &format!("{block}.attn.proj"), &mixed)
}

fn mlp(graph: &mut Graph<'_>, block: &str, x: &Value, config: &VitConfig) -> Result<Value, String> {
    let h = linear(graph, &format!("{block}.mlp.fc1"), x)?;
    let h = match config.mlp {
        MlpKind::Gelu => gelu(graph, &h),
        MlpKind::Swiglu => {
            let hidden = config.hidden() as i64;
            let first = slice(graph, &h, 0, hidden, 2);
            let second = slice(graph, &h, hidden, 2 * hidden, 2);
            let gate = graph.node("Sigmoid", &[&first], &[]);
            let gate = graph.node("Mul", &[&first, &gate], &[]);
            graph.node("Mul", &[&gate, &second], &[])
        }
    };
    linear(graph, &format!("{block}.mlp.fc2"), &h)
}

/// Adds the residual sum `x + ls · h`.
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
