//! Protocols that say what features are worth, one file each.
//!
//! A new one is a file with a struct of settings that has a default, and a line in [`Protocol`] and its functions.

mod batches;
mod bilinear;
pub(crate) mod few_shot;
mod heads;
pub(crate) mod knn;
mod lbfgs;
pub(crate) mod linear_dino;
pub(crate) mod linear_dinov2;
pub(crate) mod linear_honest;
pub(crate) mod logreg;
pub(crate) mod segmentation;
pub(crate) mod task;
pub(crate) mod views;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::EvalError;
use crate::images::transform::Transform;
use few_shot::FewShot;
use knn::Knn;
use linear_dino::LinearDino;
use linear_dinov2::{LinearDinov2, Sees};
use linear_honest::LinearHonest;
use logreg::Logreg;
use segmentation::Segmentation;
use task::{Scored, Task};

/// A protocol with its settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "protocol", rename_all = "kebab-case")]
pub enum Protocol {
    /// Weighted nearest neighbors.
    Knn(Knn),
    /// DINO's linear probe.
    LinearDino(LinearDino),
    /// DINOv2's linear probe, as published.
    LinearDinov2(LinearDinov2),
    /// DINOv2's linear heads on features that are made once.
    LinearDinov2Features(LinearDinov2),
    /// A linear probe that chooses on a part of train.
    LinearHonest(LinearHonest),
    /// Logistic regression.
    Logreg(Logreg),
    /// Nearest neighbors among a few rows of each class.
    FewShot(FewShot),
    /// Linear segmentation.
    Segmentation(Segmentation),
}

impl Protocol {
    /// One of each, with published settings where there are any.
    pub fn all() -> [Self; 8] {
        [
            Self::Knn(Knn::default()),
            Self::LinearDino(LinearDino::default()),
            Self::LinearDinov2(LinearDinov2::default()),
            Self::LinearDinov2Features(LinearDinov2::on_features()),
            Self::LinearHonest(LinearHonest::default()),
            Self::Logreg(Logreg::default()),
            Self::FewShot(FewShot::default()),
            Self::Segmentation(Segmentation::default()),
        ]
    }

    /// The one called `name`, with published settings.
    ///
    /// # Errors
    /// In words, with the names that there are.
    pub fn named(name: &str) -> Result<Self, String> {
        let found = Self::all().into_iter().find(|protocol| protocol.name() == name);
        found.ok_or_else(|| {
            let names: Vec<&str> = Self::all().iter().map(Self::name).collect();
            format!("unknown protocol '{name}'; choose from {}", names.join(", "))
        })
    }

    /// Its name: `linear-dinov2`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Knn(_) => "knn",
            Self::LinearDino(_) => linear_dino::NAME,
            Self::LinearDinov2(_) => linear_dinov2::NAME,
            Self::LinearDinov2Features(_) => linear_dinov2::FEATURES_NAME,
            Self::LinearHonest(_) => "linear-honest",
            Self::Logreg(_) => "logreg",
            Self::FewShot(_) => "few-shot",
            Self::Segmentation(_) => segmentation::NAME,
        }
    }

    /// Describes `numbers`, which are this protocol's, and what they can be compared with.
    pub fn in_words(&self, numbers: &[Scored]) -> String {
        let is_published = Self::named(self.name()).as_ref() == Ok(self);
        let as_theirs = |whose: &str, plural: bool| match (is_published, plural) {
            (true, _) => format!("as {whose}"),
            (false, true) => format!("as {whose}, but for their settings"),
            (false, false) => format!("as {whose}, but for its settings"),
        };
        let n_heads = || {
            let said = numbers.first().and_then(|scored| scored.details["n_heads"].as_u64());
            said.unwrap_or_default() as usize
        };
        match self {
            Self::Knn(protocol) if protocol.leave_one_out => {
                "weighted as DINO's, among the test images themselves, each left out of its own".into()
            }
            Self::Knn(_) if numbers.iter().any(|scored| scored.outcome.measure() == "mAP") => {
                format!("{}, mean average precision over several classes", as_theirs("DINOv3's", false))
            }
            Self::Knn(_) => as_theirs("DINO and DINOv2", true),
            Self::LinearDino(protocol) => format!(
                "{}, bilinear crops and flips, {} epochs in batches of {}; the last epoch, where the script prints the best",
                as_theirs("DINO's script", false),
                protocol.epochs,
                protocol.batch
            ),
            Self::LinearDinov2(protocol) => protocol.in_words(Sees::Crops, n_heads()),
            Self::LinearDinov2Features(protocol) => protocol.in_words(Sees::Features, n_heads()),
            Self::LinearHonest(_) => {
                "Ocelli's own: the rate is chosen on a fifth of train, never on test".into()
            }
            Self::Logreg(protocol) if protocol.c.len() == 1 => {
                "as DINOv2's, but for a C that is given".into()
            }
            Self::Logreg(_) => format!("{}: C is chosen on a tenth of train", as_theirs("DINOv2's", false)),
            Self::FewShot(protocol) => {
                let draws = if protocol.tries == 1 {
                    "1 draw".into()
                } else {
                    format!("mean of {} draws", protocol.tries)
                };
                format!("as DINOv2's k-NN among a few images of each class, {draws}")
            }
            Self::Segmentation(protocol) => format!(
                "like DINOv3's linear head, on one square of each image, {} passes, without augmentation or sliding \
                 windows: not to be compared with published numbers",
                protocol.epochs
            ),
        }
    }

    /// Its settings by name.
    pub fn settings(&self) -> Value {
        let mut value = json!(self);
        if let Some(settings) = value.as_object_mut() {
            settings.remove("protocol");
        }
        value
    }

    /// The same with the setting `key` at `value`; `None` if it has no such setting.
    ///
    /// # Errors
    /// In words, when the value is of another kind.
    pub fn with(&self, key: &str, value: &Value) -> Result<Option<Self>, String> {
        let mut all = json!(self);
        // `protocol` is no setting.
        if self.settings().get(key).is_none() {
            return Ok(None);
        }
        // Counts are whole, and everything else is larger than zero.
        let numbers = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        if numbers.is_empty() {
            return Err(format!("{}: {key} must not be empty", self.name()));
        }
        if numbers.iter().any(|number| number.as_u64() == Some(0)) {
            return Err(format!("{}: {key} must be at least 1", self.name()));
        }
        if numbers
            .iter()
            .any(|number| number.as_f64().is_some_and(|number| !(number > 0.0 && number.is_finite())))
        {
            return Err(format!("{}: {key} must be larger than 0", self.name()));
        }
        all[key] = value.clone();
        serde_json::from_value(all).map(Some).map_err(|error| format!("{}: {key}: {error}", self.name()))
    }

    /// Returns the transform of the protocol's script: `usual`, or for DINOv2's logistic regression a resize to the side of
    /// the square.
    pub(crate) fn transform(&self, usual: Transform) -> Transform {
        match self {
            Self::Logreg(_) => Transform { resize_px: usual.size_px, ..usual },
            _ => usual,
        }
    }

    /// Last levels whose vectors it looks at.
    pub fn n_levels(&self) -> usize {
        match self {
            Self::LinearDino(protocol) => protocol.levels,
            Self::LinearDinov2(protocol) | Self::LinearDinov2Features(protocol) => {
                protocol.levels.iter().copied().max().unwrap_or(1)
            }
            _ => 1,
        }
    }

    /// Whether it looks at the mean patch token.
    pub fn wants_average(&self) -> bool {
        match self {
            Self::LinearDino(protocol) => protocol.average,
            Self::LinearDinov2(_) | Self::LinearDinov2Features(_) => true,
            _ => false,
        }
    }

    /// Whether it looks at classes of images.
    pub fn needs_classes(&self) -> bool {
        !matches!(self, Self::Segmentation(_))
    }

    /// Whether it knows one class for each image only.
    pub fn needs_single_class(&self) -> bool {
        !matches!(self, Self::Knn(_) | Self::Segmentation(_))
    }

    /// Its numbers.
    ///
    /// # Errors
    /// Errors of protocols that look at images.
    pub fn score(&self, task: &Task<'_>) -> Result<Vec<Scored>, EvalError> {
        Ok(match self {
            Self::Knn(protocol) => protocol.numbers(task),
            Self::LinearDino(protocol) => vec![protocol.score(task)?],
            Self::LinearDinov2(protocol) => vec![protocol.score(Sees::Crops, task)?],
            Self::LinearDinov2Features(protocol) => vec![protocol.score(Sees::Features, task)?],
            Self::LinearHonest(protocol) => vec![protocol.score(task)],
            Self::Logreg(protocol) => vec![protocol.score(task)],
            Self::FewShot(protocol) => protocol.score(task)?,
            Self::Segmentation(protocol) => vec![protocol.score(task)?],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_those_of_the_published_protocols() {
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
        assert_eq!((LinearDinov2::default().batch, LinearDinov2::on_features().batch), (1024, 128));
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
        let sides = |protocol: &Protocol| {
            let Transform { resize_px, size_px } = protocol.transform(Transform::new(224));
            (resize_px, size_px)
        };
        for protocol in Protocol::all() {
            let published = if protocol.name() == "logreg" { (224, 224) } else { (256, 224) };
            assert_eq!(sides(&protocol), published, "{}", protocol.name());
        }
    }

    #[test]
    fn a_few_shots_are_drawn_once_as_published() {
        assert_eq!(FewShot::default().tries, 1);
    }

    #[test]
    fn settings_change_by_name() {
        let knn = Protocol::Knn(Knn::default());
        let changed = knn.with("k", &json!([5])).expect("a list").expect("a setting");
        assert_eq!(changed.settings()["k"], json!([5]));
        assert_eq!(knn.with("epochs", &json!(3)), Ok(None));
        assert_eq!(knn.with("protocol", &json!("logreg")), Ok(None));
        assert!(knn.with("k", &json!("many")).is_err());
        for (key, value) in [("k", json!([5, 0])), ("k", json!([])), ("temperature", json!(-0.1))] {
            assert!(knn.with(key, &value).is_err(), "{key} {value}");
        }
    }
}
