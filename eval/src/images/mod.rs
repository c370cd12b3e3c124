//! Images of a data set with their classes, seen through one transform.

pub(crate) mod check;
pub(crate) mod source;
pub(crate) mod transform;

use std::collections::{BTreeSet, HashMap};

use augment::decode::decode;
use augment::{DecodeRules, MultiCrop, Rgb8, SampleKey, ViewMaker};
use rayon::prelude::*;

use crate::EvalError;
use source::Source;
use transform::Transform;

/// Images that are decoded when they are needed, so that a set may be larger than memory.
#[derive(Debug, Clone)]
pub struct ImageSet {
    /// How they are seen.
    pub transform: Transform,
    /// What it is called in messages and results.
    pub name: String,
    source: Source,
    rules: DecodeRules,
    /// Indices of the images in their source.
    indices: Vec<u64>,
    /// Class of each, where it has one.
    labels: Vec<Option<u32>>,
    /// Names of the classes, by number.
    classes: Vec<String>,
}

impl ImageSet {
    /// All images of `source`. Classes are numbered in the order of their names, numbers before words.
    ///
    /// # Errors
    /// [`EvalError::Data`] when a shard cannot be read.
    pub fn open(
        source: Source,
        transform: Transform,
        rules: DecodeRules,
        name: impl Into<String>,
    ) -> Result<Self, EvalError> {
        let indices: Vec<u64> = (0..source.len()).collect();
        let written: Result<Vec<_>, _> = indices.par_iter().map(|index| source.class(*index)).collect();
        let written = written?;
        let classes = ordered(written.iter().flatten().map(String::as_str));
        let by_name: HashMap<&str, u32> = classes.iter().map(String::as_str).zip(0..).collect();
        let labels = written.iter().map(|name| Some(by_name[name.as_deref()?])).collect();
        Ok(Self { transform, name: name.into(), source, rules, indices, labels, classes })
    }

    /// Those that have a class.
    ///
    /// # Errors
    /// [`EvalError::NoLabels`] when none has.
    pub fn labeled(mut self) -> Result<Self, EvalError> {
        let n_samples = self.indices.len();
        let mut keep = self.labels.iter().map(Option::is_some);
        // As many as there are images.
        self.indices.retain(|_| keep.next().unwrap_or_default());
        self.labels.retain(Option::is_some);
        match self.indices.is_empty() {
            true => Err(EvalError::NoLabels { split: self.name, n_samples }),
            false => Ok(self),
        }
    }

    /// The images of rank `rank` of `world_size`: a range of them.
    pub fn part(mut self, rank: usize, world_size: usize) -> Self {
        let n = self.indices.len();
        let range = rank * n / world_size..(rank + 1) * n / world_size;
        self.indices = self.indices[range.clone()].to_vec();
        self.labels = self.labels[range].to_vec();
        self
    }

    /// `n` images, evenly spread over the set, or all where there are fewer.
    pub fn spread(&self, n: usize) -> Self {
        let (all, n) = (self.len(), n.min(self.len()));
        let taken = || (0..n).map(|i| i * all / n);
        let indices = taken().map(|i| self.indices[i]).collect();
        Self { indices, labels: taken().map(|i| self.labels[i]).collect(), ..self.clone() }
    }

    /// Numbers the classes of several sets alike, by all that occur in any.
    pub fn unify(sets: &mut [&mut Self]) {
        let all = ordered(sets.iter().flat_map(|set| set.classes.iter().map(String::as_str)));
        let by_name: HashMap<&str, u32> = all.iter().map(String::as_str).zip(0..).collect();
        for set in sets {
            let moved: Vec<u32> = set.classes.iter().map(|name| by_name[name.as_str()]).collect();
            for label in set.labels.iter_mut().flatten() {
                *label = moved[*label as usize];
            }
            set.classes.clone_from(&all);
        }
    }

    /// Number of images.
    pub fn len(&self) -> usize {
        self.indices.len()
    }

    /// Whether there is no image.
    pub fn is_empty(&self) -> bool {
        self.indices.is_empty()
    }

    /// Class of image `i`.
    pub fn label(&self, i: usize) -> Option<u32> {
        self.labels[i]
    }

    /// Names of the classes, by number.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// The shard of image `i`, where it lies in one, and its key there or its name.
    pub fn describe(&self, i: usize) -> (Option<String>, String) {
        self.source.describe(self.indices[i])
    }

    /// Image `i` as `[3, size, size]` bytes; `None` if it cannot be decoded.
    ///
    /// # Errors
    /// [`EvalError::Data`] when it cannot be read: a score over the readable images alone would mislead.
    pub fn image(&self, i: usize) -> Result<Option<Vec<u8>>, EvalError> {
        Ok(self.decoded(i)?.and_then(|image| self.transform.apply(&image).ok()))
    }

    /// Image `i` as it is; `None` if it cannot be decoded.
    ///
    /// # Errors
    /// As [`ImageSet::image`].
    pub(crate) fn decoded(&self, i: usize) -> Result<Option<Rgb8>, EvalError> {
        Ok(self.bytes(i)?.and_then(|bytes| decode(&bytes, &self.rules).ok()))
    }

    /// The views of the first size that `multicrop` makes of image `i`, `[V, 3, size, size]`, drawn by `seed` and
    /// `epoch`; `None` if it cannot be decoded.
    ///
    /// # Errors
    /// As [`ImageSet::image`].
    pub(crate) fn views(
        &self,
        i: usize,
        multicrop: &MultiCrop,
        [seed, epoch]: [u64; 2],
    ) -> Result<Option<Vec<u8>>, EvalError> {
        let Some(image) = self.decoded(i)? else { return Ok(None) };
        let key = SampleKey { seed, epoch, sample: self.indices[i], attempt: 0 };
        let made = ViewMaker::default().make(&image, multicrop, key);
        Ok(made.ok().map(|mut views| views.groups.remove(0)))
    }

    /// Image `i` as it is encoded; `None` if it is not there.
    pub(crate) fn bytes(&self, i: usize) -> Result<Option<Vec<u8>>, EvalError> {
        Ok(self.source.bytes(self.indices[i])?)
    }

    /// As [`Source::len_and_check`], of image `i`.
    pub(crate) fn len_and_check(&self, i: usize) -> Option<(u64, Option<u16>)> {
        self.source.len_and_check(self.indices[i])
    }

    /// Names the images and how they are seen.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        hash.update(
            format!("{:016x} {:?} {:?}", self.source.fingerprint(), self.transform, self.rules).as_bytes(),
        );
        self.indices.iter().for_each(|index| hash.update(&index.to_le_bytes()));
        hash.digest()
    }
}

/// The name of a class, in the order in which classes are numbered.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum ClassName {
    Number(u64, String),
    Word(String),
}

impl ClassName {
    fn of(name: &str) -> Self {
        match name.parse() {
            Ok(number) => Self::Number(number, name.to_string()),
            Err(_) => Self::Word(name.to_string()),
        }
    }
}

/// The names in their order.
fn ordered<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let distinct: BTreeSet<ClassName> = names.map(ClassName::of).collect();
    let name = |class| match class {
        ClassName::Number(_, name) | ClassName::Word(name) => name,
    };
    distinct.into_iter().map(name).collect()
}
