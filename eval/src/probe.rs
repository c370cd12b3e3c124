//! Evaluation of a network by protocols on a pair of image sets.

use std::sync::Arc;

use augment::Transform;
use kernels::device::Device;
use networks::Network;

use crate::EvalError;
use crate::features::cache::{FeatureCache, features};
use crate::features::columns::FeatureKind;
use crate::features::extract::pixels;
use crate::features::set::FeatureSet;
use crate::features::table::Table;
use crate::images::ImageSet;
use crate::protocol::task::{Scored, Sets, Task};
use crate::protocol::views::Views;
use crate::protocol::{Classes, Protocol};
use pipeline::{NoProgress, Progress};

/// Image sets to fit on and to score on.
#[derive(Debug, Clone)]
pub struct Split {
    /// Training set of the protocols: source of neighbors and heads.
    pub train: ImageSet,
    /// Test set, which is scored.
    pub test: ImageSet,
    /// Seed of shuffles, initial weights and draws.
    pub seed: u64,
    /// Makes every protocol use the transform of the sets, even if its script has another one.
    pub overrides_transform: bool,
}

/// Numbers of one protocol.
#[derive(Debug, Clone, PartialEq)]
pub struct ProtocolScores {
    /// The protocol.
    pub protocol: Protocol,
    /// Transform of the images.
    pub transform: Transform,
    /// Numbers of the protocol.
    pub numbers: Vec<Scored>,
}

/// Scores of a network by several protocols.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Scores {
    /// Numbers of each protocol.
    pub by_protocol: Vec<ProtocolScores>,
    /// Number of images that were fitted on.
    pub n_train: usize,
    /// Number of images that were scored.
    pub n_test: usize,
    /// Number of images of both sets that could not be decoded and were left out.
    pub n_bad: usize,
}

impl Scores {
    /// Returns all numbers, in the order of the protocols.
    pub fn numbers(&self) -> impl Iterator<Item = (&ProtocolScores, &Scored)> {
        self.by_protocol
            .iter()
            .flat_map(|protocol| protocol.numbers.iter().map(move |scored| (protocol, scored)))
    }

    /// Returns the names and values of all numbers, in percent.
    pub fn by_name(&self) -> impl Iterator<Item = (String, f64)> {
        self.numbers().map(|(_, scored)| (scored.metric.clone(), scored.outcome.value()))
    }

    /// Returns the number called `metric`, in percent.
    pub fn accuracy(&self, metric: &str) -> Option<f64> {
        self.numbers().find(|(_, scored)| scored.metric == metric).map(|(_, scored)| scored.outcome.value())
    }
}

impl Split {
    /// Returns both sets without the images that have no class. Classes are numbered by the union
    /// of both sets.
    ///
    /// # Errors
    /// [`EvalError::NoLabels`] if no image of a set has a class, [`EvalError::ClassNames`].
    pub fn new(train: ImageSet, test: ImageSet) -> Result<Self, EvalError> {
        let mut train = train.labeled()?;
        let mut test = test.labeled()?;
        ImageSet::unify(&mut [&mut train, &mut test])?;
        Ok(Self { train, test, seed: 0, overrides_transform: false })
    }

    /// Returns both sets as `protocols` need them: like [`Split::new`] if they use classes of
    /// images, otherwise all images.
    ///
    /// # Errors
    /// Errors of [`Split::new`]; [`EvalError::MixedInputs`] if the protocols need different images,
    /// [`EvalError::SeveralClasses`], [`EvalError::TooFewImages`].
    pub fn for_protocols(
        protocols: &[Protocol],
        mut train: ImageSet,
        mut test: ImageSet,
    ) -> Result<Self, EvalError> {
        let needs_classes = protocols.iter().any(|protocol| protocol.needs().has_classes());
        let classless = protocols.iter().find(|protocol| !protocol.needs().has_classes());
        let split = match classless {
            None => Self::new(train, test)?,
            Some(classless) if needs_classes => {
                return Err(EvalError::MixedInputs { protocol: classless.name() });
            }
            Some(_) => {
                ImageSet::unify(&mut [&mut train, &mut test])?;
                Self { train, test, seed: 0, overrides_transform: false }
            }
        };
        for protocol in protocols {
            protocol.check(&split.train)?;
        }
        let single_label = protocols.iter().find(|protocol| protocol.needs().classes == Classes::One);
        if let Some(protocol) = single_label
            && split.is_multi_label()
        {
            let set = if split.test.is_multi_label() { &split.test } else { &split.train };
            return Err(EvalError::SeveralClasses { split: set.name.clone(), protocol: protocol.name() });
        }
        Ok(split)
    }

    /// Returns whether some image has several classes.
    pub fn is_multi_label(&self) -> bool {
        self.train.is_multi_label() || self.test.is_multi_label()
    }

    /// Scores `network` by each of `protocols`. Protocols with the same transform share features.
    ///
    /// # Errors
    /// Errors of [`features`] and of the protocols.
    pub fn score(
        &self,
        network: &Network,
        protocols: &[Protocol],
        cache: Option<&FeatureCache>,
        progress: &dyn Progress,
    ) -> Result<Scores, EvalError> {
        let mut transforms: Vec<Transform> = Vec::new();
        for protocol in protocols {
            let transform = self.protocol_transform(protocol);
            if !transforms.contains(&transform) {
                transforms.push(transform);
            }
        }
        let mut all: Option<Scores> = None;
        for transform in transforms {
            let group = protocols.iter().filter(|protocol| self.protocol_transform(protocol) == transform);
            let group: Vec<Protocol> = group.cloned().collect();
            let split = self.with_transform(transform);
            let scores = split.score_with_one_transform(network, &group, cache, progress)?;
            match &mut all {
                Some(all) => all.by_protocol.extend(scores.by_protocol),
                None => all = Some(scores),
            }
        }
        let mut all = all.unwrap_or_default();
        all.by_protocol
            .sort_by_key(|scores| protocols.iter().position(|protocol| *protocol == scores.protocol));
        Ok(all)
    }

    /// Returns the transform with which `protocol` is scored.
    fn protocol_transform(&self, protocol: &Protocol) -> Transform {
        if self.overrides_transform { self.test.transform } else { protocol.transform(self.test.transform) }
    }

    /// Returns the same images with `transform`.
    fn with_transform(&self, transform: Transform) -> Self {
        let mut split = self.clone();
        split.train.transform = transform;
        split.test.transform = transform;
        split
    }

    /// Scores `network` by protocols that all use the transform of the sets.
    fn score_with_one_transform(
        &self,
        network: &Network,
        protocols: &[Protocol],
        cache: Option<&FeatureCache>,
        progress: &dyn Progress,
    ) -> Result<Scores, EvalError> {
        let wanted = wanted(protocols);
        let views = Views::new(network, &self.train, wanted);
        let sets = Sets { network, train: &self.train, test: &self.test, cache };
        let (train, test) = if protocols.iter().any(|protocol| protocol.needs().has_classes()) {
            self.features(network, wanted, cache, progress)?
        } else {
            (FeatureSet::empty(), FeatureSet::empty())
        };
        let mut scores = self.scores(&train, &test, protocols, Some((&views, &sets)), progress)?;
        let counts = scores.numbers().filter_map(|(_, scored)| scored.counts).last();
        if let Some(counts) = counts {
            scores.n_train = counts.n_train;
            scores.n_test = counts.n_test;
            scores.n_bad = counts.n_bad;
        }
        Ok(scores)
    }

    /// Computes the features of both sets, with their classes.
    ///
    /// # Errors
    /// Errors of [`features`].
    pub fn features(
        &self,
        network: &Network,
        wanted: FeatureKind,
        cache: Option<&FeatureCache>,
        progress: &dyn Progress,
    ) -> Result<(FeatureSet, FeatureSet), EvalError> {
        let train = labeled(features(cache, network, &self.train, wanted, progress)?, &self.train);
        // If both sets are the same, as for leave-one-out neighbors, features are computed once.
        let are_same =
            self.train.may_equal(&self.test) && self.train.fingerprint()? == self.test.fingerprint()?;
        let test = if are_same {
            train.clone()
        } else {
            labeled(features(cache, network, &self.test, wanted, progress)?, &self.test)
        };
        Ok((train, test))
    }

    /// Scores two baselines for `network` on `device`: a network of the same form with random
    /// weights, and raw pixels. Returns their names with their scores.
    ///
    /// # Errors
    /// Errors of [`Split::score`] and [`Split::score_pixels`].
    pub fn score_baselines(
        &self,
        network: &Network,
        protocols: &[Protocol],
        device: &Device,
        progress: &dyn Progress,
    ) -> Result<Vec<(String, Scores)>, EvalError> {
        let random = Network::random(&network.model, network.pixels.clone(), 0, 0, device);
        let random_scores = self.score(&random, protocols, None, progress)?;
        let pixel_scores = self.score_pixels(protocols)?;
        Ok(vec![("random init".into(), random_scores), ("pixels".into(), pixel_scores)])
    }

    /// Scores raw pixels by the cheap protocols among `protocols` (nearest neighbors): a baseline
    /// for the network.
    ///
    /// # Errors
    /// Errors of [`pixels`].
    pub fn score_pixels(&self, protocols: &[Protocol]) -> Result<Scores, EvalError> {
        // Images with several classes, or without classes, have no pixel baseline.
        let is_single = !self.is_multi_label() && !self.train.classes().is_empty();
        let cheap = protocols.iter().filter(|protocol| is_single && protocol.needs().is_cheap);
        let cheap: Vec<Protocol> = cheap.cloned().collect();
        let train = labeled(Arc::new(pixels(&self.train)?), &self.train);
        let test = labeled(Arc::new(pixels(&self.test)?), &self.test);
        self.scores(&train, &test, &cheap, None, &NoProgress)
    }

    /// Scores features by each of `protocols`; `images` are for those that need more than features.
    fn scores(
        &self,
        train: &FeatureSet,
        test: &FeatureSet,
        protocols: &[Protocol],
        images: Option<(&Views<'_>, &Sets<'_>)>,
        progress: &dyn Progress,
    ) -> Result<Scores, EvalError> {
        let (views, sets) = images.unzip();
        let n_classes = self.train.classes().len();
        let seed = self.seed;
        let task = Task { train, test, n_classes, seed, views, sets, progress };
        let transform = self.test.transform;
        let mut by_protocol = Vec::with_capacity(protocols.len());
        for protocol in protocols {
            let numbers = protocol.score(&task)?;
            by_protocol.push(ProtocolScores { protocol: protocol.clone(), transform, numbers });
        }
        let n_bad = self.train.len() + self.test.len() - train.len() - test.len();
        Ok(Scores { by_protocol, n_train: train.len(), n_test: test.len(), n_bad })
    }
}

/// Returns the features that cover the needs of all `protocols`.
pub fn wanted(protocols: &[Protocol]) -> FeatureKind {
    let n_levels = protocols.iter().map(|protocol| protocol.needs().n_levels).max().unwrap_or(1);
    FeatureKind::Vectors { n_levels, average: protocols.iter().any(|protocol| protocol.needs().average) }
}

fn labeled(table: Arc<Table>, images: &ImageSet) -> FeatureSet {
    FeatureSet::from_table(table, |image| images.label(image))
}
