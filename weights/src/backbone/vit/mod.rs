//! Vision transformers of DINO, DINOv2, timm, torchvision and transformers.

mod graph;
mod names;
mod python;
mod read;
mod write;

use networks::{ModelConfig, NamedTensor, Positions, VitConfig};
use serde_json::{Map, Value};

use super::{Exchange, GraphOutputs, PythonNetwork, Recognized, TimmModel, TransformersClassifier};
use crate::export::Export;
use crate::file::Arrays;
use crate::library::Library;
use crate::onnx::Graph;
use crate::pretrained::Hints;
use crate::source::{BackboneTensors, Source};

/// Keys of the configuration that affect only training or the resampling of the position embedding.
const TRAINING_KEYS: [&str; 13] = [
    "init_std",
    "token_std",
    "initialization",
    "mlp_multiple",
    "rope_shift",
    "rope_jitter",
    "rope_rescale",
    "freeze_patches",
    "pos_offset",
    "pos_antialias",
    "drop_path_depth",
    "drop_path_count",
    "local_class_norm",
];

/// Smallest norm epsilon that is distinguished: smaller values differ from it by rounding only.
const MIN_EPSILON: f64 = 1e-6;

impl Exchange for VitConfig {
    fn kind() -> &'static str {
        "vision transformer"
    }

    fn anchors() -> &'static [&'static str] {
        &read::ANCHORS
    }

    fn recognize(
        tensors: &mut BackboneTensors,
        source: &Source,
        hints: &Hints,
        assumed: &mut Vec<String>,
    ) -> Result<Recognized, String> {
        read::recognize(tensors, source, hints, assumed)
    }

    fn arrays(&self, library: Library, export: &Export<'_>) -> Result<Arrays, String> {
        match library {
            Library::Timm => write::timm_arrays(self, export),
            Library::Torchvision => write::torchvision_arrays(self, export),
            Library::Dinov2 => write::dinov2_arrays(self, export),
            Library::Dinov3 => write::dinov3_arrays(self, export),
            Library::Transformers => write::transformers_arrays(self, export),
            Library::Dino => Ok(super::ocelli_arrays(export)),
        }
    }

    fn timm(&self, export: &Export<'_>) -> Result<TimmModel, String> {
        write::timm(self, export.preprocessing.transform.size_px as usize)
    }

    fn resampling_note(&self, library: Library, size_px: usize) -> Option<String> {
        if self.image_px == size_px || self.positions == Positions::Rope {
            return None;
        }
        let name = library.name();
        let difference = match library {
            Library::Torchvision => format!("{name} takes images of no other size, such as {size_px} px"),
            // Its settings are in the program of the model card.
            Library::Dinov2 => return None,
            _ if read::library_resampling(library, self.registers > 0) == self.resampling() => return None,
            _ => format!(
                "{name} resamples them to {size_px} px in another way than they were trained with, so that \
                 its features differ a little"
            ),
        };
        Some(format!(
            "its positions are for images of {} px, and {difference}: --image-px {size_px} writes them for \
             that size",
            self.image_px
        ))
    }

    fn transformers(&self) -> Result<Value, String> {
        write::transformers(self)
    }

    fn classifier(&self, library: Library) -> Option<&'static str> {
        match library {
            Library::Timm => Some("head"),
            Library::Torchvision => Some("heads.head"),
            _ => None,
        }
    }

    fn transformers_classifier(&self) -> Option<TransformersClassifier> {
        write::transformers_classifier(self)
    }

    fn transformers_feature(&self) -> &'static str {
        "last_hidden_state[:, 0]"
    }

    fn transformers_arguments(&self, px: usize) -> &'static str {
        let resamples = self.positions != Positions::Rope && self.image_px != px;
        if resamples && write::is_plain(self) { ", interpolate_pos_encoding=True" } else { "" }
    }

    fn python(&self, library: Library) -> Option<PythonNetwork> {
        python::network(self, library)
    }

    fn python_renames(&self) -> String {
        python::timm_renames(self)
    }

    fn build_graph(&self, graph: &mut Graph<'_>, px: usize) -> Result<GraphOutputs, String> {
        graph::build(graph, self, px)
    }

    fn restore_merged(&self, arrays: &mut Arrays) -> Result<Option<ModelConfig>, String> {
        graph::restore_merged(arrays, self).map(Some)
    }

    fn resize(&self, tensors: &mut [NamedTensor], px: usize) -> Option<ModelConfig> {
        for tensor in tensors.iter_mut().filter(|tensor| tensor.name == names::TIMM.pos_embed) {
            tensor.values = self.positions_for(&tensor.values, px);
            tensor.shape = vec![1, tensor.values.len() / self.width, self.width];
        }
        Some(ModelConfig::Vit(Self { image_px: px, ..self.clone() }))
    }

    fn canonicalize_keys(&self, keys: &mut Map<String, Value>) {
        keys.retain(|name, _| !TRAINING_KEYS.contains(&name.as_str()));
        // Fixed and trained positions are both stored as parameters.
        if self.positions != Positions::Rope {
            keys.remove("positions");
            keys.remove("rope_base");
        }
        // Ratios that give the same hidden layer are the same.
        keys.insert("mlp_ratio".into(), (self.hidden() as f64 / self.width as f64).into());
        keys.insert("norm_epsilon".into(), self.norm_epsilon.max(MIN_EPSILON).into());
        // The initial value does not matter to weights that have a LayerScale.
        keys.remove("layer_scale");
        if self.layer_scale.is_some() {
            keys.insert("layer_scale".into(), "some".into());
        }
    }

    fn pooling(&self) -> &'static str {
        if self.class_token { "class token" } else { "mean of the patches" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Libraries for which there is a note about `config` and images of 32 px.
    fn noted(config: &VitConfig) -> Vec<Library> {
        let mut noted = Vec::new();
        for library in Library::ALL {
            if config.resampling_note(library, 32).is_some() {
                noted.push(library);
            }
        }
        noted
    }

    /// Libraries that would compute other features of images of another size, or none, are named.
    #[test]
    fn libraries_that_resample_positions_in_another_way_are_noted() {
        let plain = VitConfig::new(48, 8, 64, 2, 2);
        let antialiased = VitConfig { pos_antialias: true, ..plain.clone() };
        let offset = VitConfig { pos_offset: 0.1, ..plain.clone() };
        let with_registers = VitConfig { registers: 2, ..antialiased.clone() };
        assert_eq!(noted(&plain), [Library::Dino, Library::Timm, Library::Torchvision]);
        assert_eq!(
            noted(&antialiased),
            [Library::Dino, Library::Dinov3, Library::Torchvision, Library::Transformers]
        );
        assert_eq!(
            noted(&offset),
            [Library::Dinov3, Library::Timm, Library::Torchvision, Library::Transformers]
        );
        assert_eq!(noted(&with_registers), [Library::Dino, Library::Dinov3, Library::Torchvision]);
        let rotary = VitConfig { positions: Positions::Rope, ..plain.clone() };
        assert_eq!(noted(&rotary), []);
        let same_size = VitConfig { image_px: 32, ..plain };
        assert_eq!(noted(&same_size), []);
    }
}
