//! Names of a vision transformer's parameters.
//!
//! ```text
//! Ocelli    blocks.3.attn.qkv.weight  [3D, D]
//! library   the same, or three tensors [D, D] that are concatenated along the first dimension
//! ```

/// Names of the parameters in a library. `{}` stands for the number of a block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Names {
    /// Class token, `[1, 1, D]`.
    pub cls_token: &'static str,
    /// Whether the library has networks without a class token.
    pub class_token_is_optional: bool,
    /// Position embedding, `[1, 1 + N, D]`.
    pub pos_embed: &'static str,
    /// Register tokens, `[1, R, D]`.
    pub registers: &'static str,
    /// Convolution that embeds patches as tokens.
    pub patch_embed: &'static str,
    /// Final norm.
    pub norm: &'static str,
    /// Prefix of a block's parameters.
    pub block: &'static str,
    /// Names within a block, Ocelli's and the library's; a name that is not listed is the same in
    /// both.
    parts: &'static [(&'static str, &'static str)],
    /// Layers of queries, keys and values, or the one layer that computes all three.
    qkv: &'static [&'static str],
    /// Whether `_`, not `.`, separates `weight` and `bias` from the names in `qkv`.
    joins_by_underscore: bool,
    /// The two layers of a gated MLP's hidden layer, if the library stores them apart.
    gates: &'static [&'static str],
    /// Biases of queries, keys and values, if they are not named like the layers.
    qkv_biases: &'static [&'static str],
}

/// Names of timm and DINO, which Ocelli uses too.
pub(super) const TIMM: Names = Names {
    cls_token: "cls_token",
    class_token_is_optional: true,
    pos_embed: "pos_embed",
    registers: "reg_token",
    patch_embed: "patch_embed.proj",
    norm: "norm",
    block: "blocks.{}",
    parts: &[],
    qkv: &["attn.qkv"],
    joins_by_underscore: false,
    gates: &[],
    qkv_biases: &[],
};

/// Names of DINOv2's code with a plain MLP.
pub(super) const DINOV2: Names =
    Names { registers: "register_tokens", class_token_is_optional: false, ..TIMM };

/// Names of DINOv2's code with a gated MLP.
pub(super) const DINOV2_GATED: Names =
    Names { parts: &[("mlp.fc1", "mlp.w12"), ("mlp.fc2", "mlp.w3")], ..DINOV2 };

/// Names of torchvision.
pub(super) const TORCHVISION: Names = Names {
    cls_token: "class_token",
    class_token_is_optional: false,
    pos_embed: "encoder.pos_embedding",
    registers: "",
    patch_embed: "conv_proj",
    norm: "encoder.ln",
    block: "encoder.layers.encoder_layer_{}",
    parts: &[
        ("norm1", "ln_1"),
        ("attn.proj", "self_attention.out_proj"),
        ("norm2", "ln_2"),
        ("mlp.fc1", "mlp.0"),
        ("mlp.fc2", "mlp.3"),
    ],
    qkv: &["self_attention.in_proj"],
    joins_by_underscore: true,
    gates: &[],
    qkv_biases: &[],
};

/// Files of `ViTModel` in transformers.
pub(super) const VIT: Names = Names {
    cls_token: "embeddings.cls_token",
    class_token_is_optional: false,
    pos_embed: "embeddings.position_embeddings",
    registers: "embeddings.register_tokens",
    patch_embed: "embeddings.patch_embeddings.projection",
    norm: "layernorm",
    block: "encoder.layer.{}",
    parts: &[
        ("norm1", "layernorm_before"),
        ("attn.proj", "attention.output.dense"),
        ("norm2", "layernorm_after"),
        ("mlp.fc1", "intermediate.dense"),
        ("mlp.fc2", "output.dense"),
    ],
    qkv: &["attention.attention.query", "attention.attention.key", "attention.attention.value"],
    joins_by_underscore: false,
    gates: &[],
    qkv_biases: &[],
};

/// Files of `Dinov2Model` and `Dinov2WithRegistersModel` in transformers, with a plain MLP.
pub(super) const HF_DINOV2: Names = Names {
    parts: &[
        ("attn.proj", "attention.output.dense"),
        ("ls1.gamma", "layer_scale1.lambda1"),
        ("ls2.gamma", "layer_scale2.lambda1"),
    ],
    ..VIT
};

/// Files of `Dinov2Model` and `Dinov2WithRegistersModel` in transformers, with a gated MLP.
pub(super) const HF_DINOV2_GATED: Names = Names {
    parts: &[
        ("attn.proj", "attention.output.dense"),
        ("ls1.gamma", "layer_scale1.lambda1"),
        ("ls2.gamma", "layer_scale2.lambda1"),
        ("mlp.fc1", "mlp.weights_in"),
        ("mlp.fc2", "mlp.weights_out"),
    ],
    ..VIT
};

/// `ViTModel().state_dict()` of transformers 5, which its files do not use.
pub(super) const VIT_IN_MEMORY: Names = Names {
    block: "layers.{}",
    parts: &[("norm1", "layernorm_before"), ("attn.proj", "attention.o_proj"), ("norm2", "layernorm_after")],
    qkv: &["attention.q_proj", "attention.k_proj", "attention.v_proj"],
    ..VIT
};

/// `Dinov2Model().state_dict()` of transformers 5, with a gated MLP.
pub(super) const HF_DINOV2_IN_MEMORY: Names = Names {
    parts: &[
        ("attn.proj", "attention.o_proj"),
        ("ls1.gamma", "layer_scale1.lambda1"),
        ("ls2.gamma", "layer_scale2.lambda1"),
        ("mlp.fc2", "mlp.down_proj"),
    ],
    qkv: VIT_IN_MEMORY.qkv,
    gates: &["mlp.gate_proj", "mlp.up_proj"],
    ..VIT
};

/// `Dinov2Model().state_dict()` of transformers 5, with a plain MLP.
pub(super) const HF_DINOV2_PLAIN_IN_MEMORY: Names = Names {
    parts: &[
        ("attn.proj", "attention.o_proj"),
        ("ls1.gamma", "layer_scale1.lambda1"),
        ("ls2.gamma", "layer_scale2.lambda1"),
    ],
    qkv: VIT_IN_MEMORY.qkv,
    ..VIT
};

/// Names of DINOv3's code with a plain MLP. Rotary positions have no parameter.
pub(super) const DINOV3: Names =
    Names { registers: "storage_tokens", pos_embed: "", class_token_is_optional: false, ..TIMM };

/// Names of DINOv3's code with a gated MLP.
pub(super) const DINOV3_GATED: Names =
    Names { parts: &[("mlp.fc2", "mlp.w3")], gates: &["mlp.w1", "mlp.w2"], ..DINOV3 };

/// Names of timm for networks with rotary positions and a plain MLP.
pub(super) const TIMM_ROTARY: Names = Names {
    pos_embed: "",
    class_token_is_optional: false,
    parts: &[("ls1.gamma", "gamma_1"), ("ls2.gamma", "gamma_2")],
    qkv_biases: &["attn.q_bias", KEY_BIAS, "attn.v_bias"],
    ..TIMM
};

/// Name of a bias of keys, which timm's networks with rotary positions do not have.
pub(super) const KEY_BIAS: &str = "attn.k_bias";

/// Names of timm for networks with rotary positions and a gated MLP.
pub(super) const TIMM_ROTARY_GATED: Names = Names { gates: &["mlp.fc1_g", "mlp.fc1_x"], ..TIMM_ROTARY };

/// Files of `DINOv3ViTModel` in transformers with a plain MLP.
pub(super) const HF_DINOV3: Names = Names {
    cls_token: "embeddings.cls_token",
    class_token_is_optional: false,
    pos_embed: "",
    registers: "embeddings.register_tokens",
    patch_embed: "embeddings.patch_embeddings",
    norm: "norm",
    block: "layer.{}",
    parts: &[
        ("attn.proj", "attention.o_proj"),
        ("ls1.gamma", "layer_scale1.lambda1"),
        ("ls2.gamma", "layer_scale2.lambda1"),
        ("mlp.fc1", "mlp.up_proj"),
        ("mlp.fc2", "mlp.down_proj"),
    ],
    qkv: VIT_IN_MEMORY.qkv,
    joins_by_underscore: false,
    gates: &[],
    qkv_biases: &[],
};

/// Files of `DINOv3ViTModel` in transformers with a gated MLP.
pub(super) const HF_DINOV3_GATED: Names = Names { gates: &["mlp.gate_proj", "mlp.up_proj"], ..HF_DINOV3 };

/// `DINOv3ViTModel().state_dict()` of transformers 5.
const HF_DINOV3_IN_MEMORY: [Names; 2] =
    [Names { block: "model.layer.{}", ..HF_DINOV3_GATED }, Names { block: "model.layer.{}", ..HF_DINOV3 }];

/// Tables of networks with rotary positions, the more specific ones first.
pub(super) const ROTARY: [Names; 8] = [
    HF_DINOV3_GATED,
    HF_DINOV3,
    HF_DINOV3_IN_MEMORY[0],
    HF_DINOV3_IN_MEMORY[1],
    DINOV3_GATED,
    TIMM_ROTARY_GATED,
    TIMM_ROTARY,
    DINOV3,
];

/// Tables of networks with a position embedding, the more specific ones first.
pub(super) const ALL: [Names; 10] = [
    HF_DINOV2_GATED,
    HF_DINOV2,
    VIT,
    HF_DINOV2_IN_MEMORY,
    HF_DINOV2_PLAIN_IN_MEMORY,
    VIT_IN_MEMORY,
    TORCHVISION,
    DINOV2_GATED,
    DINOV2,
    TIMM,
];

impl Names {
    /// Returns the names in the library of Ocelli's `name`: one tensor, or several to be
    /// concatenated along their first dimension.
    pub(super) fn library_names(&self, name: &str) -> Vec<String> {
        match name {
            "cls_token" => return vec![self.cls_token.into()],
            "pos_embed" => return vec![self.pos_embed.into()],
            "reg_token" => return vec![self.registers.into()],
            _ => {}
        }
        let in_block = name.strip_prefix("blocks.").and_then(|rest| rest.split_once('.'));
        if let Some((number, part)) = in_block {
            let block = self.block.replace("{}", number);
            return self.part_names(part).into_iter().map(|part| format!("{block}.{part}")).collect();
        }
        if let Some(suffix) = name.strip_prefix("patch_embed.proj") {
            return vec![format!("{}{suffix}", self.patch_embed)];
        }
        if let Some(suffix) = name.strip_prefix("norm") {
            return vec![format!("{}{suffix}", self.norm)];
        }
        vec![name.to_string()]
    }

    /// Returns the names in the library of `part` of a block.
    fn part_names(&self, part: &str) -> Vec<String> {
        if part == "attn.qkv.bias" && !self.qkv_biases.is_empty() {
            return self.qkv_biases.iter().map(ToString::to_string).collect();
        }
        if let Some(kind) = part.strip_prefix("attn.qkv.") {
            let separator = if self.joins_by_underscore { "_" } else { "." };
            return self.qkv.iter().map(|name| format!("{name}{separator}{kind}")).collect();
        }
        if let Some(kind) = part.strip_prefix("mlp.fc1.")
            && !self.gates.is_empty()
        {
            return self.gates.iter().map(|name| format!("{name}.{kind}")).collect();
        }
        for (name, library_name) in self.parts {
            if let Some(rest) = part.strip_prefix(*name)
                && (rest.is_empty() || rest.starts_with('.'))
            {
                return vec![format!("{library_name}{rest}")];
            }
        }
        vec![part.to_string()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(names: Names, name: &str) -> String {
        names.library_names(name).join(" ")
    }

    #[test]
    fn names_are_those_of_the_libraries() {
        assert_eq!(joined(TIMM, "blocks.3.attn.qkv.weight"), "blocks.3.attn.qkv.weight");
        assert_eq!(
            joined(TORCHVISION, "blocks.3.attn.qkv.bias"),
            "encoder.layers.encoder_layer_3.self_attention.in_proj_bias"
        );
        assert_eq!(joined(VIT, "blocks.0.mlp.fc1.bias"), "encoder.layer.0.intermediate.dense.bias");
        assert_eq!(
            joined(VIT, "blocks.0.attn.qkv.bias"),
            "encoder.layer.0.attention.attention.query.bias encoder.layer.0.attention.attention.key.bias \
             encoder.layer.0.attention.attention.value.bias"
        );
        assert_eq!(joined(HF_DINOV2, "blocks.1.ls2.gamma"), "encoder.layer.1.layer_scale2.lambda1");
        assert_eq!(joined(DINOV2_GATED, "blocks.1.mlp.fc2.weight"), "blocks.1.mlp.w3.weight");
        assert_eq!(joined(TORCHVISION, "norm.weight"), "encoder.ln.weight");
    }
}
