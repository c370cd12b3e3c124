//! The encoded image of a sample: one file, or one for each of its bands.

use std::cmp::Ordering;

use super::index::{Member, ShardIndex};

/// Extensions of images, in order of preference.
pub const IMAGE_EXTENSIONS: [&str; 17] = [
    "jpg",
    "jpeg",
    "png",
    "webp",
    "bmp",
    "gif",
    "tif",
    "tiff",
    "pbm",
    "pgm",
    "pnm",
    "ppm",
    "input.jpg",
    "input.jpeg",
    "input.png",
    "input.webp",
    "npy",
];

/// Extensions of masks, which have a class for each pixel, in order of preference.
pub const MASK_EXTENSIONS: [&str; 3] = ["seg.png", "mask.png", "output.png"];

/// The encoded image of a sample.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EncodedImage {
    bytes: Vec<u8>,
    /// End of each file in `bytes`.
    ends: Vec<usize>,
}

impl From<Vec<u8>> for EncodedImage {
    fn from(bytes: Vec<u8>) -> Self {
        let ends = vec![bytes.len()];
        Self { bytes, ends }
    }
}

impl EncodedImage {
    /// Adds the file of a further band.
    pub fn push(&mut self, file: &[u8]) {
        self.bytes.extend_from_slice(file);
        self.ends.push(self.bytes.len());
    }

    /// Returns the files: one, or one for each band.
    pub fn files(&self) -> Vec<&[u8]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, end)| &self.bytes[start..*end]).collect()
    }

    /// Returns the bytes of all files, one after the other.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the number of bytes of all files.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// Returns the members of `index` that are the image of sample `i`: the first of
/// [`IMAGE_EXTENSIONS`] that the sample has, or else all members such as `b02.tif` and `b08.tif`,
/// in the order of their names, in which numbers count by value.
pub(crate) fn image_members(index: &ShardIndex, i: usize) -> Vec<Member<'_>> {
    if let Some(member) = index.member(i, &IMAGE_EXTENSIONS) {
        return vec![member];
    }
    let mut bands: Vec<Member<'_>> = index.members(i).filter(|member| is_band(member.extension)).collect();
    bands.sort_by(|a, b| by_name(a.extension, b.extension));
    bands
}

/// Returns whether `extension` is that of a band: a name and the extension of an image.
pub fn is_band(extension: &str) -> bool {
    !MASK_EXTENSIONS.contains(&extension)
        && extension.rsplit_once('.').is_some_and(|(_, format)| IMAGE_EXTENSIONS.contains(&format))
}

/// Compares names, in which numbers count by value: b2 comes before b10, and b8 before b8a and b9.
pub fn by_name(a: &str, b: &str) -> Ordering {
    let mut left = a.as_bytes();
    let mut right = b.as_bytes();
    while let ([x, ..], [y, ..]) = (left, right) {
        if !(x.is_ascii_digit() && y.is_ascii_digit()) {
            match x.cmp(y) {
                Ordering::Equal => (left, right) = (&left[1..], &right[1..]),
                unequal => return unequal,
            }
            continue;
        }
        let digits = |text: &[u8]| text.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let n_left = digits(left);
        let n_right = digits(right);
        let value = |number: &[u8]| -> (usize, Vec<u8>) {
            let significant: Vec<u8> = number.iter().copied().skip_while(|digit| *digit == b'0').collect();
            (significant.len(), significant)
        };
        match value(&left[..n_left]).cmp(&value(&right[..n_right])) {
            Ordering::Equal => (left, right) = (&left[n_left..], &right[n_right..]),
            unequal => return unequal,
        }
    }
    // Names that differ in leading zeros alone keep an order.
    left.len().cmp(&right.len()).then(a.cmp(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::index::IndexBuilder;

    #[test]
    fn bands_are_in_the_order_of_their_numbers() {
        let mut builder = IndexBuilder::default();
        let extensions =
            ["b10.tif", "b8a.tif", "b2.tif", "b09.tif", "b08.tif", "cls", "seg.png", "json", "notes.txt"];
        for (extension, number) in extensions.into_iter().zip(0..) {
            let member = Member { extension, offset_bytes: 512 * number, len_bytes: 1, check: None };
            builder.push("a", member).expect("valid");
        }
        builder
            .push("b", Member { extension: "png", offset_bytes: 0, len_bytes: 1, check: None })
            .expect("valid");
        builder
            .push("b", Member { extension: "nir.png", offset_bytes: 0, len_bytes: 1, check: None })
            .expect("valid");
        let index = builder.finish(10_000).expect("valid");
        let names = |i| {
            image_members(&index, i).iter().map(|member| member.extension.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(names(0), ["b2.tif", "b08.tif", "b8a.tif", "b09.tif", "b10.tif"]);
        assert_eq!(names(1), ["png"], "an image is not a band");
    }

    #[test]
    fn files_are_kept_apart() {
        let mut image = EncodedImage::from(b"ab".to_vec());
        image.push(b"");
        image.push(b"cde");
        assert_eq!(image.files(), [&b"ab"[..], b"", b"cde"]);
        assert_eq!((image.len(), image.bytes()), (5, &b"abcde"[..]));
    }
}
