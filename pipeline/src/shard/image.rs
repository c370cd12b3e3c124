//! Encoded images of samples: one file, or one for each band.

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

/// Extensions of segmentation masks, which hold a class for each pixel, in order of preference.
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
/// [`IMAGE_EXTENSIONS`] that the sample has, or else all bands such as `b02.tif` and `b08.tif`, in
/// the order of [`compare_names`].
pub(crate) fn image_members(index: &ShardIndex, i: usize) -> Vec<Member<'_>> {
    if let Some(member) = index.member(i, &IMAGE_EXTENSIONS) {
        return vec![member];
    }
    let mut bands: Vec<Member<'_>> = index.members(i).filter(|member| is_band(member.extension)).collect();
    bands.sort_by(|a, b| compare_names(a.extension, b.extension));
    bands
}

/// Returns whether `extension` is the extension of a band: a name and the extension of an image.
pub fn is_band(extension: &str) -> bool {
    let Some((_, format)) = extension.rsplit_once('.') else { return false };
    IMAGE_EXTENSIONS.contains(&format) && !MASK_EXTENSIONS.contains(&extension)
}

/// Compares names in natural order, in which numbers are compared by value: `b2` < `b10`, and
/// `b8` < `b8a` < `b9`.
pub fn compare_names(a: &str, b: &str) -> Ordering {
    let mut left = a.as_bytes();
    let mut right = b.as_bytes();
    while let ([x, ..], [y, ..]) = (left, right) {
        if !(x.is_ascii_digit() && y.is_ascii_digit()) {
            if x != y {
                return x.cmp(y);
            }
            left = &left[1..];
            right = &right[1..];
            continue;
        }
        let (left_number, left_rest) = split_number(left);
        let (right_number, right_rest) = split_number(right);
        let order = compare_numbers(left_number, right_number);
        if order.is_ne() {
            return order;
        }
        left = left_rest;
        right = right_rest;
    }
    // The order is total even for names that differ only in leading zeros.
    left.len().cmp(&right.len()).then(a.cmp(b))
}

/// Splits `text` after the digits at its beginning.
fn split_number(text: &[u8]) -> (&[u8], &[u8]) {
    let n_digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    text.split_at(n_digits)
}

/// Compares the values of two numbers of any length, which may have leading zeros.
fn compare_numbers(a: &[u8], b: &[u8]) -> Ordering {
    let a = without_leading_zeros(a);
    let b = without_leading_zeros(b);
    a.len().cmp(&b.len()).then(a.cmp(b))
}

fn without_leading_zeros(digits: &[u8]) -> &[u8] {
    let n_zeros = digits.iter().take_while(|digit| **digit == b'0').count();
    &digits[n_zeros..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::index::IndexBuilder;

    fn image_extensions(index: &ShardIndex, i: usize) -> Vec<&str> {
        image_members(index, i).iter().map(|member| member.extension).collect()
    }

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
        assert_eq!(image_extensions(&index, 0), ["b2.tif", "b08.tif", "b8a.tif", "b09.tif", "b10.tif"]);
        assert_eq!(image_extensions(&index, 1), ["png"], "an image is not a band");
    }

    #[test]
    fn pushed_files_are_returned_separately() {
        let mut image = EncodedImage::from(b"ab".to_vec());
        image.push(b"");
        image.push(b"cde");
        assert_eq!(image.files(), [&b"ab"[..], b"", b"cde"]);
        assert_eq!((image.len(), image.bytes()), (5, &b"abcde"[..]));
    }
}
