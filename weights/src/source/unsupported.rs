//! Names of published networks that cannot be built here, for messages.

use crate::file::Arrays;

/// Networks, and a part of a parameter's name that only these have. The first that fits is meant.
const NETWORKS: [(&str, &str); 12] = [
    (".grn.", "a ConvNeXt V2"),
    ("denseblock1.", "a DenseNet"),
    ("decoder_blocks.", "a masked autoencoder with its decoder"),
    ("rel_pos_h", "a transformer with relative positions, as in SAM and ViTDet"),
    ("reduction.weight", "a Swin transformer"),
    ("relative_position_bias_table", "a transformer with relative positions, as in Swin and BEiT"),
    ("attn_pool.", "a transformer that pools by attention, as in SigLIP"),
    ("vision_model.", "a CLIP or SigLIP of transformers"),
    ("visual.", "a CLIP of OpenAI or OpenCLIP"),
    ("dwconv.weight", "a ConvNeXt of another library than timm, torchvision and DINOv3"),
    ("conv_pw", "an EfficientNet or MobileNet of timm"),
    ("block.0.0.weight", "an EfficientNet or MobileNet of torchvision"),
];

/// Returns the network whose parameters `arrays` seem to be, with its article; `None` if it is not
/// known.
pub(crate) fn unsupported(arrays: &Arrays) -> Option<&'static str> {
    let has = |part: &str| arrays.keys().any(|name| name.contains(part));
    NETWORKS.iter().find(|(part, _)| has(part)).map(|(_, network)| *network)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::Array;

    #[test]
    fn networks_are_named_by_their_parameters() {
        let of = |name: &str| {
            unsupported(&Arrays::from([(name.into(), Array { shape: vec![1], values: vec![0.0] })]))
        };
        assert_eq!(of("stages.0.blocks.0.mlp.grn.weight"), Some("a ConvNeXt V2"));
        assert_eq!(of("features.2.reduction.weight"), Some("a Swin transformer"));
        assert_eq!(of("blocks.0.attn.qkv.weight"), None);
    }
}
