//! Names of published networks that cannot be built here, for messages.

use crate::file::Arrays;

/// Part of a parameter's name that only networks of a kind have, and the kind. The first that
/// matches applies.
const NETWORKS: [(&str, &str); 15] = [
    (".grn.", "a ConvNeXt V2"),
    ("denseblock1.", "a DenseNet"),
    ("decoder_blocks.", "a masked autoencoder with its decoder"),
    ("rel_pos_h", "a transformer with relative positions, as in SAM and ViTDet"),
    ("reduction.weight", "a Swin transformer"),
    ("relative_position_bias_table", "a transformer with relative positions, as in Swin and BEiT"),
    ("attn_pool.", "a transformer that pools by attention, as in SigLIP"),
    ("norm_pre.", "a vision transformer of a CLIP, as timm stores it"),
    ("vision_model.", "a CLIP or SigLIP of transformers"),
    // So spelled there.
    ("pre_layrnorm.", "a CLIP of transformers"),
    ("visual.", "a CLIP of OpenAI or OpenCLIP"),
    ("transformer.resblocks.", "a CLIP of OpenAI or OpenCLIP"),
    ("dwconv.weight", "a ConvNeXt of a library other than timm, torchvision and DINOv3"),
    ("conv_pw", "an EfficientNet or MobileNet of timm"),
    ("block.0.0.weight", "an EfficientNet or MobileNet of torchvision"),
];

/// Returns the kind of network whose parameters `arrays` seem to be, with its article; `None` if it
/// is not known.
pub(crate) fn unsupported(arrays: &Arrays) -> Option<&'static str> {
    for (part, network) in NETWORKS {
        if arrays.keys().any(|name| name.contains(part)) {
            return Some(network);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::Array;

    fn network_with(name: &str) -> Option<&'static str> {
        unsupported(&Arrays::from([(name.into(), Array { shape: vec![1], values: vec![0.0] })]))
    }

    #[test]
    fn unsupported_networks_are_recognized_by_parameter_names() {
        assert_eq!(network_with("stages.0.blocks.0.mlp.grn.weight"), Some("a ConvNeXt V2"));
        assert_eq!(network_with("features.2.reduction.weight"), Some("a Swin transformer"));
        let openai = Some("a CLIP of OpenAI or OpenCLIP");
        assert_eq!(network_with("visual.class_embedding"), openai);
        assert_eq!(network_with("transformer.resblocks.0.ln_1.weight"), openai, "the image tower alone");
        assert_eq!(network_with("pre_layrnorm.weight"), Some("a CLIP of transformers"));
        assert_eq!(network_with("blocks.0.attn.qkv.weight"), None);
    }
}
