//! JPEG files of every kind, decoded to Pillow's bytes.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};

use augment::decode::Decoder;
use augment::{DecodeRules, Rgb8};

use crate::libraries::python;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/jpeg");
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/interop/pillow.py");

/// Reads the files of `scripts/golden/jpeg.py`, by name.
fn files() -> BTreeMap<String, Vec<u8>> {
    let mut tar = tar::Archive::new(std::fs::File::open(format!("{FOLDER}/images.tar")).unwrap());
    let mut files = BTreeMap::new();
    for entry in tar.entries().unwrap() {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().file_stem().unwrap().to_str().unwrap().to_string();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        files.insert(name, bytes);
    }
    files
}

fn decode(decoder: &mut Decoder, bytes: &[u8]) -> Result<Rgb8, String> {
    let mut image = Rgb8::default();
    let decoded = decoder.decode_into(bytes, &DecodeRules::default(), &mut image);
    decoded.map(|()| image).map_err(|error| error.to_string())
}

fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = flate2::Crc::new();
    crc.update(bytes);
    crc.sum()
}

#[test]
fn pixels_equal_pillow() {
    let files = files();
    let mut decoder = Decoder::default();
    let table = std::fs::read_to_string(format!("{FOLDER}/pixels.csv")).unwrap();
    let mut n = 0;
    for line in table.lines().skip(1) {
        let [name, width, height, crc] = line.split(',').collect::<Vec<_>>().try_into().unwrap();
        let image = decode(&mut decoder, &files[name]).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!([image.width_px.to_string(), image.height_px.to_string()], [width, height], "{name}");
        assert_eq!(crc32(&image.data).to_string(), crc, "{name}");
        n += 1;
    }
    assert_eq!(n, files.len());
    assert!(n >= 300, "{n} files");
}

/// A process that decodes with Pillow.
struct Pillow(Child);

impl Pillow {
    fn start() -> Option<Self> {
        let mut command = Command::new(python("PIL")?);
        let child = command.arg(SCRIPT).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        Some(Self(child))
    }

    fn decode(&mut self, bytes: &[u8]) -> Option<Rgb8> {
        let stdin = self.0.stdin.as_mut().unwrap();
        stdin.write_all(&(bytes.len() as u32).to_le_bytes()).unwrap();
        stdin.write_all(bytes).unwrap();
        stdin.flush().unwrap();
        let stdout = self.0.stdout.as_mut().unwrap();
        let mut size = [[0; 4]; 2];
        for side in &mut size {
            stdout.read_exact(side).unwrap();
        }
        let [width_px, height_px] = size.map(u32::from_le_bytes);
        let mut data = vec![0; 3 * width_px as usize * height_px as usize];
        stdout.read_exact(&mut data).unwrap();
        (width_px > 0).then_some(Rgb8 { width_px, height_px, data })
    }
}

impl Drop for Pillow {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Returns the headers of frames and scans, up to the end marker, if there is one.
fn frame_and_scan_headers(bytes: &[u8]) -> Vec<&[u8]> {
    let mut headers = Vec::new();
    let mut offset = 2;
    while let Some(distance) =
        bytes[offset..].windows(2).position(|pair| pair[0] == 0xff && pair[1] >= 0xc0 && pair[1] < 0xff)
    {
        let start = offset + distance;
        let marker = bytes[start + 1];
        let len = bytes
            .get(start + 2..start + 4)
            .map_or(2, |len| usize::from(u16::from_be_bytes([len[0], len[1]])));
        let end = if matches!(marker, 0xd0..=0xd9) { start + 2 } else { (start + 2 + len).min(bytes.len()) };
        if matches!(marker, 0xc0..=0xc3 | 0xd9 | 0xda) {
            headers.push(&bytes[start..end]);
        }
        offset = end;
    }
    headers
}

/// Returns a generator of pseudo-random numbers below its argument.
fn generator(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move |below| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as usize % below.max(1)
    }
}

/// Changes, removes or adds a few bytes of a file.
fn damage(bytes: &[u8], seed: u64) -> Vec<u8> {
    let mut next = generator(seed);
    let pixels = bytes.windows(2).position(|pair| pair == [0xff, 0xda]).unwrap() + 14;
    let mut bytes = bytes.to_vec();
    for _ in 0..=next(3) {
        let first = if next(10) < 7 { pixels.min(bytes.len() - 3) } else { 2 };
        let offset = first + next(bytes.len() - 2 - first);
        match next(10) {
            0 => drop(bytes.drain(offset..(offset + 1 + next(20)).min(bytes.len() - 2))),
            1 => drop(bytes.splice(offset..offset, [next(256) as u8, next(256) as u8])),
            _ => bytes[offset] = next(256) as u8,
        }
    }
    bytes
}

/// Damaged files are decoded to the same bytes as by Pillow, or by neither. If a scan is lost,
/// libjpeg smooths the rest of a progressive image, and Ocelli does not: files whose scans have
/// changed are left out.
#[test]
fn damaged_files_are_decoded_as_pillow_decodes_them() {
    let Some(mut pillow) = Pillow::start() else { return };
    let files = files();
    let mut decoder = Decoder::default();
    let n_rounds = if std::env::var_os("RUN_SLOW_TESTS").is_some() { 60 } else { 2 };
    let mut n_compared = 0;
    let mut n_refused = 0;
    for (i, (name, bytes)) in files.iter().enumerate() {
        for round in 0..n_rounds {
            let seed = i as u64 * 1000 + round;
            let damaged = damage(bytes, seed);
            if frame_and_scan_headers(&damaged) != frame_and_scan_headers(bytes) {
                continue;
            }
            match (pillow.decode(&damaged), decode(&mut decoder, &damaged)) {
                (Some(theirs), Ok(ours)) => {
                    assert!(ours == theirs, "{name}, seed {seed}");
                    n_compared += 1;
                }
                (None, Err(_)) => n_refused += 1,
                (theirs, ours) => {
                    let ours = ours.map(|_| "decoded");
                    panic!("{name}, seed {seed}: Pillow decodes it: {}, Ocelli: {ours:?}", theirs.is_some());
                }
            }
        }
    }
    assert!(n_compared > 200 && n_refused > 20, "{n_compared} compared, {n_refused} refused by both");
}
