//! Images of a data set with their classes, seen through one transform.

pub(crate) mod check;
pub(crate) mod mask;
pub(crate) mod source;
pub(crate) mod transform;

use std::collections::{BTreeSet, HashMap};

use augment::decode::decode;
use augment::{DecodeRules, MultiCrop, Rgb8, SampleKey, ViewMaker};
use rayon::prelude::*;

use crate::EvalError;
use mask::Mask;
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
    /// Class of each, where it has one: the first of several.
    labels: Vec<Option<u32>>,
    /// All classes of those that have several, by their indices in the source.
    several: HashMap<u64, Vec<u32>>,
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
        let all = source.len();
        Self::open_some(source, transform, rules, name, all)
    }

    /// As [`ImageSet::open`], of `n` images that are evenly spread over `source`, or of all where there are fewer. The
    /// classes of the others are not read.
    ///
    /// # Errors
    /// [`EvalError::Data`] when a shard cannot be read.
    pub fn open_some(
        source: Source,
        transform: Transform,
        rules: DecodeRules,
        name: impl Into<String>,
        n: u64,
    ) -> Result<Self, EvalError> {
        let (all, n) = (source.len(), n.min(source.len()));
        let indices: Vec<u64> =
            (0..n).map(|i| (u128::from(i) * u128::from(all) / u128::from(n)) as u64).collect();
        let written: Result<Vec<_>, _> = indices.par_iter().map(|index| source.classes(*index)).collect();
        let written = written?;
        let classes = ordered(written.iter().flatten().map(String::as_str));
        let by_name: HashMap<&str, u32> = classes.iter().map(String::as_str).zip(0..).collect();
        let labels = written.iter().map(|names| Some(by_name[names.first()?.as_str()])).collect();
        let numbered = |names: &Vec<String>| names.iter().map(|name| by_name[name.as_str()]).collect();
        let several = indices.iter().zip(&written).filter(|(_, names)| names.len() > 1);
        let several = several.map(|(index, names)| (*index, numbered(names))).collect();
        Ok(Self { transform, name: name.into(), source, rules, indices, labels, several, classes })
    }

    /// Keeps the images that have a class.
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
            for label in set.labels.iter_mut().flatten().chain(set.several.values_mut().flatten()) {
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

    /// Whether some image has several classes.
    pub fn is_multi_label(&self) -> bool {
        !self.several.is_empty()
    }

    /// All classes of image `i`.
    pub fn labels(&self, i: usize) -> Vec<u32> {
        match self.several.get(&self.indices[i]) {
            Some(all) => all.clone(),
            None => self.labels[i].into_iter().collect(),
        }
    }

    /// The classes of image `i`'s pixels, `[s, s]`; `None` where it has no mask.
    ///
    /// # Errors
    /// [`EvalError::Mask`] for a mask that cannot be read, [`EvalError::Data`] when a shard cannot.
    pub(crate) fn mask(&self, i: usize) -> Result<Option<Vec<u8>>, EvalError> {
        Ok(self.decoded_mask(i)?.map(|mask| mask.seen(&self.transform)))
    }

    /// Whether image `i` and its mask have the same size, if it has one.
    ///
    /// # Errors
    /// [`EvalError::Mask`] if they have not, and as [`ImageSet::mask`].
    pub(crate) fn check_mask(&self, i: usize) -> Result<(), EvalError> {
        let (Some(mask), Some(image)) = (self.decoded_mask(i)?, self.decoded(i)?) else { return Ok(()) };
        let ([width, height], mask) = ([image.width_px, image.height_px], mask.size_px());
        match [width, height] == mask {
            true => Ok(()),
            false => {
                let [of_mask, other] = mask;
                Err(self
                    .bad_mask(i, format!("it has {of_mask} x {other} pixels, its image {width} x {height}")))
            }
        }
    }

    fn decoded_mask(&self, i: usize) -> Result<Option<Mask>, EvalError> {
        let Some(bytes) = self.source.mask(self.indices[i])? else { return Ok(None) };
        Mask::decode(&bytes).map(Some).map_err(|reason| self.bad_mask(i, reason))
    }

    fn bad_mask(&self, i: usize, reason: String) -> EvalError {
        let (shard, key) = self.describe(i);
        EvalError::Mask { shard: shard.unwrap_or_default(), key, reason }
    }

    /// Class of image `i`, the first of several.
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

    /// The views that `multicrop` makes of image `i`, by size, `[V, 3, size, size]` each, drawn by `seed` and `epoch`;
    /// `None` if it cannot be decoded.
    ///
    /// # Errors
    /// As [`ImageSet::image`].
    pub fn views(
        &self,
        i: usize,
        multicrop: &MultiCrop,
        [seed, epoch]: [u64; 2],
    ) -> Result<Option<Vec<Vec<u8>>>, EvalError> {
        let Some(image) = self.decoded(i)? else { return Ok(None) };
        let key = SampleKey { seed, epoch, sample: self.indices[i], attempt: 0 };
        let made = ViewMaker::default().make(&image, multicrop, key);
        Ok(made.ok().map(|views| views.groups))
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
