//! Images of a data set with their classes and the transform that is applied to them.

pub(crate) mod check;
pub(crate) mod source;

use std::collections::{BTreeSet, HashMap, HashSet};

use augment::{DecodeRules, Decoding, Image, Mask, MultiCrop, PixelFormat, SampleKey, Transform, ViewMaker};
use pipeline::shard::image::EncodedImage;
use prep::parts::part_range;
use rayon::prelude::*;

use crate::EvalError;
use crate::parallel::try_collect;
use source::Source;

/// A set of images with their classes. Images are decoded on demand, so that a set may be larger
/// than memory.
#[derive(Debug, Clone)]
pub struct ImageSet {
    /// Transform applied to each image.
    pub transform: Transform,
    /// Name of the set in messages and results.
    pub name: String,
    source: Source,
    rules: DecodeRules,
    /// Indices of the images in their source.
    indices: Vec<u64>,
    /// Class of each image, if it has one: the first of several.
    labels: Vec<Option<u32>>,
    /// All classes of the images that have several, by index in the source.
    several: HashMap<u64, Vec<u32>>,
    /// Classes as the samples state them, by number.
    stated: Vec<String>,
    /// Names of the classes, by number: those of [`ImageSet::named`], or the classes as stated.
    classes: Vec<String>,
    /// Names that [`ImageSet::named`] was given for several classes, whether the set has images of
    /// them or not.
    shared_names: HashSet<String>,
}

/// Classes of one or several sets, in one order.
struct ClassUnion {
    /// Classes as samples state them, by number: the first way to state each.
    stated: Vec<String>,
    /// Names of the classes, by number.
    names: Vec<String>,
    /// Number of each class, by every way in which samples state it.
    numbers: HashMap<String, u32>,
}

impl ClassUnion {
    /// Numbers the classes `all`, which are ordered. Some of them have a name in `by_class`: a
    /// class that is stated by this name is the same, unless the name is `shared` by several.
    fn new(all: Vec<String>, by_class: &HashMap<String, String>, shared: &HashSet<String>) -> Self {
        let mut union = Self { stated: Vec::new(), names: Vec::new(), numbers: HashMap::new() };
        let mut by_name: HashMap<String, u32> = HashMap::new();
        for class in all {
            let name = by_class.get(&class).unwrap_or(&class).clone();
            let known = if shared.contains(&name) { None } else { by_name.get(&name).copied() };
            let number = known.unwrap_or(union.stated.len() as u32);
            if known.is_none() {
                by_name.insert(name.clone(), number);
                union.stated.push(class.clone());
                union.names.push(name);
            }
            union.numbers.insert(class, number);
        }
        union
    }
}

impl ImageSet {
    /// Opens all images of `source`. Classes are numbered in the order of their names: numbers
    /// first, by value, then words.
    ///
    /// # Errors
    /// [`EvalError::Data`] if a shard cannot be read.
    pub fn open(
        source: Source,
        transform: Transform,
        rules: DecodeRules,
        name: impl Into<String>,
    ) -> Result<Self, EvalError> {
        let all = source.len();
        Self::open_some(source, transform, rules, name, all)
    }

    /// Opens `n` images that are evenly spread over `source`, or all if there are fewer, like
    /// [`ImageSet::open`]. The classes of the other images are not read.
    ///
    /// # Errors
    /// [`EvalError::Data`] if a shard cannot be read.
    pub fn open_some(
        source: Source,
        transform: Transform,
        rules: DecodeRules,
        name: impl Into<String>,
        n: u64,
    ) -> Result<Self, EvalError> {
        let all = source.len();
        let n = n.min(source.len());
        let indices: Vec<u64> =
            (0..n).map(|i| (u128::from(i) * u128::from(all) / u128::from(n)) as u64).collect();
        let stated = try_collect(indices.par_iter().map(|index| source.classes(*index)))?;
        let classes = ordered(stated.iter().flatten().map(String::as_str));
        let by_name: HashMap<&str, u32> = classes.iter().map(String::as_str).zip(0..).collect();
        let mut images = Vec::with_capacity(indices.len());
        for (index, names) in indices.iter().zip(&stated) {
            images.push((*index, names.iter().map(|name| by_name[name.as_str()]).collect()));
        }
        Ok(Self::from_labels(source, transform, rules, name, &classes, images))
    }

    /// Creates the set of `images` of `source`, each with its index there and the numbers of its
    /// classes, which are called `classes`. Nothing is read.
    pub fn from_labels(
        source: Source,
        transform: Transform,
        rules: DecodeRules,
        name: impl Into<String>,
        classes: &[String],
        images: Vec<(u64, Vec<u32>)>,
    ) -> Self {
        let mut indices = Vec::with_capacity(images.len());
        let mut labels = Vec::with_capacity(images.len());
        let mut several = HashMap::new();
        for (index, numbers) in images {
            indices.push(index);
            labels.push(numbers.first().copied());
            if numbers.len() > 1 {
                several.insert(index, numbers);
            }
        }
        Self {
            transform,
            name: name.into(),
            source,
            rules,
            indices,
            labels,
            several,
            stated: classes.to_vec(),
            classes: classes.to_vec(),
            shared_names: HashSet::new(),
        }
    }

    /// Names the classes that samples state as numbers: class 3 gets the fourth of `names`, if
    /// there are that many. A class that other samples state by this name is the same, unless
    /// several of `names` are the same.
    pub fn named(mut self, names: &[String]) -> Self {
        let mut by_class = HashMap::new();
        for class in &self.stated {
            let number: Option<usize> = class.parse().ok();
            if let Some(name) = number.and_then(|number| names.get(number)) {
                by_class.insert(class.clone(), name.clone());
            }
        }
        let mut seen = HashSet::new();
        self.shared_names = names.iter().filter(|name| !seen.insert(name.as_str())).cloned().collect();
        let union = ClassUnion::new(self.stated.clone(), &by_class, &self.shared_names);
        self.renumber(&union);
        self
    }

    /// Numbers the classes as `union` does, which has all of them.
    fn renumber(&mut self, union: &ClassUnion) {
        let renumbered: Vec<u32> = self.stated.iter().map(|class| union.numbers[class]).collect();
        for label in self.labels.iter_mut().flatten() {
            *label = renumbered[*label as usize];
        }
        for labels in self.several.values_mut() {
            let mut seen = HashSet::new();
            *labels = labels.iter().map(|label| renumbered[*label as usize]).collect();
            labels.retain(|label| seen.insert(*label));
        }
        self.several.retain(|_, labels| labels.len() > 1);
        self.stated.clone_from(&union.stated);
        self.classes.clone_from(&union.names);
    }

    /// Keeps only the images that have a class.
    ///
    /// # Errors
    /// [`EvalError::NoLabels`] if no image has one.
    pub fn labeled(self) -> Result<Self, EvalError> {
        let mut kept = Vec::new();
        for (i, label) in self.labels.iter().enumerate() {
            if label.is_some() {
                kept.push(i);
            }
        }
        self.select_some(&kept)
    }

    /// Keeps only the images that have a class, or state that they are of none.
    ///
    /// # Errors
    /// [`EvalError::NoLabels`] if there is no such image, [`EvalError::Data`] if a shard cannot be
    /// read.
    pub fn with_known_labels(self) -> Result<Self, EvalError> {
        let mut kept = Vec::new();
        for i in 0..self.len() {
            if self.known_labels(i)?.is_some() {
                kept.push(i);
            }
        }
        self.select_some(&kept)
    }

    /// Keeps only the images whose `is_kept` is set.
    pub(crate) fn with_only(self, is_kept: &[bool]) -> Self {
        let mut kept = Vec::new();
        for (i, is_kept) in is_kept.iter().enumerate() {
            if *is_kept {
                kept.push(i);
            }
        }
        self.select(&kept)
    }

    /// Returns the images that rank `rank` of `world_size` evaluates, which are contiguous.
    pub fn part_of_rank(self, rank: usize, world_size: usize) -> Self {
        let kept: Vec<usize> = part_range(self.len(), rank, world_size).collect();
        self.select(&kept)
    }

    /// Returns `n` images that are evenly spread over the set, or all if there are fewer.
    pub fn spread(&self, n: usize) -> Self {
        let n_images = self.len();
        let n = n.min(n_images);
        let kept: Vec<usize> = (0..n).map(|i| i * n_images / n).collect();
        self.clone().select(&kept)
    }

    /// Keeps only the images `kept`, of which there must be one.
    fn select_some(self, kept: &[usize]) -> Result<Self, EvalError> {
        if kept.is_empty() {
            return Err(EvalError::NoLabels { split: self.name, n_samples: self.indices.len() });
        }
        Ok(self.select(kept))
    }

    /// Keeps only the images `kept`, in this order.
    fn select(mut self, kept: &[usize]) -> Self {
        let mut indices = Vec::with_capacity(kept.len());
        let mut labels = Vec::with_capacity(kept.len());
        for i in kept {
            indices.push(self.indices[*i]);
            labels.push(self.labels[*i]);
        }
        self.indices = indices;
        self.labels = labels;
        self
    }

    /// Renumbers the classes of several sets by the union of their classes. A class that has a name
    /// in one set has it in all, and a class that another set states by this name is the same.
    ///
    /// # Errors
    /// [`EvalError::ClassNames`] if two sets have different names for a class.
    pub fn unify(sets: &mut [&mut Self]) -> Result<(), EvalError> {
        let mut named: HashMap<String, (String, String)> = HashMap::new();
        for set in sets.iter() {
            for (class, name) in set.stated.iter().zip(&set.classes).filter(|(class, name)| class != name) {
                let (other, split) =
                    named.entry(class.clone()).or_insert_with(|| (name.clone(), set.name.clone()));
                if other != name {
                    let class = class.clone();
                    let names = [other.clone(), name.clone()];
                    return Err(EvalError::ClassNames {
                        class,
                        names,
                        splits: [split.clone(), set.name.clone()],
                    });
                }
            }
        }
        let all = ordered(sets.iter().flat_map(|set| set.stated.iter().map(String::as_str)));
        let by_class = named.into_iter().map(|(class, (name, _))| (class, name)).collect();
        let shared = sets.iter().flat_map(|set| set.shared_names.iter().cloned()).collect();
        let union = ClassUnion::new(all, &by_class, &shared);
        for set in sets {
            set.renumber(&union);
        }
        Ok(())
    }

    /// Returns the number of images.
    pub fn len(&self) -> usize {
        self.indices.len()
    }

    /// Returns whether there are no images.
    pub fn is_empty(&self) -> bool {
        self.indices.is_empty()
    }

    /// Returns whether some image has several classes.
    pub fn is_multi_label(&self) -> bool {
        !self.several.is_empty()
    }

    /// Returns all classes of image `i`.
    pub fn labels(&self, i: usize) -> Vec<u32> {
        match self.several.get(&self.indices[i]) {
            Some(all) => all.clone(),
            None => self.labels[i].into_iter().collect(),
        }
    }

    /// Returns all classes of image `i`, none if it states that it is of none; `None` if it states
    /// nothing about its classes.
    ///
    /// # Errors
    /// [`EvalError::Data`] if a shard cannot be read.
    pub fn known_labels(&self, i: usize) -> Result<Option<Vec<u32>>, EvalError> {
        let labels = self.labels(i);
        if labels.is_empty() && !self.source.states_no_class(self.indices[i])? {
            return Ok(None);
        }
        Ok(Some(labels))
    }

    /// Returns the classes of image `i`'s pixels after the transform, `[s, s]`; `None` if it has no
    /// mask.
    ///
    /// # Errors
    /// [`EvalError::Mask`] if the mask cannot be decoded, [`EvalError::Data`] if a shard cannot be
    /// read.
    pub(crate) fn mask(&self, i: usize) -> Result<Option<Vec<u8>>, EvalError> {
        Ok(self.decoded_mask(i)?.map(|mask| mask.transformed(&self.transform)))
    }

    /// Checks that image `i` and its mask, if it has one, have the same size.
    ///
    /// # Errors
    /// [`EvalError::Mask`] if the sizes differ, and errors of [`ImageSet::mask`].
    pub(crate) fn check_mask(&self, i: usize) -> Result<(), EvalError> {
        let mask = self.decoded_mask(i)?;
        let image = self.decoded(i)?;
        let (Some(mask), Some(image)) = (mask, image) else { return Ok(()) };
        self.check_mask_size(i, &mask, &image)
    }

    /// Checks that `mask`, that of image `i`, has the size of `image`.
    ///
    /// # Errors
    /// [`EvalError::Mask`] if the sizes differ.
    pub(crate) fn check_mask_size(&self, i: usize, mask: &Mask, image: &Image) -> Result<(), EvalError> {
        mask.check_size(image.size_px()).map_err(|reason| self.bad_mask(i, reason))
    }

    /// Returns the mask of image `i` as it is stored, if it has one, and checks that its pixels are
    /// of the first `n_classes` classes.
    ///
    /// # Errors
    /// [`EvalError::Mask`] if not, and errors of [`ImageSet::mask`].
    pub(crate) fn checked_mask(&self, i: usize, n_classes: usize) -> Result<Option<Mask>, EvalError> {
        let Some(mask) = self.decoded_mask(i)? else { return Ok(None) };
        match mask.check_classes(n_classes) {
            Ok(()) => Ok(Some(mask)),
            Err(reason) => Err(self.bad_mask(i, reason)),
        }
    }

    /// Returns the encoded mask of image `i`, if it has one.
    ///
    /// # Errors
    /// [`EvalError::Data`] if a shard cannot be read.
    pub(crate) fn encoded_mask(&self, i: usize) -> Result<Option<Vec<u8>>, EvalError> {
        Ok(self.source.mask(self.indices[i])?)
    }

    /// Returns the mask of image `i` as it is stored, if it has one.
    ///
    /// # Errors
    /// Errors of [`ImageSet::mask`].
    fn decoded_mask(&self, i: usize) -> Result<Option<Mask>, EvalError> {
        let Some(bytes) = self.encoded_mask(i)? else { return Ok(None) };
        Mask::decode(&bytes, self.max_image_pixels()).map(Some).map_err(|reason| self.bad_mask(i, reason))
    }

    /// Returns the maximum number of pixels of an image, and so of a mask.
    pub(crate) fn max_image_pixels(&self) -> u64 {
        self.rules.max_image_pixels()
    }

    /// Returns the error of image `i`, whose mask cannot be used for `reason`.
    fn bad_mask(&self, i: usize, reason: String) -> EvalError {
        let (shard, key) = self.describe(i);
        EvalError::Mask { shard: shard.unwrap_or_default(), key, reason }
    }

    /// Returns the class of image `i`: the first of several.
    pub fn label(&self, i: usize) -> Option<u32> {
        self.labels[i]
    }

    /// Returns the names of the classes, by number.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Returns a name of its own for each class, by number: a name that several classes have is
    /// followed by the class as samples state it, such as `crane (517)`.
    pub fn distinct_classes(&self) -> Vec<String> {
        let mut distinct = Vec::with_capacity(self.classes.len());
        for (name, stated) in self.classes.iter().zip(&self.stated) {
            let is_shared = self.shared_names.contains(name);
            distinct.push(if is_shared { format!("{name} ({stated})") } else { name.clone() });
        }
        distinct
    }

    /// Numbers the classes by their positions in `names`, which has the [distinct
    /// name](Self::distinct_classes) of each.
    ///
    /// # Errors
    /// The names of the classes that are not in `names`.
    pub fn numbered(mut self, names: &[String]) -> Result<Self, Vec<String>> {
        let numbers: HashMap<&str, u32> = names.iter().map(String::as_str).zip(0..).collect();
        let mut renumbered = Vec::with_capacity(self.classes.len());
        let mut unknown = Vec::new();
        for name in self.distinct_classes() {
            match numbers.get(name.as_str()) {
                Some(number) => renumbered.push(*number),
                None => unknown.push(name),
            }
        }
        if !unknown.is_empty() {
            return Err(unknown);
        }
        for label in self.labels.iter_mut().flatten().chain(self.several.values_mut().flatten()) {
            *label = renumbered[*label as usize];
        }
        self.stated = names.to_vec();
        self.classes = names.to_vec();
        self.shared_names = HashSet::new();
        Ok(self)
    }

    /// Returns the shard of image `i`, if it is in one, and its key there or its name.
    pub fn describe(&self, i: usize) -> (Option<String>, String) {
        self.source.describe(self.indices[i])
    }

    /// Returns image `i` after the transform as `[C, size, size]` stored values; `None` if it
    /// cannot be decoded.
    ///
    /// # Errors
    /// [`EvalError::Data`] if it cannot be read: a score over the readable images only would be
    /// misleading.
    pub fn image(&self, i: usize) -> Result<Option<Vec<u8>>, EvalError> {
        Ok(self.decoded(i)?.and_then(|image| self.transform.apply_to(&image).ok()))
    }

    /// Returns a picture of image `i` for people after the transform, `[3, size, size]` as bytes;
    /// `None` if it cannot be decoded.
    ///
    /// # Errors
    /// Errors of [`ImageSet::image`].
    pub fn picture(&self, i: usize) -> Result<Option<Vec<u8>>, EvalError> {
        let Some(encoded) = self.encoded(i)? else { return Ok(None) };
        let files = encoded.files();
        let image =
            Image::decode(&files, &self.rules).or_else(|_| Image::decode_any(&files, &self.rules)).ok();
        Ok(image.and_then(|image| self.transform.apply(&image.picture()).ok()))
    }

    /// Returns the rules for decoding the images.
    pub fn rules(&self) -> &DecodeRules {
        &self.rules
    }

    /// Returns the options of the decoder as descriptions of features state them; `None` for the
    /// usual ones.
    pub fn unusual_decoding(&self) -> Option<Decoding> {
        Some(self.rules.decoding()).filter(|decoding| *decoding != Decoding::default())
    }

    /// Returns the format of the images' pixels.
    pub fn format(&self) -> PixelFormat {
        self.rules.format
    }

    /// Returns image `i` without the transform; `None` if it cannot be decoded.
    ///
    /// # Errors
    /// Errors of [`ImageSet::image`].
    pub(crate) fn decoded(&self, i: usize) -> Result<Option<Image>, EvalError> {
        Ok(self.encoded(i)?.and_then(|encoded| Image::decode(&encoded.files(), &self.rules).ok()))
    }

    /// Returns the reason why image `i` cannot be used; `None` if it can.
    ///
    /// # Errors
    /// Errors of [`ImageSet::image`].
    pub fn flaw(&self, i: usize) -> Result<Option<String>, EvalError> {
        let Some(encoded) = self.encoded(i)? else { return Ok(self.source.flaw(self.indices[i])?) };
        match Image::decode(&encoded.files(), &self.rules) {
            Ok(image) => Ok(self.transform.apply_to(&image).err().map(|error| error.to_string())),
            Err(error) => Ok(Some(error.to_string())),
        }
    }

    /// Returns the views that `multicrop` makes of image `i`, by size, `[V, C, size, size]` each,
    /// drawn from `seed` and `epoch`; `None` if it cannot be decoded.
    ///
    /// # Errors
    /// Errors of [`ImageSet::image`].
    pub fn views(
        &self,
        i: usize,
        multicrop: &MultiCrop,
        seed: u64,
        epoch: u64,
    ) -> Result<Option<Vec<Vec<u8>>>, EvalError> {
        let Some(image) = self.decoded(i)? else { return Ok(None) };
        let key = SampleKey { seed, epoch, sample: self.indices[i], attempt: 0 };
        let views = ViewMaker::default().make(&image, multicrop, key);
        Ok(views.ok().map(|views| views.groups))
    }

    /// Returns the encoded image `i`; `None` if the image is missing.
    pub(crate) fn encoded(&self, i: usize) -> Result<Option<EncodedImage>, EvalError> {
        Ok(self.source.encoded(self.indices[i])?)
    }

    /// Returns the length and short check of image `i`, like [`Source::len_and_check`].
    pub(crate) fn len_and_check(&self, i: usize) -> Option<(u64, Option<u16>)> {
        self.source.len_and_check(self.indices[i])
    }

    /// Returns a hash by which parts of a job recognize the images, like [`Source::recognition`].
    ///
    /// # Errors
    /// [`EvalError::Data`] if a shard cannot be read.
    pub fn recognition(&self) -> Result<u64, EvalError> {
        Ok(self.source.recognition()?)
    }

    /// Returns a hash that identifies the images with their classes, wherever they are: by
    /// [`ImageSet::recognition`].
    ///
    /// # Errors
    /// [`EvalError::Data`] if a shard cannot be read.
    pub fn identity(&self) -> Result<u64, EvalError> {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        hash.update(format!("{:016x} {:?}\n", self.recognition()?, self.classes).as_bytes());
        for (index, label) in self.indices.iter().zip(&self.labels) {
            let several = self.several.get(index);
            hash.update(format!("{index} {label:?} {several:?}\n").as_bytes());
        }
        Ok(hash.digest())
    }

    /// Returns whether the other set may hold the same images, without reading any.
    pub fn may_equal(&self, other: &Self) -> bool {
        self.indices == other.indices && self.source.has_listing_of(&other.source)
    }

    /// Returns a hash that identifies the images, the transform and the decoding rules.
    ///
    /// # Errors
    /// [`EvalError::Data`] if a shard cannot be read.
    pub fn fingerprint(&self) -> Result<u64, EvalError> {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        hash.update(
            format!("{:016x} {:?} {:?}", self.source.fingerprint()?, self.transform, self.rules).as_bytes(),
        );
        for index in &self.indices {
            hash.update(&index.to_le_bytes());
        }
        Ok(hash.digest())
    }
}

/// Name of a class, in the order in which classes are numbered.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum ClassName {
    Number(u64, String),
    Word(String),
}

impl ClassName {
    fn parse(name: &str) -> Self {
        match name.parse() {
            Ok(number) => Self::Number(number, name.to_string()),
            Err(_) => Self::Word(name.to_string()),
        }
    }
}

/// Returns the distinct names in the order in which classes are numbered.
fn ordered<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let distinct: BTreeSet<ClassName> = names.map(ClassName::parse).collect();
    distinct
        .into_iter()
        .map(|class| match class {
            ClassName::Number(_, name) | ClassName::Word(name) => name,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::source::ImageFile;
    use super::*;

    /// Returns a set of images of these classes, none of which is read.
    fn images(classes: &[&str]) -> ImageSet {
        let mut files = Vec::new();
        for (index, class) in classes.iter().enumerate() {
            let name = format!("{index}.png");
            files.push(ImageFile {
                path: name.clone().into(),
                name,
                classes: Some(vec![(*class).to_string()]),
            });
        }
        let source = Source::Files(Arc::new(files));
        ImageSet::open(source, Transform::new(16), DecodeRules::default(), "images").unwrap()
    }

    fn owned(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    /// A set with images of one of two classes of a name has the same name for it as a set with
    /// images of both.
    #[test]
    fn classes_of_one_name_are_told_apart() {
        let names = owned(&["crane", "owl", "crane"]);
        let named = images(&["0", "1", "2", "3"]).named(&names);
        assert_eq!(named.classes(), ["crane", "owl", "crane", "3"]);
        assert_eq!(named.distinct_classes(), ["crane (0)", "owl", "crane (2)", "3"]);
        assert_eq!(images(&["2"]).named(&names).distinct_classes(), ["crane (2)"]);
    }

    /// Images in folders and packed ones have the same classes, in one set and in two.
    #[test]
    fn classes_are_the_same_by_number_and_by_name() {
        let names = owned(&["cat", "dog"]);
        let mixed = images(&["dog", "0", "cat", "1", "owl"]).named(&names);
        assert_eq!(mixed.classes(), ["cat", "dog", "owl"]);
        let labels: Vec<Option<u32>> = (0..mixed.len()).map(|image| mixed.label(image)).collect();
        assert_eq!(labels, [1, 0, 0, 1, 2].map(Some));
        let mut folder = images(&["dog", "cat"]);
        let mut packed = images(&["0", "1", "2"]).named(&names);
        ImageSet::unify(&mut [&mut folder, &mut packed]).unwrap();
        assert_eq!(folder.classes(), ["cat", "dog", "2"]);
        assert_eq!(packed.classes(), folder.classes());
        assert_eq!([folder.label(0), folder.label(1)], [Some(1), Some(0)]);
        assert_eq!([packed.label(0), packed.label(1), packed.label(2)], [Some(0), Some(1), Some(2)]);
    }

    /// A name of two numbers does not tell which of them a folder of this name is.
    #[test]
    fn shared_names_are_not_merged() {
        let names = owned(&["crane", "owl", "crane"]);
        let mut folder = images(&["crane", "owl"]);
        let mut packed = images(&["0", "1", "2"]).named(&names);
        ImageSet::unify(&mut [&mut folder, &mut packed]).unwrap();
        assert_eq!(folder.classes(), ["crane", "owl", "crane", "crane"]);
        assert_eq!([folder.label(0), folder.label(1)], [Some(3), Some(1)]);
    }

    /// An image that states a class twice, by number and by name, has it once.
    #[test]
    fn a_class_is_not_stated_twice() {
        let file = ImageFile { path: "a".into(), name: "a".into(), classes: Some(owned(&["0", "cat"])) };
        let source = Source::Files(Arc::new(vec![file]));
        let set = ImageSet::open(source, Transform::new(16), DecodeRules::default(), "images").unwrap();
        assert!(set.is_multi_label());
        let set = set.named(&owned(&["cat", "dog"]));
        assert_eq!((set.labels(0), set.is_multi_label()), (vec![0], false));
    }

    /// A set of given labels is the one that is opened and numbered.
    #[test]
    fn sets_are_made_of_labels() {
        let classes = owned(&["cat", "dog", "owl"]);
        let opened = images(&["owl", "cat", "owl"]);
        let numbered = opened.clone().numbered(&classes).unwrap();
        let labels = vec![(0, vec![2]), (2, vec![2, 1])];
        let made = ImageSet::from_labels(
            opened.source.clone(),
            Transform::new(16),
            DecodeRules::default(),
            "some",
            &classes,
            labels,
        );
        assert_eq!((made.len(), made.classes(), made.name.as_str()), (2, classes.as_slice(), "some"));
        assert_eq!((made.labels(0), made.labels(1), made.label(1)), (vec![2], vec![2, 1], Some(2)));
        for (image, same) in [(0, 0), (1, 2)] {
            assert_eq!(made.describe(image), numbered.describe(same));
            assert_eq!(made.label(image), numbered.label(same));
        }
    }

    /// Images in another folder are the same ones; others, or other classes, are not.
    #[test]
    fn sets_are_identified_by_images_and_classes() {
        let folder = tempfile::tempdir().unwrap();
        let mut identities = Vec::new();
        for (place, bytes, class) in
            [("a", "one", "cat"), ("b", "one", "cat"), ("c", "two", "cat"), ("d", "one", "dog")]
        {
            let path = folder.path().join(place);
            std::fs::write(&path, bytes).unwrap();
            let file = ImageFile { path, name: "0.png".into(), classes: Some(vec![class.into()]) };
            let source = Source::Files(Arc::new(vec![file]));
            let set = ImageSet::open(source, Transform::new(16), DecodeRules::default(), place).unwrap();
            identities.push(set.identity().unwrap());
        }
        assert_eq!(identities[0], identities[1], "another folder");
        assert_ne!(identities[0], identities[2], "other bytes");
        assert_ne!(identities[0], identities[3], "another class");
    }

    #[test]
    fn classes_are_numbered_by_a_list_that_has_all_of_them() {
        let set = images(&["owl", "cat", "owl"]);
        let numbered = set.clone().numbered(&owned(&["owl", "dog", "cat"])).unwrap();
        let labels: Vec<u32> = (0..3).filter_map(|i| numbered.label(i)).collect();
        assert_eq!((labels, numbered.classes().len()), (vec![0, 2, 0], 3));
        assert_eq!(set.numbered(&owned(&["cat"])).unwrap_err(), ["owl"]);
    }
}
