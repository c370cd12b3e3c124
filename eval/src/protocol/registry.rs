//! All protocols, by name.

use augment::Transform;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::task::{Scored, Task};
#[cfg(test)]
use super::toy;
use super::{Needs, Rules, few_shot, knn, linear_dino, linear_dinov2, linear_honest, logreg, segmentation};
use crate::EvalError;
use crate::images::ImageSet;

/// Declares [`Protocol`] with a variant for each protocol: its documentation, its name, and its
/// settings.
macro_rules! protocols {
    ($($(#[doc = $doc:expr])* $(#[cfg($cfg:meta)])? $variant:ident($settings:ty) => $name:literal,)*) => {
        /// A protocol with its settings.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "protocol")]
        pub enum Protocol {
            $(
                $(#[doc = $doc])*
                $(#[cfg($cfg)])?
                #[serde(rename = $name)]
                $variant($settings),
            )*
        }

        impl Protocol {
            /// Returns every protocol with its default settings: the published ones, if there are
            /// any.
            pub fn all() -> Vec<Self> {
                vec![$($(#[cfg($cfg)])? Self::$variant(<$settings>::default()),)*]
            }

            /// Returns the protocol's name, such as `linear-dinov2`.
            pub fn name(&self) -> &'static str {
                match self {
                    $($(#[cfg($cfg)])? Self::$variant(_) => $name,)*
                }
            }

            fn rules(&self) -> &dyn Rules {
                match self {
                    $($(#[cfg($cfg)])? Self::$variant(settings) => settings,)*
                }
            }
        }
    };
}

protocols! {
    /// Weighted nearest neighbors.
    Knn(knn::Knn) => "knn",
    /// DINO's linear probe.
    LinearDino(linear_dino::LinearDino) => "linear-dino",
    /// DINOv2's linear probe, as published.
    LinearDinov2(linear_dinov2::LinearDinov2) => "linear-dinov2",
    /// DINOv2's linear heads on features that are extracted once.
    LinearDinov2Features(linear_dinov2::OnFeatures) => "linear-dinov2-features",
    /// A linear probe that chooses its learning rate on a held-out part of train.
    LinearHonest(linear_honest::LinearHonest) => "linear-honest",
    /// Logistic regression.
    Logreg(logreg::Logreg) => "logreg",
    /// Nearest neighbors among a few images of each class.
    FewShot(few_shot::FewShot) => "few-shot",
    /// Linear segmentation.
    Segmentation(segmentation::Segmentation) => "segmentation",
    /// A constant prediction, for tests.
    #[cfg(test)]
    Toy(toy::Toy) => "toy",
}

impl Protocol {
    /// Returns the protocol called `name`, with default settings.
    ///
    /// # Errors
    /// A message with the valid names if `name` is unknown.
    pub fn named(name: &str) -> Result<Self, String> {
        let all = Self::all();
        let names: Vec<&str> = all.iter().map(Self::name).collect();
        all.into_iter()
            .find(|protocol| protocol.name() == name)
            .ok_or_else(|| format!("unknown protocol '{name}'; choose from {}", names.join(", ")))
    }

    /// Describes `numbers`, which are this protocol's, and states which published numbers they
    /// compare with.
    pub fn in_words(&self, numbers: &[Scored]) -> String {
        let is_published = Self::named(self.name()).as_ref() == Ok(self);
        self.rules().in_words(numbers, is_published)
    }

    /// Returns the settings by name.
    pub fn settings(&self) -> Value {
        let mut value = json!(self);
        if let Some(settings) = value.as_object_mut() {
            settings.remove("protocol");
        }
        value
    }

    /// Returns the protocol with the setting `key` at `value`. A single number for a list becomes a
    /// list of one.
    ///
    /// # Errors
    /// A message if there is no such setting, with the valid ones, or if the value has the wrong
    /// type or range.
    pub fn with(&self, key: &str, value: &Value) -> Result<Self, String> {
        let name = self.name();
        let mut all = json!(self);
        let settings = self.settings();
        let Some(before) = settings.get(key) else {
            let keys: Vec<&str> =
                settings.as_object().into_iter().flatten().map(|(key, _)| key.as_str()).collect();
            return Err(format!("{name} has no setting {key}; it has {}", keys.join(", ")));
        };
        let value = if before.is_array() && !value.is_array() { json!([value]) } else { value.clone() };
        if let (Value::Number(_), Some(values)) = (before, value.as_array()) {
            return Err(format!("{name}.{key} takes one number, not {}", values.len()));
        }
        // Counts must be at least 1, and all other numbers larger than 0.
        let numbers = value.as_array().map_or(std::slice::from_ref(&value), Vec::as_slice);
        if numbers.is_empty() {
            return Err(format!("{name}.{key} must not be empty"));
        }
        if numbers.iter().any(|number| number.as_u64() == Some(0)) {
            return Err(format!("{name}.{key} must be at least 1"));
        }
        if numbers.iter().filter_map(Value::as_f64).any(|number| number <= 0.0 || !number.is_finite()) {
            return Err(format!("{name}.{key} must be larger than 0"));
        }
        all[key] = value;
        serde_json::from_value(all).map_err(|error| format!("{name}.{key}: {error}"))
    }

    /// Returns the features and classes that the protocol needs.
    pub fn needs(&self) -> Needs {
        self.rules().needs()
    }

    /// Returns the transform of the protocol's script; `usual` is the default of evaluation.
    pub(crate) fn transform(&self, usual: Transform) -> Transform {
        self.rules().transform(usual)
    }

    /// Checks that the training images suffice for the protocol.
    ///
    /// # Errors
    /// An [`EvalError`] that names what is missing.
    pub(crate) fn check(&self, train: &ImageSet) -> Result<(), EvalError> {
        self.rules().check(train)
    }

    /// Computes the protocol's numbers.
    ///
    /// # Errors
    /// Errors of the protocol, such as images that cannot be read.
    pub fn score(&self, task: &Task<'_>) -> Result<Vec<Scored>, EvalError> {
        self.rules().score(task)
    }
}

#[cfg(test)]
mod tests {
    use super::super::few_shot::FewShot;
    use super::super::knn::Knn;
    use super::super::linear_dino::LinearDino;
    use super::super::linear_dinov2::{LinearDinov2, OnFeatures};
    use super::super::logreg::Logreg;
    use super::*;

    #[test]
    fn default_settings_are_the_published_ones() {
        let names: Vec<&str> = Protocol::all().iter().map(Protocol::name).collect();
        for (protocol, name) in Protocol::all().iter().zip(&names) {
            assert_eq!(
                json!(protocol)["protocol"],
                *name,
                "the name that is written is the one that is told"
            );
        }
        let Knn { k, temperature, leave_one_out } = Knn::default();
        assert_eq!((k, temperature, leave_one_out), (vec![10, 20, 100, 200], 0.07, false));
        let LinearDinov2 { rates, iterations, levels, .. } = LinearDinov2::default();
        let published = ["1e-5 2e-5 5e-5 1e-4 2e-4 5e-4", "1e-3 2e-3 5e-3 1e-2 2e-2 5e-2 0.1"];
        let published =
            published.iter().flat_map(|rates| rates.split(' ')).map(|rate| rate.parse::<f64>().unwrap());
        assert_eq!(rates, published.collect::<Vec<_>>());
        assert_eq!((iterations, levels), (12_500, vec![1, 4]));
        assert_eq!((LinearDinov2::default().batch, OnFeatures::default().0.batch), (1024, 128));
        let LinearDino { rate, epochs, levels, average, .. } = LinearDino::default();
        assert_eq!((rate, epochs, levels, average), (0.001, 100, 4, false));
        let Logreg { c, iterations, tolerance } = Logreg::default();
        assert!(c.len() == 45 && (c[0] - 1e-6).abs() < 1e-18 && (c[44] - 1e5).abs() < 1e-6, "{c:?}");
        assert!(
            c.windows(3).all(|c| (c[1] * c[1] / (c[0] * c[2]) - 1.0).abs() < 1e-9),
            "evenly in the exponent"
        );
        assert_eq!((iterations, tolerance), (1000, 1e-12));
    }

    #[test]
    fn images_are_resized_as_the_scripts_do() {
        for protocol in Protocol::all() {
            let Transform { resize_px, size_px } = protocol.transform(Transform::new(224));
            let published = if protocol.name() == "logreg" { (224, 224) } else { (256, 224) };
            assert_eq!((resize_px, size_px), published, "{}", protocol.name());
        }
    }

    #[test]
    fn few_shot_draws_once_as_published() {
        assert_eq!(FewShot::default().tries, 1);
    }

    #[test]
    fn settings_are_changed_by_name() {
        let knn = Protocol::Knn(Knn::default());
        let changed = knn.with("k", &json!([5])).expect("a list");
        assert_eq!(changed.settings()["k"], json!([5]));
        assert_eq!(knn.with("k", &json!(5)), Ok(changed));
        let none = knn.with("epochs", &json!(3)).expect_err("no setting of neighbors");
        assert!(none.contains("epochs") && none.contains("k, leave_one_out, temperature"), "{none}");
        assert!(knn.with("protocol", &json!("logreg")).is_err());
        assert!(knn.with("temperature", &json!([0.1, 0.2])).is_err());
        assert!(knn.with("k", &json!("many")).is_err());
        for (key, value) in [("k", json!([5, 0])), ("k", json!([])), ("temperature", json!(-0.1))] {
            assert!(knn.with(key, &value).is_err(), "{key} {value}");
        }
    }
}
